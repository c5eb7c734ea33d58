"""`gapless compare`: every schedule for these costs and this memory, ranked."""

import argparse

from gapless.cli import options, terminal
from gapless.cli.output import asked
from gapless.errors import ConfigError
from gapless.schedule.recipes import find_recipe
from gapless.schedule.simulate import simulate
from gapless.schedule.timeline import Timeline
from gapless.view.comparison import compared
from gapless.view.template import filled

EXAMPLE = "gapless compare --devices 8 --microbatches 32 --memory-limit 1x"


def add(parser: argparse.ArgumentParser) -> None:
    """Which of them, and for what."""
    only = "only these, by name or file (default: all but optimal)"
    asked.add_options(parser, ("--schedules", options.words, None, "NAME,FILE", only))
    options.add_all(parser)


def run(arguments: argparse.Namespace) -> int:
    """Ranks by the objective; what can't be made or does not fit is told with the reason."""
    costs = options.given_costs(arguments)
    limit = options.limit_of(arguments, costs)

    names = arguments.schedules
    files = {name: options.verified(name) for name in names or () if options.is_file(name)}
    for name in names or ():
        if name not in files:
            find_recipe(name)

    def simulated(name: str) -> Timeline:
        made = files[name] if name in files else options.build(name, arguments, costs)
        sizes = made.num_devices, made.num_microbatches
        if name in files and sizes != (arguments.devices, arguments.microbatches):
            raise ConfigError("this file is for --devices {} --microbatches {}: compare it for these".format(*sizes))
        made, its_costs = options.passed(made, costs, arguments, limit)
        return simulate(made, its_costs, name)

    found = compared(simulated, names, limit, arguments.objective)
    left_out = ""
    if found.refused and arguments.html:
        left_out = filled("listing.html", title="Left out", rows=found.refused.items())
    # naive lasts so long that the others would be slivers beside it
    pictured = [timeline for timeline in found if names is not None or timeline.name != "naive"]
    asked.write_pictures(arguments, list(found), limit, pictured=pictured, overview=True, back=left_out)
    if arguments.json:
        best = found.best.name if found.ranked else None
        rows = {"schedules": found.rows(), "refused": found.refused}
        terminal.print_json({"objective": arguments.objective, "best": best, **rows})
    else:
        terminal.say(found)
    return 0
