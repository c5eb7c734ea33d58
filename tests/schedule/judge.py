"""A second opinion on schedules: a machine that carries them out, written without the package's own rules.

Tokens stand for tensors. A device runs its row in order and waits where something has not come yet. A channel (source,
target, activation or gradient) hands its n-th send to its n-th receive, as NCCL and Gloo do. An update takes what lies
in its stage's gradient. What is wrong then shows by itself: a device that waits for ever, a forward that gets another
microbatch's activation, an update that takes the next minibatch's gradient, a message that nobody takes.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

Token = tuple[int, str, int]  # stage, letter, number
Home = Mapping[tuple[int, int], int]  # (stage, microbatch) -> device


def tokens(text: str) -> list[list[Token]]:
    """The rows of a schedule's text."""
    found = [re.findall(r"(\d+)([A-Z_]+)(\d+)", line.split(":", 1)[1]) for line in text.splitlines()]
    return [[(int(stage), letter, int(number)) for stage, letter, number in row] for row in found]


class FaultError(Exception):
    """What is wrong with a schedule."""


def fault(rows: Sequence[Sequence[Token]], home: Home | None = None) -> str | None:
    """What is wrong with these rows; `home` where it is known which device has what."""
    try:
        _Machine(rows, home).run()
    except FaultError as wrong:
        return str(wrong)
    return None


class _Machine:
    def __init__(self, rows: Sequence[Sequence[Token]], home: Home | None) -> None:
        self.rows = rows
        every = [(device, *token) for device, row in enumerate(rows) for token in row]
        self.counts = Counter((stage, letter, number) for _, stage, letter, number in every)
        self.letters = {letter for _, _, letter, _ in every}
        self.S = 1 + max(stage for _, stage, _, _ in every)
        self.M = 1 + max((number for _, _, letter, number in every if letter != "U"), default=-1)
        self.updates = 1 + max((number for _, _, letter, number in every if letter == "U"), default=-1)
        self.home = home or self._homes(every)
        for device, stage, letter, number in every:
            if letter != "U" and self.home.get((stage, number)) != device:
                raise FaultError(f"{stage}{letter}{number} is not at home on device {device}")
        self.written = bool(self.letters & {"SEND_F", "RECV_F", "SEND_B", "RECV_B"})
        self.done: set[Token] = set()
        self.sent: dict[tuple[int, int, str], list[tuple[int, int]]] = defaultdict(list)
        self.posted: dict[tuple[int, int, str], list[tuple[int, int]]] = defaultdict(list)
        self.gradient: dict[tuple[int, int], set[int]] = defaultdict(set)  # (device, stage): microbatches in it
        self.updated: dict[tuple[int, int], int] = defaultdict(int)  # (device, stage): how often

    def _homes(self, every: Sequence[tuple[int, int, str, int]]) -> Home:
        found: dict[tuple[int, int], int] = {}
        for device, stage, letter, number in every:
            if letter != "U" and found.setdefault((stage, number), device) != device:
                raise FaultError(f"stage {stage} has microbatch {number} on two devices")
        return found

    def run(self) -> None:
        self._complete()
        at = [0] * len(self.rows)
        moved = True
        while moved:
            moved = False
            for device, row in enumerate(self.rows):
                while at[device] < len(row) and self._ready(device, row[at[device]]):
                    self._do(device, row[at[device]])
                    at[device] += 1
                    moved = True
        if any(place < len(row) for place, row in zip(at, self.rows, strict=True)):
            raise FaultError(f"it hangs at {at}")

    def _complete(self) -> None:
        """Each thing as often as it must be there, whatever the order."""
        twice = [token for token, count in self.counts.items() if count > 1]
        if twice:
            raise FaultError(f"{twice[0]} is there twice")
        trains = bool(self.letters & {"B", "I", "W"})
        for s in range(self.S):
            for m in range(self.M):
                have = "".join(letter for letter in "FBIW" if self.counts[s, letter, m])
                if have not in (("FB", "FIW") if trains else ("F",)):
                    raise FaultError(f"stage {s} runs {have or 'nothing'} of microbatch {m}")
                if any(self.counts[s, letter, m] for letter in "ROL") and not trains:
                    raise FaultError(f"an R, O or L of stage {s} for microbatch {m} is for no backward")
                if self.counts[s, "O", m] != self.counts[s, "L", m]:
                    raise FaultError(f"stage {s} has one copy of microbatch {m}, and not both")
                for letter, other in (("F", s + 1), ("B", s - 1)):
                    crosses = 0 <= other < self.S and self.home[s, m] != self.home[other, m]
                    wanted = int(self.written and crosses and (trains or letter == "F"))
                    pair = self.counts[s, f"SEND_{letter}", m], self.counts.get((other, f"RECV_{letter}", m), 0)
                    if pair != (wanted, wanted):
                        raise FaultError(f"{pair} transfers where {wanted} crosses: {letter} from {s} to {other}")
            for n in range(self.updates):
                if not self.counts[s, "U", n]:
                    raise FaultError(f"{s}U{n} is missing")
        if any(self.counts[0, "RECV_F", m] or self.counts[self.S - 1, "RECV_B", m] for m in range(self.M)):
            raise FaultError("a receive from no stage")
        if self.updates and self.M % self.updates:
            raise FaultError("minibatches of unlike sizes")

    def _minibatch(self, n: int) -> range:
        size = self.M // self.updates
        return range(n * size, (n + 1) * size)

    def _input(self, device: int, s: int, m: int, letter: str) -> bool:
        """Has what an action takes from another stage come? With transfers: what its own receive has got."""
        source = s - 1 if letter == "F" else s + 1
        if not 0 <= source < self.S:
            return True
        if not self.written or self.home[source, m] == device:
            return any((source, made, m) in self.done for made in ({"F"} if letter == "F" else {"B", "I"}))
        channel = (self.home[source, m], device, letter)
        if (s, m) not in self.posted[channel]:
            return False
        n = self.posted[channel].index((s, m))
        if n >= len(self.sent[channel]):
            return False
        if self.sent[channel][n] != (source, m):
            raise FaultError(f"stage {s} gets {self.sent[channel][n]} for microbatch {m}")
        return True

    def _ready(self, device: int, token: Token) -> bool:
        s, letter, m = token
        if letter == "F":
            if 1 < self.updates < self.M:  # always one version behind
                behind = max(0, m // (self.M // self.updates) - 1)
                if self.updated[device, s] < behind:
                    raise FaultError(f"{s}F{m} needs version {behind} of its weights")
            return self._input(device, s, m, "F")
        if letter in "BI":
            again = all(not self.counts[s, made, m] or (s, made, m) in self.done for made in "RL")
            return (s, "F", m) in self.done and again and self._input(device, s, m, "B")
        if letter == "W":
            return (s, "I", m) in self.done
        if letter == "R" and self.counts[s, "L", m]:
            return (s, "L", m) in self.done
        if letter == "L":
            return (s, "O", m) in self.done
        if letter in ("R", "O", "SEND_F"):
            return (s, "F", m) in self.done
        if letter == "SEND_B":
            return bool({(s, "B", m), (s, "I", m)} & self.done)
        if letter == "U":
            return all({(s, "B", i), (s, "W", i)} & self.done for i in self._minibatch(m))
        return True  # a receive is posted at once

    def _do(self, device: int, token: Token) -> None:
        s, letter, m = token
        self.done.add(token)
        if letter in ("B", "W"):
            self.gradient[device, s].add(m)
        elif letter == "SEND_F":
            self.sent[device, self.home[s + 1, m], "F"].append((s, m))
        elif letter == "SEND_B":
            self.sent[device, self.home[s - 1, m], "B"].append((s, m))
        elif letter == "RECV_F":
            self.posted[self.home[s - 1, m], device, "F"].append((s, m))
        elif letter == "RECV_B":
            self.posted[self.home[s + 1, m], device, "B"].append((s, m))
        elif letter == "U":
            self._update(device, s, m)

    def _update(self, device: int, s: int, n: int) -> None:
        """It takes what lies in the gradient here; of a single minibatch also what its other replicas have."""
        homes = {self.home[s, m] for m in self._minibatch(n)}
        if device not in homes or (len(homes) > 1 and self.updates > 1):
            raise FaultError(f"{s}U{n} on device {device}, but its gradients are on {sorted(homes)}")
        taken = set().union(*(self.gradient.pop((each, s), set()) for each in homes))
        if taken != set(self._minibatch(n)):
            raise FaultError(f"{s}U{n} takes the gradients of {sorted(taken)}")
        self.updated[device, s] += 1
