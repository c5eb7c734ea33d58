"""Contestants that are no pipelines, or not on ranks: the parts of a model by themselves, FSDP2, and torchgpipe."""

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.peer.contest import Contest, loss
from benchmarks.peer.gapless_sides import on_one_core

TORCHGPIPE_NOTE = "torchgpipe's backwards run on autograd's threads: one for all CPUs, so they are not parallel here"
Prepared = tuple[str | None, Callable[[], object]]


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
