"""`gapless schedules`: the table of all recipes."""

import argparse

from gapless.cli import terminal
from gapless.schedule.recipes import RECIPES
from gapless.view import text

EXAMPLE = "gapless schedules"
_LEGEND = """K devices, M microbatches, v stages per device, r = device 0..K-1; f, i, w = time of a forward, an input
gradient and a weight gradient of one microbatch on one device, b = i + w. Bubble: idle time of a step; peak:
activations a device holds."""


def add(parser: argparse.ArgumentParser) -> None:
    """Nothing but how to print it."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """The table and its letters, or all of it as JSON."""
    if arguments.json:
        words = ("name", "placement", "bubble", "peak", "stages_per_device", "synchronous", "note")
        found = [{word: getattr(recipe, word) for word in words} for recipe in RECIPES.values()]
        terminal.print_json(
            {"schedules": [{**each, "stages_per_device": each["stages_per_device"] or "any"} for each in found]}
        )
    else:
        rows = [(r.name, r.placement, r.bubble, r.peak, r.note) for r in RECIPES.values()]
        terminal.say(text.table(("name", "placement", "makespan bubble", "peak", "note"), rows, left=5))
        terminal.say(f"\n{_LEGEND}")
    return 0
