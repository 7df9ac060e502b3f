"""Groups of ranks chosen anew in every microbatch, on Transformer Engine's attention: against Megatron's unpacked run.

Of each call of its attention the group, its ranks, the stream and the way of exchange are looked at as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_packing.mcore import te_versions
from megatron_packing.mcore.te_versions import CP_COMM_TYPES
from tests.runs import test_dynamic_cp as ours
from tests.runs.harness import ROOT, Run, Runner
from tests.runs.test_dynamic_cp import CP2, DYNAMIC, LEARNED, ON_FOUR, SHORT, STEPS, few_chats  # noqa: F401
from tests.runs.test_equals_unpacked import PADDED, assert_same_training, later_wins
from tests.runs.test_layouts import DISTRIBUTED, RECOMPUTE
from tests.te.test_training import FUSED, UNFUSED, calls_of

pytestmark = pytest.mark.run

SCRIPT = f"--packing-attention te --own-script {ROOT / 'tests' / 'te' / 'groups_pretrain.py'}"
WINDOW = "--window-size 8,0"
VERSION = te_versions.installed() or "0.0"
NEWEST = "all_gather" if CP_COMM_TYPES["all_gather"].is_in(VERSION) else "a2a"
"""What knows a window; the older version has but one."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run with groups that change."""

    flags: str = ""
    """Of both runs."""
    packed_only: str
    ranks: int
    kinds: Sequence[str]
    """How each layer's ranks exchange keys and values."""


CASES = {
    "DP4, recompute, distributed optimizer": Case(
        packed_only=f"{ON_FOUR} {RECOMPUTE} {DISTRIBUTED}", ranks=4, kinds=("p2p", "p2p")
    ),
    "DP2, each layer its own way": Case(packed_only="--cp-comm-type p2p a2a", ranks=2, kinds=("p2p", "a2a")),
    "CP2, a window": Case(flags=WINDOW, packed_only=f"{CP2} --cp-comm-type {NEWEST}", ranks=2, kinds=(NEWEST, NEWEST)),
}


@pytest.mark.parametrize("name", CASES)
def test_groups_that_change_equal_the_unpacked_run(name: str, runner: Runner, few_chats: Path) -> None:  # noqa: F811
    case = CASES[name]
    reference = runner.train(later_wins(PADDED, case.flags, SHORT), data=few_chats)
    packed = runner.train(
        later_wins(DYNAMIC, case.flags, case.packed_only, SHORT), SCRIPT, data=few_chats, ranks=case.ranks
    )
    assert_same_training(packed, reference, STEPS, LEARNED)
    ours.assert_same_validation(packed, reference)
    assert_calls_follow_the_packs(packed, case)


@pytest.mark.parametrize("name", ours.CASES)
def test_so_do_the_layouts_of_our_own_attention(
    name: str,
    runner: Runner,
    few_chats: Path,  # noqa: F811
    request: pytest.FixtureRequest,
) -> None:
    if not request.config.getoption("--all-layouts"):
        pytest.skip("--all-layouts runs them")
    case = ours.CASES[name]
    reference = runner.train(later_wins(PADDED, case.flags, SHORT), data=few_chats, ranks=case.reference_ranks)
    flags = later_wins(DYNAMIC, case.flags, case.packed_only, SHORT)
    assert_same_training(runner.train(flags, SCRIPT, data=few_chats, ranks=case.ranks), reference, STEPS, LEARNED)


def assert_calls_follow_the_packs(run: Run, case: Case) -> None:
    """All ranks of a group make a call with that group and with the same pack; each size of a group occurs."""
    ranks = [calls_of(run, rank) for rank in range(case.ranks)]
    assert [rank["kernels"] for rank in ranks] == [[FUSED, UNFUSED]] * case.ranks
    sizes = set()
    for calls in zip(*(rank["calls"] for rank in ranks), strict=True):
        for rank, call in enumerate(calls):
            assert rank in call["group"]
            assert call["kind"] == case.kinds[call["layer"] - 1]
            assert all(calls[other] == call for other in call["group"]), "a group that not all of its ranks are in"
            sizes.add(len(call["group"]))
    assert sizes == {1, 2, case.ranks}
