"""All that a stream is made of besides the model, as dicts and lists of tensors, numbers and words:

    minibatches   how many have gone into the weights: the next one has this number, so its seeds go on
    rule, start   which version a minibatch uses
    replicas      of every stage: minibatches are groups of as many
    stages        by number   parameters   names, as the model has them
                              weights      a hash of each, to tell whether the model's state was loaded too
                              optimizer    as torch's, with names in place of numbers, and the name of its class
                              scheduler    and, in `scheduler_kind`, the name of its class
                              versions     by number, what a minibatch still to come will use: names and tensors, of
                                           each version those that differ from the version after it

The newest weights are the model's own, in its own state. Nothing here needs pickle to be saved.
"""

import ctypes
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gapless.errors import ConfigError
from gapless.run.flow.device import FlowDevice

State = dict[str, Any]
_KEYS = ("minibatches", "rule", "start", "num_stages", "replicas", "stages")


def state_of(devices: Sequence[FlowDevice], *, versions: bool) -> State:
    """Of a stream that is drained. Tensors are not copied."""
    rule, newest = devices[0].rule, devices[0].updated
    stages = {}
    for device in devices:
        held, updater = device.versions, device.updater
        stage: State = {"parameters": list(held.names), "weights": [_fingerprint(each) for each in held.parameters]}
        if updater.optimizer is not None:
            stage["optimizer"] = _optimizer_state(updater.optimizer, _names(device))
        if updater.scheduler is not None:
            stage["scheduler"] = _plain(updater.scheduler.state_dict(), "the scheduler")
            stage["scheduler_kind"] = type(updater.scheduler).__name__
        if versions:
            stage["versions"] = {
                str(version): {held.names[place]: value for place, value in kept.items()}
                for version, kept in held.kept().items()
            }
        stages[str(device.rule.stage)] = stage
    start = rule.start if versions else newest
    values = (newest, rule.kind, start, rule.stages, rule.replicas, stages)
    return dict(zip(_KEYS, values, strict=True))


def loading(devices: Sequence[FlowDevice], state: Mapping[str, Any], *, versions: bool) -> Callable[[], None]:
    """What takes over a state; raises if it does not fit, and nothing has changed then. Without `versions` all
    minibatches to come use this one's weights or newer ones; with them the bits are those of a stream that was never
    saved.
    """
    lacks = [key for key in _KEYS if key not in state] if isinstance(state, Mapping) else list(_KEYS)
    if lacks:
        raise ConfigError(
            f"this is no state of a stream, since it has no {', '.join(lacks)}: pass what the state_dict() of a stream "
            "has returned, and load the model's with the pipeline's own load_state_dict"
        )
    newest, stages, replicas = state["minibatches"], state["stages"], devices[0].rule.replicas
    versions = versions and all("versions" in stage for stage in stages.values())
    if versions:
        _check_same(devices, state)
    elif state["replicas"] != replicas:  # the next group has no minibatch that came before
        newest = -(-newest * state["replicas"] // replicas)
    saved = _Saved(list(stages.values()))
    for device in devices:
        saved.check(device)

    def load() -> None:
        for device in devices:
            saved.load(device)
            kept = stages[str(device.rule.stage)]["versions"] if versions else {}
            places = {name: place for place, name in enumerate(device.versions.names)}
            device.versions.restore(
                newest,
                {int(version): {places[name]: value for name, value in each.items()} for version, each in kept.items()},
            )
            device.begin_at(state["start"] if versions else newest)

    return load


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
        if state["replicas"] != rule.replicas:
            raise ConfigError(
                f"the state has versions for {state['replicas']} replicas, whose updates take as many minibatches, but "
                f"the stream has {rule.replicas}: {way_out}"
            )
        if saved is None or saved["parameters"] != held.names:
            raise ConfigError(f"stage {rule.stage} has other parameters than in the state: {way_out}")
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
        self._kinds: dict[str, tuple[str, str | None]] = {}
        self._weights: dict[str, str] = {}
        for stage in stages:
            self._weights.update(zip(stage["parameters"], stage["weights"], strict=True))
            optimizer = stage.get("optimizer", {"state": {}, "param_groups": []})
            self._state.update(optimizer["state"])
            for group in optimizer["param_groups"]:
                for name in group["params"]:
                    self._groups[name] = group
                    self._schedulers[name] = stage.get("scheduler")
                    self._kinds[name] = optimizer["kind"], stage.get("scheduler_kind")

    def check(self, device: FlowDevice) -> None:
        """Raises if something is missing, or of another kind."""
        number, held, scheduler = device.rule.stage, device.versions, device.updater.scheduler
        own = type(device.updater.optimizer).__name__, None if scheduler is None else type(scheduler).__name__
        for name in self._trained(device):
            if name not in self._groups:
                raise ConfigError(
                    f"{name} is trained by stage {number}, but the state has no optimizer for it: make the stream for "
                    "the same model, with the same parameters frozen"
                )
            if (scheduler is None) != (self._schedulers[name] is None):
                has, wants = ("a", "none") if scheduler is None else ("no", "one")
                raise ConfigError(f"the state has {has} scheduler for {name}, but the stream has {wants}")
            for saved, used in zip(self._kinds[name], own, strict=True):
                if saved != used:
                    raise ConfigError(
                        f"the state has what {saved} keeps for {name}, but the stream has {used}: make it with "
                        f"{saved}, or leave the state out and go on with the model's alone"
                    )
        for name, parameter in zip(held.names, held.parameters, strict=True):
            if self._weights.get(name, "") not in ("", _fingerprint(parameter)):
                whose = "loss's own state too, which is not in the model's" if _of_loss(name) else "model's state first"
                raise ConfigError(
                    f"the weights of stage {number} are not those that the state was taken with ({name}): load the "
                    f"{whose}, and then the stream's"
                )

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
    plain = {"state": _plain(state, "the optimizer"), "param_groups": _plain(groups, "the optimizer")}
    return {"kind": type(optimizer).__name__, **plain}


def _load_optimizer(
    optimizer: Optimizer, names: Mapping[Any, str], state: Mapping[str, Any], groups: Mapping[str, Mapping[str, Any]]
) -> None:
    made = optimizer.state_dict()
    taken, merged = {}, []
    for group, own in zip(optimizer.param_groups, made["param_groups"], strict=True):
        first = group["params"][:1]  # a group may be empty
        saved = groups[names[first[0]]] if first else own
        merged.append({**_like(own, saved), "params": own["params"]})
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


def _of_loss(name: str) -> bool:
    """Whether it is a parameter of the loss, whose state the model's does not have."""
    return name.startswith("loss: ")


def _fingerprint(parameter: nn.Parameter) -> str:
    """Of all bits, each in its place."""
    data = parameter.detach().cpu().contiguous()
    size = data.numel() * data.element_size()
    return hashlib.sha256((ctypes.c_ubyte * size).from_address(data.data_ptr()) if size else b"").hexdigest()
