"""Whose fault an exception is: another rank's, whose connection is lost, or this one's own.

Torch raises plain RuntimeErrors for both, so what decides is where it was raised: by a call of gapless's own transport,
or somewhere else. Words alone would take a user's error that happens to speak of Gloo for a lost connection.
"""

import torch.distributed as dist

_TRANSPORT = "gapless.run."
_WORDS = ("gloo", "pair closure", "Connection closed", "Connection reset", "NCCL")
_MOST_TEXT = 300


def is_lost(error: BaseException) -> bool:
    """A connection of gapless's own is broken."""
    return may_be_lost(error) and _raised_in(error).startswith(_TRANSPORT)


def may_be_lost(error: BaseException) -> bool:
    """Perhaps a connection of the user's, as between the ranks of a layer: only if a rank is dead is it more than an
    error of this one's own.
    """
    distributed = dist.is_available() and isinstance(error, dist.DistError)
    return distributed or (isinstance(error, RuntimeError) and any(words in _text(error) for words in _WORDS))


def _raised_in(error: BaseException) -> str:
    """The module of the innermost frame."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return "" if traceback is None else str(traceback.tb_frame.f_globals.get("__name__", ""))


def in_short(error: BaseException) -> str:
    """Its type and the first line of its text, as anybody can print it."""
    lines = f"{type(error).__name__}: {_text(error)}".strip(": ").splitlines() or [type(error).__name__]
    short = lines[0] if len(lines[0]) <= _MOST_TEXT else f"{lines[0][:_MOST_TEXT]}..."
    return short.encode(errors="backslashreplace").decode()


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # the user's own
        return ""
