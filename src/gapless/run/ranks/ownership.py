"""Which ranks hold a tensor of the model, and which of them answers for it."""

from collections.abc import Sequence

from torch import Tensor, nn

from gapless.model.uses import Uses
from gapless.run.world import Parts


class Homes:
    """Seen from one device. `parts` are the layers of each stage, `cycles` their devices, which are several where a
    stage has replicas, `uses` the stages that use a parameter.
    """

    def __init__(
        self, device: int, parts: Parts = (), cycles: Sequence[Sequence[int]] = (), uses: Uses | None = None
    ) -> None:
        self._device, self._parts, self._cycles = device, parts, cycles
        self.devices = [cycle[0] for cycle in cycles]
        self._parameters = dict(uses or {})  # held: the id() of one that is gone may be another tensor's
        self._buffers: dict[Tensor, list[int]] = {}

    @property
    def known(self) -> bool:
        """The model is cut."""
        return bool(self._parameters or self._buffers)

    def knows(self, tensor: Tensor) -> bool:
        """Whether some stage was known to use it."""
        return self._stages(tensor) is not None

    def find_buffers(self) -> None:
        """Modules may have made new ones, and dropped others."""
        self._buffers = {}
        for stage, layers in enumerate(self._parts):
            modules = [module for layer in layers if isinstance(layer, nn.Module) for module in layer.modules()]
            for buffer in (each for module in modules for each in module._buffers.values() if each is not None):
                self._buffers.setdefault(buffer, [stage])

    def holds(self, tensor: Tensor) -> bool:
        """Whether a stage of this device uses it."""
        if not self.known:
            return True
        stages = self._stages(tensor)
        return self._device == 0 if stages is None else any(self._device in self._cycles[s] for s in stages)

    def home(self, tensor: Tensor) -> int:
        """The device that answers for it, if several hold it."""
        stages = self._stages(tensor)
        return self.devices[stages[0]] if stages else 0

    def _stages(self, tensor: Tensor) -> list[int] | None:
        known = self._parameters.get(tensor) if isinstance(tensor, nn.Parameter) else None
        return known or self._buffers.get(tensor)
