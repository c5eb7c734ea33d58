"""Imports go one way, and this file proves it from the source.

    errors < schedule < view
    errors < stage < model
    {schedule, stage, model} < {plan, run} < pipeline < train < bench < cli

`zoo` holds models as people write them, so it knows torch and the one call that a custom autograd function may make.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "gapless"

_THEORY = {"errors", "schedule"}
_CORE = _THEORY | {"stage", "model"}
_FACADE = _CORE | {"plan", "run", "pipeline"}
_USERS = _FACADE | {"_version", "view", "zoo"}
MAY_IMPORT = {
    "_version": set(),
    "errors": set(),
    "schedule": _THEORY,
    "view": _THEORY | {"view", "_version"},
    "stage": {"errors", "stage"},
    "model": {"errors", "stage", "model"},
    "plan": _CORE | {"plan"},
    "run": _CORE | {"run", "_version"},
    "pipeline": _FACADE,
    "zoo": {"stage", "zoo"},
    "train": _USERS | {"train"},
    "bench": _USERS | {"train", "bench"},
    "cli": _USERS | {"train", "bench", "cli"},
    "__main__": {"cli"},
    "__init__": {"_version"},
}
WITHOUT_TORCH = ("errors", "schedule", "view")
COMMANDS_WITHOUT_TORCH = (
    "schedules",
    "show",
    "simulate",
    "compare",
    "verify",
    "plan",
    "plan_report",
    "options",
    "__init__",
)
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "types", "misc"}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def part(path: Path) -> str:
    """The first name below `gapless`: the package or module a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path, at_load_time: bool = False) -> Iterator[str]:
    """The dotted names a file imports: anywhere in it, or only what runs when it is loaded."""
    waiting: list[ast.AST] = [ast.parse(path.read_text("utf-8"), str(path))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            home = (
                [*path.relative_to(PACKAGE.parent).parts[: -node.level], node.module] if node.level else [node.module]
            )
            yield from (".".join([*filter(None, home), alias.name]) for alias in node.names)
        elif at_load_time and (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or _is_for_types_only(node)):
            continue
        waiting.extend(ast.iter_child_nodes(node))


def _is_for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def own(names: Iterator[str]) -> set[str]:
    """Of the imported names those of this package, by the part they belong to."""
    return {name.split(".")[1] for name in names if name.startswith("gapless.")}


def named(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("path", modules(), ids=named)
def test_imports_go_one_way(path: Path) -> None:
    # The public names are loaded lazily, so what __init__ names for type checkers is not an import.
    names = own(imported(path, at_load_time=path == PACKAGE / "__init__.py"))
    wrong = names - MAY_IMPORT[part(path)]
    assert not wrong, f"{named(path)} imports {sorted(wrong)}, which {part(path)} must not know"


def test_every_part_of_the_package_has_its_place_in_the_order() -> None:
    assert {part(path) for path in modules()} <= set(MAY_IMPORT)


@pytest.mark.parametrize("path", [path for path in modules() if part(path) == "zoo"], ids=named)
def test_the_zoo_knows_torch_and_deferred_gradients_only(path: Path) -> None:
    for name in imported(path):
        outside = name.split(".")[0]
        if outside == "gapless":
            assert name.startswith(("gapless.stage.deferred", "gapless.zoo")), f"{named(path)} imports {name}"
        else:
            assert outside == "torch" or outside in sys.stdlib_module_names, f"{named(path)} imports {name}"


def _never_sees_a_tensor(path: Path) -> bool:
    return part(path) in WITHOUT_TORCH or (part(path) == "cli" and path.stem in COMMANDS_WITHOUT_TORCH)


@pytest.mark.parametrize("path", [path for path in modules() if _never_sees_a_tensor(path)], ids=named)
def test_schedules_and_their_pictures_never_import_torch(path: Path) -> None:
    assert "torch" not in {name.split(".")[0] for name in imported(path)}


@pytest.mark.parametrize("path", [path for path in modules() if _never_sees_a_tensor(path)], ids=named)
def test_schedules_and_their_pictures_load_with_the_standard_library_alone(path: Path) -> None:
    outside = {name.split(".")[0] for name in imported(path, at_load_time=True)} - {"gapless"}
    assert outside <= sys.stdlib_module_names


@pytest.mark.parametrize("path", modules(), ids=named)
def test_every_file_has_a_noun_of_its_own(path: Path) -> None:
    assert not FORBIDDEN_NAMES.intersection(path.relative_to(PACKAGE).with_suffix("").parts)


@pytest.mark.parametrize(
    "command",
    [
        ["schedules"],
        ["show", "1f1b"],
        ["show", "zb-v", "--format", "json"],
        ["simulate", "v-half", "--json"],
        ["compare", "--devices", "2", "--microbatches", "2"],
        ["verify", "{file}"],
        ["show", "1f1b", "--html", "{page}", "--svg", "{page}.svg", "--perfetto", "{page}.json"],
    ],
    ids=" ".join,
)
def test_looking_at_schedules_loads_no_torch(command: list[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("0: 0F0 0B0\n")
    words = [word.format(file=file, page=tmp_path / "page.html") for word in command]
    program = (
        "import sys; from gapless.cli import main; code = main(sys.argv[1:]); "
        "heavy = {'torch', 'numpy', 'ortools', 'rich', 'matplotlib'} & set(sys.modules); "
        "sys.exit(f'{code} {heavy}' if code or heavy else 0)"
    )
    run = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
