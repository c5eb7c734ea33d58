"""How many threads the kernels of a CPU may take, for the calling thread alone.

Not all of them obey torch.set_num_threads: on ARM, matrix products go through oneDNN to the Arm Compute Library, which
asks OpenMP for a thread per core whatever was set, and devices side by side would have more threads than there are
cores. Where one thread is meant, OpenMP is told that a number asked for is a wish ("dynamic"), so that what was set
bounds it. It keeps both for each thread by itself; the number of nested levels, which would do too, some keep once for
all. Bits stay the same: the work is cut as before, and done one piece after another.
"""

import contextlib
import ctypes
import os
import platform
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch


def set_intra_op_threads(count: int) -> None:
    """For the rest of this thread's life."""
    torch.get_num_threads()  # torch sets a thread up at its first call; later that would undo the next line
    torch.set_num_threads(count)
    openmp = _openmp()
    if openmp is not None:
        openmp.omp_set_dynamic(count == 1)


@contextlib.contextmanager
def intra_op_threads(count: int) -> Iterator[None]:
    """For as long as it holds, for the calling thread; then as before."""
    before = torch.get_num_threads()
    openmp = _openmp()
    dynamic = openmp.omp_get_dynamic() if openmp is not None else 0
    set_intra_op_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        if openmp is not None:
            openmp.omp_set_dynamic(dynamic)


@cache
def _openmp() -> ctypes.CDLL | None:
    """The library that torch has loaded, where the Arm Compute Library may use it."""
    maps = Path("/proc/self/maps")
    if platform.machine() != "aarch64" or not maps.exists():
        return None
    fields = (line.split(maxsplit=5) for line in maps.read_text().splitlines() if "libgomp" in line)
    loaded = dict.fromkeys(each[5] for each in fields if len(each) == 6)
    home = Path(torch.__file__).parent
    own = tuple(f"{home.with_name(name)}{os.sep}" for name in (home.name, f"{home.name}.libs"))
    for path in sorted(loaded, key=lambda path: not path.startswith(own)):  # others may bring one of their own
        with contextlib.suppress(OSError):
            return ctypes.CDLL(path)
    return None
