"""Traces of models that keep nothing from one forward to the next, or nothing that matters.

A trace is one run, and the plain loop has many. So where a forward has set something that it reads, it is traced once
more as the first run has left it, on the same batch:

    the same graph, nothing set again   fine: Hugging Face's models set the type of their problem, others make a mask
    another graph                       refused: the first batch sets a scale, and later ones use it
    set again                           refused: a counter
"""

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from gapless.errors import GaplessError, PartitionError
from gapless.guards.whole_model import TRACED_STATE
from gapless.model.fidelity.forward_state import Attribute, Changed, ForwardState
from gapless.model.fidelity.second_run import same_graph
from gapless.stage.guards.state.state_notes import Entries

from .trace import Trace

_INITIALISED = "call the model once before the pipeline is made, if that sets it for good, or pass a list of layers"


def trace_settled(model: nn.Module, flat: list[Any], spec: pytree.TreeSpec) -> Trace:
    """A trace of a model whose second run does what the first does. What it sets once stays set, unless that is up to
    the sizes of a batch.
    """
    trace = Trace(model, flat, spec)
    state, trace.state = trace.state, ForwardState()  # which holds on to the model, or to a copy of it
    if state.remembered:
        raise _stored(model, _path(model, state.remembered[0]))
    changed = _changes(state)
    if not changed and not state.made_once:
        return trace
    if state.constants or not all(each.can_stay() for each in changed):
        _check_for_these_sizes(model, flat, spec)
        return trace
    try:
        for each in changed:
            each.set_again()
        return _again(model, flat, spec, (trace, state), changed[0].before.path)
    except BaseException:
        for each in changed:
            each.put_back()
        raise


def check_remembered(model: nn.Module, traces: Iterable[Trace]) -> None:
    """No trace reads what another one would have stored: one in training, and one in eval mode."""
    traces = list(traces)
    stored = {each for trace in traces for each in trace.stored_data}
    for trace in traces:
        for path, name in sorted(stored & trace.read_first):
            raise _stored(model, f"{path}.{name}" if path else name)


def _check_for_these_sizes(model: nn.Module, flat: list[Any], spec: pytree.TreeSpec) -> None:
    """What is set is made of sizes: with those of this batch it means something after the trace."""
    trace = Trace(model, flat, spec, attempts=["none"])
    state, changed = trace.state, _changes(trace.state)
    names = [each.before.path for each in changed] + [_path(model, each) for each in state.made_once]
    if not all(each.can_stay() for each in changed) or any(each is None for each in state.constants.values()):
        raise _kept(model, names[0])
    places = [Entries(module.__dict__, [name]) for module, name in state.constants]
    before = [each.read() for each in places]
    try:
        for each in changed:
            each.set_again()
        for (module, name), value in state.constants.items():
            module.__dict__[name] = value
        _again(model, flat, spec, (trace, state), names[0], attempts=["none"])
    finally:
        for each in changed:
            each.put_back()
        for place, content in zip(places, before, strict=True):
            place.write(content)


def _again(
    model: nn.Module,
    flat: list[Any],
    spec: pytree.TreeSpec,
    first: tuple[Trace, ForwardState],
    path: str,
    **options: Any,
) -> Trace:
    """The second run, which must do the same and set nothing more."""
    trace, left = first
    try:
        second = Trace(model, flat, spec, **options)
    except PartitionError as error:
        raise _other_way(model, path) from error
    state, second.state = second.state, ForwardState()
    for each in left.stored:
        if each in left.from_data and each in state.read_first:
            raise _stored(model, _path(model, each))
    if state.remembered or state.made_once or _changes(state):
        raise _kept(model, path)
    if not same_graph(trace.module, second.module, model):
        raise _other_way(model, path)
    return second


def _changes(state: ForwardState) -> list[Changed]:
    """What a forward has changed and may go by, besides tensors."""
    return [each for each in state.changed if each.matters(state.read_first)]


def _path(model: nn.Module, attribute: Attribute) -> str:
    module, name = attribute
    paths = {part: path for path, part in model.named_modules()}
    return ".".join(filter(None, (type(model).__name__, paths.get(module, type(module).__name__), name)))


def _kept(model: nn.Module, path: str) -> GaplessError:
    return _refusal(model, f"changes {path}, and a trace of it would keep the value of its first batch")


def _other_way(model: nn.Module, path: str) -> GaplessError:
    fact = f"sets {path} and does something else the next time, but a trace does the same for all batches"
    return _refusal(model, fact, _INITIALISED)


def _stored(model: nn.Module, path: str) -> GaplessError:
    fact = f"stores a tensor in {path} and reads what an earlier one has stored there, but a trace stores nothing"
    return _refusal(model, fact, f"make it a buffer that the forward changes in place, {_INITIALISED}")


def _refusal(model: nn.Module, fact: str, way_out: str | None = None) -> GaplessError:
    return TRACED_STATE.refusal(f"the forward of {type(model).__name__} {fact}", way_out, PartitionError)
