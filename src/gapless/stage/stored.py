"""Tensors that a layer keeps in an attribute, `self.aux = ...`, and that the loss or another stage reads.

In a plain loop that is a habit. In a pipeline other microbatches are under way by then: what is read is another one's,
or nothing, and its graph is not there any more. So now and then, at the first step among others, a step is watched:
attributes that a forward has set are noted, and a call that gets one of them elsewhere is refused. In a traced model no
code of the modules runs, so such attributes are never set: what reads them finds a tripwire.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gapless.errors import GaplessError

_NOTHING = object()
_OWN = frozenset(vars(nn.Module()))  # what every module has: parameters, buffers, hooks
_HOLDERS = (list, tuple, dict)
Places = Iterable[tuple[nn.Module, str]]  # attributes of modules
_WAY_OUT = (
    "return it from the layer with its output, or let the layer add it to the loss of its microbatch with "
    "gapless.aux_loss"
)


class _Note(NamedTuple):
    tensor: Tensor  # held, so that its id stays its own
    owner: object
    name: str


class _Notes:
    """What every attribute was set to last."""

    def __init__(self) -> None:
        self.by_id: dict[int, _Note] = {}
        self._last: dict[tuple[nn.Module, str], int] = {}

    def add(self, module: nn.Module, name: str, tensor: Tensor, owner: object) -> None:
        self.by_id.pop(self._last.get((module, name), 0), None)
        self._last[module, name] = id(tensor)
        self.by_id[id(tensor)] = _Note(tensor, owner, f"{type(module).__name__}.{name}")

    def clear(self) -> None:
        self.by_id.clear()
        self._last.clear()


class Stored:
    """What the layers of some stages have stored in the step that is watched."""

    def __init__(
        self, model: nn.Module | None = None, *, never_set: Callable[[], Places] = tuple, elsewhere: Sequence[Any] = ()
    ) -> None:
        """`never_set`: attributes that the forward of a traced model would set. `elsewhere`: layers of the model that
        other processes run; those hear what is set here, by its name in the model.
        """
        self._never_set = never_set
        self._tripped: dict[tuple[nn.Module, str], Any] = {}  # what stood where there are tripwires now
        self._watching, self._lock = 0, threading.Lock()
        self._elsewhere = {part for layer in elsewhere if isinstance(layer, nn.Module) for part in layer.modules()}
        self.paths = {part: path for path, part in model.named_modules()} if model is not None and elsewhere else {}
        self.notes = _Notes()
        self._step, self._count = -1, 0

    def watch(
        self, owner: object, step: int, layers: Callable[[], Sequence[Any]], *, seen: bool
    ) -> "WatchedForward | None":
        """Around a forward; the first step is watched, the second, the fourth and so on. Layers that are compiled can't
        be `seen` into.
        """
        if step != self._step:
            self._step, self._count = step, self._count + 1
        if self._count & (self._count - 1):
            return None
        return WatchedForward(self, owner, layers(), seen=seen)

    @contextlib.contextmanager
    def tripped(self) -> Iterator[None]:
        """Around a watched forward. Those of other stages run at the same time, and the last puts back what was there:
        one that ended between two others left the tripwire of the other behind.
        """
        with self._lock:
            self._watching += 1
            for module, name in self._never_set():
                why = f"{type(module).__name__}.{name} is set by the forward of a model that was traced"
                if (module, name) not in self._tripped:
                    self._tripped[module, name] = module.__dict__.get(name, _NOTHING)
                    module.__dict__[name] = Tripwire(f"{why}, which never runs again")
        try:
            yield
        finally:
            with self._lock:
                self._watching -= 1
                while self._tripped and not self._watching:
                    (module, name), before = self._tripped.popitem()
                    module.__dict__[name] = before
                    if before is _NOTHING:
                        del module.__dict__[name]

    def set_elsewhere(self, names: Sequence[str]) -> None:
        """Another process has set these: what stands in their place here is of no use."""
        modules = {path: part for part, path in self.paths.items()}
        for path, _, name in (each.rpartition(".") for each in names):
            module = modules.get(path)
            if module in self._elsewhere:
                module.__dict__[name] = Tripwire(f"{path}.{name} is set by a layer that another rank runs")

    def clear(self) -> None:
        """The step is over."""
        self.notes.clear()


class WatchedForward(contextlib.AbstractContextManager[None]):
    """One forward of some layers, and of the loss behind them."""

    def __init__(self, stored: Stored, owner: object, layers: Sequence[Any], *, seen: bool) -> None:
        self._notes, self._owner, self._paths = stored.notes, owner, stored.paths
        self._modules = [part for layer in layers if isinstance(layer, nn.Module) for part in layer.modules()]
        self._stack, self._tripped, self._seen = contextlib.ExitStack(), stored.tripped, seen

    def __enter__(self) -> None:
        self._before = {(module, name): id(tensor) for module, name, tensor in self._attributes()}
        self._stack.enter_context(self._tripped())
        if self._seen:
            self._stack.enter_context(_Reads(self._notes, self._owner))

    def __exit__(self, kind: object, *_: object) -> None:
        self._stack.close()
        if kind is None:
            for module, name, tensor in self._set():
                self._notes.add(module, name, tensor, self._owner)

    def told(self) -> list[str]:
        """Names of the attributes that are set by now, for other processes."""
        here = self._set() if self._paths else ()
        return [
            f"{self._paths[module]}.{name}" for module, name, _ in here if module in self._paths and "[" not in name
        ]

    def _set(self) -> Iterator[tuple[nn.Module, str, Tensor]]:
        for module, name, tensor in self._attributes():
            if self._before.get((module, name)) != id(tensor):
                yield module, name, tensor

    def _attributes(self) -> Iterator[tuple[nn.Module, str, Tensor]]:
        for module in self._modules:
            for name, value in list(module.__dict__.items()):
                if name in _OWN:
                    continue
                if isinstance(value, Tensor):
                    yield module, name, value
                elif isinstance(value, _HOLDERS):
                    for number, each in enumerate(list(value.values() if isinstance(value, dict) else value)):
                        if isinstance(each, Tensor):
                            yield module, f"{name}[{number}]", each


class _Reads(TorchFunctionMode):
    """Refuses calls that get a tensor which a layer of another owner has stored."""

    def __init__(self, notes: _Notes, owner: object) -> None:
        super().__init__()
        self._notes, self._owner = notes, owner

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._notes.by_id:
            for arg in args:
                self._check(arg)
                for each in arg if isinstance(arg, list | tuple) else ():
                    self._check(each)
        return func(*args, **(kwargs or {}))

    def _check(self, arg: Any) -> None:
        note = self._notes.by_id.get(id(arg))
        if note is not None and note.tensor is arg and note.owner is not self._owner:
            raise GaplessError(
                f"a layer keeps a tensor in {note.name}, and another stage or the loss reads it, when it may belong "
                f"to another microbatch: {_WAY_OUT}."
            )


class Tripwire:
    """Stands for an attribute that has no sensible value here; `why` says so."""

    def __init__(self, why: str) -> None:
        self._why = why

    def _trip(self, *_: Any, **__: Any) -> NoReturn:
        raise GaplessError(f"{self._why}, and the loss or another layer uses it: {_WAY_OUT}.")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # asked by copy, pickle and the like
            raise AttributeError(name)
        self._trip()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = _trip
    __float__ = __bool__ = __len__ = __iter__ = __getitem__ = _trip

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for arg in args:
            if isinstance(arg, cls):
                arg._trip()
        return NotImplemented
