"""What is a plan, and when is it right? Checking one is linear in its samples, 1 to 3 ms for 5,000.

A planner gets a `Problem` and answers with packs: lists of sample ids in the order in which they run, `dp` of them
to a microbatch. Pack `i` runs in microbatch `i // dp` on DP rank `i % dp`. A planner that also chooses which ranks
share a pack answers with `GroupedPacks`: of each microbatch the groups, in the order of the DP x CP ranks.

Legend: N samples, P packs; `padded` is a length rounded up to the topology's alignment. Where samples must share a
pack (`items`), planners see each unit of them as one sample; plans name the samples themselves.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, islice, pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from megatron_packing.errors import PackingError
from megatron_packing.schedule.cost import CostModel
from megatron_packing.schedule.groups import GroupSizes
from megatron_packing.schedule.items import Items, Units
from megatron_packing.topology import Topology

if TYPE_CHECKING:
    from megatron_packing.schedule.metrics import Metrics

type Lengths = Sequence[int] | npt.NDArray[np.integer]
type Int64Array = npt.NDArray[np.int64]


_POWERS_OF_TWO = GroupSizes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """The samples that one DP rank with its CP ranks, or one group of DP x CP ranks, runs at once."""

    sample_ids: tuple[int, ...]
    """Indices into the lengths that were planned, in the order in which the pack holds them. Empty: a dummy."""
    padded_tokens: int
    """Tokens that the pack runs. A dummy runs one unit of the topology's alignment, all of it padding."""
    cp_size: int | None = None
    """Ranks that share the pack, where the planner chose them; None: the topology's CP."""

    @property
    def is_dummy(self) -> bool:
        """Whether the pack holds no sample. It still runs, fully masked, so that every rank does equally many packs."""
        return not self.sample_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """One pack for every DP rank, or for every group of DP x CP ranks."""

    packs: tuple[Pack, ...]
    """`packs[r]` runs on DP rank `r`. Where the planner chose groups: on the next `cp_size` of the DP x CP ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All microbatches of one optimizer step, or of whatever set of samples was planned."""

    microbatches: tuple[Microbatch, ...]
    scheduler: str
    """Name of the planner, as in `SCHEDULERS`."""
    topology: Topology
    capacity: int
    """Padded tokens that a pack may hold: tokens per rank x CP. Of chosen groups see `capacity_of`."""
    max_seqs: int | None
    """Samples that a pack may hold; None means any number."""
    cost: CostModel
    """What the plan's metrics count as work."""
    lengths_digest: int
    """`digest_lengths` of the lengths that were planned: a plan of other lengths is another plan."""
    group_sizes: GroupSizes | None = None
    """Sizes that the planner could choose from, for the group of each pack; None: every pack has the topology's CP."""
    units: Units | None = None
    """Samples that must share a pack; None: none must."""
    plan_ms: float = field(default=0.0, compare=False)
    """Milliseconds that planning took here. Differs between ranks, so neither equality nor the digest sees it."""

    @property
    def num_microbatches(self) -> int:
        """Microbatches, which is the number of packs that every DP rank runs."""
        return len(self.microbatches)

    @property
    def max_tokens_per_rank(self) -> int:
        """Padded tokens that a rank may hold of a pack."""
        return self.capacity // self.topology.cp

    def capacity_of(self, pack: Pack) -> int:
        """Padded tokens that the ranks which share `pack` may hold."""
        return self.max_tokens_per_rank * self.cp_size_of(pack)

    def cp_size_of(self, pack: Pack) -> int:
        """Ranks that share `pack`."""
        return self.topology.cp if pack.cp_size is None else pack.cp_size

    @property
    def packs(self) -> tuple[Pack, ...]:
        """Every pack, dummies included, in the order in which they run."""
        return tuple(chain.from_iterable(microbatch.packs for microbatch in self.microbatches))

    def rank_packs(self, dp_rank: int) -> tuple[Pack, ...]:
        """The packs that one DP rank runs, in order.

        Raises:
            PackingError: there is no such rank, or groups are not those of DP ranks.
        """
        if self.group_sizes is not None:
            raise PackingError(
                f"scheduler {self.scheduler!r} chooses groups of DP x CP ranks anew in every microbatch, so DP rank "
                f"{dp_rank} has no packs of its own. Ask dp_cp_rank_packs."
            )
        if not 0 <= dp_rank < self.topology.dp:
            raise PackingError(f"dp_rank is {dp_rank}; this plan has DP ranks 0 to {self.topology.dp - 1}.")
        return tuple(microbatch.packs[dp_rank] for microbatch in self.microbatches)

    def dp_cp_rank_packs(self, rank: int) -> tuple[Pack, ...]:
        """The packs that one of the DP x CP ranks has a share of, in order: whatever the groups are.

        Raises:
            PackingError: there is no such rank.
        """
        ranks = self.topology.dp * self.topology.cp
        if not 0 <= rank < ranks:
            raise PackingError(f"rank is {rank}; this plan has DP x CP ranks 0 to {ranks - 1}.")
        return tuple(
            next(pack for pack, ranks in self.packs_with_ranks(microbatch) if rank in ranks)
            for microbatch in self.microbatches
        )

    def packs_with_ranks(self, microbatch: Microbatch) -> list[tuple[Pack, range]]:
        """Each pack of a microbatch with the DP x CP ranks that share it."""
        edges = accumulate((self.cp_size_of(pack) for pack in microbatch.packs), initial=0)
        return [(pack, range(*edge)) for pack, edge in zip(microbatch.packs, pairwise(edges), strict=True)]

    def digest(self) -> int:
        """63 bits of everything that ranks must agree on: equal plans give equal numbers on every machine.

        It fits in an int64 tensor and is never negative. Python's `hash` would not do: it is salted per process.
        """
        content = (
            self.scheduler,
            self.topology,
            self.capacity,
            self.max_seqs,
            # 1 and 1.0 are the same cost
            (float(self.cost.linear), float(self.cost.quadratic), float(self.cost.communication)),
            self.lengths_digest,
            self.group_sizes,
            self.units,
            [
                [(pack.padded_tokens, pack.cp_size, pack.sample_ids) for pack in microbatch.packs]
                for microbatch in self.microbatches
            ],
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

    items: Items
    """The samples, and which of them must share a pack."""
    lengths: Int64Array
    """Tokens of each sample, or unit of samples, shape [N], read-only."""
    padded: Int64Array
    """Padded tokens of each, shape [N], read-only."""
    topology: Topology
    capacity: int
    """Padded tokens that a pack may hold, and no planner may exceed."""
    max_seqs: int | None
    """How many of them a pack may hold; None means any number."""
    microbatch_multiple: int
    """The number of microbatches must be a multiple of this (interleaved pipelines ask for it)."""
    cost: CostModel
    balance: str
    """What planners that balance keep small: `step`, `lockstep`, or `auto`, which the topology decides."""
    group_sizes: GroupSizes = _POWERS_OF_TWO
    """For planners that choose groups."""

    @property
    def max_tokens_per_rank(self) -> int:
        """Padded tokens that a rank may hold of a pack."""
        return self.capacity // self.topology.cp

    def longest_first(self) -> Int64Array:
        """Places of the samples by padded tokens and then by work, both descending, equals in order; shape [N]."""
        if self.items.units is None:
            return np.argsort(-self.lengths, kind="stable")
        order: Int64Array = np.lexsort((-self.items.work(self.cost), -self.padded))
        return order

    @property
    def pack_multiple(self) -> int:
        """The number of packs must be a multiple of this."""
        return self.topology.dp * self.microbatch_multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedPacks:
    """What a planner answers with that chooses which ranks share a pack."""

    microbatches: list[list[tuple[int, list[int]]]]
    """Of each microbatch its groups in the order of the DP x CP ranks: (ranks, sample ids)."""


type Planner = Callable[[Problem], list[list[int]] | GroupedPacks]
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


def build_plan(
    packs: list[list[int]] | GroupedPacks, problem: Problem, scheduler: str, *, max_seqs: int | None
) -> Plan:
    """The plan that runs `packs` in order, not yet checked.

    Args:
        packs: what the planner answered.
        problem: what it was asked.
        scheduler: its name.
        max_seqs: samples that a pack may hold; None means any number.

    Raises:
        PackingError: a pack holds an id that is no sample's.
    """
    grouped = isinstance(packs, GroupedPacks)
    if isinstance(packs, GroupedPacks):
        rows: list[list[tuple[int | None, list[int]]]] = [list(groups) for groups in packs.microbatches]
    else:
        dp = problem.topology.dp
        rows = [[(None, ids) for ids in packs[i : i + dp]] for i in range(0, len(packs), dp)]
    ids_of_all = chain.from_iterable(ids for row in rows for _, ids in row)
    _check_known(np.fromiter(ids_of_all, dtype=np.int64), f"scheduler {scheduler!r}", len(problem.lengths))
    units = problem.items.units
    if units is not None:
        rows = [
            list(zip([size for size, _ in row], units.samples_of(ids for _, ids in row), strict=True)) for row in rows
        ]
    padded = _Padded(problem.topology, problem.items.lengths)
    return Plan(
        microbatches=tuple(
            Microbatch(
                packs=tuple(
                    Pack(
                        sample_ids=tuple(map(int, ids)),  # a planner may well hand back numpy's integers
                        padded_tokens=padded.tokens(ids, cp_size),
                        cp_size=None if cp_size is None else int(cp_size),
                    )
                    for cp_size, ids in row
                )
            )
            for row in rows
        ),
        scheduler=scheduler,
        topology=problem.topology,
        capacity=problem.capacity,
        max_seqs=max_seqs,
        cost=problem.cost,
        lengths_digest=digest_lengths(problem.items.lengths),
        group_sizes=problem.group_sizes if grouped else None,
        units=units,
    )


class _Padded:
    """What samples pad to, by the ranks that share them.

    Args:
        topology: gives the alignments.
        lengths: tokens of each sample, shape [N].
    """

    def __init__(self, topology: Topology, lengths: Int64Array) -> None:
        self._topology, self._lengths = topology, lengths
        self._by_cp: dict[int, list[int]] = {}

    def tokens(self, ids: Sequence[int], cp_size: int | None) -> int:
        """Padded tokens of a pack with these samples; of a dummy, one unit of the alignment."""
        cp = self._topology.cp if cp_size is None else cp_size
        alignment = self._topology.alignment_of(cp)
        if cp not in self._by_cp:
            self._by_cp[cp] = (-(-self._lengths // alignment) * alignment).tolist()
        padded = self._by_cp[cp]
        return sum(map(padded.__getitem__, ids)) if len(ids) else alignment


def check_plan(plan: Plan, lengths: Lengths, max_seqs: int | None = None, microbatch_multiple: int = 1) -> None:
    """Nothing, if every rank may run `plan`.

    Planners can be a user's own, so a wrong plan is an error with a message and not a failed assertion.

    Args:
        plan: what a planner made.
        lengths: the lengths that were planned, in tokens.
        max_seqs: samples that a pack may hold; None means any number.
        microbatch_multiple: what the number of microbatches must be a multiple of.

    Raises:
        PackingError: a sample runs twice or never, a pack holds too much or a part of a unit, ranks run different
            numbers of packs, the number of microbatches is no positive multiple, or the plan was made of other lengths.
    """
    who = f"scheduler {plan.scheduler!r}"
    lengths = as_lengths(lengths)
    if plan.lengths_digest != digest_lengths(lengths):
        raise PackingError(f"{who}: the plan was made of other lengths than these {lengths.size}; hand in the same.")
    _check_counts(plan, who, microbatch_multiple)
    _check_exactly_once(plan, who, lengths.size)
    if plan.units is not None:
        _check_together(plan, plan.units, who)
    _check_packs(plan, who, lengths, max_seqs)


def _check_counts(plan: Plan, who: str, microbatch_multiple: int) -> None:
    for m, microbatch in enumerate(plan.microbatches):
        if plan.group_sizes is not None:
            _check_groups(plan, plan.group_sizes, microbatch, f"{who}: microbatch {m}")
        elif len(microbatch.packs) != plan.topology.dp:
            raise PackingError(
                f"{who}: microbatch {m} has {len(microbatch.packs)} packs; it must have one for each of "
                f"{plan.topology.dp} DP ranks. Split packs or add dummies: even_counts does both."
            )
        elif any(pack.cp_size is not None for pack in microbatch.packs):
            raise PackingError(f"{who}: microbatch {m} has packs with a cp_size, but the plan has no group_sizes.")
    if plan.num_microbatches < 1 or plan.num_microbatches % microbatch_multiple:
        raise PackingError(
            f"{who}: the plan has {plan.num_microbatches} microbatches; it must have a positive multiple of "
            f"{microbatch_multiple}. Split packs or add dummies: even_counts does both."
        )


def _check_groups(plan: Plan, sizes: GroupSizes, microbatch: Microbatch, where: str) -> None:
    """Every DP x CP rank is in exactly one group of an allowed size, which begins where such a group may."""
    ranks = plan.topology.dp * plan.topology.cp
    allowed, first = sizes.of(ranks), 0
    for pack in microbatch.packs:
        if pack.cp_size not in allowed:
            raise PackingError(f"{where} has a group of {pack.cp_size} ranks; the sizes are {allowed}.")
        if not sizes.is_aligned(first, pack.cp_size):
            raise PackingError(
                f"{where} has a group of {pack.cp_size} ranks at rank {first}; it must begin at a multiple of its size."
            )
        first += pack.cp_size
    if first != ranks:
        raise PackingError(f"{where} has groups of {first} ranks in all; there are {ranks} DP x CP ranks.")


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


def _check_together(plan: Plan, units: Units, who: str) -> None:
    pack_of = {sample: number for number, pack in enumerate(plan.packs) for sample in pack.sample_ids}
    for end, size in zip(units.ends, units.sizes, strict=True):
        if len({pack_of[sample] for sample in range(end - size, end)}) > 1:
            raise PackingError(f"{who}: samples {end - size} to {end - 1} must share a pack; the plan parts them.")


def _check_packs(plan: Plan, who: str, lengths: Int64Array, max_seqs: int | None) -> None:
    padded = _Padded(plan.topology, lengths)
    for m, microbatch in enumerate(plan.microbatches):
        for i, pack in enumerate(microbatch.packs):
            place = "DP rank" if plan.group_sizes is None else "group"
            where = f"{who}: the pack of microbatch {m}, {place} {i}"
            tokens, capacity = padded.tokens(pack.sample_ids, pack.cp_size), plan.capacity_of(pack)
            if pack.padded_tokens != tokens:
                raise PackingError(f"{where} says {pack.padded_tokens:,} padded tokens; its samples make {tokens:,}.")
            if tokens > capacity:
                raise PackingError(f"{where} holds {tokens:,} padded tokens; the capacity is {capacity:,}.")
            if max_seqs is not None and len(pack.sample_ids) > max_seqs:
                raise PackingError(f"{where} holds {len(pack.sample_ids)} samples; max_seqs is {max_seqs}.")
