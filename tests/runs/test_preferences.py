"""Pairs of answers, packed, and the example's loss over them: the same in every layout, and as each pair alone."""

import json
import random
import re
from pathlib import Path

import pytest

from tests import tolerances
from tests.runs.harness import ROOT, Run, Runner

pytestmark = pytest.mark.run

SCRIPT = f"--own-script {ROOT / 'examples' / 'train_preferences.py'}"
FLAGS = (
    f"{SCRIPT} --packing-dataset preference --global-batch-size 8 --train-iters 4 --lr-decay-iters 4 "
    "--init-method-std 0.3 --lr 1e-3"
)


@pytest.fixture(scope="session")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Long and short answers side by side; one row without an answer."""
    draw = random.Random(3)

    def text(words: int) -> str:
        return " ".join(str(draw.randrange(250)) for _ in range(words))

    rows = [
        {
            "conversations": [{"from": "human", "value": text(2 + i % 5)}],
            "chosen": {"from": "gpt", "value": text(1 + 7 * i % 40)},
            "rejected": {"from": "gpt", "value": text(1 + 11 * i % 40) if i != 5 else ""},
        }
        for i in range(32)
    ]
    path = tmp_path_factory.mktemp("preferences") / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _logged(run: Run, name: str) -> list[float]:
    return [float(x) for x in re.findall(rf"iteration +\d+/.*?{name}: (\S+)", run.log)]


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ("--num-workers 2", 2),
        ("--context-parallel-size 2", 2),
        ("--tensor-model-parallel-size 2 --sequence-parallel", 2),
    ],
)
def test_pairs_in_packs_of_many_or_one(layout: str, ranks: int, runner: Runner, pairs: Path) -> None:
    """The reference holds one pair a pack: at most two samples in each."""
    reference = runner.train(FLAGS, "--max-seqlen-per-dp-cp-rank 128 --thd-max-packed-sequences 2", data=pairs)
    capacity = 256 if "context" not in layout else 128
    packed = runner.train(FLAGS, f"--max-seqlen-per-dp-cp-rank {capacity}", layout, data=pairs, ranks=ranks)
    assert max(len(pack) for step in reference.iterations for pack in step.packs[0]) == 2
    assert max(len(pack) for step in packed.iterations for pack in step.packs[0]) > 2
    assert [len(step.samples) for step in packed.iterations] == [14, 16, 16, 16]
    assert [step.samples for step in packed.iterations] == [step.samples for step in reference.iterations]
    assert [step.consumed_samples for step in packed.iterations] == [8, 16, 24, 32]
    mine, theirs = (_logged(run, "preference loss") for run in (packed, reference))
    assert len(mine) == len(set(mine)) == 4
    for one, other in zip(mine, theirs, strict=True):  # printed with 7 digits
        assert abs(one - other) <= 2 * tolerances.LOSS_PER_ITERATION * max(1.0, other)
    # Adam does not see the scale of a gradient; its norm does. Printed with three digits after the point.
    norms, expected = (_logged(run, "grad norm") for run in (packed, reference))
    assert min(norms) > 0.1
    assert norms == pytest.approx(expected, rel=1e-4, abs=2e-3)
