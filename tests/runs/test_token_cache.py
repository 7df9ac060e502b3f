"""--packing-token-cache changes nothing but where tokens come from."""

from pathlib import Path

import numpy as np
import pytest

from tests.runs.harness import Runner
from tests.runs.test_equals_unpacked import PACKED

pytestmark = pytest.mark.run

STEPS = "--train-iters 4 --lr-decay-iters 8"


def test_runs_that_write_and_read_a_cache_are_the_run_without(runner: Runner, chats: Path, tmp_path: Path) -> None:
    cached = f"--packing-token-cache {tmp_path}"
    without = runner.train(PACKED, STEPS, data=chats, ranks=2)
    writing = runner.train(PACKED, STEPS, cached, data=chats, ranks=2)
    assert "rows tokenized into" in writing.logs[0]
    reading = runner.train(PACKED, STEPS, cached, "--num-workers 2", data=chats, ranks=2)
    assert "rows read from" in reading.logs[0]
    assert writing.iterations == reading.iterations == without.iterations
    assert len(list(tmp_path.glob("*/part-*-of-00002"))) == 2

    # It is the cache that is read: other labels in it are another loss.
    for labels in tmp_path.glob("*/part-*/labels"):
        values = np.fromfile(labels, dtype=np.int32)
        np.roll(values, 1).tofile(labels)
    alone = runner.train(PACKED, STEPS, data=chats)
    tampered = runner.train(PACKED, STEPS, cached, data=chats)
    assert tampered.iterations[0].samples == alone.iterations[0].samples
    assert abs(tampered.losses[0] - alone.losses[0]) > 1e-3


def test_another_setting_or_a_changed_file_is_another_cache(runner: Runner, tmp_path: Path) -> None:
    data, cached = tmp_path / "texts.jsonl", f"--packing-token-cache {tmp_path / 'cache'}"
    data.write_text('{"text": "1 2 3 4 5 6"}\n' * 16)
    flags = "--use-varlen-dataset --max-seqlen-per-dp-cp-rank 128 --global-batch-size 4 --train-iters 2"
    runner.train(flags, cached, data=data)
    shorter = runner.train(flags, cached, "--packing-overlong truncate", data=data)
    assert "rows tokenized into" in shorter.log
    data.write_text('{"text": "1 2 3 4 5 6 7 8"}\n' * 16)
    changed = runner.train(flags, cached, "--seed 8", data=data)
    assert "rows tokenized into" in changed.log
    assert changed.iterations[0].targets == 4 * 8
    assert len(list((tmp_path / "cache").iterdir())) == 3


@pytest.mark.parametrize(("split", "caches"), [("100,0,0", 1), ("50,50,0", 2)])
def test_rules_of_evaluation_have_a_cache_where_rows_are_evaluated(
    split: str, caches: int, runner: Runner, chats: Path, tmp_path: Path
) -> None:
    flags = f"{STEPS} --packing-token-cache {tmp_path} --packing-eval-overlong drop --split {split} --eval-iters 0"
    runner.train(PACKED, flags, data=chats)
    assert len(list(tmp_path.iterdir())) == caches


def test_what_cannot_be_cached_is_refused_on_every_rank(runner: Runner, chats: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for flags, data, words in (
        (f"--packing-token-cache {file}", chats, "can be written to"),
        (f"--packing-token-cache {tmp_path} --mock-data", None, "made-up data"),
    ):
        run = runner.attempt(PACKED, flags, data=data, ranks=2)
        assert run.exit_codes == (2, 2)
        for log in run.logs:
            assert words in log.splitlines()[-1]
