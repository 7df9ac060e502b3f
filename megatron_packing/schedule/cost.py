"""How much work is a sample? One multiplication and one addition a sample.

A transformer's matrix products grow with a sample's tokens, its attention scores with their square, because no
token of a pack looks at another sample. Two numbers therefore rank any two samples. They are given, or follow from a
model's sizes (`CostModel.from_transformer`), or from measured microbatches (`CostModel.fitted`).
What ranks that share a sample send each other grows with its tokens, and no rank is spared it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import combinations

import numpy as np
import numpy.typing as npt

from megatron_packing.errors import ConfigError, PackingError


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Sizes of multi-head latent attention (MLA), each a number of features."""

    query_rank: int | None
    """Of the compressed queries; None: queries are not compressed."""
    key_value_rank: int
    """Of the compressed keys and values."""
    key_dim: int
    """Of a head's queries and keys, without the rotated part."""
    rotary_dim: int
    """Of the rotated part, which the keys of all heads share."""
    value_dim: int
    """Of a head's values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """The sizes of a decoder that decide its work, as plain numbers.

    Raises:
        ConfigError: a size is negative or no integer, or there are no layers.
    """

    layers: int
    """All layers, those with experts included."""
    hidden: int
    """Features between layers."""
    heads: int
    """Query heads of a layer."""
    head_dim: int
    """Features of a head."""
    groups: int
    """Key and value heads of a layer: `heads` for multi-head attention, 1 for multi-query attention."""
    ffn: int
    """Features inside the MLP of a dense layer."""
    gated: bool = False
    """Whether MLPs, the experts' too, have a third matrix (SwiGLU and its kin)."""
    vocabulary: int = 0
    """Entries of the output layer; 0 leaves its work out."""
    expert_layers: int = 0
    """How many of the layers have experts in the place of their MLP."""
    experts: int = 0
    """Experts that a router chooses from."""
    experts_a_token: int = 0
    """Experts that each token goes through."""
    expert_ffn: int = 0
    """Features inside an expert."""
    shared_ffn: int = 0
    """Features inside the experts that every token goes through, all together."""
    latent: LatentAttention | None = None
    """Set: attention is MLA; `head_dim` and `groups` are then not looked at."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int and (type(value) is not int or value < (field.name == "layers")):
                raise ConfigError(f"TransformerShape.{field.name} is {value!r}; it counts and must be an integer >= 0.")
        if self.expert_layers > self.layers:
            raise ConfigError(
                f"TransformerShape.expert_layers is {self.expert_layers}; there are {self.layers} layers."
            )

    @property
    def weights_a_token(self) -> int:
        """Weights of all matrices that one token is multiplied with."""
        matrices = 3 if self.gated else 2
        dense = matrices * self.hidden * self.ffn
        routed = matrices * self.hidden * (self.experts_a_token * self.expert_ffn + self.shared_ffn)
        routed += self.hidden * self.experts
        mlps = (self.layers - self.expert_layers) * dense + self.expert_layers * routed
        return self.layers * self._projections + mlps + self.hidden * self.vocabulary

    @property
    def _projections(self) -> int:
        """Weights of the matrices around one layer's attention."""
        if self.latent is None:
            return self.hidden * self.head_dim * (2 * self.heads + 2 * self.groups)
        mla, query = self.latent, self.heads * (self.latent.key_dim + self.latent.rotary_dim)
        queries = self.hidden * query if mla.query_rank is None else mla.query_rank * (self.hidden + query)
        keys_values = self.hidden * (mla.key_value_rank + mla.rotary_dim)
        keys_values += mla.key_value_rank * self.heads * (mla.key_dim + mla.value_dim)
        return queries + keys_values + self.heads * mla.value_dim * self.hidden

    @property
    def products_a_pair(self) -> int:
        """Multiplications of one query with one key and of the score with one value, over all heads and layers."""
        if self.latent is None:
            return self.layers * self.heads * 2 * self.head_dim
        return self.layers * self.heads * (self.latent.key_dim + self.latent.rotary_dim + self.latent.value_dim)


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

    def of(
        self,
        lengths: Sequence[int] | npt.NDArray[np.integer],
        squares: Sequence[int] | npt.NDArray[np.integer] | None = None,
    ) -> npt.NDArray[np.float64]:
        """The cost of each sample, or of several samples together. float64, shape [N].

        Costs are floats: the square of a length of 2**31 leaves the exact range of int64 sums.

        Args:
            lengths: tokens, shape [N], any integer type; of several samples, their sum.
            squares: of several samples, the sum of their lengths squared, shape [N]; None: each is one sample.
        """
        tokens_N = np.asarray(lengths, dtype=np.float64)
        squares_N = tokens_N * tokens_N if squares is None else np.asarray(squares, dtype=np.float64)
        return self.linear * tokens_N + self.quadratic * squares_N

    @classmethod
    def from_transformer(cls, shape: TransformerShape) -> "CostModel":
        """FLOPs of a sample through a model, forward and backward.

        A multiplication with its addition is 2 FLOPs, and the backward pass multiplies twice for each product of the
        forward pass (for the gradients of both factors), so a weight costs a token 6 FLOPs; causal attention has
        s * (s + 1) / 2 pairs of a query and a key. So with W weights a token and P products a pair

            6 * W * s + 6 * P * s * (s + 1) / 2    =    (6 W + 3 P) * s + 3 P * s**2

        Source of the counting: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using
        Megatron-LM (2021), appendix, which counts all s**2 pairs; kernels skip the half above the diagonal. Left out,
        as there: norms, softmax, activations, rotations, and whatever is computed twice to save memory.
        """
        weights, products = shape.weights_a_token, shape.products_a_pair
        return cls(linear=float(6 * weights + 3 * products), quadratic=float(3 * products))

    @classmethod
    def fitted(cls, tokens: Sequence[float], squares: Sequence[float], ms: Sequence[float]) -> "CostModel":
        """The cost in milliseconds that explains measured microbatches best: least squares, no number below 0.

        Fits ms = linear * tokens + quadratic * squares + overhead. The overhead of a microbatch is the same for every
        plan with as many of them, so it is measured and left out. Solvers round differently from machine to machine:
        ranks that plan together must take one rank's result.

        Args:
            tokens: tokens of each microbatch, the sum over its samples; at least 3 microbatches.
            squares: the sum over its samples of their tokens squared.
            ms: how long it took, forward and backward.

        Raises:
            PackingError: numbers that are not finite, rows of different length, or microbatches that are too few or too
                much alike to tell the three terms apart.
        """
        terms = np.array([tokens, squares, np.ones(len(tokens))], dtype=np.float64).T
        target = np.array(ms, dtype=np.float64)
        if target.shape != terms.shape[:1] or not (np.isfinite(terms).all() and np.isfinite(target).all()):
            raise PackingError("CostModel.fitted takes three rows of finite numbers, one of each for a microbatch.")
        scales = np.abs(terms).max(axis=0, initial=1e-300)
        if np.linalg.matrix_rank(terms / scales, tol=1e-6) < 3:
            raise PackingError(
                f"{len(target)} measured microbatches cannot tell linear from quadratic work: they are too few or too "
                "much alike. Measure more steps, or longer and shorter samples."
            )
        solution = _non_negative_least_squares(terms / scales, target) / scales
        return cls(linear=float(solution[0]), quadratic=float(solution[1]))


def _non_negative_least_squares(
    terms_NK: npt.NDArray[np.float64], target_N: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """The best weights of the K terms, none below 0, shape [K]: the best of all choices of terms that stay above 0."""
    num_terms = terms_NK.shape[1]
    best, least = np.zeros(num_terms), float(target_N @ target_N)
    for size in range(1, num_terms + 1):
        for chosen in combinations(range(num_terms), size):
            weights = np.linalg.lstsq(terms_NK[:, chosen], target_N, rcond=None)[0]
            error = float(((terms_NK[:, chosen] @ weights - target_N) ** 2).sum())
            if (weights >= 0).all() and error < least:
                best, least = np.zeros(num_terms), error
                best[list(chosen)] = weights
    return best
