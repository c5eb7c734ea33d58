"""On an NVIDIA GPU: the bits of the plain loop, several devices made of one by streams, no waiting on the host."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gapless import Pipeline, offload_optimizer, plain_step
from gapless.run.held_memory import in_use
from gapless.zoo.gpt import gpt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("deterministic"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(300),
]


def tokens_loss(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), target.flatten())


def small_gpt() -> nn.Sequential:
    torch.manual_seed(0)
    return gpt(vocab=61, width=64, depth=6, heads=4, context=32, dropout=0.1).cuda()


def assert_same_training(model: nn.Sequential, x: Any, y: Any, loss: Any, *, steps: int = 2, **options: Any) -> None:
    reference = copy.deepcopy(model)
    with Pipeline(model, loss=loss, **options) as pipe:
        for step in range(steps):
            result = pipe.step(x, y, outputs=True)
            expected = plain_step(reference, x, y, loss=loss, microbatches=options["microbatches"], step=step)
            assert result.loss is not None
            assert torch.equal(result.loss, expected.loss)
            assert torch.equal(result.outputs, expected.outputs)
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad), name


@pytest.mark.parametrize("remat", ["none", "stage", "layer"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "v-half", "dualpipe-v"])
def test_streams_of_one_gpu_give_the_bits_of_the_plain_loop(schedule: str, remat: Any) -> None:
    x = torch.randint(0, 61, (11, 32), device="cuda")
    y = torch.randint(0, 61, (11, 32), device="cuda")
    options = {"devices": ["cuda:0"] * 3, "microbatches": 5, "schedule": schedule, "remat": remat}
    assert_same_training(small_gpt(), x, y, tokens_loss, **options)


def test_batches_on_the_host_are_copied_to_the_devices() -> None:
    x, y = torch.randint(0, 61, (8, 32)).pin_memory(), torch.randint(0, 61, (8, 32)).pin_memory()
    model = small_gpt()
    reference = copy.deepcopy(model)
    with Pipeline(model, devices=["cuda:0"] * 2, microbatches=4, loss=tokens_loss) as pipe:
        result = pipe.step(x, y)
    expected = plain_step(reference, x.cuda(), y.cuda(), loss=tokens_loss, microbatches=4)
    assert result.loss is not None
    assert torch.equal(result.loss, expected.loss)


def test_bfloat16_autocast_gives_the_bits_of_the_plain_loop() -> None:
    x = torch.randint(0, 61, (8, 32), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        assert_same_training(small_gpt(), x, x, tokens_loss, devices=["cuda:0"] * 2, microbatches=4, schedule="zb-h1")


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_no_action_waits_on_the_host(schedule: str) -> None:
    """Targets that are left out are counted before a step, for which the host waits; a loss_weight needs no look."""
    x = torch.randint(0, 61, (8, 32), device="cuda")
    options: dict[str, Any] = {"microbatches": 8, "loss": tokens_loss, "schedule": schedule, "loss_weight": len}
    with Pipeline(small_gpt(), devices=["cuda:0"] * 2, **options) as pipe:
        pipe.step(x, x)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            pipe.step(x, x)
        finally:
            torch.cuda.set_sync_debug_mode("default")


class Slow(nn.Module):
    """A linear layer; on a GPU its result comes late."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1024, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda:
            torch.cuda._sleep(5_000_000)
        return torch.tanh(self.linear(x))


@pytest.mark.in_pairs
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("devices", [["cuda:0", "cpu"], ["cpu", "cuda:0"], ["cuda:0", "cpu", "cuda:0", "cpu"]])
@pytest.mark.parametrize("where", ["cpu", "cuda:0"])
def test_cpu_and_gpu_devices_have_the_bits_of_a_plain_loop_over_both(
    devices: list[str], schedule: str, where: str
) -> None:
    """What a GPU had made was copied into memory of the host that nobody waited for, and read before it was there."""
    model = nn.Sequential(*(Slow() for _ in devices))
    plain = [copy.deepcopy(layer).to(device) for layer, device in zip(model, devices, strict=True)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with Pipeline(
            model, devices=devices, microbatches=4, loss=F.mse_loss, schedule=schedule, intra_op_threads=1
        ) as pipe:
            for _ in range(3):
                torch.cuda._sleep(5_000_000)
                x, y = torch.randn(64, 1024, device=where), torch.randn(64, 1024, device=where)
                found = pipe.step(x, y)
                total = torch.zeros((), device=devices[-1])
                for hidden, target in zip(x.tensor_split(4), y.tensor_split(4), strict=True):
                    for layer, device in zip(plain, devices, strict=True):
                        hidden = layer(hidden.to(device))
                    loss = F.mse_loss(hidden, target.to(devices[-1]))
                    (loss * 0.25).backward()
                    total = total + loss.detach() * 0.25
                assert found.loss is not None
                assert torch.equal(found.loss, total)
    finally:
        torch.set_num_threads(threads)
    for layer, theirs in zip(model, plain, strict=True):
        for ours, expected in zip(layer.parameters(), theirs.parameters(), strict=True):
            assert ours.grad is not None
            assert expected.grad is not None
            assert torch.equal(ours.grad, expected.grad)


def test_a_pinned_batch_may_be_overwritten_as_soon_as_the_step_has_returned() -> None:
    """It was still on its way to the GPU then."""
    model = small_gpt()
    reference = copy.deepcopy(model)
    x, y = torch.randint(0, 61, (8, 32)).pin_memory(), torch.randint(0, 61, (8, 32)).pin_memory()
    expected = plain_step(reference, x.cuda(), y.cuda(), loss=tokens_loss, microbatches=4)
    with Pipeline(model, devices=["cuda:0"] * 2, microbatches=4, loss=tokens_loss) as pipe:
        torch.cuda._sleep(1_000_000_000)
        result = pipe.step(x, y)
        x.zero_()
        y.zero_()
    assert result.loss is not None
    assert torch.equal(result.loss, expected.loss)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
def test_many_copies_between_gpus_make_no_more_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch has 32 streams of a GPU, and hands them out in turn: one for every copy was soon that of a device."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    x, y = torch.randn(8, 16), torch.randn(8, 16)
    with Pipeline(model, devices=["cuda:0", "cuda:1"], microbatches=8, loss=F.mse_loss) as pipe:
        pipe.step(x, y)
        monkeypatch.setattr(torch.cuda, "Stream", None)
        pipe.step(x, y)


def test_a_measured_timeline_of_streams_has_every_action() -> None:
    x = torch.randint(0, 61, (8, 32), device="cuda")
    devices = ["cuda:0"] * 2
    with Pipeline(small_gpt(), devices=devices, microbatches=4, loss=tokens_loss, timeline=True) as pipe:
        timeline = pipe.step(x, x).timeline
    assert timeline is not None
    assert [len(row) for row in timeline.starts] == [len(row) for row in timeline.schedule.rows]
    assert timeline.makespan > 0


def test_memory_is_flat_over_many_steps() -> None:
    x = torch.randint(0, 61, (8, 32), device="cuda")
    with Pipeline(small_gpt(), devices=["cuda:0"] * 2, microbatches=4, loss=tokens_loss, schedule="zb-h1") as pipe:
        for _ in range(8):  # graphs are captured in the fourth
            pipe.step(x, x)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(30):
            pipe.step(x, x)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= before + 1024


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_parameters_shared_by_streams_of_one_gpu_add_up_as_in_the_plain_loop(schedule: str) -> None:
    """The node that adds to a shared parameter once told one stage's backward from another's, and told wrong."""

    class Block(nn.Module):
        def __init__(self, norm: nn.Module) -> None:
            super().__init__()
            self.norm, self.linear = norm, nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.linear(self.norm(x)))

    torch.manual_seed(0)
    norm = nn.LayerNorm(32)
    model = nn.Sequential(*(Block(norm) for _ in range(4))).cuda()
    x, y = torch.randn(8, 16, 32, device="cuda"), torch.randn(8, 16, 32, device="cuda")
    options: dict[str, Any] = {"devices": ["cuda:0"] * 2, "microbatches": 4, "schedule": schedule, "partition": [2, 2]}
    assert_same_training(model, x, y, F.mse_loss, **options)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("graphs", [False, True])
def test_offloaded_activations_have_the_bits_of_the_plain_loop(schedule: str, graphs: bool) -> None:
    tokens = torch.randint(0, 61, (16, 32), device="cuda")
    options: dict[str, Any] = {"devices": ["cuda:0"] * 3, "microbatches": 8, "offload": "activations"}
    assert_same_training(small_gpt(), tokens, tokens, tokens_loss, steps=4, schedule=schedule, graphs=graphs, **options)


GPU = torch.device("cuda", 0)


def test_what_is_offloaded_is_free_for_what_comes_next() -> None:
    """However far the host is ahead: torch's own count takes it for free as soon as a copy is queued."""
    x = torch.randn(8 * 4096, 512, device=GPU)  # 8 MiB of each microbatch, and as much after each of 16 layers

    def peak(offload: Any) -> int:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(8))).to(GPU)
        options: dict[str, Any] = {"devices": [GPU], "schedule": "gpipe", "microbatches": 8, "graphs": False}
        with Pipeline(model, loss=lambda out, _: out.mean(), offload=offload, **options) as pipe:
            for _ in range(2):
                pipe.step(x, x)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            start, _ = in_use(GPU)
            pipe.step(x, x)
            torch.cuda.synchronize()
            return in_use(GPU)[1] - start

    assert peak("activations") < 0.6 * peak("none")


def test_an_offloaded_optimizer_holds_two_pieces() -> None:
    parameters = [nn.Parameter(torch.zeros(2**20, device=GPU)) for _ in range(64)]
    optimizer = offload_optimizer(torch.optim.AdamW(parameters), piece=2**24)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start, _ = in_use(GPU)
    optimizer.step()
    assert in_use(GPU)[1] - start < 5 * 2**25  # a piece has twice as much of state, and the step needs some itself


def test_an_offloaded_optimizer_has_the_bits_of_the_optimizer_on_the_gpu() -> None:
    ours, plain = small_gpt(), small_gpt()
    mine = offload_optimizer(torch.optim.AdamW(ours.parameters(), fused=True), piece=50_000)
    theirs = torch.optim.AdamW(plain.parameters(), fused=True)
    for step in range(3):
        for model, optimizer in ((ours, mine), (plain, theirs)):
            torch.manual_seed(step)
            tokens = torch.randint(0, 61, (4, 32), device="cuda")
            tokens_loss(model(tokens), tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(state["exp_avg"].is_cpu for state in mine.state.values())
    for (name, a), b in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize(
    ("schedule", "remat"), [("1f1b", "none"), ("1f1b", "stage"), ("zb-h2", "layer"), ("zb-v", "none")]
)
def test_steps_that_do_not_wait_have_the_bits_of_a_plain_loop(schedule: str, remat: Any, graphs: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6))).cuda()
    plain, batches = copy.deepcopy(model), [torch.randn(2, 12, 16, device="cuda") for _ in range(20)]
    ours, theirs = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, plain))
    losses, norms = [], []
    for x, y in batches:
        theirs.zero_grad()
        parts = []
        for part, target in zip(x.split(2), y.split(2), strict=True):
            parts.append(F.mse_loss(plain(part), target) * (1 / 6))
            parts[-1].backward()
        losses.append(sum(parts[1:], parts[0]).detach())
        norms.append(nn.utils.clip_grad_norm_(plain.parameters(), 0.25))
        theirs.step()
    assert 0 < sum(float(norm) > 0.25 for norm in norms) < len(norms)  # some are clipped
    options: dict[str, Any] = {"devices": ["cuda:0"] * 3, "microbatches": 6, "schedule": schedule, "remat": remat}
    with Pipeline(model, loss=F.mse_loss, graphs=graphs, **options) as pipe:
        training = pipe.training(ours, max_norm=0.25)
        results = [training.step(x, y) for x, y in batches]
        read = [(result.loss, result.norm) for result in results]
        assert not graphs or "no graphs" not in repr(pipe), repr(pipe)
    assert read == list(zip(losses, norms, strict=True))
    for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(found, expected), name
