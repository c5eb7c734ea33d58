"""torch.distributed.pipelining as a contestant: what `ranks` runs."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed import P2POp, pipelining
from torch.distributed.pipelining import PipelineStage, schedules

from benchmarks.peer.contest import Contest

_CLASSES: dict[str, tuple[Any, int]] = {
    "gpipe": (pipelining.ScheduleGPipe, 1),
    "1f1b": (pipelining.Schedule1F1B, 1),
    "looped-bfs": (pipelining.ScheduleLoopedBFS, 2),
    "interleaved": (pipelining.ScheduleInterleaved1F1B, 2),
    "interleaved-zb": (pipelining.ScheduleInterleavedZeroBubble, 2),
    "zb-v": (pipelining.ScheduleZBVZeroBubble, 2),
}
if hasattr(schedules, "ScheduleDualPipeV"):  # from torch 2.9 on
    _CLASSES["dualpipe-v"] = (schedules.ScheduleDualPipeV, 2)
ALL = tuple(_CLASSES)  # every schedule that torch has
_VEE = ("zb-v", "dualpipe-v")
_SPLIT = ("interleaved-zb", "zb-v", "dualpipe-v")
_COMPUTE = ("F", "B", "I", "W")


class _NeedsGrad(nn.Module):
    """The first stage of a model whose inputs require a gradient: torch hands it views, which keep none."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x.detach().requires_grad_())
        return y


class _Stage(PipelineStage):
    """Torch 2.11 lets neighbours meet before the first step, by a message. In a V the last rank is its own neighbour,
    and Gloo does not send to itself.
    """

    def _get_init_p2p_neighbors_ops(self) -> list[P2POp]:
        return [each for each in super()._get_init_p2p_neighbors_ops() if each.group_peer != self.group_rank]


def _stages_of(rank: int, devices: int, name: str) -> list[int]:
    """Line, loop, or there and back again."""
    if _CLASSES[name][1] == 1:
        return [rank]
    return [rank, 2 * devices - 1 - rank] if name in _VEE else [rank, devices + rank]


def prepare_torch(contest: Contest, name: str, rank: int) -> tuple[str | None, Callable[[], object]]:
    """torch's schedule of that name: its order, and a call that runs one step of it on this rank."""
    made, stages_per_device = _CLASSES[name]
    num_stages = stages_per_device * contest.devices
    numbers = _stages_of(rank, contest.devices, name)
    stages = []
    for number in numbers:
        layers = contest.stage(stages_per_device, separate=name in _SPLIT, number=number)
        if number == 0 and contest.inputs_need_grad:
            layers = _NeedsGrad(layers)
        stages.append(_Stage(layers, number, num_stages, contest.device))
    stage = stages if stages_per_device > 1 else stages[0]
    schedule: Any = made(stage, contest.microbatches, loss_fn=contest.loss)
    inputs = (contest.inputs(),) if 0 in numbers else ()
    target = contest.target() if num_stages - 1 in numbers else None
    parameters = [each for stage in stages for each in stage.submod.parameters()]
    run = contest.trained(parameters, lambda: schedule.step(*inputs, target=target, return_outputs=False))
    return _order(schedule), run


def _order(schedule: Any) -> str | None:
    """The actions as torch runs them, as text; None for the schedules that are a loop in its source."""
    rows = getattr(schedule, "pipeline_order_with_comms", None)
    if rows is None:
        return None
    return "\n".join(f"{rank}: {' '.join(_tokens(rows[rank]))}" for rank in sorted(rows))


def _tokens(actions: Any) -> Iterator[str]:
    """Those that compute; of two that run as one block, one after the other."""
    for action in actions:
        if parts := getattr(action, "sub_actions", None):
            yield from _tokens(parts)
        elif action.computation_type.value in _COMPUTE:
            yield str(action)
