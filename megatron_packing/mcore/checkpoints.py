"""Is there something whole to load? Asked before Megatron looks, which ends with exit code 0 where it cannot tell.

Megatron writes `latest_checkpointed_iteration.txt` anew after each checkpoint: a disk that fills up in that moment
leaves it empty, beside checkpoints that are whole.
"""

from pathlib import Path

from megatron_packing.errors import ConfigError

_TRACKER = "latest_checkpointed_iteration.txt"
_WRITTEN_LAST = "metadata.json"  # of a distributed checkpoint
_PREFIX = "iter_"


def check_tracker(folder: str | None) -> None:
    """Refuse a folder of checkpoints whose tracker names none.

    Args:
        folder: --load; None or a folder without a tracker is Megatron's to judge.

    Raises:
        ConfigError: with the last whole checkpoint in the folder, and what to write.
    """
    tracker = Path(folder or ".", _TRACKER)
    if folder is None or not tracker.is_file():
        return
    named = tracker.read_text(errors="replace").strip()
    if named == "release" or named.isdecimal():
        return
    whole = _last_whole(Path(folder))
    remedy = (
        "There is no whole checkpoint beside it: start anew, or name another --load."
        if whole is None
        else f"The last whole checkpoint beside it is {_PREFIX}{whole:07d}: write {whole} into the file to go on."
    )
    raise ConfigError(
        f"--load {folder}: {_TRACKER} holds {named[:40]!r} where the iteration of the last checkpoint must stand, as a "
        f"full disk leaves it. {remedy}"
    )


def _last_whole(folder: Path) -> int | None:
    found = [
        int(path.parent.name.removeprefix(_PREFIX))
        for path in folder.glob(f"{_PREFIX}*/{_WRITTEN_LAST}")
        if path.parent.name.removeprefix(_PREFIX).isdecimal()
    ]
    return max(found, default=None)
