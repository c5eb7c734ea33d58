"""What optimizers and schedulers keep, under the names of parameters and in plain values: tensors, numbers, words,
None, lists, and dicts with words as keys. A number that torch gives to a parameter says nothing in another process,
where other parameters are; a name does.

    named_state -> {"kind": "AdamW", "state": {name: {...}}, "param_groups": [{..., "params": [names]}]}
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from gapless.errors import ConfigError

Named = dict[str, Any]


def named_state(optimizer: Any, names: Mapping[Any, str]) -> Named:
    """Of an optimizer whose state is kept by parameter. Tensors are not copied."""
    made = optimizer.state_dict()
    known: dict[Any, str] = {}  # by number
    groups = []
    for group, saved in zip(optimizer.param_groups, made["param_groups"], strict=True):
        own = [names[each] for each in group["params"]]
        known.update(zip(saved["params"], own, strict=True))
        groups.append({**saved, "params": own})
    state = {known.get(key, key): value for key, value in made["state"].items()}
    plainly = {"state": plain(state, "the optimizer"), "param_groups": plain(groups, "the optimizer")}
    return {"kind": type(optimizer).__name__, **plainly}


def load_named_state(
    optimizer: Any, names: Mapping[Any, str], state: Mapping[str, Any], groups: Sequence[Mapping[str, Any] | None]
) -> None:
    """Takes from `state` what belongs to the optimizer's parameters, and for each of its groups the options of one in
    `groups`; where that is None they stay as they are.
    """
    made = optimizer.state_dict()
    taken, merged = {}, []
    for group, own, saved in zip(optimizer.param_groups, made["param_groups"], groups, strict=True):
        merged.append({**own, **like(own, saved or {}), "params": own["params"]})
        for parameter, number in zip(group["params"], own["params"], strict=True):
            if names[parameter] in state:
                taken[number] = like({}, state[names[parameter]])
    optimizer.load_state_dict({"state": taken, "param_groups": merged})
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        if parameter in optimizer.state:
            optimizer.state[parameter] = _uncast(optimizer.state[parameter], state.get(names[parameter]))


def _uncast(own: Any, saved: Any) -> Any:
    """torch casts to the parameter's type what it takes for a moment of it, which may be something else, and takes
    strings for lists of letters.
    """
    if isinstance(saved, str):
        return saved
    if isinstance(saved, Tensor) and isinstance(own, Tensor):
        return own if saved.dtype == own.dtype else saved.detach().clone().to(own.device)
    if isinstance(saved, Mapping) and isinstance(own, dict):
        for key in own:
            own[key] = _uncast(own[key], saved.get(str(key)))
    elif isinstance(saved, list) and isinstance(own, list | tuple) and len(own) == len(saved):
        return type(own)([_uncast(*each) for each in zip(own, saved, strict=True)])
    return own


def plain(value: Any, owner: str) -> Any:
    """The same in dicts with words as keys, and in lists."""
    if isinstance(value, Tensor):
        return value.detach()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(each, owner) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each, owner) for each in value]
    raise ConfigError(
        f"{owner} keeps a {type(value).__name__} in its state, but what is saved has only tensors, numbers, words, "
        "lists and dicts: use another, or leave that out of its state_dict()"
    )


def like(own: Any, saved: Any) -> Any:
    """What was saved as plain values, of the kinds that a fresh one has; tensors are copied."""
    if isinstance(saved, Tensor):
        return saved.detach().clone()
    if isinstance(saved, Mapping):
        of_own = {str(key): (key, value) for key, value in own.items()} if isinstance(own, Mapping) else {}
        counts = isinstance(own, Counter)  # a scheduler's milestones
        made = {}
        for name, each in saved.items():
            key, value = of_own.get(name, (int(name) if counts else name, None))
            made[key] = like(value, each)
        return Counter(made) if counts else made
    if isinstance(saved, list):
        places = own if isinstance(own, list | tuple) and len(own) == len(saved) else [None] * len(saved)
        values = [like(place, each) for place, each in zip(places, saved, strict=True)]
        return tuple(values) if isinstance(own, tuple) else values
    return saved
