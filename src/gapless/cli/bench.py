"""`gapless bench`: measure, always against a bound or a peer in the same run."""

import argparse
import math
from collections.abc import Callable
from importlib import import_module
from typing import Any

from gapless.bench import BENCHMARKS
from gapless.bench.rounds import on_terminal
from gapless.cli import options, terminal
from gapless.errors import ConfigError
from gapless.schedule.recipes import find_recipe

_EXAMPLES = {
    "emulated": "gapless bench emulated --devices 8 --microbatches 16 --milliseconds 5",
    "overhead": "gapless bench overhead --rounds 11",
    "tiny": "gapless bench tiny",
    "split": "gapless bench split",
    "scale": "gapless bench scale --largest 256",
    "prediction": "gapless bench prediction --html prediction.html",
    "timeline": "gapless bench timeline",
    "plan": "gapless bench plan --parts prediction",
    "compile": "gapless bench compile --width 2048 --length 1024 --samples 8 --bf16",
}


def add(commands: Any, purpose: str) -> Callable[[argparse.Namespace], int]:
    parser = options.parser(commands, "bench", purpose, _EXAMPLES["emulated"])
    names = parser.add_subparsers(dest="name", metavar="NAME", parser_class=type(parser), title="benchmarks")
    for name, what in BENCHMARKS.items():
        made = options.parser(names, name, what, _EXAMPLES[name])
        _OPTIONS[name](made)
        made.add_argument("--json", action="store_true", help="print one JSON object")

    def run(arguments: argparse.Namespace) -> int:
        if arguments.name is None:
            parser.print_help()
            return 0
        return _run(arguments)

    return run


def _run(arguments: argparse.Namespace) -> int:
    given = {key: value for key, value in vars(arguments).items() if key not in ("command", "name", "json")}
    for name in given.get("schedules", ()):
        find_recipe(name)
    if "schedule" in given:
        find_recipe(given["schedule"])
    if given.get("smallest", 0) > given.get("largest", 0):
        raise ConfigError(f"--smallest {given['smallest']} is above --largest {given['largest']}")
    options.refuse_ranks("gapless bench")
    benchmark = import_module(f"gapless.bench.{arguments.name}")  # torch is loaded here, and not before
    try:
        found = benchmark.run(**given, progress=on_terminal)
    finally:
        on_terminal("")
    if arguments.json:
        terminal.print_json(found)
    else:
        terminal.say(benchmark.report(found))
    return 0


def _emulated(parser: argparse.ArgumentParser) -> None:
    _schedules(parser, "1f1b,zb-h1,interleaved,zb-v")
    _sizes(parser, devices=8, microbatches=16)
    _milliseconds(parser, 5)
    _count(parser, "rounds", 5, "rounds, of which the median counts")
    _count(parser, "size", 1, "floats that a sample carries from stage to stage")
    parser.add_argument("--torchrun", action="store_true", help="a process for each device, over Gloo, as torchrun has")
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="without torch.distributed.pipelining")


def _overhead(parser: argparse.ArgumentParser) -> None:
    for name, default, what in (
        ("depth", 8, "blocks of the GPT"),
        ("width", 256, "its width, a multiple of 4"),
        ("batch", 4, "sequences in a minibatch"),
        ("length", 64, "tokens in a sequence"),
        ("microbatches", 4, "microbatches"),
        ("threads", 1, "intra-op threads of both"),
        ("rounds", 11, "rounds, of which the median counts"),
    ):
        _count(parser, name, default, what)


def _tiny(parser: argparse.ArgumentParser) -> None:
    _sizes(parser, devices=2, microbatches=32)
    for name, default, what in (
        ("width", 32, "width of the linear layers"),
        ("layers", 2, "of them in a stage"),
        ("samples", 4, "samples in a microbatch"),
        ("steps", 20, "steps in a round"),
        ("rounds", 9, "rounds, of which the median counts"),
    ):
        _count(parser, name, default, what)


def _split(parser: argparse.ArgumentParser) -> None:
    for name, default, what in (
        ("width", 32, "width of the blocks, a multiple of 4"),
        ("samples", 2, "samples in a microbatch"),
        ("length", 4, "tokens in a sample of the GPT block"),
        ("times", 200, "times in a round"),
        ("rounds", 9, "rounds, of which the median counts"),
    ):
        _count(parser, name, default, what)


def _scale(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--schedule", default="zb-h1", metavar="NAME", help="default zb-h1")
    _count(parser, "smallest", 16, "devices to begin with; they double")
    _count(parser, "largest", 1024, "devices to end with; microbatches are 4 times as many, at most 1024")


def _prediction(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=("emulated", "gpt"), default="emulated", help="default emulated")
    _schedules(parser, "1f1b,zb-v")
    _sizes(parser, devices=4, microbatches=8)
    _milliseconds(parser, 5)
    _count(parser, "rounds", 5, "steps, of which the median counts")
    parser.add_argument("--html", type=options.file_to_write, metavar="FILE", help="write a page with both timelines")


def _timeline(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--schedule", default="zb-h1", metavar="NAME", help="default zb-h1")
    _sizes(parser, devices=4, microbatches=16)
    _milliseconds(parser, 1)
    _count(parser, "steps", 5, "steps in a round")
    _count(parser, "rounds", 15, "rounds, of which the median counts")


def _plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--parts",
        type=lambda given: tuple(filter(None, given.split(","))),
        default=("prediction", "cuts", "choice"),
        metavar="NAME,NAME",
        help="prediction, cuts and choice (default all three)",
    )
    _count(parser, "rounds", 7, "rounds, of which the median counts")
    parser.add_argument("--seconds", type=_seconds, default=4.0, metavar="S", help="to measure a model (default 4)")
    parser.add_argument(
        "--fit", action="store_true", help="only: what fits on an NVIDIA GPU, by prediction and in fact"
    )
    parser.add_argument("--quick", action="store_true", help="one small model of each part, to see that it runs")


def _compile(parser: argparse.ArgumentParser) -> None:
    _sizes(parser, devices=2, microbatches=4)
    for name, default, what in (
        ("depth", 8, "blocks of the GPT"),
        ("width", 256, "its width, a multiple of 4, and of 128 from 512 on"),
        ("vocab", 256, "its vocabulary"),
        ("samples", 4, "sequences in a microbatch"),
        ("length", 128, "tokens in a sequence"),
        ("steps", 2, "steps in a round"),
        ("rounds", 5, "rounds, of which the median counts"),
    ):
        _count(parser, name, default, what)
    parser.add_argument("--dropout", type=_share, default=0.0, metavar="P", help="dropout of the blocks (default 0)")
    parser.add_argument("--bf16", action="store_true", help="under autocast to bfloat16")
    parser.add_argument("--backend", default="inductor", metavar="NAME", help="of torch.compile (default inductor)")


_OPTIONS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "emulated": _emulated,
    "overhead": _overhead,
    "tiny": _tiny,
    "split": _split,
    "scale": _scale,
    "prediction": _prediction,
    "timeline": _timeline,
    "plan": _plan,
    "compile": _compile,
}


def _schedules(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--schedules",
        type=lambda given: tuple(filter(None, given.split(","))),
        default=tuple(default.split(",")),
        metavar="NAME,NAME",
        help=f"default {default}",
    )


def _sizes(parser: argparse.ArgumentParser, devices: int, microbatches: int) -> None:
    for name, letter, default in (("devices", "K", devices), ("microbatches", "M", microbatches)):
        help_ = f"{name} (default {default})"
        parser.add_argument(f"--{name}", f"-{letter}", type=_at_least_one, default=default, metavar=letter, help=help_)


def _count(parser: argparse.ArgumentParser, name: str, default: int, what: str) -> None:
    parser.add_argument(
        f"--{name}", type=_at_least_one, default=default, metavar="N", help=f"{what} (default {default})"
    )


def _milliseconds(parser: argparse.ArgumentParser, default: float) -> None:
    what = f"time of each F, I and W of a device (default {default})"
    parser.add_argument("--milliseconds", type=_positive, default=default, metavar="X", help=what)


def _at_least_one(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text[:9]) <= 1_000_000 or len(text) > 9:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number from 1 to 1,000,000")
    return int(text)


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number from 0 to below 1")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 600:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number of seconds between 0 and 600")
    return value


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 60_000:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a time between 0 and 60,000 ms")
    return value
