"""Random command lines and mutated schedule files: an answer or one sentence, never a traceback."""

import random
from pathlib import Path

import pytest

from gapless.schedule.recipes import RECIPES
from tests.cli.conftest import Command

QUICK = [name for name in RECIPES if name != "optimal"]
NUMBERS = [
    "0",
    "1",
    "2",
    "3",
    "-1",
    "0.5",
    "nan",
    "inf",
    "1e308",
    "1e-320",
    "x",
    "",
    "1,2",
    "1,1,1,1",
    "7,nan",
    "٣",
    "1_0",
]
SIZES = ["0", "1", "2", "3", "5", "6", "-2", "99999999999", "1.5", "", "two"]
FLAGS = [
    "--json",
    "--split",
    "--fuse",
    "--remat",
    "--forward-only",
    "--updates",
    "--transfers",
    "--help",
    "-h",
    "--",
    "-",
]
WITH_NUMBER = [
    *("--forward", "--input-grad", "--weight-grad", "--recompute", "--update", "--activation", "--boundary"),
    *("--kept-for-weight-grad", "--latency", "--bandwidth", "--memory-limit"),
]
WITH_SIZE = ["--devices", "--microbatches", "--stages-per-device", "--minibatches", "--replicas", "-K", "-M"]


def words(chance: random.Random, files: list[str]) -> list[str]:
    line = [
        chance.choice(["schedules", "show", "show", "simulate", "simulate", "compare", "verify", "train", "shwo", ""])
    ]
    if line[0] in ("show", "simulate", "verify", "train"):
        line.append(chance.choice([*QUICK, *QUICK, *files, *files, "zbv", "", "/", "\0", "a" * 5000, "né.txt"]))
    line += ["-K", str(chance.randint(1, 4)), "-M", str(chance.randint(1, 6))] if chance.random() < 0.8 else []
    for _ in range(chance.randint(0, 4)):
        kind = chance.random()
        if kind < 0.35:
            line.append(chance.choice(FLAGS))
        elif kind < 0.65:
            line += [chance.choice(WITH_NUMBER), chance.choice([*NUMBERS, "2x", "1x"])]
        elif kind < 0.8:
            line += [chance.choice(WITH_SIZE), chance.choice(SIZES)]
        elif kind < 0.9:
            line += ["--format", chance.choice(["text", "csv", "json", "grid", "pdf"])]
        else:
            line += chance.choice([["--remat", "late"], ["--objective", "span"], ["--objective"], ["--zzz=1"], ["é"]])
    return line


def mutated(chance: random.Random, text: str) -> str:
    characters = list(text)
    for _ in range(chance.randint(1, 6)):
        at = chance.randrange(len(characters) + 1)
        action = chance.random()
        if action < 0.3:
            characters[at : at + chance.randint(1, 12)] = []
        elif action < 0.6:
            characters.insert(at, chance.choice('0123456789FBIWRU:,{}[]" \n\t\r\0-é٣SEND_RECV'))
        elif action < 0.8:
            other = chance.randrange(len(characters) + 1)
            characters[at:at] = characters[other : other + chance.randint(1, 40)]
        else:
            characters = characters[:at] or ["0"]
    return "".join(characters)


@pytest.mark.parametrize("seed", range(5))
def test_30_random_command_lines_give_an_answer_or_one_sentence(gapless: Command, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    originals = [
        gapless(f"show {name} -K 3 -M 4 --format {form}").out
        for name, form in (("1f1b", "text"), ("zb-v", "csv"), ("interleaved", "json"), ("pipedream", "text"))
    ]
    originals.append(gapless("show zb-h1 -K 2 -M 3 --transfers --updates --remat --format text").out)
    for turn in range(30):
        file = tmp_path / f"{turn}.txt"
        file.write_text(mutated(chance, chance.choice(originals)), encoding="utf-8")
        line = words(chance, [str(file)])
        code, _, err = gapless("", *line)
        assert code in (0, 2), line
        assert "Traceback" not in err, line
        assert bool(err) <= (code == 2), (line, err)
