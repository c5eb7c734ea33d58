"""What devices can do before the first backward, when nothing that forwards leave behind is given back yet.

Where memory is short they are full before the first microbatch has gone all the way down, and wait for it:

    0: F F F F . . . . I W F ...
       |--- length ---|
"""

import math
from collections.abc import Sequence
from typing import NamedTuple


class Fill(NamedTuple):
    """A layer in a forward: seconds of it and of a recompute, and the bytes that it leaves behind."""

    forward: float
    again: float
    size: float


def waited(layers: Sequence[Fill], microbatches: int, room: float, entry: float, fastest: float, power: float) -> float:
    """Seconds at speed 1 that devices of `power` together, with so many bytes for activations, are idle at the least.

    A layer runs on one device, one microbatch after the other, once the layers before it have run. What is recomputed
    leaves nothing behind; but it has to run again, so that of what it does now only what it takes longer than that is
    gained. `entry`: what it takes to begin a forward, at the most once for a layer.
    """
    length = sum(layer.forward for layer in layers) / fastest
    done = before = 0.0
    items = []
    for layer in layers:
        most = min(microbatches, (length * fastest - before) / layer.forward) if layer.forward else microbatches
        before += layer.forward
        gained = max(0.0, layer.forward - layer.again)
        done += most * gained
        items.append((layer.forward - gained + entry, layer.size, most))
    # What takes longest for each byte fills the room first, the last of it in part.
    for seconds, size, most in sorted(items, key=lambda item: item[0] / item[1] if item[1] else math.inf, reverse=True):
        number = min(most, room / size) if size else most
        done += number * seconds
        room -= number * size
    return max(0.0, power * length - done)
