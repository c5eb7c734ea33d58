"""Profiles in the text format of PipeDream's profiler: read as layers, with what crosses between them, or refused."""

from pathlib import Path

import pytest

from gapless.errors import ConfigError
from gapless.plan.profile.file import read_profile
from gapless.plan.profile.pipedream_graph import is_graph, parse_graph


def node(
    name: str, kind: str = "Linear", forward: float = 1, backward: float = 2, out: str = "8", weights: int = 0
) -> str:
    return (
        f"{name} -- {kind} -- forward_compute_time={forward:.3f}, backward_compute_time={backward:.3f}, "
        f"activation_size={out}, parameter_size={weights:.3f}"
    )


def graph(nodes: list[str], edges: str) -> str:
    return "\n".join([*nodes, *(f"\t{edge.replace('>', ' -- ')}" for edge in edges.split())])


def test_nodes_are_layers_in_an_order_in_which_they_can_run() -> None:
    text = graph(
        [node("c", weights=40), node("a", "Conv2d(3, 64, kernel_size=(3, 3))", 0.5, 1.5), node("b", "ReLU(inplace)")],
        "a>b b>c",
    )
    profile = parse_graph(text, "mine")
    assert [layer.name for layer in profile.layers] == ["a Conv2d", "b ReLU", "c Linear"]
    first, _, last = profile.layers
    assert (first.forward.median, first.whole_backward, first.weight_grad.median) == pytest.approx((5e-4, 1.5e-3, 0))
    assert (last.input_grad.median, last.weight_grad.median) == pytest.approx((1e-3, 1e-3))
    assert (last.parameters, last.gradients, last.optimizer_state, last.activation) == (40, 40, 80, 8)


def test_what_skips_over_nodes_crosses_between_them_too() -> None:
    #   a ---> b ---> c ---> add
    #    `------------------'
    text = graph([node("add"), node("a", out="100"), node("b", out="20"), node("c", out="3")], "a>b b>c c>add a>add")
    profile = parse_graph(text)
    assert [layer.name[0] for layer in profile.layers] == ["a", "b", "c", "a"]
    assert [layer.boundary for layer in profile.layers] == [100, 120, 103, 8]


def test_a_second_source_comes_where_it_is_needed() -> None:
    text = graph([node("late"), node("x"), node("y"), node("z")], "x>y y>z late>z")
    assert [layer.name.split()[0] for layer in parse_graph(text).layers] == ["x", "y", "late", "z"]


def test_inputs_and_items_that_nobody_takes_are_no_layers() -> None:
    text = graph(
        [node("in", "Input", 600, 0, "77"), node("lstm", out="[6; 2; 1]"), node("h", "__getitem__(1)"), node("end")],
        "in>lstm lstm>h lstm>end",
    )
    profile = parse_graph(text)
    assert [layer.name for layer in profile.layers] == ["lstm Linear", "end Linear"]
    assert profile.input == 77
    assert profile.layers[0].boundary == 9


def test_a_stage_that_the_optimizer_has_noted_is_passed_over() -> None:
    assert len(parse_graph(f"{node('a')} -- stage_id=1\n{node('b')} -- stage_id=0\n\ta -- b").layers) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{node('a')}\nhello", "line 2 is neither a node, as .* nor an edge"),
        (f"{node('a')}\n{node('a')}", "line 2: a appears twice"),
        (f"{node('a')}\n\ta -- b", "line 2: the edge has b, which is not a node of the file"),
        (node("a").replace("backward_compute_time", "time"), "line 1 has no backward_compute_time"),
        (node("a", forward=-1), "line 1: forward_compute_time is '-1.000', but it must be a number of at least 0"),
        (node("a", out="many"), "line 1: activation_size is 'many'"),
        (graph([node("a"), node("b")], "a>b b>a"), "the graph has a cycle: a waits for itself"),
        (node("a", forward=0, backward=0), "no time was measured: all 1 nodes take 0 milliseconds"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_line(text: str, message: str) -> None:
    assert is_graph(text)
    with pytest.raises(ConfigError, match=message):
        parse_graph(text)


def test_a_file_of_either_kind_is_a_profile(tmp_path: Path) -> None:
    (tmp_path / "tiny.txt").write_text(graph([node("a"), node("b")], "a>b"))
    profile = read_profile(tmp_path / "tiny.txt")
    assert (profile.name, len(profile.layers)) == ("tiny", 2)
    (tmp_path / "wrong.txt").write_text(f"{node('a')}\n?")
    with pytest.raises(ConfigError, match=r"wrong.txt: line 2 is neither"):
        read_profile(tmp_path / "wrong.txt")
    (tmp_path / "text.txt").write_text("hello")
    with pytest.raises(ConfigError, match=r"text.txt: the profile is not valid JSON"):
        read_profile(tmp_path / "text.txt")
