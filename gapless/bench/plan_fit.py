"""Will it fit? On a GPU, with limits around what is predicted, both ways.

    planned   the limit is what was predicted, or a little more: the run must not fail
    refused   the limit is a little less than predicted: with 15% less than that the run must fail

All devices of a pipeline are on one GPU, each with a stream of its own, and the allocator gives no block of one stream
to another: together they take what each takes at its own peak.
"""

import copy
import gc
from collections.abc import Callable
from typing import Any

import torch

from gapless.bench.plan_settings import Subject, planned, small_gpt, small_resnet
from gapless.bench.rounds import Progress
from gapless.errors import ConfigError
from gapless.pipeline import Pipeline
from gapless.plan.plan import Plan
from gapless.view import text

ROOM = 0.15
OVER, UNDER = 0.10, 0.05
_ABOVE = (1.0, 1.03)  # of what was predicted: planned
_BELOW = (0.99, 0.95)  # refused
_SETTINGS = (
    ("1f1b", 2, 8, False),
    ("1f1b", 4, 8, True),
    ("gpipe", 2, 4, False),
    ("zb-h1", 2, 8, False),
    ("1f1b", 1, 4, False),
)


def subjects() -> list[Callable[[], Subject]]:
    return [
        lambda: small_gpt(width=1024, depth=8, vocab=16000, length=512, samples=4),
        lambda: small_resnet(50, width=64, side=224, samples=16),
    ]


def run(*, seconds: float, progress: Progress) -> dict[str, Any]:
    if not torch.cuda.is_available():
        raise ConfigError("--fit measures on an NVIDIA GPU, and there is none here: leave it out")
    gpu = "cuda:0"
    rows: list[dict[str, Any]] = []
    for make in subjects():
        torch.manual_seed(0)
        subject = make()
        profiles: dict[int, Any] = {}
        for schedule, devices, M, remat in _SETTINGS:
            progress(f"{subject.name}: {schedule}, {devices} devices")
            if devices not in profiles:
                profiles[devices] = subject.profile(gpu, 1, seconds)
            plan = planned(profiles[devices], devices, schedule, M, remat=remat)
            rows.append(_row(subject, plan, gpu))
    tries = [try_ for row in rows for try_ in row["tries"]]
    return {
        "rows": rows,
        "tries": len(tries),
        "failed": sum(try_["kind"] == "planned" and not try_["ran"] for try_ in tries),
        "roomy": sum(try_["kind"] == "refused" and try_["ran"] for try_ in tries),
        "peaks_right": sum(-UNDER <= row["difference"] <= OVER for row in rows),
        "device": torch.cuda.get_device_name(gpu),
    }


def _row(subject: Subject, plan: Plan, gpu: str) -> dict[str, Any]:
    predicted = sum(held.total for held in plan.memory)
    total = torch.cuda.get_device_properties(gpu).total_memory
    ran, peak, reserved = _run(subject, plan, gpu, total)
    assert ran, "it fits without a limit"
    limits = [("planned", share, share * predicted) for share in _ABOVE]
    limits += [("refused", share, (1 - ROOM) * share * predicted) for share in _BELOW]
    tries = [{"kind": kind, "share": share, "ran": _run(subject, plan, gpu, limit)[0]} for kind, share, limit in limits]
    return {
        "model": subject.name,
        "schedule": plan.recipe,
        "devices": plan.num_devices,
        "microbatches": plan.microbatches,
        "remat": "stage" in plan.remat,
        "predicted": predicted,
        "without_slack": predicted - sum(held.slack for held in plan.memory),
        "parts": {key: sum(getattr(held, key) for held in plan.memory) for key in _PARTS},
        "measured": peak,
        "reserved": reserved,
        "difference": predicted / peak - 1,
        "tries": tries,
    }


_PARTS = ("parameters", "gradients", "optimizer_state", "activations", "buffers", "workspace", "slack", "reserved")


def _run(subject: Subject, plan: Plan, gpu: str, limit: float) -> tuple[bool, int, int]:
    """Two steps with an optimizer, in so many bytes: whether they ran, and the most that was allocated and reserved."""
    _empty()
    total = torch.cuda.get_device_properties(gpu).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), gpu)
    torch.cuda.reset_peak_memory_stats(gpu)
    pipe: Pipeline | None = None
    try:
        layers = copy.deepcopy(list(subject.layers))
        pipe = subject.pipeline(plan, [gpu] * plan.num_devices, layers)
        optimizer = torch.optim.AdamW(pipe.parameters(), foreach=False)
        inputs, target = subject.batch(plan.minibatch)
        for _ in range(2):
            pipe.step(inputs, target)
            optimizer.step()
            # Gradients stay: what a step adds to is there from the first step on.
            pipe.zero_grad(set_to_none=False)
        torch.cuda.synchronize(gpu)
        return True, torch.cuda.max_memory_allocated(gpu), torch.cuda.max_memory_reserved(gpu)
    except torch.OutOfMemoryError:
        return False, 0, 0
    finally:
        if pipe is not None:
            pipe.close()
        del pipe
        torch.cuda.set_per_process_memory_fraction(1.0, gpu)


def _empty() -> None:
    """Nothing of an earlier run is left, nor what the libraries keep for its streams."""
    gc.collect()
    torch.cuda.synchronize()
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()
    torch.cuda.empty_cache()


def report(found: dict[str, Any]) -> str:
    headings = (
        "model",
        "schedule",
        "K",
        "M",
        "remat",
        "predicted",
        "allocated",
        "",
        "reserved",
        "planned ran",
        "refused ran",
    )
    rows = [
        (
            row["model"],
            row["schedule"],
            str(row["devices"]),
            str(row["microbatches"]),
            "yes" if row["remat"] else "-",
            *(f"{row[key] / 2**30:.3f} GiB" for key in ("predicted", "measured")),
            f"{100 * row['difference']:+.1f}%",
            f"{row['reserved'] / 2**30:.3f} GiB",
            *(_ran(row["tries"], kind) for kind in ("planned", "refused")),
        )
        for row in found["rows"]
    ]
    return "\n".join(
        [
            f"{found['device']}: {found['tries']} limits around what is predicted",
            "",
            text.table(headings, rows, left=2),
            "",
            (
                f"planned and failed: {found['failed']}, refused though it fits in {1 - ROOM:.0%} of the limit: "
                f"{found['roomy']}; peaks within -{UNDER:.0%} and +{OVER:.0%}: {found['peaks_right']} of "
                f"{len(found['rows'])}"
            ),
        ]
    )


def _ran(tries: list[dict[str, Any]], kind: str) -> str:
    mine = [try_["ran"] for try_ in tries if try_["kind"] == kind]
    return f"{sum(mine)} of {len(mine)}"
