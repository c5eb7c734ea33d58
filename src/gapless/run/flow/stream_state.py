"""All that a stream is made of besides the model, as dicts and lists of tensors, numbers and words:

    minibatches   how many have gone into the weights: the next one has this number, so its seeds go on
    rule, start   which version a minibatch uses
    stages        by number   parameters   names, as the model has them
                              weights      a sum of their bits, to tell whether the model's state was loaded too
                              optimizer    as torch's, with names in place of numbers
                              scheduler
                              versions     by number, what a minibatch still to come will use: names and tensors, of
                                           each version those that differ from the version after it

The newest weights are the model's own, in its own state. Nothing here needs pickle to be saved.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gapless.errors import ConfigError
from gapless.run.flow.device import FlowDevice

State = dict[str, Any]


def state_of(devices: Sequence[FlowDevice], *, versions: bool) -> State:
    """Of a stream that is drained. Tensors are not copied."""
    rule, newest = devices[0].rule, devices[0].updated
    stages = {}
    for device in devices:
        held, updater = device.versions, device.updater
        stage: State = {"parameters": list(held.names), "weights": _fingerprint(held.parameters)}
        if updater.optimizer is not None:
            stage["optimizer"] = _optimizer_state(updater.optimizer, _names(device))
        if updater.scheduler is not None:
            stage["scheduler"] = _plain(updater.scheduler.state_dict(), "the scheduler")
        if versions:
            stage["versions"] = {
                str(version): {held.names[place]: value for place, value in kept.items()}
                for version, kept in held.kept().items()
            }
        stages[str(device.rule.stage)] = stage
    start = rule.start if versions else newest
    return {"minibatches": newest, "rule": rule.kind, "start": start, "num_stages": rule.stages, "stages": stages}


def load(devices: Sequence[FlowDevice], state: Mapping[str, Any], *, versions: bool) -> None:
    """Takes over a state, or raises and changes nothing. Without `versions` all minibatches to come use this one's
    weights or newer ones; with them the bits are those of a stream that was never saved.
    """
    newest, stages = state["minibatches"], state["stages"]
    versions = versions and all("versions" in stage for stage in stages.values())
    if versions:
        _check_same(devices, state)
    saved = _Saved(list(stages.values()))
    for device in devices:
        saved.check(device)
    for device in devices:
        saved.load(device)
        kept = stages[str(device.rule.stage)]["versions"] if versions else {}
        places = {name: place for place, name in enumerate(device.versions.names)}
        device.versions.restore(
            newest,
            {int(version): {places[name]: value for name, value in each.items()} for version, each in kept.items()},
        )
        device.begin_at(state["start"] if versions else newest)


def _check_same(devices: Sequence[FlowDevice], state: Mapping[str, Any]) -> None:
    """Versions are those of one rule, of certain stages, and of this model."""
    way_out = "load it with versions=False, which starts anew from the newest weights"
    for device in devices:
        rule, held, saved = device.rule, device.versions, state["stages"].get(str(device.rule.stage))
        if (state["rule"], state["num_stages"]) != (rule.kind, rule.stages):
            raise ConfigError(
                f"the state has versions for {state['rule']} with {state['num_stages']} stages, but the stream is "
                f"{rule.kind} with {rule.stages}: {way_out}"
            )
        if saved is None or saved["parameters"] != held.names:
            raise ConfigError(f"stage {rule.stage} has other parameters than in the state: {way_out}")
        if saved["weights"] != _fingerprint(held.parameters):
            raise ConfigError(
                f"the weights of stage {rule.stage} are not those that the state was taken with: load the model's "
                "state first, and then the stream's"
            )
        shapes = dict(zip(held.names, held.parameters, strict=True))
        for version, kept in saved["versions"].items():
            for name, value in kept.items():
                if (value.shape, value.dtype) != (shapes[name].shape, shapes[name].dtype):
                    raise ConfigError(
                        f"version {version} of {name} is {value.dtype} {tuple(value.shape)} in the state, but the "
                        f"parameter is {shapes[name].dtype} {tuple(shapes[name].shape)}: {way_out}"
                    )


class _Saved:
    """Optimizers and schedulers by the names of parameters: a parameter may be in another stage by now."""

    def __init__(self, stages: Sequence[Mapping[str, Any]]) -> None:
        self._state: dict[str, Any] = {}
        self._groups: dict[str, Mapping[str, Any]] = {}
        self._schedulers: dict[str, Any] = {}
        for stage in stages:
            optimizer = stage.get("optimizer", {"state": {}, "param_groups": []})
            self._state.update(optimizer["state"])
            for group in optimizer["param_groups"]:
                for name in group["params"]:
                    self._groups[name] = group
                    self._schedulers[name] = stage.get("scheduler")

    def check(self, device: FlowDevice) -> None:
        """Raises if something is missing."""
        number, scheduler = device.rule.stage, device.updater.scheduler
        for name in self._trained(device):
            if name not in self._groups:
                raise ConfigError(
                    f"{name} is trained by stage {number}, but the state has no optimizer for it: make the stream for "
                    "the same model, with the same parameters frozen"
                )
            if (scheduler is None) != (self._schedulers[name] is None):
                has, wants = ("a", "none") if scheduler is None else ("no", "one")
                raise ConfigError(f"the state has {has} scheduler for {name}, but the stream has {wants}")

    def load(self, device: FlowDevice) -> None:
        """What belongs to the stage of this device."""
        updater, names = device.updater, _names(device)
        if updater.optimizer is None:
            return
        first = next(iter(self._trained(device)))
        _load_optimizer(updater.optimizer, names, self._state, self._groups)
        if updater.scheduler is not None:
            own = updater.scheduler.state_dict()
            updater.scheduler.load_state_dict(_like(own, self._schedulers[first]))

    def _trained(self, device: FlowDevice) -> Iterator[str]:
        names = _names(device)
        optimizer = device.updater.optimizer
        for group in [] if optimizer is None else optimizer.param_groups:
            for parameter in group["params"]:
                yield names[parameter]


def _names(device: FlowDevice) -> dict[Any, str]:
    return dict(zip(device.versions.parameters, device.versions.names, strict=True))


def _optimizer_state(optimizer: Optimizer, names: Mapping[Any, str]) -> State:
    made = optimizer.state_dict()
    known: dict[Any, str] = {}  # by number
    groups = []
    for group, saved in zip(optimizer.param_groups, made["param_groups"], strict=True):
        own = [names[each] for each in group["params"]]
        known.update(zip(saved["params"], own, strict=True))
        groups.append({**saved, "params": own})
    state = {known.get(key, key): value for key, value in made["state"].items()}
    return {"state": _plain(state, "the optimizer"), "param_groups": _plain(groups, "the optimizer")}


def _load_optimizer(
    optimizer: Optimizer, names: Mapping[Any, str], state: Mapping[str, Any], groups: Mapping[str, Mapping[str, Any]]
) -> None:
    made = optimizer.state_dict()
    taken, merged = {}, []
    for group, own in zip(optimizer.param_groups, made["param_groups"], strict=True):
        merged.append({**_like(own, groups[names[group["params"][0]]]), "params": own["params"]})
        for parameter, number in zip(group["params"], own["params"], strict=True):
            if names[parameter] in state:
                taken[number] = _like({}, state[names[parameter]])
    optimizer.load_state_dict({"state": taken, "param_groups": merged})
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        own = optimizer.state.get(parameter, {})
        for key, value in state.get(names[parameter], {}).items():
            # torch casts to the parameter's type what it takes for a moment of it, which may be something else.
            if isinstance(value, Tensor) and value.dtype != own[key].dtype:
                own[key] = value.detach().clone().to(own[key].device)


def _plain(value: Any, owner: str) -> Any:
    """The same in dicts with words as keys, and in lists."""
    if isinstance(value, Tensor):
        return value.detach()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(each, owner) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each, owner) for each in value]
    raise ConfigError(
        f"{owner} keeps a {type(value).__name__} in its state, but a stream's state has only tensors, numbers, words, "
        "lists and dicts: use another, or leave that out of its state_dict()"
    )


def _like(own: Any, saved: Any) -> Any:
    """What was saved as plain values, of the kinds that a fresh one has; tensors are copied."""
    if isinstance(saved, Tensor):
        return saved.detach().clone()
    if isinstance(saved, Mapping):
        of_own = {str(key): (key, value) for key, value in own.items()} if isinstance(own, Mapping) else {}
        counts = isinstance(own, Counter)  # a scheduler's milestones
        made = {}
        for name, each in saved.items():
            key, value = of_own.get(name, (int(name) if counts else name, None))
            made[key] = _like(value, each)
        return Counter(made) if counts else made
    if isinstance(saved, list):
        places = own if isinstance(own, list | tuple) and len(own) == len(saved) else [None] * len(saved)
        values = [_like(place, each) for place, each in zip(places, saved, strict=True)]
        return tuple(values) if isinstance(own, tuple) else values
    return saved


def _fingerprint(parameters: Sequence[nn.Parameter]) -> int:
    """A sum of all bytes, which no other weights are likely to have."""
    return sum(int(each.detach().flatten().view(torch.uint8).sum()) for each in parameters if each.numel())
