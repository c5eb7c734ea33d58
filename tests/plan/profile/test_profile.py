"""Profiles: read as written by hand, written so that a person can read them, refused with all their faults."""

import json
from pathlib import Path
from typing import Any

import pytest

from gapless.errors import ConfigError
from gapless.plan.profile.contention import Contention
from gapless.plan.profile.file import parse_profile, profile_text, read_profile, write_profile
from gapless.plan.profile.profile import EntryTime, Host, Layer, Link, Profile, Seconds

BLOCK = {"name": "block", "forward": "1.5 ms", "parameters": "12 MiB", "activation": "6 MiB", "boundary": "1 MiB"}


def parsed(*layers: Any, **more: Any) -> Profile:
    return parse_profile(json.dumps({"layers": list(layers), **more}))


def test_what_is_not_given_follows_from_what_is() -> None:
    (layer,) = parsed(BLOCK).layers
    assert layer.forward == layer.input_grad == layer.weight_grad == layer.recompute == Seconds(1.5e-3)
    assert layer.whole_backward == pytest.approx(3e-3)
    assert (layer.gradients, layer.optimizer_state) == (12 * 2**20, 24 * 2**20)
    assert layer.kept_for_weight_grad == layer.activation == 6 * 2**20
    assert (layer.update, layer.overhead, layer.workspace) == (Seconds(0.0), 0.0, 0)


def test_a_layer_may_be_repeated() -> None:
    profile = parsed({**BLOCK, "name": "first"}, {**BLOCK, "repeat": 3}, {**BLOCK, "name": "last", "layer": 4})
    assert [layer.name for layer in profile.layers] == ["first", "block.0", "block.1", "block.2", "last"]


def test_a_time_has_a_median_and_a_spread() -> None:
    (layer,) = parsed({**BLOCK, "forward": {"median": "2 ms", "spread": 1e-5}, "backward": 3e-3}).layers
    assert layer.forward == Seconds(2e-3, 1e-5)
    assert layer.whole_backward == 3e-3


def full_profile() -> Profile:
    layers = tuple(
        Layer(
            name=f"layer {number} é",
            forward=Seconds(0.1 + number / 3, 0.01),
            input_grad=Seconds(1 / 3),
            weight_grad=Seconds(2 / 7),
            recompute=Seconds(0.1),
            backward=Seconds(0.6, 0.1) if number else None,
            update=Seconds(1e-5),
            overhead=1e-6,
            parameters=3 * number,
            gradients=number,
            optimizer_state=6 * number + 1,
            activation=100,
            kept_for_weight_grad=40,
            boundary=10,
            workspace=7,
            forward_workspace=2,
            halves_workspace=9,
            weight_workspace=4,
            libraries=33,
            update_workspace=5,
            held_output=8,
            passed=3,
        )
        for number in range(3)
    )
    links = (Link("nvlink", 8, 8e-6, 2e11), Link("infiniband", None, 2e-5, None))
    return Profile(
        "mine",
        layers,
        links,
        samples=4,
        input=12,
        minibatch=64,
        reserved=2**20,
        device="a GPU",
        slack=0.25,
        entry=EntryTime(1e-4, 2e-4),
        contention=Contention(1.5, 1.25, 1.125, 1.5),
        host=Host(2.5e10, 1e-5, 2**30),
    )


def test_it_is_written_and_read_back_as_it_was(tmp_path: Path) -> None:
    profile = full_profile()
    write_profile(profile, tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == profile
    text = profile_text(profile)
    assert len([line for line in text.splitlines() if '"layer": ' in line]) == 3  # a line per layer
    assert profile_text(parse_profile(text)) == text


def test_another_microbatch_scales_what_is_not_overhead() -> None:
    layer = {**BLOCK, "overhead": "0.5 ms", "update": "1 ms"}
    half = parsed(layer, samples=4, input=100).scaled(2)
    assert half.layers[0].forward.median == pytest.approx(1e-3)
    assert half.layers[0].update.median == 1e-3
    assert (half.layers[0].activation, half.layers[0].boundary) == (3 * 2**20, 2**19)
    assert half.layers[0].parameters == 12 * 2**20
    assert (half.samples, half.input) == (2, 50)


def test_beside_each_other_devices_take_at_least_as_long_as_alone() -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(BLOCK, contention={"forward": 0.5, "halve": 1.5, "at_once": 0}, entry=3)
    assert str(caught.value) == (
        "entry is 3, but it must be an object with forward, backward; "
        "contention has 'halve', which is not understood; did you mean halves?; "
        "contention: forward is 0.5, but it must be a number of at least 1; and 1 more"
    )


def test_the_link_between_two_devices_is_the_innermost_that_has_both() -> None:
    profile = full_profile()
    assert profile.link(0, 7).name == "nvlink"
    assert profile.link(7, 8).name == "infiniband"
    assert profile.link(8, 15).name == "nvlink"
    assert parsed(BLOCK).link(0, 1).seconds(2**40) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"forward": float("nan")}, "layer 0 (block): forward is nan, but it must be a time such as '1.5 ms'"),
        ({"forward": -1e-3}, "layer 0 (block): forward is -0.001 seconds, but it can't be negative"),
        ({"forward": "12 MiB"}, "layer 0 (block): forward is '12 MiB', but it must be a time such as '1.5 ms'"),
        ({"forward": 1500}, "layer 0 (block): forward is 1500 seconds, but a time of at most 100 seconds is expected"),
        ({"forward": None}, "layer 0 (block) has no forward"),
        ({"forward": {"median": -1}}, "layer 0 (block): forward is -1 seconds, but it can't be negative"),
        (
            {"forward": {"mean": 1}},
            "layer 0 (block): forward is {'mean': 1}, but it must be a time: a number, or a text as",
        ),
        (
            {"activation": "6 ms"},
            "layer 0 (block): activation is '6 ms', but it must be a number of bytes such as '24 MiB'",
        ),
        ({"parameters": 0.5}, "layer 0 (block): parameters is 0.5 bytes, but bytes are whole: is the unit right"),
        ({"foward": 1}, "layer 0 (block) has 'foward', which is not understood; did you mean forward?"),
        ({"layer": 3}, "layer 0 is missing: the first one is 3"),
        ({"repeat": 0}, "layer 0 (block): repeat is 0, but it must be a whole number of at least 1"),
        ({"repeat": 10**8}, "layer 0 (block) ends at layer 100000000, but a profile has at most 1,000,000"),
        ({"forward": 0}, "no time was measured: the forwards of all layers take 0 seconds"),
    ],
)
def test_a_bad_layer_is_one_clear_sentence(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed({**BLOCK, **change})
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"samples": 0}, "the profile: samples is 0, but it must be a whole number of at least 1"),
        ({"reserved": -1}, "the profile: reserved is -1 bytes, but it can't be negative"),
        ({"slack": -0.1}, "the profile: slack is -0.1, but it must be a number of at least 0"),
        ({"slack": "5%"}, "the profile: slack is '5%', but it must be a number of at least 0"),
        ({"layer": []}, "the profile has 'layer', which is not understood; did you mean layers?"),
        ({"links": 3}, '"links" is not a list'),
        ({"links": [{"bandwidth": 100}]}, "link 0: bandwidth is 100 bytes/s, but a bandwidth from 100000 to 1e+15"),
        ({"links": [{"latency": 8}]}, "link 0: latency is 8 seconds, but a time of at most 1 seconds is expected"),
        (
            {"links": [{"name": "a", "devices": 8}, {"name": "b", "devices": 12}]},
            "link 1 (b) connects 12 devices, but the level within has 8",
        ),
        ({"links": [{"name": "a"}, {"name": "b"}]}, "link 0 (a) has no number of devices: only the last link"),
    ],
)
def test_a_bad_profile_is_one_clear_sentence(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(BLOCK, **more)
    assert str(caught.value).startswith(message)


def test_missing_layers_are_named() -> None:
    with pytest.raises(ConfigError, match=r"^layer 1 is missing: after layer 0 comes 2$"):
        parsed({**BLOCK, "layer": 0}, {**BLOCK, "layer": 2}, {**BLOCK, "layer": 3})
    for text in ("[]", "{}", '{"layers": []}', '{"layers": 3}', "3"):
        with pytest.raises(ConfigError, match="the profile has no layers: it needs"):
            parse_profile(text)


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parsed({**BLOCK, "forward": -1, "activation": "x"}, 7, {"name": "empty"}, samples=0)
    said = str(caught.value)
    assert said.count("; ") == 3
    assert said.endswith("; and 5 more")


@pytest.mark.parametrize("text", ["", "{", '{"layers": [' * 10_000, "\0"])
def test_what_is_no_json_is_said(text: str) -> None:
    with pytest.raises(ConfigError, match="the profile is not valid JSON: "):
        parse_profile(text)


def test_a_file_that_is_none_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file nowhere"):
        read_profile("nowhere")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="bytes is not text; a profile is a JSON file"):
        read_profile(tmp_path / "bytes")
    (tmp_path / "bad.json").write_text('{"layers": []}')
    with pytest.raises(ConfigError, match=r"bad\.json: the profile has no layers"):
        read_profile(tmp_path / "bad.json")
