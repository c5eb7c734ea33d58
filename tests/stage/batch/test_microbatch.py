"""Any tree of tensors is cut like torch.tensor_split and put together again."""

from __future__ import annotations

import random
from collections import UserDict
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from gapless.errors import ConfigError
from gapless.stage.batch import microbatch as mb
from gapless.stage.batch.minibatch import Minibatch


class Pair(NamedTuple):
    a: Tensor
    b: Any


@pytest.mark.parametrize(("size", "count"), [(8, 4), (7, 3), (5, 5), (13, 8), (6, 1)])
def test_a_batch_is_cut_like_tensor_split(size: int, count: int) -> None:
    x = torch.arange(size * 2).view(size, 2)
    parts = mb.split(x, count)
    assert [part.tolist() for part in parts] == [part.tolist() for part in x.tensor_split(count)]
    assert mb.sizes(size, count) == [len(part) for part in parts]
    assert torch.equal(mb.merge(parts), x)


def test_a_batch_smaller_than_the_number_of_microbatches_gives_fewer() -> None:
    assert [len(part) for part in mb.split(torch.zeros(3, 2), 8)] == [1, 1, 1]
    assert mb.sizes(3, 8) == [1, 1, 1]


def test_trees_are_cut_and_merged_and_the_rest_goes_to_every_microbatch() -> None:
    tree: dict[str, Any] = {
        "x": torch.arange(6),
        "pair": Pair(torch.arange(12).view(6, 2), None),
        "scale": 2,
        "table": torch.zeros(9),
        "n": [torch.tensor(3.0), "name"],
    }
    parts = mb.split(tree, 3)
    assert len(parts) == 3
    assert parts[1]["x"].tolist() == [2, 3]
    assert isinstance(parts[1]["pair"], Pair)
    assert parts[1]["pair"].a.tolist() == [[4, 5], [6, 7]]
    assert parts[2]["table"] is tree["table"]
    assert parts[0]["n"][1] == "name"
    merged = mb.merge(parts, [2, 2, 2])
    assert torch.equal(merged["x"], tree["x"])
    assert merged["table"].shape == (9,)
    assert merged["pair"].b is None


def test_outputs_that_cannot_be_joined_are_all_there() -> None:
    """CLIP's similarities of each image with each text, for a last batch of 5 in 4 parts, ended in torch's error."""
    outputs = [torch.eye(count) for count in (2, 1, 1, 1)]
    merged = mb.merge([{"similarity": output} for output in outputs], [2, 1, 1, 1])["similarity"]
    assert all(torch.equal(one, other) for one, other in zip(merged, outputs, strict=True))


def test_outputs_without_samples_that_differ_are_all_there() -> None:
    """The first microbatch's stood for all: a loss that a model returned was a quarter of the minibatch's data."""
    parts = [{"mean": torch.tensor(float(m)), "rows": torch.zeros(m + 3, 2), "x": torch.zeros(2)} for m in range(2)]
    merged = mb.merge(parts, [2, 2])
    assert merged["mean"] == [torch.tensor(0.0), torch.tensor(1.0)]
    assert [rows.shape for rows in merged["rows"]] == [(3, 2), (4, 2)]
    assert merged["x"].shape == (4,)
    whole = mb.merge(parts, [2, 2], {id(parts[0]["mean"]): torch.tensor(0.5)})
    assert torch.equal(whole["mean"], torch.tensor(0.5))
    assert torch.equal(mb.merge(parts[:1], [2])["mean"], torch.tensor(0.0))


def test_batch_dims_say_where_to_cut() -> None:
    tree = {"x": torch.zeros(5, 6), "table": torch.zeros(6, 6)}
    parts = mb.split(tree, 2, {"x": 1, "table": None})
    assert parts[0]["x"].shape == (5, 3)
    assert parts[0]["table"].shape == (6, 6)
    assert mb.batch_size(tree, {"x": 1}) == 6
    assert [part[0].shape for part in mb.split((torch.zeros(4, 6), torch.zeros(2, 6)), 3, 1)] == [(4, 2)] * 3
    with pytest.raises(ConfigError, match=r"batch_dims names \['y'\], which the batch does not have"):
        mb.split(tree, 2, {"y": 0})
    with pytest.raises(ConfigError, match=r"shape \(2, 5\) can't be cut along dimension 1, since the batch size is 6"):
        mb.split((torch.zeros(4, 6), torch.zeros(2, 5)), 3, 1)


def test_targets_are_cut_by_the_size_of_the_inputs() -> None:
    parts = mb.split({"weights": torch.ones(3), "y": torch.arange(6)}, 2, size=6)
    assert parts[1]["y"].tolist() == [3, 4, 5]
    assert parts[1]["weights"].shape == (3,)


class Encoded(UserDict[str, Any]):
    """As a tokenizer returns it."""


class Held(dict[str, Any]):
    """A dict that torch's trees do not know."""


@pytest.mark.parametrize("kind", [Encoded, Held, MappingProxyType])
def test_a_mapping_of_any_kind_is_cut_as_the_dict_it_is(kind: Any) -> None:
    """It was taken for a constant, and every microbatch got all of it."""
    batch = kind({"x": torch.arange(6), "scale": 2})
    assert mb.batch_size(batch) == 6
    parts = mb.split(batch, 3, {"x": 0})
    assert [(part["x"].tolist(), part["scale"]) for part in parts] == [([0, 1], 2), ([2, 3], 2), ([4, 5], 2)]
    assert all(type(part) is dict for part in parts)


def test_a_mapping_within_a_batch_that_hides_tensors_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Encoded holds tensors \(x\) that a pipeline can't see: pass a dict"):
        mb.split({"y": torch.zeros(4), "more": Encoded(x=torch.zeros(4))}, 2)


@pytest.mark.parametrize(("samples", "rows"), [(8, 2), (7, 2), (7, 1), (4, 1), (8, 5), (6, 3)])
def test_a_target_with_another_number_of_rows_is_refused(samples: int, rows: int) -> None:
    """Every microbatch got the same two labels, and trained on them; the plain loop refuses."""
    with pytest.raises(ConfigError, match=f"the target has {rows} rows for {samples} samples"):
        mb.split(torch.zeros(rows), 4, size=samples)


@pytest.mark.parametrize("target", [torch.zeros(()), (torch.zeros(8), torch.zeros(2))], ids=str)
def test_a_target_that_can_not_be_taken_for_rows_goes_to_every_microbatch(target: object) -> None:
    assert len(mb.split(target, 4, size=8)) == 4


def test_a_table_before_the_samples_is_not_taken_for_them() -> None:
    """The table was cut, and the samples went whole to every microbatch."""
    table, x, y = torch.zeros(5, 16), torch.zeros(12, 16), torch.zeros(12)
    cut = partial(Minibatch.cut, microbatches=4, target_dims=None)
    shapes = r"inputs\['table'\] \(5, 16\), \['x'\] \(12, 16\); target \(12,\); .* with batch_dims="
    with pytest.raises(ConfigError, match=shapes):
        cut({"table": table, "x": x}, y, batch_dims=None)
    told = cut({"table": table, "x": x}, y, batch_dims={"x": 0})
    assert [tuple(part["table"].shape) for part in told.parts] == [(5, 16)] * 4
    assert list(cut({"x": x, "table": table}, y, batch_dims=None).sizes) == [3, 3, 3, 3]
    with pytest.raises(ConfigError, match="can't tell which of them counts the samples"):  # nothing confirms either
        cut({"table": table, "x": x}, torch.zeros(84), batch_dims=None)
    assert list(cut({"x": x, "table": table}, None, batch_dims=None).sizes) == [3, 3, 3, 3]
    positions = {"position_ids": torch.zeros(1, 7), "input_ids": torch.zeros(12, 7), "labels": torch.zeros(12, 7)}
    with pytest.raises(ConfigError, match="can't tell"):  # it was one microbatch
        cut(positions, None, batch_dims=None)
    with pytest.raises(ConfigError, match="can't tell"):  # each counted as one sample
        Minibatch.given([positions] * 2, None, 2, None)


def test_the_samples_of_random_trees_are_cut_or_they_are_refused() -> None:
    for seed in range(200):
        _assert_cut_or_refused(seed)


def _assert_cut_or_refused(seed: int) -> None:
    """Whatever the order, if there are targets: a tensor that counts samples is never given whole, and none else is
    cut. Tables of one tree have sizes of their own; more tables of one size than samples could not be told from them.
    """
    chance = random.Random(seed)
    size, count = chance.randint(2, 12), chance.randint(1, 4)

    def leaf(key: str, extra: list[int]) -> Tensor:
        rows = {"sample": (size, 3), "table": (extra.pop(), 3), "scalar": ()}[key]
        return torch.full(rows, 1.0 if key == "sample" else 0.0)

    def tree(keys: list[str], *, mixed: bool) -> Any:
        if mixed:
            chance.shuffle(keys)
        extra = chance.sample([n for n in range(1, 15) if n != size], k=8)
        parts: list[Any] = [leaf(key, extra) for key in keys]
        if len(parts) > 1 and chance.random() < 0.5:
            parts = [parts[0], tuple(parts[1:])] if chance.random() < 0.5 else [{"a": parts[0], "b": parts[1:]}]
        return {str(number): part for number, part in enumerate(parts)} if chance.random() < 0.5 else tuple(parts)

    kinds = ["table", "scalar", "sample"]
    has_target = chance.random() < 0.7
    inputs = tree(["sample", *chance.choices(kinds, k=chance.randint(0, 3))], mixed=has_target)
    target = tree(["sample", *chance.choices(kinds[:2], k=chance.randint(0, 1))], mixed=True) if has_target else None
    try:
        batch = Minibatch.cut(inputs, target, count, None, None)
    except ConfigError as error:
        assert "batch_dims=" in str(error)  # noqa: PT017
        return
    assert list(batch.sizes) == mb.sizes(size, count)
    whole = mb.flatten(inputs, once=False)[0]
    for part, rows in zip(batch.parts, batch.sizes, strict=True):
        for tensor, came in zip(mb.flatten(part, once=False)[0], whole, strict=True):
            is_sample = bool(came.dim() and came[0, 0])
            assert tensor.shape == ((rows, 3) if is_sample else came.shape)
