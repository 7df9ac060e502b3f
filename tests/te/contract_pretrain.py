"""examples/pretrain_gpt.py, with every call of Transformer Engine's attention looked at.

What it gets, and what it takes that for. A call that is not as it must be ends the run; the last line of the log tells
all calls.
"""

import functools
import inspect
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from transformer_engine.pytorch import DotProductAttention
from transformer_engine.pytorch.attention.dot_product_attention import backends
from transformer_engine.pytorch.attention.dot_product_attention import utils as dpa_utils

CALLS = "calls of Transformer Engine's attention: "
BOUNDARIES = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
calls: list[dict[str, Any]] = []
kernels: set[str] = set()


def watch_attention() -> None:
    forward = DotProductAttention.forward
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments  # raises where a keyword has no parameter
        if torch.is_grad_enabled():
            calls.append(look_at(self, given))
        return forward(self, *args, **kwargs)

    DotProductAttention.forward = watched


def look_at(attention: Any, given: dict[str, Any]) -> dict[str, Any]:
    tp = parallel_state.get_tensor_model_parallel_world_size()
    group = attention.cp_group
    members = [torch.distributed.get_rank()] if group is None else torch.distributed.get_process_group_ranks(group)
    if len(members) > 1:
        assert attention.cp_global_ranks == members
        assert isinstance(attention.cp_stream, torch.cuda.Stream)
    boundaries = given["cu_seqlens_q"]
    assert given["qkv_format"] == "thd"
    assert given["attn_mask_type"] == "padding_causal"
    assert given["pad_between_seqs"] is False  # and not None, at which it would guess
    assert given.get("attention_mask") is None
    for name in BOUNDARIES:
        assert given[name] is boundaries, f"{name} is another tensor"
    assert boundaries.dtype == torch.int32
    assert boundaries.dim() == 1
    assert boundaries.is_contiguous()
    rows = int(boundaries[-1]) // len(members)
    heads = {"query_layer": 4 // tp, "key_layer": 2 // tp, "value_layer": 2 // tp}  # keys are not repeated
    for name, count in heads.items():
        assert given[name].shape == (rows, count, 16), f"{name}: {given[name].shape}"
    for name in ("max_seqlen_q", "max_seqlen_kv"):
        assert type(given[name]) is int
        assert given[name] == int(boundaries.diff().max())
    how = {"group": members, "kind": attention.cp_comm_type}
    return {"layer": attention.layer_number, "lengths": boundaries.diff().tolist(), **how}


def watch_choice() -> None:
    """What it concludes from a call: the parameters that its choice of a kernel goes by."""
    choose = dpa_utils.get_attention_backend

    @functools.wraps(choose)
    def watched(params: Any) -> Any:
        assert params.qkv_layout == "thd_thd_thd"
        assert params.attn_mask_type == "padding_causal"
        assert params.pad_between_seqs is False
        assert (params.num_heads, params.num_gqa_groups) in ((4, 2), (2, 1))
        return choose(params)

    dpa_utils.get_attention_backend = watched
    for kernel in (backends.UnfusedDotProductAttention, backends.FusedAttention, backends.FlashAttention):
        kernel.forward = noted(kernel.__name__, kernel.forward)


def noted(name: str, forward: Any) -> Any:
    @functools.wraps(forward)
    def watched(*args: Any, **kwargs: Any) -> Any:
        kernels.add(name)
        return forward(*args, **kwargs)

    return watched


def main() -> None:
    watch_attention()
    watch_choice()
    runpy.run_path(str(Path(sys.path[0]).parents[1] / "examples" / "pretrain_gpt.py"), run_name="__main__")
    print(CALLS + json.dumps({"calls": calls, "kernels": sorted(kernels)}), flush=True)


if __name__ == "__main__":
    main()
