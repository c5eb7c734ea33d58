"""One action of one microbatch passes few files and few calls, so that a reader can hold its way in mind, and small
layers are not all overhead. What is counted is calls, which are the same every time, and no time.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import gapless
from gapless.zoo.gpt import gpt, next_token_loss
from tests.run.forked import Launch

_SOURCES = str(Path(gapless.__file__).parent)
_MICROBATCHES = 4
Counts = dict[str, tuple[int, int]]  # by action how many files it passes, and in how many calls


def _counted(call: Callable[[], object], action: str, counts: Counts) -> Callable[[], None]:
    def run() -> None:
        files: list[str] = []

        def note(frame: Any, event: str, _: Any) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(_SOURCES):
                files.append(frame.f_code.co_filename)

        sys.setprofile(note)
        try:
            call()
        finally:
            sys.setprofile(None)
        counts[action] = len({*files}), len(files)

    return run


def _actions(**where: Any) -> Counts:
    """Those of a small GPT under zb-h1, on two devices, when all is known of it; not those that are a step's first."""
    torch.manual_seed(0)
    model = gpt(vocab=16, width=16, depth=2, heads=2, context=8)
    tokens, counts = torch.randint(0, 16, (_MICROBATCHES, 8)), Counts()
    with gapless.Pipeline(
        model, schedule="zb-h1", microbatches=_MICROBATCHES, partition=(2, 3), loss=next_token_loss, **where
    ) as pipe:
        for _ in range(5):
            pipe.step(tokens, tokens)
        program = pipe._staged.program(_MICROBATCHES, inference=False)
        for device, calls in program.calls.items():
            actions = map(str, program.schedule.rows[device])
            calls[:] = [_counted(call, action, counts) for call, action in zip(calls, actions, strict=True)]
        pipe.step(tokens, tokens)
    return {action: count for action, count in counts.items() if not action.endswith("0")}


def test_any_action_passes_at_most_14_files_in_90_calls() -> None:
    counts = _actions(devices=2)
    assert sum("F" in action for action in counts) == 2 * (_MICROBATCHES - 1)
    assert all(files <= 14 and calls <= 90 for files, calls in counts.values()), counts


def few_files() -> None:
    """On each rank."""
    counts = _actions(mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",)))
    assert counts
    assert all(files <= 24 for files, _ in counts.values()), counts


def test_an_action_of_a_rank_passes_at_most_24_files(launch: Launch) -> None:
    launch(few_files, 2)
