"""Which ids does a conversation become, and which of them are learned? Three ways, chosen openly and logged.

1. `megatron`: Megatron's SFTTokenizer writes ids and targets. Its formats "default" and "identity" call every id a
   target; there the targets are found as in 2, or the run is refused.
2. `template`: the chat template of a transformers tokenizer. With `{% generation %}` blocks the template says what is
   learned. Without them, each assistant turn is found by rendering the conversation up to it, and verified.
3. `plain`: no template. Each turn opens with a line that names the speaker (`User:`, `Assistant:`), turns are one empty
   line apart, EOS closes each assistant turn. `bare` leaves the speaker lines out. A row's tools, as JSON, go before
   its turns. Tool calls that a row wrote as text stay that text; other calls, and thoughts kept apart, are refused.

In 1 and 2 the template is the truth: no BOS or EOS is added to what it writes, because none would be there when the
model is asked. In 3 BOS, if texts of the vocabulary begin with it, opens the conversation.

Learned: what the assistant says and the mark that ends its turn. Not learned: speaker lines, everybody else's turns,
white space behind an end mark, and assistant turns that say nothing.

Cost: one tokenizer call a row (3: two a turn), and for 2 the renders counted in `template`.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from megatron_packing.data.meaning import Conversation, Message
from megatron_packing.data.template import Ids, Mask, Template, TurnFinder, as_text, overlapping, refused
from megatron_packing.data.tokenizer import Tokenizer, encode_text, tokenizer_errors
from megatron_packing.errors import ConfigError, SampleError

IGNORE_INDEX = -100
"""What Megatron's SFTTokenizer writes where nothing is learned."""

TRAIN_ON = ("all-assistant", "last-assistant")
"""Every assistant turn is learned, or the last one only. A turn's own `supervised` overrides either."""

_NO_TOOLS = "; has no place for a row's tools, which are not shown"


class ChatWay(Protocol):
    """One way from a conversation to ids."""

    def encode(self, conversation: Conversation, learned: Sequence[bool], path: str, line: int) -> tuple[Ids, Mask]:
        """Write a conversation.

        Args:
            conversation: at least one turn.
            learned: for each turn whether it is to be learned; at least one is.
            path: the row's file, for errors.
            line: the row's line, for errors.

        Returns:
            ids: int64 [length + 1].
            is_target: bool [length + 1], whether each id is learned.

        Raises:
            SampleError: the tokenizer or template does not accept the row, or its targets cannot be told.
        """

    def describe(self) -> str:
        """One line for the log: which way is used."""

    def content(self) -> str:
        """What ids and targets depend on besides the tokenizer, as one text; part of the encoder's fingerprint."""


def learned_turns(conversation: Conversation, train_on: str = TRAIN_ON[0]) -> tuple[bool, ...]:
    """For each turn whether it is to be learned: assistant turns that say something, as `train_on` and the row ask.

    Args:
        conversation: the turns; a turn's own `supervised` overrides `train_on`.
        train_on: one of `TRAIN_ON`.
    """
    answers = [place for place, message in enumerate(conversation.messages) if message.is_answer]
    chosen = set(answers[-1:] if train_on == "last-assistant" else answers)
    return tuple(
        message.is_answer and (message.supervised if message.supervised is not None else place in chosen)
        for place, message in enumerate(conversation.messages)
    )


def choose_chat(tokenizer: Tokenizer, way: str = "auto") -> ChatWay:
    """The way for this tokenizer; "auto" takes the first of megatron, template, plain and bare that it can do.

    Raises:
        ConfigError: the way is unknown, or asked for by name and the tokenizer cannot do it.
    """
    if way == "auto":
        way = (
            "megatron"
            if tokenizer.conversation is not None
            else "template"
            if _template_of(tokenizer.chat)
            else "plain"
        )
        if way == "plain" and not _can_encode(tokenizer, _speaker_line("user", first=True)):
            way = "bare"
    if way not in _WAYS:
        raise ConfigError(f"Chat format {way!r} is unknown. Known are auto, {', '.join(_WAYS)}.")
    return _WAYS[way](tokenizer)


class MegatronChat:
    """Way 1: Megatron's SFTTokenizer, turns as the row holds them (no system turn is invented)."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        if tokenizer.conversation is None:
            raise ConfigError(
                f"Tokenizer {tokenizer.name} is no SFTTokenizer. Set --tokenizer-type SFTTokenizer, or choose template."
            )
        self._tokenizer = tokenizer
        self._spans = TemplateChat(tokenizer) if _template_of(tokenizer.chat) else None

    def describe(self) -> str:
        """One line for the log."""
        return (
            "chats: Megatron's SFTTokenizer writes ids and targets; a format that targets everything is masked by turns"
            + _NO_TOOLS
        )

    def content(self) -> str:
        """See `ChatWay.content`."""
        return f"megatron\n{self._spans.content() if self._spans is not None else ''}"

    def encode(self, conversation: Conversation, learned: Sequence[bool], path: str, line: int) -> tuple[Ids, Mask]:
        """See `ChatWay.encode`."""
        assert self._tokenizer.conversation is not None
        if self._spans is not None:
            messages = self._spans.template.messages_of(conversation, path, line)
        else:
            messages = [
                {"role": message.role, "content": as_text(message, path, line, "SFTTokenizer")}
                for message in conversation.messages
            ]
        try:
            tokens, targets = self._tokenizer.conversation(messages)
        except tokenizer_errors() as error:
            raise refused("SFTTokenizer", error, path, line) from error
        ids = np.array(tokens, dtype=np.int64)
        is_target = np.asarray(targets) != IGNORE_INDEX
        if is_target.all() and _has_prompt(conversation):
            return ids, self._by_turns(ids, conversation, learned, path, line)
        is_target = _keep_turns(is_target, conversation, learned, path, line)
        return ids, _checked(is_target, conversation, path, line)

    def _by_turns(self, ids: Ids, conversation: Conversation, learned: Sequence[bool], path: str, line: int) -> Mask:
        if self._spans is not None:
            as_asked = replace(conversation, tools=(), template_args={})  # all that SFTTokenizer hands its template
            own_ids, is_target = self._spans.encode(as_asked, learned, path, line)
            if np.array_equal(own_ids, ids):
                return is_target
        raise ConfigError(
            f"{path}:{line}: this SFTTokenizer prompt format marks every token as a target, the user's too, and "
            "its turns cannot be found with the tokenizer's chat template. Choose another "
            "--sft-tokenizer-prompt-format, or a HuggingFaceTokenizer with a chat template."
        )


class TemplateChat:
    """Way 2: the chat template of a transformers tokenizer; how targets are found is told in `template`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        source = _template_of(tokenizer.chat)
        if not source:
            raise ConfigError(
                f"Tokenizer {tokenizer.name} has no chat template. Add one, or choose the chat format plain."
            )
        if not getattr(tokenizer.chat, "is_fast", False):
            raise ConfigError(
                f"Tokenizer {tokenizer.name} is a slow one: it cannot tell which characters a token came from, so "
                "assistant turns cannot be found. Use its fast variant (tokenizer.json), or the chat format plain."
            )
        self.template = Template(tokenizer.chat, source)

    def describe(self) -> str:
        """One line for the log."""
        template = self.template
        if template.has_blocks:
            how = "its generation blocks say what is learned"
            if template.stops_unlearned():
                how += "; they leave out the end of a turn, so to stop is not learned"
        else:
            how = "turns found by rendering, each verified in the whole"
        return f"chats: the tokenizer's own chat template; {how}{'' if template.reads_tools else _NO_TOOLS}"

    def content(self) -> str:
        """See `ChatWay.content`."""
        return f"template\n{self.template.source}"

    def encode(self, conversation: Conversation, learned: Sequence[bool], path: str, line: int) -> tuple[Ids, Mask]:
        """See `ChatWay.encode`."""
        turns = TurnFinder(self.template, conversation, path, line)
        ids, characters = self.template.tokenize(turns.whole)
        if self.template.has_blocks:
            blocks = turns.blocks()
            # Looked at before turns are taken out, so that a template that marks nothing, or everything, is named.
            _checked(overlapping(characters, blocks), conversation, path, line)
            spans = turns.keep(blocks, learned)
        else:
            spans = [turns.span(turn) for turn, is_learned in enumerate(learned) if is_learned]
        return ids, _checked(overlapping(characters, spans), conversation, path, line)


class PlainChat:
    """Way 3: speaker lines and contents, no template.

    Args:
        tokenizer: encodes speaker lines and contents one by one, so an answer's ids do not depend on what is before it.
        speakers: whether speaker lines are written; without them only contents are ("bare").
    """

    def __init__(self, tokenizer: Tokenizer, *, speakers: bool = True) -> None:
        self._tokenizer = tokenizer
        self._speakers = speakers
        if speakers and not _can_encode(tokenizer, _speaker_line("user", first=True)):
            raise ConfigError(
                f"Tokenizer {tokenizer.name} cannot encode the line 'User:'. Choose the chat format bare."
            )

    def describe(self) -> str:
        """One line for the log."""
        if self._speakers:
            return "chats: plain text, a line 'User:' or 'Assistant:' before each turn, EOS after each assistant turn"
        return "chats: bare contents without speaker lines, EOS after each assistant turn"

    def content(self) -> str:
        """See `ChatWay.content`."""
        return "plain" if self._speakers else "bare"

    def encode(self, conversation: Conversation, learned: Sequence[bool], path: str, line: int) -> tuple[Ids, Mask]:
        """See `ChatWay.encode`."""
        ids: list[int] = []
        mask: list[bool] = []
        first = True
        tools = _tools_turn(conversation)
        turns = [*tools, *conversation.messages]
        for message, is_learned in zip(turns, [*([False] * len(tools)), *learned], strict=True):
            content = as_text(message, path, line, "plain text")
            if not content:
                continue
            header = _speaker_line(message.role, first=first) if self._speakers else ""
            header_ids = encode_text(self._tokenizer, header, path, line) if header else []
            content_ids = encode_text(self._tokenizer, content, path, line)
            if message.role == "assistant":
                content_ids = with_eos(content_ids, self._tokenizer)
            ids += header_ids + content_ids
            mask += [False] * len(header_ids) + [is_learned] * len(content_ids)
            first = False
        ids = opened(ids, self._tokenizer)
        mask = [False] * (len(ids) - len(mask)) + mask
        return np.array(ids, dtype=np.int64), np.array(mask, dtype=bool)


_WAYS: dict[str, Callable[[Tokenizer], ChatWay]] = {
    "megatron": MegatronChat,
    "template": TemplateChat,
    "plain": PlainChat,
    "bare": lambda tokenizer: PlainChat(tokenizer, speakers=False),
}


def opened(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """`ids`, opened by BOS exactly once, where there is one and it is not EOS under another name."""
    bos = tokenizer.bos_id
    return ids if bos is None or bos == tokenizer.eos_id or ids[:1] == [bos] else [bos, *ids]


def with_eos(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """`ids`, ended by EOS exactly once: text that spells its own EOS gets no second one."""
    return ids if ids[-1:] == [tokenizer.eos_id] else [*ids, tokenizer.eos_id]


def _tools_turn(conversation: Conversation) -> list[Message]:
    """The row's tools as a turn of their own, in front: the assistant cannot know them otherwise."""
    tools = [dict(tool) for tool in conversation.tools]
    return [Message("tools", json.dumps(tools, ensure_ascii=False))] if tools else []


def _speaker_line(role: str, *, first: bool) -> str:
    return f"{'' if first else '\n\n'}{role.capitalize()}:\n"


def _template_of(chat: Any) -> str:
    """The template used when none is named, "" where there is none. A tokenizer may hold several, one "default"."""
    template = chat.chat_template if chat is not None else None
    return str((template.get("default") if isinstance(template, dict) else template) or "")


def _can_encode(tokenizer: Tokenizer, text: str) -> bool:
    try:
        return len(tokenizer.encode(text)) > 0
    except tokenizer_errors():
        return False


def _has_prompt(conversation: Conversation) -> bool:
    return any(message.role != "assistant" and message.content.strip() for message in conversation.messages)


def _checked(is_target: Mask, conversation: Conversation, path: str, line: int) -> Mask:
    """The mask, unless it says that nothing, or the user's words too, are to be learned."""
    if not is_target.any():
        why = "marks no token as the assistant's, though the assistant says something"
    elif is_target.all() and _has_prompt(conversation):
        why = "marks every token as the assistant's, though others speak too"
    else:
        return is_target
    raise SampleError(
        path,
        line,
        f"the chat format {why}. Put the assistant's content, and only that, into generation blocks.",
        reason="template_marks_wrong",
    )


def _keep_turns(is_target: Mask, conversation: Conversation, learned: Sequence[bool], path: str, line: int) -> Mask:
    """Take turns that are not to be learned out of a mask that marks every assistant turn.

    Each assistant turn is one unbroken run of targets: a speaker line or another's turn lies between any two.
    """
    spoken = [place for place, message in enumerate(conversation.messages) if message.role == "assistant"]
    if all(learned[place] for place in spoken):
        return is_target
    edges = np.flatnonzero(np.diff(np.concatenate(([False], is_target, [False])).astype(np.int8)))
    runs = edges.reshape(-1, 2)
    if len(runs) != len(spoken):  # turns that say nothing may leave no run
        spoken = [place for place in spoken if conversation.messages[place].is_answer]
    if len(runs) != len(spoken):
        raise SampleError(
            path,
            line,
            f"{len(spoken)} assistant turns, but {len(runs)} runs of targets: the turn that is not to be learned "
            "cannot be found. Learn all turns of this row, or use a template with one generation block a turn.",
            reason="template_span_unclear",
        )
    kept = is_target.copy()
    for place, (start, end) in zip(spoken, runs, strict=True):
        kept[start:end] &= learned[place]
    return kept
