"""What is to be saved, as trees of values and tensors beside them, each under a name."""

import hashlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gapless.checkpoint.pieces import TensorPart, piece_of
from gapless.checkpoint.tree import Json, encode, keys_in, tensors_in


class Contents:
    """Of one process. A tensor that is there under several names, as shared parameters are, is held once."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.facts = dict(facts)
        self.trees: dict[str, Json] = {}
        self.parts: dict[str, TensorPart] = {}
        self.same: dict[str, str] = {}  # what must be the same on all ranks, beside the trees
        self._known: dict[Any, str] = {}

    def add(self, name: str, value: Any) -> None:
        """A tree of values and tensors, which are named after their place in it."""
        self.trees[name] = encode(value, name, self._put)

    def add_same(self, name: str, value: Any) -> None:
        """As `add`, of what every process has alike: tensors are compared by their bytes, since of several that differ
        only one could be saved, and dicts by their keys, which would be put together.
        """
        self.add(name, value)
        self.same[f"the list of keys in {name}"] = ", ".join(sorted(keys_in(self.trees[name])))
        for tensor in tensors_in(self.trees[name]):
            part = self.parts[tensor]
            if part.data.shape == part.shape:  # of a DTensor each has its block
                data = part.data.cpu().contiguous()
                self.same[f"the hash of {tensor}"] = hashlib.sha256(part._replace(data=data).bytes_of()).hexdigest()[
                    :16
                ]

    def _put(self, place: str, tensor: Tensor) -> str:
        part = piece_of(tensor, place)
        data, key = part.data, None
        if part.num_bytes:
            key = data.device, data.data_ptr(), data.dtype, data.shape, data.stride(), part.offsets, part.shape
            if key in self._known:
                return self._known[key]
        while place in self.parts:
            place += "'"
        self.parts[place] = part
        if key is not None:
            self._known[key] = place
        return place
