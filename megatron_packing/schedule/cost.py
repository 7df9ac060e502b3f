"""How much work is a sample? One multiplication and one addition a sample.

A transformer's matrix products grow with a sample's tokens, its attention scores with their square, because no
token of a pack looks at another sample. Two numbers therefore rank any two samples.
What ranks that share a sample send each other grows with its tokens, and no rank is spared it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_packing.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Work of a sample of `s` tokens: `linear * s + quadratic * s**2`, in any unit that suits the caller.

    Planners and metrics compare costs and never read them as seconds, so only the ratio of the two numbers matters.
    With `quadratic=1` the unit is the work of one query-key pair, and `linear` says how many pairs weigh as much
    as one token's matrix products: 0 looks at attention alone, 24576 is about a dense model of 7 billion parameters.

    Raises:
        ConfigError: a number is negative, infinite or not a number.
    """

    linear: float
    """Work that a sample pays once for each of its tokens."""
    quadratic: float
    """Work that a sample pays once for each pair of its tokens."""
    communication: float = 0.0
    """Work that each rank of a CP group of more than one pays for each token of the pack, on top of its share."""

    def __post_init__(self) -> None:
        for name in ("linear", "quadratic", "communication"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"CostModel.{name} is {value!r}; it weighs work and must be finite and at least 0.")

    def of(self, lengths: Sequence[int] | npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
        """The cost of each sample. Tokens, shape [N], any integer type -> float64, shape [N].

        Costs are floats: the square of a length of 2**31 leaves the exact range of int64 sums.
        """
        tokens_N = np.asarray(lengths, dtype=np.float64)
        return self.linear * tokens_N + self.quadratic * tokens_N * tokens_N
