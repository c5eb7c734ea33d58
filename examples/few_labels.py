"""Does pretraining pay where labels are few? Digits, pretrained on some classes and fine-tuned on the others.

    pip install 'gapless[studies]'
    python examples/few_labels.py --folder runs/studies

A small convolutional network learns seven of scikit-learn's ten digits from all of their images, with flips and cutout.
It then gets a new head and learns the other three from a few labels of each. The other way starts from new weights and
gets the same labels, updates and settings to choose from.

The digits stand on a field that is larger than they are: all of them in the middle, which is easy, or each of them
anywhere, so that a few labels do not show all places where a digit may be.

The images of a new digit are in three parts, the same for all runs: labels come from the first, the second chooses the
settings of a run, and the third gives its figure.
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
from study import (
    SURE,
    Found,
    Report,
    Results,
    Study,
    main,
    more_than_chance,
    numbers,
    option,
    spread,
    train,
    warmed_up,
    whole,
)
from torch import Tensor, nn

import gapless
from gapless.view import curves

FIELD = 12  # pixels; a digit has 8
TASKS = ("in the middle", "anywhere")  # where the digits stand on it
WAYS = ("scratch", "pretrained")
CHOICES = tuple(product((0.003, 0.01, 0.03), (1.0, 0.1)))  # learning rate, and how much of it the body gets
NEW = 3  # digits to fine-tune on; the others are for pretraining
TO_LEARN, TO_CHOOSE = 50, 40  # images of each new digit; the rest, over 80, are the test
Images = tuple[Tensor, Tensor]  # and their labels


@dataclass(frozen=True)
class Settings:
    seeds: int = option(5, "runs of each way, each with digits, weights and labels of its own")
    pretraining: int = option(400, "updates on the seven other digits")
    steps: int = option(60, "updates on the three new digits")
    labels: str = option("2,5,10", "labels of each new digit, with commas between them")
    width: int = option(16, "channels of the first layer, a multiple of 4")


def counts_of(words: str) -> list[int]:
    counts = sorted(set(numbers("labels", words, int)))
    if max(counts) > TO_LEARN:
        raise ValueError(f"labels is {words!r}, but there are {TO_LEARN} images of each digit to learn from: give less")
    return counts


# -- data --------------------------------------------------------------------------------------------------------------


def digits(task: str) -> Images:
    """1,797 images of 8 x 8 on an empty field, with values from 0 to 1. Each has one place for the whole study."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise gapless.GaplessError("the digits come with scikit-learn: pip install 'gapless[studies]'") from error
    found = load_digits()
    small = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16
    room, generator = FIELD - small.size(3), torch.Generator().manual_seed(0)
    places = torch.randint(room + 1, (len(small), 2), generator=generator)
    if task == TASKS[0]:
        places.fill_(room // 2)
    images = torch.zeros(len(small), 1, FIELD, FIELD)
    for image, one, (top, left) in zip(images, small, places.tolist(), strict=True):
        image[:, top : top + 8, left : left + 8] = one
    return images, torch.tensor(found.target)


def new_digits(seed: int) -> list[int]:
    """Those of a run: five runs have all ten digits."""
    return [(2 * seed + place) % 10 for place in range(NEW)]


def only(images: Images, classes: Sequence[int]) -> Images:
    """Those of some digits, numbered from 0 in the order given."""
    number = torch.full((10,), -1)
    number[list(classes)] = torch.arange(len(classes))
    there = number[images[1]] >= 0
    return images[0][there], number[images[1][there]]


def parted(targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The places of images to learn from, to choose by and to test with; the same for all runs."""
    parts: list[list[Tensor]] = [[], [], []]
    for label in range(NEW):
        places = (targets == label).nonzero()[:, 0]
        places = places[torch.randperm(len(places), generator=torch.Generator().manual_seed(0))]
        rest = len(places) - TO_LEARN - TO_CHOOSE
        for part, some in zip(parts, places.split([TO_LEARN, TO_CHOOSE, rest]), strict=True):
            part.append(some)
    learn, choose, test = (torch.cat(part) for part in parts)
    return learn, choose, test


def varied(images: Tensor, generator: torch.Generator) -> Tensor:
    """Half of them flipped from left to right, and a square of 3 x 3 of each cut out."""
    flipped = torch.rand(len(images), 1, 1, 1, generator=generator) < 0.5
    images = torch.where(flipped, images.flip(3), images)
    rows, columns = torch.arange(FIELD).view(1, 1, FIELD, 1), torch.arange(FIELD).view(1, 1, 1, FIELD)
    top, left = torch.randint(FIELD - 2, (2, len(images), 1, 1, 1), generator=generator)
    hole = (rows >= top) & (rows < top + 3) & (columns >= left) & (columns < left + 3)
    return images.masked_fill(hole, 0.0)


# -- training ----------------------------------------------------------------------------------------------------------


def network(width: int, classes: int) -> nn.Sequential:
    """A body of five layers and a head."""

    def block(inside: int, outside: int, stride: int = 1) -> nn.Module:
        convolution = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
        return nn.Sequential(convolution, nn.GroupNorm(4, outside), nn.ReLU())

    blocks = [block(1, width), block(width, width, 2), block(width, 2 * width), block(2 * width, 2 * width, 2)]
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten())
    return nn.Sequential(*blocks, pool, nn.Linear(8 * width, classes))


def fit(
    results: Results, model: nn.Sequential, batch: Callable[[int], Images], steps: int, rate: float, body: float
) -> list[float]:
    """Trains the model as a pipeline of two devices; the losses."""
    with gapless.Pipeline(model, devices=2, schedule="1f1b", microbatches=2, loss=F.cross_entropy) as pipe:
        parts = [(model[:-1], rate * body), (model[-1], rate)]
        groups = [{"params": list(part.parameters()), "lr": lr} for part, lr in parts]
        optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
        return train(results, pipe, optimizer, batch, steps, rate=warmed_up(steps, max(1, steps // 10)))


def pretrain(results: Results, settings: Settings, images: Images, seed: int) -> dict[str, Any]:
    """The weights of a body that knows the digits that are not new."""
    old = [digit for digit in range(10) if digit not in new_digits(seed)]
    torch.manual_seed(seed)
    model, (inputs, labels) = network(settings.width, len(old)), only(images, old)

    def batch(number: int) -> Images:
        generator = torch.Generator().manual_seed(gapless.seed_of(seed, number, 0, 0))
        chosen = torch.randint(len(inputs), (64,), generator=generator)
        return varied(inputs[chosen], generator), labels[chosen]

    losses = fit(results, model, batch, settings.pretraining, 0.003, 1.0)
    weights = {name: value.tolist() for name, value in model[:-1].state_dict().items()}
    return {"loss": statistics.fmean(losses[-10:]), "weights": weights}


def tune(
    results: Results,
    settings: Settings,
    images: Images,
    seed: int,
    labels: int,
    choice: tuple[float, float],
    weights: Any,
) -> dict[str, Any]:
    """Accuracy on the new digits after learning a few of them; `weights` are those of a pretrained body, or None."""
    inputs, targets = only(images, new_digits(seed))
    learn, choose, test = parted(targets)
    order = learn[torch.randperm(len(learn), generator=torch.Generator().manual_seed(1000 + seed))]
    few = torch.cat([order[targets[order] == label][:labels] for label in range(NEW)])
    torch.manual_seed(seed)
    model = network(settings.width, NEW)
    if weights is not None:
        model[:-1].load_state_dict({name: torch.tensor(value) for name, value in weights.items()})

    def batch(number: int) -> Images:
        generator = torch.Generator().manual_seed(gapless.seed_of(seed, number, 1, 0))
        chosen = few[torch.randint(len(few), (32,), generator=generator)]
        return inputs[chosen], targets[chosen]

    fit(results, model, batch, settings.steps, *choice)
    parts = {"choose": choose, "test": test}
    return {name: accuracy(model, (inputs[part], targets[part])) for name, part in parts.items()}


@torch.no_grad()
def accuracy(model: nn.Module, images: Images) -> float:
    """The share of images that it names rightly."""
    return round((model.eval()(images[0]).argmax(1) == images[1]).float().mean().item(), 4)


def name_of(task: str, way: str, labels: int, choice: tuple[float, float], seed: int) -> str:
    """Of a run, in the results."""
    rate, body = choice
    return f"{task}, {way}, {labels} labels, rate {rate:g}, body {body:g}, run {seed + 1}"


def names_of(labels: str, task: str, seed: int) -> list[str]:
    """Of all runs with a seed."""
    return [name_of(task, *each, seed) for each in product(WAYS, counts_of(labels), CHOICES)]


def run(settings: Settings, results: Results) -> None:
    counts = counts_of(settings.labels)
    if settings.width % 4:
        raise ValueError(f"width is {settings.width}, but it must be a multiple of 4")
    for task, seed in product(TASKS, range(settings.seeds)):
        if all(name in results.found["runs"] for name in names_of(settings.labels, task, seed)):
            continue
        images, first = digits(task), f"{task}, pretraining, run {seed + 1}"
        weights = results.run(first, partial(pretrain, results, settings, images, seed))["weights"]
        for labels, way, choice in product(counts, WAYS, CHOICES):
            body = weights if way == "pretrained" else None
            learn = partial(tune, results, settings, images, seed, labels, choice, body)
            results.run(name_of(task, way, labels, choice, seed), learn)
        results.forget(first, "weights")


# -- what the figures say ----------------------------------------------------------------------------------------------


def chosen(found: Found, task: str, way: str, labels: int, seed: int) -> tuple[float, float]:
    """The settings with the best accuracy on the images that choose."""
    return max(CHOICES, key=lambda choice: found["runs"][name_of(task, way, labels, choice, seed)]["choose"])


def answer(verdicts: Sequence[int]) -> str:
    """From what `more_than_chance` says of each number of labels; of a single run it says nothing."""
    if not verdicts:
        return "one run of each way does not tell."
    better, worse, total = verdicts.count(1), verdicts.count(-1), len(verdicts)
    told = f"It is worse for {worse}." if worse else ""
    if better == total:
        said = f"yes. Fine-tuning is better by more than chance for all {total} numbers of labels."
    elif better:
        said = f"partly. Fine-tuning is better by more than chance for {better} of {total} numbers of labels."
    else:
        said = f"no. Fine-tuning is better by more than chance for none of {total} numbers of labels."
    return f"{said} {told}".strip()


@dataclass(frozen=True)
class Contest:
    """Both ways with one number of labels: for each run the settings that were chosen, and its result with them."""

    task: str
    labels: int
    seeds: Sequence[int]
    scratch: Sequence[tuple[tuple[float, float], Found]]
    tuned: Sequence[tuple[tuple[float, float], Found]]

    @classmethod
    def of(cls, found: Found, seeds: Sequence[int], task: str, labels: int) -> "Contest":
        def best(way: str, seed: int) -> tuple[tuple[float, float], Found]:
            choice = chosen(found, task, way, labels, seed)
            return choice, found["runs"][name_of(task, way, labels, choice, seed)]

        scratch, tuned = ([best(way, seed) for seed in seeds] for way in WAYS)
        return cls(task, labels, seeds, scratch, tuned)

    @property
    def percents(self) -> tuple[list[float], list[float]]:
        """Of the test, for each run: from scratch, and fine-tuned."""
        scratch, tuned = ([100 * result["test"] for _, result in way] for way in (self.scratch, self.tuned))
        return scratch, tuned

    @property
    def gains(self) -> list[float]:
        return [after - before for before, after in zip(*self.percents, strict=True)]

    def row(self) -> tuple[str, ...]:
        cells = [spread(values, 1) for values in (*self.percents, self.gains)]
        ahead = sum(gain > 0 for gain in self.gains)
        return self.task, str(self.labels), *cells, f"{ahead} of {len(self.seeds)}"

    def runs(self) -> list[tuple[str, ...]]:
        """A row for each."""
        rows = []
        for seed, scratch, tuned in zip(self.seeds, self.scratch, self.tuned, strict=True):
            figures = [
                cell
                for (rate, body), result in (scratch, tuned)
                for cell in (f"{100 * result['test']:.1f}", f"{rate:g}, {rate * body:g}")
            ]
            rows.append((self.task, str(self.labels), ", ".join(map(str, new_digits(seed))), *figures))
        return rows


def panels(contests: Sequence[Contest]) -> list[curves.Panel]:
    """Accuracy of each run, by the number of labels: from scratch, and fine-tuned."""
    by_run = [list(zip(*(contest.percents[way] for contest in contests), strict=True)) for way in (0, 1)]
    named = zip(("scratch", "fine-tuned"), by_run, strict=True)
    return [curves.Panel(f"{way}, {contests[0].task}", f"{len(runs)} runs", runs) for way, runs in named]


def report(found: Found) -> Report:
    settings = found["settings"]
    counts = counts_of(settings["labels"])
    seeds = whole(found, lambda seed: [name for task in TASKS for name in names_of(settings["labels"], task, seed)])
    contests = {task: [Contest.of(found, seeds, task, labels) for labels in counts] for task in TASKS}
    verdicts = {
        task: [more_than_chance(each.gains) for each in some if len(seeds) > 1] for task, some in contests.items()
    }
    answers = [f"Digits {task}: {answer(each)}" for task, each in verdicts.items()]
    middle, anywhere = verdicts.values()
    if anywhere and min(anywhere) == 1 and max(middle) < 1:
        answers.append(
            "So pretraining pays where a few labels show too little: they show a digit in a few places only."
        )
    every = [contest for some in contests.values() for contest in some]
    rates = "rates of head and body"
    return Report(
        answers,
        [
            (
                ("position of digits", "labels of each", "scratch, %", "fine-tuned, %", "gain", "ahead in"),
                [contest.row() for contest in every],
            )
        ],
        [
            f"The task is to tell {NEW} digits apart that pretraining has not seen. A guess is right in 33%.",
            f"A digit has 8 x 8 pixels. It stands on a field of {FIELD} x {FIELD}.",
            "The figures are accuracies on test images. They are not used for anything else.",
            f"{len(seeds)} of {settings['seeds']} planned runs per method; ± is the standard deviation.",
            "Each run has its own new digits, weights and labels. Both methods get the same labels.",
            f"A gain counts as more than chance if its mean over the runs is above {SURE} times its standard error.",
            f"Pretraining: {settings['pretraining']} updates of 64 images of the seven other digits, flips and cutout.",
            f"Learning the new digits: {settings['steps']} updates of 32 images, the same for both ways.",
            f"Each method tries {len(CHOICES)} settings in each run. Images outside the test set choose the best.",
            "The settings are three learning rates, each with the body at the full rate or at a tenth of it.",
            "Neither method shifts images in training. Shifted copies of the labelled images would be another remedy.",
        ],
        counts,
        [panel for some in reversed(contests.values()) for panel in panels(some)],
        ("labels of each digit", "accuracy, %"),
        [
            (
                ("position of digits", "labels of each", "new digits", "scratch, %", rates, "fine-tuned, %", rates),
                [row for contest in every for row in contest.runs()],
            )
        ],
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
