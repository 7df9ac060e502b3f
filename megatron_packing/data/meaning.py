"""What can a row turn out to be? A conversation, a document, or ids: the values that pass from schemas to the encoder.

Cost: none; plain values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

TOOL_CALLS = "tool_calls"

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys under which rows keep what the assistant thought before it spoke."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    """One of system, user, assistant, tool."""
    content: str
    """What was said; may be empty."""
    _: KW_ONLY
    supervised: bool | None = None
    """Whether an assistant turn is learned; None leaves it to the run's setting."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further keys for the chat template, such as tool_calls."""
    calls_text: str = ""
    """The tool calls as the row wrote them, where it wrote them as text: for formats that cannot write `tool_calls`."""

    @property
    def is_answer(self) -> bool:
        """Whether there is anything in this turn that a model could learn to say."""
        return self.role == "assistant" and bool(
            self.content.strip() or self.extra.get(TOOL_CALLS) or any(self.extra.get(key) for key in REASONING)
        )


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns in order; assistant turns are learned. (Positional, for convert functions written by users.)"""

    messages: tuple[Message, ...]
    _: KW_ONLY
    tools: tuple[Mapping[str, Any], ...] = ()
    """The tools that the assistant may call, each as OpenAI describes one; for the chat template."""
    template_args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template that this row asks for, such as enable_thinking."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "messages", tuple(self.messages))
        object.__setattr__(self, "tools", tuple(self.tools))


@dataclass(frozen=True, slots=True)
class Document:
    """Plain text; every token but the first is learned."""

    text: str


@dataclass(frozen=True, slots=True, eq=False)
class TokenIds:
    """A row that is ids already: taken as it is, no special token is added."""

    ids: npt.NDArray[np.int64] | Sequence[int]
    """int64 [length + 1]."""
    is_target: npt.NDArray[np.bool_] | None = None
    """bool [length + 1], whether each id is to be learned; None: all. That of the first id says nothing: nothing
    stands before it."""


Converted = Conversation | Document | TokenIds
