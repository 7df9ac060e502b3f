"""Transformer Engine's own context parallelism on our shares of a pack, against each sample alone on one rank.

Its rings, all-to-all and gathering run as they are, over gloo; the fused kernel in them is stood in for by
tests/te/kernels.py. What they compute is right only if the rows, boundaries, longest length and groups that arrive are.
"""

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_packing.mcore import te_versions
from megatron_packing.mcore.te_versions import CP_COMM_TYPES
from megatron_packing.thd import PackedBatch, PackShare, build_pack, fill_up, share_of_rank
from megatron_packing.thd.layout import rows_of_cp_rank
from tests import tolerances
from tests.runs.harness import Runner
from tests.runs.toy_model import hooked, random_samples, toy_gpt

VERSION = te_versions.installed() or "0.0"
KNOWN = [kind for kind, known in CP_COMM_TYPES.items() if known.is_in(VERSION)]
LACKING = [kind for kind in CP_COMM_TYPES if kind not in KNOWN]
WINDOWS = [kind for kind in te_versions.CP_WITH_WINDOW if kind in KNOWN]


def _ranks(kind: str) -> int:
    return 4 if "+" in kind else 2


EVEN, UNEVEN = (8, 16, 8, 24), (5, 13, 1, 23)
PACKS = {
    "no padding": build_pack(random_samples(EVEN), alignment=8),
    "padding between samples": build_pack(random_samples(UNEVEN), alignment=8),
    "one shape, with a tail": fill_up(build_pack(random_samples(UNEVEN), alignment=8), rows=64, num_boundaries=8),
}


# One pack for the one that takes 4 ranks: that with padding between samples, sentinels and a tail.
@pytest.mark.parametrize(
    ("kind", "pack"), [(kind, pack) for kind in KNOWN for pack in PACKS if _ranks(kind) == 2 or "tail" in pack]
)
def test_logits_and_gradients_equal_each_sample_alone(kind: str, pack: str, runner: Runner) -> None:
    runner.call(functools.partial(_equals_alone, kind, PACKS[pack], None), ranks=_ranks(kind))


@pytest.mark.parametrize("kind", WINDOWS)
def test_so_they_do_with_a_sliding_window(kind: str, runner: Runner) -> None:
    runner.call(functools.partial(_equals_alone, kind, PACKS["padding between samples"], (3, 0)), ranks=2)


@pytest.mark.parametrize("kind", [kind for kind in KNOWN if "+" not in kind])
def test_the_comparison_sees_wrong_rows_and_wrong_boundaries(kind: str, runner: Runner) -> None:
    runner.call(functools.partial(_what_is_wrong_is_seen, kind), ranks=2)


@pytest.mark.parametrize("kind", [*LACKING, "p2p with a window"])
def test_what_we_refuse_by_name_it_refuses_itself(kind: str, runner: Runner) -> None:
    runner.call(functools.partial(_it_refuses, kind), ranks=_ranks(kind))


def _alone(lengths: tuple[int, ...], window: tuple[int, int] | None) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Each sample's logits on Megatron's own attention, unpacked; and the gradients of all losses."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    model, logits = toy_gpt(core_attention=DotProductAttention, window_size=window), []
    for sample in random_samples(lengths):
        causal = torch.ones(1, 1, sample.length, sample.length, dtype=torch.bool).triu(1)
        logits.append(model(sample.tokens_L[None], torch.arange(sample.length)[None], causal)[0])
        torch.nn.functional.cross_entropy(logits[-1], sample.labels_L, reduction="sum").backward()
    return logits, {name: parameter.grad for name, parameter in model.named_parameters()}


def _shared_model(kind: str, window: tuple[int, int] | None) -> torch.nn.Module:
    """On Transformer Engine's attention, as a packed run has it, under context parallelism over all ranks."""
    from megatron.core import parallel_state
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    ranks = torch.distributed.get_world_size()
    hierarchy = [2, ranks // 2] if "+" in kind else None
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(context_parallel_size=ranks, hierarchical_context_parallel_sizes=hierarchy)
    return hooked(
        toy_gpt(
            core_attention=TEDotProductAttention,
            window_size=window,
            context_parallel_size=ranks,
            cp_comm_type=kind,
            hierarchical_context_parallel_sizes=hierarchy,
            bf16=True,  # as its context parallelism wants; the weights are fp32 all the same
        )
    )


def _rows_logits(model: torch.nn.Module, share: PackShare) -> Tensor:
    from tests.te.standin import fused_in_fp32

    model.current.share = share
    with fused_in_fp32():
        return model(share.tokens_R[None], share.position_ids_R[None], None)[0]


def _my_share(batch: PackedBatch) -> PackShare:
    return share_of_rank(batch, cp_size=torch.distributed.get_world_size(), cp_rank=torch.distributed.get_rank())


def _whole(alone: list[Tensor], batch: PackedBatch) -> Tensor:
    """[T, vocabulary]: each sample's logits in its own rows of the pack."""
    whole = alone[0].new_zeros(batch.num_rows, alone[0].shape[1])
    whole[~batch.padding_mask_T()] = torch.cat(alone).detach()
    return whole


def _equals_alone(kind: str, batch: PackedBatch, window: tuple[int, int] | None) -> None:
    alone, gradients = _alone(tuple(length for length in batch.cu_seqlens.diff().tolist() if length), window)
    model = _shared_model(kind, window)
    share = _my_share(batch)
    logits = _rows_logits(model, share)
    theirs = _whole(alone, batch)[rows_of_cp_rank(batch.cu_seqlens_padded, share.cp_size, share.cp_rank)]
    real = share.loss_mask_R.bool()
    assert (logits - theirs)[real].abs().max() <= tolerances.LOGITS * max(1.0, float(theirs.abs().max()))
    torch.nn.functional.cross_entropy(logits[real], share.labels_R[real], reduction="sum").backward()
    for name, parameter in model.named_parameters():
        torch.distributed.all_reduce(parameter.grad)
        difference = (parameter.grad - gradients[name]).norm()
        assert difference <= 1e-5 * gradients[name].norm() + 1e-6, f"gradient of {name}: {difference}"


def _what_is_wrong_is_seen(kind: str) -> None:
    alone, _ = _alone(EVEN, None)
    model, batch = _shared_model(kind, None), PACKS["no padding"]
    share, theirs = _my_share(batch), _whole(alone, batch)
    mine = torch.arange(batch.num_rows // 2) + share.cp_rank * (batch.num_rows // 2)
    contiguous = replace(share, tokens_R=batch.tokens_T[mine])
    with torch.no_grad():
        assert (_rows_logits(model, contiguous) - theirs[mine]).abs().max() > 0.1
        moved = torch.tensor([0, 16, 24, 32, 56], dtype=torch.int32)
        wrong = replace(share, cu_seqlens=moved, cu_seqlens_padded=moved)
        rows = rows_of_cp_rank(batch.cu_seqlens_padded, share.cp_size, share.cp_rank)
        assert (_rows_logits(model, wrong) - theirs[rows]).abs().max() > 0.1
        assert (_rows_logits(model, share) - theirs[rows]).abs().max() < 1e-5


def _it_refuses(kind: str) -> None:
    kind, _, window = kind.partition(" with a ")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(te_versions, "check", lambda version, asked: None)
        model = _shared_model(kind, (3, 0) if window else None)
    with pytest.raises(AssertionError, match=r"not supported|does not support|No support"):
        _rows_logits(model, _my_share(PACKS["no padding"]))
