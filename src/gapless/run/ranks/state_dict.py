"""The state of a model that is in parts: which ranks hold a tensor and which of them answers for it, the state whole on
every rank, and from there back to the parts.

Every rank has all names and shapes, with data for the layers of its own stages; so nothing needs to be agreed on, and
the tensors go one by one from the rank that holds them to all others. A DTensor is made whole first.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gapless.guards.between_ranks import TENSORS_ELSEWHERE
from gapless.model.uses import Uses
from gapless.run.clip import unsharded
from gapless.run.world import Parts
from gapless.stage.guards.changing_buffers import owned_by

Home = Callable[[Tensor], int]


def gather(module: nn.Module, home: Home, device: int, group: Any) -> dict[str, Any]:
    """The state dict of the whole model, on the CPU; `home` is the device that a tensor is taken from."""
    made: dict[int, Tensor] = {}
    known = module.state_dict(keep_vars=True)
    state = _described_by(known, {})
    for name, value in known.items():
        if isinstance(value, Tensor) and id(value) not in made:  # shared ones once, under all their names
            made[id(value)] = _sent(value, home(value), device, group)
        state[name] = made[id(value)] if isinstance(value, Tensor) else value
    return state


def _sent(value: Tensor, home: int, device: int, group: Any) -> Tensor:
    if home == device:
        whole = unsharded(value).detach().cpu().contiguous()
    else:
        whole = torch.empty(value.shape, dtype=value.dtype)
    if group is not None and whole.numel():
        options = dist.BroadcastOptions()
        options.rootRank = home
        group.broadcast([whole.view(-1).view(torch.uint8)], options).wait()
    return whole.clone() if whole.data_ptr() == value.data_ptr() else whole


def held(module: nn.Module, holds: Callable[[Tensor], bool]) -> dict[str, Any]:
    """What of the model's state is here."""
    known = module.state_dict(keep_vars=True)
    found = {
        name: value.detach() if isinstance(value, Tensor) else value
        for name, value in known.items()
        if not isinstance(value, Tensor) or holds(value)
    }
    return _described_by(known, found)


def _described_by(known: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """With the versions of the modules, by which they know how to read it."""
    made: Any = OrderedDict(state)
    made._metadata = getattr(known, "_metadata", None)
    return made  # type: ignore[no-any-return]


def load(module: nn.Module, state: Mapping[str, Any], holds: Callable[[Tensor], bool], strict: bool) -> Any:
    """Takes from the state what is needed here; `strict` asks for all of that, and for no unknown names."""
    known = module.state_dict(keep_vars=True)
    mine = held(module, holds)
    missing = [name for name in mine if name not in state]
    unexpected = [name for name in state if name not in known]
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"Error(s) in loading state_dict for {type(module).__name__}: missing keys {missing}, unexpected keys "
            f"{unexpected}"
        )
    chosen = {name: _like(state[name], known[name]) for name in mine if name in state}
    module.load_state_dict(_described_by(state if hasattr(state, "_metadata") else known, chosen), strict=False)
    return nn.modules.module._IncompatibleKeys(missing, unexpected)


def _like(value: Any, target: Any) -> Any:
    """A whole tensor as the parts that this rank has of it."""
    mesh = getattr(target, "device_mesh", None)
    if mesh is None or hasattr(value, "device_mesh"):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(target.device), mesh, target.placements, src_data_rank=None)


class Homes:
    """Seen from one device. `parts` are the layers of each stage, `cycles` their devices, which are several where a
    stage has replicas, `uses` the stages that use a parameter.
    """

    def __init__(
        self,
        device: int,
        parts: Parts = (),
        cycles: Sequence[Sequence[int]] = (),
        uses: Uses | None = None,
        module: nn.Module | None = None,
    ) -> None:
        self._device, self._parts, self._cycles, self._module = device, parts, cycles, module
        self.devices = [cycle[0] for cycle in cycles]
        self._watched: list[tuple[str, Mapping[str, Tensor | None], str]] | None = None  # what others have
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
        modules = [[layer for layer in layers if isinstance(layer, nn.Module)] for layers in self._parts]
        for stage, layers in enumerate(modules):
            for module, name in (each for layer in layers for each in owned_by(layer)):
                if (buffer := module._buffers.get(name)) is not None:
                    stages = self._buffers.setdefault(buffer, [])
                    stages += [] if stage in stages else [stage]
        for stage, layers in enumerate(modules):  # and what no graph uses yet
            for buffer in (each for layer in layers for part in layer.modules() for each in part._buffers.values()):
                if buffer is not None:
                    self._buffers.setdefault(buffer, [stage])

    def holds(self, tensor: Tensor) -> bool:
        """Whether a stage of this device uses it, or may: a layer that is a function may use any buffer."""
        if not self.known:
            return True
        stages = self._stages(tensor)
        if stages is None:
            return self._device == 0 or not (isinstance(tensor, nn.Parameter) or tensor.is_meta)
        return any(self._device in self._cycles[stage] for stage in stages)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Around what the stages of this device do: functions among the layers, and losses, change no weight and
        no buffer of others."""
        if self._watched is None:
            self._watched = [*self._of_others()]
        before = [(held := owner.get(key), 0 if held is None else held._version) for _, owner, key in self._watched]
        yield
        for (name, owner, key), (tensor, version) in zip(self._watched, before, strict=True):
            now = owner.get(key)
            if now is not tensor or (now is not None and now._version != version):
                raise TENSORS_ELSEWHERE.refusal(
                    f"a function among the layers, or the loss, changes {name}, which no layer of its stage has, so "
                    "other ranks and checkpoints keep its old value"
                )

    def _of_others(self) -> Iterator[tuple[str, Mapping[str, Tensor | None], str]]:
        self.find_buffers()
        for prefix, part in self._module.named_modules() if self._module is not None and len(self._cycles) > 1 else ():
            for owner in (part._parameters, part._buffers):
                for key, tensor in owner.items():
                    stages = [] if tensor is None else self._stages(tensor) or []
                    mine = any(self._device in self._cycles[stage] for stage in stages)
                    if tensor is not None and not mine and not tensor.is_inference():
                        yield f"{prefix}.{key}".removeprefix("."), owner, key

    def home(self, tensor: Tensor) -> int:
        """The device that answers for it, if several hold it."""
        stages = self._stages(tensor)
        return self.devices[stages[0]] if stages else 0

    def _stages(self, tensor: Tensor) -> list[int] | None:
        known = self._parameters.get(tensor) if isinstance(tensor, nn.Parameter) else None
        return known or self._buffers.get(tensor)
