"""What a user may rely on: a new name at the top of the package is a promise, so this list says when one is made."""

import re
import subprocess
import sys
from importlib import import_module
from importlib.resources import files
from pathlib import Path

import pytest

import gapless

PUBLIC = [
    "AsyncReplicas",
    "Costs",
    "GaplessError",
    "Pipeline",
    "Result",
    "Schedule",
    "Timeline",
    "__version__",
    "aux_loss",
    "compare",
    "costs_of",
    "defer",
    "draw",
    "join_steps",
    "make_plan",
    "make_schedule",
    "measure_links",
    "offload_optimizer",
    "plain_step",
    "schedules",
    "seed_of",
    "simulate",
    "verify",
]


def run_python(program: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


def test_the_public_names_are_these() -> None:
    assert sorted(gapless.__all__) == PUBLIC
    assert dir(gapless) == PUBLIC


def test_there_are_few_of_them() -> None:
    assert len([name for name in PUBLIC if name != "__version__"]) <= 22


@pytest.mark.parametrize("name", PUBLIC)
def test_each_public_name_is_there(name: str) -> None:
    assert getattr(gapless, name) is not None


def test_what_scripts_import_from_packages_is_there() -> None:
    assert callable(import_module("gapless.distributed").init_process_group)
    plan = import_module("gapless.plan")
    assert all(callable(getattr(plan, name)) for name in ("measure", "read_profile", "write_profile", "replicate"))


def test_docs_and_examples_import_public_modules_alone() -> None:
    root = Path(__file__).parent.parent
    public = {"checkpoint", "distributed", "hf", "plan", "train"}
    for page in [root / "README.md", *(root / "docs").glob("*.md")]:
        inside = set(re.findall(r"^\+?(?:from|import) gapless\.([\w.]+)", page.read_text("utf-8"), re.MULTILINE))
        assert inside <= public, page.name


def test_the_functions_are_functions_whatever_was_imported_before() -> None:
    # gapless.schedule.simulate and gapless.schedule.verify are modules of the same name, one level down.
    import_module("gapless.schedule.simulate")
    import_module("gapless.schedule.verify")
    assert callable(gapless.simulate)
    assert callable(gapless.verify)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'gapless' has no attribute 'Schedul'"):
        gapless.Schedul  # noqa: B018


def test_importing_the_package_and_its_schedules_loads_no_torch() -> None:
    run = run_python(
        "import sys, gapless; gapless.simulate(gapless.make_schedule('1f1b', devices=2, microbatches=2)); "
        "sys.exit('torch' in sys.modules)"
    )
    assert run.returncode == 0, run.stderr


def test_the_package_says_that_it_is_typed() -> None:
    assert files("gapless").joinpath("py.typed").is_file()


def test_the_version_is_a_version() -> None:
    assert [part.isdigit() for part in gapless.__version__.split(".")] == [True, True, True]
    run = subprocess.run([sys.executable, "-m", "gapless", "--version"], capture_output=True, text=True, check=False)
    assert run.stdout == f"gapless {gapless.__version__}\n"


def test_every_error_on_purpose_is_a_gapless_error() -> None:
    errors = import_module("gapless.errors")
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    assert classes
    assert all(issubclass(value, gapless.GaplessError) for value in classes)
