"""Every rank of a model-parallel group gets its share of each pack, and no more than its stage uses."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gloo import tasks
from tests.gloo.pool import GlooPool
from tests.gloo.tasks import Layout, Made, Shared
from tests.gloo.test_exchange import samples

pytestmark = pytest.mark.gloo

# Groups that do not start at rank 0, or skip ranks, are what data and context parallelism make of the cluster.
LAYOUTS = {
    "tp2": Layout(tp=2, ranks=(0, 1)),
    "tp2-second-replica": Layout(tp=2, ranks=(2, 3)),
    "tp4": Layout(tp=4, ranks=(0, 1, 2, 3)),
    "pp2": Layout(tp=1, ranks=(0, 1)),
    "pp2-second-replica": Layout(tp=1, ranks=(1, 3)),
    "pp3": Layout(tp=1, ranks=(1, 2, 3)),
    "pp4": Layout(tp=1, ranks=(0, 1, 2, 3)),
    "tp2-pp2": Layout(tp=2, ranks=(0, 1, 2, 3)),
}
every_layout = pytest.mark.parametrize("layout", [pytest.param(value, id=name) for name, value in LAYOUTS.items()])
every_cp = pytest.mark.parametrize("cp", [(1, 0), (2, 0), (2, 1)], ids=["cp1", "cp2-first", "cp2-second"])

FIGURES = [3.0, 0.1, 2.0**52 + 1, -0.0]  # counts are exact up to 2**53, fractions to the bit


def made(*lengths: int, alignment: int = 1) -> Made:
    """A pack of samples in which every id occurs once; no lengths: a dummy."""
    ids = itertools.count(1)
    rows = [[(next(ids), next(ids), next(ids)) for _ in range(length)] for length in lengths]
    return Made(samples=tuple(tuple(map(list, zip(*one, strict=True))) for one in rows), alignment=alignment)


type Place = tuple[int, int]


def share(pool: GlooPool, layout: Layout, packs: list[Made], places: Place | list[Place]) -> dict[int, Shared]:
    """What each rank of the layout gets, once checked against the share cut from the pack itself.

    `places`: of each pack, the ranks that share it and which of them the layout's are; or the same for all.
    """
    places = places if isinstance(places, list) else [places] * len(packs)
    answers = dict(enumerate(pool.run(tasks.share, layout, packs, places, FIGURES)))
    for rank, (kind, shared) in answers.items():
        assert kind == ("returned" if rank in layout.ranks else "outside"), shared
        if rank not in layout.ranks:
            continue
        cut = [expected(pack, layout, rank, place) for pack, place in zip(packs, places, strict=True)]
        assert shared.shares == cut
        assert list(map(float.hex, shared.figures)) == list(map(float.hex, FIGURES))
    return {rank: answers[rank][1] for rank in layout.ranks}


def expected(pack: Made, layout: Layout, rank: int, place: Place) -> dict:
    """The share with the fields of the rank's stage: tokens on the first, labels and loss mask on the last."""
    whole = tasks.plain_share(pack.share(*place))
    unused = []
    if layout.stage(rank) != 0:
        unused += ["tokens_R"]
    if layout.stage(rank) != layout.pp - 1:
        unused += ["labels_R", "loss_mask_R"]
    return {**whole, **dict.fromkeys(unused, ("NoneType", None))}


@every_layout
def test_two_samples_reach_every_stage(pool: GlooPool, layout: Layout) -> None:
    """L3, spelled out."""
    pack = Made(samples=(([1, 2, 3, 4, 5], [2, 3, 4, 5, 6], [9] * 5), ([7, 8, 9], [8, 9, 10], [0, 9, 9])), alignment=1)
    for rank, shared in share(pool, layout, [pack], (1, 0)).items():
        (mine,) = shared.shares
        assert mine["cu_seqlens"] == mine["cu_seqlens_padded"] == ("torch.int32", [0, 5, 8])
        assert mine["one_object"]
        assert mine["max_seqlen"] == ("int", 5)
        assert mine["padding_mask_R"] == ("NoneType", None)
        positions = ("torch.int64", [0, 1, 2, 3, 4, 0, 1, 2])
        assert mine["position_ids_R"] == mine["pack_position_ids_T"] == positions
        first, last = layout.stage(rank) == 0, layout.stage(rank) == layout.pp - 1
        nothing = ("NoneType", None)
        assert mine["tokens_R"] == (("torch.int64", [1, 2, 3, 4, 5, 7, 8, 9]) if first else nothing)
        assert mine["labels_R"] == (("torch.int64", [2, 3, 4, 5, 6, 8, 9, 10]) if last else nothing)
        assert mine["loss_mask_R"] == (("torch.float32", [9, 9, 9, 9, 9, 0, 9, 9]) if last else nothing)


@every_cp
@every_layout
def test_padded_packs_plain_packs_and_dummies_of_one_step(pool: GlooPool, layout: Layout, cp: tuple[int, int]) -> None:
    packs = [made(7, 2, alignment=4), made(8, 4, alignment=4), made(alignment=4), made(1, alignment=16)]
    for shared in share(pool, layout, packs, cp).values():
        assert [one["one_object"] for one in shared.shares] == [False, True, True, False]
        assert [one["is_dummy"] for one in shared.shares] == [("bool", flag) for flag in (False, False, True, False)]
        assert shared.shares[0]["cu_seqlens"] == ("torch.int32", [0, 7, 9])
        assert shared.shares[0]["cu_seqlens_padded"] == ("torch.int32", [0, 8, 12])


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Made], list[Place]]:
    """Packs of one step, each shared by 1 to 3 ranks: any ids, labels and weights, padded or not, some dummies."""
    packs, places = [], []
    for pack in draw(st.lists(st.lists(samples, max_size=3), min_size=1, max_size=4)):
        cp_size = draw(st.integers(1, 3))
        alignment = (2 * cp_size if cp_size > 1 else 1) * draw(st.sampled_from([1, 1, 2]))
        packs.append(Made(samples=tuple(pack), alignment=alignment))
        places.append((cp_size, draw(st.integers(0, cp_size - 1))))
    return packs, places


@given(step=steps(), layout=st.sampled_from(list(LAYOUTS.values())))
@settings(max_examples=120, deadline=None)
def test_any_packs_arrive_as_they_are_cut(pool: GlooPool, step: tuple[list[Made], list[Place]], layout: Layout) -> None:
    share(pool, layout, *step)


@pytest.mark.parametrize("layout", [LAYOUTS["pp3"], LAYOUTS["pp4"], LAYOUTS["tp2-pp2"]])
def test_rows_go_only_where_they_are_used(pool: GlooPool, layout: Layout) -> None:
    """A pack of 10 times the rows costs a middle stage nothing, and every other rank its own fields once."""
    small, large = (share(pool, layout, [made(n, n), made(n)], (1, 0)) for n in (5, 50))
    rows = 3 * 45  # more in the large packs
    for rank in layout.ranks:
        more = [
            (name, big - little)
            for (name, little), (_, big) in zip(small[rank].calls, large[rank].calls, strict=True)
            if big != little
        ]
        over_tp = layout.tp > 1
        first_of_tp = layout.ranks.index(rank) % layout.tp == 0
        if layout.stage(rank) == 0:
            assert more == [("send", 2 * rows)] * first_of_tp + [("broadcast", rows)] * over_tp
        elif layout.is_middle(rank):
            assert more == []
            assert [name for name, _ in large[rank].calls] == ["broadcast", "broadcast"]  # header, boundaries
        else:
            assert more == [("recv", 2 * rows)] * first_of_tp + [("broadcast", 2 * rows)] * over_tp


def failed(pool: GlooPool, layout: Layout, text: str) -> list[str]:
    """What the ranks without packs are told, once the source has raised its own exception."""
    answers = pool.run(tasks.share, layout, [], [], FIGURES, text)
    assert answers[layout.source] == ("ValueError", text)
    others = [answers[rank] for rank in layout.ranks if rank != layout.source]
    assert [kind for kind, _ in others] == ["PackingError"] * len(others)
    return [told for _, told in others]


@every_layout
def test_a_failure_of_the_source_is_raised_everywhere_and_the_next_step_goes_on(pool: GlooPool, layout: Layout) -> None:
    text = "rows.jsonl:3: größer als ein Pack"
    assert set(failed(pool, layout, text)) == {f"rank {layout.source} failed: {text}"}
    share(pool, layout, [made(5, 3)], (1, 0))


def test_a_failure_without_a_text(pool: GlooPool) -> None:
    assert failed(pool, LAYOUTS["pp2"], "") == ["rank 0 failed: see its output."]


def test_a_long_text_is_cut_and_still_a_text(pool: GlooPool) -> None:
    (told,) = failed(pool, LAYOUTS["pp2"], "x" + "ä" * 2000)  # two bytes each: the cut falls within a character
    assert told.startswith("rank 0 failed: xää")
    assert 1000 < len(told) < 1100


def test_a_file_name_that_is_no_text_does_not_keep_the_others_waiting(pool: GlooPool) -> None:
    """Python gives undecodable bytes of a name as lone surrogates, which no encoding takes as they are."""
    (told,) = failed(pool, LAYOUTS["pp2"], "caf\udce9.jsonl:3: not JSON")
    assert told.startswith("rank 0 failed: caf")
    assert told.endswith(".jsonl:3: not JSON")


def test_a_step_without_packs_is_shared_too(pool: GlooPool) -> None:
    share(pool, LAYOUTS["tp2-pp2"], [], [])


@pytest.mark.parametrize("text", [None, "disk full"])
def test_a_single_rank_keeps_its_shares_and_its_failure(pool: GlooPool, text: str | None) -> None:
    alone = Layout(tp=1, ranks=(2,))
    pack = made(7, 2, alignment=4)
    kind, answer = pool.run(tasks.share, alone, [pack], [(2, 1)], FIGURES, text)[2]
    if text is not None:
        assert (kind, answer) == ("ValueError", text)
        return
    assert answer == Shared(shares=[tasks.plain_share(pack.share(2, 1))], figures=FIGURES, calls=[])
