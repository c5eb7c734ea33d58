"""Is the planned partition the best? Unbalanced models on two devices: every cut there is, measured.

First every cut runs a few times; then the planned one, the one that counts layers and the quickest of the first part
take turns for longer.
"""

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks.planner import subjects
from benchmarks.planner.subjects import Subject
from benchmarks.runner.rounds import Progress, finals, median, ratio
from benchmarks.runner.told import Table, cell, tabulated
from gapless.plan.cut.partition import equal_counts
from gapless.plan.profile.machine import Mesh
from gapless.plan.profile.profile import Profile
from gapless.plan.search.search import search
from gapless.plan.search.search_options import SearchOptions

NEAR = 0.03  # how much slower than the best of all cuts the planned one may be
_DEVICES, _MICROBATCHES = 2, 4
_FINALISTS = 3

SUBJECTS: Sequence[Callable[[], Subject]] = (
    lambda: subjects.small_gpt(width=64, depth=5, vocab=6000, length=32),
    lambda: subjects.small_resnet(101, side=128, samples=2),
    subjects.small_unet,
    subjects.small_transformer,
    subjects.random_layers,
)


def run(*, rounds: int, seconds: float, quick: bool, progress: Progress) -> dict[str, Any]:
    """A row for each model; `quick` is one small model."""
    rows = []
    for make in [lambda: subjects.random_layers(4, samples=4)] if quick else SUBJECTS:
        subject = make()
        progress(f"measuring {subject.name}")
        rows.append(_row(subject, subject.profile("cpu", _DEVICES, seconds), rounds, progress))
    return {"rows": rows}


def _row(subject: Subject, profile: Profile, rounds: int, progress: Progress) -> dict[str, Any]:
    count = len(subject.layers)
    # As `make_plan` would cut it.
    wanted = SearchOptions(_MICROBATCHES, ["1f1b"], mesh=Mesh(1, _DEVICES), time_limit=None)
    minibatch = _MICROBATCHES * profile.samples
    chosen = _shown(search(profile, _DEVICES, wanted, minibatch).best.partition)
    equal = _shown(equal_counts(count, _DEVICES))
    with contextlib.ExitStack() as stack:
        made = partial(subjects.planned, profile, _DEVICES, "1f1b", _MICROBATCHES)
        all_cuts = [(first, count - first) for first in range(1, count)]
        contestants = {_shown(cut): subject.contestant(stack, made(partition=cut)) for cut in all_cuts}
        _, seconds = finals(contestants, [chosen, equal], _FINALISTS, rounds, progress)
    best = min(seconds, key=lambda cut: median(seconds[cut]))
    return {
        "model": subject.name,
        "layers": count,
        "planned": chosen,
        "equal": equal,
        "best": best,
        "seconds": {cut: median(values) for cut, values in seconds.items()},
        "faster_than_equal": ratio(seconds[equal], seconds[chosen]),
        "slower_than_best": ratio(seconds[chosen], seconds[best]) - 1,
        "rounds": seconds,
    }


def _shown(cut: Sequence[int]) -> str:
    return "|".join(map(str, cut))


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """The planned cut of each model beside equal counts and the best cut."""
    shown = [
        row | {key: f"{row[key]} {cell(row['seconds'][row[key]], 'ms')}" for key in ("equal", "planned", "best")}
        for row in rows
    ]
    title = (
        f"cuts\n{_DEVICES} devices, 1f1b, {_MICROBATCHES} microbatches; meant: faster than equal counts, and within "
        f"{NEAR:.0%} of the best cut"
    )
    columns = "model | layers | equal | planned | best of all=best | faster than equal=faster_than_equal:x"
    return tabulated(title, shown, f"{columns} | to the best=slower_than_best:+%")
