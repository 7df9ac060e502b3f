"""The same rows, whatever holds them: a run that reads a folder of shards is the run that reads one file."""

import gzip
from pathlib import Path

import pytest

from tests.runs.harness import Runner
from tests.runs.test_equals_unpacked import PACKED

pytestmark = pytest.mark.run


def test_a_folder_of_shards_trains_as_the_file_that_they_were(runner: Runner, chats: Path, tmp_path: Path) -> None:
    lines = chats.read_bytes().splitlines(keepends=True)
    shards, kept = tmp_path / "shards", tmp_path / "cache"
    shards.mkdir()
    (shards / "1.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[:5])))
    (shards / "2.jsonl").write_bytes(b"".join(lines[5:]))
    flags = f"{PACKED} --train-iters 3 --num-workers 2"
    one = runner.train(flags, data=chats, ranks=2)
    many = runner.train(flags, f"--data-cache-path {kept}", data=shards, ranks=2)
    assert many.losses == one.losses
    assert [step.samples for step in many.iterations] == [step.samples for step in one.iterations]
    assert len(list(kept.glob("*.mpidx"))) == 2
    assert len(list(shards.iterdir())) == 2
