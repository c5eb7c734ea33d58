"""On what a result was measured: the parts that change times, and nothing that tells whose machine it was."""

import os
import platform
import re
from pathlib import Path

import torch

from gapless._version import __version__


def environment() -> dict[str, str | int]:
    """Processor, cores, GPU where there is one, and versions. No host name, no path."""
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return {
        "cpu": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "os": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gapless": __version__,
        **gpu,
    }


def _processor() -> str:
    """As the system names it; ARM machines have a number for the maker and one for the part."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor() or platform.machine()
    known = dict(re.findall(r"^(model name|CPU part)\s*:\s*(.*?)\s*$", info.read_text("utf-8"), re.MULTILINE))
    part = f", part {known['CPU part']}" if "CPU part" in known else ""
    return str(known.get("model name", f"{platform.machine()}{part}"))
