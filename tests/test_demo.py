"""`make demo` is the first thing that people run: it works as it stands, says nothing else, begins with a drawing that
can be read, and ends with a report that opens.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.open_pages import Opener
from tests.programs import Ended, Programs

ROOT = Path(__file__).parent.parent


def commands() -> list[str]:
    """The lines of the demo in the Makefile, with this Python, and a short training of a small model."""
    makefile = (ROOT / "Makefile").read_text("utf-8")
    found = re.search(r"^demo:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert found is not None
    lines = [line.strip() for line in found[1].splitlines()]
    assert lines[0] == "@mkdir -p demo"
    small = "--set model.arguments.width=8 --set model.arguments.depth=2 --set evaluate.batches=1 --set run.timeline=1"
    for old, new in (
        ("$(BIN)/python", sys.executable),
        ("--steps 30", f"{small} --steps 3"),
        ("--steps 50", f"{small} --steps 4"),
    ):
        lines = [line.replace(old, new) for line in lines]
    return lines


def in_a_shell(line: str, folder: Path, environment: dict[str, str]) -> Ended:
    run = subprocess.run(
        line,
        shell=True,
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    return Ended(run.returncode, run.stdout, run.stderr)


@pytest.mark.browser
def test_the_demo_runs_and_its_report_opens(tmp_path: Path, show: Opener, programs: Programs) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = {"PYTHONPATH": str(ROOT / "src"), "PYTHONWARNINGS": "error", "COLUMNS": "80"}
    out = err = ""
    for line in commands():
        if re.match(rf"{re.escape(sys.executable)} (-m gapless (train|checkpoint)|examples/)", line):
            words = shlex.split(line)[1:]  # they load torch, and need no shell
            ended = programs.run(*words[words[0] == "-m" :], cwd=tmp_path, environment=environment)
        else:
            ended = in_a_shell(line.removeprefix("@"), tmp_path, environment)
        out, err = out + ended.out, err + ended.err
        assert ended.code == 0, err
    assert err == "wrote demo/compare.html\n"
    assert out.startswith(
        "0 F0 F1 F2 F3 ···························B0--- B1--- B2--- B3---\n"
        "1 ···F0 F1 F2 F3 ··················B0--- B1--- B2--- B3---\n"
    )
    assert "\nrun: demo/run, resumed after step 3 of 4\n" in out
    assert "\nreport: demo/run/report.html\n" in out
    proof, _, *last = out.splitlines()[-4:]
    assert re.fullmatch(r"all \d+ tensors are bit-identical to 4 steps of plain training on one device", proof)
    named = re.findall(r"demo/\S+\.html", last[0])  # what to do next
    assert [(tmp_path / each).is_file() for each in named] == [True, True]
    assert sorted(file.name for file in (tmp_path / "demo").iterdir()) == ["compare.html", "run", "weights.safetensors"]
    shown = show((tmp_path / "demo" / "run" / "report.html").read_text("utf-8"))
    assert re.fullmatch(r"gpt · run · since step 4: zb-h1 · 2 devices · \d+\.\d% bubble", shown.text("h1"))
    assert shown.page.locator(".report figure").count() == 6
    assert shown.text(".tiles div:first-child dd") == "4"


def test_its_environment_has_what_torch_warns_without() -> None:
    # torch says "Failed to initialize NumPy" at every import where there is none.
    makefile = (ROOT / "Makefile").read_text("utf-8")
    (recipe,) = re.findall(r"^\$\(RUNS\):.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert re.search(r"--editable '\.\[train\]' numpy$", recipe, re.MULTILINE)


@pytest.mark.slow
def test_the_example_in_python_runs(tmp_path: Path) -> None:
    words = [sys.executable, str(ROOT / "examples" / "train_gpt.py"), "--seconds", "1", "--page", "page.html"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONWARNINGS": "error"}
    ended = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.endswith("wrote page.html\n")
