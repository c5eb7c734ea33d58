"""The random numbers of a process: torch's, Python's and, where it is used, NumPy's. Layers of a pipeline do not need
them, since they draw from the seed, the step and their own number; a user's data or augmentation may.
"""

import base64
import random
import sys
from typing import Any

import torch
from torch import Tensor


def random_state() -> dict[str, Any]:
    """As numbers, strings and tuples."""
    state: dict[str, Any] = {"torch": _text(torch.get_rng_state()), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = [_text(each) for each in torch.cuda.get_rng_state_all()]
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, at, has_gauss, gauss = numpy.random.get_state()
        state["numpy"] = (kind, keys.tolist(), int(at), int(has_gauss), float(gauss))
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """As far as this process has such generators."""
    torch.set_rng_state(_tensor(state["torch"]))
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        for device, each in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(_tensor(each), device)
    if "numpy" in state and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(state["numpy"])


def _text(state: Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode()


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
