"""From the rows of files to samples: sources -> schemas -> chat and encode.

Needs neither torch nor Megatron; the tokenizer is handed in.
"""

from megatron_packing.data.encode import OVERLONG, Dropped, Encoder, TokenizedSample
from megatron_packing.data.preferences import Pair, convert_pair
from megatron_packing.data.schemas import (
    Conversation,
    Document,
    Message,
    TokenIds,
    convert,
    register_schema,
    split_conversations,
)
from megatron_packing.data.sources import JsonListSource, JsonlSource, Record, Source, open_source
from megatron_packing.data.survey import Rows, Survey, survey
from megatron_packing.data.synthetic import MockSource
from megatron_packing.data.tokenizer import Tokenizer

__all__ = [
    "OVERLONG",
    "Conversation",
    "Document",
    "Dropped",
    "Encoder",
    "JsonListSource",
    "JsonlSource",
    "Message",
    "MockSource",
    "Pair",
    "Record",
    "Rows",
    "Source",
    "Survey",
    "TokenIds",
    "TokenizedSample",
    "Tokenizer",
    "convert",
    "convert_pair",
    "open_source",
    "register_schema",
    "split_conversations",
    "survey",
]
