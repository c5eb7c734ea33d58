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


@pytest.fixture
def gapless(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    monkeypatch.setenv("COLUMNS", "100")

    def run(line: str, *more: str) -> Outcome:
        code = main([*line.split(), *more])
        return Outcome(code, *capsys.readouterr())

    return run
