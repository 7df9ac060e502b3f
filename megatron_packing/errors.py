"""What can go wrong, as types. Every message states subject, value, limit and remedy.

`assert` is kept for our own bugs; whatever a user can cause is one of these.
"""


class PackingError(Exception):
    """Root of every error that this package raises on purpose."""


class ConfigError(PackingError):
    """A flag, or a combination of flags, that cannot work. Raised at start-up, on every rank."""


class SampleError(PackingError):
    """A row of a data file that cannot become a sample.

    Args:
        path: the file.
        line: its line, counted from 1.
        why: what is wrong and what to do about it.
        reason: a short stable name under which such rows are counted.
    """

    def __init__(self, path: str, line: int, why: str, *, reason: str = "bad_row") -> None:
        super().__init__(path, line, why, reason)
        self.path = path
        self.line = line
        self.why = why
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.why}"


class CapacityError(PackingError):
    """A sample that fits in no pack, or a total that does not fit in the boundaries' integer type."""


class MissingDependency(PackingError):
    """An optional package that a chosen feature needs; the message says what to install."""
