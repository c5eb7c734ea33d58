"""On what a result was measured: the parts that change times, and nothing that tells whose machine it was."""

import os
import platform
from pathlib import Path

import torch

from gapless._version import __version__


def environment() -> dict[str, str | int]:
    """Processor, cores, GPU where there is one, and versions. No host name, no path."""
    found: dict[str, str | int] = {
        "cpu": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "os": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gapless": __version__,
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _processor() -> str:
    """As the system names it; ARM machines have a number for the maker and one for the part."""
    try:
        lines = [line.split(":", 1) for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines() if ":" in line]
    except OSError:
        return platform.processor() or platform.machine()
    known = {name.strip(): value.strip() for name, value in lines}
    if "model name" in known:
        return known["model name"]
    part = known.get("CPU part")
    return f"{platform.machine()}, part {part}" if part else platform.machine()
