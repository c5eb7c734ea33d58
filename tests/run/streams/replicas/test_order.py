"""The order of reads and applies as a value: printed, parsed, checked, and counted."""

import pytest

import gapless
from gapless.errors import ConfigError
from gapless.run.streams.replicas.order import Apply, Move, Order

DRAWN = "0r 1r 1a 1r 0a 1a"  # as in the docstring of the module


def test_an_order_prints_and_parses_back() -> None:
    order = Order.parse(DRAWN)
    assert order.moves[:3] == (Move(0, "r"), Move(1, "r"), Move(1, "a"))
    assert str(order) == DRAWN
    assert Order.parse(str(order)) == order
    assert hash(Order.parse("12r 12a")) == hash(Order((Move(12, "r"), Move(12, "a"))))
    assert Order.parse("") == Order()


def test_staleness_counts_the_updates_between_a_read_and_its_apply() -> None:
    order = Order.parse(DRAWN)
    assert order.applies == (Apply(1, 1, 0), Apply(0, 0, 1), Apply(1, 2, 1))
    assert order.max_staleness == 1
    assert order.mean_staleness == 2 / 3
    assert order.num_replicas == 2


def test_an_order_without_updates_is_not_stale() -> None:
    order = Order.parse("0r")
    assert (order.applies, order.max_staleness, order.mean_staleness) == ((), 0, 0.0)
    assert Order().num_replicas == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0r 0r", "move 1 of the order is 0r, but then replica 0 reads twice without applying"),
        ("0r 0a 1a", "move 2 of the order is 1a, but then replica 1 applies what it has not read for"),
        ("0r 0x", "'0x' is not a move of an order: write 0r (replica 0 reads) or 0a (it applies)"),
        ("a", "'a' is not a move of an order: write 0r (replica 0 reads) or 0a (it applies)"),
    ],
)
def test_an_order_that_makes_no_sense_says_where(text: str, message: str) -> None:
    with pytest.raises(gapless.GaplessError) as caught:
        Order.parse(text)
    assert str(caught.value) == message


def test_the_loaders_of_replicas_are_merged_as_they_were_read() -> None:
    order = Order.parse("0r 1r 1a 1r 0a 1a 0r")
    assert list(order.merged(["ab", "xyz"])) == ["a", "x", "y", "b"]
    with pytest.raises(ConfigError, match="the order has 2 replicas, but 1 loaders came: give each its own"):
        order.merged(["abc"])
    with pytest.raises(ConfigError, match="replica 1 has read more minibatches than its loader has: give it all of"):
        list(order.merged(["ab", "x"]))
