"""What each device holds at its peak, in bytes: will it fit?

    there from the first step to the last    parameters, gradients, optimizer state, what others and libraries keep
    comes and goes                           of all actions of a device the most that is there while one runs

What actions leave behind is that of `schedule.memory`, the one copy of what an action allocates and frees. On top comes
what is there only while an action runs, and the messages that were sent and not taken yet, by simulation; the last of
them may always be late:

    device 0   0F0 > 0F1 > 0B0        while 0B0 runs, what 0F1 has made may still wait for device 1
    device 1         1F0   1B0 > 1F1

A transfer takes no memory ahead on a GPU: what comes in is there when it is taken, as a part of the activation.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from heapq import heappop, heappush
from operator import itemgetter
from typing import NamedTuple

from gapless.plan.cut.stage_costs import Stages
from gapless.plan.predict.messages import Crossing, crossing_messages, largest_sent, waiting_bytes
from gapless.plan.profile.profile import Profile
from gapless.schedule import memory
from gapless.schedule.action import Kind, Schedule
from gapless.schedule.costs import Number
from gapless.schedule.host_copies import sizes
from gapless.schedule.timeline import Timeline


@dataclass(frozen=True)
class Footprint:
    """Bytes of one device at its peak.

    activations  what forwards leave behind for backwards, and the inputs kept for a recompute
    buffers      messages that wait to be taken
    workspace    what the layer that takes most takes while it runs; or the optimizer, where that is more than all this
    slack        lost by the allocator
    reserved     taken by others, and kept by libraries
    """

    parameters: int
    gradients: int
    optimizer_state: int
    activations: int
    buffers: int
    workspace: int
    slack: int
    reserved: int

    @cached_property
    def total(self) -> int:
        return int(sum(astuple(self)))

    @property
    def fixed(self) -> int:
        """What does not come and go."""
        return self.parameters + self.gradients + self.optimizer_state + self.reserved


def footprints(
    profile: Profile, stages: Stages, timeline: Timeline, *, optimizer_shards: int = 1, slack: float | None = None
) -> tuple[Footprint, ...]:
    """Of each device. `optimizer_shards`: among how many replicas the optimizer's state is shared out."""
    share = profile.slack if slack is None else slack
    found = []
    leaving = {stage for stage, _ in timeline.schedule.offloaded}
    for device, row in enumerate(_running(timeline, stages, leaving)):
        layers = stages.of_device(device)
        # Between two steps nothing of a microbatch is left.
        update = sum(layer.update_workspace for layer in layers)
        update = update if profile.most_update is None else min(update, profile.most_update)
        total, activations, buffers, workspace = max((*row, (update, 0, 0, update)), key=itemgetter(0))
        found.append(
            Footprint(
                parameters=sum(layer.parameters for layer in layers),
                gradients=sum(layer.gradients for layer in layers),
                optimizer_state=math.ceil(sum(layer.optimizer_state for layer in layers) / optimizer_shards),
                activations=math.ceil(activations),
                buffers=buffers,
                workspace=workspace,
                slack=math.ceil(share * math.ceil(total)),
                reserved=profile.reserved + max((layer.libraries for layer in layers), default=0),
            )
        )
    return tuple(found)


class _Beside(NamedTuple):
    """What an action holds beside what `schedule.memory` says."""

    before: Number  # from its start on
    again: Number  # while it runs: activations that will be made again
    buffers: int  # at least
    workspace: int
    after: Number  # from its end on


def levels(timeline: Timeline, stages: Stages) -> list[list[Number]]:
    """What comes and goes, per device while each of its actions runs, where nothing that is sent is held anyway: what
    else may leave for the host's memory is then no longer there.
    """
    every = range(len(stages.layers))
    return [[held for held, *_ in row] for row in _running(timeline, stages, every)]


_Level = tuple[Number, Number, int, int]  # in all, activations, buffers, workspace


def _running(timeline: Timeline, stages: Stages, leaving: Iterable[int]) -> Iterator[list[_Level]]:
    """Per device, while each of its actions runs. What is on its way to the host counts until its copy has ended when
    the device gets to the action, and what comes back from when the device gets to the copy.
    """
    schedule = timeline.schedule
    recomputed = schedule.recomputed
    crossing = crossing_messages(schedule, stages, leaving)
    moved = sizes(schedule, timeline.costs)
    each = zip(memory.changes(schedule, stages.memory_costs), waiting_bytes(timeline, crossing), strict=True)
    for device, (changes, waits) in enumerate(each):
        plain, remade = _beside(schedule, stages, crossing, device)
        held: Number = 0
        free: Number = 0
        leaves: list[tuple[Number, Number]] = []  # when, and how much
        row: list[_Level] = []
        for (action, _, end), (takes, gives), waiting in zip(timeline.spans(device), changes, waits, strict=True):
            stage, kind, microbatch = action
            if kind is Kind.OFFLOAD:
                heappush(leaves, (end, moved(action)))
                continue
            if kind is Kind.LOAD:
                held += moved(action)
                continue
            while leaves and leaves[0][0] <= free:
                held -= heappop(leaves)[1]
            table = remade if recomputed and (stage, microbatch) in recomputed else plain
            before, again, last, workspace, after = table[stage, kind]
            buffers = max(last, waiting)
            held += takes + before
            row.append((held + again + buffers + workspace, held + again, buffers, workspace))
            held += after - gives
            free = end
        yield row


_Table = dict[tuple[int, Kind], _Beside]


def _beside(schedule: Schedule, stages: Stages, crossing: Crossing, device: int) -> tuple[_Table, _Table]:
    """By stage and kind: of microbatches that are not recomputed, and of those that are."""
    activations = stages.memory_costs.per_stage("activation", stages.placement)
    after_forward, after_backward = largest_sent(crossing, device)
    plain: _Table = {}
    remade: _Table = {}
    halved = {stage for stage, kind, _ in schedule.rows[device] if kind is Kind.WEIGHT_GRAD}
    for stage in schedule.placement.stages[device]:
        activation = activations[stage]
        # The activations that a recompute brings back have the kept input among them.
        input_ = min(stages.boundary[stage], activation)
        # What W needs may be more than what F has left: gradients are among it.
        more = max(0, sum(layer.kept_for_weight_grad for layer in stages.layers[stage]) - activation)
        workspaces = _workspaces(stages, stage, halves=stage in halved)
        after = {Kind.INPUT_GRAD: more, Kind.WEIGHT_GRAD: -more}
        given = {Kind.BACKWARD: input_, Kind.WEIGHT_GRAD: input_}
        one = _one_by_one(stages, stage, halves=stage in halved) if stages.remat[stage] == "layer" else {}
        for kind in Kind:
            waiting = after_backward if kind is Kind.FORWARD else after_forward
            workspace = workspaces.get(kind, 0)
            held_more, own_workspace = one.get(kind, (0, workspace))
            plain[stage, kind] = _Beside(0, held_more, waiting, own_workspace, after.get(kind, 0))
            remade[stage, kind] = _Beside(
                -input_ if kind is Kind.RECOMPUTE else 0,
                # A forward makes all of it the first time too, and lets go of it at its end.
                activation - input_ if kind is Kind.FORWARD else 0,
                waiting,
                workspace,
                after.get(kind, 0) + given.get(kind, 0),
            )
    return plain, remade


def _one_by_one(stages: Stages, stage: int, *, halves: bool) -> dict[Kind, tuple[int, int]]:
    """Of a stage that is recomputed layer by layer, on top of the inputs of all its layers: the activations and the
    workspace of the layer at which most is there.

        F    layer 1 runs: the inputs of layers 2 and 3 are not there yet
        B    layer 1 runs, forward again and then backward: those of layers 2 and 3 are no longer there
        I    the same, but what their W needs is there instead; with `halves` B is an I, too
    """
    layers = stages.layers[stage]
    begin = layers[-1].boundary if stage < len(stages.layers) - 1 else 0
    most: dict[Kind, tuple[int, int]] = {}

    def note(kind: Kind, activations: int, workspace: int) -> None:
        if kind not in most or activations + workspace > sum(most[kind]):
            most[kind] = activations, workspace

    later = later_halves = 0  # inputs of the layers behind, less what their W needs
    for number, layer in reversed(list(enumerate(layers))):
        input_ = layers[number - 1].boundary if number else stages.boundary[stage]
        own = layer.activation - min(input_, layer.activation)
        beside = begin if number < len(layers) - 1 else 0
        again = layer.forward_workspace + (layer.boundary if number < len(layers) - 1 or begin else 0)
        note(Kind.FORWARD, own - later, layer.forward_workspace)
        note(Kind.BACKWARD, own - later, max(again, layer.workspace + beside))
        for kind in (Kind.INPUT_GRAD, Kind.BACKWARD) if halves else ():
            note(kind, own - later_halves, max(again, layer.halves_workspace + beside))
        gone = input_ - (layers[number - 1].passed if number else 0)  # what was passed on is an input before it, too
        later += gone
        later_halves += gone - layer.kept_for_weight_grad
    return most


def _workspaces(stages: Stages, stage: int, *, halves: bool) -> dict[Kind, int]:
    """What a stage takes while it runs, on top of the activations of all its layers.

        0F    layer 0 runs: those of layers 1 and 2 are not there yet
        0B    layer 0 runs: those of layers 1 and 2 are no longer there, or with `halves` what their W needs instead

    So what an early layer takes counts only in so far as it is more than that. The gradient that a backward begins with
    stays until its end.
    """
    layers = stages.layers[stage]
    begin = layers[-1].boundary if stage < len(stages.layers) - 1 else 0
    forward = backward = whole = gone = given = 0
    for number, layer in reversed(list(enumerate(layers))):
        beside = begin if number < len(layers) - 1 else 0
        beside -= layer.passed if number > 0 else 0
        forward = max(forward, layer.forward_workspace - given)
        backward = max(backward, layer.halves_workspace + beside - gone)
        whole = max(whole, layer.workspace + beside - gone)
        own = max(0, layer.activation - layer.overlap)
        given += own
        # An input that the layer before holds too is there in any case.
        shared = min(layer.overlap, layer.kept_input)
        gone += own - max(0, layer.kept_for_weight_grad - shared) if halves else own
    weight = max(layer.weight_workspace for layer in layers)
    return {
        Kind.FORWARD: forward,
        Kind.RECOMPUTE: forward,
        Kind.BACKWARD: max(whole, backward, weight) if halves else whole,
        Kind.INPUT_GRAD: backward,
        Kind.WEIGHT_GRAD: weight,
    }


def over_limit(held: Sequence[Footprint], limits: Sequence[int | None]) -> list[int]:
    """The devices that hold more than they have, the fullest first."""
    excess = {
        device: footprint.total - limit
        for device, (footprint, limit) in enumerate(zip(held, limits, strict=True))
        if limit is not None and footprint.total > limit
    }
    return sorted(excess, key=lambda device: (-excess[device], device))
