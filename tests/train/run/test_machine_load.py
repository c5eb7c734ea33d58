"""A busy machine is noticed, since the measured bubble then means little."""

from pathlib import Path

import pytest

from gapless.train.run import machine_load
from gapless.train.run.machine_load import MachineLoad

TICKS = 100


@pytest.mark.parametrize(
    ("own", "others", "idle", "seconds", "warned"),
    [
        (5, 15, 0, 10, "other programs took 75% of this machine's"),
        (20, 0, 0, 10, ""),
        (5, 5, 10, 10, ""),
        (1, 1, 0, 1, ""),
    ],
    ids=["others", "alone", "room for both", "short"],
)
def test_other_programs_are_noticed_where_they_take_time_from_the_run(
    own: int, others: int, idle: int, seconds: int, warned: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = {"process_time": 0.0, "monotonic": 0.0}
    stat = tmp_path / "stat"
    stat.write_text("cpu  0 0 0 0 0 0 0 0 0 0\ncpu0 0\n")
    monkeypatch.setattr(machine_load, "_STAT", stat)
    monkeypatch.setattr("os.sysconf", lambda name: TICKS)
    for name in clock:
        monkeypatch.setattr(f"time.{name}", lambda name=name: clock[name])
    load = MachineLoad()
    stat.write_text(f"cpu  {(own + others) * TICKS} 0 0 {idle * TICKS} 0 0 0 0 0 0\ncpu0 0\n")
    clock |= {"process_time": float(own), "monotonic": float(seconds)}
    assert load.warning().startswith(warned)
    assert bool(load.warning()) == bool(warned)


def test_without_such_a_file_nothing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_load, "_STAT", tmp_path / "none")
    assert MachineLoad().warning() == ""
