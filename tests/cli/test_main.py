"""The command line as a whole: help, unknown words, Ctrl-C, a closed pipe."""

import os
import signal
import subprocess
import sys
import time

import pytest

from gapless.cli import COMMANDS
from tests.cli.conftest import Command

LOOKING = ["schedules", "show", "simulate", "compare", "verify"]


def test_without_words_it_says_what_it_can_do(gapless: Command) -> None:
    code, out, err = gapless("")
    assert (code, err) == (0, "")
    assert all(command in out for command in COMMANDS)
    assert "example: gapless compare --devices 8 --microbatches 32" in out


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_each_command_shows_an_example(gapless: Command, command: str) -> None:
    code, out, _ = gapless(f"{command} --help")
    assert code == 0
    assert "example: gapless " in out


@pytest.mark.parametrize("command", LOOKING)
def test_the_example_of_each_command_runs(
    gapless: Command, command: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    out = gapless(f"{command} --help").out
    example = out.split("example: ")[1].strip()
    folder = tmp_path_factory.mktemp("example")
    script = example.replace("gapless ", f"{sys.executable} -m gapless ")
    run = subprocess.run(script, shell=True, cwd=folder, capture_output=True, text=True, check=False, env=environment())
    assert run.returncode == 0, run.stderr


def test_an_unknown_command_suggests_the_nearest(gapless: Command) -> None:
    assert gapless("simulat 1f1b") == (2, "", "gapless: there is no command 'simulat'; did you mean simulate?\n")
    assert gapless("xyzzy") == (2, "", "gapless: there is no command 'xyzzy'; `gapless --help` lists them.\n")
    said = "benchmarks are run from the repository as `python -m benchmarks`"
    assert gapless("bench emulated") == (2, "", f"gapless: there is no command 'bench'; {said}\n")


def test_an_unknown_option_suggests_the_nearest(gapless: Command) -> None:
    assert gapless("show 1f1b --devces 4").err == "gapless: '--devces' is not understood; did you mean --devices?\n"
    assert gapless("show 1f1b --zzz").err == "gapless: '--zzz' is not understood; `gapless show --help` shows how\n"
    assert gapless("--zzz").err == "gapless: '--zzz' is not understood; `gapless --help` shows how\n"


def environment() -> dict[str, str]:
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return {**os.environ, "PYTHONPATH": os.path.join(root, "src")}


def seconds_used(process: int) -> float:
    with open(f"/proc/{process}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_ctrl_c_ends_a_long_command_without_a_traceback() -> None:
    words = [sys.executable, "-m", "gapless", "compare", "--devices", "64", "--microbatches", "2000"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while seconds_used(process.pid) < 1.0:  # it is at work, however busy the machine
            assert process.poll() is None, "the command should take longer than this"
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert out == ""
    assert err == "gapless: stopped\n"


def test_a_reader_that_goes_away_is_no_error() -> None:
    words = [sys.executable, "-m", "gapless", "show", "1f1b", "-K", "64", "-M", "500", "--format", "text"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        err = process.stderr.read()
    assert process.returncode == 0
    assert err == b""


def test_a_closed_standard_output_is_no_traceback() -> None:
    run = subprocess.run(
        f"{sys.executable} -m gapless show 1f1b >&-", shell=True, stderr=subprocess.PIPE, text=True, check=False
    )
    assert run.returncode in (0, 2)
    assert "Traceback" not in run.stderr
