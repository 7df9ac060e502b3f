"""Is what `plan` advises the best of what it looked at, and true of the plans themselves?"""

import numpy as np
import pytest

from megatron_packing.cli.capacity_advice import Advice, advise
from megatron_packing.cli.planning import Setting
from megatron_packing.schedule import ATTENTION_ONLY, GroupSizes, make_plan, mean_metrics
from megatron_packing.topology import Topology

TOKENS = 1024


def setting(topology: Topology, tokens: int = TOKENS) -> Setting:
    return Setting(
        topology=topology,
        max_tokens_per_rank=tokens,
        seq_length=tokens * topology.cp,
        max_seqs=None,
        cost=ATTENTION_ONLY,
        balance="auto",
        group_sizes=GroupSizes(),
        widest_cp=topology.cp,
    )


def drawn(longest: int, steps: int = 3, samples: int = 64) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [np.clip(rng.lognormal(4.5, 1.0, samples).astype(np.int64), 8, longest) for _ in range(steps)]


def advised(steps: list[np.ndarray], topology: Topology, tokens: int = TOKENS) -> Advice:
    advice = advise(steps, setting(topology, tokens))
    assert advice is not None
    return advice


@pytest.mark.parametrize("topology", [Topology(dp=4), Topology(dp=4, ep=2), Topology(dp=2, cp=2, tp=2)])
def test_every_choice_is_what_its_plans_give(topology: Topology) -> None:
    steps = drawn(TOKENS)
    advice = advised(steps, topology)
    assert advice.balance == ("lockstep" if topology.ep > 1 else "step")
    ranks = topology.dp * topology.cp
    for choice in advice.choices:
        assert choice.dp * choice.cp == ranks
        cut = Topology(dp=choice.dp, cp=choice.cp, tp=topology.tp, ep=topology.ep)
        plans = [make_plan(step, choice.scheduler, cut, choice.max_tokens_per_rank) for step in steps]
        mean = mean_metrics([plan.metrics(step) for plan, step in zip(plans, steps, strict=True)])
        expected = mean.lockstep_imbalance if topology.ep > 1 else mean.step_imbalance
        assert choice.imbalance == pytest.approx(expected)
        assert choice.microbatches_per_rank == mean.microbatches_per_rank
    assert advice.best.memory <= 1
    assert advice.best.imbalance <= 1.05 * min(one.imbalance for one in advice.choices if one.memory <= 1)
    if advice.less_memory is not None:
        assert advice.less_memory.memory == 0.5


def test_a_sample_too_long_for_one_rank_needs_context_parallelism() -> None:
    advice = advised([*drawn(2 * TOKENS, samples=32), np.full(32, 2 * TOKENS)], Topology(dp=1, cp=4))
    assert min(one.cp for one in advice.choices if one.memory == 1) == 2
    assert advice.best.cp >= 2
    assert "exchanges keys and values" in advice.in_words()[-1]
    assert any(one.cp == 1 and one.memory == 2 for one in advice.choices)


def test_twice_the_memory_is_worth_a_word_only_where_it_buys_something() -> None:
    equal = [np.full(64, 16)] * 2
    advice = advised(equal, Topology(dp=2))
    assert advice.more_memory is None
    assert advice.in_words()[-1].startswith("Twice the memory would make no step shorter")
    needs_two = advised([np.full(8, TOKENS + 1)], Topology(dp=1, cp=2))
    assert needs_two.best.cp == 2
    assert needs_two.more_memory is not None
    assert (needs_two.more_memory.cp, needs_two.more_memory.memory) == (1, 2)
    assert "With twice the memory: --max-seqlen-per-dp-cp-rank 2048 --context-parallel-size 1" in " ".join(
        needs_two.in_words()
    )


def test_a_larger_cp_is_not_advised_for_little() -> None:
    """CP 2 would shorten these steps by less than 5 %: its exchange in every layer costs more."""
    advice = advised([np.array([540, *[512] * 7])], Topology(dp=4))
    at_two = min(one.imbalance for one in advice.choices if one.cp == 2 and one.memory <= 1)
    assert at_two < advice.best.imbalance < 1.05 * at_two
    assert advice.best.cp == 1


def test_whole_sets_and_samples_that_fit_nowhere_get_no_advice() -> None:
    assert advise([np.full(20_001, 8)], setting(Topology(dp=2))) is None
    assert advise([np.full(2, 8 * TOKENS)], setting(Topology(dp=2))) is None
