"""The options that commands share: sizes, costs, passes and where the output goes."""

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from gapless.cli.output.asked import add_look, add_options, add_outputs, given, number_of
from gapless.cli.terminal import say, show_progress
from gapless.errors import ConfigError, ScheduleError
from gapless.schedule import recipes
from gapless.schedule.action import PER_MINIBATCH, Kind, Schedule
from gapless.schedule.costs import Costs, Number, PerStage
from gapless.schedule.lower import Passes, consecutive, lowered
from gapless.schedule.memory import fits
from gapless.schedule.recipes.request import Request
from gapless.schedule.timeline import Timeline
from gapless.schedule.verify import verify
from gapless.units import show_count
from gapless.user_file import read_user_file

_DEVICES, _MICROBATCHES = 4, 8  # unless told


def add_all(parser: argparse.ArgumentParser) -> None:
    """The options of every command that makes schedules: sizes, costs, passes and outputs."""
    add_options(
        parser.add_argument_group("sizes"),
        ("--devices -K", int, _DEVICES, "K", "number of devices"),
        ("--microbatches -M", int, _MICROBATCHES, "M", "number of microbatches"),
        ("--stages-per-device", int, None, "V", "stages per device (default: the recipe's own)"),
        ("--minibatches", int, 8, "N", "2bw: number of minibatches to show"),
        ("--replicas", _integers, None, "R,R", "pipedream: replicas of each stage"),
    )
    costs = parser.add_argument_group(
        "costs",
        "a single number is per device and microbatch, shared by its stages; a list such as 1,2,1,1 is per stage",
    )
    boundary = "memory of a stage's input: it is sent, and kept if the stage is recomputed"
    limit = "memory of a device, in the unit of --activation, or a multiple such as 2x: twice the peak of 1f1b"
    add_options(
        costs,
        ("--forward", _per_stage, 1, "X", "time of a forward"),
        ("--input-grad", _per_stage, 1, "X", "time of the input gradient"),
        ("--weight-grad", _per_stage, 1, "X", "time of the weight gradient"),
        ("--recompute", _per_stage, None, "X", "time of a recompute (default: that of a forward)"),
        ("--update", _per_stage, 0, "X", "time of a weight update"),
        ("--activation", _per_stage, 1, "X", "memory of an activation, held from F to W"),
        ("--boundary", _per_stage, 0, "X", boundary),
        ("--kept-for-weight-grad", _per_stage, None, "X", "the part of the activation held from I to W (default: all)"),
        ("--latency", number_of, 0, "X", "time of a hop between devices"),
        ("--bandwidth", number_of, None, "X", "boundary memory that a link carries per unit of time"),
        ("--host-bandwidth", number_of, None, "X", "with --offload: memory copied to the host per unit of time"),
        ("--host-latency", number_of, 0, "X", "with --offload: latency of a copy, whatever its size"),
        ("--host-share", int, 1, "N", "with --offload: devices that share a link to their host"),
        ("--memory-limit", str, None, "X", limit),
    )
    costs.add_argument(
        "--objective", choices=("makespan", "span"), default="makespan", help="what to minimise (default makespan)"
    )
    _add_passes(parser)
    add_outputs(parser)
    add_look(parser)


def _add_passes(parser: argparse.ArgumentParser) -> None:
    passes = parser.add_argument_group("passes", "changes to the schedule, in this order")
    split, fuse = "run a B as I and W where that saves time", "run an I and its W as one B where no device waits"
    add_options(passes, ("--split", split), ("--fuse", fuse))
    remat = "recompute activations, early (the default: as early as memory allows) or late"
    passes.add_argument("--remat", nargs="?", const="early", choices=("early", "late"), help=remat)
    offload = "keep activations in host memory while they wait: as many as --memory-limit requires, or all that "
    add_options(
        passes,
        ("--offload", f"{offload}delay nothing"),
        ("--forward-only", "keep only the forwards, for inference"),
        ("--updates", "add the weight updates"),
        ("--transfers", "add the sends and receives"),
    )


def add_name(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Which schedule, for commands that take one, or `several`."""
    told = "a name from `gapless schedules`, or a schedule file"
    if several:
        parser.add_argument("schedules", nargs="+", metavar="SCHEDULE", help=told + "; several are drawn together")
    else:
        parser.add_argument("schedule", metavar="SCHEDULE", help=told)
    add_options(parser, ("--time-limit", number_of, 60, "S", "optimal: seconds to search"))


def limit_of(arguments: argparse.Namespace, costs: Costs) -> Number | None:
    """The memory limit as a number."""
    check_sizes(arguments)
    return _request(arguments, "", costs).limit


def refuse_ranks(command: str) -> None:
    """For commands that use the machine alone: torchrun would start the same job once for every rank."""
    ranks = os.environ.get("WORLD_SIZE", "")
    if "RANK" in os.environ and ranks.isdecimal() and int(ranks) > 1:
        raise ConfigError(
            f"`{command}` runs in one process, but torchrun started {ranks}, and each would do the whole job: "
            "start it without torchrun; to train with a process per device, write a script as in docs/cluster.md"
        )


def refuse_below_one(arguments: argparse.Namespace, *names: str, why: str = "it must be") -> None:
    """For numbers of things, where they are given."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name} is {value}, but {why} at least 1")


def check_sizes(arguments: argparse.Namespace) -> None:
    """Refuses what no recipe can be made for, in the words of the command line."""
    refuse_below_one(arguments, "devices", "microbatches", "minibatches", why="a schedule needs")
    recipes.refuse_too_many(3 * arguments.devices * arguments.microbatches * (arguments.stages_per_device or 1))


def build(name: str, arguments: argparse.Namespace, costs: Costs) -> Schedule:
    """The recipe of that name with the sizes and costs asked for."""
    return recipes.build(name, _request(arguments, name, costs))


def _request(arguments: argparse.Namespace, name: str, costs: Costs) -> Request:
    asked = given(arguments, Request)
    return Request(**asked | {"costs": costs, "replicas": arguments.replicas if name == "pipedream" else None})


def given_costs(arguments: argparse.Namespace) -> Costs:
    """A recompute takes as long as a forward, unless told."""
    asked = given(arguments, Costs)
    return Costs(**asked | ({"recompute": asked["forward"]} if asked["recompute"] is None else {}))


def schedule_of(arguments: argparse.Namespace, name: str) -> tuple[Schedule, Costs, Number | None]:
    """The schedule of that name, or in that file, after the passes; its costs and the memory limit."""
    costs = given_costs(arguments)
    limit = limit_of(arguments, costs)
    if is_file(name):
        schedule = verified(name)
        for asked, usual, there in (
            (arguments.devices, _DEVICES, schedule.num_devices),
            (arguments.microbatches, _MICROBATCHES, schedule.num_microbatches),
        ):
            if asked not in (usual, there):
                raise ConfigError(f"{name} is a schedule of {shown_size(schedule)}, not {asked}: leave that out")
    else:
        schedule = _solved(arguments, costs) if name == "optimal" else build(name, arguments, costs)
    schedule, costs = passed(schedule, costs, arguments, limit)
    return _followed(schedule, arguments.steps), costs, limit


def is_file(name: str) -> bool:
    """Whether a schedule is meant that is in a file, and not a recipe."""
    looks_so = os.path.exists(name) or os.sep in name or name.endswith((".txt", ".csv", ".json"))
    return name not in recipes.RECIPES and looks_so


def verified(path: str) -> Schedule:
    """The correct schedule in a file."""
    schedule = read_schedule(path)
    verify(schedule).raise_if_wrong()
    return schedule


def _followed(schedule: Schedule, steps: int) -> Schedule:
    """So many steps, each of which begins before the one before was checked."""
    if steps < 1:
        raise ConfigError(f"--steps is {steps}, but it must be at least 1")
    if steps > 1 and (schedule.has_transfers or schedule.kinds & PER_MINIBATCH or schedule.kinds == {Kind.FORWARD}):
        raise ConfigError(
            "--steps is for schedules with backwards, and without updates or transfers written out: leave those out"
        )
    recipes.refuse_too_many(steps * schedule.num_actions)
    return consecutive(schedule, steps)


def add_steps(parser: argparse.ArgumentParser) -> None:
    """How many of them."""
    words = "number of consecutive steps, whose optimizer does not wait (default 1)"
    parser.add_argument("--steps", type=int, default=1, metavar="N", help=words)


def _solved(arguments: argparse.Namespace, costs: Costs) -> Schedule:
    """The optimal schedule; how far the search is, and what it proved, goes to standard error."""

    def show(progress: Any) -> None:
        show_progress(f"{progress.seconds:6.1f} s  best {float(progress.value):g}  bound {float(progress.bound):g}")

    try:
        asked = _request(arguments, "optimal", costs)
        found = recipes.solve(asked, show)
    finally:
        show_progress("")
    arguments.optimum = found
    shapes = ", ".join(sorted(placement.shape for placement in asked.placements))
    claim = f"proven optimal among {shapes}" if found.proven else f"not proven, gap {100 * found.gap:.2f}%"
    say(
        f"{arguments.objective} {float(found.value):g}, bound {float(found.bound):g}: {claim} ({found.seconds:.1f} s)",
        sys.stderr,
    )
    return found.schedule


def read_schedule(path: str) -> Schedule:
    """A schedule from its file, named after it."""
    parse = partial(Schedule.parse, name=Path(path).stem)
    return read_user_file(path, parse, "a schedule file", "has lines such as `0: 0F0 0B0`", error=ScheduleError)


def shown_size(schedule: Schedule, shape: str = "") -> str:
    """`4 devices, 4 stages, 8 microbatches, 96 actions`."""
    stages = show_count(schedule.num_stages, "stage") + (f" ({shape})" if shape else "")
    devices, actions = show_count(schedule.num_devices, "device"), show_count(schedule.num_actions, "action")
    return f"{devices}, {stages}, {show_count(schedule.num_microbatches, 'microbatch')}, {actions}"


def misfit(timeline: Timeline, limit: Number | None) -> str:
    """That a schedule needs more memory than there is, if it does."""
    peak = max(timeline.peak, default=0)
    if limit is None or fits(peak, limit):
        return ""
    from gapless.view.text import number

    return (
        f"{timeline.schedule.name or 'the schedule'} does not fit: its peak of {number(peak)} is above the limit of "
        f"{number(limit)}; `gapless compare` with the same limit shows what does"
    )


def passed(
    schedule: Schedule, costs: Costs, arguments: argparse.Namespace, limit: Number | None
) -> tuple[Schedule, Costs]:
    """The schedule after the passes asked for, and the costs it is to be simulated with."""
    late, every = arguments.remat == "late", range(schedule.num_stages)
    asked = given(arguments, Passes) | {"early": not late, "memory_limit": limit}
    asked |= {"recompute": every if arguments.remat else (), "offload": every if arguments.offload else ()}
    made = lowered(schedule, costs, Passes(**asked))
    return made, costs.recomputed_late(schedule.placement) if late else costs


def _per_stage(text: str) -> PerStage:
    return tuple(map(number_of, text.split(","))) if "," in text else number_of(text)


def words(text: str) -> tuple[str, ...] | None:
    """A list with commas; None for nothing at all."""
    return tuple(filter(None, text.split(","))) or None


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a list of whole numbers such as 2,1,1") from None
