"""What a layer keeps in an attribute is not for others to read: refused with the way out, where it would go wrong."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapless
from gapless.errors import GaplessError
from gapless.stage.guards.stored_tensors import Stored
from gapless.stage.guards.tripwire import Tripwire
from tests.pipelines import Own, assert_same_gradients

WIDTH = 6


class Keeps(nn.Module):
    """As layers with routers are written."""

    def __init__(self, kind: str = "graph") -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(WIDTH, WIDTH), kind
        self.aux: Any = torch.zeros(())
        self.auxs: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.tanh(self.linear(x))
        aux = y.pow(2).mean()
        self.aux = aux if self.kind == "graph" else aux.detach()
        self.auxs = [self.aux]
        return y


def sequence(kind: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Keeps(kind) for _ in range(3)), nn.Linear(WIDTH, WIDTH))


def rows() -> tuple[Tensor, Tensor]:
    return torch.randn(8, WIDTH), torch.randn(8, WIDTH)


@pytest.mark.parametrize("kind", ["graph", "detached"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_loss_that_reads_what_a_layer_of_another_stage_has_stored_is_refused(kind: str, schedule: str) -> None:
    """Detached, it was another microbatch's, without a word; with its graph it failed in the backward."""
    model = sequence(kind)

    def loss(outputs: Tensor, target: Tensor) -> Any:
        kept: Any = sum(part.aux for part in model.modules() if isinstance(part, Keeps))
        return F.mse_loss(outputs, target) + 0.1 * kept

    with (
        gapless.Pipeline(model, devices=2, schedule=schedule, microbatches=4, loss=loss) as pipe,
        pytest.raises(GaplessError, match=r"keeps a tensor in Keeps.aux.*return it from the layer.*gapless.aux_loss"),
    ):
        pipe.step(*rows())


def test_so_is_a_layer_that_reads_it_from_a_list() -> None:
    first = Keeps("detached")
    model = nn.Sequential(
        first,
        nn.Linear(WIDTH, WIDTH),
        Own(lambda layer, x: x * torch.stack(layer.others[0].auxs).sum(), others=[first]),
        nn.Linear(WIDTH, WIDTH),
    )
    with (
        gapless.Pipeline(model, devices=2, partition=[2, 2], microbatches=4, loss=F.mse_loss) as pipe,
        pytest.raises(GaplessError, match=r"keeps a tensor in Keeps.aux"),
    ):
        pipe.step(*rows())


def test_what_is_stored_and_read_in_one_place_is_exact() -> None:
    """The loss and the layer are in the same stage, so it is the microbatch's own."""
    kept = Keeps()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), kept)
    plain = copy.deepcopy(model)
    (x, y), other = rows(), list[Any](plain)[3]
    with gapless.Pipeline(
        model,
        devices=2,
        microbatches=4,
        loss=lambda outputs, target: F.mse_loss(outputs, target) + kept.aux,
        intra_op_threads=torch.get_num_threads(),
    ) as pipe:
        losses = pipe.step(x, y).losses
    for number, (part, goal) in enumerate(zip(x.tensor_split(4), y.tensor_split(4), strict=True)):
        loss = F.mse_loss(plain(part), goal) + other.aux
        assert torch.equal(losses[number], loss)
        (loss * 0.25).backward()
    assert_same_gradients(model, plain)


def test_storing_alone_is_nobodys_business_and_can_be_logged_after_the_step() -> None:
    model = sequence("detached")
    shared = torch.ones(())
    for part in model:
        part.scale = shared  # one tensor, which all layers have
    with gapless.Pipeline(model, devices=2, microbatches=4, loss=lambda a, b: F.mse_loss(a, b) * shared) as pipe:
        pipe.step(*rows())
        assert float(model[0].aux) > 0  # type: ignore[arg-type]


class Net(nn.Module):
    """Traced: its forward runs no more, and stores nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Keeps(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.first(x)) + x


def test_a_loss_that_reads_what_a_traced_model_would_have_stored_is_refused() -> None:
    """It read the zero from the constructor."""
    model = Net()
    before = model.first.aux
    with (
        gapless.Pipeline(
            model, devices=2, microbatches=2, loss=lambda outputs, target: F.mse_loss(outputs, target) + model.first.aux
        ) as pipe,
        pytest.raises(
            GaplessError, match=r"Keeps.aux is set by the forward of a model that was traced.*gapless.aux_loss"
        ),
    ):
        pipe.step(*rows())
    assert model.first.aux is before
    with gapless.Pipeline(model, devices=2, microbatches=2, loss=F.mse_loss) as pipe:
        pipe.step(*rows())


def test_what_is_stored_outside_of_modules_fails_with_a_hint() -> None:
    kept: list[Tensor] = [torch.zeros(())]

    def store(_: Any, __: Any, outputs: Tensor) -> None:
        kept[0] = outputs.pow(2).mean()

    model = sequence("detached")
    model[0].register_forward_hook(store)
    with (
        gapless.Pipeline(
            model, devices=2, microbatches=4, loss=lambda outputs, target: F.mse_loss(outputs, target) + kept[0]
        ) as pipe,
        pytest.raises(RuntimeError, match="second time") as failed,
    ):
        pipe.step(*rows())
    assert "gapless.aux_loss" in failed.value.__notes__[0]


def test_tripwires_of_a_traced_model_are_gone_after_the_step() -> None:
    """Stages on several devices come in any order."""
    module = Keeps()
    before = module.aux
    stored = Stored(never_set=lambda: [(module, "aux"), (module, "never")])
    stored.begin()
    stored.begin()
    assert isinstance(module.aux, Tripwire)
    stored.rest()
    assert module.aux is before
    assert not hasattr(module, "never")


class BeginsLater(nn.Module):
    """Stores from some forward on; a hook may do it for a module of torch's own."""

    def __init__(self, clock: list[int]) -> None:
        super().__init__()
        self.linear, self.clock = nn.Linear(WIDTH, WIDTH), clock
        self.aux: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if self.clock[0] >= 3:
            self.aux = y.detach().square().mean()
        return y


@pytest.mark.parametrize("kind", ["stores later", "reads later", "in place", "by a hook", "in a list", "in a stream"])
def test_storing_or_reading_that_begins_later_is_refused_in_the_step_in_which_it_begins(kind: str) -> None:
    """It was looked at in steps 1, 2, 4, 8 and so on."""
    clock = [0]
    first: Any = {"reads later": Keeps("detached"), "by a hook": nn.Linear(WIDTH, WIDTH)}.get(kind, BeginsLater(clock))
    if kind == "in place":
        first.aux = torch.zeros(())
        first.linear.register_forward_hook(lambda *_: (first.aux.add_(int(clock[0] >= 3)), None)[1])
        first.clock = [0]
    if kind == "by a hook":
        first.register_forward_hook(lambda module, _, y: setattr(module, "aux", y.detach().mean()))
    if kind == "in a list":
        first.clock, first.aux = [0], []
        first.linear.register_forward_hook(lambda _, __, y: first.aux.append(y.detach()) if clock[0] >= 3 else None)

    def loss(outputs: Tensor, target: Tensor) -> Tensor:
        plain = F.mse_loss(outputs, target)
        if clock[0] < 3:
            return plain
        return plain * (torch.stack(first.aux).mean() if kind == "in a list" else first.aux)

    model = [first, nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
    streams = kind == "in a stream"
    with gapless.Pipeline(
        model, devices=2, schedule="pipedream" if streams else "1f1b", microbatches=1 if streams else 4, loss=loss
    ) as pipe:
        if streams:
            stream = pipe.stream(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01))

            def batches() -> Iterator[tuple[Tensor, Tensor]]:
                for clock[0] in range(5):
                    stream.drain()
                    yield rows()

            with pytest.raises(GaplessError, match=r"keeps a tensor in BeginsLater.aux.*gapless.aux_loss"):
                list(stream.run(batches()))
            assert clock[0] == 3
            return
        for clock[0] in range(3):
            pipe.step(*rows())
        clock[0] = 3
        with pytest.raises(GaplessError, match=r"keeps a tensor in \w+.aux.*gapless.aux_loss"):
            pipe.step(*rows())
    assert type(first) in (Keeps, BeginsLater, nn.Linear)
    assert first.aux is not None


def test_a_backward_hook_that_reads_what_the_forward_has_stored_is_refused() -> None:
    """By then other microbatches have stored theirs."""
    first = nn.Linear(WIDTH, WIDTH)
    first.register_forward_pre_hook(lambda module, args: setattr(module, "seen", args[0].detach().mean()))

    def scaled(module: Any, grads: Any, _: Any) -> Any:
        return tuple(grad * module.seen for grad in grads)

    first.register_full_backward_hook(scaled)
    model = [nn.Linear(WIDTH, WIDTH), first, nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
    with (
        gapless.Pipeline(model, devices=2, microbatches=4, loss=F.mse_loss) as pipe,
        pytest.raises(GaplessError, match=r"keeps a tensor in Linear.seen.*a backward reads it"),
    ):
        pipe.step(*rows())
