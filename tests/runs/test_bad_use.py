"""What cannot work ends at start-up, on every rank, with one clear error that says what to do."""

import json
from pathlib import Path

import pytest

from tests.pure.test_data_encode import ROTTEN
from tests.runs.harness import Run, Runner
from tests.runs.test_equals_unpacked import PACKED, PADDED

pytestmark = pytest.mark.run

# name -> (flags, words that the error must have)
FLAGS = {
    "micro-batch size": (f"{PACKED} --micro-batch-size 2 --global-batch-size 8", ["--micro-batch-size 2", "is 1"]),
    "unknown scheduler": (
        f"{PACKED} --sequence-packing-scheduler best",
        ["scheduler is 'best'", "--sequence-packing-scheduler", "dynamic_cp, first_fit"],
    ),
    "groups that change, with another attention": (
        f"{PACKED} --dynamic-context-parallel --spec tests.runs.specs honouring",
        ["dynamic_cp with the attention 'spec': proven with ours and with Transformer", "Drop --spec"],
    ),
    "capacity below seq-length": (
        "--use-varlen-dataset --max-seqlen-per-dp-cp-rank 32",
        ["--max-seqlen-per-dp-cp-rank 32", "--seq-length 64", "at least 64"],
    ),
    "CUDA graphs": (f"{PACKED} --cuda-graph-impl local", ["--cuda-graph-impl local", "differ in shape", "none"]),
    "EP overlap": (f"{PACKED} --overlap-moe-expert-parallel-comm", ["--overlap-moe-expert-parallel-comm"]),
    "position reset": (f"{PACKED} --reset-position-ids", ["--reset-position-ids"]),
    "mask reset": (f"{PACKED} --reset-attention-mask", ["--reset-attention-mask"]),
    "EOD mask": (f"{PACKED} --eod-mask-loss", ["--eod-mask-loss"]),
    "relative positions": (f"{PACKED} --position-embedding-type relative", ["--position-embedding-type relative"]),
    "mrope": (f"{PACKED} --position-embedding-type mrope", ["--position-embedding-type mrope"]),
    "yarn": (f"{PACKED} --position-embedding-type yarn", ["--position-embedding-type yarn"]),
    "multi-token prediction": (f"{PACKED} --mtp-num-layers 1", ["--mtp-num-layers 1", "from sample to sample"]),
    "hybrid model": (f"{PACKED} --hybrid-override-pattern M*M*", ["--hybrid-override-pattern M*M*", "carry state"]),
    "sinkhorn routing": (
        f"{PACKED} --num-experts 4 --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type sinkhorn",
        ["--moe-router-load-balancing-type", "sinkhorn", "padding included"],
    ),
    "stock attention": (f"{PACKED} --packing-attention stock", ["--packing-attention stock", "boundaries"]),
    "local attention backend": (f"{PACKED} --attention-backend local", ["--attention-backend local"]),
    "no Transformer Engine": (f"{PACKED} --packing-attention te", ["not installed", "transformer-engine[pytorch]"]),
    "no dataset": ("--sequence-packing-scheduler first_fit", ["--use-varlen-dataset", "--sft"]),
    "reference with a scheduler": (f"{PADDED} --sequence-packing-scheduler first_fit", ["--varlen-sbhd-validation"]),
    "two datasets": (f"{PACKED} --sft", ["--use-varlen-dataset", "--sft"]),
    "a dataset that is none": (f"{PACKED} --packing-dataset json:JSONDecoder", ["json:JSONDecoder", "VarlenDataset"]),
    "a module that is none": (f"{PACKED} --packing-dataset no.such:Thing", ["no.such:Thing", "module:Class"]),
}


@pytest.mark.parametrize("name", FLAGS)
def test_flags_that_cannot_work(name: str, runner: Runner, chats: Path) -> None:
    flags, words = FLAGS[name]
    assert_refused(runner, flags, chats, words, ranks=1)


def test_a_dispatcher_that_needs_equal_packs(runner: Runner, chats: Path) -> None:
    words = ["--moe-token-dispatcher-type allgather", "alltoall"]
    assert_refused(runner, f"{PACKED} --num-experts 4", chats, words, ranks=1)


def test_users_spec_is_kept_and_refused_where_it_would_mix_samples(runner: Runner, chats: Path) -> None:
    words = ["DotProductAttention", "cannot honour the boundaries", "--spec"]
    assert_refused(runner, f"{PACKED} --spec tests.runs.specs stock", chats, words, ranks=1)
    own = runner.train(f"{PACKED} --spec tests.runs.specs honouring --train-iters 3", data=chats)
    assert own.arguments["spec"] == "['tests.runs.specs', 'honouring']"
    assert own.losses == runner.train(f"{PACKED} --train-iters 3", data=chats).losses


BAD_FILES = {
    "missing": (None, ["no such file", "{path}"]),
    "empty": ("", ["{path}"]),
    "unknown schema": (
        '{"speech": "hello", "reply": "hi"}\n',
        ["{path}:1", "reply", "speech", "messages", "alpaca", "text"],
    ),
    "cut short": ('{"text": "1 2 3"}\n{"text": "1 2', ["{path}:2"]),
    "nothing to learn": (
        "\n".join(
            (
                '{"text": ""}',
                '{"messages": []}',
                '{"messages": [{"role": "user", "content": "1 2"}]}',
                '{"text": "1"}',
                '{"text": " \\n "}',
            )
        ),
        ["{path}: none of the first 5 rows", "empty: 3", "no_targets: 1", "too_short: 1"],
    ),
    "every answer truncated away": (
        json.dumps({"messages": [{"role": "user", "content": "7 " * 70}, {"role": "assistant", "content": "1"}]})
        + "\n",
        ["{path}: none of the first 1 rows", "truncated_no_targets: 1"],
        "--packing-overlong truncate",
    ),
    "overlong": (json.dumps({"text": " ".join(["7"] * 100)}) + "\n", ["{path}:1", "100", "64", "--packing-overlong"]),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_files_that_cannot_be_trained_on(name: str, runner: Runner, tmp_path: Path) -> None:
    content, words, *flags = BAD_FILES[name]
    path = tmp_path / "rows.jsonl"
    if content is not None:
        path.write_text(content)
    assert_refused(runner, " ".join((PACKED, *flags)), path, [word.format(path=path) for word in words], ranks=2)


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_row_far_from_the_start_ends_every_rank(workers: int, runner: Runner, tmp_path: Path) -> None:
    """Row 1,101 reads well, and lies behind the rows encoded at start-up: the rank that meets it ends the other too."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "1 2 3 4 5"}\n' * 1100 + '{"text": "1 x"}\n' * 4 + '{"text": "1 2 3"}\n' * 96)
    flags = f"{PACKED} --global-batch-size 100 --train-iters 12 --num-workers {workers}"
    assert_refused(runner, flags, path, [f"{path}:110"], ranks=2, trained=11)
    assert "Traceback" not in runner.attempt(flags, data=path, ranks=2).log
    skipping = runner.train(flags, "--packing-bad-rows skip", data=path, ranks=2)
    assert "rows dropped: 4" in skipping.log
    told = _lines_of(skipping)
    assert sum(line.startswith(f"a row was dropped (not_encodable) in training: {path}:110") for line in told) == 3
    assert "rows lost or cut in training, over all ranks: 4" in told
    assert sum(line.startswith(f"not_encodable 4 {path}:110") for line in told) == 1
    assert " packing, rows lost or cut since the start | not_encodable: 4 |" in skipping.log
    assert [len(step.samples) for step in skipping.iterations][-2:] == [100, 96]


def _broken(path: Path, *, bad: dict[int, str]) -> Path:
    """10,000 rows; those numbered in `bad`, from 1, are replaced."""
    path.write_text("".join(bad.get(line, '{"text": "1 2 3 4 5"}') + "\n" for line in range(1, 10_001)))
    return path


def test_a_bad_row_far_into_a_file_is_told_before_the_first_iteration(runner: Runner, tmp_path: Path) -> None:
    """Of two ranks the second reads these rows; the first one is told on both."""
    path = _broken(tmp_path / "rows.jsonl", bad={9_000: '{"text": 5}', 9_001: "{", 9_002: "{"})
    assert_refused(runner, PACKED, path, [f"error: {path}:9000: field 'text' is 5"], ranks=2)
    # In a file of another split too, and the first in the file's order even where the other rank finds one, too.
    path = _broken(tmp_path / "valid.jsonl", bad={800: '{"text": "1 x"}', 1_200: "{"})
    good = _broken(tmp_path / "good.jsonl", bad={})
    data = f"--train-data-path 1 {good} --valid-data-path {path}"
    run = runner.attempt(PACKED, data, data=None, ranks=2)
    assert set(run.exit_codes) == {2}
    assert all(f"error: {path}:800: " in log for log in run.logs)


def test_skipped_rows_are_told_by_reason_with_their_first_three(runner: Runner, tmp_path: Path) -> None:
    bad = {505: '{"text": 5}', 506: "{", 7_000: "{", 8_000: '{"text": ""}', **dict.fromkeys((9_001, 9_002, 9_003), "{")}
    path = _broken(tmp_path / "rows.jsonl", bad=bad)
    run = runner.train(f"{PACKED} --packing-bad-rows skip --train-iters 1", data=path, ranks=2)
    told = _lines_of(run)
    assert sum(line.startswith(f"{path}: 10,000 rows; of the first 1,000: 998 samples") for line in told) == 1
    for start in (f"bad_content 1 {path}:505: ", f"bad_json 5 {path}:506: ", f"{path}:7000: ", f"{path}:9001: "):
        assert sum(line.startswith(start) for line in told) == 1, start
    assert f"{path}:9002" not in run.log


def _see_files_of_different_size() -> None:
    import torch.distributed as dist

    from megatron_packing.errors import PackingError
    from megatron_packing.mcore.look import survey_sources
    from tests.runs.datasets import UnevenRows
    from tests.torch.test_dataset import _config

    with pytest.raises(PackingError, match="stale has 5, 6 rows, depending on the rank"):
        list(survey_sources(UnevenRows, _config(blend=(["stale"], None)), group=dist.group.WORLD))


def test_ranks_that_see_different_files_do_not_start(runner: Runner) -> None:
    runner.call(_see_files_of_different_size, ranks=2)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_rotten_file(workers: int, runner: Runner, tmp_path: Path) -> None:
    """D5 and D6: two passes over 4 good rows, 3 rotten ones and 3 with nothing to learn."""
    path = tmp_path / "rotten.jsonl"
    path.write_bytes(ROTTEN + b'{"text": " "}\n{"messages": []}\n{"messages":[{"role":"user","content":"11"}]}\n')
    flags = f"{PACKED} --num-workers {workers} --global-batch-size 10 --train-iters 2"
    assert_refused(runner, flags, path, [f"error: {path}:3: field 'messages' is 'ping'"], ranks=2)
    lenient = runner.train(flags, "--packing-bad-rows skip", data=path, ranks=2)
    assert [len(step.samples) for step in lenient.iterations] == [4, 4]
    told = _lines_of(lenient)
    for start in (f"{path}: 10 rows; of the first 10: 4 samples", f"bad_turns 1 {path}:3: ", f"bad_json 1 {path}:8: "):
        assert sum(line.startswith(start) for line in told) == 1, start
    assert "rows lost or cut in training, over all ranks: 12" in told
    for reason, count in {"bad_turns": 2, "bad_content": 2, "bad_json": 2, "empty": 4, "no_targets": 2}.items():
        assert sum(line.startswith(f"{reason} {count} {path}:") for line in told) == 1, reason


def _lines_of(run: Run) -> list[str]:
    """What our own lines say, white space shortened."""
    ours = (line.partition("megatron_packing:")[2] for line in run.log.splitlines())
    return [" ".join(line.split()) for line in ours if line]


def assert_refused(runner: Runner, flags: str, data: Path, words: list[str], ranks: int, trained: int = 0) -> None:
    run = runner.attempt(flags, data=data, ranks=ranks)
    assert all(code not in (0, None) for code in run.exit_codes), run.exit_codes
    for log in run.logs:
        for word in words:
            assert word in log, f"{word!r} is not in\n{log[-3000:]}"
        assert f" iteration {trained + 1:8d}/" not in log
    assert not trained or f" iteration {trained:8d}/" in run.log
