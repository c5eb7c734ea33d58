"""What goes into a checkpoint and comes back, and what is refused."""

import json
import math
import os
import random
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapless
from gapless.checkpoint.manifest import NAME, VERSION, Manifest, read_manifest
from gapless.errors import CheckpointError
from tests.pipelines import Own

FIXTURE = Path(__file__).parent / "format-1"


def model(width: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, width, bias=False))


def pipeline(made: nn.Module | None = None, **options: Any) -> gapless.Pipeline:
    given = {"devices": 2, "microbatches": 1, "loss": F.mse_loss, **options}
    return gapless.Pipeline(model() if made is None else made, **given)


def sgd(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, **options)


def step(pipe: gapless.Pipeline, optimizer: Any) -> None:
    torch.manual_seed(pipe.steps)
    batch = torch.randn(4, 4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = pipe.step(batch, -batch).loss
        assert loss is not None
        return loss

    optimizer.step(closure)


def state(pipe: gapless.Pipeline, optimizer: Any) -> dict[str, Any]:
    found = {name: value.clone() for name, value in pipe.state_dict().items()}
    return {**found, "optimizer": json.dumps(optimizer.state_dict(), default=lambda value: value.tolist())}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name, value in one.items():
        equal = torch.equal(value, other[name]) if isinstance(value, Tensor) else value == other[name]
        assert equal, (name, value, other[name])


class Nested(torch.optim.Optimizer):
    """Keeps, for each parameter, trees of tensors of a type that is not the parameter's, and a word."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "betas": (0.5, 0.25)})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure()
        for group in self.param_groups:
            for each in group["params"]:
                kept = self.state[each]
                if not kept:
                    kept.update(sums={"all": torch.zeros(each.shape, dtype=torch.float64)}, pair=[0, None], word="on")
                kept["sums"]["all"] += each.grad.double() * group["betas"][0]
                kept["pair"][0] += 1
                each.data.sub_(kept["sums"]["all"] * group["lr"])


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    name: getattr(torch.optim, name)
    for name in re.findall(
        r"\w+", "ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax LBFGS NAdam RAdam RMSprop Rprop SGD"
    )
}
OPTIMIZERS |= {
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, amsgrad=True),
    "lr is a tensor": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.01)),
    "named": lambda parameters: sgd([(f"p{number}", each) for number, each in enumerate(parameters)]),
    "a user's": Nested,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_goes_on_with_the_same_bits(name: str, tmp_path: Path) -> None:
    with pipeline() as pipe, pipeline(devices=1) as other:
        optimizer, fresh = (OPTIMIZERS[name](each.parameters()) for each in (pipe, other))
        for _ in range(2):
            step(pipe, optimizer)
        pipe.save(tmp_path / "a", optimizer)
        other.load(tmp_path / "a", fresh)
        assert_same(state(pipe, optimizer), state(other, fresh))
        for each, own in ((pipe, optimizer), (other, fresh)):
            step(each, own)
        assert_same(state(pipe, optimizer), state(other, fresh))


def test_moments_in_another_type_than_the_weights_stay_in_it(tmp_path: Path) -> None:
    with pipeline(model().bfloat16()[:1], devices=1) as pipe, pipeline(model().bfloat16()[:1], devices=1) as other:
        optimizer, fresh = (torch.optim.Adam(each.parameters()) for each in (pipe, other))
        for each in pipe.parameters():
            moments = torch.full(each.shape, 1 / 3)
            optimizer.state[each] = {"step": torch.tensor(3.0), "exp_avg": moments, "exp_avg_sq": moments.clone()}
        pipe.save(tmp_path / "a", optimizer)
        other.load(tmp_path / "a", fresh)
        kept = fresh.state[next(other.parameters())]
        assert (kept["exp_avg"].dtype, kept["step"].shape) == (torch.float32, ())
        assert torch.equal(kept["exp_avg"], torch.full((4, 4), 1 / 3))


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "milestones": lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5], 0.5),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, 10),
    "plateau": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
    "one after another": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 2),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8),
        ],
        [2],
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_go_on_where_they_were(name: str, tmp_path: Path) -> None:
    def rates(optimizer: Any, scheduler: Any, count: int) -> list[float]:
        found = []
        for _ in range(count):
            optimizer.step()
            scheduler.step(*([1.0] if name == "plateau" else []))
            found.append(optimizer.param_groups[0]["lr"])
        return found

    with pipeline() as pipe:
        optimizer = sgd(pipe.parameters())
        scheduler = SCHEDULERS[name](optimizer)
        rates(optimizer, scheduler, 3)
        pipe.save(tmp_path / "a", optimizer, scheduler)
        expected = rates(optimizer, scheduler, 5)
        fresh = sgd(pipe.parameters())
        again = SCHEDULERS[name](fresh)
        pipe.load(tmp_path / "a", fresh, again)
        assert rates(fresh, again, 5) == expected


def test_what_a_user_adds_comes_back_as_it_was(tmp_path: Path) -> None:
    extra = {
        "position": 12,
        "floats": [0.1, math.inf, -math.inf, 1e-320],
        "pair": (1, (2.5, None, True)),
        3: {"$tensor": "not one", (1, "a"): []},
        "": OrderedDict(tensor=torch.arange(6).view(2, 3)[:, 1:], empty=torch.empty(0, 3), scalar=torch.tensor(True)),
        "half": torch.tensor([1.0, math.nan], dtype=torch.bfloat16),
    }
    with pipeline() as pipe:
        pipe.save(tmp_path / "a", sgd(pipe.parameters()), extra=extra)
        found = pipe.load(tmp_path / "a", sgd(pipe.parameters()))
    of_found, of_extra = found.pop(""), extra.pop("")
    half = found.pop("half")
    assert half.dtype == torch.bfloat16
    assert torch.equal(half.view(torch.int16), extra.pop("half").view(torch.int16))  # type: ignore[attr-defined]
    assert found == extra
    assert all(torch.equal(of_found[key], value) for key, value in of_extra.items())  # type: ignore[attr-defined]
    assert {key: value.shape for key, value in of_found.items()} == {
        "tensor": (2, 2),
        "empty": (0, 3),
        "scalar": (),
    }


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")

    def draws() -> list[float]:
        return [torch.rand(1).item(), random.random(), float(numpy.random.rand()), torch.randn(3).sum().item()]

    with pipeline() as pipe:
        pipe.save(tmp_path / "a", None)
        expected = draws()
        pipe.load(tmp_path / "a")
        assert draws() == expected


def weighted() -> Any:
    """A loss that learns."""
    scale = nn.Parameter(torch.ones(2))
    return Own(lambda loss, outputs, target: F.mse_loss(outputs, target) * loss.scale.sum(), scale=scale)


def test_the_weights_of_a_loss_and_buffers_are_saved_and_shared_weights_once(tmp_path: Path) -> None:
    def tied() -> nn.Sequential:
        made = model()
        made.append(nn.Linear(4, 4))
        made[3].weight = made[0].weight
        return made

    with pipeline(tied(), loss=weighted()) as pipe, pipeline(tied(), loss=(loss := weighted())) as other:
        own = pipe._options.loss
        assert isinstance(own, nn.Module)
        optimizer = sgd([*pipe.parameters(), *own.parameters()])
        step(pipe, optimizer)
        pipe.save(tmp_path / "a", optimizer)
        other.load(tmp_path / "a", fresh := sgd([*other.parameters(), *loss.parameters()]))
        assert torch.equal(loss.scale, own.state_dict()["scale"])
        assert_same(state(pipe, optimizer), state(other, fresh))
        module = other.module()
        assert isinstance(module, nn.Sequential)
        assert module[3].weight is module[0].weight
    names = set(read_manifest(tmp_path / "a").tensors)
    assert {"model.0.weight", "model.1.running_mean", "loss.scale", "optim.state.loss: scale.momentum_buffer"} <= names
    assert "model.3.weight" not in names


def test_torchs_distributed_checkpoint_reads_the_files(tmp_path: Path) -> None:
    checkpoint = pytest.importorskip("torch.distributed.checkpoint")
    with pipeline() as pipe:
        optimizer = torch.optim.Adam(pipe.parameters())
        step(pipe, optimizer)
        pipe.save(tmp_path / "a", optimizer)
        weight = pipe.state_dict()["0.weight"]
        moment = optimizer.state[next(pipe.parameters())]["exp_avg"]
        wanted = {"model.0.weight": torch.empty(4, 4), "optim.state.0.weight.exp_avg": torch.empty(4, 4)}
        reader = checkpoint.HuggingFaceStorageReader(str(tmp_path / "a"))
        checkpoint.load(wanted, storage_reader=reader, no_dist=True)
        assert torch.equal(wanted["model.0.weight"], weight)
        assert torch.equal(wanted["optim.state.0.weight.exp_avg"], moment)


def test_a_checkpoint_of_the_first_format_is_read_for_ever() -> None:
    """It was made by `_make_fixture` below, when that was the newest format."""
    with pipeline(devices=1, seed=5) as pipe:
        optimizer = sgd(pipe.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        assert pipe.load(FIXTURE, optimizer, scheduler) == {"made": (1, "by hand"), "tensor": torch.tensor(7)}
        assert pipe.steps == 2
        expected = json.loads((FIXTURE.parent / "format-1.json").read_text())
        found = {name: value.flatten().tolist() for name, value in pipe.state_dict().items()}
        kept = [optimizer.state[each]["momentum_buffer"].flatten().tolist() for each in pipe.parameters()]
        assert {"model": found, "momentum": kept, "lr": optimizer.param_groups[0]["lr"]} == expected


def _make_fixture() -> None:
    shutil.rmtree(FIXTURE, ignore_errors=True)
    with pipeline(seed=5) as pipe:
        optimizer = sgd(pipe.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for _ in range(2):
            step(pipe, optimizer)
            scheduler.step()
        pipe.save(FIXTURE, optimizer, scheduler, {"made": (1, "by hand"), "tensor": torch.tensor(7)})
        found = {name: value.flatten().tolist() for name, value in pipe.state_dict().items()}
        kept = [optimizer.state[each]["momentum_buffer"].flatten().tolist() for each in pipe.parameters()]
        whole = {"model": found, "momentum": kept, "lr": optimizer.param_groups[0]["lr"]}
        (FIXTURE.parent / "format-1.json").write_text(json.dumps(whole))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "a"
    with pipeline() as pipe:
        optimizer = sgd(pipe.parameters())
        step(pipe, optimizer)
        pipe.save(folder, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1))
    return folder


def of_scheduler(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


@pytest.mark.parametrize(
    ("options", "make", "schedule", "words"),
    [
        ({"seed": 3}, sgd, of_scheduler, "was trained with seed=0, and this pipeline has seed=3"),
        ({"made": model()[:2]}, sgd, of_scheduler, "it has 2.weight, which the model has not"),
        (
            {"made": nn.Sequential(*model(), nn.Linear(4, 4))},
            sgd,
            of_scheduler,
            "it has no 3.weight, 3.bias; make the model as it was",
        ),
        (
            {"made": model().double()},
            sgd,
            of_scheduler,
            r"its 0.weight is F32 \(4, 4\), and the model's is F64 \(4, 4\)",
        ),
        ({"made": model(5)}, sgd, of_scheduler, r"F32 \(5, 5\)"),
        ({}, torch.optim.Adam, of_scheduler, "has the state of SGD, but this optimizer is Adam: make SGD, or load"),
        ({}, sgd, lambda _: None, "has StepLR scheduler, and load got none: pass scheduler="),
        (
            {},
            sgd,
            lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
            "has StepLR scheduler, and load got ExponentialLR: make StepLR",
        ),
        (
            {},
            lambda parameters: sgd([{"params": [each]} for each in parameters]),
            of_scheduler,
            "an optimizer with 1 groups of parameters, and this one has 5: make the same groups",
        ),
        (
            {},
            lambda parameters: sgd(list(parameters)[1:]),
            of_scheduler,
            "has 0.weight in group 0 of its optimizer, and this one does not: make the same groups",
        ),
        (
            {},
            lambda _: sgd([nn.Parameter(torch.ones(3))]),
            of_scheduler,
            r"a parameter of shape \(3,\) that is neither",
        ),
    ],
)
def test_a_checkpoint_of_something_else_is_refused_and_nothing_changes(
    options: dict[str, Any], make: Any, schedule: Any, words: str, checkpoint: Path
) -> None:
    with pipeline(**options) as pipe:
        optimizer = make(pipe.parameters())
        before = {name: value.clone() for name, value in pipe.state_dict().items()}
        with pytest.raises(CheckpointError, match=words):
            pipe.load(checkpoint, optimizer, schedule(optimizer))
        assert_same(before, pipe.state_dict())
        assert (pipe.steps, dict(optimizer.state)) == (0, {})


class Thing:
    """Nothing that a checkpoint can hold."""


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"a": [{"b": Thing()}]}, "extra.a.0.b is a Thing, and a checkpoint holds only tensors, numbers"),
        ({"when": {1, 2}}, "extra.when is a set"),
        ({"of": torch.float32}, "extra.of is a dtype"),
        ({"f": print}, "extra.f is a builtin_function_or_method"),
        ({torch.ones(1): 1}, "extra has a tensor as a key"),
        ({"t": torch.ones(2).to_sparse()}, "extra.t is torch.float32, torch.sparse_coo, which safetensors"),
        ({"t": torch.ones(2, dtype=torch.complex128)}, "extra.t is torch.complex128"),
        ({"t": torch.ones(2, device="meta")}, "extra.t has no data"),
    ],
)
def test_what_no_checkpoint_can_hold_is_refused_by_its_place(extra: Any, words: str, tmp_path: Path) -> None:
    with pipeline() as pipe, pytest.raises(CheckpointError, match=words):
        pipe.save(tmp_path / "a", None, extra=extra)
    assert os.listdir(tmp_path) == []


def test_a_checkpoint_is_replaced_in_one_step_and_nothing_else_ever_is(tmp_path: Path) -> None:
    with pipeline() as pipe:
        optimizer = sgd(pipe.parameters())
        pipe.save(tmp_path / "a", optimizer)
        step(pipe, optimizer)
        pipe.save(tmp_path / "a", optimizer)
        assert read_manifest(tmp_path / "a").step == 1
        assert os.listdir(tmp_path) == ["a"]
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "thesis.tex").touch()
        (tmp_path / "file").touch()
        (tmp_path / "link").symlink_to("a")
        for name, words in {"mine": "has other files in it", "file": "is a file", "link": "is a link"}.items():
            with pytest.raises(CheckpointError, match=words):
                pipe.save(tmp_path / name, optimizer)
        with pytest.raises(CheckpointError, match="is not a valid name for a folder"):
            pipe.save("/", optimizer)
        pipe.save(tmp_path / "new" / "deep" / ".." / "b", optimizer)
        assert (tmp_path / "new" / "b" / NAME).is_file()


def test_links_out_of_a_checkpoint_are_never_followed(tmp_path: Path, checkpoint: Path) -> None:
    inside = tmp_path / "run"
    shutil.copytree(checkpoint, inside / "a")
    (inside / "latest").symlink_to("a")
    (inside / "out").symlink_to(checkpoint)
    shutil.copytree(checkpoint, inside / "b")
    (file,) = (inside / "b").glob("*.safetensors")
    file.unlink()
    file.symlink_to(next(checkpoint.glob("*.safetensors")))
    with pipeline() as pipe:
        pipe.load(inside / "latest")
        with pytest.raises(CheckpointError, match="out is a link out of its folder"):
            pipe.load(inside / "out")
        with pytest.raises(CheckpointError, match=r"b/shard-00001.*can't be read: Too many levels of symbolic links"):
            pipe.load(inside / "b")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda made: Manifest(made.facts, made.trees, made.tensors, made.files, VERSION + 1), "use a newer gapless"),
        (lambda made: Manifest({**made.facts, "step": -1}, made.trees, made.tensors, made.files), "step -1"),
        (lambda made: Manifest(made.facts, made.trees, {}, made.files), "bytes that belong to nothing"),
        (
            lambda made: Manifest(
                made.facts, made.trees, made.tensors, {f"../a/{name}": each for name, each in made.files.items()}
            ),
            "can't be understood",
        ),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(
    change: Callable[[Manifest], Manifest], words: str, tmp_path: Path, checkpoint: Path
) -> None:
    shutil.copytree(checkpoint, tmp_path / "a")
    (tmp_path / "a" / NAME).write_bytes(change(read_manifest(checkpoint)).text())
    with pipeline() as pipe, pytest.raises(CheckpointError, match=words):
        pipe.load(tmp_path / "a")


if __name__ == "__main__":
    _make_fixture()
