"""Does pretraining pay where labels are few? Digits, pretrained on some classes and fine-tuned on the others.

    pip install 'gapless[studies]'
    python examples/few_labels.py --folder runs/studies

A small convolutional network learns five of scikit-learn's ten digits from all of their images, with flips and cutout.
It then gets a new head and learns the other five from a few labels of each. The other way starts from new weights and
gets the same labels, steps and learning rates. Half of the other images choose the learning rate of each way, and the
other half gives the figures.
"""

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from study import Found, Report, Results, Study, curve, main, middles, option, spread, train, warmed_up, whole
from torch import Tensor, nn

import gapless
from gapless.view import curves

OLD, NEW = range(5), range(5, 10)  # digits to pretrain on, and those to fine-tune on
RATES = (0.003, 0.01)
WAYS = ("scratch", "pretrained")
SURE = 3  # standard errors: with runs as few as these, two are often chance
Images = tuple[Tensor, Tensor]  # and their labels


@dataclass(frozen=True)
class Settings:
    seeds: int = option(5, "runs of each way, each with weights and labels of its own")
    pretraining: int = option(200, "updates on the first five digits")
    steps: int = option(40, "updates on the other five")
    labels: str = option("1,5,20", "labels of each new digit, with commas between them")
    width: int = option(16, "channels of the first layer")


def digits() -> Images:
    """1,797 images of 8 x 8, with values from 0 to 1."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise gapless.GaplessError("the digits come with scikit-learn: pip install 'gapless[studies]'") from error
    found = load_digits()
    return torch.tensor(found.images, dtype=torch.float32)[:, None] / 16, torch.tensor(found.target)


def only(images: Images, classes: range) -> Images:
    """Those of some digits, which are numbered from 0 again."""
    there = (images[1] >= classes.start) & (images[1] < classes.stop)
    return images[0][there], images[1][there] - classes.start


def network(width: int) -> nn.Sequential:
    """A body of five layers and a head for five classes."""

    def block(inside: int, outside: int, stride: int = 1) -> nn.Module:
        convolution = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
        return nn.Sequential(convolution, nn.GroupNorm(4, outside), nn.ReLU())

    blocks = [block(1, width), block(width, width), block(width, 2 * width, 2), block(2 * width, 2 * width)]
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten())
    return nn.Sequential(*blocks, pool, nn.Linear(8 * width, len(NEW)))


def varied(images: Tensor, generator: torch.Generator) -> Tensor:
    """Half of them flipped from left to right, and a square of 3 x 3 of each cut out."""
    flipped = torch.rand(len(images), 1, 1, 1, generator=generator) < 0.5
    images = torch.where(flipped, images.flip(3), images)
    rows, columns = torch.arange(8).view(1, 1, 8, 1), torch.arange(8).view(1, 1, 1, 8)
    top, left = torch.randint(6, (2, len(images), 1, 1, 1), generator=generator)
    hole = (rows >= top) & (rows < top + 3) & (columns >= left) & (columns < left + 3)
    return images.masked_fill(hole, 0.0)


def fit(results: Results, model: nn.Module, batch: Callable[[int], Images], steps: int, lr: float) -> list[float]:
    """Trains the model as a pipeline of two devices; the losses."""
    with gapless.Pipeline(model, devices=2, schedule="1f1b", microbatches=2, loss=F.cross_entropy) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=lr, weight_decay=0.01)
        return train(results, pipe, optimizer, batch, steps, rate=warmed_up(steps, max(1, steps // 10)))


def pretrain(results: Results, settings: Settings, images: Images, seed: int) -> dict[str, Any]:
    """The weights of a body that knows the first digits."""
    torch.manual_seed(seed)
    model, (inputs, labels) = network(settings.width), only(images, OLD)

    def batch(number: int) -> Images:
        generator = torch.Generator().manual_seed(gapless.seed_of(seed, number, 0, 0))
        chosen = torch.randint(len(inputs), (64,), generator=generator)
        return varied(inputs[chosen], generator), labels[chosen]

    losses = fit(results, model, batch, settings.pretraining, 0.003)
    weights = {name: value.tolist() for name, value in model[:-1].state_dict().items()}
    return {"loss": statistics.fmean(losses[-10:]), "weights": weights}


def tune(
    results: Results, settings: Settings, images: Images, seed: int, labels: int, lr: float, body: Any
) -> dict[str, Any]:
    """Accuracy on the new digits after learning a few of them; `body` has pretrained weights or is None."""
    inputs, targets = only(images, NEW)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(1000 + seed))
    few = torch.cat([order[targets[order] == label][:labels] for label in range(len(NEW))])
    rest = order[~torch.isin(order, few)]
    torch.manual_seed(seed)
    model = network(settings.width)
    if body is not None:
        model[:-1].load_state_dict({name: torch.tensor(value) for name, value in body.items()})

    def batch(number: int) -> Images:
        generator = torch.Generator().manual_seed(gapless.seed_of(seed, number, 1, 0))
        chosen = few[torch.randint(len(few), (32,), generator=generator)]
        return inputs[chosen], targets[chosen]

    losses = fit(results, model, batch, settings.steps, lr)
    halves = {"choose": rest[::2], "test": rest[1::2]}
    right = {name: accuracy(model, (inputs[part], targets[part])) for name, part in halves.items()}
    return {**right, "curve": curve(losses, settings.steps)}


@torch.no_grad()
def accuracy(model: nn.Module, images: Images) -> float:
    """The share of images that it names rightly."""
    return round((model.eval()(images[0]).argmax(1) == images[1]).float().mean().item(), 4)


def name_of(way: str, labels: int, lr: float, seed: int) -> str:
    """Of a run, in the results."""
    return f"{way}, {labels} labels, rate {lr:g}, run {seed + 1}"


def names_of(labels: str, seed: int) -> list[str]:
    """Of all runs with a seed."""
    return [name_of(way, count, lr, seed) for way in WAYS for count in map(int, labels.split(",")) for lr in RATES]


def run(settings: Settings, results: Results) -> None:
    images = digits()
    for seed in range(settings.seeds):
        if seed in whole(results.found, partial(names_of, settings.labels)):
            continue
        first = f"pretraining {seed + 1}"
        weights = results.run(first, partial(pretrain, results, settings, images, seed))["weights"]
        for labels, lr, way in product(map(int, settings.labels.split(",")), RATES, WAYS):
            body = weights if way == "pretrained" else None
            results.run(
                name_of(way, labels, lr, seed), partial(tune, results, settings, images, seed, labels, lr, body)
            )
        results.forget(first, "weights")


def best(found: Found, way: str, labels: int) -> tuple[float, list[float], list[Any]]:
    """The learning rate with the best accuracy on what chooses; test accuracies and curves of all runs with it."""
    seeds = whole(found, partial(names_of, found["settings"]["labels"]))
    runs = {lr: [found["runs"][name_of(way, labels, lr, seed)] for seed in seeds] for lr in RATES}
    chosen = max(RATES, key=lambda lr: statistics.fmean(run["choose"] for run in runs[lr]))
    return chosen, [run["test"] for run in runs[chosen]], [run["curve"] for run in runs[chosen]]


def more_than_chance(gains: Sequence[float]) -> int:
    """1 if fine-tuning is better, -1 if it is worse, 0 if the runs differ too much to tell."""
    mean, error = statistics.fmean(gains), statistics.stdev(gains) / len(gains) ** 0.5
    return (mean > SURE * error) - (mean < -SURE * error)


def answer(verdicts: Sequence[int]) -> str:
    """From what `more_than_chance` says of each number of labels; of a single run it says nothing."""
    if not verdicts:
        return "One run of each way does not tell."
    better, worse, total = verdicts.count(1), verdicts.count(-1), len(verdicts)
    told = f"It is worse for {worse}." if worse else ""
    if better == total:
        said = f"Yes: fine-tuning is better by more than chance for all {total} numbers of labels."
    elif better:
        said = f"Partly: fine-tuning is better by more than chance for {better} of {total} numbers of labels."
    else:
        said = f"No: pretraining did not help. For none of {total} numbers of labels it is better by more than chance."
    return f"{said} {told}".strip()


def report(found: Found) -> Report:
    settings = found["settings"]
    counts = [int(each) for each in settings["labels"].split(",")]
    rows, panels, verdicts = [], [], []
    for labels in counts:
        (slow, scratch, _), (quick, tuned, _) = (best(found, way, labels) for way in WAYS)
        gains = [after - before for before, after in zip(scratch, tuned, strict=True)]
        if len(gains) > 1:
            verdicts.append(more_than_chance(gains))
        ahead = sum(gain > 0 for gain in gains)
        percent = [[100 * value for value in values] for values in (scratch, tuned, gains)]
        cells = [f"{spread(values, 1)}" for values in percent]
        rows.append((str(labels), cells[0], cells[1], cells[2], f"{ahead} of {len(gains)}", f"{slow:g}", f"{quick:g}"))
    for labels in counts:
        for way in WAYS:
            lr, _, drawn = best(found, way, labels)
            panels.append(curves.Panel(way, f"{labels} labels of each, rate {lr:g}", drawn))
    headings = ("labels of each digit", "scratch, %", "fine-tuned, %", "gain", "ahead in", "its rate", "tuned rate")
    return Report(
        [answer(verdicts)],
        [(headings, rows)],
        [
            "The figures are accuracies on images of the digits 5 to 9 that the run has not seen.",
            f"Runs of each way: {len(scratch)} of {settings['seeds']} that were planned; ± is the standard deviation.",
            "Each run has weights and labels of its own.",
            "Both ways get the same labels.",
            f"A gain counts as more than chance if its mean over the runs is above {SURE} times its standard error.",
            f"Pretraining: {settings['pretraining']} updates of 64 images of the digits 0 to 4, with flips and cutout.",
            f"Learning the new digits: {settings['steps']} updates of 32 images.",
            "Each way has the best of two learning rates. In each run other images than those that count choose it.",
        ],
        middles(settings["steps"]),
        panels,
        ("update", "training loss"),
    )


STUDY = Study(
    name="few_labels",
    title="Fine-tuning with few labels",
    question="Does a network that was pretrained on other digits learn new ones better than one from scratch?",
    settings=Settings(),
    quick=Settings(seeds=1, pretraining=2, steps=2, labels="2", width=4),
    run=run,
    report=report,
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
