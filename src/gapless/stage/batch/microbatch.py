"""A minibatch is any tree of tensors and constants; this file cuts it into microbatches and puts the results together.

The trees are those of `torch.utils._pytree`: tuples, lists, dicts, named tuples and every class registered there (the
outputs of Hugging Face models are). A tensor whose first dimension is the batch size is cut like `torch.tensor_split`;
all else goes to every microbatch. A tensor that only happens to have that size is told apart with `batch_dims`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gapless.errors import ConfigError
from gapless.guards.batches_and_losses import CUT_BATCHES

from .aliases import NOWHERE, View, made_with_views, places_of, with_views

_CONSTANTS = frozenset((bool, int, float, str))
LossWeight = Callable[[Any], Any] | Literal["sum"] | None


class Shape(NamedTuple):
    """What is left of a tree when its tensors are taken out; `tensors` are the places they go back to, and `again` has
    further places, each with the number of the tensor that is there too. `views` has places of views of these.
    """

    spec: pytree.TreeSpec
    leaves: list[Any]
    tensors: list[int]
    again: Sequence[tuple[int, int]] = ()
    views: Sequence[tuple[int, View]] = ()


def flatten(tree: Any, *, once: bool = True, views: bool = False) -> tuple[list[Tensor], Shape | None]:
    """The tensors of a tree in order, and the shape that `unflatten` needs. A lone tensor has the shape None.

    A tensor that is there twice comes once, and stays one: the gradients of all its uses are summed in one place, in
    autograd's order. Without `once` it comes twice: each place may be cut in its own way. With `views`, what shares
    memory with another tensor does not come, but is a view of it.
    """
    if isinstance(tree, Tensor):
        return [tree], None
    leaves, spec = pytree.tree_flatten(tree)
    tensors: list[Tensor] = []
    places: list[int] = []
    again: list[tuple[int, int]] = []
    numbers: dict[int, int] = {}
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            number = numbers.setdefault(id(leaf), len(tensors)) if once else len(tensors)
            if number < len(tensors):
                again.append((place, number))
            else:
                tensors.append(leaf)
                places.append(place)
            leaves[place] = None
        elif leaf is not None and type(leaf) not in _CONSTANTS:
            _refuse_hidden_tensors(leaf)
    if views and len(tensors) > 1:
        return _with_views(tensors, Shape(spec, leaves, places, again))
    return tensors, Shape(spec, leaves, places, again)


def _with_views(tensors: list[Tensor], shape: Shape) -> tuple[list[Tensor], Shape]:
    bases, views, found = with_views(tensors)
    if not views:
        return tensors, shape
    places, again = [NOWHERE] * (len(bases) + len(views)), []
    for number, place in (*enumerate(shape.tensors), *((number, place) for place, number in shape.again)):
        if places[found[number]] == NOWHERE:
            places[found[number]] = place
        else:
            again.append((place, found[number]))
    count = len(bases)
    views_at = [*zip(places[count:], views, strict=True)]
    return bases, Shape(shape.spec, shape.leaves, places[:count], again, views_at)


def views_in(tree: Any, shape: Shape | None) -> list[Tensor]:
    """The tensors of a tree that are views in its shape, in the order of their places."""
    if shape is None or not shape.views:
        return []
    leaves = pytree.tree_leaves(tree)
    return [leaves[place] for place in places_of(shape.views)]


def unflatten(tensors: Sequence[Any], shape: Shape | None, own: Sequence[Tensor] = ()) -> Any:
    """The tree of that shape with these tensors (or anything else) in the places of its own. `own` are the leaves to
    which the gradients of `views_in` it go, if not to these tensors.
    """
    if shape is None:
        return tensors[0]
    leaves = [*shape.leaves, None]
    made = made_with_views(tensors, shape.views, own) if shape.views else tensors
    for place, tensor in zip((*shape.tensors, *(place for place, _ in shape.views)), made, strict=True):
        leaves[place] = tensor
    for place, number in shape.again:
        leaves[place] = made[number]
    return pytree.tree_unflatten(leaves[:NOWHERE], shape.spec)


def _refuse_hidden_tensors(leaf: Any) -> None:
    """Tensors that are neither cut nor followed would go astray."""
    kind = type(leaf).__name__
    if isinstance(leaf, set | frozenset):
        if any(isinstance(each, Tensor) for each in leaf):
            raise CUT_BATCHES.refusal(f"a {kind} of tensors has no fixed order", "pass a list or a dict")
        return
    if isinstance(leaf, Mapping):
        held, way_out = leaf, ""
    elif dataclasses.is_dataclass(leaf):
        held = {field.name: getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)}
        way_out = f"call torch.export.register_dataclass({kind}), or "
    else:
        held = getattr(leaf, "__dict__", {})
        way_out = "register it with torch.utils._pytree.register_pytree_node, or "
    hidden = [str(name) for name, value in held.items() if isinstance(value, Tensor)]
    if hidden:
        raise CUT_BATCHES.refusal(
            f"{kind} holds tensors ({', '.join(hidden)}) that a pipeline can't see", f"{way_out}pass a dict"
        )


def as_dict(tree: Any) -> Any:
    """A batch that is some other mapping, as the dict that `model(**batch)` makes of it: a tokenizer returns one."""
    is_known = type(tree) in pytree.SUPPORTED_NODES
    return dict(tree) if isinstance(tree, Mapping) and not is_known else tree


def call_of(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with which a model takes a batch: a tuple is its positional ones, a dict its keyword arguments."""
    if isinstance(inputs, tuple):
        return inputs, {}
    return ((), inputs) if isinstance(inputs, dict) else ((inputs,), {})


def batch_size(tree: Any, batch_dims: Any = None) -> int:
    """The number of samples: the first dimension of the first tensor that has one, or the first dimension that
    `batch_dims` names.
    """
    tree = as_dict(tree)
    tensors, shape = flatten(tree, once=False)
    for tensor, dim in zip(tensors, _dims(tensors, shape, tree, batch_dims), strict=True):
        if dim is not None and tensor.dim() > dim:
            return tensor.size(dim)
    if shape is not None:
        _refuse_arrays(shape.leaves)
    raise ConfigError(
        f"no tensor with a batch dimension among {len(tensors)} tensor(s) of the batch: "
        "pass at least one tensor whose first dimension counts the samples, or name it with batch_dims."
    )


def samples(inputs: Any, target: Any, batch_dims: Any = None) -> int:
    """The `batch_size` of the inputs. Where nothing is said and their first dimensions differ, it must be the one size
    that the targets have too or, if these don't tell, the one that most tensors have. Without targets the first input
    counts unless others outnumber it.
    """
    size = batch_size(inputs, batch_dims)
    tensors = [tensor for tensor in flatten(as_dict(inputs), once=False)[0] if tensor.dim()]
    sizes_of = {tensor.size(0) for tensor in tensors}
    if batch_dims is not None or len(sizes_of) < 2:
        return size
    targets = [tensor for tensor in flatten(as_dict(target), once=False)[0] if tensor.dim()]
    shared = sizes_of & {tensor.size(0) for tensor in targets}
    votes = {each: sum(tensor.size(0) == each for tensor in (*tensors, *targets)) for each in sizes_of}
    others = max(number for each, number in votes.items() if each != size)
    if shared != {size} and (len(shared) == 1 or votes[size] < others + bool(targets)):
        raise CUT_BATCHES.refusal(
            "the first dimensions of the inputs differ, and gapless can't tell which of them counts the samples: "
            f"inputs{_shapes(inputs)}{f'; target{_shapes(target)}' if targets else ''}"
        )
    return size


def _shapes(tree: Any) -> str:
    leaves = pytree.tree_flatten_with_path(as_dict(tree))[0]
    found = [f"{pytree.keystr(path)} {tuple(leaf.shape)}" for path, leaf in leaves if isinstance(leaf, Tensor)]
    return ", ".join([*found[:8], *(["..."] if len(found) > 8 else [])])


def split(tree: Any, num_microbatches: int, batch_dims: Any = None, *, size: int | None = None) -> list[Any]:
    """Cuts a minibatch into microbatches, as many as asked or, if it has fewer samples, one per sample.

    `batch_dims` says where each tensor is cut: one number for all, or a tree shaped like the batch (a prefix of it is
    enough) of numbers and None (not cut). `size` is the number of samples where another tree decides it: the targets of
    these inputs.
    """
    tree = as_dict(tree)
    if num_microbatches < 1:
        raise ConfigError(f"{num_microbatches} microbatches: at least 1 is needed.")
    follows = size is not None
    if size is None:
        size = batch_size(tree, batch_dims)
    if size == 0:
        raise ConfigError("the batch is empty (0 samples): skip it, or let the data loader drop it.")
    count = min(num_microbatches, size)
    tensors, shape = flatten(tree, once=False)
    if shape is not None:
        _refuse_arrays(shape.leaves)
    dims = _dims(tensors, shape, tree, batch_dims)
    if follows and batch_dims is None and count > 1:
        _refuse_other_rows(tensors, size, count)
    columns = []
    for tensor, dim in zip(tensors, dims, strict=True):
        if dim is None or tensor.dim() <= dim or (batch_dims is None and tensor.size(dim) != size):
            columns.append([tensor] * count)
        elif tensor.size(dim) != size:
            raise ConfigError(
                f"a tensor of shape {tuple(tensor.shape)} can't be cut along dimension {dim}, "
                f"since the batch size is {size}."
            )
        else:
            columns.append(list(tensor.tensor_split(count, dim)))
    return [unflatten([column[m] for column in columns], shape) for m in range(count)]


def _refuse_other_rows(tensors: Sequence[Tensor], size: int, count: int) -> None:
    """A target that is not cut may fit a microbatch where it does not fit the batch, by its size or by broadcasting."""
    rows = [tensor.size(0) for tensor in tensors if tensor.dim() > 0]
    if rows and size not in rows:
        raise CUT_BATCHES.refusal(
            f"the target has {rows[0]} rows for {size} samples, so each of the {count} microbatches would get all of "
            "them",
            "give the target one row per sample, specify with target_dims= where to cut it, or let the loss hold what "
            "all samples share",
        )


def _refuse_arrays(leaves: Sequence[Any]) -> None:
    for leaf in leaves:
        if type(leaf).__module__ == "numpy" and leaf.ndim > 0:
            raise CUT_BATCHES.refusal(
                f"the batch has a numpy array of shape {leaf.shape}, which would go whole to every microbatch",
                "pass torch.from_numpy of it",
            )


def sizes(size: int, num_microbatches: int) -> list[int]:
    """How many samples each microbatch has: those of `torch.tensor_split`."""
    count = min(num_microbatches, size)
    each, more = divmod(size, count)
    return [each + 1] * more + [each] * (count - more)


def merge(trees: Sequence[Any], counts: Sequence[int] | None = None, whole: Mapping[int, Any] | None = None) -> Any:
    """The outputs of all microbatches as one tree: what was cut is concatenated. Of the rest, what is equal in all of
    them is taken as it is, and anything else is a list with that of each: the first alone would pass for the whole.

    A tensor counts as cut if its first dimension is the number of samples of its microbatch (`counts`) in every
    microbatch, and the others are alike in all: similarities of all pairs of samples are not. `whole` has what is known
    better, by the id of the first microbatch's tensor.
    """
    rows = [flatten(tree, once=False) for tree in trees]
    merged: list[Any] = []
    for column in zip(*(tensors for tensors, _ in rows), strict=True):
        cut = all(tensor.dim() > 0 and tensor.shape[1:] == column[0].shape[1:] for tensor in column)
        if cut and counts is not None:
            cut = all(tensor.size(0) == count for tensor, count in zip(column, counts, strict=True))
        if whole and id(column[0]) in whole:
            merged.append(whole[id(column[0])])
        elif cut:
            merged.append(torch.cat(column))
        else:
            same = all(torch.equal(column[0], other) for other in column[1:])
            merged.append(column[0] if same else list(column))
    return unflatten(merged, rows[0][1])


def _dims(tensors: list[Tensor], shape: Shape | None, tree: Any, batch_dims: Any) -> list[int | None]:
    if batch_dims is None:
        return [0] * len(tensors)
    if isinstance(batch_dims, int):
        return [batch_dims] * len(tensors)
    if shape is None:
        raise ConfigError(f"batch_dims={batch_dims!r} does not fit a batch that is one tensor: pass one number.")
    spread = _spread(tree, batch_dims)
    return [dim for dim, leaf in zip(spread, pytree.tree_leaves(tree), strict=True) if isinstance(leaf, Tensor)]


def _spread(tree: Any, dims: Any) -> list[int | None]:
    """`dims` for every leaf of `tree`, where `dims` may stop above the leaves."""
    if dims is None or isinstance(dims, int):
        return [dims] * len(pytree.tree_leaves(tree))
    if isinstance(tree, dict) and isinstance(dims, dict):
        if unknown := set(dims) - set(tree):
            raise ConfigError(
                f"batch_dims names {sorted(map(str, unknown))}, which the batch does not have: "
                f"it has {sorted(map(str, tree))}."
            )
        return [dim for key, value in tree.items() for dim in _spread(value, dims.get(key, None))]
    if isinstance(tree, (tuple, list)) and isinstance(dims, (tuple, list)) and len(tree) == len(dims):
        return [dim for value, part in zip(tree, dims, strict=True) for dim in _spread(value, part)]
    raise ConfigError(
        f"batch_dims={dims!r} does not fit a batch that is a {type(tree).__name__}: "
        "give numbers in the shape of the batch."
    )
