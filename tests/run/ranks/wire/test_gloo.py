"""Channels over Gloo."""

from gapless.run.ranks.wire.gloo import Windows


def test_both_ends_know_what_is_posted_without_a_word() -> None:
    """The receiver posts what `passed` tells it; the sender, told the same sizes, knows where each message lands."""
    sender, receiver = Windows(), Windows()
    posted = [receiver.first[1]] * (2 * receiver.first[0])
    for size in [100, 20_000, 50, 5_000_000, 100, *[3_000_000] * 40, 6_000_000, *[10] * 5]:
        assert sender.capacity == posted.pop(0)
        fits = size <= sender.capacity
        sender.passed(0 if fits else size)
        block = receiver.passed(0 if fits else size)
        posted += [block[1]] * block[0] if block is not None else []
        assert posted  # there is always one more
    assert fits
    assert sender.capacity >= 6_000_000
