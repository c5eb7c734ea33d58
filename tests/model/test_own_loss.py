"""Models with labels weigh what their own loss counts: the bits of the loop that a user writes around the model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import gapless
from tests.model.hub import bert, gpt2, llama, t5
from tests.pipelines import assert_same_gradients
from tests.run.forked import Launch

pytestmark = pytest.mark.usefixtures("traced_once")

Count = Callable[[dict[str, Tensor]], int]


def batch(classes: int = 24) -> dict[str, Tensor]:
    """Padded sentences of 8 lengths: the third of four microbatches has no target at all, shifted or not."""
    lengths = torch.tensor([7, 5, 2, 3, 1, 1, 6, 4])
    there = torch.arange(7) < lengths[:, None]
    labels = torch.randint(classes, (8, 7)).masked_fill(~there, -100)
    labels[4:6] = -100
    return {"input_ids": torch.randint(3, 24, (8, 7)), "attention_mask": there.long(), "labels": labels}


def shifted(part: dict[str, Tensor]) -> int:
    return int((part["labels"][..., 1:] != -100).sum())


def not_shifted(part: dict[str, Tensor]) -> int:
    return int((part["labels"] != -100).sum())


def cut(inputs: dict[str, Any], count: int = 4) -> list[dict[str, Any]]:
    names = [name for name, value in inputs.items() if value.dim()]
    rows = zip(*(inputs[name].tensor_split(count) for name in names), strict=True)
    return [{**inputs, **dict(zip(names, row, strict=True))} for row in rows]


def own_loop(model: nn.Module, inputs: dict[str, Any], count: Count, total: int | None = None) -> None:
    """A microbatch without any target is left out: its mean is no number."""
    parts = cut(inputs)
    total = sum(map(count, parts)) if total is None else total
    for part in parts:
        if count(part):
            found = model(**part)
            loss = found if isinstance(found, Tensor) else found.loss
            (loss * (count(part) / total)).backward()


MODELS: list[tuple[Callable[[], nn.Module], Count, int]] = [
    (llama, shifted, 24),
    (partial(bert, "TokenClassification"), not_shifted, 2),
    (t5, not_shifted, 24),  # slow, as are those that follow
    (gpt2, shifted, 24),
    (partial(bert, "MaskedLM"), not_shifted, 24),
]


@pytest.mark.parametrize(
    ("make", "count", "classes"), [*MODELS[:2], *(pytest.param(*each, marks=pytest.mark.slow) for each in MODELS[2:])]
)
def test_a_models_own_loss_weighs_the_labels_it_counts(
    make: Callable[[], nn.Module], count: Count, classes: int
) -> None:
    """It was a mean of means: 4.1830 for 4.1788. Causal models shift their labels, the others do not."""
    torch.manual_seed(4)
    model, inputs = make(), batch(classes)
    reference, plain, whole = (copy.deepcopy(model) for _ in range(3))
    with gapless.Pipeline(model, devices=2, schedule="zb-h1", microbatches=4, intra_op_threads=1) as pipe:
        result, evaluated = pipe.step(inputs), pipe.evaluate(inputs)
    for found in (result, evaluated):
        assert found.loss is not None
        torch.testing.assert_close(found.loss, whole(**inputs).loss.detach())
    assert result.losses[2].isnan()
    own_loop(reference, inputs, count)
    assert_same_gradients(model, reference)
    gapless.plain_step(plain, inputs, microbatches=4)
    assert_same_gradients(plain, reference)


@pytest.mark.parametrize(
    ("head", "sizes"),
    [
        ("QuestionAnswering", {"start_positions": 5, "end_positions": 5}),
        pytest.param("SequenceClassification", {"labels": 2}, marks=pytest.mark.slow),
    ],
)
def test_positions_and_sentences_weigh_as_samples_do(head: str, sizes: dict[str, int]) -> None:
    inputs = {"input_ids": torch.randint(3, 24, (7, 5))}
    inputs |= {name: torch.randint(most, (7,)) for name, most in sizes.items()}
    model = bert(head)
    reference = copy.deepcopy(model)
    with gapless.Pipeline(model, devices=2, microbatches=4, intra_op_threads=1) as pipe:
        assert pipe.step(inputs).weights == (2 / 7, 2 / 7, 2 / 7, 1 / 7)
    own_loop(reference, inputs, lambda part: len(part["input_ids"]))
    assert_same_gradients(model, reference)


def test_two_losses_that_count_differently_are_refused() -> None:
    """A mean over tokens and one over sentences: no weight of a microbatch is right for both."""
    inputs = {**batch(), "next_sentence_label": torch.randint(2, (8,))}
    model = bert("PreTraining")
    with gapless.Pipeline(model, devices=2, microbatches=4) as pipe:
        with pytest.raises(gapless.GaplessError, match=r"own loss has 2 parts, .* \(12, 5, 0, 10 and 2, 2, 2, 2 of"):
            pipe.step(inputs)
        inputs["labels"] = inputs["labels"].clamp(min=0)
        assert pipe.step(inputs).weights == (0.25,) * 4
    with gapless.Pipeline(model, devices=2, microbatches=4, loss_weight=not_shifted) as pipe:
        pipe.step(batch() | {"next_sentence_label": torch.randint(2, (8,))})


def test_a_batch_that_says_how_many_items_it_has_is_a_sum() -> None:
    """Hugging Face's own convention for accumulation: the loss of each part is its sum over all items."""
    model, inputs = llama(), batch()
    inputs["num_items_in_batch"] = torch.tensor(shifted(inputs))
    reference = copy.deepcopy(model)
    with gapless.Pipeline(model, devices=2, microbatches=4, intra_op_threads=1) as pipe:
        assert pipe.step(inputs).weights == (1.0,) * 4
    for part in cut(inputs):
        model_loss = reference(**part).loss
        model_loss.backward()
    assert_same_gradients(model, reference)


class Own(nn.Module):
    """A model with a loss of its own, in which nobody can see what it leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(24, 8), nn.Linear(8, 24)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        kept = (labels != -100).float()
        logits = self.second(torch.tanh(self.first(ids)))
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten().clamp(min=0), reduction="none")
        return (each * kept.flatten()).sum() / kept.sum()


def test_a_loss_that_can_not_be_read_is_asked_for_where_it_matters() -> None:
    inputs = (batch()["input_ids"], batch()["labels"])
    with gapless.Pipeline(Own(), devices=2, microbatches=4) as pipe:
        pipe.step((inputs[0], inputs[1].clamp(min=0)))
        with pytest.raises(gapless.GaplessError, match=r"spread unevenly .* loss_weight="):
            pipe.step(inputs)
    model = Own()
    reference = copy.deepcopy(model)
    count = lambda part: (part[1] != -100).sum()  # noqa: E731
    with gapless.Pipeline(model, devices=2, microbatches=4, loss_weight=count, intra_op_threads=1) as pipe:
        result = pipe.step(inputs)
    assert result.loss is not None
    assert result.loss.isfinite()
    for ids, labels in zip(inputs[0].tensor_split(4), inputs[1].tensor_split(4), strict=True):
        if (labels != -100).any():
            share = int((labels != -100).sum()) / int((inputs[1] != -100).sum())
            (reference(ids, labels) * share).backward()
    assert_same_gradients(model, reference)


# -- under ranks -------------------------------------------------------------------------------------------------------


class Causal(Own):
    """It shifts its labels, as Hugging Face's causal models do, and is traced in a tenth of the time."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.second(torch.tanh(self.first(input_ids)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def replicas(kind: str) -> None:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "pp"))
    replica = mesh.get_local_rank("dp")
    torch.manual_seed(4)
    model = llama() if kind == "llama" else Causal()
    local = [copy.deepcopy(model) for _ in range(2)]
    data = [batch(), batch()]
    data[1]["labels"][:, 3:] = -100
    total = sum(map(shifted, data))
    if kind != "llama":
        data = [{name: each[name] for name in ("input_ids", "labels")} for each in data]
    with gapless.Pipeline(model, mesh=mesh, microbatches=4) as pipe:
        pipe.step(data[replica])
        for number, each in enumerate(local):
            own_loop(each, data[number], shifted, total=total)
        first, second = (dict(each.named_parameters()) for each in local)
        for name, parameter in pipe.named_parameters():
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, first[name].grad + second[name].grad), name  # type: ignore[operator]
    # what is not known must be even over the replicas, too
    with (
        gapless.Pipeline(Own(), mesh=mesh, microbatches=1, timeout=40) as pipe,
        pytest.raises(gapless.GaplessError, match="spread unevenly"),
    ):
        pipe.step((data[replica]["input_ids"], data[replica]["labels"]))
    dist.barrier()


@pytest.mark.parametrize("kind", ["one's own", pytest.param("llama", marks=pytest.mark.slow)])
def test_replicas_weigh_by_the_labels_of_all(kind: str, launch: Launch) -> None:
    launch(replicas, 4 if kind == "llama" else 2, kind)
