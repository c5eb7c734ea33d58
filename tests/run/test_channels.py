"""Channels as the proof has them: what `verify` says about buffers and unsent messages holds for what runs."""

import random
import threading
import time
from collections import Counter

import pytest

from gapless.run.channels import InOrderOfUse, ThreadChannels
from gapless.schedule.action import Schedule
from gapless.schedule.lower.inference import forward_only
from gapless.schedule.pools import most_unsent, receive_buffers
from gapless.schedule.recipes import make_schedule
from gapless.schedule.routes import MAKERS, Channel, Routes

NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "naive")


def most_held(schedule: Schedule, seed: int, late: tuple[Channel, int] | None = None) -> Counter[Channel]:
    """Every device a thread that plays its row, with pauses; per channel the most messages sent and not yet taken.

    The device at the end of the channel `late` begins when so many wait for it.
    """
    transport = ThreadChannels(schedule)
    routes = Routes(schedule.placement)
    held: Counter[Channel] = Counter()
    most: Counter[Channel] = Counter()
    lock = threading.Lock()

    def play(device: int) -> None:
        pauses = random.Random(1000 * seed + device)
        deadline = time.monotonic() + 30
        while late is not None and late[0][1] == device and held[late[0]] < late[1] and time.monotonic() < deadline:
            time.sleep(0.001)
        for action in schedule.rows[device]:
            arriving, leaving = routes.both(action) if action.kind in MAKERS else (None, None)
            if arriving is not None and arriving.crosses:
                transport.receiver(arriving.channel)()
                with lock:
                    held[arriving.channel] -= 1
            time.sleep(pauses.choice((0, 0, 0.0005)))
            if leaving is not None and leaving.crosses:
                channel = leaving.channel
                with lock:
                    held[channel] += 1
                    most[channel] = max(most[channel], held[channel])
                transport.sender(channel)(action)

    threads = [threading.Thread(target=play, args=(device,), daemon=True) for device in range(schedule.num_devices)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "it hangs"
    return most


@pytest.mark.parametrize("name", NAMES)
def test_no_channel_holds_more_than_the_proof_says(name: str) -> None:
    whole = make_schedule(name, devices=4, microbatches=8)
    fewer = make_schedule(name, devices=4, microbatches=4)
    for schedule in (whole, fewer, forward_only(whole)):
        pools, unsent = receive_buffers(schedule), most_unsent(schedule)
        for seed in range(2):
            for channel, count in most_held(schedule, seed).items():
                assert count <= pools[channel] + unsent[channel], channel


def test_the_bound_is_reached_where_somebody_is_late() -> None:
    schedule = make_schedule("gpipe", devices=2, microbatches=6)
    channel = (0, 1, "activation")
    bound = receive_buffers(schedule)[channel] + most_unsent(schedule)[channel]
    assert most_held(schedule, 0, late=(channel, bound))[channel] == bound == 6


def test_early_messages_have_as_many_slots_as_the_proof_says() -> None:
    came = iter(range(10))
    taker = InOrderOfUse(lambda: next(came), [2, 0, 1, 3, 5, 4], slots=3)
    assert [taker.take() for _ in range(6)] == [2, 0, 1, 3, 5, 4]
    came = iter(range(10))
    with pytest.raises(AssertionError, match="more than 2 wait"):
        InOrderOfUse(lambda: next(came), [2, 0, 1], slots=2).take()
