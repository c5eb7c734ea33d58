"""Ranks of one pipeline train on one batch, and one model: where they do not, nothing fails, and the numbers are wrong.

    the first stage takes its inputs from the batch of its rank        x of one sample
    the last stage takes targets and weights from that of its own      y of another

Loaders that shuffle differently do that, and models that every rank has made with a seed of its own. So fingerprints
are compared: of the weights before the first call, of the batches in the first calls and then less and less often.

Of each tensor that is a weighed sum of some of its elements, and the sum of their sizes, by which the difference of two
is judged. Numbers that were computed alike on different processors may differ in their last bits, and are the same
here. Another sample in its place, or another seed, changes nearly all of them.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gapless.errors import ConfigError
from gapless.run.ranks.mesh_position import MeshPosition
from gapless.run.ranks.wire.call_stamp import Call, Stamp, different, row_length
from gapless.run.ranks.wire.groups import of_each
from gapless.stage import microbatch as mb

_FIRST = 8  # calls in which batches are compared; then at each power of two, and
_OFTEN = 1024
_MOST = 16  # tensors of inputs, and of targets
_MOST_NAMED = 3
_ELEMENTS = 1 << 12  # of a tensor, at the most
_SAME = 1e-6  # of the sizes
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
UNKNOWN = (0.0, -1.0)  # what is not here is not compared


class Consistency:
    """What the ranks of this one's row have; rows of other replicas have their own."""

    def __init__(self, position: MeshPosition, pp: Any, dp: Any, stamp: Stamp) -> None:
        self._position, self._pp, self._dp, self._stamp = position, pp, dp, stamp
        self._calls = {True: 0, False: 0}  # by whether it only infers
        self._unequal: dict[str, tuple[int, int]] = {}  # weights that started so, and two ranks
        self._tensors: dict[str, Tensor] = {}
        self._versions: dict[str, tuple[int, Tensor]] = {}
        self.started = False  # with equal weights, in all rows
        self.room = 0  # for the numbers of so many microbatches, in the rows that replicas compare

    # -- weights ----------------------------------------------------------------------------------------------------

    def compare_weights(self, module: nn.Module, loss: Any = None) -> None:
        """All ranks, when model and loss are whole on each. What differs is remembered until the first call:
        weights may be loaded before that. Alternative replicas take the values of the first.
        """
        if self._pp is None or self._position.replica > 0:
            return
        self._tensors = dict(_state(module))
        if isinstance(loss, nn.Module):
            self._tensors |= {f"{name} of the loss": each for name, each in _state(loss)}
        rows = of_each(self._pp, fingerprints(list(self._tensors.values())))
        for other in range(len(rows)):
            for one in range(other):
                for (name, _), unequal in zip(self._tensors.items(), differ(rows[one], rows[other]), strict=True):
                    if unequal:
                        self._unequal.setdefault(name, (one, other))
        self._tensors = {name: self._tensors[name] for name in self._unequal}

    def begin(self) -> None:
        """The pipeline is made: from here on a change of these weights is meant."""
        prints = fingerprints(list(self._tensors.values()))
        pairs = zip(self._tensors.items(), prints, strict=True)
        self._versions = {name: (tensor._version, each) for (name, tensor), each in pairs}

    def check_start(self) -> None:
        """At the start of a call: all make the same, and until they were once as they are to be, the weights."""
        self.agreed()
        if not self.started:
            self._refuse(self._fault_of_weights())
            self.started, self._tensors, self._versions, self._unequal = True, {}, {}, {}

    def _fault_of_weights(self) -> str:
        if not self._unequal:
            return ""
        same = torch.tensor([[float(self._is_as_it_was(name)), 0.0] for name in self._unequal], dtype=torch.float64)
        rows = of_each(self._pp, same)
        untouched = [name for number, name in enumerate(self._unequal) if all(row[number, 0] for row in rows)]
        if not untouched:
            return ""
        one, other = (self._position.pp_ranks[device] for device in self._unequal[untouched[0]])
        more = f" and {len(untouched) - _MOST_NAMED} more" if len(untouched) > _MOST_NAMED else ""
        return (
            f"the ranks do not start with the same weights: {', '.join(untouched[:_MOST_NAMED])}{more} differ between "
            f"rank {one} and rank {other}; call torch.manual_seed with the same number on every rank before the model "
            "is made, load the same file on every rank, or load it with load_state_dict of the pipeline"
        )

    def _is_as_it_was(self, name: str) -> bool:
        tensor, (version, before) = self._tensors[name], self._versions[name]
        return tensor._version == version and not bool(differ(before[None], fingerprints([tensor])).any())

    # -- batches ----------------------------------------------------------------------------------------------------

    def check(
        self, inputs: Any, target: Any, numbers: Sequence[float], *, first: int, last: int, inference: bool
    ) -> None:
        """At the start of a call; `first` and `last` are the devices of the first and the last stage. All ranks make
        the same calls, so they compare in the same, and all refuse.
        """
        call = self._calls[inference]
        self._calls[inference] += 1
        if first == last or not is_compared(call):
            return
        self.agreed()
        name = f"{'evaluation' if inference else 'step'} {call + 1}"
        self._refuse(self._fault_of_batches(inputs, target, numbers, name, first, last))

    def _fault_of_batches(
        self, inputs: Any, target: Any, numbers: Sequence[float], call: str, first: int, last: int
    ) -> str:
        rows = of_each(self._pp, row_of(inputs, target, numbers))
        ranks = self._position.pp_ranks
        return fault_of_batches(rows[first], rows[last], call, ranks[first], ranks[last])

    # -- all ranks --------------------------------------------------------------------------------------------------

    def agreed(self, fault: str = "", *, ready: bool = True) -> bool:
        """Whether all ranks of the mesh are ready. All of them refuse if they are in different calls, or if any has a
        fault: one that went on would be a step ahead of it. Whatever else they do together comes after this: it is as
        long as `Shares` in all calls, since Gloo ends a process that gets more than it has asked for.
        """
        me = self._position.pp_ranks[self._position.device]
        other, theirs = me, self._stamp.call  # a rank in another call, as far as one is known
        for group, ranks in ((self._pp, self._position.pp_ranks), (self._dp, self._position.dp_ranks)):
            if group is not None:
                mine = [float(bool(fault)), float(ready), *self._stamp.call, other, *theirs]
                mine += [0.0] * (row_length(self.room) - len(mine))
                rows = [row.tolist() for row in of_each(group, torch.tensor(mine, dtype=torch.float64))]
                for rank, row in zip(ranks, rows, strict=True):
                    call, found = Call.of(row[2:9]), Call.of(row[10:17])
                    if group is self._dp:  # replicas have as many microbatches as they have samples for
                        call = call._replace(microbatches=self._stamp.call.microbatches)
                    if not fault and call != self._stamp.call:
                        other, theirs = rank, call
                        fault = different(self._stamp.call, call, me, rank)
                    elif not fault and int(row[9]) != rank:
                        fault = different(Call.of(row[2:9]), found, rank, int(row[9]))
                    elif not fault and row[0]:
                        fault = f"rank {rank} has refused this step, so no rank begins it: its error says why"
                ready = all(row[1] for row in rows)
        if fault:
            raise ConfigError(fault)
        return ready

    def close(self) -> None:
        """Lets go of the groups."""
        self._pp = self._dp = None

    def _refuse(self, fault: str) -> None:
        """On all ranks of the mesh, if any row has a fault."""
        if self._dp is not None:
            faults = of_each(self._dp, torch.tensor([[float(bool(fault)), 0.0]], dtype=torch.float64))
            others = [str(self._position.dp_ranks[place]) for place, row in enumerate(faults) if row[0, 0]]
            if others and not fault:
                fault = f"the ranks of rank {others[0]}'s pipeline got different batches or weights: its error says how"
        if fault:
            raise ConfigError(fault)


def is_compared(call: int) -> bool:
    """Whether the batches of this call are."""
    return call < _FIRST or call & (call - 1) == 0 or call % _OFTEN == 0


def row_of(inputs: Any, target: Any, numbers: Sequence[float]) -> Tensor:
    """The fingerprints of a batch, and of what its microbatches count."""
    return torch.cat([_row(inputs), _row(target), fingerprints([torch.tensor(numbers, dtype=torch.float64)])])


def fault_of_batches(one: Tensor, other: Tensor, call: str, first: int, last: int) -> str:
    """In words, if there is one: the rank with the first stage has batch `one`, that with the last stage the other."""
    unequal = differ(one, other)
    # All of the batch of one rank, or all of the other's, is a batch: augmented inputs, say, that only one uses.
    if not (bool(unequal[:_MOST].any()) and bool(unequal[_MOST:].any())):
        return ""
    return (
        f"the ranks got different batches in {call}: rank {first}, which has the first stage, takes its inputs from "
        f"one and rank {last}, which has the last, its targets from another; give all ranks of a pipeline the same "
        "batch, from a loader that is shuffled alike on every rank (generator=torch.Generator().manual_seed(0)), and "
        "other batches only to other replicas (dp)"
    )


def _row(tree: Any) -> Tensor:
    """As many fingerprints for every tree, so that all ranks send alike."""
    tensors = [] if tree is None else mb.flatten(tree)[0][:_MOST]
    unknown = torch.tensor([UNKNOWN] * (_MOST - len(tensors)), dtype=torch.float64).view(-1, 2)
    return torch.cat([fingerprints(tensors), unknown])


def _state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, and buffers that are saved: others are computed, and may hold anything."""
    yield from module.named_parameters()
    for prefix, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield f"{prefix}.{name}".removeprefix("."), buffer


def fingerprints(tensors: list[Tensor]) -> Tensor:
    """Two numbers for each, on the CPU. From a GPU all come in one copy."""
    made = [_fingerprint(tensor) for tensor in tensors]
    together = torch.empty(len(made), 2, dtype=torch.float64)
    for device in {each.device for each in made}:
        places = [place for place, each in enumerate(made) if each.device == device]
        together[places] = torch.stack([made[place] for place in places]).cpu()
    return together


def _fingerprint(tensor: Tensor) -> Tensor:
    is_plain = type(tensor) in _PLAIN and not tensor.is_meta and tensor.layout is torch.strided
    if not is_plain or tensor.is_quantized or tensor.is_nested:
        return torch.tensor(UNKNOWN, dtype=torch.float64)
    flat = tensor.detach()
    flat = torch.view_as_real(flat.resolve_conj()) if flat.is_complex() else flat
    flat = flat.reshape(-1)
    step = max(1, flat.numel() // _ELEMENTS) | 1  # odd: not always the same column
    some = flat[::step][:_ELEMENTS].to(torch.float64).nan_to_num(0.0, 1.0, -1.0)
    weights = torch.arange(2, 2 + len(some), device=some.device, dtype=torch.float64).sqrt_().frac_().add_(0.5)
    return torch.stack([some @ weights + flat.numel(), some.abs().sum() + flat.numel()])


def differ(one: Tensor, other: Tensor) -> Tensor:
    """For each tensor whether the two ranks have different ones."""
    known = (one[:, 1] >= 0) & (other[:, 1] >= 0)
    return known & ((one - other).abs().amax(1) > _SAME * (one[:, 1] + other[:, 1]))
