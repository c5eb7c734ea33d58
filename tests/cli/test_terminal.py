"""Names come from files, and a terminal acts on what they hold: nothing of it comes out raw, wherever it is printed."""

import ast
import json
from pathlib import Path

import pytest

import gapless.cli
from gapless.errors import ConfigError, GaplessError, printable
from gapless.plan.plan import Plan
from gapless.plan.profile.file import parse_profile
from gapless.schedule.action import Schedule
from gapless.schedule.verify import verify
from tests.cli.conftest import Command

# Colour, the title of the window, a bell, a line that looks like ours, the other direction of writing, a surrogate.
EVIL = "\x1b[31mred\x1b]0;title\x07\rgood: correct\nmine: correct\x9b2J\u202egnp\x00\ud800"


def layer(**more: object) -> dict[str, object]:
    return {"name": EVIL, "forward": "1 ms", "parameters": 1000, "activation": 1000, "boundary": 1000, **more}


def files(folder: Path) -> dict[str, str]:
    """One of each kind of file that has a name in it, and what it is called is as bad."""
    key = json.dumps(EVIL[:-1])
    made = {
        "schedule": json.dumps({"schedule": EVIL, "rows": [["0F0", "0B0"]]}),
        "wrong": json.dumps({"schedule": EVIL, "rows": [["0B0", "0F0"]]}),
        "token": f"0: 0F0 {EVIL}".replace("\n", " ").replace("\ud800", ""),
        "profile": json.dumps(
            {"profile": EVIL, "device": EVIL, "minibatch": 8, "layers": [layer(repeat=4)], "links": [{"name": EVIL}]}
        ),
        "no-profile": json.dumps({"profile": EVIL, "layers": [layer(forward=EVIL)], EVIL: 1}),
        "plan": json.dumps({"recipe": EVIL, "schedule": {"rows": [[EVIL]]}}),
        "config": f'[model]\nname = {key}\n[data]\nname = "x:y"\nminibatch = 4\n{key} = 1\n',
    }
    odd = EVIL.replace("\ud800", "").replace("\0", "").replace("\n", "")
    endings = {"config": ".toml", "token": ".txt"}
    found = {}
    for name, content in made.items():
        file = folder / f"{odd}{name}{endings.get(name, '.json')}"
        file.write_text(content, "utf-8")
        found[name] = str(file)
    return found


@pytest.mark.parametrize(
    "words",
    [
        ("verify", "schedule"),
        ("verify", "wrong"),
        ("verify", "token"),
        ("simulate", "schedule"),
        ("simulate", "wrong"),
        ("show", "schedule"),
        ("show", "schedule", "--format", "json"),
        ("show", "token"),
        ("plan", "profile"),
        ("plan", "profile", "--json"),
        ("plan", "profile", "--memory", "1MiB"),
        ("plan", "no-profile"),
        ("plan", "config"),
        ("train", "config"),
        ("simulate", EVIL),
        ("verify", EVIL),
        ("show", "1f1b", "--format", EVIL),
        ("show", "1f1b", f"--{EVIL}"),
        (EVIL,),
        ("compare", "--html", f"{EVIL}/x.html"),
    ],
)
def test_nothing_that_a_terminal_acts_on_comes_out_of_a_command(
    gapless: Command, tmp_path: Path, words: tuple[str, ...]
) -> None:
    there = files(tmp_path)
    _, out, err = gapless(words[0] if words[0] != EVIL else "", *(there.get(word, word) for word in words[1:]))
    said = out + err
    assert said
    assert printable(said, keep="\n") == said
    assert "\nmine: correct" not in said


def test_errors_are_printable_wherever_they_are_caught(tmp_path: Path) -> None:
    with pytest.raises(GaplessError) as caught:
        verify(Schedule.parse("0: 0B0 0F0", name=EVIL)).raise_if_wrong()
    assert printable(str(caught.value), keep="\n") == str(caught.value)
    with pytest.raises(ConfigError) as other:
        Plan.read(files(tmp_path)["plan"])
    assert printable(str(other.value), keep="\n") == str(other.value)


def test_names_are_one_line_as_soon_as_they_are_read() -> None:
    profile = parse_profile(json.dumps({"profile": EVIL, "layers": [layer()]}))
    schedule = Schedule.parse(json.dumps({"schedule": EVIL, "rows": [["0F0", "0B0"]]}))
    for name in (profile.name, profile.layers[0].name, schedule.name):
        assert name == printable(EVIL)
        assert name.isprintable()


def test_text_of_any_language_stays_as_it_is() -> None:
    assert printable("modèle 模型 модель ✓ 'a' \\x1b") == "modèle 模型 модель ✓ 'a' \\x1b"
    assert printable("a\x1b[0m\n") == "a\\x1b[0m\\n"


def test_commands_print_through_one_place() -> None:
    folder = Path(gapless.cli.__file__).parent
    for file in folder.glob("*.py"):
        calls = [node for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, ast.Call)]
        printing = [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]
        assert not printing or file.name == "terminal.py", f"{file.name} prints by itself, at {printing}"
