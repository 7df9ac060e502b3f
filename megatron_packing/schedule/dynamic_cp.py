"""How should the DP x CP ranks be grouped, microbatch by microbatch? 5 to 30 ms for 512 samples on 64 ranks.

With a static CP every sample is shared by as many ranks as the longest needs. Here each microbatch has groups of its
own: a short sample stays on one rank and pays no communication, a long one may get more ranks than it needs to fit, so
that nobody waits for it. `group_rows` searches for rows; this file says what is searched, and takes the best.

Every plan is found in integers, and is the same on every machine. Sets of more than a few thousand samples are planned
in parts, so that planning grows linearly.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from megatron_packing.schedule.cost import CostModel
from megatron_packing.schedule.items import Items
from megatron_packing.schedule.plan import GroupedPacks, Problem
from megatron_packing.topology import Topology

if TYPE_CHECKING:
    from megatron_packing.schedule.group_rows import Step

type Int64Array = npt.NDArray[np.int64]

_AT_ONCE = 4096
"""Samples that are planned together."""
_ALL_WORK = 2.0**40
"""What the work of all samples is scaled to: a share of 1e-9 still counts, and no product leaves 64 bits."""
_MORE_ROWS = 6
"""Rows above the least that are tried while rows in turn do not hold everything."""
_WIDE_SEARCH = 4
"""Up to so many rows, every candidate is tried as the first row's ceiling: the rest depends on it most."""
_MULTIPLES = np.array([1000, 1020, 1050, 1100, 1150, 1200, 1300, 1450, 1600, 1800, 2100, 2500, 3000, 4000, 6000])
"""Ceilings to try, in thousandths of the mean rank's work in a row."""
_LAST_ROW_TRIES = 14
_POLISH_TRIES = 8
"""Ceilings that a search for the lowest tries, where a row must hold all that is left, and where it does already."""
_SHARES = (1000, 995, 985, 970, 950)
"""Thousandths of later rows' room that a row may count on: packs are seldom filled to the last token."""


class _Rows:
    """A way to run all samples, row by row. Written by a search, then read.

    Args:
        step: what has to be run.
        num_rows: rows that there are.
    """

    def __init__(self, step: "Step", num_rows: int) -> None:
        from megatron_packing.schedule.group_rows import COLUMNS

        self.total = 0
        """Sum over rows of what the busiest rank does."""
        self.row_of = np.zeros(len(step.work_N), dtype=np.int64)
        self.group_of = np.zeros(len(step.work_N), dtype=np.int64)
        self.groups = np.zeros((num_rows, int(step.sizes_K[-1] // step.sizes_K[0]), COLUMNS), dtype=np.int64)
        """Of each row, the lines of its groups."""

    def put(self, row: int, samples: Int64Array, group_of: Int64Array, busiest: int) -> None:
        """Say which group of a row each of `samples` is in, and what the row's busiest rank does."""
        self.row_of[samples], self.group_of[samples] = row, group_of
        self.total += int(busiest)


def dynamic_cp(problem: Problem) -> GroupedPacks:
    """The groups of each microbatch, larger ones first, which makes them aligned; dummies on ranks that are left."""
    longest_first = problem.longest_first()
    parts = max(1, -(-len(longest_first) // _AT_ONCE))
    sizes = problem.group_sizes.of(problem.topology.dp * problem.topology.cp)
    microbatches = [
        _with_dummies(groups, sizes)
        for part in range(parts)
        for groups in _plan_part(problem, longest_first[part::parts], sizes)
    ]
    missing = -len(microbatches) % problem.microbatch_multiple if microbatches else problem.microbatch_multiple
    return GroupedPacks(microbatches=microbatches + [_with_dummies([], sizes) for _ in range(missing)])


def warm_up() -> None:
    """Compile what `dynamic_cp` needs, or load it: seconds the first time on a machine, then about 0.5 s a process."""
    lengths = np.array([2, 1], dtype=np.int64)
    dynamic_cp(
        Problem(
            items=Items(lengths=lengths, units=None),
            lengths=lengths,
            padded=lengths,
            topology=Topology(dp=2),
            capacity=2,
            max_seqs=None,
            microbatch_multiple=1,
            cost=CostModel(linear=1, quadratic=0),
            balance="auto",
        )
    )


def _with_dummies(groups: list[tuple[int, list[int]]], sizes: tuple[int, ...]) -> list[tuple[int, list[int]]]:
    """The groups and enough dummies for all ranks, larger groups first."""
    free = sizes[-1] - sum(size for size, _ in groups)
    filled = list(groups)
    for size in reversed(sizes):
        filled += [(size, []) for _ in range(free // size)]
        free %= size
    return sorted(filled, key=lambda group: -group[0])


def _plan_part(problem: Problem, samples: Int64Array, sizes: tuple[int, ...]) -> Iterator[list[tuple[int, list[int]]]]:
    """The rows of some samples, given longest first."""
    from megatron_packing.schedule import group_rows  # brings in numba: only for who needs it

    if not len(samples):
        return
    step = _step(problem, samples, sizes)
    found = _search(step, problem)
    for row in range(len(found.groups)):
        inside = found.row_of == row
        num_groups = int(found.group_of[inside].max(initial=-1)) + 1
        members: list[list[int]] = [[] for _ in range(num_groups)]
        for sample, group in zip(samples[inside].tolist(), found.group_of[inside].tolist(), strict=True):
            members[group].append(sample)
        lines = found.groups[row, :num_groups, group_rows.SIZE].tolist()
        yield [(sizes[size], ids) for size, ids in zip(lines, members, strict=True)]


def _step(problem: Problem, samples: Int64Array, sizes: tuple[int, ...]) -> "Step":
    """The tables of a search, in whole numbers."""
    from megatron_packing.schedule.group_rows import Step

    tokens_N = np.ascontiguousarray(problem.lengths[samples])
    costs_N = problem.items.work(problem.cost)[samples]
    talk_N = problem.cost.communication * tokens_N.astype(np.float64)
    total = math.fsum(costs_N) + math.fsum(talk_N)  # fsum rounds once: the same sum on every machine
    if total == 0:
        costs_N, total = tokens_N.astype(np.float64), float(tokens_N.sum())
    work_N = np.maximum(1, np.rint(costs_N * (_ALL_WORK / total))).astype(np.int64)
    whole_talk_N = np.rint(talk_N * (_ALL_WORK / total)).astype(np.int64)

    sizes_K = np.array(sizes, dtype=np.int64)
    alignments_K = np.array([problem.topology.alignment_of(size) for size in sizes], dtype=np.int64)
    capacities_K = sizes_K * problem.max_tokens_per_rank
    padded_NK = np.ascontiguousarray(problem.items.padded(alignments_K)[samples])
    load_NK = work_N[:, None] + np.where(sizes_K > 1, sizes_K, 0) * whole_talk_N[:, None]
    fits_NK = padded_NK <= capacities_K
    return Step(
        tokens_N=tokens_N + (problem.items.samples()[samples] - 1) * (alignments_K[-1] - 1),
        work_N=work_N,
        talk_N=whole_talk_N,
        padded_NK=padded_NK,
        load_NK=load_NK,
        least_N=np.where(fits_NK, -(-load_NK // sizes_K), np.iinfo(np.int64).max).min(axis=1),
        fewest_N=padded_NK[np.arange(len(tokens_N)), fits_NK.argmax(axis=1)],
        sizes_K=sizes_K,
        inverse_K=1.0 / sizes_K,
        alignments_K=alignments_K,
        capacities_K=capacities_K,
        max_seqs=len(tokens_N) if problem.max_seqs is None else problem.max_seqs,
    )


def _search(step: "Step", problem: Problem) -> _Rows:
    """The best of all tries: with the fewest rows that rows in turn can do with, or few more; else one by one."""
    by_count = -(-len(step.work_N) // (step.max_seqs * int(step.sizes_K[-1] // step.sizes_K[0])))
    least = max(1, by_count, -(-int(step.fewest_N.sum()) // int(step.capacities_K[-1])))
    multiple = problem.microbatch_multiple
    least += -least % multiple
    policies = _policies(communication=bool(step.talk_N.any()))
    best: _Rows | None = None
    for num_rows in range(least, least + _MORE_ROWS * multiple + 1, multiple):
        in_turn = _best(_in_turn(step, num_rows, policies, wide=least <= _WIDE_SEARCH))
        best = _best(filter(None, [best, in_turn, *_by_content(step, num_rows, policies)]))
        if in_turn is not None:
            break
    return best or _one_by_one(step)


def _best(tries: Iterator[_Rows]) -> _Rows | None:
    return min(tries, key=lambda rows: rows.total, default=None)


def _policies(*, communication: bool) -> Int64Array:
    """Ways to choose a group. Where communication costs nothing, nothing speaks against large ones."""
    from megatron_packing.schedule.group_rows import OPEN_EAGERLY, OPEN_SMALLER, SMALL_FIRST, TIGHTEST

    indifferent = [TIGHTEST, OPEN_EAGERLY]
    sparing = [TIGHTEST | SMALL_FIRST | OPEN_SMALLER, SMALL_FIRST | OPEN_EAGERLY]
    return np.array(sparing + indifferent[::-1] if communication else indifferent)


def _in_turn(step: "Step", num_rows: int, policies: Int64Array, *, wide: bool) -> Iterator[_Rows]:
    """Rows one after the other. `wide`: with each ceiling for the first row, until they hold everything."""
    from megatron_packing.schedule.group_rows import HALVINGS

    wide = wide and num_rows > 1
    for share in _SHARES:
        found = False
        for forced in range(-1, len(_MULTIPLES) + HALVINGS if wide else 0):
            rows = _filled_in_turn(step, num_rows, policies, share, forced)
            if rows is not None:
                found = True
                yield rows
        if wide and found:
            return


def _filled_in_turn(step: "Step", num_rows: int, policies: Int64Array, share: int, forced: int) -> _Rows | None:
    """Each row takes of the waiting samples what wastes least; None where the last one cannot hold what is left."""
    from megatron_packing.schedule.group_rows import most_worth_it

    rows, waiting = _Rows(step, num_rows), np.arange(len(step.work_N))
    for row in range(num_rows):
        if not len(waiting):
            break
        groups, group_of = rows.groups[row], np.empty_like(waiting)
        rows_after = num_rows - 1 - row
        if rows_after:
            first = forced if row == 0 else -1
            found, busiest = most_worth_it(
                step, waiting, rows_after, share, _MULTIPLES, first, policies, groups, group_of
            )
        else:
            found, busiest = _hold_all(step, waiting, 3, policies, groups, group_of)
        if not found:
            return None
        placed = group_of >= 0
        if rows_after:
            busiest = _polish(step, waiting[placed], busiest, policies, groups, group_of, placed)
        rows.put(row, waiting[placed], group_of[placed], busiest)
        waiting = waiting[~placed]
    return None if len(waiting) else rows


def _hold_all(
    step: "Step", samples: Int64Array, factor: int, policies: Int64Array, groups: Int64Array, group_of: Int64Array
) -> tuple[int, int]:
    """`fit_row` from the least that the busiest rank must do to `factor` times that."""
    from megatron_packing.schedule.group_rows import FINE, fit_row

    low = max(int(step.least_N[samples].max()), -(-int(step.work_N[samples].sum()) // int(step.sizes_K[-1])))
    found, busiest = fit_row(
        step, samples, low - low // FINE, low * factor, _LAST_ROW_TRIES, policies, groups, group_of
    )
    return int(found), int(busiest)


def _polish(
    step: "Step",
    samples: Int64Array,
    busiest: int,
    policies: Int64Array,
    groups: Int64Array,
    group_of: Int64Array,
    placed: npt.NDArray[np.bool_],
) -> int:
    """The same samples in better groups, where there are any; returns what the busiest rank then does."""
    from megatron_packing.schedule.group_rows import fit_row

    better, better_of = np.empty_like(groups), np.empty_like(samples)
    low = int(step.work_N[samples].sum()) // int(step.sizes_K[-1])
    found, least = fit_row(step, samples, low, int(busiest), _POLISH_TRIES, policies, better, better_of)
    if not found or least >= busiest:
        return int(busiest)
    groups[:found], group_of[placed] = better[:found], better_of
    return int(least)


def _by_content(step: "Step", num_rows: int, policies: Int64Array) -> Iterator[_Rows]:
    """Rows whose samples are chosen first, then the groups of each."""
    from megatron_packing.schedule.group_rows import share_out

    for by_work in (True, False):
        rows = _Rows(step, num_rows)
        shared = share_out(step, num_rows, by_work, rows.row_of)
        if shared and all(_grouped(step, rows, row, policies) for row in range(num_rows)):
            yield rows


def _grouped(step: "Step", rows: _Rows, row: int, policies: Int64Array) -> bool:
    """Whether a row's samples could be held in groups; then they are."""
    samples = np.flatnonzero(rows.row_of == row)
    if not len(samples):
        return True
    group_of = np.empty_like(samples)
    found, busiest = _hold_all(step, samples, 4, policies, rows.groups[row], group_of)
    if found:
        rows.put(row, samples, group_of, busiest)
    return bool(found)


def _one_by_one(step: "Step") -> _Rows:
    """As many rows as it takes, each filled without a ceiling: always possible, for tiny capacities and counts."""
    from megatron_packing.schedule.group_rows import TIGHTEST, fill_row

    filled: list[tuple[Int64Array, Int64Array, Int64Array]] = []
    waiting = np.arange(len(step.work_N))
    no_ceiling = int(_ALL_WORK)  # times ranks must stay within 64 bits
    while len(waiting):
        groups, group_of = _Rows(step, 1).groups[0], np.empty_like(waiting)
        fill_row(step, waiting, no_ceiling, TIGHTEST, groups, group_of)
        placed = group_of >= 0
        filled.append((groups, waiting[placed], group_of[placed]))
        waiting = waiting[~placed]
    rows = _Rows(step, len(filled))
    for row, (groups, samples, group_of) in enumerate(filled):
        rows.groups[row] = groups
        rows.put(row, samples, group_of, 0)
    return rows
