"""What does a row of a chosen and a rejected answer mean? Two conversations that differ in their end alone.

Rows may have these layouts; a turn is understood as in a conversation, an answer is a text, a turn, or several:

    conversations | messages | prompt: turns, or a text;   chosen, rejected: an answer
    instruction [+ input]: texts;                          chosen, rejected: an answer
    chosen, rejected: whole conversations that begin alike

Cost: that of understanding two conversations.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_packing.data.schemas import Conversation, Message, convert
from megatron_packing.data.sources import Record
from megatron_packing.errors import SampleError

_PROMPTS = ("conversations", "messages", "prompt", "instruction", "question")
_INPUTS = ("input", "context")


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one conversation; of each side only the answer is learned."""

    chosen: Conversation
    rejected: Conversation


def convert_pair(record: Record) -> Pair:
    """The meaning of a preference row.

    Raises:
        SampleError: it has no prompt or no two answers, or a turn breaks the rules of conversations.
    """
    missing = [name for name in ("chosen", "rejected") if not record.fields.get(name)]
    if missing:
        raise SampleError(
            record.path,
            record.line,
            f"lacks {' and '.join(missing)}; found: {', '.join(record.fields) or 'none'}. A preference row has a "
            "prompt (conversations, messages, prompt or instruction), chosen and rejected.",
            reason="missing_key",
        )
    prompt = _prompt(record)
    chosen, rejected = (_turns(record.fields[name]) for name in ("chosen", "rejected"))
    if not prompt:
        prompt = _common_beginning(chosen, rejected)
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    if not prompt:
        raise SampleError(
            record.path,
            record.line,
            "has no prompt, and chosen and rejected do not begin alike; what are they answers to?",
            reason="missing_key",
        )
    return Pair(_side(record, "chosen", prompt, chosen), _side(record, "rejected", prompt, rejected))


def _prompt(record: Record) -> list[Any]:
    """The turns before the answers, not yet looked at; empty where the row names none."""
    name = next((name for name in _PROMPTS if record.fields.get(name)), None)
    if name is None:
        return []
    given = record.fields[name]
    turns = list(given) if isinstance(given, list) else [{"role": "user", "content": given}]
    extra = next((record.fields[name] for name in _INPUTS if record.fields.get(name)), None)
    if name == "instruction" and extra is not None:
        turns[-1] = {"role": "user", "content": f"{given}\n\n{extra}"}
    system = record.fields.get("system")
    return [{"role": "system", "content": system}, *turns] if system else turns


def _turns(answer: Any) -> list[Any]:
    if isinstance(answer, list):
        return list(answer)
    return [answer if isinstance(answer, dict) else {"role": "assistant", "content": answer}]


def _common_beginning(some: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """The turns that two conversations share; the last of either is an answer, whatever it says."""
    shared = []
    for one, other in zip(some[:-1], others[:-1], strict=False):
        if one != other:
            break
        shared.append(one)
    return shared


def _side(record: Record, name: str, prompt: Sequence[Any], answer: Sequence[Any]) -> Conversation:
    try:
        whole = convert(dataclasses.replace(record, fields={"messages": [*prompt, *answer]}), "messages")
    except SampleError as error:
        why = f"the prompt with its {name} answer as messages: {error.why}"
        raise SampleError(error.path, error.line, why, reason=error.reason) from error
    assert isinstance(whole, Conversation)
    return Conversation(tuple(_learned(turn, place >= len(prompt)) for place, turn in enumerate(whole.messages)))


def _learned(turn: Message, in_answer: bool) -> Message:
    """An answer is learned unless the turn itself says no; what stands in the prompt never is."""
    return dataclasses.replace(turn, supervised=in_answer and turn.role == "assistant" and turn.supervised is not False)
