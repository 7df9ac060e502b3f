"""How do samples go to ranks so that the dearest rank costs little, whatever its microbatches are?

Each rank gets a fair share of both tokens and cost (`share_out`), a rank's samples go in its own bins (`fill_ranks`),
and then the dearest rank trades samples with the others (`trade`).

A rank that holds a very long sample has spent its cost on few tokens; it must still carry its share of the tokens, with
short samples only. So the ranks are filled one after the other, each with the longest samples left and then with a
window of neighbours in the sorted order, as long as its tokens ask for and as dear as its cost allows.

Legend: N samples, longest first; R ranks, each with its own M bins: bin b is rank b // M's. Tokens and costs are int64
with exact sums.
"""

import numpy as np
import numpy.typing as npt

from megatron_packing.schedule.jit import compiled

type Int64Array = npt.NDArray[np.int64]


@compiled
def share_out(tokens: Int64Array, costs: Int64Array, ranks: int, rank_capacity: int, goal: int) -> Int64Array:
    """The rank of each sample, shape [N]. O(N * ranks).

    Args:
        tokens: padded tokens of each sample, shape [N], descending.
        costs: cost of each sample, shape [N]; descending, except of units (see `items`).
        ranks: ranks to share between.
        rank_capacity: tokens that a rank can hold at most; shares stay near it, but the bins decide.
        goal: a rank's cost that is good enough.
    """
    rank_of = np.full(len(tokens), ranks - 1)
    left = np.arange(len(tokens))
    for rank in range(ranks - 1):
        others = ranks - rank - 1
        unshared_tokens, unshared_cost = tokens[left].sum(), costs[left].sum()
        fair_tokens, fair_cost = unshared_tokens // (others + 1), unshared_cost // (others + 1)
        head = _take_longest(tokens[left], costs[left], fair_tokens, fair_cost, rank_capacity)
        held_tokens, held_cost = tokens[left[:head]].sum(), costs[left[:head]].sum()
        start, end = _window(
            tokens[left[head:]],
            costs[left[head:]],
            fair_tokens - held_tokens,
            fair_cost - held_cost,
            unshared_tokens - others * rank_capacity - held_tokens,
            max(goal, fair_cost) - held_cost,
        )
        rank_of[left[:head]] = rank
        rank_of[left[head + start : head + end]] = rank
        left = np.concatenate((left[head : head + start], left[head + end :]))
    return rank_of


@compiled
def _take_longest(tokens: Int64Array, costs: Int64Array, fair_tokens: int, fair_cost: int, rank_capacity: int) -> int:
    """How many of the longest samples a rank takes: until what it still needs is found among the others.

    That is when the cost it still needs for each token it still needs is no more than the next sample's.
    """
    held_tokens, held_cost = 0, 0
    for i in range(len(tokens)):
        need_tokens, need_cost = fair_tokens - held_tokens, fair_cost - held_cost
        if i and (
            need_tokens <= 0
            or need_cost <= 0
            or held_tokens + tokens[i] > rank_capacity
            or float(need_cost) * tokens[i] <= float(costs[i]) * need_tokens
        ):
            return i
        held_tokens += tokens[i]
        held_cost += costs[i]
    return len(tokens)


@compiled
def _window(
    tokens: Int64Array, costs: Int64Array, need_tokens: int, need_cost: int, least_tokens: int, most_cost: int
) -> tuple[int, int]:
    """Neighbours [start, end) with `need_tokens` together, as near to `need_cost` as such a window can come.

    Where even the shortest samples cost more than that, as many of them as `most_cost` pays for, but no fewer than
    `least_tokens`, which no other rank has room for.
    """
    start = end = len(tokens)
    held_tokens, held_cost = 0, 0
    while start > 0 and held_tokens < need_tokens:
        start -= 1
        held_tokens += tokens[start]
        held_cost += costs[start]
    if held_cost > need_cost:
        while start < end and held_cost > most_cost and held_tokens - tokens[start] >= least_tokens:
            held_tokens -= tokens[start]
            held_cost -= costs[start]
            start += 1
        return start, end
    while start > 0:
        longer_end, longer_tokens = end, held_tokens + tokens[start - 1]
        longer_cost = held_cost + costs[start - 1]
        while longer_end > start and longer_tokens - tokens[longer_end - 1] >= need_tokens:
            longer_end -= 1
            longer_tokens -= tokens[longer_end]
            longer_cost -= costs[longer_end]
        if longer_cost > need_cost and longer_cost - need_cost >= need_cost - held_cost:
            break
        start, end, held_tokens, held_cost = start - 1, longer_end, longer_tokens, longer_cost
        if held_cost > need_cost:
            break
    return start, end


@compiled
def fill_ranks(
    tokens: Int64Array, costs: Int64Array, rank_of: Int64Array, ranks: int, bins: int, capacity: int, most: int
) -> Int64Array:
    """The bin of each sample, shape [N]: best fit within its rank; what finds no place there, in the cheapest rank's.

    -1 for samples that found no place anywhere.
    """
    room, seats, paid = np.full(ranks * bins, capacity), np.full(ranks * bins, most), np.zeros(ranks, np.int64)
    bin_of = np.full(len(tokens), -1)
    for at_home in (True, False):
        for i in range(len(tokens)):
            if bin_of[i] >= 0:
                continue
            first, last = (rank_of[i] * bins, rank_of[i] * bins + bins) if at_home else (0, ranks * bins)
            chosen = -1
            for b in range(first, last):
                if seats[b] == 0 or tokens[i] > room[b]:
                    continue
                if chosen < 0 or (paid[b // bins], room[b]) < (paid[chosen // bins], room[chosen]):
                    chosen = b
            if chosen >= 0:
                bin_of[i] = chosen
                room[chosen] -= tokens[i]
                seats[chosen] -= 1
                paid[chosen // bins] += costs[i]
    return bin_of


@compiled
def trade(
    tokens: Int64Array,
    costs: Int64Array,
    bin_of: Int64Array,
    ranks: int,
    bins: int,
    capacity: int,
    most: int,
    goal: int,
    tries: int,
) -> int:
    """Change `bin_of` in place until no rank costs more than `goal`, no trade helps, or `tries` pairs were looked at.

    The dearest rank gives a sample to another one and gets none, one or two cheaper ones of one bin for it. One for
    two is what moves cost without tokens. Each round looks for the best trade with each of the cheaper ranks and then
    makes them, one rank after the other.

    Returns:
        The dearest rank's cost.
    """
    room, seats, paid = np.full(ranks * bins, capacity), np.full(ranks * bins, most), np.zeros(ranks, np.int64)
    for i in range(len(tokens)):
        room[bin_of[i]] -= tokens[i]
        seats[bin_of[i]] -= 1
        paid[bin_of[i] // bins] += costs[i]
    members, edges = _members(bin_of, ranks * bins)
    while tries > 0:
        dearest = int(np.argmax(paid))
        if paid[dearest] <= goal:
            break
        traded = False
        for rank in np.argsort(paid, kind="mergesort"):
            gap = paid[dearest] - paid[rank]
            if gap <= 0 or paid[dearest] <= goal or tries <= 0:
                break
            gives, gets, also, away, looked_at = _best_trade(
                tokens, costs, members, edges, dearest * bins, rank * bins, bins, room, seats, gap, tries
            )
            tries -= looked_at
            if gives < 0:
                continue
            traded = True
            for sample, to in ((gives, away), (gets, bin_of[gives]), (also, bin_of[gives])):
                if sample >= 0:
                    was = bin_of[sample]
                    bin_of[sample] = to
                    for b, sign in ((was, 1), (to, -1)):
                        room[b] += sign * tokens[sample]
                        seats[b] += sign
                        paid[b // bins] -= sign * costs[sample]
            members, edges = _members(bin_of, ranks * bins)
        if not traded:
            break
    return int(paid.max())


@compiled
def _members(bin_of: Int64Array, num_bins: int) -> tuple[Int64Array, Int64Array]:
    """Samples by bin, longest first, shape [N]; bin b has those at [edges[b], edges[b + 1])."""
    edges = np.zeros(num_bins + 1, np.int64)
    for b in bin_of:
        edges[b + 1] += 1
    edges = np.cumsum(edges)
    members, filled = np.empty_like(bin_of), edges.copy()
    for i in range(len(bin_of)):
        members[filled[bin_of[i]]] = i
        filled[bin_of[i]] += 1
    return members, edges


@compiled
def _best_trade(
    tokens: Int64Array,
    costs: Int64Array,
    members: Int64Array,
    edges: Int64Array,
    first_here: int,
    first_there: int,
    bins: int,
    room: Int64Array,
    seats: Int64Array,
    gap: int,
    tries: int,
) -> tuple[int, int, int, int, int]:
    """The trade after which the dearer of two ranks is cheapest, of about the first `tries` pairs. `gap` is what one
    rank costs more than the other now.

    Returns:
        The sample to give, those to get for it (-1: none), the bin to give it to, and how many pairs were looked at.
        The first is -1 if no trade helps.
    """
    gives, gets, also, away, looked_at, best = -1, -1, -1, -1, 0, gap
    for home in range(first_here, first_here + bins):
        for b in range(first_there, first_there + bins):
            first, end = edges[b], edges[b + 1]
            for x in range(edges[home], edges[home + 1]):
                i = members[x]
                # A trade is better than the best if it moves more cost than gap - best and less than best.
                if looked_at >= tries or costs[i] <= gap - best:
                    break
                looked_at += 1
                after = max(gap - costs[i], costs[i])
                if after < best and seats[b] and tokens[i] <= room[b] and edges[home + 1] - edges[home] > 1:
                    gives, gets, also, away, best = i, -1, -1, b, after
                while first < end and costs[i] - costs[members[first]] <= gap - best:
                    first += 1
                shortest = end - 1
                for y in range(first, end):
                    k = members[y]
                    moves, short = costs[i] - costs[k], tokens[i] - tokens[k] - room[b]
                    if moves - costs[k] >= best:
                        break
                    looked_at += 1
                    after = max(gap - moves, moves)
                    # What comes back fits, too: of units (see `items`) the one of less work may be the longer one.
                    if after < best and short <= 0 and tokens[k] - tokens[i] <= room[home]:
                        gives, gets, also, away, best = i, k, -1, b, after
                    # The shortest that can go with k: it moves the most cost. As k gets shorter, it gets longer.
                    while shortest > y and tokens[members[shortest]] < short:
                        shortest -= 1
                    m = members[shortest]
                    after = max(gap - moves + costs[m], moves - costs[m])
                    if shortest > y and after < best and seats[home] and tokens[m] - short - room[b] <= room[home]:
                        gives, gets, also, away, best = i, k, m, b, after
    return gives, gets, also, away, looked_at
