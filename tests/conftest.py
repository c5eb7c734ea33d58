"""What every test stands on: one intra-op thread, so that plain loops and devices compute the same bits; Ctrl-C, which
a shell switches off for what it starts in the background; and one launcher for all ranks.
"""

import signal
from collections.abc import Iterator

import pytest
import torch

from gapless.bench.peer.launcher import Launcher
from tests.run.crew import Server
from tests.run.forked import Launch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", help="2/4: the second of every four tests that would run", metavar="K/N")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    yield
    if asked := config.getoption("--part"):  # of those that are left
        number, count = (int(word) for word in asked.split("/"))
        config.hook.pytest_deselected(
            items=[item for place, item in enumerate(items, 1) if place % count != number % count]
        )
        items[:] = items[number - 1 :: count]


@pytest.fixture(scope="session", autouse=True)
def _one_intra_op_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c() -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    """One for all tests of this process: it imports torch once."""
    launcher = Launcher("tests.run.crew", "tests.run.forked", "tests.run.preloaded")
    yield launcher
    launcher.close()


@pytest.fixture(scope="session")
def launch(launcher: Launcher) -> Launch:
    return Launch(launcher)


@pytest.fixture(scope="session")
def server(launcher: Launcher) -> Server:
    return Server(launcher)
