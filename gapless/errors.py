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
