"""The stranger's matrix: Hugging Face models with their default configs, padding and labels, against a loop of our own
that shares no code with the library, to the bit; in one process and under ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import gapless
from gapless.errors import PartitionError
from tests.model.strangers import STRANGERS, VOCAB, Batch, gpt2, mixtral, opt, text, wav2vec2
from tests.model.training import assert_exact
from tests.run.forked import Launch

MICROBATCHES = 3


def parts_of(batch: dict[str, Any]) -> list[dict[str, Any]]:
    columns = {key: value.tensor_split(MICROBATCHES) for key, value in batch.items() if isinstance(value, Tensor)}
    return [{**batch, **{key: column[m] for key, column in columns.items()}} for m in range(MICROBATCHES)]


def counted(name: str, part: Batch) -> int:
    """Over how many targets this model's loss is a mean: a causal one predicts all but the first."""
    if "labels" not in part:
        return len(part["input_ids"])
    labels = part["labels"] if name in ("bert", "t5", "vit", "whisper") else part["labels"][:, 1:]
    return int((labels != -100).sum())


def own_loop(name: str, model: nn.Module, batch: dict[str, Any]) -> list[Tensor]:
    """What anybody would write who knows that a mean over targets is no mean of means."""
    parts = parts_of(batch)
    total = sum(counted(name, part) for part in parts)
    losses = []
    for part in parts:
        loss = model(**part).loss
        (loss * (counted(name, part) / total)).backward()
        losses.append(loss.detach())
    return losses


def batch_of(name: str) -> dict[str, Any]:
    batch: dict[str, Any] = dict(STRANGERS[name][1](2 * MICROBATCHES))
    return {**batch, "return_loss": True} if name == "clip" else batch


def assert_same(ours: Any, plain: Any, where: str) -> None:
    assert (ours is None) == (plain is None), where
    if ours is not None:
        assert torch.equal(ours, plain), f"{where}: off by {(ours.double() - plain.double()).abs().max().item()}"


def trained(name: str, pipe: gapless.Pipeline, reference: nn.Module, steps: int) -> None:
    """Some steps leave the losses, gradients and weights of the loop."""
    ours, plain = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (pipe, reference))
    names = dict(reference.named_parameters())
    for number in range(steps):
        batch = batch_of(name)
        result = pipe.step(copy.deepcopy(batch))
        for m, (loss, wanted) in enumerate(zip(result.losses, own_loop(name, reference, batch), strict=True)):
            assert_same(loss, wanted, f"{name}, step {number}, loss {m}")
        for key, parameter in pipe.named_parameters():
            assert_same(parameter.grad, names[key].grad, f"{name}, step {number}, gradient of {key}")
        ours.step()
        plain.step()
        ours.zero_grad()
        plain.zero_grad()


@pytest.mark.slow  # some are quick in test_huggingface.py, and between ranks in tests/hf
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", STRANGERS)
def test_a_stranger_has_the_bits_of_its_own_loop(name: str) -> None:
    model = STRANGERS[name][0]()
    reference = copy.deepcopy(model)
    with gapless.Pipeline(
        model,
        devices=2,
        schedule="zb-v",
        remat="stage",
        microbatches=MICROBATCHES,
        intra_op_threads=torch.get_num_threads(),
    ) as pipe:
        trained(name, pipe, reference, steps=1)
        assert_same_evaluation(name, pipe, reference)


def assert_same_evaluation(name: str, pipe: gapless.Pipeline, reference: nn.Module) -> None:
    batch = batch_of(name)
    outputs = pipe.evaluate(copy.deepcopy(batch)).outputs
    reference.eval()
    key = "text_embeds" if name == "clip" else "logits"
    with torch.no_grad():
        wanted = torch.cat([reference(**part)[key] for part in parts_of(batch)])
    assert_same(outputs[key], wanted, f"{name}, {key} of evaluate")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("names", [(*STRANGERS,)[start::8] for start in range(8)], ids="-".join)
def test_strangers_between_ranks_have_the_bits_of_their_own_loops(names: tuple[str, ...], launch: Launch) -> None:
    from tests.model.on_ranks import strangers_between_ranks

    launch(strangers_between_ranks, 2, *names, timeout=380)


@pytest.mark.parametrize(
    ("made", "switch"),
    [
        (partial(opt, layerdrop=0.5), "Set layerdrop=0.0 in its config"),
        (partial(mixtral, experts_implementation="eager"), 'Set experts_implementation="batched_mm" in its config'),
    ],
    ids=["layerdrop", "eager experts"],
)
def test_what_no_graph_can_follow_is_refused_by_the_name_of_its_switch(
    made: Callable[[], nn.Module], switch: str
) -> None:
    """Which layer is dropped and which experts run is known only when they run."""
    with (
        gapless.Pipeline(made(), devices=2, microbatches=MICROBATCHES) as pipe,
        pytest.raises(PartitionError, match=switch),
    ):
        pipe.step(text(2 * MICROBATCHES))


NO_DICE = {"layerdrop": 0.0, "apply_spec_augment": False}


@pytest.mark.parametrize(
    ("switches", "way_out"),
    [
        ({}, "Set layerdrop=0.0 and apply_spec_augment=False in its config"),
        (NO_DICE, "leave out the labels and pass them as the target of loss="),
    ],
    ids=["drawn masks", "loss"],
)
def test_a_model_for_transcripts_says_what_to_do_about_its_masks_and_its_loss(
    switches: dict[str, Any], way_out: str
) -> None:
    batch = {"input_values": torch.randn(6, 70), "labels": torch.randint(3, VOCAB, (6, 2))}
    model = wav2vec2(**switches)
    with gapless.Pipeline(model, devices=2, microbatches=3) as pipe, pytest.raises(PartitionError, match=way_out):
        pipe.step(batch)


def test_a_model_for_transcripts_of_padded_samples_is_exact_with_a_loss_of_ones_own() -> None:
    """Its mask is written into zeros, and attention asks whether there is any padding."""

    def loss(outputs: Any, target: Tensor) -> Tensor:
        chances = outputs.logits.log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(chances, target, torch.full((len(target),), len(chances)), torch.full((len(target),), 2))

    mask = torch.ones(6, 70, dtype=torch.long)
    mask[3, 50:] = 0
    batch = {"input_values": torch.randn(6, 70), "attention_mask": mask}
    assert_exact(wav2vec2(**NO_DICE), [(batch, torch.randint(3, VOCAB, (6, 2)))], loss=loss, evaluate=False)


class Seeded(TorchFunctionMode):
    """Seeds every draw of a plain call as `gapless.seed_of` says: the n-th of a microbatch as its n-th."""

    def __init__(self) -> None:
        super().__init__()
        self.place: tuple[int, int, int] = (0, 0, 0)
        self.drawn = 0

    @contextmanager
    def microbatch(self, seed: int, step: int, number: int) -> Iterator[None]:
        self.place, self.drawn = (seed, step, number), 0
        with self:
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (func is F.dropout and kwargs.get("training")) or kwargs.get("dropout_p"):
            torch.manual_seed(gapless.seed_of(*self.place, self.drawn))
            self.drawn += 1
        return func(*args, **kwargs)


def test_dropout_draws_what_seed_of_says() -> None:
    model = gpt2(dropout=0.2, layers=1)
    reference, seeded = copy.deepcopy(model), Seeded()
    threads = torch.get_num_threads()
    with gapless.Pipeline(model, devices=2, microbatches=MICROBATCHES, seed=9, intra_op_threads=threads) as pipe:
        for step in range(2):
            batch = text(2 * MICROBATCHES, ignored=False)
            del batch["attention_mask"]  # what is padded and what is not would be traced each
            result = pipe.step(copy.deepcopy(batch))
            for number, part in enumerate(parts_of(batch)):
                with seeded.microbatch(9, step, number):
                    loss = reference(**part).loss
                (loss * (1 / 3)).backward()
                assert seeded.drawn == 4  # the embedding's, and those of attention, projection and MLP
                assert_same(result.losses[number], loss.detach(), f"step {step}, loss {number}")
            for (key, ours), plain in zip(model.named_parameters(), reference.parameters(), strict=True):
                assert_same(ours.grad, plain.grad, f"step {step}, gradient of {key}")
