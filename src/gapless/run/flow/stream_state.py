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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from gapless.errors import ConfigError
from gapless.run.flow.device import FlowDevice
from gapless.run.named_state import like, load_named_state, named_state, plain

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
            stage["optimizer"] = named_state(updater.optimizer, _names(device))
        if updater.scheduler is not None:
            stage["scheduler"] = plain(updater.scheduler.state_dict(), "the scheduler")
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
        groups = [
            self._groups[names[each["params"][0]]] if each["params"] else None
            for each in updater.optimizer.param_groups
        ]
        load_named_state(updater.optimizer, names, self._state, groups)
        if updater.scheduler is not None:
            own = updater.scheduler.state_dict()
            updater.scheduler.load_state_dict(like(own, self._schedulers[first]))

    def _trained(self, device: FlowDevice) -> Iterator[str]:
        names = _names(device)
        optimizer = device.updater.optimizer
        for group in [] if optimizer is None else optimizer.param_groups:
            for parameter in group["params"]:
                yield names[parameter]


def _names(device: FlowDevice) -> dict[Any, str]:
    return dict(zip(device.versions.parameters, device.versions.names, strict=True))


def _of_loss(name: str) -> bool:
    """Whether it is a parameter of the loss, whose state the model's does not have."""
    return name.startswith("loss: ")


def _fingerprint(parameter: nn.Parameter) -> str:
    """Of all bits, each in its place."""
    data = parameter.detach().cpu().contiguous()
    size = data.numel() * data.element_size()
    return hashlib.sha256((ctypes.c_ubyte * size).from_address(data.data_ptr()) if size else b"").hexdigest()
