"""A model that is edited after its pipeline was made: the next step is that of the edited model, every bit."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import gapless
from gapless.errors import ConfigError, PartitionError
from gapless.pipeline.edits import followed
from tests.by_hand import assert_same_bits, in_order, loop, same

X, Y = torch.randn(8, 4), torch.randn(8, 4)


class Net(nn.Module):
    """The same layers in a module that is traced."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.scale = 1.0
        self.settings = {"shift": 0.0}
        self.sizes = [1.0]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.scale + self.settings["shift"] + sum(self.sizes)


class Halved(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 0.5


def _layers() -> list[nn.Module]:
    return [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4)]


def _two() -> list[nn.Module]:
    """As many as are to be cut, where the edit is none of a layer."""
    return [nn.Linear(4, 4), nn.Linear(4, 4)]


def _of(model: nn.Module) -> Any:
    return model.layers if isinstance(model, Net) else model


def _new(seed: int = 9) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(4, 4)


def _half(_: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out * 0.5


def _replace(model: nn.Module) -> None:
    _of(model)[4] = _new()


def _replace_by_norm(model: nn.Module) -> None:
    _of(model)[3] = nn.BatchNorm1d(4)


def _append(model: nn.Module) -> None:
    _of(model).append(_new())


def _insert(model: nn.Module) -> None:
    _of(model).insert(1, _new())


def _delete(model: nn.Module) -> None:
    del _of(model)[3]


def _reverse(model: nn.Module) -> None:
    layers = _of(model)
    layers[0], layers[5] = layers[5], layers[0]


def _tie(model: nn.Module) -> None:
    _of(model)[5].weight = _of(model)[0].weight


def _use_twice(model: nn.Module) -> None:
    _of(model)[5] = _of(model)[0]


def _freeze(model: nn.Module) -> None:
    _of(model)[2].requires_grad_(False)
    _of(model)[5].bias.requires_grad_(False)


def _hook(model: nn.Module) -> None:
    _of(model)[2].register_forward_hook(_half)


def _pre_hook(model: nn.Module) -> None:
    _of(model)[5].register_forward_pre_hook(lambda _, args: (args[0] * 0.5,))


def _parametrize(model: nn.Module) -> None:
    parametrizations.weight_norm(_of(model)[2])


def _new_parameter(model: nn.Module) -> None:
    _of(model)[2].weight = nn.Parameter(_new().weight.detach().clone())


def _assign(model: nn.Module) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()}, assign=True)


def _new_buffer(model: nn.Module) -> None:
    _of(model)[1].running_mean = torch.ones(4)


def _norm_in_eval(model: nn.Module) -> None:
    _of(model)[1].eval()


def _eps(model: nn.Module) -> None:
    _of(model)[1].eps = 0.5


def _no_statistics(model: nn.Module) -> None:
    _of(model)[1].running_mean = _of(model)[1].running_var = None


def _other_class(model: nn.Module) -> None:
    _of(model)[2].__class__ = Halved


def _own_forward(model: nn.Module) -> None:
    layer = _of(model)[2]
    layer.forward = lambda x: F.linear(x, layer.weight * 0.5, layer.bias)


def _in_double(model: Any) -> None:
    model.double()


EDITS: dict[str, Callable[[nn.Module], None]] = {
    name.removeprefix("_"): edit
    for name, edit in list(globals().items())
    if name.startswith("_") and callable(edit) and getattr(edit, "__annotations__", {}).get("model") == "nn.Module"
    if name != "_of"
}


def _assert_followed(
    model: nn.Module, *edits: Callable[[nn.Module], None], dtype: torch.dtype | None = None, **options: Any
) -> None:
    """One step, and one after each edit, leave what the plain loop leaves with the same edits."""
    plain = copy.deepcopy(model)
    x, y = X, Y
    with gapless.Pipeline(model, devices=2, microbatches=4, loss=F.mse_loss, **options) as pipe:
        for number, edit in enumerate((None, *edits)):
            if edit is not None:
                edit(model)
                edit(plain)
            if edit is not None and dtype is not None:
                x, y = x.to(dtype), y.to(dtype)
            for again in range(2):
                where = f"edit {number} ({edit and edit.__name__}), step {again}"
                expected = loop(plain, x, y)
                ours = pipe.step(x, y, outputs=True)
                assert same(ours.loss, expected), where
                assert_same_bits(model, plain, where)
                for each in (model, plain):
                    torch.optim.SGD(each.parameters(), lr=0.1).step()
            if isinstance(model, Net) and 0 < number < len(edits):
                continue  # another trace each; that of the start must not outlive the edits
            modes = [module.training for module in plain.modules()]
            plain.eval()
            with torch.no_grad():
                expected = torch.cat([plain(part) for part in x.tensor_split(4)])
            for module, training in zip(plain.modules(), modes, strict=True):
                module.training = training
            assert torch.equal(pipe.evaluate(x).outputs, expected), (
                f"edit {number} ({edit and edit.__name__}), evaluate"
            )
        assert [name for name, _ in pipe.named_parameters()] == [name for name, _ in plain.named_parameters()]


@pytest.mark.parametrize(("edit", "schedule"), zip(EDITS, ["1f1b", "zb-h1"] * 10, strict=True))
def test_an_edited_sequence_is_followed(edit: str, schedule: str) -> None:
    """What a stage has learnt of its layers when it was made was kept for ever."""
    _assert_followed(nn.Sequential(*_layers()), EDITS[edit], schedule=schedule)


# One after the other: a model that was edited may be edited again, and an edit costs one trace less.
IN_TURN = (
    ("replace", "replace_by_norm", "append", "insert", "delete", "reverse"),
    ("freeze", "tie", "use_twice", "new_parameter", "assign", "parametrize"),
    ("new_buffer", "eps", "norm_in_eval", "no_statistics"),
    ("hook", "pre_hook", "other_class", "own_forward"),
)


@pytest.mark.parametrize("edits", IN_TURN, ids="-".join)
def test_an_edited_module_is_traced_again_for_every_edit(edits: tuple[str, ...]) -> None:
    """A trace was kept for ever, whatever became of the model."""
    _assert_followed(Net(*_layers()), *(EDITS[edit] for edit in edits), schedule="zb-h1")


def test_every_edit_has_its_turn() -> None:
    assert sorted(edit for edits in IN_TURN for edit in edits) == sorted(EDITS)


@pytest.mark.parametrize("kind", [nn.Sequential, Net])
def test_another_dtype_after_a_step_is_followed(kind: Any) -> None:
    _assert_followed(kind(*_layers()), _in_double, dtype=torch.float64)


@pytest.mark.parametrize("remat", ["stage", "layer"])
def test_edits_are_followed_under_remat(remat: str) -> None:
    """Which buffers change is learnt in the first run: a norm that comes later has to be learnt too."""
    _assert_followed(nn.Sequential(*_layers()), _replace_by_norm, _tie, _append, remat=remat)
    if remat == "layer":
        _assert_followed(Net(*_layers()), _replace_by_norm, _hook, remat=remat)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("edit", ["rate", "layer"])
def test_a_dropout_raised_from_zero_draws_from_its_seeds(traced: bool, edit: str) -> None:
    """It was known not to draw: it drew from the generator of all threads, or in a trace not at all."""
    layers = [nn.Linear(4, 4), nn.Dropout(0.0), nn.Linear(4, 4), nn.Dropout(0.0), nn.Linear(4, 4)]
    model = Net(*layers) if traced else nn.Sequential(*layers)
    plain = copy.deepcopy(model)
    with gapless.Pipeline(model, devices=2, microbatches=4, loss=F.mse_loss, seed=5) as pipe:
        assert same(pipe.step(X, Y).loss, loop(plain, X, Y))
        for each in (model, plain):
            if edit == "rate":
                for layer in (_of(each)[1], _of(each)[3]):
                    layer.p = 0.5
            else:
                _of(each)[1], _of(each)[3] = nn.Dropout(0.5), nn.Dropout(0.5)
        ours = pipe.step(X, Y)
    microbatch = 0
    for number, place in enumerate((1, 3)):  # in a trace the n-th draw counts, in a sequence the layer

        def seeded(*_: Any, number: int = place if not traced else number) -> None:
            torch.manual_seed(gapless.seed_of(5, 1, microbatch, number))

        _of(plain)[place].register_forward_pre_hook(seeded)
    for part, goal, loss in zip(X.tensor_split(4), Y.tensor_split(4), ours.losses, strict=True):
        value = F.mse_loss(plain(part), goal)
        (value * 0.25).backward()
        assert torch.equal(loss, value)
        microbatch += 1
    assert_same_bits(model, plain)


def _scale(model: Any) -> None:
    model.scale = 0.5


def _setting(model: Any) -> None:
    model.settings["shift"] = 0.5


def _item(model: Any) -> None:
    model.sizes.append(0.5)


def _constant(model: Any) -> None:
    model.sizes = [torch.full((4,), 0.5)]


def test_what_a_forward_reads_of_its_modules_is_read_again_when_it_changes() -> None:
    _assert_followed(Net(*_two()), _scale, _setting, _item, _constant)


class Config:
    def __init__(self) -> None:
        self.square = False


class Configured(nn.Module):
    """Its settings are in an object, as Hugging Face's are; it notes how much it got, and keeps a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.config = Config()
        self.factor = torch.ones(4)
        self.rows = 0
        self.epoch = 0

    def forward(self, x: Tensor) -> Any:
        self.rows = len(x)
        x = self.linear(x)
        return self.head(x * x if self.config.square else x) * self.factor


def test_settings_in_an_object_and_tensors_of_its_own_are_noticed() -> None:

    def square(model: Any) -> None:
        model.config.square = True

    def fill(model: Any) -> None:
        model.factor.fill_(0.5)

    def other(model: Any) -> None:
        model.factor = torch.full((4,), 2.0)

    _assert_followed(Configured(), square, fill, other)


class Inherited(Net):
    """Its class has the number, and the way."""

    factor = 1.0

    def shifted(self, x: Tensor) -> Tensor:
        return x + 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.shifted(super().forward(x)) * self.factor


def test_what_a_class_has_is_noticed_when_an_instance_gets_its_own_and_when_it_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:

    def factor(model: Any) -> None:
        model.factor = 0.5

    def shifted(model: Any) -> None:
        model.shifted = torch.sin

    def of_class(model: Any) -> None:
        monkeypatch.setattr(Inherited, "forward", lambda self, x: Net.forward(self, x) * 0.25)

    _assert_followed(Inherited(*_two()), factor, shifted, of_class)


def test_a_forward_put_into_torchs_own_class_later_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = nn.Linear.forward

    def patch(model: nn.Module) -> None:
        monkeypatch.setattr(nn.Linear, "forward", lambda self, x: forward(self, x) * 0.5)

    for schedule in ("1f1b", "zb-h1"):
        _assert_followed(nn.Sequential(*_layers()), patch, schedule=schedule)
        monkeypatch.undo()


def test_a_layer_that_is_there_several_times_stays_where_it_is() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Tanh(), nn.Linear(4, 4), shared)
    _assert_followed(model, _freeze_third, _append_shared, partition=[1, 3])
    assert followed([shared, 1, 2, shared], [1, 3], [shared, 1, 2, shared, 4]) == (1, 4)
    assert followed([1, 2, 3], [1, 2], [2, 1, 3]) is None


def _freeze_third(model: Any) -> None:
    model[2].requires_grad_(False)


def _append_shared(model: Any) -> None:
    model.append(model[0])


def test_what_was_removed_from_a_traced_model_is_let_go() -> None:
    model = Net(*_layers())
    with gapless.Pipeline(model, devices=2, microbatches=4, loss=F.mse_loss) as pipe:
        pipe.step(X, Y)
        gone = weakref.ref(model.layers[4])
        _replace(model)
        pipe.step(X, Y)
        gc.collect()
        assert gone() is None


def test_what_no_forward_reads_and_what_it_only_writes_is_no_edit() -> None:
    """A trace takes seconds: it is made anew only for what it depends on, and used again when an edit is taken back."""
    model = Configured()
    with gapless.Pipeline(model, devices=2, microbatches=4, loss=F.mse_loss) as pipe:
        captured: Any = pipe._staged.model
        for epoch in range(3):
            model.epoch = epoch
            pipe.step(X, Y)
            pipe.evaluate(X)
        assert captured.num_traces == 2
        for _ in range(3):
            model.linear.requires_grad_(False)
            pipe.step(X, Y)
            model.linear.requires_grad_(True)
            pipe.step(X, Y)
        assert captured.num_traces == 3


def test_a_list_of_layers_is_followed_too() -> None:
    layers: list[Any] = [*_layers(), torch.tanh]
    plain = copy.deepcopy(layers)
    with gapless.Pipeline(layers, devices=2, microbatches=4, loss=F.mse_loss) as pipe:
        pipe.step(X, Y)
        loop(in_order(plain), X, Y)
        for each in (layers, plain):
            each.append(_new())
            each[3] = torch.sigmoid
        assert same(pipe.step(X, Y).loss, loop(in_order(plain), X, Y))
        assert "7.weight" in dict(pipe.named_parameters())
    for ours, theirs in zip(layers, plain, strict=True):
        if isinstance(ours, nn.Module):
            assert_same_bits(ours, theirs)


def test_layers_by_hand_are_followed_too() -> None:
    model = Net(*_layers())
    plain = copy.deepcopy(model)
    layers = [*model.layers]
    with gapless.Pipeline(model, layers=layers, devices=2, microbatches=4, loss=F.mse_loss) as pipe:
        assert same(pipe.step(X, Y).loss, loop(in_order([*plain.layers]), X, Y))
        for each in (model, plain):
            _tie(each)
            each.layers.append(_new())
        layers.append(model.layers[-1])
        assert same(pipe.step(X, Y).loss, loop(in_order([*plain.layers]), X, Y))
    assert_same_bits(model, plain)


class Penalised(nn.Module):
    """A loss with a part that learns, and one that draws."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(4, 4)

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.scale(out), target)


@pytest.mark.parametrize("kind", [nn.Sequential, Net])
def test_an_edited_loss_is_followed(kind: Any) -> None:
    model, loss = kind(*_layers()), Penalised()
    plain, plain_loss = copy.deepcopy((model, loss))
    with gapless.Pipeline(model, devices=2, microbatches=4, loss=loss, schedule="zb-h1") as pipe:
        for edited in (False, True):
            if edited:
                loss.scale, plain_loss.scale = _new(), _new()
                loss.scale.weight, plain_loss.scale.weight = _of(model)[0].weight, _of(plain)[0].weight
            pipe.step(X, Y)
            for part, goal in zip(X.tensor_split(4), Y.tensor_split(4), strict=True):
                (plain_loss(plain(part), goal) * 0.25).backward()
            assert_same_bits(model, plain)
            assert_same_bits(loss, plain_loss)


def _strict(out: Tensor, target: Tensor) -> Tensor:
    if target.dtype != out.dtype:
        raise TypeError
    return F.mse_loss(out, target)


@pytest.mark.parametrize("kind", [nn.Sequential, Net])
def test_edits_after_a_failed_step_are_followed(kind: Any) -> None:
    """What catches the gradients of shared parameters was left behind by a step that had failed."""
    model = kind(*_layers())
    _tie(model)
    plain = copy.deepcopy(model)
    with gapless.Pipeline(model, devices=2, microbatches=4, loss=_strict) as pipe:
        with pytest.raises(TypeError):
            pipe.step(X, Y.long())
        pipe.zero_grad()
        for each in (model, plain):
            _of(each)[5].weight = nn.Parameter(_of(each)[5].weight.detach().clone())
            _of(each)[2].weight = _of(each)[0].weight
        model.load_state_dict(plain.state_dict())
        assert same(pipe.step(X, Y).loss, loop(plain, X, Y))
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert same(ours.grad, theirs.grad)


def test_an_edit_that_can_not_be_traced_is_refused_until_it_is_taken_back() -> None:
    model = Net(*_layers())
    plain = copy.deepcopy(model)
    with gapless.Pipeline(model, devices=2, microbatches=4, loss=F.mse_loss) as pipe:
        assert same(pipe.step(X, Y).loss, loop(plain, X, Y))
        handle = model.layers[2].register_full_backward_hook(lambda *_: None)
        for _ in range(2):
            with pytest.raises(PartitionError, match="a backward hook of a module"):
                pipe.step(X, Y)
        handle.remove()
        assert same(pipe.step(X, Y).loss, loop(plain, X, Y))
    assert_same_bits(model, plain)


def test_a_sequence_that_gets_a_hook_of_its_own_is_refused_until_it_is_gone() -> None:
    """The pipeline calls its layers and not itself, so the hook would be ignored."""
    model = nn.Sequential(*_layers())
    plain = copy.deepcopy(model)
    with gapless.Pipeline(model, devices=2, microbatches=4, loss=F.mse_loss) as pipe:
        handle = model.register_forward_hook(_half)
        for _ in range(2):
            with pytest.raises(
                ConfigError, match="was a sequence when the pipeline was made, but has hooks of its own now"
            ):
                pipe.step(X, Y)
        handle.remove()
        assert same(pipe.step(X, Y).loss, loop(plain, X, Y))
    assert_same_bits(model, plain)


@pytest.mark.parametrize("kind", [nn.Sequential, Net])
def test_a_model_that_is_compiled_in_place_later_is_refused_as_one_that_was_before(kind: Any) -> None:
    model = kind(*_layers())
    with gapless.Pipeline(model, devices=2, microbatches=4, loss=F.mse_loss) as pipe:
        pipe.step(X, Y)
        model.compile()
        with pytest.raises(ConfigError, match="was compiled as a whole"):
            pipe.step(X, Y)


def test_a_sequence_with_fewer_layers_than_stages_is_refused_until_it_grows() -> None:
    model = nn.Sequential(*_layers())
    with gapless.Pipeline(model, devices=6, microbatches=4, loss=F.mse_loss) as pipe:
        pipe.step(X, Y)
        del model[3]
        with pytest.raises(PartitionError, match="5 layers"):
            pipe.step(X, Y)
        model.append(_new())
        model.zero_grad()
        plain = copy.deepcopy(model)
        assert same(pipe.step(X, Y).loss, loop(plain, X, Y))
    assert_same_bits(model, plain)


def test_a_parametrization_that_is_removed_again_is_followed() -> None:

    def remove(model: nn.Module) -> None:
        parametrize.remove_parametrizations(_of(model)[2], "weight")

    for kind in (nn.Sequential, Net):
        _assert_followed(kind(*_layers()), _parametrize, remove, schedule="zb-h1")
