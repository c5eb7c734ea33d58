"""Runs a program: every device goes through its calls, and the first failure stops all of them."""

from collections.abc import Callable, Mapping, Sequence

import torch

from gapless.errors import note_place
from gapless.run.channels import StoppedError
from gapless.run.lanes import fenced
from gapless.run.program import Call, Program
from gapless.run.team import Team
from gapless.run.thread_state import CallerState
from gapless.schedule.action import Action, Schedule
from gapless.schedule.timeline import Timeline
from gapless.stage.stage import Stage


def execute(program: Program, team: Team) -> None:
    """Run the program's batch on its devices. The first failure stops all and is raised here, with its place noted."""
    team.settle()
    if team.left is not None:  # Ctrl-C came a second time, while what the first had left was cleared up
        team.left()
    team.left = program.forget
    program.channels.begin()
    state = CallerState(saves=not program.inference)
    failures: list[BaseException] = []
    profiled = torch.autograd.profiler._is_profiler_enabled

    def task(device: int) -> Call:
        lane, calls, stopping = program.lanes[device], _weighed(program, device), program.stopping
        reached = program.reached
        if profiled:
            calls = [
                _named(call, str(action)) for call, action in zip(calls, program.schedule.rows[device], strict=True)
            ]

        def run() -> None:
            reached[device] = 0
            try:
                with lane.entered(), state.entered():
                    for reached[device], call in enumerate(calls):
                        if stopping:
                            raise StoppedError
                        call()
                    program.channels.end()
            except StoppedError:
                pass
            except BaseException as error:
                note_place(error, place_of(program, device))
                failures.append(error)
                program.stop()

        return run

    try:
        with fenced(program.lanes):
            for lane in program.lanes if program.recorded else ():
                lane.begin()
            team.run([task(device) for device in program.here], program.stop)
        state.leave()
    except BaseException:
        state.leave()
        program.forget()
        team.left = None
        raise
    if failures:
        program.forget()
        team.left = None
        try:
            raise failures[0]
        finally:
            failures.clear()  # the traceback holds this frame, and this frame must not hold the traceback
    team.left = None


def _weighed(program: Program, device: int) -> list[Call]:
    """The calls of a device; on a GPU that no other device of this process uses, the second step is `weighed`."""
    calls, gpu = program.calls[device], program.lanes[device].device
    if program.inference or gpu.type != "cuda" or [program.lanes[each].device for each in program.here].count(gpu) > 1:
        return calls
    return weighed(calls, program.schedule.rows[device], program.stages, lambda: torch.cuda.memory_allocated(gpu))


def weighed(
    calls: list[Call], row: Sequence[Action], stages: Mapping[int, Stage], allocated: Callable[[], int]
) -> list[Call]:
    """The calls of a row of actions; in the second step of their stages each notes in `Stage.changes` by how much it
    changes what is allocated.
    """
    known = {action.stage: stages[action.stage].changes for action in row}
    if any(changes is None for changes in known.values()):
        for stage, changes in known.items():
            stages[stage].changes = {} if changes is None else changes
        return calls

    def noted(call: Call, into: list[int]) -> Call:
        def run() -> None:
            before = allocated()
            call()
            into.append(allocated() - before)

        return run

    found, is_second = [], not any(known.values())
    for call, action in zip(calls, row, strict=True):
        changes = known[action.stage]
        assert changes is not None
        found.append(noted(call, changes.setdefault(action.kind.value, [])) if is_second else call)
    return found


def _named(call: Call, name: str) -> Call:
    """The call as a range of that name in torch's profiler."""

    def run() -> None:
        with torch.profiler.record_function(name):
            call()

    return run


def place_of(program: Program, device: int) -> str:
    """Where a device is, in words."""
    action = program.schedule.rows[device][program.reached[device]]
    where = program.lanes[device].device
    return f"on device {device} ({where}), stage {action.stage}, action {action}"


def measured(program: Program, name: str, schedule: Schedule | None = None) -> Timeline:
    """The timeline of the step that has just run; `schedule` has what was measured besides."""
    spans = [
        [(lane.seconds(start), lane.seconds(end)) for start, end in marks]
        for lane, marks in zip(program.lanes, program.marks, strict=True)
    ]
    return Timeline(
        schedule or program.schedule,
        tuple(tuple(start for start, _ in row) for row in spans),
        tuple(tuple(end for _, end in row) for row in spans),
        name=name,
        unit="s",
        clock=min(lane.began for lane in program.lanes),
    )
