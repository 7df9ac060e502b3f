"""Datasets that a test hands to a run through --packing-dataset."""

from typing import Any

import numpy as np
import torch

from megatron_packing import VarlenDataset
from megatron_packing.data import TokenIds


class GivenIds(VarlenDataset):
    """Rows `{"ids": [...]}`, one more than the sample is long; with `"learn": false` nothing is a target."""

    def convert(self, row: Any) -> TokenIds:
        ids = np.array(row.fields["ids"])
        return TokenIds(ids, np.full(ids.shape, row.fields.get("learn", True)))


class MaskedSteps(VarlenDataset):
    """Steps 3 and 7 of 8 samples each have their targets masked, every one."""

    def __getitem__(self, idx: int) -> dict[str, Any]:
        item = super().__getitem__(idx)
        if idx // 8 in (2, 6):
            item["loss_mask"] = torch.zeros_like(item["loss_mask"])
        return item


class UnevenRows(VarlenDataset):
    """A file that not every node has in the same state."""

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: Any) -> Any:
        return [np.array([1, 2, 3])] * (5 + torch.distributed.get_rank())
