"""A stream that is interrupted, saved and restored has the bits of one that never was."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import gapless
from gapless.errors import ConfigError, GaplessError
from gapless.run.streams.stream import Stream
from gapless.run.streams.stream_state import _KEYS
from tests.pipelines import Own
from tests.run.streams.test_stream import (
    RULES,
    adam,
    batches,
    by_formula,
    failing,
    make,
    momentum,
    pipeline,
    same,
    slower,
    weights,
)  # fmt: skip


def taken_apart(value: Any, tensors: dict[str, Tensor], path: str = "") -> Any:
    """What can be written as JSON, and tensors by name."""
    if isinstance(value, Tensor):
        tensors[path] = value.contiguous()
        return {"tensor": path}
    if isinstance(value, dict):
        return {key: taken_apart(each, tensors, f"{path}/{key}") for key, each in value.items()}
    if isinstance(value, list):
        return [taken_apart(each, tensors, f"{path}/{number}") for number, each in enumerate(value)]
    return value


def put_together(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if set(value) == {"tensor"}:
            return tensors[value["tensor"]]
        return {key: put_together(each, tensors) for key, each in value.items()}
    return [put_together(each, tensors) for each in value] if isinstance(value, list) else value


def through_files(folder: Path, state: Any) -> Any:
    """Saved without pickle, and loaded."""
    tensors: dict[str, Tensor] = {}
    (folder / "state.json").write_text(json.dumps(taken_apart(state, tensors)))
    save_file(tensors, folder / "state.safetensors")
    return put_together(json.loads((folder / "state.json").read_text()), load_file(folder / "state.safetensors"))


def stream_of(pipe: gapless.Pipeline, kind: str, **options: Any) -> Stream:
    return pipe.stream(vertical=RULES[kind][1], **{"optimizer": momentum, **options})


def milestones(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [4, 9], 0.5)


def interrupted(kind: str, count: int, interruptions: int, seed: int, folder: Path, **options: Any) -> None:
    """Drained, evaluated, restored, or moved to a pipeline that was built anew, at random minibatches."""
    chosen, data, plain = random.Random(seed), batches(count), make("dropout")
    cuts = sorted(chosen.sample(range(count), interruptions))
    pipe = pipeline(kind, make("dropout"), 3)
    made = {key: options[key] for key in ("optimizer", "scheduler") if key in options}
    ahead, annealed_over = options.get("correction") == "spectrain", options.get("lr_by_delay")
    known = by_formula(pipe, kind, plain, data, ahead=ahead, annealed_over=annealed_over, **made)
    stream, found = stream_of(pipe, kind, **options), []
    for start, end in zip([0, *cuts], [*cuts, count], strict=True):
        found += [result.loss for result in stream.run(data[start:end])]
        how = chosen.choice(["drain", "evaluate", "restore", "same", "anew"])
        if how != "restore":
            stream.drain()
        if how == "evaluate":
            pipe.evaluate(*data[0])
        if how in ("restore", "same", "anew"):
            state = through_files(folder, stream.state_dict())
            whole = copy.deepcopy(pipe.state_dict())
            assert state["minibatches"] == end
        if how == "anew":
            pipe.close()
            other = make("dropout")
            other.load_state_dict({name: torch.zeros_like(each) for name, each in other.state_dict().items()})
            pipe = pipeline(kind, other, 3)
        if how in ("restore", "anew"):
            pipe.load_state_dict(whole)
            stream = stream_of(pipe, kind, **options)
        if how in ("restore", "same", "anew"):
            stream.load_state_dict(state)
            assert stream.minibatches == end
    stream.drain()
    assert same(found, known.losses)
    assert same(pipe.parameters(), known.at(count))
    pipe.close()


PREDICTED = {"optimizer": adam, "scheduler": milestones, "correction": "spectrain", "lr_by_delay": 8}


@pytest.mark.parametrize(
    ("kind", "options"), [("stashing", PREDICTED), ("vertical", {}), ("2bw", {"scheduler": slower})]
)
def test_interruptions_at_random_minibatches_change_no_bit(kind: str, options: Any, tmp_path: Path) -> None:
    interrupted(kind, 12, 8, 0, tmp_path, **options)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("kind", ["stashing", "vertical", "2bw"])
@pytest.mark.parametrize("options", [PREDICTED, {"scheduler": slower}], ids=["predicted", "momentum"])
def test_interruptions_anywhere_change_no_bit(kind: str, options: Any, seed: int, tmp_path: Path) -> None:
    interrupted(kind, 60, 20, seed, tmp_path, **options)


@pytest.mark.parametrize("kind", ["vertical", "2bw"])
def test_the_nesterov_form_goes_on_in_low_precision(kind: str) -> None:
    """torch casts the product of NAdam's momenta to the type of the parameter."""
    data = [(x.bfloat16(), y.bfloat16()) for x, y in batches(12)]
    ends = []
    for cuts in ((), (3, 7, 8)):
        with pipeline(kind, make("dropout").bfloat16(), 3) as pipe:
            stream = pipe.stream(vertical=RULES[kind][1], correction="nesterov", lr=0.01)
            for start, end in zip((0, *cuts), (*cuts, 12), strict=True):
                list(stream.run(data[start:end]))
                state = copy.deepcopy(stream.state_dict())
                stream = pipe.stream(vertical=RULES[kind][1], correction="nesterov", lr=0.01)
                stream.load_state_dict(state)
            ends.append(weights(pipe))
    assert same(*ends)


@pytest.mark.in_pairs
@pytest.mark.parametrize("kind", ["stashing", "vertical", "2bw"])
@pytest.mark.parametrize("how", ["left out", "ignored"])
@pytest.mark.parametrize("ahead", [False, True])
def test_without_versions_a_stream_starts_anew_at_its_minibatch(kind: str, how: str, ahead: bool) -> None:
    data, made = batches(11), {"optimizer": adam, "scheduler": slower}
    asked: dict[str, Any] = {**made, "correction": "spectrain", "lr_by_delay": 9} if ahead else {**made}
    with pipeline(kind, make("dropout"), 3) as pipe:
        annealed_over = 9 if ahead else None
        known = by_formula(pipe, kind, make("dropout"), data, anew=5, ahead=ahead, annealed_over=annealed_over, **made)
        stream = stream_of(pipe, kind, **asked)
        found = [result.loss for result in stream.run(data[:5])]
        state = copy.deepcopy(stream.state_dict(versions=how != "left out"))
        stream = stream_of(pipe, kind, **asked)
        stream.load_state_dict(state, versions=how == "left out")
        found += [result.loss for result in stream.run(data[5:7])]
        state = copy.deepcopy(stream.state_dict())  # of a stream that has begun anew before
        stream = stream_of(pipe, kind, **asked)
        stream.load_state_dict(state)
        found += [result.loss for result in stream.run(data[7:])]
        stream.drain()
        assert same(found, known.losses)
        assert same(pipe.parameters(), known.at(11))


def test_without_versions_other_devices_may_go_on() -> None:
    with pipeline("stashing", make("dropout"), 4) as pipe:
        stream = stream_of(pipe, "stashing", scheduler=slower)
        list(stream.run(batches(5)))
        state, whole = copy.deepcopy([stream.state_dict(), pipe.state_dict()])
    with pipeline("2bw", make("dropout")) as pipe:
        pipe.load_state_dict(whole)
        stream = stream_of(pipe, "2bw", scheduler=slower)
        with pytest.raises(ConfigError, match="versions for stashing with 4 stages, but the stream is 2bw with 2"):
            stream.load_state_dict(state)
        stream.load_state_dict(state, versions=False)
        again = copy.deepcopy(stream.state_dict())
        assert [result.minibatch for result in stream.run(batches(2))] == [5, 6]
    before, after = (
        {name: each for stage in saved["stages"].values() for name, each in stage["optimizer"]["state"].items()}
        for saved in (state, again)
    )
    assert set(before) == set(after) == set(whole)
    assert all(torch.equal(before[name]["momentum_buffer"], after[name]["momentum_buffer"]) for name in before)
    assert again["stages"]["1"]["scheduler"]["last_epoch"] == 5
    assert again["stages"]["1"]["optimizer"]["param_groups"][0]["lr"] == 0.025


def test_a_state_that_does_not_fit_is_refused_and_nothing_is_changed() -> None:
    with pipeline("stashing", make("dropout"), 3) as pipe:
        stream = stream_of(pipe, "stashing", scheduler=slower)
        list(stream.run(batches(4)))
        state = copy.deepcopy(stream.state_dict())
        list(stream.run(batches(4)))
        stream.drain()
        before = weights(pipe)
        with pytest.raises(ConfigError, match="load the model's state first"):
            stream.load_state_dict(state)
        with pytest.raises(ConfigError, match=r"no optimizer for it|has a scheduler for 0\.norm"):
            stream_of(pipe, "stashing").load_state_dict(state, versions=False)
        with pytest.raises(ConfigError, match="versions for stashing with 3 stages, but the stream is vertical"):
            stream_of(pipe, "vertical", scheduler=slower).load_state_dict(state)
        assert stream.minibatches == 8
        assert same(before, pipe.parameters())
    other = pipeline("stashing", make("dropout"), 3, partition=[2, 2, 4])
    with other as pipe, pytest.raises(ConfigError, match="has other parameters"):
        stream_of(pipe, "stashing", scheduler=slower).load_state_dict(state)


def saved_by(optimizer: Any, count: int = 3) -> Any:
    """The states of a stream and of its model."""
    with pipeline() as pipe, stream_of(pipe, "stashing", optimizer=optimizer) as one:
        list(one.run(batches(count)))
        return copy.deepcopy([one.state_dict(), pipe.state_dict()])


@pytest.mark.parametrize(("of", "into"), [(momentum, adam), (adam, momentum)])
def test_the_state_of_another_optimizer_is_refused_and_nothing_is_changed(of: Any, into: Any) -> None:
    state, whole = saved_by(of)
    with pipeline() as pipe:
        pipe.load_state_dict(whole)
        stream = stream_of(pipe, "stashing", optimizer=into)
        before = copy.deepcopy(stream.state_dict())
        for versions in (True, False):
            with pytest.raises(
                ConfigError, match=r"what (SGD|Adam) keeps for 0\.weight, but the stream has (SGD|Adam)"
            ):
                stream.load_state_dict(state, versions=versions)
        assert stream.state_dict()["stages"]["0"]["optimizer"] == before["stages"]["0"]["optimizer"]
        assert stream.minibatches == 0
        assert len(list(stream.run(batches(2)))) == 2


@pytest.mark.parametrize("lacks", [*_KEYS, "all"])
def test_what_is_no_state_of_a_stream_is_refused(lacks: str) -> None:
    state, whole = saved_by(momentum, 1)
    state.pop(lacks, None)
    with pipeline() as pipe:
        pipe.load_state_dict(whole)
        with pytest.raises(ConfigError, match="this is no state of a stream"):
            stream_of(pipe, "stashing").load_state_dict(whole if lacks == "all" else state)


def by_shape(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    groups = [[each for each in params if each.ndim == ndim] for ndim in (1, 2)]
    return torch.optim.SGD([{"params": group, "lr": 0.1} for group in groups], momentum=0.9)


def test_a_group_without_parameters_is_restored() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(6, 6, bias=place < 2) for place in range(4)))

    with pipeline("stashing", model()) as pipe, stream_of(pipe, "stashing", optimizer=by_shape) as stream:
        list(stream.run(batches(3)))
        state, whole = copy.deepcopy([stream.state_dict(), pipe.state_dict()])
        list(stream.run(batches(3)))
        stream.drain()
        expected = weights(pipe)
    with pipeline("stashing", model()) as pipe:
        pipe.load_state_dict(whole)
        with stream_of(pipe, "stashing", optimizer=by_shape) as stream:
            stream.load_state_dict(state)
            list(stream.run(batches(3)))
        assert same(pipe.parameters(), expected)


@pytest.mark.parametrize("versions", [True, False])
def test_weights_in_other_places_are_told_from_those_of_the_state(versions: bool) -> None:
    state, whole = saved_by(momentum)
    whole["3.weight"] = whole["3.weight"].flip(0)
    with pipeline() as pipe:
        pipe.load_state_dict(whole)
        with pytest.raises(ConfigError, match=r"\(3\.weight\): load the model's state first"):
            stream_of(pipe, "stashing").load_state_dict(state, versions=versions)


def scaled() -> nn.Module:
    scale = nn.Parameter(torch.ones(()))
    return Own(lambda loss, outputs, target: F.mse_loss(loss.scale * outputs, target), scale=scale)


def test_the_state_of_a_loss_is_asked_for_by_name() -> None:
    loss, other = scaled(), scaled()
    with pipeline(loss=loss) as pipe, pipe.stream(optimizer=momentum) as stream:
        list(stream.run(batches(2)))
        state, whole = copy.deepcopy([stream.state_dict(), pipe.state_dict()])
    with pipeline(loss=other) as pipe:
        pipe.load_state_dict(whole)
        stream = pipe.stream(optimizer=momentum)
        with pytest.raises(ConfigError, match="load the loss's own state too"):
            stream.load_state_dict(state)
        other.load_state_dict(loss.state_dict())
        stream.load_state_dict(state)
        assert stream.minibatches == 2


def test_the_state_of_other_replicas_starts_anew() -> None:
    state, whole = saved_by(momentum, 3)
    state["replicas"] = 4
    with pipeline() as pipe:
        pipe.load_state_dict(whole)
        stream = stream_of(pipe, "stashing")
        with pytest.raises(ConfigError, match="versions for 4 replicas"):
            stream.load_state_dict(state)
        stream.load_state_dict(state, versions=False)
        assert [result.minibatch for result in stream.run(batches(1))] == [12]


class Odd(torch.optim.lr_scheduler.StepLR):
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.odd = object()
        super().__init__(optimizer, 3)


def test_what_is_no_plain_value_is_refused() -> None:
    with pipeline() as pipe:
        stream = stream_of(pipe, "stashing", scheduler=Odd)
        with pytest.raises(ConfigError, match="the scheduler keeps a object in its state"):
            stream.state_dict()


def test_a_stream_that_failed_in_a_backward_has_no_state_until_one_is_loaded() -> None:
    with pipeline("stashing", failing(3, backward_at=6)[0], 4) as pipe:
        stream = stream_of(pipe, "stashing")
        list(stream.run(batches(2)))
        state, whole = copy.deepcopy([stream.state_dict(), pipe.state_dict()])
        with pytest.raises(ValueError, match="as told"):
            list(stream.run(batches(9)))
        for taken in (stream.state_dict, pipe.state_dict):
            with pytest.raises(GaplessError, match=r"stage 0 at 6, stage 1 at 6, stage 2 at \d"):
                taken()
        pipe.load_state_dict(whole)
        stream.load_state_dict(state)
        assert all(torch.equal(each, whole[name]) for name, each in pipe.state_dict().items())
        with stream:
            assert [result.minibatch for result in stream.run(batches(3))] == [2, 3, 4]
