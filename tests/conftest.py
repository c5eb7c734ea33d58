"""What every test stands on: one intra-op thread, so that plain loops and devices compute the same bits."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_intra_op_thread() -> None:
    torch.set_num_threads(1)
