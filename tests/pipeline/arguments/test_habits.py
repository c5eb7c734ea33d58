"""What people bring along from torch and from other libraries."""

import copy
import inspect
import io
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapless
from gapless.errors import ConfigError, GaplessError, ScheduleError
from tests.pipelines import assert_same_gradients

make: Any = gapless.Pipeline  # as it is called by those who do not know its options


def layers(count: int = 8) -> list[nn.Module]:
    return [nn.Linear(4, 4) for _ in range(count)]


@pytest.fixture
def pipe() -> Any:
    with gapless.Pipeline(layers(), devices=2, loss=F.mse_loss) as made:
        yield made


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("num_microbatches", "use microbatches="),
        ("n_microbatches", "use microbatches="),
        ("chunks", "use microbatches="),
        ("balance", "use partition="),
        ("loss_fn", "use loss="),
        ("device_mesh", "use mesh="),
        ("checkpoint", "use remat="),
        ("microbatchs", r"did you mean microbatches=\?"),
        ("frobnicate", "it has model, devices, mesh"),
    ],
)
def test_an_option_of_another_library_is_answered_with_ours(option: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"Pipeline has no option {option}=: {meant}"):
        make(layers(), devices=2, **{option: 2})


def test_every_option_is_recognised_by_a_slip_of_the_pen() -> None:
    for name in inspect.signature(gapless.Pipeline).parameters:
        if name not in ("model", "seed", "init", "tied", "mesh", "loss"):  # too short, or one letter from another word
            with pytest.raises(ConfigError, match=f"did you mean {name}="):
                make(layers(), **{name[:-2] + name[-1] + name[-2]: 1})


def test_a_stream_answers_too() -> None:
    with (
        gapless.Pipeline(layers(), devices=2, schedule="2bw", loss=F.mse_loss) as pipe,
        pytest.raises(ConfigError, match="stream has no option max_norm="),
    ):
        pipe.stream(max_norm=1.0)  # type: ignore[call-arg]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "auto"])
def test_microbatches_have_a_default_that_fits_any_batch(schedule: str) -> None:
    with gapless.Pipeline(layers(), devices=2, schedule=schedule, loss=F.mse_loss) as pipe:
        assert pipe.microbatches % 2 == 0
        bubble = gapless.simulate(gapless.make_schedule(schedule, devices=2, microbatches=pipe.microbatches)).bubble
        assert bubble < 0.1 or pipe.microbatches == 8 or schedule == "auto"
        assert f"{pipe.microbatches} microbatches" in repr(pipe)
        for size in (3, 16):
            assert len(pipe.step(torch.randn(size, 4), torch.randn(size, 4)).losses) == min(size, pipe.microbatches)


def test_a_schedule_of_ones_own_says_its_microbatches() -> None:
    own = gapless.make_schedule("gpipe", devices=2, microbatches=3)
    with gapless.Pipeline(layers(), devices=2, schedule=own, loss=F.mse_loss) as pipe:
        assert pipe.microbatches == 3


def test_the_loss_of_a_step_has_no_backward(pipe: gapless.Pipeline) -> None:
    loss = pipe.step(torch.randn(8, 4), torch.randn(8, 4)).loss
    assert loss is not None
    with pytest.raises(GaplessError, match=r"step has computed the gradients already, .* leave out loss\.backward"):
        loss.backward()
    file = io.BytesIO()
    torch.save({"loss": loss}, file)
    file.seek(0)
    for again in (torch.load(file, weights_only=True)["loss"], pickle.loads(pickle.dumps(loss)), copy.deepcopy(loss)):
        assert torch.equal(again, loss)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("to", "devices="),
        ("cuda", "devices="),
        ("generate", r"pipe\.module\(\)\.generate"),
        ("push_to_hub", r"save_pretrained\(folder\)"),
        ("forward", r"evaluate\(x\)"),
        ("stepp", r"did you mean step\?"),
        ("nothing_like_it", "has no attribute 'nothing_like_it'$"),
    ],
)
def test_what_a_pipeline_does_not_have_is_told(pipe: gapless.Pipeline, name: str, told: str) -> None:
    assert not hasattr(pipe, name)
    with pytest.raises(AttributeError, match=told):
        getattr(pipe, name)


def test_a_name_or_a_class_is_no_model() -> None:
    with pytest.raises(ConfigError, match=r"model is 'gpt2', a name, .*from_pretrained\('gpt2'\)"):
        make("gpt2", devices=2)
    with pytest.raises(GaplessError, match=r"model is the class Linear, .*: pass Linear\(\.\.\.\)"):
        make(nn.Linear, devices=2)
    with pytest.raises(GaplessError, match=r"model is a builtin_function_or_method, but it must be an nn\.Module or a"):
        make(len, devices=2)


def test_the_name_of_a_schedule_is_no_schedule() -> None:
    for call in (gapless.simulate, gapless.verify):
        with pytest.raises(ScheduleError, match=rf"{call.__name__} takes a Schedule.*make_schedule\('zb-v', devices="):
            call("zb-v")  # type: ignore[arg-type]


def test_fewer_gpus_than_devices_are_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"devices is 4, but this machine has 2 GPUs: .*\['cpu'\] \* 4"):
        gapless.Pipeline(layers(), devices=4)


class Nano(nn.Module):
    """Returns its loss beside its logits, as nanoGPT and older Hugging Face models do."""

    def __init__(self, *, loss_first: bool) -> None:
        super().__init__()
        self.embedding, self.head, self.loss_first = nn.Embedding(11, 8), nn.Linear(8, 11), loss_first

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        logits = self.head(self.embedding(idx).tanh())
        loss = None if targets is None else F.cross_entropy(logits.view(-1, 11), targets.view(-1))
        return (loss, logits) if self.loss_first else (logits, loss)


@pytest.mark.parametrize("loss_first", [True, False])
def test_a_loss_beside_the_logits_is_found_and_a_batch_may_be_keywords(loss_first: bool) -> None:
    model = Nano(loss_first=loss_first)
    plain, x = copy.deepcopy(model), torch.randint(11, (4, 6))
    with gapless.Pipeline(model, devices=2, microbatches=2) as pipe:
        result = pipe.step(idx=x, targets=x)
        total = sum(plain(part, part)[0 if loss_first else 1] / 2 for part in x.chunk(2))
        total.backward()
        assert result.loss is not None
        assert torch.equal(result.loss, total)
        assert_same_gradients(model, plain)
        found = pipe.evaluate(idx=x, targets=x)
        assert found.loss is not None
        assert torch.allclose(found.loss, total)
        with pytest.raises(ConfigError, match=r"a tuple without a loss.*loss=lambda out, y: out\[1\]"):
            pipe.step(x)


def test_a_batch_is_given_once(pipe: gapless.Pipeline) -> None:
    with pytest.raises(ConfigError, match="step has no batch"):
        pipe.step()
    with pytest.raises(ConfigError, match="step has both inputs and labels=: give one batch"):
        pipe.step(torch.randn(8, 4), labels=torch.randn(8, 4))


def test_devices_under_torchrun_are_copies_of_one_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")  # of somebody else's launcher, which may mean it
    gapless.Pipeline(layers(), devices=2, loss=F.mse_loss).close()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.warns(
        UserWarning,
        match=r"started 2 processes, and devices= makes a separate pipeline.*init_device_mesh\('cpu', \(2,\)",
    ):
        gapless.Pipeline(layers(), devices=2, loss=F.mse_loss).close()
    monkeypatch.setenv("WORLD_SIZE", "1")
    gapless.Pipeline(layers(), devices=2, loss=F.mse_loss).close()
