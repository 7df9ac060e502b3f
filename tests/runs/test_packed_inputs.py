"""Rows that Megatron packs itself (--sft, --dataloader-inter-document-masking), without a scheduler of ours."""

import json
import random
import re
from pathlib import Path

import pytest

from tests.runs.harness import Runner
from tests.torch.test_data_paths import documents

pytestmark = pytest.mark.run

SCRIPT = f"--own-script {Path(__file__).parent / 'documents_alone.py'}"
SHORT = "--train-iters 2 --global-batch-size 4"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """80 documents of 3 to 40 tokens, as Megatron's own preprocessing leaves them."""
    rng = random.Random(0)
    prefix = tmp_path_factory.mktemp("corpus") / "text"
    documents(prefix, [[[rng.randrange(1, 250) for _ in range(rng.randint(2, 39))] + [255]] for _ in range(80)])
    return prefix


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of one to four conversations, each from its system turn on; some rows are longer than the sequence."""
    rng = random.Random(0)

    def words(most: int) -> str:
        return " ".join(str(rng.randrange(1, 250)) for _ in range(rng.randint(2, most)))

    path = tmp_path_factory.mktemp("sft") / "sft.jsonl"
    roles = (("system", 3), ("user", 6), ("assistant", 14))
    rows = [
        [{"role": role, "content": words(most)} for _ in range(rng.randint(1, 4)) for role, most in roles]
        for _ in range(24)
    ]
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    return path


def compared(log: str) -> tuple[int, int]:
    """Documents and microbatches whose losses were compared with those of the documents alone."""
    return max(tuple(map(int, found)) for found in re.findall(r"so far: (\d+) documents in (\d+) microbatches", log))


def test_documents_in_a_window_of_pretraining_do_not_see_each_other(runner: Runner, corpus: Path) -> None:
    flags = f"{SHORT} --micro-batch-size 2 --dataloader-inter-document-masking --packing-attention auto"
    run = runner.train(SCRIPT, flags, data=corpus)
    documents, microbatches = compared(run.log)
    assert microbatches == 2 * 2
    assert documents >= 3 * 2 * microbatches, "a window of 64 tokens holds three documents and more"
    assert "core attention: ours, within the boundaries of inputs that Megatron packs" in run.log
    assert "our attention runs by sdpa (the device is cpu" in run.log
    assert "scheduler" not in "\n".join(line for line in run.log.splitlines() if line.startswith("megatron_packing:"))


def test_conversations_of_a_row_do_not_see_each_other(runner: Runner, conversations: Path) -> None:
    run = runner.train(SCRIPT, f"{SHORT} --sft --packing-attention sdpa", data=conversations)
    documents, microbatches = compared(run.log)
    assert microbatches == 2 * 4
    assert documents > 1.5 * microbatches
    assert "our attention runs by sdpa (asked for)" in run.log


def test_megatrons_own_attention_cannot(runner: Runner, corpus: Path) -> None:
    """What the flag is for: without it the local attention refuses boundaries."""
    run = runner.attempt(SCRIPT, f"{SHORT} --dataloader-inter-document-masking", data=corpus)
    assert not run.ok
    assert "Packed sequence is not supported by DotProductAttention" in run.log
