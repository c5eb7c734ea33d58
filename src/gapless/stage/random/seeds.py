"""One number for each place where randomness enters.

A pipeline runs layers in an order that depends on devices, schedule and thread timing. If every layer draws from a seed
that depends on none of these, the same step draws the same numbers everywhere, and the plain loop on one device can be
its reference.
"""

_MASK = (1 << 64) - 1


def seed_of(seed: int, step: int, microbatch: int, layer: int) -> int:
    """The seed a layer draws from: a 63-bit hash. Similar arguments give unrelated seeds.

    The reference calls `torch.manual_seed(seed_of(seed, step, microbatch, layer))` just before each layer.
    """
    state = 0
    for value in (seed, step, microbatch, layer):
        # One round of splitmix64: each is a bijection of 64 bits, so no two values of one argument collide.
        state = (state + value + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1
