"""What a pipeline asks of the processes it runs in. There are two kinds:

    one_process    all devices are threads of this process, and there is nobody else to talk to
    ranks          one device is in this process, the others in processes of their own, under torchrun

A pipeline makes its calls in this order:

    with making():    agree, adopt                  once, when it is made; both again when its model was edited
    with call(...):   program, weights, run         for each step and each evaluation

Whoever wants another transport or watches what runs (benchmarks do) derives from one of the two, and passes it as
`devices=`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from gapless.run.program import Program
from gapless.schedule.action import Schedule
from gapless.schedule.costs import Costs
from gapless.schedule.placement import Placement
from gapless.schedule.timeline import Timeline
from gapless.stage.batch.loss_counts import Weighed
from gapless.stage.batch.share import Share
from gapless.stage.shared.tie import Tied
from gapless.stage.stage import Stage

TransportName = Literal["auto", "memory", "nccl", "gloo"]
"""What carries tensors between ranks: the best that works, memory within one host, or a library."""

StaticShapesWord = bool | Literal["auto"]


class Carriage(NamedTuple):
    """How tensors are to be carried between ranks. With `static_shapes` every step sends what the first one did."""

    transport: TransportName = "auto"
    static_shapes: StaticShapesWord = "auto"


OwnStages = Mapping[int, Stage]  # those of this process, by their numbers
Parts = Sequence[Sequence[Any]]  # what each stage calls, wherever it is
Evaluated = Callable[[Any, Any], Tensor | None]  # the loss of an evaluation, which need not have one


class Ran(NamedTuple):
    """What a run leaves: the losses of all microbatches of all replicas, what each counts, and when actions ran."""

    losses: tuple[Tensor, ...]
    weights: tuple[float, ...]
    timeline: Timeline | None = None


class Gathering(Protocol):
    """All processes of a pipeline, which tell each other what they have to save. From one thread at a time."""

    @property
    def ranks(self) -> Sequence[int]:
        """In the order in which they are heard."""

    @property
    def place(self) -> int:
        """This one's, in that order."""

    def everywhere(self, own: Any) -> list[Any]:
        """What each has to say, as JSON can. All of them call it."""

    def note(self, doing: str) -> None:
        """What this one is at, for others who wait for it."""


class World(Protocol):
    """The processes of a pipeline, as seen from one of them."""

    devices: Sequence[torch.device]  # of the whole pipeline
    here: Sequence[int]  # the numbers of those that this process runs
    tied: Tied  # how gradients of shared parameters are added unless asked for otherwise
    replica: int  # that of this process
    num_replicas: int
    one_process: bool
    near: bool  # each device is one of its own, and GPUs reach each other's memory

    def making(self) -> AbstractContextManager[object]:
        """Around making a pipeline: where it fails on one rank, the others are told."""

    def agree(self, facts: Mapping[str, Any], module: nn.Module | None = None, loss: Any = None) -> None:
        """Every rank was asked for the same, or all of them refuse. Each still holds the whole `module` and the loss as
        it has made them, if they are given: by the first call their weights must be the same everywhere.
        """

    def adopt(self, module: nn.Module, stages: OwnStages, parts: Parts, placement: Placement, tied: Tied) -> None:
        """These stages are here: what several stages share is tied, and copies start with the same values. `parts` are
        the layers of each stage, also of those elsewhere, and `placement` says where they are.
        """

    def program(
        self, schedule: Schedule, stages: OwnStages, loss: Evaluated, costs: Costs | None, *, recorded: bool
    ) -> Program:
        """The schedule bound to the stages, the devices and the channels between them."""

    @property
    def busy(self) -> bool:
        """A step or an evaluation is under way."""

    @property
    def stopping(self) -> bool:
        """Some rank was asked to leave, and all do at the next call; not between the steps of one minibatch."""

    def call(self, doing: str) -> AbstractContextManager[object]:
        """Around a step or an evaluation: one at a time, and where it fails on one rank, the others are told."""

    def weights(self, program: Program, inputs: Any, target: Any, counted: Weighed, share: Share) -> Sequence[float]:
        """The share of each microbatch in the minibatch of all replicas. Ranks of one pipeline that have got different
        batches are refused.
        """

    def of_replicas(self, numbers: Sequence[float]) -> list[list[float]]:
        """Those of each replica. All processes are in the same `call`."""

    def run(self, program: Program, weights: Sequence[float]) -> Ran:
        """The actions of the program on its batch. After a step that trains, gradients are those of all replicas."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether a stage of this process uses it."""

    def state(self, module: nn.Module, whole: bool) -> dict[str, Any]:
        """The state dict of the whole model, or of what is held here."""

    def load(self, module: nn.Module, state: Mapping[str, Any], strict: bool) -> Any:
        """Takes from a state dict what is held here."""

    def zero_grad(self, module: nn.Module, set_to_none: bool) -> None:
        """Gradients that wait for an exchange are dropped too."""

    def share_of(self, parameters: Sequence[nn.Parameter]) -> tuple[set[nn.Parameter], set[nn.Parameter]]:
        """Those that are here, and of these the ones whose norms no other process counts."""

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float, norm_type: float) -> Tensor:
        """Scales the gradients of all processes to `max_norm`; the norm before."""

    def gathered(self, doing: str) -> AbstractContextManager[Gathering]:
        """Around saving and loading, in which no step is under way, and nobody leaves."""

    def described(self) -> Iterator[str]:
        """How tensors get from device to device, a line for each way, if it is not within one process."""

    def close(self) -> None:
        """Ends threads and connections."""
