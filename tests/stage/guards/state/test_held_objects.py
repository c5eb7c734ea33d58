"""Python state that layers of two stages share is refused when it changes: against a loop that shares nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import gapless
from gapless.errors import ConfigError, GaplessError
from tests.run.forked import Launch
from tests.stage.state_loops import Clock, Made, assert_same_as_loop, linear

BEGINS = (0, 3)


class Settings:
    def __init__(self, clock: Clock, begins: int) -> None:
        self.clock, self.begins = clock, begins
        self.temperature, self.history, self.table = 1.0, list[float](), {"t": 1.0}

    @property
    def begun(self) -> bool:
        return self.clock.step >= self.begins


class Layer(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.linear, self.settings = linear(), settings


class Counts(Layer):
    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.settings.begun:
            self.count += 1
        return torch.tanh(self.linear(x) * (1 + 0.1 * self.count))


class Anneals(Layer):
    def forward(self, x: Tensor) -> Tensor:
        if self.settings.begun:
            self.settings.temperature *= 0.9
        return self.linear(x) * self.settings.temperature  # type: ignore[no-any-return]


class Reads(Layer):
    def forward(self, x: Tensor) -> Tensor:
        factor = self.settings.temperature * self.settings.table["t"] + sum(self.settings.history[-2:])
        return torch.tanh(self.linear(x) * factor)


class WritesTable(Layer):
    def forward(self, x: Tensor) -> Tensor:
        if self.settings.begun:
            self.settings.table["t"] = 1 + 0.1 * float(x.mean())
        return self.linear(x)  # type: ignore[no-any-return]


class Appends(Layer):
    def forward(self, x: Tensor) -> Tensor:
        if self.settings.begun:
            self.settings.history.append(float(x.mean()))
        return self.linear(x)  # type: ignore[no-any-return]


class Saves(nn.Module):
    def __init__(self, skips: Any) -> None:
        super().__init__()
        self.linear, self.skips = linear(), skips

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.skips, dict):
            self.skips["h"] = x.detach()
        else:
            self.skips.append(x.detach())
        return self.linear(x)  # type: ignore[no-any-return]


class Restores(Saves):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.skips.pop("h") if isinstance(self.skips, dict) else self.skips.pop()  # type: ignore[no-any-return]


def counter_twice(clock: Clock, begins: int) -> list[Any]:
    counts = Counts(Settings(clock, begins))
    return [counts, linear(), counts, linear()]


def two_layers(writer: type[Layer]) -> Callable[[Clock, int], list[Any]]:
    def make(clock: Clock, begins: int) -> list[Any]:
        settings = Settings(clock, begins)
        return [writer(settings), linear(), Reads(settings), linear()]

    return make


def closure(clock: Clock, begins: int) -> list[Any]:
    first, last, scale = linear(), linear(), 1.0

    def front(x: Tensor) -> Tensor:
        nonlocal scale
        if clock.step >= begins:
            scale *= 0.9
        return first(x)  # type: ignore[no-any-return]

    def back(x: Tensor) -> Tensor:
        return last(x) * scale  # type: ignore[no-any-return]

    return [front, linear(), back, linear()]


def skips(kind: type[Any]) -> Callable[[Clock, int], list[Any]]:
    def make(clock: Clock, begins: int) -> list[Any]:
        shared = kind()
        return [Saves(shared), linear(), Restores(shared), linear()]

    return make


class Model(nn.Module):
    """Whose methods are the layers."""

    def __init__(self, clock: Clock, begins: int) -> None:
        super().__init__()
        self.a, self.b, self.clock, self.begins, self.scale = linear(), linear(), clock, begins, 1.0

    def front(self, x: Tensor) -> Tensor:
        if self.clock.step >= self.begins:
            self.scale = 1 + 0.1 * float(x.mean())
        return self.a(x)  # type: ignore[no-any-return]

    def back(self, x: Tensor) -> Tensor:
        return self.b(x) * self.scale  # type: ignore[no-any-return]


def methods(clock: Clock, begins: int) -> list[Any]:
    model = Model(clock, begins)
    return [model.front, linear(), model.back, linear()]


CASES = {
    "counter": (counter_twice, r"Counts\.count", "layer 0 (Counts) and layer 2 (Counts)"),
    "object": (two_layers(Anneals), r"Anneals\.settings\.temperature", "layer 0 (Anneals) and layer 2 (Reads)"),
    "dict": (two_layers(WritesTable), r"WritesTable\.settings\.table", "layer 0 (WritesTable) and layer 2 (Reads)"),
    "list": (two_layers(Appends), r"Appends\.settings\.history", "layer 0 (Appends) and layer 2 (Reads)"),
    "closure": (closure, "function", "layer 0 (function) and layer 2 (function)"),
    "methods": (methods, r"method\[0\]\.scale", "layer 0 (method) and layer 2 (method)"),
}


@pytest.mark.in_pairs
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("begins", BEGINS)
@pytest.mark.parametrize("case", CASES)
def test_state_of_two_stages_that_changes_is_refused(case: str, begins: int, schedule: str) -> None:
    make, path, layers = CASES[case]
    told: list[Clock] = []

    def made(clock: Clock) -> Made:
        told.append(clock)
        return make(clock, begins), F.mse_loss

    with pytest.raises(ConfigError, match=rf"{path}.* was changed while a step was under way, and layers of") as error:
        assert_same_as_loop(made, schedule=schedule)
    assert layers in str(error.value)
    assert told[-1].step == begins  # in the very step in which it happens


@pytest.mark.parametrize("case", CASES)
def test_in_one_stage_it_may_change(case: str) -> None:
    make, *_ = CASES[case]
    assert_same_as_loop(lambda clock: (make(clock, 1), F.mse_loss), partition=[3, 1])


@pytest.mark.parametrize("kind", [dict, list])
def test_a_skip_connection_past_the_activations_is_refused(kind: type[Any]) -> None:
    with pytest.raises(ConfigError, match=r"Saves\.skips was changed .* layer 0 \(Saves\) and layer 2 \(Restores\)"):
        assert_same_as_loop(lambda clock: (skips(kind)(clock, 0), F.mse_loss), schedule="gpipe")
    assert_same_as_loop(lambda clock: (skips(kind)(clock, 0), F.mse_loss), partition=[3, 1])


@pytest.mark.parametrize("begins", BEGINS)
def test_two_layers_of_a_stage_that_remat_runs_apart_are_refused_too(begins: int) -> None:
    make = lambda clock: (two_layers(Anneals)(clock, begins), F.mse_loss)  # noqa: E731
    with pytest.raises(ConfigError, match=r"two layers that remat='layer' runs again .* use remat='stage'"):
        assert_same_as_loop(make, partition=[3, 1], remat="layer", schedule="gpipe")
    assert_same_as_loop(make, partition=[3, 1], remat="stage", schedule="gpipe")


def test_what_a_program_changes_between_steps_is_seen_by_all_layers() -> None:
    def make(clock: Clock) -> Made:
        settings = Settings(clock, 9)

        class Follows(Reads):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x) * (1 + 0.1 * self.settings.clock.step)

        return [Follows(settings), linear(), Follows(settings), linear()], F.mse_loss

    assert_same_as_loop(make)


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("where", ["attribute", "closure"])
def test_a_list_to_which_layers_only_add_is_a_log(where: str, read: bool) -> None:
    class Logs(nn.Module):
        def __init__(self, log: list[float]) -> None:
            super().__init__()
            self.linear, self.log = linear(), log

        def forward(self, x: Tensor) -> Tensor:
            self.log.append(float(x.detach().mean()))
            return torch.tanh(self.linear(x))

    class LogsAndReads(Logs):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.log[-1]

    def make(clock: Clock) -> Made:
        log: list[float] = []
        kind = LogsAndReads if read else Logs
        if where == "attribute":
            return [kind(log), linear(), kind(log), linear()], F.mse_loss

        def note(x: Tensor) -> Tensor:
            log.append(float(x.detach().mean()))
            return x

        def scale(x: Tensor) -> Tensor:
            return x * log[-1]

        return [note, linear(), scale if read else note, linear()], F.mse_loss

    if read:
        with pytest.raises(ConfigError, match="was changed while a step was under way"):
            assert_same_as_loop(make)
    else:
        assert_same_as_loop(make)


def test_an_equal_number_in_its_place_is_no_change() -> None:
    class Looks(Layer):
        def forward(self, x: Tensor) -> Tensor:
            self.settings.temperature = x.shape[1] * 1000.5
            return torch.tanh(self.linear(x))

    def make(clock: Clock) -> Made:
        settings = Settings(clock, 9)
        settings.temperature = 6003.0
        return [Looks(settings), linear(), Looks(settings), linear()], F.mse_loss

    assert_same_as_loop(make)


@pytest.mark.parametrize("begins", BEGINS)
def test_a_loss_that_reads_a_number_which_a_layer_changes_is_refused(begins: int) -> None:
    def make(clock: Clock) -> Made:
        counts = Counts(Settings(clock, begins))
        return [counts, linear(), linear()], lambda out, y: F.mse_loss(out, y) * (1 + counts.count)

    with pytest.raises(GaplessError, match=r"a layer changes Counts.count, and another stage or the loss reads it"):
        assert_same_as_loop(make)


def test_a_loss_that_holds_all_layers_for_their_weights_does_no_harm() -> None:
    def make(clock: Clock) -> Made:
        layers: list[Any] = [Counts(Settings(clock, 1)), linear(), Counts(Settings(clock, 1)), linear()]

        def loss(out: Tensor, y: Tensor) -> Tensor:
            return F.mse_loss(out, y) + 0.01 * sum((layer.weight.sum() for layer in layers[3:]), torch.zeros(()))

        return layers, loss

    assert_same_as_loop(make, state=lambda layers: [layers[0].count, layers[2].count])


def refused_on_ranks() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    torch.manual_seed(0)
    for case in ("counter", "object", "list"):
        make, path, layers = CASES[case]
        with gapless.Pipeline(make(Clock(), 0), mesh=mesh, schedule="1f1b", microbatches=4, loss=F.mse_loss) as pipe:
            with pytest.raises(GaplessError, match=rf"{path} was changed while a step was under way") as error:
                pipe.step(torch.randn(8, 6), torch.randn(8, 6))
            assert layers in str(error.value)


def test_so_it_is_between_processes(launch: Launch) -> None:
    launch(refused_on_ranks, 2)
