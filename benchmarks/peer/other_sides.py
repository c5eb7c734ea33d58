"""The other contestants, as `ranks` runs them: torch.distributed.pipelining; and those that are no pipelines, or not on
ranks: the parts of a model by themselves, FSDP2, and torchgpipe.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import P2POp, pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules

from benchmarks.peer.contest import Contest, loss
from benchmarks.peer.gapless_sides import on_one_core

TORCHGPIPE_NOTE = "torchgpipe's backwards run on autograd's threads: one for all CPUs, so they are not parallel here"
Prepared = tuple[str | None, Callable[[], object]]

# -- torch.distributed.pipelining --------------------------------------------------------------------------------------

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


def prepare_torch(contest: Contest, name: str, rank: int) -> Prepared:
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


# -- no pipelines, or not on ranks -------------------------------------------------------------------------------------


def prepare_parts(contest: Contest, name: str, rank: int) -> Prepared:
    """Parts of a model with nobody to wait for: no pipeline beats them. The step of "parts": every rank its own part,
    at once; of "whole": the first rank all of them, and the others nothing. "parts graphed": a microbatch of it is one
    CUDA graph.
    """
    torch.manual_seed(0)
    count = contest.devices if name == "whole" else 1
    layers = nn.Sequential(*(contest.stage(1, number=rank + number) for number in range(count)))
    inputs, targets = contest.inputs().split(contest.samples), contest.target().split(contest.samples)
    needs_grad = name != "whole" and rank > 0
    if contest.kind == "llama" and needs_grad:
        shape, low = (contest.samples, contest.tokens, contest.size), next(layers.parameters()).dtype
        inputs = tuple(torch.randn(shape, dtype=low, device=contest.device) for _ in inputs)
    is_last = name == "whole" or rank == contest.devices - 1
    find = contest.loss if contest.kind != "llama" or is_last else loss

    def once(part: Tensor, target: Tensor) -> None:
        with contest.casting():
            found = find(layers(part), target)
        found.backward()

    if name == "parts graphed":
        run: Callable[[], object] = _graphed(once, inputs, needs_grad, targets)
    else:

        def run() -> None:
            if name == "parts" or rank == 0:
                for part, target in zip(inputs, targets, strict=True):
                    once(part.detach().requires_grad_(needs_grad), target)

    return None, contest.trained(layers.parameters(), run, in_place=name == "parts graphed")


def _graphed(
    once: Callable[[Tensor, Tensor], None], inputs: Sequence[Tensor], needs_grad: bool, targets: Sequence[Tensor]
) -> Callable[[], object]:
    """Gradients stay where they are, so that a graph can add to them."""
    place, target = inputs[0].clone().requires_grad_(needs_grad), targets[0].clone()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            once(place, target)
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            once(place, target)

    def step(*_: object) -> None:
        for part in inputs:
            place.data.copy_(part)
            graph.replay()

    return partial(step, once, target)  # what the graph reads, and does not hold


def prepare_fsdp(contest: Contest, name: str, rank: int) -> Prepared:
    """FSDP2: the whole model on every rank, its weights shared out among them. Every rank takes its share of the
    samples, all at once. Weights are gathered before a layer runs, and gradients are summed after it. There is no
    bubble, and weights travel instead of activations.
    """
    if contest.microbatches % contest.devices:
        raise ValueError(
            f"{contest.microbatches} microbatches can't be shared out evenly among {contest.devices} ranks"
        )
    torch.manual_seed(0)
    mesh = init_device_mesh(contest.device.type, (contest.devices,))
    model: Any = nn.Sequential(*(contest.stage(1) for _ in range(contest.devices)))
    for stage in (*model, model):
        fully_shard(stage, mesh=mesh)
    inputs, target = contest.inputs().tensor_split(contest.devices)[rank], contest.target()
    return None, lambda: contest.loss(model(inputs), target).backward()


def missing_torchgpipe() -> dict[str, str]:
    """Why it can't take part, if it can't."""
    return {} if find_spec("torchgpipe") else {"torchgpipe": "torchgpipe is not installed: pip install torchgpipe"}


def prepare_torchgpipe(contest: Contest, name: str, rank: int) -> Prepared:
    """Its only schedule, gpipe, without recomputing, on a single rank, since its devices are threads.

    Its forwards are pipelined by threads of its own, its backwards by autograd's, of which there is one for each
    accelerator and one for all CPUs. So on CPUs its backwards run one after another.
    """
    torchgpipe: Any = import_module("torchgpipe")
    layers = nn.Sequential(*(contest.stage(1) for _ in range(contest.devices)))
    sizes = {"balance": [1] * contest.devices, "devices": [contest.device] * contest.devices}
    with on_one_core():  # its threads start here
        model = torchgpipe.GPipe(layers, **sizes, chunks=contest.microbatches, checkpoint="never")
    inputs, target = contest.inputs().requires_grad_(contest.inputs_need_grad), contest.target()
    return None, lambda: contest.loss(model(inputs), target).backward()
