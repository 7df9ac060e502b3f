"""How good could any plan be? Lower bounds; O(N log N), about 1 ms each for 5,000 samples.

A bound is no promise that a plan reaches it: it says where searching further is pointless.
Imbalances are ratios over the mean rank, so 1.0 is perfect.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

type Int64Array = npt.NDArray[np.int64]
type Float64Array = npt.NDArray[np.float64]

# Rows that `lockstep_lower_bound` looks at. Every prefix of them gives a valid bound, and the expensive samples that
# make the bound interesting are in the first few; without a limit, planning a whole corpus would take N * P steps.
_ROWS = 64
# Sums of costs are rounded; a bound must err on the low side.
_SLACK = 1 + 1e-12


def packs_lower_bound(padded: Int64Array, capacity: int, max_seqs: int | None = None) -> int:
    """Packs that any plan needs to hold these samples, before rounding up to even counts.

    The largest of three:
    - L1, the total of tokens / capacity: a pack holds no more than its capacity.
    - L2 of Martello and Toth, Lower bounds and reduction procedures for the bin packing problem, Discrete Applied
      Mathematics 28 (1990): for any a <= capacity / 2, no two samples above capacity / 2 share a pack; those above
      capacity - a share with none of a or more; so samples of a to capacity / 2 must go in the room that the others
      leave, or open packs of their own.
    - samples / max_seqs: a pack holds no more than max_seqs.

    Args:
        padded: padded tokens of each sample, shape [N], each from 1 to capacity.
        capacity: padded tokens that a pack may hold.
        max_seqs: samples that a pack may hold; None means any number.
    """
    if len(padded) == 0:
        return 0
    by_count = 0 if max_seqs is None else -(-len(padded) // max_seqs)
    return max(by_count, _martello_toth(np.sort(padded), capacity))


def _martello_toth(ascending: Int64Array, capacity: int) -> int:
    """L2 over every useful `a`: 0, which makes it at least L1, and each distinct sample of at most half a pack."""
    total_before = np.concatenate(([0], np.cumsum(ascending)))
    half = int(np.searchsorted(ascending, capacity // 2, side="right"))  # the first sample above half a pack
    a = np.concatenate(([0], np.unique(ascending[:half])))
    small = np.searchsorted(ascending, a)  # the first sample of a or more
    lonely = np.maximum(half, np.searchsorted(ascending, capacity - a, side="right"))  # the first above capacity - a
    room = (lonely - half) * capacity - (total_before[lonely] - total_before[half])
    homeless = total_before[half] - total_before[small] - room
    return int((len(ascending) - half + np.maximum(0, -(-homeless // capacity))).max())


def lockstep_lower_bound(
    padded: Int64Array,
    costs: Float64Array,
    *,
    dp: int,
    capacity: int,
    max_seqs: int | None = None,
    num_microbatches: int | None = None,
) -> float:
    """Least possible sum over microbatches of the busiest rank's cost, over the mean rank's cost.

    Sort a plan's microbatches (rows) by their busiest rank, dearest first. By induction q bounds the sum of the first
    j rows' busiest ranks: rows of sum Q hold at most dp * Q of cost, j * dp * capacity of tokens, j * dp samples of
    more than half a pack and j * dp * max_seqs samples. So the dearest samples in order cannot all be there; the
    first that is left out opens a row that costs no less than it. We do not know Q >= q and take the Q that
    makes Q + that sample cheapest. The rows after those j share what cost the tokens of j rows cannot carry.

    Args:
        padded: padded tokens of each sample, shape [N].
        costs: cost of each sample, shape [N].
        dp: ranks.
        capacity: padded tokens that a pack may hold.
        max_seqs: samples that a pack may hold; None means any number.
        num_microbatches: rows of the plans that are bounded; None: any number. Says only where to stop: a bound that
            follows from the first rows holds for plans with more of them.
    """
    total = float(costs.sum())
    if total == 0:
        return 1.0
    dearest = np.argsort(-costs, kind="stable")
    cost_before, tokens_before = _before(costs[dearest]), _before(padded[dearest])
    big_before = _before(2 * padded[dearest] > capacity)
    next_cost = np.concatenate((costs[dearest], [0.0]))
    densest = np.argsort(-costs / padded, kind="stable")
    dense_tokens, dense_cost = _before(padded[densest]), _before(costs[densest])

    num_samples, q, best = len(padded), 0.0, total / dp
    for rows in range(min(_ROWS, num_microbatches or _ROWS)):
        most = min(
            int(np.searchsorted(tokens_before, rows * dp * capacity, side="right")) - 1,
            int(np.searchsorted(big_before, rows * dp, side="right")) - 1,
            num_samples if max_seqs is None else rows * dp * max_seqs,
            num_samples,
        )
        least = min(int(np.searchsorted(cost_before, dp * q * _SLACK, side="right")) - 1, most)
        sums = np.maximum(cost_before[least : most + 1] / dp, q)
        sums[0] = q  # the samples before `least` need no more than q
        previous, q = q, float((sums + next_cost[least : most + 1]).min())
        carried = float(np.interp((rows + 1) * dp * capacity, dense_tokens, dense_cost))
        best = max(best, q + (total - carried) / dp)
        if q == previous:
            break  # every sample fits in these rows
    return best / (total / dp)


def step_lower_bound(
    padded: Int64Array, costs: Float64Array, *, dp: int, capacity: int, num_microbatches: int
) -> float:
    """Least possible cost of the busiest rank over a step of `num_microbatches`, over the mean rank's cost.

    The largest of two, each over every k. (max_seqs would make them stronger; it is left out.)
    - Some k ranks hold the k dearest samples, and also the tokens that the other ranks have no room for; let those be
      the tokens with the least cost, parts of samples allowed. One of the k ranks holds a k-th of that.
    - Of the k * dp + 1 dearest samples one rank holds k + 1 (there are more than k for each rank), which cost no less
      than the k + 1 cheapest of them.

    Args:
        padded: padded tokens of each sample, shape [N].
        costs: cost of each sample, shape [N].
        dp: ranks.
        capacity: padded tokens that a pack may hold.
        num_microbatches: packs that each rank runs.
    """
    total = float(costs.sum())
    if total == 0:
        return 1.0
    dearest, cheapest = np.argsort(-costs, kind="stable"), np.argsort(costs / padded, kind="stable")
    cost_before, tokens_before = _before(costs[dearest]), _before(padded[dearest])
    k = np.arange(1, min(dp, len(costs)) + 1)
    homeless = tokens_before[-1] - tokens_before[k] - (dp - k) * float(num_microbatches * capacity)
    extra = np.interp(np.maximum(0, homeless), _before(padded[cheapest]), _before(costs[cheapest]))
    crowds = np.arange(1, (len(costs) - 1) // dp + 1) * dp + 1
    crowded = cost_before[crowds] - cost_before[crowds - (crowds - 1) // dp - 1]
    best = max(total / dp, float(((cost_before[k] + extra) / k).max()), float(crowded.max(initial=0)))
    return best / (total / dp)


def grouped_lower_bound(
    lengths: Int64Array,
    costs: Float64Array,
    talk: Float64Array,
    *,
    sizes: Sequence[int],
    max_tokens_per_rank: int,
) -> float:
    """`lockstep_lower_bound` where a planner chooses, pack by pack, how many ranks share it.

    The larger of two. A sample occupies all ranks of its group together for its cost and, on each where they are
    several, for its communication: at least what the smallest group that holds it takes. All of that, shared equally.
    And: the ranks of one sample's group take no less than in the group that suits it best, while all others wait.

    Args:
        lengths: tokens of each sample, shape [N].
        costs: cost of each sample, shape [N].
        talk: cost of each sample's communication on each rank of a group of more than one, shape [N].
        sizes: ranks that a group may have, ascending; the last is all ranks, which hold every sample.
        max_tokens_per_rank: tokens that a rank may hold of a pack.
    """
    total = float(costs.sum())
    if total == 0:
        return 1.0
    sizes_K = np.array(sizes)
    fits_KN = lengths <= sizes_K[:, None] * max_tokens_per_rank
    talk_KN = np.where(sizes_K > 1, 1, 0)[:, None] * talk
    smallest_N = fits_KN.argmax(axis=0)
    together = total + float((sizes_K[:, None] * talk_KN)[smallest_N, np.arange(len(lengths))].sum())
    alone_KN = np.where(fits_KN, costs / sizes_K[:, None] + talk_KN, np.inf)
    ranks = sizes[-1]
    return max(together / ranks, float(alone_KN.min(axis=0).max())) / (total / ranks)


def _before(values: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
    """Sums of what stands before each position, and of all: shape [N] -> [N + 1]. Exact for tokens up to 2**53."""
    return np.concatenate(([0.0], np.cumsum(values, dtype=np.float64)))
