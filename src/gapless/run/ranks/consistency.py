"""Ranks of one pipeline make the same calls, on one batch and one model.

Where their batches or models differ, nothing fails, and the numbers are wrong:

    the first stage takes its inputs from the batch of its rank        x of one sample
    the last stage takes targets and weights from that of its own      y of another

Loaders that shuffle differently do that, and models that every rank has made with a seed of its own. So fingerprints
are compared: of the weights before the first call, of the batches in the first calls and then less and less often.

Ranks that make different calls would take each other's messages, or wait for each other for ever:

    messages    carry a stamp: which call, of which kind, with which arguments (`Stamp`); others are refused
    meetings    begin with a comparison of the stamps, the same in every call, before anything else is exchanged
    waits       a call that lasts is said to the neighbours in the ring, who compare it with their own (`RollCall`)

Modes (train or eval) are those of all modules of the model: whoever changes them does so on every rank.
"""

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gapless.errors import ConfigError, GaplessError, TransportError, first_of
from gapless.guards.between_ranks import SAME_WEIGHTS
from gapless.run.program import Program
from gapless.run.ranks.fingerprints import differ, fault_of_batches, fingerprints, is_compared, row_of, saved_tensors
from gapless.run.ranks.mesh_position import Groups, MeshPosition
from gapless.run.ranks.watch.blame import is_lost
from gapless.run.ranks.watch.watch import Watch
from gapless.run.ranks.wire.call_stamp import Call, different, row_length
from gapless.run.ranks.wire.connections import Connections
from gapless.run.ranks.wire.groups import of_each
from gapless.stage.batch.share import Share

_MOST_NAMED = 3
_CARRIED = ("in a step", "evaluating")  # whose messages say what they are


class Consistency:
    """What the ranks of this one's row have; rows of other replicas have their own."""

    def __init__(self, position: MeshPosition, groups: Groups, links: Connections, watch: Watch) -> None:
        self._position, self._pp, self._dp, self._links, self._watch = position, groups.pp, groups.dp, links, watch
        self.stamp = links.courier.stamp
        self._process = os.getpid()
        self._modules: list[dict[str, object]] = []
        self._calls = {True: 0, False: 0}  # by whether it only infers
        self._unequal: dict[str, tuple[int, int]] = {}  # weights that started so, and two ranks
        self._tensors: dict[str, Tensor] = {}
        self._versions: dict[str, tuple[int, Tensor]] = {}
        self.started = False  # with equal weights, in all rows
        self.most_microbatches = 0  # of a replica: the rows that replicas compare have a number for each

    # -- weights ----------------------------------------------------------------------------------------------------

    def compare_weights(self, module: nn.Module, loss: Any = None) -> None:
        """All ranks, when model and loss are whole on each. What differs is remembered until the first call:
        weights may be loaded before that. Other replicas take the values of the first.
        """
        if self._pp is None or self._position.replica > 0:
            return
        self._tensors = dict(saved_tensors(module))
        if isinstance(loss, nn.Module):
            self._tensors |= {f"{name} of the loss": each for name, each in saved_tensors(loss)}
        rows = of_each(self._pp, fingerprints(list(self._tensors.values())))
        for other in range(len(rows)):
            for one in range(other):
                for (name, _), unequal in zip(self._tensors.items(), differ(rows[one], rows[other]), strict=True):
                    if unequal:
                        self._unequal.setdefault(name, (one, other))
        self._tensors = {name: self._tensors[name] for name in self._unequal}

    def made(self) -> None:
        """The pipeline is: from here on a change of these weights is meant."""
        prints = fingerprints(list(self._tensors.values()))
        pairs = zip(self._tensors.items(), prints, strict=True)
        self._versions = {name: (tensor._version, each) for (name, tensor), each in pairs}

    def check_start(self) -> None:
        """At the start of a call: all make the same, and until they were once as they are to be, the weights."""
        self.agreed()
        if not self.started:
            self._refuse(self._fault_of_weights())
            self.started, self._tensors, self._versions, self._unequal = True, {}, {}, {}

    def _fault_of_weights(self) -> GaplessError | None:
        if not self._unequal:
            return None
        same = torch.tensor([[float(self._is_as_it_was(name)), 0.0] for name in self._unequal], dtype=torch.float64)
        rows = of_each(self._pp, same)
        untouched = [name for number, name in enumerate(self._unequal) if all(row[number, 0] for row in rows)]
        if not untouched:
            return None
        one, other = (self._position.pp_ranks[device] for device in self._unequal[untouched[0]])
        return SAME_WEIGHTS.refusal(
            f"the ranks do not start with the same weights: {first_of(untouched, _MOST_NAMED)} differ between "
            f"rank {one} and rank {other}"
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
        rows, ranks = of_each(self._pp, row_of(inputs, target, numbers)), self._position.pp_ranks
        self._refuse(fault_of_batches(rows[first], rows[last], name, ranks[first], ranks[last]))

    # -- all ranks --------------------------------------------------------------------------------------------------

    def agreed(self, fault: GaplessError | None = None, ready: int = 1) -> int:
        """How ready all ranks of the mesh are: as the least of them. All of them refuse if they are in different calls,
        or if any has a fault: one that went on would be a step ahead of it. Whatever else they do together comes after
        this: it is as long as `Shares` in all calls, since Gloo ends a process that gets more than it has asked for.
        """
        me = self._position.pp_ranks[self._position.device]
        other, theirs = me, self.stamp.call  # a rank in another call, as far as one is known
        for group, ranks in ((self._pp, self._position.pp_ranks), (self._dp, self._position.dp_ranks)):
            if group is not None:
                mine = [float(bool(fault)), float(ready), *self.stamp.call, other, *theirs]
                mine += [0.0] * (row_length(self.most_microbatches) - len(mine))
                rows = [row.tolist() for row in of_each(group, torch.tensor(mine, dtype=torch.float64))]
                for rank, row in zip(ranks, rows, strict=True):
                    call, found = Call.of(row[2:9]), Call.of(row[10:17])
                    if group is self._dp:  # replicas have as many microbatches as they have samples for
                        call = call._replace(microbatches=self.stamp.call.microbatches)
                    if not fault and call != self.stamp.call:
                        other, theirs = rank, call
                        fault = different(self.stamp.call, call, me, rank)
                    elif not fault and int(row[9]) != rank:
                        fault = different(Call.of(row[2:9]), found, rank, int(row[9]))
                    elif not fault and row[0]:
                        fault = ConfigError(f"rank {rank} rejected this step, so no rank begins it: its error says why")
                ready = min(int(row[1]) for row in rows)
        if fault:
            raise fault
        return ready

    # -- calls ------------------------------------------------------------------------------------------------------

    def adopt(self, module: nn.Module) -> None:
        """The model."""
        self._modules = [each.__dict__ for each in module.modules()]

    @contextmanager
    def call(
        self, doing: str, numbers: tuple[float, float] = (0.0, 0.0), *, leaves: bool = True, meet: bool = True
    ) -> Iterator[None]:
        """Around everything that all ranks do together; without `meet` those of one replica do. The numbers are
        arguments, the same on all ranks.
        """
        watch = self._watch
        if os.getpid() != self._process:
            raise TransportError(
                f"process {os.getpid()} is a forked child of rank {watch.me} (process {self._process}) and has "
                "no connection to the other ranks: make this call in the rank itself, on every rank"
            )
        watch.check()
        failure = self._links.courier.failure
        if failure is not None and is_lost(failure):
            raise watch.lost_connection(None, failure) from None
        self._links.check()
        with watch.call(doing, leaves=leaves, meet=meet or self._dp is None):
            self.stamp.begin(watch.roll.number, doing, *numbers)
            yield

    def start(self, doing: str) -> None:
        """In a call. Steps and evaluations meet in the first one only: their messages say what they are."""
        if not self.started or doing not in _CARRIED:
            self.meet(self.check_start)

    def meet(self, check: Callable[[], object] | None = None) -> None:
        """All ranks are in this call, or all refuse; also what is checked they refuse together."""
        with self._watch.roll.meeting():
            (check or self.agreed)()

    def detail(self, program: Program, share: Share) -> None:
        """What the program is to do is known now, and nothing was sent yet."""
        modes = bytes([bool(own.get("training", True)) for own in self._modules])
        self.stamp.detail(
            float(share.weight),
            program.schedule.num_microbatches,
            zlib.crc32(modes),
            sync=share.sync,
            timeline=program.recorded,
            trains=modes[:1] == b"\1",
        )

    def close(self) -> None:
        """Lets go of the groups."""
        self._pp = self._dp = None

    def _refuse(self, fault: GaplessError | None) -> None:
        """On all ranks of the mesh, if any row has a fault."""
        if self._dp is not None:
            faults = of_each(self._dp, torch.tensor([[float(bool(fault)), 0.0]], dtype=torch.float64))
            others = [str(self._position.dp_ranks[place]) for place, row in enumerate(faults) if row[0, 0]]
            if others and not fault:
                fault = ConfigError(
                    f"the ranks of rank {others[0]}'s pipeline got different batches or weights: its error says how"
                )
        if fault:
            raise fault
