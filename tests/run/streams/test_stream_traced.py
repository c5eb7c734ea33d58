"""Streams of models that are traced, and of backwards in two halves, have the weights of the formula too."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gapless
from gapless.errors import ConfigError
from gapless.stage.split.deferred import defer
from tests.pipelines import Own
from tests.run.streams import reference
from tests.run.streams.test_stream import (
    MICROBATCHES,
    RULES,
    SEED,
    Block,
    adam,
    batches,
    by_formula,
    make,
    momentum,
    pipeline,
    same,
    slower,
    weights,
)  # fmt: skip

X = batches(1)[0][0]


class Net(nn.Module):
    """No sequence: the input meets every block again."""

    def __init__(self, dropout: float = 0.0, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(blocks))
        self.gates = nn.ParameterList(torch.full((6,), 0.5) for _ in range(blocks))
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for block, gate in zip(self.blocks, self.gates, strict=True):
            y = block(y) * gate + x
        return y


def net(dropout: float) -> Net:
    torch.manual_seed(1)
    return Net(dropout)


def named(pipe: gapless.Pipeline, stages: list[list[str]]) -> list[Tensor]:
    found = dict(pipe.module().named_parameters())
    return [found[name].detach().clone() for names in stages for name in names]


def traced(kind: str, dropout: float, *, split: bool, evaluations: set[int] = frozenset(), **options: Any) -> None:  # type: ignore[assignment]
    data = batches(9)
    with pipeline(kind, net(dropout), 3, example=X, **options) as pipe:
        with pipe.stream(optimizer=momentum, vertical=RULES[kind][1], scheduler=slower, split=split) as stream:
            stages = [device.versions.names for device in stream._devices]
            known = reference.trained(
                net(dropout), stages, kind, data, optimizer=momentum, scheduler=slower, seed=SEED,
                microbatches=MICROBATCHES[kind],
            )  # fmt: skip
            found = []
            for result in stream.run(data):
                found.append(result.loss)
                if result.minibatch in evaluations:
                    stream.drain()
                    pipe.evaluate(*data[0])
        assert same(found, known.losses)
        assert same(named(pipe, stages), known.at(9))


@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize(("kind", "split"), [("stashing", True), ("vertical", False), ("2bw", True)])
def test_a_traced_model_has_the_weights_of_the_formula(kind: str, split: bool) -> None:
    traced(kind, 0.2, split=split)


@pytest.mark.usefixtures("traced_once")
def test_an_evaluation_that_traces_once_more_changes_nothing() -> None:
    traced("stashing", 0.2, split=True, evaluations={1, 4}, remat="stage")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stashing", "vertical", "2bw"])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("remat", ["none", "stage", "layer"])
def test_traced_models_in_every_way(kind: str, split: bool, remat: Any) -> None:
    traced(kind, 0.2, split=split, evaluations={0, 3, 4, 7}, remat=remat)


class Unseen(torch.autograd.Function):
    """A use of a weight that no function mode sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w.sum(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grads[0] * w.sum(0), (grads[0] * x).sum(0).expand_as(w).clone()


class Thrice(nn.Linear):
    """Before and after the use that could wait there is another: the order of their sum matters."""

    def __init__(self, again: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(6, 6)
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.again(x, self.weight) + super().forward(x) + self.again(x.sin(), self.weight))


@pytest.mark.parametrize("again", [lambda x, w: x * w.mean(), Unseen.apply], ids=["seen", "unseen"])
def test_what_one_version_shows_of_a_weight_that_can_not_wait_holds_for_all(again: Any) -> None:
    model = make("linear")
    for place in (0, 3, 6):
        model[place] = Thrice(again)
    plain, data = copy.deepcopy(model), batches(8)
    found: list[Tensor] = []
    state: dict[str, Any] = {}
    for part in (data[:4], data[4:]):
        with pipeline("stashing", model, 4) as pipe:
            stream = pipe.stream(optimizer=momentum, split=True)
            if state:  # all versions are there when the first is looked at
                stream.load_state_dict(state)
            found += [result.loss for result in stream.run(part)]
            state = stream.state_dict()
    known = by_formula(pipe, "stashing", plain, data)
    assert same(found, known.losses)
    assert same(pipe.parameters(), known.at(8))


class Told(torch.autograd.Function):
    """Says when its weight gradient is computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, said: list[str]) -> Tensor:
        ctx.save_for_backward(x, w.detach())
        ctx.weight, ctx.said = w, said
        return x * w

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, w = ctx.saved_tensors
        grad, said = grads[0], ctx.said
        weight = defer(ctx.weight, lambda: (said.append("W"), (grad * x).sum(0))[1])
        said.append("I")
        return grad * w, weight, None


@pytest.mark.parametrize(("split", "order"), [(False, ["W", "I"]), (True, ["I", "W"])])
def test_with_split_the_input_gradient_comes_before_that_of_the_weights(split: bool, order: list[str]) -> None:
    model = make("linear")
    tell: Any = Told.apply
    parts = {"weight": nn.Parameter(torch.ones(6)), "said": ["start"]}
    model[1] = Own(lambda layer, x: tell(x, layer.weight, layer.said), **parts)
    with pipeline("stashing", model) as pipe, pipe.stream(optimizer=momentum, split=split) as stream:
        list(stream.run(batches(3)))
    assert model[1].said == ["start", *order * 3]


@pytest.mark.usefixtures("traced_once")
def test_a_batch_of_a_new_kind_is_traced_when_the_stream_is_drained() -> None:
    data = [
        (x.view(2, 4, 6), y.view(2, 4, 6)) if number in (3, 4, 7) else (x, y)
        for number, (x, y) in enumerate(batches(9))
    ]
    traced = pipeline("stashing", net(0.2), 3, example=X)
    with traced as pipe, pipe.stream(optimizer=momentum, split=True) as stream:
        stages = [device.versions.names for device in stream._devices]
        known = reference.trained(net(0.2), stages, "stashing", data, optimizer=momentum, seed=SEED)
        assert same([result.loss for result in stream.run(data)], known.losses)
        stream.drain()
        assert same(named(pipe, stages), known.at(9))


@pytest.mark.usefixtures("traced_once")
def test_a_stream_of_a_traced_model_is_saved_and_restored() -> None:
    with pipeline("stashing", net(0.2), 3, example=X) as pipe:
        stream = pipe.stream(optimizer=adam)
        list(stream.run(batches(5)))
        state, whole = copy.deepcopy([stream.state_dict(), pipe.state_dict()])
        list(stream.run(batches(4)))
        stream.drain()
        expected = weights(pipe)
    with pipeline("stashing", Net(0.2), 3, example=X) as pipe, pipe.stream(optimizer=adam) as stream:
        pipe.load_state_dict(whole)
        stream.load_state_dict(state)
        list(stream.run(batches(4)))
        stream.drain()
        assert same(pipe.parameters(), expected)


def test_what_a_traced_model_can_not_do_is_refused() -> None:
    untraced = pipeline("stashing", net(0.0), 3)
    with untraced as pipe, pytest.raises(ConfigError, match="make the pipeline with example=inputs"):
        pipe.stream(optimizer=momentum)
    tied = net(0.0)
    tied.blocks[1].linear.weight = tied.blocks[0].linear.weight  # type: ignore[union-attr]
    traced = pipeline("stashing", tied, 3, example=X)
    with traced as pipe, pytest.raises(ConfigError, match=r"blocks\.0\.linear\.weight is used by"):
        pipe.stream(optimizer=momentum)


@pytest.mark.parametrize("kind", ["traced", "layers"])
def test_a_model_that_was_edited_needs_a_new_stream(kind: str) -> None:
    model: Any = net(0.2) if kind == "traced" else make("dropout")
    with pipeline("stashing", model, 3, example=X) as pipe:
        stream = pipe.stream(optimizer=momentum)
        list(stream.run(batches(4)))
        state = stream.state_dict()
        (model.blocks if kind == "traced" else model)[1].dropout.p = 0.5
        with pytest.raises(ConfigError, match="the model was edited since the stream was made: make a new stream"):
            list(stream.run(batches(2)))
        again = pipe.stream(optimizer=momentum)
        again.load_state_dict(state)
        assert [result.minibatch for result in again.run(batches(2))] == [4, 5]
        again.drain()
