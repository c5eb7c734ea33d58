"""Whose code a file is. Told by where packages really lie: anybody may have a folder called `torch` or `gapless`."""

import os
import sysconfig

import torch

_TORCH, _GAPLESS, _PYTHON = (
    os.path.join(folder, "")
    for folder in (torch.__path__[0], os.path.dirname(os.path.dirname(__file__)), sysconfig.get_path("stdlib"))
)
_ZOO = os.path.join(_GAPLESS, "zoo", "")  # models as people write them
_INSTALLED = tuple(os.path.join(_PYTHON, name, "") for name in ("site-packages", "dist-packages"))


def is_users(filename: str) -> bool:
    """Whether a line in this file may be one to change: it is neither ours, nor torch's, nor Python's own."""
    if filename.startswith((_TORCH, "<")):
        return False
    if filename.startswith(_GAPLESS):
        return filename.startswith(_ZOO)
    return not filename.startswith(_PYTHON) or filename.startswith(_INSTALLED)
