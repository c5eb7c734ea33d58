"""A piece of a traced graph, as Python code that a stage can run like any other layer.

    trace     n0 n1 n2 | n3 n4 n5 n6 | n7 n8        nodes in the graph's order, cut in two places
    layer        0            1           2         a layer of the pipeline: one per stage, with one piece per trace
    crossing        (t, a, s)      (t, b, s)        the trace's number, then every value that is needed later

Parameters and buffers stay where they are, in the user's model: a piece looks them up by name whenever it runs, so the
optimizer, `state_dict` and hooks never notice. Calls that a stage answers itself (deferred weight gradients, seeded
draws) are written in the form its table knows.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from gapless.model.fidelity.checkpointed_norms import RECOMPUTES
from gapless.stage.compiled import Compiler
from gapless.stage.norm.batchnorm_calls import checkpointed, checkpointed_count

from .compiled_segments import in_segments
from .crossing import Crossing
from .operators import COUNTING, PYTHON, Answer, answered, as_function, is_heavy, is_uncompiled

Place = Callable[[int], object]
Moved = tuple[torch.device, torch.device]  # from the one in a trace to the one of a piece
Exclude = Callable[[list[nn.Parameter]], None]


def _place(place: Place, number: int) -> None:
    place(number)


class Piece:
    """Consecutive nodes of one trace as one function, on one device."""

    def __init__(
        self, crossing: Crossing, start: int, end: int, model: nn.Module, moved: Moved | None, *, is_last: bool
    ) -> None:
        """From after position `start` up to `end`. What the last one gives is the model's result, and it is told how
        many random calls there are; `moved` says which device in the trace is which one here.
        """
        trace = crossing.trace
        self._nodes = trace.nodes[start + 1 : end + 1]
        self._incoming = trace.inputs if start < 0 else crossing.values(start)
        self._numbers, self._end = trace.numbers, len(trace.numbers) if is_last else None
        self._kept = trace.results if is_last else crossing.values(end)
        self._moved = moved
        self.spec = trace.out_spec if is_last else None
        used = {arg for node in self._nodes for arg in node.all_input_nodes if arg.op == "get_attr"}
        torch.fx.map_arg(self._kept, lambda node: used.add(node) if node.op == "get_attr" else None)
        self._attrs = sorted(used)
        self._homes = [home_of(model, node) for node in self._attrs]
        # By whether weight gradients may wait, and by what compiles it.
        self._runs: dict[tuple[bool, Compiler | None], Callable[..., Any]] = {}

    def _made(self, split: bool, compiler: Compiler | None) -> Any:
        graph = Graph()
        place, answer = graph.placeholder("place"), graph.placeholder("answer")
        values: dict[Node, Node] = {}
        for node in (*self._incoming, *self._attrs):
            values[node] = graph.placeholder(node.name)
        for node in self._nodes:
            if node in self._numbers:
                graph.call_function(_place, (place, self._numbers[node]))
            made = graph.node_copy(node, values.__getitem__)
            target: Any = PYTHON.get(node.target, node.target)
            made.meta = {}
            if self._moved is not None:
                made.args, made.kwargs = _moved((made.args, made.kwargs), self._moved)
            if RECOMPUTES in node.meta:
                target = checkpointed if target is torch.batch_norm else checkpointed_count
                made.args = (node.meta[RECOMPUTES], *made.args)
            if node in self._numbers or target in COUNTING or (split and is_heavy(node)):
                target, made.args = answered(target), (answer, *made.args)
            made.target = target
            if compiler is None:
                as_function(made)
            values[node] = made
        if self._end is not None:
            graph.call_function(_place, (place, self._end))
        graph.output(torch.fx.map_arg(self._kept, values.__getitem__))
        if compiler is not None:
            asks = {place, answer}
            graph = in_segments(
                graph, lambda node: is_uncompiled(node.target) or not asks.isdisjoint(node.all_input_nodes), compiler
            )
        return GraphModule({}, graph).forward

    def __call__(
        self, values: Sequence[Any], place: Place, answer: Answer, split: bool, compiler: Compiler | None = None
    ) -> Any:
        run = self._runs.get((split, compiler))
        if run is None:
            run = self._runs[split, compiler] = self._made(split, compiler)
        held = [getattr(owner, name) for owner, name in self._homes]
        if self._moved is not None:
            held = [_brought(value, self._moved) for value in held]
        out = run(place, answer, *values, *held)
        return tuple(out) if self.spec is None else pytree.tree_unflatten(out, self.spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Piece":
        """The graph is shared, what it uses is copied."""
        made = copy.copy(self)
        made._homes = copy.deepcopy(self._homes, memo)
        return made

    def apart(self) -> "tuple[Piece, nn.ModuleList]":
        """The same piece with modules of its own, which hold what it uses and nothing else."""
        made, holders = copy.copy(self), {id(owner): nn.Module() for owner, _ in self._homes}
        made._homes = [(holders[id(owner)], name) for owner, name in self._homes]
        for (owner, name), (holder, _) in zip(self._homes, made._homes, strict=True):
            value = getattr(owner, name)
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                holder._buffers[name] = value
            else:
                setattr(holder, name, value)
        return made, nn.ModuleList(holders.values())

    def unseen(self) -> list[nn.Parameter]:
        """Parameters that some call uses whose weight gradient can't wait."""
        light = {node for node in self._nodes if not is_heavy(node)}
        homes = [home for node, home in zip(self._attrs, self._homes, strict=True) if not light.isdisjoint(node.users)]
        values = [getattr(owner, name) for owner, name in homes]
        return [value for value in values if isinstance(value, nn.Parameter)]

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those it uses, with a name."""
        for number, (owner, name) in enumerate(self._homes):
            value = getattr(owner, name)
            if isinstance(value, nn.Parameter):
                yield f"{number}.{name}", value

    def homes(self, kind: Literal["_parameters", "_buffers"]) -> list[tuple[nn.Module, str]]:
        """Where the parameters or the buffers that it uses are."""
        return [each for each in self._homes if isinstance(each[0], nn.Module) and each[1] in getattr(each[0], kind)]


def home_of(model: nn.Module, node: Node) -> tuple[Any, str]:
    """The owner of a parameter or buffer in the user's model, or of a constant in the trace."""
    path, _, name = str(node.target).rpartition(".")
    traced: Any = node.graph.owning_module
    try:
        owner = model.get_submodule(path)
    except AttributeError:
        return traced.get_submodule(path), name
    return (owner if name in owner._parameters or name in owner._buffers else traced.get_submodule(path)), name


def _moved(tree: Any, moved: Moved) -> Any:
    source, target = moved

    def change(leaf: Any) -> Any:
        return target if isinstance(leaf, torch.device) and leaf == source else leaf

    return pytree.tree_map(change, tree)


def _brought(value: Any, moved: Moved) -> Any:
    """What a piece holds, on its own device: buffers, and the devices named in a body that a call runs."""
    if isinstance(value, Tensor):
        return value if type(value) is nn.Parameter else value.to(moved[1])
    if isinstance(value, GraphModule):
        known = value.meta.setdefault("brought", {})
        if moved not in known:
            known[moved] = moved_body(value, moved)
        return known[moved]
    return value


def moved_body(body: GraphModule, moved: Moved) -> GraphModule:
    """A copy of a body that names another device."""
    made = copy.deepcopy(body)
    for part in made.modules():
        if isinstance(part, GraphModule):
            for node in part.graph.nodes:
                node.args, node.kwargs = _moved((node.args, node.kwargs), moved)
            part.recompile()
    return made


class GraphLayer(nn.Module):
    """A stage's place in every trace: the one layer of that stage."""

    counts_draws = True

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[Piece] = []
        self.compiler: Compiler | None = None  # of its pieces, whose weight gradients then do not wait
        self.bind(_nowhere, as_it_is)

    def bind(self, place: Place, answer: Answer, *, split: bool = False, exclude: Exclude | None = None) -> None:
        """Gives it to a stage, which is told the number of a draw and answers calls; with `split` weight gradients may
        wait, but for those of parameters given to `exclude`.
        """
        self._place, self._answer, self._split, self._exclude = place, answer, split, exclude
        self._seen = 0

    def take(self, pieces: list[Piece]) -> None:
        """Other pieces in place of those it has: the model was edited."""
        self.pieces, self._seen = pieces, 0

    def forward(self, crossing: tuple[Any, ...]) -> Any:
        trace, *values = crossing
        self.learn()
        piece = self.pieces[trace]
        if torch.is_grad_enabled():
            out = piece(values, self._place, self._answer, self._split and self.compiler is None, self.compiler)
        else:
            out = piece(values, _nowhere, as_it_is, False, self.compiler)
        return out if piece.spec is not None else (trace, *out)

    def learn(self) -> None:
        """Tells the stage of parameters in new pieces whose gradients can't wait."""
        while self._seen < len(self.pieces):
            if self._exclude is not None:
                seen = self.pieces[self._seen]
                self._exclude(seen.unseen() if self.compiler is None else [each for _, each in seen.parameters()])
            self._seen += 1

    def homes(self) -> Iterator[tuple[nn.Module, str]]:
        """Where the parameters that it uses are."""
        return (each for piece in self.pieces for each in piece.homes("_parameters"))

    def settle(self, device: torch.device) -> None:
        """Brings parameters and buffers to the device; `.to` would give the model buffers of its own."""
        for piece in self.pieces:
            for _, parameter in piece.parameters():
                if parameter.device != device and not parameter.is_meta:
                    parameter.data = parameter.data.to(device)
                    if parameter.grad is not None:
                        parameter.grad.data = parameter.grad.data.to(device)
            for owner, name in piece.homes("_buffers"):
                if (buffer := owner._buffers[name]) is not None and not buffer.is_meta:
                    owner._buffers[name] = buffer.to(device)

    def modules(self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True) -> Iterator[nn.Module]:  # type: ignore[override]
        """Itself, and the modules whose buffers it uses: a stage looks for batch norms among them."""
        yield self
        yield from dict.fromkeys(owner for owner, _ in self.owned_buffers())

    def owned_buffers(self) -> Iterable[tuple[nn.Module, str]]:
        """Where the buffers that it uses are, each once."""
        return dict.fromkeys(each for piece in self.pieces for each in piece.homes("_buffers"))

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        names = {parameter: name for piece in self.pieces for name, parameter in piece.parameters()}
        yield from ((name, parameter) for parameter, name in names.items())


def _nowhere(_: int) -> None:
    """Nobody draws, or nobody asks from where."""


def as_it_is(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call itself: nobody answers it."""
    return function(*args, **kwargs)
