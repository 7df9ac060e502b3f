"""Which packs, and which rank runs them when, so that no rank waits for another? 1 to 3 ms for 512 samples on 8 ranks.

Attention makes a long sample dearer than many short ones of as many tokens, so packs that are equally full are not
equally slow. What a step takes depends on when ranks meet:

step       once, after their last microbatch (dense data parallelism): the dearest rank's cost over the step
lockstep   in every microbatch (experts, sharded parameters; pipelines nearly): the dearest rank's cost in each, summed

The best of one is seldom the best of the other, so `Problem.balance` chooses. Both keep to the fewest microbatches in
which the samples fit, and both start from `lockstep.fill_rows`, swept over how strict it is; `step` goes on with
`step.share_out` and trades samples between ranks. The lower bounds say when to stop.

Everything works on lengths in descending order and on costs as integers: sample ids break ties and nothing else, and no
sum is rounded, so that every rank and machine makes the same plan.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from megatron_packing.errors import ConfigError
from megatron_packing.schedule.bounds import lockstep_lower_bound, packs_lower_bound, step_lower_bound
from megatron_packing.schedule.plan import Problem
from megatron_packing.topology import Topology

type Int64Array = npt.NDArray[np.int64]

BALANCES = ("auto", "step", "lockstep")
"""What `make_plan` can be asked to keep small; auto: what fits the topology."""

# Constructions are tried with the loosest first; see `lockstep.fill_rows`. More values give no better plans.
_LOOSENESS = (1e9, 4.0, 2.5, 2.0, 1.8, 1.6, 1.4, 1.2, 1.1, 1.05, 1.02, 1.0)
_RICHNESS = (1e9, 3.0, 2.0, 1.5)
_GOOD_ENOUGH = 5e-4
"""Over a lower bound: where to stop looking."""
_SWEEP_WORK = 1_000_000
"""Samples x ranks that a sweep may look at, 2 to 3 ms: large steps get fewer constructions, but all loosenesses."""
_FIT_WORK = 20_000_000
"""Bins squared times placings that the search for a way into the fewest microbatches may take, about 20 ms; rarely
needed at all."""
_FIT_TRIES = 20_000
"""Placings that it may take where bins are few."""
_SHARE_WORK = 20_000_000
"""Samples x bins up to which samples are shared out and traded. With more, the rows alone level the ranks."""
_TRADE_TRIES = 1_000_000
"""Pairs of samples that trading may look at, about 10 ms; few steps need more than a tenth of them."""
_COST_BITS = 46
"""Costs are scaled to a total below 2**46: sums are exact, also as floats, and a looseness of 4 stays within int64."""


def objective(balance: str, topology: Topology) -> str:
    """`step` or `lockstep`: what `balance` means on this topology.

    Raises:
        ConfigError: it is none of `BALANCES`.
    """
    if balance not in BALANCES:
        raise ConfigError(f"balance is {balance!r}; set --packing-balance to one of: {', '.join(BALANCES)}.")
    if balance != "auto":
        return balance
    return "lockstep" if topology.pp > 1 or topology.ep > 1 or topology.fsdp else "step"


def balanced(problem: Problem) -> list[list[int]]:
    """Samples in the fewest microbatches that hold them, ranks alike in cost; pipelines run cheap microbatches at both
    ends.
    """
    if not len(problem.padded):
        return [[] for _ in range(problem.pack_multiple)]
    lockstep = objective(problem.balance, problem.topology) == "lockstep"
    step, bin_of = _fewest_microbatches(problem, thoroughly=lockstep)
    bin_of = step.in_rows(bin_of)
    if not lockstep:
        bin_of = step.step_bins(bin_of)
    packs = step.packs(bin_of)
    return packs if problem.topology.pp == 1 else cheap_at_both_ends(packs, problem.topology.dp)


def warm_up() -> None:
    """Compile what `balanced` needs, or load it: 10 s of CPU the first time on a machine, then 0.6 s a process."""
    from megatron_packing.schedule import lockstep, step

    one = np.ones(1, dtype=np.int64)
    bin_of, _, _ = lockstep.fill_rows(one, one, 1, 1, 1, 1, 1.0, 1.0, True)
    lockstep.search_fit(one, 1, 1, 1, 1)
    rank_of = step.share_out(one, one, 1, 1, 1)
    step.fill_ranks(one, one, rank_of, 1, 1, 1, 1)
    step.trade(one, one, bin_of, 1, 1, 1, 1, 0, 1)


def cheap_at_both_ends(packs: list[list[int]], dp: int) -> list[list[int]]:
    """The order for pipelines of packs whose microbatches come dearest first.

    A pipeline's last stage idles until the first microbatch has come through all stages, and its first stage after the
    last one's backward pass has left it; in between a stage waits where neighbours differ. So costs rise to the middle
    and fall from there.
    """
    cheapest_first = [packs[i : i + dp] for i in range(0, len(packs), dp)][::-1]
    return [pack for row in cheapest_first[::2] + cheapest_first[1::2][::-1] for pack in row]


def _fewest_microbatches(problem: Problem, *, thoroughly: bool) -> tuple["_Step", Int64Array]:
    """The step with the fewest microbatches in which a way was found to fit the samples, and that way: their bins.

    Args:
        thoroughly: whether the way must be as good as can be, or is only where `step_bins` starts.
    """
    samples = _Samples.of(problem)
    packs = packs_lower_bound(problem.padded, problem.capacity, problem.max_seqs)
    microbatches = max(1, -(-packs // problem.pack_multiple)) * problem.microbatch_multiple
    while True:  # ends: with a bin for each sample there is a way
        step = _Step(samples=samples, microbatches=microbatches)
        bin_of = step.lockstep_bins(thoroughly=thoroughly)
        if bin_of is not None:
            return step, bin_of
        microbatches += problem.microbatch_multiple


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Samples:
    """The samples of a problem, longest first, and what binds them."""

    ids_N: Int64Array
    tokens_N: Int64Array
    """Padded."""
    costs_N: Int64Array
    """Scaled to integers; descending, because more tokens of one sample never cost less. Of units they may."""
    ranks: int
    capacity: int
    most: int
    """Samples that a pack may hold."""

    @classmethod
    def of(cls, problem: Problem) -> "_Samples":
        ids_N = problem.longest_first()
        costs_N = problem.items.work(problem.cost)[ids_N]
        if not costs_N.any():
            costs_N = problem.padded[ids_N].astype(np.float64)  # nothing costs anything: level the tokens
        spare_bits = _COST_BITS - math.frexp(costs_N.max())[1] - len(ids_N).bit_length()
        return cls(
            ids_N=ids_N,
            tokens_N=problem.padded[ids_N],
            costs_N=np.rint(np.ldexp(costs_N, spare_bits)).astype(np.int64),
            ranks=problem.topology.dp,
            capacity=min(problem.capacity, int(problem.padded.sum())),
            most=problem.max_seqs or len(ids_N),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Step:
    """Samples that must go in `ranks` x `microbatches` bins."""

    samples: _Samples
    microbatches: int

    def lockstep_bins(self, *, thoroughly: bool) -> Int64Array | None:
        """The bin of each sample, with the least lockstep cost that was found; None if they do not fit."""
        found = _Sweep(step=self, good_enough=self._goal(self._lockstep_bound())).best(thoroughly=thoroughly)
        if found is not None:
            return found
        from megatron_packing.schedule import lockstep

        samples = self.samples
        bins = samples.ranks * self.microbatches
        tries = min(_FIT_TRIES, _FIT_WORK // bins**2)
        bin_of = lockstep.search_fit(samples.tokens_N, bins, samples.capacity, samples.most, tries)
        return None if bin_of[-1] < 0 else bin_of

    def step_bins(self, in_rows: Int64Array) -> Int64Array:
        """The bin of each sample, in rows, with the least step cost that was found.

        Args:
            in_rows: some way in which they fit, in rows. Kept if it is good enough.
        """
        goal = self._goal(self._step_bound())
        dearest = int(self._rank_costs(in_rows).max())
        if dearest <= goal or len(in_rows) * self.microbatches * self.samples.ranks > _SHARE_WORK:
            return in_rows
        from megatron_packing.schedule import step

        samples, bins = self.samples, self.microbatches
        tokens_N, costs_N, room = samples.tokens_N, samples.costs_N, (bins, samples.capacity, samples.most)
        rank_of = step.share_out(tokens_N, costs_N, samples.ranks, bins * samples.capacity, goal)
        shared = step.fill_ranks(tokens_N, costs_N, rank_of, samples.ranks, *room)
        starts = [in_rows]
        if shared.min() >= 0:
            starts.insert(0, self.none_empty(shared % bins * samples.ranks + shared // bins, at_home=True))
        best = in_rows
        for start in starts:
            by_rank = start % samples.ranks * bins + start // samples.ranks
            cost = step.trade(tokens_N, costs_N, by_rank, samples.ranks, *room, goal, _TRADE_TRIES)
            if cost < dearest:
                dearest, best = cost, by_rank % bins * samples.ranks + by_rank // bins
            if dearest <= goal:
                break
        return self._dearest_first(best)

    def in_rows(self, bin_of: Int64Array) -> Int64Array:
        """The same bins, numbered anew: rows from the dearest to the cheapest, and in each row the dearest bin on the
        rank that has least so far. Empty bins get a sample first, if there is one to spare.
        """
        ranks = self.samples.ranks
        bin_of = self.none_empty(bin_of, at_home=False)
        costs_B = self._bin_costs(bin_of)
        order = np.argsort(-costs_B, kind="stable").reshape(self.microbatches, ranks)
        paid_R = np.zeros(ranks, dtype=np.int64)
        new = np.empty(order.size, dtype=np.int64)
        for row, bins_R in enumerate(order):
            cheapest_R = np.argsort(paid_R, kind="stable")
            new[bins_R] = row * ranks + cheapest_R
            paid_R[cheapest_R] += costs_B[bins_R]
        return new[bin_of]

    def _dearest_first(self, bin_of: Int64Array) -> Int64Array:
        """The same bins on the same ranks, each rank's own from the dearest to the cheapest."""
        ranks = self.samples.ranks
        costs_MR = self._bin_costs(bin_of).reshape(self.microbatches, ranks)
        order_MR = np.argsort(-costs_MR, axis=0, kind="stable")
        new_MR = np.empty_like(order_MR)
        np.put_along_axis(new_MR, order_MR, np.arange(self.microbatches)[:, None], axis=0)
        return (new_MR * ranks + np.arange(ranks)).reshape(-1)[bin_of]

    def packs(self, bin_of: Int64Array) -> list[list[int]]:
        """Sample ids of each bin in ascending order."""
        order = np.lexsort((self.samples.ids_N, bin_of))
        ids = self.samples.ids_N[order].tolist()
        bins = self.samples.ranks * self.microbatches
        edges = np.searchsorted(bin_of[order], np.arange(bins + 1)).tolist()
        return [ids[start:end] for start, end in pairwise(edges)]

    def none_empty(self, bin_of: Int64Array, *, at_home: bool) -> Int64Array:
        """Each empty bin gets the shortest sample that shares a bin, if there is one.

        Every rank has then something to learn from in every microbatch.

        Args:
            at_home: whether to look among the bin's own rank's samples first, which leaves ranks as dear as they are.
        """
        ranks = self.samples.ranks
        counts_B = np.bincount(bin_of, minlength=ranks * self.microbatches)
        empty = np.flatnonzero(counts_B == 0)
        if not empty.size:
            return bin_of
        bin_of = bin_of.copy()
        for b in empty:
            to_spare = np.flatnonzero(counts_B[bin_of] > 1)
            if not to_spare.size:
                break
            if at_home and (bin_of[to_spare] % ranks == b % ranks).any():
                to_spare = to_spare[bin_of[to_spare] % ranks == b % ranks]
            sample = to_spare[-1]
            counts_B[bin_of[sample]] -= 1
            counts_B[b] = 1
            bin_of[sample] = b
        return bin_of

    def lockstep_cost(self, bin_of: Int64Array) -> int:
        """The dearest bin of each row, summed, once bins are sorted into rows by cost."""
        return int(np.sort(self._bin_costs(bin_of))[::-1][:: self.samples.ranks].sum())

    def _bin_costs(self, bin_of: Int64Array) -> Int64Array:
        costs_B = np.zeros(self.samples.ranks * self.microbatches, dtype=np.int64)
        np.add.at(costs_B, bin_of, self.samples.costs_N)
        return costs_B

    def _rank_costs(self, bin_of: Int64Array) -> Int64Array:
        costs_R: Int64Array = self._bin_costs(bin_of).reshape(self.microbatches, self.samples.ranks).sum(axis=0)
        return costs_R

    def _lockstep_bound(self) -> float:
        samples = self.samples
        return lockstep_lower_bound(
            samples.tokens_N,
            samples.costs_N.astype(np.float64),
            dp=samples.ranks,
            capacity=samples.capacity,
            max_seqs=samples.most,
            num_microbatches=self.microbatches,
        )

    def _step_bound(self) -> float:
        samples = self.samples
        return step_lower_bound(
            samples.tokens_N,
            samples.costs_N.astype(np.float64),
            dp=samples.ranks,
            capacity=samples.capacity,
            num_microbatches=self.microbatches,
        )

    def _goal(self, imbalance: float) -> int:
        """The cost at which to stop looking; coarse, so that the last bit of a bound's arithmetic shows in no plan."""
        rounded = math.ceil(imbalance * (1 + _GOOD_ENOUGH) * 2**20) / 2**20
        return int(rounded * (int(self.samples.costs_N.sum()) // self.samples.ranks))


@dataclass(slots=True, kw_only=True)
class _Sweep:
    """Tries constructions until one is good enough: first over looseness, then over richness, then around the best."""

    step: _Step
    good_enough: int
    _results: dict[tuple[int, int, bool], int] = field(default_factory=dict)
    """By (place in _LOOSENESS, place in _RICHNESS, cheapest): the sum over rows of the dearest bin; -1: no fit."""
    _best: tuple[int, Int64Array] | None = None
    _best_key: tuple[int, int, bool] = (0, 0, True)
    _loose: bool = True
    """Whether the looseness tried last made a difference."""

    def best(self, *, thoroughly: bool) -> Int64Array | None:
        """The bin of each sample, or None if none of the constructions found them all a place.

        Args:
            thoroughly: whether to go on once a few loosenesses have found a way.
        """
        few, all_of_them = range(0, len(_LOOSENESS), 3), range(len(_LOOSENESS))
        stages: list[Callable[[], Iterator[tuple[int, int, bool]]]] = [
            lambda: self._by_looseness(all_of_them if thoroughly else few),
            lambda: self._by_looseness(all_of_them),
            self._by_richness,
            self._other_policy,
            self._neighbours,
            self._by_richness,
        ]
        for attempts in stages:
            if self._best is not None and not thoroughly:
                break
            for key in attempts():
                if self._done():
                    break
                self._try(key)
        return None if self._best is None else self._best[1]

    def _done(self) -> bool:
        samples = self.step.samples
        limit = max(len(_LOOSENESS), _SWEEP_WORK // (len(samples.tokens_N) * samples.ranks))
        return len(self._results) >= limit or (self._best is not None and self._best[0] <= self.good_enough)

    def _by_looseness(self, places: Iterable[int]) -> Iterator[tuple[int, int, bool]]:
        # From the loosest on; once it makes no difference, stricter ones make none either.
        return ((place, 0, True) for place in places if self._loose)

    def _by_richness(self) -> Iterator[tuple[int, int, bool]]:
        loose, _, cheapest = self._best_key
        return ((loose, place, cheapest) for place in range(len(_RICHNESS)))

    def _other_policy(self) -> Iterator[tuple[int, int, bool]]:
        loose, rich, cheapest = self._best_key
        return iter([(loose, rich, not cheapest)])

    def _neighbours(self) -> Iterator[tuple[int, int, bool]]:
        loose, rich, cheapest = self._best_key
        return ((near, rich, cheapest) for near in (loose - 1, loose + 1) if 0 <= near < len(_LOOSENESS))

    def _try(self, key: tuple[int, int, bool]) -> None:
        if key in self._results:
            return
        from megatron_packing.schedule import lockstep

        samples = self.step.samples
        bin_of, cost, self._loose = lockstep.fill_rows(
            samples.tokens_N,
            samples.costs_N,
            self.step.microbatches,
            samples.ranks,
            samples.capacity,
            samples.most,
            _LOOSENESS[key[0]],
            _RICHNESS[key[1]],
            key[2],
        )
        if cost >= 0:
            none_empty = self.step.none_empty(bin_of, at_home=False)
            if none_empty is not bin_of:  # moving a sample may have made a row dearer: count it before choosing
                bin_of, cost = none_empty, self.step.lockstep_cost(none_empty)
        self._results[key] = cost
        if cost >= 0 and (self._best is None or cost < self._best[0]):
            self._best, self._best_key = (cost, bin_of), key
