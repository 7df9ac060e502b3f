import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_packing.config import FP8_ROWS
from megatron_packing.errors import ConfigError
from megatron_packing.topology import Topology
from tests.strategies import topologies


@pytest.mark.parametrize(
    ("topology", "alignment"),
    [
        (Topology(), 1),
        (Topology(tp=4), 1),
        (Topology(tp=4, sequence_parallel=True), 4),
        (Topology(cp=2), 4),
        (Topology(cp=8), 16),
        (Topology(cp=2, tp=2, sequence_parallel=True), 8),
        (Topology(cp=2, tp=4, sequence_parallel=True), 16),
        (Topology(dp=8, pp=4, vpp=2, ep=8), 1),
    ],
)
def test_alignment(topology: Topology, alignment: int) -> None:
    assert topology.alignment == alignment


@pytest.mark.parametrize("cp", [1, 2])
def test_29_tokens_pad_to_32_on_four_sequence_parallel_ranks(cp: int) -> None:
    assert Topology(cp=cp, tp=4, sequence_parallel=True).pad(29) == 32


@pytest.mark.parametrize(
    ("recipe", "cp", "rows"),
    [
        *((None, 1, 32), ("delayed", 1, 64), ("tensorwise", 1, 64), ("mxfp8", 1, 128), ("blockwise", 1, 512)),
        *((None, 2, 32), ("delayed", 2, 128), ("tensorwise", 2, 128), ("mxfp8", 2, 256), ("blockwise", 2, 1024)),
    ],
)
def test_a_pack_of_29_tokens_is_filled_up_to_what_its_recipe_asks_of_each_rank(
    recipe: str | None, cp: int, rows: int
) -> None:
    quantized_rows = 1 if recipe is None else FP8_ROWS[recipe]
    topology = Topology(cp=cp, tp=4, sequence_parallel=True, quantized_rows=quantized_rows)
    assert topology.pad(29) == 32, "a sample alone is not padded for it"
    assert -(-topology.pad(29) // topology.pack_alignment) * topology.pack_alignment == rows
    assert rows // (cp * 4) % quantized_rows == 0
    assert rows % topology.alignment == 0
    with pytest.raises(ConfigError, match=f"multiple of the alignment {topology.pack_alignment:,}"):
        topology.check_capacity(rows // cp + 1)


def test_without_sequence_parallelism_every_tensor_parallel_rank_holds_all_rows() -> None:
    assert Topology(tp=4, quantized_rows=32).pack_alignment == 32
    assert Topology(tp=4, cp=2, quantized_rows=1).pack_alignment == 4


def test_cp_8_pads_one_token_to_two_rows_a_rank() -> None:
    assert Topology(cp=8).pad(1) == 16


@given(topologies(), st.integers(1, 2**40))
def test_pad_is_the_next_multiple(topology: Topology, length: int) -> None:
    padded = topology.pad(length)
    assert padded % topology.alignment == 0
    assert length <= padded < length + topology.alignment


def test_world_size_counts_every_rank_once() -> None:
    assert Topology(dp=2, cp=3, tp=5, pp=7, vpp=2, ep=2).world_size == 210


@pytest.mark.parametrize("name", ["dp", "cp", "tp", "pp", "vpp", "ep", "quantized_rows"])
@pytest.mark.parametrize("size", [0, -1, 1.0, True, "2", None])
def test_a_size_that_counts_no_ranks_is_refused(name: str, size: object) -> None:
    with pytest.raises(ConfigError, match=rf"Topology\.{name} is {size!r}.*at least 1"):
        Topology(**{name: size})  # type: ignore[arg-type]
