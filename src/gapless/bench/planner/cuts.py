"""Is the planned partition the best? Unbalanced models on two devices: every cut there is, measured.

First every cut runs a few times; then the planned one, the one that counts layers and the quickest of the first part
take turns for longer.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gapless.bench.planner.settings import (
    Subject,
    planned,
    random_layers,
    small_gpt,
    small_resnet,
    small_transformer,
    small_unet,
    threads_hop,
)
from gapless.bench.rounds import Contestant, Progress, median, ratio, take_turns, timed
from gapless.plan.cut.partition import equal_counts
from gapless.plan.profile.profile import Profile
from gapless.plan.search.search import search
from gapless.view import text

NEAR = 0.03  # how much slower than the best of all cuts the planned one may be
_DEVICES, _MICROBATCHES = 2, 4
_FINALISTS = 3

SUBJECTS: Mapping[str, Callable[[], Subject]] = {
    "gpt": lambda: small_gpt(width=64, depth=5, vocab=6000, length=32),
    "resnet": lambda: small_resnet(101, side=128, samples=2),
    "unet": small_unet,
    "transformer": small_transformer,
    "random": random_layers,
}


def run(
    *, rounds: int, seconds: float, quick: bool, progress: Progress, names: Sequence[str] = tuple(SUBJECTS)
) -> dict[str, Any]:
    rows = []
    for subject in [random_layers(4, samples=4)] if quick else [SUBJECTS[name]() for name in names]:
        progress(f"measuring {subject.name}")
        profile = threads_hop(subject.profile("cpu", _DEVICES, seconds))
        rows.append(_row(subject, profile, rounds, progress))
    return {"rows": rows, "near": NEAR}


def _row(subject: Subject, profile: Profile, rounds: int, progress: Progress) -> dict[str, Any]:
    count = len(subject.layers)
    chosen = _chosen(profile)
    equal = equal_counts(count, _DEVICES)
    every = [(first, count - first) for first in range(1, count)]
    with _Pipelines(subject, profile) as pipelines:
        first = take_turns({str(cut): pipelines.step(cut) for cut in every}, 2, progress)
        quickest = sorted(every, key=lambda cut: min(first[str(cut)]))[:_FINALISTS]
        final = list(dict.fromkeys([chosen, equal, *quickest]))
        seconds = take_turns({str(cut): pipelines.step(cut) for cut in final}, rounds, progress, warmup=0)
    best = min(final, key=lambda cut: median(seconds[str(cut)]))
    return {
        "model": subject.name,
        "layers": count,
        "planned": list(chosen),
        "equal": list(equal),
        "best": list(best),
        "seconds": {str(cut): median(seconds[str(cut)]) for cut in final},
        "faster_than_equal": ratio(seconds[str(equal)], seconds[str(chosen)]),
        "slower_than_best": ratio(seconds[str(chosen)], seconds[str(best)]) - 1,
        "rounds": seconds,
    }


def _chosen(profile: Profile) -> tuple[int, ...]:
    """As `make_plan` would cut it."""
    minibatch = _MICROBATCHES * profile.samples
    found = search(profile, _DEVICES, microbatches=_MICROBATCHES, minibatch=minibatch, recipes=["1f1b"], replicas=False)
    return found.best.partition


class _Pipelines:
    """One for each cut, made when it is needed."""

    def __init__(self, subject: Subject, profile: Profile) -> None:
        self._subject, self._profile = subject, profile
        self._made: dict[tuple[int, ...], Any] = {}

    def __enter__(self) -> "_Pipelines":
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._made.values():
            pipe.close()

    def step(self, cut: tuple[int, ...]) -> Contestant:
        if cut not in self._made:
            plan = planned(self._profile, _DEVICES, "1f1b", _MICROBATCHES, partition=cut)
            layers = copy.deepcopy(list(self._subject.layers))
            self._made[cut] = self._subject.pipeline(plan, ["cpu"] * _DEVICES, layers)
        pipe = self._made[cut]
        inputs, target = self._subject.batch(_MICROBATCHES * self._subject.samples)
        return timed(lambda: pipe.step(inputs, target))


def report(found: dict[str, Any]) -> str:
    headings = ("model", "layers", "equal", "planned", "best of all", "to equal", "to the best")
    rows = [
        (
            row["model"],
            str(row["layers"]),
            *(f"{_shown(row[key])} {1000 * row['seconds'][str(tuple(row[key]))]:.1f} ms" for key in _KEYS),
            f"{row['faster_than_equal']:.2f}x faster",
            f"{100 * row['slower_than_best']:+.1f}%",
        )
        for row in found["rows"]
    ]
    return "\n".join(
        [
            (
                f"{_DEVICES} devices, 1f1b, {_MICROBATCHES} microbatches; meant: faster than equal counts, and within "
                f"{found['near']:.0%} of the best cut"
            ),
            "",
            text.table(headings, rows, left=1),
        ]
    )


_KEYS = ("equal", "planned", "best")


def _shown(cut: Sequence[int]) -> str:
    return "|".join(map(str, cut))
