"""How does the data room see Megatron's tokenizers? Through one small adapter.

Megatron wraps several libraries whose special tokens differ: a missing pad id is None, -1 or an
exception, BOS may be added or not. `MegatronTokenizer` answers plainly.
"""

from collections.abc import Sequence
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
        eos_id = _special(tokenizer, "eod")
        if eos_id is None:
            raise ConfigError(f"tokenizer {self.name} has no end-of-document token. Add one to its special tokens.")
        self.eos_id = eos_id
        self.bos_id = _special(tokenizer, "bos")
        pad_id = _special(tokenizer, "pad")
        self.pad_id = eos_id if pad_id is None else pad_id

    @property
    def chat(self) -> Any:
        """The Hugging Face tokenizer, where there is one with a chat template; else None."""
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
        if self._outer.library in ("huggingface", "megatron"):
            return list(self._library.tokenizer(text, add_special_tokens=False)["input_ids"])
        if self._outer.library == "sft":
            return list(self._library._tokenizer(text, add_special_tokens=False)["input_ids"])
        if self._outer.library == "null-text":
            return [int(word) for word in text.split()]  # its own split takes two spaces for an empty number
        return [int(i) for i in self._outer.tokenize(text)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens shown."""
        if self._outer.library == "sft":
            return str(self._library._tokenizer.decode(list(ids)))
        return str(self._outer.detokenize(list(ids), skip_special_tokens=False))


def _special(tokenizer: Any, name: str) -> int | None:
    """A special token's id, or None where the library has none, whichever way it says so."""
    try:
        value = getattr(tokenizer, name)
    except (AttributeError, NotImplementedError, KeyError, ValueError):
        return None
    return int(value) if value is not None and int(value) >= 0 else None
