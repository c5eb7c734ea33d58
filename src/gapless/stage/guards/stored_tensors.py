"""Tensors that a layer keeps in an attribute, `self.aux = ...`, and that the loss or another stage reads.

In a plain loop that is a habit. In a pipeline other microbatches are under way by then: what is read is another one's,
or nothing, and its graph is not there any more. So an attribute that a forward was seen to set is, while a step runs,
there for that forward alone. Whoever reads it meanwhile, in whatever thread, is told so: another stage, the loss of
another stage, a hook of a backward. For that the module has a class of its own during the step, with a property.

In a traced model no code of the modules runs, so such attributes are never set: they are tripwires while a step runs.
Torch's own modules store nothing; where a hook stores something in one, it has one attribute more. Into compiled layers
nobody can look.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any
from weakref import WeakSet

from torch import Generator, Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from gapless.guards.held_state import STORED_TENSORS
from gapless.guards.weights_and_gradients import LOOSE_TENSORS
from gapless.stage.compiled import is_compiled, is_traced
from gapless.stage.random.draws import no_users
from gapless.stage.split.interception import is_torchs

from .state.held_objects import Seen, Was, Watched, equal_numbers
from .state.shared_objects import Holder, Objects, SharedObjects
from .state.state_notes import OWN, Entries, Note, holds_tensors
from .tripwire import Tripwire

Places = Iterable[tuple[nn.Module, str]]  # attributes of modules
_ELSEWHERE = object()  # stages of other processes


class _Forward(threading.local):
    of: "Attributes | None" = None  # whose forward this thread runs


_forward = _Forward()


class Stored:
    """What the layers of some stages store in a step."""

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        never_set: Callable[[], Places] = tuple,
        elsewhere: Mapping[int, Any] | None = None,
    ) -> None:
        """`never_set`: attributes that the forward of a traced model would set. `elsewhere`: layers of the model that
        other processes run, by their numbers, and the loss; those hear what is set here, by its name in the model.
        """
        self._never_set = never_set
        self._tripped: list[tuple[Entries, dict[str, Any]]] = []  # what stood where there are tripwires now
        self._set: dict[nn.Module, dict[str, set[Attributes]]] = {}  # attributes that forwards set, and whose
        self._classes: dict[nn.Module, tuple[type, type]] = {}  # their own, and that of a step
        self.rests, self._lock = True, threading.RLock()
        self.watching: WeakSet[Attributes] = WeakSet()
        self._others = [Holder(_ELSEWHERE, number, part) for number, part in (elsewhere or {}).items()]
        self.shared = SharedObjects()
        self._elsewhere = {
            part for each in self._others if isinstance(each.part, nn.Module) for part in each.part.modules()
        }
        self._paths = {part: path for path, part in model.named_modules()} if model is not None and elsewhere else {}
        self.tells = bool(self._paths)  # other processes
        self._heard: set[str] = set()
        # By generator that layers bring, who has drawn from it: a stage, or perhaps one of another process.
        self.generators = no_users()
        self.weights: set[int] = set()  # the parameters of the stages, by id
        self._learning: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # and by such a tensor its place
        for module in self._elsewhere:
            for value in module.__dict__.values():
                if isinstance(value, Generator):
                    self.generators[value] = module

    def learns(self, leaves: Sequence[Tensor], inputs: Sequence[Tensor], place: tuple[int, int]) -> None:
        """The leaves of a graph, of this cell of a stage, that are no parameters, so that nobody ties them."""
        for tensor in leaves:
            if any(tensor is each for each in inputs):
                continue
            with self._lock:
                stage, cell = self._learning.setdefault(tensor, place)
                if (stage, cell) != place:
                    where = (
                        f"stages {stage} and {place[0]}" if stage != place[0] else f"stage {stage} with remat='layer'"
                    )
                    raise LOOSE_TENSORS.refusal(
                        f"layers of {where} train one tensor of shape {tuple(tensor.shape)} that is not an "
                        "nn.Parameter, and its gradients would be added in another order than in plain training"
                    )

    def begin(self) -> None:
        """A step begins, for whatever stage."""
        with self._lock:
            if not self.rests:
                return
            self.rests = False
            layers = [*self._others, *(layer for each in self.watching for layer in each.layers)]
            self.shared.find(sorted(layers, key=lambda layer: layer.number))
            for each in self.watching:
                each.objects.find(self.shared)
            for module, (_, guarded) in self._classes.items():
                module.__class__ = guarded
            for module, name in self._never_set():
                why = f"{type(module).__name__}.{name} is set by the forward of a model that was traced"
                held = Entries(module.__dict__, [name])
                self._tripped.append((held, held.read()))
                module.__dict__[name] = Tripwire(f"{why}, which never runs again")

    def rest(self) -> None:
        """Nothing is under way: attributes are the caller's."""
        with self._lock:
            self.rests = True
            self.shared.forget()
            for each in self.watching:
                each.forget()
            for module, (own, _) in self._classes.items():
                module.__class__ = own
            while self._tripped:
                held, before = self._tripped.pop()
                held.write(before)

    def finish(self, *, resting: bool) -> None:
        """A stage has ended a minibatch. `resting`: so have all, and no other one is under way."""
        try:
            if not self.rests:
                self.shared.check()
        finally:
            if resting:
                self.rest()

    def guard(self, module: nn.Module, name: str, by: "Attributes") -> None:
        """A forward has set it: from now on it has a class of its own while a step runs, as torch's parametrizations
        give to a module.
        """
        with self._lock:
            names = self._set.setdefault(module, {})
            names.setdefault(name, set()).add(by)
            own = self._classes[module][0] if module in self._classes else type(module)
            shown = {
                each: _property(f"{own.__name__}.{each}", each, owners, of_tensors=holds_tensors(module.__dict__[each]))
                for each, owners in names.items()
            }
            guarded = type(own.__name__, (own,), {"__module__": own.__module__, **shown})
            self._classes[module] = own, guarded
            module.__class__ = guarded

    def told(self, by: "Attributes") -> list[str]:
        """Names of the attributes that are set here, `by` this forward too, for other processes."""
        by.look()
        found = [(self._paths.get(module), names) for module, names in self._set.items()]
        return sorted(f"{path}.{name}" for path, names in found if path is not None for name in names)

    def set_elsewhere(self, names: Sequence[str]) -> None:
        """Another process has set these: what stands in their place here is of no use."""
        if self._heard.issuperset(names):
            return
        self._heard.update(names)
        modules = {path: part for part, path in self._paths.items()}
        for path, _, name in (each.rpartition(".") for each in names):
            module = modules.get(path)
            if module in self._elsewhere:
                module.__dict__[name] = Tripwire(f"{path}.{name} is set by a layer that another rank runs")


def _property(shown: str, name: str, owners: "set[Attributes]", *, of_tensors: bool) -> property:
    def read(module: nn.Module) -> Any:
        of = _forward.of
        if (of not in owners or any(each.stage is not of.stage for each in owners)) and (of_tensors or of is not None):
            what, whom = "keeps a tensor in", "another stage, the loss or a backward"
            if not of_tensors:  # which a checkpoint in a backward may read
                what, whom = "changes", "another stage or the loss"
            raise STORED_TENSORS.refusal(
                f"a layer {what} {shown}, and {whom} reads it, when it may belong to another microbatch"
            )
        if name not in module.__dict__:
            raise AttributeError(f"{shown} is not set")
        return module.__dict__[name]

    def write(module: nn.Module, value: Any) -> None:
        module.__dict__[name] = value

    def delete(module: nn.Module) -> None:
        del module.__dict__[name]

    return property(read, write, delete)


class Attributes(contextlib.AbstractContextManager[None]):
    """What some layers of a stage store; entered around their forward."""

    def __init__(
        self, stored: Stored, parts: Sequence[Any], stage: object, first: int = 0, *, apart: bool = False
    ) -> None:
        """`first` is the number of the first of these layers. `apart`: they run again without others of their stage."""
        self._stored, self.stage = stored, stage
        key = (stage, object()) if apart else stage
        self.layers = [
            Holder(key, number, part) for number, part in enumerate(parts, start=first) if not is_traced(part)
        ]
        stored.watching.add(self)
        whole = [
            part for part in parts if isinstance(part, nn.Module) and not is_traced(part) and not is_compiled(part)
        ]
        modules = list(dict.fromkeys(module for part in whole for module in part.modules()))
        self._torchs = {each: len(each.__dict__) for each in modules if is_torchs(type(each))}
        self._watched = [Watched(each) for each in modules if each not in self._torchs]
        self.objects = Objects(key, [each.module for each in self._watched])
        self._set: set[tuple[nn.Module, str]] = set()  # attributes that these forwards set
        self._changing: set[tuple[nn.Module, str]] = set()  # and those that these change, whatever they hold
        self.begun: list[tuple[nn.Module, str, Was]] = []  # those of them that the last forward was the first to change
        self.changed: list[Note] = []  # what it has changed in objects, as it was
        self._before: Attributes | None = None
        self._step = -1

    def during(self, step: int) -> "Attributes":
        """A forward of this step comes."""
        if step != self._step or self._stored.rests:  # what was set meanwhile was set by somebody else
            self._step = step
            self._stored.begin()
            for each in self._watched:
                each.look_anew()
        return self

    def forget(self) -> None:
        """The step has ended."""
        self._step = -1
        self.begun, self.changed = [], []
        self.objects.forget()
        for each in self._watched:
            each.forget()

    def __enter__(self) -> None:
        self._before, _forward.of = _forward.of, self
        self.begun, self.changed = [], []
        for each in self.objects.seen:
            if not _is_untouched(each):
                each.look()

    def __exit__(self, kind: object, *_: object) -> None:
        _forward.of, self._before = self._before, None
        if kind is None:
            self.look()
            if self.objects.of_others or not all(map(_is_untouched, self.objects.seen)):
                self.changed = self.objects.changed()
            if self._stored.shared.seen:
                self._stored.shared.check()

    def look(self) -> None:
        """Which attributes are set."""
        if [*map(len, map(vars, self._torchs))] != [*self._torchs.values()]:
            for module, size in [each for each in self._torchs.items() if len(each[0].__dict__) != each[1]]:
                del self._torchs[module]  # a hook has stored something in it
                names = [name for name in list(module.__dict__)[:size] if name not in OWN]
                self._watched.append(Watched(module, names=names))
        for each in self._watched:
            held = each.held
            if not each.inside and len(held) == each.size and all(map(is_, map(held.get, each.names), each.values)):
                continue  # as `changed` would find, without a call
            for name, was in each.changed():
                key = each.module, name
                if key not in self._changing:
                    self._changing.add(key)
                    self.begun.append((*key, was))
                value, lent = each.module.__dict__.get(name), self._stored.shared.lent
                if key not in self._set and (
                    holds_tensors(value) or (each.module in lent and not equal_numbers(was.value, value))
                ):
                    self._set.add(key)
                    self._stored.guard(*key, self)


def _is_untouched(seen: Seen) -> bool:
    """Whether the very same things are in it; if not, it may still be as it was."""
    if not seen.is_dict:
        return False
    source, before = seen.source, seen.before
    return 2 * len(source) == len(before) and all(map(is_, chain(source, source.values()), before))
