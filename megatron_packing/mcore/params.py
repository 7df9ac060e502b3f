"""What does Megatron's attention need to know of a pack? `PackedSeqParams`, as Transformer Engine wants them.

Two forms:

- nothing is padded: real and padded boundaries are the *same tensor object* and `pad_between_seqs` is
  False. Transformer Engine tells the case by object identity from 2.18 on; equal copies lose its
  fastest kernels.
- a sample is padded: the padded boundaries stand for both. A padding row then belongs to its sample's
  end, where under a causal mask no real row sees it; its loss is masked, and the padding mask keeps it
  out of MoE routing. Safe with every backend.

`pad_between_seqs` is never None: Transformer Engine would guess, and a wrong guess is silently wrong.

Where every microbatch groups the ranks anew, the parameters name the group as well: `local_cp_size` and `cp_group`, the
latter None for a rank alone, which is how Transformer Engine is told to leave context parallelism out.
"""

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_packing.comm.groups import ContextGroups
from megatron_packing.thd import PackedBatch, PackShare


def to_packed_seq_params(batch: PackedBatch | PackShare, groups: ContextGroups | None = None) -> PackedSeqParams:
    """Boundaries of `batch` for Megatron: int32, one-dimensional, `max_seqlen` a Python int.

    Under context parallelism they are the whole pack's on every rank: Megatron divides by CP itself.

    Args:
        batch: a pack, or a rank's share of one.
        groups: where the ranks that share a pack change; then `batch` is a share. None: they are Megatron's own group.
    """
    boundaries: Tensor = batch.cu_seqlens_padded
    own_group = {}
    if groups is not None:
        assert isinstance(batch, PackShare)
        own_group = {"local_cp_size": batch.cp_size, "cp_group": groups.of(batch.cp_size)}
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        cu_seqlens_q_padded=boundaries,
        cu_seqlens_kv_padded=boundaries,
        max_seqlen_q=batch.max_seqlen,
        max_seqlen_kv=batch.max_seqlen,
        pad_between_seqs=False,
        **own_group,
    )


def padding_mask(batch: PackedBatch | PackShare) -> Tensor | None:
    """bool [1, rows]: True where a row of this rank belongs to no sample; None where every row does."""
    if isinstance(batch, PackShare):
        return None if batch.padding_mask_R is None else batch.padding_mask_R[None]
    return batch.padding_mask_T()[None] if batch.is_padded or batch.is_dummy else None
