"""Slow tests come in shards, and every one is in exactly one of them: new files as well."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def shards() -> dict[str, list[Path]]:
    if shutil.which("make") is None:
        pytest.skip("there is no make here")
    listed = subprocess.run(
        ["make", "--silent", "--no-print-directory", "shards"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    rows = (line.split(":") for line in listed.splitlines())
    return {name: [ROOT / word for word in words.split()] for name, words in rows}


def test_every_test_file_is_in_one_shard(shards: dict[str, list[Path]]) -> None:
    for file in ROOT.glob("tests/**/test_*.py"):
        holders = [name for name, places in shards.items() if any(file.is_relative_to(place) for place in places)]
        assert len(holders) == 1, f"{file.relative_to(ROOT)} is in {holders or 'none'}: see SLOW_ in the Makefile"


def test_each_shard_is_named_in_contributing(shards: dict[str, list[Path]]) -> None:
    named = re.findall(r"^\| `make (slow-\w+)`", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(named) == sorted(shards)
