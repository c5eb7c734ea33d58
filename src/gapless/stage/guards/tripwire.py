"""What stands in the place of an attribute that has no sensible value here."""

from typing import Any, NoReturn

from gapless.guards.held_state import STORED_TENSORS


class Tripwire:
    """Stands for an attribute that has no sensible value here; `why` says so."""

    def __init__(self, why: str) -> None:
        self._why = why

    def _trip(self, *_: Any, **__: Any) -> NoReturn:
        raise STORED_TENSORS.refusal(f"{self._why}, and the loss or another layer uses it")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # asked by copy, pickle and the like
            raise AttributeError(name)
        self._trip()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = _trip
    __float__ = __bool__ = __len__ = __iter__ = __getitem__ = _trip

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for arg in args:
            if isinstance(arg, cls):
                arg._trip()
        return NotImplemented
