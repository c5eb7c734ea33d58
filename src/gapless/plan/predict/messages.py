"""Messages that were sent and not taken yet: what they hold of their sender's memory."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from itertools import product

from gapless.plan.cut.stage_costs import Stages
from gapless.schedule.action import COPIES, Action, Kind, Schedule
from gapless.schedule.costs import Number
from gapless.schedule.routes import MAKERS, Channel, Route, Routes
from gapless.schedule.timeline import Timeline

Crossing = dict[tuple[int, Kind], tuple[Route, int]]  # messages to other devices, by who makes them


def sent(schedule: Schedule, stages: Stages) -> list[int]:
    """Bytes of the messages that may leave each device while an action runs, at the least."""
    crossing = crossing_messages(schedule, stages, ())
    return [max(largest_sent(crossing, device)) for device in range(schedule.num_devices)]


def largest_sent(crossing: Crossing, device: int) -> tuple[int, int]:
    """Bytes of the messages that leave a device: the largest of each channel, after forwards and after backwards."""
    largest: dict[Channel, int] = defaultdict(int)
    for route, size in crossing.values():
        if route.channel[0] == device:
            largest[route.channel] = max(largest[route.channel], size)
    forward, back = (
        sum(size for (_, _, name), size in largest.items() if name == wanted) for wanted in ("activation", "gradient")
    )
    return forward, back


def waiting_bytes(timeline: Timeline, crossing: Crossing) -> Iterator[list[int]]:
    """Per device, for each action of its row: bytes of what it has sent and nobody has taken when the action starts."""
    schedule = timeline.schedule
    routes = Routes(schedule.placement)
    taken: dict[tuple[Route, int], Number] = {}  # when the next stage takes it
    for action, start, _ in timeline.all_spans:
        if (arriving := routes.arriving(action)) is not None:
            taken[arriving, action.microbatch] = start
    for device in range(schedule.num_devices):
        waiting: list[tuple[Number, int]] = []  # until when, and how much
        held = 0
        levels = []
        for (stage, kind, microbatch), start, _ in timeline.spans(device):
            while kind not in COPIES and waiting and waiting[0][0] <= start:
                held -= heappop(waiting)[1]
            levels.append(held)
            if (stage, kind) in crossing:
                route, size = crossing[stage, kind]
                heappush(waiting, (taken[route, microbatch], size))
                held += size
        yield levels


def crossing_messages(schedule: Schedule, stages: Stages, leaving: Iterable[int]) -> Crossing:
    """The messages to other devices, by who makes them: their way, and their bytes. Of what a forward sends, only that
    which its stage does not hold anyway; one whose activations are `leaving` does not.
    """
    remade = {stage for stage, _ in schedule.recomputed} | {s for s, mode in enumerate(stages.remat) if mode == "layer"}
    remade.update(leaving)
    routes = Routes(schedule.placement)
    found = {}
    for stage, kind in product(range(schedule.num_stages), MAKERS):
        route = routes.leaving(Action(stage, kind, 0))
        if route is not None and route.crosses:
            held = stages.layers[stage][-1].held_output if kind is Kind.FORWARD and stage not in remade else 0
            if size := max(0, stages.boundary[max(route.source, route.target)] - held):
                found[stage, kind] = route, size
    return found
