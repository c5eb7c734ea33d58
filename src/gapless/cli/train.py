"""`gapless train`: train what a config describes."""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from gapless.cli import options, terminal
from gapless.plan.plan import Plan
from gapless.schedule.recipes import find_recipe
from gapless.units import show_seconds

if TYPE_CHECKING:
    from gapless.train.config import Config
    from gapless.train.trainer import Step

EXAMPLE = "gapless train examples/gpt.toml --plan auto"
_EVERY = 5.0  # seconds between two lines
_LIVE = 0.2  # and between two looks at the line that is written over


def add(parser: argparse.ArgumentParser) -> None:
    """Options stand in place of what the config says."""
    parser.add_argument(
        "config", metavar="CONFIG", help="a TOML file with a model, its data and its optimizer (docs/training.md)"
    )
    options.add_values(
        parser.add_argument_group("instead of what the config says"),
        ("--plan", str, None, "auto|FILE", "make a plan first, or use one from `gapless plan --write`"),
        ("--steps", int, None, "N", "number of steps"),
        ("--devices -K", int, None, "K", "number of devices"),
        ("--microbatches -M", int, None, "M", "number of microbatches, also for --plan auto"),
        ("--schedule", str, None, "NAME", "schedule, also for --plan auto"),
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object at the end; progress goes to standard error"
    )


def run(arguments: argparse.Namespace) -> int:
    """Trains to the last step; 130 after Ctrl-C, 1 where the loss was not finite."""
    options.refuse_below_one(arguments, "steps", "devices", "microbatches")
    if arguments.schedule is not None:
        find_recipe(arguments.schedule)
    options.refuse_ranks("gapless train")
    from gapless.train import user_code as own  # torch is loaded here, and not before
    from gapless.train.config import read_config
    from gapless.train.job import build
    from gapless.train.trainer import NotFiniteError, train

    out = sys.stderr if arguments.json else sys.stdout
    config = _changed(read_config(arguments.config), arguments, out)
    try:
        terminal.show_progress("making the model")
        job = build(config)
        plan = job.plan(terminal.show_progress)
    finally:
        terminal.show_progress("")
    with own.importable(config), job.pipeline(plan) as pipe:
        terminal.say(pipe, out)
        if plan is not None:
            layers, speed = ",".join(map(str, plan.partition)), f"{plan.throughput:.4g} samples/s"
            promise = f"predicted {show_seconds(plan.step_seconds)} per step, {speed}"
            terminal.say(f"plan: {plan.title}; layers per stage {layers}; {promise}", out)
        terminal.say(file=out)
        out.flush()
        lines = _Lines(config.steps, out)
        try:
            optimizer = job.optimizer(list(pipe.parameters()))
            for step in train(pipe, optimizer, job.batches, steps=config.steps, clip=config.clip):
                lines.add(step)
        except (KeyboardInterrupt, NotFiniteError) as error:
            terminal.show_progress("")
            why = "" if isinstance(error, KeyboardInterrupt) else f": {error}"
            terminal.complain(f"stopped {lines.so_far}{why}")
            return 1 if why else 130
        finally:
            terminal.show_progress("")
    if arguments.json:
        terminal.print_json(_as_json(lines.steps, plan))
    else:
        terminal.say(f"\n{_summary(lines.steps, plan)}")
    return 0


def _changed(config: "Config", arguments: argparse.Namespace, out: TextIO) -> "Config":
    """With the options in place of what the file says; what a plan takes the place of is told."""
    from gapless.train.config import BROUGHT_BY_A_PLAN

    plan = arguments.plan
    if plan is not None:
        said = [key for key in BROUGHT_BY_A_PLAN if getattr(config.pipeline, key) is not None]
        if said:
            terminal.say(f"the plan takes the place of {', '.join(said)} in {arguments.config}", out)
        if plan != "auto":
            plan = str(Path(plan).absolute())
    others = {name: getattr(arguments, name) for name in ("steps", "devices", "schedule", "microbatches")}
    return config.changed(plan=plan, **others)


class _Lines:
    """The first step, the last one, and about every 5 s one between them; on a terminal all of them pass by."""

    def __init__(self, total: int, out: TextIO) -> None:
        self.steps: list[Step] = []
        self._total, self._out = total, out
        self._shown = self._looked = time.monotonic()
        self._since = 0  # the first step that no line has told of

    @property
    def so_far(self) -> str:
        last = f", last loss {self.steps[-1].loss:.4g}" if self.steps else ""
        return f"after {len(self.steps)} of {self._total} steps{last}"

    def add(self, step: "Step") -> None:
        self.steps.append(step)
        now = time.monotonic()
        if step.number in (1, self._total) or now - self._shown >= _EVERY:
            terminal.show_progress("")
            terminal.say(self._line(), self._out)
            self._out.flush()
            self._shown = self._looked = now
            self._since = len(self.steps)
        elif now - self._looked >= _LIVE:
            terminal.show_progress(self._line())
            self._looked = now

    def _line(self) -> str:
        recent, last = self.steps[self._since :], self.steps[-1]
        return (
            f"step {last.number:>{len(str(self._total))}} of {self._total}   loss {last.loss:<8.4g} "
            f"{1000 * statistics.median(step.seconds for step in recent):7.1f} ms per step   "
            f"{_throughput(recent):.4g} samples/s"
        )


def _throughput(steps: "list[Step]") -> float:
    return sum(step.samples for step in steps) / sum(step.seconds + step.waited for step in steps)


def _usual(steps: "list[Step]") -> float:
    """The median step; the first one is left out, since it is not warm."""
    return statistics.median(step.seconds for step in steps[1:] or steps)


def _summary(steps: "list[Step]", plan: Plan | None) -> str:
    usual = _usual(steps)
    many = f"{len(steps)} step{'s' if len(steps) > 1 else ''}"
    lines = [f"{many}, last loss {steps[-1].loss:.4g}, {1000 * usual:.1f} ms per step (median)"]
    if plan is not None:
        off = 100 * (usual / plan.step_seconds - 1)
        lines.append(f"predicted {1000 * plan.step_seconds:.1f} ms, measured {1000 * usual:.1f} ms: {off:+.1f}%")
    return "\n".join(lines)


def _as_json(steps: "list[Step]", plan: Plan | None) -> dict[str, Any]:
    return {
        "steps": len(steps),
        "loss": steps[-1].loss,
        "losses": [step.loss for step in steps],
        "step_seconds": _usual(steps),
        "samples_per_second": _throughput(steps[1:] or steps),
        "plan": None if plan is None else plan.title,
        "partition": None if plan is None else list(plan.partition),
        "predicted_step_seconds": None if plan is None else plan.step_seconds,
    }
