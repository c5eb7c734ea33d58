"""What is to be saved, copied so that training may go on: memory that is taken once and used for every save."""

from collections.abc import Mapping

import torch
from torch import Tensor

from gapless.checkpoint.pieces import TensorPart
from gapless.checkpoint.save import SaveUnderWay


class Copies:
    """On the CPU. One save at a time uses them."""

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}
        self.closed = False

    def take(self, under_way: SaveUnderWay) -> None:
        """The save writes copies from now on."""
        under_way.parts = self._copied(under_way.parts)

    def _copied(self, parts: Mapping[str, TensorPart]) -> dict[str, TensorPart]:
        made, devices = {}, set()
        for name, part in parts.items():
            data, room = part.data, self._memory.get(name)
            if room is None or room.shape != data.shape or room.dtype != data.dtype:
                room = torch.empty(data.shape, dtype=data.dtype, pin_memory=data.is_cuda)
            room.copy_(data, non_blocking=True)
            made[name] = part._replace(data=room)
            if data.is_cuda:
                devices.add(data.device)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        self._memory = {name: part.data for name, part in made.items()}
        return made

    def close(self) -> None:
        """Gives the memory back."""
        self._memory, self.closed = {}, True
