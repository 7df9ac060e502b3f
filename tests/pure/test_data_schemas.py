import pytest

from megatron_packing.data import schemas
from megatron_packing.data.schemas import Conversation, Document, Message, convert, register_schema, split_conversations
from megatron_packing.data.sources import Record
from megatron_packing.errors import ConfigError, SampleError

ASKED = (Message("user", "11 12"), Message("assistant", "21 22"))


def record(**fields) -> Record:
    return Record("train.jsonl", 18, fields)


def turn(role, content):
    return {"role": role, "content": content}


@pytest.fixture
def registry():
    before = dict(schemas.SCHEMAS)
    yield
    schemas.SCHEMAS.clear()
    schemas.SCHEMAS.update(before)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"messages": [turn("user", "11 12"), turn("assistant", "21 22")]}, Conversation(ASKED)),
        (
            {"conversations": [{"from": "human", "value": "11 12"}, {"from": "gpt", "value": "21 22"}], "text": "x"},
            Conversation(ASKED),
        ),
        ({"instruction": "11 12", "output": "21 22"}, Conversation(ASKED)),
        (
            {"question": "11", "context": "12", "answer": "21"},
            Conversation((Message("user", "11\n\n12"), Message("assistant", "21"))),
        ),
        (
            {"prompt": "", "query": "11", "input": "", "response": None, "answer": "21"},
            Conversation((Message("user", "11"), Message("assistant", "21"))),
        ),
        ({"text": "00123", "meta": 1}, Document("00123")),
        ({"messages": [turn("user", None)]}, Conversation((Message("user", ""),))),
        ({"messages": []}, Conversation(())),
    ],
)
def test_each_layout_is_told_by_its_fields(fields, expected):
    assert convert(record(**fields)) == expected


@pytest.mark.parametrize(
    ("speaker", "role"),
    [(speaker, "user") for speaker in ("human", "user", "User ", "prompter")]
    + [(speaker, "assistant") for speaker in ("gpt", "assistant", "model", "chatgpt", "bing", "bard", "AI", "bot")]
    + [(speaker, "assistant") for speaker in ("function_call", "function-call", "tool_call", "chatbot")]
    + [(speaker, "tool") for speaker in ("tool", "function", "observation", "FUNCTION RESPONSE", "tool_response")]
    + [("system", "system"), ("developer", "system")],
)
def test_speakers(speaker, role):
    assert convert(record(conversations=[{"from": speaker, "value": "x"}])) == Conversation((Message(role, "x"),))


@pytest.mark.parametrize(
    ("fields", "reason", "says"),
    [
        ({"messages": "ping"}, "bad_turns", "'ping'; it must be a list"),
        ({"messages": ["ping"]}, "bad_turns", "messages[0]"),
        ({"messages": [turn("user", 5)]}, "bad_content", "5 (int)"),
        ({"messages": [turn("user", [{"type": "text"}])]}, "bad_part", "messages[0] 'content'[0]"),
        (
            {"messages": [turn("user", "x"), turn("narrator", "x")]},
            "unknown_role",
            "messages[1] has the unknown role 'narrator'; known are system",
        ),
        ({"messages": [turn(None, "x")]}, "unknown_role", "None"),
        ({"messages": [{"content": "x"}]}, "missing_key", "lacks 'role'; found: content"),
        ({"conversations": [{"from": "gpt"}]}, "missing_key", "lacks 'value'"),
        ({"messages": [turn("user", "x") | {"weight": "no"}]}, "bad_weight", "'no'"),
        ({"instruction": 5, "output": "x"}, "bad_content", "'instruction'"),
        ({"text": 5}, "bad_content", "'text'"),
        ({"body": "x", "id": 1}, "unknown_schema", "fields found: body, id. Known: input_ids (input_ids [+"),
        ({}, "unknown_schema", "fields found: none"),
        ({"conversations": [], "chosen": {}, "rejected": {}}, "unknown_schema", "chosen and rejected"),
    ],
)
def test_what_a_row_may_not_be(fields, reason, says):
    with pytest.raises(SampleError) as caught:
        convert(record(**fields))
    assert caught.value.reason == reason
    assert str(caught.value).startswith("train.jsonl:18: ")
    assert says in str(caught.value)


def test_a_named_schema_is_held_to():
    row = record(messages=[turn("user", "x")], text="y")
    assert convert(row, "text") == Document("y")
    with pytest.raises(SampleError, match="'conversations' is missing"):
        convert(row, "conversations")
    with pytest.raises(SampleError, match="instruction"):
        convert(row, "alpaca")
    with pytest.raises(ConfigError, match="auto, input_ids, messages, conversations, prompt_completion, alpaca, text"):
        convert(row, "chatml")


def test_a_turn_may_say_whether_it_is_learned_and_carry_what_templates_read():
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    row = record(
        messages=[
            turn("user", "x"),
            {"role": "assistant", "tool_calls": calls, "weight": 0},
            turn("tool", "y") | {"tool_call_id": "1", "unread": 3},
            turn("assistant", "z") | {"train": True},
        ]
    )
    messages = convert(row).messages
    assert [message.supervised for message in messages] == [None, False, None, True]
    assert [message.extra for message in messages] == [{}, {"tool_calls": calls}, {"tool_call_id": "1"}, {}]


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


WRITTEN = '{"name": "add", "arguments": {"a": 1.50, "b": 12345678901234567890}}'
ADD = call("add", a=1.5, b=12345678901234567890)


@pytest.mark.parametrize(
    ("said", "calls", "content"),
    [
        ({"from": "function_call", "value": WRITTEN}, [ADD], ""),
        ({"from": "function_call", "value": f"[{WRITTEN}, {WRITTEN}]"}, [ADD, ADD], ""),
        ({"from": "function_call", "value": '{"name": "f", "parameters": {"x": 1}}'}, [call("f", x=1)], ""),
        ({"from": "function_call", "value": "f(1)"}, None, "f(1)"),  # no JSON: it is what the assistant wrote
        (
            {"from": "function_call", "value": '{"name": "f", "arguments": "g("}'},
            None,
            '{"name": "f", "arguments": "g("}',
        ),
        ({"role": "assistant", "tool_calls": [{"id": "7", "function": ADD["function"]}]}, [{"id": "7", **ADD}], ""),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"x": "1"}'}}]},
            [call("f", x="1")],
            "",
        ),
        ({"role": "assistant", "tool_calls": '[{"name": "f"}]', "content": "so:"}, [call("f")], "so:"),
        ({"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": ""}}, [call("f")], ""),
    ],
)
def test_tool_calls_in_each_spelling(said, calls, content):
    (message,) = convert(record(conversations=[said])).messages
    assert (message.role, message.extra.get("tool_calls"), message.content) == ("assistant", calls, content)
    assert message.calls_text == (said["value"] if calls and "value" in said else "")
    assert message.is_answer


def test_what_stands_beside_the_turns_belongs_to_the_conversation():
    plain = {"name": "f", "parameters": {}}
    row = record(
        conversations=[{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}],
        system="Be brief.",
        tools='[{"name": "f", "parameters": {}}]',
        chat_template_kwargs='{"enable_thinking": false}',
    )
    found = convert(row)
    assert found.messages == (Message("system", "Be brief."), Message("user", "x"), Message("assistant", "y"))
    assert found.tools == ({"type": "function", "function": plain},)
    assert found.template_args == {"enable_thinking": False}
    (part,) = split_conversations(found)
    assert part == found  # a part keeps the tools
    told = Message("system", "Be brief.")
    assert convert(record(messages=[turn("system", "Be brief.")], system="Be brief.")).messages == (told,)
    asked = convert(record(instruction="b", output="c", history=[["x", "y"]], system="Be brief."))
    assert [m.content for m in asked.messages] == ["Be brief.", "x", "y", "b", "c"]


def test_text_parts_are_joined_as_they_are():
    parts = [
        {"type": "text", "text": "a ", "image_url": None},
        "b",
        {"text": "\nc"},
        {"type": "output_text", "text": "d"},
    ]
    assert convert(record(messages=[turn("user", parts)])).messages == (Message("user", "a b\ncd"),)


def test_only_a_completion_is_learned():
    row = record(
        prompt=[turn("user", "a"), turn("assistant", "b"), turn("assistant", "c") | {"weight": 1}, turn("user", "d")],
        completion=[turn("assistant", "e")],
    )
    assert [message.supervised for message in convert(row).messages] == [False, False, True, False, None]
    asked = Conversation((Message("user", "[1]"), Message("assistant", "[2]")))
    assert convert(record(prompt="[1]", completion="[2]")) == asked  # text, whatever it looks like
    assert convert(record(prompt="[1]", completion="[2]"), "prompt_completion") == asked


@pytest.mark.parametrize("key", ["train", "weight", "loss_weight", "loss"])
def test_a_turns_weight_has_many_names(key):
    for value, expected in ((0, False), (1, True), (1.0, True), (False, False)):
        (message,) = convert(record(messages=[turn("assistant", "x") | {key: value}])).messages
        assert message.supervised is expected


def test_columns_that_a_row_does_not_use_are_empty():
    union = {
        "messages": None,
        "conversations": [],
        "instruction": None,
        "output": None,
        "text": None,
        "input_ids": None,
    }
    chat = [turn("user", "11 12"), turn("assistant", "21 22")]
    assert convert(record(**union | {"text": "a"})) == Document("a")
    assert convert(record(**union | {"messages": chat})) == Conversation(ASKED)
    assert convert(record(**union | {"messages": chat, "conversations": chat})) == Conversation(ASKED)
    assert convert(record(**union | {"instruction": "11 12", "output": "21 22", "text": "x"})) == Conversation(ASKED)
    assert convert(record(**union | {"input_ids": [1, 2], "text": "x"})).ids.tolist() == [1, 2]
    # Asked, but not answered: no target, and the text beside it is not learned in its place.
    assert convert(record(**union | {"instruction": "x", "text": "y"})).messages[1] == Message("assistant", "")
    assert convert(record(**union)).ids.size == 0


@pytest.mark.parametrize(
    ("fields", "targets"),
    [
        ({}, None),
        ({"labels": [-100, -100, 7]}, [False, False, True]),
        ({"loss_mask": [0, 1, True]}, [False, True, True]),
        ({"labels": [5, -100, 7], "loss_mask": [0.0, 0, 1.0]}, [False, False, True]),  # the first is nobody's target
        ({"attention_mask": [1, 1, 1]}, None),
    ],
)
def test_rows_of_ids_hold_unshifted_labels(fields, targets):
    found = convert(record(input_ids=[5, 6, 7], **fields))
    assert found.ids.tolist() == [5, 6, 7]
    assert (found.is_target if targets is None else found.is_target.tolist()) == targets


@pytest.mark.parametrize(
    ("fields", "reason", "says"),
    [
        (
            {"input_ids": [5, 6], "labels": [6, 7]},
            "bad_ids",
            "labels[0] is 6, but input_ids[0] is 5. Labels are",
        ),
        ({"input_ids": [5, 6], "labels": [5]}, "bad_ids", "2 input_ids but 1 labels"),
        ({"input_ids": [5, 6], "loss_mask": [1, 2]}, "bad_ids", "0 and 1 only"),
        ({"input_ids": [5, 6], "labels": [5, -100], "loss_mask": [1, 1]}, "two_readings", "disagree at place 1"),
        ({"input_ids": [5, -1]}, "bad_ids", "from 0 to"),
        ({"input_ids": [5, True]}, "bad_ids", "whole numbers"),
        ({"input_ids": [5, 2**40]}, "bad_ids", "whole numbers"),
        ({"input_ids": "5 6"}, "bad_ids", "'5 6'"),
        ({"input_ids": [5, 0], "attention_mask": [1, 0]}, "bad_ids", "1 zeros"),
        ({"messages": [turn("user", "x")], "conversations": [turn("user", "y")]}, "two_readings", "--packing-schema"),
        ({"messages": [turn("system", "x")], "system": "y"}, "two_readings", "'x'"),
        ({"prompt": "x", "completion": [turn("assistant", "y")]}, "two_readings", "both as turns"),
        ({"messages": [turn("user", [{"type": "image", "url": "u"}])]}, "bad_part", "of type 'image'"),
        ({"messages": [turn("user", [{"type": "text", "text": "t", "image_url": "u"}])]}, "bad_part", "only text"),
        ({"messages": [turn("user", [{"type": "input_audio", "data": ""}])]}, "bad_part", "'input_audio'"),
        ({"messages": [turn("user", "x") | {"weight": 0, "loss": True}]}, "bad_weight", "contradict"),
        ({"messages": [turn("user", "x") | {"loss_weight": 0.5}]}, "bad_weight", "0.5"),
        ({"messages": [turn("assistant", "x") | {"tool_calls": [{"name": 5}]}]}, "bad_tool_calls", "function's name"),
        ({"messages": [turn("assistant", "x") | {"tool_calls": "f()"}]}, "bad_tool_calls", "'f()'"),
        ({"messages": [turn("user", "x")], "tools": "{"}, "bad_tools", "list of objects"),
        ({"messages": [], "chat_template_kwargs": {"tokenize": True}}, "bad_template_args", "Remove tokenize"),
        ({"instruction": "x", "output": "y", "history": ["z"]}, "bad_turns", "list of pairs"),
    ],
)
def test_contradictions_and_what_cannot_be_learned_are_errors(fields, reason, says):
    with pytest.raises(SampleError, match=r"^train\.jsonl:18: ") as caught:
        convert(record(**fields))
    assert caught.value.reason == reason
    assert says in str(caught.value)


@pytest.mark.usefixtures("registry")
def test_a_registered_schema_is_asked_first_and_its_name_is_taken():
    def own(row):
        return Document(row.fields["text"].upper())

    register_schema("shout", lambda fields: fields.get("loud") is True, own, "text, loud")
    assert convert(record(text="a", loud=True)) == Document("A")
    assert convert(record(text="a", loud=False)) == Document("a")
    assert convert(record(text="a"), "shout") == Document("A")
    register_schema("shout", lambda fields: False, own, "text, loud")  # a module that is run and imported
    with pytest.raises(ConfigError, match="taken"):
        register_schema("shout", lambda fields: True, str, "text")
    with pytest.raises(ConfigError, match="taken"):
        register_schema("auto", lambda fields: True, own, "text")


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ("", []),
        ("ua", ["ua"]),
        ("sua", ["sua"]),
        ("suasuaua", ["sua", "suaua"]),
        ("uasua", ["ua", "sua"]),
        ("ss", ["s", "s"]),
    ],
)
def test_a_system_turn_starts_a_new_conversation(roles, expected):
    names = {"s": "system", "u": "user", "a": "assistant"}
    messages = tuple(Message(names[role], str(place)) for place, role in enumerate(roles))
    parts = split_conversations(Conversation(messages))
    assert ["".join(message.role[0] for message in part.messages) for part in parts] == expected
    assert sum((part.messages for part in parts), ()) == messages


@pytest.mark.usefixtures("registry")
def test_a_schema_is_found_through_its_module(tmp_path, monkeypatch):
    (tmp_path / "own_cards.py").write_text(
        "from megatron_packing import Document, register_schema\n"
        "def card(row): return Document(row.fields['front'])\n"
        "register_schema('cards', lambda fields: 'front' in fields, card, 'front')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert convert(record(front="a", text="b"), "own_cards:cards") == Document("a")
    for name, says in (("own_cards:decks", "unknown"), ("no_such_module:cards2", "no_such_module")):
        with pytest.raises(ConfigError, match=says):
            convert(record(text="a"), name)
