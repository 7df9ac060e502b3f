"""A whole step, from what each rank draws to the packs that it runs."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_packing.config import PackingConfig
from megatron_packing.schedule import make_plan
from megatron_packing.topology import Topology
from tests.gloo import tasks
from tests.gloo.pool import GlooPool
from tests.gloo.tasks import Packs, Row

pytestmark = pytest.mark.gloo

CAPACITY = 8


def config(topology: int | Topology, **changes: object) -> PackingConfig:
    """Settings for a number of data-parallel ranks, or a topology."""
    topology = Topology(dp=topology) if isinstance(topology, int) else topology
    values = {"seq_length": CAPACITY, "scheduler": "first_fit", "max_tokens_per_rank": CAPACITY, **changes}
    return PackingConfig(topology=topology, **values)  # type: ignore[arg-type]


def rows(*lengths: int | None) -> list[Row]:
    """Samples of these lengths, of tokens that occur nowhere else; None is a row that was dropped."""
    return [
        Row(dropped="no_targets") if length is None else Row(length=length, first=100 * (i + 1))
        for i, length in enumerate(lengths)
    ]


def shared_out(drawn: list[Row], ranks: int) -> list[list[Row]]:
    """As Megatron's sampler does: each rank takes the same number of consecutive rows."""
    each = len(drawn) // ranks
    assert each * ranks == len(drawn)
    return [drawn[rank * each : (rank + 1) * each] for rank in range(ranks)]


def pack_step(pool: GlooPool, of_rank: list[list[Row]], asked: PackingConfig | None = None) -> list[Packs]:
    """The packs of one step on each rank."""
    ranks = len(of_rank)
    steps = [[step] for step in of_rank]
    answers = pool.run(tasks.pack_steps, asked or config(ranks), ranks, of_rank=steps, ranks=ranks)
    assert [kind for ((kind, _),) in answers] == ["returned"] * ranks, answers
    return [packs for ((_, packs),) in answers]


def samples_in(packs: Sequence[Packs]) -> Counter[tuple[int, ...]]:
    """The real samples in all packs of all ranks; each is checked to be whole: labels and weights still its own."""
    found: Counter[tuple[int, ...]] = Counter()
    for of_rank in packs:
        fields = zip(of_rank.tokens, of_rank.labels, of_rank.loss_mask, of_rank.boundaries, strict=True)
        for (tokens, labels, mask, boundaries), is_dummy in zip(fields, of_rank.is_dummy, strict=True):
            assert len(tokens) <= CAPACITY
            assert is_dummy == (not any(mask))
            if is_dummy:
                continue
            assert labels == [token + 1 for token in tokens]
            assert mask == [1.0] * len(tokens)
            found.update(tuple(tokens[a:b]) for a, b in itertools.pairwise(boundaries))
    return found


def samples_of(drawn: Sequence[Row]) -> Counter[tuple[int, ...]]:
    return Counter(tuple(range(row.first, row.first + row.length)) for row in drawn if row.dropped is None)


def check_step(drawn: list[list[Row]], packs: list[Packs]) -> None:
    """What every step keeps: the samples, equal counts, one plan, the same figures on all ranks."""
    assert samples_in(packs) == samples_of(list(itertools.chain.from_iterable(drawn)))
    assert len({len(of_rank.tokens) for of_rank in packs}) == 1
    assert len({of_rank.digest for of_rank in packs}) == 1
    measured = {"plan_ms", "exchange_ms", "waited_ms"}
    figures = [{k: v for k, v in of_rank.figures.items() if k not in measured} for of_rank in packs]
    assert all(of_rank == figures[0] for of_rank in figures)
    assert figures[0]["microbatches"] == len(packs[0].tokens)
    assert figures[0]["dummies"] == sum(sum(of_rank.is_dummy) for of_rank in packs)


def test_three_full_packs_become_two_a_rank(pool: GlooPool) -> None:
    drawn = shared_out(rows(8, 8, 4, 4), 2)
    packs = pack_step(pool, drawn)
    check_step(drawn, packs)
    assert [len(of_rank.tokens) for of_rank in packs] == [2, 2]
    assert not any(packs[0].is_dummy + packs[1].is_dummy)
    assert sorted(len(tokens) for of_rank in packs for tokens in of_rank.tokens) == [4, 4, 8, 8]
    assert packs[0].figures["fill"] == 24 / 32
    assert packs[0].figures["padding_tokens"] == 0


def test_a_dropped_row_leaves_a_dummy_that_teaches_nothing(pool: GlooPool) -> None:
    drawn = shared_out(rows(8, None, 8, 4), 2)
    packs = pack_step(pool, drawn)
    check_step(drawn, packs)
    assert [len(of_rank.tokens) for of_rank in packs] == [2, 2]
    assert sum(packs[0].is_dummy + packs[1].is_dummy) == 1
    figures = packs[0].figures
    assert (figures["samples"], figures["dropped"], figures["targets"], figures["real_tokens"]) == (3, 1, 20, 20)
    assert figures["padding_tokens"] == 1  # the dummy's one row
    assert [of_rank.lost for of_rank in packs] == [{"no_targets": 1}] * 2


def test_packs_of_one_shape_count_the_tails_that_run(pool: GlooPool) -> None:
    """Four packs of 8 rows, one of them a dummy; the samples fill 14 rows."""
    drawn = shared_out(rows(8, None, 1, 5), 2)
    packs = pack_step(pool, drawn, config(2, max_tokens_per_rank=8, pad_alignment="max", max_seqs=2))
    of_all = list(itertools.chain.from_iterable(zip(p.tokens, p.loss_mask, p.boundaries, strict=True) for p in packs))
    assert {(len(tokens), len(mask), len(boundaries)) for tokens, mask, boundaries in of_all} == {(8, 8, 3)}
    assert sorted(sum(mask) for _, mask, _ in of_all) == [0, 1, 5, 8], "a pack of two segments holds one sample"
    figures = packs[0].figures
    assert (figures["packs"], figures["dummies"], figures["real_tokens"]) == (4, 1, 14)
    assert figures["padding_tokens"] == 4 * 8 - 14
    assert figures["fill"] == 14 / 32
    assert sum(figures[name] for name in ("fill", "alignment_waste", "tail_waste", "dummy_waste")) == 1


def test_every_row_of_a_step_dropped(pool: GlooPool) -> None:
    drawn = shared_out(rows(None, None, None, None), 2)
    packs = pack_step(pool, drawn)
    check_step(drawn, packs)
    assert [of_rank.is_dummy for of_rank in packs] == [[True], [True]]
    assert packs[0].figures["targets"] == 0


def test_a_rank_without_samples_is_given_some(pool: GlooPool) -> None:
    drawn = shared_out(rows(None, None, 8, 8), 2)
    packs = pack_step(pool, drawn)
    check_step(drawn, packs)
    assert [of_rank.is_dummy for of_rank in packs] == [[False], [False]]


def test_one_rank_without_a_group(pool: GlooPool) -> None:
    drawn = [rows(8, 3, None, 5)]
    packs = pack_step(pool, drawn)
    check_step(drawn, packs)
    assert sorted(len(tokens) for tokens in packs[0].tokens) == [8, 8]
    assert packs[0].figures["fill"] == 1.0


@given(
    lengths=st.lists(st.one_of(st.integers(1, CAPACITY), st.none()), min_size=1, max_size=12), ranks=st.integers(1, 4)
)
@settings(max_examples=50, deadline=None)
@pytest.mark.parametrize("scheduler", ["first_fit", "dp_balanced", "balanced"])
def test_packs_are_the_planner_s_and_hold_the_drawn_samples(
    pool: GlooPool, scheduler: str, lengths: list[int | None], ranks: int
) -> None:
    drawn = shared_out(rows(*lengths, *[None] * (-len(lengths) % ranks)), ranks)
    asked = config(ranks, scheduler=scheduler)
    packs = pack_step(pool, drawn, asked)
    check_step(drawn, packs)
    kept = [row for row in itertools.chain.from_iterable(drawn) if row.dropped is None]
    plan = make_plan([row.length for row in kept], scheduler, asked.topology, CAPACITY, cost=tasks.COST)
    for rank, of_rank in enumerate(packs):
        expected = [
            [token for i in pack.sample_ids for token in range(kept[i].first, kept[i].first + kept[i].length)] or [0]
            for pack in plan.rank_packs(rank)
        ]
        assert of_rank.tokens == expected
        assert of_rank.digest == plan.digest()


def test_losses_are_counted_by_reason_over_all_ranks_and_told_with_their_first_rows(pool: GlooPool) -> None:
    empty, cut = Row(first=1, dropped="empty"), Row(length=4, first=100, truncated=True)
    of_first = [[cut, empty], rows(4, 4), [empty, empty], [empty, empty], rows(4, 4)]
    of_second = [
        [empty, *rows(4)],
        rows(4, 4),
        [Row(first=2, dropped="bad_json"), empty],
        [empty, *rows(4)],
        rows(4, 4),
    ]
    answers = pool.run(tasks.pack_steps, config(2), 2, of_rank=[of_first, of_second], ranks=2)
    for steps in answers:
        packs = [step for _, step in steps]
        assert [step.lost for step in packs] == [
            {"empty": 2, "truncated": 1},
            {},
            {"empty": 3, "bad_json": 1},
            {"empty": 3},
            {},
        ]
        figures = [(step.figures["dropped"], step.figures["truncated"]) for step in packs]
        assert figures == [(2, 1), (0, 0), (4, 0), (3, 0), (0, 0)]
        assert packs[0].news == [("truncated", "100: cut"), ("empty", "1: bad"), ("empty", "1: bad")]
        assert packs[2].news == [("empty", "1: bad"), ("bad_json", "2: bad")]
        # Only a step with something new to tell pays for it.
        assert [step.collectives for step in packs] == [1, 0, 1, 0, 0]


LOST_ROWS = st.lists(st.one_of(st.none(), st.sampled_from(["empty", "no_targets", "bad_json", "own"])), min_size=2)


@given(steps=st.lists(LOST_ROWS, min_size=1, max_size=6), ranks=st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_every_lost_row_is_counted_once_and_at_most_three_of_a_reason_are_told(
    pool: GlooPool, steps: list[list[str | None]], ranks: int
) -> None:
    even = [[*step, *[None] * (-len(step) % ranks)] for step in steps]
    drawn = [[Row(dropped=reason) if reason else Row(length=2) for reason in step] for step in even]
    of_rank = [[step[rank::ranks] for step in drawn] for rank in range(ranks)]
    answers = pool.run(tasks.pack_steps, config(ranks), ranks, of_rank=of_rank, ranks=ranks)
    everything = Counter(reason for step in steps for reason in step if reason)
    for packs in ([step for _, step in of_one] for of_one in answers):
        assert [step.lost for step in packs] == [dict(Counter(filter(None, step))) for step in steps]
        told = Counter(reason for step in packs for reason, _ in step.news)
        assert told == {reason: min(count, 3) for reason, count in everything.items()}


def test_a_reason_of_its_own_for_every_row_does_not_make_steps_grow(pool: GlooPool) -> None:
    steps = [[Row(dropped=f"row {50 * step + place}") for place in range(50)] for step in range(4)]
    answers = pool.run(tasks.pack_steps, config(2), 2, of_rank=[steps, steps], ranks=2)
    for packs in ([step for _, step in of_one] for of_one in answers):
        assert [step.lost.get("other", 0) for step in packs] == [0, 0, 100, 100]
        assert [sum(step.lost.values()) for step in packs] == [100] * 4
        assert [step.collectives for step in packs] == [1, 1, 1, 0]


def test_texts_of_any_length_reach_every_rank(pool: GlooPool) -> None:
    texts = ["", "a" * 5000 + "\u2603", "b\udcff.jsonl"]
    assert pool.run(tasks.gather_texts, 3, of_rank=texts, ranks=3) == [texts] * 3


# --- rows whose samples must share a pack ---------------------------------------------------------


def pair(first: int, chosen: int, rejected: int) -> Row:
    """Two samples of these lengths, of tokens that occur nowhere else."""
    return Row(together=(Row(length=chosen, first=first), Row(length=rejected, first=first + 50)))


@given(
    lengths=st.lists(
        st.one_of(st.none(), st.tuples(st.integers(1, CAPACITY // 2), st.integers(1, CAPACITY // 2))),
        min_size=1,
        max_size=10,
    ),
    ranks=st.integers(1, 4),
    max_seqs=st.one_of(st.none(), st.integers(2, 5)),
)
@settings(max_examples=50, deadline=None)
@pytest.mark.parametrize("scheduler", ["first_fit", "dp_balanced"])
def test_pairs_are_never_parted(
    pool: GlooPool, scheduler: str, lengths: list[tuple[int, int] | None], ranks: int, max_seqs: int | None
) -> None:
    rows_ = [Row(dropped="no_targets") if two is None else pair(100 * i, *two) for i, two in enumerate(lengths, 1)]
    drawn = shared_out([*rows_, *[Row(dropped="empty")] * (-len(rows_) % ranks)], ranks)
    packs = pack_step(pool, drawn, config(ranks, scheduler=scheduler, max_seqs=max_seqs))
    check_step([[part for row in of_rank for part in (row.together or (row,))] for of_rank in drawn], packs)
    for of_rank in packs:
        for tokens, edges, is_dummy in zip(of_rank.tokens, of_rank.boundaries, of_rank.is_dummy, strict=True):
            starts = [] if is_dummy else [tokens[edge] for edge in edges[:-1]]
            assert len(starts) <= (max_seqs or len(starts))
            assert [start + 50 for start in starts[0::2]] == starts[1::2], "chosen and rejected, one after the other"
            assert all(start % 100 == 0 for start in starts[0::2])


def test_pairs_and_single_samples_in_one_step(pool: GlooPool) -> None:
    """Padded to 4, the pair takes all 8 tokens of a pack."""
    asked = replace(config(2), topology=Topology(dp=2, cp=2), max_tokens_per_rank=4)
    drawn = [[pair(100, 3, 1)], [Row(length=5, first=300)]]
    packs = pack_step(pool, drawn, asked)
    assert [of_rank.boundaries for of_rank in packs] == [[[0, 3, 4]], [[0, 5]]]
    assert packs[0].figures["samples"] == 3
    assert packs[0].figures["padding_tokens"] == 1 + 3 + 3
    drawn = [[pair(100, 3, 1), Row(length=4, first=300)], [Row(length=4, first=400), Row(length=4, first=500)]]
    for of_rank in pack_step(pool, drawn, asked):
        assert max(map(len, of_rank.tokens)) <= CAPACITY


def test_a_pair_that_does_not_fit_stops_every_rank(pool: GlooPool) -> None:
    drawn = [[[pair(100, 5, 4)]], [[pair(300, 1, 1)]]]
    for ((kind, text),) in pool.run(tasks.pack_steps, config(2), 2, of_rank=drawn, ranks=2):
        assert kind == "CapacityError"
        assert "Samples 0 to 1, which must share a pack, have 9 padded tokens" in text
    for ((kind, text),) in pool.run(tasks.pack_steps, config(2, max_seqs=1), 2, of_rank=drawn, ranks=2):
        assert kind == "ConfigError"
        assert "--thd-max-packed-sequences 1: 2 samples of one row must share a pack" in text


def test_a_row_that_cannot_be_read_stops_every_rank(pool: GlooPool) -> None:
    of_rank = [[rows(4, 4)], [[*rows(4), Row(raises="is cut short")]]]
    answers = pool.run(tasks.pack_steps, config(2), 2, of_rank=of_rank, ranks=2)
    assert answers[0] == [("PackingError", "rank 1 failed: rows.jsonl:3: is cut short")]
    assert answers[1] == [("SampleError", "rows.jsonl:3: is cut short")]


def test_a_sample_longer_than_a_pack_stops_every_rank(pool: GlooPool) -> None:
    answers = pool.run(tasks.pack_steps, config(2), 2, of_rank=[[rows(4, 4)], [rows(4, 9)]], ranks=2)
    for ((kind, text),) in answers:
        assert kind == "CapacityError"
        assert "Sample 3 has 9 tokens" in text


def test_data_that_ends_within_a_step_stops_every_rank(pool: GlooPool) -> None:
    counts_and_rows = [rows(4, 4), rows(4)]
    answers = pool.run(
        tasks.pack_more_than_there_is, config(2), 2, of_rank=[(2, drawn) for drawn in counts_and_rows], ranks=2
    )
    text = "the data ended in the middle of a step; lower --train-iters or add rows."
    assert answers == [("PackingError", f"rank 1 failed: {text}"), ("PackingError", text)]


def test_ranks_under_different_settings_do_not_train_on_two_plans(pool: GlooPool) -> None:
    same = config(2)
    assert pool.run(tasks.pack_under, rows(4, 4), 2, of_rank=[same, same], ranks=2) == [("returned", 4)] * 2
    for other in (replace(same, max_seqs=1), replace(same, scheduler="dp_balanced")):
        answers = pool.run(tasks.pack_under, rows(4, 4), 2, of_rank=[same, other], ranks=2)
        for kind, text in answers:
            assert kind == "PackingError"
            assert text.startswith("the plan of this step differs between data-parallel ranks")
