"""Batch norm in microbatches: what normalises, what is remembered, and what must not count twice.

In training a batch norm normalises with the moments of what it sees, which is a microbatch, and moves its running
statistics, which evaluation will use. `batchnorm=` says how these move:

    "microbatch"   as torch does: once for each microbatch
    "deferred"     as GPipe does: the moments of the microbatches are put together, and the running statistics move
                   once for the minibatch, to where one update with the moments of the whole minibatch would move them
    "error"        a batch norm in training is refused

A forward that starts again, and one that is repeated for remat, must not count. Both make the same calls in the same
order as the run that did, so the calls are numbered and those below the mark of what has been counted are not counted.

`torch.utils.checkpoint` in a layer runs a batch norm again in the backward, and in a plain loop that moves the running
statistics once more. Here other forwards have run by then. So the forward makes these moves too, and the backward none;
when the minibatch is over, there must have been as many. With "deferred", what is computed again does not count.
"""

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gapless.errors import ConfigError
from gapless.guards.held_state import CHECKPOINTED_NORMS
from gapless.stage.compiled import is_compiled
from gapless.stage.random.draws import checkpoints_around

BatchNorm = Literal["deferred", "microbatch", "error"]
_COUNTER = "num_batches_tracked"


class Moments(NamedTuple):
    """What one call saw: `size` values per channel, their mean and unbiased variance; and what it is to move."""

    running_mean: Tensor
    running_var: Tensor
    factor: float
    size: int
    mean: Tensor
    var: Tensor


class Statistics:
    """The running statistics of the batch norms of a stage, between the start of a minibatch and its end."""

    def __init__(self, option: BatchNorm, layers: Sequence[Any]) -> None:
        _check(option, layers)
        self.option = option
        # A function may say to which module it belongs.
        parts = [layer if isinstance(layer, nn.Module) else getattr(layer, "module", None) for layer in layers]
        self._layers = [part for part in parts if isinstance(part, nn.Module)]
        self._counting: list[nn.Module] = []  # modules with counters, as far as known
        self._microbatch = -1
        self._seen = 0  # calls in this run
        self._counted = 0  # calls in this run or in one before it that counted
        self._uses: dict[int, int] = {}  # of each batch norm by this microbatch, if deferred or in a checkpoint
        # In this minibatch: by batch norm and by which of its calls it is, the moments of each microbatch; by counter
        # the microbatch that moves it; and the counters as often as they moved.
        self._moments: dict[tuple[int, int], dict[int, Moments]] = {}
        self._movers: dict[int, int] = {}
        self._raised: list[Tensor] = []
        self._weights: dict[Any, Tensor] = {}
        self.moved: set[int] = set()  # running statistics and counters that calls were seen to move, by id
        # Nobody has asked yet, so that a microbatch that comes need only be noted, and whether it does for remat.
        self.idle, self.coming = option != "error", (-1, False)
        self.asked = 0  # how often there was a call of a batch norm, in training or not
        self.in_checkpoints = False  # whether calls were seen that the backward makes again
        self._recomputing = self._replaying = False
        self._own = set[int]()  # buffers of the layers, by id
        # In this minibatch, by running mean: how many calls the backward is to make again, less those that it has made.
        self._to_come: Counter[int] = Counter()

    def enter(self, microbatch: int, *, replaying: bool) -> None:
        """A microbatch comes, or comes again for remat; its forward may take several runs."""
        self.idle = False
        if microbatch != self._microbatch:
            self._uses.clear()
        self._microbatch, self._replaying = microbatch, replaying
        self._counted = sys.maxsize if replaying else 0
        if self.option == "error":
            for module in self._modules():
                if isinstance(module, _BatchNorm) and module.training:
                    refuse(type(module).__name__)

    def run(self) -> None:
        """A run starts."""
        self._seen = 0

    @contextlib.contextmanager
    def recomputing(self) -> Iterator[None]:
        """Around a backward: what a checkpoint computes again there was counted."""
        counted, self._counted, self._recomputing = self._counted, sys.maxsize, True
        try:
            yield
        finally:
            self._counted, self._recomputing = counted, False

    def finish(self, *, whole: bool = True) -> None:
        """The minibatch is over: what was deferred moves the running statistics. `whole`: no other is under way."""
        if whole and any(self._to_come.values()):
            raise CHECKPOINTED_NORMS.refusal(
                "a batch norm inside torch.utils.checkpoint was not computed again as often as it has checkpoints "
                "around it, so its running statistics are not those of plain training"
            )
        with torch.no_grad() if self._moments else contextlib.nullcontext():
            for parts in self._moments.values():
                factor = next(iter(parts.values())).factor  # an average over all minibatches has it from the counter
                self._move([parts[microbatch] for microbatch in sorted(parts)], factor)
        self._raised.clear()
        to_come = +self._to_come  # of minibatches that are under way too
        self.clear()
        if not whole:
            self._to_come = to_come

    def clear(self) -> None:
        """Forgets a minibatch that did not come to its end."""
        for counter in self._raised:
            counter.sub_(1)
        self._raised.clear()
        self._movers.clear()
        self._moments.clear()
        self._uses.clear()
        self._to_come.clear()
        self._own.clear()
        self._microbatch = -1

    def counts(self, moving: Tensor) -> bool:
        """Whether the call that is being made counts, or did so before; it would move this."""
        if self.idle:
            microbatch, replaying = self.coming
            self.enter(microbatch, replaying=replaying)
        self._seen += 1
        if self._seen <= self._counted:
            return False
        self._counted = self._seen
        self.moved.add(id(moving))
        return True

    @property
    def moved_once(self) -> set[int]:
        """What counts this forward once, however often it runs: `is_put_back` moves in every run for remat."""
        return set() if self._replaying else self.moved

    @property
    def counters(self) -> list[tuple[nn.Module, str]]:
        """Those that calls were seen to raise, and perhaps more, by the modules that have them."""
        return [(module, _COUNTER) for module in self._counting]

    def repeats(self, running_mean: Tensor, traced: int | None = None) -> int:
        """How often the backward of a plain loop makes the call again that is being made, and counts. In a traced graph
        `traced` says so, and no backward makes it again.
        """
        if id(running_mean) in self._uses and self.option != "deferred":
            raise CHECKPOINTED_NORMS.refusal(
                "a batch norm inside torch.utils.checkpoint is used twice in one forward, and which use the backward "
                "computes again first is not known",
                "give each use a batch norm of its own, or use remat= in place of the checkpoint",
            )
        times = checkpoints_around() if traced is None else traced
        self.in_checkpoints = self.in_checkpoints or (times > 0 and traced is None)
        if not times or self.option == "deferred":
            return 0
        if traced is None:
            self._to_come[id(running_mean)] += times
        self._uses[id(running_mean)] = 1
        return times

    def computed_again(self, running_mean: Tensor) -> None:
        """A call that does not count."""
        if self._recomputing and self.option != "deferred":
            self._to_come[id(running_mean)] -= 1

    def is_put_back(self, running_mean: Tensor) -> bool:
        """Whether it may move where a call does not count: remat puts back what belongs to a batch norm that is no
        module of a layer, as it does with all that layers hold.
        """
        if not self._replaying or self._recomputing or self.option == "deferred":
            return False
        self._own = self._own or {id(each) for module in self._modules() for each in module._buffers.values()}
        return id(running_mean) not in self._own

    def factor(self, running_mean: Tensor, factor: float) -> float:
        """A batch norm counts a call once more; the weight of that in its average."""
        for module in self._modules():
            if any(buffer is running_mean for buffer in module._buffers.values()) and _COUNTER in module._buffers:
                counter = module._buffers[_COUNTER]
                if counter is not None:
                    counter.add_(1)
                    return 1.0 / float(counter) if getattr(module, "momentum", factor) is None else factor
        return factor

    @property
    def has_counted(self) -> bool:
        """Whether this run has."""
        return 0 < self._seen <= self._counted < sys.maxsize

    @property
    def moves(self) -> bool:
        """Whether a microbatch leaves statistics behind that the next one goes on from."""
        return bool(self.moved) and self.option != "deferred"

    def is_counter(self, tensor: Tensor) -> bool:
        """Whether this is the buffer in which a batch norm counts its minibatches."""
        if any(module._buffers[_COUNTER] is tensor for module in self._counting):
            return True
        # A traced model gets its modules when it is traced.
        self._counting = [module for module in self._modules() if _COUNTER in module._buffers]
        return any(module._buffers[_COUNTER] is tensor for module in self._counting)

    def _modules(self) -> Iterator[nn.Module]:
        return (module for layer in self._layers for module in layer.modules())

    def raises(self, counter: Tensor) -> bool:
        """Whether the counter moves now: with deferred statistics once for the minibatch."""
        if not self.counts(counter):
            return False
        if self.option == "deferred":
            if self._movers.setdefault(id(counter), self._microbatch) != self._microbatch:
                return False
            self._raised.append(counter)
        return True

    def note(self, moments: Moments) -> None:
        """Keeps the moments of this microbatch."""
        name = id(moments.running_mean)
        use = self._uses.get(name, 0)
        self._uses[name] = use + 1
        self._moments.setdefault((name, use), {})[self._microbatch] = moments

    def _move(self, group: Sequence[Moments], factor: float) -> None:
        """One update by the moments of all parts: n = sum of n_m; the squares about the mean of all are those about
        the mean of each part, and n_m times the square of the distance between the two.
        """
        count = sum(part.size for part in group)
        counts = self._column([part.size for part in group], group[0].mean.device)
        means = torch.stack([part.mean for part in group]).double()
        variances = torch.stack([part.var for part in group]).double()
        mean = (means * (counts / count)).sum(0)
        squares = (variances * (counts - 1) + (means - mean).square() * counts).sum(0)
        for running, new in ((group[0].running_mean, mean), (group[0].running_var, squares / (count - 1))):
            running.copy_(running.double() * (1 - factor) + new * factor)

    def _column(self, counts: Sequence[int], device: torch.device) -> Tensor:
        """As a tensor, kept from step to step: to make one stops the host on an accelerator."""
        key = (tuple(counts), device)
        if key not in self._weights:
            self._weights[key] = torch.tensor(counts, dtype=torch.float64, device=device).unsqueeze(1)
        return self._weights[key]


def _check(option: str, layers: Sequence[Any]) -> None:
    if option not in ("deferred", "microbatch", "error"):
        raise ConfigError(f"batchnorm is {option!r}, but it must be 'deferred', 'microbatch' or 'error'.")
    for layer in layers:
        modules = list(layer.modules()) if isinstance(layer, nn.Module) else []
        if option == "deferred" and any(isinstance(module, nn.SyncBatchNorm) for module in modules):
            raise ConfigError(
                "a SyncBatchNorm updates its statistics with other processes at every microbatch and can't defer that: "
                "use batchnorm='microbatch', or a BatchNorm."
            )
        if option == "deferred" and is_compiled(layer) and any(isinstance(module, _BatchNorm) for module in modules):
            raise ConfigError(
                "a compiled layer can't defer the statistics of its batch norm: use batchnorm='microbatch', or leave "
                "that layer uncompiled."
            )


def refuse(name: str) -> None:
    """What `batchnorm="error"` is for."""
    raise ConfigError(
        f"a {name} in training normalises with the moments of a microbatch, which batchnorm='error' forbids: put it "
        "in eval mode, use another norm, or choose batchnorm='deferred' or 'microbatch'."
    )
