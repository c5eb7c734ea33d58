"""Two hosts with a slow link between them: the same bits, the predicted step, and the recommended schedule is fastest.

Ranks of torchrun run this file's `main`.
"""

import copy
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import gapless
from gapless.cli import main as command_line
from gapless.errors import TransportError
from tests.launcher import Launcher
from tests.run.crew import Crew, leave
from tests.run.hosts import ADDRESSES, INTERFACE, Hosts, enter, two_hosts

DELAY, RATE = 0.005, 12.5e6  # seconds; bytes a second: 100 Mbit/s
DEVICES, MICROBATCHES, SECONDS, BYTES = 2, 6, 0.01, 131072
SCHEDULES = ("1f1b", "eager-1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "auto")
COSTS = gapless.Costs(
    forward=SECONDS, input_grad=SECONDS, weight_grad=SECONDS, latency=DELAY, bandwidth=RATE, boundary=BYTES
)
WARM_UP, LEAST, LONGEST = 2, 3, 60  # steps of a schedule, and seconds in all


MEASURED = [pytest.mark.slow, pytest.mark.alone]  # the speed of a link


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=MEASURED)])
def test_two_hosts_have_the_bits_of_the_plain_loop(launcher: Launcher, tmp_path: Path, ranks: int) -> None:
    with two_hosts(delay=DELAY, rate=RATE) as hosts:
        if ranks == 1:
            found = one_rank_each(hosts, launcher, tmp_path)
        else:
            found = torchrun(hosts, ranks, "exact", tmp_path / "found.json")
    assert found["exact"] == ["1f1b", "zb-v"]
    *near, (name, devices, latency, bandwidth) = found["links"]
    assert (name, devices) == ("between hosts", None)
    assert latency > DELAY
    assert bandwidth < 1.3 * RATE  # below it a busy machine decides
    assert ranks == 1 or (latency, bandwidth) == (pytest.approx(DELAY, rel=1), pytest.approx(RATE, rel=0.3))
    assert [(name, devices) for name, devices, *_ in near] == ([("one host", ranks)] if ranks > 1 else [])


@pytest.mark.slow
@pytest.mark.alone
def test_a_dead_rank_of_another_host_is_noticed_while_its_child_lives(tmp_path: Path) -> None:
    """Its process can't be seen from here, so it is the connection: the child closes its copy."""
    with two_hosts(delay=DELAY, rate=RATE) as hosts:
        found = torchrun(hosts, 1, "dies", tmp_path / "found.json")
    assert "rank 1 is dead: its connection to rank 0 was closed" in found["words"]
    print(f"noticed after {found['seconds']:.2f} s")
    assert found["seconds"] < 3


@pytest.mark.slow
@pytest.mark.alone
def test_two_hosts_take_as_long_as_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with two_hosts(delay=DELAY, rate=RATE) as hosts:
        found = torchrun(hosts, 1, "measured", tmp_path / "found.json")
    measured = found["seconds"]
    for name, seconds in measured.items():
        predicted = found["predicted"][name]
        assert seconds == pytest.approx(predicted, rel=0.1), f"{name}: measured {seconds}, predicted {predicted}"
    words = f"--forward {SECONDS} --input-grad {SECONDS} --weight-grad {SECONDS} --boundary {BYTES}"
    link = f"--latency {DELAY} --bandwidth {RATE:.0f}"
    assert command_line(f"compare -K {DEVICES} -M {MICROBATCHES} {words} {link} --json".split()) == 0
    assert json.loads(capsys.readouterr().out)["best"] == min(measured, key=lambda name: measured[name])


def torchrun(hosts: Hosts, ranks: int, what: str, file: Path) -> Any:
    """A function below on so many ranks of each host, started as a user would; what rank 0 has found."""
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(ranks)]
    words += ["--master-addr", ADDRESSES[0], "--master-port", "29500"]
    commands = [
        [*words, "--node-rank", str(node), "--local-addr", address, "-m", "tests.run.ranks.test_hosts", what, str(file)]
        for node, address in enumerate(ADDRESSES)
    ]
    hosts.launch(commands, timeout=250)
    return json.loads(file.read_text())


def one_rank_each(hosts: Hosts, launcher: Launcher, folder: Path) -> Any:
    """The same without torchrun and imports, which take longer than the ranks."""
    said, file = [folder / f"{rank}.txt" for rank in range(2)], folder / "found.json"
    pids = launcher.start(on_host, 2, *hosts.names, str(file), said=said, imports=__name__)
    try:
        assert set(Crew(launcher, folder, pids).ended(seconds=250).values()) == {0}, [each.read_text() for each in said]
    finally:
        launcher.end(pids)
    return json.loads(file.read_text())


# -- on every rank ----------------------------------------------------------------------------------------------------


def on_host(rank: int, ranks: int, first: str, second: str, file: str) -> None:
    enter((first, second)[rank])
    os.environ.update(MASTER_ADDR=ADDRESSES[0], MASTER_PORT="29500", GLOO_SOCKET_IFNAME=INTERFACE)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK="0")
    main("exact", file)
    leave()


def main(what: str, file: str) -> None:
    torch.set_num_threads(1)
    if what == "dies":
        loses_a_rank(file)
        return
    dist.init_process_group("gloo")
    found: Any = {"exact": exact(), "links": links()} if what == "exact" else measured()
    if dist.get_rank() == 0:
        Path(file).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def loses_a_rank(file: str) -> None:
    """Rank 1 is a child of what torchrun has started, which has no complaints, and has a child itself."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    pipe = gapless.Pipeline(model, mesh=mesh, microbatches=2, loss=nn.functional.mse_loss, timeout=60)
    pipe.step(torch.ones(4, 8), torch.ones(4, 8))
    dist.barrier()
    began = time.monotonic()
    if dist.get_rank() == 1:
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        pipe.step(torch.ones(4, 8), torch.ones(4, 8))
    except TransportError as error:
        Path(file).write_text(json.dumps({"words": str(error), "seconds": time.monotonic() - began}))


def exact() -> list[str]:
    """Schedules whose bits are those of the plain loop, on every rank."""
    names = [name for name in ("1f1b", "zb-v") if is_exact(name, dist.get_world_size())]
    everywhere: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everywhere, names)
    return [name for name in names if all(name in found for found in everywhere)]


def links() -> list[tuple[Any, ...]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    return [astuple(link) for link in gapless.measure_links(mesh)]


def is_exact(schedule: str, devices: int) -> bool:
    """Two steps, each against the plain loop, on this rank."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.2)) for _ in range(2 * devices)]
    model = nn.Sequential(*layers)
    reference = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (devices,), mesh_dim_names=("pp",))
    settings: dict[str, Any] = {"microbatches": 4, "loss": nn.functional.mse_loss, "seed": 3}
    same = True
    with gapless.Pipeline(model, mesh=mesh, schedule=schedule, **settings) as pipe:
        for step in range(2):
            x, y = torch.randn(10, 32), torch.randn(10, 32)
            result = pipe.step(x, y)
            plain = gapless.plain_step(list(reference), x, y, step=step, **settings)
            assert result.loss is not None
            assert plain.loss is not None
            same = same and torch.equal(result.loss, plain.loss)
        theirs = dict(reference.named_parameters())
        for name, parameter in pipe.named_parameters():
            same = same and _equal(parameter.grad, theirs[name].grad)
    return same


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)


def measured() -> dict[str, Any]:
    """The quickest step of each schedule, in seconds, and the predicted one. Schedules take turns until all are as
    predicted, or it takes too long: other programs of this machine can only make a step longer.
    """
    from benchmarks.peer.contest import Contest
    from benchmarks.peer.gapless_sides import batch, pipeline

    mesh = init_device_mesh("cpu", (DEVICES,), mesh_dim_names=("pp",))
    contest = Contest(DEVICES, MICROBATCHES, "emulated", seconds=SECONDS, size=BYTES // 4)
    pipes = {name: pipeline(contest, name, mesh=mesh, costs=COSTS) for name in SCHEDULES}
    predicted = {name: float(gapless.simulate(pipe.schedule, COSTS).makespan) for name, pipe in pipes.items()}
    inputs, target = batch(contest)
    best = dict.fromkeys(SCHEDULES, float("inf"))
    began = time.monotonic()
    for number in range(WARM_UP + 100):
        if number >= WARM_UP + LEAST and _agreed(best, predicted, time.monotonic() - began):
            break
        for name, pipe in pipes.items():
            seconds = _spent(lambda pipe=pipe: pipe.step(inputs, target))  # type: ignore[misc]
            if number >= WARM_UP:
                best[name] = min(best[name], seconds)
    for pipe in pipes.values():
        pipe.close()
    return {"seconds": best, "predicted": predicted}


def _spent(step: Callable[[], object]) -> float:
    """From the first start of a rank to the last end, if all begin when they are told to; the same on every rank."""
    dist.barrier()
    start = time.perf_counter()
    step()
    longest = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    return float(longest)


def _agreed(best: dict[str, float], predicted: dict[str, float], seconds: float) -> bool:
    """Whether to stop, on rank 0's word."""
    near = all(best[name] < 1.05 * predicted[name] for name in best)
    stop = torch.tensor(near or seconds > LONGEST)
    dist.broadcast(stop, 0)
    return bool(stop)


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # nothing is left to say, and torch takes its time
