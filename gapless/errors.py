"""What users see when something is wrong: a fact, its numbers, and the way out, in one sentence."""


class GaplessError(Exception):
    """The root of every error that gapless raises on purpose."""


class ScheduleError(GaplessError):
    """A schedule that cannot be built, read or run."""


class PartitionError(GaplessError):
    """A model that cannot be cut as asked."""


class PlanError(GaplessError):
    """No plan fits the costs and limits."""


class TransportError(GaplessError):
    """Data did not get from one device to another."""


class CheckpointError(GaplessError):
    """Files on disk that cannot be written or read back."""


class ConfigError(GaplessError):
    """An option or a configuration with a value that makes no sense."""


_RAISED = "gapless: raised "  # how a note of ours begins; others may have added notes too


def note_place(error: BaseException, place: str) -> None:
    """Adds where in the pipeline an error was raised, for its traceback to show."""
    error.add_note(f"{_RAISED}{place}")


def noted_place(error: BaseException) -> str:
    """Where in the pipeline it was raised, or nothing."""
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(_RAISED)]
    return notes[0].removeprefix(_RAISED) if notes else ""
