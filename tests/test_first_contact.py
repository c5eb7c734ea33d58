"""What people try first: it works, or one sentence tells the way out."""

from __future__ import annotations

import copy
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapless
from gapless.errors import CheckpointError, ConfigError, PartitionError
from tests.by_hand import loop
from tests.model.training import assert_exact
from tests.pipelines import assert_same_gradients

WIDTH = 6


class Pair(nn.Module):
    """Two layers, and an argument that it has no use for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, more: Any = None) -> Any:
        return self.last(torch.tanh(self.first(x)))


class Holder:
    def __init__(self) -> None:
        self.points = torch.randn(4)


def rows() -> Tensor:
    return torch.randn(4, WIDTH)


def sequence() -> nn.Sequential:
    return nn.Sequential(Pair(), nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("model", [Pair, sequence])
@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({torch.ones(4)}, "a set of tensors has no fixed order: pass a list or a dict"),
        (Holder(), r"Holder holds tensors \(points\) that a pipeline can't see: register it with .* or pass a dict"),
        (
            np.ones((4, 2)),
            r"a numpy array of shape \(4, 2\), which would go whole to every microbatch: pass torch.from_n",
        ),
    ],
)
def test_tensors_that_can_not_be_seen_in_a_batch_are_refused(model: Any, more: Any, message: str) -> None:
    with (
        gapless.Pipeline(model(), devices=2, microbatches=2, loss=F.mse_loss) as pipe,
        pytest.raises(ConfigError, match=message),
    ):
        pipe.step({"x": rows(), "more": more}, rows())


def test_a_set_of_words_goes_to_every_microbatch_and_can_not_be_traced() -> None:
    with gapless.Pipeline(sequence(), devices=2, microbatches=2, loss=F.mse_loss) as pipe:
        pipe.step({"x": rows(), "more": {"a", "b"}}, rows())
    with (
        gapless.Pipeline(Pair(), devices=2, microbatches=2, loss=F.mse_loss) as pipe,
        pytest.raises(ConfigError, match="the batch has a set, which can't be traced: pass tensors, numbers"),
    ):
        pipe.step({"x": rows(), "more": {"a", "b"}}, rows())


def test_a_target_with_too_few_rows_is_an_error_before_the_loss_could_broadcast_it() -> None:
    with (
        gapless.Pipeline(sequence(), devices=2, microbatches=2, loss=F.cross_entropy) as pipe,
        pytest.raises(gapless.errors.ConfigError, match="the target has 3 rows for 4 samples") as error,
    ):
        pipe.step(rows(), torch.zeros(3, dtype=torch.long))
    assert "target_dims=" in str(error.value)


class WithLoss(Pair):
    def forward(self, x: Tensor, more: Any = None) -> Any:
        made = super().forward(x)
        return {"loss": F.mse_loss(made, x), "made": made, "largest": made.max()}


def test_outputs_have_the_loss_of_the_minibatch_and_not_of_a_microbatch() -> None:
    """It was the first microbatch's, without a word."""
    model, x = WithLoss(), torch.randn(5, WIDTH)
    with gapless.Pipeline(model, devices=2, microbatches=2) as pipe:
        result = pipe.evaluate({"x": x})
        trained = pipe.step({"x": x}, outputs=True)
    assert result.loss is not None
    assert trained.loss is not None
    assert result.outputs["loss"].equal(result.loss)
    assert trained.outputs["loss"].equal(trained.loss)
    assert result.loss.item() == pytest.approx(model(x)["loss"].item())
    assert len(result.outputs["largest"]) == 2
    plain = gapless.plain_step(model, {"x": x}, microbatches=2)
    assert trained.loss.equal(plain.loss)
    assert trained.outputs["loss"].equal(plain.outputs["loss"])
    assert repr(result) == f"Result(loss={result.loss.item():.6g}, microbatches=2, counted=5, outputs=...)"


class Lazy(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.LazyLinear(WIDTH)


@pytest.mark.parametrize(("model", "name"), [(Lazy, "last"), (lambda: nn.Sequential(nn.ReLU(), nn.LazyLinear(2)), "1")])
def test_lazy_layers_are_to_be_called_once_before(model: Any, name: str) -> None:
    made = model()
    with pytest.raises(
        ConfigError, match=f"{name} is a LazyLinear whose parameters have no shape yet: call the model o"
    ):
        gapless.Pipeline(made, devices=2, microbatches=2, loss=F.mse_loss)
    with torch.no_grad():
        target = made(rows())
    with gapless.Pipeline(made, devices=2, microbatches=2, loss=F.mse_loss) as pipe:
        pipe.step(rows(), target)


class Energy(Pair):
    """A layer whose output has a gradient in it."""

    def forward(self, x: Tensor, more: Any = None) -> Any:
        h = self.first(x)
        return self.last(h) + torch.func.grad(lambda part: self.last(part).pow(2).sum())(h)


class Force(Pair):
    def forward(self, x: Tensor, more: Any = None) -> Any:
        h = self.first(x)
        (force,) = torch.autograd.grad(self.last(h).pow(2).sum(), h, create_graph=True)
        return self.last(h) + force


@pytest.mark.parametrize("model", [Energy, Force])
def test_gradients_inside_a_traced_forward_are_refused_with_the_line(model: type[nn.Module]) -> None:
    with pytest.raises(
        PartitionError, match=r"computes gradients in its forward .*test_first_contact.py, line \d+, in .*layers="
    ):
        gapless.Pipeline(model(), devices=2, microbatches=1, loss=F.mse_loss, example=rows())


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("layer", [Energy, Force])
def test_gradients_inside_a_layer_are_exact(layer: type[nn.Module], schedule: str) -> None:
    model = nn.Sequential(layer(), nn.Linear(WIDTH, WIDTH))
    plain = copy.deepcopy(model)
    x, y = rows(), rows()
    with gapless.Pipeline(
        model, devices=2, microbatches=2, loss=F.mse_loss, schedule=schedule, intra_op_threads=torch.get_num_threads()
    ) as pipe:
        pipe.step(x, y)
    loop(plain, x, y, 2)
    assert_same_gradients(model, plain)


class Mapped(Pair):
    def forward(self, x: Tensor, more: Any = None) -> Any:
        return self.last(torch.vmap(lambda row: torch.tanh(self.first(row)) * row.sum())(x))


def test_what_vmap_runs_is_not_cut() -> None:
    """A tensor inside vmap crossed to the next stage, where it has no meaning."""
    assert_exact(Mapped(), [(rows(), rows())], loss=F.mse_loss, microbatches=2)


def test_keywords_that_the_first_layer_does_not_have_are_a_sentence() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with gapless.Pipeline(model, devices=2, microbatches=2, loss=F.mse_loss) as pipe:
        with pytest.raises(
            ConfigError,
            match="the batch has input_ids, but the first layer, a Linear, takes input: for input_ids, did",
        ):
            pipe.step(input_ids=torch.randn(4, 4), target=torch.randn(4, 4))
        pipe.step(input=torch.randn(4, 4), target=torch.randn(4, 4))


class Branch(Pair):
    def forward(self, x: Tensor, more: Any = None) -> Tensor:
        made: Tensor = self.first(x)
        return made if made.sum() > 0 else self.last(made)


class OwnLoss(Pair):
    def forward(self, inputs: Tensor, labels: Tensor, **more: Any) -> Tensor:  # type: ignore[override]
        return F.mse_loss(super().forward(inputs), labels)


class Named(OwnLoss):
    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(inputs, labels)


def shown(call: Callable[[], object]) -> str:
    """What a user sees of its error."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call()
    return "".join(traceback.format_exception(caught.value))


def test_a_model_that_can_not_be_traced_is_a_sentence_with_its_line_and_nothing_of_torch_or_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It came after two hundred lines of torch's."""
    options: dict[str, Any] = {"devices": 2, "microbatches": 2, "loss": F.mse_loss}
    pipe = gapless.Pipeline(Branch(), **options)
    for call in (
        lambda: pipe.step(rows(), rows()),
        lambda: gapless.Pipeline(Branch(), example=rows(), **options),
        lambda: gapless.Pipeline(Branch(), **{**options, "microbatches": 0}),
        lambda: pipe.load("nowhere"),
    ):
        seen = shown(call)
        assert {line.split('"')[1] for line in seen.splitlines() if line.startswith("  File")} == {__file__}
        assert "direct cause" not in seen
    assert re.search(
        r"can't trace Branch: it branches on the value .*test_first_contact.py, line \d+",
        shown(lambda: pipe.step(rows(), rows())),
    )
    monkeypatch.setenv("GAPLESS_TRACEBACK", "full")
    seen = shown(lambda: pipe.step(rows(), rows()))
    assert "direct cause" in seen
    assert "trace.py" in seen
    pipe.close()


@pytest.mark.parametrize(
    ("model", "options", "batch", "words"),
    [
        (
            Named,
            {},
            {"input": rows(), "labels": rows()},
            "the batch has input, but Named takes inputs, labels: for input, ",
        ),
        (OwnLoss, {}, {"input": rows(), "labels": rows()}, "did you mean inputs?"),
        (Named, {}, {"labels": rows()}, "the batch has labels, but Named takes inputs, labels: missing a required arg"),
        (Pair, {"loss": F.mse_loss}, [rows(), rows()], "give inputs and target as two arguments, (x, y)"),
        (sequence, {"loss": F.mse_loss}, [rows(), rows()], "give inputs and target as two arguments, (x, y)"),
        (
            lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
            {"loss": F.mse_loss},
            (rows(), rows()),
            "the batch has 2 inputs, but the first layer, a Linear, takes input: too many positional arguments; a ta",
        ),
    ],
)
def test_a_batch_with_other_inputs_than_the_model_is_told_what_it_takes(
    model: Any, options: Any, batch: Any, words: str
) -> None:
    with gapless.Pipeline(model(), devices=2, microbatches=2, **options) as pipe:
        assert words in shown(lambda: pipe.step(batch))
        assert words in shown(lambda: pipe.evaluate(batch))


def test_wrong_arguments_are_told_in_the_names_of_the_user() -> None:
    with pytest.raises(ConfigError, match=r"takes only the model without a name: write Pipeline\(model, devices=2, "):
        gapless.Pipeline(Pair(), 2)  # type: ignore[call-arg]
    with gapless.Pipeline(sequence(), devices=2, loss=F.mse_loss) as pipe:
        for name in ("save", "load", "clip_grad_norm_"):
            with pytest.raises(TypeError, match=rf"Pipeline\.{name}\(\) missing [12] required"):
                getattr(pipe, name)()


def test_a_file_of_torch_is_no_checkpoint_but_its_state_can_be_loaded(tmp_path: Path) -> None:
    file, other = tmp_path / "x.pt", sequence()
    torch.save(other.state_dict(), file)
    with gapless.Pipeline(sequence(), devices=2, loss=F.mse_loss) as pipe:
        with pytest.raises(CheckpointError, match=r"x.pt is a file.*pipe.load_state_dict\(torch.load\(file\)\)"):
            pipe.load(file)
        pipe.load_state_dict(torch.load(file))
        assert all(torch.equal(each, other.state_dict()[name]) for name, each in pipe.state_dict().items())
