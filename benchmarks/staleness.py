"""What delayed gradients cost: the same small GPT on the same text, trained in several ways with equal samples.

The text is the source of Python's standard library, as bytes, and a tenth of it is held out. All ways begin a seed with
the same weights and get the same minibatches in the same order, with the same optimizer and learning rate:

    sync                   each gradient at the newest weights: plain training
    pipedream              weight stashing: the first stage's gradients are devices - 1 updates old, the last one's new
    pipedream, vertical    all stages' gradients are devices - 1 updates old
    2bw                    all are one update old; a minibatch is cut into as many microbatches as there are devices
    spectrain, lr by delay, nesterov   pipedream with a correction; nesterov brings an optimizer of its own
    asp                    as many replicas as devices apply gradients without waiting: the clock decides how old

With one optimizer for all, the corrections are compared as they are; whoever tunes each way will find other figures.

example: python -m benchmarks staleness --optimizer sgd --html curves.html
"""

import copy
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from benchmarks.runner.findings import BenchmarkResult, of_rounds, tabulated
from benchmarks.runner.parameters import Between, Devices, check_width, one_of
from benchmarks.runner.rounds import Progress, silent
from gapless import AsyncReplicas, GaplessError, Pipeline
from gapless.errors import ConfigError
from gapless.run.streams.nesterov import DelayedNesterov
from gapless.stage.intra_op import intra_op_threads
from gapless.train.data.sources import standard_library
from gapless.units import show_count
from gapless.view import curves
from gapless.zoo.gpt import gpt, next_token_loss

RATES = {"adam": 0.003, "sgd": 0.1}
POINTS = 40  # of a curve
_CONTEXT, _HELD_OUT = 32, 256
_NOTES = (
    "Loss in nats per byte, the lower the better: the last stretch of training, and 256 held-out windows afterwards.",
    "Equal samples, and one learning rate for all ways: none is tuned. A difference within the spread says nothing.",
    "asp depends on the clock, so it is another run every time; its delay is measured.",
)
Batch = tuple[Tensor, Tensor]
Losses = Iterator[float]  # of minibatches, in their order
Way = Callable[[nn.Sequential, Sequence[Batch]], Losses]


def run(
    *,
    devices: Devices = 8,
    steps: Annotated[int, "minibatches of a run"] = 250,
    batch: Annotated[int, "sequences in a minibatch, at least as many as devices"] = 16,
    seeds: Annotated[int, "runs of each way"] = 3,
    optimizer: Annotated[str, "adam or sgd (with momentum 0.9)", one_of("optimizer", *RATES)] = "adam",
    lr: Annotated[float, "learning rate of all ways (0: 0.003 for adam, 0.1 for sgd)", Between(0, 10)] = 0,
    width: Annotated[int, "width of the GPT, a multiple of 4"] = 32,
    html: Annotated[Path | None, "write a page with the curves"] = None,
    progress: Progress = silent,
) -> BenchmarkResult:
    """Losses while training, and those of held-out text afterwards; a figure where there is one for every seed."""
    if batch < devices:
        raise ConfigError(f"batch is {batch}, but 2bw cuts it into a microbatch for each of {devices} devices")
    check_width(width)
    lr = lr or RATES[optimizer]
    text = standard_library()
    cut = len(text) * 9 // 10
    held_out = _windows(text[cut:], _HELD_OUT, torch.Generator().manual_seed(0))
    staleness: list[float] = []
    ways = _ways(devices, optimizer, lr, steps, staleness)
    rows: dict[str, Any] = {name: {"way": name, "delay": ways[name][0], "runs": [], "held_out": []} for name in ways}
    points = min(POINTS, steps)
    bounds = list(itertools.pairwise(steps * point // points for point in range(points + 1)))
    with intra_op_threads(1):
        for seed in range(seeds):
            torch.manual_seed(seed)
            start = gpt(width=width, depth=devices, context=_CONTEXT)
            generator = torch.Generator().manual_seed(seed)
            batches = [_windows(text[:cut], batch, generator) for _ in range(steps)]
            for name, (_, way) in ways.items():
                progress(f"seed {seed + 1} of {seeds}: {name}")
                model, row = copy.deepcopy(start), rows[name]
                losses = list(_finite(way(model, batches)))
                means = [statistics.fmean(losses[start:end]) if end <= len(losses) else None for start, end in bounds]
                row["runs"].append(means)  # None from where it has diverged
                row["held_out"].append(_loss(model, held_out) if len(losses) == steps else None)
    if staleness:
        rows["asp"]["delay"] = f"{statistics.fmean(staleness):.1f}"
    sync = math.nan
    for row in rows.values():
        known = [loss for loss in row["held_out"] if loss is not None]
        row |= {"training": "diverged", "held out": "diverged"}
        if known:
            mean, lost = statistics.fmean(known), seeds - len(known)
            sync = mean if row["way"] == "sync" else sync
            training = statistics.fmean(run[-1] for run in row["runs"] if run[-1] is not None)
            row |= {"training": f"{training:.3f}", "held out": f"{mean:.3f}", "to sync": f"{mean - sync:+.3f}"}
            row["of all seeds"] = f"{min(known):.3f} to {max(known):.3f}{f', {lost} diverged' if lost else ''}"
    title = f"GPT of {devices + 3} layers on {devices} devices, Python's source as bytes, {steps} "
    title += f"minibatches of {batch} x {_CONTEXT}, {optimizer} at {lr:g}, {show_count(seeds, 'seed')}"
    columns = "way | delay | training | held out | of all seeds | to sync"
    table = tabulated(title, list(rows.values()), columns, *_NOTES, left=2)
    middles = [(start + end - 1) / 2 for start, end in bounds]
    if html is not None:
        panels = [curves.Panel(row["way"], f"delay {row['delay']}", row["runs"]) for row in rows.values()]
        words, axes, cells = (f"{title}.", *_NOTES), ("minibatch", "training loss"), (table.headings, table.rows)
        page = curves.render("What delayed gradients cost", words, middles, panels, axes, cells)
        html.write_text(page, encoding="utf-8", newline="\n")
    whole = {name: row["held_out"] for name, row in rows.items() if None not in row["held_out"]}
    figures = [of_rounds(f"loss, {name}", losses, "loss") for name, losses in whole.items()]
    return BenchmarkResult({"lr": lr, "rows": list(rows.values()), "minibatches": middles}, figures, [table])


def _ways(devices: int, optimizer: str, lr: float, steps: int, staleness: list[float]) -> dict[str, tuple[str, Way]]:
    """By name: the delay of their gradients in words, and how to train. `staleness` gets what replicas have had."""
    make: Any = partial(SGD, lr=lr, momentum=0.9) if optimizer == "sgd" else partial(AdamW, lr=lr, weight_decay=0.01)
    streamed, stage = partial(_streamed, devices=devices, optimizer=make), f"0 to {devices - 1}"
    ways: dict[str, tuple[str, Way]] = {
        "sync": ("0", partial(_plain, make)),
        "pipedream": (stage, streamed),
        "pipedream, vertical": (f"{devices - 1}", partial(streamed, vertical=True)),
        "2bw": ("1", partial(streamed, schedule="2bw", microbatches=devices)),
        "spectrain": (stage, partial(streamed, correction="spectrain")),
        "lr by delay": (stage, partial(streamed, lr_by_delay=max(1, steps // 4))),
        "asp": ("by the clock", partial(_replicated, devices, make, staleness)),
    }
    if optimizer == "adam":
        ways["nesterov"] = (stage, partial(streamed, optimizer=None, correction="nesterov", lr=lr))
        ways["sync, nesterov's optimizer"] = ("0", partial(_plain, partial(DelayedNesterov, lr=lr)))
    return ways


def _plain(make: Callable[[Any], Optimizer], model: nn.Sequential, batches: Sequence[Batch]) -> Losses:
    optimizer = make(model.parameters())
    for inputs, target in batches:
        loss = next_token_loss(model(inputs), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


def _streamed(
    model: nn.Sequential, batches: Sequence[Batch], *, devices: int, schedule: str = "pipedream", microbatches: int = 1,
    **options: Any,
) -> Losses:  # fmt: skip
    sizes: Any = {"devices": devices, "schedule": schedule, "microbatches": microbatches}
    with Pipeline(model, loss=next_token_loss, **sizes) as pipe, pipe.stream(**options) as stream:
        yield from (result.loss.item() for result in stream.run(batches))


def _replicated(
    devices: int, make: Any, staleness: list[float], model: nn.Sequential, batches: Sequence[Batch]
) -> Losses:
    found = {}
    with AsyncReplicas(model, replicas=devices, loss=next_token_loss, optimizer=make) as replicas:
        try:
            for result in replicas.run(batches):
                found[result.minibatch] = result.loss.item()
        finally:  # also where it has diverged
            staleness.append(replicas.order.mean_staleness)
            yield from (found[minibatch] for minibatch in sorted(found))


def _finite(losses: Losses) -> Losses:
    """Up to where the run has diverged, which a stream says itself."""
    try:
        for loss in losses:
            if not loss < 100:  # 5.5 is a model that knows nothing
                return
            yield loss
    except GaplessError as error:
        if "not finite" not in str(error):
            raise


def _windows(text: Tensor, count: int, generator: torch.Generator) -> Batch:
    starts = torch.randint(len(text) - _CONTEXT, (count, 1), generator=generator)
    windows = text[starts + torch.arange(_CONTEXT + 1)].long()
    return windows[:, :-1], windows[:, 1:]


@torch.no_grad()
def _loss(model: nn.Module, batch: Batch) -> float:
    return next_token_loss(model.eval()(batch[0]), batch[1]).item()
