"""The decoded targets are exactly what the assistant says and the ends of its turns, whatever the template and text."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_packing.data import Conversation, Encoder, Message, Record
from megatron_packing.data.chat import choose_chat, learned_turns
from megatron_packing.errors import SampleError
from tests.pure.chat_templates import CHATML, LLAMA, MARKERS, SHAPES, THINKING, TOOLS, Shape
from tests.pure.data_toys import Real

transformers = pytest.importorskip("transformers", reason="chat templates need the extra hf")
tokenizers = pytest.importorskip("tokenizers")

ALL, LAST = "all-assistant", "last-assistant"

# Spaces at the ends, characters of several bytes, text that looks like the template's own, repetitions.
WORDS = (
    *(" ", "  ", "\n", "\t", "a", "Hello", "Hello", "user", "assistant", "system", "caf\u00e9", "\u4f60\u597d"),
    *(
        "\U0001f642",
        "\U0001f468\u200d\U0001f469\u200d\U0001f467",
        "e\u0301",
        '"}',
        "{{ x }}",
        "{% if %}",
        "\\n",
        "\u00a0",
    ),
    *(marker for marker in MARKERS if "think" not in marker),
)
TEXT = st.lists(st.sampled_from(WORDS), max_size=6).map("".join)
SAID = TEXT.filter(str.strip)


@pytest.fixture(scope="module")
def build():
    """A tokenizer of single bytes and the templates' markers: each character's tokens are its own."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(_alphabet())}, merges=[]))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe.add_special_tokens(list(MARKERS))
    names = {"bos_token": "<s>", "eos_token": "</s>", "clean_up_tokenization_spaces": False}

    def tokenizer(template):
        chat = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, **names)
        chat.chat_template = template
        return Real(chat=chat)

    return tokenizer


def _alphabet():
    return sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())


@st.composite
def chats(draw, shape: Shape):
    """Turns in the order that templates ask for; some end with the user, some answers say nothing."""
    turns = []
    if shape.has_system and draw(st.booleans()):
        turns.append({"role": "system", "content": draw(TEXT)})
    for _ in range(draw(st.integers(1, 3))):
        answer = draw(TEXT)
        if shape is THINKING and draw(st.booleans()):
            answer = f"<think>\n{draw(TEXT)}\n</think>\n\n{answer}"
        turns += [{"role": "user", "content": draw(TEXT)}, {"role": "assistant", "content": answer}]
    return turns if draw(st.booleans()) or len(turns) < 3 else turns[:-1]


@st.composite
def tool_chats(draw):
    turns = []
    for _ in range(draw(st.integers(1, 2))):
        turns.append({"role": "user", "content": draw(TEXT)})
        for _ in range(draw(st.integers(0, 2))):
            arguments = draw(st.dictionaries(st.sampled_from(["x", "caf\u00e9"]), SAID | st.integers(), max_size=2))
            call = {"type": "function", "function": {"name": "look_up", "arguments": arguments}}
            turns.append({"role": "assistant", "content": draw(TEXT), "tool_calls": [call] * draw(st.integers(1, 2))})
            turns += [{"role": "tool", "content": draw(TEXT)}] * draw(st.integers(1, 2))
        turns.append({"role": "assistant", "content": draw(TEXT)})
    return turns


def as_conversation(turns, **beside):
    known = ("role", "content")
    extra = [{key: value for key, value in turn.items() if key not in known} for turn in turns]
    messages = [Message(turn["role"], turn["content"], extra=more) for turn, more in zip(turns, extra, strict=True)]
    return Conversation(tuple(messages), **beside)


def expected(pieces, turns, train_on):
    """The whole text, and for each character whether it is to be learned."""
    conversation = as_conversation(turns)
    said = [place for place, message in enumerate(conversation.messages) if message.role == "assistant"]
    learned = learned_turns(conversation, train_on)
    spoken = iter(said)
    text, mask = "", []
    for piece, is_assistant in pieces:
        text += piece
        mask += [is_assistant and learned[next(spoken)]] * len(piece)
    return text, mask


def characters(tokenizer, ids, is_target):
    """The text of the ids, and for each character whether it is learned: all of its bytes, or none."""
    text, mask, start = "", [], 0
    for end in range(1, len(ids) + 1):
        piece = tokenizer.decode(ids[start:end].tolist())
        if "\ufffd" in piece and end < len(ids) and end - start < 4:
            continue
        assert len(set(is_target[start:end].tolist())) == 1, "a character is learned in part"
        text += piece
        mask += [bool(is_target[start])] * len(piece)
        start = end
    return text, mask


def check(tokenizer, turns, pieces, train_on, **beside):
    conversation = as_conversation(turns, **beside)
    learned = learned_turns(conversation, train_on)
    if not any(learned):
        return
    ids, is_target = choose_chat(tokenizer).encode(conversation, learned, "a.jsonl", 1)
    text, mask = expected(pieces, turns, train_on)
    assert tokenizer.decode(ids.tolist()) == text
    found_text, found = characters(tokenizer, ids, is_target)
    assert found_text == text
    assert "".join(c for c, m in zip(text, found, strict=True) if m) == "".join(
        c for c, m in zip(text, mask, strict=True) if m
    )
    assert found == mask


PLAIN_SHAPES = [shape for shape in SHAPES if shape is not TOOLS]


@pytest.mark.parametrize("blocks", [False, True], ids=["by-rendering", "by-blocks"])
@pytest.mark.parametrize("shape", PLAIN_SHAPES, ids=lambda shape: shape.name)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_targets_are_what_the_assistant_says(build, shape, blocks, data):
    turns = data.draw(chats(shape))
    tokenizer = build(shape.template(blocks=blocks))
    for train_on in (ALL, LAST):
        learned = learned_turns(as_conversation(turns), train_on)
        earlier = zip(turns[:-1], learned[:-1], strict=True)
        if not blocks and any(is_learned and shape.is_rewritten(turn) for turn, is_learned in earlier):
            with pytest.raises(SampleError) as caught:
                check(tokenizer, turns, shape.write(turns), train_on)
            assert caught.value.reason == "template_rewrites_history"
        else:
            check(tokenizer, turns, shape.write(turns), train_on)


@pytest.mark.parametrize("blocks", [False, True], ids=["by-rendering", "by-blocks"])
@settings(max_examples=40, deadline=None)
@given(turns=tool_chats(), with_tools=st.booleans())
def test_tool_calls_are_said_and_results_are_not(build, blocks, turns, with_tools):
    tools = ({"type": "function", "function": {"name": "look_up", "description": "\u00e9"}},) if with_tools else ()
    tokenizer = build(TOOLS.template(blocks=blocks))
    for train_on in (ALL, LAST):
        check(tokenizer, turns, TOOLS.write(turns, tools), train_on, tools=tools)


# --- one case at a time ---------------------------------------------------------------------------


def encoded(tokenizer, turns, **settings):
    (sample,) = Encoder(tokenizer, 500, **settings).encode(as_conversation(turns))
    targets = sample.labels[sample.loss_mask > 0].tolist()
    return [*sample.tokens.tolist(), int(sample.labels[-1])], tokenizer.decode(targets)


def turn(role, content, **extra):
    return {"role": role, "content": content, **extra}


def test_of_a_chat_that_thinks_the_last_answer_can_always_be_learned(build):
    turns = [turn("user", "a"), turn("assistant", "<think>b</think>c"), turn("user", "d")]
    turns.append(turn("assistant", "<think>e</think>f"))
    tokenizer = build(THINKING.template(blocks=False))
    with pytest.raises(SampleError, match="Set --packing-train-on last-assistant"):
        encoded(tokenizer, turns)
    assert encoded(tokenizer, turns, train_on=LAST)[1] == "<think>e</think>f<|im_end|>"
    # Without thoughts in the history nothing of it is rewritten, though the template marks the last turn as it thinks.
    turns[1] = turn("assistant", "c")
    assert encoded(tokenizer, turns)[1] == "c<|im_end|><think>e</think>f<|im_end|>"


def test_a_context_that_later_turns_change_is_refused(build):
    """The system text stands before the last user turn only: no earlier answer is asked for with this text."""
    moves = CHATML.template(blocks=False).replace(
        "{% for m in messages %}",
        "{% for m in messages %}{% if m.role == 'user' and not loop.index < loop.length - 1 %}{{ 'NOTE' }}{% endif %}",
    )
    turns = [turn("user", "a"), turn("assistant", "b"), turn("user", "c"), turn("assistant", "d")]
    tokenizer = build(moves)
    with pytest.raises(SampleError) as caught:
        encoded(tokenizer, turns)
    assert caught.value.reason == "template_rewrites_history"
    assert encoded(tokenizer, turns, train_on=LAST)[1] == "d<|im_end|>"


def test_a_rewritten_turn_in_a_changed_context_is_refused(build):
    """Turn 1 stands whole where it was, but what stands before it is not what the model saw: one letter is another."""
    letter = "{{ 'last' if loop.index >= loop.length - 1 else 'past' }}"
    turns = [turn("user", "a"), turn("assistant", "b"), turn("user", "c"), turn("assistant", "d")]
    tokenizer = build(CHATML.template(blocks=False).replace("{% else %}", "{% else %}" + letter))
    with pytest.raises(SampleError) as caught:
        encoded(tokenizer, turns)
    assert caught.value.reason == "template_rewrites_history"
    assert encoded(tokenizer, turns, train_on=LAST)[1] == "d<|im_end|>"


def test_an_answer_that_later_turns_shorten_is_refused(build):
    short = "{{ (m.content if loop.last else m.content[:1]) + '<|im_end|>' }}{% else %}"
    turns = [turn("user", "a"), turn("assistant", "bcd"), turn("user", "c"), turn("assistant", "def")]
    tokenizer = build(CHATML.template(blocks=False).replace("{{ m.content + '<|im_end|>' }}{% else %}", short))
    with pytest.raises(SampleError) as caught:
        encoded(tokenizer, turns)
    assert caught.value.reason == "template_rewrites_history"
    assert encoded(tokenizer, turns, train_on=LAST)[1] == "def<|im_end|>"


def test_blocks_whose_text_is_changed_afterwards_are_refused(build):
    cut = "{% for m in messages %}{% set t %}{% generation %}{{ m.content }}{% endgeneration %}{% endset %}{{ t[:4] }}"
    with pytest.raises(SampleError, match="cannot be located") as caught:
        encoded(build(cut + "{% endfor %}"), [turn("user", "a"), turn("assistant", "Hello")])
    assert caught.value.reason == "template_marks_wrong"


def test_one_bos_whoever_writes_it(build):
    tokenizer = build(LLAMA.template(blocks=False))
    backend = tokenizer.chat.backend_tokenizer
    adds_bos = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.bos_id)])
    backend.post_processor = adds_bos
    try:
        chat = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
        assert chat("a")["input_ids"][0] == tokenizer.bos_id
        chat.chat_template = tokenizer.chat.chat_template
        ids, _ = encoded(Real(chat=chat), [turn("user", "a"), turn("assistant", "b")])
        assert ids.count(tokenizer.bos_id) == 1
        for text in ("a b", "<s>a b</s>", "a b</s>"):
            (sample,) = Encoder(Real(chat=chat), 500).encode(Record("a.jsonl", 1, {"text": text}))
            ids = [*sample.tokens.tolist(), int(sample.labels[-1])]
            assert Real(chat=chat).decode(ids) == "<s>a b</s>"
    finally:
        backend.post_processor = tokenizers.processors.ByteLevel()


def test_blocks_that_leave_out_the_end_of_a_turn_are_spoken_of(build):
    keeps, leaves = CHATML.template(blocks=True), CHATML.template(blocks=True)
    leaves = leaves.replace(
        "{{ m.content + '<|im_end|>' }}{% endgeneration %}", "{{ m.content }}{% endgeneration %}<|im_end|>"
    )
    assert "to stop is not learned" not in Encoder(build(keeps), 9).describe()
    assert "to stop is not learned" in Encoder(build(leaves), 9).describe()


CALLS = [{"type": "function", "function": {"name": "f", "arguments": {"k": "\u00e9"}}}]


def test_a_template_is_given_calls_as_it_writes_them(build):
    joins = CHATML.template(blocks=False).replace(
        "{{ m.content + '<|im_end|>' }}{% else %}",
        "{% for c in m.tool_calls or [] %}{{ 'call:' + c.function.arguments }}{% endfor %}"
        "{{ m.content + '<|im_end|>' }}{% else %}",
    )
    turns = [turn("user", "a"), turn("assistant", "", tool_calls=CALLS)]
    assert encoded(build(joins), turns)[1] == 'call:{"k": "\u00e9"}<|im_end|>'


def test_what_a_template_has_no_place_for_is_not_lost(build):
    tokenizer = build(CHATML.template(blocks=False))
    for extra in ({"tool_calls": CALLS}, {"reasoning_content": "because"}):
        with pytest.raises(SampleError, match="which the chat template has no place for") as caught:
            encoded(tokenizer, [turn("user", "a"), turn("assistant", "b", **extra)])
        assert caught.value.reason == "needs_template"
    written = json.dumps({"name": "f", "arguments": {"k": 1}})
    row = {"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": written}]}
    (sample,) = Encoder(tokenizer, 500).encode(Record("a.jsonl", 1, row))  # a call written as text stays that text
    assert tokenizer.decode(sample.labels[sample.loss_mask > 0].tolist()) == written + "<|im_end|>"
    row["tools"] = [{"name": "f"}]
    assert "has no place for a row's tools" in Encoder(tokenizer, 500).describe()
    tools = build(TOOLS.template(blocks=False))
    (sample,) = Encoder(tools, 500).encode(Record("a.jsonl", 1, row))
    said = '<tool_call>\n{"name": "f", "arguments": {"k": 1}}\n</tool_call><|im_end|>'
    assert tools.decode(sample.labels[sample.loss_mask > 0].tolist()) == said
    assert tools.decode(sample.tokens.tolist()).startswith('<|im_start|>system\nTools:\n{"type": "function"')


def test_thoughts_kept_apart_are_learned_where_the_template_writes_them(build):
    writes = CHATML.template(blocks=False).replace(
        "{{ m.content + '<|im_end|>' }}{% else %}",
        "{{ '<think>' + (m.reasoning_content or '') + '</think>' + m.content + '<|im_end|>' }}{% else %}",
    )
    turns = [turn("user", "a"), turn("assistant", "b", reasoning_content="because"), turn("user", "c")]
    turns += [turn("assistant", "", reasoning_content="hm", tool_calls=[]), turn("assistant", "d")]
    assert encoded(build(writes), turns)[1] == (
        "<think>because</think>b<|im_end|><think>hm</think><|im_end|><think></think>d<|im_end|>"
    )


def test_a_rows_own_arguments_reach_the_template(build):
    silent = "{% if quiet %}{{ 'Q' }}{% endif %}" + CHATML.template(blocks=False)
    row = {"messages": [turn("user", "a"), turn("assistant", "b")], "chat_template_kwargs": {"quiet": True}}
    tokenizer = build(silent)
    (sample,) = Encoder(tokenizer, 500).encode(Record("a.jsonl", 1, row))
    assert tokenizer.decode(sample.tokens.tolist()).startswith("Q<|im_start|>")
