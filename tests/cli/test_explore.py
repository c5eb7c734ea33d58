"""`gapless explore`: it says where it is, serves until Ctrl-C, and needs neither a terminal nor a browser."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

from tests.benchmarks.processes import below, needs_proc
from tests.cli.conftest import Refusal

# Ctrl-C reaches a program even where whoever started the tests ignores it.
PROGRAM = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from gapless.cli import main; code = main(sys.argv[1:]); "
    "sys.exit('torch' if 'torch' in sys.modules else code)"
)


def _workers_of(server: int) -> list[int]:
    """The processes that it has started to make answers."""
    return [each for each in below(server) if b"spawn_main" in Path(f"/proc/{each}/cmdline").read_bytes()]


def _leaves_ctrl_c_to_others(process: int) -> bool:
    (blocked,) = re.findall(r"SigBlk:\s*(\w+)", Path(f"/proc/{process}/status").read_text())
    return bool(int(blocked, 16) >> (signal.SIGINT - 1) & 1)


@needs_proc
def test_it_serves_without_a_terminal_until_ctrl_c_and_ends_with_0() -> None:
    words = [sys.executable, "-c", PROGRAM, "explore", "--json"]
    with subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        address = json.loads(process.stdout.readline())["address"]
        with build_opener(ProxyHandler({})).open(address, timeout=60) as answer:  # no proxy leads here
            assert b"<title>gapless explore</title>" in answer.read()
        with socket.create_connection(("127.0.0.1", urlsplit(address).port), timeout=60) as busy:
            token = address.partition("token=")[2]
            headers = f"Host: {urlsplit(address).netloc}\r\nX-Gapless-Token: {token}\r\n\r\n"
            for schedule in ("1f1b&devices=2", "auto&devices=64&microbatches=32&memory_limit=20&latency=0.03"):
                busy.sendall(f"GET /answer?schedule={schedule} HTTP/1.1\r\n{headers}".encode())
            busy.recv(1)  # the first is answered, and the second soon under way
            leave_it_to_others = [_leaves_ctrl_c_to_others(each) for each in _workers_of(process.pid)]
            time.sleep(0.5)
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            assert process.wait(60) == 0
        # Its workers have ended too: they would hold these open.
        assert (process.stdout.read(), process.stderr.read().strip()) == ("", "")
        assert leave_it_to_others
        assert all(leave_it_to_others)


def test_a_port_that_is_none_is_refused_with_a_sentence(refused: Refusal) -> None:
    told = "--port is 70000, but a port is a number from 0 to 65535"
    assert refused("explore --port 70000 --no-browser") == told
