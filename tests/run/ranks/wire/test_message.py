"""A tree as bytes and back: structure, constants, dtypes, strides and bits, and a small header the second time."""

import re
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor

from gapless.errors import ConfigError
from gapless.run.ranks.wire.layout import ALIGNMENT
from gapless.run.ranks.wire.message import HEADER_SIZE, Reader, Writer, announced, announcement
from gapless.stage.batch import microbatch as mb

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
