"""A stream has the weights of asynchronous training as its formulas say, after every update, to the bit."""

import copy
import gc
import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gapless
from gapless.errors import ConfigError, GaplessError, TransportError
from tests.pipelines import Do
from tests.run.streams import reference

SEED = 5
Optimize = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def momentum(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01)


def adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


class Assigning(torch.optim.SGD):
    """Writes new data instead of changing them."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.data = each.data - group["lr"] * each.grad


def assigning(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return Assigning(params, lr=0.1)


def slower(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.linear, self.dropout = nn.LayerNorm(6), nn.Linear(6, 6), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Any:
        return x + self.dropout(torch.tanh(self.linear(self.norm(x))))


class Sometimes(nn.Module):
    """Uses its weights for some minibatches only."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale if x[0, 0] > 0 else x


def make(kind: str, layers: int = 8) -> nn.Sequential:
    torch.manual_seed(1)
    if kind in ("linear", "sometimes", "frozen"):
        made = nn.Sequential(*(nn.Linear(6, 6) for _ in range(layers)))
        made[1] = Sometimes() if kind == "sometimes" else made[1]
        made[layers // 2 :].requires_grad_(kind != "frozen")
        return made
    return nn.Sequential(*(Block(0.2 if kind == "dropout" else 0.0) for _ in range(layers)))


def batches(count: int, size: int = 8) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [tuple(torch.randn(2, size, 6, generator=generator).unbind()) for _ in range(count)]  # type: ignore[misc]


RULES = {"stashing": ("pipedream", False), "vertical": ("pipedream", True), "2bw": ("2bw", False)}
MICROBATCHES = {"stashing": 1, "vertical": 1, "2bw": 4}


def pipeline(
    kind: str = "stashing", model: nn.Module | None = None, devices: Any = 2, **options: Any
) -> gapless.Pipeline:
    asked: dict[str, Any] = {"microbatches": MICROBATCHES[kind], "loss": F.mse_loss, "seed": SEED, **options}
    return gapless.Pipeline(
        make("linear") if model is None else model, devices=devices, schedule=RULES[kind][0], **asked
    )


def weights(pipe: gapless.Pipeline) -> list[Tensor]:
    return [each.detach().clone() for each in pipe.parameters()]


def same(found: Iterable[Tensor], expected: Iterable[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def by_formula(
    pipe: gapless.Pipeline, kind: str, model: nn.Module, data: Sequence[Any], **how: Any
) -> reference.Trained:
    return reference.trained(
        model, pipe.partition, kind, data, microbatches=pipe.microbatches, seed=SEED, **{"optimizer": momentum, **how}
    )


def assert_follows(
    pipe: gapless.Pipeline,
    kind: str,
    plain: nn.Module,
    data: Sequence[Any],
    *,
    stages: slice = slice(None),
    replica: int = 0,
    replicas: int = 1,
    drains: Iterable[int] = (),
    split: bool = False,
    **how: Any,
) -> reference.Trained:
    """A stream has the losses and weights of the formula, in these stages of the pipeline: at its end, and wherever it
    is drained after a result. With replicas it has every so many of the minibatches.
    """
    known = by_formula(pipe, kind, plain, data, replicas=replicas, **how)
    own, found = data[replica::replicas], list[Tensor]()

    def assert_at(update: int) -> None:
        expected = [each for stage in known.history[stages] for each in stage[update]]
        assert same(pipe.parameters(), expected), (kind, update)

    with pipe.stream(
        optimizer=how["optimizer"],
        scheduler=how.get("scheduler"),
        vertical=RULES[kind][1],
        clip=how.get("clip"),
        correction="spectrain" if how.get("ahead") else None,
        lr_by_delay=how.get("annealed_over"),
        split=split,
    ) as stream:
        for part in (own[: len(own) // 2], own[len(own) // 2 :]):  # the flow stays as it is in between
            for result in stream.run(part):
                assert result.minibatch == len(found) * replicas + replica
                if len(found) in drains:
                    stream.drain()
                    assert_at(stream.minibatches)
                found.append(result.loss)
    assert stream.minibatches == -(-len(data) // replicas)
    assert same(found, known.losses[replica::replicas]), kind
    assert_at(stream.minibatches)
    return known


def check(
    kind: str,
    model: nn.Sequential,
    devices: int,
    count: int,
    optimizer: Optimize = momentum,
    *,
    remat: Any = "none",
    microbatches: int | None = None,
    **how: Any,
) -> None:
    plain = copy.deepcopy(model)
    with pipeline(kind, model, devices, remat=remat, microbatches=microbatches or MICROBATCHES[kind]) as pipe:
        assert_follows(pipe, kind, plain, batches(count), optimizer=optimizer, **how)


@pytest.mark.parametrize("seed", [*range(24), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(24, 200))])
def test_a_stream_has_the_weights_of_its_formula(seed: int) -> None:
    """Every kind on every number of devices, each with other settings, which meet at random."""
    drawn = random.Random(seed)
    kind, devices, count = list(RULES)[seed % 3], 1 + seed % 4, drawn.choice([1, 2, 3, 6, 8, 10])
    model = make(drawn.choice(["linear", "blocks", "dropout"]))
    how: dict[str, Any] = {"ahead": drawn.random() < 0.4}
    if frozen := not how["ahead"] and drawn.random() < 0.3:
        model[0].requires_grad_(False)
    if drawn.random() < 0.5:
        how["drains"] = drawn.sample(range(count), min(count, 3))
    optimizer = drawn.choice([momentum, adam] if how["ahead"] or frozen else [momentum, adam, assigning])
    how |= {"scheduler": drawn.choice([None, slower]), "clip": drawn.choice([None, 0.1])}
    how |= {"annealed_over": drawn.choice([None, 5]), "split": drawn.random() < 0.3}
    how |= {"remat": drawn.choice(["none", "stage", "layer"])}
    microbatches = drawn.choice([max(2, devices), 4]) if kind == "2bw" else 1
    check(kind, model, devices, count, optimizer, microbatches=microbatches, **how)


def checkpointed(layer: nn.Module, use_reentrant: bool) -> nn.Module:
    """Runs its layer again in the backward, by itself."""
    return Do(lambda layer, x: checkpoint(layer, x, use_reentrant=use_reentrant), layer)


@pytest.mark.in_pairs
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("remat", ["none", "stage"])
@pytest.mark.parametrize("kind", ["stashing", "2bw"])
def test_a_checkpoint_in_a_layer_finds_the_version_of_its_forward(kind: str, remat: Any, use_reentrant: bool) -> None:
    """It computed with the weights that were newest when its backward came."""
    layers = enumerate(make("blocks"))
    blocks = [layer if number % 2 else checkpointed(layer, use_reentrant) for number, layer in layers]
    check(kind, nn.Sequential(nn.Linear(6, 6), *blocks), 3, 7, remat=remat)


@pytest.mark.parametrize("kind", ["stashing", "2bw"])
def test_a_weight_that_a_forward_changes_is_refused(kind: str) -> None:
    """Each version of it changed on its own, and some changes were lost."""
    model = nn.Sequential(nn.Embedding(10, 6, max_norm=1.0), *make("linear", 3))
    data = [(torch.randint(10, (8,)), torch.randn(8, 6)) for _ in range(6)]
    told = r"a forward has changed the weight 0\.weight, as nn\.Embedding does with max_norm"
    with (
        pipeline(kind, model) as pipe,
        pytest.raises(ConfigError, match=told),
        pipe.stream(optimizer=momentum) as stream,
    ):
        list(stream.run(data))


def test_the_loss_of_a_minibatch_is_added_in_the_order_of_its_microbatches() -> None:
    """Torch's sum of many numbers adds them in an order of its own."""
    model, data = make("linear", 2), batches(8, size=32)
    with (
        pipeline("2bw", model, microbatches=32) as pipe,
        pipe.stream(optimizer=lambda params: torch.optim.SGD(params, lr=0.0)) as stream,
    ):
        found = [result.loss for result in stream.run(data)]
    expected = [
        reduce(torch.add, [F.mse_loss(model(x), y).detach() / 32 for x, y in zip(a.split(1), b.split(1), strict=True)])
        for a, b in data
    ]
    assert same(found, expected)


def test_the_nesterov_form_brings_its_own_optimizer() -> None:
    with pipeline() as pipe:
        before = weights(pipe)
        with pipe.stream(correction="nesterov", lr=0.01) as stream:
            assert len(list(stream.run(batches(5)))) == 5
        assert not any(map(torch.equal, before, weights(pipe)))


class Fails(nn.Linear):
    """At a certain forward or backward."""

    def __init__(self, forward_at: int = -1, backward_at: int = -1) -> None:
        super().__init__(6, 6)
        self.forward_at, self.backward_at, self.calls = forward_at, backward_at, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.forward_at + 1:
            raise ValueError("as told")
        y = super().forward(x)
        if self.calls == self.backward_at + 1:
            y.register_hook(partial(_raise, ValueError("as told")))
        return y


def _raise(error: Exception, _: Tensor) -> None:
    raise error


def failing(where: int, **at: int) -> tuple[nn.Sequential, nn.Sequential]:
    """A model whose layer `where` fails, and the same without."""
    model = make("linear")
    model[where] = Fails(**at)
    plain = copy.deepcopy(model)
    plain[where] = nn.Linear(6, 6)
    plain.load_state_dict(model.state_dict())
    return model, plain


@pytest.mark.parametrize("where", [0, 3, 7])
def test_a_forward_that_fails_leaves_the_model_at_its_minibatch(where: int) -> None:
    model, plain = failing(where, forward_at=5)
    data = batches(9)
    with pipeline("stashing", model, 4) as pipe:
        known = by_formula(pipe, "stashing", plain, data)
        stream = pipe.stream(optimizer=momentum)
        with pytest.raises(ValueError, match="as told") as failed:
            list(stream.run(data))
        assert "the model is at minibatch 5" in failed.value.__notes__[-1]
        assert stream.minibatches == 5
        assert same(pipe.parameters(), known.at(5))
        with stream:  # it goes on as if nothing had happened
            assert len(list(stream.run(data[5:]))) == 4
        assert same(pipe.parameters(), known.at(9))


class Counts(nn.Linear):
    """Its forwards, in a buffer that it replaces."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("never", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count = self.count + 1
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize("kind", ["stashing", "2bw"])
@pytest.mark.parametrize("fault", ["forward", "gradient"])
def test_buffers_are_not_ahead_of_the_weights_after_a_failure(kind: str, fault: str) -> None:
    """A run that failed and went on leaves the buffers of one that never did."""

    def model() -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), Counts(), nn.BatchNorm1d(6), nn.Linear(6, 6))

    data, plain, other = batches(6), model(), model()
    bad = torch.full((8, 6), torch.inf) if fault == "gradient" else torch.zeros(8, 5)
    with pipeline(kind, plain) as pipe, pipe.stream(optimizer=momentum) as stream:
        list(stream.run(data))
    with pipeline(kind, other) as pipe:
        stream = pipe.stream(optimizer=momentum)
        # Targets of another shape fail in the last stage, when the first has gone on.
        with pytest.raises((GaplessError, RuntimeError)):
            list(stream.run([*data[:3], (data[3][0], bad), *data[4:]]))
        assert stream.minibatches == 3
        with stream:
            list(stream.run(data[3:]))
    for name, value in plain.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def test_a_backward_that_fails_breaks_the_stream_and_says_where_each_stage_is() -> None:
    with pipeline("stashing", failing(3, backward_at=4)[0], 4) as pipe:
        stream = pipe.stream(optimizer=momentum)
        with pytest.raises(ValueError, match="as told") as failed:
            list(stream.run(batches(9)))
        assert "stage 1 at 4" in failed.value.__notes__[-1]
        with pytest.raises(GaplessError, match="in the middle of an update"):
            list(stream.run(batches(1)))


def test_a_gradient_that_is_not_finite_is_never_applied() -> None:
    data = batches(6)
    data[3][0][0, 0] = float("inf")
    model = make("linear")
    with pipeline("stashing", model) as pipe:
        stream = pipe.stream(optimizer=momentum)
        with pytest.raises(GaplessError, match=r"of minibatch 3 at stage [01] is not finite"):
            list(stream.run(data))
        assert stream.minibatches == 3
        with stream:  # it goes on with others
            assert len(list(stream.run(batches(2)))) == 2
    assert all(torch.isfinite(each).all() for each in model.parameters())


class Stumbles(torch.optim.SGD):
    """At a certain step, when it has changed the weights."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.steps += 1
        if self.steps == 4:
            raise ValueError("as told")


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=3)


@pytest.mark.parametrize("by", ["optimizer", "scheduler"])
def test_an_update_that_fails_alike_on_all_stages_is_half_made_and_not_whole(by: str) -> None:
    with pipeline() as pipe:
        stream = pipe.stream(
            optimizer=(lambda params: Stumbles(params, lr=0.1)) if by == "optimizer" else momentum,
            scheduler=None if by == "optimizer" else one_cycle,
        )
        with pytest.raises(ValueError, match=r"as told|Tried to step 4 times") as failed:
            list(stream.run(batches(9)))
        assert "an update is half made: stage 0 at 3 and a part of the next, stage 1 at 3" in failed.value.__notes__[-1]
        for use in (stream.state_dict, pipe.state_dict, lambda: list(stream.run(batches(1)))):
            with pytest.raises(GaplessError, match="resume from a state that was saved before"):
                use()


@pytest.mark.parametrize("ignored", [slice(0, 2), slice(0, 8)])
def test_a_microbatch_of_ignored_targets_does_not_count_in_the_loss(ignored: slice) -> None:
    x, y = torch.randn(8, 6), torch.randint(6, (8,))
    y[ignored] = -100
    with pipeline("2bw", loss=F.cross_entropy) as pipe, pipe.stream(optimizer=momentum) as stream:
        (result,) = stream.run([(x, y)])
    with torch.no_grad():
        expected = F.cross_entropy(make("linear")(x), y)
    torch.testing.assert_close(result.loss, expected.nan_to_num(0.0))


def test_evaluation_after_a_drain_uses_the_newest_weights_and_changes_nothing() -> None:
    data, model = batches(10), make("blocks")
    plain = copy.deepcopy(model)
    with pipeline("stashing", model, 3) as pipe:
        known = by_formula(pipe, "stashing", plain, data)
        with pipe.stream(optimizer=momentum) as stream:
            list(stream.run(data[:6]))
            stream.drain()
            found = pipe.evaluate(*data[0]).outputs
            list(stream.run(data[6:]))
        for each, value in zip(plain.parameters(), known.at(6), strict=True):
            each.data = value
        assert torch.equal(found, plain.eval()(data[0][0]))
        assert same(pipe.parameters(), known.at(10))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)}, "pass a function that makes one"),
    ({"optimizer": torch.optim.LBFGS}, "LBFGS"),
    ({"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau}, "ReduceLROnPlateau needs a metric"),
    ({"scheduler": 3}, "every stage has a scheduler of its own: pass a function"),
    ({"clip": 0}, "clip is 0, but it must be a norm above 0"),
    ({"clip": "1"}, "clip is '1', but it must be a norm above 0"),
    ({"vertical": "no"}, "vertical is 'no', but it must be True or False"),
    ({"split": None}, "split is None, but it must be True or False"),
    ({"in_flight": 2.5}, "in_flight is 2.5, but it must be a whole number"),
    ({"in_flight": 0}, "in_flight is 0, but it must be a whole number"),
    ({"in_flight": True}, "in_flight is True, but it must be a whole number"),
    ({"lr": 0.1}, "give the learning rate to your optimizer"),
    ({"correction": "nesterov"}, "leave optimizer= out"),
    ({"correction": "other"}, "correction is 'other', but it must be"),
    ({"optimizer": None, "correction": "nesterov", "lr": "1"}, "lr is '1', but it must be a number"),
]


def test_what_a_stream_can_not_do_is_refused_with_the_way_out() -> None:
    with pipeline() as pipe:
        for asked, told in REFUSED:
            with pytest.raises(ConfigError, match=told):
                pipe.stream(**{"optimizer": momentum, **asked})
        with pytest.raises(ConfigError, match="make it from the parameters that it is given"):
            pipe.stream(optimizer=lambda _: momentum(list(pipe.parameters())))
        with pytest.raises(ConfigError, match="has no steps"):
            pipe.step(*batches(1)[0])
        assert "no bubble in a long stream" in str(pipe)
    with pytest.raises(GaplessError, match="pipedream takes minibatches whole"):
        pipeline(microbatches=4)
    tied, marked, carrying, before = (make("linear") for _ in range(4))
    tied[7].weight = tied[0].weight
    marked[2].weight = Marked(torch.zeros(6, 6))
    carrying[2].weight.scale = 2.0  # type: ignore[union-attr]
    before[2].weight.grad = torch.zeros(6, 6)
    for model, options, told in (
        (tied, {}, r"0\.weight is used by several stages"),
        (marked, {}, "or has attributes of its own"),
        (carrying, {}, "or has attributes of its own"),
        (before, {}, "drop it with zero_grad"),
        (make("linear"), {"batchnorm": "deferred"}, "use 'microbatch'"),
    ):
        with pipeline("stashing", model, **options) as pipe, pytest.raises(ConfigError, match=told):
            pipe.stream(optimizer=momentum)
    synchronous = gapless.Pipeline(make("linear"), devices=2, schedule="1f1b", loss=F.mse_loss)
    with synchronous as pipe, pytest.raises(ConfigError, match="the schedule is synchronous"):
        pipe.stream(optimizer=momentum)


def test_a_minibatch_that_is_too_small_is_refused() -> None:
    with pipeline("2bw") as pipe, pipe.stream(optimizer=momentum) as stream:
        with pytest.raises(ConfigError, match="drop the last minibatch of the loader"):
            list(stream.run(batches(1, size=3)))
        assert len(list(stream.run(batches(2)))) == 2


def test_a_batch_that_is_no_pair_is_refused_by_its_number() -> None:
    (x, y), *_ = batches(1)
    with pipeline() as pipe, pipe.stream(optimizer=momentum) as stream:
        with pytest.raises(ConfigError, match="minibatch 2 is a tuple of 3, but it must be inputs and a target"):
            list(stream.run([(x, y), (x, y), (x, x, y)]))
        assert stream.minibatches == 2


def test_a_loader_that_raises_leaves_a_stream_that_is_drained() -> None:
    def loader() -> Any:
        yield from batches(3)
        raise OSError("no more disk")

    with pipeline() as pipe, pipe.stream(optimizer=momentum) as stream:
        with pytest.raises(OSError, match="no more disk") as failed:
            list(stream.run(loader()))
        assert failed.value.__notes__ == ["gapless: the model is at minibatch 3, and so are all stages"]
        assert len(pipe.state_dict()) == 16


@pytest.mark.parametrize("leave", ["break", "raise", "interrupt"])
@pytest.mark.parametrize("drain", [False, True])
def test_a_run_has_the_results_of_its_own_loader(leave: str, drain: bool) -> None:
    def loader() -> Any:
        yield from batches(4)
        raise KeyboardInterrupt if leave == "interrupt" else OSError("as told")

    with pipeline() as pipe, pipe.stream(optimizer=momentum) as stream:
        if leave == "break":
            for _ in stream.run(batches(9)):
                break
        else:
            with pytest.raises((OSError, KeyboardInterrupt)):
                list(stream.run(loader()))
        if drain:
            stream.drain()
        before = stream.fed
        assert [result.minibatch for result in stream.run(batches(5))] == list(range(before, before + 5))


def test_leaving_a_loop_early_drains_what_was_fed() -> None:
    with pipeline() as pipe:
        with pipe.stream(optimizer=momentum) as stream:
            for result in stream.run(batches(20)):
                if result.minibatch == 4:
                    with pytest.raises(ConfigError, match="a stream is under way"):
                        pipe.state_dict()
                    break
        assert 5 <= stream.minibatches <= 8
        assert pipe.evaluate(*batches(1)[0]).loss is not None


@pytest.mark.parametrize("kind", ["stashing", "vertical", "2bw"])
def test_autocast_may_keep_no_casts_of_weights_that_are_updated(kind: str) -> None:
    """It trained on with the first weights for ever."""
    data, model = batches(8), make("blocks")
    low = partial(torch.autocast, "cpu", dtype=torch.bfloat16, cache_enabled=False)
    with pipeline(kind, model) as pipe:
        with low():
            known = by_formula(pipe, kind, model, data)
        with pipe.stream(optimizer=momentum, vertical=RULES[kind][1]) as stream:
            with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ConfigError, match="cache_enabled=False"):
                list(stream.run(data))
            with low():
                found = [result.loss for result in stream.run(data)]
        assert same(found, known.losses)
        assert same(pipe.parameters(), known.at(8))


@pytest.mark.parametrize("kind", ["stashing", "2bw"])
def test_minibatches_run_under_the_settings_of_their_own_run(kind: str) -> None:
    """What is under way is finished under those that it was begun with."""
    data, model = batches(9), make("blocks")
    low = partial(torch.autocast, "cpu", dtype=torch.bfloat16, cache_enabled=False)
    with pipeline(kind, model) as pipe:
        known = by_formula(pipe, kind, model, data, around=lambda minibatch: low(enabled=3 <= minibatch < 6))
        with pipe.stream(optimizer=momentum) as stream:
            found = [result.loss for result in stream.run(data[:3])]
            assert stream.is_running
            with low():
                found += [result.loss for result in stream.run(data[3:6])]
            found += [result.loss for result in stream.run(data[6:])]
        assert same(found, known.losses)
        assert same(pipe.parameters(), known.at(9))


@pytest.mark.parametrize("taken", [1, 6])
def test_closing_a_pipeline_ends_a_stream_that_was_not_drained(taken: int) -> None:
    """It waited for ever."""
    with pipeline() as pipe:
        results = pipe.stream(optimizer=momentum).run(batches(6))
        for _ in range(taken):
            next(results)


def test_weights_of_other_stages_may_not_be_used() -> None:
    """They are at another minibatch, and which one was a matter of time."""
    model = make("linear")

    def penalised(outputs: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(outputs, target) + sum(each.square().sum() for each in model.parameters())

    with pipeline("stashing", model, loss=penalised) as pipe:
        stream = pipe.stream(optimizer=momentum)
        with pytest.raises(ConfigError, match="uses weights of another stage"):
            list(stream.run(batches(3)))
        assert stream.minibatches == 0


def test_without_gradients_nothing_is_streamed() -> None:
    with pipeline() as pipe, pipe.stream(optimizer=momentum) as stream:
        for off in (torch.no_grad, torch.inference_mode):
            with off(), pytest.raises(ConfigError, match="run it outside no_grad"):
                list(stream.run(batches(1)))


@pytest.mark.parametrize("change", ["in place", "data", "loaded", "frozen", "another stream"])
def test_weights_that_changed_between_two_runs_are_refused(change: str) -> None:
    model, data = make("linear"), batches(4)
    with pipeline("stashing", model) as pipe:
        first, second = pipe.stream(optimizer=momentum), pipe.stream(optimizer=momentum)
        with first:
            list(first.run(data))
        weight = model[5].weight
        assert isinstance(weight, nn.Parameter)
        if change == "in place":
            with torch.no_grad():
                weight.mul_(2)
        elif change == "data":
            weight.data = torch.zeros(6, 6)
        elif change == "loaded":
            pipe.load_state_dict(make("linear", 8).state_dict())
        elif change == "frozen":
            weight.requires_grad_(False)
        else:
            with pytest.raises(ConfigError, match="make a new stream"):
                list(second.run(data))
            return
        with pytest.raises(ConfigError, match="make a new stream"):
            list(first.run(data))


def test_2bw_evaluates() -> None:
    model, (x, y) = make("blocks"), batches(1)[0]
    with pipeline("2bw", model) as pipe:
        found = pipe.evaluate(x, y).outputs
    assert torch.equal(found, torch.cat([model.eval()(part) for part in x.tensor_split(4)]))


class Marked(nn.Parameter):
    pass


class Loose(nn.Linear):
    def __init__(self, kept: Any) -> None:
        super().__init__(6, 6)
        self.kept = kept


@pytest.mark.parametrize("learns", [torch.ones(6, requires_grad=True), nn.Parameter(torch.ones(6))])
def test_tensors_that_learn_but_are_no_parameters_are_refused(learns: Tensor) -> None:
    for kept in ([learns], {"a": learns}) if isinstance(learns, nn.Parameter) else ([learns], (learns,), learns):
        model = make("linear")
        model[5] = Loose(kept)
        with (
            pipeline("stashing", model) as pipe,
            pytest.raises(ConfigError, match=r"Loose\.kept at stage 1 has trainable tensors"),
        ):
            pipe.stream(optimizer=momentum)
    model, layer = make("linear"), Loose([torch.ones(6)])
    layer.kept.append(layer.weight)
    model[5] = layer
    with pipeline("stashing", model) as pipe, pipe.stream(optimizer=momentum) as stream:
        assert len(list(stream.run(batches(2)))) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
@pytest.mark.parametrize("kind", ["stashing", "vertical", "2bw"])
@pytest.mark.parametrize("ahead", [False, True])
def test_streams_of_one_gpu_have_the_weights_of_the_formula(kind: str, ahead: bool) -> None:
    torch.use_deterministic_algorithms(True)
    data = [(x.cuda(), y.cuda()) for x, y in batches(12)]
    with pipeline(kind, make("dropout"), devices=["cuda:0"] * 3) as pipe:
        assert_follows(pipe, kind, make("dropout").cuda(), data, optimizer=momentum, ahead=ahead)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
def test_a_stream_takes_no_graphs_where_they_are_tried() -> None:
    """A graph knows the memory of one version."""
    torch.use_deterministic_algorithms(True)
    data = [(x.cuda(), y.cuda()) for x, y in batches(40)]
    with pipeline("stashing", make("blocks"), devices=["cuda:0"] * 3, graphs="auto") as pipe:
        assert_follows(pipe, "stashing", make("blocks").cuda(), data, optimizer=momentum)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_weights_that_were_changed_behind_the_back_of_autograd_are_noticed(dtype: torch.dtype) -> None:
    """Changes through .data are counted by nobody, and the older versions would be those of another model."""
    data = [(x.to(dtype), y.to(dtype)) for x, y in batches(4)]
    for place in (0, -1):
        model = nn.Sequential(*(nn.Linear(6, 6, dtype=dtype) for _ in range(4)))
        with pipeline("stashing", model) as pipe:
            stream = pipe.stream(optimizer=momentum)
            list(stream.run(data))
            stream.drain()
            model.get_parameter("0.bias").data[place] *= 1  # which changes nothing
            list(stream.run(data))
            stream.drain()
            model.get_parameter("0.bias").data[place] += 0.5
            with pytest.raises(ConfigError, match="weights were changed"):
                list(stream.run(data))


def test_a_stream_keeps_its_pipeline() -> None:
    """One that nobody else held was closed, and the stream failed with words of its own insides."""
    stream = pipeline().stream(optimizer=momentum)
    gc.collect()
    with stream:
        assert len(list(stream.run(batches(5)))) == 5


def test_a_run_or_a_stream_that_begins_under_another_is_told() -> None:
    """Two runs in turn got each other's results; two streams were told of an edit of the model."""
    data = batches(6)
    with pipeline() as pipe:
        one, other = pipe.stream(optimizer=momentum), pipe.stream(optimizer=momentum)
        first = one.run(data)
        next(first)
        with pytest.raises(ConfigError, match=r"another stream of this pipeline is under way: drain\(\) it first"):
            next(other.run(data))
        second = one.run(data)
        next(second)
        with pytest.raises(ConfigError, match="another run of this stream has begun"):
            next(first)
        assert len(list(second)) == 5


def test_a_pipeline_that_is_closed_under_its_stream_says_so() -> None:
    with pipeline() as pipe:
        results = pipe.stream(optimizer=momentum).run(batches(9))
        next(results)
    with pytest.raises(
        TransportError, match=r"closed while its stream was under way, and the model is at minibatch \d"
    ):
        list(results)
