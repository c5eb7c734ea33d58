"""CONTRIBUTING.md says where a change goes: what it names is there."""

import re
from functools import cache
from pathlib import Path

from benchmarks import BENCHMARKS, benchmark_file
from gapless.cli import COMMANDS
from tests.test_architecture import MAY_IMPORT, PACKAGE

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
HOUSE = TEXT[TEXT.index("## The house") :]
A_NAME = r"`\w+`(?: \([^)`]*\))?"  # with a remark


@cache
def folders() -> list[Path]:
    return [folder for top in (PACKAGE, ROOT / "tests") for folder in top.rglob("*/")]


def found(word: str) -> list[Path]:
    """Where a file or folder of that name is: paths may begin in any folder."""
    return [home / word for home in (ROOT, PACKAGE, *folders()) if (home / word).exists()]


def test_every_file_and_folder_it_names_is_there() -> None:
    words = set(re.findall(r"`([\w./]+(?:/|\.py|\.js|\.css|\.html))`", HOUSE)) - {"cli/COMMAND.py"}
    assert len(words) > 25
    assert [word for word in sorted(words) if not found(word)] == []


def test_what_it_says_is_in_a_file_is_defined_there() -> None:
    places = re.findall(rf"((?:{A_NAME}(?:, | and ))*{A_NAME}) (?:of|in) `([\w./]+\.py)`", HOUSE)
    pairs = [(name, file) for names, file in places for name in re.findall(r"`(\w+)`", names)]
    assert len(pairs) > 20
    for name, file in pairs:
        for path in found(file):
            is_defined = rf"^( *def |class ){name}\b|^{name}\b.* = "
            assert re.search(is_defined, path.read_text("utf-8"), re.MULTILINE), f"{name} is not in {file}"


def test_a_package_imports_only_what_stands_above_it_in_the_table() -> None:
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", HOUSE, re.MULTILINE)
    above = {"_version"}
    for name in re.findall(r"\w+", " ".join(rows)):
        above.add(name)
        assert MAY_IMPORT[name] <= above
    assert above == set(MAY_IMPORT) - {"__main__", "__init__"}


def test_a_command_and_a_benchmark_have_the_file_that_bears_their_name() -> None:
    assert all((PACKAGE / "cli" / f"{name}.py").is_file() for name in COMMANDS)
    for name in BENCHMARKS:
        assert list((ROOT / "benchmarks").rglob(f"{name}.py")) == [benchmark_file(name)]
