"""What is a plan, and when is it right? Checking one is linear in its samples, 1 to 3 ms for 5,000.

A planner gets a `Problem` and answers with packs: lists of sample ids in the order in which they run, `dp` of them
to a microbatch. Pack `i` runs in microbatch `i // dp` on DP rank `i % dp`.

Legend: N samples, P packs; `padded` is a length rounded up to the topology's alignment.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from megatron_packing.errors import PackingError
from megatron_packing.schedule.cost import CostModel
from megatron_packing.topology import Topology

if TYPE_CHECKING:
    from megatron_packing.schedule.metrics import Metrics

type Lengths = Sequence[int] | npt.NDArray[np.integer]
type Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """The samples that one DP rank, with its CP group, runs at once."""

    sample_ids: tuple[int, ...]
    """Indices into the lengths that were planned, in the order in which the pack holds them. Empty: a dummy."""
    padded_tokens: int
    """Tokens that the pack runs. A dummy runs one unit of the topology's alignment, all of it padding."""

    @property
    def is_dummy(self) -> bool:
        """Whether the pack holds no sample. It still runs, fully masked, so that every rank does equally many packs."""
        return not self.sample_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """One pack for every DP rank."""

    packs: tuple[Pack, ...]
    """`packs[r]` runs on DP rank `r`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All microbatches of one optimizer step, or of whatever set of samples was planned."""

    microbatches: tuple[Microbatch, ...]
    scheduler: str
    """Name of the planner, as in `SCHEDULERS`."""
    topology: Topology
    capacity: int
    """Padded tokens that a pack may hold: tokens per rank x CP."""
    max_seqs: int | None
    """Samples that a pack may hold; None means any number."""
    cost: CostModel
    """What the plan's metrics count as work."""
    lengths_digest: int
    """`digest_lengths` of the lengths that were planned: a plan of other lengths is another plan."""
    plan_ms: float = field(default=0.0, compare=False)
    """Milliseconds that planning took here. Differs between ranks, so neither equality nor the digest sees it."""

    @property
    def num_microbatches(self) -> int:
        """Microbatches, which is the number of packs that every DP rank runs."""
        return len(self.microbatches)

    @property
    def packs(self) -> tuple[Pack, ...]:
        """Every pack, dummies included, in the order in which they run."""
        return tuple(chain.from_iterable(microbatch.packs for microbatch in self.microbatches))

    def rank_packs(self, dp_rank: int) -> tuple[Pack, ...]:
        """The packs that one DP rank runs, in order.

        Raises:
            PackingError: there is no such rank.
        """
        if not 0 <= dp_rank < self.topology.dp:
            raise PackingError(f"dp_rank is {dp_rank}; this plan has DP ranks 0 to {self.topology.dp - 1}.")
        return tuple(microbatch.packs[dp_rank] for microbatch in self.microbatches)

    def digest(self) -> int:
        """63 bits of everything that ranks must agree on: equal plans give equal numbers on every machine.

        It fits in an int64 tensor and is never negative. Python's `hash` would not do: it is salted per process.
        """
        content = (
            self.scheduler,
            self.topology,
            self.capacity,
            self.max_seqs,
            (float(self.cost.linear), float(self.cost.quadratic)),  # 1 and 1.0 are the same cost
            self.lengths_digest,
            [[(pack.padded_tokens, pack.sample_ids) for pack in microbatch.packs] for microbatch in self.microbatches],
        )
        return _hash63(repr(content).encode())

    def metrics(self, lengths: Lengths, *, dropped: int = 0) -> "Metrics":
        """What the plan costs; see `megatron_packing.schedule.metrics.Metrics`.

        Args:
            lengths: the lengths that were planned, in tokens.
            dropped: samples that were left out before planning; reported, not computed.

        Raises:
            PackingError: these are not the lengths that were planned.
        """
        from megatron_packing.schedule.metrics import measure  # metrics are made from plans: not at import time

        return measure(self, lengths, dropped=dropped)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """What a planner has to solve. Validated by `make_plan`: every padded length fits in a pack."""

    lengths: Int64Array
    """Tokens of each sample, shape [N], read-only."""
    padded: Int64Array
    """Padded tokens of each sample, shape [N], read-only."""
    topology: Topology
    capacity: int
    """Padded tokens that a pack may hold, and no planner may exceed."""
    max_seqs: int | None
    """Samples that a pack may hold; None means any number."""
    microbatch_multiple: int
    """The number of microbatches must be a multiple of this (interleaved pipelines ask for it)."""
    cost: CostModel
    balance: str
    """What planners that balance keep small: `step`, `lockstep`, or `auto`, which the topology decides."""

    @property
    def pack_multiple(self) -> int:
        """The number of packs must be a multiple of this."""
        return self.topology.dp * self.microbatch_multiple


type Planner = Callable[[Problem], list[list[int]]]
type Cuts = Callable[[list[list[int]], list[int]], Iterator[tuple[int, int]]]


def even_counts(packs: list[list[int]], problem: Problem, cuts: Cuts) -> list[list[int]]:
    """`packs`, changed in place until their number is a positive multiple of `problem.pack_multiple`.

    Packs are split first, so that every rank has something to learn from; dummies (empty lists) fill what is left.

    Args:
        packs: sample ids of each pack.
        problem: gives the multiple and the padded lengths.
        cuts: the policy. Called as `cuts(packs, padded)`, it yields (index of a pack, position to cut it at) for as
            long as a pack can be cut; between two yields the pack has lost its tail, which stands at the end of
            `packs` as a pack of its own.
    """
    multiple = problem.pack_multiple
    wanted = max(1, -(-len(packs) // multiple)) * multiple
    for index, position in islice(cuts(packs, problem.padded.tolist()), wanted - len(packs)):
        packs.append(packs[index][position:])
        del packs[index][position:]
    packs.extend([] for _ in range(wanted - len(packs)))
    return packs


def as_lengths(lengths: Lengths) -> Int64Array:
    """A private, read-only int64 copy of `lengths`, shape [N].

    Raises:
        PackingError: not a flat row of integers that are at least 1 and fit in 64 bits; the message names the first.
    """
    try:
        given = np.asarray(lengths)
    except ValueError as error:
        raise PackingError("lengths must be one flat row of integers; its rows differ in size.") from error
    if given.ndim != 1:
        raise PackingError(f"lengths has {given.ndim} dimensions; it must be one flat row, a count of tokens a sample.")
    if given.size == 0:
        given = given.astype(np.int64)
    if given.dtype.kind not in "iu":
        raise PackingError(f"lengths are of type {given.dtype}; they count tokens and must be integers of 64 bits.")
    wrong = np.flatnonzero((given < 1) | (given > np.iinfo(np.int64).max))
    if wrong.size:
        raise PackingError(
            f"lengths[{wrong[0]}] is {given[wrong[0]]}; it counts tokens and must be at least 1 and fit in 64 bits "
            f"({wrong.size} such). Leave samples without tokens out."
        )
    copy = given.astype(np.int64)
    copy.setflags(write=False)
    return copy


def digest_lengths(lengths: Int64Array) -> int:
    """63 bits that stand for `lengths`, the same on every machine."""
    return _hash63(lengths.astype("<i8").tobytes())


def _hash63(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") >> 1


def build_plan(packs: list[list[int]], problem: Problem, scheduler: str) -> Plan:
    """The plan that runs `packs` in order, not yet checked.

    Raises:
        PackingError: a pack holds an id that is no sample's.
    """
    dp, padded = problem.topology.dp, problem.padded.tolist()
    _check_known(np.fromiter(chain.from_iterable(packs), dtype=np.int64), f"scheduler {scheduler!r}", len(padded))
    built = [
        Pack(
            sample_ids=tuple(map(int, ids)),  # a planner may well hand back numpy's integers
            padded_tokens=sum(padded[i] for i in ids) if ids else problem.topology.alignment,
        )
        for ids in packs
    ]
    return Plan(
        microbatches=tuple(Microbatch(packs=tuple(built[i : i + dp])) for i in range(0, len(built), dp)),
        scheduler=scheduler,
        topology=problem.topology,
        capacity=problem.capacity,
        max_seqs=problem.max_seqs,
        cost=problem.cost,
        lengths_digest=digest_lengths(problem.lengths),
    )


def check_plan(plan: Plan, lengths: Lengths, max_seqs: int | None = None, microbatch_multiple: int = 1) -> None:
    """Nothing, if every rank may run `plan`.

    Planners can be a user's own, so a wrong plan is an error with a message and not a failed assertion.

    Args:
        plan: what a planner made.
        lengths: the lengths that were planned, in tokens.
        max_seqs: samples that a pack may hold; None means any number.
        microbatch_multiple: what the number of microbatches must be a multiple of.

    Raises:
        PackingError: a sample runs twice or never, a pack holds too much, ranks run different numbers of packs, the
            number of microbatches is no positive multiple, or the plan was made of other lengths.
    """
    who = f"scheduler {plan.scheduler!r}"
    lengths = as_lengths(lengths)
    if plan.lengths_digest != digest_lengths(lengths):
        raise PackingError(f"{who}: the plan was made of other lengths than these {lengths.size}; hand in the same.")
    _check_counts(plan, who, microbatch_multiple)
    _check_exactly_once(plan, who, lengths.size)
    _check_packs(plan, who, lengths, max_seqs)


def _check_counts(plan: Plan, who: str, microbatch_multiple: int) -> None:
    for m, microbatch in enumerate(plan.microbatches):
        if len(microbatch.packs) != plan.topology.dp:
            raise PackingError(
                f"{who}: microbatch {m} has {len(microbatch.packs)} packs; it must have one for each of "
                f"{plan.topology.dp} DP ranks. Split packs or add dummies: even_counts does both."
            )
    if plan.num_microbatches < 1 or plan.num_microbatches % microbatch_multiple:
        raise PackingError(
            f"{who}: the plan has {plan.num_microbatches} microbatches; it must have a positive multiple of "
            f"{microbatch_multiple}. Split packs or add dummies: even_counts does both."
        )


def _check_exactly_once(plan: Plan, who: str, num_samples: int) -> None:
    ids = np.fromiter(chain.from_iterable(pack.sample_ids for pack in plan.packs), dtype=np.int64)
    _check_known(ids, who, num_samples)
    # Counts and not set sizes: a set cannot see that one sample runs twice.
    times = np.bincount(ids, minlength=num_samples)
    wrong = np.flatnonzero(times != 1)
    if wrong.size:
        raise PackingError(
            f"{who}: sample {wrong[0]} is in the plan {times[wrong[0]]} times; every sample must be in it exactly "
            f"once ({wrong.size} are not)."
        )


def _check_known(ids: Int64Array, who: str, num_samples: int) -> None:
    foreign = ids[(ids < 0) | (ids >= num_samples)]
    if foreign.size:
        raise PackingError(f"{who}: sample id {foreign[0]} is none of the {num_samples} samples, counted from 0.")


def _check_packs(plan: Plan, who: str, lengths: Int64Array, max_seqs: int | None) -> None:
    alignment = plan.topology.alignment
    padded = (-(-lengths // alignment) * alignment).tolist()
    for i, pack in enumerate(plan.packs):
        where = f"{who}: the pack of microbatch {i // plan.topology.dp}, DP rank {i % plan.topology.dp}"
        tokens = alignment if pack.is_dummy else sum(padded[s] for s in pack.sample_ids)
        if pack.padded_tokens != tokens:
            raise PackingError(f"{where} says {pack.padded_tokens:,} padded tokens; its samples make {tokens:,}.")
        if tokens > plan.capacity:
            raise PackingError(f"{where} holds {tokens:,} padded tokens; the capacity is {plan.capacity:,}.")
        if max_seqs is not None and len(pack.sample_ids) > max_seqs:
            raise PackingError(f"{where} holds {len(pack.sample_ids)} samples; max_seqs is {max_seqs}.")
