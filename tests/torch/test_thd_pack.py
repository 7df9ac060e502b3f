import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_packing.errors import CapacityError, PackingError
from megatron_packing.thd import PackedBatch, SampleTensors, build_pack, dummy_pack
from megatron_packing.thd.pack import boundaries_of
from megatron_packing.topology import Topology
from tests import strategies
from tests.torch.toys import numbered, sample

LARGEST = 2**31 - 1  # what an int32 boundary can say


def taken_apart(pack: PackedBatch) -> list[SampleTensors]:
    starts, lengths = pack.cu_seqlens_padded.tolist(), pack.cu_seqlens.diff().tolist()
    cuts = [slice(start, start + length) for start, length in zip(starts, lengths, strict=False)]
    return [
        SampleTensors(tokens_L=pack.tokens_T[cut], labels_L=pack.labels_T[cut], loss_mask_L=pack.loss_mask_T[cut])
        for cut in cuts
    ]


def as_lists(samples: list[SampleTensors]) -> list[tuple[list[int], list[int], list[float]]]:
    return [(s.tokens_L.tolist(), s.labels_L.tolist(), s.loss_mask_L.tolist()) for s in samples]


packs = st.tuples(st.lists(st.integers(1, 40), min_size=1, max_size=8), strategies.topologies())


def test_the_end_of_one_sample_never_predicts_the_start_of_the_next() -> None:
    a = sample([11, 12, 21, 22], [12, 21, 22, 7], [0, 1, 1, 1])
    b = sample([13, 23], [23, 7], [1, 1])
    pack = build_pack([a, b], alignment=1)
    assert pack.tokens_T.tolist() == [11, 12, 21, 22, 13, 23]
    assert pack.labels_T.tolist() == [12, 21, 22, 7, 23, 7]
    assert pack.loss_mask_T.tolist() == [0, 1, 1, 1, 1, 1]
    assert pack.cu_seqlens.tolist() == [0, 4, 6]
    pairs = set(zip(pack.tokens_T.tolist(), pack.labels_T.tolist(), strict=True))
    assert (22, 13) not in pairs
    assert (7, 13) not in pairs


def test_layout_of_padded_samples() -> None:
    pack = build_pack(numbered([7, 2]), alignment=Topology(cp=2).alignment)
    assert pack.cu_seqlens.tolist() == [0, 7, 9]
    assert pack.cu_seqlens_padded.tolist() == [0, 8, 12]
    assert pack.tokens_T.tolist() == [1, 2, 3, 4, 5, 6, 7, 0, 8, 9, 0, 0]
    assert pack.position_ids_T.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 0, 1, 0, 0]
    assert pack.padding_mask_T().tolist() == [False] * 7 + [True] + [False] * 2 + [True] * 2
    assert pack.max_seqlen == 8
    assert (pack.num_samples, pack.num_rows, pack.is_padded, pack.is_dummy) == (2, 12, True, False)


def test_one_token_under_cp_8() -> None:
    pack = build_pack(numbered([1]), alignment=Topology(cp=8).alignment)
    assert pack.cu_seqlens.tolist() == [0, 1]
    assert pack.cu_seqlens_padded.tolist() == [0, 16]
    assert int(pack.padding_mask_T().sum()) == 15


@given(case=packs)
@settings(max_examples=60)
def test_packing_then_taking_apart_is_the_identity(case: tuple[list[int], Topology]) -> None:
    lengths, topology = case
    samples = numbered(lengths)
    pack = build_pack(samples, alignment=topology.alignment)
    assert as_lists(taken_apart(pack)) == as_lists(samples)
    assert pack.num_samples == len(lengths)


@given(case=packs)
@settings(max_examples=60)
def test_every_row_is_a_sample_s_or_masked_padding(case: tuple[list[int], Topology]) -> None:
    lengths, topology = case
    pack = build_pack(numbered(lengths), alignment=topology.alignment)
    positions, is_padding = [], []
    for length in lengths:
        padding = topology.pad(length) - length
        positions += [*range(length), *[0] * padding]
        is_padding += [False] * length + [True] * padding
    assert pack.position_ids_T.tolist() == positions
    assert pack.padding_mask_T().tolist() == is_padding
    padding_T = pack.padding_mask_T()
    for field in (pack.tokens_T, pack.labels_T, pack.loss_mask_T):
        assert not field[padding_T].any()
        assert field[~padding_T].all()  # the samples hold no zero: nothing real was lost


@given(case=packs)
@settings(max_examples=60)
def test_types_and_boundaries_are_what_kernels_ask_for(case: tuple[list[int], Topology]) -> None:
    lengths, topology = case
    pack = build_pack(numbered(lengths), alignment=topology.alignment)
    padded = [topology.pad(length) for length in lengths]
    assert pack.cu_seqlens.tolist() == [0, *itertools.accumulate(lengths)]
    assert pack.cu_seqlens_padded.tolist() == [0, *itertools.accumulate(padded)]
    assert (pack.cu_seqlens is pack.cu_seqlens_padded) == (lengths == padded)
    assert pack.cu_seqlens.dtype == pack.cu_seqlens_padded.dtype == torch.int32
    assert pack.tokens_T.dtype == pack.labels_T.dtype == pack.position_ids_T.dtype == torch.int64
    assert pack.loss_mask_T.dtype == torch.float32
    assert type(pack.max_seqlen) is int
    assert pack.max_seqlen == max(padded)


def test_a_pack_shares_no_memory_with_its_samples() -> None:
    for lengths in ([3], [3, 2]):
        samples = numbered(lengths)
        pack = build_pack(samples, alignment=1)
        for field in (pack.tokens_T, pack.labels_T, pack.loss_mask_T):
            field.fill_(99)
        assert as_lists(samples) == as_lists(numbered(lengths))


@pytest.mark.parametrize("alignment", [1, 4, 16])
def test_a_dummy_runs_and_teaches_nothing(alignment: int) -> None:
    dummy = dummy_pack(alignment=alignment)
    assert dummy.is_dummy
    assert dummy.num_rows == dummy.max_seqlen == alignment
    assert dummy.num_samples == 0
    assert not dummy.loss_mask_T.any()
    assert dummy.cu_seqlens is dummy.cu_seqlens_padded
    assert dummy.cu_seqlens.tolist() == [0, alignment]
    assert dummy.to("cpu").is_dummy


def test_boundaries_up_to_the_largest_int32() -> None:
    assert boundaries_of([LARGEST - 1, 1]).tolist() == [0, LARGEST - 1, LARGEST]
    # Sums of numpy's own integers would wrap silently on the way.
    assert boundaries_of(np.array([2**30, 2**30 - 1], dtype=np.int32)).tolist() == [0, 2**30, LARGEST]


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param([2**31], id="one"),
        pytest.param([LARGEST, 1], id="two"),
        pytest.param([2**30] * 4, id="wraps-to-zero"),
        pytest.param(np.array([2**30, 2**30], dtype=np.int32), id="numpy-int32"),
        pytest.param(torch.tensor([2**62, 2**62]), id="wraps-in-int64"),
    ],
)
def test_a_total_beyond_int32_is_an_error_and_no_wrap(lengths: list[int]) -> None:
    with pytest.raises(CapacityError, match=r"does not fit in int32.*2147483647.*--max-seqlen-per-dp-cp-rank"):
        boundaries_of(lengths)


@pytest.mark.parametrize(("length", "copies", "alignment"), [(2**30, 2, 1), (LARGEST, 1, 4)])
def test_a_pack_beyond_int32_is_refused_before_its_tensors_exist(length: int, copies: int, alignment: int) -> None:
    one = torch.zeros(1, dtype=torch.int64).expand(length)  # one number in memory, whatever its length
    huge = SampleTensors(tokens_L=one, labels_L=one, loss_mask_L=one)
    with pytest.raises(CapacityError, match="does not fit in int32"):
        build_pack([huge] * copies, alignment=alignment)


def test_nothing_is_no_pack() -> None:
    with pytest.raises(PackingError, match="at least one sample; use dummy_pack"):
        build_pack([], alignment=1)


def test_an_empty_sample_cannot_be_packed() -> None:
    with pytest.raises(PackingError, match="a sample of 0 tokens cannot be packed; drop it"):
        build_pack([*numbered([3]), sample([], [], [])], alignment=1)


def test_a_sample_s_fields_are_equally_long() -> None:
    with pytest.raises(PackingError, match=r"equally long; they are \(2,\), \(1,\) and \(2,\)"):
        sample([1, 2], [3], [1, 1])
    two_dimensional = torch.zeros(1, 2)
    with pytest.raises(PackingError, match="one-dimensional"):
        SampleTensors(tokens_L=two_dimensional, labels_L=two_dimensional, loss_mask_L=two_dimensional)


def test_targets_are_counted_by_position_and_not_by_weight() -> None:
    assert sample([1, 2, 3], [2, 3, 4], [0, 0.25, 0.5]).targets == 2
