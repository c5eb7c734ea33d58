"""The functions that a config names: found in a file or a module, called with its arguments, and where one of them
fails, that is told with its place. The error itself stays as the cause.

A file is loaded anew for every job, since it may have been edited, but once for all functions of a job, since they may
share what it defines. The modules that it imports are loaded once, as Python does.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any

from gapless.errors import ConfigError, GaplessError, did_you_mean, noted_place
from gapless.model.code_origin import is_users
from gapless.train.config.config import Config
from gapless.train.config.keys import Part

Files = dict[Path, ModuleType]  # those that a job has loaded


@contextmanager
def importable(config: Config) -> Iterator[None]:
    """While it holds, what lies beside a config with functions of one's own can be imported, as beside a script.

    It has to hold wherever they are called, for they may import too.
    """
    folder = str(config.folder.resolve())
    if folder in sys.path or not any(part.is_own for part in config.parts):
        yield
        return
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with suppress(ValueError):  # they may have taken it away
            sys.path.remove(folder)


def load(part: Part, config: Config, files: Files) -> Callable[..., Any]:
    """The function, from a file beside the config or from a module."""
    home, _, name = part.where.rpartition(":")
    with importable(config), told(f"{part.key}.name: loading {home}"):
        module = _from_file(part, config.folder / home, files) if home.endswith(".py") else _imported(part, home)
    function = getattr(module, name, None)
    if callable(function):
        return function  # type: ignore[no-any-return]
    hint = did_you_mean(name, [key for key, value in vars(module).items() if callable(value)], "")
    raise ConfigError(f"{part.key}.name is {part.name!r}, but {home} has no function {name}{hint and f'; {hint}'}")


def _from_file(part: Part, file: Path, files: Files) -> ModuleType:
    if not file.is_file():
        raise ConfigError(f"{part.key}.name is {part.name!r}, but there is no file {file}")
    file = file.resolve()
    if file in files:
        return files[file]
    # Pickle and dataclasses find it under the name of its file; a dot there would be a package.
    loader = SourceFileLoader(str(file).replace(".", "_"), str(file))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    # Not exec_module: what that has compiled before, it takes for the same if it has the same second and size.
    code = loader.source_to_code(file.read_bytes(), str(file))
    sys.modules[loader.name] = module
    try:
        exec(code, vars(module))
    except BaseException:
        del sys.modules[loader.name]
        raise
    return files.setdefault(file, module)


def _imported(part: Part, name: str) -> ModuleType:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"{part.key}.name is {part.name!r}, but there is no module {error.name}: a file is 'file.py:function'"
        ) from None


def call(function: Callable[..., Any], part: Part, config: Config, *given: Any, **offered: Any) -> Any:
    """Call it with the arguments of the config, and of what is offered with that which it takes."""
    arguments = fitting(function, part, *given, **offered)
    with importable(config), told(f"{part.key}: {part.name}"):
        return function(*given, **arguments)


def fitting(function: Callable[..., Any], part: Part, *given: Any, **offered: Any) -> Mapping[str, Any]:
    """The arguments of the config, checked, with that of what is offered which the function takes."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # one written in C
        return part.arguments
    names = [name for name, parameter in signature.parameters.items() if parameter.kind is not parameter.VAR_KEYWORD]
    if len(names) == len(signature.parameters):
        for key in part.arguments:
            if key not in names:
                takes = ", ".join(name for name in names[len(given) :] if name not in offered)
                hint = did_you_mean(key, names, f"it takes {takes or 'none'}")
                raise ConfigError(f"{part.key}.arguments has {key!r}, which {part.name} does not take; {hint}")
    arguments = {**{key: value for key, value in offered.items() if key in names}, **part.arguments}
    try:
        signature.bind(*given, **arguments)
    except TypeError as error:
        raise ConfigError(f"{part.key}.arguments do not fit {part.name}: {error}") from None
    return arguments


@contextmanager
def told(what: str) -> Iterator[None]:
    """Errors that are not gapless's own become one sentence, with the place at which they were raised."""
    try:
        yield
    except GaplessError:
        raise
    except Exception as error:
        raise ConfigError(f"{what} failed with {described(error)}") from error


def described(error: Exception) -> str:
    """`ValueError: too wide, at models.py, line 7, in make`: of all places the last that is no library's."""
    said = " ".join(str(error).split())[:400]
    places = [each for each in extract_tb(error.__traceback__) if is_users(each.filename)]
    at = "".join(f", at {Path(each.filename).name}, line {each.lineno}, in {each.name}" for each in places[-1:])
    stage = noted_place(error)
    return f"{type(error).__name__}{': ' if said else ''}{said}{at}{f' ({stage})' if stage else ''}"
