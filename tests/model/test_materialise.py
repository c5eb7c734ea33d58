"""A model on the meta device gets its memory and its values stage by stage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

import gapless
from gapless.errors import CheckpointError, ConfigError
from gapless.model.materialise import homes_in, materialise, on_meta
from gapless.zoo.gpt import gpt, next_token_loss
from gapless.zoo.resnet import resnet
from tests.pipelines import Own

CPU = torch.device("cpu")


def made(meta: bool) -> nn.Sequential:
    torch.manual_seed(0)
    with torch.device("meta" if meta else "cpu"):
        return gpt(vocab=13, width=8, depth=4, heads=2, context=6)


def step(model: nn.Sequential, **options: Any) -> Tensor:
    ids = torch.arange(24).view(4, 6) % 13
    with gapless.Pipeline(model, devices=2, microbatches=2, loss=next_token_loss, **options) as pipe:
        loss = pipe.step(ids, ids.roll(-1, 1)).loss
    assert loss is not None
    return loss


def as_mapping(state: dict[str, Tensor], _: Path) -> Any:
    return state


def as_file(state: dict[str, Tensor], folder: Path) -> Any:
    save_file(state, folder / "model.safetensors")
    return folder / "model.safetensors"


def as_several_files(state: dict[str, Tensor], folder: Path) -> Any:
    homes = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(state)}
    for file in set(homes.values()):
        save_file({name: tensor for name, tensor in state.items() if homes[name] == file}, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": homes}))
    return index


@pytest.mark.parametrize("form", [as_mapping, as_file, as_several_files])
def test_a_checkpoint_fills_every_stage(form: Callable[[dict[str, Tensor], Path], Any], tmp_path: Path) -> None:
    real, model = made(meta=False), made(meta=True)
    source = form(real.state_dict(), tmp_path)
    assert torch.equal(step(model, init=source), step(real))
    assert not on_meta([model])
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in real.named_parameters()]


def test_only_the_stage_at_hand_has_memory_when_it_is_filled() -> None:
    model = made(meta=True)
    seen: list[tuple[str, int]] = []

    def init(module: nn.Module, name: str) -> None:
        seen.append((name, len({name.split(".")[0] for name in on_meta([model])})))
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            nn.init.normal_(tensor)

    step(model, init=init, partition=[2, 5])
    left = {name.split(".")[0]: count for name, count in seen}
    assert left == {"0": 5, "1": 5, "2": 0, "3": 0, "4": 0, "5": 0, "6": 0}, "layers without memory at each call"
    assert len(seen) == len({name for name, _ in seen}), "each module is filled once"


def test_only_the_tensors_of_the_stage_are_read() -> None:
    class Reads(dict[str, Tensor]):
        names: list[str] = []  # noqa: RUF012

        def get(self, name: str, default: Any = None) -> Any:
            self.names.append(name)
            return super().get(name, default)

    model = made(meta=True)
    source = Reads(made(meta=False).state_dict())
    materialise(model, homes_in([model[1]]), CPU, source)
    assert sorted(source.names) == sorted(name for name, _ in model.named_parameters() if name.startswith("1."))
    assert all(parameter.is_meta != (name.startswith("1.")) for name, parameter in model.named_parameters())


class Parts(nn.Module):
    """What torch has that draws: a layer whose parts draw before itself, and a head that is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(9, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.rows, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(5)
        self.mix = nn.Conv1d(5, 5, 1)
        self.head = nn.Linear(8, 9, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.mix(self.norm(self.rows(self.encoder(self.tokens(ids))))))
        return out.mean()


def test_modules_draw_the_numbers_of_a_model_that_is_built_whole() -> None:
    """Each process drew from the start: stages began with the same numbers, which depended on how many there were."""
    torch.manual_seed(11)
    whole = Parts()
    torch.manual_seed(11)
    with torch.device("meta"):
        model, part = Parts(), Parts()
    for each in (model, part):
        each.head.weight = each.tokens.weight
    torch.randn(3)  # batches are drawn in the meantime
    ids = torch.randint(9, (4, 5))
    before = torch.get_rng_state()
    with gapless.Pipeline(
        model, devices=3, microbatches=2, loss=lambda y, _: y, init="reset_parameters", example=ids
    ) as pipe:
        assert len(pipe.partition or ()) == 3
    assert torch.equal(before, torch.get_rng_state())
    materialise(part, homes_in([part.mix]), CPU, "reset_parameters")  # as a rank that has nothing else
    for name, each in whole.state_dict().items():
        assert torch.equal(each, model.state_dict()[name]), name
    assert torch.equal(part.mix.weight, whole.mix.weight)
    assert part.rows.weight.is_meta


def test_modules_can_initialise_themselves() -> None:
    with torch.device("meta"):
        model = resnet(18, classes=4, width=2)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)  # before there is anything to optimize
    with gapless.Pipeline(
        model, devices=2, microbatches=2, loss=F.cross_entropy, init="reset_parameters", batchnorm="deferred"
    ) as pipe:
        pipe.step(torch.randn(4, 3, 32, 32), torch.randint(4, (4,)))
        before = parameters[0].detach().clone()
        optimizer.step()
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True)), "the same objects"
    assert not torch.equal(before, parameters[0])
    assert int(model.get_buffer("1.norm1.num_batches_tracked")) == 1


def test_tied_weights_stay_tied_and_are_found_under_any_name() -> None:
    with torch.device("meta"):
        first, last = nn.Linear(6, 6), nn.Linear(6, 6)
    last.weight = first.weight
    first.weight.note = "kept"  # type: ignore[attr-defined]
    model = nn.Sequential(first, nn.Tanh(), last)
    weight = torch.randn(6, 6)
    materialise(model, homes_in([*model]), CPU, {"2.weight": weight, "0.bias": torch.ones(6), "2.bias": torch.zeros(6)})
    assert last.weight is first.weight
    assert torch.equal(first.weight, weight)
    assert first.weight.note == "kept"  # type: ignore[attr-defined]
    assert first.weight.requires_grad


def test_what_has_data_is_left_alone() -> None:
    model = made(meta=False)
    before = [parameter.clone() for parameter in model.parameters()]
    materialise(model, homes_in([*model]), CPU, lambda module, name: nn.init.zeros_(next(module.parameters())))  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_what_nobody_filled_is_an_error_that_names_it() -> None:
    state = made(meta=False).state_dict()
    del state["3.network.0.bias"], state["5.weight"]
    with pytest.raises(ConfigError, match=r"init= left 3\.network\.0\.bias, 5\.weight without values"):
        materialise(model := made(meta=True), homes_in([*model]), CPU, state)

    def masked() -> nn.Sequential:
        with torch.device("meta"):
            return nn.Sequential(Own(lambda mask, x: x, steps=nn.Buffer(torch.arange(3), persistent=False)))

    masks = masked()
    with pytest.raises(ConfigError, match=r"init= left 0\.steps without values: .* also those that no checkpoint has"):
        materialise(masks, homes_in([*masks]), CPU, {})
    masks = masked()
    with pytest.raises(ConfigError, match=r"no reset_parameters in 0 \(Own\): give init= a function"):
        materialise(masks, homes_in([*masks]), CPU, "reset_parameters")


def test_other_mistakes_are_told_too(tmp_path: Path) -> None:
    model = made(meta=True)
    with pytest.raises(ConfigError, match=r"tokens\.weight of a Embed is on the meta device, without data: give init="):
        step(model)
    with pytest.raises(CheckpointError, match=r"other shapes for 5\.weight \(\(3,\) there, \(8,\) here\)"):
        materialise(model, homes_in([model[5]]), CPU, {"5.weight": torch.ones(3), "5.bias": torch.ones(8)})
    with pytest.raises(CheckpointError, match="there is no such file"):
        materialise(made(meta=True), homes_in([model[6]]), CPU, tmp_path / "nowhere.safetensors")
    with pytest.raises(ConfigError, match="init is a int: it is a function of a module and its name"):
        materialise(made(meta=True), homes_in([model[4]]), CPU, 3)  # type: ignore[arg-type]
