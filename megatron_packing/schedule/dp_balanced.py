"""Which packs does Megatron-LM's `dp_balanced` make? The same here, sample for sample. O(N).

Source of the behaviour: `DpBalancedScheduler` in megatron/core/datasets/data_schedule.py, Megatron-LM's dev branch.
Despite its name it balances nothing. It is here so that a run can move from there without a change, and to compare
with. One difference: where upstream stops because no sample is left to move, dummies take the missing places.
"""

from collections.abc import Iterator

from megatron_packing.schedule.plan import Problem, even_counts


def dp_balanced(problem: Problem) -> list[list[int]]:
    """Next fit in gather order: a sample that does not fit closes the open pack for good."""
    most = len(problem.padded) if problem.max_seqs is None else problem.max_seqs
    packs: list[list[int]] = []
    room = 0
    for sample, tokens in enumerate(problem.padded.tolist()):
        if not packs or tokens > room or len(packs[-1]) == most:
            packs.append([])
            room = problem.capacity
        packs[-1].append(sample)
        room -= tokens
    return even_counts(packs, problem, last_samples_backwards)


def last_samples_backwards(packs: list[list[int]], padded: list[int]) -> Iterator[tuple[int, int]]:
    """Cuts for `even_counts`: single samples off the end of the last pack, then of the one before, down to the first.

    Packs made by cutting hold one sample and are never visited.
    """
    for index in reversed(range(len(packs))):
        while len(packs[index]) > 1:
            yield index, len(packs[index]) - 1
