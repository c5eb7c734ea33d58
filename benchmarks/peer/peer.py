"""The other end of `ranks`: start them, ask them for steps, and leave no process behind, whatever happens."""

import contextlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing import forkserver, get_context
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

from benchmarks.peer.contest import Contest
from benchmarks.peer.gapless_sides import pipeline, step
from benchmarks.peer.ranks import Failed, Prepared, Stepped, compete
from benchmarks.runner.rounds import Contestant, GaveUpError, Progress
from gapless import Schedule, make_schedule
from gapless.errors import TransportError
from gapless.schedule.recipes import RECIPES

# What each side is, and the module that has its `prepare_...`.
_SIDES = {
    "torch": ("torch.distributed.pipelining", "benchmarks.peer.other_sides"),
    "torchgpipe": ("torchgpipe", "benchmarks.peer.other_sides"),
    "fsdp": ("FSDP2", "benchmarks.peer.other_sides"),
    "gapless": ("gapless on ranks", "benchmarks.peer.gapless_sides"),
    "parts": ("the parts of the model", "benchmarks.peer.other_sides"),
    "replicas": ("stages with replicas on ranks", "benchmarks.planner.replicas"),
    "trial": ("a trial", "benchmarks.gpipe.offload"),
}
_OTHERS = ("torch", "torchgpipe", "fsdp", "trial")  # what fails of them is left out; what fails of ours is an error
_SERVER = get_context("forkserver")

SideName = Literal["torch", "torchgpipe", "fsdp", "gapless", "parts", "replicas", "trial"]
Environment = Mapping[str, str] | None
_ONE_PROCESS = ("torchgpipe",)  # whose devices are threads
_PATIENCE = 3.0  # seconds, for the other ranks to say how they failed


def start_server() -> None:
    """A process that has imported what ranks need, and forks them: to fork takes milliseconds, to import torch seconds.
    It ends with this process, and ranks end with it.
    """
    # Whether there is a GPU is asked without its driver: what has asked the driver has no GPU after a fork.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    _SERVER.set_forkserver_preload(["benchmarks.peer.ranks", *(module for _, module in _SIDES.values())])
    forkserver.ensure_running()


class _RankFailedError(Exception):
    """The first cause of it, and the schedule it was met with: empty before the first one."""

    def __init__(self, first: Failed) -> None:
        super().__init__((first.reason.strip().splitlines() or [""])[0])
        self.name = first.name


class Peer:
    """A contestant in processes of its own, one per device, for as long as the context lasts.

    schedules   those that it runs, by name, as it runs them
    refused     why it does not run the others: it does not take the sizes, or failed. After a failure its ranks start
                again without that schedule. A schedule of ours is never left out: there it is an error
    bubbles     of those whose last step had a timeline, with the times of its actions
    peaks       on GPUs: the most bytes that a rank had in a step
    """

    def __init__(
        self, contest: Contest, names: Sequence[str], side: SideName = "torch", environment: Environment = None
    ) -> None:
        self._contest, self._names, self._side, self._environment = contest, names, side, dict(environment or {})
        self._stack = contextlib.ExitStack()
        self._ranks: list[Connection] = []
        self.schedules: dict[str, Schedule] = {}
        self.refused: dict[str, str] = {}
        self.bubbles: dict[str, float] = {}
        self.peaks: dict[str, int] = {}

    def __enter__(self) -> "Peer":
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def step(self, name: str, times: int = 1) -> float:
        """The mean seconds of one of several steps in a row, each from the first start of a rank to the last end. They
        are called in their order, the first one first, and come to a step one after another as they do in training.
        Raises `GaveUpError` for a schedule that is left out from now on.
        """
        if name in self.refused:
            raise GaveUpError(f"{_SIDES[self._side][0]} can't run {name}: {self.refused[name]}")
        with contextlib.suppress(ConnectionError):  # it has gone, and `_gather` says why
            for rank in self._ranks:
                rank.send((name, times))
        try:
            spans: list[Stepped] = self._gather(name, within=60.0 + 100 * times)
        except _RankFailedError as failure:
            self._leave_out(failure)
            self._stack.close()
            self._start()
            return self.step(name, times)
        if (bubble := spans[0].bubble) is not None:
            self.bubbles[name] = bubble
        self.peaks[name] = max(span.peak for span in spans)
        return (max(span.end for span in spans) - min(span.start for span in spans)) / times

    def _start(self) -> None:
        """The ranks, again without what fails until nothing does."""
        while names := [name for name in self._names if name not in self.refused]:
            with contextlib.ExitStack() as stack:
                try:
                    self._let_in(stack, names)
                    for name in names:
                        self._prepare(name)
                    self._stack = stack.pop_all()
                    break
                except _RankFailedError as failure:
                    self._leave_out(failure)

    def _leave_out(self, failure: _RankFailedError) -> None:
        """The schedule that failed, or all where it is none of them."""
        if self._side not in _OTHERS:
            at = f" with {failure.name}" if failure.name else ""
            raise TransportError(f"{_SIDES[self._side][0]} failed{at}: {failure}") from None
        for name in [failure.name] if failure.name else self._names:
            self.refused.setdefault(name, f"it failed: {failure}")
            self.schedules.pop(name, None)

    def _let_in(self, stack: contextlib.ExitStack, names: Sequence[str]) -> None:
        """Start the ranks; they end with the stack."""
        start_server()
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        count = 1 if self._side in _ONE_PROCESS else self._contest.devices
        place = f"{_SIDES[self._side][1]}:prepare_{self._side}"
        self._ranks = []
        for rank in range(count):
            here, there = _SERVER.Pipe()
            words = (rank, count, folder, there, place, self._contest, names, self._environment)
            process: Any = _SERVER.Process(target=compete, args=words, daemon=True)
            process.start()
            there.close()
            for end in (process.close, process.join, process.kill):  # the last one first
                stack.callback(end)
            self._ranks.append(stack.enter_context(here))

    def _prepare(self, name: str) -> None:
        """Whether the ranks take that schedule, and in which order they run it."""
        answers: list[Prepared] = self._gather(name, within=180.0)
        if why := next((answer.refused for answer in answers if answer.refused), ""):
            self.refused[name] = why
        elif (order := answers[0].order) is not None:
            self.schedules[name] = Schedule.parse(order, name=name)
        elif name in RECIPES:
            sizes: Any = {"devices": self._contest.devices, "microbatches": self._contest.microbatches}
            self.schedules[name] = make_schedule(name, **sizes)

    def _gather(self, name: str, within: float) -> list[Any]:
        """One answer of every rank; or the earliest failure. One that ended without a word was killed, and comes before
        all others, which only noticed.
        """
        answers: list[Any] = [None] * len(self._ranks)
        failures, waiting = list[Failed](), list(self._ranks)
        while waiting and (ready := wait(waiting, _PATIENCE if failures else within)):
            for rank in (rank for rank in self._ranks if rank in ready):
                waiting.remove(rank)
                number = self._ranks.index(rank)
                answers[number] = Failed(0.0, name, f"rank {number} ended without a word")
                with contextlib.suppress(EOFError, ConnectionError):
                    answers[number] = rank.recv()
                failures += [answers[number]] if isinstance(answers[number], Failed) else []
        if waiting and not failures:
            failures = [Failed(0.0, name, f"it did not answer within {within:.0f} s")]
        if failures:
            raise _RankFailedError(min(failures))
        return answers


class Lineup(contextlib.ExitStack):
    """For as long as the context lasts.

    contestants   by name: that of their side and what it runs
    schedules     what they run, as they run it
    """

    def __init__(self, contest: Contest, progress: Progress, environment: Environment = None) -> None:
        super().__init__()
        self._contest, self._progress, self._environment = contest, progress, environment
        self._peers: dict[str, Peer] = {}
        self.contestants: dict[str, Contestant] = {}
        self.schedules: dict[str, Schedule] = {}

    @property
    def peaks(self) -> dict[str, int]:
        """Bytes on the fullest GPU, by name."""
        return {f"{by} {what}".strip(): peak for by, peer in self._peers.items() for what, peak in peer.peaks.items()}

    @property
    def refused(self) -> dict[str, str]:
        """Why some do not take part, or no longer."""
        return {f"{name} {what}": why for name, peer in self._peers.items() for what, why in peer.refused.items()}

    def add_here(
        self, schedules: Sequence[str], name: str = "gapless", *, steps: int = 1, on_all_cores: bool = False
    ) -> None:
        """Our pipelines, whose devices are threads of this process."""
        for schedule in schedules:
            pipe = self.enter_context(pipeline(self._contest, schedule))
            self.schedules[f"{name} {schedule}"] = pipe.schedule
            self.contestants[f"{name} {schedule}"] = step(self._contest, pipe, steps, on_all_cores=on_all_cores)

    def add_ranks(self, side: SideName, whats: Sequence[str], name: str | None = None, steps: int = 1) -> None:
        """A side in processes of its own, and what it is to run."""
        name = side if name is None else name
        self._progress(f"starting {side}")
        peer = self._peers[name] = self.enter_context(Peer(self._contest, whats, side, self._environment))
        self.contestants |= {f"{name} {what}".strip(): partial(peer.step, what, steps) for what in whats}
        self.schedules |= {f"{name} {what}": schedule for what, schedule in peer.schedules.items()}
