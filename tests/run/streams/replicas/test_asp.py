"""Replicas that apply gradients without waiting: their weights are those of a loop that does the same, move by move."""

import copy
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gapless
from gapless.run.streams.replicas.order import Order
from tests.by_hand import seeded_loop
from tests.pipelines import Do, alive, mlp

SEED = 7
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def halving(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)


def batches(count: int, width: int = 6) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(5)
    return [(torch.randn(4, width), torch.randn(4, width)) for _ in range(count)]


class Noisy(nn.Module):
    """No sequence: draws in two ways, and counts its calls."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = F.dropout(self.first(x), 0.3, training=self.training)
        return self.second(x + 0.1 * torch.rand_like(x))  # type: ignore[no-any-return]


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 6))


def frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: mlp(dropout=0.3),
    "batch norm": normed,
    "no sequence": Noisy,
    "frozen": frozen,
}


def made(name: str) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[name]()


def in_backward(do: Callable[[], None]) -> nn.Module:
    """A layer at whose backward something is done: in a forward nobody may wait, as the first ones take turns."""

    def hooked(x: Tensor) -> Tensor:
        x.register_hook(lambda _: do())
        return x

    return Do(hooked)


def with_barrier(model: nn.Module, replicas: int) -> nn.Module:
    """Nobody applies before all replicas have read: in every round one update is as stale as can be."""
    barrier = threading.Barrier(replicas)

    def meet() -> None:
        if threading.current_thread().name.startswith("gapless replica"):
            barrier.wait(60)

    layers = model if isinstance(model, nn.Sequential) else [model]
    return nn.Sequential(*layers, in_backward(meet))


def sequential(
    model: nn.Module, order: str, data: list[Any], make: Make, scheduler: Any = None, context: Any = nullcontext
) -> list[Tensor]:
    """By the definition: a read copies the model, an apply steps the model with the gradient on that copy."""
    optimizer = make(list(model.parameters()))
    stepped = None if scheduler is None else scheduler(optimizer)
    read: dict[str, tuple[int, nn.Module]] = {}
    losses: list[Tensor] = [torch.tensor(0.0)] * len(data)
    reads = 0
    for move in order.split():
        replica, kind = move[:-1], move[-1]
        if kind == "r":
            read[replica] = reads, copy.deepcopy(model)
            reads += 1
            continue
        minibatch, mine = read.pop(replica)
        layers = mine if isinstance(mine, nn.Sequential) else [mine]
        asked: dict[str, Any] = {"microbatches": 1, "seed": SEED, "step": minibatch, "around": context}
        (losses[minibatch],) = seeded_loop(layers, *data[minibatch], **asked)
        for ours, its in zip(model.parameters(), mine.parameters(), strict=True):
            ours.grad = its.grad
        optimizer.step()
        optimizer.zero_grad()
        if stepped is not None:
            stepped.step()
        for buffer, its_buffer in zip(model.buffers(), mine.buffers(), strict=True):
            buffer.copy_(its_buffer)
    return losses


def assert_same_state(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, a), b in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize(("name", "make"), zip(MODELS, (sgd, adam) * 2, strict=True))
def test_weights_are_those_of_a_loop_that_reads_and_applies_in_the_same_order(name: str, make: Make) -> None:
    data = batches(12)
    model = with_barrier(made(name), 3)
    start, again = copy.deepcopy(model), copy.deepcopy(model)
    with gapless.AsyncReplicas(model, replicas=3, loss=F.mse_loss, optimizer=make, scheduler=halving, seed=SEED) as asp:
        results = list(asp.run(data))
        order = asp.order
        assert asp.updates == asp.minibatches == 12
    losses = sequential(start, str(order), data, make, halving)
    assert_same_state(model, start)
    assert sorted(result.minibatch for result in results) == list(range(12))
    for result in results:
        assert torch.equal(result.loss, losses[result.minibatch])
        assert not result.loss.requires_grad
    assert [(each.replica, each.minibatch, each.staleness) for each in results] == list(order.applies)
    assert sorted(each.staleness for each in results[:3]) == [0, 1, 2]
    assert order.max_staleness >= 2

    with gapless.AsyncReplicas(again, replicas=3, loss=F.mse_loss, optimizer=make, scheduler=halving, seed=SEED) as asp:
        replayed = list(asp.replay(Order.parse(str(order)), data))
        assert asp.order == order
    assert_same_state(again, model)
    assert [(each.minibatch, each.replica, each.staleness) for each in replayed] == [
        (each.minibatch, each.replica, each.staleness) for each in results
    ]


def test_autocast_holds_in_the_replicas_and_casts_follow_the_weights() -> None:
    data = batches(8)
    model = with_barrier(made("mlp"), 2)
    start = copy.deepcopy(model)

    def context() -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False)

    with (
        gapless.AsyncReplicas(model, replicas=2, loss=F.mse_loss, optimizer=sgd, seed=SEED) as asp,
        torch.autocast("cpu", dtype=torch.bfloat16),
    ):
        list(asp.run(data))
        assert torch.is_autocast_cache_enabled()
    sequential(start, str(asp.order), data, sgd, context=context)
    assert_same_state(model, start)


def test_clip_scales_the_gradient_of_each_minibatch() -> None:
    x, y = batches(1)[0]
    model = made("frozen")
    plain = copy.deepcopy(model)
    with gapless.AsyncReplicas(model, replicas=1, loss=F.mse_loss, optimizer=sgd, clip=0.01) as asp:
        list(asp.run([(x, y)]))
    F.mse_loss(plain(x), y).backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    sgd(list(plain.parameters())).step()
    assert_same_state(model, plain)


def test_the_model_may_have_its_own_loss_and_take_a_dict() -> None:
    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": F.mse_loss(self.linear(x), labels)}

    torch.manual_seed(3)
    model = WithLoss()
    plain = copy.deepcopy(model)
    data = batches(3)
    with gapless.AsyncReplicas(model, replicas=1, optimizer=sgd) as asp:
        list(asp.run({"x": x, "labels": y} for x, y in data))
    optimizer = sgd(list(plain.parameters()))
    for x, y in data:
        plain(x, y)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_state(model, plain)


# -- the bound ---------------------------------------------------------------------------------------------------------


class Slow:
    """Holds replica 0 until it is let go, and the others until it is there: it has read before any update."""

    def __init__(self) -> None:
        self.there, self.go = threading.Event(), threading.Event()

    def __call__(self) -> None:
        name = threading.current_thread().name
        if name == "gapless replica 0":
            self.there.set()
            assert self.go.wait(60)
        elif name.startswith("gapless replica"):
            assert self.there.wait(60)


def held_up(slow: Slow, count: int, until: int, **options: Any) -> tuple[Order, nn.Module, nn.Module]:
    """Three replicas, of which the first is held until so many results have come."""
    model = nn.Sequential(*mlp(), in_backward(slow))
    start = copy.deepcopy(model)
    with gapless.AsyncReplicas(model, replicas=3, loss=F.mse_loss, optimizer=sgd, seed=SEED, **options) as asp:
        for number, _ in enumerate(asp.run(batches(count)), 1):
            if number == until:
                slow.go.set()
        return asp.order, model, start


def test_without_a_bound_the_others_go_on_while_one_is_slow() -> None:
    order, model, start = held_up(Slow(), 12, 11)
    assert [each.staleness for each in order.applies if each.replica == 0] == [11]
    sequential(start, str(order), batches(12), sgd)
    assert_same_state(model, start)


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_a_bound_holds_those_that_are_too_far_ahead(bound: int) -> None:
    count = 6 * (bound + 2)
    order, model, start = held_up(Slow(), count, 2 * (bound + 1), bound=bound)
    applied = [0, 0, 0]
    for replica, kind in order.moves:
        if kind == "a":
            applied[replica] += 1
        else:
            assert applied[replica] - min(applied) <= bound
    assert sum(applied) == count
    assert order.max_staleness <= 2 * (2 * bound + 1)
    first = next(each for each in order.applies if each.replica == 0)
    assert first.staleness == 2 * (bound + 1)
    sequential(start, str(order), batches(count), sgd)
    assert_same_state(model, start)


# -- failures ----------------------------------------------------------------------------------------------------------


class BoomError(Exception):
    pass


def test_a_failure_in_a_replica_stops_all_and_names_the_minibatch() -> None:
    data = batches(20)
    data[7][0].fill_(float("inf"))

    def check(x: Tensor) -> Tensor:
        if not x.isfinite().all():
            raise BoomError
        return x

    model = nn.Sequential(Do(check), *mlp())
    with gapless.AsyncReplicas(model, replicas=3, loss=F.mse_loss, optimizer=sgd) as asp:
        seen: list[int] = []
        with pytest.raises(BoomError) as caught:
            seen.extend(result.minibatch for result in asp.run(data))
        (note,) = caught.value.__notes__
        assert note.startswith("gapless: raised in replica ")
        assert ", minibatch 7; the model has had " in note
        assert 7 not in seen
        assert alive("gapless replica") == []
        order = asp.order
        assert len(order.applies) == asp.updates
        assert len(list(asp.run(data[:6]))) == 6  # a later run works again


def test_gradients_that_are_not_finite_are_not_applied() -> None:
    data = batches(3)
    data[1][1].fill_(float("nan"))
    model = made("mlp")
    with gapless.AsyncReplicas(model, replicas=1, loss=F.mse_loss, optimizer=sgd) as asp:
        with pytest.raises(gapless.GaplessError, match=r"the gradient of 0\.weight is not finite, with a loss of nan"):
            list(asp.run(data))
        assert asp.updates == 1
    assert all(each.isfinite().all() for each in model.parameters())


def test_gradients_that_are_sparse_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(4, 6, sparse=True), nn.Linear(6, 6))
    with (
        gapless.AsyncReplicas(model, replicas=1, loss=F.mse_loss, optimizer=sgd) as asp,
        pytest.raises(gapless.GaplessError, match=r"the gradient of 0\.weight is sparse, which replicas can't take"),
    ):
        list(asp.run([(torch.tensor([1, 2]), torch.zeros(2, 6))]))


def test_an_error_of_the_loader_comes_through_and_leaves_no_thread() -> None:
    def loader() -> Iterator[Any]:
        yield from batches(3)
        raise BoomError

    with gapless.AsyncReplicas(mlp(), replicas=2, loss=F.mse_loss, optimizer=sgd) as asp:
        with pytest.raises(BoomError):
            list(asp.run(loader()))
        assert alive("gapless replica") == []


def test_leaving_the_loop_stops_the_threads_and_the_order_can_be_replayed() -> None:
    data = batches(40)
    model = made("mlp")
    again = copy.deepcopy(model)
    options: dict[str, Any] = {"replicas": 2, "loss": F.mse_loss, "optimizer": sgd, "seed": SEED}
    with gapless.AsyncReplicas(model, **options) as asp, gapless.AsyncReplicas(again, **options) as other:
        for result in asp.run(data):
            assert len(alive("gapless replica")) == 2
            if result.minibatch >= 5:
                break
        assert alive("gapless replica") == []
        begun = asp.minibatches
        assert len(asp.order.applies) == asp.updates >= 4
        list(other.replay(asp.order, data))
        list(asp.run(data[begun:]))
        list(other.replay(asp.order, data[begun:]))
        assert asp.minibatches == 40
    assert_same_state(model, again)


def test_ctrl_c_and_the_end_of_the_context_stop_the_threads() -> None:
    asp = gapless.AsyncReplicas(mlp(), replicas=2, loss=F.mse_loss, optimizer=sgd)
    results = asp.run(batches(40))

    def interrupted() -> None:
        with asp:
            next(results)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert alive("gapless replica") == []
    assert list(results) == []
    with pytest.raises(gapless.GaplessError, match="the replicas are closed; make new ones"):
        asp.run(batches(1))


def test_ctrl_c_while_it_waits_for_a_result_stops_the_threads() -> None:
    pressed: list[bool] = []

    def press() -> None:
        if not pressed:
            pressed.append(True)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.2)  # it is told meanwhile, and ends with what it computes

    model = nn.Sequential(*mlp(), in_backward(press))
    with gapless.AsyncReplicas(model, replicas=1, loss=F.mse_loss, optimizer=sgd) as asp:
        with pytest.raises(KeyboardInterrupt):
            list(asp.run(batches(20)))
        assert alive("gapless replica") == []
        assert asp.updates < 20
        assert len(list(asp.run(batches(1)))) == 1


def test_a_second_run_at_the_same_time_is_refused() -> None:
    with gapless.AsyncReplicas(mlp(), replicas=2, loss=F.mse_loss, optimizer=sgd) as asp:
        results = asp.run(batches(4))
        with pytest.raises(gapless.GaplessError, match="in the middle of a run: go to its end, or close its iterator"):
            asp.run(batches(4))
        results.close()
        assert len(list(asp.run(batches(4)))) == 4


def test_a_penalty_on_the_weights_of_the_model_itself_is_refused() -> None:
    model = mlp()

    def loss(out: Tensor, goal: Tensor) -> Tensor:
        return F.mse_loss(out, goal) + sum(each.square().sum() for each in model.parameters())

    asp = gapless.AsyncReplicas(model, replicas=1, loss=loss, optimizer=sgd)
    with pytest.raises(gapless.GaplessError, match=r"the loss or a layer uses 0\.weight of the model itself"):
        list(asp.run(batches(2)))


def test_replaying_wants_the_minibatches_and_the_replicas_of_the_order() -> None:
    with gapless.AsyncReplicas(mlp(), replicas=1, loss=F.mse_loss, optimizer=sgd) as asp:
        with pytest.raises(gapless.GaplessError, match="the order has 2 replicas, but there are 1: make as many"):
            asp.replay(Order.parse("0r 1r"), batches(2))
        with pytest.raises(gapless.GaplessError, match="has 2 minibatches, but the loader ended after 1: give it all"):
            list(asp.replay(Order.parse("0r 0a 0r 0a"), batches(1)))


def test_minibatches_under_way_do_not_pile_up() -> None:
    taken = 0

    def loader() -> Iterator[Any]:
        nonlocal taken
        for batch in batches(60):
            taken += 1
            yield batch

    with gapless.AsyncReplicas(mlp(), replicas=2, loss=F.mse_loss, optimizer=sgd) as asp:
        for number, _ in enumerate(asp.run(loader())):
            assert taken <= number + 8


# -- bad input ---------------------------------------------------------------------------------------------------------

OTHER = nn.Linear(2, 2)


def locked() -> nn.Module:
    model = mlp()
    model.lock = threading.Lock()  # type: ignore[assignment]
    return model


def hooked() -> nn.Module:
    model = mlp()
    model[0].weight.register_hook(lambda grad: grad)  # type: ignore[operator]
    return model


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicas": 0}, "replicas is 0, but it must be a whole number of at least 1"),
        ({"replicas": True}, "replicas is True, but it must be a whole number of at least 1"),
        ({"bound": -1}, "bound is -1, but it must be a whole number of at least 0"),
        ({"local_steps": 0}, "local_steps is 0, but it must be a whole number of at least 1"),
        ({"intra_op_threads": 0}, "intra_op_threads is 0, but it must be a whole number of at least 1"),
        ({"bound": 1, "local_steps": 2}, "bound=1 is for replicas that share weights, but with local_steps=2"),
        ({"average_state": True}, "average_state=True is for local_steps="),
        ({"scaler": torch.amp.GradScaler("cpu")}, "a GradScaler chooses one scale for all gradients and skips updates"),
        (
            {"optimizer": lambda _: sgd(list(OTHER.parameters()))},
            "the optimizer has 2 parameters that it was not given",
        ),
        ({"optimizer": sgd(list(OTHER.parameters()))}, "optimizer is a SGD, but it must be a function that makes one"),
        ({"model": locked()}, "this Sequential can't be copied (TypeError: cannot pickle"),
        ({"optimizer": lambda _: None}, "optimizer made a NoneType, but it must be a torch.optim.Optimizer"),
        ({"optimizer": torch.optim.LBFGS}, "optimizer made a LBFGS, but it must be a torch.optim.Optimizer that steps"),
        ({"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau}, "a ReduceLROnPlateau needs a loss"),
        ({"scheduler": 3}, "scheduler is a int, but it must be a function of an optimizer"),
        ({"loss": 3}, "loss is 3, but it must be a function of the outputs and the target"),
        ({"loss": nn.Linear(1, 1)}, "the loss is a Linear with parameters of its own"),
        (
            {"model": [nn.Linear(1, 1)]},
            "the model is a list, but every replica has a copy of a module: pass an nn.Module",
        ),
        ({"model": hooked()}, "0.weight has a hook, which copies of it do not have: remove it"),
        ({"model": nn.LazyLinear(3)}, "the model is a LazyLinear whose parameters have no shape yet"),
        ({"model": nn.Linear(1, 1, device="meta")}, "is on the meta device, without data: give it values first"),
        ({"model": nn.Sequential(Do(lambda x: x), nn.Linear(1, 1))}, None),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_sentence(options: dict[str, Any], message: str | None) -> None:
    asked: dict[str, Any] = {"model": mlp(), "replicas": 2, "loss": F.mse_loss, "optimizer": sgd, **options}
    model = asked.pop("model")
    if message is None:
        gapless.AsyncReplicas(model, **asked).close()
        return
    with pytest.raises(gapless.GaplessError) as caught:
        gapless.AsyncReplicas(model, **asked)
    assert message in str(caught.value)


def test_a_model_with_other_layers_than_before_is_refused() -> None:
    model = mlp()
    with gapless.AsyncReplicas(model, replicas=2, loss=F.mse_loss, optimizer=sgd) as asp:
        model.append(nn.Linear(6, 6))
        with pytest.raises(gapless.GaplessError, match="this Sequential has other layers or parameters than when"):
            asp.run(batches(1))


def test_gradients_that_are_switched_off_are_asked_for() -> None:
    asp = gapless.AsyncReplicas(mlp(), replicas=2, loss=F.mse_loss, optimizer=sgd)
    with (
        torch.no_grad(),
        pytest.raises(gapless.GaplessError, match="they are switched off here: train outside no_grad"),
    ):
        asp.run(batches(1))


def test_a_batch_that_is_no_pair_is_refused() -> None:
    asp = gapless.AsyncReplicas(mlp(), replicas=1, loss=F.mse_loss, optimizer=sgd)
    with pytest.raises(gapless.GaplessError, match="minibatch 0 is a tuple of 3, but it must be inputs and a target"):
        list(asp.run([(torch.ones(1), torch.ones(1), torch.ones(1))]))
