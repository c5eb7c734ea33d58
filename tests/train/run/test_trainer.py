"""Training from a config gives the losses of the plain loop, bit for bit, with a plan or without."""

import re
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import gapless
from gapless.errors import ConfigError
from gapless.plan.profile.machine import Mesh
from gapless.plan.search.search_options import SearchOptions
from gapless.train.config.config import Config, read_config
from gapless.train.data.feed import make_feeds
from gapless.train.job import build
from gapless.train.run.trainer import NotFiniteError, Trainer
from gapless.train.run.training import make_trainer
from tests.train.configs import GPT, Kept, trained, write


def plain_losses(config: Config, microbatches: int) -> list[float]:
    """The loop anybody would write."""
    job = build(config)
    assert isinstance(job.model, torch.nn.Module)
    optimizer = torch.optim.AdamW(job.model.parameters(), lr=0.01)
    losses = []
    for step, (inputs, target) in enumerate(islice(make_feeds(config, {})[0], config.train.steps)):
        found = gapless.plain_step(
            job.model,
            inputs,
            target,
            microbatches=microbatches,
            loss=F.cross_entropy,
            seed=config.train.seed,
            step=step,
        )
        torch.nn.utils.clip_grad_norm_(job.model.parameters(), config.train.clip or 0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(found.loss))
    return losses


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return read_config(write(tmp_path))


def test_the_losses_are_those_of_the_plain_loop(config: Config) -> None:
    losses = [step.loss for step in trained(config)]
    assert losses == plain_losses(config, 4)
    assert len(set(losses)) == 6


def test_the_losses_with_a_plan_are_those_of_the_plain_loop(config: Config) -> None:
    asked = config.changed(plan="auto", microbatches=3, schedule="1f1b")
    found = build(asked).planned(seconds=0.01)
    assert (found.profile.name, found.profile.minibatch) == ("mine.py:make", 6)
    assert found.profile.host is None
    host = build(asked.changed(offload="activations")).planned(seconds=0.01).profile.host
    assert host is not None  # it was measured, since the plan may offload
    assert {plan.recipe for plan in found.found.plans} == {"1f1b"}
    assert [step.loss for step in trained(asked, found.found.best)] == plain_losses(config, 3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_plan_is_made_and_trained_with_on_a_gpu(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, ('["cpu", "cpu"]', '["cuda:0", "cuda:0"]')))
    asked = config.changed(plan="auto", microbatches=4, schedule="zb-h1")
    plan = build(asked).planned(seconds=0.01, memory="1GiB").found.best
    assert [step.loss for step in trained(asked, plan)] == [step.loss for step in trained(config)]


def test_a_step_says_what_it_took(config: Config) -> None:
    steps = trained(config)
    assert [step.number for step in steps] == [1, 2, 3, 4, 5, 6]
    assert all(step.samples == 6 and step.seconds > step.updated > 0 and step.waited > 0 for step in steps)
    assert all(step.tokens is None and step.norm and step.rate == 0.01 for step in steps)


def test_samples_of_a_loader_that_mean_something_else_are_not_taken_for_its_size() -> None:
    class Loader(list[tuple[torch.Tensor, torch.Tensor]]):
        samples = ("cat.png", "dog.png")

    kept = Kept()
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    with gapless.Pipeline([torch.nn.Linear(3, 3), torch.nn.Tanh()], devices=2, microbatches=2, loss=F.mse_loss) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        Trainer(pipe, optimizer, Loader([(x, y)] * 2), steps=1, accumulate=2, callbacks=[kept]).run()
    assert [step.samples for step in kept.steps] == [8]


def test_the_seed_decides_the_weights(config: Config) -> None:
    one, again = (next(build(config).model.parameters()) for _ in range(2))  # type: ignore[union-attr]
    assert torch.equal(one, again)


def test_a_gpt_learns_the_source_of_python(tmp_path: Path) -> None:
    text = GPT + "\n[train]\nsteps = 12\n[optimizer]\nname = 'AdamW'\narguments = { lr = 0.03 }\n"
    steps = trained(read_config(write(tmp_path, text=text)))
    assert steps[-1].loss < steps[0].loss - 0.5


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_may_have_arguments_and_may_be_a_sum(tmp_path: Path, reduction: str) -> None:
    name, arguments = 'name = "cross_entropy"', f"arguments = {{ reduction = '{reduction}' }}"
    job = build(read_config(write(tmp_path, (name, f"{name}\n{arguments}"), ("dropout = 0.25", "dropout = 0.0"))))
    assert isinstance(job.model, torch.nn.Module)
    inputs, target = job.first
    with job.pipeline(None) as pipe:
        loss = pipe.step(inputs, target).loss
    torch.testing.assert_close(loss, F.cross_entropy(job.model(inputs), target, reduction=reduction).detach())


def test_targets_that_are_left_out_do_not_count(tmp_path: Path) -> None:
    job = build(read_config(write(tmp_path, ("dropout = 0.25", "dropout = 0.0"))))
    assert isinstance(job.model, torch.nn.Module)
    inputs, target = job.first
    target = torch.where(torch.tensor([False, True, False, False, True, False]), -100, target)
    with job.pipeline(None) as pipe:  # microbatches of 2, 2, 1 and 1
        loss = pipe.step(inputs[[0, 1, 2, 4, 3, 5]], target[[0, 1, 2, 4, 3, 5]]).loss
    torch.testing.assert_close(loss, F.cross_entropy(job.model(inputs), target).detach())


NAN_LOSS = [("cross_entropy", "mine.py:no_number")]
NAN_GRADIENTS = [("cross_entropy", "mine.py:steep"), ("clip = 0.5\n", "")]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (NAN_LOSS, "the loss of step 1 is nan, in microbatch 0 of 4: a smaller"),
        (NAN_GRADIENTS, "the gradients of step 1 have norm nan"),
    ],
)
def test_what_is_not_finite_ends_it_before_the_weights_change(
    tmp_path: Path, changes: list[tuple[str, str]], told: str
) -> None:
    job = build(read_config(write(tmp_path, *changes)))
    assert isinstance(job.model, torch.nn.Module)
    before = [parameter.clone() for parameter in job.model.parameters()]
    with job.pipeline(None) as pipe, pytest.raises(NotFiniteError, match=told):
        make_trainer(job.config, job, pipe).run()
    assert all(torch.equal(a, b) for a, b in zip(before, job.model.parameters(), strict=True))


def test_an_error_in_the_model_is_told_with_the_step_and_the_shapes(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, ("depth = 5,", "depth = 5, width = 4,")))
    with pytest.raises(ConfigError) as error:
        trained(config)
    assert re.fullmatch(  # some versions of torch name the operator first
        r"step 1 with inputs that are a tensor of shape \(6, 8\) and a target that is a tensor of shape \(6,\) failed "
        r"with RuntimeError: (addmm: )?mat1 and mat2 shapes cannot be multiplied \(2x8 and 4x4\) "
        r"\(on device 0 \(cpu\), stage 0, action 0F0\)",
        str(error.value),
    )
    assert isinstance(error.value.__cause__, RuntimeError)
    with pytest.raises(ConfigError, match=r"measuring the model with inputs .* failed with RuntimeError"):
        build(config).planned(seconds=0.01)


def test_an_optimizer_that_fails_is_told_with_the_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        trained(read_config(write(tmp_path, ("AdamW", "torch.optim:SparseAdam"))))
    assert str(error.value) == (
        "the update of step 1 with SparseAdam failed with RuntimeError: SparseAdam does not support dense gradients, "
        "please consider Adam instead"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            [(":make", ":failing"), ("depth = 5, dropout = 0.25", "")],
            "model: mine.py:failing failed with ValueError: far too wide, at mine.py, line 23, in failing",
        ),
        (
            [(":make", ":number"), ("depth = 5, dropout = 0.25", "")],
            "model: mine.py:number returned 3, but it must return a module or a list of layers",
        ),
        (
            [("depth = 5", "dept = 5")],
            "model.arguments has 'dept', which mine.py:make does not take; did you mean depth?",
        ),
        ([("lr = 0.01", "lr = -1")], "optimizer: AdamW failed with ValueError: Invalid learning rate: -1"),
        (
            [("lr = 0.01", "momentum = 1")],
            "optimizer.arguments has 'momentum', which AdamW does not take; it takes lr, betas, eps,",
        ),
        (
            [("AdamW", "mine.py:number"), ("lr = 0.01", "")],
            "optimizer.arguments do not fit mine.py:number: too many positional arguments",
        ),
        ([('["cpu", "cpu"]', '["cuda:77"]')], "device cuda:77 does not exist: this machine has"),
        ([('["cpu", "cpu"]', '["cuda:256"]')], "device cuda:256 does not exist: this machine has"),
        (
            [("microbatches = 4", "")],
            "pipeline.microbatches is missing: set the number of parts that a minibatch is cut into, such as",
        ),
        (
            [("microbatches = 4", "microbatches = 40")],
            "a minibatch of 6 samples can't be cut into 40 microbatches: use fewer",
        ),
        (
            [("microbatches = 4", "microbatches = 4\npartition = [1, 1]")],
            "partition [1, 1] has 2 stages and 2 layers, but the schedule has 2 stages and the model 6",
        ),
    ],
)
def test_what_can_t_be_built_is_said(tmp_path: Path, changes: list[tuple[str, str]], message: str) -> None:
    with pytest.raises(gapless.GaplessError) as error:
        build(read_config(write(tmp_path, *changes))).pipeline(None)
    assert str(error.value).startswith(message)


def test_a_plan_from_a_file_must_be_for_this(tmp_path: Path, config: Config) -> None:
    job = build(config.changed(plan="auto", microbatches=3, schedule="1f1b"))
    plan = job.planned(wanted=SearchOptions(mesh=Mesh(1, 2)), seconds=0.01).found.best
    plan.write(tmp_path / "plan.json")
    asked = config.changed(plan="plan.json")
    assert build(asked).plan() == plan
    for other, message in (
        (
            asked.changed(minibatch=9),
            "the plan plan.json is for a minibatch of 6, but data.minibatch is 9: make a plan",
        ),
        (asked.changed(schedule="zb-h1"), "schedule is zb-h1, but the plan plan.json has 1f1b: leave it out"),
        (asked.changed(microbatches=2), "microbatches is 2, but the plan has 3: leave these out"),
        (asked.changed(devices=1), "the plan is for 1 pipeline of 2 devices, but there is 1 pipeline of 1 device"),
        (asked.changed(plan="no.json"), f"there is no file {tmp_path / 'no.json'}"),
    ):
        job = build(other)
        with pytest.raises(ConfigError) as error:
            job.pipeline(job.plan())
        assert str(error.value).startswith(message)
