"""How should the DP x CP ranks be grouped, microbatch by microbatch? 5 to 30 ms for 512 samples on 64 ranks.

With a static CP every sample is shared by as many ranks as the longest needs. Here each microbatch has groups of its
own: a short sample stays on one rank and pays no communication, a long one may get more ranks than it needs to fit, so
that nobody waits for it. `group_rows` searches for rows; this file says what is searched, and takes the best.

Every plan is found in integers, and is the same on every machine. Sets of more than a few thousand samples are planned
in parts, so that planning grows linearly.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megatron_packing.schedule.plan import GroupedPacks, Problem

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
_SHARES = (1000, 995, 985, 970, 950)
"""Thousandths of later rows' room that a row may count on: packs are seldom filled to the last token."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Rows:
    """A way to run all samples, as `group_rows` writes it."""

    total: int
    """Sum over rows of what the busiest rank does."""
    row_of: Int64Array
    group_of: Int64Array
    groups: Int64Array
    """Of each row, the lines of its groups, shape [M, G, COLUMNS]."""


def dynamic_cp(problem: Problem) -> GroupedPacks:
    """The groups of each microbatch, larger ones first, which makes them aligned; dummies on ranks that are left."""
    longest_first = np.argsort(-problem.lengths, kind="stable")
    parts = max(1, -(-len(longest_first) // _AT_ONCE))
    sizes = problem.group_sizes.of(problem.topology.dp * problem.topology.cp)
    microbatches = [
        _with_dummies(groups, sizes)
        for part in range(parts)
        for groups in _plan_part(problem, longest_first[part::parts], sizes)
    ]
    missing = -len(microbatches) % problem.microbatch_multiple if microbatches else problem.microbatch_multiple
    return GroupedPacks(microbatches=microbatches + [_with_dummies([], sizes) for _ in range(missing)])


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
    costs_N = problem.cost.of(tokens_N)
    talk_N = problem.cost.communication * tokens_N.astype(np.float64)
    total = math.fsum(costs_N) + math.fsum(talk_N)  # fsum rounds once: the same sum on every machine
    if total == 0:
        costs_N, total = tokens_N.astype(np.float64), float(tokens_N.sum())
    work_N = np.maximum(1, np.rint(costs_N * (_ALL_WORK / total))).astype(np.int64)
    whole_talk_N = np.rint(talk_N * (_ALL_WORK / total)).astype(np.int64)

    sizes_K = np.array(sizes, dtype=np.int64)
    alignments_K = np.array([problem.topology.alignment_of(size) for size in sizes], dtype=np.int64)
    capacities_K = sizes_K * problem.max_tokens_per_rank
    padded_NK = -(-tokens_N[:, None] // alignments_K) * alignments_K
    load_NK = work_N[:, None] + np.where(sizes_K > 1, sizes_K, 0) * whole_talk_N[:, None]
    fits_NK = padded_NK <= capacities_K
    return Step(
        tokens_N=tokens_N,
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
    from megatron_packing.schedule.group_rows import HALVINGS, rows_in_turn

    wide = wide and num_rows > 1
    for share in _SHARES:
        found = False
        for forced in range(-1, len(_MULTIPLES) + HALVINGS if wide else 0):
            room = _Room(step, num_rows)
            rows = room.filled_by(rows_in_turn, share, _MULTIPLES, forced, policies)
            if rows is not None:
                found = True
                yield rows
        if wide and found:
            return


def _by_content(step: "Step", num_rows: int, policies: Int64Array) -> Iterator[_Rows]:
    """Rows whose samples are chosen first."""
    from megatron_packing.schedule.group_rows import rows_by_content

    for by_work in (True, False):
        rows = _Room(step, num_rows).filled_by(rows_by_content, by_work, policies)
        if rows is not None:
            yield rows


class _Room:
    """Arrays that a compiled search writes its rows in."""

    def __init__(self, step: "Step", num_rows: int) -> None:
        from megatron_packing.schedule.group_rows import COLUMNS

        num_samples, ranks = len(step.work_N), int(step.sizes_K[-1] // step.sizes_K[0])
        self._step, self._num_rows = step, num_rows
        self._row_of = np.zeros(num_samples, dtype=np.int64)
        self._group_of = np.zeros(num_samples, dtype=np.int64)
        self._groups = np.zeros((num_rows, ranks, COLUMNS), dtype=np.int64)
        self._counts = np.zeros(num_rows, dtype=np.int64)

    def filled_by(self, search: Any, *options: Any) -> _Rows | None:
        """What the search finds; None where it does not hold every sample."""
        arrays = (self._row_of, self._group_of, self._groups, self._counts)
        total = int(search(self._step, self._num_rows, *options, *arrays))
        if total < 0:
            return None
        return _Rows(total=total, row_of=self._row_of, group_of=self._group_of, groups=self._groups)


def _one_by_one(step: "Step") -> _Rows:
    """As many rows as it takes, each filled without a ceiling: always possible, for tiny capacities and counts."""
    from megatron_packing.schedule.group_rows import COLUMNS, TIGHTEST, fill_row

    ranks = int(step.sizes_K[-1] // step.sizes_K[0])
    waiting = np.arange(len(step.work_N))
    row_of, group_of = np.zeros_like(waiting), np.zeros_like(waiting)
    rows: list[Int64Array] = []
    no_ceiling = np.int64(2**40)  # times ranks must stay within 64 bits
    while len(waiting):
        groups, chosen = np.zeros((ranks, COLUMNS), dtype=np.int64), np.empty_like(waiting)
        fill_row(step, waiting, no_ceiling, TIGHTEST, groups, chosen)
        placed = waiting[chosen >= 0]
        row_of[placed], group_of[placed] = len(rows), chosen[chosen >= 0]
        waiting = waiting[chosen < 0]
        rows.append(groups)
    return _Rows(total=0, row_of=row_of, group_of=group_of, groups=np.stack(rows))
