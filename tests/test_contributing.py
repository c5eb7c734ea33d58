"""CONTRIBUTING.md says where a change goes: what it names is there."""

import re
from pathlib import Path

from gapless.bench import BENCHMARKS
from gapless.cli import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
HOUSE = TEXT[TEXT.index("## The house") :]


def test_every_file_and_folder_it_names_is_there() -> None:
    words = set(re.findall(r"`([\w./]+(?:/|\.py|\.js|\.html))`", HOUSE)) - {"cli/COMMAND.py"}
    package = ROOT / "src" / "gapless"
    homes = [
        ROOT,
        package,
        *(folder for top in (package, ROOT / "tests") for folder in top.rglob("*") if folder.is_dir()),
    ]
    assert len(words) > 25
    assert [word for word in sorted(words) if not any((home / word).exists() for home in homes)] == []


def test_a_command_and_a_benchmark_have_the_file_that_bears_their_name() -> None:
    for folder, names in (("cli", COMMANDS), ("bench", BENCHMARKS)):
        assert all((ROOT / "src" / "gapless" / folder / f"{name}.py").is_file() for name in names)
