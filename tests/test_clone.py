"""A clone is named `gapless`, as the README says, and people write their scripts beside it: both must make no
difference.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Whose line an error names, and what is imported from where: what the name of a folder has changed, or may.
ABOUT_PLACES = (
    "tests/model/test_odd_models.py::test_what_can_not_be_traced_is_refused_with_the_line_and_the_way_out",
    "tests/model/test_code_origin.py",
    "tests/train/data/test_feed.py::test_an_error_in_ones_own_function_is_told_with_its_place_and_stays_the_cause",
    "tests/train/data/test_feed.py::test_a_file_that_can_t_be_loaded_is_told_with_its_line_and_can_be_mended",
    "tests/train/config/test_user_code.py",
    "tests/test_public_surface.py",
)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What git would give, in a folder of that name. Where there is one called `torch` above it, nothing changes."""
    folder = tmp_path_factory.mktemp("src") / "torch" / "gapless"
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("this is no git repository")
    for name in filter(None, os.fsdecode(listed.stdout).split("\0")):
        if (ROOT / name).is_file():  # it may be deleted and not yet committed
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def run(folder: Path, *words: str, package: Path = ROOT / "src") -> "subprocess.CompletedProcess[str]":
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(package)
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=110, check=False
    )


@pytest.mark.slow  # tests/model/test_code_origin.py has files below a folder of that name
def test_what_depends_on_places_passes_in_a_clone_called_gapless(clone: Path) -> None:
    # `_place_of` took every file below a folder of that name for ours: `make test` failed as the README says to run it.
    ended = run(clone, "-m", "pytest", "-m", "not slow", "-p", "no:cacheprovider", *ABOUT_PLACES, package=clone / "src")
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-2000:]


def test_a_script_beside_the_clone_imports_the_package_and_not_the_folder(clone: Path) -> None:
    # `import gapless` gave the folder, as an empty package: module 'gapless' has no attribute 'make_schedule'.
    script = clone.parent / "train.py"
    script.write_text("import gapless\nprint(gapless.make_schedule.__name__)\n")
    ended = run(clone.parent, "train.py")
    assert ended.stdout == "make_schedule\n", ended.stderr
