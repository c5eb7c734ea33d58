"""Buffers that a forward changes: counters, moving averages, the vectors of a spectral norm.

Where remat runs a forward again, the second run must start from what the first started from, and leave no trace:

    first run     starts from v0, leaves v1          v0 is kept with the microbatch
    others        leave v2, v3
    second run    starts from v0, leaves v1 again    in a copy; v3 stays

A forward that starts again, because something was learnt on the way, puts back what it has changed. Most buffers never
change, and only those that did are kept. Batch norm is counted elsewhere (`batchnorm`), except in a compiled layer,
where nothing can be seen.
"""

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily

from gapless.errors import GaplessError
from gapless.guards.held_state import RECOMPUTED_STATE
from gapless.stage.compiled import is_compiled, is_traced


class Copy(NamedTuple):
    """A buffer before a run: the tensor, how often it had changed, and its numbers."""

    module: nn.Module
    name: str
    value: Tensor
    version: int
    numbers: Tensor

    def is_changed(self, *, by_value: bool) -> bool:
        """Whether the run has changed it; a kernel may do so without telling, but not one without data."""
        if self.module._buffers.get(self.name) is not self.value or self.value._version != self.version:
            return True
        return by_value and not isinstance(self.value, FakeTensor) and not torch.equal(self.value, self.numbers)


Taken = list[Copy]
Owned = tuple[nn.Module, str]  # a buffer by the module that has it, since a forward may put another tensor there
Marks = list[tuple[Owned, Tensor, int]]  # tensors in their places, and how often they had changed


class Buffers:
    """The buffers of some layers. With `always`, every run may show that one changes; else the first run tells."""

    def __init__(self, layers: Sequence[Any], *, always: bool) -> None:
        self._layers = [(layer, is_compiled(layer)) for layer in layers if isinstance(layer, nn.Module)]
        self._always = always
        self.changing: dict[Owned, None] = {}  # those that were seen to change
        self._marks: Marks = []
        self._spare: dict[Owned, Copy] = {}
        self._begun: Taken = []
        self._tried = False

    def taken(self, looks: bool = False) -> Taken:
        """Before a run: copies of those that change, or of all while nothing is known of them. With `looks`, this run
        too may show that one changes.
        """
        if self.is_settled and not looks:
            return []
        if not self._tried:
            return [copied(*each) for each in self._all()]
        if self._always:
            self._spare = {each[:2]: self._spare_of(*each) for each in self._all() if each[:2] not in self.changing}
        elif looks:
            self._marks = self.marks()
        return [
            copied(module, name, value)
            for module, name in self.changing
            if (value := module._buffers.get(name)) is not None
        ]

    @property
    def is_settled(self) -> bool:
        """Whether it is known that there is nothing to take."""
        return self._tried and not self._always and not self.changing

    def put_back(self, taken: Taken, *, but: Collection[int] = ()) -> None:
        """The run did not come to its end: as before it, `but` for those (by id) that are counted elsewhere."""
        with torch.no_grad():
            for each in taken:
                if id(each.value) not in but and each.is_changed(by_value=not self._tried):
                    each.module._buffers[each.name] = each.value
                    each.value.copy_(each.numbers)

    def learn(self, taken: Taken) -> Taken:
        """After a run: of what was taken only what changes."""
        if self.is_settled and not self._marks:
            return taken
        for each in taken if not self._tried else ():
            if each.is_changed(by_value=True):
                self.changing[each.module, each.name] = None
        begun = self._begun = [each for each in self._spare.values() if each.is_changed(by_value=False)]
        self.changing.update(dict.fromkeys([*moved(self._marks), *((each.module, each.name) for each in begun)]))
        self._marks = []
        self._tried = True
        return [*begun, *(each for each in taken if (each.module, each.name) in self.changing)]

    def begun_now(self) -> Taken:
        """Those that the last run was the first to change, as they were: what is kept of others lacks them."""
        return [each._replace(numbers=each.numbers.clone()) for each in self._begun]

    def _spare_of(self, module: nn.Module, name: str, value: Tensor) -> Copy:
        """A copy of one that has never changed, kept for the run that begins to."""
        known = self._spare.get((module, name))
        if known is not None and known.value is value and known.version == value._version:
            return known
        return copied(module, name, value)

    def marks(self) -> Marks:
        """Where all of them stand."""
        return marks_of((module, name) for module, name, _ in self._all())

    def changed_since(self, marks: Marks, *, but: Collection[int]) -> list[str]:
        """Those that have changed since, and were not known to, `but` for those (by id) that are counted elsewhere."""
        found = [each for each in moved(marks) if each not in self.changing]
        return [f"{type(module).__name__}.{name}" for module, name in found if id(module._buffers[name]) not in but]

    @contextlib.contextmanager
    def replayed(self, taken: Taken) -> Iterator[None]:
        """Around a second run."""
        present = [(each.module, each.name, each.module._buffers[each.name]) for each in taken]
        for each in taken:
            each.module._buffers[each.name] = each.numbers
        try:
            yield
        finally:
            for module, name, now in present:
                module._buffers[name] = now

    def _all(self) -> Iterator[tuple[nn.Module, str, Tensor]]:
        for layer, hidden in self._layers:
            for module, name in owned_by(layer):
                value, norm = module._buffers.get(name), isinstance(module, _BatchNorm)
                if value is None or (norm and not hidden):
                    continue
                if norm:
                    self.changing[module, name] = None  # a kernel changes them without telling
                yield module, name, value


def changed_late(stage: int, name: str) -> GaplessError:
    """A backward has met what forwards of later microbatches have changed, and it is too late to tell them."""
    return RECOMPUTED_STATE.refusal(
        f"a backward of stage {stage} uses {name}, as torch.utils.checkpoint does when it runs a layer again, after "
        "forwards of later microbatches have changed it"
    )


class LateUses(TorchFunctionMode):
    """Around a backward: refuses calls that use one of these buffers."""

    def __init__(self, buffers: Iterable[Owned], stage: int) -> None:
        super().__init__()
        self._names = {id(each._buffers.get(name)): f"{type(each).__name__}.{name}" for each, name in buffers}
        self._stage = stage

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for arg in (*args, *(kwargs or {}).values()):
            if id(arg) in self._names:
                raise changed_late(self._stage, f"the buffer {self._names[id(arg)]}")
        return func(*args, **(kwargs or {}))


def no_late_uses() -> contextlib.AbstractContextManager[object]:
    """Around a second run inside of a backward, which has the buffers of the first: compiled layers would be compiled
    anew for this mode.
    """
    return _pop_mode_temporarily() if type(_get_current_function_mode()) is LateUses else contextlib.nullcontext()


def marks_of(buffers: Iterable[Owned]) -> Marks:
    """Where they stand."""
    values = ((owned, owned[0]._buffers.get(owned[1])) for owned in buffers)
    return [(owned, value, value._version) for owned, value in values if value is not None]


def moved(marks: Marks) -> list[Owned]:
    """Those that have changed since."""
    return [
        (module, name)
        for (module, name), value, version in marks
        if module._buffers.get(name) is not value or value._version != version
    ]


def owned_by(layer: nn.Module) -> Iterable[Owned]:
    """Of a traced model a layer has those that it uses: others of the same module may be another stage's, which changes
    them at the same time.
    """
    if is_traced(layer):
        return layer.owned_buffers()  # type: ignore[operator, no-any-return]
    return ((module, name) for module in layer.modules() for name in module._buffers)


def copied(module: nn.Module, name: str, value: Tensor) -> Copy:
    """As it is now."""
    return Copy(module, name, value, value._version, value.detach().clone())
