"""Hugging Face's library, imported by the process that needs it, and not wherever tests are collected: that takes
seconds, in every one of several processes.
"""

from typing import Any

import pytest


def hub() -> Any:
    """The library; a test is skipped where there is none."""
    return pytest.importorskip("transformers")
