import os
import pickle
import signal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_packing.data import Dropped, TokenizedSample
from megatron_packing.data.token_cache import Encoded, complete, open_cache, part_rows, write_part
from megatron_packing.errors import ConfigError, PackingError, SampleError

KEY = "0123"


@st.composite
def samples(draw: st.DrawFn) -> TokenizedSample:
    length = draw(st.integers(1, 6))
    ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=length + 1, max_size=length + 1))
    mask = draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=length, max_size=length))
    return TokenizedSample(
        tokens=np.array(ids[:-1], dtype=np.int64),
        labels=np.array(ids[1:], dtype=np.int64),
        loss_mask=np.array(mask, dtype=np.float32),
        truncated=draw(st.booleans()),
    )


dropped = st.builds(Dropped, st.sampled_from(["empty", "overlong"]))
rows_made = st.lists(st.one_of(st.lists(samples(), min_size=1, max_size=3), dropped), min_size=1, max_size=12)


def some_rows(count: int = 5) -> list[Encoded]:
    def sample(row: int) -> TokenizedSample:
        ids = np.arange(row, row + 4)
        return TokenizedSample(tokens=ids[:-1], labels=ids[1:], loss_mask=np.ones(3, dtype=np.float32))

    return [Dropped("empty") if row % 4 == 3 else [sample(row)] for row in range(count)]


def written(folder: Path, made: list[Encoded], parts: int = 2) -> None:
    for part in range(parts):
        write_part(folder, KEY, rows=len(made), part=part, parts=parts, encode=made.__getitem__)
    complete(folder, KEY, rows=len(made), parts=parts)


def assert_same(mine: Encoded, theirs: Encoded) -> None:
    if isinstance(theirs, Dropped):
        assert mine == theirs
        return
    assert not isinstance(mine, Dropped)
    for one, other in zip(mine, theirs, strict=True):
        for name in ("tokens", "labels", "loss_mask"):
            kept, given = getattr(one, name), getattr(other, name)
            np.testing.assert_array_equal(kept, given)
            assert kept.dtype == (np.float32 if name == "loss_mask" else np.int64)
        assert one.truncated == other.truncated


@given(rows=st.integers(1, 40), parts=st.integers(1, 9))
def test_parts_hold_each_row_once_in_order(rows: int, parts: int) -> None:
    assert [row for part in range(parts) for row in part_rows(rows, part, parts)] == list(range(rows))


@settings(deadline=None, max_examples=60)
@given(made=rows_made, parts=st.integers(1, 4))
def test_every_row_comes_back(made: list[Encoded], parts: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("cache")
    written(folder, made, parts)
    cache = open_cache(folder, KEY)
    assert cache is not None
    assert len(cache) == len(made)
    for row, theirs in enumerate(made):
        assert_same(cache[row], theirs)
    with pytest.raises(IndexError):
        cache[len(made)]


def test_what_is_read_is_the_readers_own_and_a_pickle_is_small(tmp_path: Path) -> None:
    made = some_rows(400)
    written(tmp_path, made)
    cache = open_cache(tmp_path, KEY)
    assert cache is not None
    first = cache[0]
    assert not isinstance(first, Dropped)
    first[0].tokens[:] = 99
    assert_same(cache[0], made[0])
    pickled = pickle.dumps(cache)
    assert len(pickled) < 2_000
    assert_same(pickle.loads(pickled)[399], made[399])


def test_another_key_is_another_cache(tmp_path: Path) -> None:
    written(tmp_path, some_rows())
    assert open_cache(tmp_path, "4567") is None
    assert open_cache(tmp_path / "elsewhere", KEY) is None


def test_nothing_is_a_cache_before_it_is_whole(tmp_path: Path) -> None:
    made = some_rows()
    write_part(tmp_path, KEY, rows=5, part=0, parts=2, encode=made.__getitem__)
    assert open_cache(tmp_path, KEY) is None
    with pytest.raises(PackingError, match=r"part-00001-of-00002.*shared file system"):
        complete(tmp_path, KEY, rows=5, parts=2)
    assert open_cache(tmp_path, KEY) is None


def test_a_bad_row_ends_the_part_and_leaves_nothing_of_it(tmp_path: Path) -> None:
    def encode(row: int) -> Encoded:
        raise SampleError("rows.jsonl", row + 1, "is cut short")

    with pytest.raises(SampleError, match=r"rows\.jsonl:1: is cut short"):
        write_part(tmp_path, KEY, rows=5, part=0, parts=1, encode=encode)
    assert list((tmp_path / KEY).iterdir()) == []


def test_a_killed_writer_leaves_what_serves_the_next_attempt(tmp_path: Path) -> None:
    made = some_rows()
    write_part(tmp_path, KEY, rows=5, part=0, parts=2, encode=made.__getitem__)

    def kill_at_last(row: int) -> Encoded:
        if row == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return made[row]

    pid = os.fork()
    if pid == 0:
        write_part(tmp_path, KEY, rows=5, part=1, parts=2, encode=kill_at_last)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert any(".unfinished-" in path.name for path in (tmp_path / KEY).iterdir()), "the kill came halfway"
    assert open_cache(tmp_path, KEY) is None

    asked = []
    for part in range(2):
        write_part(tmp_path, KEY, rows=5, part=part, parts=2, encode=lambda row: asked.append(row) or made[row])
    complete(tmp_path, KEY, rows=5, parts=2)
    assert asked == [2, 3, 4], "the part that was whole is not made again"
    cache = open_cache(tmp_path, KEY)
    assert cache is not None
    for row in range(5):
        assert_same(cache[row], made[row])
    assert not any(".unfinished-" in path.name for path in (tmp_path / KEY).iterdir())


def test_parts_for_another_number_of_ranks_are_made_anew_and_cleared(tmp_path: Path) -> None:
    made = some_rows()
    write_part(tmp_path, KEY, rows=5, part=0, parts=3, encode=made.__getitem__)
    written(tmp_path, made, parts=2)
    assert sorted(path.name for path in (tmp_path / KEY).glob("part-*")) == [
        "part-00000-of-00002",
        "part-00001-of-00002",
    ]
    # Whoever was slower, and finds its parts cleared away, uses what is there.
    assert len(complete(tmp_path, KEY, rows=5, parts=3)) == 5


@pytest.mark.parametrize("name", ["tokens", "row_ends", "dropped.json", "sizes.json"])
@pytest.mark.parametrize("gone", [False, True])
def test_a_part_with_a_file_cut_short_or_gone_is_made_anew(tmp_path: Path, name: str, gone: bool) -> None:
    made = some_rows()
    written(tmp_path, made)
    path = tmp_path / KEY / "part-00001-of-00002" / name
    path.write_bytes(path.read_bytes()[:-1])
    if gone:
        path.unlink()
    assert open_cache(tmp_path, KEY) is None
    written(tmp_path, made)
    cache = open_cache(tmp_path, KEY)
    assert cache is not None
    for row in range(5):
        assert_same(cache[row], made[row])


def test_several_writers_of_one_part_are_safe(tmp_path: Path) -> None:
    """The slower one finds the part there as it renames its own."""
    made = some_rows()

    def encode(row: int) -> Encoded:
        if row == 4:  # meanwhile another process finishes
            write_part(tmp_path, KEY, rows=5, part=0, parts=1, encode=made.__getitem__)
        return made[row]

    write_part(tmp_path, KEY, rows=5, part=0, parts=1, encode=encode)
    cache = complete(tmp_path, KEY, rows=5, parts=1)
    for row in range(5):
        assert_same(cache[row], made[row])


def test_a_folder_that_cannot_be_written_to_and_values_that_cannot_be_kept(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--packing-token-cache .*/file: .*can be written to"):
        write_part(tmp_path / "file", KEY, rows=1, part=0, parts=1, encode=some_rows().__getitem__)

    def unreadable(row: int) -> Encoded:
        raise OSError("stale file handle")

    with pytest.raises(PackingError, match="row 1 of the data cannot be read: stale file handle"):
        write_part(tmp_path, KEY, rows=1, part=0, parts=1, encode=unreadable)
    half = TokenizedSample(
        tokens=np.ones(1, dtype=np.int64), labels=np.ones(1, dtype=np.int64), loss_mask=np.array([0.5], np.float32)
    )
    with pytest.raises(ConfigError, match="loss_mask with values other than 0 and 1"):
        write_part(tmp_path, KEY, rows=1, part=0, parts=1, encode=lambda row: [half])
