"""What every test stands on: one intra-op thread, so that plain loops and devices compute the same bits; Ctrl-C, which
a shell switches off for what it starts in the background; one launcher for all ranks; and what keeps tests quick.
"""

import gc
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.launcher import Launcher, launching
from tests.open_pages import browser, show, tabs  # noqa: F401
from tests.pairs import leave_pairs
from tests.programs import Programs

if TYPE_CHECKING:  # the process that only hands out tests does without torch
    from tests.run.crew import Server
    from tests.run.forked import Launch
    from tests.traced_once import Traces

_LAUNCHING = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    """One launcher for all processes that run tests: it imports torch once."""
    if hasattr(config, "workerinput"):
        config.stash[_LAUNCHING] = Path(config.workerinput["launching"])
    else:
        held = ExitStack()
        config.stash[_LAUNCHING] = held.enter_context(launching())
        config.add_cleanup(held.close)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["launching"] = str(node.config.stash[_LAUNCHING])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", help="2/4: the second of every four tests that would run", metavar="K/N")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    from tests.unneeded import leave_out

    leave_out()
    leave_pairs(items)
    yield
    if asked := config.getoption("--part"):  # of those that are left
        number, count = (int(word) for word in asked.split("/"))
        config.hook.pytest_deselected(
            items=[item for place, item in enumerate(items, 1) if place % count != number % count]
        )
        items[:] = items[number - 1 :: count]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported stays: Python's collector need not look through it, neither meanwhile nor later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.fixture(autouse=True)
def _begins_alike() -> None:
    """With one intra-op thread and the same random numbers, whatever the test before has set and drawn."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c() -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def launcher(request: pytest.FixtureRequest) -> Iterator[Launcher]:
    launcher = Launcher(request.config.stash[_LAUNCHING])
    yield launcher
    launcher.close()


@pytest.fixture(scope="session")
def launch(launcher: Launcher) -> "Launch":
    from tests.run.forked import Launch

    return Launch(launcher)


@pytest.fixture(scope="session")
def server(launcher: Launcher) -> "Server":
    from tests.run.crew import Server

    return Server(launcher)


@pytest.fixture
def programs(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Programs:
    return Programs(launcher, tmp_path_factory.mktemp("programs"))


@pytest.fixture(scope="session")
def _traces() -> "Traces":
    from tests.traced_once import Traces

    return Traces()


@pytest.fixture
def traced_once(_traces: "Traces", monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test with many ways to run a model: a model is traced once for all of them."""
    from gapless.model.traced import settled

    monkeypatch.setattr(settled, "Trace", _traces)


@pytest.fixture
def compiled_anew() -> Iterator[None]:
    """Nothing is left that another test has compiled."""
    import torch

    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels of a GPU give the same bits every time."""
    import torch

    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
