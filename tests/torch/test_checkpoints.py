from pathlib import Path

import pytest

from megatron_packing.errors import ConfigError
from megatron_packing.mcore.checkpoints import check_tracker


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for iteration in (2, 4, 6):
        (tmp_path / f"iter_{iteration:07d}").mkdir()
    for iteration in (2, 4):  # the one of iteration 6 was never finished
        (tmp_path / f"iter_{iteration:07d}" / "metadata.json").touch()
    return tmp_path


def _tracker(folder: Path, text: bytes) -> None:
    (folder / "latest_checkpointed_iteration.txt").write_bytes(text)


@pytest.mark.parametrize("text", [b"4", b"4\n", b"release"])
def test_a_tracker_that_names_a_checkpoint_passes(folder: Path, text: bytes) -> None:
    _tracker(folder, text)
    check_tracker(str(folder))


def test_nothing_to_load_is_megatrons_to_judge(folder: Path) -> None:
    check_tracker(None)
    check_tracker(str(folder))
    check_tracker(str(folder / "no such folder"))


@pytest.mark.parametrize("text", [b"", b"\n", b"\0\0", b"-1", b"4.5"])
def test_any_other_names_the_last_whole_checkpoint(folder: Path, text: bytes) -> None:
    _tracker(folder, text)
    with pytest.raises(ConfigError, match=r"iter_0000004: write 4 into the file") as refused:
        check_tracker(str(folder))
    assert f"--load {folder}" in str(refused.value)


def test_without_a_whole_checkpoint_it_says_so(tmp_path: Path) -> None:
    _tracker(tmp_path, b"")
    with pytest.raises(ConfigError, match="no whole checkpoint"):
        check_tracker(str(tmp_path))
