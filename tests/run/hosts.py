"""Two hosts on one machine: namespaces with addresses and processes of their own, a link with a delay and a rate.

    host 0 (10.231.7.1) === 5 ms, 100 Mbit/s each way === host 1 (10.231.7.2)

The link is a veth pair behind `tc netem`. Where the kernel has no netem, a program (`tests.run.link`) carries packets
from one host to the other, with the same delay and rate. Everything ends with the context.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks import die_with_parent

ROOT = Path(__file__).parent.parent.parent
ADDRESSES = ("10.231.7.1", "10.231.7.2")
INTERFACE = "link0"
_MTU = 9000
_PREFIX = "gapless-"
# Or the ranks of two hosts would find that they can share memory.
_OWN_PROCESSES = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
_NEW_MOUNTS, _NEW_PROCESSES, _NEW_NETWORK = 0x20000, 0x20000000, 0x40000000  # of linux/sched.h
_RECURSIVE, _PRIVATE = 0x4000, 0x40000  # of linux/mount.h
_SBIN = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))


@dataclass(frozen=True)
class Hosts:
    """`names` are those of the namespaces, `link` says what the link is made of."""

    names: tuple[str, str]
    link: str

    def launch(self, commands: Sequence[Sequence[str]], timeout: float) -> str:
        """One command on each host; what they have printed. None of their processes is left."""
        processes = [self.start(host, command, subprocess.PIPE, ROOT) for host, command in enumerate(commands)]
        try:
            said = [process.communicate(timeout=timeout)[0] for process in processes]
        finally:
            for name in self.names:
                _end_all(name)
            for process in processes:
                process.wait()
        for process, text in zip(processes, said, strict=True):
            assert process.returncode == 0, "\n".join(said) + f"\n(ended with {process.returncode}: {text[-200:]})"
        return "\n".join(said)

    def start(self, host: int, command: Sequence[str], out: int, folder: Path) -> "subprocess.Popen[str]":
        """A command on one host. What is left of it ends with the host."""
        return subprocess.Popen(
            [_tool("ip"), "netns", "exec", self.names[host], *_OWN_PROCESSES, *command],
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT / "src"),
                "GLOO_SOCKET_IFNAME": INTERFACE,
                "OMP_NUM_THREADS": "1",
            },
            start_new_session=True,
            preexec_fn=die_with_parent,
        )

    def processes(self, host: int) -> list[int]:
        return [int(each) for each in _run("netns", "pids", self.names[host]).stdout.split()]

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        """Packets are lost without a word: they go to a card that nobody has."""
        for name, other in zip(self.names, reversed(ADDRESSES), strict=True):
            card = ("lladdr", "02:00:00:00:00:99", "nud", "permanent")
            assert _run("-n", name, "neigh", "replace", other, "dev", INTERFACE, *card).returncode == 0
        yield
        for name, other in zip(self.names, reversed(ADDRESSES), strict=True):
            assert _run("-n", name, "neigh", "del", other, "dev", INTERFACE).returncode == 0


def enter(name: str) -> None:
    """Goes on in that namespace, in a process that is the first of its host; this one ends as that one does."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as network:
        assert libc.setns(network.fileno(), _NEW_NETWORK) == 0, os.strerror(ctypes.get_errno())
    assert libc.unshare(_NEW_PROCESSES | _NEW_MOUNTS) == 0, os.strerror(ctypes.get_errno())
    if child := os.fork():
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    die_with_parent()
    assert libc.mount(b"none", b"/", None, _RECURSIVE | _PRIVATE, None) == 0, os.strerror(ctypes.get_errno())
    assert libc.mount(b"proc", b"/proc", b"proc", 0, None) == 0, os.strerror(ctypes.get_errno())


@contextlib.contextmanager
def two_hosts(*, delay: float = 0.0, rate: float = 0.0) -> Iterator[Hosts]:
    """With a link of so many seconds one way, and so many bytes a second, or as the kernel has it. Skips where that is
    not allowed.
    """
    if sys.platform != "linux" or not _tool("ip") or not _tool("tc"):
        pytest.skip("two hosts need Linux and iproute2 (make network)")
    _remove_left_behind()
    names = (f"{_PREFIX}{os.getpid()}-0", f"{_PREFIX}{os.getpid()}-1")
    with contextlib.ExitStack() as stack:
        for name in names:
            made = _run("netns", "add", name)
            if made.returncode:
                pytest.skip(f"no network namespaces here: {made.stderr.strip()}")
            stack.callback(_remove, name)
            assert _run("-n", name, "link", "set", "lo", "up").returncode == 0
        own = _run("netns", "exec", names[0], *_OWN_PROCESSES, "true")
        if own.returncode:
            pytest.skip(f"no process namespaces here: {own.stderr.strip()}")
        if _veth(names, delay, rate):
            yield Hosts(names, "veth")
        elif not rate:
            pytest.skip("no veth here")
        else:
            stack.enter_context(_relay(names, delay, rate))
            yield Hosts(names, "relay")


def _veth(names: tuple[str, str], delay: float, rate: float) -> bool:
    first, second = names
    made = _run("-n", first, "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE, "netns", second)
    if made.returncode:
        return False
    for name in names if rate else ():
        shaped = _run(
            *("-n", name, "qdisc", "add", "dev", INTERFACE, "root", "netem"),
            *("delay", f"{1e3 * delay:g}ms", "rate", f"{8 * rate:.0f}bit", "limit", "10000"),
            tool="tc",
        )
        if shaped.returncode:
            assert _run("-n", first, "link", "del", INTERFACE).returncode == 0
            return False
    _address(names)
    return True


@contextlib.contextmanager
def _relay(names: tuple[str, str], delay: float, rate: float) -> Iterator[None]:
    if not Path("/dev/net/tun").exists():
        pytest.skip("this kernel has no netem, and /dev/net/tun, which would do instead, is not there")
    command = [sys.executable, "-m", "tests.run.link", *names, INTERFACE, str(delay), str(rate)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, preexec_fn=die_with_parent)
    try:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            pytest.skip("this kernel has no netem, and /dev/net/tun, which would do instead, can't be used")
        _address(names)
        yield
    finally:
        process.kill()
        process.communicate()


def _address(names: tuple[str, str]) -> None:
    for name, address in zip(names, ADDRESSES, strict=True):
        for words in (
            ("addr", "add", f"{address}/30", "dev", INTERFACE),
            ("link", "set", INTERFACE, "mtu", str(_MTU)),
            ("link", "set", INTERFACE, "up"),
        ):
            done = _run("-n", name, *words)
            assert done.returncode == 0, done.stderr


def _remove(name: str) -> None:
    """With its links, and whoever is still in it."""
    _end_all(name)
    _run("netns", "del", name)


def _end_all(name: str) -> None:
    for process in _run("netns", "pids", name).stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(process), signal.SIGKILL)


def _remove_left_behind() -> None:
    """By a test that was itself killed."""
    for line in _run("netns", "list").stdout.splitlines():
        name = line.split()[0]
        if name.startswith(_PREFIX) and not Path("/proc", name.split("-")[1]).exists():
            _remove(name)


def _tool(name: str) -> str:
    found = shutil.which(name, path=_SBIN)
    return found or ""


def _run(*words: str, tool: str = "ip") -> subprocess.CompletedProcess[str]:
    return subprocess.run([_tool(tool), *words], capture_output=True, text=True, check=False)
