"""Which file is it, and is it still the one that was opened? Cost: one `stat`."""

import os
import stat
import time
from dataclasses import dataclass

from megatron_packing.errors import ConfigError

_CLOCK_NS = 20_000_000
"""Two writes within this time may leave a file with the same time of change: file systems use a coarse clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStamp:
    """A file's name and what changes when somebody writes to it."""

    path: str
    """Where it is."""
    size: int
    """In bytes."""
    mtime_ns: int
    """Its time of change."""
    shown: str
    """What to call it in messages: as the user named it; of an unpacked copy, the archive's name."""

    @classmethod
    def of(cls, path: str | os.PathLike[str], *, shown: str | None = None) -> "FileStamp":
        """The stamp of the file at `path` as it is now.

        Raises:
            ConfigError: it is missing, a folder, or unreadable.
        """
        path = os.fspath(path)
        found = _stat(path)
        if os.path.isdir(path):
            raise ConfigError(f"{path} is a directory; name one file in it.")
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"{path} is a pipe or device; rows are found by place, so write them to a file first.")
        if not os.access(path, os.R_OK):
            raise ConfigError(f"{path} cannot be read: permission denied.")
        return cls(path=path, size=found.st_size, mtime_ns=found.st_mtime_ns, shown=shown or path)

    @property
    def fingerprint(self) -> str:
        """Path, size and time of change in one line."""
        return f"{os.path.abspath(self.path)}:{self.size}:{self.mtime_ns}"

    def check_unchanged(self) -> None:
        """Raise ConfigError if the file is no longer what it was."""
        found = _stat(self.path)
        if found.st_size != self.size:
            raise ConfigError(
                f"{self.shown} has {found.st_size:,} bytes; it had {self.size:,} when it was opened. {_KEEP_STILL}"
            )
        if found.st_mtime_ns != self.mtime_ns:
            raise ConfigError(f"{self.shown} was written to after it was opened. {_KEEP_STILL}")

    def settle(self) -> None:
        """Wait, if the file is only just written, until a later write would show in its time of change."""
        if time.time_ns() - self.mtime_ns < _CLOCK_NS:
            time.sleep(_CLOCK_NS / 1e9)
            self.check_unchanged()


_KEEP_STILL = (
    "Rows are found by byte offset, so a data file must not change during a run: write a new file and start again."
)


def _stat(path: str) -> os.stat_result:
    try:
        return os.stat(path)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file. Check the path given as data.") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from error


def no_rows(path: str, size: int) -> str:
    """What to say of a file without rows."""
    held = "is empty (0 bytes)" if size == 0 else f"holds no rows ({size:,} bytes, all of them blank or an empty list)"
    return f"{path} {held}. Training needs at least one row."
