"""Does a pack file give back what was packed, and nothing where it is of other data, cut short or damaged?"""

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_packing.errors import ConfigError, PackingError
from megatron_packing.schedule import pack_set
from megatron_packing.schedule.offline import PackedSet
from megatron_packing.schedule.pack_file import (
    PackFile,
    PackKey,
    PackRules,
    fingerprint_of_lengths,
    write_pack_file,
)
from tests import strategies

KEY = PackKey(data="d1", tokenizer="t1", lengths="l1")
RULES = PackRules(capacity=16, alignment=1, max_seqs=None)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "packs.idx"
    packed = pack_set(np.array([9, 7, 5, 5, 6, 12, 4]), 16)
    write_pack_file(path, packed, key=KEY, rules=RULES)
    return path


def listed(packs: PackedSet | PackFile) -> list[list[int]]:
    return (
        [packs[i].tolist() for i in range(len(packs))] if isinstance(packs, PackFile) else [p.tolist() for p in packs]
    )


@settings(max_examples=30)
@given(strategies.lengths(max_length=16, max_size=30))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, lengths: list[int]) -> None:
    path = tmp_path_factory.mktemp("packs") / "packs.idx"
    packed = pack_set(np.array(lengths, dtype=np.int64), 16)
    write_pack_file(path, packed, key=KEY, rules=RULES)
    read = PackFile(path)
    assert listed(read) == listed(packed)
    assert (read.num_samples, read.key, read.rules) == (len(lengths), KEY, RULES)
    assert [file.name for file in path.parent.iterdir()] == ["packs.idx"]


def test_packs_are_arrays_of_their_own(written: Path) -> None:
    packs = PackFile(written)
    first = packs[0]
    first[0] = 99
    assert packs[0][0] != 99
    assert first.dtype == np.int64
    for outside in (-1, len(packs)):
        with pytest.raises(IndexError):
            packs[outside]


def test_a_worker_gets_the_path_and_maps_the_file_itself(written: Path) -> None:
    packs = PackFile(written)
    sent = pickle.dumps(packs)
    assert len(sent) < 500
    assert listed(pickle.loads(sent)) == listed(packs)


# Refused


def test_a_file_cut_short_anywhere_is_refused(written: Path) -> None:
    whole = written.read_bytes()
    for size in range(len(whole)):
        written.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=r"no pack file|cut short or damaged"):
            PackFile(written)
    written.write_bytes(whole + b"\0")
    with pytest.raises(ConfigError, match="cut short or damaged"):
        PackFile(written)


@settings(max_examples=60)
@given(data=st.data())
def test_a_damaged_byte_is_seen(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("packs") / "packs.idx"
    write_pack_file(path, pack_set(np.array([9, 7, 5, 5, 6]), 16), key=KEY, rules=RULES)
    whole = bytearray(path.read_bytes())
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(whole)
    with pytest.raises(ConfigError, match=r"megatron-packing pack"):
        PackFile(path)


def test_no_such_file_and_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.idx: No such file"):
        PackFile(tmp_path / "no.idx")
    with pytest.raises(ConfigError, match="No such file"):
        write_pack_file(tmp_path / "no" / "packs.idx", pack_set(np.array([1]), 1), key=KEY, rules=RULES)


@pytest.mark.parametrize("name", ["data", "tokenizer", "lengths"])
def test_what_changed_is_named(written: Path, name: str) -> None:
    packs = PackFile(written)
    packs.check(key=KEY, rules=RULES)
    with pytest.raises(ConfigError, match=rf"--packing-plan .*made of other {name} than.*'.1'.*'new'.*Pack again"):
        packs.check(key=replace(KEY, **{name: "new"}), rules=RULES)


def test_everything_that_changed_is_named(written: Path) -> None:
    with pytest.raises(ConfigError, match="made of other data and other lengths than"):
        PackFile(written).check(key=PackKey(data="x", tokenizer="t1", lengths="x"), rules=RULES)


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"capacity": 15}, "up to 16 tokens; this run has 15"),
        ({"alignment": 4}, "an alignment of 1; this run has 4"),
        ({"max_seqs": 3}, "up to 7 samples; this run has 3"),
    ],
)
def test_packs_that_break_the_runs_rules(written: Path, rules: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        PackFile(written).check(key=KEY, rules=replace(RULES, **rules))
    PackFile(written).check(key=KEY, rules=replace(RULES, capacity=32, max_seqs=7))


@pytest.mark.parametrize("ids", [[0, 0], [0, 2], [0]])
def test_packs_that_lose_a_sample_are_not_written(tmp_path: Path, ids: list[int]) -> None:
    packed = PackedSet(sample_ids=np.array(ids), ends=np.array([2]))
    with pytest.raises(PackingError, match="exactly once"):
        write_pack_file(tmp_path / "packs.idx", packed, key=KEY, rules=RULES)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = written.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ConfigError, match="No space left"):
        write_pack_file(written, pack_set(np.array([1, 2]), 16), key=KEY, rules=RULES)
    assert written.read_bytes() == before
    assert [file.name for file in written.parent.iterdir()] == ["packs.idx"]


def test_rows_may_be_left_out(tmp_path: Path) -> None:
    """Rows 0, 3 and 5 of six make no sample."""
    path = tmp_path / "packs.idx"
    packed = PackedSet(sample_ids=np.array([2, 4, 1]), ends=np.array([2, 3]))
    write_pack_file(path, packed, key=KEY, rules=RULES, left_out=3)
    read = PackFile(path)
    assert listed(read) == [[2, 4], [1]]
    assert (read.num_samples, read.left_out) == (3, 3)
    for wrong in (2, 0):
        with pytest.raises(PackingError, match="exactly once"):
            write_pack_file(path, packed, key=KEY, rules=RULES, left_out=wrong - 2)


def test_equal_files_have_equal_digests(tmp_path: Path) -> None:
    digests = []
    for number, lengths in enumerate(([9, 7], [9, 7], [9, 8])):
        path = tmp_path / f"{number}"
        write_pack_file(path, pack_set(np.array(lengths), 16), key=KEY, rules=RULES)
        digests.append(PackFile(path).digest)
    assert digests[0] == digests[1] != digests[2]
    assert all(0 <= digest < 2**63 for digest in digests)


def test_the_order_of_lengths_is_part_of_the_key() -> None:
    assert fingerprint_of_lengths(np.array([1, 2])) != fingerprint_of_lengths(np.array([2, 1]))


@given(lengths=st.lists(st.integers(1, 16), max_size=60))
def test_packs_in_the_order_of_the_data(lengths: list[int]) -> None:
    packed = pack_set(np.array(lengths, dtype=np.int64), 16)
    ordered = listed(packed.in_order_of_data())
    assert ordered == sorted(listed(packed))  # first ids are all different
