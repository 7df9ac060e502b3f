"""--packing-plan: each consumed sample is a pack of the file, and what is learned is what the unpacked run learns."""

import hashlib
import json
import random
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from megatron_packing.cli.main import app
from megatron_packing.schedule.pack_file import PackFile
from tests import tolerances
from tests.runs.harness import Iteration, Runner

pytestmark = pytest.mark.run

# Packs of 16 tokens hold one row of each length, and nothing else fits: every pack is 3 rows.
ROWS = 18 * [9, 4, 3]
SHAPE = "--seq-length 16 --max-position-embeddings 16 --train-iters 6 --lr-decay-iters 6 --lr 1e-3"
FOLLOWING = f"--use-varlen-dataset {SHAPE} --max-seqlen-per-dp-cp-rank 16 --global-batch-size 4"
PADDED = f"--use-varlen-dataset --varlen-sbhd-validation {SHAPE} --global-batch-size 12"
TOKENIZER = "--tokenizer-type NullTokenizer --vocab-size 256 --null-tokenizer-eod-id 255"


def write_rows(path: Path, texts: list[list[int]]) -> Path:
    path.write_text("".join(json.dumps({"text": " ".join(map(str, ids))}) + "\n" for ids in texts))
    return path


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    """Every fifth row holds nothing and makes no sample; every other one is told from all others."""
    draw = random.Random(5)
    lengths = [*ROWS]
    draw.shuffle(lengths)
    texts = [[draw.randrange(1, 250) for _ in range(length)] for length in lengths]
    for place in range(0, 60, 5):
        texts.insert(place, [])
    return texts


@pytest.fixture(scope="module")
def data(texts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("plan") / "rows.jsonl", texts)


@pytest.fixture(scope="module")
def plan(data: Path) -> Path:
    """As the command writes it."""
    out = data.with_name("packs.idx")
    words = f"pack --data {data} {TOKENIZER} --seq-length 16 --max-seqlen-per-dp-cp-rank 16 --out {out}".split()
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    return out


def fingerprint(ids: list[int]) -> str:
    return hashlib.sha256(np.array(ids, dtype=np.int64).tobytes()).hexdigest()[:12]


def packs_of(step: Iteration) -> list[tuple[str, ...]]:
    return sorted(pack for rank in step.packs for pack in rank)


def test_each_step_is_the_files_packs_and_learns_what_their_rows_teach_unpacked(
    runner: Runner, texts: list[list[int]], data: Path, plan: Path, tmp_path: Path
) -> None:
    packs = PackFile(plan)
    listed = [packs[number].tolist() for number in range(len(packs))]
    assert len(listed) == 18
    planned = runner.train(FOLLOWING, f"--packing-plan {plan}", data=data, ranks=2)
    assert "18 packs of 54 rows, 12 rows that make no sample left out; each pack is one consumed sample" in planned.log
    assert "as the packs stand in the plan; an epoch of 18 packs is 4 steps of 4 and 2 packs left" in planned.log
    for number, step in enumerate(planned.iterations):
        due = [listed[place % 18] for place in range(4 * number, 4 * number + 4)]  # the epoch ends within step 5
        assert packs_of(step) == sorted(tuple(fingerprint(texts[row]) for row in pack) for pack in due)
        assert step.consumed_samples == 4 * (number + 1)

    in_order = write_rows(tmp_path / "in_order.jsonl", [texts[row] for pack in listed for row in pack])
    reference = runner.train(PADDED, data=in_order)
    for mine, theirs in zip(planned.iterations, reference.iterations, strict=True):
        assert (mine.samples, mine.targets) == (theirs.samples, theirs.targets)
        assert len(mine.samples) == 12
        assert mine.loss is not None
        assert theirs.loss is not None
        assert abs(mine.loss - theirs.loss) <= tolerances.LOSS_PER_ITERATION * max(1.0, theirs.loss)
    for name, weight in planned.weights.items():
        distance = (weight - reference.weights[name]).norm() / reference.weights[name].norm()
        assert distance <= tolerances.WEIGHTS_REL_L2, name


def test_a_resumed_run_goes_on_with_the_next_packs(runner: Runner, data: Path, plan: Path, tmp_path: Path) -> None:
    flags = f"{FOLLOWING} --packing-plan {plan}"
    whole = runner.train(flags, data=data, ranks=2)
    saving = f"--save {tmp_path} --save-interval 3 --exit-interval 3 --ckpt-format torch_dist"
    first = runner.train(flags, saving, data=data, ranks=2)
    second = runner.train(flags, f"--load {tmp_path} --num-workers 2", data=data, ranks=2)
    assert first.iterations == whole.iterations[:3]
    assert second.iterations == whole.iterations[3:], "samples, packs, losses, weights and optimizer state"


def test_what_the_plan_was_not_made_for_is_refused_on_every_rank(
    runner: Runner, texts: list[list[int]], data: Path, plan: Path, tmp_path: Path
) -> None:
    changed = write_rows(tmp_path / "rows.jsonl", [*texts[:-1], [1, 2, 3]])
    for flags, path, words in (
        (FOLLOWING, changed, "made of other data"),
        (f"{FOLLOWING} --vocab-size 300", data, "made of other tokenizer"),
    ):
        run = runner.attempt(f"{flags} --packing-plan {plan}", data=path, ranks=2)
        assert run.exit_codes == (2, 2)
        for log in run.logs:
            assert words in log.splitlines()[-1]
