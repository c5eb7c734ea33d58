"""Checkpoints of Trainer that are whole: a kill may leave one half written, and Trainer would fail at what is missing.

Trainer writes `trainer_state.json` last. So a checkpoint is whole if that file is, and one that is written once more
loses it first.
"""

import json
import re
from pathlib import Path
from typing import Any

from transformers.utils import logging

from gapless.errors import ConfigError

_STATE = "trainer_state.json"
_NAME = re.compile(r"checkpoint-(\d+)")
_logger = logging.get_logger(__name__)


def begin(checkpoint: Path) -> None:
    """It is about to be written, perhaps over one that is there."""
    (checkpoint / _STATE).unlink(missing_ok=True)


def resumed(asked: Any, folder: str) -> Any:
    """What Trainer is to resume from: as asked, or the last whole checkpoint before it in the folder of the run."""
    there = {int(found[1]): path for path in _entries(Path(folder)) if (found := _NAME.fullmatch(path.name))}
    if asked is True and there:
        last = max(there)
    elif isinstance(asked, str) and Path(asked).resolve() in (path.resolve() for path in there.values()):
        last = next(step for step, path in there.items() if path.resolve() == Path(asked).resolve())
    else:
        return asked
    whole = [step for step in sorted(there) if step <= last and _is_whole(there[step])]
    if not whole:
        raise ConfigError(
            f"{there[last]} is incomplete, and there is no complete checkpoint before it: start a new run"
        )
    if whole[-1] != last:
        _logger.warning(f"{there[last]} is incomplete: training resumes from {there[whole[-1]]}")
    return str(there[whole[-1]])


def _entries(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []


def _is_whole(checkpoint: Path) -> bool:
    try:
        json.loads((checkpoint / _STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True
