"""A tree as bytes and back: structure, constants, dtypes, strides and bits, and a small header the second time."""

import contextlib
import os
import re
import resource
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gapless.errors import ConfigError
from gapless.run.ranks.wire.layout import ALIGNMENT
from gapless.run.ranks.wire.message import HEADER_SIZE, Reader, Writer, announced, announcement
from gapless.run.ranks.wire.segments import Attached, Segments
from gapless.run.ranks.wire.windows import Windows
from gapless.stage import microbatch as mb

Pair = namedtuple("Pair", "first second")


def assert_crosses(tree: Any, writer: Writer | None = None, reader: Reader | None = None) -> Any:
    writer, reader = writer or Writer(), reader or Reader()
    message = writer.write(tree)
    got = reader.read(message.buffer.clone())
    sent, sent_shape = mb.flatten(tree)
    came, came_shape = mb.flatten(got)
    assert came_shape == sent_shape
    for a, b in zip(sent, came, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert a.stride() == b.stride()
        assert a.requires_grad == b.requires_grad
        assert torch.equal(a, b)
    return got


X = torch.arange(24.0).view(4, 6)


@pytest.mark.parametrize(
    "tree",
    [
        X,
        X.clone().requires_grad_(),
        [X],
        [X, None, X.clone()],
        [None, None],
        [],
        {"x": X, "more": (X > 3, [None, 4, 1.5, "words", True, float("inf"), torch.float16])},
        OrderedDict([("b", X), ("a", 1)]),
        Pair(X, Pair(1, X.clone())),
        (0, X, X.clone()),
        X.double(),
        X.to(torch.bfloat16),
        X.long(),
        torch.complex(X, X),
        X.t(),
        X[:, ::2],
        X[1:3, 2:],
        X[:1].expand(5, 6),
        torch.tensor(2.0),
        torch.tensor(2.0).expand(3, 2),
        torch.empty(0, 3),
        X.view(2, 2, 6).permute(2, 0, 1),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ],
    ids=lambda tree: type(tree).__name__,
)
def test_a_tree_comes_out_as_it_went_in(tree: Any) -> None:
    assert_crosses(tree)


def test_a_layout_is_described_once_and_named_afterwards() -> None:
    writer, sizes = Writer(), []
    for number in range(3):
        tree = {"x": X + number, "n": 1}
        sizes.append(writer.write(tree).buffer.numel())
    assert sizes[0] > sizes[1] == sizes[2] == ALIGNMENT + 128  # 24 floats, rounded up


def test_what_looks_alike_but_is_not_has_a_layout_of_its_own() -> None:
    writer, reader = Writer(), Reader()
    for constant in (1, True, 1.0, "1", None, 0.0, -0.0, 2):
        got = assert_crosses({"x": X, "c": constant}, writer, reader)
        assert type(got["c"]) is type(constant)
        assert repr(got["c"]) == repr(constant)
    assert_crosses(X, writer, reader)
    assert_crosses([X], writer, reader)
    assert_crosses((X,), writer, reader)
    assert_crosses(X.t(), writer, reader)


def test_a_message_is_used_again_once_it_was_sent() -> None:
    writer, reader = Writer(), Reader()
    assert_crosses(X, writer, reader)
    first = writer.write(X)
    second = writer.write(X + 1)
    assert first is not second
    first.sent()
    third = writer.write(X + 2)
    assert third is first
    assert torch.equal(reader.read(third.buffer), X + 2)
    assert torch.equal(reader.read(second.buffer), X + 1)


def test_a_blank_has_its_tensors_before_the_message_comes() -> None:
    writer, reader = Writer(), Reader()
    assert reader.blank(4096).read() is None
    assert_crosses([X.clone().requires_grad_()], writer, reader)
    blank = reader.blank(4096)
    message = writer.write([(X + 1).requires_grad_()])
    blank.buffer[: message.buffer.numel()] = message.buffer
    (got,) = blank.read()
    assert isinstance(got, Tensor)
    assert got.requires_grad
    assert torch.equal(got, X + 1)
    other = writer.write([X[:2].clone()])  # another kind: to be read from its description
    blank = reader.blank(4096)
    blank.buffer[: other.buffer.numel()] = other.buffer
    assert blank.read() is None
    assert torch.equal(reader.read(blank.buffer)[0], X[:2])


def test_two_tensors_of_one_message_do_not_share_a_version() -> None:
    first, second = assert_crosses([X, X.clone()])
    before = second._version
    first.add_(1)
    assert second._version == before


def test_every_tensor_begins_where_kernels_like_it() -> None:
    got = assert_crosses([torch.ones(3), torch.ones(5, dtype=torch.float16), torch.ones(7)])
    assert all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in got)


class Odd:
    pass


class Own(Tensor):
    pass


@pytest.mark.parametrize(
    ("tree", "name"),
    [
        ({"x": Odd()}, "Odd"),
        (X.to_sparse(), "torch.sparse_coo"),
        ((X, X.to_sparse_csr()), "torch.sparse_csr"),
        ((X, {1, 2}), "set"),
        ({"x": b"bytes"}, "bytes"),
        ([torch.quantize_per_tensor(X, 0.1, 0, torch.qint8)], "quantized tensor (torch.qint8)"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested tensor"),
        ([X, torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)], "torch.jagged"),
        ({"x": torch.empty(3, device="meta")}, "meta tensor without data"),
        (X.as_subclass(Own), "Own"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_can_not_cross_is_refused_with_a_way_out(tree: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"a {re.escape(name)} can't cross between processes: ."):
        Writer().write(tree)


def test_a_message_that_does_not_fit_is_announced() -> None:
    assert announced(announcement(12345)) == 12345
    assert announcement(1).numel() == HEADER_SIZE
    assert announced(Writer().write(X).buffer) == 0


def test_both_ends_know_what_is_posted_without_a_word() -> None:
    """The receiver posts what `passed` tells it; the sender, told the same sizes, knows where each message lands."""
    sender, receiver = Windows(), Windows()
    posted = [receiver.first[1]] * (2 * receiver.first[0])
    for size in [100, 20_000, 50, 5_000_000, 100, *[3_000_000] * 40, 6_000_000, *[10] * 5]:
        assert sender.capacity == posted.pop(0)
        fits = size <= sender.capacity
        sender.passed(0 if fits else size)
        block = receiver.passed(0 if fits else size)
        posted += [block[1]] * block[0] if block is not None else []
        assert posted  # there is always one more
    assert fits
    assert sender.capacity >= 6_000_000


def test_a_large_tensor_is_shared_and_its_memory_used_again_when_nobody_has_it() -> None:
    segments, attached = Segments(), Attached(os.getpid())
    writer, reader = Writer(segments=segments), Reader(attached=attached)
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
    writer, reader = Writer(segments=Segments()), Reader(attached=Attached(os.getpid()))
    got = assert_crosses(torch.randn(300, 300), writer, reader)
    assert set(os.listdir("/dev/shm")) == before
    del writer, reader, got
    assert len(os.listdir("/proc/self/fd")) == descriptors


def _crossed(tree: Any, writer: Writer, reader: Reader) -> Any:
    message = writer.write(tree)
    return reader.read_bytes(bytes(message.bytes))


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("size", [3, 5000])
def test_tensors_that_do_not_fill_their_memory_cross(shared: bool, size: int) -> None:
    writer, reader = Writer(segments=Segments() if shared else None), Reader(attached=Attached(os.getpid()))
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
    writer, reader = Writer(segments=Segments()), Reader(attached=Attached(os.getpid()))
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
    writer = Writer(segments=Segments() if shared else None)
    reader = Reader(attached=Attached(os.getpid()))
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
    writer, reader = Writer(segments=segments), Reader(attached=Attached(os.getpid()))
    trees = [torch.randn(3000 + 100 * number) for number in range(4)]
    assert_crosses(trees[0], writer, reader)
    written = [writer.write(tree) for tree in trees for _ in range(2)]
    messages = [bytes(message.bytes) for message in written]
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
