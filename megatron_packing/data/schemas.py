"""What does a row mean: a conversation, a document, or ids? Decided row by row from the names of its fields.

Cost: a few dictionary look-ups a row. A new corpus is one `register_schema` call.
"""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_packing.data.sources import Record
from megatron_packing.errors import ConfigError, SampleError

SPEAKERS: Mapping[str, str] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
"""Names of speakers in the wild -> the four roles that chat templates know. An unknown one is an error."""

_INSTRUCTION = ("instruction", "prompt", "query", "question")
_INPUT = ("input", "context")
_OUTPUT = ("output", "response", "completion", "answer")

_FOR_TEMPLATES = ("name", "tool_calls", "tool_call_id", "reasoning_content")
"""Keys of a turn, besides role and content, that chat templates read."""


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

    @property
    def is_answer(self) -> bool:
        """Whether there is anything in this turn that a model could learn to say."""
        return self.role == "assistant" and bool(self.content.strip() or self.extra.get("tool_calls"))


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns in order; assistant turns are learned. (Positional, for convert functions written by users.)"""

    messages: tuple[Message, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "messages", tuple(self.messages))


@dataclass(frozen=True, slots=True)
class Document:
    """Plain text; every token but the first is learned."""

    text: str


@dataclass(frozen=True, slots=True, eq=False)
class TokenIds:
    """A row that is ids already: taken as it is, no special token is added."""

    ids: npt.NDArray[np.int64]
    """int64 [length + 1]."""
    is_target: npt.NDArray[np.bool_] | None = None
    """bool [length + 1], whether each id is to be learned; None: all."""


Converted = Conversation | Document | TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """One layout of rows."""

    name: str
    matches: Callable[[Mapping[str, Any]], bool]
    """fields -> whether a row with these fields has this layout."""
    convert: Callable[[Record], Converted]
    """The row's meaning; raises SampleError."""
    fields: str
    """The fields it needs, in words, for error messages."""


SCHEMAS: dict[str, Schema] = {}
"""By name, in the order in which `auto` asks them."""


def register_schema(
    name: str,
    matches: Callable[[Mapping[str, Any]], bool],
    convert: Callable[[Record], Converted],
    fields: str,
) -> None:
    """Teach `schema="auto"`, and `schema=name`, a new layout of rows. It is asked before those registered earlier.

    Call it when a module is imported that every rank and loader worker imports, such as the one that
    `--packing-dataset` names.

    Args:
        name: what to call it.
        matches: fields -> whether a row has this layout. It sees names and values.
        convert: record -> Conversation, Document or TokenIds; raises SampleError(record.path, record.line, why).
        fields: the fields it needs, in words, for error messages.

    Raises:
        ConfigError: the name is taken.
    """
    taken = SCHEMAS.get(name)
    if name == "auto" or (taken is not None and _origin(taken.convert) != _origin(convert)):
        raise ConfigError(f"Schema name {name!r} is taken. Known are auto, {', '.join(SCHEMAS)}; choose another.")
    schema = Schema(name=name, matches=matches, convert=convert, fields=fields)
    earlier = {key: value for key, value in SCHEMAS.items() if key != name}
    SCHEMAS.clear()
    SCHEMAS.update({name: schema, **earlier})


def check_schema(name: str) -> str:
    """`name` if it can be asked for; otherwise a ConfigError that lists what can."""
    if name != "auto" and name not in SCHEMAS:
        raise ConfigError(f"Schema {name!r} is unknown. Known are auto, {', '.join(SCHEMAS)}.")
    return name


def convert(record: Record, schema: str = "auto") -> Converted:
    """The meaning of a row, under the named schema or, with "auto", the first that matches this very row.

    Raises:
        SampleError: no schema matches ("unknown_schema"), or the row breaks the rules of the one that does.
        ConfigError: `schema` is no schema.
    """
    if check_schema(schema) != "auto":
        return SCHEMAS[schema].convert(record)
    # An answer to a preference row is not in its turns: learning those would learn the wrong thing without a word.
    is_preference = "chosen" in record.fields and "rejected" in record.fields
    for known in SCHEMAS.values():
        if known.matches(record.fields) and not (is_preference and known.name in _BUILT_IN):
            return known.convert(record)
    known_fields = "; ".join(f"{known.name} ({known.fields})" for known in SCHEMAS.values())
    raise SampleError(
        record.path,
        record.line,
        f"no schema matches the fields found: {_listed(record.fields)}. Known: {known_fields}. "
        + ("Rows of chosen and rejected answers are not for this training. " if is_preference else "")
        + "Rename the fields or register a schema.",
        reason="unknown_schema",
    )


def split_conversations(conversation: Conversation) -> tuple[Conversation, ...]:
    """Cut a row that strings several conversations together: each system turn starts a new one.

    Turns before the first system turn form one of their own; without system turns the row is one conversation.
    """
    parts: list[list[Message]] = []
    for message in conversation.messages:
        if message.role == "system" or not parts:
            parts.append([])
        parts[-1].append(message)
    return tuple(Conversation(tuple(part)) for part in parts)


def _origin(function: Callable[..., Any]) -> tuple[str, str]:
    # A module that is run and imported registers twice; the same function is not a clash.
    return getattr(function, "__module__", ""), getattr(function, "__qualname__", "")


def _listed(fields: Mapping[str, Any]) -> str:
    return ", ".join(fields) if fields else "none"


def _text(value: object, record: Record, subject: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise SampleError(
            record.path,
            record.line,
            f"{subject} is {value!r:.60} ({type(value).__name__}); it must be a string. Write it in quotes, or remove "
            "the row.",
            reason="bad_content",
        )
    return value


def _first_text(record: Record, names: tuple[str, ...]) -> str:
    texts = (_text(record.fields.get(name), record, f"field {name!r}") for name in names)
    return next((text for text in texts if text), "")


def _turns(record: Record, name: str) -> Conversation:
    turns = record.fields.get(name)
    if not isinstance(turns, list):
        what = (
            f"is missing; fields found: {_listed(record.fields)}" if name not in record.fields else f"is {turns!r:.60}"
        )
        raise SampleError(
            record.path, record.line, f"field {name!r} {what}; it must be a list of turns.", reason="bad_turns"
        )
    return Conversation(tuple(_turn(turn, record, f"{name}[{place}]") for place, turn in enumerate(turns)))


def _turn(turn: object, record: Record, subject: str) -> Message:
    if not isinstance(turn, dict):
        raise SampleError(
            record.path, record.line, f"{subject} is {turn!r:.60}; a turn must be an object.", reason="bad_turns"
        )
    role_key, content_key = ("from", "value") if "from" in turn and "role" not in turn else ("role", "content")
    missing = [key for key in (role_key, content_key) if key not in turn]
    if missing == [content_key] and turn.get("tool_calls"):
        missing = []
    if missing:
        raise SampleError(
            record.path,
            record.line,
            f"{subject} lacks {' and '.join(map(repr, missing))}; found: {_listed(turn)}. A turn has role and content, "
            "or from and value.",
            reason="missing_key",
        )
    speaker = turn[role_key]
    role = SPEAKERS.get(speaker.strip().lower()) if isinstance(speaker, str) else None
    if role is None:
        raise SampleError(
            record.path,
            record.line,
            f"{subject} has the unknown role {speaker!r:.60}; known are {', '.join(SPEAKERS)}.",
            reason="unknown_role",
        )
    content = _text(turn.get(content_key), record, f"{subject} {content_key!r}")
    extra = {key: turn[key] for key in _FOR_TEMPLATES if turn.get(key) is not None}
    return Message(role, content, supervised=_supervised(turn, record, subject), extra=extra)


def _supervised(turn: Mapping[str, Any], record: Record, subject: str) -> bool | None:
    """A turn's own word on whether it is learned: `train` (true or false) or OpenAI's `weight` (0 or 1)."""
    for key in ("train", "weight"):
        value = turn.get(key)
        if value is None:
            continue
        if value not in (0, 1):
            raise SampleError(
                record.path,
                record.line,
                f"{subject} has {key} {value!r:.60}; it must be 0, 1, false or true.",
                reason="bad_weight",
            )
        return bool(value)
    return None


def _messages(record: Record) -> Conversation:
    return _turns(record, "messages")


def _conversations(record: Record) -> Conversation:
    return _turns(record, "conversations")


def _alpaca(record: Record) -> Conversation:
    for names in (_INSTRUCTION, _OUTPUT):
        if not any(name in record.fields for name in names):
            raise SampleError(
                record.path,
                record.line,
                f"none of {', '.join(names)} is among the fields found: {_listed(record.fields)}.",
                reason="missing_key",
            )
    request = (_first_text(record, _INSTRUCTION), _first_text(record, _INPUT))
    return Conversation(
        (
            Message("user", "\n\n".join(part for part in request if part)),
            Message("assistant", _first_text(record, _OUTPUT)),
        )
    )


def _document(record: Record) -> Document:
    if "text" not in record.fields:
        raise SampleError(
            record.path, record.line, f"lacks 'text'; found: {_listed(record.fields)}.", reason="missing_key"
        )
    return Document(_text(record.fields["text"], record, "field 'text'"))


def _has_alpaca(fields: Mapping[str, Any]) -> bool:
    return any(name in fields for name in _INSTRUCTION) and any(name in fields for name in _OUTPUT)


# Least explicit first: each registration goes before the earlier ones, so `auto` asks for messages first.
register_schema("text", lambda fields: "text" in fields, _document, "text")
register_schema(
    "alpaca", _has_alpaca, _alpaca, f"{'|'.join(_INSTRUCTION)} + {'|'.join(_OUTPUT)} [+ {'|'.join(_INPUT)}]"
)
register_schema("conversations", lambda fields: "conversations" in fields, _conversations, "conversations: from, value")
register_schema("messages", lambda fields: "messages" in fields, _messages, "messages: role, content")
_BUILT_IN = frozenset(SCHEMAS)
