"""Where an activation and a gradient go: the one copy.

    F(s)        takes the activation of stage s-1, and hands its own to stage s+1
    I(s), B(s)  take the gradient of stage s+1,    and hand their own to stage s-1

all for the same microbatch. Between two stages of one device (at the turn of a vee) it stays where it is; between two
devices it is a message on a channel, which delivers in the order in which its messages were made.
"""

from collections import defaultdict
from typing import NamedTuple

from gapless.schedule.action import Action, Kind, Schedule
from gapless.schedule.placement import Placement

Channel = tuple[int, int, str]  # source device, target device, "activation" or "gradient"
Message = tuple[int, int]  # the stage that made it, and the microbatch

MAKERS = {Kind.FORWARD: 1, Kind.INPUT_GRAD: -1, Kind.BACKWARD: -1}
"""What hands something on, and how far away the stage is that takes it."""
SENDS = {Kind.SEND_ACTIVATION: 1, Kind.SEND_GRADIENT: -1}
"""The same where transfers are written out."""


class Route(NamedTuple):
    """From the stage that makes something to the one that takes it; on one device the ends of the channel are one."""

    source: int
    target: int
    channel: Channel
    crosses: bool  # from one device to another


class Routes:
    """What the actions of a placement take, and what they hand on."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._replicated = placement.single is None
        self._known: dict[tuple[int | Kind, ...], tuple[Route | None, Route | None]] = {}

    def arriving(self, action: Action) -> Route | None:
        """How what an action takes comes to it; None for what no stage makes."""
        return self.both(action)[0]

    def leaving(self, action: Action) -> Route | None:
        """How what an action has made, or sends, goes on; None where no stage takes it."""
        return self.both(action)[1]

    def both(self, action: Action) -> tuple[Route | None, Route | None]:
        """What arrives, and what leaves."""
        key = action if self._replicated else action[:2]
        found = self._known.get(key)
        if found is None:
            stage, kind, microbatch = action
            arrives, leaves = MAKERS.get(kind, 0), MAKERS.get(kind) or SENDS.get(kind, 0)
            found = self._between(stage - arrives, stage, microbatch), self._between(stage, stage + leaves, microbatch)
            self._known[key] = found
        return found

    def _between(self, source: int, target: int, microbatch: int) -> Route | None:
        if source == target or not 0 <= min(source, target) <= max(source, target) < self._placement.num_stages:
            return None
        here, there = self._placement.device(source, microbatch), self._placement.device(target, microbatch)
        name = "activation" if source < target else "gradient"
        return Route(source, target, (here, there, name), here != there)


def transfer(channel: Channel, message: Message) -> tuple[Action, Action]:
    """The send and the receive of a message, where transfers are written out."""
    stage, microbatch = message
    if channel[2] == "activation":
        return Action(stage, Kind.SEND_ACTIVATION, microbatch), Action(stage + 1, Kind.RECEIVE_ACTIVATION, microbatch)
    return Action(stage, Kind.SEND_GRADIENT, microbatch), Action(stage - 1, Kind.RECEIVE_GRADIENT, microbatch)


def messages(
    schedule: Schedule,
) -> tuple[dict[Channel, dict[Message, int]], dict[Channel, list[tuple[Message, Action]]]]:
    """What crosses between devices: per channel the number of each message as produced, and the consumers in their
    order.
    """
    routes = Routes(schedule.placement)
    produced: dict[Channel, dict[Message, int]] = defaultdict(dict)
    consumed: dict[Channel, list[tuple[Message, Action]]] = defaultdict(list)
    for action in schedule.actions:
        arriving, leaving = routes.both(action)
        if arriving is not None and arriving.crosses:
            consumed[arriving.channel].append(((arriving.source, action.microbatch), action))
        if leaving is not None and leaving.crosses and action.kind in MAKERS:
            numbers = produced[leaving.channel]
            numbers[leaving.source, action.microbatch] = len(numbers)
    return produced, consumed
