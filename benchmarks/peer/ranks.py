"""What each rank of a contestant does: it prepares its schedules, and then runs the steps that `Peer` asks for.

    benchmark <--- Prepared -------- rank 0, rank 1, ... (Gloo on loopback), one for each schedule
              --- (name, times) --->
              <--- Stepped ---------
              <--- Failed ---------- instead, and the rank ends

A rank that has nothing to do blocks in its connection, so it takes no time from the other contestants. All times come
from one monotonic clock. What the ranks run is a matter of the sides.
"""

import contextlib
import os
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks import die_with_parent
from benchmarks.peer.contest import Contest
from benchmarks.runner.rounds import Span
from gapless import costs_of, simulate
from gapless.run.held_memory import in_use
from gapless.stage.intra_op import set_intra_op_threads


class Prepared(NamedTuple):
    """A schedule is ready on this rank, with the order of its actions; or it is refused."""

    order: str | None = None
    refused: str = ""


class Stepped(NamedTuple):
    """From when to when the steps ran; the bubble of a timeline, where there is one; on a GPU the peak of its memory,
    in bytes, without what other contestants have there.
    """

    start: float
    end: float
    bubble: float | None
    peak: int


class Failed(NamedTuple):
    """The rank ends. `time` is when it failed: the first of several ranks has the cause, the others its symptoms."""

    time: float
    name: str
    reason: str


# What a contestant's module has. For a contest, what is to run and a rank: the order of the actions of that schedule,
# if it is not as in the recipe, and a call that runs one step on this rank. Raises ValueError or AssertionError for
# sizes that it does not take, on every rank.
Prepare = Callable[[Contest, str, int], tuple[str | None, Callable[[], object]]]


def join_group(rank: int, ranks: int, folder: str, seconds: float, backend: str = "gloo") -> None:
    """A group of the ranks that share the folder, each with one intra-op thread, as under torchrun."""
    set_intra_op_threads(1)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=timedelta(seconds=seconds)
    )


def _begin(folder: str) -> None:
    """It ends with who started it, connects over loopback, and what it says goes into the folder."""
    os.setsid()  # Ctrl-C is for whoever started it
    die_with_parent()
    said = os.open(f"{folder}/said", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(said, stream)
    if loopback := [name for _, name in socket.if_nameindex() if name.startswith("lo")]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])


def compete(
    rank: int, ranks: int, folder: str, lead: Connection, place: str, contest: Contest, names: Sequence[str], more: Any
) -> None:
    """Until `Peer` hangs up; `place` is where its `Prepare` is, `more` belongs to the environment."""
    _begin(folder)
    os.environ.update(more)
    at = ""
    try:
        if contest.on_gpu:
            torch.cuda.set_device(rank % torch.cuda.device_count())
        join_group(rank, ranks, folder, 120.0, "cpu:gloo,cuda:nccl" if contest.on_gpu else "gloo")
        module, _, function = place.partition(":")
        prepare: Prepare = getattr(import_module(module), function)
        steps: dict[str, Callable[[], object]] = {}
        held: dict[str, int] = {}  # bytes of the GPU, of each of them between steps
        for at in names:
            before = _in_use(contest)
            _send(lead, _prepare(rank, prepare, contest, at, steps))
            held[at] = _in_use(contest) - before
        while (asked := _asked(lead)) is not None:
            at, times = asked
            before = _in_use(contest)
            _send(lead, _step(contest, steps[at], times, before - held[at]))
            held[at] += _in_use(contest) - before  # of graphs, say
            contest.tidy()
    except BaseException as error:
        when = time.perf_counter()
        traceback.print_exc()
        while error.__cause__ is not None:  # torch wraps what went wrong into pages of its own state
            error = error.__cause__
        _send(lead, Failed(when, at, f"rank {rank}: {type(error).__name__}: {error}"))
    os._exit(0)  # no farewell between ranks: the others may have gone


def _send(lead: Connection, answer: Prepared | Stepped | Failed) -> None:
    with contextlib.suppress(ConnectionError):  # `Peer` has hung up
        lead.send(answer)


def _asked(lead: Connection) -> tuple[str, int] | None:
    with contextlib.suppress(EOFError, ConnectionError):
        name, times = lead.recv()
        return name, times
    return None


def _prepare(
    rank: int, prepare: Prepare, contest: Contest, name: str, steps: dict[str, Callable[[], object]]
) -> Prepared:
    try:
        order, steps[name] = prepare(contest, name, rank)
    except (ValueError, AssertionError) as error:
        return Prepared(refused=str(error) or type(error).__name__)
    contest.tidy()
    steps[name]()  # the first asks the stages for their shapes
    contest.settle()
    contest.tidy()
    return Prepared(order)


def _in_use(contest: Contest) -> int:
    return in_use(torch.device("cuda"))[0] if contest.on_gpu else 0


def _step(contest: Contest, step: Callable[[], object], times: int, others: int) -> Stepped:
    if contest.on_gpu:
        step()  # takes the memory again that was left to the others
        contest.settle()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for _ in range(times):
        result = step()
        contest.settle()
    span = result if isinstance(result, Span) else Span(start, time.perf_counter())  # only a part of it may count
    timeline = getattr(result, "timeline", None)  # what the schedule would leave idle, with the times it has
    bubble = timeline and float(simulate(timeline.schedule, costs_of([timeline])).bubble)
    return Stepped(*span, bubble, in_use(torch.device("cuda"))[1] - others if contest.on_gpu else 0)
