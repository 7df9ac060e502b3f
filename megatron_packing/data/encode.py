"""What does one row teach? Ids, shifted into inputs and labels, with a mask over what is learned; or why nothing.

A row of n + 1 ids becomes a sample of length n:

    ids        11 12 21 22  7        (11 12 the prompt, 21 22 the answer, 7 EOS)
    tokens     11 12 21 22
    labels        12 21 22  7
    loss_mask      0  1  1  1

Nothing is masked by the value of an id, so it does not matter whether padding and EOS share one. Labels under a zero
mask are true ids, never -100: a fused cross entropy looks them up before the mask is applied.

A row longer than --seq-length, L tokens, is cut between two ids, wherever that falls: a character of several tokens
may be cut, as each of them is still the true next one. `split` makes pieces of L tokens, the last one shorter:

    ids           11 12 21 22  7     L = 3
    tokens        11 12 21|22        each id but the last is an input once
    labels        12 21 22| 7        each id but the first is a target once

Cost: the tokenizer's, plus two copies of the row.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_packing.data.chat import TRAIN_ON, choose_chat, learned_turns, opened, with_eos
from megatron_packing.data.meaning import Converted, Document, TokenIds
from megatron_packing.data.schemas import check_schema, convert, schemas_content
from megatron_packing.data.sources import Record
from megatron_packing.data.tokenizer import Tokenizer, encode_text
from megatron_packing.errors import ConfigError, SampleError

OVERLONG = ("error", "drop", "truncate", "truncate-left", "split")
"""What to do with a sample longer than --seq-length."""

ENCODING_VERSION = 1
"""Part of every fingerprint. Raise it whenever a row may become other ids or targets than before."""

MIN_DOCUMENT_IDS = 2
"""Content ids below which a document is skipped: of one id, only that it ends could be learned."""

NOT_BAD_ROWS = frozenset({"overlong", "template_rewrites_history", "template_marks_wrong", "template_span_unclear"})
"""Reasons of SampleErrors that a setting causes, not a rotten row: --packing-bad-rows skip does not silence them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenizedSample:
    """One training sequence of n tokens, labels already shifted. The arrays are its own: editing one harms no other."""

    tokens: npt.NDArray[np.int64]
    """int64 [n], the inputs."""
    labels: npt.NDArray[np.int64]
    """int64 [n], the id after each input; true ids under a zero mask, too."""
    loss_mask: npt.NDArray[np.float32]
    """float32 [n], 1 where the label counts in the loss, else 0; at least one is 1."""
    truncated: bool = False
    """Whether ids were cut off to fit --seq-length."""

    @property
    def length(self) -> int:
        """n, in tokens; before any padding."""
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Dropped:
    """A row that makes no sample, by a stated rule."""

    reason: str
    """empty, too_short, no_targets, overlong or truncated_no_targets: the name it is counted under."""
    why: str = field(default="", compare=False)
    """"file:line: why" where a fault of the row is the cause; empty where a rule is, which `said` then names."""

    def said(self, place: str) -> str:
        """Which row this is and why it makes no sample, in words. `place` is its file:line."""
        return self.why or f"{place}: {_RULES.get(self.reason, self.reason)}"


_RULES = {
    "empty": "says nothing",
    "too_short": "has too few tokens for anything to be learned",
    "no_targets": "has nothing that is to be learned, such as an assistant turn",
    "overlong": "has more tokens than --seq-length",
    "truncated_no_targets": "has nothing to be learned within --seq-length",
}


class Encoder:
    """Rows to samples under one set of rules. Holds no state that a row changes; pickles if its tokenizer does.

    Args:
        tokenizer: text to ids.
        seq_length: the longest sample, in tokens after the shift (`--seq-length`).
        overlong: one of `OVERLONG` (`--packing-overlong`).
        chat: auto, megatron, template, plain or bare; see `chat` (`--packing-chat-format`).
        train_on: one of `TRAIN_ON` (`--packing-train-on`).
        schema: how rows are understood; "auto" decides row by row (`--packing-schema`).

    Raises:
        ConfigError: a setting that is unknown or cannot work.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        seq_length: int,
        overlong: str = "error",
        *,
        chat: str = "auto",
        train_on: str = TRAIN_ON[0],
        schema: str = "auto",
    ) -> None:
        if seq_length < 1:
            raise ConfigError(f"--seq-length is {seq_length}; it counts tokens and must be at least 1.")
        if overlong not in OVERLONG:
            raise ConfigError(f"--packing-overlong {overlong!r} is unknown. Known are {', '.join(OVERLONG)}.")
        if train_on not in TRAIN_ON:
            raise ConfigError(f"--packing-train-on {train_on!r} is unknown. Known are {', '.join(TRAIN_ON)}.")
        self.tokenizer = tokenizer
        self.seq_length = seq_length
        self.overlong = overlong
        self._train_on = train_on
        check_schema(schema)
        self._schema = schema  # with its module, so that a process that receives this imports it too
        self._chat = choose_chat(tokenizer, chat)

    def describe(self) -> str:
        """One line for the log: tokenizer, way of chats, what is learned, limit and policy."""
        return (
            f"tokenizer {self.tokenizer.name}; {self._chat.describe()}; learned turns: {self._train_on}; "
            f"longer than {self.seq_length:,} tokens: {self.overlong}"
        )

    @property
    def fingerprint(self) -> str:
        """64 hexadecimal digits, the same in every process: equal where, and only where, the same rows make the same
        samples. Covers the tokenizer's content, the chat format and its template, the schemas with the files that
        define a user's own, what is learned, --seq-length and the policy for longer rows.
        """
        depends_on: Mapping[str, Any] = {
            "version": ENCODING_VERSION,
            "tokenizer": self.tokenizer.fingerprint,
            "chat": self._chat.content(),
            "schema": self._schema,
            "schemas": schemas_content(),
            "train_on": self._train_on,
            "seq_length": self.seq_length,
            "overlong": self.overlong,
        }
        return hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()

    def encode(
        self, item: Record | Converted | npt.NDArray[np.int64], path: str = "<memory>", line: int = 0
    ) -> list[TokenizedSample] | Dropped:
        """The samples that a row makes, or why it makes none.

        Args:
            item: a row as read, as converted, or ids (int64 [length + 1], all of them learned).
            path: the row's file, for errors; a Record knows its own.
            line: the row's line, for errors.

        Returns:
            One sample; several, in the order of the text, where the policy "split" cuts a long one.

        Raises:
            SampleError: the row breaks its schema's rules, or is overlong under the policy "error".
        """
        if isinstance(item, Record):
            path, line, item = item.path, item.line, convert(item, self._schema)
        if isinstance(item, np.ndarray):
            item = TokenIds(item)
        encoded = self._ids(item, path, line)
        if isinstance(encoded, Dropped):
            return encoded
        ids, is_target = encoded
        if len(ids) < 2:
            return Dropped("too_short" if len(ids) else "empty")
        if not is_target[1:].any():
            return Dropped("no_targets")
        if len(ids) - 1 <= self.seq_length:
            return [_shifted(ids, is_target)]
        # Ids that are learned throughout are text; masked ones were a chat before they were ids.
        is_text = isinstance(item, Document) or (isinstance(item, TokenIds) and item.is_target is None)
        return self._shortened(ids, is_target, is_text=is_text, path=path, line=line)

    def _ids(
        self, item: Converted, path: str, line: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]] | Dropped:
        if isinstance(item, TokenIds):
            return _given(item, self.tokenizer, path, line)
        if isinstance(item, Document):
            return self._document_ids(item, path, line)
        if not any(message.content.strip() or message.is_answer for message in item.messages):
            return Dropped("empty")
        learned = learned_turns(item, self._train_on)
        return self._chat.encode(item, learned, path, line) if any(learned) else Dropped("no_targets")

    def _document_ids(
        self, document: Document, path: str, line: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]] | Dropped:
        if not document.text.strip():
            return Dropped("empty")
        ids = with_eos(encode_text(self.tokenizer, document.text, path, line), self.tokenizer)
        if len(ids) - 1 < MIN_DOCUMENT_IDS:
            return Dropped("too_short")
        ids = opened(ids, self.tokenizer)
        return np.array(ids, dtype=np.int64), np.ones(len(ids), dtype=bool)

    def _shortened(
        self, ids: npt.NDArray[np.int64], is_target: npt.NDArray[np.bool_], *, is_text: bool, path: str, line: int
    ) -> list[TokenizedSample] | Dropped:
        if self.overlong == "drop":
            return Dropped("overlong")
        if self.overlong == "error" or (self.overlong in ("truncate-left", "split") and not is_text):
            raise SampleError(path, line, self._too_long(len(ids) - 1), reason="overlong")
        room = self.seq_length + 1
        if self.overlong == "split":
            starts = range(0, len(ids) - 1, self.seq_length)
            return [_shifted(ids[at : at + room], is_target[at : at + room]) for at in starts]
        keep = slice(-room, None) if self.overlong == "truncate-left" else slice(room)
        ids, is_target = ids[keep], is_target[keep]
        if not is_target[1:].any():
            return Dropped("truncated_no_targets")
        return [_shifted(ids, is_target, truncated=True)]

    def _too_long(self, length: int) -> str:
        found = f"has {length:,} tokens; --seq-length is {self.seq_length:,}. "
        if self.overlong == "error":
            return found + "Raise --seq-length, or set --packing-overlong drop or truncate."
        return found + (
            f"--packing-overlong {self.overlong} is for text: a chat is never split, nor its start cut off. "
            "Raise --seq-length, or set --packing-overlong drop or truncate."
        )


def _given(
    item: TokenIds, tokenizer: Tokenizer, path: str, line: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    ids = np.asarray(item.ids)
    is_target = np.ones(ids.shape, dtype=bool) if item.is_target is None else np.asarray(item.is_target, dtype=bool)
    if ids.ndim != 1 or is_target.shape != ids.shape or (ids.size and ids.dtype.kind not in "iu"):
        raise SampleError(
            path,
            line,
            f"ids are {ids.dtype} {ids.shape} with a mask {is_target.shape}; they must be integers in one dimension, "
            "and the mask as long.",
            reason="bad_ids",
        )
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < tokenizer.vocab_size:
        raise SampleError(
            path,
            line,
            f"ids run from {ids.min()} to {ids.max()}; {tokenizer.name} has {tokenizer.vocab_size:,} in all. "
            "Is it the tokenizer that wrote them?",
            reason="bad_ids",
        )
    return ids.astype(np.int64), is_target  # a copy, always: the caller keeps its own


def _shifted(
    ids: npt.NDArray[np.int64], is_target: npt.NDArray[np.bool_], *, truncated: bool = False
) -> TokenizedSample:
    # One copy: as two views, tokens and labels would share a buffer, and an edit of either would show in both.
    return TokenizedSample(
        tokens=ids[:-1].copy(), labels=ids[1:], loss_mask=is_target[1:].astype(np.float32), truncated=truncated
    )
