"""What the graph of a microbatch has saved, by storage, so that all of it can wait in the host's memory.

Autograd gives what it saves to `pack`, and gets it back from `unpack`; deferred weight gradients do the same with what
they keep. A storage leaves once, however many tensors look at it. What others hold as well stays: weights and
buffers, casts of weights, the stage's own inputs, and what is too small to be worth a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from gapless.stage.split.reached_parameters import is_cast

from .host_link import Link

SMALL = 4096  # bytes
_top_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
CHANGED = "one of the variables needed for gradient computation has been modified by an inplace operation"


def hooks_of_others() -> bool:
    """Whether somebody else, as `torch.utils.checkpoint`, has a say in what is saved here."""
    hooks = _top_hooks(False)
    return hooks is not None and type(getattr(hooks[0], "__self__", None)) is not SavedStorages


class SavedStorages:
    """Those of one microbatch of one stage, on the device of its inputs. `others` stay there anyway."""

    def __init__(self, inputs: Sequence[Tensor], others: Iterable[Tensor]) -> None:
        self._device = inputs[0].device if inputs else torch.device("cpu")
        self._others = {each.untyped_storage()._cdata for each in others if each.layout is torch.strided}
        self._gone: torch.cuda.Event | None = None
        self._arrived: torch.cuda.Event | None = None
        # A forward that starts again lets go of what it has saved, so nothing but the graph holds these.
        self._there: WeakValueDictionary[int, _Storage] = WeakValueDictionary()
        self._left: list[_Storage] = []

    def during(self) -> saved_tensors_hooks:
        """Around a forward."""
        return saved_tensors_hooks(self.pack, unpack)

    def pack(self, tensor: Tensor) -> Tensor | _Stays | _Ticket:
        if not self._may_leave(tensor):
            return tensor if tensor.is_inference() else _Stays(tensor, tensor._version)
        storage = tensor.untyped_storage()
        found = self._there.get(storage._cdata)
        if found is None:
            found = self._there[storage._cdata] = _Storage(storage)
        return _Ticket(found, tensor)

    def _may_leave(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.device != self._device:
            return False
        if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or _is_cast_weight(tensor):
            return False
        storage = tensor.untyped_storage()
        if storage.nbytes() < SMALL or storage._cdata in self._others:
            return False
        try:
            return storage.data_ptr() != 0
        except RuntimeError:  # torch knows it to be zero, without any memory
            return False

    def leave(self, link: Link) -> None:
        """All of it goes to the host's memory."""
        found = list(self._there.values())
        self._there.clear()
        for each, copy in zip(found, link.out([each.bytes() for each in found]), strict=True):
            each.note_changes()
            each.there, each.copy = None, copy
        self._left, self._gone = found, link.gone()  # once torch's allocator has noted what it waits for

    def wait_until_gone(self) -> None:
        """The host waits until its memory is free."""
        if self._gone is not None:
            self._gone.synchronize()
            self._gone = None

    def come_back(self, link: Link) -> None:
        found, self._left = self._left, []
        copies, self._arrived = link.back([each.copy for each in found if each.copy is not None])
        for each, made in zip(found, copies, strict=True):
            each.there, each.copy = made.untyped_storage(), None

    def wait(self) -> None:
        """What this device computes next comes after they are back."""
        if self._arrived is not None:
            torch.cuda.current_stream(self._device).wait_event(self._arrived)
            self._arrived = None


def _is_cast_weight(tensor: Tensor) -> bool:
    """Autocast makes it once for all microbatches."""
    node = tensor.grad_fn
    if node is None or not is_cast(node):
        return False
    return type(getattr(node.next_functions[0][0], "variable", None)) is Parameter


class _Storage:
    """One of them: on the device, or a copy of its bytes."""

    __slots__ = ("__weakref__", "copy", "saved", "there")

    def __init__(self, there: torch.UntypedStorage) -> None:
        self.there: torch.UntypedStorage | None = there
        self.copy: Tensor | None = None
        self.saved: list[ref[_Ticket]] = []  # what looks at it

    def bytes(self) -> Tensor:
        assert self.there is not None
        return torch.empty(0, dtype=torch.uint8, device=self.there.device).set_(self.there)

    def note_changes(self) -> None:
        for found in self.saved:
            if (each := found()) is not None and each.alias is not None:
                each.is_stale = each.alias._version != each.version
                each.alias = None
        self.saved.clear()


class _Ticket:
    """What autograd holds in place of a tensor."""

    __slots__ = ("__weakref__", "_dtype", "_offset", "_shape", "_storage", "_stride", "alias", "is_stale", "version")

    def __init__(self, storage: _Storage, tensor: Tensor) -> None:
        self._storage, self._dtype, self._shape = storage, tensor.dtype, tensor.shape
        self._stride, self._offset = tensor.stride(), tensor.storage_offset()
        # Changed after it was saved, it would give other gradients, which torch tells of where it is asked for.
        self.alias: Tensor | None = tensor.detach()
        self.version, self.is_stale = tensor._version, False
        storage.saved.append(ref(self))

    def tensor(self) -> Tensor:
        there = self._storage.there
        assert there is not None, "a tensor in the host's memory is asked for before it was brought back"
        if self.is_stale or (self.alias is not None and self.alias._version != self.version):
            raise RuntimeError(f"{CHANGED}: a tensor of shape {tuple(self._shape)}")
        made = torch.empty(0, dtype=self._dtype, device=there.device)
        return made.set_(there, self._offset, self._shape, self._stride)


class _Stays(NamedTuple):
    """A tensor that stays where it is. Torch looks for changes in place only where it has no hooks to call."""

    saved: Tensor
    version: int

    def tensor(self) -> Tensor:
        if self.saved._version != self.version:
            raise RuntimeError(f"{CHANGED}: a tensor of shape {tuple(self.saved.shape)}")
        return self.saved


def unpack(saved: Any) -> Any:
    """The tensor again; anything else as it is."""
    return saved.tensor() if type(saved) in (_Ticket, _Stays) else saved
