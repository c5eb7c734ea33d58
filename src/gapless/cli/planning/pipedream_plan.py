"""`gapless plan --no-flush`: stages and replicas for training without a flush, as PipeDream's planner finds them."""

from itertools import accumulate
from typing import Any

from gapless import units
from gapless.plan.asynchronous.replicate import Replication, replicate, versions_kept
from gapless.plan.asynchronous.stage_times import FORMS
from gapless.plan.profile.profile import Profile
from gapless.view import text


def planned(profile: Profile, devices: int, form: str, memory: int | None) -> tuple[str, dict[str, Any]]:
    """The report, and the same for programs."""
    found = replicate(profile, devices, form=FORMS[form], memory=memory)
    return _report(profile, found, form), _as_json(profile, found, form)


def _stages(profile: Profile, found: Replication) -> list[dict[str, Any]]:
    ends, devices = list(accumulate(found.partition)), list(accumulate(found.replicas))
    return [
        {
            "layers": count,
            "devices": copies,
            "seconds_on_one": sum(layer.work for layer in profile.layers[end - count : end]),
            "weight_versions": versions_kept(found.num_devices, behind - copies, copies),
            "memory": held,
        }
        for end, count, behind, copies, held in zip(
            ends, found.partition, devices, found.replicas, found.memory, strict=True
        )
    ]


def _report(profile: Profile, found: Replication, form: str) -> str:
    rows = [
        (
            str(number),
            str(stage["layers"]),
            str(stage["devices"]),
            units.show_seconds(stage["seconds_on_one"]),
            str(stage["weight_versions"]),
            units.show_bytes(stage["memory"]),
        )
        for number, stage in enumerate(_stages(profile, found))
    ]
    headings = ("stage", "layers", "devices", "time on one", "weight versions", "memory")
    alone = sum(layer.work for layer in profile.layers)
    told = f"{units.show_seconds(found.seconds)} a minibatch, {alone / found.seconds:.3g} times as fast as one device"
    if found.seconds > found.slowest:
        told += (
            f"; the slowest stage or hop takes {units.show_seconds(found.slowest)}, but with {found.in_flight} "
            "minibatches in flight per first device their round trip sets the pace"
        )
    counted = {"ring": "a ring sums gradients", "pipedream": "times are counted as PipeDream's own optimizer does"}
    size = f"{units.show_count(len(profile.layers), 'layer')} on {units.show_count(found.num_devices, 'device')}"
    head = f"{profile.name or 'model'}: {size}, without a flush; {counted[form]}"
    drawn = f"gapless show pipedream --devices {found.num_devices} --replicas {','.join(map(str, found.replicas))}"
    return f"{head}\n\n{text.table(headings, rows, left=0)}\n\n{told}\nto see it: {drawn}"


def _as_json(profile: Profile, found: Replication, form: str) -> dict[str, Any]:
    return {
        "profile": profile.name,
        "form": form,
        "seconds": found.seconds,
        "slowest": found.slowest,
        "in_flight": found.in_flight,
        "partition": list(found.partition),
        "replicas": list(found.replicas),
        "stages": _stages(profile, found),
    }
