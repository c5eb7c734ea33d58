"""Every loss of torch, found in its namespaces: a pipeline has the gradients of the whole batch, or it asks.

Targets that are left out and weights of classes are spread unevenly over the microbatches. The reference is one call of
the loss on the whole batch, in float64.
"""

import copy
import inspect
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapless

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
CLASSES = torch.tensor([0, 1, 2, 0, 0, 0, 1, 0])
WEIGHT = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
WEIGHTS = torch.eye(3, dtype=torch.float64)
SIGNS = torch.tensor([[1, -1, 1, 1, -1, 1, 1, -1]]).t()
torch.manual_seed(0)
X, OTHER, THIRD = (torch.rand(8, 3, dtype=torch.float64) for _ in range(3))
LENGTHS = torch.tensor([1, 2, 1, 1, 2, 2, 1, 2])
FUNCTIONS = ("loss", "entropy", "kl_div")
CHANGED: dict[str, list[Any]] = {
    "reduction": ["mean", "sum", "batchmean"],
    "weight": [None, WEIGHT],
    "ignore_index": [-100, 0],
    "label_smoothing": [0.0, 0.1],
    "pos_weight": [None, WEIGHT],
}
# What a loss is called with, where that is not the outputs and a float for each: the target, and how they are given.
KNOWN = ("crossentropy", "nll", "mse", "l1", "bce", "kldiv", "binarycrossentropy", "multimargin")


def FIRST(loss: Any, outputs: Any, target: Any) -> Any:  # noqa: N802
    return loss(outputs, target)


CALLS: dict[str, tuple[Any, Callable[..., Any]]] = {
    **dict.fromkeys(("crossentropy", "nll", "nll2d", "multimargin", "linearcrossentropy"), (CLASSES, FIRST)),
    "multilabelmargin": (torch.stack([CLASSES, -torch.ones(8).long(), CLASSES], 1), FIRST),
    "hingeembedding": (SIGNS.expand(8, 3), FIRST),
    "gaussiannll": ((OTHER, THIRD), lambda loss, out, y: loss(out, y[0], y[1])),
    "cosineembedding": ((OTHER, SIGNS[:, 0]), lambda loss, out, y: loss(out, y[0], y[1])),
    "marginranking": ((OTHER, SIGNS), lambda loss, out, y: loss(out, y[0], y[1])),
    **dict.fromkeys(
        ("tripletmargin", "tripletmarginwithdistance"), ((OTHER, THIRD), lambda loss, out, y: loss(out, y[0], y[1]))
    ),
    "adaptivelogsoftmaxwith": (CLASSES, lambda loss, out, y: loss(out, y).loss),
    "ctc": (
        (torch.stack([CLASSES.clamp(1), 3 - CLASSES.clamp(1)], 1), LENGTHS),
        lambda loss, out, y: loss(
            out.log_softmax(-1)[None].repeat(5, 1, 1), y[0], torch.full((len(out),), 5), target_lengths=y[1]
        ),
    ),
}


def key_of(name: str) -> str:
    """Of a module and of its function."""
    return name.lower().replace("_", "").removesuffix("loss")


def names() -> list[str]:
    """Of modules and functions, in whatever version of torch this is."""
    modules = [name for name in dir(nn) if inspect.isclass(getattr(nn, name)) and name.endswith("Loss")]
    functions = [name for name in dir(F) if any(word in name for word in FUNCTIONS) and name[0] != "_"]
    return [*modules, *(name for name in functions if callable(getattr(F, name)))]


def forms(name: str) -> Iterator[Any]:
    """The loss with all that its arguments allow."""
    made = getattr(nn, name, None) or getattr(F, name)
    taken = [each for each in CHANGED if each in inspect.signature(made).parameters]
    if name == "linear_cross_entropy":
        taken = ["weight", "ignore_index"]  # in a lambda, which is to be a mean
    if name in ("l1_loss", "mse_loss", "smooth_l1_loss", "huber_loss"):
        taken = ["reduction"]  # their weights are of a target's shape
    for values in itertools.product(*(CHANGED[each] for each in taken)):
        asked = dict(zip(taken, values, strict=True))
        if asked.get("reduction") == "batchmean" and "kl" not in name.lower():
            continue
        if name == "AdaptiveLogSoftmaxWithLoss":
            yield made(3, 3, [1], dtype=torch.float64)
        elif name == "linear_cross_entropy":
            yield lambda out, y, asked=asked: F.linear_cross_entropy(out, WEIGHTS, y, **asked)
        elif name == "LinearCrossEntropyLoss":
            for options in (None, nn.LinearCrossEntropyOptions()):
                yield nn.LinearCrossEntropyLoss(3, 3, dtype=torch.float64, options=options, **asked)
        else:
            yield made(**asked) if inspect.isclass(made) else partial(made, **asked)


def layers() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Sigmoid()).double()


def counted_right(loss: Any, target: Any, microbatches: int) -> bool:
    """False if gapless asks what the loss counts."""
    model = layers()
    reference, plain = copy.deepcopy(model), copy.deepcopy(loss)
    try:
        with gapless.Pipeline(model, devices=2, microbatches=microbatches, loss=loss, intra_op_threads=1) as pipe:
            result = pipe.step(X, target)
    except gapless.GaplessError as error:
        assert "pass loss_weight=" in str(error), error  # noqa: PT017
        return False
    value = plain(reference(X), target)
    value.backward()
    assert result.loss is not None
    torch.testing.assert_close(result.loss, value.detach(), rtol=1e-12, atol=1e-14)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12)
    return True


@pytest.mark.parametrize("name", names())
def test_a_loss_of_torch_has_the_gradients_of_the_whole_batch_or_asks(name: str) -> None:
    """A list of types decided, and those that came later were taken for means over samples."""
    target, call = CALLS.get(key_of(name), (OTHER, FIRST))
    known = 0
    for loss in forms(name):
        summed = "sum" in (getattr(loss, "reduction", ""), getattr(loss, "keywords", {}).get("reduction"))
        for microbatches in (4, 3):
            if call is FIRST and not inspect.isfunction(loss):
                known += counted_right(loss, target, microbatches)
            if not summed and microbatches == 3:
                counted_right(partial(call, loss), target, microbatches)
    assert known or call is not FIRST or key_of(name) not in KNOWN


def test_a_loss_that_torch_adds_one_day_is_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    def new_loss(outputs: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(outputs, target)

    monkeypatch.setattr(F, "new_loss", new_loss, raising=False)
    assert not counted_right(new_loss, OTHER, 4)


def test_a_class_made_from_one_of_torchs_counts_as_it_does_unless_it_has_a_forward_of_its_own() -> None:
    class Same(nn.CrossEntropyLoss):
        pass

    class Other(nn.CrossEntropyLoss):
        def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
            return super().forward(outputs, target) * 2

    assert counted_right(Same(weight=WEIGHT), CLASSES, 3)
    assert not counted_right(Other(weight=WEIGHT), CLASSES, 3)
    assert counted_right(Other(), CLASSES, 3)


def masked(outputs: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(outputs[target > 0], target[target > 0])


def two(outputs: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(outputs, outputs.detach() + 1) + 2 * F.cross_entropy(outputs, target, ignore_index=0)


@pytest.mark.parametrize(
    "loss",
    [
        lambda out, y: F.cross_entropy(out, y, weight=WEIGHT),
        lambda out, y: F.nll_loss(out[..., None], y[:, None], ignore_index=0),
        masked,
        two,
    ],
)
@pytest.mark.parametrize("remat", ["none", "stage"])
def test_a_function_that_calls_a_cross_entropy_is_asked_what_it_counts(loss: Any, remat: str) -> None:
    """They were means over samples, whatever was left out; -100 alone was looked for."""
    even = torch.tensor([1, 0, 1, 0, 0, 1, 0, 1])
    options: dict[str, Any] = {"devices": 2, "microbatches": 4, "loss": loss, "remat": remat, "intra_op_threads": 1}
    with gapless.Pipeline(layers(), **options) as pipe:
        pipe.step(X, even)  # as much is left out of each
        with pytest.raises(gapless.GaplessError, match=r"the loss divides by .* in one .* pass loss_weight="):
            pipe.step(X, CLASSES)
        pipe.step(X, even)
    with pytest.raises(gapless.GaplessError, match="the loss divides by"):
        gapless.plain_step(layers(), X, CLASSES, loss=loss, microbatches=4)
    with gapless.Pipeline(layers(), loss_weight=len, **options) as pipe:
        pipe.step(X, CLASSES)


def test_a_weight_for_each_sample_is_not_taken_for_one_of_classes() -> None:
    """One sample at a time was multiplied by the weights of all."""
    with (
        gapless.Pipeline(layers(), devices=2, microbatches=8, loss=nn.BCELoss(weight=torch.rand(8, 1))) as pipe,
        pytest.raises(gapless.GaplessError, match=r"weight of shape \(8, 1\) for a target of shape \(8, 3\)"),
    ):
        pipe.step(X, OTHER)
