"""Groups of ranks chosen anew in every microbatch, against Megatron's own unpacked run: the same training."""

from pathlib import Path

import pytest

from tests.runs.harness import Runner
from tests.runs.test_equals_unpacked import PADDED, assert_same_training, later_wins

pytestmark = pytest.mark.run

# A rank holds half of what a sample may have, so that long samples need groups and short ones do not.
DYNAMIC = "--use-varlen-dataset --dynamic-context-parallel --max-seqlen-per-dp-cp-rank 32"

# name -> (flags of the packed run alone, flags of both, ranks)
CASES = {
    "2 ranks": ("", "", 2),
    "4 ranks": ("", "", 4),
    "learned positions": ("", "--position-embedding-type learned_absolute", 2),
    "full recompute": ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", "", 2),
    "distributed optimizer, overlap": (
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        "",
        4,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_dynamic_cp_equals_unpacked_run(name: str, runner: Runner, chats: Path) -> None:
    packed_only, both, ranks = CASES[name]
    reference = runner.train(PADDED, both, data=chats, ranks=ranks)
    assert_same_training(runner.train(later_wins(DYNAMIC, both, packed_only), data=chats, ranks=ranks), reference)
