"""Data parallelism: replicas of the pipeline, each with its share of the minibatch.

The weights of microbatches are shares of the whole minibatch, so gradients are added up and never averaged, whatever
the replicas' sizes. Each stage's gradients are added as soon as its last one is there, while other stages still work:

    stage 3   ... W3 [===== sum =====]
    stage 2      ... W3 [===== sum =====]           one flat bucket after another, once per minibatch

A minibatch may take several steps. All but the last keep their gradients where they are, and the last exchanges the
sums: replicas add up their own microbatches first, as the plain loop on each would.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from gapless.guards.between_ranks import UNEXCHANGED_GRADIENTS
from gapless.run.clip import local
from gapless.run.ranks.wire.call_stamp import Call, different, row_length
from gapless.run.ranks.wire.groups import of_each
from gapless.stage.batch.loss_counts import Weighed
from gapless.stage.batch.share import Share

_BUCKET_BYTES = 32 << 20
_HEAD = 2 + len(Call._fields)  # numbers of a row before those of the microbatches


class Shares(Sequence[float]):
    """The weights of this replica's microbatches. They are asked for when the step starts, and waited for when they are
    first needed.
    """

    def __init__(
        self, group: Any, ranks: Sequence[int], replica: int, counted: Weighed, most: int, part: Share, call: Call
    ) -> None:
        """`counted` has what each microbatch counts; `most`, the same everywhere, is at least their number. All
        replicas, on these ranks, must be in the same `call`.
        """
        numbers = counted.numbers
        self._replica, self._count, self._counted, self._part = replica, len(numbers), counted, part
        self._ranks, self._call = ranks, call
        head = [len(numbers), counted.kept, *call]
        padding = [0.0] * (row_length(most) - len(head) - len(numbers))
        mine = torch.tensor([*head, *numbers, *padding], dtype=torch.float64)
        self._rows = [torch.empty_like(mine) for _ in range(group.size())]
        self._work = group.allgather([self._rows], [mine])
        self._found: list[list[float]] = []
        self.waited = 0.0  # seconds, for the other replicas

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, microbatch: Any) -> Any:
        return self.everywhere()[self._replica][microbatch]

    def everywhere(self) -> list[list[float]]:
        """Those of all replicas."""
        if not self._found:
            began = time.monotonic()
            self._work.wait()
            self.waited = time.monotonic() - began
            rows = [row.tolist() for row in self._rows]
            for rank, (_, _, *theirs) in zip(self._ranks, rows, strict=True):
                call = Call.of(theirs[:7])._replace(microbatches=self._call.microbatches)
                if fault := different(self._call, call, self._ranks[self._replica], rank):
                    raise fault
            self._counted.check_kept([row[1] for row in rows])
            numbers = [row[_HEAD : _HEAD + int(row[0])] for row in rows]
            total = sum(number for row in numbers for number in row)
            self._found = [self._part.shares(row, total, summed=self._counted.summed) for row in numbers]
        return self._found


def gathered(group: Any, losses: Sequence[Tensor], counts: Sequence[int], device: torch.device) -> tuple[Tensor, ...]:
    """The losses of all replicas, one after another; `counts` says how many each has."""
    mine = torch.stack(list(losses)).cpu()
    padded = torch.cat([mine, mine.new_zeros(max(counts) - len(mine))])
    rows = of_each(group, padded)
    return tuple(loss for row, count in zip(rows, counts, strict=True) for loss in row[:count].to(device).unbind())


class Buckets:
    """The gradients of some parameters, to be added over the replicas once per step."""

    def __init__(self, group: Any, parameters: Iterable[nn.Parameter], earlier: "Sequence[Buckets]" = ()) -> None:
        """`earlier` are those from before an edit of the model or a new trace, with gradients that were kept."""
        self._group = group
        kept = dict(chain(*(each._kept.items() for each in earlier)))
        self._mine = [each for each in parameters if (each.requires_grad or each in kept) and not is_sharded(each)]
        sparse: set[nn.Parameter] = set(chain(*(each._sparse for each in earlier)))  # their gradients
        self._sparse: dict[nn.Parameter, None] = {each: None for each in self._mine if each in sparse}  # in order
        self._parts = list(_parts([each for each in self._mine if each not in self._sparse]))
        self._before: dict[nn.Parameter, Tensor | None] = {}
        self._under_way: list[tuple[Tensor, Any]] = []
        self._kept: dict[nn.Parameter, tuple[Tensor | None, int]] = {}  # as steps without an exchange left it
        if kept:
            before = dict(chain(*(each._before.items() for each in earlier)))
            self._before = {each: before.get(each) for each in self._mine}
            self._kept = {each: kept.get(each, (each.grad, 0)) for each in self._mine}

    def begin(self) -> None:
        """What was there before the step is summed already, and set aside; but not what was kept."""
        if self._kept:
            self._drop_zeroed()
            return
        self._before = {each: each.grad for each in self._mine}
        for each in self._mine:
            each.grad = None

    def keep(self) -> None:
        """The step is over, and its gradients stay here: a later one adds to them and exchanges the sums. A parameter
        that it did not use has what was set aside, so that it shows whether somebody sets gradients to zero.
        """
        for each in self._mine:
            if each.grad is None:
                each.grad = self._before[each]
        self._kept = {each: (grad := each.grad, 0 if grad is None else grad._version) for each in self._mine}

    def _drop_zeroed(self) -> None:
        """Who has set gradients to zero since means what was set aside, too."""
        for each, (grad, version) in self._kept.items():
            now, before = each.grad, self._before[each]
            if before is None or grad is None:
                continue
            if now is before:  # not used since
                each.grad = None
            if now is grad and now._version == version:
                continue
            if now is not None and local(now).any():
                raise UNEXCHANGED_GRADIENTS.refusal(
                    "gradients changed after a step with sync=False, while those of an earlier exchange were set aside",
                    "call zero_grad() before the first step with sync=False",
                )
            self._before[each] = None

    def start(self) -> None:
        """The gradients are complete: the sums begin."""
        for part in self._parts:
            size = sum(local(parameter).numel() for parameter in part) + 2 * len(part)
            dtype = reduce(torch.promote_types, map(_grad_dtype, part))  # it may have been changed since
            flat = local(part[0]).new_zeros(size, dtype=dtype)
            there, sparse = flat[-2 * len(part) :].view(2, -1)  # whether somebody has one, and a sparse one
            with torch.no_grad():
                for number, (parameter, place) in enumerate(_places(part, flat)):
                    if parameter.grad is not None and parameter.grad.is_sparse:
                        sparse[number] = 1
                    elif parameter.grad is not None:
                        place.copy_(local(parameter.grad))
                        there[number] = 1
            self._under_way.append((flat, self._group.allreduce([flat])))

    def finish(self) -> None:
        """Waits for the sums, and adds what was set aside."""
        for part, (flat, work) in zip(self._parts, self._under_way, strict=True):
            work.wait()
            if flat.is_cuda:  # made on the stream of the device
                flat.record_stream(torch.cuda.current_stream(flat.device))
            there, sparse = flat[-2 * len(part) :].view(2, -1).tolist()
            with torch.no_grad():
                for number, (parameter, place) in enumerate(_places(part, flat)):
                    if sparse[number]:
                        self._sparse[parameter] = None  # on all replicas
                    elif there[number]:
                        _set(parameter, place, self._before[parameter])
                    else:
                        parameter.grad = self._before[parameter]
        for parameter in self._sparse:
            total = sparse_sum(self._group, parameter)
            parameter.grad = self._before[parameter] if total is None else _added(self._before[parameter], total)
        if any(each in self._sparse for part in self._parts for each in part):
            self._parts = list(_parts([each for each in self._mine if each not in self._sparse]))
        self._before, self._under_way, self._kept = {}, [], {}

    def drop(self) -> None:
        """The gradients that were kept are not wanted any more."""
        self._before, self._kept = {}, {}

    def give_up(self) -> None:
        """The step has failed: gradients are those from before its minibatch."""
        for each, grad in self._before.items():
            each.grad = grad
        self._before, self._under_way, self._kept = {}, [], {}


def _set(parameter: nn.Parameter, total: Tensor, before: Tensor | None) -> None:
    if before is not None:
        local(before).add_(total)
        parameter.grad = before
        return
    if parameter.grad is None or parameter.grad.dtype != _grad_dtype(parameter):
        parameter.grad = torch.zeros_like(parameter, dtype=_grad_dtype(parameter))
    local(parameter.grad).copy_(total)


def _added(before: Tensor | None, total: Tensor) -> Tensor:
    """Where one of them may be sparse; what is dense stays so."""
    if before is None:
        return total
    return total + before if before.is_sparse else before.add_(total)


def sparse_sum(group: Any, parameter: nn.Parameter) -> Tensor | None:
    """Of a gradient that has only the rows which were used, as an embedding's may: those of all replicas, in their
    order. All of them call it.
    """
    with torch.no_grad():
        grad = parameter.grad
        mine = parameter.new_zeros(parameter.shape).to_sparse(1) if grad is None else grad
        mine = (mine if mine.is_sparse else mine.to_sparse(1)).coalesce()
        rows, values = mine.indices(), mine.values()
        head = rows.new_tensor([rows.shape[1], grad is not None, grad is not None and not grad.is_sparse])
        heads = [each.tolist() for each in of_each(group, head)]
        most = max(count for count, _, _ in heads)
        all_rows = of_each(group, nn.functional.pad(rows, (0, most - rows.shape[1])))
        padding = values.new_zeros(most - len(values), *values.shape[1:])
        all_values = of_each(group, torch.cat([values, padding]))
        if not any(has for _, has, _ in heads):
            return None
        total = torch.sparse_coo_tensor(
            torch.cat([each[:, :count] for each, (count, _, _) in zip(all_rows, heads, strict=True)], 1),
            torch.cat([each[:count] for each, (count, _, _) in zip(all_values, heads, strict=True)]),
            parameter.shape,
        ).coalesce()
        return total.to_dense() if any(dense for _, _, dense in heads) else total


def _grad_dtype(parameter: nn.Parameter) -> torch.dtype:
    """Of its gradient. Torch may be told to take any that comes: then one that holds them all."""
    if not hasattr(parameter, "grad_dtype"):  # before torch 2.13
        return parameter.dtype
    return parameter.grad_dtype or torch.promote_types(parameter.dtype, torch.float32)


def _parts(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Parameters whose gradients have one dtype, of about so many bytes together."""
    for dtype in dict.fromkeys(map(_grad_dtype, parameters)):
        part: list[nn.Parameter] = []
        for parameter in parameters:
            if _grad_dtype(parameter) != dtype:
                continue
            if part and sum(each.nbytes for each in (*part, parameter)) > _BUCKET_BYTES:
                yield part
                part = []
            part.append(parameter)
        yield part


def _places(part: Sequence[nn.Parameter], flat: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
    start = 0
    for parameter in part:
        part_of_it = local(parameter)
        end = start + part_of_it.numel()
        yield parameter, flat[start:end].view(part_of_it.shape)
        start = end


def is_sharded(tensor: Tensor) -> bool:
    """Whether every replica has a part of it, as FSDP makes them: that takes care of its gradients itself."""
    mesh = getattr(tensor, "device_mesh", None)
    return mesh is not None and "dp" in (mesh.mesh_dim_names or ())


def same_everywhere(group: Any, tensors: Iterable[Tensor]) -> None:
    """Replicas start with the values of the first."""
    with torch.no_grad():
        for tensor in tensors:
            if not is_sharded(tensor):
                value = local(tensor).detach().cpu().contiguous()
                group.broadcast([value.view(-1).view(torch.uint8) if value.numel() else value]).wait()
                local(tensor).copy_(value)


def tensors_of(layers: Iterable[Any]) -> list[Tensor]:
    """Their parameters and buffers, each once."""
    modules = [layer for layer in layers if isinstance(layer, nn.Module)]
    found = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    return list({id(tensor): tensor for tensor in found}.values())
