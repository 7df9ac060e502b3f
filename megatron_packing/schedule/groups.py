"""Which CP groups may a planner form, when it chooses them anew in every microbatch? Integers only.

The DP x CP ranks are numbered as Megatron numbers them, CP ranks first: a static CP of 2 makes the groups 0-1, 2-3, ...
A group is a row of neighbours, so a microbatch's groups are told by their sizes, in order.
"""

from dataclasses import dataclass

from megatron_packing.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSizes:
    """The sizes that groups may have: the smallest times 1, 2, 4, ... as far as the ranks reach, and all ranks.

    Raises:
        ConfigError: `smallest` is no integer of at least 1.
    """

    smallest: int = 1
    """Ranks of the smallest group, as `--min-dynamic-context-parallel-size`."""
    any_size: bool = False
    """Every multiple of the smallest, instead. Such groups need process groups of their own."""

    def __post_init__(self) -> None:
        if type(self.smallest) is not int or self.smallest < 1:
            raise ConfigError(
                f"--min-dynamic-context-parallel-size is {self.smallest!r}; it counts ranks and must be an integer of "
                "at least 1."
            )

    def of(self, ranks: int) -> tuple[int, ...]:
        """The sizes for so many DP x CP ranks, ascending; the last is `ranks`.

        Raises:
            ConfigError: the ranks are no multiple of the smallest group.
        """
        units, rest = divmod(ranks, self.smallest)
        if rest or not units:
            raise ConfigError(
                f"--min-dynamic-context-parallel-size is {self.smallest}; it must divide the {ranks} DP x CP ranks."
            )
        if self.any_size:
            return tuple(range(self.smallest, ranks + 1, self.smallest))
        powers = [self.smallest << k for k in range(units.bit_length())]
        return tuple(powers if powers[-1] == ranks else [*powers, ranks])

    def is_aligned(self, first_rank: int, size: int) -> bool:
        """Whether a group of `size` may begin at `first_rank`: at a multiple of its size, unless any size may be."""
        return self.any_size or first_rank % size == 0
