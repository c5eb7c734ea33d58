"""Configs as tired people write them: each trains, or is refused in one sentence. None ends in a traceback."""

import random
import re
from pathlib import Path

import pytest

from gapless.cli import main
from gapless.train.config.keys import keys_of
from gapless.train.config.tables import TABLES
from tests.train.configs import CONFIG, GPT, MINE

_WORDS = (
    "cpu auto gpt mine.py:make mine.py:nothing mine.py:failing no.py:no zb-v 2bw bf16 fp16 cosine StepLR OneCycleLR"
)
_WORDS += " SGD text tokens records ../../etc \\u0000 mse_loss next_token huggingface python-source stage layer"
VALUES = [
    *("0", "1", "-1", "2", "3", "7", "1.5", "-0.5", "nan", "inf", "-inf", "1e400", "true", "false", "9" * 20, '""'),
    *(f'"{word}"' for word in _WORDS.split()),
    *("[]", "[1]", '["cpu"]', "[1, 2, 3]", '["cpu", "cpu", "cpu"]', "[[1]]", "1979-05-27"),
    *("{}", "{ a = 1 }", "{ lr = -1 }", "{ context = 0 }", "{ step_size = 1 }", "{ width = 6, heads = 4 }"),
    '{ files = "mine.toml", context = 4 }',
]
_ELSEWHERE = ("run.folder", "run.wandb")  # would write outside, or want a network
SMALL = ("--set", "run.tensorboard=false", "--set", "run.report=false")


def wild(chance: random.Random) -> str:
    """A config that was right, with some keys set to anything, lines dropped or doubled, and letters changed."""
    text = chance.choice([CONFIG, GPT])
    tables = {name: [] for name in TABLES}  # type: dict[str, list[str]]
    name = ""
    for line in text.splitlines():
        if found := re.fullmatch(r"\[(\w+)\]", line):
            name = found[1]
        elif line.strip():
            tables[name].append(line)
    for _ in range(chance.randint(1, 4)):
        table = chance.choice(list(TABLES))
        keys = keys_of(TABLES[table])
        key = chance.choice(list(keys)) if chance.random() < 0.95 else chance.choice(["zzz", "stesp", "é"])
        likely = chance.random() < 0.6 and key in keys and f"{table}.{key}" not in _ELSEWHERE
        value = keys[key].example if likely else chance.choice(VALUES)
        tables[table] = [line for line in tables[table] if not line.startswith(f"{key} ")]
        tables[table].append(f"{key} = {value}")
    tables["train"] = [line for line in tables["train"] if not line.startswith("steps ")] + ["steps = 2"]
    lines = [line for name, rows in tables.items() if rows for line in (f"[{name}]", *rows)]
    if chance.random() < 0.2:
        lines.pop(chance.randrange(len(lines)))
    if chance.random() < 0.1:
        at = chance.randrange(len(lines))
        lines[at] = lines[at][: chance.randrange(len(lines[at]) + 1)]
    return "\n".join(lines) + "\n"


def assert_trained_or_refused(seed: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> int:
    text = wild(random.Random(seed))
    folder.mkdir()
    (folder / "mine.py").write_text(MINE)
    (folder / "mine.toml").write_text(text, encoding="utf-8")
    code = main(["train", str(folder / "mine.toml"), "--folder", str(folder / "run"), *SMALL])
    out, err = capsys.readouterr()
    assert code in (0, 1, 2), f"seed {seed}: {code}\n{text}\n{err}"
    if code:
        assert err.startswith("gapless: "), f"seed {seed}\n{text}\n{err}"
        assert len(err.splitlines()) == 1, f"seed {seed}\n{text}\n{err}"
        assert "Traceback" not in err
    else:
        assert "last loss" in out, f"seed {seed}\n{text}\n{out}\n{err}"
    return code


def test_wild_configs_train_or_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for seed in range(12):
        assert_trained_or_refused(seed, tmp_path / str(seed), capsys)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_300_wild_configs_train_or_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    monkeypatch.chdir(tmp_path)
    codes = [assert_trained_or_refused(1000 + 30 * part + each, tmp_path / str(each), capsys) for each in range(30)]
    assert {0, 2} <= set(codes)
