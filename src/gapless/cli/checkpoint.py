"""`gapless checkpoint`: look at checkpoints, prove that none of their bytes has changed, and export their weights."""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from gapless.checkpoint.listing import Saved, looked_at, saved_in
from gapless.checkpoint.manifest import NAME, faults, read_manifest
from gapless.cli import terminal
from gapless.cli.output import asked
from gapless.errors import CheckpointError, ConfigError, printable
from gapless.units import read_bytes, show_bytes, show_count

EXAMPLE = "gapless checkpoint verify runs/first"
_VERBS = {
    "list": "the checkpoints of a run: their steps, times, sizes and metrics",
    "verify": "read every byte of a checkpoint, or of all in a run's folder, and compare it with its hash",
    "export": "write the weights as one plain .safetensors file, or as a folder that from_pretrained loads",
}


def add(parser: argparse.ArgumentParser) -> None:
    """A verb, and what it is about."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", parser_class=type(parser), required=True)
    for verb, what in _VERBS.items():
        own = verbs.add_parser(verb, help=what, description=what[0].upper() + what[1:] + ".", allow_abbrev=False)
        own.add_argument("folder", metavar="FOLDER", help="a checkpoint, or the folder of a run")
        if verb == "export":
            own.epilog = "example: gapless checkpoint export runs/first model.safetensors"
            own.add_argument("to", metavar="TO", help="a new file that ends in .safetensors, or a new folder")
            own.add_argument(
                "--largest",
                default="5GB",
                metavar="SIZE",
                help="largest size of a file in a folder (default %(default)s)",
            )
        else:
            own.epilog = f"example: gapless checkpoint {verb} runs/first"
        own.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """What the verb says."""
    folder = Path(arguments.folder)
    if not folder.is_dir():
        raise CheckpointError(f"{printable(folder)} is not a folder")
    verbs: dict[str, Callable[[Path, argparse.Namespace], int]] = {"list": _list, "verify": _verify, "export": _export}
    return verbs[arguments.verb](folder, arguments)


def _list(folder: Path, arguments: argparse.Namespace) -> int:
    saved = _found(folder)
    if arguments.json:
        terminal.print_json({"checkpoints": [{**each._asdict(), "path": str(each.path)} for each in saved]})
        return 0
    metrics = any(each.metric is not None for each in saved)
    terminal.say(f"{'step':>8}  {'saved':<19}  {'size':>9}{'  metric' if metrics else ''}  path")
    for each in saved:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each.time)) if not each.fault else "damaged"
        size = show_bytes(each.size) if not each.fault else ""
        metric = f"  {'' if each.metric is None else f'{each.metric:.4g}':>6}" if metrics else ""
        terminal.say(f"{each.step:>8}  {when:<19}  {size:>9}{metric}  {each.path}")
    return 0


def _verify(folder: Path, arguments: argparse.Namespace) -> int:
    """Exit code 2 where something is wrong."""
    wrong = {}
    for each in _found(folder):
        terminal.show_progress(f"reading {each.path} ({show_bytes(each.size)})")
        led_out = each.fault and each.path.is_symlink()  # `latest` may be named, but in a folder no link is followed
        wrong[str(each.path)] = [each.fault] if led_out else [str(fault) for fault in faults(each.path)]
    terminal.show_progress("")
    if arguments.json:
        terminal.print_json({"ok": not any(wrong.values()), "faults": wrong})
        return 2 if any(wrong.values()) else 0
    for path, found in wrong.items():
        for fault in found:
            terminal.complain(fault)
        if not found:
            manifest = read_manifest(Path(path))
            files = show_count(len(manifest.files), "file")
            size = f"step {manifest.step}, {len(manifest.tensors):,} tensors, {files}, {show_bytes(manifest.size)}"
            terminal.say(f"{path}: correct ({size})")
    return 2 if any(wrong.values()) else 0


def _export(folder: Path, arguments: argparse.Namespace) -> int:
    from gapless.checkpoint.export import export  # torch is loaded where it is needed

    chosen = _found(folder)[-1].path
    with asked.naming("--largest"):
        largest = read_bytes(arguments.largest)
    if largest < 1:
        raise ConfigError(f"--largest is {arguments.largest}, but it must be a size such as 5GB")
    made = export(chosen, Path(arguments.to), largest, terminal.show_progress)
    terminal.show_progress("")
    if arguments.json:
        terminal.print_json({"checkpoint": str(chosen), "files": [str(file) for file in made.files]})
        return 0
    terminal.say(f"{made.tensors:,} tensors, {show_bytes(made.num_bytes)}, of {chosen}:")
    for file in made.files:
        terminal.say(f"  {file}")
    return 0


def _found(folder: Path) -> list[Saved]:
    """The checkpoint, or those of a run."""
    if (folder / NAME).exists():
        return [looked_at(folder)]
    found = saved_in(folder)
    if not found and (folder / "checkpoints").is_dir():  # where `gapless train` has them
        found = saved_in(folder / "checkpoints")
    if not found:
        raise CheckpointError(f"{printable(folder)} has no checkpoints: name a checkpoint, or the folder of a run")
    return found
