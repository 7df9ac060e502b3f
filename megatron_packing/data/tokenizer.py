"""What must a tokenizer offer? One small protocol, so that this room needs neither Megatron nor transformers.

Cost: none of its own. Adapters around real tokenizers live where Megatron may be imported; tests use a toy.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from megatron_packing.errors import SampleError


class Tokenizer(Protocol):
    """Text to ids. Must pickle, and must give the same ids for the same text in every process."""

    @property
    def name(self) -> str:
        """What to call it in logs."""

    @property
    def fingerprint(self) -> str:
        """A text that is the same in every process, and another one whenever any text's ids may be others."""

    @property
    def vocab_size(self) -> int:
        """Ids are below it."""

    @property
    def eos_id(self) -> int:
        """The id that ends a text."""

    @property
    def bos_id(self) -> int | None:
        """The id that opens every text, or None where texts of this vocabulary open with none."""

    @property
    def pad_id(self) -> int:
        """The id to fill up with; EOS stands in where the vocabulary has none. Padding is masked by position."""

    @property
    def chat(self) -> Any | None:
        """A transformers tokenizer that has a chat template, or None."""

    @property
    def conversation(self) -> Callable[[list[dict[str, Any]]], tuple[Any, Any]] | None:
        """Megatron's `SFTTokenizer`: messages -> (ids, targets), -100 where nothing is learned; or None."""

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without special tokens."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included."""


def encode_text(tokenizer: Tokenizer, text: str, path: str, line: int) -> list[int]:
    """`tokenizer.encode`, with what it cannot encode reported as a fault of the row."""
    try:
        return list(tokenizer.encode(text))
    except tokenizer_errors() as error:
        raise SampleError(
            path,
            line,
            f"tokenizer {tokenizer.name} cannot encode {text[:40]!r} ({type(error).__name__}: {error}). Is it the "
            "tokenizer for this data?",
            reason="not_encodable",
        ) from error


def tokenizer_errors() -> tuple[type[Exception], ...]:
    """What a tokenizer or its chat template raises over a row it does not accept.

    Jinja's errors share no base with Python's. If a template ran, jinja2 is loaded, so it need not be imported here.
    """
    jinja = sys.modules.get("jinja2")
    own: tuple[type[Exception], ...] = (ValueError, TypeError, LookupError, AssertionError)
    return (*own, jinja.TemplateError) if jinja is not None else own
