"""How do packs reach the other TP ranks and pipeline stages? In flat tensors, each field only where it is used.

One rank of a model-parallel group (the first of TP, on the first stage) has the packs. It sends all of the
group a header (how many, how large, the step's figures) and the boundaries; the first stage gets tokens, the
last stage labels and loss mask, each in one broadcast over TP. Middle stages get boundaries alone. A failure
travels in the header, so that nobody waits for packs that will not come.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_packing.comm.failures import as_text_row, text_of_row
from megatron_packing.errors import PackingError
from megatron_packing.thd.share import PackShare, make_share

_HEAD = 6
"""Numbers before a pack's boundaries: how many these are, whether it is a dummy, whether it is padded, the longest
segment, how many ranks share it and which of them this is. All ranks of a model-parallel group have the same place
among those that share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParallel:
    """This rank's place in its model-parallel group."""

    group: dist.ProcessGroup
    """All TP ranks of all stages that run the same packs."""
    source: int
    """Global rank that has the packs: TP rank 0 of the first stage."""
    tp_group: dist.ProcessGroup
    tp_source: int
    """Global rank of TP rank 0 of this stage."""
    pp_group: dist.ProcessGroup
    is_first_stage: bool
    is_last_stage: bool
    last_stage: int
    """Global rank of the last stage in this rank's own pipeline."""
    device: torch.device | str
    """Where the groups' backend wants its tensors."""

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return dist.get_rank()

    @property
    def has_packs(self) -> bool:
        """Whether this rank draws samples and sends packs to the others."""
        return self.rank == self.source


def share_packs(
    shares: Sequence[PackShare] | None,
    figures: Sequence[float],
    place: ModelParallel,
    *,
    failure: Exception | None = None,
) -> tuple[list[PackShare], list[float]]:
    """Give every rank of the model-parallel group its share of each pack.

    Args:
        shares: with every field, on the source; None elsewhere.
        figures: numbers for every rank, on the source; elsewhere as many of anything.
        place: this rank's place.
        failure: what kept the source from having packs.

    Returns:
        This rank's shares, and the source's figures.

    Raises:
        Exception: `failure` itself on the source; `PackingError` with its text on the others.
    """
    if place.group.size() == 1:
        if failure is not None:
            raise failure
        assert shares is not None
        return list(shares), list(figures)
    header = _header(shares, figures, failure)
    header = _broadcast(header.to(place.device), place.source, place.group).cpu()
    failed, packs, boundary_entries, rows = (int(value) for value in header[:4].tolist())
    if failed:
        _raise_failure(failure, place)
    if not packs:
        return [], header[4:].tolist()
    boundaries = _flat_boundaries(shares) if shares is not None else torch.empty(boundary_entries, dtype=torch.int32)
    boundaries = _broadcast(boundaries.to(place.device), place.source, place.group).cpu()
    mine = _fields(shares, rows, place)
    return _rebuild(boundaries, packs, mine), header[4:].tolist()


def _header(shares: Sequence[PackShare] | None, figures: Sequence[float], failure: Exception | None) -> Tensor:
    """float64 [4 + figures]: counts up to 2**53 are exact."""
    sizes = [0.0] * 3
    if shares is not None and failure is None:
        entries = sum(_HEAD + share.cu_seqlens.numel() + share.cu_seqlens_padded.numel() for share in shares)
        sizes = [float(len(shares)), float(entries), float(sum(share.position_ids_R.numel() for share in shares))]
    return torch.tensor([float(failure is not None), *sizes, *figures], dtype=torch.float64)


def _flat_boundaries(shares: Sequence[PackShare]) -> Tensor:
    """int32: for each pack what `_rebuild` reads first, then both boundaries."""
    parts = []
    for share in shares:
        padded = share.cu_seqlens is not share.cu_seqlens_padded
        head = [share.cu_seqlens.numel(), share.is_dummy, padded, share.max_seqlen, share.cp_size, share.cp_rank]
        parts += [torch.tensor(head, dtype=torch.int32), share.cu_seqlens, share.cu_seqlens_padded]
    return torch.cat(parts)


@dataclass(slots=True)
class _Fields:
    """Rows of all packs, one after the other; None where this stage does not use them."""

    tokens: Tensor | None = None
    labels: Tensor | None = None
    loss_mask: Tensor | None = None


def _fields(shares: Sequence[PackShare] | None, rows: int, place: ModelParallel) -> _Fields:
    """Bring each field to the stage that uses it, over TP in one broadcast."""
    tokens = outputs = None
    if shares is not None:
        tokens = torch.cat([_not_none(share.tokens_R).to(torch.int32) for share in shares])
        labels = torch.cat([_not_none(share.labels_R).to(torch.int32) for share in shares])
        mask = torch.cat([_not_none(share.loss_mask_R) for share in shares])
        outputs = torch.cat([labels, mask.view(torch.int32)])  # the mask's bits, not its values
    if place.is_first_stage and place.is_last_stage:
        flat = None if tokens is None or outputs is None else torch.cat([tokens, outputs])
        flat = _over_tp(flat, 3 * rows, place)
        return _Fields(
            tokens=flat[:rows].long(), labels=flat[rows : 2 * rows].long(), loss_mask=_mask(flat[2 * rows :])
        )
    outputs = _to_last_stage(outputs, 2 * rows, place)
    if place.is_first_stage:
        return _Fields(tokens=_over_tp(tokens, rows, place).long())
    if place.is_last_stage:
        flat = _over_tp(outputs, 2 * rows, place)
        return _Fields(labels=flat[:rows].long(), loss_mask=_mask(flat[rows:]))
    return _Fields()


def _to_last_stage(outputs: Tensor | None, size: int, place: ModelParallel) -> Tensor | None:
    """From the source to TP rank 0 of the last stage; nobody else takes part."""
    if place.has_packs:
        assert outputs is not None
        dist.send(outputs.to(place.device), dst=place.last_stage, group=place.pp_group)
        return None
    if place.is_last_stage and place.rank == place.tp_source:
        received = torch.empty(size, dtype=torch.int32, device=place.device)
        dist.recv(received, src=place.source, group=place.pp_group)
        return received
    return None


def _over_tp(flat: Tensor | None, size: int, place: ModelParallel) -> Tensor:
    if flat is None:
        flat = torch.empty(size, dtype=torch.int32)
    flat = flat.to(place.device)
    if place.tp_group.size() > 1:
        _broadcast(flat, place.tp_source, place.tp_group)
    return flat.cpu()


def _rebuild(boundaries: Tensor, packs: int, mine: _Fields) -> list[PackShare]:
    shares = []
    at = row = 0
    for _ in range(packs):
        entries, is_dummy, padded, max_seqlen, cp_size, cp_rank = boundaries[at : at + _HEAD].tolist()
        at += _HEAD
        real, in_rows = boundaries[at : at + 2 * entries].clone().view(2, entries)
        at += 2 * entries
        in_rows = in_rows.clone()
        rows = slice(row, row + int(in_rows[-1]) // cp_size)
        row = rows.stop
        shares.append(
            make_share(
                cu_seqlens=real.clone() if padded else in_rows,
                cu_seqlens_padded=in_rows,
                max_seqlen=max_seqlen,
                is_dummy=bool(is_dummy),
                cp_size=cp_size,
                cp_rank=cp_rank,
                tokens_R=None if mine.tokens is None else mine.tokens[rows],
                labels_R=None if mine.labels is None else mine.labels[rows],
                loss_mask_R=None if mine.loss_mask is None else mine.loss_mask[rows],
            )
        )
    return shares


def _raise_failure(failure: Exception | None, place: ModelParallel) -> None:
    words = _broadcast(as_text_row(failure).to(place.device), place.source, place.group).cpu()
    if failure is not None:
        raise failure
    raise PackingError(f"rank {place.source} failed: {text_of_row(words) or 'see its output.'}")


def _broadcast(tensor: Tensor, source: int, group: dist.ProcessGroup) -> Tensor:
    dist.broadcast(tensor, source, group=group)
    return tensor


def _mask(bits: Tensor) -> Tensor:
    return bits.contiguous().view(torch.float32)


def _not_none(field: Tensor | None) -> Tensor:
    assert field is not None, "the rank that sends packs has every field"
    return field
