"""`make demo` is the first thing that people run: it works as it stands, says nothing else, and begins with a drawing
that can be read.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def commands() -> list[str]:
    """The lines of the demo in the Makefile, with this Python, and a training of a second."""
    makefile = (ROOT / "Makefile").read_text("utf-8")
    found = re.search(r"^demo:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert found is not None
    lines = [line.strip() for line in found[1].splitlines()]
    assert lines[0] == "@mkdir -p demo"
    return [line.replace("$(BIN)/python", sys.executable).replace("--seconds 45", "--seconds 1") for line in lines]


def test_the_demo_runs_and_begins_with_a_drawing_whose_actions_are_apart(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONWARNINGS": "error", "COLUMNS": "80"}
    ended = subprocess.run(
        "set -e\n" + "\n".join(line.removeprefix("@") for line in commands()),
        shell=True,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == "wrote demo/compare.html\n"
    assert ended.stdout.startswith(
        "0 F0 F1 F2 F3 ···························B0--- B1--- B2--- B3---\n"
        "1 ···F0 F1 F2 F3 ··················B0--- B1--- B2--- B3---\n"
    )
    assert ended.stdout.endswith("wrote demo/training.html\n")
    assert sorted(file.name for file in (tmp_path / "demo").iterdir()) == ["compare.html", "training.html"]


def test_its_environment_has_what_torch_warns_without() -> None:
    # torch says "Failed to initialize NumPy" at every import where there is none.
    makefile = (ROOT / "Makefile").read_text("utf-8")
    (recipe,) = re.findall(r"^\$\(RUNS\):.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert re.search(r"--editable \. numpy$", recipe, re.MULTILINE)
