"""What users see when something is wrong: a fact, its numbers, and the way out, in one sentence."""

import collections.abc
import difflib
import importlib
import re
import typing

_NOT_PLAIN = re.compile("[^ -~]")


def printable(text: object, keep: str = "") -> str:
    """The text without what a terminal acts on: escapes, other control characters and what turns the direction of
    writing are written out as Python does, `\\x1b` for one. A name from a file can't move the cursor, nor start a line.
    """
    return _NOT_PLAIN.sub(lambda c: c[0] if c[0].isprintable() or c[0] in keep else ascii(c[0])[1:-1], str(text))


def first_of(names: collections.abc.Sequence[str], most: int, word: str = "more") -> str:
    """The first few of them, and how many there are besides."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} {word}" if len(names) > most else "")


def did_you_mean(word: str, known: collections.abc.Iterable[str], otherwise: str, cutoff: float = 0.6) -> str:
    """The known word that is nearest, as a question; `otherwise` where none is near."""
    alike = {each.lower(): each for each in known}
    near = difflib.get_close_matches(word.lower(), alike, n=1, cutoff=cutoff)
    return f"did you mean {alike[near[0]]}?" if near else otherwise


def optional(module: str, otherwise: str) -> typing.Any:
    """A module of a package that not everybody has; where it is missing, an error says so."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(otherwise) from None


class GaplessError(Exception):
    """The root of every error that gapless raises on purpose."""

    guard = ""  # the name of the guard that refuses (gapless.guards); none where an argument is wrong

    def __str__(self) -> str:
        """Of what a message quotes nothing reaches a terminal raw."""
        return printable(super().__str__(), keep="\n\t")


class ScheduleError(GaplessError):
    """A schedule that cannot be built, read or run."""


class PartitionError(GaplessError):
    """A model that cannot be cut as asked."""


class TooFewLayersError(PartitionError):
    """A model that cannot be cut into so many stages, but into `most`."""

    def __init__(self, words: str, most: int) -> None:
        super().__init__(words)
        self.most = most


class PlanError(GaplessError):
    """No plan fits the costs and limits."""


class TransportError(GaplessError):
    """Data did not get from one device to another."""


class CheckpointError(GaplessError):
    """Files on disk that cannot be written or read back."""


class ConfigError(GaplessError):
    """An option or a configuration with a value that makes no sense."""


_LESS_MEMORY = (
    "gapless: less memory is needed with more microbatches, schedule='1f1b', graphs=False, remat='stage' or "
    "offload='activations'; pipe.memory() shows what holds it"
)
_RAISED = "gapless: raised "  # how a note of ours begins; others may have added notes too


def note_place(error: BaseException, place: str) -> None:
    """Adds where in the pipeline an error was raised, for its traceback to show; and what takes less memory."""
    error.add_note(f"{_RAISED}{place}")
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which need not be loaded here
        error.add_note(_LESS_MEMORY)


def noted_place(error: BaseException) -> str:
    """Where in the pipeline it was raised, or nothing."""
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(_RAISED)]
    return notes[0].removeprefix(_RAISED) if notes else ""
