"""Words and names in over a hundred languages, each with its English: pycountry's catalogues.

A catalogue translates the names of an ISO standard: countries, their subdivisions, languages and families of them,
currencies, scripts. Some languages have 15,000 entries and others less than a hundred.

What is held out is held out everywhere. Names of one entity belong together: `Bolivia` is also `Plurinational State of
Bolivia`, and a language and a script may have one name. If one of them is held out, all are, in all languages and all
catalogues.
"""

import gettext
import hashlib
import json
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

import gapless

PADDING, START, END = 0, 1, 2
_NAMES = ("name", "official_name", "common_name", "inverted_name")


@dataclass(frozen=True)
class Pair:
    """A name in some language, and in English."""

    language: str
    foreign: str
    english: str

    def both_ways(self) -> tuple["Task", "Task"]:
        there = Task(self.language, "en", self.foreign, self.english)
        return there, Task("en", self.language, self.english, self.foreign)


@dataclass(frozen=True)
class Task:
    """To translate `source` into `target`."""

    source_language: str
    target_language: str
    source: str
    target: str

    @property
    def language(self) -> str:
        """The one that is not English."""
        return self.source_language if self.target_language == "en" else self.target_language


@dataclass(frozen=True)
class Corpus:
    """Pairs to learn from and pairs to be asked, by language, and how many of all pairs were left out, and why."""

    learn: dict[str, list[Pair]]
    ask: dict[str, list[Pair]]
    left_out: dict[str, int]
    characters: tuple[str, ...]
    longest: int

    @cached_property
    def tokens(self) -> dict[str, int]:
        """Characters, and a tag for each language."""
        names = [*self.characters, *(f"<{language}>" for language in ("en", *self.learn))]
        return {name: number for number, name in enumerate(names, start=END + 1)}

    @property
    def vocabulary(self) -> int:
        return END + 1 + len(self.tokens)

    def batch(self, tasks: Sequence[Task]) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Source and target so far, and the target: what a transformer learns from."""
        tags = [[self.tokens[f"<{name}>"] for name in (task.source_language, task.target_language)] for task in tasks]
        sources = [[*tag, *self._ids(task.source)] for tag, task in zip(tags, tasks, strict=True)]
        targets = [[*self._ids(task.target), END] for task in tasks]
        # One shape for all, so that a pipeline traces the model once.
        source = _padded(sources, self.longest + 2)
        given = _padded([[START, *target[:-1]] for target in targets], self.longest + 1)
        return (source, given), _padded(targets, self.longest + 1)

    def text(self, ids: Iterable[int]) -> str:
        """Up to the end."""
        names, found = list(self.tokens), []
        for number in ids:
            if number <= END:
                break
            found.append(names[number - END - 1])
        return "".join(found)

    def _ids(self, text: str) -> list[int]:
        return [self.tokens[character] for character in text]


def _padded(rows: Sequence[Sequence[int]], length: int) -> Tensor:
    return torch.tensor([[*row, *([PADDING] * (length - len(row)))] for row in rows])


def corpus(*, longest: int, characters: int, held_out: float = 0.15, standards: str = "*") -> Corpus:
    """Of all catalogues. Text is in small letters and decomposed, so that `é` is `e` and an accent.

    longest      characters in a name; longer ones are left out
    characters   how many different ones there are; names with rarer ones are left out
    held_out     the share of entities
    standards    those whose catalogues are read, as a pattern
    """
    pairs = list(dict.fromkeys(_pairs(standards)))
    if not pairs:
        raise ValueError(f"standards is {standards!r}, but no catalogue of pycountry has such a name: try iso639*")
    left_out = Counter({"all": len(pairs)})
    different = [pair for pair in pairs if pair.foreign != pair.english]
    left_out["identical to English"] = len(pairs) - len(different)
    short = [pair for pair in different if max(len(pair.foreign), len(pair.english)) <= longest]
    left_out["too long"] = len(different) - len(short)
    counted = Counter(character for pair in short for character in pair.foreign + pair.english)
    known = {character for character, _ in sorted(counted.items(), key=lambda each: (-each[1], each[0]))[:characters]}
    kept = [pair for pair in short if known.issuperset(pair.foreign + pair.english)]
    left_out["with rare characters"] = len(short) - len(kept)
    entities = _entities()
    learn: dict[str, list[Pair]] = {}
    ask: dict[str, list[Pair]] = {}
    for pair in kept:
        asked = _share(entities.get(pair.english, pair.english)) < held_out
        (ask if asked else learn).setdefault(pair.language, []).append(pair)
    both = sorted(learn.keys() & ask.keys())
    left_out["of languages with too few names"] = sum(
        len(each) for part in (learn, ask) for language, each in part.items() if language not in both
    )
    return Corpus(
        {language: learn[language] for language in both},
        {language: ask[language] for language in both},
        dict(left_out),
        tuple(sorted(known)),
        longest,
    )


def _folder(name: str) -> Path:
    try:
        import pycountry
    except ImportError as error:
        raise gapless.GaplessError("the catalogues come with pycountry: pip install 'gapless[studies]'") from error
    return Path(pycountry.__file__).parent / name


def _plain(text: str) -> str:
    return unicodedata.normalize("NFD", " ".join(text.split()).casefold())


def _pairs(standards: str) -> Iterator[Pair]:
    for file in sorted(_folder("locales").glob(f"*/LC_MESSAGES/{standards}.mo")):
        language = file.parent.parent.name
        if language == "en":
            continue
        with file.open("rb") as opened:
            catalogue = gettext.GNUTranslations(opened)._catalog  # type: ignore[attr-defined]
        for english, foreign in catalogue.items():
            if isinstance(english, str) and english and foreign.strip():
                yield Pair(language, _plain(foreign), _plain(english))


def _entities() -> dict[str, str]:
    """For each name in English the one that stands for its entity: names of one entry of a standard are joined."""
    leader: dict[str, str] = {}

    def find(name: str) -> str:
        while leader.setdefault(name, name) != name:
            name = leader[name]
        return name

    for file in sorted(_folder("databases").glob("*.json")):
        for entries in json.loads(file.read_text("utf-8")).values():
            for entry in entries:
                first, *others = [_plain(entry[key]) for key in _NAMES if key in entry] or [""]
                for other in others:
                    leader[find(other)] = find(first)
    return {name: find(name) for name in leader}


def _share(entity: str) -> float:
    """A number from 0 to 1 that depends on the entity alone."""
    return int.from_bytes(hashlib.sha256(entity.encode()).digest()[:4], "big") / 2**32
