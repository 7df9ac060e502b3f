"""What the flags of data change in a run: a text that is split, and which turns are learned."""

import hashlib
import json
import random
from pathlib import Path

import numpy as np
import pytest

from tests.runs.harness import Runner

pytestmark = pytest.mark.run

SEQ_LENGTH, BATCH, STEPS = 64, 4, 3
EOS = 255


@pytest.mark.parametrize("ranks", [1, 2])
def test_pieces_stay_in_their_rows_step(ranks: int, runner: Runner, tmp_path: Path) -> None:
    """Which samples each step holds, how many targets and tokens, against the rows cut by hand."""
    rng = random.Random(1)
    texts = [[rng.randrange(1, 250) for _ in range(rng.choice([5, 64, 65, 130, 200]))] for _ in range(BATCH * STEPS)]
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": " ".join(map(str, text))}) + "\n" for text in texts))
    flags = f"--use-varlen-dataset --packing-overlong split --global-batch-size {BATCH} --train-iters {STEPS}"
    run = runner.train(flags, "--max-seqlen-per-dp-cp-rank 128 --lr-decay-iters 8", data=data, ranks=ranks)
    assert [step.consumed_samples for step in run.iterations] == [BATCH, 2 * BATCH, 3 * BATCH]
    for step, first in zip(run.iterations, range(0, len(texts), BATCH), strict=True):
        pieces = [piece for text in texts[first : first + BATCH] for piece in _cut(text)]
        assert step.samples == tuple(sorted(map(_fingerprint, pieces)))
        assert step.targets == step.real_tokens == sum(map(len, texts[first : first + BATCH]))
        assert step.squared_lengths == sum(len(piece) ** 2 for piece in pieces)
    assert max(len(_cut(text)) for text in texts) > 2


def test_only_last_answers_are_learned_where_the_run_says_so(runner: Runner, tmp_path: Path) -> None:
    turns = [("user", "1 2"), ("assistant", "3 4 5"), ("user", "6"), ("assistant", "7 8")]
    data = tmp_path / "chats.jsonl"
    row = {"messages": [{"role": role, "content": content} for role, content in turns]}
    data.write_text((json.dumps(row) + "\n") * BATCH)
    flags = f"--use-varlen-dataset --global-batch-size {BATCH} --train-iters 1 --lr-decay-iters 8"
    found = {
        train_on: runner.train(flags, f"--packing-train-on {train_on}", data=data).iterations[0].targets
        for train_on in ("all-assistant", "last-assistant")
    }
    assert found == {"all-assistant": BATCH * 7, "last-assistant": BATCH * 3}  # EOS behind each answer


def _cut(text: list[int]) -> list[list[int]]:
    """The inputs of each piece: every id of the text is one, EOS behind it is a target only."""
    return [text[at : at + SEQ_LENGTH] for at in range(0, len(text), SEQ_LENGTH)]


def _fingerprint(tokens: list[int]) -> str:
    return hashlib.sha256(np.array(tokens, dtype=np.int64).tobytes()).hexdigest()[:12]
