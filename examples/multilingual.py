"""One model for over a hundred languages: names of pycountry's catalogues into English and back, in several sizes.

    pip install 'gapless[studies]'
    python examples/multilingual.py --folder runs/studies

A size LxHxA is GPipe's T(L, H, A): L layers each in encoder and decoder, feed-forward networks of H, A heads. Languages
are drawn with a temperature, so that those with few names are seen more often than their share. Entities that are
asked are not learnt in any language. Names that are identical to English are left out, and a copy of the source is
the baseline: many names differ only in a letter or two.
"""

import itertools
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from catalogues import END, PADDING, START, Corpus, Task, corpus
from study import Found, Report, Results, Study, Table, curve, main, option, parameters_of, train, warmed_up
from torch import Tensor

import gapless
from gapless.view import curves
from gapless.zoo.transformer import Transformer, translation_loss

GROUPS = {"2,000 names or more": 2000, "500 to 1,999": 500, "100 to 499": 100, "less than 100": 0}  # that are learnt
DIRECTIONS = ("into English", "from English")
HEAD = 16
COPY = "copy of the source"


@dataclass(frozen=True)
class Settings:
    sizes: str = option("1x64x1,2x64x2,3x128x4,6x64x2,6x128x4", "layers x feed-forward width x heads of each model")
    width: int = option(32, "of all models")
    updates: int = option(2000, "of each model")
    batch: int = option(128, "names in a minibatch")
    temperature: float = option(5.0, "a language is drawn by the n-th root of its number of names")
    longest: int = option(16, "characters in a name; longer ones are left out")
    characters: int = option(400, "different ones; names with rarer ones are left out")
    asked: int = option(8, "held-out names of each language, in each direction")
    standards: str = option("*", "catalogues, as a pattern such as iso639*")


@dataclass(frozen=True)
class Size:
    """T(L, H, A)."""

    layers: int
    hidden: int
    heads: int

    def __str__(self) -> str:
        return f"T({self.layers}, {self.hidden}, {self.heads})"

    @property
    def amount(self) -> tuple[int, int]:
        """Sizes with the same have as many parameters, but for norms and biases."""
        return self.layers * self.hidden, self.layers * self.heads


def sizes_of(words: str) -> list[Size]:
    try:
        return [Size(*map(int, each.split("x"))) for each in words.split(",")]
    except (TypeError, ValueError) as error:
        raise ValueError(f"sizes is {words!r}, but each must be three numbers, such as 2x64x2") from error


# -- data and quality --------------------------------------------------------------------------------------------------


def sampler(known: Corpus, settings: Settings) -> Callable[[int], tuple[tuple[Tensor, Tensor], Tensor]]:
    """The n-th minibatch."""
    languages = list(known.learn)
    counts = torch.tensor([float(len(known.learn[language])) for language in languages])
    weights = counts ** (1 / settings.temperature)

    def batch(number: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        generator = torch.Generator().manual_seed(gapless.seed_of(0, number, 0, 0))
        drawn = torch.multinomial(weights, settings.batch, replacement=True, generator=generator)
        places = (torch.rand(settings.batch, generator=generator) * counts[drawn]).long()
        ways = torch.randint(2, (settings.batch,), generator=generator)
        chosen = zip(drawn.tolist(), places.tolist(), ways.tolist(), strict=True)
        return known.batch([known.learn[languages[each]][place].both_ways()[way] for each, place, way in chosen])

    return batch


def questions(known: Corpus, most: int) -> list[Task]:
    """Held-out names of all languages, the same for all models, in both directions."""
    found = []
    for number, pairs in enumerate(known.ask.values()):
        order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(number)).tolist()
        found += [task for place in order[:most] for task in pairs[place].both_ways()]
    return found


@torch.no_grad()
def translated(model: Transformer, known: Corpus, tasks: Sequence[Task]) -> list[str]:
    """The most likely character, one after the other."""
    found: list[str] = []
    for start in range(0, len(tasks), 256):
        (source, _), _ = known.batch(tasks[start : start + 256])
        target = torch.full((len(source), 1), START)
        for _ in range(known.longest + 1):
            following = model(source, target)[:, -1].argmax(-1, keepdim=True)
            target = torch.cat([target, following], dim=1)
            if (target == END).any(dim=1).all():
                break
        found += [known.text(row) for row in target[:, 1:].tolist()]
    return found


def chrf(got: str, wanted: str, orders: int = 6, beta: float = 2.0) -> float:
    """chrF (Popović, 2015) of one name, from 0 to 100: character n-grams of up to six, recall counts twice."""
    precisions, recalls = [], []
    for order in range(1, orders + 1):
        ours, theirs = (
            Counter(text[place : place + order] for place in range(len(text) - order + 1)) for text in (got, wanted)
        )
        if ours or theirs:
            common = sum((ours & theirs).values())
            precisions.append(common / max(1, sum(ours.values())))
            recalls.append(common / max(1, sum(theirs.values())))
    precision, recall = (statistics.fmean(each) if each else 0.0 for each in (precisions, recalls))
    if not precision + recall:
        return 0.0
    return 100 * (1 + beta**2) * precision * recall / (beta**2 * precision + recall)


def graded(answers: Sequence[str], tasks: Sequence[Task]) -> dict[str, dict[str, list[float]]]:
    """For each direction and language: mean chrF, and the share that is exactly right in percent."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {direction: {} for direction in DIRECTIONS}
    for answer, task in zip(answers, tasks, strict=True):
        grades = found[DIRECTIONS[task.target_language != "en"]].setdefault(task.language, [])
        grades.append((chrf(answer, task.target), 100.0 * (answer == task.target)))
    return {
        direction: {
            language: [round(statistics.fmean(each), 2) for each in zip(*grades, strict=True)]
            for language, grades in by.items()
        }
        for direction, by in found.items()
    }


# -- the study ---------------------------------------------------------------------------------------------------------


def describe(known: Corpus, settings: Settings) -> dict[str, Any]:
    """The data, and what a copy of the source is worth."""
    tasks = questions(known, settings.asked)
    return {
        "learnt": {language: len(pairs) for language, pairs in known.learn.items()},
        "held_out": sum(map(len, known.ask.values())),
        "asked": len(tasks),
        "left_out": known.left_out,
        "grades": graded([task.source for task in tasks], tasks),
    }


def learn(known: Corpus, settings: Settings, results: Results, size: Size) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Transformer(
        vocab=known.vocabulary,
        width=settings.width,
        depth=size.layers,
        hidden=size.hidden,
        heads=size.heads,
        head_size=HEAD,
        one_vocabulary=True,
    )
    with gapless.Pipeline(
        model,
        devices=2,
        schedule="1f1b",
        microbatches=2,
        loss=translation_loss,
        loss_weight=lambda target: (target != PADDING).sum(),
    ) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.003, weight_decay=0.01)
        rate = warmed_up(settings.updates, max(1, settings.updates // 20))
        losses = train(results, pipe, optimizer, sampler(known, settings), settings.updates, clip=1.0, rate=rate)
    results.show("translates what was held out")
    tasks, model = questions(known, settings.asked), model.eval()
    answers = translated(model, known, tasks)
    shown = range(0, len(tasks), max(1, len(tasks) // 12))
    with torch.no_grad():
        inputs, target = known.batch(tasks)
        held_out = translation_loss(model(*inputs), target).item()
    return {
        "parameters": parameters_of(model),
        "held_out": round(held_out, 4),
        "curve": curve(losses, settings.updates),
        "grades": graded(answers, tasks),
        "examples": [
            (tasks[place].language, tasks[place].source, tasks[place].target, answers[place]) for place in shown
        ],
    }


def run(settings: Settings, results: Results) -> None:
    sizes = sizes_of(settings.sizes)
    known = corpus(longest=settings.longest, characters=settings.characters, standards=settings.standards)
    results.run(COPY, partial(describe, known, settings))
    for size in sizes:
        results.run(str(size), partial(learn, known, settings, results, size))


# -- what the figures say ----------------------------------------------------------------------------------------------


class Figures:
    """The results, asked by model, group of languages and direction. Models that have not run yet are left out."""

    def __init__(self, found: Found) -> None:
        self._runs = found["runs"]
        self.data = self._runs[COPY]
        known = [size for size in sizes_of(found["settings"]["sizes"]) if str(size) in self._runs]
        self.sizes = sorted(known, key=lambda size: self.of(size)["parameters"])
        self.names = [str(size) for size in self.sizes]
        self.everyone = [one for one, _ in sorted(self.data["learnt"].items(), key=lambda each: -each[1])]
        every = {group: [one for one in self.everyone if self._group(one) == group] for group in GROUPS}
        self.groups = {group: languages for group, languages in every.items() if languages}

    def _group(self, language: str) -> str:
        return next(group for group, least in GROUPS.items() if self.data["learnt"][language] >= least)

    def of(self, run: Size | str) -> Any:
        return self._runs[str(run)]

    def quality(self, run: Size | str, languages: Sequence[str], way: str | None = None, which: int = 0) -> float:
        """Mean chrF, or exact names if `which` is 1."""
        ways = DIRECTIONS if way is None else (way,)
        return statistics.fmean(self.of(run)["grades"][way][one][which] for way in ways for one in languages)

    def gain(self, worse: Size, better: Size, languages: Sequence[str]) -> tuple[float, float]:
        """How much more chrF, and the standard error of that over languages."""
        gains = [self.quality(better, [one]) - self.quality(worse, [one]) for one in languages]
        error = statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else float("inf")
        return statistics.fmean(gains), error

    def by_size(self) -> Table:
        rows = [
            (
                str(size),
                f"{self.of(size)['parameters']:,}",
                f"{self.of(size)['held_out']:.3f}",
                *(f"{self.quality(size, self.everyone, way):.1f}" for way in DIRECTIONS),
                *(f"{self.quality(size, self.everyone, way, 1):.1f}" for way in DIRECTIONS),
            )
            for size in self.sizes
        ]
        grades = [f"{what} {way}" for what in ("chrF", "% exact") for way in DIRECTIONS]
        return ("model", "parameters", "held-out loss", *grades), rows

    def by_group(self) -> Table:
        groups = {"all": self.everyone, **self.groups}
        rows = [
            (f"{way}, {group}", str(len(languages)), *self._cells(languages, way))
            for way, (group, languages) in itertools.product(DIRECTIONS, groups.items())
        ]
        return ("names that are learnt", "languages", "copy", *self.names), rows

    def by_language(self) -> Table:
        rows = [(one, f"{self.data['learnt'][one]:,}", *self._cells([one])) for one in self.everyone]
        return ("language", "names that are learnt", "copy", *self.names), rows

    def _cells(self, languages: Sequence[str], way: str | None = None) -> list[str]:
        return [f"{self.quality(run, languages, way):.1f}" for run in (COPY, *self.names)]

    def panels(self) -> list[curves.Panel]:
        groups = {"all languages": self.everyone, **self.groups}
        return [
            curves.Panel(group, f"{len(each)} languages", [[self.quality(size, each) for size in self.sizes]])
            for group, each in groups.items()
        ]


def rise(figures: Figures) -> str:
    """Whether larger is better, for whom, and for whom most."""
    first, last = figures.sizes[0], figures.sizes[-1]
    gains = {group: figures.gain(first, last, languages) for group, languages in figures.groups.items()}
    risen = [group for group, (gain, error) in gains.items() if gain > 2 * error]
    told = ", ".join(f"{group}: {gain:+.1f} ± {error:.1f}" for group, (gain, error) in gains.items())
    how = "rises for all groups" if len(risen) == len(gains) else f"rises for {len(risen)} of {len(gains)} groups"
    most = max(gains, key=lambda group: gains[group][0])
    where = "the data-poorest" if most == list(gains)[-1] else f"those with {most}, not for the data-poorest"
    best = f" It rises most for {where}." if risen else ""
    return f"From {first} to {last} quality {how} of languages (chrF by names learnt, {told}).{best}"


def deeper(figures: Figures) -> list[str]:
    """Models with as many parameters, compared."""
    found = []
    for pair in itertools.combinations(figures.sizes, 2):
        if pair[0].amount == pair[1].amount:
            wide, deep = sorted(pair, key=lambda size: size.layers)
            gain, error = figures.gain(wide, deep, figures.everyone)
            verdict = f"the {'deeper' if gain > 0 else 'wider'} model is better"
            if abs(gain) < 2 * error:
                verdict = "deeper and wider do not differ by more than chance"
            losses = " and ".join(f"{figures.of(size)['held_out']:.3f}" for size in (deep, wide))
            found.append(
                f"At equal parameters {verdict}: {deep} has {gain:+.1f} ± {error:.1f} chrF against {wide}; "
                f"held-out losses {losses}."
            )
    return found


def copied(figures: Figures) -> str:
    """The best model against the baseline."""
    best, copy = (figures.quality(run, figures.everyone) for run in (figures.names[-1], COPY))
    verdict = "more" if best > copy else "less: it has not learnt enough to be of use"
    return f"A copy of the source has chrF {copy:.1f}; {figures.names[-1]} has {best:.1f}, which is {verdict}."


def report(found: Found) -> Report:
    settings, figures = found["settings"], Figures(found)
    data, best = figures.data, figures.names[-1]
    left = ", ".join(f"{count:,} {why}" for why, count in data["left_out"].items() if why != "all")
    missing = [str(size) for size in sizes_of(settings["sizes"]) if str(size) not in figures.names]
    return Report(
        [rise(figures), *deeper(figures), copied(figures), *(f"{name} has not been run." for name in missing)],
        [figures.by_size(), figures.by_group()],
        [
            f"{len(figures.everyone)} languages and English. Of {data['left_out']['all']:,} pairs {left} are left out.",
            f"{sum(data['learnt'].values()):,} pairs are learnt, and {data['held_out']:,} held out by entity.",
            f"{data['asked']:,} questions give the figures. Languages count alike in a mean; ± is its standard error.",
            f"Names have up to {settings['longest']} characters, in small letters. Quality is chrF, from 0 to 100.",
            f"Languages are drawn with a temperature of {settings['temperature']:g}.",
            f"All models have width {settings['width']} and heads of {HEAD}. T(L, H, A) is GPipe's name for a size.",
            f"Each is trained once: {settings['updates']} updates of {settings['batch']} names, the same for all.",
        ],
        [figures.of(size)["parameters"] / 1000 for size in figures.sizes],
        figures.panels(),
        ("thousand parameters", "chrF"),
        [
            figures.by_language(),
            (("language", "source", "target", f"what {best} says"), figures.of(best)["examples"]),
        ],
    )


STUDY = Study(
    name="multilingual",
    title="One model for over a hundred languages",
    question="Does quality rise with size, for data-rich and data-poor languages, and is deeper better than wider?",
    settings=Settings(),
    quick=Settings(
        "2x8x1,1x16x2", width=8, updates=2, batch=4, longest=8, characters=80, asked=1, standards="iso15924"
    ),
    run=run,
    report=report,
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
