"""The devices that a user asks for, as torch has them."""

from collections.abc import Sequence

import torch

from gapless.errors import ConfigError

_MOST = 4096  # threads of one process

Devices = int | str | torch.device | Sequence[torch.device | str]


def torch_devices(devices: Devices) -> list[torch.device]:
    """A number stands for GPUs, and where there are none for threads of the CPU; "cuda" for all GPUs."""
    if isinstance(devices, str | torch.device):
        return _named(devices)
    if isinstance(devices, int):
        if isinstance(devices, bool) or devices < 1:
            raise ConfigError(f"devices is {devices!r}, but it must be a whole number of at least 1")
        if devices > _MOST:
            raise ConfigError(f"devices is {devices:,}, but a process has at most {_MOST:,}: use ranks, or fewer")
        gpus = torch.cuda.device_count()
        if 0 < gpus < devices:
            raise ConfigError(
                f"devices is {devices}, but this machine has {gpus} GPU{'s' if gpus > 1 else ''}: use devices='cuda' "
                f"for all of them, ['cuda:0'] * {devices} to share one, or ['cpu'] * {devices} for threads of the CPU"
            )
        return [torch.device("cuda", index) for index in range(gpus and devices)] or [torch.device("cpu")] * devices
    made = [_torch_device(device) for device in devices]
    if not made:
        raise ConfigError("devices is an empty list, but it must have at least 1, as ['cpu', 'cpu']")
    return made


def _named(name: str | torch.device) -> list[torch.device]:
    """One device by its name, or all GPUs."""
    device = _torch_device(name) if str(name) != "cuda" else torch.device(name)
    if device.type == "cpu":
        raise ConfigError("devices is 'cpu', but it must say how many: devices=['cpu'] * 4 are 4 threads")
    if device.index is not None:
        return [device]
    if not torch.cuda.device_count():
        raise ConfigError(
            "devices is 'cuda', all GPUs, but this machine has none: use devices=4, which are 4 CPU threads here"
        )
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def _torch_device(name: torch.device | str) -> torch.device:
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise ConfigError(f"device {name!r:.60} is neither cpu nor cuda, as 'cpu' or 'cuda:0'") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {device} is neither cpu nor cuda, as 'cpu' or 'cuda:0'")
    if device.type == "cpu":
        return device
    # torch keeps eight bits of an index: cuda:256 is its cuda:0.
    if (device.index or 0) >= (count := torch.cuda.device_count()) or str(device) != str(name):
        raise ConfigError(
            f"device {name} does not exist: this machine has {count} CUDA device{'s' if count != 1 else ''}; list "
            "some of these, or 'cpu'"
        )
    return torch.device("cuda", device.index or 0)
