"""Running commands in this process, as `gapless WORD ...` would."""

from collections.abc import Callable
from typing import NamedTuple

import pytest

from gapless.cli import main


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


Command = Callable[..., Outcome]
Refusal = Callable[..., str]


@pytest.fixture
def gapless(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setenv("COLUMNS", "100")

    def run(line: str, *more: str) -> Outcome:
        code = main([*line.split(), *more])
        return Outcome(code, *capsys.readouterr())

    return run


@pytest.fixture
def refused(gapless: Command) -> Refusal:
    """What a command says that makes no sense: one sentence, and nothing else."""

    def run(line: str, *more: str) -> str:
        code, out, err = gapless(line, *more)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith("gapless: ")
        return err.removeprefix("gapless: ").rstrip()

    return run
