import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_packing.data import Conversation, Dropped, Encoder, Message, Record, convert
from megatron_packing.data.chat import IGNORE_INDEX, choose_chat, learned_turns
from megatron_packing.errors import ConfigError, SampleError
from tests.pure.data_toys import Real, Toy

transformers = pytest.importorskip("transformers", reason="chat templates need the extra hf")
tokenizers = pytest.importorskip("tokenizers")

TURN = "{{ '<|im_start|>' + m['role'] + '\\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
CHATML = "{% for m in messages %}" + TURN + "{{ m['content'] + '<|im_end|>\\n' }}{% endfor %}" + PROMPT
GENERATION = (
    "{% for m in messages %}" + TURN + "{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}" + PROMPT
)
# As reasoning models do it: what an earlier turn thought is no longer shown.
REWRITES = (
    "{% for m in messages %}" + TURN + "{{ m['content'].split('</think>')[-1] if not loop.last else m['content'] }}"
    "{{ '<|im_end|>\\n' }}{% endfor %}" + PROMPT
)
NO_PROMPT = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
)
HEADER_ALWAYS = "{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] + eos_token + '\\n' }}{% endfor %}"
THINKING_PROMPT = CHATML.replace("assistant\\n' }}{% endif %}", "assistant\\n<think>\\n' }}{% endif %}")
NEWLINE_ENDS = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
NOTHING_MARKED = CHATML + "{% if false %}{% generation %}{{ '' }}{% endgeneration %}{% endif %}"
ALL_MARKED = "{% generation %}" + CHATML + "{% endgeneration %}"
PICKY = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turns') }}{% endif %}" + CHATML

CHAT = Conversation(
    (
        Message("system", "Be brief."),
        Message("user", "What is 1 + 1?"),
        Message("assistant", "It is 2."),
        Message("user", "And caf\u00e9 \U0001f642?"),
        Message("assistant", " naïve \U0001f642  answer"),
    )
)
ANSWERS = ["It is 2.<|im_end|>", " naïve \U0001f642  answer<|im_end|>"]


@pytest.fixture(scope="module")
def trained():
    """A byte-level BPE, trained in memory on a few lines; <|im_end|> ends texts."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)  # as GPT-2's: offsets without the spaces
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>", "<s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["system user assistant the answer is brief\n\nUser:\nAssistant:\n"] * 4, trainer)
    return bpe


@pytest.fixture
def make(trained):
    def build(template, **names):
        chat = transformers.PreTrainedTokenizerFast(tokenizer_object=trained, eos_token="<|im_end|>", **names)
        chat.chat_template = template
        return Real(chat=chat)

    return build


def encode(tokenizer, conversation=CHAT, way="auto", train_on="all-assistant"):
    learned = learned_turns(conversation, train_on)
    return choose_chat(tokenizer, way).encode(conversation, learned, "train.jsonl", 18)


def taught(tokenizer, ids, is_target):
    """The text of each unbroken run of targets."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], is_target.astype(int), [0])))).reshape(-1, 2)
    return [tokenizer.decode(ids[start:end].tolist()) for start, end in edges]


@pytest.mark.parametrize("template", [CHATML, GENERATION])
def test_answers_and_their_end_marks_are_learned_and_nothing_else(make, template):
    tokenizer = make(template)
    ids, is_target = encode(tokenizer)
    assert tokenizer.decode(ids.tolist()) == tokenizer.chat.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in CHAT.messages], tokenize=False
    )
    assert taught(tokenizer, ids, is_target) == ANSWERS
    assert is_target.dtype == bool
    # The template ends with a line end behind EOS; no second EOS is invented after it.
    assert ids.tolist().count(tokenizer.eos_id) == len(CHAT.messages)


@pytest.mark.parametrize("template", [CHATML, GENERATION])
def test_the_last_turn_alone_and_a_turns_own_word(make, template):
    tokenizer = make(template)
    assert taught(tokenizer, *encode(tokenizer, train_on="last-assistant")) == ANSWERS[1:]
    own = Conversation((*CHAT.messages[:2], Message("assistant", "It is 2.", supervised=False), *CHAT.messages[3:]))
    assert taught(tokenizer, *encode(tokenizer, own)) == ANSWERS[1:]
    silent = Conversation((*CHAT.messages[:2], Message("assistant", ""), *CHAT.messages[3:]))
    assert taught(tokenizer, *encode(tokenizer, silent)) == ANSWERS[1:]


def test_a_silent_turn_may_leave_no_mark_in_a_generation_block(make):
    tokenizer = make(GENERATION.replace("m['content'] + '<|im_end|>' }}{% endg", "m['content'] }}{% endg"))
    silent = Conversation((*CHAT.messages[:2], Message("assistant", ""), *CHAT.messages[3:]))
    assert taught(tokenizer, *encode(tokenizer, silent)) == [ANSWERS[1].removesuffix("<|im_end|>")]


def test_runs_of_targets_that_do_not_fit_the_turns_are_refused(make):
    unmarked = "{% if m['role'] == 'assistant' and not loop.first and loop.last %}"
    tokenizer = make(GENERATION.replace("{% if m['role'] == 'assistant' %}", unmarked))  # marks the last turn alone
    with pytest.raises(SampleError, match="2 assistant turns, but 1 generation blocks"):
        encode(tokenizer, train_on="last-assistant")


def test_only_the_assistant_is_ever_learned():
    chat = Conversation((Message("user", "11", supervised=True), Message("assistant", "21")))
    assert learned_turns(chat) == (False, True)


TEXT = st.text(st.sampled_from(list("aA 1\n\t.<|é\U0001f642")), min_size=1, max_size=8)


@given(contents=st.lists(TEXT, min_size=2, max_size=6))
def test_rendered_prefixes_find_what_generation_blocks_mark(trained, contents):
    roles = ("user", "assistant")
    chat = Conversation(tuple(Message(roles[place % 2], text) for place, text in enumerate(contents)))
    if not any(learned_turns(chat)):
        return
    found = []
    for template in (CHATML, GENERATION):
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=trained, eos_token="<|im_end|>")
        fast.chat_template = template
        found.append(encode(Real(chat=fast), chat))
    (ids, by_prefix), (same_ids, by_blocks) = found
    assert ids.tolist() == same_ids.tolist()
    assert by_prefix.any()
    # transformers leaves out tokens of spaces alone, whose trimmed offsets are empty; it never marks more than we do.
    assert not (by_blocks & ~by_prefix).any()
    extra = ids[by_prefix & ~by_blocks].tolist()
    assert fast.decode(extra).strip() == ""


def test_a_template_that_rewrites_history_is_refused(make):
    thinking = Conversation(
        (Message("user", "a"), Message("assistant", "hm</think>b"), Message("user", "c"), Message("assistant", "d"))
    )
    with pytest.raises(SampleError, match=r"train\.jsonl:18: the chat template writes earlier turns") as caught:
        encode(make(REWRITES), thinking)
    assert caught.value.reason == "template_rewrites_history"
    tokenizer = make(REWRITES)
    single = Conversation(thinking.messages[:2])  # with one answer there is no history to rewrite
    assert taught(tokenizer, *encode(tokenizer, single)) == ["hm</think>b<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (NO_PROMPT, ["It is 2. <|im_end|>", "yes <|im_end|>"]),
        (HEADER_ALWAYS, ["It is 2.<|im_end|>", "yes<|im_end|>"]),
        (THINKING_PROMPT, ["It is 2.<|im_end|>", "yes<|im_end|>"]),
        (NEWLINE_ENDS, ["It is 2.\n", "yes\n"]),
        (NEWLINE_ENDS.replace("\\n", "  "), ["It is 2. ", "yes  "]),  # " user" took one of the spaces
    ],
)
def test_templates_without_a_plain_generation_prompt(make, template, expected):
    chat = Conversation((*CHAT.messages[1:3], Message("user", "more?"), Message("assistant", "yes")))
    tokenizer = make(template, bos_token="<s>")
    ids, is_target = encode(tokenizer, chat)
    assert taught(tokenizer, ids, is_target) == expected


def test_a_start_that_cannot_be_told_is_refused(make):
    chat = Conversation((Message("user", "x"), Message("assistant", "assistant")))
    tokenizer = make(HEADER_ALWAYS)  # another text in its place tells it from the header of the same word
    assert taught(tokenizer, *encode(tokenizer, chat)) == ["assistant<|im_end|>"]
    with pytest.raises(SampleError) as caught:
        encode(make(HEADER_ALWAYS.replace("m['content']", "m['content'] | upper")), chat)
    assert caught.value.reason == "template_span_unclear"


@pytest.mark.parametrize(("template", "says"), [(NOTHING_MARKED, "no token"), (ALL_MARKED, "every token")])
def test_a_template_that_marks_nothing_or_everything_is_refused(make, template, says):
    for train_on in ("all-assistant", "last-assistant"):
        with pytest.raises(SampleError, match=says) as caught:
            encode(make(template), train_on=train_on)
        assert caught.value.reason == "template_marks_wrong"


def test_a_row_that_the_template_refuses_is_the_rows_fault(make):
    with pytest.raises(
        SampleError, match=r"train\.jsonl:18: the chat template does not accept .*no system turns"
    ) as caught:
        encode(make(PICKY))
    assert caught.value.reason == "refused_by_template"


def test_the_template_alone_decides_on_bos(make):
    for template, count in (("{{ bos_token }}" + CHATML, 1), (CHATML, 0)):
        tokenizer = make(template, bos_token="<s>")
        ids, _ = encode(tokenizer)
        assert ids.tolist().count(tokenizer.bos_id) == count


def test_a_slow_tokenizer_is_refused():
    class Slow:
        chat_template = CHATML
        is_fast = False

    with pytest.raises(ConfigError, match="slow"):
        choose_chat(Toy(chat=Slow()))


def test_plain_text_chats(make):
    tokenizer = make(None, bos_token="<s>")
    ids, is_target = encode(tokenizer, Conversation((Message("system", ""), *CHAT.messages[1:])))
    assert tokenizer.decode(ids.tolist()) == (
        "<s>User:\nWhat is 1 + 1?\n\nAssistant:\nIt is 2.<|im_end|>\n\n"
        "User:\nAnd caf\u00e9 \U0001f642?\n\nAssistant:\n naïve \U0001f642  answer<|im_end|>"
    )
    assert taught(tokenizer, ids, is_target) == ANSWERS
    bare, _ = encode(tokenizer, Conversation(CHAT.messages[1:3]), "bare")
    assert tokenizer.decode(bare.tolist()) == "<s>What is 1 + 1?It is 2.<|im_end|>"
    calls = Message("assistant", "", extra={"tool_calls": [{}]})
    with pytest.raises(SampleError, match="tool_calls"):
        encode(tokenizer, Conversation((Message("user", "x"), calls)))


def test_plain_text_tells_of_tools_and_keeps_calls_that_were_text(make):
    call = '{"name": "f", "arguments": {"k":  1}}'
    turns = [("human", "x"), ("function_call", call), ("observation", "5"), ("gpt", "five")]
    row = {"conversations": [{"from": who, "value": said} for who, said in turns], "tools": '[{"name": "f"}]'}
    tokenizer = make(None)
    ids, is_target = encode(tokenizer, convert(Record("a.jsonl", 1, row)))
    assert tokenizer.decode(ids.tolist()) == (
        'Tools:\n[{"type": "function", "function": {"name": "f"}}]\n\nUser:\nx\n\n'
        f"Assistant:\n{call}<|im_end|>\n\nTool:\n5\n\nAssistant:\nfive<|im_end|>"
    )
    assert taught(tokenizer, ids, is_target) == [f"{call}<|im_end|>", "five<|im_end|>"]


def test_the_log_line_says_which_way_is_used(make):
    lines = [
        choose_chat(tokenizer).describe()
        for tokenizer in (Toy(conversation=print), make(GENERATION), make(CHATML), make(None), Toy())
    ]
    for line, word in zip(lines, ("SFTTokenizer", "generation blocks", "by rendering", "'User:'", "bare"), strict=True):
        assert word in line
        assert "\n" not in line


def test_an_encoder_with_a_real_tokenizer_pickles(make):
    encoder = Encoder(make(CHATML), 200)
    copy = pickle.loads(pickle.dumps(encoder))
    first, second = encoder.encode(CHAT), copy.encode(CHAT)
    assert not isinstance(first, Dropped)
    assert first[0].tokens.tolist() == second[0].tokens.tolist()


class Megatron:
    """Megatron's SFTTokenizer in miniature; `targets_all` as in its formats default and identity."""

    def __init__(self, chat=None, *, targets_all=False):
        self.chat, self.targets_all = chat, targets_all

    def __call__(self, messages):
        if self.chat is not None:
            ids = np.array(self.chat.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"])
            return ids, ids.copy()
        ids, targets = [], []
        for place, message in enumerate(messages):
            assert message["role"] != "assistant" or messages[place - 1]["role"] == "user"
            said = [int(word) for word in message["content"].split()]
            header = [90]
            ids += header + said
            learned = self.targets_all or message["role"] == "assistant"
            targets += [h if self.targets_all else IGNORE_INDEX for h in header]
            targets += said if learned else [IGNORE_INDEX] * len(said)
        return np.array(ids), np.array(targets)


TOY_CHAT = Conversation(
    (Message("user", "11"), Message("assistant", "21 22"), Message("user", "12"), Message("assistant", "23"))
)


def test_megatrons_targets_are_taken():
    tokenizer = Toy(conversation=Megatron())
    ids, is_target = encode(tokenizer, TOY_CHAT)
    assert (ids.tolist(), ids[is_target].tolist()) == ([90, 11, 90, 21, 22, 90, 12, 90, 23], [21, 22, 23])
    ids, is_target = encode(tokenizer, TOY_CHAT, train_on="last-assistant")
    assert ids[is_target].tolist() == [23]
    with pytest.raises(SampleError, match="SFTTokenizer does not accept"):
        encode(tokenizer, Conversation((TOY_CHAT.messages[1], TOY_CHAT.messages[1])))


def test_megatrons_formats_that_target_everything_are_masked_by_turns_or_refused(make):
    with pytest.raises(ConfigError, match="marks every token"):
        encode(Toy(conversation=Megatron(targets_all=True)), TOY_CHAT)
    real = make(CHATML)
    sft = Real(chat=real.chat, conversation=Megatron(real.chat))
    ids, is_target = encode(sft)
    assert taught(real, ids, is_target) == ANSWERS
    other = make("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    with pytest.raises(ConfigError, match="marks every token"):
        encode(Real(chat=real.chat, conversation=Megatron(other.chat)))
