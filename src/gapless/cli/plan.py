"""`gapless plan`: how to cut a model, with which schedule, whether it fits and how long a step takes."""

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from gapless import units
from gapless.cli import options, terminal
from gapless.cli.output import asked
from gapless.cli.planning import model_options, plan_page
from gapless.cli.planning.model_options import kinds_of, machine_of, memories, speeds_of
from gapless.cli.planning.pipedream_plan import planned
from gapless.cli.planning.plan_report import as_json, best_of_each_kind, report, what_if_json, what_if_report
from gapless.errors import ConfigError
from gapless.plan.asynchronous.alternatives import Alternative, alternatives
from gapless.plan.asynchronous.stage_times import FORMS
from gapless.plan.profile.file import read_profile, write_profile
from gapless.plan.profile.profile import ANY_HOST, SLACK, Host, Link, Profile, read_host
from gapless.plan.search.search import Found, search
from gapless.plan.search.search_options import OFFLOAD, SearchOptions
from gapless.plan.search.what_if import Answer, read_changes, usual_changes, what_if
from gapless.view import text

EXAMPLE = "gapless plan profile.json --devices 8 --memory 24GiB, or gapless plan --model gpt2 --memory 80GB"
_ONLY_WITH_A_FLUSH = (
    *("what_if", "device_profiles", "html", "figure", "perfetto", "write", "speeds"),
    *("schedules", "minibatch", "microbatches", "shard_optimizer", "slack", "host_bandwidth", "host_memory"),
)


def add(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    source = "a JSON file with the costs of the layers, or a graph.txt of PipeDream's profiler (docs/profiles.md); or "
    source += "a .toml config with a model and data, which is then measured (docs/training.md)"
    parser.add_argument("source", metavar="PROFILE", nargs="?", help=source)
    asked.add_options(
        parser.add_argument_group("devices and sizes"),
        ("--devices -K", int, None, "N", "number of devices (default: the config's, or 4)"),
        ("--memory", str, None, "SIZE", "memory of each device, such as 24GiB, or a list such as 24GiB,16GiB"),
        ("--speeds", str, None, "X,X", "speeds of the devices, if they differ; 1 is as profiled"),
        (
            "--device-profiles",
            str,
            None,
            "N,FILE:N",
            "devices of several kinds: N as profiled, N as in another profile",
        ),
        ("--minibatch", int, None, "N", "samples in a step (default: from the file)"),
        ("--microbatches -M", int, None, "M", "number of microbatches (default: try several)"),
        ("--bandwidth", str, None, "X", "of links between all devices, such as 25GB/s, in place of the profile's"),
        ("--latency", str, None, "T", "of these links, such as 20us (default 0)"),
        ("--host-bandwidth", str, None, "X", "between a device and its host, such as 25GB/s (default: the profile's)"),
        ("--host-memory", str, None, "SIZE", "host memory that a device may use, such as 64GiB (default: no limit)"),
    )
    model_options.add(parser)
    asked.add_options(
        parser.add_argument_group("measuring a config"),
        ("--seconds", float, None, "S", "about how many seconds to measure (default 10)"),
        ("--profile", asked.file_to_write, None, "FILE", "write the measured profile, to plan again later"),
    )
    searched = parser.add_argument_group("search")
    names = ("--schedules", options.words, None, "NAME,NAME", "schedules to try (default: auto and all with a flush)")
    asked.add_options(searched, names)
    flush = "plan stages and their replicas for training without a flush instead, as PipeDream does; pipedream counts "
    flush += "times as PipeDream's optimizer does, ring (the default) as gapless does"
    searched.add_argument("--no-flush", nargs="?", const="ring", choices=tuple(FORMS), help=flush)
    change = "plan again for a machine with memory+8GiB (each), devices+1, bandwidth*2, latency/2, speed*1.5 or "
    change += "minibatch*2, and report the gain of each (default: 8 GiB more, a device more, links twice as fast)"
    searched.add_argument("--what-if", nargs="?", const="", metavar="CHANGE,CHANGE", help=change)
    host = "use host memory for activations (the default), where that helps, for the optimizer's state, or for both"
    searched.add_argument("--offload", nargs="?", const="activations", default="none", choices=OFFLOAD, help=host)
    slack = f"share of memory that the allocator loses (default: the profile's, or {SLACK})"
    asked.add_options(
        searched,
        ("--overlap", "count the copies of an optimizer step that does not wait"),
        ("--shard-optimizer", "split the optimizer's state between replicas"),
        ("--slack", float, None, "X", slack),
        ("--time-limit", float, None, "S", "seconds to search (default 60; 20 with --model)"),
        ("--top", int, 10, "N", "number of plans to list"),
    )
    asked.add_outputs(parser)
    asked.add_options(parser, ("--write", asked.file_to_write, None, "FILE", "write the best plan, to train with"))


def run(arguments: argparse.Namespace) -> int:
    """Plans, writes the files that were asked for, and prints the report or JSON."""
    _check(arguments)
    if arguments.no_flush:
        return _without_flush(arguments)
    try:
        profile, found = _of_config(arguments) if _is_config(arguments) else _of_profile(arguments)
    finally:
        terminal.show_progress("")
    beside = _others(arguments, profile, found)
    _write(arguments, found)
    answers, kinds = _answers(arguments, profile, found), kinds_of(arguments, profile)
    if arguments.html:
        page = plan_page.render(profile, found, arguments.top, beside, answers or ())
        Path(arguments.html).write_text(page, encoding="utf-8")
        terminal.say(f"wrote {arguments.html}", sys.stderr)
    if arguments.json:
        told: dict[str, Any] = {} if answers is None else {"what_if": list(map(what_if_json, answers))}
        if arguments.model is not None:
            told["stages"] = model_options.stages_of(profile, found.best)
        if kinds is not None:
            told["own_step_seconds"] = kinds.step_seconds(found.best)
        terminal.print_json(as_json(profile, found, beside) | told)
    else:
        terminal.say(report(profile, found, arguments.top, beside))
        if arguments.model is not None:
            terminal.say(f"\n{model_options.stage_table(profile, found.best)}")
        if kinds is not None:
            terminal.say(f"\n{kinds.report(found.best)}")
        if answers is not None:
            terminal.say(f"\n{what_if_report(found.best, answers)}")
        terminal.draw(f"\n{text.grid(found.best.timeline, terminal.width(), terminal.on_terminal())}")
        terminal.draw(f"\n{text.key(found.best.schedule, terminal.on_terminal())}")
    return 0


def _of_profile(arguments: argparse.Namespace) -> tuple[Profile, Found]:
    for name in ("seconds",) if arguments.model else ("seconds", "profile"):
        if getattr(arguments, name) is not None:
            raise ConfigError(f"--{name} is for a config, a .toml file: a profile has been measured already")
    profile = _profile(arguments)
    machine, wanted, told = machine_of(arguments, profile), _wanted(arguments), terminal.show_progress
    if arguments.model is not None:
        _write_profile(arguments, profile)
        return profile, model_options.plan_model(arguments, profile, machine, wanted, told)
    return profile, search(profile, machine, wanted, arguments.minibatch, told)


def _is_config(arguments: argparse.Namespace) -> bool:
    return arguments.model is None and bool(arguments.source.endswith(".toml"))


def _write_profile(arguments: argparse.Namespace, profile: Profile) -> None:
    if arguments.profile:
        write_profile(profile, arguments.profile)
        terminal.say(f"wrote {arguments.profile}", sys.stderr)


def _wanted(arguments: argparse.Namespace) -> SearchOptions:
    return SearchOptions(**asked.given(arguments, SearchOptions), replicas=True)


def _others(arguments: argparse.Namespace, profile: Profile, found: Found) -> list[Alternative]:
    """What is listed beside plans of a profile, where nothing was asked for that only these have."""
    if not arguments.source or _is_config(arguments) or arguments.schedules or arguments.microbatches:
        return []
    return alternatives(profile, machine_of(arguments, profile), found.best)


def _answers(arguments: argparse.Namespace, profile: Profile, found: Found) -> list[Answer] | None:
    """What the changes that were asked about bring; None where nobody asked."""
    if arguments.what_if is None:
        return None
    machine = machine_of(arguments, profile)
    changes = read_changes(arguments.what_if) if arguments.what_if else usual_changes(profile, machine)
    try:
        return what_if(profile, machine, found.best, changes, _wanted(arguments), terminal.show_progress)
    finally:
        terminal.show_progress("")


def _profile(arguments: argparse.Namespace) -> Profile:
    """The profile of the file, with the link that was asked for."""
    profile = read_profile(arguments.source) if arguments.model is None else model_options.read_model(arguments)
    given = _host(arguments)
    if given != ANY_HOST:
        known = profile.host or ANY_HOST
        profile = replace(profile, host=replace(given, bandwidth=given.bandwidth or known.bandwidth))
    if arguments.bandwidth is None and arguments.latency is None:
        return profile
    with asked.naming("--bandwidth"):
        bandwidth = None if arguments.bandwidth is None else units.read(arguments.bandwidth, units.BANDWIDTH)
    with asked.naming("--latency"):
        latency = 0.0 if arguments.latency is None else units.read(arguments.latency, units.LATENCY)
    return replace(profile, links=(Link("link", None, latency, bandwidth),))


def _host(arguments: argparse.Namespace) -> Host:
    if arguments.offload == "none" and (arguments.host_bandwidth or arguments.host_memory):
        raise ConfigError("--host-bandwidth and --host-memory are for --offload: give that too")
    return read_host(arguments.host_bandwidth, arguments.host_memory, "--host-")


def _without_flush(arguments: argparse.Namespace) -> int:
    given = {name: getattr(arguments, name) for name in _ONLY_WITH_A_FLUSH}
    wrong = [name for name, value in given.items() if value is not None and value is not False]
    if wrong or _is_config(arguments):
        what = f"--{wrong[0].replace('_', '-')}" if wrong else "a config"
        raise ConfigError(
            f"--no-flush plans from a profile, for equal devices, and {what} does not apply there: leave that out"
        )
    (memory,) = memories(arguments.memory, 1) or [None]
    report, data = planned(_profile(arguments), arguments.devices or 4, arguments.no_flush, memory)
    if arguments.json:
        terminal.print_json(data)
    else:
        terminal.say(report)
    return 0


def _of_config(arguments: argparse.Namespace) -> tuple[Profile, Found]:
    for name in ("bandwidth", "latency", "what_if", "device_profiles"):
        if getattr(arguments, name) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} is for a profile, and a config is measured: write what is measured with "
                "--profile, and plan that"
            )
    if arguments.shard_optimizer:
        raise ConfigError(
            "--shard-optimizer is for replicas, and a config is planned as one pipeline: write what is measured with "
            "--profile, and plan that"
        )
    options.refuse_ranks("gapless plan CONFIG")
    from gapless.train.config.config import read_config  # torch is loaded here, and not before
    from gapless.train.job import build

    config = read_config(arguments.source).changed(devices=arguments.devices, minibatch=arguments.minibatch)
    count = config.num_devices
    terminal.show_progress("making the model")
    made = build(config).planned(
        memory=memories(arguments.memory or None, count),
        speeds=speeds_of(arguments.speeds or None, count),
        wanted=SearchOptions(**asked.given(arguments, SearchOptions)),
        host=_host(arguments),
        seconds=10.0 if arguments.seconds is None else arguments.seconds,
        progress=terminal.show_progress,
    )
    _write_profile(arguments, made.profile)
    return made


def _check(arguments: argparse.Namespace) -> None:
    model_options.check(arguments)
    if arguments.time_limit is None:
        arguments.time_limit = 60.0 if arguments.model is None else 20.0
    if arguments.what_if:
        read_changes(arguments.what_if)
    options.refuse_below_one(arguments, "devices", "minibatch", "microbatches", "top", "length")
    if arguments.devices is not None and arguments.devices > 4096:
        raise ConfigError(f"--devices is {arguments.devices}, but a plan is made for at most 4096")
    for name in ("slack", "time_limit", "seconds"):
        value = getattr(arguments, name)
        if value is not None and not 0 <= value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} is {value:g}, but it must be a number of at least 0")


def _write(arguments: argparse.Namespace, found: Found) -> None:
    if arguments.write:
        found.best.write(arguments.write)
        terminal.say(f"wrote {arguments.write}", sys.stderr)
    kinds = best_of_each_kind(found.plans, 3)
    limit = plan_page.room_for_activations(found.best)
    page, arguments.html = arguments.html, None  # which is more than its timelines
    asked.write_pictures(arguments, [plan.timeline for plan in kinds], limit, unit="s")
    arguments.html = page
