"""Which rank is who? Answered from integers alone, so that any rank of any cluster can be simulated.

Nothing here asks torch or Megatron what the current process is: detection lives in `mcore`.
"""

from dataclasses import dataclass, replace
from math import gcd, lcm

from megatron_packing.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Sizes of the parallel groups that matter to packing.

    Every size counts ranks and is at least 1.
    """

    dp: int = 1
    """Data-parallel replicas, context parallelism not included."""
    cp: int = 1
    """Context-parallel ranks that share one sample."""
    tp: int = 1
    """Tensor-parallel ranks."""
    pp: int = 1
    """Pipeline stages."""
    vpp: int = 1
    """Virtual pipeline stages (model chunks) on each rank; 1 means no interleaving."""
    ep: int = 1
    """Expert-parallel ranks."""
    fsdp: bool = False
    """Whether parameters are sharded over data parallelism, so that ranks meet in every layer."""
    sequence_parallel: bool = False
    """Whether activations are split along the sequence over the TP ranks."""
    quantized_rows: int = 1
    """Rows that what a rank holds of a pack must be a multiple of, for matrix products in a quantized type."""

    def __post_init__(self) -> None:
        for name in ("dp", "cp", "tp", "pp", "vpp", "ep", "quantized_rows"):
            size = getattr(self, name)
            if type(size) is not int or size < 1:
                counts = "rows" if name == "quantized_rows" else "ranks"
                raise ConfigError(
                    f"Topology.{name} is {size!r}; it counts {counts} and must be an integer of at least 1."
                )

    @property
    def widest(self) -> "Topology":
        """The same ranks, as they are for a pack that all DP x CP ranks share."""
        return replace(self, dp=1, cp=self.dp * self.cp)

    @property
    def alignment(self) -> int:
        """Tokens that every padded length is a multiple of.

        Context parallelism cuts a sample in 2*CP chunks (zigzag); sequence parallelism cuts each
        rank's share in TP parts.
        """
        return self.alignment_of(self.cp)

    def alignment_of(self, cp: int) -> int:
        """`alignment` for a pack that `cp` ranks share, whatever the CP of the others."""
        return (2 * cp if cp > 1 else 1) * (self.tp if self.sequence_parallel else 1)

    @property
    def pack_alignment(self) -> int:
        """Rows that every pack is a multiple of.

        That is the samples' alignment, and what a quantization recipe asks of each rank's rows. The recipe looks at
        matrices and not at samples, so that the whole pack is filled up once, and not each sample.
        """
        return lcm(self.alignment, self.quantized_rows * self.cp * (self.tp if self.sequence_parallel else 1))

    def check_capacity(self, max_tokens_per_rank: int) -> None:
        """Refuse a capacity that padded samples cannot fill: whatever fits unpadded must also fit padded.

        Args:
            max_tokens_per_rank: padded tokens that one rank may hold of a pack.

        Raises:
            ConfigError: the capacity is no multiple of the pack's alignment; names the nearest that are.
        """
        capacity, alignment = max_tokens_per_rank * self.cp, self.pack_alignment
        if capacity % alignment == 0:
            return
        unit = alignment // gcd(alignment, self.cp)  # tokens per rank whose multiples give valid capacities
        below = max_tokens_per_rank // unit * unit
        nearest = " or ".join(f"{rank:,} (capacity {rank * self.cp:,})" for rank in (below, below + unit) if rank)
        raise ConfigError(
            f"max_tokens_per_rank is {max_tokens_per_rank:,}, so a pack holds {capacity:,} = {max_tokens_per_rank:,} "
            f"per rank x CP {self.cp}; that must be a multiple of the alignment {alignment:,} (CP {self.cp}, TP "
            f"{self.tp}{' with sequence parallelism' if self.sequence_parallel else ''}"
            f"{f', {self.quantized_rows} rows a rank for FP8' if self.quantized_rows > 1 else ''}). "
            f"Set --max-seqlen-per-dp-cp-rank {nearest}."
        )

    @property
    def world_size(self) -> int:
        """Ranks in the whole job."""
        return self.dp * self.cp * self.tp * self.pp

    def pad(self, length: int) -> int:
        """`length` rounded up to the alignment, in tokens."""
        return -(-length // self.alignment) * self.alignment
