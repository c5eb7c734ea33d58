"""What a model is made of, as far as a pipeline has built on it: noticed in microseconds when it has changed.

A pipeline looks at a model when it is made: which layers there are, which draw, which have hooks, which parameters are
shared, frozen or on which side of a cut; a traced model is even copied, as a graph. A program may edit its model
afterwards. So at the start of every step all these things are read again, as one flat list of objects, and compared by
identity with the list from before:

    module      its class, its parts, its parameters (requires_grad and dtype of each), its hooks, a forward of its own
    attributes  those that matter: the rate of a dropout in a sequence, all that a trace has read of a traced model
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter, is_
from typing import Any

from torch import Tensor, nn

_RATES = ("p", "dropout")  # by which torch's modules draw or do not
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_INSTANCE = ("forward", "_compiled_call_impl")  # what an instance may have in place of its class's
_VALUES = (bool, int, float, complex, str, bytes, tuple)
_learns, _kind = attrgetter("requires_grad"), attrgetter("dtype")
Reads = Mapping[nn.Module, Sequence[str]]


class Makeup:
    """Of what `parts` gives whenever it is asked: modules, and functions, of which nothing is known but who they are.

    `reads` are the attributes that a trace has read, by module; without it the rates of dropouts are watched.
    """

    def __init__(self, parts: Callable[[], Sequence[Any]], reads: Reads | None = None) -> None:
        self._parts = parts
        self._top = list(parts())
        modules = list(_walk(self._top))
        self.modules = [module for module, _ in modules]
        owns = [module.__dict__ for module in self.modules]
        self._children = [own["_modules"] for own in owns]
        self._parameters = [own["_parameters"] for own, (_, sharded) in zip(owns, modules, strict=True) if not sharded]
        self._hooks = [own[name] for own in owns for name in _HOOKS]
        self._owns = owns
        self._attributes = [
            (own, name)
            for module, own in zip(self.modules, owns, strict=True)
            for name in (_RATES if reads is None else reads.get(module, ()))
            if name in own or reads is not None
        ]
        called = [(type(module), name) for module in self.modules for name in ("forward", "__call__")]
        read = [(type(module), name) for module in self.modules for name in (reads or {}).get(module, ())]
        self._of_classes = list(dict.fromkeys((*called, *read)))
        values = {id(value): value for own, name in self._attributes if (value := own.get(name)) is not None}
        self._boxes = [] if reads is None else [value for value in values.values() if _contents(value)]
        self._buffers = [] if reads is None else [own["_buffers"] for own in owns]
        self._seen = self._read()

    def same(self) -> bool:
        """Whether nothing has changed."""
        top = self._parts()
        if len(top) != len(self._top) or not all(map(is_, top, self._top)):
            return False
        seen, now = self._seen, self._read()
        if len(seen) != len(now):
            return False
        if not all(map(is_, seen, now)):
            if not all(map(_equal, seen, now)):
                return False
            self._seen = now  # 0.5 and another 0.5
        return True

    def parts(self) -> set[Any]:
        """The modules and parameters that were there."""
        return {*self.modules, *(each for each in self._seen if isinstance(each, nn.Parameter))}

    def _read(self) -> list[Any]:
        """All of it. Whole lists at a time: it is done in every step."""
        now = [*map(type, self.modules), *map(len, self._children), *map(len, self._parameters)]
        for parts in filter(None, self._children):
            now += parts.values()
        parameters: list[Any] = []
        for own in self._parameters:
            parameters += own.values()
        now += parameters
        parameters = [each for each in parameters if each is not None]
        now += map(_learns, parameters)
        now += map(_kind, parameters)
        for hooks in filter(None, self._hooks):
            now += hooks
        for name in _INSTANCE:
            now += [own.get(name) for own in self._owns]
        now += [own.get(name) for own, name in self._attributes]
        now += [getattr(kind, name, None) for kind, name in self._of_classes]
        for value in self._boxes:
            now += _contents(value)
        if self._buffers:  # a trace has their sizes, but not their values
            buffers = [buffer for own in self._buffers for buffer in own.values()]
            now += [None if buffer is None else buffer.dtype for buffer in buffers]
            now.append(tuple([tuple(each.shape) for each in (*parameters, *buffers) if each is not None]))
        return now


def _walk(parts: Sequence[Any]) -> Iterator[tuple[nn.Module, bool]]:
    """Every module once, and whether FSDP has its parameters, which then come and go."""
    waiting = [(part, False) for part in parts if isinstance(part, nn.Module)]
    known: set[nn.Module] = set()
    for module, sharded in waiting:  # grows on the way
        if module in known or type(module.__dict__.get("_parameters")) is not dict:  # what is scripted makes its anew
            continue
        known.add(module)
        sharded = sharded or hasattr(module, "_get_fsdp_state")
        waiting += [(part, sharded) for part in module.__dict__["_modules"].values() if part is not None]
        yield module, sharded


def _contents(value: Any) -> list[Any]:
    """What may change while the thing itself stays the same: the items of a list, the settings in a config."""
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, list | tuple | set):
        return [*value]
    if isinstance(value, Tensor):
        return [value._version]
    if isinstance(value, nn.Module) or callable(value):
        return []
    return [*getattr(value, "__dict__", {}).values()]


def _equal(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, _VALUES) and one == other)
