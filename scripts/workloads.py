"""Which lengths do the benchmarks plan? Seeded, so that figures can be compared from machine to machine.

W1   log-normal around 600 tokens, up to 8,192: instruction data
W2   nine tenths of W1's body, one tenth a Pareto tail up to 131,072: long context
W3   uniform up to 8,192: hard to pack
"""

import numpy as np
import numpy.typing as npt

type Lengths = npt.NDArray[np.int64]

SHORTEST = 16
MEAN, SIGMA = 600.0, 1.1
TAIL_SHARE, TAIL_START, TAIL_EXPONENT = 0.1, 8192, 1.1

CAPACITIES = {"W1": 8192, "W2": 131_072, "W3": 8192}
SEEDS = {"W1": 20261129, "W2": 20261130, "W3": 20261131}
"""Of the published figures; others show that nothing was tuned on these."""


def lengths_of(workload: str, *, samples: int, seed: int | None = None) -> Lengths:
    """Lengths in tokens, int64 [samples]; `seed` None: that of the published figures."""
    rng = np.random.default_rng(SEEDS[workload] if seed is None else seed)
    capacity = CAPACITIES[workload]
    if workload == "W3":
        return rng.integers(1, capacity + 1, samples, dtype=np.int64)
    lengths = rng.lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, samples)
    if workload == "W2":
        in_tail = rng.random(samples) < TAIL_SHARE
        lengths[in_tail] = TAIL_START * (1 + rng.pareto(TAIL_EXPONENT, int(in_tail.sum())))
    return np.clip(np.rint(lengths), SHORTEST, capacity).astype(np.int64)
