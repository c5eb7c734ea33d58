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
from functools import partial
from pathlib import Path
from typing import Any

from gapless import units
from gapless.errors import ConfigError, printable
from gapless.plan.profile.contention import ALONE, Contention
from gapless.plan.profile.pipedream_graph import is_graph, parse_graph
from gapless.plan.profile.profile import SLACK, EntryTime, Host, Layer, Link, Profile, Seconds, Sizes
from gapless.user_file import read_user_file

_MOST_LAYERS = 1_000_000
_FAULTS_SHOWN = 3

_TIMES = ("forward", "input_grad", "weight_grad", "recompute", "backward", "update")
_SIZES = tuple(each.name for each in fields(Sizes))
_LAYER_KEYS = ("layer", "name", "repeat", *_TIMES, "overhead", *_SIZES)
_HEAD = ("device", "samples", "minibatch", "input", "reserved", "slack")
_PROFILE_KEYS = ("profile", *_HEAD, "entry", "contention", "host", "layers", "links")


def write_profile(profile: Profile, path: str | Path) -> None:
    """As `profile_text`."""
    Path(path).write_text(profile_text(profile), encoding="utf-8", newline="\n")


def read_profile(path: str | Path) -> Profile:
    """A profile from its file, ours or PipeDream's."""
    return read_user_file(path, partial(_of_text, name=Path(path).stem), "a profile", "is a JSON file")


def _of_text(text: str, name: str) -> Profile:
    return parse_graph(text, name) if is_graph(text) else parse_profile(text)


def profile_text(profile: Profile) -> str:
    """JSON with a line per layer and link; `parse_profile` gives the same profile back."""
    head = {"profile": profile.name, **{key: getattr(profile, key) for key in _HEAD}}
    for key, usual in (("entry", EntryTime()), ("contention", ALONE), ("host", None)):
        if getattr(profile, key) != usual:
            head[key] = _there(getattr(profile, key))
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items() if value is not None]
    layers = [{"layer": number, **_layer_to_json(layer)} for number, layer in enumerate(profile.layers)]
    for key, rows in (("layers", layers), ("links", list(map(_there, profile.links)))):
        listed = ",\n".join(f"    {json.dumps(row)}" for row in rows)
        lines.append(f'  "{key}": [\n{listed}\n  ]' if rows else f'  "{key}": []')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _there(value: Any) -> dict[str, Any]:
    """What a dataclass says, without what it leaves open."""
    return {key: each for key, each in asdict(value).items() if each is not None}


def _layer_to_json(layer: Layer) -> dict[str, Any]:
    times: dict[str, Seconds | None] = {key: getattr(layer, key) for key in _TIMES}
    found: dict[str, Any] = {"name": layer.name}
    found |= {key: asdict(time) if time.spread else time.median for key, time in times.items() if time is not None}
    if layer.overhead:
        found["overhead"] = layer.overhead
    return found | {key: getattr(layer, key) for key in _SIZES}


def parse_profile(text: str) -> Profile:
    """Of the text of a file."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the profile is not valid JSON: {str(error)[:120]}") from None
    faults: list[str] = []
    profile = _profile(data, faults)
    if faults:
        more = len(faults) - _FAULTS_SHOWN
        listed = "; ".join(faults[:_FAULTS_SHOWN])
        raise ConfigError(f"{listed}; and {more} more" if more > 0 else listed)
    return profile


class _Object:
    """An object of the file. Reading goes on after a fault, so that all of them can be told at once."""

    def __init__(self, place: str, data: dict[str, Any], known: tuple[str, ...], faults: list[str]) -> None:
        self.place, self._data, self._faults = place, data, faults
        for key in data:
            if key not in known:
                near = get_close_matches(str(key), known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(known)}"
                faults.append(f"{place} has {str(key)[:40]!r}, which is not understood; {hint}")

    def get(self, key: str, read: Callable[[Any], Any], default: Any, *, needed: bool = False) -> Any:
        """What `read` makes of a value; the default, to go on with, where it is none or there is none."""
        if self._data.get(key) is None:
            if needed:
                self._faults.append(f"{self.place} has no {key}")
            return default
        try:
            return read(self._data[key])
        except ConfigError as error:
            self._faults.append(f"{self.place}: {key} {error}")
            return default

    def inner(self, key: str, kind: type) -> "_Object":
        """The object under that key, of which nothing need be there."""
        found, known = self._data.get(key, {}), tuple(each.name for each in fields(kind))
        if not isinstance(found, dict):
            self._faults.append(f"{key} is {found!r:.40}, but it must be an object with {', '.join(known)}")
            found = {}
        return _Object(key, found, known, self._faults)


def _profile(data: Any, faults: list[str]) -> Profile:
    if not isinstance(data, dict) or not isinstance(data.get("layers"), list) or not data["layers"]:
        faults.append(
            'the profile has no layers: it needs "layers", a list such as [{"name": "block", "forward": "1.5 ms", '
            '"parameters": "12 MiB", "activation": "6 MiB", "boundary": "1 MiB"}]'
        )
        return Profile("", ())
    row = _Object("the profile", data, _PROFILE_KEYS, faults)
    links = data.get("links", [])
    if not isinstance(links, list):
        faults.append('"links" is not a list')
        links = []
    made = Profile(
        name=printable(str(data.get("profile", ""))),
        layers=tuple(_layers(data["layers"], faults)),
        links=tuple(_links(links, faults)),
        samples=row.get("samples", _count, 1),
        input=row.get("input", units.read_bytes, 0),
        minibatch=row.get("minibatch", _count, None),
        reserved=row.get("reserved", units.read_bytes, 0),
        device=printable(str(data.get("device", ""))),
        slack=row.get("slack", _number(0, "of at least 0"), SLACK),
        entry=_entry(row.inner("entry", EntryTime)),
        contention=_contention(row.inner("contention", Contention)),
        host=_host(row.inner("host", Host)) if "host" in data else None,
    )
    if not faults and not any(layer.forward.median for layer in made.layers):
        faults.append("no time was measured: the forwards of all layers take 0 seconds")
    return made


def _entry(row: _Object) -> EntryTime:
    return EntryTime(*(row.get(key, _latency, 0.0) for key in ("forward", "backward")))


def _contention(row: _Object) -> Contention:
    times = {key: row.get(key, _number(1, "of at least 1"), 1.0) for key in ("forward", "backward", "halves")}
    return Contention(**times, at_once=row.get("at_once", _number(math.ulp(0), "above 0"), None))


def _host(row: _Object) -> Host:
    latency, memory = row.get("latency", _latency, 0.0), row.get("memory", units.read_bytes, None)
    return Host(row.get("bandwidth", _bandwidth, None), latency, memory)


def _layers(rows: list[Any], faults: list[str]) -> Iterable[Layer]:
    expected = 0
    for data in rows:
        if not isinstance(data, dict):
            faults.append(f"layer {expected} is {data!r:.40}, but a layer is an object with a name and its costs")
            expected += 1
            continue
        row = _Object(_place("layer", expected, data), data, _LAYER_KEYS, faults)
        number = data.get("layer", expected)
        if number != expected:
            after = f"after layer {expected - 1} comes" if expected else "the first one is"
            faults.append(f"layer {expected} is missing: {after} {number!r:.40}")
            expected = number if isinstance(number, int) and number >= 0 else expected
        repeat = row.get("repeat", _count, 1)
        if expected + repeat > _MOST_LAYERS:
            faults.append(f"{row.place} ends at layer {expected + repeat}, but a profile has at most {_MOST_LAYERS:,}")
            return
        layer = _layer(row, printable(str(data.get("name", expected))), faults)
        if repeat == 1:
            yield layer
        for copy in range(repeat if repeat > 1 else 0):
            yield Layer(**{**vars(layer), "name": f"{layer.name}.{copy}"})
        expected += repeat


def _layer(row: _Object, name: str, faults: list[str]) -> Layer:
    forward = row.get("forward", _time, Seconds(0.0), needed=True)
    sizes: dict[str, Any] = {}
    for each in fields(Sizes):
        like = each.metadata["like"]
        unless_given = each.metadata["times"] * sizes[like] if like else 0
        sizes[each.name] = row.get(each.name, units.read_bytes, unless_given, needed=each.metadata["needed"])
    if sizes["overlap"] > sizes["activation"]:
        faults.append(
            f"{row.place}: overlap is {sizes['overlap']} bytes, but it must be a part of the activation's "
            f"{sizes['activation']}"
        )
    others = dict.fromkeys(("input_grad", "weight_grad", "recompute"), forward)
    others |= {"backward": None, "update": Seconds(0.0)}
    times = {key: row.get(key, _time, default) for key, default in others.items()}
    return Layer(name=name, forward=forward, **times, overhead=row.get("overhead", _seconds, 0.0), **sizes)


def _links(rows: list[Any], faults: list[str]) -> Iterable[Link]:
    within = 1
    for number, data in enumerate(rows):
        if not isinstance(data, dict):
            faults.append(f"link {number} is {data!r:.40}, but a link is an object with its bandwidth")
            continue
        row = _Object(_place("link", number, data), data, tuple(each.name for each in fields(Link)), faults)
        devices = row.get("devices", _count, None if data.get("devices") is None else 2)
        if devices is None and number < len(rows) - 1:
            faults.append(f"{row.place} has no number of devices: only the last link, the outermost, may leave it out")
        if devices is not None and (devices <= within or devices % within):
            faults.append(
                f"{row.place} connects {devices} devices, but the level within has {within}: from the innermost out, "
                "each is a multiple of the one before"
            )
        within = devices or within
        name, latency = printable(str(data.get("name", number))), row.get("latency", _latency, 0.0)
        yield Link(name, devices, latency, row.get("bandwidth", _bandwidth, None))


def _place(word: str, number: int, data: dict[str, Any]) -> str:
    return f"{word} {number}" + (f" ({printable(str(data['name'])[:60])})" if "name" in data else "")


_seconds = partial(units.read, quantity=units.SECONDS)
_latency = partial(units.read, quantity=units.LATENCY)
_bandwidth = partial(units.read, quantity=units.BANDWIDTH)


def _time(value: Any) -> Seconds:
    if isinstance(value, dict) and "median" in value and value.keys() <= {"median", "spread"}:
        return Seconds(*(_seconds(value.get(part, 0)) for part in ("median", "spread")))
    return Seconds(_seconds(value))


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 2**53:
        raise ConfigError(f"is {value!r:.40}, but it must be a whole number of at least 1")
    return value


def _number(least: float, words: str) -> Callable[[Any], float]:
    def read(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
            raise ConfigError(f"is {value!r:.40}, but it must be a number {words}")
        return float(value)

    return read
