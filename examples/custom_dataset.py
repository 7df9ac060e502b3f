"""A corpus of your own: subclass VarlenDataset, say what a row means, and name the class on the command line.

    python -m megatron_packing.launch examples/pretrain_gpt.py \\
        --packing-dataset custom_dataset:FlashcardDataset --data-path cards.jsonl ...

The module is found next to the script. A row here is {"front": ..., "back": ..., "hints": [...]}.
"""

from typing import Any

from megatron_packing import Conversation, VarlenDataset
from megatron_packing.data import Message
from megatron_packing.errors import SampleError


class FlashcardDataset(VarlenDataset):
    """One flashcard a row: the back is learned, the front and the hints are not."""

    def convert(self, row: Any) -> Conversation:
        """A card as a chat of two turns."""
        card = row.fields
        if "front" not in card or "back" not in card:
            raise SampleError(row.path, row.line, f"has the fields {sorted(card)}; a card needs front and back.")
        prompt = " ".join([card["front"], *card.get("hints", [])])
        return Conversation((Message("user", prompt), Message("assistant", card["back"])))
