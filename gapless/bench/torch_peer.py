"""torch.distributed.pipelining as a contestant: this program is started by `Peer` and ends with it.

    gapless bench --- commands ---> this program --- pipes ---> rank 0, rank 1, ... (forked; Gloo on loopback)
                  <--- seconds ----              <--- spans ---

A rank that has nothing to do blocks in a pipe, so it takes no time from the other contestants. All spans come from one
monotonic clock; a step lasts from the first start of a rank to the last end.
"""

import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from gapless.bench.contest import Contest, from_json, loss

_CLASSES = {
    "gpipe": (pipelining.ScheduleGPipe, 1),
    "1f1b": (pipelining.Schedule1F1B, 1),
    "interleaved": (pipelining.ScheduleInterleaved1F1B, 2),
    "zb-v": (pipelining.ScheduleZBVZeroBubble, 2),
}
_COMPUTE = ("F", "B", "I", "W")


class _NeedsGrad(nn.Module):
    """The first stage of a model whose inputs require a gradient: torch hands it views, which keep none."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x.detach().requires_grad_())
        return y


def _stages_of(rank: int, devices: int, name: str) -> list[int]:
    """Line, loop, or there and back again."""
    if _CLASSES[name][1] == 1:
        return [rank]
    return [rank, 2 * devices - 1 - rank] if name == "zb-v" else [rank, devices + rank]


def _schedule(contest: Contest, name: str, rank: int) -> tuple[Any, Callable[[], object]]:
    """torch's schedule of that name, and a call that runs one step of it on this rank."""
    made, stages_per_device = _CLASSES[name]
    num_stages = stages_per_device * contest.devices
    numbers = _stages_of(rank, contest.devices, name)
    stages = []
    for number in numbers:
        layers = contest.stage(stages_per_device, separate=name == "zb-v")
        if number == 0 and contest.inputs_need_grad:
            layers = _NeedsGrad(layers)
        stages.append(PipelineStage(layers, number, num_stages, torch.device("cpu")))
    stage = stages if stages_per_device > 1 else stages[0]
    schedule: Any = made(stage, contest.microbatches, loss_fn=loss)
    inputs = (contest.inputs(),) if 0 in numbers else ()
    target = contest.target() if num_stages - 1 in numbers else None
    return schedule, lambda: schedule.step(*inputs, target=target, return_outputs=False)


def _order(schedule: Any) -> str | None:
    """The actions as torch runs them, as text; None for the schedules that are a loop in its source."""
    rows = getattr(schedule, "pipeline_order_with_comms", None)
    if rows is None:
        return None
    tokens = {
        rank: [str(action) for action in rows[rank] if action.computation_type.value in _COMPUTE] for rank in rows
    }
    return "\n".join(f"{rank}: {' '.join(tokens[rank])}" for rank in sorted(tokens))


def _work(rank: int, contest: Contest, names: Sequence[str], folder: str, lead: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=contest.devices,
        timeout=timedelta(seconds=120),
    )
    steps: dict[str, Callable[[], object]] = {}
    orders, refused = {}, {}
    for name in names:
        try:
            schedule, steps[name] = _schedule(contest, name, rank)
        except (ValueError, AssertionError) as error:  # sizes it does not take: the same on every rank
            refused[name] = str(error)
            continue
        orders[name] = _order(schedule)
        steps[name]()  # the first step asks the stages for their shapes
    lead.send({"orders": orders, "refused": refused})
    while True:
        name, times = lead.recv()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(times):
            steps[name]()
        lead.send((start, time.perf_counter()))


def _rank(
    rank: int, contest: Contest, names: Sequence[str], folder: str, lead: Connection, others: Sequence[Connection]
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for other in others:  # inherited: while they are open here, nobody sees that the program has gone
        other.close()
    try:
        _work(rank, contest, names, folder, lead)
    except (EOFError, BrokenPipeError):
        pass
    except BaseException as error:
        traceback.print_exc()
        while error.__cause__ is not None:  # torch wraps what went wrong into pages of its own state
            error = error.__cause__
        lead.send(f"rank {rank}: {type(error).__name__}: {error}")
    os._exit(0)  # no farewell between ranks: the others may have gone


class _FailedError(Exception):
    """A rank said why."""


def _gather(ends: Sequence[Connection], commands: int) -> list[Any]:
    """One answer of every rank. Nothing is said meanwhile, so if there is something to read, it is the end."""
    answers: dict[Connection, Any] = {}
    while len(answers) < len(ends):
        for ready in wait([*(end for end in ends if end not in answers), commands]):
            if not isinstance(ready, Connection):
                raise EOFError
            answer = ready.recv()
            if isinstance(answer, str):
                raise _FailedError(answer)
            answers[ready] = answer
    return [answers[end] for end in ends]


def _serve(ends: Sequence[Connection], answer: Callable[[Any], None]) -> None:
    commands = sys.stdin.fileno()
    answer(_gather(ends, commands)[0])
    while line := sys.stdin.readline():
        for end in ends:
            end.send(json.loads(line))
        spans = _gather(ends, commands)
        answer({"seconds": max(end for _, end in spans) - min(start for start, _ in spans)})


def _loopback() -> str | None:
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)


def main() -> None:
    contest, names = from_json(sys.argv[1])
    if loopback := _loopback():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not get between the answers

    def answer(value: Any) -> None:
        print(json.dumps(value), file=out, flush=True)

    context = multiprocessing.get_context("fork")
    ends: list[Connection] = []
    ranks = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(contest.devices):
                mine, theirs = context.Pipe()
                ends.append(mine)
                process = context.Process(
                    target=_rank, args=(rank, contest, names, folder, theirs, tuple(ends)), daemon=True
                )
                process.start()
                theirs.close()
                ranks.append(process)
            _serve(ends, answer)
        except _FailedError as error:
            answer({"failed": str(error)})
        except (EOFError, ConnectionError):
            answer({"failed": "a rank ended without a word"})
        finally:
            for process in ranks:
                process.kill()
                process.join()


if __name__ == "__main__":
    main()
