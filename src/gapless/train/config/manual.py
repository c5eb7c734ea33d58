"""What the definitions of the keys say to people: the page with all of them, and a commented config to start from."""

import inspect
from dataclasses import MISSING

from gapless.train.config.keys import Key, keys_of
from gapless.train.config.tables import TABLES

_HEAD = """# Every key of a config

This page is generated from the code: `gapless train --keys` prints it. [Training](training.md) explains how the keys
work together. `--set train.steps=50` sets any of them for one run.
"""
_START = """# A config for `gapless train`. Lines after a # are optional: docs/config.md has all keys.
"""
_SHOWN = {  # what the commented config says without a #
    "model": ("name", "arguments"),
    "data": ("name", "arguments", "minibatch"),
    "optimizer": ("name", "arguments"),
    "pipeline": ("devices", "schedule", "microbatches"),
    "train": ("steps", "clip"),
}
_OF_THE_EXAMPLE = {"model.arguments": "{ width = 64, depth = 8, heads = 4, context = 64 }"}


def page() -> str:
    """Every key with what it means and its default, as Markdown."""
    parts = [_HEAD]
    for table, kind in TABLES.items():
        rows = [f"| `{table}.{name}` | {key.what} | {_usual(key)} |" for name, key in keys_of(kind).items()]
        parts.append(
            "\n".join([f"## [{table}]\n\n{_says(kind)}\n\n| key | meaning | default |\n|---|---|---|", *rows, ""])
        )
    return "\n".join(parts)


def example() -> str:
    """A config that runs as it is, with every key in it."""
    parts = [_START]
    for table, kind in TABLES.items():
        lines = []
        for name, key in keys_of(kind).items():
            value = _OF_THE_EXAMPLE.get(f"{table}.{name}", key.example)
            lines.append(f"{'' if name in _SHOWN.get(table, ()) else '# '}{name} = {value}")
        parts.append("\n".join([f"[{table}]  # {_says(kind)[:1].lower()}{_says(kind)[1:].rstrip('.')}", *lines, ""]))
    return "\n".join(parts)


def _says(kind: type) -> str:
    return " ".join((inspect.getdoc(kind) or "").partition("\n\n")[0].split())


def _usual(key: Key) -> str:
    if key.default is MISSING:
        return "needed"
    if key.usual or key.default in (None, {}):
        return key.usual or "none"
    return f"`{str(key.default).lower() if isinstance(key.default, bool) else key.default}`"
