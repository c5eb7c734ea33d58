"""One export of a model: its graph, and for which batches it holds.

A trace is made from a real microbatch with every dimension dynamic that the model leaves dynamic. Where a later
microbatch does not fit (a size of 1 is special to torch, a model may look at its sequence length), another trace is
made; traces are kept, so this happens once for each new kind of batch.
"""

import contextlib
import functools
import importlib
import inspect
import io
import logging
import re
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from gapless.errors import PartitionError
from gapless.guards.whole_model import LOST_IN_TRACE
from gapless.model.code_origin import is_users
from gapless.model.fidelity.batch_questions import Questions
from gapless.model.fidelity.checkpointed_norms import CheckpointedNorms
from gapless.model.fidelity.forward_state import ForwardState
from gapless.model.fidelity.own_backward import OwnBackwards
from gapless.model.fidelity.plain_choices import as_called, spelled_out, switches
from gapless.model.fidelity.traced_forward import in_forward
from gapless.model.fidelity.untraceable import LostError, levels_left, nothing_lost
from gapless.model.layers import misspelt
from gapless.stage.auxiliary import traced
from gapless.stage.random.exclusive import exclusively
from gapless.stage.settings import settings

from .operators import as_called_plainly, draws, kept_nodes

_LIBRARIES = ("torch", "transformers", "accelerate", "peft")  # whose hooks are known to do nothing else
# Everything dynamic; or what shares its first dimension with the batch; or nothing.
_ATTEMPTS = ("all", "first", "none")


class Trace:
    """The graph of a model for one kind of batch, in one mode (training or not) and under the caller's settings of
    torch: autocast, gradients, default types.
    """

    def __init__(
        self, model: nn.Module, flat: list[Any], spec: pytree.TreeSpec, *, attempts: Sequence[str] = _ATTEMPTS
    ) -> None:
        self._spec = spec
        self._kinds = [_kind(leaf) for leaf in flat]
        self._settings = settings()
        with exclusively():  # while torch traces, functions of its own are replaced for all threads
            self.module, seen = _export(model, flat, spec, attempts)
        _tell_of_hooks(model)
        self.questions, self.state, self.checkpointed_norms = seen.questions.asked, seen.state, seen.norms.checkpointed
        self.stored = _named_in(model, self.state.stored)
        self.stored_data = _named_in(model, self.state.from_data)
        self.read_first = seen.read_first(model)
        as_called_plainly(self.module)
        self.graph: Graph = self.module.graph
        self.inputs = [node for node in self.graph.nodes if node.op == "placeholder"]
        if len(self.inputs) != len(flat):
            raise PartitionError(
                f"the trace of {type(model).__name__} has {len(self.inputs)} inputs for {len(flat)} in the batch: pass "
                "exactly the arguments that its forward uses, or cut it by hand with layers="
            )
        shapes = [getattr(node.meta.get("val"), "shape", ()) for node in self.inputs]
        self._dynamic = [[dim for dim, size in enumerate(shape) if not isinstance(size, int)] for shape in shapes]
        self.nodes = kept_nodes(self.graph)
        self.output: Node = next(node for node in self.graph.nodes if node.op == "output")
        self.results: Any = self.output.args[0]
        self.out_spec: pytree.TreeSpec = self.module._out_spec  # type: ignore[assignment]
        drawing = [node for node in self.nodes if draws(node)]
        self.numbers: dict[Node, int] = {node: number for number, node in enumerate(drawing)}
        self._guards: Any = getattr(self.module, "_guards_fn", None)

    def fits(self, flat: list[Any], spec: pytree.TreeSpec) -> bool:
        """Whether it holds for this batch."""
        if settings() != self._settings or not self.is_for(flat, spec):
            return False
        # A dynamic size stands for 2 and more: of 0 and 1 a model may make something else.
        if any(leaf.size(dim) < 2 for leaf, dims in zip(flat, self._dynamic, strict=True) for dim in dims):
            return False
        try:
            if self._guards is not None:
                self._guards(*flat)
        except AssertionError:
            return False
        return all(question.same(flat) for question in self.questions)

    def is_for(self, flat: list[Any], spec: pytree.TreeSpec) -> bool:
        """Whether it is for such a batch, but for its sizes and data."""
        return spec == self._spec and self._kinds == [_kind(leaf) for leaf in flat]


def _tell_of_hooks(model: nn.Module) -> None:
    """Forward hooks are traced: what they do to tensors is part of the graph, and nothing else of them comes again."""
    for name, module in model.named_modules():
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        own = [each for each in hooks if str(getattr(each, "__module__", "")).partition(".")[0] not in _LIBRARIES]
        if own:
            warnings.warn(
                f"a forward hook of {name or type(model).__name__} runs when the model is traced, not for each "
                "microbatch: what it does to tensors is kept, what it records or prints is not",
                stacklevel=2,
            )
            return


class Observed(NamedTuple):
    """What a model is seen to do while it is traced."""

    questions: Questions
    state: ForwardState
    own: OwnBackwards
    norms: CheckpointedNorms

    def read_first(self, model: nn.Module) -> set[tuple[str, str]]:
        """The attributes that it has read before it has set them, if at all."""
        return _named_in(model, self.state.read_first)


@contextlib.contextmanager
def observed(model: nn.Module, flat: list[Any], names: Iterable[str]) -> Iterator[Observed]:
    """While it holds, the model does in a trace what it does when it is called, and is watched. `names`: of the
    arguments that it is given by name.
    """
    seen = Observed(Questions(flat), ForwardState(), OwnBackwards(), CheckpointedNorms())
    with (
        levels_left(),
        seen.own.kept(),
        traced(),
        _without_torchs_report(),
        as_called(model),
        spelled_out(model, names),
        in_forward(model, functools.partial(_in_forward, model, seen)),
    ):
        yield seen


def _kind(leaf: Any) -> Any:
    """What must be the same: all of a constant, of a tensor everything but its sizes."""
    return (leaf.dtype, leaf.dim(), leaf.requires_grad) if isinstance(leaf, Tensor) else (type(leaf), leaf)


def _export(
    model: nn.Module, flat: list[Any], spec: pytree.TreeSpec, attempts: Sequence[str]
) -> tuple[GraphModule, Observed]:
    args, kwargs = pytree.tree_unflatten(flat, spec)
    _load_tracer()
    last: Exception | None = None
    before = torch.get_rng_state()
    size = next((leaf.size(0) for leaf in flat if isinstance(leaf, Tensor) and leaf.dim()), 0)
    for attempt in attempts:
        shapes = pytree.tree_map(lambda leaf, attempt=attempt: _dims(leaf, attempt, size), (args, kwargs))
        try:
            # A trace keeps the calls before autocast sees them: it acts when they run. But the model may look at it,
            # and at the types of what it has made, so it is traced under the caller's.
            with observed(model, flat, kwargs) as seen:
                dynamic = None
                if attempt != "none":  # positional arguments under their names, which export asks for
                    dynamic = {**inspect.signature(model.forward).bind_partial(*shapes[0]).arguments, **shapes[1]}
                program = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic, strict=False)
            last = None  # an error holds the frames it went through, and so itself
            module = program.module()
            seen.own.put_back(module, model)
            seen.norms.mark(module)
            return module, seen
        except LostError as error:
            raise LOST_IN_TRACE.refusal(_refusal(model, error, kwargs), "", PartitionError) from error
        except Exception as error:
            last = error
        finally:
            torch.set_rng_state(before)
    assert last is not None
    raise PartitionError(_refusal(model, last, kwargs)) from last


@contextlib.contextmanager
def _in_forward(model: nn.Module, seen: Observed) -> Iterator[None]:
    with seen.state.put_back(model), nothing_lost(), seen.norms, seen.questions:
        yield


def _load_tracer() -> None:
    """What torch loads at its first trace holds on to the frames in which it is loaded, and so to whatever pipeline is
    in them: it is loaded in a thread of its own.
    """
    if "torch._dynamo" not in sys.modules:
        with ThreadPoolExecutor(1) as apart:
            apart.submit(importlib.import_module, "torch._dynamo").result()


@contextlib.contextmanager
def _without_torchs_report() -> Iterator[None]:
    """While it holds, torch neither logs nor prints why a trace fails: another attempt may work, and of the last one we
    tell ourselves. What a model writes to standard error is kept, and so is the log of whoever asked torch for it.
    """
    logger = logging.getLogger("torch")  # its level is that of all below it which have none of their own
    level, said, graph = logger.level, io.StringIO(), None
    if level == logging.WARNING:  # as torch sets it
        logger.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(said):
            yield
    except Exception as error:
        graph = getattr(error, "partial_fx_graph", None)  # which torch has printed
        raise
    finally:
        logger.setLevel(level)
        if sys.stderr is not None:
            sys.stderr.write(said.getvalue() if graph is None else said.getvalue().replace(f"{graph}\n", ""))


def _dims(leaf: Any, attempt: str, size: int) -> Any:
    if not isinstance(leaf, Tensor):
        return None
    if attempt == "all":
        return dict.fromkeys(range(leaf.dim()), Dim.AUTO)
    return {0: Dim.AUTO} if leaf.dim() and leaf.size(0) == size else {}


def _named_in(model: nn.Module, attributes: Iterable[tuple[nn.Module, str]]) -> set[tuple[str, str]]:
    """Attributes of modules, with the names of these in the model."""
    paths = {module: path for path, module in model.named_modules()}
    return {(paths[module], name) for module, name in attributes if module in paths}


def _refusal(model: nn.Module, error: Exception, names: Iterable[str]) -> str:
    """The fact, the user's line and the way out. `names`: of the arguments that the model is given by name."""
    message = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if "fake tensor in the exported program constant" in message:
        message = "it uses .data of a tensor, which no trace can follow: use .detach() in its place"
    if re.match("Could not (guard on|extract specialized integer from) data-dependent expression", message):
        message = "it branches on the value of a tensor, or makes a Python number of it, which no trace can follow"
    if meant := misspelt(model, names):
        message = f"{meant} ({message})"
    wanted = switches(model)
    change = (
        f"Set {' and '.join(wanted)} in its config" if wanted else "Check the shapes of the batch, change that line"
    )
    place = _place_of(error)
    if "labels" in names and "loss" in place.lower():
        change += ", leave out the labels and pass them as the target of loss="
    return (
        f"torch.export can't trace {type(model).__name__}: {message[:300]} ({place}). {change}, or "
        f"{LOST_IN_TRACE.way_out}"
    )


def _place_of(error: BaseException) -> str:
    """The innermost line outside torch, from the error's own words or from its traceback."""
    written = re.findall(r'File "([^"]+)", line (\d+), in (\w+)', str(error))
    frames = [(frame.filename, frame.lineno, frame.name) for frame in traceback.extract_tb(error.__traceback__)]
    for filename, line, name in [*reversed(written), *reversed(frames)]:
        if is_users(filename):
            return f"{filename}, line {line}, in {name}"
    return "no line known"
