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
    [(speaker, "user") for speaker in ("human", "user", "User")]
    + [(speaker, "assistant") for speaker in ("gpt", "assistant", "model", "chatgpt", "bing", "bard", "function_call")]
    + [(speaker, "tool") for speaker in ("tool", "function", "observation")]
    + [("system", "system")],
)
def test_speakers(speaker, role):
    assert convert(record(conversations=[{"from": speaker, "value": "x"}])) == Conversation((Message(role, "x"),))


@pytest.mark.parametrize(
    ("fields", "reason", "says"),
    [
        ({"messages": "ping"}, "bad_turns", "'ping'; it must be a list"),
        ({"messages": ["ping"]}, "bad_turns", "messages[0]"),
        ({"messages": [turn("user", 5)]}, "bad_content", "5 (int)"),
        ({"messages": [turn("user", [{"type": "text"}])]}, "bad_content", "string"),
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
        ({"body": "x", "id": 1}, "unknown_schema", "fields found: body, id. Known: messages (messages: role, content)"),
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
    with pytest.raises(ConfigError, match="auto, messages, conversations, alpaca, text"):
        convert(row, "chatml")


def test_a_turn_may_say_whether_it_is_learned_and_carry_what_templates_read():
    calls = [{"function": {"name": "f", "arguments": {}}}]
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
