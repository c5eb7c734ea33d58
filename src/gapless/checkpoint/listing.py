"""The checkpoints of a run: those in its folder that are called after their steps. Without torch."""

import os
import re
from pathlib import Path
from typing import NamedTuple

from gapless.checkpoint.manifest import NAME, read_manifest
from gapless.errors import CheckpointError, printable

LATEST = "latest"
_NAME = re.compile(r"step-(\d{8,18})")


class Saved(NamedTuple):
    """A checkpoint in a run's folder. `fault` says why it can't be loaded, if that is known from its manifest."""

    path: Path
    step: int
    metric: float | None = None
    time: float = 0.0  # seconds since 1970
    size: int = 0  # in bytes
    kind: str = ""
    fault: str = ""


def name_of(step: int) -> str:
    """Of the checkpoint of a step; in order of steps they are in order of names."""
    return f"step-{step:08d}"


def saved_in(folder: Path, after: int = -1) -> list[Saved]:
    """Those after a step, in the order of their steps. What another program has put there is left out."""
    found = []
    for entry in os.scandir(folder):
        match = _NAME.fullmatch(entry.name)
        if match and int(match[1]) > after and (entry.is_symlink() or entry.is_dir()):
            path = Path(entry.path)
            each = _led_out(path, int(match[1])) if entry.is_symlink() else looked_at(path, int(match[1]))
            if not each.fault or os.path.lexists(each.path):  # a run at work may have removed it meanwhile
                found.append(each)
    return sorted(found, key=lambda each: each.step)


def _led_out(path: Path, step: int) -> Saved:
    shown = printable(f"{path} is a link, to {os.readlink(path)}")
    return Saved(path, step, fault=f"{shown}: name the checkpoint itself")


def looked_at(path: Path, step: int = 0) -> Saved:
    """A checkpoint, of which this is the step if its manifest can't say."""
    try:
        manifest = read_manifest(path)
        size = manifest.size + (path / NAME).stat().st_size
    except (CheckpointError, OSError) as error:
        return Saved(path, step, fault=str(error))
    facts = manifest.facts
    return Saved(path, manifest.step, manifest.metric, float(facts["time"]), size, str(facts["kind"]))
