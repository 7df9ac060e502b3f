"""How do samples fill rows of packs so that the dearest packs of all rows cost little together?

A row is a microbatch: one bin a rank. Rows are filled one after the other, the longest waiting sample first. What a bin
of the row may cost has a ceiling, so that a sample that would make the row dear waits for a later row; the ceiling is
never below the longest waiting sample, which must go somewhere and opens the row. The rows of long samples come first
and short samples level out the bins.

Legend: N samples, longest first; B = rows * ranks bins, bin b is in row b // ranks. Tokens and costs are int64 with
exact sums. About O(N * ranks), because a row looks only at samples that a bin of it may have room for.
"""

import numpy as np
import numpy.typing as npt

from megatron_packing.schedule.jit import compiled

type Int64Array = npt.NDArray[np.int64]

ANY = 1e9
"""A looseness or richness that rules nothing out."""


@compiled
def fill_rows(
    tokens: Int64Array,
    costs: Int64Array,
    rows: int,
    ranks: int,
    capacity: int,
    most: int,
    looseness: float,
    richness: float,
    cheapest: bool,
) -> tuple[Int64Array, int, bool]:
    """One construction. The last row has no ceiling: what is left must go there.

    Args:
        tokens: padded tokens of each sample, shape [N], descending.
        costs: cost of each sample, shape [N]; descending, except of units (see `items`).
        rows: microbatches.
        ranks: bins of a row.
        capacity: tokens that a bin may hold.
        most: samples that a bin may hold.
        looseness: a row's ceiling over the mean cost of the bins that are left.
        richness: a sample is kept out of a bin if, per token, it costs this many times what the bin can still pay for
            each token that it has room for: it would use up the ceiling and leave room that nothing can fill.
        cheapest: whether a sample goes to the cheapest bin that takes it, else to the one with the least room.

    Returns:
        The bin of each sample, shape [N]; the sum over rows of the dearest bin once bins are sorted into rows by cost;
        and whether any ceiling followed from `looseness` (if not, a smaller one gives the same). -1 for samples that
        found no place; the sum is then -1, too.
    """
    room, paid, seats = np.full(rows * ranks, capacity), np.zeros(rows * ranks, np.int64), np.full(rows * ranks, most)
    bin_of = np.full(len(tokens), -1)
    waiting = np.arange(len(tokens) + 1)  # waiting[i] leads to the first waiting sample from i on; see `_first_waiting`
    least_so_far = _running_least(costs)
    unpaid = costs.sum()
    loose = False
    for row in range(rows):
        i = _first_waiting(waiting, 0)
        if i == len(tokens):
            break
        last = row == rows - 1
        ceiling = costs[i]
        fair = looseness * unpaid / (ranks * (rows - row))
        if last:
            ceiling = np.int64(2**62)
        elif fair > ceiling:
            ceiling = np.int64(min(fair, float(unpaid)))
            loose = True
        guard = ANY if last else richness
        keys = paid if cheapest or last else room
        order = np.arange(row * ranks, row * ranks + ranks)
        while i < len(tokens):
            place = _first_that_takes(tokens[i], costs[i], order, room, paid, seats, ceiling, guard)
            start = i + 1
            if place < 0:
                most_room, most_pay = _most_left(order, room, paid, seats, ceiling)
                start = max(start, _first_at_most(tokens, most_room), _first_at_most(least_so_far, most_pay))
            else:
                chosen = order[place]
                bin_of[i] = chosen
                room[chosen] -= tokens[i]
                paid[chosen] += costs[i]
                seats[chosen] -= 1
                unpaid -= costs[i]
                waiting[i] = i + 1
                _restore_order(order, keys, place)
            i = _first_waiting(waiting, start)
    if _first_waiting(waiting, 0) < len(tokens):
        return bin_of, -1, loose
    return bin_of, np.sort(paid)[::-1][::ranks].sum(), loose


@compiled
def _first_waiting(waiting: Int64Array, i: int) -> int:
    """The first sample from `i` on that has no bin yet, or N. Halves the way for those who come after."""
    while waiting[i] != i:
        waiting[i] = waiting[waiting[i]]
        i = waiting[i]
    return i


@compiled
def _running_least(values: Int64Array) -> Int64Array:
    """The least value up to each position: the values themselves, where they descend."""
    least = values.copy()
    for i in range(1, len(least)):
        least[i] = min(least[i], least[i - 1])
    return least


@compiled
def _first_at_most(descending: Int64Array, limit: int) -> int:
    """The first position whose value is at most `limit`."""
    low, high = 0, len(descending)
    while low < high:
        middle = (low + high) // 2
        if descending[middle] <= limit:
            high = middle
        else:
            low = middle + 1
    return low


@compiled
def _first_that_takes(
    tokens: int,
    cost: int,
    order: Int64Array,
    room: Int64Array,
    paid: Int64Array,
    seats: Int64Array,
    ceiling: int,
    richness: float,
) -> int:
    """The first place in `order` whose bin takes this sample, or -1."""
    for place in range(len(order)):
        b = order[place]
        pay = ceiling - paid[b]
        if tokens > room[b] or cost > pay or seats[b] == 0:
            continue
        if richness < ANY and paid[b] and float(cost) * room[b] > richness * pay * tokens:
            continue
        return place
    return -1


@compiled
def _most_left(
    order: Int64Array, room: Int64Array, paid: Int64Array, seats: Int64Array, ceiling: int
) -> tuple[int, int]:
    """The most room and the most pay that any bin of the row has left: longer or dearer samples find no place."""
    most_room, most_pay = 0, 0
    for b in order:
        if seats[b]:
            most_room, most_pay = max(most_room, room[b]), max(most_pay, ceiling - paid[b])
    return most_room, most_pay


@compiled
def _restore_order(order: Int64Array, keys: Int64Array, place: int) -> None:
    """Sort `order` by the bins' keys, ascending, then by their numbers, after one bin's key has changed."""
    b = order[place]
    while place + 1 < len(order) and (keys[b], b) > (keys[order[place + 1]], order[place + 1]):
        order[place] = order[place + 1]
        place += 1
    while place > 0 and (keys[b], b) < (keys[order[place - 1]], order[place - 1]):
        order[place] = order[place - 1]
        place -= 1
    order[place] = b


@compiled
def search_fit(tokens: Int64Array, bins: int, capacity: int, most: int, tries: int) -> Int64Array:
    """Any way to put all samples in `bins` bins, by going back where a bin turns out wrong; at most `tries` placings.

    Equal bins are tried once, and equal samples go to bins in ascending order. -1s where no way exists or was found.
    """
    room, seats = np.full(bins, capacity), np.full(bins, most)
    bin_of = np.full(len(tokens), -1)
    left = tokens.sum()
    i = 0
    while 0 <= i < len(tokens) and tries > 0:
        tries -= 1
        b = bin_of[i]
        if b >= 0:  # come back: take it out again
            room[b] += tokens[i]
            seats[b] += 1
            left += tokens[i]
        elif i and tokens[i] == tokens[i - 1]:
            b = bin_of[i - 1] - 1
        bin_of[i] = b = _next_bin(tokens[i], b + 1, room, seats)
        if b < 0:
            i -= 1
            continue
        room[b] -= tokens[i]
        seats[b] -= 1
        left -= tokens[i]
        usable = 0
        for other in range(bins):
            if seats[other] and room[other] >= tokens[-1]:
                usable += room[other]
        i += usable >= left  # else the same sample tries its next bin
    if i < len(tokens):
        bin_of[:] = -1
    return bin_of


@compiled
def _next_bin(tokens: int, first: int, room: Int64Array, seats: Int64Array) -> int:
    """The first bin from `first` on that takes the sample and is like no bin before it, or -1."""
    for b in range(first, len(room)):
        if seats[b] == 0 or tokens > room[b]:
            continue
        twin = False
        for other in range(b):
            twin |= room[other] == room[b] and seats[other] == seats[b]
        if not twin:
            return b
    return -1
