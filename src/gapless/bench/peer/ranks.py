"""One process per device: a program that `Peer` starts, and that ends with it.

    gapless bench --- commands ---> this program --- pipes ---> rank 0, rank 1, ... (forked; Gloo on loopback)
                  <--- seconds ----              <--- spans ---

A rank that has nothing to do blocks in a pipe, so it takes no time from the other contestants. They are called in their
order, the first one first, and come to a step one after another as they do in training. All spans come from one
monotonic clock; a step lasts from the first start of a rank to the last end. What the ranks run is a matter of
`torch_side` and `gapless_side`.
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
from importlib import import_module
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

import torch.distributed as dist

from gapless.bench.peer.contest import Contest, from_json
from gapless.stage.intra_op import set_intra_op_threads


class Side(Protocol):
    """What a contestant's module has."""

    def prepare(self, contest: Contest, name: str, rank: int) -> tuple[str | None, Callable[[], object]]:
        """The order of the actions of that schedule, if it is not as in the recipe, and a call that runs one step on
        this rank. Raises ValueError or AssertionError for sizes that it does not take, on every rank.
        """


def _work(rank: int, side: Side, contest: Contest, names: Sequence[str], folder: str, lead: Connection) -> None:
    set_intra_op_threads(1)  # as under torchrun
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
            orders[name], steps[name] = side.prepare(contest, name, rank)
        except (ValueError, AssertionError) as error:
            refused[name] = str(error)
            continue
        steps[name]()  # the first step asks the stages for their shapes
    lead.send({"orders": orders, "refused": refused})
    while True:
        name, times = lead.recv()
        start = time.perf_counter()
        for _ in range(times):
            steps[name]()
        lead.send((start, time.perf_counter()))


def _rank(
    rank: int,
    side: Side,
    contest: Contest,
    names: Sequence[str],
    folder: str,
    lead: Connection,
    others: Sequence[Connection],
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for other in others:  # inherited: while they are open here, nobody sees that the program has gone
        other.close()
    try:
        _work(rank, side, contest, names, folder, lead)
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
        command = json.loads(line)
        for end in ends:
            end.send(command)
        spans = _gather(ends, commands)
        answer({"seconds": max(end for _, end in spans) - min(start for start, _ in spans)})


def _loopback() -> str | None:
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)


def main() -> None:
    side: Any = import_module(f"gapless.bench.peer.{sys.argv[1]}_side")
    contest, names = from_json(sys.argv[2])
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
                    target=_rank, args=(rank, side, contest, names, folder, theirs, tuple(ends)), daemon=True
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
