"""What would another 8 GiB, another device, a faster link bring? The best plan of a machine that has it, beside that of
the machine there is.

A change is written as what is changed, how, and by how much: `memory+8GiB` (of each device), `devices+1` (like the
last one), `speed*1.5` (of each device), `bandwidth*2` and `latency/2` (of every link), `minibatch*2`.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gapless import units
from gapless.errors import ConfigError, GaplessError
from gapless.plan.plan import Plan
from gapless.plan.profile.machine import Device
from gapless.plan.profile.profile import Link, Profile
from gapless.plan.search.search import search
from gapless.plan.search.search_options import SearchOptions

_WRITTEN = re.compile(r"\s*([a-z]+)\s*([+*/])\s*(.+?)\s*")
_WAYS = {"memory": "+*", "devices": "+", "speed": "*", "bandwidth": "*", "latency": "*/", "minibatch": "+*"}
_MOST_DEVICES = 4096
_ENOUGH = 1e-9  # that much more is no gain, but rounding


@dataclass(frozen=True)
class Change:
    """What is changed (`memory`, ...), how (`+`, `*` or `/`), and by how much; `text` as it was written."""

    what: str
    way: str
    by: float
    text: str

    def of(self, number: float) -> float:
        """What becomes of a number."""
        return number + self.by if self.way == "+" else number * self.by if self.way == "*" else number / self.by


@dataclass(frozen=True)
class Answer:
    """What a change brings.

    plan     the best one then; None where nothing is gained, and `reason` says so
    gain     in samples per second, as a share: 0.25 is a quarter more
    """

    change: Change
    plan: Plan | None
    gain: float
    reason: str = ""


def read_changes(text: str) -> tuple[Change, ...]:
    """As in `memory+8GiB,devices+1`."""
    return tuple(_read(word) for word in text.split(","))


def _read(word: str) -> Change:
    found = _WRITTEN.fullmatch(word)
    if found is None or found[1] not in _WAYS or found[2] not in _WAYS[found[1]]:
        raise ConfigError(
            f"{word[:40]!r} is not a change: write memory+8GiB, memory*2, devices+1, speed*1.5, bandwidth*2, "
            "latency/2 or minibatch*2"
        )
    what, way, amount = found.groups()
    try:
        by = units.read_bytes(amount) if (what, way) == ("memory", "+") else float(amount)
    except ConfigError as error:
        raise ConfigError(f"{word[:40]!r}: the size {error}") from None
    except ValueError:
        by = 0.0
    if not 0 < by < 2**53 or (way == "+" and by != int(by)):
        raise ConfigError(f"{word[:40]!r}: {amount[:20]!r} must be a {'whole ' if way == '+' else ''}number above 0")
    if what == "devices" and by > _MOST_DEVICES:
        raise ConfigError(f"{word[:40]!r}: a plan is made for at most {_MOST_DEVICES} devices")
    return Change(what, way, by, word.strip())


def usual_changes(profile: Profile, devices: Sequence[Device]) -> tuple[Change, ...]:
    """Those that everybody asks about, where they make sense."""
    asked = ["devices+1"]
    if any(device.memory is not None for device in devices):
        asked.insert(0, "memory+8GiB")
    if len(devices) > 1 and any(link.bandwidth is not None for link in profile.links):
        asked.append("bandwidth*2")
    return tuple(map(_read, asked))


def what_if(
    profile: Profile,
    devices: Sequence[Device],
    best: Plan,
    changes: Sequence[Change],
    wanted: SearchOptions,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Answer]:
    """Each change by itself. `best` is the plan of the machine as it is; the minibatch stays that of `best`."""
    answers = []
    for change in changes:

        def tell(line: str, change: Change = change) -> None:
            progress(f"what if {change.text}: {line}")

        try:
            changed, machine, minibatch = _changed(change, profile, devices, best.minibatch)
            plan = search(changed, machine, wanted, minibatch, tell).best
        except GaplessError as error:
            answers.append(Answer(change, None, 0.0, str(error)))
            continue
        gain = plan.throughput / best.throughput - 1
        gained = gain > _ENOUGH
        answers.append(Answer(change, plan, gain) if gained else Answer(change, None, 0.0, "nothing is faster then"))
    return answers


def _changed(
    change: Change, profile: Profile, devices: Sequence[Device], minibatch: int
) -> tuple[Profile, list[Device], int]:
    machine = list(devices)
    if change.what == "devices":
        machine += [machine[-1]] * int(change.by)
    elif change.what == "memory":
        if all(device.memory is None for device in machine):
            raise ConfigError("the devices have no memory limit: give --memory")
        machine = [
            device if device.memory is None else replace(device, memory=round(change.of(device.memory)))
            for device in machine
        ]
    elif change.what == "speed":
        machine = [replace(device, speed=change.of(device.speed)) for device in machine]
    elif change.what == "minibatch":
        minibatch = round(change.of(minibatch))
    else:
        if not profile.links:
            raise ConfigError("hops are free in this profile: give it links, or --bandwidth")
        profile = replace(profile, links=tuple(_link(change, link) for link in profile.links))
    return profile, machine, minibatch


def _link(change: Change, link: Link) -> Link:
    if change.what == "latency":
        return replace(link, latency=change.of(link.latency))
    return link if link.bandwidth is None else replace(link, bandwidth=change.of(link.bandwidth))
