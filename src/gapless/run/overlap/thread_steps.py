"""Devices as threads of one process, which take step after step: the caller hands over a step while the one before is
under way, and then waits until that one is settled on all devices.

    caller     step 4 ->          (3 is settled) groups of 4 ->                step 5 ->
    device 0      ... W3 U3 F4 F4 F4 V4 I4 ...                           W4 U4 F5 ...
    device 1           ... W3 W3 U3 F4 F4 V4 I4 ...

What a user may see or set, the optimizer's groups and its scheduler, only the caller's thread touches, inside a call.
"""

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gapless.errors import TransportError, note_place
from gapless.run.channels import StoppedError
from gapless.run.execute import measured, place_of
from gapless.run.lanes import await_computed, computed, fenced, queued_by_caller
from gapless.run.one_process import OneProcess
from gapless.run.overlap.notice_board import NoticeBoard, ThreadCourt
from gapless.run.overlap.optimizer_part import Setting
from gapless.run.overlap.part_updates import Court, PartUpdates, Settled
from gapless.run.overlap.verdict import Check
from gapless.run.program import Program
from gapless.run.thread_state import CallerState
from gapless.run.world import Ran
from gapless.schedule.action import Action
from gapless.schedule.asynchronous.verdicts import losses_at
from gapless.schedule.lower.consecutive_steps import end_with_updates
from gapless.schedule.timeline import Timeline
from gapless.stage.intra_op import intra_op_threads
from gapless.stage.shared.tie import Tie


@dataclass(eq=False)
class HandedStep:
    """A step as it is handed over. Gradients of one that does not update wait for the next."""

    step: int
    program: Program
    updates: bool
    told_at: Action | None  # where its losses are known
    threads: int = field(default_factory=torch.get_num_threads)
    state: CallerState = field(default_factory=CallerState)
    weights: tuple[float, ...] = ()
    queued: dict[torch.device, torch.cuda.Event] = field(default_factory=dict)  # by the caller, before
    losses: tuple[Tensor, ...] | None = None
    computed: Mapping[torch.device, torch.cuda.Event] = field(default_factory=dict)  # when the losses are there
    ended: threading.Event = field(default_factory=threading.Event)  # losses are there, or never will be


class ThreadSteps:
    """All devices of a process. `settled` is called, in the caller's thread, for each step when it is."""

    def __init__(self, world: OneProcess, check: Check, settled: Settled) -> None:
        self._world, self._settled = world, settled
        self._board = NoticeBoard()
        self._court = ThreadCourt(check, len(world.here), self._board)
        self.devices: Sequence[PartUpdates] = ()
        self._ties: list[list[Tie]] = []  # by device, those whose gradients are added there
        self._jobs: list[HandedStep] = []  # that are not settled, in order
        self._inboxes: list[queue.SimpleQueue[HandedStep | None]] = []
        self._failures: list[BaseException] = []
        self._running: ExitStack | None = None

    def adopt(self, make: Callable[[Court], Sequence[PartUpdates]], homes: Sequence[int], parameters: int) -> None:
        """Stages are new, and nothing is under way. `homes`: the device of each."""
        self.devices = make(self._court)
        self._ties = [[tie for tie in self._world.ties if homes[tie.stages[0]] == each] for each in self._world.here]

    @property
    def is_running(self) -> bool:
        return self._running is not None

    def call(self) -> AbstractContextManager[object]:
        """Around a step that is handed over."""
        return nullcontext()

    def run(
        self, step: int, program: Program, weights: Sequence[float], setting: Callable[[], Setting], *, updates: bool
    ) -> Callable[[], Ran]:
        """Hands a step over, and returns when the one before is settled. What is returned waits for the losses."""
        self._start()
        schedule = program.schedule
        last = schedule.rows[schedule.placement.homes[-1]]
        job = HandedStep(step, program, updates, losses_at(last, schedule.num_stages - 1), weights=tuple(weights))
        program.channels.begin()
        program.at_verdict = partial(self._verdict, job)
        self._jobs.append(job)
        job.queued = queued_by_caller(self._world.lanes)
        for inbox in self._inboxes:
            inbox.put(job)
        if len(self._jobs) > 1:
            self._wait()
        self._board.post(("setting", step), setting())
        return partial(self._ran, job)

    def _ran(self, job: HandedStep) -> Ran:
        job.ended.wait()
        if job.losses is None:
            raise StoppedError
        outputs = (each for each in pytree.tree_leaves(job.program.batch.outputs) if isinstance(each, Tensor))
        await_computed((*job.losses, *outputs), job.computed)
        return Ran(job.losses, job.weights)

    def settle(self) -> None:
        """All steps are over, and no thread works."""
        if self._running is None or self._world.team.works_here:
            return
        for inbox in self._inboxes:
            inbox.put(None)
        while self._jobs:
            self._wait()
        self._leave()

    def _wait(self) -> None:
        """Until the oldest step is settled."""
        job = self._jobs[0]
        try:
            self._board.wait(("over", job.step))
        except StoppedError:
            error = self._failures[0] if self._failures else TransportError("the pipeline was closed in a step")
            self._failures.clear()  # the traceback holds this frame
            self.give_up(error)
            raise error from None
        self._over(job)

    def _over(self, job: HandedStep) -> None:
        verdict = self._court.verdict(job.step) if job.updates else None
        self._settled(job.step, verdict, _timeline(job))
        for each in self.devices:
            each.forget(job.step)
        job.program.clear()
        job.state.leave()
        self._board.forget(job.step)
        self._jobs.remove(job)

    def give_up(self, error: BaseException) -> None:
        """Steps that are not settled are undone, but for one whose verdict is known: it is carried out."""
        if self._running is None:
            return
        self.stop()
        self._world.team.settle()
        for job in self._jobs:
            job.program.forget()
        try:
            judged = self._jobs and self._jobs[0].updates and self._board.has(("verdict", self._jobs[0].step))
            if judged and not any(each.is_torn for each in self.devices):
                for each in self.devices:
                    each.settle()
                self._over(self._jobs[0])
        finally:
            for job in self._jobs:
                job.program.clear()
                job.state.leave()
            for each in self.devices:
                each.undo()
                if self._jobs:
                    each.drop(self._jobs[0].step)
            if self._jobs:
                error.add_note(f"gapless: the model and its optimizer are as before step {self._jobs[0].step}")
            self._jobs.clear()
            for tie in self._world.ties:
                tie.release()
            self._leave()

    def _leave(self) -> None:
        assert self._running is not None
        with self._running:
            self._running = None
            self._world.team.finish()
            self._world.team.flows = False
            self._board.clear()
            for each in self.devices:
                each.rest()
            with fenced(self._world.lanes):  # what the caller queues next comes after what devices have queued
                pass

    def _start(self) -> None:
        if self._running is not None:
            return
        with ExitStack() as entered:
            entered.enter_context(self._world.team.held())
            self._inboxes = [queue.SimpleQueue() for _ in self._world.here]
            for each in self.devices:
                each.start()
            for lane in self._world.lanes:
                lane.begin()
            self._world.team.begin([partial(self._device, device) for device in self._world.here], self.stop)
            self._world.team.flows = True
            self._running = entered.pop_all()

    def stop(self) -> None:
        """From any thread: nobody waits any more, and no device begins another action."""
        self._board.stop()
        for job in list(self._jobs):
            job.program.stop()
            job.ended.set()
        for inbox in self._inboxes:
            inbox.put(None)

    def _device(self, device: int) -> None:
        lane, job = self._world.lanes[device], None
        try:
            while (job := self._inboxes[device].get()) is not None:
                with lane.entered(), job.state.entered():
                    lane.follow(job.queued)  # here: a stream that captures a graph may wait for nothing
                    self._run(job, device)
            with lane.entered():
                self._settle(device)
        except StoppedError:
            pass
        except BaseException as error:
            if job is not None:
                note_place(error, place_of(job.program, device))
            self._failures.append(error)
            self.stop()

    def _run(self, job: HandedStep, device: int) -> None:
        program, updates = job.program, self.devices[device]
        reached, stopping = program.reached, program.stopping
        updates.begin(job.step, program)
        for tie in self._ties[device]:
            tie.begin()
        row = program.schedule.rows[device]
        for position, call in enumerate(program.calls[device]):
            reached[device] = position
            if stopping:
                raise StoppedError
            call()
            if row[position] == job.told_at:
                job.losses, job.computed = program.losses, computed(program.losses)
                job.ended.set()
        for tie in self._ties[device]:
            tie.end()
        for stage in updates.stages:
            stage.finish(resting=False)
        if job.told_at in row:
            updates.look_at(program.losses, job.weights)
        if job.updates:
            setting: Setting = self._board.wait(("setting", job.step))
            start = program.lanes[device].now()
            with intra_op_threads(job.threads):
                updates.update(job.step, setting)
            if program.recorded:  # what is stepped of several stages is stepped together
                end = program.lanes[device].now()
                program.marks[device] += [(end if number else start, end) for number, _ in enumerate(updates.stages)]
        if updates.due is None:
            self._note(job.step)

    def _verdict(self, job: HandedStep, device: int) -> None:
        updates = self.devices[device]
        due = updates.due
        with intra_op_threads(job.threads) if due is not None else nullcontext():
            verdict = updates.settle()
        if verdict is not None and not verdict.stands:
            updates.run_again(job.program, device, job.step)
        if due is not None:
            self._note(due)

    def _settle(self, device: int) -> None:
        """No other step comes."""
        updates = self.devices[device]
        if (due := updates.due) is not None:
            updates.settle()
            self._note(due)

    def _note(self, step: int) -> None:
        """A device has settled it."""
        if len(self._board.add(("settled", step))) == len(self._world.here):
            self._board.post(("over", step))


def _timeline(job: HandedStep) -> Timeline | None:
    """With its updates. Those of consecutive steps have one clock."""
    program = job.program
    if not program.recorded:
        return None
    return measured(program, "measured", end_with_updates(program.schedule) if job.updates else None)
