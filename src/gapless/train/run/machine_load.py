"""How busy other programs keep the machine: then times, and the bubble, are not those of the run alone."""

import os
import time
from pathlib import Path

_STAT = Path("/proc/stat")
_LONG = 10.0  # seconds; what is shorter tells nothing
_IDLE, _OTHERS = 0.1, 0.15  # of all processors: with less idle time and more of others the run had to wait


class MachineLoad:
    """From when it is made; for a run in one process."""

    def __init__(self) -> None:
        self._first = _now()

    def warning(self) -> str:
        """In one sentence, or nothing; only Linux tells."""
        now = _now()
        if self._first is None or now is None:
            return ""
        own, all_of_it, idle, wall = (after - before for after, before in zip(now, self._first, strict=True))
        others = max(0.0, all_of_it - idle - own) / (all_of_it or 1.0)
        if wall < _LONG or idle > _IDLE * all_of_it or others < _OTHERS:
            return ""
        return (
            f"other programs took {others:.0%} of this machine's processor time meanwhile: step times and the measured "
            "bubble mean little; run it again when the machine is idle"
        )


def _now() -> tuple[float, float, float, float] | None:
    """Seconds of this process, of all processors, of theirs without work, and of the clock."""
    try:
        ticks = [int(each) for each in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
        second = os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None
    return time.process_time(), sum(ticks) / second, sum(ticks[3:5]) / second, time.monotonic()
