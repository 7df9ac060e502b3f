"""Who draws a step's samples, and how do its packs reach every rank that runs them?

In each data-parallel replica, and for each of its context-parallel ranks, TP rank 0 of the first stage draws
and packs (`iterator`); the other TP ranks and stages get their share of each pack from it (`comm.broadcast`).
"""

from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_packing.comm.broadcast import ModelParallel, share_packs
from megatron_packing.comm.failures import all_gather_rows, device_of
from megatron_packing.comm.groups import ContextGroups
from megatron_packing.config import PackingConfig
from megatron_packing.mcore.costs import cost_of_model, with_communication
from megatron_packing.mcore.iterator import PackedStep, StepFigures, StepPacker, group_sizes_of
from megatron_packing.mcore.lost import LostInStep
from megatron_packing.mcore.prefetch import PrefetchingPacker
from megatron_packing.mcore.watch import ReadLimit
from megatron_packing.schedule import CostModel
from megatron_packing.thd import PackShare, share_of_rank


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FedStep:
    """This rank's shares of a step's packs, in the order in which they run, and the step's figures."""

    shares: tuple[PackShare, ...]
    figures: StepFigures
    lost: LostInStep | None
    """The rows that the step lost, on ranks that draw; None elsewhere."""
    groups_change: bool = False
    """Whether the ranks that share a pack change from one to the next."""


class StepFeeder:
    """Feeds this rank, step after step. Built once Megatron's process groups and the model exist.

    Args:
        config: the run's settings.
        chunks: the rank's model chunks, for the shape of its pipeline.
    """

    def __init__(self, config: PackingConfig, chunks: list[nn.Module]) -> None:
        self._place = _find_place()
        self._packers: dict[bool, StepPacker] = {}
        """Of training and of evaluation, on ranks that draw."""
        who_draws = {True: _who_draws(config.prefetch), False: _who_draws()}
        if self._place.has_packs:
            limit = ReadLimit(config.data_timeout)
            self._packers = {
                training: _make_packer(config if training else config.for_evaluation(), chunks, limit, drawing)
                for training, drawing in who_draws.items()
            }
        self._prefetching = PrefetchingPacker(self._packers[True]) if config.prefetch and self._packers else None
        self.groups = _make_groups(config) if config.smallest_group is not None else None
        """Where the ranks that share a pack change from one to the next."""

    def use_cost(self, cost: CostModel) -> None:
        """Plan with this cost from the next step on; the same on every rank that draws."""
        for packer in self._packers.values():
            packer.use_cost(cost)

    def feed(self, data_iterator: Iterator[Any] | None, count: int, *, training: bool) -> FedStep:
        """Draw `count` items in each replica, and give this rank its share of every pack.

        Args:
            data_iterator: the rank's, if it draws.
            count: items.
            training: or else under the settings of evaluation.

        Raises:
            PackingError: on every rank, when any rank failed.
        """
        shares: list[PackShare] | None = None
        figures: StepFigures | None = None
        lost: LostInStep | None = None
        failure: Exception | None = None
        packer = self._packers.get(training)
        if packer is not None:
            try:
                step = self._pack(packer, _given(data_iterator), count, training=training)
                shares = [
                    share_of_rank(batch, cp_size=size, cp_rank=rank)
                    for batch, (size, rank) in zip(step.batches, step.places, strict=True)
                ]
                figures, lost = step.figures, step.lost
            except Exception as error:  # shared with the ranks that wait for packs
                failure = error
        numbers = [0.0] * len(fields(StepFigures)) if figures is None else [float(x) for x in astuple(figures)]
        mine, numbers = share_packs(shares, numbers, self._place, failure=failure)
        figures = _figures_from(numbers)
        return FedStep(shares=tuple(mine), figures=figures, lost=lost, groups_change=self.groups is not None)

    def close(self) -> None:
        """Call once no step follows."""
        if self._prefetching is not None:
            self._prefetching.close()

    def _pack(self, packer: StepPacker, data_iterator: Iterator[Any], count: int, *, training: bool) -> PackedStep:
        if self._prefetching is None or not training:
            return packer.pack(data_iterator, count)
        return self._prefetching.pack(data_iterator, count, another_follows=_another_step_follows())


def _another_step_follows() -> bool:
    """Whether this step of training is not the run's last; Megatron may still end the run before the next."""
    from megatron.training.global_vars import get_args

    args = get_args()
    return args.curr_iteration + 1 < args.train_iters


def _find_place() -> ModelParallel:
    """This rank's place among Megatron's groups."""
    from megatron.core import parallel_state as groups

    group = groups.get_model_parallel_group()
    return ModelParallel(
        group=group,
        source=groups.get_model_parallel_src_rank(),
        tp_group=groups.get_tensor_model_parallel_group(),
        tp_source=groups.get_tensor_model_parallel_src_rank(),
        pp_group=groups.get_pipeline_model_parallel_group(),
        is_first_stage=groups.is_pipeline_first_stage(ignore_virtual=True),
        is_last_stage=groups.is_pipeline_last_stage(ignore_virtual=True),
        last_stage=groups.get_pipeline_model_parallel_last_rank(),
        device=device_of(group),
    )


def _make_groups(config: PackingConfig) -> ContextGroups:
    from megatron.core import parallel_state
    from megatron.training.global_vars import get_args

    mine = parallel_state.get_data_parallel_group(with_context_parallel=True)
    minutes = get_args().distributed_timeout_minutes
    return ContextGroups(_of_all_ranks(mine), group_sizes_of(config).of(mine.size()), timedelta(minutes=minutes))


def _of_all_ranks(mine: dist.ProcessGroup) -> list[tuple[int, ...]]:
    """The global ranks of this rank's group and of those that the others have in its place: the same on every rank."""
    ranks = torch.tensor(dist.get_process_group_ranks(mine))
    return sorted(set(map(tuple, all_gather_rows(ranks, group=dist.group.WORLD, device=device_of()).tolist())))


@dataclass(frozen=True, slots=True, kw_only=True)
class _WhoDraws:
    """The process groups of the ranks that draw and plan one step."""

    group: dist.ProcessGroup
    """Of data parallelism."""
    siblings: dist.ProcessGroup | None
    """Of data and context parallelism; None where CP is 1."""


def _who_draws(of_their_own: bool = False) -> _WhoDraws:
    """Megatron's groups; or the same ranks over gloo, so that a thread may use them beside Megatron and any backend.

    Call on every rank of the job: also on those that do not draw.
    """
    from megatron.core import parallel_state

    group, siblings = parallel_state.get_data_parallel_group(), None
    cp = parallel_state.get_context_parallel_world_size()
    if cp > 1:
        siblings = parallel_state.get_data_parallel_group(with_context_parallel=True)
        # Plans number the DP x CP ranks as this group does: CP ranks first.
        assert siblings.rank() % cp == parallel_state.get_context_parallel_rank()
    if of_their_own:
        group, siblings = _same_ranks(group), None if siblings is None else _same_ranks(siblings)
    return _WhoDraws(group=group, siblings=siblings)


def _same_ranks(group: dist.ProcessGroup) -> dist.ProcessGroup:
    from megatron.training.global_vars import get_args

    minutes = timedelta(minutes=get_args().distributed_timeout_minutes)
    # All of them on all ranks: torch numbers groups, and ranks that had made fewer would wait in the next one for ever.
    made = {ranks: dist.new_group(list(ranks), timeout=minutes, backend="gloo") for ranks in _of_all_ranks(group)}
    return made[tuple(dist.get_process_group_ranks(group))]


def _make_packer(config: PackingConfig, chunks: list[nn.Module], limit: ReadLimit, drawing: _WhoDraws) -> StepPacker:
    from megatron.core.utils import get_model_config
    from megatron.training.global_vars import get_args

    model = get_model_config(chunks[0])
    # Interleaved stages run microbatches in groups, none of which may be cut.
    multiple = model.microbatch_group_size_per_vp_stage if len(chunks) > 1 else 1
    cost = cost_of_model(model, vocabulary=get_args().padded_vocab_size)
    if config.smallest_group is not None:
        cost = with_communication(cost, model)
    return StepPacker(
        config,
        group=drawing.group,
        siblings=drawing.siblings,
        device=device_of(drawing.group),
        limit=limit,
        microbatch_multiple=multiple,
        cost=cost,
    )


def _given(data_iterator: Any) -> Iterator[Any]:
    """The rank's iterator; interleaved stages hand over one for each chunk, of which only the first has data."""
    if isinstance(data_iterator, list):
        return next(iterator for iterator in data_iterator if iterator is not None)
    assert data_iterator is not None, "a rank that draws samples has a data iterator"
    return data_iterator


def _figures_from(numbers: list[float]) -> StepFigures:
    """The inverse of `astuple`; counts come back as integers."""
    pairs = zip(fields(StepFigures), numbers, strict=True)
    return StepFigures(**{field.name: int(x) if field.type is int else x for field, x in pairs})
