"""Bad input: one clear sentence with the numbers, exit code 2, nothing on standard output, no traceback."""

import os
from pathlib import Path

import pytest

from tests.cli.conftest import Command, Refusal


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("show zbv", "there is no schedule named 'zbv'; did you mean zb-v?"),
        ("simulate pipdream", "there is no schedule named 'pipdream'; did you mean pipedream?"),
        ("show 1f1b --devices 0", "--devices is 0, but a schedule needs at least 1"),
        ("simulate 1f1b --microbatches 0", "--microbatches is 0, but a schedule needs at least 1"),
        ("compare --devices -4", "--devices is -4, but a schedule needs at least 1"),
        ("show 2bw --minibatches 0", "--minibatches is 0, but a schedule needs at least 1"),
        ("simulate 1f1b --forward -1", "forward is -1, but a cost is a number from 0 to 1e+100"),
        ("simulate 1f1b --weight-grad nan", "weight_grad is nan, but a cost is a number from 0 to 1e+100"),
        ("compare --latency inf", "latency is inf, but a cost is a number from 0 to 1e+100"),
        ("compare --latency 1e300", "latency is 1e+300, but a cost is a number from 0 to 1e+100"),
        ("simulate 1f1b --input-grad 1,nan,1,1", "input_grad is nan, but a cost is a number from 0 to 1e+100"),
        ("simulate 1f1b --forward 1,2", "forward lists 2 stages, but the schedule has 4"),
        ("simulate zb-v --activation 1,2,3,4", "activation lists 4 stages, but the schedule has 8"),
        ("show zb-v --stages-per-device 3", "zb-v takes 2 stages per device, not 3"),
        ("show interleaved --stages-per-device 0", "interleaved takes at least 1 stages per device, not 0"),
        ("show 2bw --microbatches 2", "2bw needs at least as many microbatches as devices, but M = 2 < K = 4"),
        ("show pipedream --replicas 2,3", "replicas 2,3 use 5 devices, but there are 4: give one number"),
        ("simulate auto --memory-limit 0.1", "no schedule of 4 devices and 8 microbatches fits a memory limit of 0.1"),
        ("compare --memory-limit 0.1", "no schedule fits a memory limit of 0.1 (naive: its peak of 1 is above"),
        ("compare --memory-limit 0", "memory limit is 0, but it must be a number above 0"),
        (
            "compare --memory-limit lots",
            "memory limit 'lots' is neither a number nor a multiple of 1f1b's peak such as 2x",
        ),
        ("simulate 1f1b --bandwidth 0", "bandwidth is 0, so nothing would ever arrive"),
        ("show 1f1b -K 1000000 -M 1000000", "that would be about 3,000,000,000,000 actions; a schedule has up to"),
        ("show 2bw --minibatches 99999999", "that would be about 6,399,999,936 actions; a schedule has up to"),
        ("show 1f1b --devices x", "argument --devices/-K: invalid int value: 'x'; `gapless show --help` shows how"),
        ("show 1f1b --forward x", "argument --forward: 'x' is not a number; `gapless show --help` shows how"),
        ("show 1f1b --replicas 1,x", "argument --replicas: '1,x' is not a list of whole numbers such as 2,1,1;"),
        (
            "simulate auto --svg none/a.svg",
            "argument --figure/--svg: there is no folder none: make it first; `gapless simulate",
        ),
        ("show 1f1b --format pdf", "argument --format: invalid choice: 'pdf' (choose from "),
        ("show", "the following arguments are required: SCHEDULE; `gapless show --help` shows how"),
        ("verify nowhere.txt", "there is no file nowhere.txt"),
        ("show nowhere.txt", "there is no file nowhere.txt"),
    ],
)
def test_bad_words_are_one_sentence(refused: Refusal, line: str, message: str) -> None:
    assert refused(line).startswith(message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the schedule is empty"),
        (b"0: 0F0 0B0\n1: 1F0 1", "line 2: '1' is not an action"),
        (b"0: 0F0 2F0garbage", "line 1: '2F0garbage' is not an action"),
        (b'{"rows": [["0F0"', "the schedule is not valid JSON"),
        (b"\xff\xfe\x00\x01", "is not text; a schedule file has lines such as `0: 0F0 0B0`"),
        (b"\0" * 1000, "line 1: "),
        (b"hello, world", "line 1: 'hello' is not an action"),
        (b"0: 0F0 0B999999999", "microbatch 999999999 in a schedule of 2 actions"),
        ("0: " + " ".join(f"{n}F{n}" for n in range(5_000)), "at least 25,000,000 forwards"),
    ],
)
@pytest.mark.parametrize("command", ["verify", "show", "simulate"])
def test_a_broken_file_is_one_sentence(
    refused: Refusal, tmp_path: Path, command: str, content: bytes | str, message: str
) -> None:
    file = tmp_path / "broken.txt"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    assert message in refused(command, str(file))


def test_what_is_no_file_of_a_schedule_is_one_sentence(refused: Refusal, tmp_path: Path) -> None:
    file = tmp_path / "huge.txt"
    with file.open("wb") as stream:
        stream.truncate(100 * 2**20)  # it is refused before it is read
    assert refused("verify", str(file)) == f"{file} has 100 MiB, but a schedule file has at most 64 MiB"
    assert refused("verify", str(tmp_path)) == f"{tmp_path} is a folder, not a file"
    assert refused("verify", os.devnull) == f"{os.devnull} is a pipe or a device, not a file"
    refused("show 1f1b --svg", str(tmp_path))


def test_tiny_and_huge_costs_are_drawn(gapless: Command) -> None:
    # Columns per unit of time once were infinite, and infinity times nothing is not a column.
    for line in ("show 1f1b --forward 1e-320 --input-grad 0 --weight-grad 0", "show 1f1b --forward 1e99"):
        assert gapless(line).code == 0
