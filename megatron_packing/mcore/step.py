"""How does a step of packs run through Megatron's schedule, and what must be put right around it?

The schedule, the forward step and the loss stay Megatron's and the script's. Around them: iterators over
packs instead of samples, the number of packs instead of the number of samples, boundaries handed to the
model, FLOPs counted from real lengths, and no update in a step without targets.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron_packing.comm.groups import ContextGroups
from megatron_packing.config import PackingConfig
from megatron_packing.errors import PackingError
from megatron_packing.mcore.attention_spec import (
    check_attention_honours_boundaries,
    let_transformer_engine_change_groups,
    rotate_by_the_packs_group,
)
from megatron_packing.mcore.feed import FedStep, StepFeeder
from megatron_packing.mcore.fit_cost import CostFitter
from megatron_packing.mcore.params import to_packed_seq_params
from megatron_packing.mcore.report import StepReporter
from megatron_packing.mcore.routers import RouterMask, average_over_packs, forget_losses, prepare_routers
from megatron_packing.mcore.unproven import check_layers
from megatron_packing.thd import PackShare


class PackedStepRunner:
    """Wraps Megatron's forward-backward functions. One for a process."""

    def __init__(self, config: PackingConfig) -> None:
        self._config = config
        self._currents: list[CurrentMicrobatch] = []
        self._prepared: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._feeder: StepFeeder | None = None
        self._reporter = StepReporter(config)
        # A microbatch takes as long whatever the number of replicas.
        layout = str(replace(config.topology, dp=1))
        self._fitter = CostFitter(config.fit_cost_steps, layout=layout, store=_megatrons_arguments)

    def wrap(self, schedule: Callable[..., Any]) -> Callable[..., Any]:
        """`schedule` with the same signature, running each call's samples as packs."""

        @functools.wraps(schedule)
        def run(
            *,
            data_iterator: Any,
            model: Any,
            num_microbatches: int,
            micro_batch_size: int,
            forward_only: bool = False,
            **keywords: Any,
        ) -> Any:
            chunks = model if isinstance(model, list) else [model]
            feeder = self._prepare(chunks)
            self._reporter.step_begins(training=not forward_only)
            if not forward_only:
                forget_losses()
                _begin_fitting(self._fitter, feeder)
            step = feeder.feed(data_iterator, num_microbatches, training=not forward_only)
            iterators = [PackIterator(step.shares, current, self._fitter.mark) for current in self._currents]
            for current in self._currents:
                current.groups = feeder.groups
            timing = contextlib.nullcontext() if forward_only else self._fitter.timing(_config_of(chunks), step.shares)
            with timing:
                losses = schedule(
                    data_iterator=iterators if isinstance(data_iterator, list) else iterators[0],
                    model=model,
                    num_microbatches=len(step.shares),
                    micro_batch_size=1,
                    forward_only=forward_only,
                    **keywords,
                )
            for current in self._currents:
                current.share = None
            _running.clear()
            if not forward_only:
                average_over_packs(samples_per_rank=num_microbatches, packs_per_rank=_packs_per_rank(step))
                _count_real_work(step, self._config.topology.cp)
                if step.figures.targets == 0:
                    losses = _skip_update(chunks, losses)
            self._reporter.step_ended(step.figures, step.lost, training=not forward_only)
            return losses

        return run

    def run_ends(self) -> None:
        """Say what the run lost. Call once no step follows."""
        if self._feeder is not None:
            self._feeder.close()
        self._reporter.run_ends()

    def _prepare(self, chunks: list[nn.Module]) -> StepFeeder:
        """Hook each chunk once; build the feeder at the first step, when Megatron's process groups exist."""
        for number, chunk in enumerate(chunks):
            if chunk not in self._prepared:
                if number == len(self._currents):
                    self._currents.append(CurrentMicrobatch())
                prepare_chunk(chunk, self._currents[number])
                if self._config.smallest_group is not None:
                    rotate_by_the_packs_group(chunk)
                    let_transformer_engine_change_groups(chunk)
                self._prepared.add(chunk)
        if self._feeder is None:
            self._feeder = StepFeeder(self._config, chunks)
        return self._feeder


def prepare_chunk(chunk: nn.Module, current: "CurrentMicrobatch") -> None:
    """Make a model chunk run packs: once each. `current.share` is then the pack that its forward is given.

    Raises:
        ConfigError: the chunk's attention, or a layer, would look across samples.
    """
    from megatron.core.utils import get_model_config

    check_attention_honours_boundaries(chunk)
    check_layers(chunk)
    config = get_model_config(chunk)
    config.variable_seq_lengths = True  # packs differ in length; argument validation hard-codes False
    current.router_mask = prepare_routers(chunk)
    chunk.register_forward_pre_hook(current.hand_in_boundaries, with_kwargs=True)
    if not config.apply_rope_fusion:  # the fused kernel reads the boundaries itself
        _restart_rope_in_each_sample(chunk, current)


class CurrentMicrobatch:
    """The pack that is going through a model chunk, set by its iterator and read by the hooks."""

    def __init__(self) -> None:
        self.share: PackShare | None = None
        self.groups: ContextGroups | None = None
        """Where the ranks that share a pack change from one to the next."""
        self.router_mask = RouterMask(has_routers=False, is_cut=False)

    def hand_in_boundaries(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Forward pre-hook: the pack's boundaries and padding mask, in place of whatever the script built."""
        if self.share is None:
            return args, kwargs
        kwargs = {**kwargs, "packed_seq_params": to_packed_seq_params(self.share, self.groups)}
        mask = self.router_mask.of(self.share)
        if mask is not None:
            kwargs["padding_mask"] = mask
        return args, kwargs


class PackIterator(Iterator[PackShare]):
    """Gives the packs of a step to the script's forward step and notes which one is current."""

    def __init__(
        self, shares: Sequence[PackShare], current: CurrentMicrobatch, taken: Callable[[], None] = lambda: None
    ) -> None:
        self._remaining = iter(shares)
        self._current = current
        self._taken = taken

    def __next__(self) -> PackShare:
        self._taken()
        self._current.share = next(self._remaining).to("cuda")
        _running[:] = [self._current.share]
        return self._current.share


_running: list[PackShare] = []
"""The pack that the script's forward step took last, which is the one whose loss it computes."""


def current_pack() -> PackShare:
    """This rank's share of the pack that runs now, for a loss that looks at samples. Call it where the loss is made.

    Raises:
        PackingError: no pack is running.
    """
    if not _running:
        raise PackingError("no pack is running; ask for it in the loss of a packed run, right after the forward pass.")
    return _running[0]


def _restart_rope_in_each_sample(chunk: nn.Module, current: CurrentMicrobatch) -> None:
    """Give Megatron's RoPE the angles of every row of the pack, in one tensor.

    Megatron's unfused path otherwise walks through the samples one by one, in every layer, for queries
    and for keys. Angles that cover the whole pack it applies in one call.
    """
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    def angles_of_rows(module: nn.Module, args: Any, angles_P11H: Tensor) -> Tensor:
        share = current.share
        return angles_P11H if share is None else angles_P11H.index_select(0, share.pack_position_ids_T)

    for module in chunk.modules():
        if isinstance(module, RotaryEmbedding):
            module.register_forward_hook(angles_of_rows)


def _begin_fitting(fitter: CostFitter, feeder: StepFeeder) -> None:
    from megatron.training import get_args
    from megatron.training.utils import print_rank_0

    fitter.step_begins(get_args().curr_iteration, feeder.use_cost, print_rank_0)


def _megatrons_arguments() -> dict[str, Any]:
    from megatron.training import get_args

    return vars(get_args())


def _config_of(chunks: list[nn.Module]) -> Any:
    from megatron.core.utils import get_model_config

    return get_model_config(chunks[0])


def _packs_per_rank(step: FedStep) -> float:
    """Packs that a data-parallel rank ran in the mean, without dummies; of groups that change, shares of packs."""
    figures = step.figures
    real = figures.packs if step.groups_change else figures.packs - figures.dummies
    return figures.microbatches * max(1, real) / max(1, figures.packs)


def _count_real_work(step: FedStep, cp_size: int) -> None:
    """Feed Megatron's FLOP count once a step, with real lengths.

    Called here and not in the forward step: evaluation would leak into the next training step, and
    interleaved pipelines would count every pack once a chunk. A dummy counts as nothing, but is
    announced, because the count is reduced over all ranks; so are packs that a rank shares with an earlier rank of a
    group of the microbatch's own. The first rank of such a group counts for all `cp_size` that Megatron believes to
    share each pack, by which it divides.
    """
    from megatron.training import training

    if training._seqlen_stats_active:  # Megatron runs this step a second time: it counts once
        training._seqlen_stats_in_iteration.zero_()
    for share in step.shares:
        counted = share.is_dummy or (step.groups_change and share.cp_rank > 0)
        boundaries = torch.zeros(2, dtype=torch.int32) if counted else share.cu_seqlens
        for _ in range(cp_size if step.groups_change else 1):
            training.update_seqlen_stats_from_cu_seqlens(boundaries)


def _skip_update(chunks: list[nn.Module], losses: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """No rank has a target in this step: there is nothing to learn, and Adam must not move the weights.

    Megatron clamps the count of targets to 1 and would step on momentum alone, and log 0 / 0. Every
    rank knows the step's targets, so that all skip together; Megatron then counts a skipped iteration.

    Returns:
        The losses with a count of one, so that their mean is 0 and not NaN.
    """
    from megatron.core.utils import get_model_config

    # Megatron's loop sets the model's grad_scale_func to the optimizer's bound method.
    optimizer = get_model_config(chunks[0]).grad_scale_func.__self__
    if not isinstance(optimizer.step, _SkipOnce):  # Megatron may run a step a second time before it updates
        optimizer.step = _SkipOnce(optimizer)
    return [{key: _with_count_one(value) for key, value in loss.items()} for loss in losses]


class _SkipOnce:
    """Stands in for an optimizer's `step` until it is called: no update, and the real one is back."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._step = optimizer.step

    def __call__(self) -> tuple[bool, None, None]:
        self._optimizer.step = self._step
        return False, None, None


def _with_count_one(sum_and_count: Tensor) -> Tensor:
    return sum_and_count if sum_and_count.numel() != 2 else torch.tensor([0.0, 1.0], device=sum_and_count.device)
