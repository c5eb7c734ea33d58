"""Replicas on ranks: weights are those of a loop that does the same, and what happens on one rank stops all in order.

Processes are expensive to start, so each launch runs many settings, one after another.
"""

import contextlib
import copy
import os
import random
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from traceback import walk_stack
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.overrides import TorchFunctionMode

import gapless
from gapless.errors import ConfigError, TransportError
from gapless.run.streams.replicas.order import Order
from tests.pipelines import Do, alive, mlp
from tests.run.forked import Launch
from tests.run.streams.replicas import test_asp, test_local_steps
from tests.run.streams.replicas.test_asp import SEED, Make, adam, assert_same_state, halving, in_backward, made, sgd

Data = list[tuple[Tensor, Tensor]]


def mesh(*dims: int, names: tuple[str, ...] = ("dp",)) -> Any:
    return init_device_mesh("cpu", dims or (dist.get_world_size(),), mesh_dim_names=names)


def replicas(model: nn.Module, make: Make = sgd, **options: Any) -> gapless.AsyncReplicas:
    asked: dict[str, Any] = {"loss": F.mse_loss, "seed": SEED, "timeout": 30.0, **options}
    return gapless.AsyncReplicas(model, mesh=mesh(), optimizer=make, **asked)


def data_of(counts: tuple[int, ...]) -> list[Data]:
    """Of each rank its own."""
    data = test_asp.batches(sum(counts))
    return [data[sum(counts[:rank]) : sum(counts[: rank + 1])] for rank in range(len(counts))]


def meeting(times: int) -> nn.Module:
    """Nobody applies before all have read, so many times: one update of every three is as stale as can be."""
    left = [times]

    def meet() -> None:
        if left[0] > 0 and threading.current_thread() is threading.main_thread():
            left[0] -= 1
            dist.barrier()

    return in_backward(meet)


def of_all(own: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


# -- shared weights ----------------------------------------------------------------------------------------------------


def check_shared(name: str, make: Make, counts: tuple[int, ...], bound: int | None = None) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    counts, data = counts[:ranks], data_of(counts[:ranks])
    model = made(name)
    start, again = copy.deepcopy(model), copy.deepcopy(model)
    layers = model if isinstance(model, nn.Sequential) else [model]
    trained = nn.Sequential(*layers, meeting(min(counts)))
    with replicas(trained, make, scheduler=halving, bound=bound) as asp:
        results = list(asp.run(data[rank]))
        order = asp.order
        assert asp.updates == asp.minibatches == sum(counts)
        assert len(asp.optimizers) == (rank == 0)
    assert of_all(str(order)) == [str(order)] * ranks
    applies = [each for each in order.applies if each.replica == rank]
    assert [(each.replica, each.minibatch, each.staleness) for each in results] == applies
    assert len(results) == counts[rank]
    assert sorted(each.staleness for each in order.applies[:ranks]) == list(range(ranks))
    merged = list(order.merged(data))
    losses = test_asp.sequential(start, str(order), merged, make, halving)
    assert_same_state(nn.Sequential(*layers) if isinstance(model, nn.Sequential) else model, start)
    for result in results:
        assert torch.equal(result.loss, losses[result.minibatch])
        assert not result.loss.requires_grad
    options: dict[str, Any] = {"replicas": ranks, "optimizer": make, "scheduler": halving, "seed": SEED}
    with gapless.AsyncReplicas(again, loss=F.mse_loss, **options) as once_more:
        list(once_more.replay(Order.parse(str(order)), merged))
    assert_same_state(again, start)
    if bound is not None:
        check_bound(order, counts, bound)


def check_bound(order: Order, counts: tuple[int, ...], bound: int) -> None:
    """A replica that has nothing more to do holds nobody up."""
    applied = [0] * len(counts)
    for replica, kind in order.moves:
        if kind == "a":
            applied[replica] += 1
        else:
            slowest = [done for done, count in zip(applied, counts, strict=True) if done < count]
            assert applied[replica] - min(slowest) <= bound


def shared() -> None:
    check_shared("mlp", sgd, (4, 5, 2))
    if dist.get_world_size() == 1:
        return
    check_shared("batch norm", adam, (2, 3, 4))
    check_shared("no sequence", sgd, (3, 3, 3), bound=0)
    check_shared("frozen", adam, (2, 6, 4), bound=1)
    several_runs()
    begun_late()
    cut_short()
    assert not alive()


def several_runs() -> None:
    """Another run goes on, with its own order; what the caller changes in between is changed on all ranks."""
    rank, data = dist.get_rank(), data_of((4, 2, 3))
    model = made("mlp")
    again = copy.deepcopy(model)
    with (
        replicas(model) as asp,
        gapless.AsyncReplicas(again, replicas=3, loss=F.mse_loss, optimizer=sgd, seed=SEED) as other,
    ):
        for parts in ([each[:2] for each in data], [each[2:] for each in data]):
            list(asp.run(parts[rank]))
            list(other.replay(asp.order, asp.order.merged(parts)))
            assert_same_state(model, again)
            for one in (model, again):
                one[0].requires_grad_(False)  # type: ignore[index]
                with torch.no_grad():
                    one[0].weight.zero_()  # type: ignore[index]
        assert asp.minibatches == other.minibatches == 9


class FirstCopy(TorchFunctionMode):
    """In the thread that enters it, the first copy into a tensor comes after something else."""

    def __init__(self, wait: Callable[[], object]) -> None:
        super().__init__()
        self._wait, self.came = wait, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_ and not self.came:
            self.came = True
            self._wait()
        return func(*args, **(kwargs or {}))


def begun_late() -> None:
    """The rank with the weights is the last to begin: what others have applied by then stays."""
    rank, data = dist.get_rank(), data_of((2, 3, 3))
    store = dist.distributed_c10d._get_default_store()
    model = made("mlp")
    start = copy.deepcopy(model)
    late = FirstCopy(lambda: store.wait(["rank 1 has applied"]))
    with replicas(model) as asp:
        with late if rank == 0 else contextlib.nullcontext():
            results = asp.run(data[rank])
            next(results)
        if rank == 1:
            store.set("rank 1 has applied", "")
        list(results)
        order = asp.order
    assert late.came == (rank == 0)
    test_asp.sequential(start, str(order), list(order.merged(data)), sgd)
    assert_same_state(model, start)


def cut_short() -> None:
    """Where one rank leaves its loop, the run ends on all, with the same weights."""
    rank, data = dist.get_rank(), data_of((40, 40, 40))
    model = made("mlp")
    start = copy.deepcopy(model)
    with replicas(model) as asp:
        for number, _ in enumerate(asp.run(data[rank]), 1):
            if rank == 1 and number == 2:
                break
        assert 2 <= asp.updates == len(asp.order.applies) <= 82
        test_asp.sequential(start, str(asp.order), list(asp.order.merged(data)), sgd)
        assert_same_state(model, start)
        assert len(list(asp.run(data[rank][:2]))) == 2


# -- local steps -------------------------------------------------------------------------------------------------------


def stepped_alone(reference: test_local_steps.Sequential, data: list[Data], steps: int, first: int) -> None:
    """By the definition: a round is n steps of each replica that has any minibatch left, then their mean."""
    count = len(data)
    for start in range(0, max(map(len, data)), steps):
        parts = [list(enumerate(each))[start : start + steps] for each in data]
        came = [number for number, part in enumerate(parts) if part]
        for number in came:
            reference.copies[number].load_state_dict(reference.model.state_dict())
            for place, (x, y) in parts[number]:
                reference.step(number, first + place * count + number, x, y)
        states = [reference.copies[number].state_dict() for number in came]
        reference.model.load_state_dict(
            {
                name: test_local_steps.mean([each[name] for each in states]) if value.is_floating_point() else value
                for name, value in states[0].items()
            }
        )
        if reference.average_state:
            reference.average(came)


def check_local(
    make_model: Callable[[], nn.Sequential], make: Make, counts: tuple[int, ...], steps: int, average_state: bool
) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    data = data_of(counts[:ranks])
    ours, theirs = make_model(), make_model()
    reference = test_local_steps.Sequential(theirs, ranks, make, average_state=average_state)
    options: dict[str, Any] = {"scheduler": test_local_steps.halving, "local_steps": steps}
    with replicas(ours, make, average_state=average_state, **options) as asp:
        first = 0
        for _ in range(2):  # the second run goes on with the optimizers as they are
            results = list(asp.run(data[rank]))
            stepped_alone(reference, data, steps, first)
            assert_same_state(ours, theirs)
            numbers = [first + place * ranks + rank for place in range(len(data[rank]))]
            assert [each.minibatch for each in results] == numbers
            first = asp.minibatches
        assert asp.updates == 2 * sum(counts[:ranks])
        with pytest.raises(ConfigError, match="with local_steps timing changes nothing, so there is no order"):
            asp.order  # noqa: B018


def local() -> None:
    check_local(test_local_steps.plain, sgd, (4, 4, 4), 2, False)
    if dist.get_world_size() == 1:
        return
    check_local(test_local_steps.normed, adam, (5, 4, 1), 2, True)
    check_local(test_local_steps.plain, adam, (3, 1, 2), 1, False)
    assert not alive()


def semantics() -> None:
    shared()
    local()


@pytest.mark.parametrize("ranks", [1, 3])
def test_weights_are_those_of_a_loop_that_does_the_same(ranks: int, launch: Launch) -> None:
    launch(semantics, ranks)


# -- failures ----------------------------------------------------------------------------------------------------------


def after(count: int, do: Callable[[], object]) -> nn.Module:
    """Does something in the backward of that minibatch of this rank."""
    seen = [0]

    def count_down() -> None:
        seen[0] += 1
        if seen[0] == count:
            do()

    return in_backward(count_down)


def fail() -> None:
    raise ValueError("as told")


def stops(do: Callable[[], object], error: type[BaseException], words: str, **options: Any) -> None:
    """On each rank in turn: all stop, with the same weights, and another run works."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    data = data_of((30,) * ranks)
    for guilty in range(ranks):
        torch.manual_seed(3)
        model = nn.Sequential(*mlp(), after(3, do if rank == guilty else lambda: None))
        start = copy.deepcopy(model)
        asp = replicas(model, **options)
        with pytest.raises(error if rank == guilty else TransportError) as caught:
            list(asp.run(data[rank]))
        at = f"the model has had {asp.updates} updates"
        if rank == guilty:
            assert caught.value.__notes__[-1] == f"gapless: {at}"
        else:
            assert re.match(f"the replicas have stopped, since rank {guilty} {words}.*: {at}", str(caught.value))
        states = of_all(model.state_dict())
        assert all(torch.equal(states[0][name], states[rank][name]) for name in states[0])
        if "local_steps" not in options:
            test_asp.sequential(start, str(asp.order), list(asp.order.merged(data)), sgd)
            assert_same_state(model, start)
            assert asp.updates == len(asp.order.applies) >= 2
        with asp:
            assert len(list(asp.run(data[rank][:3]))) == 3


def interrupted_at_the_end() -> None:
    """A rank that has nothing more to do waits for the others, and Ctrl-C there stops them."""
    rank, data = dist.get_rank(), data_of((1, 1, 1))[dist.get_rank()]
    pause = threading.Event()

    def interrupt() -> None:
        main = threading.main_thread().ident
        assert main is not None
        while not any(frame.f_code.co_name == "_final" for frame, _ in walk_stack(sys._current_frames()[main])):
            pause.wait(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    def endless() -> Iterator[Any]:
        while True:
            pause.wait(0.01)
            yield from data

    with replicas(mlp()) as asp:
        if rank == 0:
            threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt if rank == 0 else TransportError) as caught:
            list(asp.run(data if rank == 0 else endless()))
        assert rank == 0 or "since rank 0 was interrupted: the model has had" in str(caught.value)
        assert len(list(asp.run(data))) == 1


def a_loader_fails() -> None:
    rank, data = dist.get_rank(), data_of((30, 30, 30))

    def loader() -> Iterator[Any]:
        yield from data[rank][:2]
        raise ValueError("of the loader")

    with replicas(mlp()) as asp:
        with pytest.raises(ValueError if rank == 1 else TransportError, match="of the loader"):
            list(asp.run(loader() if rank == 1 else data[rank]))
        assert asp.updates >= 2


def a_body_fails() -> None:
    """Python closes the iterator of a loop that raises, unless somebody keeps it."""
    rank, data = dist.get_rank(), data_of((30, 30, 30))

    def trained() -> None:
        with replicas(mlp()) as asp:
            results = asp.run(data[rank])
            for number, _ in enumerate(results):
                if rank == 2 and number == 1:
                    fail()

    with pytest.raises(ValueError if rank == 2 else TransportError, match="as told" if rank == 2 else "rank 2 failed:"):
        trained()


def an_update_fails() -> None:
    """Of the first rank, which has the optimizer, whoever the gradient comes from."""

    class Broken(torch.optim.SGD):
        steps = 0

        def step(self, closure: Any = None) -> Any:
            self.steps += 1
            if self.steps == 4:
                raise ValueError("of the optimizer")
            return super().step(closure)

    rank, data = dist.get_rank(), data_of((30, 30, 30))
    with replicas(mlp(), lambda p: Broken(p, lr=0.1)) as asp:
        with pytest.raises(ValueError if rank == 0 else TransportError, match="of the optimizer"):
            list(asp.run(data[rank]))
        assert asp.updates == 3
        assert len(list(asp.run(data[rank][:1]))) == 1


def refused() -> None:
    rank, data = dist.get_rank(), data_of((2, 2, 2))
    model = mlp()
    with replicas(model) as asp:
        if rank == 2:
            with torch.no_grad():
                next(model[2].parameters()).mul_(2)
        with pytest.raises(ConfigError, match=r"rank 0 and rank 2 differ: 2\.weight have other values; make the model"):
            list(asp.run(data[rank]))
        model.load_state_dict(of_all(model.state_dict())[0])
        model.requires_grad_(rank != 1)
        with pytest.raises(ConfigError, match="rank 0 and rank 1 differ: other parameters are frozen"):
            list(asp.run(data[rank]))
        model.requires_grad_()
        with pytest.raises(ConfigError, match=r"in one process: AsyncReplicas\(model, replicas=3, \.\.\.\)\.replay"):
            asp.replay(Order(), [])
        assert len(list(asp.run(data[rank]))) == 2
        assert asp.minibatches == 6
    model = mlp()
    if rank == 1:
        model.register_buffer("more", torch.ones(1))
    words = "rank 0 and rank 1 differ: one has 8 parameters and buffers, the other 9; make the same model"
    with replicas(model) as asp, pytest.raises(ConfigError, match=words):
        list(asp.run(data[rank]))
    with pytest.raises(ConfigError, match="the ranks disagree: bound is 1 on rank 0 and 2 on rank 2"):
        replicas(mlp(), bound=2 if rank == 2 else 1)
    with pytest.raises(ConfigError, match="replicas is 2, but the mesh has 3 ranks, with one each: leave replicas out"):
        replicas(mlp(), replicas=2)
    for given, words in (
        (3, "mesh is 3, but it must be a torch DeviceMesh with the dimension 'dp'"),
        (mesh(names=("pp",)), "the mesh has the dimensions 'pp', but every rank has a whole model here"),
    ):
        with pytest.raises(ConfigError, match=words):
            gapless.AsyncReplicas(mlp(), mesh=given, optimizer=sgd)  # type: ignore[arg-type]


def faults() -> None:
    def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)

    stops(fail, ValueError, "failed in replica ., minibatch .+: ValueError: as told")
    stops(interrupt, KeyboardInterrupt, "was interrupted", bound=1)
    stops(fail, ValueError, "failed", local_steps=2)
    for each in (interrupted_at_the_end, a_loader_fails, a_body_fails, an_update_fails, refused):
        each()
        dist.barrier()
    assert not alive()


def test_whatever_happens_on_one_rank_all_of_them_stop_in_order(launch: Launch) -> None:
    launch(faults, 3)


def begun(data: Data, do: Callable[[], object]) -> Iterator[tuple[Tensor, Tensor]]:
    """Does something when all ranks have begun their run."""
    do()
    yield from data


def at_random() -> None:
    """Runs of all kinds, with Ctrl-C at any moment on any rank: weights are the same on all, and those of the order."""
    rank, ranks, chance = dist.get_rank(), dist.get_world_size(), random.Random(11)
    stopped = 0
    for _ in range(60):
        counts = tuple(chance.randint(1, 30) for _ in range(ranks))
        data, guilty, delay = data_of(counts), chance.randint(0, ranks), chance.random() * 0.1
        options: dict[str, Any] = chance.choice(
            [{}, {"bound": chance.randint(0, 2)}, {"local_steps": chance.randint(1, 4)}]
        )
        model = made("mlp")
        start = copy.deepcopy(model)
        asp = replicas(model, **options)
        timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
        stopped_here = False
        with contextlib.suppress(KeyboardInterrupt):
            try:
                list(asp.run(begun(data[rank], timer.start if rank == guilty else int)))
            except TransportError as error:
                if "was interrupted" not in str(error):
                    raise
                stopped_here = True
            timer.cancel()
            if rank == guilty:
                timer.join()
        stopped += stopped_here
        states = of_all(model.state_dict())
        assert all(torch.equal(states[0][name], states[rank][name]) for name in states[0])
        if "local_steps" not in options:
            test_asp.sequential(start, str(asp.order), list(asp.order.merged(data)), sgd)
            assert_same_state(model, start)
        with asp:
            assert len(list(asp.run(data[rank][:1]))) == 1
    print(f"rank {rank} was stopped {stopped} times")
    assert not alive()


@pytest.mark.slow
def test_ctrl_c_at_any_moment_leaves_all_ranks_alike(launch: Launch) -> None:
    print(launch(at_random, 3, timeout=500.0))


def one_dies(victim: str, way: str) -> None:
    """The others name it, and end."""
    rank, data = dist.get_rank(), data_of((40, 40, 40))
    options: dict[str, Any] = {"bound": 0} if way == "shared" else {"local_steps": 2}
    model = nn.Sequential(*mlp(), after(5, (lambda: os._exit(3)) if rank == int(victim) else lambda: None))
    try:
        list(replicas(model, **options).run(data[rank]))
    except TransportError as error:
        print(f"{error}")
        os._exit(0)


@pytest.mark.parametrize(("victim", "way"), [(0, "local"), (1, "shared")])
def test_a_rank_that_dies_is_named_by_all_others(victim: int, way: str, launch: Launch) -> None:
    said = launch(one_dies, 3, str(victim), way, fails=True)
    for rank in {0, 1, 2} - {victim}:
        assert re.search(rf"rank {rank} was .*: rank {victim} is dead: ", said), said


def test_replicas_are_threads_or_ranks() -> None:
    with pytest.raises(ConfigError, match="give replicas=, a number of threads of this process, or mesh=, with a rank"):
        gapless.AsyncReplicas(nn.Sequential(Do(lambda x: x), nn.Linear(1, 1)), optimizer=sgd)
