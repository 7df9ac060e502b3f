"""Which model will run the plan? By training's own flags for its sizes, with training's defaults."""

from dataclasses import dataclass

from megatron_packing.errors import ConfigError
from megatron_packing.schedule import CostModel, TransformerShape
from megatron_packing.schedule.memory import ActivationMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlags:
    """Sizes as they were given; None: not given."""

    num_layers: int | None
    hidden_size: int | None
    num_attention_heads: int | None
    num_query_groups: int | None
    kv_channels: int | None
    ffn_hidden_size: int | None
    swiglu: bool
    padded_vocab_size: int | None
    recompute_granularity: str | None

    def memory(self) -> ActivationMemory | None:
        """What the model keeps; None where no model was named.

        Raises:
            ConfigError: some of its flags were given, but not those without which there is no model.
        """
        needed = {
            "--num-layers": self.num_layers,
            "--hidden-size": self.hidden_size,
            "--num-attention-heads": self.num_attention_heads,
        }
        missing = [flag for flag, value in needed.items() if value is None]
        if missing and not self._anything():
            return None
        if self.num_layers is None or self.hidden_size is None or self.num_attention_heads is None:
            raise ConfigError(f"a model's sizes are given without {', '.join(missing)}: give all three, or none.")
        # As Megatron fills them in; a gated MLP has three matrices in the place of two.
        ffn = self.hidden_size * 4 * 2 // 3 // 64 * 64 if self.swiglu else 4 * self.hidden_size
        shape = TransformerShape(
            layers=self.num_layers,
            hidden=self.hidden_size,
            heads=self.num_attention_heads,
            head_dim=self.kv_channels or self.hidden_size // self.num_attention_heads,
            groups=self.num_query_groups or self.num_attention_heads,
            ffn=self.ffn_hidden_size or ffn,
            gated=self.swiglu,
            vocabulary=self.padded_vocab_size or 0,
        )
        return ActivationMemory(shape=shape, recompute=self.recompute_granularity or "none")

    def _anything(self) -> bool:
        return any(getattr(self, name) for name in self.__slots__)


def cost_of(
    memory: ActivationMemory | None, *, linear: float | None, quadratic: float, communication: float
) -> CostModel:
    """What counts as work, in query-key pairs: as given, or by the model's FLOPs; without either attention alone."""
    if linear is None and memory is not None:
        flops = CostModel.from_transformer(memory.shape)
        linear = quadratic * flops.linear / flops.quadratic
    return CostModel(linear=linear or 0.0, quadratic=quadratic, communication=communication)


def in_gib(size: int) -> str:
    """Bytes, in words."""
    return f"about {size / 2**30:,.1f} GiB"
