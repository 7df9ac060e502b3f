"""Which samples share a pack, when the whole set is known? Best fit, longest first. O(N + C): 0.05 s for a million.

Each sample, from the longest down, goes in the pack that it fills most. Fast because lengths are small integers:
samples are sorted by counting, open packs are linked into one list for each room, and the least room that a sample
fits in is found in a bitmap of three levels, each bit of which stands for 64 of the level below.

Importing this imports numba; what it compiles is kept on disk, beside this file or in numba's own cache folder.

Legend: N samples, C tokens of a pack, P packs; a pack's room is what it can still hold.
"""

import numpy as np
import numpy.typing as npt
from numba import njit

type Int64Array = npt.NDArray[np.int64]
type Int32Array = npt.NDArray[np.int32]

_MOST_ROOMS = 1 << 22
"""Rooms that are told apart: the tables take 12 bytes for each. Larger packs are counted in coarser units."""

_ONE = np.uint64(1)
_NONE = -1


def best_fit_decreasing(tokens: Int64Array, capacity: int, max_seqs: int | None = None) -> tuple[Int32Array, int]:
    """The pack of each sample, int32 [N], numbered from 0 as they open; and the number of packs.

    Where a pack holds more than four million tokens, samples are counted in units of a few tokens, rounded up: no pack
    is too full, and one in a million of its room may stay unused.

    Args:
        tokens: padded tokens of each sample, shape [N], each from 1 to `capacity`.
        capacity: padded tokens that a pack may hold.
        max_seqs: samples that a pack may hold; None means any number.
    """
    pack_of_N = np.full(len(tokens), _NONE, dtype=np.int32)
    most = len(tokens) if max_seqs is None else max_seqs
    if len(tokens) <= most and float(tokens.sum(dtype=np.float64)) <= capacity:
        return np.zeros_like(pack_of_N), min(1, len(tokens))
    return pack_of_N, fill_up(tokens, capacity, most, pack_of_N, 0)


def fill_up(tokens: Int64Array, capacity: int, max_seqs: int, pack_of_N: Int32Array, num_packs: int) -> int:
    """Give a pack to every sample that has none, in packs that are open already or new; returns the number of packs.

    Args:
        tokens: padded tokens of each sample, shape [N], each from 1 to `capacity`.
        capacity: padded tokens that a pack may hold.
        max_seqs: samples that a pack may hold.
        pack_of_N: the pack of each sample, -1 where it has none yet; completed in place.
        num_packs: packs that are open: those in `pack_of_N` are below.
    """
    units_N, room = in_units(tokens, capacity, _MOST_ROOMS)
    return int(_best_fit(units_N, room, max_seqs, pack_of_N, num_packs))


def in_units(tokens: Int64Array, capacity: int, most: int) -> tuple[Int64Array, int]:
    """The samples' lengths, rounded up, and the capacity, rounded down, in units that make it `most` or less.

    Whatever fits in units fits in tokens: a sample of more units than the room is cut down to it, and so stays alone.
    """
    unit = -(-capacity // most)
    if unit == 1:
        return tokens, capacity
    return np.minimum(-(-tokens // unit), capacity // unit), capacity // unit


@njit(cache=True)
def _best_fit(tokens_N, capacity, most, pack_of_N, packs):  # type: ignore[no-untyped-def]
    """`fill_up` in units; a bitmap and linked lists know the rooms of open packs."""
    rooms = _no_rooms(capacity)
    newest_R = np.full(
        capacity + 1, _NONE, dtype=np.int32
    )  # of each room, the pack that came last; the rest are linked
    next_P = np.empty(packs + len(tokens_N), dtype=np.int32)
    samples_P = np.zeros(packs + len(tokens_N), dtype=np.int32)
    room_P = np.full(packs, capacity, dtype=np.int64)
    for sample, pack in enumerate(pack_of_N):
        if pack != _NONE:
            samples_P[pack] += 1
            room_P[pack] -= tokens_N[sample]
    for pack, room in enumerate(room_P):
        if room and samples_P[pack] < most:
            _open(rooms, newest_R, next_P, pack, room)

    order, start_L = longest_first(tokens_N, pack_of_N, capacity)
    for length in range(capacity, 0, -1):
        first, end = start_L[length], start_L[length - 1]
        while first < end:
            room = _least_room(rooms, length)
            if room == _NONE:
                pack, room = packs, capacity
                packs += 1
            else:
                pack = newest_R[room]
                newest_R[room] = next_P[pack]
                if newest_R[room] == _NONE:
                    _forget_room(rooms, room)
            # What is left of its room is the least that fits, if it fits at all: the pack takes more of this length.
            taken = min(end - first, room // length, most - samples_P[pack])
            for place in range(first, first + taken):
                pack_of_N[order[place]] = pack
            first += taken
            samples_P[pack] += taken
            room -= taken * length
            if room and samples_P[pack] < most:
                _open(rooms, newest_R, next_P, pack, room)
    return packs


@njit(cache=True)
def _open(rooms, newest_R, next_P, pack, room):  # type: ignore[no-untyped-def]
    """Link a pack in at its room."""
    if newest_R[room] == _NONE:
        _note_room(rooms, room)
    next_P[pack] = newest_R[room]
    newest_R[room] = pack


@njit(cache=True)
def longest_first(tokens_N, pack_of_N, capacity):  # type: ignore[no-untyped-def]
    """Samples without a pack by falling length, equals in order; and where each length begins in that: [C + 1]."""
    start_L = np.zeros(capacity + 2, dtype=np.int64)
    for sample, tokens in enumerate(tokens_N):
        start_L[tokens] += pack_of_N[sample] == _NONE
    before = 0
    for length in range(capacity, -1, -1):
        before, start_L[length] = before + start_L[length], before
    next_L = start_L.copy()
    order = np.empty(before, dtype=np.int32)
    for sample, tokens in enumerate(tokens_N):
        if pack_of_N[sample] == _NONE:
            order[next_L[tokens]] = sample
            next_L[tokens] += 1
    return order, start_L


@njit(cache=True)
def _no_rooms(capacity):  # type: ignore[no-untyped-def]
    """A set of rooms, empty. Bit r of the first level is room r; above, a bit says that a word below is not 0."""
    words = (capacity >> 6) + 1
    return (
        np.zeros(words, dtype=np.uint64),
        np.zeros((words >> 6) + 1, dtype=np.uint64),
        np.zeros((words >> 12) + 1, dtype=np.uint64),
    )


@njit(cache=True)
def _note_room(rooms, room):  # type: ignore[no-untyped-def]
    for level in rooms:
        level[room >> 6] |= _ONE << np.uint64(room & 63)
        room >>= 6


@njit(cache=True)
def _forget_room(rooms, room):  # type: ignore[no-untyped-def]
    for level in rooms:
        level[room >> 6] &= ~(_ONE << np.uint64(room & 63))
        if level[room >> 6]:
            break
        room >>= 6


@njit(cache=True)
def _least_room(rooms, wanted):  # type: ignore[no-untyped-def]
    """The least room in the set that is `wanted` or more; -1 where there is none."""
    leaves, middle, top = rooms
    found = _in_word(leaves, wanted)
    if found == _NONE:
        word = _in_word(middle, (wanted >> 6) + 1)
        if word == _NONE:
            upper = _in_level(top, (wanted >> 12) + 1)
            if upper == _NONE:
                return _NONE
            word = _in_word(middle, upper << 6)
        found = _in_word(leaves, word << 6)
    return found


@njit(cache=True)
def _in_level(level, start):  # type: ignore[no-untyped-def]
    """The first bit from `start` on, looking through all words; -1 where there is none."""
    found = _in_word(level, start)
    word = (start >> 6) + 1
    while found == _NONE and word < len(level):
        found = _in_word(level, word << 6)
        word += 1
    return found


@njit(cache=True)
def _in_word(level, start):  # type: ignore[no-untyped-def]
    """The first bit from `start` to the end of its word; -1 where there is none, or no such word."""
    if start >> 6 >= len(level):
        return _NONE
    bits = level[start >> 6] >> np.uint64(start & 63)
    if bits == 0:
        return _NONE
    place = start
    for width in (32, 16, 8, 4, 2, 1):  # halve the word in which the lowest bit is sought
        if bits & ((_ONE << np.uint64(width)) - _ONE) == 0:
            bits >>= np.uint64(width)
            place += width
    return place


def by_pack(pack_of_N: Int32Array, num_packs: int) -> tuple[Int32Array, Int64Array]:
    """Samples pack by pack, in order within each, int32 [N]; and where each pack ends in that, int64 [P]."""
    sample_ids, ends_P = np.empty_like(pack_of_N), np.zeros(num_packs, dtype=np.int64)
    _write_by_pack(pack_of_N, sample_ids, ends_P)
    return sample_ids, ends_P


@njit(cache=True)
def _write_by_pack(pack_of_N, sample_ids, ends_P):  # type: ignore[no-untyped-def]
    for pack in pack_of_N:
        ends_P[pack] += 1
    for pack in range(1, len(ends_P)):
        ends_P[pack] += ends_P[pack - 1]
    next_P = ends_P.copy()
    for sample in range(len(pack_of_N) - 1, -1, -1):
        next_P[pack_of_N[sample]] -= 1
        sample_ids[next_P[pack_of_N[sample]]] = sample
