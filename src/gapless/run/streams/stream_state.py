"""All that a stream is made of besides the model, as dicts and lists of tensors, numbers and words:

    minibatches   how many have gone into the weights: the next one has this number, so its seeds go on
    rule, start   which version a minibatch uses
    replicas      of every stage: minibatches are groups of as many; a list, of each stage, where they take turns
    stages        by number   parameters   names, as the model has them
                              weights      a hash of each, to tell whether the model's state was loaded too
                              optimizer    as torch's, with names in place of numbers, and the name of its class
                              scheduler    and, in `scheduler_kind`, the name of its class
                              versions     by number, what a minibatch still to come will use: names and tensors, of
                                           each version those that differ from the version after it
                              updates      only where replicas take turns: how many the stage has made; `origin`, a
                                           minibatch and the group that began with it; and `waiting`, by minibatch the
                                           gradients of a group that is not complete

The newest weights are the model's own, in its own state. Nothing here needs pickle to be saved.
"""

import ctypes
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from gapless.errors import ConfigError
from gapless.guards.between_ranks import STREAM_WEIGHTS
from gapless.run.named_state import like, load_named_state, named_state, plain
from gapless.run.streams.stage_replicas import Grads
from gapless.run.streams.stream_device import StreamDevice
from gapless.run.streams.version_rule import VersionRule

State = dict[str, Any]
Kept = dict[int, dict[int, Tensor]]  # by version and the place of the parameter
_KEYS = ("minibatches", "rule", "start", "num_stages", "replicas", "stages")


def state_of(devices: Sequence[StreamDevice], *, versions: bool) -> State:
    """Of a stream that is drained. Tensors are not copied."""
    rule, newest = devices[0].rule, devices[0].at
    stages = {}
    for device in devices:
        held, updater = device.versions, device.updater
        stage: State = {"parameters": list(held.names), "weights": [_fingerprint(each) for each in held.parameters]}
        if updater.optimizer is not None:
            stage["optimizer"] = named_state(updater.optimizer, _names(device))
        if updater.scheduler is not None:
            stage["scheduler"] = plain(updater.scheduler.state_dict(), "the scheduler")
            stage["scheduler_kind"] = type(updater.scheduler).__name__
        if not versions:
            _check_none_waits(device.waiting)
        else:
            stage["versions"] = {
                str(version): {held.names[place]: value for place, value in kept.items()}
                for version, kept in held.kept().items()
            }
            if rule.in_turns:
                stage |= _turns_of(device)
        stages[str(device.rule.stage)] = stage
    start = rule.start if versions else newest
    values = (newest, rule.kind, start, rule.stages, _replicas(rule), stages)
    return dict(zip(_KEYS, values, strict=True))


def _replicas(rule: VersionRule) -> int | list[int]:
    return list(rule.turns) if rule.in_turns else rule.replicas


def _turns_of(device: StreamDevice) -> State:
    """How far a stage is whose replicas take turns, and the gradient that waits here."""
    rule, waiting = device.rule, {}
    if device.gradient is not None:
        named = zip(device.versions.names, device.gradient, strict=True)
        waiting[str(rule.number(device.updated))] = {name: grad.detach() for name, grad in named if grad is not None}
    return {
        "updates": device.updated,
        "start": rule.start,
        "origin": list(rule.origin),
        "came": device.waiting,
        "waiting": waiting,
    }


def loading(devices: Sequence[StreamDevice], state: Mapping[str, Any], *, versions: bool) -> Callable[[], None]:
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
    stages = state["stages"]
    versions = versions and all("versions" in stage for stage in stages.values())
    if versions:
        _check_same(devices, state)
    else:
        _check_none_waits(sum(len(stage.get("waiting", ())) for stage in stages.values()))
    saved = _Saved(list(stages.values()))
    for device in devices:
        saved.check(device)

    def load() -> None:
        for device in devices:
            saved.load(device)
            if not versions:
                begins = _Begins.anew(device, state)
            elif device.rule.in_turns:
                begins = _Begins.in_turns(device, stages[str(device.rule.stage)])
            else:
                begins = _Begins(state["minibatches"], state["start"])
            kept = _kept(device, stages[str(device.rule.stage)]["versions"]) if versions else {}
            if predicted := [] if versions else device.updater.predict_anew(begins.newest):
                kept, begins = _as_if_older(device, begins, predicted)
            device.versions.restore(begins.newest, kept)
            device.begin_at(*begins[1:])

    return load


class _Begins(NamedTuple):
    """Where a device goes on: its newest version, the oldest one, and how minibatches make groups."""

    newest: int
    start: int
    origin: tuple[int, int] = (0, 0)
    waiting: int = 0
    gradient: Grads | None = None

    @classmethod
    def anew(cls, device: StreamDevice, state: Mapping[str, Any]) -> "_Begins":
        """No version is older, and the next group has no minibatch that came before."""
        replicas, rule = state["replicas"], device.rule
        done = state["minibatches"] * (1 if isinstance(replicas, list) else replicas)
        newest = -(-done // rule.replicas)
        return cls(newest, newest, (done, newest) if rule.in_turns else (0, 0))

    @classmethod
    def in_turns(cls, device: StreamDevice, stage: Mapping[str, Any]) -> "_Begins":
        """In the middle of a group, perhaps."""
        minibatch, group = stage["origin"]
        rule = device.rule.anew(minibatch, group)
        own = stage["waiting"].get(str(rule.number(stage["updates"])))
        gradient = None
        if own is not None:
            named = zip(device.versions.names, device.versions.parameters, strict=True)
            gradient = [own[name].detach().clone().to(each.device) if name in own else None for name, each in named]
        return cls(stage["updates"], stage["start"], rule.origin, stage["came"], gradient)


def _kept(device: StreamDevice, saved: Mapping[str, Mapping[str, Tensor]]) -> Kept:
    places = {name: place for place, name in enumerate(device.versions.names)}
    return {int(version): {places[name]: value for name, value in each.items()} for version, each in saved.items()}


def _as_if_older(
    device: StreamDevice, begins: _Begins, predicted: Sequence[Mapping[Tensor, Tensor]]
) -> tuple[Kept, _Begins]:
    """Minibatch n + s of a stream that begins anew at n uses the newest weights, predicted for s updates: they take the
    places of the versions that it would have used.
    """
    moved = [(place, each) for place, each in enumerate(device.versions.parameters) if each in predicted[-1]]
    oldest = begins.newest - device.rule.delay
    kept = {
        oldest + updates: {place: found.get(each, each.detach()) for place, each in moved}
        for updates, found in enumerate(predicted)
    }
    # All stages save one start, but where replicas take turns.
    start = oldest if device.rule.in_turns else begins.newest - device.rule.longest_delay
    return kept, begins._replace(start=start)


def _check_none_waits(count: int) -> None:
    """Without versions groups begin anew, so nothing may be left of the last one."""
    if count:
        raise ConfigError(
            f"{count} gradients wait for the rest of their group, and a state without versions would lose them: take "
            "and load it with versions, or end the stream before, as leaving its `with` does"
        )


def _check_same(devices: Sequence[StreamDevice], state: Mapping[str, Any]) -> None:
    """Versions are those of one rule, of certain stages, and of this model."""
    way_out = "load it with versions=False, which starts anew from the newest weights"
    for device in devices:
        rule, held, saved = device.rule, device.versions, state["stages"].get(str(device.rule.stage))
        if (state["rule"], state["num_stages"]) != (rule.kind, rule.stages):
            raise ConfigError(
                f"the state has versions for {state['rule']} with {state['num_stages']} stages, but the stream is "
                f"{rule.kind} with {rule.stages}: {way_out}"
            )
        if state["replicas"] != _replicas(rule):
            raise ConfigError(
                f"the state has versions for {state['replicas']} replicas, whose updates take as many minibatches, but "
                f"the stream has {_replicas(rule)}: {way_out}"
            )
        if saved is None or saved["parameters"] != held.names:
            raise ConfigError(f"stage {rule.stage} has other parameters than in the state: {way_out}")
        if rule.in_turns:
            own = rule.anew(*saved["origin"]).number(saved["updates"])
            if rule.replica < saved["came"] and str(own) not in saved["waiting"]:
                raise ConfigError(
                    f"the state lacks the gradient of minibatch {own} at stage {rule.stage}, which waits for its "
                    "group: load what this rank has saved, or a whole state"
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

    def check(self, device: StreamDevice) -> None:
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
                        f"{saved}, or leave the state out and load the model's alone"
                    )
        for name, parameter in zip(held.names, held.parameters, strict=True):
            if self._weights.get(name, "") not in ("", _fingerprint(parameter)):
                whose = (
                    "loss's own state too, which is not in the model's"
                    if name.startswith("loss: ")
                    else "model's state first"
                )
                raise STREAM_WEIGHTS.refusal(
                    f"the weights of stage {number} are not those that the state was taken with ({name})",
                    f"load the {whose}, and then the stream's",
                )

    def load(self, device: StreamDevice) -> None:
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

    def _trained(self, device: StreamDevice) -> Iterator[str]:
        names = _names(device)
        optimizer = device.updater.optimizer
        for group in [] if optimizer is None else optimizer.param_groups:
            for parameter in group["params"]:
                yield names[parameter]


def _names(device: StreamDevice) -> dict[Any, str]:
    return dict(zip(device.versions.parameters, device.versions.names, strict=True))


def _fingerprint(parameter: nn.Parameter) -> str:
    """Of all bits, each in its place."""
    data = parameter.detach().cpu().contiguous()
    size = data.numel() * data.element_size()
    return hashlib.sha256((ctypes.c_ubyte * size).from_address(data.data_ptr()) if size else b"").hexdigest()
