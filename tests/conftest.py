"""What every test stands on: one intra-op thread, so that plain loops and devices compute the same bits; and Ctrl-C,
which a shell switches off for what it starts in the background.
"""

import signal

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_intra_op_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c() -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
