"""Everything of a tree of tensors but its numbers: structure, constants, dtypes, shapes, strides, which tensors want a
gradient, which were views, and which are to be read with another sign, as conjugates and their parts are. It is
described in JSON, from which another process makes its own; nothing is pickled.
"""

import dataclasses
import math
import sys
from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gapless.errors import ConfigError
from gapless.stage.batch import microbatch as mb
from gapless.stage.batch.aliases import View, memory_of
from gapless.stage.batch.view_bases import mark_view, was_view

ALIGNMENT = 64
_SPARSEST = 8  # a tensor that is spread thinner than this over its memory arrives compact


@dataclasses.dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor is in a message, and how it is laid out there and at its end."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool
    was_view: bool
    offset: int  # in elements, from the beginning of the data
    sent_shape: tuple[int, ...]
    sent_stride: tuple[int, ...]
    signs: int

    def target(self, storage: Any, start: int) -> Tensor:
        """The place of the tensor in a buffer whose data begin at byte `start`."""
        made = torch.empty(0, dtype=self.dtype, device=storage.device)
        made.set_(storage, start // made.itemsize + self.offset, self.sent_shape, self.sent_stride)
        return made

    def read(self, storage: Any, start: int) -> Tensor:
        """The tensor as it was, as a view if it is dense there."""
        made = torch.empty(0, dtype=self.dtype, device=storage.device)
        at = start // made.itemsize + self.offset
        if self.sent_stride == self.stride:
            made.set_(storage, at, self.shape, self.stride)
        else:
            made.set_(storage, at, self.sent_shape, self.sent_stride)
            made = torch.empty_strided(
                self.sent_shape, self.stride, dtype=self.dtype, device=made.device, pin_memory=made.is_pinned()
            ).copy_(made)
            made = made.as_strided(self.shape, self.stride) if self.sent_shape != self.shape else made
        return self.finished(made)

    def finished(self, made: Tensor) -> Tensor:
        """All of it that is not in its bytes."""
        made = read_with(self.signs, made) if self.signs else made
        if self.was_view:
            mark_view(made)
        return made.requires_grad_() if self.requires_grad else made


class TreeLayout:
    """How one kind of tree is written. `described` is what the other end makes its own from."""

    def __init__(self, described: dict[str, Any]) -> None:
        self._spec = _spec_from(described) if "spec" in described else None  # a lone tensor has none
        spec = self._spec
        self._is_list = spec is not None and spec.type is list and all(each.is_leaf() for each in _children(spec))
        self._leaves = [_constant_from(leaf) for leaf in described.get("leaves", ())]
        self._leaf_of: list[int] = described.get("places", [])
        self._again: list[tuple[int, int]] = described.get("again", [])
        self._views = [(place, View(*view)) for place, view in described.get("views", [])]
        self.places: list[TensorPlace] = []
        self.is_dense = True  # every tensor fills its memory
        end = 0
        for dtype, shape, stride, marks, signs in described["tensors"]:
            place = _place(_dtype(dtype), tuple(shape), tuple(stride), (*marks,), end, signs)
            self.places.append(place)
            self.is_dense &= (place.sent_shape, place.sent_stride) == (tuple(shape), tuple(stride))
            end += padded(math.prod(place.sent_shape) * place.dtype.itemsize)
        self.size = end
        self.is_all_views = all(place.sent_stride == place.stride for place in self.places)

    def tree(self, tensors: Sequence[Tensor]) -> Any:
        """With these tensors in it."""
        if self._spec is None:
            return tensors[0]
        if self._views:
            return mb.unflatten(tensors, mb.Shape(self._spec, self._leaves, self._leaf_of, self._again, self._views))
        leaves = list(self._leaves)
        for place, tensor in zip(self._leaf_of, tensors, strict=True):
            leaves[place] = tensor
        for place, number in self._again:
            leaves[place] = tensors[number]
        return leaves if self._is_list else pytree.tree_unflatten(leaves, self._spec)


def key_of(tree: Any) -> tuple[list[Tensor], Any]:
    """The tensors of a tree, and what its layout depends on."""
    if type(tree) is Tensor:
        return [tree], _kind_of(tree)
    if type(tree) is list and len(tree) == 1 and type(tree[0]) is Tensor:
        return tree, (list, *_kind_of(tree[0]))
    if _is_flat(tree):
        tensors = [item for item in tree if item is not None]
        return tensors, ("list", *(None if item is None else key_of(item)[1] for item in tree))
    tensors, shape = mb.flatten(tree, views=True)
    kinds = [_kind_of(tensor) for tensor in tensors]
    if shape is None:
        return tensors, (None, *kinds)
    constants = tuple((type(leaf), repr(leaf)) for leaf in shape.leaves)
    return tensors, (shape.spec, constants, tuple(shape.again), repr(shape.views) if shape.views else "", *kinds)


def _kind_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad, was_view(tensor), signs_of(tensor)


def signs_of(tensor: Tensor) -> int:
    """How its bytes are to be read: their negative, their conjugate, or as they are."""
    return tensor.is_neg() + 2 * tensor.is_conj()


def read_with(signs: int, tensor: Tensor) -> Tensor:
    """The same bytes, read so; twice is as they are."""
    with torch.no_grad():
        tensor = torch._neg_view(tensor) if signs & 1 else tensor
        return tensor.conj() if signs & 2 else tensor


def check(tree: Any) -> None:
    """Refuses tensors that are more than bytes with strides, by their name."""
    for tensor in mb.flatten(tree)[0]:
        _stride(tensor)


def _is_flat(tree: Any) -> bool:
    """Gradients: a list of tensors, some of which may be missing, and none shares memory with another."""
    if type(tree) is not list or not all(item is None or type(item) is Tensor for item in tree):
        return False
    there = [memory_of(item) for item in tree if item is not None]
    return len(there) == len(set(there))


def describe(tree: Any) -> dict[str, Any]:
    """What `TreeLayout` is made from, as JSON can say it."""
    described: dict[str, Any] = {}
    tensors, shape = mb.flatten(tree, views=True)
    if shape is not None:
        described = {
            "spec": _spec_to(shape.spec),
            "named": sorted(_named_tuples(shape.spec)),
            "leaves": [_constant(leaf) for leaf in shape.leaves],
            "places": shape.tensors,
            "again": shape.again,
            "views": shape.views,
        }
    described["tensors"] = [
        [
            str(tensor.dtype).removeprefix("torch."),
            list(tensor.shape),
            list(_stride(tensor)),
            [tensor.requires_grad, was_view(tensor)],
            signs_of(tensor),
        ]
        for tensor in tensors
    ]
    return described


def _stride(tensor: Tensor) -> tuple[int, ...]:
    kind = _kind(tensor)
    if kind:
        way_out = "make it a plain one first"
        if kind == "DTensor":
            way_out = "let the layer return its local part, with use_local_output=True or to_local()"
        raise ConfigError(f"a tensor that is a {kind} can't cross between processes: {way_out}")
    return tensor.stride()


def _kind(tensor: Tensor) -> str:
    """What it is, if it is more than bytes with strides."""
    if tensor.layout is not torch.strided:
        return str(tensor.layout)
    if tensor.is_nested or tensor.is_quantized:
        return "nested tensor" if tensor.is_nested else f"quantized tensor ({tensor.dtype})"
    if tensor.device.type == "meta":
        return "meta tensor without data"
    return "" if type(tensor) in (Tensor, torch.nn.Parameter) else type(tensor).__name__


def _place(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    marks: tuple[bool, bool],  # requires_grad, was_view
    start: int,
    signs: int,
) -> TensorPlace:
    sent = tuple(1 if step == 0 else size for size, step in zip(shape, stride, strict=True))
    offset, contiguous = start // dtype.itemsize, _contiguous(sent)
    span, dense = _span(sent, stride)
    count = math.prod(sent)
    if dense or count == 0:
        return TensorPlace(dtype, shape, stride, *marks, offset, sent, stride, signs)
    if span is None or span > _SPARSEST * count:  # elements share memory, or too little of it is used
        return TensorPlace(dtype, shape, _contiguous(shape), *marks, offset, shape, _contiguous(shape), signs)
    return TensorPlace(dtype, shape, stride, *marks, offset, sent, contiguous, signs)


def _span(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int | None, bool]:
    """How many elements of memory it lies in (None if some share a place), and whether all of them are its own."""
    dims = sorted((step, size) for size, step in zip(shape, stride, strict=True) if size > 1)
    filled, end = 1, 1
    for step, size in dims:
        if step < end:
            return None, False
        end += step * (size - 1)
        filled *= size
    return end, end == filled


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def padded(size: int) -> int:
    """The next multiple of the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _constant(leaf: Any) -> Any:
    if leaf is None or type(leaf) in (bool, int, float, str):
        return leaf
    if isinstance(leaf, torch.dtype):
        return {"dtype": str(leaf).removeprefix("torch.")}
    if isinstance(leaf, torch.device):
        return {"device": str(leaf)}
    raise ConfigError(
        f"a {type(leaf).__name__} can't cross between processes: what one stage hands to the next may hold tensors, "
        "numbers, strings and None; make anything else in the stage that needs it"
    )


def _constant_from(described: Any) -> Any:
    if not isinstance(described, dict):
        return described
    return _dtype(described["dtype"]) if "dtype" in described else torch.device(described["device"])


def _spec_to(spec: pytree.TreeSpec) -> str:
    for name in _named_tuples(spec):
        _register(name)
    try:
        return pytree.treespec_dumps(spec)
    except (NotImplementedError, TypeError) as error:
        raise ConfigError(
            f"what one stage hands to the next can't be described to another process ({error}): hand on a dict, a "
            "tuple or a list"
        ) from None


def _spec_from(described: dict[str, Any]) -> pytree.TreeSpec:
    for name in described["named"]:
        _register(name)
    return pytree.treespec_loads(described["spec"])


def _children(spec: pytree.TreeSpec) -> list[pytree.TreeSpec]:
    return spec.children() if hasattr(spec, "children") else spec.children_specs  # as older versions of torch say


def _named_tuples(spec: pytree.TreeSpec) -> set[str]:
    """Those in the structure, as module:name; every process has the class itself."""
    found = {name for child in _children(spec) for name in _named_tuples(child)}
    kind = spec.context if spec.type is namedtuple else None
    return found | {f"{kind.__module__}:{kind.__qualname__}"} if kind is not None else found


def _register(name: str) -> None:
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields")):
        raise ConfigError(f"the named tuple {name} is not there in every process: define it at the top of a module")
    if found not in pytree.SUPPORTED_SERIALIZED_TYPES:
        pytree._register_namedtuple(found, serialized_type_name=name)
