"""A profile as JSON that a person can read, edit and write by hand.

    {
      "profile": "a small GPT", "samples": 4, "input": "16 KiB",
      "layers": [
        {"name": "embedding", "forward": "0.2 ms", "parameters": "98 MiB", "activation": "3 MiB", "boundary": "3 MiB"},
        {"name": "block", "repeat": 12, "forward": {"median": "1.1 ms", "spread": "0.02 ms"}, ...}
      ],
      "links": [{"name": "nvlink", "devices": 8, "latency": "8 us", "bandwidth": "200 GB/s"}]
    }

A number without a unit is seconds, bytes or bytes per second. What is wrong is said with its place and its numbers.
"""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from gapless import units
from gapless.errors import ConfigError, printable
from gapless.plan.profile.contention import ALONE, Contention
from gapless.plan.profile.profile import SLACK, EntryTime, Layer, Link, Profile, Seconds, Sizes
from gapless.user_file import read_user_file

_MOST_LAYERS = 1_000_000
_FAULTS_SHOWN = 3

T = TypeVar("T")

_TIMES = ("forward", "input_grad", "weight_grad", "recompute", "backward", "update")
_SIZES = tuple(each.name for each in fields(Sizes))
_LAYER_KEYS = ("layer", "name", "repeat", *_TIMES, "overhead", *_SIZES)
_LINK_KEYS = ("name", "devices", "latency", "bandwidth")
_PROFILE_KEYS = (
    *("profile", "device", "samples", "minibatch", "input", "reserved", "slack"),
    *("entry", "contention", "layers", "links"),
)
_ENTRY_KEYS = ("forward", "backward")
_CONTENTION_KEYS = ("forward", "backward", "halves", "at_once")


def write_profile(profile: Profile, path: str | Path) -> None:
    """As `profile_text`."""
    Path(path).write_text(profile_text(profile), encoding="utf-8", newline="\n")


def read_profile(path: str | Path) -> Profile:
    """A profile from its file."""
    return read_user_file(path, parse_profile, "a profile", "is a JSON file")


def profile_text(profile: Profile) -> str:
    """JSON with a line per layer and link; `parse_profile` gives the same profile back."""
    head: dict[str, Any] = {"profile": profile.name, "device": profile.device, "samples": profile.samples}
    head |= {
        "minibatch": profile.minibatch,
        "input": profile.input,
        "reserved": profile.reserved,
        "slack": profile.slack,
    }
    if profile.entry != EntryTime():
        head["entry"] = asdict(profile.entry)
    if profile.contention != ALONE:
        head["contention"] = {key: value for key, value in asdict(profile.contention).items() if value is not None}
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items() if value is not None]
    layers = [{"layer": number, **_layer_to_json(layer)} for number, layer in enumerate(profile.layers)]
    links = [{key: value for key, value in asdict(link).items() if value is not None} for link in profile.links]
    for key, rows in (("layers", layers), ("links", links)):
        listed = ",\n".join(f"    {json.dumps(row)}" for row in rows)
        lines.append(f'  "{key}": [\n{listed}\n  ]' if rows else f'  "{key}": []')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _layer_to_json(layer: Layer) -> dict[str, Any]:
    found: dict[str, Any] = {"name": layer.name}
    for key in _TIMES:
        time: Seconds | None = getattr(layer, key)
        if time is not None:
            found[key] = asdict(time) if time.spread else time.median
    if layer.overhead:
        found["overhead"] = layer.overhead
    return found | {key: getattr(layer, key) for key in _SIZES}


def parse_profile(text: str) -> Profile:
    """Of the text of a file."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the profile is not valid JSON: {str(error)[:120]}") from None
    reader = _Reader()
    profile = reader.profile(data)
    if reader.faults:
        more = len(reader.faults) - _FAULTS_SHOWN
        listed = "; ".join(reader.faults[:_FAULTS_SHOWN])
        raise ConfigError(f"{listed}; and {more} more" if more > 0 else listed)
    return profile


class _Reader:
    """Reads on after a fault, so that all of them can be told at once."""

    def __init__(self) -> None:
        self.faults: list[str] = []

    def profile(self, data: Any) -> Profile:
        if not isinstance(data, dict) or not isinstance(data.get("layers"), list) or not data["layers"]:
            self.faults.append(
                'the profile has no layers: it needs "layers", a list such as [{"name": "block", "forward": "1.5 ms", '
                '"parameters": "12 MiB", "activation": "6 MiB", "boundary": "1 MiB"}]'
            )
            return Profile("", ())
        self._check_keys("the profile", data, _PROFILE_KEYS)
        links = data.get("links", [])
        if not isinstance(links, list):
            self.faults.append('"links" is not a list')
            links = []
        made = Profile(
            name=printable(str(data.get("profile", ""))),
            layers=tuple(self._layers(data["layers"])),
            links=tuple(self._links(links)),
            samples=self._count("the profile", data, "samples", 1),
            input=self._bytes("the profile", data, "input", 0),
            minibatch=self._count("the profile", data, "minibatch", 1) if data.get("minibatch") is not None else None,
            reserved=self._bytes("the profile", data, "reserved", 0),
            device=printable(str(data.get("device", ""))),
            slack=self._number("the profile", data, "slack", _at_least(0), SLACK),
            entry=self._entry(self._object("entry", data, _ENTRY_KEYS)),
            contention=self._contention(self._object("contention", data, _CONTENTION_KEYS)),
        )
        if not self.faults and not any(layer.forward.median for layer in made.layers):
            self.faults.append(f"no time was measured: the forward of all {len(made.layers)} layers takes 0 seconds")
        return made

    def _object(self, place: str, data: dict[str, Any], known: tuple[str, ...]) -> dict[str, Any]:
        """What stands under that key; nothing where it is not there."""
        found = data.get(place, {})
        if not isinstance(found, dict):
            self.faults.append(f"{place} is {found!r:.40}, but it must be an object with {', '.join(known)}")
            return {}
        self._check_keys(place, found, known)
        return found

    def _entry(self, data: dict[str, Any]) -> EntryTime:
        return EntryTime(
            *(
                self._number("entry", data, key, lambda value: units.read(value, units.LATENCY), 0.0)
                for key in _ENTRY_KEYS
            )
        )

    def _contention(self, data: dict[str, Any]) -> Contention:
        forward, backward, halves = (
            self._number("contention", data, key, _at_least(1), 1.0) for key in _CONTENTION_KEYS[:3]
        )
        at_once = self._number("contention", data, "at_once", _above_zero, 1.0) if "at_once" in data else None
        return Contention(forward, backward, halves, at_once)

    def _layers(self, rows: list[Any]) -> Iterable[Layer]:
        expected = 0
        for row in rows:
            if not isinstance(row, dict):
                self.faults.append(
                    f"layer {expected} is {row!r:.40}, but a layer is an object with a name and its costs"
                )
                expected += 1
                continue
            place = f"layer {expected}" + (f" ({printable(str(row['name'])[:60])})" if "name" in row else "")
            self._check_keys(place, row, _LAYER_KEYS)
            number = row.get("layer", expected)
            if number != expected:
                self.faults.append(
                    f"layer {expected} is missing: after layer {expected - 1} comes {number!r:.40}"
                    if expected
                    else f"layer 0 is missing: the first one is {number!r:.40}"
                )
                expected = number if isinstance(number, int) and number >= 0 else expected
            repeat = self._count(place, row, "repeat", 1)
            if expected + repeat > _MOST_LAYERS:
                self.faults.append(
                    f"{place} ends at layer {expected + repeat}, but a profile has at most {_MOST_LAYERS:,}"
                )
                return
            layer = self._layer(place, row, printable(str(row.get("name", expected))))
            if repeat == 1:
                yield layer
            for copy in range(repeat if repeat > 1 else 0):
                yield Layer(**{**vars(layer), "name": f"{layer.name}.{copy}"})
            expected += repeat

    def _layer(self, place: str, row: dict[str, Any], name: str) -> Layer:
        forward = self._time(place, row, "forward")
        sizes: dict[str, int] = {}
        for each in fields(Sizes):
            like = each.metadata["like"]
            unless_given = each.metadata["times"] * sizes[like] if like else 0
            default = None if each.metadata["needed"] else unless_given
            sizes[each.name] = self._bytes(place, row, each.name, default)
        if sizes["overlap"] > sizes["activation"]:
            self.faults.append(
                f"{place}: overlap is {sizes['overlap']} bytes, but it must be a part of the activation's "
                f"{sizes['activation']}"
            )
        return Layer(
            name=name,
            forward=forward,
            input_grad=self._time(place, row, "input_grad", forward),
            weight_grad=self._time(place, row, "weight_grad", forward),
            recompute=self._time(place, row, "recompute", forward),
            backward=self._time(place, row, "backward") if row.get("backward") is not None else None,
            update=self._time(place, row, "update", Seconds(0.0)),
            overhead=self._number(place, row, "overhead", lambda value: units.read(value, units.SECONDS), 0.0),
            **sizes,
        )

    def _links(self, rows: list[Any]) -> Iterable[Link]:
        within = 1
        for number, row in enumerate(rows):
            if not isinstance(row, dict):
                self.faults.append(f"link {number} is {row!r:.40}, but a link is an object with its bandwidth")
                continue
            place = f"link {number}" + (f" ({printable(str(row['name'])[:60])})" if "name" in row else "")
            self._check_keys(place, row, _LINK_KEYS)
            devices = self._count(place, row, "devices", 2) if row.get("devices") is not None else None
            if devices is None and number < len(rows) - 1:
                self.faults.append(
                    f"{place} has no number of devices: only the last link, the outermost, may leave it out"
                )
            if devices is not None and (devices <= within or devices % within):
                self.faults.append(
                    f"{place} connects {devices} devices, but the level within has {within}: from the innermost out, "
                    "each is a multiple of the one before"
                )
            within = devices or within
            yield Link(
                printable(str(row.get("name", number))),
                devices,
                self._number(place, row, "latency", lambda value: units.read(value, units.LATENCY), 0.0),
                self._number(place, row, "bandwidth", lambda value: units.read(value, units.BANDWIDTH), 0.0)
                if row.get("bandwidth") is not None
                else None,
            )

    def _time(self, place: str, row: dict[str, Any], key: str, default: Seconds | None = None) -> Seconds:
        def read(value: Any) -> Seconds:
            if isinstance(value, dict) and "median" in value and value.keys() <= {"median", "spread"}:
                return Seconds(*(units.read(value.get(part, 0), units.SECONDS) for part in ("median", "spread")))
            return Seconds(units.read(value, units.SECONDS))

        return self._number(place, row, key, read, default, Seconds(0.0))

    def _bytes(self, place: str, row: dict[str, Any], key: str, default: int | None = None) -> int:
        return self._number(place, row, key, units.read_bytes, default, 0)

    def _count(self, place: str, row: dict[str, Any], key: str, default: int) -> int:
        def read(value: Any) -> int:
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 2**53:
                raise ConfigError(f"is {value!r:.40}, but it must be a whole number of at least 1")
            return value

        return self._number(place, row, key, read, default)

    def _number(
        self,
        place: str,
        row: dict[str, Any],
        key: str,
        read: Callable[[Any], T],
        default: T | None,
        bad: T | None = None,
    ) -> T:
        """What `read` makes of a value; a fault, and a stand-in to go on with, where it is none or there is none."""
        stand_in = default if default is not None else bad
        assert stand_in is not None
        if row.get(key) is None:
            if default is None:
                self.faults.append(f"{place} has no {key}")
            return stand_in
        try:
            return read(row[key])
        except ConfigError as error:
            self.faults.append(f"{place}: {key} {error}")
            return stand_in

    def _check_keys(self, place: str, row: dict[str, Any], known: tuple[str, ...]) -> None:
        for key in row:
            if key not in known:
                near = get_close_matches(str(key), known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(known)}"
                self.faults.append(f"{place} has {str(key)[:40]!r}, which is not understood; {hint}")


def _at_least(least: float) -> Callable[[Any], float]:
    def read(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
            raise ConfigError(f"is {value!r:.40}, but it must be a number of at least {least:g}")
        return float(value)

    return read


def _above_zero(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"is {value!r:.40}, but it must be a number above 0")
    return float(value)
