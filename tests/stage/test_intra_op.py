"""One thread is one thread, for every kernel, and only where it was asked for."""

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import gapless
from gapless.stage.intra_op import _openmp, intra_op_threads, set_intra_op_threads
from tests.programs import Programs

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")


def _in_a_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def _tasks() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def test_a_product_in_a_thread_of_one_starts_no_other_and_has_the_same_bits() -> None:
    x, weight, bias = torch.randn(64, 64), torch.randn(512, 64), torch.randn(512)
    expected = F.linear(x, weight, bias)
    found: list[torch.Tensor] = []
    more: list[set[str]] = []

    def work() -> None:
        set_intra_op_threads(1)
        before = _tasks()
        found.append(F.linear(x, weight, bias))
        more.append(_tasks() - before)

    _in_a_thread(work)
    assert torch.equal(found[0], expected)
    assert more == [set()]


def test_devices_of_one_thread_start_no_others() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    x = torch.randn(256, 64)
    with gapless.Pipeline(model, devices=2, microbatches=4, loss=F.mse_loss, intra_op_threads=1) as pipe:
        before = _tasks()
        pipe.step(x, x)
        assert len(_tasks() - before) <= 2  # the devices'


def test_it_is_put_back_and_concerns_the_calling_thread_alone() -> None:
    before, dynamic = torch.get_num_threads(), _dynamic()
    with intra_op_threads(1):
        assert torch.get_num_threads() == 1
        elsewhere: list[int | None] = []
        _in_a_thread(lambda: elsewhere.append(_dynamic()))
        assert elsewhere == [dynamic]
        with intra_op_threads(2):
            assert torch.get_num_threads() == 2
            assert _dynamic() == dynamic
        assert torch.get_num_threads() == 1
    assert (torch.get_num_threads(), _dynamic()) == (before, dynamic)


def _dynamic() -> int | None:
    openmp = _openmp()
    return None if openmp is None else openmp.omp_get_dynamic()


def test_a_library_in_a_folder_with_a_space_stops_nobody(programs: Programs, tmp_path: Path) -> None:
    """A program whose other libraries bring an OpenMP of their own, before torch's is looked for."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    program = f"""
import ctypes, shutil, torch
from gapless.stage.intra_op import _openmp
assert not _openmp.cache_info().currsize
found = [line.split(maxsplit=5)[5] for line in open("/proc/self/maps") if "libgomp" in line]
if found:
    copy = shutil.copy(found[0].strip(), {str(folder / "libgomp-other.so")!r})
    other = ctypes.CDLL(copy)
import gapless
layers = [torch.nn.Linear(4, 4) for _ in range(2)]
with gapless.Pipeline(layers, devices=["cpu"] * 2, microbatches=2, loss=torch.nn.functional.mse_loss) as pipe:
    pipe.step(torch.ones(4, 4), torch.ones(4, 4))
library = _openmp()
print(library is None or "other" not in library._name)
"""
    done = programs.run("-c", program)
    assert done.out == "True\n", done.err
