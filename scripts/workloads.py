"""Which lengths do the benchmarks of packing and balance run on? Made up, seeded, the same on every machine.

W1: lognormal of mean 600 (sigma 1.1), in packs of 8,192. W2: a tenth of it a Pareto tail up to packs of 131,072.
W3: uniform up to packs of 8,192. Each has the seed that its planners were made with, and two that nobody tuned on.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

type Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Lengths to draw and the packs that they go in."""

    name: str
    capacity: int
    samples: int
    seeds: tuple[int, int, int]
    """The first is the one that planners were made with."""
    draw: Callable[[np.random.Generator, int, int], npt.NDArray[np.floating | np.integer]]

    def lengths(self, seed: int, samples: int | None = None) -> Int64Array:
        """Lengths in tokens, int64 [N]."""
        drawn = self.draw(np.random.default_rng(seed), samples or self.samples, self.capacity)
        return np.clip(np.rint(drawn), 1 if self.name == "W3" else 16, self.capacity).astype(np.int64)


def _lognormal(rng: np.random.Generator, samples: int, capacity: int) -> npt.NDArray[np.floating]:
    sigma = 1.1
    return rng.lognormal(np.log(600.0) - sigma**2 / 2, sigma, samples)


def _with_tail(rng: np.random.Generator, samples: int, capacity: int) -> npt.NDArray[np.floating]:
    lengths = _lognormal(rng, samples, capacity)
    tail = rng.random(samples) < 0.10
    lengths[tail] = 8192 * (1 + rng.pareto(1.1, int(tail.sum())))
    return lengths


def _uniform(rng: np.random.Generator, samples: int, capacity: int) -> Int64Array:
    return rng.integers(1, capacity + 1, samples, dtype=np.int64)


W1 = Workload(name="W1", capacity=8192, samples=100_000, seeds=(20261129, 11, 12), draw=_lognormal)
W2 = Workload(name="W2", capacity=131_072, samples=100_000, seeds=(20261130, 21, 22), draw=_with_tail)
W3 = Workload(name="W3", capacity=8192, samples=10_000, seeds=(20261131, 31, 32), draw=_uniform)
