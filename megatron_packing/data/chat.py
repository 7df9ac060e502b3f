"""Which ids does a conversation become, and which of them are learned? Three ways, chosen openly and logged.

1. `megatron`: Megatron's SFTTokenizer writes ids and targets. Its formats "default" and "identity" call every id a
   target; there the targets are found as in 2, or the run is refused.
2. `template`: the chat template of a transformers tokenizer. With `{% generation %}` blocks the template says what is
   learned. Without them, each assistant turn is found by rendering the conversation up to it.
3. `plain`: no template. Each turn opens with a line that names the speaker (`User:`, `Assistant:`), turns are one empty
   line apart, EOS closes each assistant turn. `bare` leaves the speaker lines out.

In 1 and 2 the template is the truth: no BOS or EOS is added to what it writes, because none would be there when the
model is asked. In 3 BOS, if the vocabulary has one, opens the conversation.

Learned: what the assistant says and the mark that ends its turn. Not learned: speaker lines, everybody else's turns,
white space behind an end mark, and assistant turns that say nothing.

Cost: one tokenizer call a row; `template` without generation blocks renders up to 3 prefixes for each assistant turn,
so time quadratic in turns. Every way also costs the row's length.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megatron_packing.data.meaning import Conversation, Message
from megatron_packing.data.tokenizer import Tokenizer, encode_text, tokenizer_errors
from megatron_packing.errors import ConfigError, SampleError

IGNORE_INDEX = -100
"""What Megatron's SFTTokenizer writes where nothing is learned."""

TRAIN_ON = ("all-assistant", "last-assistant")
"""Every assistant turn is learned, or the last one only. A turn's own `supervised` overrides either."""

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


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
        way = "megatron" if tokenizer.conversation is not None else "template" if _has_template(tokenizer) else "plain"
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
        self._spans = TemplateChat(tokenizer) if _has_template(tokenizer) else None

    def describe(self) -> str:
        """One line for the log."""
        return (
            "chats: Megatron's SFTTokenizer writes ids and targets; a format that targets everything is masked by turns"
        )

    def content(self) -> str:
        """See `ChatWay.content`."""
        return f"megatron\n{self._spans.content() if self._spans is not None else ''}"

    def encode(self, conversation: Conversation, learned: Sequence[bool], path: str, line: int) -> tuple[Ids, Mask]:
        """See `ChatWay.encode`."""
        assert self._tokenizer.conversation is not None
        try:
            tokens, targets = self._tokenizer.conversation(_as_dicts(conversation.messages))
        except tokenizer_errors() as error:
            raise _refused("SFTTokenizer", error, path, line) from error
        ids = np.array(tokens, dtype=np.int64)
        is_target = np.asarray(targets) != IGNORE_INDEX
        if is_target.all() and _has_prompt(conversation):
            return ids, self._by_turns(ids, conversation, learned, path, line)
        is_target = _keep_turns(is_target, conversation, learned, path, line)
        return ids, _checked(is_target, conversation, path, line)

    def _by_turns(self, ids: Ids, conversation: Conversation, learned: Sequence[bool], path: str, line: int) -> Mask:
        if self._spans is not None:
            own_ids, is_target = self._spans.encode(conversation, learned, path, line)
            if np.array_equal(own_ids, ids):
                return is_target
        raise ConfigError(
            f"{path}:{line}: this SFTTokenizer prompt format marks every token as a target, the user's too, and "
            "its turns cannot be found with the tokenizer's chat template. Choose another "
            "--sft-tokenizer-prompt-format, or a HuggingFaceTokenizer with a chat template."
        )


class TemplateChat:
    """Way 2: the chat template of a transformers tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not _has_template(tokenizer):
            raise ConfigError(
                f"Tokenizer {tokenizer.name} has no chat template. Add one, or choose the chat format plain."
            )
        chat: Any = tokenizer.chat
        if not getattr(chat, "is_fast", False):
            raise ConfigError(
                f"Tokenizer {tokenizer.name} is a slow one: it cannot tell which characters a token came from, so "
                "assistant turns cannot be found. Use its fast variant (tokenizer.json), or the chat format plain."
            )
        self._chat = chat
        self._says_targets = re.search(r"\{%-?\s*generation\s*-?%\}", str(_template_of(chat))) is not None

    def describe(self) -> str:
        """One line for the log."""
        how = "its generation blocks say what is learned" if self._says_targets else "turns found by rendering prefixes"
        return f"chats: the tokenizer's own chat template; {how}"

    def content(self) -> str:
        """See `ChatWay.content`."""
        return f"template\n{_template_of(self._chat)}"

    def encode(self, conversation: Conversation, learned: Sequence[bool], path: str, line: int) -> tuple[Ids, Mask]:
        """See `ChatWay.encode`."""
        messages = _as_dicts(conversation.messages)
        if not self._says_targets:
            whole = self._render(messages, path, line)
            spans = [
                self._span(whole, messages, turn, path, line) for turn, is_learned in enumerate(learned) if is_learned
            ]
            ids, is_target = self._tokenize(whole, spans)
            return ids, _checked(is_target, conversation, path, line)
        try:
            out = self._chat.apply_chat_template(
                messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
        except tokenizer_errors() as error:
            raise _refused("the chat template", error, path, line) from error
        ids = np.array(out["input_ids"], dtype=np.int64)
        is_target = np.array(out["assistant_masks"], dtype=bool)
        # Looked at before turns are taken out, so that a template that marks nothing, or everything, is named as such.
        is_target = _keep_turns(_checked(is_target, conversation, path, line), conversation, learned, path, line)
        return ids, _checked(is_target, conversation, path, line)

    def _render(self, messages: list[dict[str, Any]], path: str, line: int, *, ask: bool = False) -> str:
        if not messages:
            return ""
        try:
            return str(self._chat.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask))
        except tokenizer_errors() as error:
            raise _refused("the chat template", error, path, line) from error

    def _span(self, whole: str, messages: list[dict[str, Any]], turn: int, path: str, line: int) -> tuple[int, int]:
        """The characters of `whole` that turn number `turn` teaches: its content and its end mark."""
        before = self._render(messages[:turn], path, line)
        until = whole if turn + 1 == len(messages) else self._render(messages[: turn + 1], path, line)
        if not (until.startswith(before) and whole.startswith(until)):
            raise SampleError(
                path,
                line,
                "the chat template writes earlier turns differently once later ones follow, so what the model sees "
                f"when asked for turn {turn} is not what stands before it here. Use a template with generation blocks, "
                "one that keeps its history, or rows with one answer.",
                reason="template_rewrites_history",
            )
        content = messages[turn]["content"].strip()
        prompt = self._render(messages[:turn], path, line, ask=True)
        if prompt != before and until.startswith(prompt):
            start = len(prompt)
        elif content and until.count(content, len(before)) == 1:
            # The template ignores the request for a prompt, or opens its prompt with words the answer lacks.
            start = until.index(content, len(before))
        else:
            raise SampleError(
                path,
                line,
                f"where the content of turn {turn} starts cannot be told: the chat template's generation prompt does "
                "not stand before it, and its text does not occur exactly once. Use a template with generation blocks.",
                reason="template_span_unclear",
            )
        said = until[start:].rstrip()
        # White space behind an end mark is never asked of the model; where it is the only end mark it stays.
        end = len(until) if content and said.endswith(content) else start + len(said)
        return start, end

    def _tokenize(self, whole: str, spans: Sequence[tuple[int, int]]) -> tuple[Ids, Mask]:
        """Ids of a rendered conversation, and which of them overlap one of the spans of characters."""
        out = self._chat(whole, add_special_tokens=False, return_offsets_mapping=True)
        ids = np.array(out["input_ids"], dtype=np.int64)
        offsets = np.array(out["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        starts, ends = offsets[:, 0], offsets[:, 1]
        # Byte-level vocabularies trim white space off the offsets, down to nothing for a token of spaces alone:
        # such a token reaches back to where the one before it ended.
        starts = np.where(starts == ends, np.minimum(starts, np.concatenate(([0], ends[:-1]))), starts)
        is_target = np.zeros(len(ids), dtype=bool)
        for start, end in spans:
            is_target |= (starts < end) & (ends > start)
        return ids, is_target


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
        for message, is_learned in zip(conversation.messages, learned, strict=True):
            if message.extra.get("tool_calls"):
                raise SampleError(
                    path,
                    line,
                    "holds tool_calls, which only a chat template can write. Use one.",
                    reason="needs_template",
                )
            if not message.content:
                continue
            header = _speaker_line(message.role, first=first) if self._speakers else ""
            header_ids = encode_text(self._tokenizer, header, path, line) if header else []
            content_ids = encode_text(self._tokenizer, message.content, path, line)
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


def _speaker_line(role: str, *, first: bool) -> str:
    return f"{'' if first else '\n\n'}{role.capitalize()}:\n"


def _has_template(tokenizer: Tokenizer) -> bool:
    return bool(_template_of(tokenizer.chat)) if tokenizer.chat is not None else False


def _template_of(chat: Any) -> Any:
    """The template used when none is named. A tokenizer may hold several by name, "default" among them."""
    template = chat.chat_template
    return template.get("default") if isinstance(template, dict) else template


def _can_encode(tokenizer: Tokenizer, text: str) -> bool:
    try:
        return len(tokenizer.encode(text)) > 0
    except tokenizer_errors():
        return False


def _as_dicts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [{"role": message.role, "content": message.content, **message.extra} for message in messages]


def _has_prompt(conversation: Conversation) -> bool:
    return any(message.role != "assistant" and message.content.strip() for message in conversation.messages)


def _refused(who: str, error: Exception, path: str, line: int) -> SampleError:
    return SampleError(
        path,
        line,
        f"{who} does not accept this conversation ({type(error).__name__}: {error}). Mend the row, or use a template "
        "that takes its roles in this order.",
        reason="refused_by_template",
    )


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
