"""Rows of your own in files of any kind: say what a row means, and name the schema on the command line.

    python -m megatron_packing.launch examples/pretrain_gpt.py \\
        --use-varlen-dataset --packing-schema custom_schema:flashcards --data-path cards.jsonl ...
    megatron-packing inspect --packing-schema custom_schema:flashcards --data-path cards.jsonl ...

The module is found next to the script, or on PYTHONPATH; importing it registers the schema. A row here is
{"front": ..., "back": ..., "hints": [...]}. Where cards stand among rows of other kinds, `custom_schema:auto` decides
row by row and asks for cards first. To read other files, or to make samples in another way, subclass the dataset: see
custom_dataset.py.
"""

from collections.abc import Mapping
from typing import Any

from megatron_packing import Conversation, register_schema
from megatron_packing.data import Message, Record
from megatron_packing.errors import SampleError


def is_card(fields: Mapping[str, Any]) -> bool:
    """Whether a row is a card, by its fields."""
    return "front" in fields and "back" in fields


def card(row: Record) -> Conversation:
    """A card as a chat of two turns: the back is learned, the front and the hints are not."""
    front, back, hints = row.fields.get("front"), row.fields.get("back"), row.fields.get("hints") or []
    if not all(isinstance(text, str) for text in (front, back, *hints)):
        raise SampleError(row.path, row.line, "a card's front, back and hints must be text.", reason="bad_card")
    return Conversation((Message("user", " ".join([front, *hints])), Message("assistant", back)))


register_schema("flashcards", is_card, card, "front, back [, hints]")
