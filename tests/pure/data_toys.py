"""Tokenizers for the tests of `data`: ids written out as digits, and a small real one trained on the spot."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_packing.data import Dropped, Encoder, Record, Source, Survey, TokenizedSample, convert, survey
from megatron_packing.data.sources import ManySource
from megatron_packing.data.survey import first_rows

EOS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Toy:
    """ "11 12" -> [11, 12]. Like Megatron's NullTokenizer it can encode nothing but numbers."""

    eos_id: int = EOS
    bos_id: int | None = None
    pad_id: int = EOS  # the vocabulary has no pad token: EOS stands in
    name: str = "toy"
    vocab_size: int = 100
    fingerprint: str = "toy"
    chat: Any = None
    conversation: Callable[..., Any] | None = None

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class Real:
    """An adapter around a transformers tokenizer, as thin as it can be."""

    chat: Any
    name: str = "real"
    fingerprint: str = "real"
    conversation: Callable[..., Any] | None = None

    @property
    def vocab_size(self) -> int:
        return len(self.chat)

    @property
    def eos_id(self) -> int:
        return self.chat.eos_token_id

    @property
    def bos_id(self) -> int | None:
        return self.chat.bos_token_id

    @property
    def pad_id(self) -> int:
        return self.chat.pad_token_id if self.chat.pad_token_id is not None else self.eos_id

    def encode(self, text: str) -> list[int]:
        return self.chat.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        return self.chat.decode(list(ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRows:
    """A file's rows as an encoder sees them, for `survey`."""

    source: Source
    encoder: Encoder

    @property
    def path(self) -> str:
        return self.source.path

    def __len__(self) -> int:
        return len(self.source)

    @property
    def starts(self) -> Sequence[int]:
        return self.source.starts if isinstance(self.source, ManySource) else (0, len(self))

    def read(self, row: int) -> Any:
        return self.source[row]

    def understand(self, record: Any) -> object:
        return convert(record) if isinstance(record, Record) else record

    def encode(self, record: Any, row: int) -> list[TokenizedSample] | Dropped:
        return self.encoder.encode(record, self.path, row + 1)

    def place(self, record: Any, row: int) -> str:
        return f"{self.path}:{record.line if isinstance(record, Record) else row + 1}"


def surveyed(source: Source, encoder: Encoder, limit: int = 1000) -> Survey:
    """What the first `limit` rows give, all of them encoded."""
    look_at = first_rows((0, len(source)), encode=limit, most=0)
    return survey(EncodedRows(source=source, encoder=encoder), look_at)
