"""Torch's own runtime runs our schedules: examples/torch_runtime.py on two ranks, against a plain loop."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gapless.cli import main
from tests.run.forked import Launch

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples" / "torch_runtime.py"
PAGE = ROOT / "docs" / "migrating.md"
MICROBATCHES = 4
SCHEDULES = ["zb-h1", "interleaved"]
if torch.__version__ >= "2.13":  # older ones send from a stage to the next on the same rank, which Gloo does not do
    SCHEDULES += ["zb-v", "v-min", "auto --input-grad 1.2 --weight-grad 0.8 --latency 0.05"]


def script() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "train"}
    exec(compile(FILE.read_text("utf-8"), str(FILE), "exec"), names)
    return names


def on_rank(folder: str) -> None:
    train = script()["train"]
    for number in range(len(SCHEDULES)):
        layers, mine, x, y = train(f"{folder}/{number}.csv")
        found = {stage: [each.grad for each in layers[stage].parameters()] for stage in mine}
        model = nn.Sequential(*layers)
        model.zero_grad()
        for part, target in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
            F.mse_loss(model(part), target).backward()
        for stage, grads in found.items():
            for ours, parameter in zip(grads, layers[stage].parameters(), strict=True):
                assert torch.equal(ours, parameter.grad / MICROBATCHES), f"{SCHEDULES[number]}, stage {stage}"


def test_the_page_shows_lines_of_the_script() -> None:
    (shown,) = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert set(shown.splitlines()) - {"    ..."} <= set(FILE.read_text("utf-8").splitlines())


def test_torch_s_runtime_runs_our_csv_with_the_gradients_of_a_plain_loop(launch: Launch, tmp_path: Path) -> None:
    for number, words in enumerate(SCHEDULES):
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            sizes = ["--devices", "2", "--microbatches", str(MICROBATCHES), "--format", "csv"]
            assert main(["show", *words.split(), *sizes]) == 0
        (tmp_path / f"{number}.csv").write_text(said.getvalue())
    launch(on_rank, 2, str(tmp_path))
