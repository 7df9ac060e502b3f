"""What the ranks of the pool run. Arguments and answers are plain values: tensors stay in the processes."""

import contextlib
import functools
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from megatron_packing.attention.core import sharded_attention
from megatron_packing.comm import broadcast, lengths
from megatron_packing.comm.exchange import exchange_samples
from megatron_packing.comm.failures import raise_if_any_failed
from megatron_packing.comm.gather import all_gather_rows_of_cp
from megatron_packing.comm.groups import ContextGroups
from megatron_packing.comm.lengths import GatheredLengths, check_same, gather_lengths
from megatron_packing.comm.texts import all_gather_texts
from megatron_packing.comm.turns import take_turn
from megatron_packing.config import PackingConfig
from megatron_packing.data import JsonlSource, open_source
from megatron_packing.data.sources.index import IndexKind
from megatron_packing.data.sources.lines import scan_lines
from megatron_packing.errors import SampleError
from megatron_packing.mcore import iterator, lost
from megatron_packing.mcore.fit_cost import KEPT_AS, CostFitter
from megatron_packing.mcore.watch import ReadLimit
from megatron_packing.schedule import CostModel
from megatron_packing.thd import PackedBatch, PackShare, SampleTensors, build_pack, dummy_pack, share_of_rank
from megatron_packing.thd.layout import order_of_gathered_rows, rows_of_cp_rank
from megatron_packing.thd.pack import boundaries_of
from tests.gloo.pool import group_of

COST = CostModel(linear=0, quadratic=1, communication=100)
"""Of the steps that are packed: groups that nothing else asks for do not pay."""

# One sample: tokens, labels, and the bits of its loss mask as int32.
type Sample = tuple[list[int], list[int], list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """What one rank brings to `gather`."""

    lengths: list[int]
    targets: list[int]
    joined: list[bool] | None = None
    counters: tuple[int, ...] = ()
    failure: str | None = None


def outcome(run: Callable[[], Any]) -> tuple[str, Any]:
    """("returned", the answer), or the error's type and text. Errors are an answer here, not a failed task."""
    try:
        return "returned", run()
    except Exception as error:
        return type(error).__name__, str(error)


def gather(drawn: Drawn, ranks: int, limit: int) -> tuple[str, Any]:
    failure = None if drawn.failure is None else SampleError("rows.jsonl", 3, drawn.failure)
    return outcome(
        lambda: asdict(
            gather_lengths(
                drawn.lengths,
                drawn.targets,
                limit=limit,
                group=group_of(ranks),
                device="cpu",
                joined=drawn.joined,
                counters=drawn.counters,
                failure=failure,
            )
        )
    )


def count_collectives(drawn: Drawn, ranks: int, limit: int) -> int:
    """All-gathers that `gather_lengths` takes."""
    with mock.patch.object(lengths, "all_gather_rows", wraps=lengths.all_gather_rows) as gathered:
        assert gather(drawn, ranks, limit)[0] == "returned"
    return gathered.call_count


def agree(value: int | str, ranks: int) -> tuple[str, Any]:
    """`check_same` of a number; a text is this rank's failure."""
    failure = ValueError(value) if isinstance(value, str) else None
    number = 0 if isinstance(value, str) else value
    return outcome(lambda: check_same(number, "the answer", group=group_of(ranks), device="cpu", failure=failure))


def fail_together(text: str | None, ranks: int) -> tuple[str, Any]:
    failure = None if text is None else ValueError(text)
    return outcome(lambda: raise_if_any_failed(failure, group=group_of(ranks), device="cpu"))


def fail_and_differ_in_group(members: tuple[int, ...]) -> list[str]:
    """The last member fails; then each holds a value of its own. What the members are told."""
    group, rank = dist.new_group(list(members)), dist.get_rank()
    if rank not in members:
        return []
    failure = ValueError("disk full") if rank == members[-1] else None
    told = [
        outcome(lambda: raise_if_any_failed(failure, group=group, device="cpu")),
        outcome(lambda: check_same(rank, "the answer", group=group, device="cpu")),
    ]
    return [text for _, text in told]


def exchange(
    mine: list[tuple[int, Sample]], destinations: list[frozenset[int]], gathered: GatheredLengths, ranks: int
) -> dict[int, Sample]:
    """`mine` in the order in which this rank happens to hold it."""
    received = exchange_samples(
        {sample_id: _tensors(sample) for sample_id, sample in mine},
        destinations=destinations,
        gathered=gathered,
        group=group_of(ranks),
        device="cpu",
    )
    return {sample_id: _plain(sample) for sample_id, sample in received.items()}


def _tensors(sample: Sample) -> SampleTensors:
    tokens, labels, bits = sample
    return SampleTensors(
        tokens_L=torch.tensor(tokens),
        labels_L=torch.tensor(labels),
        loss_mask_L=torch.tensor(bits, dtype=torch.int32).view(torch.float32),
    )


def _plain(sample: SampleTensors) -> Sample:
    assert sample.tokens_L.dtype == sample.labels_L.dtype == torch.int64
    assert sample.loss_mask_L.dtype == torch.float32
    return sample.tokens_L.tolist(), sample.labels_L.tolist(), sample.loss_mask_L.view(torch.int32).tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One item of a made-up dataset: a sample of `length` tokens that start at `first`, or why there is none."""

    length: int = 0
    first: int = 0
    dropped: str | None = None
    truncated: bool = False
    raises: str | None = None
    together: tuple["Row", ...] = ()
    """Samples of this row that must share a pack; then the row is none itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packs:
    """What `StepPacker.pack` made on one rank."""

    tokens: list[list[int]] = field(default_factory=list)
    labels: list[list[int]] = field(default_factory=list)
    loss_mask: list[list[float]] = field(default_factory=list)
    boundaries: list[list[int]] = field(default_factory=list)
    is_dummy: list[bool] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)
    """Of each pack, the ranks that share it and which of them this one is."""
    rows: list[list[tuple[int, int, float]]] = field(default_factory=list)
    """Token, position and weight of each row of this rank's share of each pack."""
    figures: dict[str, Any] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)
    news: list[tuple[str, str]] = field(default_factory=list)
    collectives: int = 0
    digest: int = -1


def pack_steps(rows: list[list[Row]], config: PackingConfig, ranks: int) -> list[tuple[str, Any]]:
    """Pack one step for each list of rows, on one packer."""
    cp = ranks // config.topology.dp  # some tests run no more than the first CP rank of each replica
    packer = iterator.StepPacker(
        config,
        group=group_of(ranks) if cp == 1 else _replicas(ranks, cp),
        siblings=None if cp == 1 else group_of(ranks),
        device="cpu",
        limit=ReadLimit(config.data_timeout),
        cost=COST,
    )
    return [outcome(lambda step=step: _pack(packer, step)) for step in rows]


@functools.cache
def _replicas(ranks: int, cp: int) -> Any:
    """The ranks that have this one's CP rank, among the first `ranks`; None for a single one."""
    if ranks == cp:
        return None
    assert ranks == dist.get_world_size(), "all ranks make groups together"
    return [dist.new_group(list(range(first, ranks, cp))) for first in range(cp)][dist.get_rank() % cp]


def pack_more_than_there_is(
    count_and_rows: tuple[int, list[Row]], config: PackingConfig, ranks: int
) -> tuple[str, Any]:
    count, rows = count_and_rows
    packer = iterator.StepPacker(config, group=group_of(ranks), device="cpu", limit=ReadLimit(config.data_timeout))
    return outcome(lambda: packer.pack(map(_item, rows), count).figures.samples)


def pack_under(config: PackingConfig, rows: list[Row], ranks: int) -> tuple[str, Any]:
    """The same rows on every rank, but each under settings of its own."""
    packer = iterator.StepPacker(config, group=group_of(ranks), device="cpu", limit=ReadLimit(config.data_timeout))
    return outcome(lambda: packer.pack(map(_item, rows), len(rows)).figures.samples)


def fit_cost(packs: list[list[int]]) -> tuple[list[CostModel], list[str], str]:
    """What a rank uses, says and keeps that has run these packs, on a clock of its own that lies a little."""
    now, used, said = [0.0], [], []
    kept: dict[str, str] = {}
    fitter = CostFitter(1, layout="", store=lambda: kept, clock=lambda: now[0])
    model = SimpleNamespace(finalize_model_grads_func=lambda: None)
    for iteration in (1, 2, 3):
        fitter.step_begins(iteration, used.append, said.append)
        batches = [build_pack([_sample(length) for length in lengths], alignment=1) for lengths in packs]
        with fitter.timing(model, [share_of_rank(batch, cp_size=1, cp_rank=0) for batch in batches]):
            for lengths in packs:
                fitter.mark()
                now[0] += sum(3 * n + n * n for n in lengths) + 0.1 * dist.get_rank()
            model.finalize_model_grads_func()
    return used, said, kept[KEPT_AS]


def _sample(length: int) -> SampleTensors:
    ids = torch.ones(length, dtype=torch.int64)
    return SampleTensors(tokens_L=ids, labels_L=ids, loss_mask_L=ids.float())


def _pack(packer: iterator.StepPacker, rows: list[Row]) -> Packs:
    with (
        mock.patch.object(iterator, "check_same", wraps=check_same) as compared,
        mock.patch.object(lost, "all_gather_texts", wraps=all_gather_texts) as texts,
    ):
        step = packer.pack(map(_item, rows), len(rows))
    batches = step.batches
    shares = [
        share_of_rank(batch, cp_size=size, cp_rank=rank)
        for batch, (size, rank) in zip(batches, step.places, strict=True)
    ]
    return Packs(
        tokens=[batch.tokens_T.tolist() for batch in batches],
        labels=[batch.labels_T.tolist() for batch in batches],
        loss_mask=[batch.loss_mask_T.tolist() for batch in batches],
        boundaries=[batch.cu_seqlens.tolist() for batch in batches],
        is_dummy=[batch.is_dummy for batch in batches],
        places=list(step.places),
        rows=[_rows_of(share) for share in shares],
        figures=asdict(step.figures),
        lost=dict(step.lost.counts),
        news=list(step.lost.news),
        collectives=texts.call_count,
        digest=compared.call_args.args[0],
    )


def _rows_of(share: PackShare) -> list[tuple[int, int, float]]:
    columns = (share.tokens_R, share.position_ids_R, share.loss_mask_R)
    return list(zip(*(column.tolist() for column in columns if column is not None), strict=True))


def members_of_groups(sizes: tuple[int, ...], rows: list[list[int]]) -> dict[int, list[int] | None]:
    """Make the groups in `rows` of the pool's ranks; which ranks share this one's groups, by size."""
    groups = ContextGroups(rows, sizes)
    found: dict[int, list[int] | None] = {}
    for size in sizes:
        try:
            group = groups.of(size)
        except KeyError:  # outside of all blocks of this size
            continue
        if group is None:
            found[size] = None
            continue
        total = torch.tensor([1 << dist.get_rank()])
        dist.all_reduce(total, group=group)
        found[size] = [rank for rank in range(dist.get_world_size()) if int(total) >> rank & 1]
    return found


def _item(row: Row) -> dict[str, Any]:
    """As the loader hands it over: collated to a batch of one."""
    if row.raises is not None:
        raise SampleError("rows.jsonl", 3, row.raises)
    if row.dropped is not None:
        return {"dropped": [row.dropped], "original_seq_len": torch.zeros(1, 1), "why": [f"{row.first}: bad"]}
    if row.together:
        return {"together": [_item(part) for part in row.together]}
    tokens = torch.arange(row.first, row.first + row.length + 2)  # two tokens of padding
    item = {
        "tokens": tokens[None],
        "labels": tokens[None] + 1,
        "loss_mask": (tokens[None] - row.first < row.length).float(),
        "position_ids": torch.arange(tokens.numel())[None],
        "original_seq_len": torch.tensor([[row.length]], dtype=torch.int32),
        "padded_seq_len": torch.tensor([[tokens.numel()]], dtype=torch.int32),
    }
    return {**item, "truncated": torch.tensor([True]), "why": [f"{row.first}: cut"]} if row.truncated else item


def gather_texts(text: str, ranks: int) -> list[str]:
    return all_gather_texts(text, group=group_of(ranks), device="cpu")


def gather_rows(
    mine: tuple[list[Any], list[Any]], ranks: int, how: str = "plain", dtype: torch.dtype = torch.float32
) -> tuple[list[Any], list[Any]]:
    """The rows of all ranks, and the gradient of this rank's rows for the loss sum(weight * rows ** 2) / 2.

    Args:
        mine: this rank's rows, and its weight for the rows of all ranks.
        how: "plain"; "strided": rows and gradient that are not contiguous in memory.
    """
    rows, weight = (torch.tensor(x, dtype=dtype) for x in mine)
    if how == "strided":
        rows, weight = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (rows, weight))
        assert not rows.is_contiguous()
    rows.requires_grad_()
    gathered = all_gather_rows_of_cp(rows, group_of(ranks))
    (gradient,) = torch.autograd.grad(gathered, rows, weight * gathered.detach())
    assert gathered.dtype == gradient.dtype == dtype
    return gathered.tolist(), gradient.tolist()


def gradient_of_a_plain_sum(rows: list[float], ranks: int) -> list[float]:
    """Autograd hands the gradient of a sum over as one number, seen as many rows."""
    leaf = torch.tensor(rows, requires_grad=True)
    all_gather_rows_of_cp(leaf, group_of(ranks)).sum().backward()
    assert leaf.grad is not None
    return leaf.grad.tolist()


def attention_inputs(sample_rows: list[int]) -> tuple[torch.Tensor, ...]:
    """Queries, keys, values and the output's gradient, of 4 query and 2 key heads: the same wherever it is called."""
    generator = torch.Generator().manual_seed(sum(sample_rows))
    return tuple(torch.randn(sum(sample_rows), heads, 16, generator=generator) for heads in (4, 2, 2, 4))


def attend(sample_rows: list[int], ranks: int, causal: bool) -> list[list[Any]]:
    """As the model does on this rank: output, and gradients of its queries, keys and values."""
    group = group_of(ranks)
    place = {"cp_size": ranks, "cp_rank": group.rank()}
    mine = rows_of_cp_rank(boundaries_of(sample_rows), **place)
    *qkv, weight = (x[mine] for x in attention_inputs(sample_rows))
    query, key, value = (x.requires_grad_() for x in qkv)
    order = order_of_gathered_rows(tuple(sample_rows), ranks)
    gathered = all_gather_rows_of_cp(torch.stack([key, value], dim=1), group).index_select(0, order)
    keys, values = gathered.unbind(dim=1)
    out = sharded_attention(query, keys, values, sample_rows, **place, scale=0.25, causal=causal)
    return [x.tolist() for x in (out, *torch.autograd.grad((out * weight).sum(), (query, key, value)))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A model-parallel group among the four ranks: its global ranks, stage by stage, TP ranks side by side."""

    tp: int
    ranks: tuple[int, ...]

    @property
    def pp(self) -> int:
        return len(self.ranks) // self.tp

    @property
    def source(self) -> int:
        return self.ranks[0]

    def stage(self, rank: int) -> int:
        return self.ranks.index(rank) // self.tp

    def is_middle(self, rank: int) -> bool:
        return 0 < self.stage(rank) < self.pp - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A pack as plain values: its samples, or a dummy."""

    samples: tuple[Sample, ...]
    alignment: int

    def batch(self) -> PackedBatch:
        if not self.samples:
            return dummy_pack(alignment=self.alignment)
        return build_pack([_tensors(sample) for sample in self.samples], alignment=self.alignment)

    def share(self, cp_size: int, cp_rank: int) -> PackShare:
        return share_of_rank(self.batch(), cp_size=cp_size, cp_rank=cp_rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What `share_packs` gave one rank, and what it cost."""

    shares: list[dict[str, Any]]
    figures: list[float]
    calls: list[tuple[str, int]]
    """Each broadcast, send and receive, with its numbers of 32 bits."""


def plain_share(share: PackShare) -> dict[str, Any]:
    """Every field with its type, floats by their bits, and whether the boundaries are one object."""
    values: dict[str, Any] = {"one_object": share.cu_seqlens is share.cu_seqlens_padded}
    for name in (each.name for each in fields(PackShare)):
        value = getattr(share, name)
        if isinstance(value, torch.Tensor):
            bits = value.contiguous().view(torch.int32) if value.dtype == torch.float32 else value
            values[name] = (str(value.dtype), bits.tolist())
        else:
            values[name] = (type(value).__name__, value)
    return values


def share(
    layout: Layout,
    packs: list[Made],
    places: list[tuple[int, int]],
    figures: list[float],
    failure: str | None = None,
) -> tuple[str, Any]:
    """What this rank gets of `packs`, which only the source makes. Ranks outside the layout get None.

    `places`: of each pack, the ranks that share it and which of them the layout's are.
    """
    groups = _groups_of(layout)  # made by all ranks together
    rank = dist.get_rank()
    if rank not in layout.ranks:
        return "outside", None
    here = _place(layout, groups, rank)
    mine, numbers = None, [0.0] * len(figures)
    if rank == layout.source and failure is None:
        mine = [pack.share(*place) for pack, place in zip(packs, places, strict=True)]
        numbers = figures
    error = None if failure is None or rank != layout.source else ValueError(failure)
    calls: list[tuple[str, int]] = []
    with contextlib.ExitStack() as stack:
        for name in ("broadcast", "send", "recv"):
            stack.enter_context(mock.patch.object(broadcast.dist, name, _noted(getattr(dist, name), name, calls)))
        kind, answer = outcome(lambda: broadcast.share_packs(mine, numbers, here, failure=error))
    if kind != "returned":
        return kind, answer
    shares, numbers = answer
    return kind, Shared(shares=[plain_share(one) for one in shares], figures=numbers, calls=calls)


def _noted(call: Callable[..., Any], name: str, calls: list[tuple[str, int]]) -> Callable[..., Any]:
    def noted(tensor: torch.Tensor, *args: Any, **keywords: Any) -> Any:
        calls.append((name, tensor.numel() * tensor.element_size() // 4))
        return call(tensor, *args, **keywords)

    return noted


@functools.cache
def _groups_of(layout: Layout) -> dict[tuple[int, ...], Any]:
    """The layout's groups by their ranks: all of it, its stages over TP, its pipelines."""
    stages = [layout.ranks[at : at + layout.tp] for at in range(0, len(layout.ranks), layout.tp)]
    pipelines = list(zip(*stages, strict=True))
    return {ranks: dist.new_group(list(ranks)) for ranks in dict.fromkeys([layout.ranks, *stages, *pipelines])}


def _place(layout: Layout, groups: dict[tuple[int, ...], Any], rank: int) -> broadcast.ModelParallel:
    stage = layout.stage(rank)
    tp_ranks = layout.ranks[stage * layout.tp : (stage + 1) * layout.tp]
    pp_ranks = layout.ranks[tp_ranks.index(rank) :: layout.tp]
    return broadcast.ModelParallel(
        group=groups[layout.ranks],
        source=layout.source,
        tp_group=groups[tp_ranks],
        tp_source=tp_ranks[0],
        pp_group=groups[pp_ranks],
        is_first_stage=stage == 0,
        is_last_stage=stage == layout.pp - 1,
        last_stage=pp_ranks[-1],
        device="cpu",
    )


def open_after_a_turn(path: str, builder: int) -> tuple[str, Any]:
    """(rows, how often this rank read the file to find them), after rank `builder` opened it, slowly."""
    scans = []

    def scan(file: Any, stamp: Any) -> Any:
        scans.append(time.sleep(0.3))
        yield from scan_lines(file, stamp)

    def opened_rows() -> tuple[int, int]:
        take_turn(lambda: open_source(path) and None, is_mine=dist.get_rank() == builder, device="cpu")
        return len(open_source(path)), len(scans)

    with mock.patch.object(JsonlSource, "_KIND", IndexKind(name="lines", version=1, scan=scan)):
        return outcome(opened_rows)
