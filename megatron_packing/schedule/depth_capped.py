"""How few packs hold a whole set, when each takes at most D samples? A linear program, rounded; 1 to 3 s a set.

Best fit wastes room where D binds: long samples use up each other's packs, and the short ones that are left fill D
places without filling a pack. Which *patterns* (the lengths of one pack) to use how often is the cutting-stock problem
of Gilmore and Gomory, A linear programming approach to the cutting-stock problem, Operations Research 9 (1961):

    least sum of x_p   such that the slots of all patterns, each of which may serve a shorter sample, hold every sample

Patterns are too many to list. They are made as they are needed: the program's prices say what a sample of each length
is worth, and dynamic programming over (samples, tokens) finds the dearest patterns, which join. When none is worth
more than the pack that it costs, the program's optimum is that of all patterns; before that, its value divided by the
dearest pattern's worth is a lower bound. Whole numbers come from rounding down, and best fit packs what is left.

The floating-point program may be solved differently on another machine. Its packs are valid everywhere, but not equal:
whoever needs equal ones must hand round the result.

Legend: N samples, P packs, D samples of a pack; U units of room in a pack (tokens, or several where a pack is large),
R distinct lengths in units, J patterns.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from megatron_packing.errors import MissingDependency
from megatron_packing.schedule.best_fit import Int32Array, Int64Array, fill_up, in_units, longest_first

type Float64Array = npt.NDArray[np.float64]

DEEPEST = 16
"""The most samples of a pack for which patterns are searched: each round takes D x U x R steps."""

_MOST_UNITS = 1024
_ROUNDS = 60
_NEW_PATTERNS = 512
"""Patterns that join in a round, at most: more make each program slower, fewer make more of them."""
_ROUNDING = 1e-6
"""What a number of copies may fall short of a whole one by the solver's rounding."""
_CLOSE = 1e-6
"""Where the value is this near to its lower bound, relative to it, another round could not save a pack in a million."""
_WORTH = 1 + 1e-7
"""What a pattern must be worth to join; less is rounding."""
_SCALE = 1000.0
"""What demands are scaled to sum up to: the solver's tolerances are absolute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """The solved program."""

    patterns_JD: Int64Array
    """Lengths in units of each pattern, longest first; 0 where it has fewer than D."""
    copies_J: Float64Array
    """How often each pattern is used: a fraction, before rounding."""
    value: float
    """The sum of `copies_J`."""
    lower_bound: float
    """No packing of these lengths, in these units, has fewer packs."""


def depth_capped(tokens: Int64Array, capacity: int, max_seqs: int) -> tuple[Int32Array, int]:
    """The pack of each sample, int32 [N], and the number of packs.

    Args:
        tokens: padded tokens of each sample, shape [N] with N of at least 1, each from 1 to `capacity`.
        capacity: padded tokens that a pack may hold.
        max_seqs: D, samples that a pack may hold, from 1 to `DEEPEST`.

    Raises:
        MissingDependency: SciPy, which solves the program, is not installed.
    """
    units_N, room = in_units(tokens, capacity, _MOST_UNITS)
    strategy = solve(np.bincount(units_N, minlength=room + 1), max_seqs)
    copies_J = np.floor(strategy.copies_J + _ROUNDING).astype(np.int64)
    pack_of_N = np.full(len(tokens), -1, dtype=np.int32)
    order_N, _ = longest_first(units_N, pack_of_N, room)
    _match(units_N, order_N, *_slots(strategy.patterns_JD, copies_J), pack_of_N)
    return pack_of_N, fill_up(tokens, capacity, max_seqs, pack_of_N, int(copies_J.sum()))


def solve(counts_U: Int64Array, max_seqs: int) -> Strategy:
    """The program's optimum, within a millionth.

    Args:
        counts_U: samples of each length, shape [room + 1]: `counts_U[s]` samples of `s` units; `counts_U[0]` is 0.
        max_seqs: D, samples of a pattern.

    Raises:
        MissingDependency: SciPy is not installed.
    """
    lengths_R = np.flatnonzero(counts_U)[::-1].astype(np.int64)  # longest first: slots serve what stands further on
    room, scale = len(counts_U) - 1, counts_U.sum() / _SCALE
    demand_R = counts_U[lengths_R] / scale
    patterns = _first_patterns(lengths_R, room, max_seqs)
    known = set(patterns)
    bound = float(demand_R @ lengths_R) / room
    for _ in range(_ROUNDS):
        value, copies_J, prices_R = _program(patterns, demand_R, lengths_R)
        dearest, found = _dearest(prices_R, lengths_R, room, max_seqs)
        bound = max(bound, float(demand_R @ prices_R) / max(1.0, dearest))
        new = [pattern for pattern in found if pattern not in known]
        if not new or value - bound <= _CLOSE * value:
            break
        patterns += new
        known.update(new)
    slots_JD = np.zeros((len(copies_J), max_seqs), dtype=np.int64)
    for row, pattern in zip(slots_JD, patterns, strict=False):  # after the last round, new ones are in no program
        row[: len(pattern)] = lengths_R[list(pattern)]
    return Strategy(
        patterns_JD=slots_JD, copies_J=copies_J * scale, value=float(value * scale), lower_bound=float(bound * scale)
    )


type Pattern = tuple[int, ...]
"""Indices into `lengths_R`, ascending: longest first."""


def _first_patterns(lengths_R: Int64Array, room: int, max_seqs: int) -> list[Pattern]:
    """Patterns that hold every sample somehow: each length, alone and with what fills its pack in 2 to D samples."""
    patterns: dict[Pattern, None] = {}
    for r, length in enumerate(lengths_R.tolist()):
        for parts in range(max_seqs):
            pattern, left = [r], room - length
            for part in range(parts, 0, -1):  # equal shares of what is left, each as long as there is a length for it
                share = int(np.searchsorted(-lengths_R, -(left // part)))
                if share == len(lengths_R):
                    break
                pattern.append(share)
                left -= int(lengths_R[share])
            patterns[tuple(sorted(pattern))] = None
    return list(patterns)


def _program(
    patterns: list[Pattern], demand_R: Float64Array, lengths_R: Int64Array
) -> tuple[float, Float64Array, Float64Array]:
    """The program over these patterns: its value, copies of each pattern [J], and what a sample of each length is
    worth in packs [R], which never rises with falling length."""
    optimize, sparse = _scipy()
    rows = np.array([r for pattern in patterns for r in pattern])
    columns = np.repeat(np.arange(len(patterns)), [len(pattern) for pattern in patterns])
    size = len(lengths_R)
    slots = sparse.csr_matrix((np.ones(len(rows)), (rows, columns)), shape=(size, len(patterns)))
    # Variable r: slots of length r that serve length r + 1.
    handed = sparse.diags_array([-np.ones(size), np.ones(size - 1)], offsets=[0, -1], shape=(size, size)).tocsr()
    held = sparse.hstack([slots, handed[:, : size - 1]]).tocsr()
    costs = np.concatenate([np.ones(len(patterns)), np.zeros(size - 1)])
    solved = optimize.linprog(costs, A_ub=-held, b_ub=-demand_R, bounds=(0, None), method="highs-ds")
    assert solved.status == 0, solved.message  # every length has a pattern, and costs are positive
    return float(solved.fun), solved.x[: len(patterns)], np.maximum(-solved.ineqlin.marginals, 0.0)


def _dearest(prices_R: Float64Array, lengths_R: Int64Array, room: int, max_seqs: int) -> tuple[float, list[Pattern]]:
    """What the dearest pattern of all is worth; and for each length the dearest with it, where worth more than 1."""
    found_RD = np.full((len(lengths_R), max_seqs), -1, dtype=np.int64)
    worth_R = np.empty(len(lengths_R))
    dearest = _price(prices_R, lengths_R, room, max_seqs, found_RD, worth_R)
    best = np.argsort(-worth_R, kind="stable")[:_NEW_PATTERNS]
    return float(dearest), list(
        dict.fromkeys(tuple(sorted(r for r in found_RD[i].tolist() if r >= 0)) for i in best if worth_R[i] > _WORTH)
    )


@njit(cache=True)
def _price(prices_R, lengths_R, room, max_seqs, found_RD, worth_R):  # type: ignore[no-untyped-def]
    """worth[d, u]: the most that d samples in u units can be worth. Returns worth[D, room]."""
    worth = np.zeros((max_seqs + 1, room + 1))
    taken = np.full((max_seqs + 1, room + 1), -1, dtype=np.int64)  # the length that comes last; -1: one sample fewer
    for d in range(1, max_seqs + 1):
        worth[d] = worth[d - 1]
        for r in range(len(lengths_R)):
            length, price = lengths_R[r], prices_R[r]
            for u in range(length, room + 1):
                with_it = worth[d - 1, u - length] + price
                if with_it > worth[d, u] + 1e-12:
                    worth[d, u] = with_it
                    taken[d, u] = r
    for r in range(len(lengths_R)):
        left = room - lengths_R[r]
        worth_R[r] = prices_R[r] + worth[max_seqs - 1, left]
        found_RD[r, 0] = r
        place = 1
        for d in range(max_seqs - 1, 0, -1):
            last = taken[d, left]
            if last >= 0:
                found_RD[r, place] = last
                left -= lengths_R[last]
                place += 1
    return worth[max_seqs, room]


def _slots(patterns_JD: Int64Array, copies_J: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """The slots of all packs in runs, longest first: length in units, first pack, and number of packs, each [runs].

    Packs are numbered pattern by pattern, so that a place in a pattern is one slot in each of a row of packs.
    """
    first_J = np.cumsum(copies_J) - copies_J
    used, place = np.nonzero(patterns_JD * (copies_J > 0)[:, None])
    lengths = patterns_JD[used, place]
    order = np.argsort(-lengths, kind="stable")
    return lengths[order], first_J[used][order], copies_J[used][order]


@njit(cache=True)
def _match(units_N, order_N, lengths, packs, copies, pack_of_N):  # type: ignore[no-untyped-def]
    """Give each sample, longest first, the shortest free slot that holds it. Takes runs of slots; uses up `copies`."""
    runs = np.empty(len(lengths), dtype=np.int64)  # those with free slots that are long enough, the shortest on top
    num_runs = 0
    following = 0
    for sample in order_N:
        while following < len(lengths) and lengths[following] >= units_N[sample]:
            runs[num_runs] = following
            num_runs += 1
            following += 1
        if num_runs:
            run = runs[num_runs - 1]
            copies[run] -= 1
            pack_of_N[sample] = packs[run] + copies[run]
            if copies[run] == 0:
                num_runs -= 1


def has_scipy() -> bool:
    """Whether SciPy is installed."""
    return find_spec("scipy") is not None


def _scipy() -> tuple[Any, Any]:
    if not has_scipy():
        raise MissingDependency(
            "packing a whole set with --thd-max-packed-sequences solves a linear program with SciPy, which is not "
            'installed. Run: pip install "megatron-packing[lp]".'
        )
    from scipy import optimize, sparse

    return optimize, sparse
