"""How does an attention that honours boundaries get into a local Megatron model? As `core_attention` of the stock spec.

`--spec megatron_packing.mcore.attention_spec local_layer_spec` is set by the launcher for `--transformer-impl local`
(`local_layer_spec_te` with `--packing-attention te`); Transformer Engine's own layer spec is left untouched.
"""

import contextlib
import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from megatron.core.utils import divide
from torch import Tensor, nn

from megatron_packing.attention.core import batched_attention, packed_attention, sharded_attention, varlen_attention
from megatron_packing.attention.dispatch import Kernel, choose_kernel
from megatron_packing.comm.gather import all_gather_rows_of_cp
from megatron_packing.errors import ConfigError, PackingError
from megatron_packing.mcore import te_versions
from megatron_packing.thd.layout import order_of_gathered_rows

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)


def local_layer_spec(model_config: Any, vp_stage: int | None = None) -> Any:
    """The default layer spec of Megatron's local implementation, with our core attention in its place.

    The kernel is the one that --packing-attention names, where the run has our flags.
    """
    from megatron_packing.mcore.hooks import kernel_of_our_attention

    kernel = kernel_of_our_attention()
    return _default_spec_with(functools.partial(PackedDotProductAttention, kernel=kernel), model_config, vp_stage)


def local_layer_spec_te(model_config: Any, vp_stage: int | None = None) -> Any:
    """The same with Transformer Engine's core attention; linears and norms stay Megatron's."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    return _default_spec_with(TEDotProductAttention, model_config, vp_stage)


def _default_spec_with(core_attention: Callable[..., nn.Module], model_config: Any, vp_stage: int | None) -> Any:
    from megatron.training.models.gpt import default_layer_spec

    spec = default_layer_spec(model_config, vp_stage)
    for layer in getattr(spec, "layer_specs", None) or [spec]:  # a block of layers (MoE), or one for all
        put_core_attention(layer, core_attention)
    return spec


def put_core_attention(layer: Any, core_attention: Callable[..., nn.Module]) -> None:
    """Change a local layer's spec: its self-attention gets this core. Megatron has specs of two kinds."""
    self_attention = layer.submodules.self_attention
    submodules = getattr(self_attention, "submodules", None) or self_attention.keywords["submodules"]
    submodules.core_attention = core_attention


class PackedDotProductAttention(MegatronModule):
    """Core attention that honours the boundaries in `PackedSeqParams`; GQA and dropout included.

    Takes the place of Megatron's `DotProductAttention`. Without packed parameters it computes ordinary
    causal attention on [s, b, heads, dim], so that a padded baseline can run on the same kernel.

    Args:
        kernel: of `attention.dispatch.KERNELS`; what computes packs.

    Raises:
        ConfigError: the model wants a kind of attention that this one does not compute.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        kernel: str = "auto",
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        self.kernel = kernel
        if attention_type != "self":
            raise ConfigError(f"packing's attention is for self-attention; the model asks for {attention_type!r}.")
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.cp_group = pg_collection.cp
        self.attn_mask_type = attn_mask_type
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.window = _window_of(config, layer_number)
        # Megatron's layer-dependent query/key scaling divides before the softmax and multiplies inside it.
        self.scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        self.hidden_per_rank = divide(config.kv_channels * config.num_attention_heads, pg_collection.tp.size())

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attention output.

        Args:
            query: [R, N, H] with packed parameters, R = T / CP the rank's rows; else [s, b, N, H].
            key: [R, G, H], else [s, b, G, H].
            value: like `key`.
            attention_mask: must be None; causality and boundaries are the whole mask.
            attn_mask_type: overrides the layer's own.
            attention_bias: must be None.
            packed_seq_params: boundaries of the pack.

        Returns:
            [R, N * H] with packed parameters, else [s, b, N * H].
        """
        if attention_bias is not None or attention_mask is not None:
            raise PackingError("packing's attention takes neither an explicit mask nor a bias.")
        dropout = self.dropout if self.training else 0.0
        causal = (attn_mask_type or self.attn_mask_type) in _CAUSAL
        if self.window is not None and not causal:
            raise PackingError("packing's attention has sliding windows for causal attention only.")
        settings: dict[str, Any] = {"scale": self.scale, "causal": causal, "window": self.window, "dropout": dropout}
        if packed_seq_params is None:
            if self.cp_group.size() > 1:
                raise PackingError("without boundaries, packing's attention runs on one context-parallel rank only.")
            with self._random_state(dropout):
                out = batched_attention(query, key, value, **settings)
            return out.reshape(*out.shape[:2], self.hidden_per_rank)
        boundaries = packed_seq_params.cu_seqlens_q_padded
        if boundaries is None:
            boundaries = packed_seq_params.cu_seqlens_q
        group = group_that_shares(packed_seq_params, self.cp_group)
        kernel = choose_kernel(query, wanted=self.kernel, dropout=dropout, cp_size=group.size())
        _say_once(kernel)
        with self._random_state(dropout):
            if kernel.takes_boundaries:
                settings |= {"max_seqlen": packed_seq_params.max_seqlen_q, "kernel": kernel}
                out = varlen_attention(query, key, value, boundaries, **settings)
            elif group.size() == 1:
                out = packed_attention(query, key, value, _lengths(boundaries), **settings)
            else:
                out = self._over_context_parallel_ranks(query, key, value, boundaries, group, settings)
        return out.reshape(out.shape[0], self.hidden_per_rank)

    def _over_context_parallel_ranks(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        boundaries: Tensor,
        group: torch.distributed.ProcessGroup,
        settings: dict[str, Any],
    ) -> Tensor:
        """Gather every rank's keys and values, put them in the pack's order, and look at them from this rank's rows."""
        lengths = _lengths(boundaries)
        order = order_of_gathered_rows(tuple(lengths), group.size()).to(query.device)
        gathered = all_gather_rows_of_cp(torch.stack([key, value], dim=1), group).index_select(0, order)
        keys, values = gathered.unbind(dim=1)
        place = {"cp_size": group.size(), "cp_rank": group.rank()}
        return sharded_attention(query, keys, values, lengths, **place, **settings)

    def _random_state(self, dropout: float) -> Any:
        """Dropout of attention weights draws from the model-parallel state, as Megatron's own attention does."""
        if dropout == 0.0 or self.config.sequence_parallel:
            return contextlib.nullcontext()
        return tensor_parallel.get_cuda_rng_tracker().fork()


def _window_of(config: TransformerConfig, layer_number: int) -> int | None:
    """Rows before its own that a row of this layer sees; None: all."""
    if not is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        return None
    assert config.window_size is not None
    return None if config.window_size[0] < 0 else config.window_size[0]


def _lengths(boundaries: Tensor) -> list[int]:
    """Rows of each sample that has some. Waits for the device."""
    return [rows for rows in boundaries.diff().tolist() if rows]


@functools.cache
def _say_once(kernel: Kernel) -> None:
    from megatron.training.utils import print_rank_0

    print_rank_0(f"megatron_packing: our attention runs by {kernel.name} ({kernel.why})")


def group_that_shares(
    packed: PackedSeqParams | None, static: torch.distributed.ProcessGroup
) -> torch.distributed.ProcessGroup:
    """The ranks that share a pack: those that its parameters name, or else the model's own context-parallel group."""
    if packed is None or packed.local_cp_size is None:
        return static
    return _alone() if packed.cp_group is None else packed.cp_group


@functools.cache
def _alone() -> torch.distributed.ProcessGroup:
    """A group of one, which nobody communicates in: no backend, and no collective to make it."""
    return torch.distributed.ProcessGroup(0, 1)


def rotate_by_the_packs_group(chunk: nn.Module) -> None:
    """Let every attention of a chunk give RoPE the group of the pack that it is called with.

    Megatron hands RoPE the model's own context-parallel group, whatever the parameters of the pack say. Set before each
    call and not once a microbatch, so that a recomputed layer rotates as it did at first.
    """
    from megatron.core.transformer.attention import Attention

    for module in chunk.modules():
        if isinstance(module, Attention):
            # Its own collection: the model's other parts go on with the static group.
            module.pg_collection, static = copy.copy(module.pg_collection), module.pg_collection.cp
            module.register_forward_pre_hook(functools.partial(_set_group, static), with_kwargs=True)


def _set_group(static: torch.distributed.ProcessGroup, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
    module.pg_collection.cp = group_that_shares(kwargs.get("packed_seq_params"), static)


def let_transformer_engine_change_groups(chunk: nn.Module) -> None:
    """Set up every Transformer Engine's attention of a chunk for whatever group a pack comes with.

    Megatron hands it the group at each call, and with it a stream and the way in which ranks exchange keys and values.
    Those two it sets up for a model with a fixed context-parallel group only: else there is no stream, with which a
    group of several ranks fails, and `--cp-comm-type` is lost.
    """
    from megatron.core.extensions.transformer_engine import HAVE_TE, TEDotProductAttention

    for module in chunk.modules():
        if HAVE_TE and isinstance(module, TEDotProductAttention):
            module.cp_comm_type = _cp_comm_type_of(module.config, module.layer_number)
            if TEDotProductAttention.cp_stream is None:  # one for all layers, as Megatron has it
                TEDotProductAttention.cp_stream = torch.cuda.Stream()


def _cp_comm_type_of(config: TransformerConfig, layer_number: int) -> str:
    """What --cp-comm-type says of a layer; layers count from 1."""
    kinds = config.cp_comm_type or "p2p"
    return kinds if isinstance(kinds, str) else kinds[layer_number - 1]


def check_attention_honours_boundaries(chunk: nn.Module) -> None:
    """Refuse a model chunk in which some attention would look across samples.

    Raises:
        ConfigError: a core attention is Megatron's local `DotProductAttention`, or a Transformer Engine's that cannot
            do with packed samples what the model asks of it.
    """
    from megatron.core.extensions.transformer_engine import HAVE_TE, TEDotProductAttention
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    for name, module in chunk.named_modules():
        if HAVE_TE and isinstance(module, TEDotProductAttention):
            kind = module.cp_comm_type or "p2p"
            groups = module.config.num_query_groups
            asked = te_versions.asked_of(module.config, cp_comm_types=[kind], query_groups=groups)
            te_versions.check(te_versions.installed(), asked)
        if isinstance(module, DotProductAttention):
            raise ConfigError(
                f"{name} is {type(module).__name__}, which cannot honour the boundaries between samples. Leave --spec "
                "out, or put PackedDotProductAttention or TEDotProductAttention in its place."
            )
