"""examples/pretrain_gpt.py on rows that Megatron packs itself. Each document is run alone too, and must lose the same.

A user's script as far as packing is concerned; Megatron-LM's own where MEGATRON_LM names a checkout of it. With --sft
Megatron's own SFTDataset packs conversations; what reads the file and what tokenizes are ours: the toy tokenizer
knows no conversations.
"""

import itertools
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tokenizers.utils import build_tokenizer as tokenizers
from megatron.training.datasets import sft_dataset

from tests import tolerances

SCRIPT = Path(os.environ.get("MEGATRON_LM", Path(__file__).parents[2] / "examples")) / "pretrain_gpt.py"


class Conversing:
    """The toy tokenizer, with a pad token and targets for conversations: ids in words, prompts are not learned."""

    pad = 0

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def tokenize_conversation(self, turns: list[dict[str, str]], **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, targets = [], []
        for turn in turns:
            ids = [int(word) for word in turn["content"].split()]
            tokens += ids
            targets += ids if turn["role"] == "assistant" else [sft_dataset.IGNORE_INDEX] * len(ids)
        return torch.tensor(tokens), torch.tensor(targets)


class Rows:
    """Conversations of a jsonl file."""

    def __init__(self, path: str) -> None:
        self._rows = [json.loads(line)["messages"] for line in Path(path).read_text().splitlines()]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> list[dict[str, str]]:
        return self._rows[number]


def compare_with_each_document_alone() -> None:
    forward = GPTModel.forward
    compared = {"rows": 0, "documents": 0}

    def checked(self: GPTModel, input_ids: Any, position_ids: Any, attention_mask: Any, **given: Any) -> Any:
        losses = forward(self, input_ids, position_ids, attention_mask, **given)
        edges = given["packed_seq_params"].cu_seqlens_q.tolist()
        assert edges[-1] == input_ids.numel() == losses.numel()
        for start, end in itertools.pairwise(edges):
            tokens, labels, mask = (x[:, start:end] for x in (input_ids, given["labels"], given["loss_mask"]))
            positions = torch.arange(end - start)[None]
            with torch.no_grad():  # what is no target has no label
                alone = forward(self, tokens, positions, None, labels=labels.clamp(min=0), loss_mask=mask)
            difference = (losses[:, start:end] - alone)[labels >= 0].abs()
            limit = tolerances.LOGITS * max(1.0, float(alone.abs().max()))
            assert not difference.numel() or float(difference.max()) <= limit, f"{start} to {end}: {difference.max()}"
            compared["documents"] += 1
        compared["rows"] += 1
        print(f"compared so far: {compared['documents']} documents in {compared['rows']} microbatches", flush=True)
        return losses

    GPTModel.forward = checked


if __name__ == "__main__":
    build = tokenizers.build_tokenizer
    tokenizers.build_tokenizer = lambda args, **how: Conversing(build(args, **how))
    sft_dataset.SFTLowLevelDataset = Rows
    compare_with_each_document_alone()
    sys.path.insert(0, str(SCRIPT.parent))
    runpy.run_path(str(SCRIPT), run_name="__main__")
