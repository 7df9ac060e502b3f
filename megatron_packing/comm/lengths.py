"""What has every rank drawn for this step? Lengths and targets, gathered over the data-parallel ranks.

Every rank leaves with the same global list, rank-major, or every rank raises: a rank that could not
read its samples still takes part, and says so. Cost: one all-gather of three integers a sample and a
few more.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_packing.comm.failures import all_gather_rows, raise_first_failure
from megatron_packing.errors import PackingError


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredLengths:
    """The samples of one step over all DP ranks. A sample's id is its index in these lists."""

    lengths: tuple[int, ...]
    """Tokens of each sample, without padding."""
    targets: tuple[int, ...]
    """Targets of each sample."""
    joined: tuple[bool, ...]
    """Whether a sample must share the pack of the one before it, as the answers of a preference pair must."""
    counts: tuple[int, ...]
    """Samples that each DP rank drew."""
    counters: tuple[int, ...] = ()
    """The ranks' counters, summed."""

    def first_id(self, rank: int) -> int:
        """Id of the first sample that `rank` drew; its others follow."""
        return sum(self.counts[:rank])

    def units(self) -> list[int]:
        """How many samples, one after the other, must share a pack; of most datasets, each stands alone."""
        starts = [i for i, joined in enumerate(self.joined) if not joined]
        return [b - a for a, b in itertools.pairwise([*starts, len(self.joined)])]

    def owners(self) -> list[int]:
        """The rank that drew each sample, by id."""
        return [rank for rank, count in enumerate(self.counts) for _ in range(count)]


def gather_lengths(
    lengths: Sequence[int],
    targets: Sequence[int],
    *,
    limit: int,
    group: dist.ProcessGroup | None,
    device: torch.device | str,
    joined: Sequence[bool] | None = None,
    counters: Sequence[int] = (),
    failure: Exception | None = None,
) -> GatheredLengths:
    """Exchange what each rank drew.

    Args:
        lengths: tokens of this rank's samples.
        targets: targets of this rank's samples.
        limit: samples a rank for which the first collective has room, the same on every rank. Where a
            rank drew more (a row of `SFTDataset` holds any number), a second one carries them.
        group: the data-parallel group; None for a single rank.
        device: where the group's backend wants its tensors.
        joined: of this rank's samples, see `GatheredLengths`; None: each stands alone.
        counters: numbers to be summed over the ranks, as many on each.
        failure: what kept this rank from drawing its samples.

    Raises:
        Exception: `failure` itself on the rank that had it; `PackingError` with its text on the others.
    """
    joined = [False] * len(lengths) if joined is None else joined
    if group is None or group.size() == 1:
        if failure is not None:
            raise failure
        return GatheredLengths(
            lengths=tuple(lengths),
            targets=tuple(targets),
            joined=tuple(joined),
            counts=(len(lengths),),
            counters=tuple(counters),
        )
    header = torch.tensor([int(failure is not None), len(lengths), *counters], dtype=torch.int64)
    drawn_3S = torch.tensor([list(lengths), list(targets), list(joined)], dtype=torch.int64).view(3, -1)
    rows = all_gather_rows(torch.cat([header, _fill(drawn_3S, limit)]), group=group, device=device)
    headers, bodies = rows[:, : header.numel()], rows[:, header.numel() :]
    if bool(headers[:, 0].any()):
        raise_first_failure(failure, group=group, device=device)
    counts = headers[:, 1].tolist()
    if max(counts) > limit:
        limit = max(counts)
        bodies = all_gather_rows(_fill(drawn_3S, limit), group=group, device=device)
    bodies = bodies.view(len(counts), 3, limit)
    everyone_3S = torch.cat([body[:, :n] for body, n in zip(bodies, counts, strict=True)], dim=1)
    all_lengths, all_targets, all_joined = everyone_3S.tolist()
    return GatheredLengths(
        lengths=tuple(all_lengths),
        targets=tuple(all_targets),
        joined=tuple(map(bool, all_joined)),
        counts=tuple(counts),
        counters=tuple(headers[:, 2:].sum(dim=0).tolist()),
    )


def _fill(drawn_3S: torch.Tensor, limit: int) -> torch.Tensor:
    """[3 * limit]: lengths, targets and joints, each cut to or filled with zeros up to `limit`."""
    filled = drawn_3S.new_zeros(3, limit)
    kept = drawn_3S[:, :limit]
    filled[:, : kept.shape[1]] = kept
    return filled.view(-1)


def check_same(
    value: int,
    what: str,
    *,
    group: dist.ProcessGroup | None,
    device: torch.device | str,
    failure: Exception | None = None,
) -> None:
    """Raise on every rank unless all ranks hold the same `value` (a non-negative 63-bit integer).

    Args:
        value: what must be equal; ignored with a `failure`.
        what: its name in the message.
        group: the ranks that compare; None for a single rank.
        device: where the group's backend wants its tensors.
        failure: what kept this rank from having a value.

    Raises:
        Exception: `failure` itself on a rank that had one.
        PackingError: another rank failed, or the ranks disagree: training on would mix two plans.
    """
    if group is None or group.size() == 1:
        if failure is not None:
            raise failure
        return
    mine = torch.tensor([-1 if failure is not None else value], dtype=torch.int64)
    values = all_gather_rows(mine, group=group, device=device)[:, 0].tolist()
    if min(values) < 0:
        raise_first_failure(failure, group=group, device=device)
    if len(set(values)) > 1:
        raise PackingError(
            f"{what} differs between data-parallel ranks: {_who_holds_what(values, group)}. They must run the same "
            "version with the same flags and see the same data."
        )


def _who_holds_what(values: Sequence[int], group: dist.ProcessGroup) -> str:
    """Values with the global ranks that hold them, the rarest first: most often it is one rank that is wrong."""
    ranks_of: dict[int, list[int]] = {}
    for rank, value in enumerate(values):
        ranks_of.setdefault(value, []).append(dist.get_global_rank(group, rank))
    rarest_first = sorted(ranks_of.items(), key=lambda pair: len(pair[1]))
    return "; ".join(f"rank {', '.join(map(str, ranks))}: {value}" for value, ranks in rarest_first)
