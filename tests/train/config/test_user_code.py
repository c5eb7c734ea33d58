"""Functions of one's own: loaded anew for every job, and with the folder importable for as long as they need it."""

import pickle
import sys
from pathlib import Path

from torch import nn

from gapless.train.config.config import read_config
from gapless.train.job import build
from gapless.train.run.training import make_trainer
from tests.train.configs import CONFIG

SHARED = """
import torch
from torch import nn


class Outputs(tuple):
    pass


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.second(self.first(x))


def make():
    from beside_it import LAYERS

    return Model() if LAYERS is None else nn.Sequential(*(nn.Linear(8, 8) for _ in range(LAYERS)))


def batches(minibatch):
    while True:
        from also_beside_it import SIZE

        yield torch.ones(minibatch, SIZE), Outputs()


def loss(outputs, target):
    assert type(target) is Outputs
    return outputs.sum()
"""


def write(folder: Path, text: str, layers: int | None) -> Path:
    (folder / "mine.py").write_text(text)
    (folder / "beside_it.py").write_text(f"LAYERS = {layers}")
    (folder / "also_beside_it.py").write_text("SIZE = 8")
    for name in ("beside_it", "also_beside_it"):
        sys.modules.pop(name, None)  # of another test
    file = folder / "mine.toml"
    file.write_text(
        CONFIG.replace("arguments = { depth = 5, dropout = 0.25 }", "").replace('"cross_entropy"', '"mine.py:loss"')
    )
    return file


def test_a_file_that_was_edited_is_loaded_anew(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, SHARED, 2))
    assert len(build(config).model) == 2  # type: ignore[arg-type]
    (tmp_path / "mine.py").write_text(SHARED.replace("range(LAYERS)", "range(5-LAYERS)"))
    assert len(build(config).model) == 3  # type: ignore[arg-type]


def test_an_edit_of_the_same_size_in_the_same_second_counts(tmp_path: Path) -> None:
    """Python's own cache of compiled files would miss it."""
    config = read_config(write(tmp_path, SHARED, 2))
    for count in (2, 3, 4):
        (tmp_path / "mine.py").write_text(SHARED.replace("range(LAYERS)", f"range({count})"))
        assert len(build(config).model) == count  # type: ignore[arg-type]


def test_the_functions_of_a_job_share_what_their_file_defines(tmp_path: Path) -> None:
    job = build(read_config(write(tmp_path, SHARED, 2)))
    assert job.loss is not None
    job.loss(*job.first)  # asserts that the class of the target is its own


def test_neighbours_can_be_imported_also_later_and_the_path_stays_as_it_was(tmp_path: Path) -> None:
    before = list(sys.path)
    job = build(read_config(write(tmp_path, SHARED, 2)))
    assert sys.path == before
    sys.modules.pop("also_beside_it")
    with job.pipeline(None) as pipe:
        trainer = make_trainer(job.config.changed(steps=2), job, pipe)
        trainer.run()
    assert trainer.step == 2
    assert sys.path == before
    assert "also_beside_it" in sys.modules


def test_a_model_of_a_file_can_be_pickled(tmp_path: Path) -> None:
    model = build(read_config(write(tmp_path, SHARED, None))).model
    assert isinstance(model, nn.Module)
    assert type(pickle.loads(pickle.dumps(model))) is type(model)
