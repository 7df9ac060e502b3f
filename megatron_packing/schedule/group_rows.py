"""Which samples, in which CP groups, make a good microbatch? The search of `dynamic_cp`, compiled; 0.1 to 1 ms a row.

A row is one microbatch: groups of ranks, each with its samples. Rows are filled one after the other, longest sample
first, under a *ceiling* on what any rank may have to do; what does not fit waits for the next row. Many ceilings are
tried for each row, and that row is kept which wastes least of its ranks' time.

All numbers are integers, so that every machine finds the same rows: work is scaled and rounded once, beforehand.

Importing this imports numba; what it compiles is kept on disk, beside this file or in numba's own cache folder.

Legend: N samples, longest first; K group sizes, ascending; M rows; G ranks. A group of more than one rank pays
`communication` for each token on every one of its ranks, so the *load* of a group, over all its ranks, is
work + size * communication, and a rank's is its share of that.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_packing.schedule.jit import compiled, inlined

type Int64Array = npt.NDArray[np.int64]


class Step(NamedTuple):
    """What has to be run, and on what."""

    tokens_N: Int64Array
    """Tokens; of a unit with what padding each but one of its samples may add, so that no widening is too tight."""
    work_N: Int64Array
    talk_N: Int64Array
    """Communication of each sample, on each rank of a group of more than one."""
    padded_NK: Int64Array
    """Padded tokens in a group of each size."""
    load_NK: Int64Array
    """Work and communication in a group of each size, over all its ranks."""
    least_N: Int64Array
    """What the busiest rank must do for the sample, in the group that suits it best."""
    fewest_N: Int64Array
    """Padded tokens in the smallest group that holds the sample."""
    sizes_K: Int64Array
    inverse_K: npt.NDArray[np.float64]
    """1 / size. A product of two numbers rounds alike everywhere; nothing is added to it."""
    alignments_K: Int64Array
    capacities_K: Int64Array
    """Padded tokens that a group holds."""
    max_seqs: int


# Columns of the array that describes a row's groups, one group a line.
SIZE, TOKENS, COUNT, LOAD, TALK, REAL = range(6)
COLUMNS = 6

# How a sample chooses among the groups that hold it. Bits of a policy.
TIGHTEST = 1  # the one that comes closest to the ceiling; else the one with the least to do
SMALL_FIRST = 2  # smaller groups before larger ones
OPEN_SMALLER = 4  # rather open a group than join a larger one
OPEN_EAGERLY = 8  # rather open a group than join any

HALVINGS = 6
"""Sizes at which the longest sample's own load is tried as a ceiling: all ranks, half of them, and so on."""
FINE = 1000
"""A search for the lowest ceiling ends where its bounds differ by less than this part of them."""
_NOT_TRIED = np.int64(-1)


@compiled
def fill_row(step, waiting, ceiling, policy, groups, group_of):  # type: ignore[no-untyped-def]
    """Fill one row from the samples in `waiting`; returns the number of groups.

    `groups` gets a line for each group, and `group_of` the group of each of `waiting`, or -1.
    """
    free = step.sizes_K[-1]
    num_groups = 0
    for place, sample in enumerate(waiting):
        group = _group_with_room(step, sample, ceiling, policy, groups, num_groups)
        size = _smallest_size(step, sample, ceiling, free)
        wanted = group < 0 or policy & OPEN_EAGERLY or (policy & OPEN_SMALLER and size < groups[group, SIZE])
        if size >= 0 and wanted:
            group = num_groups
            num_groups += 1
            groups[group] = 0
            groups[group, SIZE] = size
            free -= step.sizes_K[size]
        group_of[place] = group
        if group >= 0:
            size = groups[group, SIZE]
            groups[group, TOKENS] += step.padded_NK[sample, size]
            groups[group, COUNT] += 1
            groups[group, LOAD] += step.load_NK[sample, size]
            groups[group, TALK] += step.talk_N[sample]
            groups[group, REAL] += step.tokens_N[sample]
    _widen(step, groups, num_groups, free)
    return num_groups


@inlined
def _group_with_room(step, sample, ceiling, policy, groups, num_groups):  # type: ignore[no-untyped-def]
    """The open group that the policy puts the sample in; -1 where none holds it."""
    best, best_size, best_left = -1, np.int64(0), 0.0
    for group in range(num_groups):
        size = groups[group, SIZE]
        if (
            groups[group, TOKENS] + step.padded_NK[sample, size] > step.capacities_K[size]
            or groups[group, COUNT] == step.max_seqs
        ):
            continue
        ranks = step.sizes_K[size]
        left_of_all = ceiling * ranks - groups[group, LOAD] - step.load_NK[sample, size]
        if left_of_all < 0:
            continue
        left = left_of_all * step.inverse_K[size] if policy & TIGHTEST else -left_of_all * step.inverse_K[size]
        if best < 0 or (size < best_size if policy & SMALL_FIRST and size != best_size else left < best_left):
            best, best_size, best_left = group, size, left
    return best


@inlined
def _smallest_size(step, sample, ceiling, free):  # type: ignore[no-untyped-def]
    """The smallest group that holds the sample under the ceiling, as an index; -1 where the free ranks make none."""
    for size in range(len(step.sizes_K)):
        ranks = step.sizes_K[size]
        if ranks > free:
            break
        if step.padded_NK[sample, size] <= step.capacities_K[size] and step.load_NK[sample, size] <= ceiling * ranks:
            return size
    return -1


@compiled
def _widen(step, groups, num_groups, free):  # type: ignore[no-untyped-def]
    """Give the free ranks to the busiest groups, as long as that helps them."""
    while free > 0:
        best, best_load = -1, np.int64(-1)
        for group in range(num_groups):
            load = _rank_load(step, groups[group])
            if load > best_load and _wider_load(step, groups[group], free) < load:
                best, best_load = group, load
        if best < 0:
            break
        old = groups[best, SIZE]
        free -= step.sizes_K[old + 1] - step.sizes_K[old]
        groups[best, LOAD] = _load_of_size(step, groups[best], old + 1)
        groups[best, SIZE] = old + 1
        # An upper bound, enough to widen again by; nothing joins the group any more.
        groups[best, TOKENS] = groups[best, REAL] + groups[best, COUNT] * (step.alignments_K[old + 1] - 1)


@compiled
def _wider_load(step, group, free):  # type: ignore[no-untyped-def]
    """What each rank would have to do if the group had the next size; very much where it may not."""
    never = np.int64(2**62)
    size = group[SIZE] + 1
    if size == len(step.sizes_K) or step.sizes_K[size] - step.sizes_K[size - 1] > free:
        return never
    if group[REAL] + group[COUNT] * (step.alignments_K[size] - 1) > step.capacities_K[size]:
        return never
    return -(-_load_of_size(step, group, size) // step.sizes_K[size])


@compiled
def _load_of_size(step, group, size):  # type: ignore[no-untyped-def]
    before, after = step.sizes_K[group[SIZE]], step.sizes_K[size]
    work = group[LOAD] - (before * group[TALK] if before > 1 else 0)
    return work + (after * group[TALK] if after > 1 else 0)


@compiled
def _rank_load(step, group):  # type: ignore[no-untyped-def]
    return -(-group[LOAD] // step.sizes_K[group[SIZE]])


@compiled
def _busiest(step, groups, num_groups):  # type: ignore[no-untyped-def]
    most = np.int64(0)
    for group in range(num_groups):
        most = max(most, _rank_load(step, groups[group]))
    return most


@compiled
def fit_row(step, waiting, low, high, tries, policies, groups, group_of):  # type: ignore[no-untyped-def]
    """Hold all of `waiting` in one row whose busiest rank has as little to do as we can find.

    Bisects the ceiling between `low` and `high` with each policy. Returns (number of groups, what the busiest rank
    does); no groups where none of them holds everything.
    """
    trial, trial_of = np.empty_like(groups), np.empty_like(group_of)
    best, best_groups = np.int64(2**62), 0
    for policy in policies:
        below, above = low, high
        for attempt in range(tries):
            ceiling = above if attempt == 0 else (below + above) // 2
            num_groups = fill_row(step, waiting, ceiling, policy, trial, trial_of)
            if (trial_of >= 0).all():
                busiest = _busiest(step, trial, num_groups)
                if busiest < best:
                    best, best_groups = busiest, num_groups
                    groups[:num_groups] = trial[:num_groups]
                    group_of[:] = trial_of
                above = min(ceiling, busiest)
            elif attempt == 0:
                break
            else:
                below = ceiling
            if above - below <= above // FINE:
                break
    return best_groups, best


@compiled
def most_worth_it(step, waiting, rows_after, share, multiples, forced, policies, groups, group_of):  # type: ignore[no-untyped-def]
    """Fill a row that other rows follow: of many ceilings, the one that wastes least. Returns as `fit_row`.

    Args:
        rows_after: rows that follow.
        share: thousandths of their room that this row may count on.
        multiples: ceilings to try, in thousandths of the mean rank's work in a row; see `_ceilings` for others.
        forced: which of the ceilings is taken; -1: the best.
    """
    ceilings = _ceilings(step, waiting, rows_after, multiples)
    if forced >= 0:
        ceilings = ceilings[forced : forced + 1]
    trial, trial_of = np.empty_like(groups), np.empty_like(group_of)
    ranks = step.sizes_K[-1]
    fewest = np.int64(0)
    for sample in waiting:
        fewest += step.fewest_N[sample]
    wanted = fewest - rows_after * step.capacities_K[-1] * share // 1000  # tokens that the rows after have no room for
    best_waste, best_groups, best_busiest = 1e300, 0, np.int64(0)
    for ceiling in ceilings:
        if ceiling == _NOT_TRIED:
            continue
        for policy in policies:
            num_groups = fill_row(step, waiting, ceiling, policy, trial, trial_of)
            placed, work, tokens = 0, np.int64(0), np.int64(0)
            for place, sample in enumerate(waiting):
                if trial_of[place] >= 0:
                    placed += 1
                    work += step.work_N[sample]
                    tokens += step.fewest_N[sample]
            left = len(waiting) - placed
            if placed == 0 or tokens < wanted or (left < rows_after and len(waiting) > rows_after):
                continue
            busiest = _busiest(step, trial, num_groups)
            waste = (busiest * ranks - work) / work
            if waste < best_waste:
                best_waste, best_groups, best_busiest = waste, num_groups, busiest
                groups[:num_groups] = trial[:num_groups]
                group_of[:] = trial_of
    return best_groups, best_busiest


@compiled
def _ceilings(step, waiting, rows_after, multiples):  # type: ignore[no-untyped-def]
    """What to try as the ceiling of a row; none twice."""
    work, floor = np.int64(0), np.int64(0)
    for sample in waiting:
        work += step.work_N[sample]
        floor = max(floor, step.least_N[sample])  # below it, some sample would never be placed
    mean = work // step.sizes_K[-1] // (rows_after + 1)
    ceilings = np.full(len(multiples) + HALVINGS, _NOT_TRIED)
    for candidate in range(len(ceilings)):
        if candidate < len(multiples):
            ceiling = max(floor, mean * multiples[candidate] // 1000)
        else:
            ceiling = _own_ceiling(step, waiting[0], candidate - len(multiples))
        if ceiling >= floor and not (ceilings[:candidate] == ceiling).any():
            ceilings[candidate] = ceiling
    return ceilings


@compiled
def _own_ceiling(step, sample, halvings):  # type: ignore[no-untyped-def]
    """What the sample's ranks have to do for it alone, in all ranks halved so many times; -1: too long for them."""
    size = len(step.sizes_K) - 1
    while size > 0 and step.sizes_K[size - 1] >= step.sizes_K[-1] >> halvings:
        size -= 1
    if step.sizes_K[-1] >> halvings < 1 or step.padded_NK[sample, size] > step.capacities_K[size]:
        return _NOT_TRIED
    return -(-step.load_NK[sample, size] // step.sizes_K[size])


@compiled
def share_out(step, num_rows, by_work, row_of):  # type: ignore[no-untyped-def]
    """Choose the row of each sample by tokens over all ranks; returns whether every sample has one.

    Args:
        by_work: a sample goes in the row with the least work; else in the fullest, each if it holds it.
        row_of: gets the row of each sample.
    """
    tokens_M, work_M = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)
    for sample in range(len(step.work_N)):
        best = -1
        for row in range(num_rows):
            if tokens_M[row] + step.fewest_N[sample] <= step.capacities_K[-1] and (
                best < 0 or (work_M[row] < work_M[best] if by_work else tokens_M[row] > tokens_M[best])
            ):
                best = row
        if best < 0:
            return False
        row_of[sample] = best
        tokens_M[best] += step.fewest_N[sample]
        work_M[best] += step.work_N[sample]
    return True
