"""Quantities as people write them; a slip of the unit is told, not guessed."""

from typing import Any

import pytest

from gapless import units
from gapless.errors import ConfigError


@pytest.mark.parametrize(
    ("written", "seconds"),
    [(0.5, 0.5), (0, 0.0), ("1.5 ms", 1.5e-3), ("12us", 12e-6), ("12 µs", 12e-6), ("3e-3 s", 3e-3), ("7 NS", 7e-9)],
)
def test_times(written: Any, seconds: float) -> None:
    assert units.read(written, units.SECONDS) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(
    ("written", "size"),
    [(1024, 1024), ("24GiB", 24 * 2**30), ("24 gib", 24 * 2**30), ("1.5 KB", 1500), ("7 B", 7), ("512", 512)],
)
def test_sizes(written: Any, size: int) -> None:
    assert units.read_bytes(written) == size


@pytest.mark.parametrize(
    ("written", "bandwidth"), [("100 GB/s", 1e11), ("25 Gbit/s", 25e9 / 8), ("10 Gbps", 1.25e9), (1e9, 1e9)]
)
def test_bandwidths(written: Any, bandwidth: float) -> None:
    assert units.read(written, units.BANDWIDTH) == pytest.approx(bandwidth, rel=1e-12)


@pytest.mark.parametrize(
    ("written", "quantity", "message"),
    [
        ("12 MiB", units.SECONDS, "is '12 MiB', but it must be a time such as '1.5 ms'"),
        ("fast", units.SECONDS, "is 'fast', but it must be a time such as '1.5 ms'"),
        ("1.2.3 ms", units.SECONDS, "is '1.2.3 ms', but it must be a time such as '1.5 ms'"),
        ("", units.SECONDS, "is '', but it must be a time such as '1.5 ms'"),
        (float("nan"), units.SECONDS, "is nan, but it must be a time such as '1.5 ms'"),
        ("nan", units.SECONDS, "is nan, but it must be a time such as '1.5 ms'"),
        (-0.5, units.SECONDS, "is -0.5 seconds, but it can't be negative"),
        ("-3 ms", units.SECONDS, "is '-3 ms', but it can't be negative"),
        (1500, units.SECONDS, "is 1500 seconds, but a time of at most 100 seconds is expected: is the unit right, as"),
        (float("inf"), units.SECONDS, "is inf seconds, but a time of at most 100 seconds is expected"),
        (True, units.SECONDS, "is True, but it must be a time: a number, or a text as '1.5 ms'"),
        ([1], units.BYTES, "is [1], but it must be a number of bytes: a number, or a text as '24 MiB'"),
        ("3 ms", units.BYTES, "is '3 ms', but it must be a number of bytes such as '24 MiB'"),
        (100, units.BANDWIDTH, "is 100 bytes/s, but a bandwidth from 100000 to 1e+15 bytes/s is expected: is the unit"),
        ("25 Gb/s", units.BANDWIDTH, "is '25 Gb/s', but it must be a bandwidth such as '100 GB/s'"),
        (
            8,
            units.LATENCY,
            "is 8 seconds, but a time of at most 1 seconds is expected: is the unit right, as in '8 us'?",
        ),
    ],
)
def test_what_is_wrong_is_said(written: Any, quantity: units.Quantity, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        units.read(written, quantity)
    assert str(caught.value).startswith(message)


def test_half_a_byte_is_a_slip_of_the_unit() -> None:
    with pytest.raises(ConfigError, match=r"is 0\.5 bytes, but bytes are whole: is the unit right, as in '24 MiB'\?"):
        units.read_bytes(0.5)


def test_they_are_shown_with_four_digits() -> None:
    assert [units.show_seconds(s) for s in (1.23456, 0.0012, 3e-6, 5e-9, 0)] == [
        "1.235 s",
        "1.2 ms",
        "3 us",
        "5 ns",
        "0 s",
    ]
    assert [units.show_bytes(b) for b in (2**30, 1536, 12, 0)] == ["1 GiB", "1.5 KiB", "12 B", "0 B"]
