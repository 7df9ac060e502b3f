"""Which pack takes the next sample? The first with room. O(N log P): 5 to 15 ms for 5,000 samples.

Samples keep their gather order, so two runs over the same data pack alike whatever else changes, and short samples
slip into the room that long ones left.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import accumulate

from megatron_packing.schedule.plan import Problem, even_counts


def first_fit(problem: Problem) -> list[list[int]]:
    """Each sample, in order, goes in the lowest open pack with room; then the fullest packs are halved as needed."""
    return even_counts(_lowest_with_room(problem), problem, fullest_in_halves)


def _lowest_with_room(problem: Problem) -> list[list[int]]:
    """The packs before evening out, in the order in which they opened.

    A binary tree over the packs keeps the largest room below each node; walking down it finds the lowest pack with
    room in log(P) steps. A pack that is not yet open is simply one with all its room.
    """
    num_leaves = 1 << (_most_packs(problem) - 1).bit_length()
    room = [problem.capacity] * (2 * num_leaves)  # room[1] is the root, the leaves start at num_leaves
    most = len(problem.padded) if problem.max_seqs is None else problem.max_seqs
    packs: list[list[int]] = []
    for sample, tokens in enumerate(problem.padded.tolist()):
        node = 1
        while node < num_leaves:
            node *= 2
            if room[node] < tokens:
                node += 1
        index = node - num_leaves
        if index == len(packs):
            packs.append([])
        packs[index].append(sample)
        room[node] = room[node] - tokens if len(packs[index]) < most else 0
        while node > 1:
            node //= 2
            largest = max(room[2 * node], room[2 * node + 1])
            if room[node] == largest:
                break  # nothing above changes either
            room[node] = largest
    return packs


def _most_packs(problem: Problem) -> int:
    """Packs that first fit cannot exceed, at least 1.

    A pack opened only because its first sample did not fit an earlier one, so any two packs that are not at max_seqs
    hold more than one capacity between them: at most 2 * total / capacity + 1 of those. Full ones hold max_seqs each.
    """
    num_samples = len(problem.padded)
    by_tokens = 2 * int(problem.padded.sum()) // problem.capacity + 1
    by_count = num_samples // problem.max_seqs if problem.max_seqs else 0
    return max(1, min(num_samples, by_tokens + by_count))


def fullest_in_halves(packs: list[list[int]], padded: list[int]) -> Iterator[tuple[int, int]]:
    """Cuts for `even_counts`: always the fullest pack of more than one sample, where its parts come out most alike.

    The fullest packs decide how long a microbatch takes, so these are the ones worth making smaller.
    """

    def entry(index: int) -> tuple[int, int]:
        return -sum(padded[s] for s in packs[index]), index  # among equals the lowest index

    heap = [entry(index) for index, pack in enumerate(packs) if len(pack) > 1]
    heapify(heap)
    while heap:
        _, index = heappop(heap)
        yield index, _middle([padded[s] for s in packs[index]])
        for part in (index, len(packs) - 1):
            if len(packs[part]) > 1:
                heappush(heap, entry(part))


def _middle(tokens: list[int]) -> int:
    """Where to cut a row of two or more so that its parts' sums differ least; the earliest of equals."""
    total = sum(tokens)
    left_sums = list(accumulate(tokens[:-1]))
    return 1 + min(range(len(left_sums)), key=lambda i: abs(2 * left_sums[i] - total))
