"""The ranks of peers are forked by a server that has torch already; it starts with the first test that needs it."""

import pytest

from benchmarks.peer.peer import start_server


@pytest.fixture
def server_of_ranks() -> None:
    start_server()
