"""Whether a trace that was made in another mode, or for other sizes, does what the model does now.

An export takes seconds. So before there is another one, the model and a trace are both run on tensors without data, of
exactly the sizes of the batch, and what they call is compared: operators as an export records them, above autograd and
autocast, with all their arguments.

    model in eval    linear(x, w)  dropout(., 0.0, False)  add      linear(x, w)  batch_norm(., training=False)
    trace, training  linear(x, w)  dropout(., 0.0, True)   add      linear(x, w)  batch_norm(., training=True)
                     the same                                       traced again
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.amp import autocast_mode
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from gapless.model.fidelity.batch_questions import BatchQuestion
from gapless.model.fidelity.second_run import Made, same_calls
from gapless.model.materialise import named_tensors
from gapless.stage.random.exclusive import exclusively

from .hollow import hollow
from .operators import PYTHON, WRAPPING
from .trace import Observed, Trace, observed

aten = torch.ops.aten
_TORCHS: Any = autocast_mode
_VIEWS = (aten.alias.default, aten.slice.Tensor, aten.select.int, aten.unsqueeze.default)
Run = Callable[[dict[str, Tensor], list[Any]], Any]


class Shared(NamedTuple):
    """A trace that does what the model does: its place among those that were tried, for which answers of the batch, and
    which attributes the model has read on the way.
    """

    number: int
    questions: list[BatchQuestion]
    read_first: set[tuple[str, str]]


def find_shared(
    model: nn.Module, flat: list[Any], spec: pytree.TreeSpec, device: torch.device, traces: Iterable[Trace]
) -> Shared | None:
    """The first of the traces that does for this batch what the model does, in its present mode. `device`: that of the
    traces. None, too, for whatever can't be seen without data, or sets something.
    """
    tried = [(number, trace) for number, trace in enumerate(traces) if trace.is_for(flat, spec)]
    held = {type(tensor) for _, tensor in named_tensors(model)} - {Tensor, nn.Parameter}
    if not tried or held or any(isinstance(leaf, Tensor) and not leaf.numel() for leaf in flat):
        return None
    before = torch.get_rng_state()
    try:
        with exclusively(), observed(model, flat, pytree.tree_unflatten(flat, spec)[1]) as seen:
            return _found(model, flat, spec, device, tried, seen)
    except Exception:
        return None  # an export may do better, or says what is in the way
    finally:
        torch.set_rng_state(before)


def _found(
    model: nn.Module,
    flat: list[Any],
    spec: pytree.TreeSpec,
    device: torch.device,
    tried: list[tuple[int, Trace]],
    seen: Observed,
) -> Shared | None:
    outputs: list[pytree.TreeSpec] = []

    def called(_: Any, leaves: list[Any]) -> Any:
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        results, out_spec = pytree.tree_flatten(model(*args, **kwargs))
        outputs.append(out_spec)
        return results

    ours = _recorded(called, model, flat, device, seen)
    if seen.state.changed or seen.state.stored or seen.norms.checkpointed:
        return None
    for number, trace in tried:
        if trace.out_spec == outputs[0] and not trace.stored and not trace.checkpointed_norms:
            replay = functools.partial(_replayed, trace.module)
            if same_calls(_calls(ours), _calls(_recorded(replay, model, flat, device, seen))):
                return Shared(number, seen.questions.asked, seen.read_first(model))
    return None


def _recorded(run: Run, model: nn.Module, flat: list[Any], device: torch.device, seen: Observed) -> GraphModule:
    """The calls of a run of the model, or of a trace of it, with parameters, buffers and the batch as inputs."""
    with FakeTensorMode(allow_non_fake_inputs=True), hollow(model, device):
        held = dict(named_tensors(model))
        unique = list({id(tensor): tensor for tensor in held.values()}.values())
        leaves = [
            torch.empty_strided(
                leaf.size(), leaf.stride(), dtype=leaf.dtype, device=device, requires_grad=leaf.requires_grad
            )
            if isinstance(leaf, Tensor)
            else leaf
            for leaf in flat
        ]
        made = make_fx(lambda _, values: run(held, values), pre_dispatch=True)(unique, leaves)
    seen.own.put_back(made, model)
    made.graph.eliminate_dead_code()
    return made


class _Replay(Interpreter):
    """A run of a trace with other parameters and buffers, without the checks of its sizes."""

    def __init__(self, module: GraphModule, held: dict[str, Tensor]) -> None:
        super().__init__(module)
        self._held = held

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._held[target] if target in self._held else super().get_attr(target, args, kwargs)

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        return None

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if "assert" in str(target):
            return None
        if PYTHON.get(target) in WRAPPING:
            target = PYTHON[target]
            args = [_body(arg) if isinstance(arg, GraphModule) else arg for arg in args]
        return super().call_function(target, tuple(args), kwargs)


def _replayed(module: GraphModule, held: dict[str, Tensor], leaves: Iterable[Any]) -> Any:
    return _Replay(module, held).run(*leaves, enable_io_processing=False)


def _body(module: GraphModule) -> Callable[..., Any]:
    return lambda *args: _replayed(module, {}, args)


def _calls(module: GraphModule) -> list[list[Any]]:
    """What is called in order: operator, grad mode, autocast, and the leaves of its arguments."""
    known: dict[Node, Any] = {}
    constants: dict[int, int] = {}
    found: list[list[Any]] = []
    grad, casts, dropped = torch.is_grad_enabled(), list[Any](), set[Node]()
    for node in module.graph.nodes:
        target, args = node.target, node.args
        if target is torch._C._set_grad_enabled:
            grad = args[0]
        elif target is _TORCHS._enter_autocast:
            casts.append(args[:3])  # the fourth is a cache, which does not change numbers
        elif target is _TORCHS._exit_autocast:
            casts.pop()
        elif node.op == "get_attr":
            value = getattr(module, target)
            place = constants.setdefault(id(value), len(constants))
            known[node] = (Made(place), value) if isinstance(value, Tensor) else value
        elif target is aten.contiguous.default and args[0].meta["val"].is_contiguous():
            known[node] = known[args[0]]  # in Python that is no call
        elif _gives_all(node) and _in_a_chain(node, dropped):
            known[node] = known[args[0]]
            dropped.add(node)
        elif "assert" not in str(target):
            if target is aten.dropout.default and not (args[1] and args[2]):
                args = args[:1]  # it gives what it is given
            if _gives_all(node):
                target, args = aten.alias.default, args[:1]
            given = pytree.tree_map_only(Node, known.__getitem__, (args, node.kwargs))
            leaves, spec = pytree.tree_flatten(given)
            found.append([node.op if node.op == "placeholder" else target, grad, tuple(casts), spec, *leaves])
            known[node] = Made(len(found))
    return found


def _gives_all(node: Node) -> bool:
    """Whether it is a view of all that it is given: of `x[:, :1]` the first part, which is a call where sizes vary."""
    if node.target is aten.alias.default:
        return True
    if node.target is not aten.slice.Tensor or len(node.args) != 4:
        return False
    arguments: Any = node.args
    source, dim, start, end = arguments
    return bool(start == 0 and end >= source.meta["val"].size(dim))


def _in_a_chain(node: Node, dropped: set[Node]) -> bool:
    """Whether it stands beside another view that is not dropped, and nothing else uses what is between: then gradients
    are added up alike without it.
    """
    if node.next.target in _VIEWS and list(node.users) == [node.next]:
        return True
    source = node.prev
    if node.args[0] is not source or len(source.users) > 1:
        return False
    while source in dropped:
        source = source.all_input_nodes[0]
    return source.target in _VIEWS
