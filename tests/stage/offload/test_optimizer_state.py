"""An optimizer whose state is in the host's memory: the bits of the same one without, and memory that is free."""

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

import gapless
from gapless.errors import ConfigError

Made = Callable[[Iterable[Any]], Optimizer]
OPTIMIZERS: dict[str, Made] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "capturable steps": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9),
}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(30, 30) for _ in range(5)], nn.Linear(30, 2))


def groups(of: nn.Module) -> list[dict[str, Any]]:
    weights = [each for each in of.parameters() if each.dim() > 1]
    return [{"params": weights, "weight_decay": 0.1}, {"params": [each for each in of.parameters() if each.dim() < 2]}]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_have_the_bits_of_the_optimizer_on_the_device(name: str) -> None:
    ours, plain = model(), model()
    mine = gapless.offload_optimizer(OPTIMIZERS[name](groups(ours)), piece=5000)
    theirs = OPTIMIZERS[name](groups(plain))
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2) for each in (mine, theirs)]
    for step in range(6):
        x = torch.randn(4, 30)
        for net, optimizer, scheduler in zip((ours, plain), (mine, theirs), schedulers, strict=True):
            optimizer.zero_grad()
            net[: 3 if step == 4 else None](x).square().mean().backward()  # some have no gradient now and then
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
            scheduler.step()
        if step == 2:
            mine.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert all(map(torch.equal, ours.parameters(), plain.parameters()))
    for mine_, theirs_ in zip(mine.state.values(), theirs.state.values(), strict=True):
        assert all(
            torch.equal(a, b) if isinstance(a, Tensor) else a == b
            for a, b in zip(mine_.values(), theirs_.values(), strict=True)
        )


def test_two_pieces_are_on_the_device_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    whole, seen = optimizer.step, []

    def watched() -> None:
        whole()
        here = [p for group in optimizer.param_groups for p in group["params"]]
        refs.extend(StorageWeakRef(optimizer.state[p]["exp_avg"].untyped_storage()) for p in here)
        seen.append(sum(not each.expired() for each in refs))

    refs: list[StorageWeakRef] = []
    monkeypatch.setattr(optimizer, "step", watched)
    gapless.offload_optimizer(optimizer, piece=1)  # a parameter at a time
    torch.optim.lr_scheduler.StepLR(optimizer, 2)  # which looks at the step, and may replace it
    for _ in range(2):
        net(torch.randn(4, 30)).square().mean().backward()
        optimizer.step()
    assert len(seen) == 2 * len(list(net.parameters()))
    assert max(seen) <= 2
    assert all(each.expired() for each in refs)


def test_a_pipeline_saves_and_loads_it(tmp_path: Path) -> None:
    def trained(folder: Path, steps: range, offloaded: bool) -> nn.Module:
        net = model()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        if offloaded:
            gapless.offload_optimizer(optimizer, piece=4000)
        with gapless.Pipeline(net, devices=2, microbatches=2, loss=F.mse_loss) as pipe:
            if steps.start:
                pipe.load(folder, optimizer)
            for step in steps:
                x = torch.randn(8, 30, generator=torch.Generator().manual_seed(step))
                pipe.step(x, x[:, :2])
                pipe.clip_grad_norm_(0.5)
                optimizer.step()
                optimizer.zero_grad()
            pipe.save(folder, optimizer)
        return net

    plain = trained(tmp_path / "plain", range(4), offloaded=False)
    for first in (False, True):  # with and without it, and the other way round
        folder = tmp_path / str(first)
        trained(folder, range(2), offloaded=first)
        ours = trained(folder, range(2, 4), offloaded=not first)
        assert all(map(torch.equal, ours.parameters(), plain.parameters()))


def test_a_scaler_steps_it() -> None:
    nets = model(), model()
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in nets]
    gapless.offload_optimizer(optimizers[0], piece=1)
    for net, optimizer in zip(nets, optimizers, strict=True):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(3):
            x = torch.randn(4, 30, generator=torch.Generator().manual_seed(step))
            loss = net(x).square().mean() * (float("inf") if step == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert all(map(torch.equal, nets[0].parameters(), nets[1].parameters()))


class Own(Optimizer):
    """Counts in its group."""

    def __init__(self, parameters: Iterable[Any]) -> None:
        super().__init__(parameters, {"count": 0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1


def test_what_can_not_be_stepped_in_pieces_is_refused() -> None:
    net = model()
    with pytest.raises(ConfigError, match=r"Own would be stepped in pieces.*independent=True"):
        gapless.offload_optimizer(Own(net.parameters()))
    with pytest.raises(ConfigError, match="LBFGS steps all parameters together"):
        gapless.offload_optimizer(torch.optim.LBFGS(net.parameters()))
    with pytest.raises(ConfigError, match="Optimizer, and this is a Sequential"):
        gapless.offload_optimizer(net)  # type: ignore[arg-type]
    net(torch.randn(2, 30)).sum().backward()
    with pytest.raises(ConfigError, match="Own keeps state in its parameter groups"):
        gapless.offload_optimizer(Own(net.parameters()), independent=True).step()
    hooked = torch.optim.SGD(net.parameters())
    hooked.register_step_post_hook(lambda *_: None)
    with pytest.raises(ConfigError, match="SGD has step hooks, which would be called for every piece"):
        gapless.offload_optimizer(hooked)
    with pytest.raises(ConfigError, match="a closure would run for every piece"):
        gapless.offload_optimizer(torch.optim.SGD(net.parameters())).step(lambda: 0.0)
    offloaded = gapless.offload_optimizer(torch.optim.SGD(net.parameters()))
    torch.optim.lr_scheduler.StepLR(offloaded, 2)
    with (
        gapless.Pipeline(net, devices=2, microbatches=2, loss=F.mse_loss) as pipe,
        pytest.raises(ConfigError, match="the state of this SGD is in host memory, where a step can't be undone"),
    ):
        pipe.training(offloaded)
    with pytest.raises(ConfigError, match="piece is 0"):
        gapless.offload_optimizer(torch.optim.SGD(net.parameters()), piece=0)
