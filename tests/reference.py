"""docs/reference.md from the docstrings: `python -m tests.reference > docs/reference.md`, from the root of the project.

A docstring is paragraphs, lists of options (`name   what it is`, further lines indented) and `>>>` examples.
"""

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from functools import cached_property
from importlib import import_module
from typing import Any

_TITLE = """# Reference

Every public name, with every option. This page is generated from the docstrings, so `help(gapless.Pipeline)` shows the
same text. [Keys of a config](config.md) and [commands](command-line.md) have their own pages.
"""

_SECTIONS = {
    "Training": (
        "gapless.Pipeline",
        "gapless.Result",
        "gapless.pipeline.overlapped_training.OverlappedTraining",
        "gapless.pipeline.result.PendingResult",
        "gapless.plain_step",
        "gapless.aux_loss",
        "gapless.seed_of",
        "gapless.defer",
        "gapless.offload_optimizer",
        "gapless.train.Trainer",
        "gapless.train.Callback",
        "gapless.hf.load",
        "gapless.hf.empty_model",
        "gapless.hf.PipelineTrainer",
        "gapless.checkpoint.Checkpoints",
        "gapless.distributed.init_process_group",
    ),
    "Training without a flush": ("gapless.run.streams.stream.Stream", "gapless.AsyncReplicas"),
    "Planning": (
        "gapless.make_plan",
        "gapless.measure_links",
        "gapless.plan.measure",
        "gapless.plan.Plan",
    ),
    "Schedules": (
        "gapless.make_schedule",
        "gapless.Schedule",
        "gapless.verify",
        "gapless.Costs",
        "gapless.simulate",
        "gapless.Timeline",
        "gapless.costs_of",
        "gapless.join_steps",
        "gapless.compare",
        "gapless.draw",
    ),
}

# What calls give, and nobody makes.
_GIVEN = (
    "gapless.Result",
    "gapless.Schedule",
    "gapless.Timeline",
    "gapless.plan.Plan",
    "gapless.run.streams.stream.Stream",
    "gapless.pipeline.overlapped_training.OverlappedTraining",
    "gapless.pipeline.result.PendingResult",
)

# Their methods are known from where they come from.
_AS_THEIR_BASE = ("gapless.hf.PipelineTrainer",)

# Public for other packages of gapless, not for its users.
_INSIDE = {
    "Costs": ("per_stage", "durations", "transits", "hops", "recomputed_late", "merged"),
    "PendingResult": ("result", "judge"),
    "Pipeline": ("saveable",),
    "Schedule": ("optional", "with_rows"),
    "Stream": ("loading", "saveable", "reloaded", "check_whole", "owner"),
    "Timeline": ("all_spans",),
    "Trainer": ("tell", "update"),
}

_OPTION = re.compile(r"(?P<names>[\w.*]+(?:, [\w.*]+)*) {2,}(?P<text>\S.*)")


def page() -> str:
    parts = [_TITLE]
    for title, names in _SECTIONS.items():
        parts.append(f"## {title}\n")
        for name in names:
            parts.extend(_entry(name))
    return "\n".join(parts)


def _entry(name: str) -> Iterator[str]:
    module, _, own = name.rpartition(".")
    found = getattr(import_module(module), own)
    shown = own if module.count(".") > 1 else name
    yield f"### {shown}\n"
    if name not in _GIVEN:
        yield _signature(found, shown)
    yield _text(found)
    if not inspect.isclass(found) or name in _AS_THEIR_BASE:
        return
    for member, value in _members(found).items():
        yield f"#### {own}.{member}\n"
        if inspect.isfunction(value):
            yield _signature(value, member)
        yield _text(value)


def _members(found: type) -> dict[str, object]:
    """What is public and says what it is, our own base classes' too."""
    members: dict[str, object] = {}
    for base in found.__mro__:
        for name, value in vars(base).items() if base.__module__.startswith("gapless") else ():
            call = getattr(value, "__func__", value)
            if (inspect.isfunction(call) or isinstance(call, property | cached_property)) and inspect.getdoc(call):
                members.setdefault(name, call)
    hidden = _INSIDE.get(found.__name__, ())
    return {name: call for name, call in members.items() if not name.startswith("_") and name not in hidden}


def _signature(call: Callable[..., Any], name: str) -> str:
    """Names and defaults; what they are the text says."""
    parameters = [each.replace(annotation=each.empty) for each in inspect.signature(call).parameters.values()]
    plain = str(inspect.Signature([each for each in parameters if each.name not in ("self", "cls")]))
    plain = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", plain)
    line = f"{name}{plain}"
    if len(line) > 100:
        line = f"{name}(\n" + textwrap.fill(plain[1:-1], 96, initial_indent="    ", subsequent_indent="    ") + "\n)"
    return f"```py\n{line}\n```\n"


def _text(found: object) -> str:
    """A docstring as Markdown."""
    return "\n".join(_block(block) for block in re.split(r"\n\s*\n", inspect.getdoc(found) or ""))


def _block(block: str) -> str:
    if block.startswith(">>>"):
        return f"```text\n{block}\n```\n"
    options = _options(block.split("\n"))
    if options is None:
        return f"{' '.join(block.split())}\n"
    rows = "\n".join(f"| {_code(names)} | {text} |" for names, text in options)
    return f"| | |\n|---|---|\n{rows}\n"


def _options(lines: list[str]) -> list[tuple[str, str]] | None:
    """Names with their texts, if it is a list of them."""
    found: list[tuple[str, str]] = []
    for line in lines:
        if option := _OPTION.fullmatch(line):
            found.append((option["names"], option["text"]))
        elif found and line.startswith("    "):
            names, text = found[-1]
            found[-1] = names, f"{text} {line.strip()}"
        else:
            return None
    return [(names, text.replace("|", "\\|")) for names, text in found]


def _code(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", "))


if __name__ == "__main__":
    print(page(), end="")
