"""How do a step's samples become this rank's packs? Draw, tell the lengths, plan, exchange, lay out.

The samples of a step are exactly those that Megatron's sampler gave: packing changes the layout, never
which samples an update sees. Every rank runs this once a step, at the same point; whatever fails on one
rank is raised on all of them before the next collective.
"""

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_packing.comm.exchange import exchange_samples
from megatron_packing.comm.failures import raise_if_any_failed
from megatron_packing.comm.lengths import GatheredLengths, check_same, gather_lengths
from megatron_packing.config import PackingConfig
from megatron_packing.errors import PackingError
from megatron_packing.mcore import peers
from megatron_packing.mcore.costs import advise
from megatron_packing.mcore.lost import Lost, LostInStep, LostRows
from megatron_packing.mcore.watch import ReadLimit
from megatron_packing.schedule import (
    ATTENTION_ONLY,
    BalanceAdvice,
    CostModel,
    GroupSizes,
    Metrics,
    Pack,
    Plan,
    make_plan,
)
from megatron_packing.thd import PackedBatch, SampleTensors, build_pack, dummy_pack, fill_up

type Assignments = list[list[tuple[Pack, range]]]
"""Of each microbatch, its packs and the DP x CP ranks that share each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """What one step holds, over all data-parallel ranks."""

    samples: int
    packs: int
    """Packs of all ranks, dummies included."""
    dummies: int
    microbatches: int
    """Packs of each rank."""
    real_tokens: int
    padding_tokens: int
    """Rows that run and belong to no sample: alignment, dummies, and the tails that fill packs up."""
    fill: float
    """Real tokens / slots, which are packs x capacity; with the three wastes below it makes 1."""
    alignment_waste: float
    """Share of the slots between the samples' lengths and their padded lengths. They run."""
    tail_waste: float
    """Share of the slots that packs with samples leave free. They do not run, but for tails that fill packs up."""
    dummy_waste: float
    """Share of the slots that are dummies', each of which runs one unit of alignment, filled up like any pack."""
    packs_lower_bound: int
    """Packs that any plan of these samples needs; see `Metrics`, as for the three below."""
    step_imbalance: float
    lockstep_imbalance: float
    lockstep_lower_bound: float
    targets: int
    dropped: int
    """Rows that left the step, by whatever reason."""
    truncated: int
    plan_ms: float
    """Planning on this rank, and measuring the plan."""
    exchange_ms: float
    """Exchange of lengths and samples on this rank, without waiting for the data."""
    waited_ms: float
    """How long this rank's training stood still for the two above: for both, or, prefetched, for what was left."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedStep:
    """This rank's packs of one step, in the order in which they run, and the step's figures."""

    batches: tuple[PackedBatch, ...]
    figures: StepFigures
    lost: LostInStep
    places: tuple[tuple[int, int], ...]
    """Of each pack, how many ranks share it and which of them this one is."""


class StepPacker:
    """Packs one step after the other. One for training, one for evaluation; between steps it keeps only what it told.

    Args:
        config: the run's settings.
        group: the data-parallel group (context parallelism not included); None for a single rank.
        device: where that group's backend wants its tensors.
        limit: how long an item may take; one for a process, which has one handler of signals.
        siblings: the data-parallel group with context parallelism, whose ranks must all plan the same, and those of
            a replica draw the same; None where CP is 1.
        microbatch_multiple: what the number of microbatches must be a multiple of (interleaved pipelines).
        cost: what counts as work; the same on every rank.
    """

    def __init__(
        self,
        config: PackingConfig,
        *,
        group: dist.ProcessGroup | None,
        device: torch.device | str,
        limit: ReadLimit,
        siblings: dist.ProcessGroup | None = None,
        microbatch_multiple: int = 1,
        cost: CostModel = ATTENTION_ONLY,
    ) -> None:
        self._config = config
        self._cost = cost
        self._advice = BalanceAdvice(balance=config.balance)
        self._siblings = siblings
        self._microbatch_multiple = microbatch_multiple
        self._limit = limit
        self._group = group
        self._ranks: dict[str, Any] = {"group": group, "device": device}
        self._lost = LostRows(group, device)

    def use_cost(self, cost: CostModel) -> None:
        """Plan with this cost from the next step on; the same on every rank."""
        self._cost = cost

    def pack(self, data_iterator: Iterator[Any], count: int) -> PackedStep:
        """Draw `count` items and pack the step.

        Raises:
            PackingError: on every rank, when any rank failed to draw or to plan.
        """
        return self.pack_items(self.draw(data_iterator, count))

    def draw(self, data_iterator: Iterator[Any], count: int, *, steps_ahead: int = 0) -> "StepItems":
        """Draw `count` items; what keeps this rank from it is told to the others in `pack_items`.

        Args:
            data_iterator: the rank's.
            count: items.
            steps_ahead: how many steps before their own they are drawn.
        """
        items: list[Any] = []
        failure: Exception | None = None
        try:
            for number in range(count):
                items.append(self._limit.next(data_iterator, number, count, steps_ahead=steps_ahead))
        except StopIteration:
            failure = PackingError("the data ended in the middle of a step; lower --train-iters or add rows.")
        except Exception as error:  # whatever a user's dataset raises must reach every rank
            failure = _as_raised(error)
        return StepItems(items=items, count=count, failure=failure)

    def pack_items(self, items: "StepItems") -> PackedStep:
        """Pack a step of which this rank has drawn these items. All ranks call it for the same steps in the same order.

        Raises:
            PackingError: on every rank, when any rank failed to draw or to plan.
        """
        drawn, failure = _take_apart(items)
        if self._siblings is not None:  # the gather below reaches one context-parallel rank of each replica only
            raise_if_any_failed(failure, group=self._siblings, device=self._ranks["device"])
        started = time.perf_counter()
        gathered = gather_lengths(
            [sample.length for sample in drawn.samples],
            [sample.targets for sample in drawn.samples],
            limit=items.count,
            **self._ranks,
            joined=drawn.joined,
            counters=self._lost.counters(drawn.lost),
            failure=failure,
        )
        gathered_ms = _ms_since(started)
        lost = self._lost.share(drawn.lost, gathered.counters)
        plan, metrics, plan_ms, plan_failure = self._plan(gathered)
        started = time.perf_counter()
        check_same(
            plan.digest() if plan else 0,
            "the plan of this step",
            group=self._siblings or self._group,
            device=self._ranks["device"],
            failure=plan_failure,
        )
        assert plan is not None
        assert metrics is not None
        assignments = [plan.packs_with_ranks(microbatch) for microbatch in plan.microbatches]
        batches = self._exchange(drawn.samples, assignments, gathered)
        exchange_ms = gathered_ms + _ms_since(started)
        times = {"plan_ms": plan_ms, "exchange_ms": exchange_ms}
        running = sum(self._config.rows_of(pack.padded_tokens) for pack in plan.packs)
        figures = _figures(plan, metrics, gathered, lost, running=running, times=times)
        places = tuple(_places(assignments, self._rank))
        return PackedStep(batches=batches, figures=figures, lost=lost, places=places)

    def forget(self, step: PackedStep) -> None:
        """Take back a step that will not run as it is: rows that it told of will be told of again. On every rank."""
        self._lost.untell(step.lost)

    @property
    def _dp_rank(self) -> int:
        return 0 if self._group is None else self._group.rank()

    @property
    def _rank(self) -> int:
        """Among the DP x CP ranks, which Megatron numbers CP ranks first; without siblings, the replica's first one."""
        return self._dp_rank * self._config.topology.cp if self._siblings is None else self._siblings.rank()

    def _plan(self, gathered: GatheredLengths) -> tuple[Plan | None, Metrics | None, float, Exception | None]:
        """A plan of the step and what it is worth.

        Measuring it costs 0.4 to 1.6 ms for 500 to 4,000 samples, a tenth to a third of planning.
        """
        started = time.perf_counter()
        plan, metrics, failure = None, None, None
        try:
            plan = make_plan(
                gathered.lengths,
                scheduler=self._config.scheduler or "",
                topology=self._config.topology,
                max_tokens_per_rank=self._config.max_tokens_per_rank,
                max_seqs=self._config.most_samples,
                microbatch_multiple=self._microbatch_multiple,
                cost=self._cost,
                balance=self._config.balance,
                group_sizes=group_sizes_of(self._config),
                units=gathered.units(),
            )
            metrics = plan.metrics(gathered.lengths)
            if plan.group_sizes is None:  # else what `balanced` could do is another question
                advise(self._advice, plan, gathered.lengths)
        except Exception as error:  # a planner of the user's own included
            failure = _as_raised(error)
        return plan, metrics, _ms_since(started), failure

    def _exchange(
        self, samples: Sequence[SampleTensors], assignments: Assignments, gathered: GatheredLengths
    ) -> tuple[PackedBatch, ...]:
        rank, cp = self._rank, self._config.topology.cp
        destinations = [range(0)] * len(gathered.lengths)
        for pack, ranks in itertools.chain.from_iterable(assignments):
            within = _within_dp_group(ranks, cp, rank % cp)
            for sample_id in pack.sample_ids:
                destinations[sample_id] = within
        first = gathered.first_id(self._dp_rank)
        received = exchange_samples(
            {first + i: sample for i, sample in enumerate(samples)},
            destinations=destinations,
            gathered=gathered,
            **self._ranks,
        )
        batches = []
        for pack in (pack for row in assignments for pack, ranks in row if rank in ranks):
            alignment = self._config.topology.alignment_of(cp if pack.cp_size is None else pack.cp_size)
            members = [received[i] for i in pack.sample_ids]
            batch = dummy_pack(alignment=alignment) if pack.is_dummy else build_pack(members, alignment=alignment)
            rows = self._config.rows_of(batch.num_rows)
            batches.append(fill_up(batch, rows=rows, num_boundaries=self._config.num_boundaries))
        return tuple(batches)


def _figures(
    plan: Plan,
    metrics: Metrics,
    gathered: GatheredLengths,
    lost: LostInStep,
    *,
    running: int,
    times: Mapping[str, float],
) -> StepFigures:
    """Args: running: rows that run, of all packs. times: in ms, by the fields' names."""
    packs = plan.packs
    real_tokens = sum(gathered.lengths)
    padded = sum(pack.padded_tokens for pack in packs)
    dummies = [pack.padded_tokens for pack in packs if pack.is_dummy]
    slots = plan.num_microbatches * plan.topology.dp * plan.capacity
    return StepFigures(
        samples=len(gathered.lengths),
        packs=len(packs),
        dummies=len(dummies),
        microbatches=plan.num_microbatches,
        real_tokens=real_tokens,
        padding_tokens=running - real_tokens,
        fill=real_tokens / slots,
        alignment_waste=(padded - sum(dummies) - real_tokens) / slots,
        tail_waste=metrics.tail_waste / slots,
        dummy_waste=metrics.dummy_waste / slots,
        packs_lower_bound=int(metrics.packs_lower_bound),
        step_imbalance=metrics.step_imbalance,
        lockstep_imbalance=metrics.lockstep_imbalance,
        lockstep_lower_bound=metrics.lockstep_lower_bound,
        targets=sum(gathered.targets),
        dropped=lost.dropped,
        truncated=lost.truncated,
        **times,
        waited_ms=sum(times.values()),
    )


def group_sizes_of(config: PackingConfig) -> GroupSizes:
    """The sizes of groups that a run's planner may choose, if it chooses any."""
    return GroupSizes(smallest=config.smallest_group or 1)


def _within_dp_group(ranks: range, cp_size: int, cp_rank: int) -> range:
    """Which DP ranks with this CP rank are among `ranks`, neighbours of the DP x CP ranks?

    Every replica has drawn its samples on each of its CP ranks, so that a rank finds all of them in its own DP group.
    """
    return range(-((cp_rank - ranks.start) // cp_size), -((cp_rank - ranks.stop) // cp_size))


def _places(assignments: Assignments, rank: int) -> Iterator[tuple[int, int]]:
    """Of each microbatch, how many ranks share this rank's pack and which of them it is."""
    for _, ranks in itertools.chain.from_iterable(assignments):
        if rank in ranks:
            yield len(ranks), ranks.index(rank)


def _as_raised(failure: Exception) -> PackingError:
    """What every rank will say; of what nobody foresaw, type and place. The traceback stays with it as its cause."""
    if isinstance(failure, PackingError):
        return failure
    said = PackingError(peers.describe(failure))
    said.__cause__ = failure
    return said


@dataclass(frozen=True, slots=True, kw_only=True)
class StepItems:
    """The loader's items of one step of one rank, as they came."""

    items: list[Any]
    count: int
    """How many there should be; fewer came if it failed."""
    failure: Exception | None = None
    """What kept the rank from drawing the others."""


def _take_apart(items: StepItems) -> tuple["_Drawn", Exception | None]:
    """The samples of a step's items; none, and why, where anything about them failed."""
    drawn, failure = _Drawn(), items.failure
    try:
        for item in items.items:
            drawn.add(item)
    except Exception as error:  # a user's dataset may give anything
        failure = failure or _as_raised(error)
    return (_Drawn(), failure) if failure else (drawn, None)


class _Drawn:
    """What a rank drew for one step, taken out of the loader's batches."""

    def __init__(self) -> None:
        self.samples: list[SampleTensors] = []
        self.joined: list[bool] = []
        self.lost = Lost()

    def add(self, item: dict[str, Any]) -> None:
        """Take in one item of the loader: a sample, a dropped row, a row of several samples, a pack of rows, or none
        (evaluation)."""
        if "absent" in item:
            return
        if "pack" in item:
            first = len(self.samples)
            for row in item["pack"]:
                self.add(row)
            self.joined[first:] = [number > first for number in range(first, len(self.samples))]
            return
        if self.lost.add(item):
            return
        if "together" in item:
            samples = [sample for part in item["together"] for sample in samples_of_row(part)]
            self.joined += [number > 0 for number in range(len(samples))]
        else:
            samples = samples_of_row(item)
            self.joined += [False] * len(samples)
        self.samples += samples


def samples_of_row(item: dict[str, Any]) -> list[SampleTensors]:
    """The samples in one item of the loader, without padding.

    Args:
        item: fields of `VarlenDataset` (one sample, `original_seq_len` says how long it is) or of
            `SFTDataset` (several samples in one buffer, `cu_seqlens` says where), with or without the
            batch dimension of 1 that the loader's collate adds.

    Raises:
        PackingError: a field is missing, or the item holds more than one row.
    """
    tokens, labels, mask = (_flat(item, name) for name in ("tokens", "labels", "loss_mask"))
    if "cu_seqlens" in item:
        edges = _edges(_flat(item, "cu_seqlens"), tokens.numel())
        # The buffer's tail belongs to no sample. Under a causal mask nothing after a sample's last
        # target can reach the loss, so that cutting there is exact whoever filled the tail.
        last = torch.nonzero(mask[edges[-2] : edges[-1]])
        edges[-1] = edges[-2] + (int(last[-1]) + 1 if last.numel() else 0)
    elif "original_seq_len" in item:
        edges = [0, int(_flat(item, "original_seq_len"))]
        if edges[1] > tokens.numel():
            raise PackingError(
                f"a dataset's item has original_seq_len {edges[1]} but only {tokens.numel()} tokens; it counts the "
                "tokens before padding."
            )
    else:
        raise PackingError(
            f"a dataset's item has the fields {sorted(item)}; packing needs original_seq_len (VarlenDataset) or "
            "cu_seqlens (SFTDataset). Derive your dataset from one of them."
        )
    return [
        SampleTensors(tokens_L=tokens[a:b], labels_L=labels[a:b], loss_mask_L=mask[a:b].float())
        for a, b in itertools.pairwise(edges)
        if b > a
    ]


def _edges(cu_seqlens: torch.Tensor, length: int) -> list[int]:
    """Boundaries of a buffer without the entries that only fill it up."""
    edges = torch.unique_consecutive(cu_seqlens).tolist()
    if len(edges) < 2 or edges[0] != 0 or edges[-1] > length or edges != sorted(edges):
        raise PackingError(
            f"a dataset's item has cu_seqlens {edges[:8]}... for {length} tokens; they must start at 0, increase, and "
            "end within the buffer."
        )
    return [int(edge) for edge in edges]


def _flat(item: dict[str, Any], name: str) -> torch.Tensor:
    if name not in item:
        raise PackingError(f"a dataset's item lacks {name!r}; it has {sorted(item)}.")
    value = torch.as_tensor(item[name])
    if value.dim() > 1 and value.shape[0] != 1:
        raise PackingError(
            f"a dataset's item holds {value.shape[0]} rows of {name!r}; packing needs --micro-batch-size 1."
        )
    return value.reshape(-1)


def _ms_since(started: float) -> float:
    return (time.perf_counter() - started) * 1000.0
