"""Which versions do what? One table of packed features, and what each needs; the README's is printed from it.

Loads neither torch nor Megatron: what is installed is handed in, so that any machine can be asked about. A feature that
packed runs refuse says so in the words of that refusal; versions of Transformer Engine are those of `te_versions`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_packing.config import ATTENTION_BACKENDS, FP8_ROWS, check_megatron_flags
from megatron_packing.errors import ConfigError
from megatron_packing.mcore.te_versions import CP_COMM_TYPES, CP_WITH_WINDOW, LARGEST_LOGIT, NEEDED, SINKS

_ENGINE = max(NEEDED, key=lambda need: need.since)
"""The youngest of what every packed run needs of Transformer Engine."""

type Capability = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """Something that a packed run may use, and what it needs."""

    name: str
    """Key in JSON."""
    title: str
    transformer_engine: str | None = None
    """Least version. Whatever needs Transformer Engine needs a CUDA device as well."""
    torch: str | None = None
    """Least version."""
    flash_attn: str | None = None
    """Least version."""
    apex: bool = False
    """Whether NVIDIA's Apex is needed."""
    device: bool = False
    """Whether a CUDA device is needed."""
    capability: Capability | None = None
    """Least compute capability."""
    below_capability: Capability | None = None
    cuda: str | None = None
    """Least CUDA that torch was built for."""
    backend: str | None = None
    """Name of --packing-attention under which it is chosen."""
    flags: Mapping[str, Any] = field(default_factory=dict)
    """Megatron's settings in a run that uses it, as `check_megatron_flags` takes them."""
    note: str = ""
    """What is worth knowing where it can be used."""

    @property
    def needs_device(self) -> bool:
        """Whether it runs on CUDA devices only."""
        return self.device or self.capability is not None or self.transformer_engine is not None

    def needs(self) -> list[str]:
        """Each need in words."""
        named = {
            "Transformer Engine": self.transformer_engine,
            "torch": self.torch,
            "flash-attn": self.flash_attn,
            "torch built for CUDA": self.cuda,
        }
        words = [f"{name} {least}" for name, least in named.items() if least is not None]
        if self.apex:
            words.append("NVIDIA's Apex")
        if self.capability is not None:
            below = "" if self.below_capability is None else f", below {dotted(self.below_capability)}"
            words.append(f"compute capability {dotted(self.capability)}{below}")
        elif self.needs_device:
            words.append("a CUDA device")
        return words


_UNPROVEN_FP8 = "alignment is tested, training was never run"

FEATURES: tuple[Feature, ...] = (
    Feature(
        name="sdpa",
        title="our attention: one SDPA call a sample",
        torch="2.9",
        backend="sdpa",
        note="any device; --transformer-impl local",
    ),
    Feature(
        name="varlen",
        title="our attention: torch.nn.attention.varlen",
        torch="2.12",
        capability=(8, 0),
        backend="varlen",
        note="bf16 on CUDA; --transformer-impl local",
    ),
    Feature(
        name="flash_attn",
        title="our attention: FlashAttention",
        flash_attn="2.3",
        capability=(8, 0),
        backend="flash",
        note="bf16 on CUDA; --transformer-impl local",
    ),
    Feature(
        name="packed_inputs",
        title="our attention, rows that Megatron packs (--sft, --dataloader-inter-document-masking)",
        backend="sdpa",
        note="--packing-attention without a scheduler; refused with context parallelism, where it is not proven",
    ),
    Feature(
        name="te_attention",
        title="Transformer Engine's attention",
        transformer_engine=_ENGINE.since_text,
        note=f"--transformer-impl transformer_engine; in older ones {_ENGINE.without}",
    ),
    Feature(
        name="padding_between_samples",
        title="padding between samples (alignment to CP, sequence parallelism, FP8)",
        note="padding rows end their sample, where no real row sees them: any attention can do that",
    ),
    Feature(
        name="cp_ours",
        title="context parallelism, our attention",
        backend="sdpa",
        note="keys and values of the group are gathered",
    ),
    *(
        Feature(
            name=f"cp_{kind}",
            title=f"context parallelism, Transformer Engine's {kind}",
            transformer_engine=comm.since_text,
            note="bf16",
        )
        for kind, comm in CP_COMM_TYPES.items()
    ),
    Feature(
        name="dynamic_cp_ours",
        title="groups of ranks that change (dynamic_cp), our attention",
        backend="sdpa",
        note="--no-rope-fusion",
    ),
    Feature(
        name="dynamic_cp_te",
        title="groups of ranks that change (dynamic_cp), Transformer Engine's attention",
        transformer_engine=CP_COMM_TYPES["p2p"].since_text,
        note="bf16, --no-rope-fusion; p2p, a2a and all_gather in the versions above",
    ),
    Feature(
        name="sliding_window",
        title="sliding window, Transformer Engine",
        transformer_engine=_ENGINE.since_text,
        flags={"window_size": (128, 0)},
        note=f"with context parallelism: {' or '.join(CP_WITH_WINDOW)} only",
    ),
    Feature(
        name="sliding_window_ours",
        title="sliding window, our attention",
        backend="sdpa",
        flags={"window_size": (128, 0)},
        note="rows before, none after; any device",
    ),
    Feature(
        name="sinks",
        title="attention sinks (--softmax-type)",
        transformer_engine=SINKS.since_text,
        flags={"softmax_type": "learnable"},
    ),
    Feature(
        name="largest_logit",
        title="largest attention logit (--log-max-attention-logit)",
        transformer_engine=LARGEST_LOGIT.since_text,
        flags={"log_max_attention_logit": True},
        note="rows of padding count in it",
    ),
    Feature(name="qk_clip", title="clipping by that logit (--qk-clip)", flags={"qk_clip": True}),
    Feature(
        name="fused_rope",
        title="fused RoPE",
        transformer_engine=_ENGINE.since_text,
        note="elsewhere --no-rope-fusion: one call for the whole pack",
    ),
    Feature(
        name="fp8",
        title="FP8, delayed or tensorwise scaling",
        note=f"{_UNPROVEN_FP8}; packs in multiples of {FP8_ROWS['delayed']} rows a rank",
        transformer_engine=_ENGINE.since_text,
        capability=(8, 9),
        flags={"fp8": "hybrid", "fp8_recipe": "delayed"},
    ),
    Feature(
        name="fp8_blockwise",
        title="FP8, blockwise scaling",
        note=f"{_UNPROVEN_FP8}; packs in multiples of {FP8_ROWS['blockwise']} rows a rank",
        transformer_engine="2.3",
        capability=(9, 0),
        cuda="12.9",
        flags={"fp8": "e4m3", "fp8_recipe": "blockwise"},
    ),
    Feature(
        name="mxfp8",
        title="MXFP8",
        note=f"{_UNPROVEN_FP8}; packs in multiples of {FP8_ROWS['mxfp8']} rows a rank",
        transformer_engine=_ENGINE.since_text,
        capability=(10, 0),
        below_capability=(12, 0),
        flags={"fp8": "e4m3", "fp8_recipe": "mxfp8"},
    ),
    Feature(name="fp4", title="FP4", transformer_engine="2.7", capability=(10, 0), flags={"fp4": "e2m1"}),
    Feature(name="fp16", title="fp16", flags={"fp16": True}),
    Feature(name="cuda_graphs", title="CUDA graphs", device=True, flags={"cuda_graph_impl": "local"}),
    Feature(
        name="apex",
        title="NVIDIA's Apex (optional)",
        apex=True,
        device=True,
        note="fused optimizer and norms where Transformer Engine brings none",
    ),
    Feature(
        name="moe",
        title="mixture of experts",
        flags={"num_experts": 8, "moe_token_dispatcher_type": "alltoall"},
        note="padding reaches neither statistics nor auxiliary losses of the router; those are one a microbatch, "
        "so that they depend on the packs",
    ),
    Feature(
        name="moe_grouped_gemm",
        title="experts' grouped GEMM",
        transformer_engine=_ENGINE.since_text,
        flags={"num_experts": 8, "moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True},
        note="groups of any size, as packs make them",
    ),
    Feature(
        name="moe_capacity",
        title="expert capacity with dropping",
        flags={"num_experts": 8, "moe_token_dispatcher_type": "alltoall", "moe_expert_capacity_factor": 1.0},
        note="which tokens are dropped depends on the packs, and padding takes places too; the log warns",
    ),
    Feature(
        name="moe_sinkhorn",
        title="sinkhorn and quantile routing",
        flags={
            "num_experts": 8,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "sinkhorn",
        },
    ),
    Feature(
        name="moe_dispatchers",
        title="other token dispatchers than alltoall",
        flags={"num_experts": 8, "moe_token_dispatcher_type": "allgather"},
    ),
    Feature(name="mtp", title="multi-token prediction", flags={"mtp_num_layers": 1}),
    Feature(name="hybrid", title="hybrid models (Mamba, gated delta net)", flags={"hybrid_layer_pattern": "M*M*"}),
    Feature(
        name="linear_attention",
        title="recurrent layers in a GPT (gated delta net)",
        flags={"experimental_attention_variant": "gated_delta_net"},
    ),
    Feature(name="mla", title="multi-latent attention", flags={"multi_latent_attention": True}),
)
"""Versions of Transformer Engine: Megatron-Core's `TEDotProductAttention` for what it hands on, TE's own
`dot_product_attention/context_parallel.py` and `quantization.py` for what it can do with it."""


def refusal(feature: Feature) -> str | None:
    """Why packed runs refuse it, in the words that a run would say; None where they do not."""
    if feature.backend is not None and feature.backend not in ATTENTION_BACKENDS:
        return f"--packing-attention {feature.backend}: there is no such backend in this release."
    try:
        check_megatron_flags(feature.flags, packed=True, attention=feature.backend or "te")
    except ConfigError as error:
        return str(error)
    return None


def table() -> str:
    """Feature, what it needs, remark: as Markdown, which the README holds word for word."""
    rows = [("", "needs", ""), ("---", "---", "---")]
    for feature in FEATURES:
        refused = refusal(feature)
        if refused is None:
            rows.append((feature.title, ", ".join(feature.needs()) or "nothing more", feature.note))
        else:
            rows.append((feature.title, "refused", refused))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def dotted(capability: Capability) -> str:
    """(9, 0) as people write it."""
    return ".".join(map(str, capability))
