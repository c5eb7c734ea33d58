"""Any module that torch.export can trace, cut into stages: the bits of the plain model, its names and its modes."""

from __future__ import annotations

import copy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapless
from gapless.errors import ConfigError, PartitionError
from gapless.model.reference import Reference
from gapless.model.traced.capture import Captured
from tests.model.training import WAYS, assert_exact, assert_same, assert_same_state
from tests.pipelines import Do
from tests.programs import Programs

VOCAB, WIDTH = 11, 8


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.mix(self.norm(x)).unflatten(-1, (2, 12)).transpose(1, 2).chunk(3, dim=-1)
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p)
        return x + F.dropout(self.out(y.transpose(1, 2).flatten(2)), p)


class Gpt(nn.Module):
    """As people write them: a mask, positions, an embedding tied to the head."""

    def __init__(self, dropout: float = 0.0, depth: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.places = nn.Embedding(16, WIDTH)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(depth))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.size(1)
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        x = self.drop(self.tokens(ids) + self.places(torch.arange(length)))
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)  # type: ignore[no-any-return]


class Unet(nn.Module):
    """Long skips, batch norm, transposed convolutions."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [2, 4, 6]
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(sizes))
        self.norms = nn.ModuleList(nn.BatchNorm2d(size) for size in sizes[1:])
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for conv, norm in zip(self.down, self.norms, strict=True):
            skips.append(x)
            x = F.max_pool2d(F.relu(norm(conv(x)), inplace=True), 2)
        for up in reversed(self.up):
            x = up(x) + skips.pop()
        return x


class Translator(nn.Module):
    """Encoder and decoder: two inputs, and what the encoder says goes to every layer of the decoder."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.body = nn.Transformer(WIDTH, 2, 1, 1, 2 * WIDTH, dropout, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = self.body.generate_square_subsequent_mask(target.size(1))
        x = self.body(self.tokens(source), self.tokens(target), tgt_mask=mask, tgt_is_causal=True)
        return self.head(x)  # type: ignore[no-any-return]


def token_loss(outputs: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), target.flatten())


def ids(samples: int = 6, length: int = 5) -> Tensor:
    return torch.randint(VOCAB, (samples, length))


def made(model: type[nn.Module], *args: Any) -> Any:
    torch.manual_seed(2)
    return model(*args)


@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize(("devices", "schedule", "remat"), WAYS)
def test_a_gpt_with_a_tied_head_has_the_bits_of_its_own_loop(devices: int, schedule: str, remat: str) -> None:
    model = made(Gpt)
    batches = [(ids(), ids()), (ids(7), ids(7)), (ids(6, 9), ids(6, 9))]  # uneven, then longer
    once = (devices, schedule) == (2, "interleaved")  # evaluate traces again, and neither schedule nor remat matter
    assert_exact(model, batches, loss=token_loss, devices=devices, schedule=schedule, remat=remat, evaluate=once)


def test_a_unet_has_the_bits_of_its_own_loop_and_its_running_statistics() -> None:
    batches = [(torch.randn(6, 2, 8, 8), torch.randn(6, 2, 8, 8)) for _ in range(3)]
    assert_exact(made(Unet), batches, loss=F.mse_loss, devices=3, schedule="1f1b", remat="stage")


def test_an_encoder_and_decoder_has_the_bits_of_its_own_loop() -> None:
    batches = [((ids(), ids(6, 4)), ids(6, 4)) for _ in range(2)]
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # which torch takes in eval mode, but not in a trace
    try:
        assert_exact(made(Translator), batches, loss=token_loss, devices=2, schedule="zb-v")
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize(
    ("model", "devices", "schedule", "remat"),
    [
        (Gpt, 3, "gpipe", "stage"),
        (Gpt, 2, "zb-v", "none"),
        pytest.param(Translator, 2, "zb-v", "stage", marks=pytest.mark.slow),
    ],
)
def test_dropout_draws_the_numbers_of_the_uncut_graph(
    model: type[nn.Module], devices: int, schedule: str, remat: Any
) -> None:
    ours = made(model, 0.3)
    plain = copy.deepcopy(ours)
    reference = Reference(plain)
    with gapless.Pipeline(
        ours, devices=devices, schedule=schedule, remat=remat, microbatches=3, loss=token_loss, seed=5
    ) as pipe:
        for step in range(2):
            inputs: Any = ids() if model is Gpt else (ids(), ids())
            target = ids()
            result = pipe.step(inputs, target, outputs=True)
            wanted = reference.step(inputs, target, loss=token_loss, microbatches=3, seed=5, step=step)
            assert_same(result.losses, wanted.losses, "losses")
            assert_same(result.outputs, wanted.outputs, "outputs")
            assert_same_state(ours, plain, f"step {step}")


@pytest.mark.usefixtures("traced_once")
def test_plain_step_of_a_module_without_randomness_is_its_own_loop() -> None:
    model = made(Gpt)
    other = copy.deepcopy(model)
    inputs, target = ids(4), ids(4)
    result = gapless.plain_step(model, inputs, target, loss=token_loss, microbatches=2)
    for part, goal in zip(inputs.chunk(2), target.chunk(2), strict=True):
        (token_loss(other(part), goal) * 0.5).backward()
    assert_same_state(model, other, "plain_step")
    assert len(result.losses) == 2


@pytest.mark.usefixtures("traced_once")
def test_parameters_keep_their_names_and_are_there_before_the_first_batch() -> None:
    model = made(Gpt)
    names = [name for name, _ in model.named_parameters()]
    with gapless.Pipeline(model, devices=2, microbatches=2, loss=token_loss) as pipe:
        assert [name for name, _ in pipe.named_parameters()] == names
        assert "to be traced and cut when the first batch comes" in repr(pipe)
        optimizer = torch.optim.AdamW(pipe.parameters())
        before = pipe.state_dict()["head.weight"].clone()
        pipe.step(ids(), ids())
        optimizer.step()
        assert not torch.equal(before, pipe.state_dict()["head.weight"])
        assert list(pipe.state_dict()) == list(model.state_dict())
        assert "stage 1 on device 1" in repr(pipe)


def test_an_example_is_traced_at_once() -> None:
    with gapless.Pipeline(made(Gpt), devices=2, microbatches=2, loss=token_loss, example=ids(4)) as pipe:
        assert "stage 1 on device 1" in repr(pipe)


def test_autocast_of_the_caller_holds() -> None:
    model = made(Gpt)
    other = copy.deepcopy(model)
    inputs, target = ids(4), ids(4)
    with (
        gapless.Pipeline(model, devices=2, microbatches=2, loss=token_loss) as pipe,
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        result = pipe.step(inputs, target)
    losses = []
    for part, goal in zip(inputs.chunk(2), target.chunk(2), strict=True):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = token_loss(other(part), goal)
        losses.append(loss.detach())
        (loss * 0.5).backward()
    assert_same(result.losses, losses, "losses")
    assert_same_state(model, other, "autocast")


class Lora(nn.Module):
    """A frozen layer and two thin matrices that learn."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.a = nn.Linear(frozen.in_features, 2, bias=False)
        self.b = nn.Linear(2, frozen.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.b(self.a(x))  # type: ignore[no-any-return]


def test_adapters_alone_learn() -> None:
    model = made(Gpt).requires_grad_(False)
    for block in model.blocks:
        block.mix = Lora(block.mix)
    batches = [(ids(), ids()) for _ in range(2)]
    assert_exact(model, batches, loss=token_loss, devices=4, schedule="zb-h1")
    assert {name.rsplit(".")[-2] for name, p in model.named_parameters() if p.requires_grad} == {"a", "b"}


@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_nothing_is_computed_or_sent_for_a_frozen_first_half(schedule: str) -> None:
    model = made(Gpt, 0.0, 3)
    frozen = [model.tokens, model.places, *model.blocks[:2]]
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    for part in frozen:
        part.requires_grad_(False)
    batches = [(ids(), ids()) for _ in range(2)]
    assert_exact(model, batches, loss=token_loss, schedule=schedule, evaluate=False)
    with gapless.Pipeline(model, devices=2, microbatches=2, loss=token_loss, schedule=schedule) as pipe:
        pipe.step(ids(), ids())
        _, *crossing = pipe._staged.stages[0].forward(0, pipe._staged.prepared([ids(2)])[0], step=0)
        assert not any(value.requires_grad for value in crossing if isinstance(value, Tensor))
        pipe._staged.stages[0].drop()
    assert all(p.grad is None for part in frozen for p in part.parameters())


class WithLoss(nn.Module):
    """Its own loss, in a dict, as some models return it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Gpt()

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        out = self.body(ids)
        return {"logits": out} if labels is None else {"loss": token_loss(out, labels), "logits": out}


@pytest.mark.usefixtures("traced_once")
def test_without_a_loss_the_models_own_is_used() -> None:
    assert_exact(made(WithLoss), [({"ids": ids(), "labels": ids()}, None) for _ in range(2)])


@pytest.mark.usefixtures("traced_once")
def test_evaluate_gives_the_models_own_loss_where_there_is_one() -> None:
    model = made(WithLoss)
    batch = {"ids": ids(4), "labels": ids(4)}
    with gapless.Pipeline(model, devices=2, microbatches=2) as pipe:
        result = pipe.evaluate(batch)
        assert len(result.losses) == 2
        assert result.loss is not None
        assert pipe.evaluate({"ids": ids(4)}).loss is None
        with pytest.raises(ConfigError, match=r"returned a dict without a loss, and no loss= was given"):
            pipe.step({"ids": ids(4)})


def test_counting_layers_of_a_module_makes_no_sense() -> None:
    with pytest.raises(PartitionError, match="partition counts the layers of a sequence"):
        gapless.Pipeline(made(Gpt), devices=2, microbatches=2, loss=token_loss, partition=[1, 2])


def test_more_stages_than_places_to_cut_are_refused() -> None:
    class Tiny(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    with (
        gapless.Pipeline(Tiny(), devices=4, microbatches=2, loss=F.mse_loss) as pipe,
        pytest.raises(PartitionError, match=r"can be cut in 0 places, but .* on \d devices needs 4 stages: "),
    ):
        pipe.step(torch.randn(4, 2), torch.randn(4, 2))


@torch.library.custom_op("tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda _, grad: grad * 3)  # its own, so that another would be seen


def test_an_operator_keeps_its_own_backward() -> None:
    """It was refused as an autograd.Function is, though the graph has the operator and so its backward."""
    assert_exact(
        Do(lambda a, b, x: b(doubled(a(x))), nn.Linear(4, 4), nn.Linear(4, 4)),
        [(torch.randn(6, 4), torch.randn(6, 4))],
        loss=F.mse_loss,
    )


@pytest.mark.parametrize("first", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_pipeline_that_nobody_holds_is_let_go_of_at_once(first: bool, programs: Programs) -> None:
    """Torch kept the frames in which it first loaded its tracer, and these held the pipeline until a collection."""
    program = """if True:
        import gc, weakref
        import torch, torch.nn.functional as F
        from torch import nn
        import gapless

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

            def forward(self, x):
                return self.last(self.first(x).relu())

        gc.disable()
        pipe = gapless.Pipeline(Model(), devices=2, microbatches=2, loss=F.mse_loss)
        pipe.step(torch.randn(4, 4), torch.randn(4, 4))
        held = weakref.ref(pipe)
        del pipe
        assert held() is None
    """
    if not first:
        assert programs.run("-c", program) == (0, "", "")
        return
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


class Loose(nn.Module):
    """It takes what it has no name for, as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor, **others: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.pow(2).sum() / others["total"] + others["shift"].sum()


def test_tensors_without_a_name_of_their_own_may_vary_in_size() -> None:
    """torch.export knows no sizes that vary among **kwargs: every length was traced anew."""
    model = Loose()
    found = Captured(model, [torch.device("cpu")] * 2)
    for length in (3, 5, 6):
        found.prepare([{"x": torch.randn(2, length, 4), "shift": torch.randn(length), "total": torch.tensor(7)}])
    assert found.num_traces == 1
    assert "forward" not in vars(model)


def test_threads_that_trace_at_the_same_time_wait_for_each_other() -> None:
    """What one had put in place of torch's functions, another took for torch's own, and left it there."""
    before = {
        name: vars(nn.Module).get(name) for name in ("__call__", "__setattr__", "__getattr__", "__getattribute__")
    }

    def train(seed: int) -> Tensor:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
        parts = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        model = Do(lambda one, other, x: x + other(torch.tanh(one(x))), *parts)
        with gapless.Pipeline(model, devices=2, microbatches=2, loss=F.mse_loss) as pipe:
            loss = pipe.step(x, x).loss
        assert loss is not None
        return loss

    torch._C._ensureCUDADeviceGuardSet()  # torch 2.11 without a GPU: not from a thread that ends, or later traces crash
    with ThreadPoolExecutor(4) as threads:
        losses = list(threads.map(train, range(4)))
    assert all(map(torch.isfinite, losses))
    assert before == {name: vars(nn.Module).get(name) for name in before}
