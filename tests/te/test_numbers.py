"""Packed on Transformer Engine's attention against each sample alone on Megatron's own, unpacked.

The unfused kernel of Transformer Engine runs here, which is plain torch. What decides which rows it looks at are the
arguments that every kernel of it gets.
"""

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_packing.thd import PackedBatch, SampleTensors, build_pack, fill_up, share_of_rank
from tests import tolerances
from tests.runs.harness import Runner
from tests.runs.toy_model import hooked, random_samples, toy_gpt

LENGTHS = (5, 20, 1, 7, 8)


PACKS = {
    "no padding": build_pack(random_samples(LENGTHS), alignment=1),
    "padding between samples": build_pack(random_samples(LENGTHS), alignment=8),
    "one shape, with a tail": fill_up(build_pack(random_samples(LENGTHS), alignment=2), rows=64, num_boundaries=10),
}
KINDS: dict[str, dict[str, Any]] = {
    "causal": {},
    "sliding window": {"window_size": (3, 0)},
    "sinks": {"softmax_type": "learnable"},
}


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_equal_each_sample_alone(pack: str, kind: str, runner: Runner) -> None:
    runner.call(functools.partial(_equals_alone, PACKS[pack], KINDS[kind]))


def test_changing_one_sample_changes_the_others_by_exactly_nothing(runner: Runner) -> None:
    runner.call(_changing_one_changes_only_one)


def test_the_comparison_sees_a_wrong_flag_and_a_wrong_boundary(runner: Runner) -> None:
    runner.call(_what_is_wrong_is_seen)


def _pair(settings: dict[str, Any]) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The model on Transformer Engine's attention, as a packed run has it, and Megatron's own with the same weights."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    mine, theirs = (toy_gpt(core_attention=core, **settings) for core in (TEDotProductAttention, DotProductAttention))
    weights = dict(theirs.named_parameters())
    assert weights.keys() == dict(mine.named_parameters()).keys()
    with torch.no_grad():
        for name, weight in mine.named_parameters():
            weight.copy_(weights[name])
    return hooked(mine), theirs


def _logits(model: torch.nn.Module, batch: PackedBatch) -> list[torch.Tensor]:
    """Of each sample's own rows: [length, vocabulary]."""
    model.current.share = share_of_rank(batch, cp_size=1, cp_rank=0)
    logits = model(batch.tokens_T[None], batch.position_ids_T[None], None)[0]
    return [
        logits[start : start + length]
        for start, length in zip(batch.cu_seqlens_padded.tolist(), batch.cu_seqlens.diff().tolist(), strict=False)
        if length
    ]


def _loss(logits: torch.Tensor, sample: SampleTensors) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits, sample.labels_L, reduction="sum")


def _alone(model: torch.nn.Module, sample: SampleTensors) -> torch.Tensor:
    """[length, vocabulary], in Megatron's unpacked layout, without boundaries."""
    causal = torch.ones(1, 1, sample.length, sample.length, dtype=torch.bool).triu(1)
    return model(sample.tokens_L[None], torch.arange(sample.length)[None], causal)[0]


def _equals_alone(batch: PackedBatch, settings: dict[str, Any]) -> None:
    (packing, stock), samples = _pair(settings), random_samples(LENGTHS)
    packed = _logits(packing, batch)
    sum(_loss(logits, sample) for logits, sample in zip(packed, samples, strict=True)).backward()
    for logits, sample in zip(packed, samples, strict=True):
        alone = _alone(stock, sample)
        assert (logits - alone).abs().max() <= tolerances.LOGITS * max(1.0, float(alone.abs().max()))
        _loss(alone, sample).backward()
    gradients = {name: parameter.grad for name, parameter in stock.named_parameters()}
    for name, parameter in packing.named_parameters():
        difference = (parameter.grad - gradients[name]).norm()
        assert difference <= 1e-5 * gradients[name].norm() + 1e-6, f"gradient of {name}: {difference}"
    if settings:
        plain, _ = _pair({})
        assert (packed[1] - _logits(plain, batch)[1]).abs().max() > 0.1, "else the setting says nothing"


def _changing_one_changes_only_one() -> None:
    (model, _), samples = _pair({}), random_samples(LENGTHS)
    changed = [*samples]
    changed[1] = replace(samples[1], tokens_L=random_samples(LENGTHS, seed=2)[1].tokens_L)
    before, after = (_logits(model, build_pack(given, alignment=4)) for given in (samples, changed))
    assert not torch.equal(before[1], after[1])
    assert all(torch.equal(before[index], after[index]) for index in (0, 2, 3, 4))


def _what_is_wrong_is_seen() -> None:
    (model, stock), samples = _pair({}), random_samples(LENGTHS)
    batch = build_pack(samples, alignment=8)
    real = batch.cu_seqlens.clone()
    real[-1] = batch.num_rows  # as many rows as there are, or the shape alone would give it away
    with pytest.MonkeyPatch.context() as patch:
        # Real boundaries where rows are padded, and a flag that denies the padding.
        _hand_in(patch, cu_seqlens_q=real, cu_seqlens_kv=real)
        assert _largest_error(model, stock, batch, samples) > 0.1
    with pytest.MonkeyPatch.context() as patch:
        # The honest flag with them: a kernel that knows padding is needed, and the unfused one says so.
        _hand_in(patch, cu_seqlens_q=real, cu_seqlens_kv=real, pad_between_seqs=True)
        with pytest.raises(ValueError, match="No dot product attention backend"):
            _logits(model, batch)
    with pytest.MonkeyPatch.context() as patch:
        moved = batch.cu_seqlens_padded.clone()
        moved[1] += 1
        everywhere = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
        _hand_in(patch, **dict.fromkeys(everywhere, moved))
        assert _largest_error(model, stock, batch, samples) > 0.1
    assert _largest_error(model, stock, batch, samples) < 1e-5


def _hand_in(patch: pytest.MonkeyPatch, **wrong: object) -> None:
    """Let the model get parameters of which these are other than `to_packed_seq_params` makes them."""
    from megatron_packing.mcore import step

    right = step.to_packed_seq_params
    patch.setattr(step, "to_packed_seq_params", lambda *args: replace(right(*args), **wrong))


def _largest_error(
    model: torch.nn.Module, stock: torch.nn.Module, batch: PackedBatch, samples: list[SampleTensors]
) -> float:
    with torch.no_grad():
        packed = _logits(model, batch)
        errors = [
            float((logits - _alone(stock, sample)).abs().max()) for logits, sample in zip(packed, samples, strict=True)
        ]
    assert all(map(math.isfinite, errors))
    return max(errors)
