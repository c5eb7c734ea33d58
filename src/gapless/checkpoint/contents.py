"""What is to be saved, as trees of values and tensors beside them, each under a name; and copied so that training may
go on: memory that is taken once and used for every save.
"""

import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from gapless.checkpoint.pieces import TensorPart, piece_of
from gapless.checkpoint.tree import Json, encode, keys_in, tensors_in
from gapless.model.shards import memory_of


class Contents:
    """Of one process. A tensor that is there under several names, as shared parameters are, is held once."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.facts = dict(facts)
        self.trees: dict[str, Json] = {}
        self.parts: dict[str, TensorPart] = {}
        self.same: dict[str, str] = {}  # what must be the same on all ranks, beside the trees
        self.of_first: set[str] = set()  # tensors of which replicas have each their own: the first replica's are saved
        self._known: dict[Any, str] = {}

    def add(self, name: str, value: Any, of_first: Iterable[str] = ()) -> None:
        """A tree of values and tensors, which are named after their place in it; `of_first`: keys of the tree."""
        tree = self.trees[name] = encode(value, name, self._put)
        self.of_first.update(each for key in of_first for each in tensors_in(tree[key]))

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
                self.same[f"the hash of {tensor}"] = hashlib.sha256(memory_of(data)).hexdigest()[:16]

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


_THREADS = 4  # more do not copy faster


class Copies:
    """On the CPU. One save at a time uses them."""

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}
        self.closed = False

    def of(self, parts: Mapping[str, TensorPart]) -> dict[str, TensorPart]:
        """The same parts, with data of their own."""
        rooms, near = {}, []
        for name, part in parts.items():
            data, room = part.data, self._memory.get(name)
            if room is None or room.shape != data.shape or room.dtype != data.dtype:
                room = torch.empty(data.shape, dtype=data.dtype, pin_memory=data.is_cuda)
            rooms[name] = room
            if data.is_cuda:
                room.copy_(data, non_blocking=True)
            else:
                near.append((room, data))
        with ThreadPoolExecutor(_THREADS) as threads:  # nothing else runs meanwhile
            for copied in [threads.submit(Tensor.copy_, *pair) for pair in near]:
                copied.result()
        for device in {part.data.device for part in parts.values() if part.data.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        self._memory = rooms
        return {name: part._replace(data=rooms[name]) for name, part in parts.items()}

    def close(self) -> None:
        """Gives the memory back."""
        self._memory, self.closed = {}, True
