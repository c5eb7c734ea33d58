"""Channels between processes of one host, with both ends in this one."""

import os
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from gapless.errors import TransportError
from gapless.run.ranks.wire.channel import Courier
from gapless.run.ranks.wire.connections import Connections
from gapless.run.ranks.wire.inbox import Inbox, Outbox, find_near
from gapless.run.ranks.wire.pipes import ThroughPipes

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="opens files of other processes")


def _lost(rank: int | None, error: BaseException) -> Exception:
    return TransportError(f"rank {rank}: {error}")


def _ends(names: tuple[str, ...]) -> list[Connections]:
    inboxes = [Inbox() for _ in names]
    found = []
    for device, name in enumerate(names):
        courier = Courier(None, name, lambda _: None)
        near = {other: Outbox(os.getpid(), inbox.descriptor) for other, inbox in enumerate(inboxes) if other != device}
        made = Connections(courier, device, range(len(names)), _lost)
        made.carriers.append(ThroughPipes(courier, made.waiting, device, inboxes[device], near))
        found.append(made)
    return found


def _near(links: Connections) -> dict[int, Outbox]:
    (carrier,) = links.carriers
    assert isinstance(carrier, ThroughPipes)
    return carrier.near


@pytest.fixture
def links() -> Iterator[list[Connections]]:
    made = _ends(("one", "two", "three"))
    yield made
    for each in made:
        each.close()


def test_channels_do_not_mix_whatever_the_order_they_are_asked_in(links: list[Connections]) -> None:
    for number in range(3):
        links[0].outgoing(1, "activation").put(torch.full((2,), float(number)))
        links[2].outgoing(1, "activation").put(torch.full((3,), 10.0 + number))
        links[0].outgoing(1, "gradient").put([torch.full((4,), 20.0 + number)])
    for number in range(3):
        assert links[1].incoming(0, "gradient").get()[0].tolist() == [20.0 + number] * 4
    for number in range(3):
        assert links[1].incoming(2, "activation").get().tolist() == [10.0 + number] * 3
        assert links[1].incoming(0, "activation").get().tolist() == [0.0 + number] * 2


def test_a_message_may_be_longer_than_what_a_pipe_takes_at_once(links: list[Connections]) -> None:
    """Its description alone is."""
    tree = {f"a name that is rather long {number}": torch.tensor(number) for number in range(200)}
    for _ in range(2):
        links[0].outgoing(1, "activation").put(tree)
        came = links[1].incoming(0, "activation").get()
        assert list(came) == list(tree)
        assert all(torch.equal(came[name], value) for name, value in tree.items())


@pytest.mark.parametrize("size", [10, 400, 100_000])
def test_a_device_goes_on_while_nobody_reads(links: list[Connections], size: int) -> None:
    """More than the pipe holds: the rest waits with the courier, in order."""
    count = 3000 if size < 1000 else 40
    began = time.monotonic()
    for number in range(count):
        links[0].outgoing(1, "activation").put(torch.full((size,), float(number)))
    assert time.monotonic() - began < 30
    for number in range(count):
        came = links[1].incoming(0, "activation").get()
        assert came.shape == (size,)
        assert (came == number).all()


def test_what_the_device_copies_does_not_overtake_what_the_courier_copies(links: list[Connections]) -> None:
    """A device leaves large tensors to the courier, and sends small ones itself."""
    sizes = [200_000, 10, 200_000, 200_000, 10, 1_000, 200_000, 10] * 5
    outgoing = links[0].outgoing(1, "activation")
    for number, size in enumerate(sizes):
        (outgoing.put_now if number % 3 else outgoing.put)(torch.full((size,), float(number)))
    for number, size in enumerate(sizes):
        came = links[1].incoming(0, "activation").get()
        assert came.shape == (size,)
        assert (came == number).all()


def test_whoever_waits_raises_when_the_other_end_breaks_off(links: list[Connections]) -> None:
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            links[1].incoming(0, "activation").get()
        except TransportError as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    links[0].break_off()
    thread.join(10)
    assert not thread.is_alive()
    assert "rank 0" in str(raised[0])


def test_who_has_left_is_not_waited_for_but_what_it_sent_comes(links: list[Connections]) -> None:
    links[0].outgoing(1, "activation").put(torch.ones(1))
    _near(links[0]).pop(1).close(0)
    assert links[1].incoming(0, "activation").get() == 1
    with pytest.raises(TransportError, match="closed: by device 0"):
        links[1].incoming(0, "activation").get()
    links[2].outgoing(1, "activation").put(torch.zeros(1))
    assert links[1].incoming(2, "activation").get() == 0


def test_a_write_to_an_end_that_is_gone_raises(links: list[Connections]) -> None:
    inbox = Inbox()
    _near(links[0])[1].close(0)
    _near(links[0])[1] = Outbox(os.getpid(), inbox.descriptor)
    inbox.close()
    with pytest.raises(RuntimeError, match="Connection closed"):
        links[0].outgoing(1, "activation").put(torch.zeros(1))


def test_what_was_sent_can_be_taken_after_its_sender_has_closed() -> None:
    made = _ends(("one", "two"))
    for number in range(5):
        made[0].outgoing(1, "activation").put(torch.full((100_000,), float(number)))
    closing = threading.Thread(target=made[0].close)
    closing.start()
    time.sleep(0.2)
    came = [made[1].incoming(0, "activation").get() for _ in range(5)]
    closing.join(10)
    assert not closing.is_alive()
    assert [float(each.mean()) for each in came] == [0.0, 1.0, 2.0, 3.0, 4.0]
    made[1].close()


def test_who_closes_does_not_wait_for_one_that_has_left() -> None:
    made = _ends(("one", "two"))
    made[0].outgoing(1, "activation").put(torch.zeros(100_000))
    made[1].close()
    made[0].close()


def test_as_much_as_one_likes_is_in_flight(links: list[Connections]) -> None:
    """More than a process may have open files."""
    before = len(os.listdir("/proc/self/fd"))
    for number in range(1500):
        links[0].outgoing(1, "activation").put(torch.full((1000,), float(number)))
    kept = [links[1].incoming(0, "activation").get() for _ in range(1500)]
    assert [float(each[-1]) for each in kept] == list(map(float, range(1500)))
    assert len(os.listdir("/proc/self/fd")) - before < 200


def test_a_child_does_not_give_back_what_its_parent_has(links: list[Connections]) -> None:
    links[0].outgoing(1, "activation").put(torch.ones(10_000))
    mine = links[1].incoming(0, "activation").get()
    child = os.fork()
    if child == 0:
        del mine
        os._exit(0)
    os.waitpid(child, 0)
    links[0].outgoing(1, "activation").put(torch.zeros(10_000))
    links[1].incoming(0, "activation").get()
    assert (mine == 1).all()


def test_where_it_is_not_allowed_nobody_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then everything goes over Gloo; and no rank leaves the others waiting to find out."""

    def refused(*_: object) -> int:
        raise PermissionError("no")

    monkeypatch.setattr(os, "memfd_create", refused)
    assert find_near(_AloneGroup(), 0) == (None, {})


class _AloneGroup:
    """Of one."""

    def size(self) -> int:
        return 1

    def allgather(self, rows: list[list[torch.Tensor]], mine: list[torch.Tensor]) -> "_AloneGroup":
        rows[0][0].copy_(mine[0])
        return self

    def wait(self) -> None:
        """It is there."""


def test_closing_leaves_nothing_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    made = _ends(("one", "two"))
    made[0].outgoing(1, "activation").put(torch.zeros(100_000))
    assert made[1].incoming(0, "activation").get().shape == (100_000,)
    for each in made:
        each.close()
    assert len(os.listdir("/proc/self/fd")) == before
