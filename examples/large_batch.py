"""What large batches cost and give: gradients of 1, 4 and 16 minibatches before each update.

    python examples/large_batch.py --folder runs/studies

A small GPT learns Python's source, byte by byte. All ways see the same minibatches in the same order. With four of them
to an update there are a quarter of the updates, at the same learning rate or at one that grows with the root of the
batch, as is usual for Adam. The last way has 16 times the batch and as many updates as the one with 4: it sees more.
"""

import statistics
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from study import POINTS, Found, Report, Results, Study, curve, main, option, spread, train, warmed_up, whole
from torch import Tensor

import gapless
from gapless.train.data.sources import standard_library
from gapless.view import curves
from gapless.zoo.gpt import gpt, next_token_loss

CONTEXT, HELD_OUT = 32, 512
LR = 0.004


@dataclass(frozen=True)
class Settings:
    minibatches: int = option(320, "of a run, a multiple of 16")
    batch: int = option(16, "sequences in a minibatch")
    seeds: int = option(3, "runs of each way")
    width: int = option(32, "width of the GPT, a multiple of 4")


@dataclass(frozen=True)
class Way:
    """How many minibatches make an update, the factor of the learning rate, and how often all samples are seen."""

    name: str
    accumulate: int
    factor: float
    samples: int


WAYS = (
    Way("x1", 1, 1, 1),
    Way("x4, same rate", 4, 1, 1),
    Way("x4, rate x2", 4, 2, 1),
    Way("x16, same rate", 16, 1, 1),
    Way("x16, rate x4", 16, 4, 1),
    Way("x16, 4 times the samples", 16, 1, 4),
)


def windows(text: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random places of the text, and the same one byte later."""
    starts = torch.randint(len(text) - CONTEXT, (count, 1), generator=generator)
    found = text[starts + torch.arange(CONTEXT + 1)].long()
    return found[:, :-1], found[:, 1:]


def learn(settings: Settings, results: Results, way: Way, seed: int) -> dict[str, Any]:
    text = standard_library()
    cut = len(text) * 9 // 10
    torch.manual_seed(seed)
    model = gpt(width=settings.width, depth=2, heads=4, context=CONTEXT)
    updates = settings.minibatches * way.samples // way.accumulate

    def batch(number: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(gapless.seed_of(seed, number, 0, 0))
        return windows(text[:cut], settings.batch, generator)

    with gapless.Pipeline(model, devices=2, microbatches=2, schedule="1f1b", loss=next_token_loss) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=LR * way.factor, weight_decay=0.01)
        rate = warmed_up(updates, max(1, updates // 20))
        losses = train(results, pipe, optimizer, batch, updates, accumulate=way.accumulate, clip=1.0, rate=rate)
        inputs, target = windows(text[cut:], HELD_OUT, torch.Generator().manual_seed(0))
        asked = pipe.evaluate(inputs, target)
    right = (asked.outputs.argmax(-1) == target).float().mean().item()
    points = curve(losses, updates)
    return {"updates": updates, "held_out": float(asked.loss), "right": right, "curve": points}


def run(settings: Settings, results: Results) -> None:
    if settings.minibatches % 16:
        raise ValueError(f"minibatches is {settings.minibatches}, but it must be a multiple of 16")
    for seed in range(settings.seeds):
        for way in WAYS:
            results.run(name_of(way, seed), partial(learn, settings, results, way, seed))


def name_of(way: Way, seed: int) -> str:
    """Of a run, in the results."""
    return f"{way.name}, seed {seed + 1}"


def report(found: Found) -> Report:
    settings, equal = found["settings"], [way for way in WAYS if way.samples == 1]
    seeds = whole(found, lambda seed: [name_of(way, seed) for way in equal])
    ways = [way for way in WAYS if all(name_of(way, seed) in found["runs"] for seed in seeds)]
    runs = {way.name: [found["runs"][name_of(way, seed)] for seed in seeds] for way in ways}
    means = {name: statistics.fmean(run["held_out"] for run in each) for name, each in runs.items()}
    rows, panels = [], []
    for way in ways:
        each = runs[way.name]
        updates, size = each[0]["updates"], settings["batch"] * way.accumulate
        held_out, right = spread([run["held_out"] for run in each]), spread([100 * run["right"] for run in each], 1)
        rows.append((way.name, f"{size:,}", f"{updates * size:,}", str(updates), held_out, right))
        panels.append(curves.Panel(way.name, f"{updates} updates", [_stretched(run["curve"]) for run in each]))
    best = min(equal, key=lambda way: means[way.name])
    answer = [f"At equal samples `{best.name}` has the least held-out loss: {_losses(equal, means)}."]
    if ways != list(WAYS):
        answer.append(f"Not run yet: {', '.join(way.name for way in WAYS if way not in ways)}.")
    else:
        more, less = means[WAYS[-1].name], means["x4, same rate"]
        better = "is better" if more < less else "is no better"
        answer.append(f"At equal updates, x16 {better} than x4: {more:.3f} against {less:.3f}.")
        answer.append("GPipe saw quality rise with the batch; it compared batches at equal updates.")
    return Report(
        answer,
        [(("method", "sequences in an update", "sequences seen", "updates", "held-out loss", "bytes right, %"), rows)],
        [
            f"{len(seeds)} of {settings['seeds']} planned runs per method; ± is the standard deviation.",
            "The loss is in nats per byte of held-out text.",
            f"Byte-level GPT with two blocks of width {settings['width']}, AdamW at {LR:g} times the factor named.",
            "A step of the pipeline takes one minibatch: `pipe.step(x, y, weight=1 / n)` n times, then an update.",
        ],
        [point / POINTS for point in range(POINTS)],
        panels,
        ("share of the run", "training loss"),
    )


def _losses(ways: list[Way], means: dict[str, float]) -> str:
    return ", ".join(f"{way.name}: {means[way.name]:.3f}" for way in ways)


def _stretched(points: list[float | None]) -> list[float | None]:
    """A curve of few updates has few points: each is drawn over the stretch that it stands for."""
    return [points[place * len(points) // POINTS] for place in range(POINTS)]


STUDY = Study(
    name="large_batch",
    title="Large batches by accumulation",
    question="What do batches of 4 and 16 times the size do to loss and quality?",
    settings=Settings(),
    quick=Settings(minibatches=16, batch=2, seeds=1, width=4),
    run=run,
    report=report,
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
