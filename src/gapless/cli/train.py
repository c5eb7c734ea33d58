"""`gapless train`: train what a config describes."""

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from gapless.cli import options, terminal
from gapless.cli.output import asked
from gapless.errors import ConfigError
from gapless.plan.plan import Plan
from gapless.schedule.recipes import find_recipe
from gapless.units import show_count, show_seconds

if TYPE_CHECKING:
    from gapless.train.config.config import Config
    from gapless.train.run.run_folder import RunFolder
    from gapless.train.run.training import Training
    from gapless.train.torchrun import Ranks

EXAMPLE = "gapless train --example > my.toml; gapless train my.toml --set train.steps=50"


def add(parser: argparse.ArgumentParser) -> None:
    """Options stand in place of what the config says."""
    file = "a TOML file with a model, its data and its optimizer (docs/training.md)"
    parser.add_argument("config", metavar="CONFIG", nargs="?", help=file)
    print_it = ("--example", "print a config to start from"), ("--keys", "print what every key of a config means")
    asked.add_options(parser, *print_it)
    asked.add_options(
        parser.add_argument_group("override the config"),
        ("--plan", str, None, "auto|FILE", "make a plan first, or use one from `gapless plan --write`"),
        ("--steps", int, None, "N", "number of steps"),
        ("--devices -K", int, None, "K", "number of devices"),
        ("--microbatches -M", int, None, "M", "number of microbatches, also for --plan auto"),
        ("--schedule", str, None, "NAME", "schedule, also for --plan auto"),
        ("--folder", str, None, "FOLDER", "the run's folder; a run found there is resumed"),
    )
    keys = "any key, such as --set train.clip=1; may be repeated"
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help=keys)
    resume = "resume from this checkpoint of another run; without a value: fail unless the folder holds a checkpoint"
    parser.add_argument("--resume", nargs="?", const="", metavar="CHECKPOINT", help=resume)
    asked.add_options(
        parser,
        ("--fresh", "start a new run, in a new folder"),
        ("--plain", "plain lines on a terminal too"),
        ("--json", "print one JSON object at the end; progress goes to standard error"),
    )


def run(arguments: argparse.Namespace) -> int:
    """Trains to the last step; 130 after Ctrl-C, 1 where the loss was not finite."""
    options.refuse_below_one(arguments, "steps", "devices", "microbatches")
    if arguments.schedule is not None:
        find_recipe(arguments.schedule)
    if arguments.keys or arguments.example:
        from gapless.train.config import manual

        terminal.say(manual.page() if arguments.keys else manual.example(), end="")
        return 0
    if arguments.config is None:
        raise ConfigError("CONFIG is missing: `gapless train --example > my.toml` writes one to start from")
    return _train(arguments)


def _train(arguments: argparse.Namespace) -> int:
    from gapless.train.config.config import read_config  # torch is loaded here, and not before
    from gapless.train.run.interrupts import CTRL_C
    from gapless.train.run.run_folder import folder_of
    from gapless.train.run.trainer import NotFiniteError
    from gapless.train.run.training import prepared
    from gapless.train.torchrun import joined

    out = sys.stderr if arguments.json else sys.stdout
    read = read_config(arguments.config, arguments.set)
    config = _changed(read, arguments)
    with joined(config) as ranks:
        if ranks.first and arguments.plan is not None:
            _say_replaced(read, arguments, out)
        shows = terminal.show_progress if ranks.first else None
        folder = ranks.decided(folder_of(config, arguments.folder, fresh=arguments.fresh))
        try:
            with prepared(config, folder, ranks, start=_start(arguments, folder, ranks), progress=shows) as training:
                terminal.show_progress("")
                if ranks.first:
                    _introduce(training, out)
                    training.add(_display(arguments, training, out))
                try:
                    training.run()
                except NotFiniteError as error:
                    return _stopped(training, f": {error}", 1)
                stopped = training.trainer.ended
                if training.interrupts.interrupted or stopped == CTRL_C:
                    return _stopped(training, "", 130)
                if ranks.first:
                    _conclude(arguments, training)
                return 0
        finally:
            terminal.show_progress("")


def _start(arguments: argparse.Namespace, folder: "RunFolder", ranks: "Ranks") -> Path | None:
    """The checkpoint that was asked for, if one was."""
    if arguments.resume is None:
        return None
    if arguments.fresh and not arguments.resume:
        raise ConfigError(
            "--fresh starts a new run and --resume continues one: leave one of them out, or name a checkpoint"
        )
    if arguments.resume:
        if ranks.first and folder.has_checkpoints:  # so it is when torchrun starts its ranks anew
            terminal.complain(f"{folder.path} holds a run, which is resumed; --resume CHECKPOINT is for a new folder")
        return Path(arguments.resume)
    if not folder.has_checkpoints:
        raise ConfigError(f"{folder.path} holds no checkpoint to resume from: leave --resume out to start a new run")
    return None


def _introduce(training: "Training", out: TextIO) -> None:
    terminal.say(training.pipe, out)
    plan = training.plan
    if plan is not None:
        layers, speed = ",".join(map(str, plan.partition)), f"{plan.throughput:.4g} samples/s"
        promise = f"predicted {show_seconds(plan.step_seconds)} per step, {speed}"
        terminal.say(f"plan: {plan.title}; layers per stage {layers}; {promise}", out)
        if plan.caution:
            terminal.say(f"caution: {plan.caution}", out)
    done, steps = training.trainer.step, training.trainer.steps
    goes_on = f", resumed after step {done} of {steps}" if done else ""
    if done >= steps:
        goes_on = (
            f", whose {show_count(steps, 'step')} are done: train more with --steps N, or start a new run with --fresh"
        )
    terminal.say(f"run: {training.folder.path}{goes_on}", out)
    terminal.say(file=out)
    out.flush()


def _display(arguments: argparse.Namespace, training: "Training", out: TextIO) -> Any:
    """Live on a terminal where rich is installed, lines elsewhere."""
    from gapless.train.run.display import Lines, Live

    if out.isatty() and not arguments.plain:
        try:
            import rich.console
        except ImportError:
            terminal.complain("no live display without rich: pip install 'gapless[train]'")
        else:
            devices = show_count(len(training.pipe.devices), "device")
            title = f"{training.config.model.name} on {devices}, {training.folder.path}"
            return Live(title, training.monitor, rich.console.Console(file=out))

    def say(line: str) -> None:
        terminal.say(line, out)
        out.flush()

    return Lines(say)


def _say_replaced(config: "Config", arguments: argparse.Namespace, out: TextIO) -> None:
    """What of the file a plan takes the place of."""
    from gapless.train.config.config import BROUGHT_BY_A_PLAN

    said = [key for key in BROUGHT_BY_A_PLAN if getattr(config.pipeline, key) is not None]
    if said:
        terminal.say(f"the plan takes the place of {', '.join(said)} in {arguments.config}", out)


def _changed(config: "Config", arguments: argparse.Namespace) -> "Config":
    """With the options in place of what the file says."""
    plan = arguments.plan
    if plan not in (None, "auto"):
        plan = str(Path(plan).absolute())
    others = {name: getattr(arguments, name) for name in ("steps", "devices", "schedule", "microbatches")}
    return config.changed(plan=plan, **others)


def _stopped(training: "Training", why: str, code: int) -> int:
    if training.job.ranks.first:
        trainer = training.trainer
        saved = "" if why else "; the run is saved: the same command resumes it"
        terminal.complain(f"stopped after {trainer.step} of {trainer.steps} steps{saved}{why}")
    return code


def _conclude(arguments: argparse.Namespace, training: "Training") -> None:
    from gapless.train.run.metrics import summary_of
    from gapless.train.run.trainer import SIGTERM

    found = summary_of(training.folder.metrics, training.begun)
    plan = training.plan
    if arguments.json:
        terminal.print_json(_as_json(found, training, plan))
        return
    usual = found["step_seconds"]
    speed = "" if math.isnan(usual) else f", {1000 * usual:.1f} ms per step (median)"
    lines = [f"{show_count(found['steps'], 'step')}, last loss {found['loss']:.4g}{speed}"]
    if plan is not None and speed:
        off = 100 * (usual / plan.step_seconds - 1)
        lines.append(f"predicted {1000 * plan.step_seconds:.1f} ms, measured {1000 * usual:.1f} ms: {off:+.1f}%")
    if training.trainer.step < training.trainer.steps:
        goes_on = "; the same command resumes it" if training.trainer.ended == SIGTERM else ""
        at = f"step {training.trainer.step} of {training.trainer.steps}"
        lines.append(f"ended after {at}: {training.trainer.ended}{goes_on}")
    if training.config.run.report:
        lines.append(f"report: {training.folder.report}")
    terminal.say("\n" + "\n".join(lines))


def _as_json(found: dict[str, Any], training: "Training", plan: Plan | None) -> dict[str, Any]:
    return {
        **found,
        "ended": training.trainer.ended,
        "folder": str(training.folder.path),
        "plan": None if plan is None else plan.title,
        "partition": None if plan is None else list(plan.partition),
        "predicted_step_seconds": None if plan is None else plan.step_seconds,
    }
