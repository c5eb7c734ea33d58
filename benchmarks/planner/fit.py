"""Will it fit? On a GPU, with limits around what is predicted, both ways.

    planned   the limit is what was predicted, or a little more: the run must not fail
    refused   the limit is a little less than predicted: with 15% less than that the run must fail

All devices of a pipeline are on one GPU, each with a stream of its own and copies of what comes from the others, so the
limit is the sum of what they are predicted to take. What each holds at its own peak is read from the allocator's
history, stream by stream: that is what a GPU of its own would have to hold. Together they may hold less, since they
need not have their peaks at once: what runs that way in a limit that is below the sum of their peaks does not count as
refused in vain.

Torch's allocator runs with expandable segments. Without them it loses up to a quarter of what comes and goes.
"""

import gc
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.planner import subjects
from benchmarks.planner.apart import Apart
from benchmarks.planner.prediction import OVER, UNDER, plans_for
from benchmarks.planner.subjects import Subject
from benchmarks.runner.findings import Found, Table, tabulated
from benchmarks.runner.rounds import Progress
from gapless import Pipeline
from gapless.errors import ConfigError
from gapless.plan.plan import Plan
from gapless.plan.profile.meter import clear_workspaces, has_expandable_segments

ROOM = 0.15
_ABOVE = (1.0, 1.03)  # of what was predicted: planned
_BELOW = (0.99, 0.95)  # refused
_SETTINGS = {2: "1f1b 8, gpipe 4, zb-h1 8", 4: "1f1b 8 remat", 1: "1f1b 4"}  # by the number of devices
SUBJECTS: Sequence[Callable[[], Subject]] = (
    lambda: subjects.small_gpt(width=1024, depth=8, vocab=16000, length=512, samples=4),
    lambda: subjects.small_resnet(50, width=64, side=224, samples=16),
    lambda: subjects.small_transformer(width=512, depth=6, vocab=8000, length=256, samples=8),
    lambda: subjects.small_unet(depth=4, width=64, side=256, samples=8),
)


def run(*, seconds: float, progress: Progress) -> tuple[list[Found], Table]:
    """A row for each model and setting, with the limits that it was tried in; and how often a plan or a refusal was
    wrong.
    """
    if not torch.cuda.is_available():
        raise ConfigError("--fit measures on an NVIDIA GPU, and there is none here: leave it out")
    gpu = "cuda:0"
    rows: list[dict[str, Any]] = []
    with _expandable_segments(gpu):
        for make in SUBJECTS:
            torch.manual_seed(0)
            subject = make()
            progress(f"{subject.name}: profile")
            profile = subject.profile(gpu, 1, seconds)
            for devices, wanted in _SETTINGS.items():
                for plan in plans_for(profile, devices, wanted):
                    progress(f"{subject.name}: {plan.recipe}, {devices} devices")
                    rows.append(_row(subject, plan, gpu, lost=profile.reserved))
    tries = [try_ for row in rows for try_ in row["tries"]]
    failed = sum(try_["kind"] == "planned" and not try_["ran"] for try_ in tries)
    roomy = sum(try_["kind"] == "refused" and try_["fits"] for try_ in tries)
    right = sum(-UNDER <= row["difference"] <= OVER for row in rows)
    columns = f"{subjects.COLUMNS} | predicted:GiB.3 | live=predicted_live:GiB.3 | measured=peaks:GiB.3"
    columns += " | =difference:+% | together=allocated:GiB.3 | reserved:GiB.3"
    columns += " | planned ran=planned | refused ran=refused"
    verdict = f"planned and failed: {failed}, refused though it fits in {1 - ROOM:.0%} of the limit: {roomy}; "
    verdict += f"peaks within -{UNDER:.0%} and +{OVER:.0%}: {right} of {len(rows)}"
    title = f"fit\n{torch.cuda.get_device_name(gpu)}: {len(tries)} limits around what is predicted"
    return rows, tabulated(title, rows, columns, verdict, left=2)


@contextmanager
def _expandable_segments(gpu: str) -> Iterator[None]:
    before = has_expandable_segments(torch.device(gpu))
    _empty()
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    try:
        yield
    finally:
        _empty()
        torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{before}")


def _row(subject: Subject, plan: Plan, gpu: str, lost: int) -> dict[str, Any]:
    """`lost`: what the allocator loses of each device beside its slack."""
    predicted = sum(held.total for held in plan.memory)
    live = sum(held.total - held.slack - lost for held in plan.memory)
    free = _run(subject, plan, gpu, watched=True)
    assert free, "it fits without a limit"
    limits = [("planned", share, share * predicted) for share in _ABOVE]
    limits += [("refused", share, (1 - ROOM) * share * predicted) for share in _BELOW]
    tries: list[dict[str, Any]] = []
    for kind, share, limit in limits:
        ran = _run(subject, plan, gpu, limit) is not None
        # Devices of one GPU may run in less than devices of their own need: not all have their peaks at once.
        tries.append({"kind": kind, "share": share, "ran": ran, "fits": ran and free["peaks"] <= limit})
    found = {"predicted": predicted, "predicted_live": live, "difference": live / free["peaks"] - 1, "tries": tries}
    shown = {}
    for kind in ("planned", "refused"):
        own = [try_["ran"] for try_ in tries if try_["kind"] == kind]
        shown[kind] = f"{sum(own)} of {len(own)}"
    return {**subjects.told(subject, plan), **found, **shown, **free}


def _run(
    subject: Subject, plan: Plan, gpu: str, limit: float | None = None, *, watched: bool = False
) -> dict[str, int] | None:
    """Two steps with an optimizer, in so many bytes: what was held at the most, or None where that did not suffice."""
    _empty()
    total = torch.cuda.get_device_properties(gpu).total_memory
    torch.cuda.set_per_process_memory_fraction(1.0 if limit is None else min(1.0, limit / total), gpu)
    torch.cuda.reset_peak_memory_stats(gpu)
    if watched:
        torch.cuda.memory._record_memory_history("all", context=None)
    pipe: Pipeline | None = None
    try:
        pipe = subject.pipeline(plan, Apart([gpu] * plan.num_devices))
        optimizer = torch.optim.AdamW(pipe.parameters(), foreach=False)
        inputs, target = subject.batch(plan.minibatch)
        for _ in range(2):
            pipe.step(inputs, target)
            optimizer.step()
            # Gradients stay: what a step adds to is there from the first step on.
            pipe.zero_grad(set_to_none=False)
        torch.cuda.synchronize(gpu)
        found = {"allocated": torch.cuda.max_memory_allocated(gpu), "reserved": torch.cuda.max_memory_reserved(gpu)}
        if watched:
            history = torch.cuda.memory._snapshot()["device_traces"][torch.device(gpu).index]
            found["peaks"] = _peaks(history, torch.cuda.current_stream(gpu).cuda_stream)
        return found
    except torch.OutOfMemoryError:
        return None
    finally:
        if pipe is not None:
            pipe.close()
        del pipe
        if watched:
            torch.cuda.memory._record_memory_history(None)
        torch.cuda.set_per_process_memory_fraction(1.0, gpu)


def _peaks(history: Sequence[Mapping[str, Any]], caller: int) -> int:
    """What each stream held at its own peak, added up; of the caller's what stays, and not what its optimizer takes
    between two steps.
    """
    held: dict[int, int] = defaultdict(int)
    most: dict[int, int] = defaultdict(int)
    for event in history:
        stream = event["stream"]
        if event["action"] == "alloc":
            held[stream] += event["size"]
            most[stream] = max(most[stream], held[stream])
        elif event["action"] == "free_requested":
            held[stream] -= event["size"]
    return held[caller] + sum(size for stream, size in most.items() if stream != caller)


def _empty() -> None:
    """Nothing of an earlier run is left, nor what the libraries keep for its streams."""
    gc.collect()
    torch.cuda.synchronize()
    clear_workspaces()
    torch.cuda.empty_cache()
