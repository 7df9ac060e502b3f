"""How does the data room see Megatron's tokenizers? Through one small adapter.

Megatron wraps several libraries whose special tokens differ: a missing pad id is None, -1 or an
exception, BOS may be added or not. `MegatronTokenizer` answers plainly.
"""

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_packing.errors import ConfigError


class MegatronTokenizer:
    """`megatron_packing.data` tokenizer interface over a tokenizer that Megatron built.

    Raises:
        ConfigError: the tokenizer has no end-of-document token; without one nothing learns to stop.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._outer = tokenizer
        self._library = tokenizer._tokenizer  # the library's own object, under Megatron's facade
        self.name = f"{tokenizer.library} ({tokenizer.path})" if tokenizer.path else str(tokenizer.library)
        if tokenizer.library not in ("huggingface", "megatron", "sft") and tokenizer.chat_template:
            # Only a tokenizer of transformers tells which characters a token came from.
            self.name += ", its chat template not used (HuggingFaceTokenizer could)"
        eos_id = _special(tokenizer, "eod")
        if eos_id is None:
            raise ConfigError(f"tokenizer {self.name} has no end-of-document token. Add one to its special tokens.")
        self.eos_id = eos_id
        self.bos_id = self._bos_wanted()
        pad_id = _special(tokenizer, "pad")
        self.pad_id = eos_id if pad_id is None else pad_id

    @property
    def vocab_size(self) -> int:
        """Ids are below it."""
        return int(self._outer.vocab_size)

    @cached_property
    def fingerprint(self) -> str:
        """64 hexadecimal digits over what the ids of texts depend on: the vocabulary itself, wherever it lies, and the
        special ids."""
        content = hashlib.sha256(self._content()).hexdigest()
        special = [self.vocab_size, self.eos_id, self.bos_id, self.pad_id]
        return hashlib.sha256(json.dumps([self._outer.library, special, content]).encode()).hexdigest()

    def _content(self) -> bytes:
        inner = self._transformers
        if inner is not None:
            rules = [str(inner.special_tokens_map), str(getattr(self._library, "_prompt_config", ""))]
            if inner.is_fast:
                return "\n".join([inner.backend_tokenizer.to_str(), *rules]).encode()
            return json.dumps([type(inner).__name__, sorted(inner.get_vocab().items()), *rules]).encode()
        if self._outer.library == "sentencepiece":
            added = sorted(self._library.special_token_to_id.items())
            rules = [added, self._library.legacy, self._library.ignore_extra_whitespaces]
            return bytes(self._library.tokenizer.serialized_model_proto()) + json.dumps(rules).encode()
        path = Path(self._outer.path or "")
        return path.read_bytes() if path.is_file() else json.dumps(self._outer.unique_identifiers, default=str).encode()

    @property
    def _transformers(self) -> Any:
        """The transformers tokenizer inside, or None."""
        if self._outer.library in ("huggingface", "megatron"):
            return self._library.tokenizer
        return self._library._tokenizer if self._outer.library == "sft" else None

    def _bos_wanted(self) -> int | None:
        """BOS, where texts of this vocabulary open with it: many name one that they never write."""
        bos_id = _special(self._outer, "bos")
        if self._transformers is None or bos_id is None:
            return bos_id
        return bos_id if self._transformers("")["input_ids"][:1] == [bos_id] else None

    @property
    def chat(self) -> Any:
        """The Hugging Face tokenizer, where there is one with a chat template; else None."""
        if self._outer.library == "sft":  # its formats but "default" bring a template of their own
            inner = self._library._tokenizer
            template = self._library._prompt_config.custom_chat_template
            return inner if template is not None and template == inner.chat_template else None
        if self._outer.library not in ("huggingface", "megatron"):
            return None
        inner = self._library.tokenizer
        template = self._outer.chat_template
        if template is not None and getattr(inner, "chat_template", None) is None:
            inner.chat_template = template
        return inner if getattr(inner, "chat_template", None) else None

    @property
    def conversation(self) -> Any:
        """Megatron's own conversation tokenizer (`--tokenizer-type SFTTokenizer`); else None."""
        if self._outer.library != "sft":
            return None
        return lambda messages: self._outer.tokenize_conversation(
            messages, return_target=True, add_generation_prompt=False
        )

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without any special token."""
        if self._transformers is not None:
            return list(self._transformers(text, add_special_tokens=False)["input_ids"])
        if self._outer.library == "null-text":
            return [_number(word, self.vocab_size) for word in text.split()]  # its own split: "" between two spaces
        return [int(i) for i in self._outer.tokenize(text)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens shown."""
        if self._outer.library == "sft":
            return str(self._library._tokenizer.decode(list(ids)))
        return str(self._outer.detokenize(list(ids), skip_special_tokens=False))


def _number(word: str, vocab_size: int) -> int:
    if not (word.isascii() and word.isdigit() and int(word) < vocab_size):  # int() takes "1_0" and "+1" too
        raise ValueError(f"{word!r:.40} is no number below {vocab_size:,}")
    return int(word)


def _special(tokenizer: Any, name: str) -> int | None:
    """A special token's id, or None where the library has none, whichever way it says so."""
    try:
        value = getattr(tokenizer, name)
    except (AttributeError, NotImplementedError, KeyError, ValueError):
        return None
    return int(value) if value is not None and int(value) >= 0 else None
