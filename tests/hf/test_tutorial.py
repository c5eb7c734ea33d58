"""The script of docs/tutorial-huggingface.md, run as it is printed: in one process, and with a process per device."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tutorial-huggingface.md"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_script_trains_alike_in_one_process_and_under_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (script,) = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    said = []
    for name, words in {
        "one": [],
        "ranks": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "train.py").write_text(script)
        run = subprocess.run(
            [sys.executable, *words, "train.py"], cwd=folder, capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, run.stderr
        said.append(re.findall(r"loss [\d.]+", run.stdout))
        assert (folder / "trained" / "config.json").exists()
    assert said[0] == said[1]
    assert len(said[0]) == 1
