"""What a forward changes in Python: numbers, flags, lists, objects, and attributes in which it stores tensors.

A trace has all of it as it was for one batch, and changes nothing when it runs.
"""

import contextlib
import sys
from collections.abc import Collection, Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gapless.stage.guards.state.held_objects import Seen, can_be_seen
from gapless.stage.guards.state.reachable_state import Walk, named
from gapless.stage.guards.state.state_notes import OWN, Entries, Fields, Note, content_of, holds_tensors, write

from . import thread_patches
from .batch_questions import constant, depends_on_data

Attribute = tuple[nn.Module, str]
_TORCHS = frozenset((*nn.Module().__dict__, *dir(nn.Module)))
_TRACERS = ("torch.fx.", "torch.export.", "torch._")
_OF_A_TRACE = (torch.SymInt, torch.SymFloat, torch.SymBool)


class ForwardState:
    """What the forward of one trace has changed, and in which attributes it has stored tensors."""

    def __init__(self) -> None:
        self.changed: list[Changed] = []
        self.stored: list[Attribute] = []
        self.read_first: set[Attribute] = set()  # those that it has read, or looked for, before it has set them
        self.from_data: set[Attribute] = set()  # those of `stored` whose tensors depend on batch, weights or draws
        self.constants: dict[Attribute, Tensor | None] = {}  # the others, where they are known without a batch
        self._torchs: set[Attribute] = set()  # attributes that torch has set itself
        self._set_so_far: set[Attribute] = set()

    @contextlib.contextmanager
    def put_back(self, model: nn.Module) -> Iterator[None]:
        """Around the forward of a model: what that changes is noted, and put back."""
        held = [each for _, *each in Walk(named([model]), follows=False).held()]
        found = [Seen(*each) for each in held if not isinstance(each[0], Tensor | None) and can_be_seen(each[0])]
        hooks = [(held, dict(held)) for module in model.modules() for held in _hooks(module)]
        try:
            with (
                thread_patches.instead(nn.Module, "__setattr__", self._set),
                thread_patches.instead(nn.Module, "__getattribute__", self._get),
            ):
                yield
        finally:
            moved: list[Note] = []
            for each in found:
                if not each.stays() and (note := each.note()) is not None:
                    moved += _parts(note)
            changed = [Changed(part, content_of(part.holder)) for part in moved]
            changed += [_changed(held, before) for held, before in hooks if held != before]
            self.changed += [each for each in changed if self._counts(each)]
            for one in changed:
                one.put_back()

    def _get(self, original: Any, module: nn.Module, name: str) -> Any:
        if name not in _TORCHS and (module, name) not in self._set_so_far:
            self.read_first.add((module, name))
        return original(module, name)

    def _set(self, original: Any, module: nn.Module, name: str, value: Any) -> None:
        before = module.__dict__.get(name)
        original(module, name, value)
        setter = _setter()
        if (
            name not in module.__dict__
            or (value is before and isinstance(value, Tensor))
            or setter.startswith(_TRACERS)
        ):
            return
        self._set_so_far.add((module, name))
        if isinstance(value, Tensor):
            self.stored.append((module, name))
            if depends_on_data(value):
                self.from_data.add((module, name))
            else:
                self.constants[module, name] = constant(value)
        elif setter.startswith("torch.nn."):
            self._torchs.add((module, name))

    @property
    def remembered(self) -> list[Attribute]:
        """Attributes whose tensors the next forward would read, and that are those of one microbatch."""
        return [each for each in dict.fromkeys(self.stored) if each in self.read_first and each in self.from_data]

    @property
    def made_once(self) -> dict[Attribute, Tensor | None]:
        """Those that it would read too, and whose tensors are the same whatever is computed."""
        return {key: value for key, value in self.constants.items() if key in self.read_first - self.from_data}

    def _counts(self, changed: "Changed") -> bool:
        """Of attributes of modules neither tensors, which are `stored`, nor what torch keeps there itself, as an LSTM
        keeps what it makes of its parameters.
        """
        holder, content = changed.before.holder, changed.before.content
        if not isinstance(holder, Fields) or not isinstance(holder.owner, nn.Module):
            return True
        return any(
            not (holds_tensors(now) or holds_tensors(content[name]) or (holder.owner, name) in self._torchs)
            for name, now in changed.after.items()
        )


class Changed(NamedTuple):
    """What a forward has changed in attributes, lists and objects: as it was, and what it has left there."""

    before: Note
    after: Any

    def put_back(self) -> None:
        if self.before.content is not None:
            write(self.before.holder, self.before.content)

    def set_again(self) -> None:
        write(self.before.holder, self.after)

    def matters(self, read: Collection[Attribute]) -> bool:
        """Whether the forward may go by it. Of what is in objects and lists nobody knows whether it is read."""
        holder = self.before.holder
        owner = holder.owner if isinstance(holder, Fields) else None
        return not isinstance(owner, nn.Module) or any((owner, name) in read for name in self.before.content)

    def can_stay(self) -> bool:
        """Whether what it has left means something after the trace."""
        left = [*self.after.values()] if isinstance(self.after, dict) else self.after
        known = self.before.content is not None and isinstance(left, list)
        return known and not any(isinstance(each, _OF_A_TRACE) or holds_tensors(each) for each in left)


def _parts(note: Note) -> Iterator[Note]:
    """Each attribute of a module by itself."""
    holder, path, content = note
    if not isinstance(holder, Fields) or not isinstance(holder.owner, nn.Module):
        yield note
        return
    for name in [name for name in holder.keys or () if name not in OWN]:
        yield Note(Fields(holder.owner, [name]), f"{path.rpartition('.')[0]}.{name}", {name: content[name]})


def _hooks(module: nn.Module) -> list[dict[int, Any]]:
    """Those of its forward, which a Hugging Face model adds when it is first asked for its hidden states."""
    return [held for name, held in vars(module).items() if name in OWN and name.startswith("_forward")]


def _changed(held: dict[int, Any], before: dict[int, Any]) -> Changed:
    keys = {**before, **held}
    return Changed(Note(Entries(held, keys), "its hooks", Entries(before, keys).read()), Entries(held, keys).read())


def _setter() -> str:
    """Which module of Python sets an attribute."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (
        frame.f_code.co_name == "__setattr__" or frame.f_globals.get("__name__") == thread_patches.__name__
    ):
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__"))
