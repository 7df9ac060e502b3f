"""Train Megatron-Core on variable-length samples packed in THD format: no padding, the same loss.

The public names resolve on first use: importing this package loads neither torch nor Megatron.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# name -> module that defines it
_PUBLIC = {
    "CostModel": "megatron_packing.schedule",
    "Plan": "megatron_packing.schedule",
    "make_plan": "megatron_packing.schedule",
    "Topology": "megatron_packing.topology",
    "Conversation": "megatron_packing.data",
    "Document": "megatron_packing.data",
    "register_schema": "megatron_packing.data",
    "PackedBatch": "megatron_packing.thd",
    "to_packed_seq_params": "megatron_packing.mcore.params",
    "current_pack": "megatron_packing.mcore.step",
    "pair_log_probs": "megatron_packing.mcore.pairs",
    "MockVarlenDataset": "megatron_packing.mcore.dataset",
    "PreferenceDataset": "megatron_packing.mcore.dataset",
    "SFTDataset": "megatron_packing.mcore.dataset",
    "VarlenDataset": "megatron_packing.mcore.dataset",
}

__all__ = ["__version__", *sorted(_PUBLIC)]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
