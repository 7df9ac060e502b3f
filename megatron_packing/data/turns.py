"""What does a list of turns say? Speakers, contents, tool calls, and which turns are learned, checked turn by turn.

Cost: a few look-ups a turn; JSON inside strings (tool calls, tools) is parsed once.
"""

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from megatron_packing.data.meaning import REASONING, TOOL_CALLS, Message
from megatron_packing.data.sources import Record
from megatron_packing.errors import SampleError

_CALL = "function_call"

SPEAKERS: Mapping[str, str] = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "chatgpt", "bing", "bard", "ai", "bot", "chatbot"), "assistant"),
    **dict.fromkeys((_CALL, "tool_call"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "tool_response", "tool_result"), "tool"),
    **dict.fromkeys(("function_response", "function_result", "ipython"), "tool"),
}
"""Names of speakers in the wild -> the four roles that chat templates know. An unknown one is an error. Compared in
lower case, with - and space as _."""

_CALL_SPEAKERS = (_CALL, "tool_call")
"""Speakers whose turn is a tool call, written as JSON."""

LOSS_KEYS = ("train", "weight", "loss_weight", "loss")
"""A turn's own word on whether it is learned: false or true, 0 or 1."""

_TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of the parts of a content that are text."""

_NAMES = ("name", "tool_call_id")


def read_turns(value: object, record: Record, name: str) -> tuple[Message, ...]:
    """The turns in `value`, a list or, as tables of columns hold it, JSON text of a list.

    Args:
        value: the list of turns.
        record: the row, for messages.
        name: what the list is called in messages.

    Raises:
        SampleError: something is not as a turn must be; the message names the turn.
    """
    turns = json_list(value)
    if turns is None:
        what = f"is {value!r:.60}" if name in record.fields else f"is missing; fields found: {listed(record.fields)}"
        raise bad_row(record, f"field {name!r} {what}; it must be a list of turns.", "bad_turns")
    return tuple(read_turn(turn, record, f"{name}[{place}]") for place, turn in enumerate(turns))


def read_turn(turn: object, record: Record, subject: str) -> Message:
    """One turn: `{"role", "content"}` or `{"from", "value"}`. `subject` names it in messages.

    Raises:
        SampleError: see `read_turns`.
    """
    if not isinstance(turn, dict):
        raise bad_row(record, f"{subject} is {turn!r:.60}; a turn must be an object.", "bad_turns")
    sharegpt = "from" in turn and turn.get("role") is None
    role_key, content_key = ("from", "value") if sharegpt else ("role", "content")
    _check_keys(turn, (role_key, content_key), record, subject)
    speaker, role = _speaker(turn[role_key], record, subject)
    content = content_text(turn.get(content_key), record, f"{subject} {content_key!r}")
    extra = _extra(turn, record, subject)
    calls_text = ""
    if speaker in _CALL_SPEAKERS and TOOL_CALLS not in extra and (calls := _calls_in_text(content)):
        extra[TOOL_CALLS], calls_text, content = calls, content, ""
    return Message(role, content, supervised=_supervised(turn, record, subject), extra=extra, calls_text=calls_text)


def content_text(value: object, record: Record, subject: str) -> str:
    """A content as text: a string, null (nothing said), or a list of text parts, joined as they are.

    Raises:
        SampleError: it is something else, or a part is an image, audio or anything but text.
    """
    if isinstance(value, list):
        return "".join(_part_text(part, record, f"{subject}[{place}]") for place, part in enumerate(value))
    return text_of(value, record, subject)


def text_of(value: object, record: Record, subject: str) -> str:
    """A string as it is, null as ""; anything else is an error, so that no number becomes text unasked."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise bad_row(
            record,
            f"{subject} is {value!r:.60} ({type(value).__name__}); it must be a string. Write it in quotes, or remove "
            "the row.",
            "bad_content",
        )
    return value


def read_tools(value: object, record: Record) -> tuple[Mapping[str, Any], ...]:
    """The row's tools: a list of objects, or JSON text of one; a bare function is put under "function".

    Raises:
        SampleError: it is neither.
    """
    if value is None or value == "":
        return ()
    tools = json_list(value)
    if tools is None or not all(isinstance(tool, dict) for tool in tools):
        raise bad_row(
            record, f"field 'tools' is {value!r:.60}; it must be a list of objects, or JSON text of one.", "bad_tools"
        )
    bare = [tool if "function" in tool or "name" not in tool else _as_function(tool) for tool in tools]
    return tuple(bare)


def json_list(value: object) -> list[Any] | None:
    """`value` if it is a list, or the list that it is the JSON text of; else None."""
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        value = parsed_json(value)
    return value if isinstance(value, list) else None


def parsed_json(text: str) -> Any:
    """The value of JSON text, None where it is none. Whole numbers of any size stay exact."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None


def bad_row(record: Record, why: str, reason: str) -> SampleError:
    """The error of this row."""
    return SampleError(record.path, record.line, why, reason=reason)


def listed(fields: Mapping[str, Any]) -> str:
    """The names of fields, for messages."""
    return ", ".join(fields) if fields else "none"


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _check_keys(turn: Mapping[str, Any], keys: tuple[str, str], record: Record, subject: str) -> None:
    missing = [key for key in keys if key not in turn]
    if missing == [keys[1]] and any(turn.get(key) for key in (TOOL_CALLS, _CALL, *REASONING)):
        return
    if missing:
        raise bad_row(
            record,
            f"{subject} lacks {' and '.join(map(repr, missing))}; found: {listed(turn)}. A turn has role and content, "
            "or from and value.",
            "missing_key",
        )


def _speaker(speaker: object, record: Record, subject: str) -> tuple[str, str]:
    name = speaker.strip().lower().replace("-", "_").replace(" ", "_") if isinstance(speaker, str) else ""
    role = SPEAKERS.get(name)
    if role is None:
        raise bad_row(
            record,
            f"{subject} has the unknown role {speaker!r:.60}; known are {', '.join(SPEAKERS)}.",
            "unknown_role",
        )
    return name, role


def _part_text(part: object, record: Record, subject: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type", "text") in _TEXT_PARTS and isinstance(part.get("text"), str):
        others = [key for key in part if key not in ("type", "text") and part[key] is not None]
        media = [key for key in others if key.startswith(("image", "audio", "video"))]
        if not media:
            return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else None
    raise bad_row(
        record,
        f"{subject} is {part!r:.60}, a part {f'of type {kind!r}' if kind is not None else 'without text'}; only text "
        f"can be learned here: strings, or objects with type {', '.join(_TEXT_PARTS)} and text. Remove the row.",
        "bad_part",
    )


def _extra(turn: Mapping[str, Any], record: Record, subject: str) -> dict[str, Any]:
    """What chat templates read of a turn besides role and content."""
    texts = {key: text_of(turn[key], record, f"{subject} {key!r}") for key in (*_NAMES, *REASONING) if turn.get(key)}
    calls = turn.get(TOOL_CALLS)
    if not calls and turn.get(_CALL):
        calls = [{"function": turn[_CALL]}]  # OpenAI's earlier name, for a single call
    return {**texts, TOOL_CALLS: _read_calls(calls, record, subject)} if calls else texts


def _read_calls(value: object, record: Record, subject: str) -> list[dict[str, Any]]:
    calls = [_call(call) for call in json_list(value) or [None]]
    if not all(calls):
        raise bad_row(
            record,
            f"{subject} has {TOOL_CALLS} {value!r:.60}; it must be a list of objects, each with a function's name and "
            "its arguments (an object, or JSON text of one).",
            "bad_tool_calls",
        )
    return [call for call in calls if call]


def _calls_in_text(text: str) -> list[dict[str, Any]] | None:
    """The calls in the text of a turn that is a call; None where the text is something else, and stays text."""
    value = parsed_json(text)
    calls = [_call(call) for call in (value if isinstance(value, list) else [value])]
    return [call for call in calls if call] if calls and all(calls) else None


def _call(call: object) -> dict[str, Any] | None:
    """A call as OpenAI writes it, its arguments an object, as chat templates expect them."""
    if not isinstance(call, dict):
        return None
    function = call.get("function", call)
    if isinstance(function, str):
        function = parsed_json(function)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return None
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        arguments = parsed_json(arguments.strip() or "{}")
    elif arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return None
    known = {key: call[key] for key in ("id",) if isinstance(call.get(key), str)}
    return {**known, **_as_function({"name": function["name"], "arguments": arguments})}


def _as_function(function: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": dict(function)}


def _supervised(turn: Mapping[str, Any], record: Record, subject: str) -> bool | None:
    """A turn's own word on whether it is learned; None where it says nothing."""
    said = {key: turn[key] for key in LOSS_KEYS if turn.get(key) is not None}
    for key, value in said.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            raise bad_row(record, f"{subject} has {key} {value!r:.60}; it must be 0, 1, false or true.", "bad_weight")
    if len({bool(value) for value in said.values()}) > 1:
        raise bad_row(record, f"{subject} has {said}, which contradict each other. Leave one of them.", "bad_weight")
    return bool(next(iter(said.values()))) if said else None
