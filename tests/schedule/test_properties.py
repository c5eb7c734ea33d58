"""All property tests of schedules, with ten times as many examples."""

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_holds_for_some_schedules_holds_for_many() -> None:
    words = ["-m", "pytest", "-m", "not slow", "-p", "no:cacheprovider", "--hypothesis-profile", "many", str(HERE)]
    run = subprocess.run([sys.executable, *words], cwd=HERE.parent.parent, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
