"""Memory that two processes share: as the bytes of a message, used again when nobody has it, and never left behind."""

import contextlib
import os
import resource
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from gapless.run.ranks.wire.layout import ALIGNMENT
from gapless.run.ranks.wire.message import Message, Writer
from gapless.run.ranks.wire.shared_memory import Attached, Segments, SharingReader, SharingWriter
from tests.run.ranks.wire.test_message import X, assert_crosses


def test_a_large_tensor_is_shared_and_its_memory_used_again_when_nobody_has_it() -> None:
    segments, attached = Segments(), Attached(os.getpid())
    writer, reader = SharingWriter(segments), SharingReader(attached)
    big = torch.randn(200, 200)
    assert_crosses({"x": X}, writer, reader)
    first = assert_crosses([big, X.t()], writer, reader)
    kept = first[1]
    del first
    second = assert_crosses([big + 1, X.t()], writer, reader)
    where = kept.untyped_storage().data_ptr()
    assert second[0].untyped_storage().data_ptr() != where
    assert torch.equal(kept, X.t())  # the first one's memory was not taken while a part of it was in use
    del kept
    third = assert_crosses([big + 2, X.t()], writer, reader)
    assert third[0].untyped_storage().data_ptr() == where
    assert writer.write([big, X.t()]).buffer.numel() == ALIGNMENT  # a name, and no tensors


@pytest.mark.alone  # nobody else makes files meanwhile
def test_what_is_shared_leaves_no_file() -> None:
    before = set(os.listdir("/dev/shm"))
    descriptors = len(os.listdir("/proc/self/fd"))
    writer, reader = SharingWriter(Segments()), SharingReader(Attached(os.getpid()))
    got = assert_crosses(torch.randn(300, 300), writer, reader)
    assert set(os.listdir("/dev/shm")) == before
    del writer, reader, got
    assert len(os.listdir("/proc/self/fd")) == descriptors


def _crossed(tree: Any, writer: Writer, reader: SharingReader) -> Any:
    return reader.read_bytes(_bytes(writer.write(tree)))


def _writer(shared: bool) -> Writer:
    return SharingWriter(Segments()) if shared else Writer()


def _bytes(message: Message) -> bytes:
    return bytes(message.buffer.tolist())


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("size", [3, 5000])
def test_tensors_that_do_not_fill_their_memory_cross(shared: bool, size: int) -> None:
    writer, reader = _writer(shared), SharingReader(Attached(os.getpid()))
    base = torch.randn(size, 20)
    trees = [
        base[:, 0],  # so thin that it arrives compact
        base[:, ::3],
        base.flatten().unfold(0, 4, 1),  # elements that are there several times
        base[:, :1].expand(-1, 9),
        {"x": base, "nothing": torch.empty(0, dtype=torch.int64), "one": torch.tensor(True)},
    ]
    for tree in trees:
        for _ in range(3):
            for there, here in zip(
                pytree.tree_leaves(_crossed(tree, writer, reader)), pytree.tree_leaves(tree), strict=True
            ):
                assert there.dtype == here.dtype
                assert torch.equal(there, here)


def test_inference_mode_does_not_stick_to_messages() -> None:
    writer, reader = SharingWriter(Segments()), SharingReader(Attached(os.getpid()))
    for size in (4, 4000):
        x = torch.randn(size, 4)
        for _ in range(2):
            with torch.inference_mode():
                _crossed(x[:, ::2], writer, reader)
        for _ in range(2):
            assert torch.equal(_crossed(x[:, ::2], writer, reader), x[:, ::2])


@pytest.mark.parametrize("shared", [True, False])
def test_numbers_that_differ_from_their_bytes_cross(shared: bool) -> None:
    """A conjugate or its imaginary part is the memory of another tensor, to be read with another sign. It stays so, or
    kernels that know what to do with it would take another way, with other last bits.
    """
    writer, reader = _writer(shared), SharingReader(Attached(os.getpid()))
    for size in (3, 5000):
        z = torch.randn(size, 2, dtype=torch.complex64)
        trees = [z, z.conj(), z.mH, z.conj().requires_grad_(), z[:1].conj().expand(4, -1), z.conj()[:, ::2]]
        trees += [z.conj().imag, z.conj().imag.contiguous(), z.real[::2], torch.randn(size), z[0, 0].conj()]
        trees += [torch._neg_view(torch.randn(size)).requires_grad_(), torch._efficientzerotensor((size,))]
        for tensor in trees:
            for _ in range(3):
                for got in (_crossed(tensor, writer, reader), _crossed([tensor], writer, reader)[0]):
                    assert torch.equal(got, tensor)
                    assert (got.is_conj(), got.is_neg()) == (tensor.is_conj(), tensor.is_neg())
                    assert got.requires_grad == tensor.requires_grad
                    assert got.is_leaf


@pytest.mark.parametrize("limit", ["files", "memory"])
def test_a_receiver_that_can_not_share_memory_takes_a_copy(limit: str) -> None:
    """It took the want of a file descriptor, or of room for the whole segment, for a lost connection."""
    segments = Segments()
    writer, reader = SharingWriter(segments), SharingReader(Attached(os.getpid()))
    trees = [torch.randn(3000 + 100 * number) for number in range(4)]
    assert_crosses(trees[0], writer, reader)
    written = [writer.write(tree) for tree in trees for _ in range(2)]
    messages = [_bytes(message) for message in written]
    kind = resource.RLIMIT_NOFILE if limit == "files" else resource.RLIMIT_AS
    before = resource.getrlimit(kind)
    held: list[int] = []
    try:
        if limit == "files":
            resource.setrlimit(kind, (_highest_descriptor() + 1, before[1]))
            with contextlib.suppress(OSError):
                while True:
                    held.append(os.open(os.devnull, os.O_RDONLY))
        else:
            resource.setrlimit(kind, (_address_space(), before[1]))
        got = [reader.read_bytes(message) for message in messages]
    finally:
        resource.setrlimit(kind, before)
        for descriptor in held:
            os.close(descriptor)
    for tree, one, other in zip(trees, got[::2], got[1::2], strict=True):
        assert torch.equal(one, tree)
        assert torch.equal(other, tree)
        assert one.data_ptr() % ALIGNMENT == other.data_ptr() % ALIGNMENT == 0
    assert not segments.awaited


def _highest_descriptor() -> int:
    return max(int(name) for name in os.listdir("/proc/self/fd"))


def _address_space() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
