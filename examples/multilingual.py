"""One model for over a hundred languages: names of pycountry's catalogues into English and back, in several sizes.

    pip install 'gapless[studies]'
    python examples/multilingual.py --folder runs/studies

A size LxHxA is GPipe's T(L, H, A): L layers each in encoder and decoder, feed-forward networks of H, A heads. Languages
are drawn with a temperature, so that those with few names are seen more often than their share. Entities that are
asked are not learnt in any language. Names that are identical to English are left out, and a copy of the source is
the baseline: many names differ only in a letter or two.
"""

import itertools
import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from catalogues import PADDING, Corpus, corpus
from grades import DIRECTIONS, graded, questions, translated
from study import Found, Report, Results, Study, Table, curve, main, option, parameters_of, train, warmed_up
from torch import Tensor

import gapless
from gapless.view import curves
from gapless.zoo.transformer import Transformer, translation_loss

GROUPS = {"2,000 names or more": 2000, "500 to 1,999": 500, "100 to 499": 100, "less than 100": 0}  # that are learnt
HEAD = 16
COPY = "copy of the source"
OTHER_LETTERS = 5.0  # chrF of a copy, below which a language has other letters than English


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
    repeats: int = option(2, "runs of each of the models that are compared at equal parameters")
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
    sizes = [re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", each) for each in words.split(",")]
    if not all(sizes):
        raise ValueError(f"sizes is {words!r}, but each must be three numbers, such as 2x64x2")
    return [Size(*map(int, size.groups())) for size in sizes if size]


def equals(sizes: Sequence[Size]) -> list[tuple[Size, Size]]:
    """Pairs of a wide and a deep model with as many parameters."""
    ordered = sorted(sizes, key=lambda size: size.layers)
    return [pair for pair in itertools.combinations(ordered, 2) if pair[0].amount == pair[1].amount]


def name_of(size: Size, seed: int) -> str:
    """Of a run, in the results."""
    return f"{size}, run {seed + 1}" if seed else str(size)


# -- data --------------------------------------------------------------------------------------------------------------


def sampler(known: Corpus, settings: Settings, seed: int) -> Callable[[int], tuple[tuple[Tensor, Tensor], Tensor]]:
    """The n-th minibatch."""
    languages = list(known.learn)
    counts = torch.tensor([float(len(known.learn[language])) for language in languages])
    weights = counts ** (1 / settings.temperature)

    def batch(number: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        generator = torch.Generator().manual_seed(gapless.seed_of(seed, number, 0, 0))
        drawn = torch.multinomial(weights, settings.batch, replacement=True, generator=generator)
        places = (torch.rand(settings.batch, generator=generator) * counts[drawn]).long()
        ways = torch.randint(2, (settings.batch,), generator=generator)
        chosen = zip(drawn.tolist(), places.tolist(), ways.tolist(), strict=True)
        return known.batch([known.learn[languages[each]][place].both_ways()[way] for each, place, way in chosen])

    return batch


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


def learn(known: Corpus, settings: Settings, results: Results, size: Size, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
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
        batch = sampler(known, settings, seed)
        losses = train(results, pipe, optimizer, batch, settings.updates, clip=1.0, rate=rate)
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
    again = [(size, seed) for seed in range(1, settings.repeats) for pair in equals(sizes) for size in pair]
    for size, seed in [(size, 0) for size in sizes] + again:
        results.run(name_of(size, seed), partial(learn, known, settings, results, size, seed))


# -- what the figures say ----------------------------------------------------------------------------------------------


class Figures:
    """The results, asked by model, group of languages and direction. Models that have not run yet are left out."""

    def __init__(self, found: Found) -> None:
        self._runs, self._repeats = found["runs"], found["settings"]["repeats"]
        self.data = self._runs[COPY]
        known = [size for size in sizes_of(found["settings"]["sizes"]) if str(size) in self._runs]
        self.sizes = sorted(known, key=lambda size: self.of(size)["parameters"])
        self.names = [str(size) for size in self.sizes]
        self.everyone = [one for one, _ in sorted(self.data["learnt"].items(), key=lambda each: -each[1])]
        every = {group: [one for one in self.everyone if self._group(one) == group] for group in GROUPS}
        self.groups = {group: languages for group, languages in every.items() if languages}
        latin = {one for one in self.everyone if self.quality(COPY, [one]) >= OTHER_LETTERS}
        self.letters = {
            letters: {group: [one for one in some if (one in latin) == same] for group, some in self.groups.items()}
            for letters, same in (("Latin letters", True), ("other letters", False))
        }

    def _group(self, language: str) -> str:
        return next(group for group, least in GROUPS.items() if self.data["learnt"][language] >= least)

    @property
    def ends(self) -> tuple[Size, Size]:
        """The smallest model and the largest."""
        return self.sizes[0], self.sizes[-1]

    def runs_of(self, one: Size, other: Size) -> list[tuple[str, str]]:
        """The names of those that both have, in pairs."""
        pairs = [(name_of(one, seed), name_of(other, seed)) for seed in range(self._repeats)]
        return [pair for pair in pairs if all(name in self._runs for name in pair)]

    def of(self, run: Size | str) -> Any:
        return self._runs[str(run)]

    def quality(self, run: Size | str, languages: Sequence[str], way: str | None = None, which: int = 0) -> float:
        """Mean chrF, or exact names if `which` is 1."""
        ways = DIRECTIONS if way is None else (way,)
        return statistics.fmean(self.of(run)["grades"][way][one][which] for way in ways for one in languages)

    def gain(self, worse: Size | str, better: Size | str, languages: Sequence[str]) -> tuple[float, float]:
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
        """chrF in both directions, from data-rich to data-poor."""
        rows = []
        for group, languages in {**self.groups, "all languages": self.everyone}.items():
            rows.append((group, str(len(languages)), *self._cells(languages), self.gained(languages)))
        return ("training names", "languages", "copy", *self.names, "gain from first to last"), rows

    def by_letters(self) -> Table:
        """The gains of languages that share their letters with English, and of the others."""
        rows = []
        for group in self.groups:
            cells = []
            for letters in self.letters.values():
                languages = letters[group]
                cells += [str(len(languages)), self.gained(languages) if languages else ""]
            rows.append((group, *cells))
        headings = [f"{letters}: {what}" for letters in self.letters for what in ("languages", "gain")]
        return ("training names", *headings), rows

    def gained(self, languages: Sequence[str]) -> str:
        """From the smallest model to the largest."""
        gain, error = self.gain(*self.ends, languages)
        return f"{gain:+.1f} ± {error:.1f}" if len(languages) > 1 else f"{gain:+.1f}"

    def by_direction(self) -> Table:
        groups = {**self.groups, "all languages": self.everyone}
        rows = [
            (way, group, str(len(languages)), *self._cells(languages, way))
            for way, (group, languages) in itertools.product(DIRECTIONS, groups.items())
        ]
        return ("direction", "training names", "languages", "copy", *self.names), rows

    def by_language(self) -> Table:
        rows = [(one, f"{self.data['learnt'][one]:,}", *self._cells([one])) for one in self.everyone]
        return ("language", "training names", "copy", *self.names), rows

    def _cells(self, languages: Sequence[str], way: str | None = None) -> list[str]:
        return [f"{self.quality(run, languages, way):.1f}" for run in (COPY, *self.names)]

    def panels(self) -> list[curves.Panel]:
        groups = {"all languages": self.everyone, **self.groups}
        return [
            curves.Panel(group, f"{len(each)} languages", [[self.quality(size, each) for size in self.sizes]])
            for group, each in groups.items()
        ]


def rise(figures: Figures) -> list[str]:
    """Whether larger is better, for whom, and for whom most."""
    gains = [figures.gain(*figures.ends, languages) for languages in figures.groups.values()]
    risen = sum(gain > 2 * error for gain, error in gains)
    how = f"all {len(gains)}" if risen == len(gains) else f"{risen} of {len(gains)}"
    found = [f"From {figures.ends[0]} to {figures.ends[1]} quality rises for {how} groups of languages."]
    found.append(f"All languages: {most(figures, figures.groups)}.")
    found += [f"Languages with {letters}: {most(figures, groups)}." for letters, groups in figures.letters.items()]
    levels = [list(some) for _, some in itertools.groupby(figures.sizes, key=lambda size: size.amount)]
    fallen = [
        f"{larger} is worse than {smaller} for {group}"
        for below, above in itertools.pairwise(levels)
        for smaller, larger in itertools.product(below, above)
        for group, languages in figures.groups.items()
        if figures.gain(smaller, larger, languages)[0] < 0
    ]
    return [*found, f"Not every step up is better: {'; '.join(fallen)}."] if fallen else found


def most(figures: Figures, groups: Mapping[str, Sequence[str]]) -> str:
    """The group with the greatest gain, and whether it is the data-poorest."""
    gains = {group: figures.gain(*figures.ends, languages) for group, languages in groups.items() if languages}
    ordered = sorted(gains, key=lambda group: -gains[group][0])
    if not gains or gains[ordered[0]][0] <= 0:
        return "it does not rise"
    top, poorest = ordered[0], list(gains)[-1]
    told = f"it rises most for {'the data-poorest' if top == poorest else top} ({figures.gained(groups[top])} chrF)"
    if top != poorest:
        told += f", not for the data-poorest ({figures.gained(groups[poorest])})"
    if len(gains) > 1:
        (gain, error), (other, its_error) = (gains[group] for group in ordered[:2])
        if gain - other < 2 * (error**2 + its_error**2) ** 0.5:
            told += f". The next, {ordered[1]}, is within chance"
    return told


def deeper(figures: Figures) -> list[str]:
    """Models with as many parameters, compared in each run."""
    found = []
    for wide, deep in equals(figures.sizes):
        runs = figures.runs_of(wide, deep)
        gains = [figures.gain(*pair, figures.everyone) for pair in runs]
        sure = [(gain > 2 * error) - (gain < -2 * error) for gain, error in gains]
        verdict = "deeper and wider do not differ by more than chance"
        if len(set(sure)) == 1 and sure[0]:
            verdict = f"the {'deeper' if sure[0] > 0 else 'wider'} model is better"
        told = ", ".join(f"{gain:+.1f} ± {error:.1f}" for gain, error in gains)
        pairs = [
            f"{figures.of(narrow)['held_out']:.3f} against {figures.of(wider)['held_out']:.3f}"
            for wider, narrow in runs
        ]
        found.append(f"At equal parameters {verdict}: {deep} has {told} chrF against {wide}, run by run.")
        found.append(f"Their held-out losses: {', '.join(pairs)}.")
    return found


def copied(figures: Figures) -> str:
    """The best model against the baseline."""
    best, copy = (figures.quality(run, figures.everyone) for run in (figures.names[-1], COPY))
    verdict = "more" if best > copy else "less: it has not learnt enough to be of use"
    return f"A copy of the source has {copy:.1f} chrF. {figures.names[-1]} has {best:.1f}, which is {verdict}."


def report(found: Found) -> Report:
    settings, figures = found["settings"], Figures(found)
    data, best = figures.data, figures.names[-1]
    left = ", ".join(f"{count:,} {why}" for why, count in data["left_out"].items() if why != "all")
    missing = [str(size) for size in sizes_of(settings["sizes"]) if str(size) not in figures.names]
    return Report(
        [*rise(figures), *deeper(figures), copied(figures), *(f"{name} has not been run." for name in missing)],
        [figures.by_size(), figures.by_group(), figures.by_letters()],
        [
            f"{len(figures.everyone)} languages and English. Of {data['left_out']['all']:,} pairs {left} are left out.",
            f"{sum(data['learnt'].values()):,} pairs are for training, and {data['held_out']:,} held out by entity.",
            f"{data['asked']:,} test questions. Languages have equal weight in a mean; ± is its standard error.",
            f"Names have up to {settings['longest']} characters, in small letters.",
            "Quality is chrF, from 0 to 100, the mean of both directions where none is named.",
            "The last table separates scripts, since most data-rich languages here use another script than English.",
            f"Other letters: a copy of the source has less than {OTHER_LETTERS:g} chrF.",
            f"Languages are drawn with a temperature of {settings['temperature']:g}.",
            f"All models have width {settings['width']} and heads of {HEAD}. T(L, H, A) is GPipe's name for a size.",
            f"A run has {settings['updates']} minibatches of {settings['batch']} names, the same for all models.",
            "The tables show the first run of each model. Another differs by its first weights and minibatches.",
        ],
        [figures.of(size)["parameters"] / 1000 for size in figures.sizes],
        figures.panels(),
        ("thousand parameters", "chrF"),
        [
            figures.by_direction(),
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
        "2x8x1,1x16x2", width=8, updates=2, batch=4, longest=8, characters=80, asked=1, repeats=1, standards="iso15924"
    ),
    run=run,
    report=report,
)

if __name__ == "__main__":
    sys.exit(main(STUDY))
