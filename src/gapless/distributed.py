"""A process group that the ranks of torchrun can make again after one of them has died.

torchrun keeps its store when it starts ranks again, and in it the addresses of those that died: a rank that reads one
before its owner has written the new one waits for a dead process. So each start has a part of the store of its own, on
which the ranks agree first, through what no earlier rank can have written:

    each rank   writes a nonce under its number:    rank 3 = b7..
    rank 0      calls every nonce that it finds:    call b7.. = its own nonce, a0..
    each rank   answers a call for its nonce:       here b7.. = a0..
    rank 0      once all have answered:             all a0..      and a0.. is the name of the part

A nonce of a dead rank never answers. A rank that comes late, or is started again meanwhile, is called when it is there;
if rank 0 is, it calls all others again. Counting the starts would not do: every agent counts its own.
"""

import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from gapless.errors import TransportError

_TIMEOUT = timedelta(seconds=600)
_PAUSE, _MANY = 0.05, 32  # seconds; with more ranks than that it is longer, or the store would be too busy


def init_process_group(backend: str | None = None, timeout: timedelta | None = None, **options: Any) -> None:
    """`torch.distributed.init_process_group` for ranks that torchrun starts and restarts (`--max-restarts`): no rank
    sees the address of a dead one. Arguments are torch's, except those that specify where ranks meet. Ranks wait
    `timeout` for each other (600 seconds by default), and then raise a `TransportError` that names the missing ranks.
    """
    patience, prefixed = timeout or _TIMEOUT, dist.distributed_c10d.PrefixStore
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=patience))  # type: ignore[attr-defined]
        store.set_timeout(timeout or default_pg_timeout)
        name = agreed_name(prefixed("gapless", store), rank, size, patience.total_seconds())
    except RuntimeError as error:
        raise TransportError(f"this rank can't reach torchrun's store: {error}") from error
    dist.init_process_group(
        backend, timeout=timeout, store=prefixed(name, store), rank=rank, world_size=size, **options
    )


def agreed_name(store: Any, rank: int, size: int, seconds: float) -> str:
    """A name that was never used before, the same on all ranks, which are all here now."""
    nonce, leader = uuid.uuid4().hex, ""
    store.set(f"rank {rank}", nonce)
    called: set[str] = set()
    deadline = time.monotonic() + seconds
    while not (leader and store.check([f"all {leader}"])):
        if _found(store, f"rank {rank}") != nonce:
            raise TransportError(f"rank {rank} was restarted while this one waited for others, so this one ends")
        if rank == 0:
            _call(store, nonce, size, called)
        caller = _found(store, f"call {nonce}")
        if caller != leader:
            leader = caller
            store.set(f"here {nonce}", leader)
        elif time.monotonic() > deadline:
            missing = _missing(store, leader, size)
            who = (
                f"ranks {', '.join(missing)} of {size} have" if len(missing) > 1 else f"rank {missing[0]} of {size} has"
            )
            raise TransportError(
                f"{who} not joined within {seconds:g} s: check its output, and that torchrun runs on every host"
            )
        else:
            time.sleep(_PAUSE * max(1.0, size / _MANY))
    return leader


def _call(store: Any, leader: str, size: int, called: set[str]) -> None:
    """Calls those that have come since, and says so once all are here."""
    nonces = [_found(store, f"rank {rank}") for rank in range(size)]
    for nonce in set(nonces) - called - {""}:
        store.set(f"call {nonce}", leader)
        called.add(nonce)
    if all(_found(store, f"here {nonce}") == leader for nonce in nonces):
        store.set(f"all {leader}", "")


def _missing(store: Any, leader: str, size: int) -> list[str]:
    """Ranks that have not answered; where nobody has called, it is the one that calls."""
    nonces = [_found(store, f"rank {rank}") for rank in range(size)]
    missing = [str(rank) for rank, nonce in enumerate(nonces) if _found(store, f"here {nonce}") != leader]
    return missing if leader else ["0"]


def _found(store: Any, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""
