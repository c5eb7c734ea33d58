"""`gapless explore`: it says where it is, serves until Ctrl-C, and needs neither a terminal nor a browser."""

import json
import signal
import subprocess
import sys
from urllib.request import ProxyHandler, build_opener

from tests.cli.conftest import Command

# Ctrl-C reaches a program even where whoever started the tests ignores it.
PROGRAM = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from gapless.cli import main; code = main(sys.argv[1:]); "
    "sys.exit('torch' if 'torch' in sys.modules else code)"
)


def test_it_serves_without_a_terminal_until_ctrl_c_and_ends_with_0() -> None:
    words = [sys.executable, "-c", PROGRAM, "explore", "--json"]
    with subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8"
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        address = json.loads(process.stdout.readline())["address"]
        with build_opener(ProxyHandler({})).open(address, timeout=60) as answer:  # no proxy leads here
            assert b"<title>gapless explore</title>" in answer.read()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert (process.stdout.read(), process.stderr.read().strip()) == ("", "")


def test_a_port_that_is_none_is_refused_with_a_sentence(gapless: Command) -> None:
    code, out, err = gapless("explore --port 70000 --no-browser")
    assert (code, out) == (2, "")
    assert err == "gapless: --port is 70000, but a port is a number from 0 to 65535\n"
