"""Which characters of a rendered chat does the assistant say? Told by the template, or by what it writes turn by turn.

A template with `{% generation %}` blocks says so itself: it is rendered once more with marks in place of the blocks,
and without the marks the text must be the same. Without blocks, the text that asks for turn k (the turns before it, and
the generation prompt) must stand at the start of the whole chat: then the model sees, when it is asked, what stands
before turn k here. What follows, up to the end of the chat as it was with turn k its last, is turn k:

    whole                 <user>Hi<end><assistant>Hello<end><user>Bye<end>...
    asked for turn 1      <user>Hi<end><assistant>
    with turn 1 its last  <user>Hi<end><assistant>Hello<end>
    learned                                       ~~~~~~~~~~

A template that writes turn k differently once later turns follow (thinking taken out, say) is still masked where turn
k's whole text and its end mark follow the asking text all the same; else the row is refused, not guessed at. The last
turn is never rewritten: --packing-train-on last-assistant works with every such template.

Cost: 2 renders for each learned turn, up to 4 where a template asks for answers without a prompt, so time quadratic in
turns; with blocks 2 in all. One tokenizer call.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_packing.data.meaning import REASONING, TOOL_CALLS, Conversation, Message
from megatron_packing.data.tokenizer import tokenizer_errors
from megatron_packing.errors import SampleError

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Span = tuple[int, int]
"""First character and the one behind the last."""

_BLOCK = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
_OPEN, _CLOSE = "\ue0f0\ue0f1", "\ue0f1\ue0f0"  # private use: no text has a meaning for them
_STAND_IN = "Xq7Zw"
"""What a turn says when it is asked where a content would stand: nothing that a template could take for more."""


class Template:
    """The chat template of a transformers tokenizer.

    Args:
        chat: the tokenizer, a fast one.
        source: the template's text.
    """

    def __init__(self, chat: Any, source: str) -> None:
        self._chat = chat
        self.source = source
        self.has_blocks = any(not end for _, end, _ in _BLOCK.findall(source))
        self.reads_calls = TOOL_CALLS in source
        self.reads_tools = re.search(r"\btools\b", source) is not None
        self.reads_reasoning = any(key in source for key in REASONING)
        self._marked = _BLOCK.sub(_mark, source)

    def render(self, messages: Sequence[Mapping[str, Any]], row: Conversation, *, ask: bool = False) -> str:
        """The text of `messages`, with the tools and arguments of `row`; with `ask`, and the generation prompt.

        Raises:
            one of `tokenizer_errors()`: the template does not accept them.
        """
        return self._written(messages, row, add_generation_prompt=ask) if messages else ""

    def block_spans(self, whole: str, messages: Sequence[Mapping[str, Any]], row: Conversation) -> list[Span] | None:
        """The generation blocks' spans in `whole`, in order; None where they cannot be located."""
        text = self._written(messages, row, chat_template=self._marked)
        spans: list[Span] = []
        at, start = 0, -1
        for piece in re.split(f"({_OPEN}|{_CLOSE})", text):
            if piece == _OPEN:
                start = at
            elif piece == _CLOSE:
                spans.append((start, at))
            else:
                at += len(piece)
        same = text.replace(_OPEN, "").replace(_CLOSE, "") == whole
        return spans if same and all(start >= 0 for start, _ in spans) else None

    def tokenize(self, whole: str) -> tuple[Ids, Ids]:
        """Ids of a rendered conversation, int64 [n], and the characters that each covers, int64 [n, 2]."""
        out = self._chat(whole, add_special_tokens=False, return_offsets_mapping=True)
        ids = np.array(out["input_ids"], dtype=np.int64)
        offsets = np.array(out["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        starts, ends = offsets[:, 0], offsets[:, 1]
        # Byte-level vocabularies trim white space off the offsets, down to nothing for a token of spaces alone:
        # such a token reaches back to where the one before it ended.
        starts = np.where(starts == ends, np.minimum(starts, np.concatenate(([0], ends[:-1]))), starts)
        return ids, np.stack([starts, ends], axis=1)

    def messages_of(self, row: Conversation, path: str, line: int) -> list[dict[str, Any]]:
        """The turns as the template reads them; what it has no place for is an error, or text if the row wrote text."""
        return [self._message(message, path, line) for message in row.messages]

    def stops_unlearned(self) -> bool:
        """Whether its blocks leave out the mark that ends a turn, as far as a small chat can tell."""
        row = Conversation((Message("user", "a"), Message("assistant", _STAND_IN)))
        messages = [{"role": message.role, "content": message.content} for message in row.messages]
        try:
            whole = self.render(messages, row)
            spans = self.block_spans(whole, messages, row)
        except tokenizer_errors():
            return False
        said = whole.find(_STAND_IN) + len(_STAND_IN)
        return bool(spans) and spans is not None and spans[-1][1] == said and bool(whole[said:].strip())

    def _message(self, message: Message, path: str, line: int) -> dict[str, Any]:
        extra = dict(message.extra)
        content = message.content
        if extra.get(TOOL_CALLS) and not self.reads_calls:
            content = as_text(message, path, line, "the chat template")
            del extra[TOOL_CALLS]
        elif extra.get(TOOL_CALLS) and self._wants_calls_as_text:
            extra[TOOL_CALLS] = [_arguments_as_text(call) for call in extra[TOOL_CALLS]]
        if any(extra.get(key) for key in REASONING) and not self.reads_reasoning:
            as_text(message, path, line, "the chat template")
        return {"role": message.role, "content": content, **extra}

    @cached_property
    def prompt(self) -> str:
        """What it writes to ask for an answer to a small chat; "" where it ignores the request."""
        row = Conversation((Message("user", "a"),))
        messages = [{"role": "user", "content": "a"}]
        try:
            before, asking = self.render(messages, row), self.render(messages, row, ask=True)
        except tokenizer_errors():
            return ""
        return asking[len(before) :] if asking.startswith(before) else ""

    @cached_property
    def _wants_calls_as_text(self) -> bool:
        """Whether it joins a call's arguments to text as they are, as some do, instead of writing them as JSON."""
        call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"k": "v"}}}
        asking = {"role": "assistant", "content": "", TOOL_CALLS: [call]}
        try:
            text = self.render([{"role": "user", "content": "a"}, asking], Conversation((Message("user", "a"),)))
        except tokenizer_errors():
            return True
        return "{'k'" in text

    def _written(self, messages: Sequence[Mapping[str, Any]], row: Conversation, **settings: Any) -> str:
        return str(
            self._chat.apply_chat_template(
                list(messages),
                tools=list(row.tools) or None,
                **{"chat_template": self.source, **settings},
                tokenize=False,
                **row.template_args,
            )
        )


class TurnFinder:
    """Where each turn of one conversation stands in its whole text.

    Args:
        template: the template.
        row: the conversation.
        path: its file, for errors.
        line: its line, for errors.
    """

    def __init__(self, template: Template, row: Conversation, path: str, line: int) -> None:
        self._template, self._row = template, row
        self._path, self._line = path, line
        self._messages = template.messages_of(row, path, line)
        self.whole = self._render(len(row.messages))

    def blocks(self) -> list[Span]:
        """The spans of all generation blocks, in order."""
        try:
            spans = self._template.block_spans(self.whole, self._messages, self._row)
        except tokenizer_errors() as error:
            raise refused("the chat template", error, self._path, self._line) from error
        if spans is None:
            raise self._error(
                "the chat template's generation blocks change the text that it writes, so that they cannot be located. "
                "Write them around plain output.",
                "template_marks_wrong",
            )
        return spans

    def keep(self, spans: list[Span], learned: Sequence[bool]) -> list[Span]:
        """Those of all generation blocks that belong to turns that are learned."""
        spoken = [turn for turn, message in enumerate(self._row.messages) if message.role == "assistant"]
        if all(learned[turn] for turn in spoken):
            return spans
        if len(spans) != len(spoken):  # turns that say nothing may have no block
            spoken = [turn for turn in spoken if self._row.messages[turn].is_answer]
        if len(spans) != len(spoken):
            raise self._error(
                f"{len(spoken)} assistant turns, but {len(spans)} generation blocks: which of them is not to be "
                "learned cannot be told. Learn all turns of this row, or use a template with one block a turn.",
                "template_span_unclear",
            )
        return [span for turn, span in zip(spoken, spans, strict=True) if learned[turn]]

    def span(self, turn: int) -> Span:
        """What turn number `turn` teaches: all it says, and its end mark.

        Raises:
            SampleError: it cannot be told exactly.
        """
        until = self.whole if turn + 1 == len(self._messages) else self._render(turn + 1)
        asking = self._render(turn, ask=True)
        if not self.whole.startswith(until):
            return self._rewritten(turn, until, asking)
        if until.startswith(asking) and self._is_prompted(asking, until):
            return len(asking), self._end(turn, len(asking), until)
        before = self._render(turn)
        if asking != before and until.startswith(asking):
            start = len(asking)
        elif until.startswith(before) and (aligned := self._aligned(turn, until)) is not None:
            # The template ignores the request for a prompt, or opens its prompt with words the answer lacks.
            start = aligned[0]
        elif until.startswith(before):
            raise self._error(
                f"where turn {turn} starts cannot be told: the chat template's generation prompt does not stand before "
                "it, and its content is written differently from what it is. Use a template with generation blocks.",
                "template_span_unclear",
            )
        else:
            raise self._rewrites(turn)
        return start, self._end(turn, start, until)

    def _is_prompted(self, asking: str, until: str) -> bool:
        """Whether `asking` surely ends with the prompt that opens the turn, so that its absence need not be looked at.

        A template that ignored the request here would write the turn's opening behind `asking`.
        """
        prompt = self._template.prompt
        return bool(prompt) and asking.endswith(prompt) and not until[len(asking) :].startswith(prompt)

    def _end(self, turn: int, start: int, until: str) -> int:
        said = until[start:].rstrip()
        content = self._messages[turn]["content"].strip()
        if content and said.endswith(content):
            aligned = self._aligned(turn, until)
            if aligned is None or not until[aligned[1] :].strip():
                return len(until)  # white space is the only end mark there is
        # White space behind an end mark is never asked of the model.
        return start + len(said)

    def _aligned(self, turn: int, until: str) -> Span | None:
        """Where a turn's content stands in the text that ends with this turn, found by another content in its place."""
        content = self._messages[turn]["content"]
        stand_in = [*self._messages[:turn], {**self._messages[turn], "content": _STAND_IN}]
        text = self._written(stand_in)
        if text.count(_STAND_IN) != 1:
            return None
        head, tail = text.split(_STAND_IN)
        start, end = len(head), len(until) - len(tail)
        fits = start <= end and until.startswith(head) and until.endswith(tail)
        return (start, end) if fits and until[start:end].strip() == content.strip() else None

    def _rewritten(self, turn: int, until: str, asking: str) -> Span:
        """A turn that is written differently once others follow: exact if all of its own text is still there."""
        aligned = self._aligned(turn, until)
        if aligned is None or not self.whole.startswith(asking):
            raise self._rewrites(turn)
        content, mark = until[slice(*aligned)].lstrip(), until[aligned[1] :]
        here = self.whole[len(asking) :]
        said = len(here) - len(here.lstrip()) + len(content) + len(mark)
        if not content or not mark.strip() or here[:said].lstrip() != content + mark:
            raise self._rewrites(turn)
        return len(asking), len(asking) + said - (len(mark) - len(mark.rstrip()))

    def _rewrites(self, turn: int) -> SampleError:
        return self._error(
            "the chat template writes earlier turns differently once later ones follow, so what the model sees and "
            f"says when asked for turn {turn} is not what stands here. Set --packing-train-on last-assistant, use a "
            "template with generation blocks or one that keeps its history, or rows with one answer.",
            "template_rewrites_history",
        )

    def _render(self, turns: int, *, ask: bool = False) -> str:
        return self._written(self._messages[:turns], ask=ask)

    def _written(self, messages: Sequence[Mapping[str, Any]], *, ask: bool = False) -> str:
        try:
            return self._template.render(messages, self._row, ask=ask)
        except tokenizer_errors() as error:
            raise refused("the chat template", error, self._path, self._line) from error

    def _error(self, why: str, reason: str) -> SampleError:
        return SampleError(self._path, self._line, why, reason=reason)


def overlapping(characters: Ids, spans: Sequence[Span]) -> Mask:
    """Which tokens, given the characters that each covers, have one in any of the spans."""
    starts, ends = characters[:, 0], characters[:, 1]
    mask = np.zeros(len(characters), dtype=bool)
    for start, end in spans:
        mask |= (starts < end) & (ends > start)
    return mask


def as_text(message: Message, path: str, line: int, who: str) -> str:
    """What a turn says, for a format that knows contents only; the calls of a turn that wrote them as text are text.

    Raises:
        SampleError: the turn says something that only a chat template could write ("needs_template").
    """
    held = [key for key in REASONING if message.extra.get(key)]
    if message.extra.get(TOOL_CALLS) and not message.calls_text:
        held.append(TOOL_CALLS)
    if held:
        raise SampleError(
            path,
            line,
            f"holds {' and '.join(held)}, which {who} has no place for. Use a chat template that writes it, or remove "
            "it from the row.",
            reason="needs_template",
        )
    return message.content + message.calls_text


def refused(who: str, error: Exception, path: str, line: int) -> SampleError:
    """The error of a row that `who` does not accept."""
    return SampleError(
        path,
        line,
        f"{who} does not accept this conversation ({type(error).__name__}: {error}). Mend the row, or use a template "
        "that takes its roles in this order.",
        reason="refused_by_template",
    )


def _mark(block: re.Match[str]) -> str:
    """Output in the place of a block's tag, with the same rule for the white space around it."""
    before, end, after = block.groups()
    return f"{{%{before} if true %}}{{{{ '{_CLOSE if end else _OPEN}' }}}}{{% endif {after}%}}"


def _arguments_as_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
