"""`megatron-packing doctor --probe` with Transformer Engine's attention: its unfused one, which a CPU can run."""

from typing import Any

import pytest
import torch

from tests.runs.harness import Runner

pytestmark = pytest.mark.run


def test_transformer_engine_s_attention_holds_and_lost_boundaries_are_named(runner: Runner) -> None:
    runner.call(_probe)


def _probe() -> None:
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    from megatron_packing.mcore.probe import Candidate, probe

    class Lost(TEDotProductAttention):
        def forward(self, *args: Any, packed_seq_params: Any, **keywords: Any) -> torch.Tensor:
            ends = packed_seq_params.cu_seqlens_q[[0, -1]]
            for name in ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
                setattr(packed_seq_params, name, ends)
            packed_seq_params.max_seqlen_q = packed_seq_params.max_seqlen_kv = int(ends[-1])
            return super().forward(*args, packed_seq_params=packed_seq_params, **keywords)

    def checks(build: Any) -> dict[str, bool]:
        found = probe("cpu", [Candidate(name="it", build=build, precisions=(torch.float32,))])
        return {check.name: check.ok for check in found}

    right, wrong = checks(TEDotProductAttention), checks(Lost)
    assert len(right) == 8
    assert all(right.values()), right
    assert right.keys() == wrong.keys(), "it must run, and be wrong"
    assert not any(wrong.values()), wrong
