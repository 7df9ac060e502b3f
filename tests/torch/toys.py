"""Samples small enough to be read in a failing test's output."""

from collections.abc import Sequence

import torch

from megatron_packing.thd import SampleTensors


def sample(tokens: Sequence[int], labels: Sequence[int], loss_mask: Sequence[float]) -> SampleTensors:
    return SampleTensors(
        tokens_L=torch.tensor(tokens, dtype=torch.int64),
        labels_L=torch.tensor(labels, dtype=torch.int64),
        loss_mask_L=torch.tensor(loss_mask, dtype=torch.float32),
    )


def numbered(lengths: Sequence[int]) -> list[SampleTensors]:
    """Samples in which every token, label and weight is unique and none is 0, so that no mix-up goes unseen."""
    samples, next_id = [], 1
    for length in lengths:
        tokens = list(range(next_id, next_id + length))
        samples.append(sample(tokens, [-token for token in tokens], [token / 64 for token in tokens]))
        next_id += length
    return samples
