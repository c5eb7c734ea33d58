"""Seconds, bytes and bytes per second, as people write them and as they read them.

A number is seconds, bytes or bytes per second. A text has its unit: "1.5 ms", "24 GiB", "100 GB/s", "25 Gbit/s".
"""

import math
import re
from typing import Any, NamedTuple

from gapless.errors import ConfigError

_WRITTEN = re.compile(r"\s*([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?|[-+]?(?:nan|inf))\s*([A-Za-z/]*)\s*", re.ASCII | re.I)
_DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_BYTES = {f"{prefix}B": factor for prefix, factor in (_DECIMAL | _BINARY).items()}
_BITS = {f"{prefix}bit": factor / 8 for prefix, factor in _DECIMAL.items()}


class Quantity(NamedTuple):
    """What is measured, its units, an example to show, and the range in which a value is no slip of the unit."""

    name: str
    units: dict[str, float]
    example: str
    least: float
    most: float
    unit: str


SECONDS = Quantity("time", {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}, "1.5 ms", 0, 100, "seconds")
LATENCY = SECONDS._replace(example="8 us", most=1)
BYTES = Quantity("number of bytes", _BYTES, "24 MiB", 0, 2.0**53, "bytes")
BANDWIDTH = Quantity(
    "bandwidth",
    {f"{unit}/s": factor for unit, factor in (_BYTES | _BITS).items()}
    | {f"{prefix}bps": factor / 8 for prefix, factor in _DECIMAL.items() if prefix},
    "100 GB/s",
    1e5,
    1e15,
    "bytes/s",
)
FLOPS = Quantity(
    "speed", {f"{p}FLOP/s": f for p, f in (*_DECIMAL.items(), ("P", 1e15))}, "400 TFLOP/s", 1e6, 1e18, "FLOP/s"
)


def read(value: Any, quantity: Quantity) -> float:
    """A number from a number or a text with a unit. What it is not is said in a ConfigError: `is ..., but ...`."""
    number = value
    if isinstance(value, str):
        found = _WRITTEN.fullmatch(value.replace("µ", "u").replace("μ", "u"))
        try:
            number = float(found[1]) * _factor(found[2], quantity) if found else math.nan
        except (ValueError, KeyError):
            found = None
        if found is None:
            raise ConfigError(f"is {value[:40]!r}, but it must be a {quantity.name} such as {quantity.example!r}")
    elif isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(
            f"is {value!r:.40}, but it must be a {quantity.name}: a number, or a text as {quantity.example!r}"
        )
    number = float(number)
    shown = f"is {value[:40]!r}" if isinstance(value, str) else f"is {number:.6g} {quantity.unit}"
    if math.isnan(number):
        raise ConfigError(f"is nan, but it must be a {quantity.name} such as {quantity.example!r}")
    if number < 0:
        raise ConfigError(f"{shown}, but it can't be negative")
    if not quantity.least <= number <= quantity.most:
        low, high = quantity.least, quantity.most
        span = f"from {low:g} to {high:g}" if low else f"of at most {high:g}"
        raise ConfigError(
            f"{shown}, but a {quantity.name} {span} {quantity.unit} is expected: is the unit right, as in "
            f"{quantity.example!r}?"
        )
    return number


def _factor(unit: str, quantity: Quantity) -> float:
    """Gb/s is a bit or a byte depending on whom one asks, so bandwidths must be spelt right; 24gib is clear."""
    if not unit:
        return 1.0
    if quantity is BANDWIDTH:
        return quantity.units[unit]
    return {known.lower(): factor for known, factor in quantity.units.items()}[unit.lower()]


def read_bytes(value: Any) -> int:
    """Whole bytes: 1.5 of them is a unit that was forgotten."""
    number = read(value, BYTES)
    if not isinstance(value, str) and not number.is_integer():
        raise ConfigError(f"is {number:g} bytes, but bytes are whole: is the unit right, as in {BYTES.example!r}?")
    return round(number)


def show_seconds(seconds: float) -> str:
    """Four digits, in the largest unit that leaves a whole number before the point."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= factor:
            return f"{seconds / factor:.4g} {unit}"
    return f"{seconds * 1e9:.4g} ns" if seconds else "0 s"


def show_bytes(count: float) -> str:
    """The same in KiB, MiB, ..."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if count >= _BYTES[unit]:
            return f"{count / _BYTES[unit]:.4g} {unit}"
    return f"{count:.0f} B"


def show_count(count: int, word: str) -> str:
    """`1 device`, `2 devices`, `8 microbatches`."""
    plural = "" if count == 1 else "es" if word.endswith("ch") else "s"
    return f"{count:,} {word}{plural}"
