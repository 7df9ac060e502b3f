"""What does a row mean: a conversation, a document, or ids? Decided row by row from the names of its fields.

Of several readings that fit, `auto` takes the most explicit: input_ids, messages, conversations, prompt_completion,
alpaca, text. A field that is null or [] counts as missing, so files with one column for each kind work row by row. Two
lists of turns that disagree are an error.

Cost: a few dictionary look-ups a row. A new corpus is one `register_schema` call.
"""

import dataclasses
import hashlib
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from megatron_packing.data.meaning import Conversation, Converted, Document, Message, TokenIds
from megatron_packing.data.sources import Record
from megatron_packing.data.turns import SPEAKERS, bad_row, listed, read_tools, read_turns, text_of
from megatron_packing.errors import ConfigError

__all__ = [
    "SCHEMAS",
    "SPEAKERS",
    "Conversation",
    "Converted",
    "Document",
    "Message",
    "Schema",
    "TokenIds",
    "check_schema",
    "convert",
    "register_schema",
    "split_conversations",
]

IGNORE_INDEX = -100
"""What the labels of tokenized rows hold where nothing is learned."""

_INSTRUCTION = ("instruction", "prompt", "query", "question")
_INPUT = ("input", "context")
_OUTPUT = ("output", "response", "completion", "answer")
_SYSTEM = ("system", "system_prompt")

_NOT_FOR_TEMPLATES = frozenset(
    (
        *("conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"),
        *("tokenize", "padding", "truncation", "max_length", "tokenizer_kwargs"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask"),
    )
)
"""Arguments of a chat template that are the run's to set, not a row's."""


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
    """The schema that is asked for: `name`, or, of `module:name`, the name once that module is imported.

    Raises:
        ConfigError: there is no such schema, or no such module.
    """
    module, _, own = name.rpartition(":")
    if module and own not in SCHEMAS:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(
                f"Schema {name!r}: {error}. Write module:name, with the module importable from the script's folder or "
                "PYTHONPATH."
            ) from error
    if own != "auto" and own not in SCHEMAS:
        raise ConfigError(f"Schema {name!r} is unknown. Known are auto, {', '.join(SCHEMAS)}.")
    return own


def convert(record: Record, schema: str = "auto") -> Converted:
    """The meaning of a row, under the named schema or, with "auto", the first that matches this very row.

    Raises:
        SampleError: no schema matches ("unknown_schema"), or the row breaks the rules of the one that does.
        ConfigError: `schema` is no schema.
    """
    name = check_schema(schema)
    if name != "auto":
        return SCHEMAS[name].convert(record)
    present = _filled(record.fields)
    # An answer to a preference row is not in its turns: learning those would learn the wrong thing without a word.
    is_preference = "chosen" in present and "rejected" in present
    for fields in (present, record.fields):  # where nothing else is there, null and [] say that the row is empty
        for known in SCHEMAS.values():
            if known.matches(fields) and not (is_preference and known.name in _BUILT_IN):
                return _agreed(known.convert(record), record, known.name)
    known_fields = "; ".join(f"{known.name} ({known.fields})" for known in SCHEMAS.values())
    raise bad_row(
        record,
        f"no schema matches the fields found: {listed(record.fields)}. Known: {known_fields}. "
        + ("Rows of chosen and rejected answers are not for this training. " if is_preference else "")
        + "Rename the fields or register a schema.",
        "unknown_schema",
    )


def schemas_content() -> list[list[str]]:
    """What the meaning of rows depends on besides this package: each schema of a user's own, its origin, and a hash of
    the file that defines it."""
    own = [schema for name, schema in SCHEMAS.items() if name not in _BUILT_IN]
    return [[schema.name, *_origin(schema.convert), _file_hash(schema.convert)] for schema in own]


def split_conversations(conversation: Conversation) -> tuple[Conversation, ...]:
    """Cut a row that strings several conversations together: each system turn starts a new one.

    Turns before the first system turn form one of their own; without system turns the row is one conversation.
    """
    parts: list[list[Message]] = []
    for message in conversation.messages:
        if message.role == "system" or not parts:
            parts.append([])
        parts[-1].append(message)
    return tuple(dataclasses.replace(conversation, messages=tuple(part)) for part in parts)


def _origin(function: Callable[..., Any]) -> tuple[str, str]:
    # A module that is run and imported registers twice; the same function is not a clash.
    return getattr(function, "__module__", ""), getattr(function, "__qualname__", "")


def _file_hash(function: Callable[..., Any]) -> str:
    try:
        data = Path(inspect.getsourcefile(function) or "").read_bytes()
    except (TypeError, OSError):  # built in, or typed into a prompt
        return ""
    return hashlib.sha256(data).hexdigest()


def _filled(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields in which this row says something: null and [] fill the columns of other kinds of rows."""
    filled = {key: value for key, value in fields.items() if value is not None and value != []}
    if any(name in filled for name in _INSTRUCTION):
        # Asked, but not answered: an alpaca row without targets, even if a text column stands beside it.
        filled.update({name: fields[name] for name in _OUTPUT if name in fields})
    return filled


def _agreed(converted: Converted, record: Record, name: str) -> Converted:
    """`converted`, read as `messages`, unless the row's `conversations` say something else."""
    if name != "messages" or not record.fields.get("conversations") or not record.fields.get("messages"):
        return converted
    if _conversations(record) != converted:
        raise bad_row(
            record,
            "has both 'messages' and 'conversations', and they disagree. Remove one, or name the one meant with "
            "--packing-schema.",
            "two_readings",
        )
    return converted


# --- turns ----------------------------------------------------------------------------------------


def _messages(record: Record) -> Conversation:
    return _conversation(read_turns(record.fields.get("messages"), record, "messages"), record)


def _conversations(record: Record) -> Conversation:
    return _conversation(read_turns(record.fields.get("conversations"), record, "conversations"), record)


def _conversation(messages: tuple[Message, ...], record: Record) -> Conversation:
    """Turns together with what the row says beside them: a system text, tools, arguments for the template."""
    system = _first_text(record, _SYSTEM)
    if system and not (messages and messages[0].role == "system"):
        messages = (Message("system", system), *messages)
    elif system and messages[0].content != system:
        raise bad_row(
            record,
            f"has a system text beside its turns and another one in their first ({messages[0].content!r:.40}). Leave "
            "one of them.",
            "two_readings",
        )
    return Conversation(
        messages, tools=read_tools(record.fields.get("tools"), record), template_args=_template_args(record)
    )


def _template_args(record: Record) -> Mapping[str, Any]:
    args: Any = record.fields.get("chat_template_kwargs") or {}
    if isinstance(args, str):
        try:
            args = orjson.loads(args)
        except orjson.JSONDecodeError:
            args = None
    refused = sorted(_NOT_FOR_TEMPLATES & set(args)) if isinstance(args, dict) else ["it"]
    if refused:
        raise bad_row(
            record,
            f"field 'chat_template_kwargs' is {args!r:.60}; it must be an object (or JSON text of one) of arguments "
            f"that the template reads. Remove {', '.join(refused)}.",
            "bad_template_args",
        )
    return dict(args)


def _prompt_completion(record: Record) -> Conversation:
    """A prompt and its completion, both text or both turns; what stands in the prompt is not learned."""
    sides = {name: record.fields.get(name) for name in ("prompt", "completion")}
    lists = [isinstance(side, list) for side in sides.values()]
    if not any(lists):
        return _alpaca(record)
    if not all(lists):
        raise bad_row(
            record,
            "one of prompt and completion is a list of turns, the other is not. Write both as text, or both as turns.",
            "two_readings",
        )
    prompt, completion = (read_turns(side, record, name) for name, side in sides.items())
    unlearned = (dataclasses.replace(turn, supervised=bool(turn.supervised)) for turn in prompt)
    return _conversation((*unlearned, *completion), record)


# --- alpaca ---------------------------------------------------------------------------------------


def _alpaca(record: Record) -> Conversation:
    for names in (_INSTRUCTION, _OUTPUT):
        if not any(name in record.fields for name in names):
            raise bad_row(
                record,
                f"none of {', '.join(names)} is among the fields found: {listed(record.fields)}.",
                "missing_key",
            )
    request = (_first_text(record, _INSTRUCTION), _first_text(record, _INPUT))
    asked = Message("user", "\n\n".join(part for part in request if part))
    return _conversation((*_history(record), asked, Message("assistant", _first_text(record, _OUTPUT))), record)


def _history(record: Record) -> tuple[Message, ...]:
    """Earlier pairs of question and answer, as LLaMA-Factory's alpaca files hold them."""
    pairs = record.fields.get("history")
    if not pairs:
        return ()
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise bad_row(
            record,
            f"field 'history' is {pairs!r:.60}; it must be a list of pairs, each a question and its answer.",
            "bad_turns",
        )
    return tuple(
        Message(role, text_of(text, record, f"history[{place}]"))
        for place, pair in enumerate(pairs)
        for role, text in zip(("user", "assistant"), pair, strict=True)
    )


def _first_text(record: Record, names: tuple[str, ...]) -> str:
    texts = (text_of(record.fields.get(name), record, f"field {name!r}") for name in names)
    return next((text for text in texts if text), "")


# --- text and ids ---------------------------------------------------------------------------------


def _document(record: Record) -> Document:
    if "text" not in record.fields:
        raise bad_row(record, f"lacks 'text'; found: {listed(record.fields)}.", "missing_key")
    return Document(text_of(record.fields["text"], record, "field 'text'"))


def _token_ids(record: Record) -> TokenIds:
    """Ids as Hugging Face keeps them: labels and masks are not shifted, each stands at the id that it is about."""
    ids = _whole_numbers(record, "input_ids", lowest=0)
    if ids is None and "input_ids" not in record.fields:
        raise bad_row(record, f"lacks 'input_ids'; found: {listed(record.fields)}.", "missing_key")
    if ids is None:
        return TokenIds(np.zeros(0, dtype=np.int64))
    attended = _whole_numbers(record, "attention_mask", lowest=0)
    if attended is not None and (len(attended) != len(ids) or not attended.all()):
        raise bad_row(
            record,
            f"attention_mask has {int((attended == 0).sum())} zeros and {len(attended)} entries for {len(ids)} ids; "
            "here every id belongs to the sample. Write the rows without padding.",
            "bad_ids",
        )
    labels, mask = _whole_numbers(record, "labels", lowest=IGNORE_INDEX), _whole_numbers(record, "loss_mask", lowest=0)
    for name, values in (("labels", labels), ("loss_mask", mask)):
        if values is not None and len(values) != len(ids):
            raise bad_row(record, f"has {len(ids)} input_ids but {len(values)} {name}; each id needs one.", "bad_ids")
    return TokenIds(ids, _targets_of(record, ids, labels, mask))


def _targets_of(
    record: Record, ids: np.ndarray[Any, Any], labels: np.ndarray[Any, Any] | None, mask: np.ndarray[Any, Any] | None
) -> np.ndarray[Any, Any] | None:
    by_labels = None if labels is None else labels != IGNORE_INDEX
    if labels is not None and (wrong := np.flatnonzero(by_labels & (labels != ids))).size:
        place = int(wrong[0])
        raise bad_row(
            record,
            f"labels[{place}] is {labels[place]}, but input_ids[{place}] is {ids[place]}. Labels are not shifted: each "
            f"equals its id, or is {IGNORE_INDEX} where nothing is learned.",
            "bad_ids",
        )
    if mask is not None and mask.max(initial=0) > 1:
        raise bad_row(record, f"loss_mask holds {mask.max()}; it must hold 0 and 1 only.", "bad_ids")
    by_mask = None if mask is None else mask == 1
    if by_labels is not None and by_mask is not None and (by_labels[1:] != by_mask[1:]).any():
        place = 1 + int(np.flatnonzero(by_labels[1:] != by_mask[1:])[0])
        raise bad_row(record, f"labels and loss_mask disagree at place {place}. Leave one of them.", "two_readings")
    return by_labels if by_mask is None else by_mask


def _whole_numbers(record: Record, name: str, *, lowest: int) -> np.ndarray[Any, Any] | None:
    """A field as int64 [n]; None where the row has none. True, false and 1.0 are read as numbers in masks alone."""
    values = record.fields.get(name)
    if values is None:
        return None
    if isinstance(values, list) and name.endswith("_mask"):
        values = [int(value) if isinstance(value, bool | float) and value in (0, 1) else value for value in values]
    good = isinstance(values, list) and all(type(value) is int and lowest <= value < 2**31 for value in values)
    if not good:
        raise bad_row(
            record,
            f"field {name!r} is {values!r:.60}; it must be a list of whole numbers from {lowest} to {2**31 - 1}.",
            "bad_ids",
        )
    return np.array(values, dtype=np.int64)


def _has_alpaca(fields: Mapping[str, Any]) -> bool:
    return any(name in fields for name in _INSTRUCTION) and any(name in fields for name in _OUTPUT)


def _has_prompt_turns(fields: Mapping[str, Any]) -> bool:
    # Text that happens to be JSON of a list stays text, so strings are not looked into.
    sides = [fields.get("prompt"), fields.get("completion")]
    return None not in sides and any(isinstance(side, list) for side in sides)


# Least explicit first: each registration goes before the earlier ones, so `auto` asks for input_ids first.
register_schema("text", lambda fields: "text" in fields, _document, "text")
register_schema(
    "alpaca", _has_alpaca, _alpaca, f"{'|'.join(_INSTRUCTION)} + {'|'.join(_OUTPUT)} [+ {'|'.join(_INPUT)}]"
)
register_schema("prompt_completion", _has_prompt_turns, _prompt_completion, "prompt, completion: both lists of turns")
register_schema("conversations", lambda fields: "conversations" in fields, _conversations, "conversations: from, value")
register_schema("messages", lambda fields: "messages" in fields, _messages, "messages: role, content")
register_schema("input_ids", lambda fields: "input_ids" in fields, _token_ids, "input_ids [+ labels, loss_mask]")
_BUILT_IN = frozenset(SCHEMAS)
