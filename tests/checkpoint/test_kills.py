"""A process that is killed at any moment goes on from its last checkpoint, with the bits of one that nobody killed."""

import hashlib
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gapless
from gapless.checkpoint import Checkpoints
from gapless.checkpoint.manifest import faults
from tests.launcher import Launcher

WIDTH = 64
ENDLESS = 1_000_000
LONGEST = 0.15  # seconds from a save to a kill; some saves take as long


def trains(rank: int, ranks: int, folder: str, steps: str) -> None:
    """Goes on from the newest checkpoint, and saves after every step. What it prints is read by the test."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH))
    pipe = gapless.Pipeline(model, devices=2, microbatches=2, loss=nn.functional.mse_loss)
    optimizer = torch.optim.Adam(pipe.parameters(), lr=0.001)
    with Checkpoints(folder, pipe, keep=2) as run:
        if run.latest:
            run.load(optimizer)
            say(resumed=pipe.steps, bits=bits(pipe, optimizer))
        while pipe.steps < int(steps):
            batch = torch.randn(4, WIDTH)
            pipe.step(batch, batch)
            optimizer.step()
            optimizer.zero_grad()
            run.save(optimizer)
            say(on_disk=pipe.steps - 1, bits=bits(pipe, optimizer))  # a save waits for the one before
    os._exit(0)


def say(**words: Any) -> None:
    os.write(1, f"{json.dumps(words)}\n".encode())


def bits(pipe: gapless.Pipeline, optimizer: torch.optim.Optimizer) -> str:
    made = hashlib.sha256()
    for each in pipe.parameters():
        made.update(each.detach().numpy().tobytes())
        made.update(optimizer.state[each]["exp_avg_sq"].numpy().tobytes())
    return made.hexdigest()


class Life:
    """One process that trains."""

    def __init__(self, launcher: Launcher, folder: Path, file: Path, steps: int = ENDLESS) -> None:
        self._launcher, self._file = launcher, file
        file.touch()
        (self.pid,) = launcher.start(trains, 1, str(folder), str(steps), said=[file], imports=__name__)

    def said(self, key: str) -> list[dict[str, Any]]:
        lines = [line for line in self._file.read_text().splitlines(keepends=True) if line.endswith("}\n")]
        return [words for words in map(json.loads, lines) if key in words]

    def wait_for(self, count: int) -> None:
        """Until so many saves have begun."""
        until = time.monotonic() + 120
        while len(self.said("on_disk")) < count:
            assert time.monotonic() < until, self._file.read_text()
            assert not any(self._launcher.statuses([self.pid]).values()), self._file.read_text()  # it may have ended
            time.sleep(0.002)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._launcher.end([self.pid])


def killed(launcher: Launcher, tmp_path: Path, kills: int, seed: int) -> None:
    chosen, folder = random.Random(seed), tmp_path / "run"
    came_back: dict[int, str] = {}
    on_disk = resumed = lost = 0
    for number in range(kills + 1):
        life = Life(launcher, folder, tmp_path / f"{number}.txt")
        life.wait_for(2 if number == 0 else 1)
        time.sleep(chosen.uniform(0.0, LONGEST))
        life.kill()
        for each in life.said("resumed"):
            assert each["resumed"] >= on_disk, f"{on_disk} was on the disk, and {each['resumed']} came back"
            assert came_back.setdefault(each["resumed"], each["bits"]) == each["bits"]
            resumed += 1
        on_disk = life.said("on_disk")[-1]["on_disk"]
        lost += sum(1 for checkpoint in folder.glob("step-*") if list(faults(checkpoint)))
    most = max(came_back)
    whole = Life(launcher, tmp_path / "whole", tmp_path / "whole.txt", most)
    whole.wait_for(most)
    plain = [each["bits"] for each in whole.said("on_disk")]
    equal = sum(plain[step - 1] == found for step, found in came_back.items())
    print(
        f"{resumed} of {kills} kills resumed from, {lost} damaged, {equal} of {len(came_back)} steps equal; seed {seed}"
    )
    assert (resumed, lost, equal) == (kills, 0, len(came_back))


def test_runs_that_are_killed_go_on_with_the_same_bits(launcher: Launcher, tmp_path: Path) -> None:
    killed(launcher, tmp_path, 3, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_hundred_kills_around_saves_are_resumed_from(launcher: Launcher, tmp_path: Path) -> None:
    killed(launcher, tmp_path, 200, seed=random.randrange(2**20))
