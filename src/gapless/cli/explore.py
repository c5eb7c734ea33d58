"""`gapless explore`: schedules on a page with sliders, on this machine."""

import argparse
import os
import sys
import webbrowser
from threading import Thread

from gapless.cli import terminal
from gapless.cli.output import asked
from gapless.errors import ConfigError

EXAMPLE = "gapless explore --port 8800 --no-browser"


def add(parser: argparse.ArgumentParser) -> None:
    """Where it is served, and whether to open it."""
    asked.add_options(
        parser,
        ("--port", int, 0, "N", "port of 127.0.0.1 to serve it on; 0 is any that is free"),
        ("--no-browser", "print the address, and open nothing"),
        ("--json", "print the address as one JSON object, and open nothing"),
    )


def run(arguments: argparse.Namespace) -> int:
    """Serves until Ctrl-C."""
    from gapless.explore.server import ExploreServer

    if not 0 <= arguments.port <= 65535:
        raise ConfigError(f"--port is {arguments.port}, but a port is a number from 0 to 65535")
    with ExploreServer(arguments.port) as server:
        if arguments.json:
            terminal.print_json({"address": server.address, "port": server.server_port})
        else:
            terminal.say(f"exploring at {server.address}\nCtrl-C ends it.")
        terminal.flush()
        try:
            if not arguments.no_browser and not arguments.json and _has_display():
                Thread(target=webbrowser.open, args=(server.address,), daemon=True).start()
            server.serve_forever()
        except KeyboardInterrupt:
            terminal.say("", sys.stderr)
    return 0


def _has_display() -> bool:
    """Without one, a browser that draws text would take the terminal."""
    return sys.platform in ("darwin", "win32") or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
