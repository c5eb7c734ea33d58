"""The optimizer and the scheduler of a user, one of each on every rank, as a checkpoint has them: what the optimizer
keeps goes under the names of parameters, so it fits whatever ranks have these next.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from gapless.checkpoint.saveable import Opened
from gapless.checkpoint.tree import Json
from gapless.errors import CheckpointError
from gapless.pipeline.saved.saved_model import SavedModel
from gapless.run.named_state import like, load_named_state, named_state, plain

_NEEDED = ("state", "param_groups", "state_dict", "load_state_dict")
_NOBODY = ""  # the parameter of a rank that has none


class SavedOptimizer:
    """`nothing` stands for the parameters of a rank that has none, since optimizers want some."""

    def __init__(self, model: SavedModel, optimizer: Any, nothing: nn.Parameter) -> None:
        if any(not hasattr(optimizer, name) for name in _NEEDED):
            raise CheckpointError(
                f"the optimizer is a {type(optimizer).__name__}, which keeps no state by parameter: pass one like "
                "those of torch.optim, with state and param_groups"
            )
        self._model, self._optimizer = model, optimizer
        self._names = {**model.names(), nothing: _NOBODY}
        strangers = [each for group in optimizer.param_groups for each in group["params"] if each not in self._names]
        if strangers:
            raise CheckpointError(
                f"the optimizer has a parameter of shape {tuple(strangers[0].shape)} that is neither the model's nor "
                "the loss's, so it has no name to be saved under: make it from pipe.parameters()"
            )
        if isinstance(optimizer, torch.optim.LBFGS) and not model.world.one_process:
            raise CheckpointError(
                "LBFGS keeps one state for all parameters, which can't be taken apart for other ranks: use another "
                "optimizer, or devices= instead of mesh="
            )

    def tree(self) -> dict[str, Any]:
        """What of it belongs to parameters that this process trains, with the options of all groups."""
        saved = named_state(self._optimizer, self._names)
        here = {self._names[each] for each in self._mine()}
        known = set(self._names.values())
        groups = [
            {
                "options": {key: value for key, value in group.items() if key not in ("params", "param_names")},
                "names": dict.fromkeys(sorted(here.intersection(group["params"]))),
            }
            for group in saved["param_groups"]
        ]
        return {
            "kind": saved["kind"],
            "groups": groups,
            "state": {name: value for name, value in saved["state"].items() if name in here},
            "other": {name: value for name, value in saved["state"].items() if name not in known},
        }

    def _mine(self) -> Iterator[nn.Parameter]:
        for group in self._optimizer.param_groups:
            for each in group["params"]:
                if self._names[each] != _NOBODY and self._model.holds(each):
                    yield each

    def taking(self, opened: Opened) -> Callable[[], None]:
        """Reads what belongs to its parameters; what is returned puts that in place."""
        saved, kind = opened.tree("optim"), type(self._optimizer).__name__
        if saved is None:
            raise CheckpointError(f"{opened.shown} was saved without an optimizer: load it without one, too")
        if saved["kind"] != kind:
            raise CheckpointError(
                f"{opened.shown} has the state of {saved['kind']}, but this optimizer is {kind}: make "
                f"{saved['kind']}, or load without an optimizer"
            )
        self._check_groups(opened, saved["groups"])
        state = {
            self._names[each]: self._read(opened, saved["state"][self._names[each]], each)
            for each in chain.from_iterable(group["params"] for group in self._optimizer.param_groups)
            if self._names[each] in saved["state"] and (self._model.holds(each) or self._model.has_copy(each))
        }
        groups = [opened.decoded(group["options"]) for group in saved["groups"]]
        other = opened.decoded(saved["other"])

        def put_in_place() -> None:
            load_named_state(self._optimizer, self._names, state, groups)
            for key in [key for key in self._optimizer.state if str(key) in other]:
                self._optimizer.state[key] = like(self._optimizer.state[key], other[str(key)])

        return put_in_place

    def _check_groups(self, opened: Opened, saved: list[Json]) -> None:
        own = self._optimizer.param_groups
        if len(saved) != len(own):
            raise CheckpointError(
                f"{opened.shown} has an optimizer with {len(saved)} groups of parameters, and this one has {len(own)}: "
                "make the same groups, on every rank, empty ones too"
            )
        here = {name for each, name in self._names.items() if name != _NOBODY and self._model.holds(each)}
        for number, (group, before) in enumerate(zip(own, saved, strict=True)):
            left_out = here.intersection(before["names"]).difference(self._names[each] for each in group["params"])
            if left_out:
                raise CheckpointError(
                    f"{opened.shown} has {min(left_out)} in group {number} of its optimizer, and this one does not: "
                    "make the same groups, of the same parameters"
                )
            for each in group["params"]:
                name = self._names[each]
                if name != _NOBODY and self._model.holds(each) and name not in before["names"]:
                    raise CheckpointError(
                        f"{opened.shown} has no {name} in group {number} of its optimizer, where this one has it: make "
                        "the same groups, of the same parameters"
                    )

    def _read(self, opened: Opened, tree: Mapping[str, Json], parameter: nn.Parameter) -> Any:
        """Tensors like the parameter are laid out as that is."""

        def near(name: str) -> Tensor:
            entry = opened.manifest.tensors[name]
            alike = entry.shape == tuple(parameter.shape)
            if alike and hasattr(parameter, "device_mesh"):
                return opened.tensor(name, parameter)
            found = opened.tensor(name)
            if alike and found.stride() != parameter.stride():
                return torch.empty_like(parameter, dtype=found.dtype, device="cpu").copy_(found)
            return found

        return opened.decoded(tree, get=near)


def scheduler_tree(scheduler: Any) -> dict[str, Any] | None:
    """Of a scheduler, or of none."""
    if scheduler is None:
        return None
    if not hasattr(scheduler, "state_dict") or not hasattr(scheduler, "load_state_dict"):
        raise CheckpointError(f"the scheduler is a {type(scheduler).__name__}, which has no state_dict: leave it out")
    return {"kind": type(scheduler).__name__, "state": plain(scheduler.state_dict(), "the scheduler")}


def taking_scheduler(opened: Opened, scheduler: Any) -> Callable[[], None]:
    """Checks that it is of the same kind; what is returned puts its state in place."""
    saved = opened.value("scheduler")
    kind, before = None if scheduler is None else type(scheduler).__name__, None if saved is None else saved["kind"]
    if kind != before:
        way = "pass scheduler=" if kind is None else "leave scheduler= out" if before is None else f"make {before}"
        raise CheckpointError(f"{opened.shown} has {before or 'no'} scheduler, and load got {kind or 'none'}: {way}")

    def put_in_place() -> None:
        if scheduler is not None:
            scheduler.load_state_dict(like(scheduler.state_dict(), saved["state"]))

    return put_in_place
