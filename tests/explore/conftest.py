"""An explorer that serves."""

from collections.abc import Iterator
from threading import Thread

import pytest

from gapless.explore.server import ExploreServer


@pytest.fixture(scope="module")
def explorer() -> Iterator[ExploreServer]:
    with ExploreServer() as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
