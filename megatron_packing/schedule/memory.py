"""How many bytes does a microbatch keep for the backward pass? A count of the tensors that are stored, and an estimate.

Source of the counting: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models (2022),
sections 4 and 5 and table 2. Adapted: attention kernels of today keep no scores, so that nothing grows with the square
of a sample, only one number a query and head (the logarithm of its softmax's sum); heads of keys and values may be
fewer than those of queries; an MLP may be gated; there is no dropout, and so none of its masks. Numbers have 2 bytes,
logits and what softmax keeps 4. Left out: weights, gradients, optimizer, buffers of communication and whatever lives
for a moment only, so that a run's peak is higher.
"""

from dataclasses import dataclass

from megatron_packing.errors import ConfigError
from megatron_packing.schedule.cost import TransformerShape
from megatron_packing.topology import Topology

RECOMPUTE = ("none", "selective", "full")
"""What may be computed again instead of kept: nothing, attention, or each layer from its input."""

_BYTES = 2
"""Of a number in bf16."""
_FP32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationMemory:
    """What decides how much a rank keeps.

    Raises:
        ConfigError: a kind of recomputation that there is not, or a model with experts or MLA: it keeps other tensors.
    """

    shape: TransformerShape
    recompute: str = "none"
    """Of `RECOMPUTE`."""

    def __post_init__(self) -> None:
        if self.recompute not in RECOMPUTE:
            raise ConfigError(f"recompute is {self.recompute!r}; it must be one of: {', '.join(RECOMPUTE)}.")
        if self.shape.expert_layers or self.shape.latent is not None:
            raise ConfigError("activation memory is not counted for models with experts or MLA; give a dense model.")

    def of(self, tokens: int, topology: Topology) -> int:
        """Bytes that the rank with most of them keeps.

        The first stage of a pipeline holds as many microbatches as there are stages, each in its part of the layers:
        together all layers once. The last one holds one microbatch in its part of the layers, and the logits.

        Args:
            tokens: that a rank holds of a microbatch.
            topology: its TP, sequence parallelism and PP.
        """
        shared = topology.tp if topology.sequence_parallel else 1  # ranks that share what TP alone keeps whole
        layers = -(-self.shape.layers // topology.pp)
        last = self._layers(layers, topology.tp, shared) + self._output(topology.tp, shared)
        most = last if topology.pp == 1 else max(last, self._layers(layers * topology.pp, topology.tp, shared))
        return round(tokens * most)

    def _layers(self, layers: int, tp: int, shared: int) -> float:
        """Bytes a token of `layers` layers; where they are computed again, of their inputs and of one layer whole."""
        one = self._layer(tp, shared)
        return one + layers * _BYTES * self.shape.hidden / shared if self.recompute == "full" else layers * one

    def _layer(self, tp: int, shared: int) -> float:
        """Bytes a token of one layer.

        The inputs of both norms, of the matrix of queries, keys and values and of the MLP's first; then, shared by the
        TP ranks, queries, keys, values, what attention gives, and what stands before and after the MLP's activation.
        """
        shape = self.shape
        whole = 4 * shape.hidden
        attention = shape.head_dim * (2 * shape.heads + 2 * shape.groups)
        mlp = (3 if shape.gated else 2) * shape.ffn
        softmax = 0 if self.recompute == "selective" else _FP32_BYTES * shape.heads
        return _BYTES * whole / shared + (_BYTES * (attention + mlp) + softmax) / tp

    def _output(self, tp: int, shared: int) -> float:
        """Bytes a token of the last norm's input, the output layer's input, and the logits in fp32."""
        return 2 * _BYTES * self.shape.hidden / shared + _FP32_BYTES * self.shape.vocabulary / tp
