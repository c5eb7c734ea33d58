"""What is to be saved, copied so that training may go on: memory that is taken once and used for every save."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from gapless.checkpoint.pieces import TensorPart

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
