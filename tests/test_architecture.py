"""Imports go one way, and this file proves it from the source.

    errors < schedule < view < explore
    errors < guards < stage < model
    {schedule, stage, model} < {plan, run} < checkpoint < pipeline < train < cli
    pipeline < hf
    all of these < benchmarks, which is not in the package

Inside `run`:   what one process needs < ranks.wire < ranks.watch < ranks < streams < overlap
Inside `plan`:  profile < cut < predict < plan < explain < search < asynchronous < planner

`zoo` holds models as people write them, so it knows torch and the one call that a custom autograd function may make.
"""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

import benchmarks

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "gapless"
BENCHMARKS = ROOT / "benchmarks"

_THEORY = {"errors", "schedule"}
_CORE = _THEORY | {"guards", "stage", "model", "slow_work", "units", "user_file"}
_FACADE = _CORE | {"plan", "run", "checkpoint", "pipeline"}
_USERS = _FACADE | {"_version", "distributed", "view", "zoo"}
MAY_IMPORT = {
    "_version": set(),
    "errors": set(),
    "guards": {"errors", "guards"},
    "slow_work": set(),
    "units": {"errors"},
    "user_file": {"errors", "units"},
    "schedule": _THEORY | {"units"},
    "view": _THEORY | {"view", "_version"},
    "explore": _THEORY | {"view", "explore"},
    "stage": {"errors", "guards", "stage"},
    "model": {"errors", "guards", "slow_work", "stage", "model", "units"},
    "plan": _CORE | {"plan"},
    "run": _CORE | {"run", "_version"},
    "checkpoint": _CORE | {"run", "checkpoint", "_version"},
    "pipeline": _FACADE,
    "distributed": {"errors"},
    "zoo": {"stage", "zoo"},
    "train": _USERS | {"train"},
    "hf": _FACADE | {"hf"},
    "cli": _USERS | {"explore", "hf", "train", "cli"},
    "__main__": {"cli"},
    "__init__": {"_version"},
}
WITHOUT_TORCH = ("errors", "guards", "slow_work", "units", "user_file", "schedule", "view", "explore")
COMMANDS_WITHOUT_TORCH = (
    "schedules",
    "show",
    "simulate",
    "compare",
    "explore",
    "verify",
    "plan",
    "plan_report",
    "plan_page",
    "checkpoint",
    "options",
    "__init__",
)
# From the lowest room to the highest; a file belongs to the longest name that it begins with.
ROOMS = (
    ("run", "run.ranks.wire", "run.ranks.watch", "run.ranks", "run.streams", "run.overlap"),
    (
        "plan.profile",
        "plan.cut",
        "plan.predict",
        "plan.plan",
        "plan.explain",
        "plan.search",
        "plan.asynchronous",
        "plan.planner",
    ),
)
MOST_LINES = {"file": 300, "function": 80}
MOST_FILES = 14  # of a folder
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "types", "misc"}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def everything() -> list[Path]:
    """The package, and the benchmarks, which keep house in the same way."""
    return modules() + sorted(BENCHMARKS.rglob("*.py"))


def part(path: Path) -> str:
    """The first name below `gapless`: the package or module a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def imported(path: Path, at_load_time: bool = False) -> tuple[str, ...]:
    """The dotted names a file imports: anywhere in it, or only what runs when it is loaded."""
    return tuple(_imported(path, at_load_time))


def _imported(path: Path, at_load_time: bool) -> Iterator[str]:
    waiting: list[ast.AST] = [_tree(path)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            home = [*_place(path).parts[: -node.level], node.module] if node.level else [node.module]
            yield from (".".join([*filter(None, home), alias.name]) for alias in node.names)
        elif at_load_time and (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or _is_for_types_only(node)):
            continue
        waiting.extend(ast.iter_child_nodes(node))


def _is_for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def own(names: Iterable[str]) -> set[str]:
    """Of the imported names those of this package, by the part they belong to."""
    return {name.split(".")[1] for name in names if name.startswith("gapless.")}


def _place(path: Path) -> Path:
    return path.relative_to(PACKAGE.parent if path.is_relative_to(PACKAGE) else ROOT)


def named(path: Path) -> str:
    return str(path.relative_to(PACKAGE) if path.is_relative_to(PACKAGE) else _place(path))


def against_the_floors() -> Iterator[str]:
    for path in modules():
        # The public names are loaded lazily, so what __init__ names for type checkers is not an import.
        names = own(imported(path, at_load_time=path == PACKAGE / "__init__.py"))
        if wrong := names - MAY_IMPORT[part(path)]:
            yield f"{named(path)} imports {sorted(wrong)}, which {part(path)} must not know"
        if "gapless" in imported(path):
            yield f"{named(path)} imports gapless itself, whose names come from everywhere: a circle"
        if {name.split(".")[0] for name in imported(path)} & {"benchmarks", "tests"}:
            yield f"{named(path)} imports benchmarks or tests, which are not in the package"


def test_every_part_of_the_package_has_its_place_in_the_order() -> None:
    assert {part(path) for path in modules()} <= set(MAY_IMPORT)


def dotted(path: Path) -> str:
    """The name of a module without `gapless`; a package has its own."""
    return ".".join(_place(path).with_suffix("").parts).removeprefix("gapless.").removesuffix(".__init__")


@cache
def graph() -> dict[str, set[str]]:
    """What every module imports of this package and of the benchmarks, for types alone or not."""
    names = {dotted(path) for path in everything()}
    found: dict[str, set[str]] = {}
    for path in everything():
        if path == PACKAGE / "__init__.py":
            continue
        whole = (name.removeprefix("gapless.") for name in imported(path))
        found[dotted(path)] = {name if name in names else name.rpartition(".")[0] for name in whole} & names
    return found


def room(name: str, rooms: tuple[str, ...]) -> int | None:
    inside = [number for number, each in enumerate(rooms) if f"{name}.".startswith(f"{each}.")]
    return max(inside, key=lambda number: len(rooms[number]), default=None)


def against_the_order() -> Iterator[str]:
    for rooms in ROOMS:
        for name, others in graph().items():
            here = room(name, rooms)
            for other in others:
                there = room(other, rooms)
                if here is not None and there is not None and there > here:
                    yield f"{name} -> {other}"


def in_circles() -> Iterator[str]:
    """Modules that import themselves, through others; imports for types alone count too."""
    whole = graph()
    for name, others in whole.items():
        waiting, seen = list(others), set[str]()
        while waiting:
            other = waiting.pop()
            if other not in seen:
                seen.add(other)
                waiting.extend(whole.get(other, ()))
        if name in seen:
            yield name


def names_of_several_things() -> Iterator[str]:
    classes = Counter(
        node.name for path in everything() for node in ast.walk(_tree(path)) if isinstance(node, ast.ClassDef)
    )
    # A file of a command or a benchmark has its name, which may be that of what it shows or measures.
    called = set(map(benchmarks.benchmark_file, benchmarks.BENCHMARKS))
    called |= {path for path in modules() if part(path) == "cli"}
    files = Counter(path.stem for path in everything() if path not in called and not path.stem.startswith("__"))
    yield from (name for counted in (classes, files) for name, times in counted.items() if times > 1)


def too_long() -> Iterator[str]:
    for path in everything():
        if len(path.read_text("utf-8").splitlines()) > MOST_LINES["file"]:
            yield named(path)
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= MOST_LINES["function"]:
                yield f"{named(path)}: {node.name}"


def without_a_word() -> Iterator[str]:
    """Public classes and functions that say nothing about themselves."""
    for path in everything():
        for node in _tree(path).body:
            if (
                isinstance(node, ast.ClassDef | ast.FunctionDef)
                and not node.name.startswith("_")
                and ast.get_docstring(node) is None
            ):
                yield f"{named(path)}: {node.name}"


def unnamed_by_their_package() -> Iterator[str]:
    """Files and folders that the docstring of their package says nothing of."""
    for package in (path for path in everything() if path.name == "__init__.py"):
        words = {word.strip(".") for word in re.findall(r"[\w.]+", ast.get_docstring(_tree(package)) or "")}
        folders = [path for path in package.parent.iterdir() if path.is_dir() and not (path / "__init__.py").exists()]
        for path in (path for folder in (package.parent, *folders) for path in folder.iterdir()):
            is_part = path.suffix in (".py", ".html", ".css", ".js") or (path / "__init__.py").exists()
            if is_part and not path.name.startswith("_") and path.name.removesuffix(".py") not in words:
                yield named(path)


def too_many_files() -> Iterator[str]:
    for folder, count in Counter(path.parent for path in everything()).items():
        if count > MOST_FILES:
            yield f"{_place(folder)} has {count} files"


def without_a_noun() -> Iterator[str]:
    for path in everything():
        if FORBIDDEN_NAMES.intersection(_place(path).with_suffix("").parts):
            yield named(path)


# What a function may import, and why not at the top of its file. In `cli` a command loads what it runs.
IMPORTED_LATE = {
    "an extra that may not be installed": (
        *(
            "cairosvg",
            "huggingface_hub",
            "numpy",
            "ortools",
            "peft",
            "pyarrow",
            "rich",
            "tokenizers",
            "transformers",
            "wandb",
        ),
        *("torch.utils.tensorboard", "gapless.schedule.recipes.optimal.optimal"),
    ),
    "only pages need it": ("jinja2", "markupsafe"),
    "only ranks need it": ("torch.distributed", "gapless.run.ranks", "gapless.run.streams", "gapless.run.overlap"),
    "loaded when its name is first used": ("importlib", "gapless.checkpoint.collection"),
}


def late_without_a_reason() -> Iterator[str]:
    known = tuple(name for names in IMPORTED_LATE.values() for name in names)
    for path in modules():
        functions = [node for node in ast.walk(_tree(path)) if isinstance(node, ast.FunctionDef)]
        inner = {node for each in functions for node in ast.walk(each)}
        for node in (each for each in inner if isinstance(each, ast.Import | ast.ImportFrom)):
            name = node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name
            if part(path) != "cli" and not any(f"{name}.".startswith(f"{each}.") for each in known):
                yield f"{named(path)}: {name}"


RULES = [
    against_the_floors,
    against_the_order,
    in_circles,
    late_without_a_reason,
    names_of_several_things,
    too_long,
    too_many_files,
    without_a_noun,
    without_a_word,
    unnamed_by_their_package,
]


@pytest.mark.parametrize("rule", RULES)
def test_the_house_is_in_order(rule: Callable[[], Iterator[str]]) -> None:
    assert not set(rule())


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"), str(path))


@pytest.mark.parametrize("path", [path for path in modules() if part(path) == "zoo"], ids=named)
def test_the_zoo_knows_torch_and_deferred_gradients_only(path: Path) -> None:
    for name in imported(path):
        outside = name.split(".")[0]
        if outside == "gapless":
            assert name.startswith(("gapless.stage.split.deferred", "gapless.zoo")), f"{named(path)} imports {name}"
        else:
            assert outside == "torch" or outside in sys.stdlib_module_names, f"{named(path)} imports {name}"


def _never_sees_a_tensor(path: Path) -> bool:
    return part(path) in WITHOUT_TORCH or (part(path) == "cli" and path.stem in COMMANDS_WITHOUT_TORCH)


def test_schedules_and_their_pictures_never_import_torch_and_load_with_the_standard_library_alone() -> None:
    for path in filter(_never_sees_a_tensor, modules()):
        assert "torch" not in {name.split(".")[0] for name in imported(path)}, named(path)
        outside = {name.split(".")[0] for name in imported(path, at_load_time=True)} - {"gapless"}
        assert outside <= sys.stdlib_module_names, named(path)


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
        "heavy = {'torch', 'numpy', 'ortools', 'rich', 'matplotlib', 'pydantic', 'filelock', 'psutil'}; "
        "heavy = (heavy | (set() if '--html' in sys.argv else {'jinja2'})) & set(sys.modules); "
        "sys.exit(f'{code} {heavy}' if code or heavy else 0)"
    )
    run = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
