"""Which inputs must the package cope with? Hypothesis strategies that every tier of tests shares.

Sizes are small on purpose: with capacities of a few alignment units, packs fill up, samples fail to fit and dummies
appear within a handful of samples, and a failing example stays readable.
"""

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from megatron_packing.schedule import Plan, make_plan
from megatron_packing.topology import Topology


@st.composite
def topologies(draw: st.DrawFn, max_dp: int = 4) -> Topology:
    """Small clusters, with and without context and sequence parallelism."""
    return Topology(
        dp=draw(st.integers(1, max_dp)),
        cp=draw(st.sampled_from([1, 1, 2, 3, 4])),
        tp=draw(st.sampled_from([1, 2, 4])),
        sequence_parallel=draw(st.booleans()),
    )


def lengths(max_length: int = 64, max_size: int = 24) -> st.SearchStrategy[list[int]]:
    """Lengths of samples in tokens, often equal to each other or at the limit."""
    one = st.one_of(st.integers(1, max_length), st.sampled_from([1, max_length, (max_length + 1) // 2]))
    return st.lists(one, max_size=max_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningCase:
    """Arguments of `make_plan` that it must accept."""

    lengths: list[int]
    topology: Topology
    max_tokens_per_rank: int
    max_seqs: int | None
    microbatch_multiple: int

    @property
    def capacity(self) -> int:
        return self.max_tokens_per_rank * self.topology.cp


def plan_case(case: PlanningCase, scheduler: str, **more: Any) -> Plan:
    """The plan of a case; `more` goes to `make_plan`."""
    return make_plan(
        case.lengths,
        scheduler,
        case.topology,
        case.max_tokens_per_rank,
        max_seqs=case.max_seqs,
        microbatch_multiple=case.microbatch_multiple,
        **more,
    )


@st.composite
def planning_cases(draw: st.DrawFn) -> PlanningCase:
    """Lengths that fit, on any topology, with a capacity of 1 to 8 alignment units."""
    topology = draw(topologies())
    # CP divides the alignment except where CP is 1, so this many tokens per rank always give a valid capacity.
    max_tokens_per_rank = topology.alignment // topology.cp * draw(st.integers(1, 8))
    return PlanningCase(
        lengths=draw(lengths(max_length=max_tokens_per_rank * topology.cp)),
        topology=topology,
        max_tokens_per_rank=max_tokens_per_rank,
        max_seqs=draw(st.sampled_from([None, None, 1, 2, 5])),
        microbatch_multiple=draw(st.sampled_from([1, 1, 2, 3])),
    )
