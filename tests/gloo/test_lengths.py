import itertools
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_packing.comm.lengths import GatheredLengths
from tests import strategies
from tests.gloo import tasks
from tests.gloo.pool import GlooPool
from tests.gloo.tasks import Drawn

pytestmark = pytest.mark.gloo


def drawn(max_size: int = 6) -> st.SearchStrategy[Drawn]:
    """What one rank drew, often nothing."""
    return strategies.lengths(max_size=max_size).map(
        lambda lengths: Drawn(
            lengths=lengths,
            targets=[length // 2 for length in lengths],
            joined=[i > 0 and length % 3 == 0 for i, length in enumerate(lengths)],
            counters=(len(lengths), 10 * len(lengths)),
        )
    )


@given(of_rank=st.integers(1, 4).flatmap(lambda n: st.lists(drawn(), min_size=n, max_size=n)), limit=st.integers(1, 7))
@settings(max_examples=60, deadline=None)
def test_every_rank_leaves_with_the_same_list_rank_major(pool: GlooPool, of_rank: list[Drawn], limit: int) -> None:
    """`limit` may be below what a rank drew: then the lengths take a second collective."""
    ranks = len(of_rank)
    everyone = list(itertools.chain.from_iterable(d.lengths for d in of_rank))
    expected = {
        "lengths": tuple(everyone),
        "targets": tuple(length // 2 for length in everyone),
        "joined": tuple(joined for d in of_rank for joined in d.joined or ()),
        "counts": tuple(len(d.lengths) for d in of_rank),
        "counters": (len(everyone), 10 * len(everyone)),
    }
    assert pool.run(tasks.gather, ranks, limit, of_rank=of_rank, ranks=ranks) == [("returned", expected)] * ranks


def test_one_collective_does_unless_a_rank_drew_more_than_expected(pool: GlooPool) -> None:
    of_rank = [Drawn(lengths=[5, 3], targets=[1, 1]), Drawn(lengths=[], targets=[])]
    assert pool.run(tasks.count_collectives, 2, 2, of_rank=of_rank, ranks=2) == [1, 1]
    assert pool.run(tasks.count_collectives, 2, 1, of_rank=of_rank, ranks=2) == [2, 2]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_nothing_on_any_rank(pool: GlooPool, ranks: int) -> None:
    nothing = Drawn(lengths=[], targets=[])
    expected = {"lengths": (), "targets": (), "joined": (), "counts": (0,) * ranks, "counters": ()}
    answers = pool.run(tasks.gather, ranks, 3, of_rank=[nothing] * ranks, ranks=ranks)
    assert answers == [("returned", expected)] * ranks


def test_numbers_beyond_32_bits_arrive_whole(pool: GlooPool) -> None:
    large = Drawn(lengths=[2**40 + 1], targets=[2**40], counters=(2**50,))
    answers = pool.run(tasks.gather, 2, 1, of_rank=[large, large], ranks=2)
    expected = {
        "lengths": (2**40 + 1,) * 2,
        "targets": (2**40,) * 2,
        "joined": (False,) * 2,
        "counts": (1, 1),
        "counters": (2**51,),
    }
    assert answers == [("returned", expected)] * 2


@pytest.mark.parametrize(("ranks", "unlucky"), [(1, 0), (2, 1), (3, 0), (4, 2)])
def test_a_failure_on_one_rank_raises_on_all_with_its_text(pool: GlooPool, ranks: int, unlucky: int) -> None:
    of_rank = [Drawn(lengths=[5], targets=[1], counters=(1,))] * ranks
    of_rank[unlucky] = replace(of_rank[unlucky], lengths=[], targets=[], failure="no messages. Mend it: größer")
    answers = pool.run(tasks.gather, ranks, 1, of_rank=of_rank, ranks=ranks)
    own = "rows.jsonl:3: no messages. Mend it: größer"
    expected = [("PackingError", f"rank {unlucky} failed: {own}")] * ranks
    expected[unlucky] = ("SampleError", own)
    assert answers == expected


def test_several_failures_keep_their_own_and_tell_the_first(pool: GlooPool) -> None:
    well = Drawn(lengths=[5], targets=[1])
    bad = [Drawn(lengths=[], targets=[], failure=text) for text in ("one", "two")]
    answers = pool.run(tasks.gather, 4, 1, of_rank=[well, bad[0], well, bad[1]])
    told = ("PackingError", "rank 1 failed: rows.jsonl:3: one")
    assert answers == [told, ("SampleError", "rows.jsonl:3: one"), told, ("SampleError", "rows.jsonl:3: two")]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ranks_that_agree_pass(pool: GlooPool, ranks: int) -> None:
    for value in (0, 5, 2**63 - 1):
        answers = pool.run(tasks.agree, ranks, of_rank=[value] * ranks, ranks=ranks)
        assert answers == [("returned", None)] * ranks


@pytest.mark.parametrize("values", [(1, 2), (0, 0, 1), (2**63 - 1, 2**63 - 2, 2**63 - 1, 2**63 - 1)])
def test_ranks_that_disagree_all_raise(pool: GlooPool, values: tuple[int, ...]) -> None:
    ranks = len(values)
    answers = pool.run(tasks.agree, ranks, of_rank=values, ranks=ranks)
    assert len(set(answers)) == 1
    kind, text = answers[0]
    assert kind == "PackingError"
    told = re.search(r"^the answer differs between data-parallel ranks: (.*?)\. They must", text)
    assert told, text
    held = [re.fullmatch(r"rank ([\d, ]+): (\d+)", part).groups() for part in told[1].split("; ")]
    assert sorted((int(rank), int(value)) for ranks, value in held for rank in ranks.split(", ")) == list(
        enumerate(values)
    )
    counts = [len(ranks.split(", ")) for ranks, _ in held]
    assert counts == sorted(counts), "the odd one out first"


def test_a_rank_without_a_value_raises_on_all(pool: GlooPool) -> None:
    answers = pool.run(tasks.agree, 3, of_rank=[7, "no plan", 7], ranks=3)
    told = ("PackingError", "rank 1 failed: no plan")
    assert answers == [told, ("ValueError", "no plan"), told]
    assert pool.run(tasks.agree, 1, of_rank=["no plan"], ranks=1) == [("ValueError", "no plan")]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_without_a_failure_go_on(pool: GlooPool, ranks: int) -> None:
    assert pool.run(tasks.fail_together, ranks, of_rank=[None] * ranks, ranks=ranks) == [("returned", None)] * ranks


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_fail_together(pool: GlooPool, ranks: int) -> None:
    texts = [None] * (ranks - 1) + ["disk full"]
    answers = pool.run(tasks.fail_together, ranks, of_rank=texts, ranks=ranks)
    told = ("PackingError", f"rank {ranks - 1} failed: disk full")
    assert answers == [told] * (ranks - 1) + [("ValueError", "disk full")]


def test_failures_and_differences_name_global_ranks(pool: GlooPool) -> None:
    """In a group that is not the first ranks: its second member is rank 3."""
    told = pool.run(tasks.fail_and_differ_in_group, (1, 3))
    assert told[0] == told[2] == []
    for failed, differs in (told[1], told[3]):
        assert "rank 3: 3" in differs
        assert "rank 1: 1" in differs
        assert failed in ("rank 3 failed: disk full", "disk full")
    assert told[1][0] == "rank 3 failed: disk full"


def test_a_failure_without_a_text_raises_on_all(pool: GlooPool) -> None:
    answers = pool.run(tasks.fail_together, 2, of_rank=["", None], ranks=2)
    assert answers[0] == ("ValueError", "")
    kind, text = answers[1]
    assert kind == "PackingError"
    assert "without a message" in text


def test_a_long_text_is_cut_and_still_a_text(pool: GlooPool) -> None:
    text = "x" + "ä" * 2000  # two bytes each: the cut falls within a character
    answers = pool.run(tasks.fail_together, 2, of_rank=[text, None], ranks=2)
    assert answers[0] == ("ValueError", text)
    kind, told = answers[1]
    assert kind == "PackingError"
    assert told.startswith("rank 0 failed: xää")
    assert len(told) > 1000


def test_a_text_that_no_encoding_takes_keeps_nobody_waiting(pool: GlooPool) -> None:
    """Python gives undecodable bytes of a file name as lone surrogates."""
    answers = pool.run(tasks.fail_together, 2, of_rank=["caf\udce9.jsonl:3", None], ranks=2)
    assert answers[1] == ("PackingError", "rank 0 failed: caf\\udce9.jsonl:3")


def test_units_are_samples_and_those_joined_to_them() -> None:
    def units(*joined: bool) -> list[int]:
        zeros = (0,) * len(joined)
        return GatheredLengths(lengths=zeros, targets=zeros, joined=joined, counts=(len(joined),)).units()

    assert units() == []
    assert units(False, False) == [1, 1]
    assert units(False, True, False, True, True, False) == [2, 3, 1]
