import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_packing.data import (
    Conversation,
    Document,
    Dropped,
    Encoder,
    Message,
    Record,
    TokenIds,
    open_source,
    schemas,
)
from megatron_packing.errors import ConfigError, SampleError
from tests.pure.data_toys import EOS, Toy, surveyed

A = Conversation((Message("user", "11 12"), Message("assistant", "21 22")))
B = Conversation((Message("user", "13"), Message("assistant", "23")))
LONG = Conversation((Message("user", "1 2 3 4 5 6 8 9 10 11 12 13"), Message("assistant", "21 22")))


def only(made):
    """The one sample that a row makes."""
    assert not isinstance(made, Dropped), made
    (sample,) = made
    return sample


def shown(made):
    sample = only(made) if isinstance(made, list | Dropped) else made
    return sample.tokens.tolist(), sample.labels.tolist(), sample.loss_mask.tolist()


def test_eos_counts_though_pad_is_the_same_id():  # D1, D8
    encoder = Encoder(Toy(), 8)
    assert encoder.tokenizer.pad_id == EOS
    assert shown(encoder.encode(A)) == ([11, 12, 21, 22], [12, 21, 22, EOS], [0, 1, 1, 1])
    assert shown(encoder.encode(B)) == ([13, 23], [23, EOS], [1, 1])
    assert shown(encoder.encode(Document("31 32 33 7"))) == ([31, 32, 33], [32, 33, 7], [1, 1, 1])
    assert shown(encoder.encode(Document("31 32 33"))) == shown(encoder.encode(Document("31 32 33 7")))


def test_every_turn_end_of_the_assistant_counts():  # D1
    chat = Conversation((*A.messages, *B.messages))
    tokens, labels, mask = shown(Encoder(Toy(), 8).encode(chat))
    assert [*tokens, labels[-1]] == [11, 12, 21, 22, 7, 13, 23, 7]
    assert mask == [0, 1, 1, 1, 0, 1, 1]


def test_dtypes_and_true_labels_under_the_mask():
    sample = only(Encoder(Toy(), 8).encode(A))
    assert [array.dtype for array in (sample.tokens, sample.labels, sample.loss_mask)] == [
        np.int64,
        np.int64,
        np.float32,
    ]
    assert (sample.labels >= 0).all()
    assert (sample.length, sample.truncated) == (4, False)


@pytest.mark.parametrize("overlong", ["error", "drop", "truncate", "truncate-left"])
def test_seq_length_plus_one_ids_fit(overlong):  # D2
    for item, length in ((A, 4), (Document("31 32 33"), 3)):
        sample = only(Encoder(Toy(), length, overlong).encode(item))
        assert (sample.length, sample.truncated) == (length, False)
        assert sample.labels[-1] == EOS


def test_a_truncated_answer_is_dropped_and_no_eos_invented():  # D3
    truncate = Encoder(Toy(), 8, "truncate")
    assert truncate.encode(LONG) == Dropped("truncated_no_targets")
    assert Encoder(Toy(), 8, "drop").encode(LONG) == Dropped("overlong")
    cut = only(Encoder(Toy(), 12, "truncate").encode(LONG))
    assert shown(cut)[1][-2:] == [13, 21]
    assert shown(cut)[2] == [0] * 11 + [1]
    assert cut.truncated
    document = only(truncate.encode(Document("1 2 3 4 5 6 8 9 10 11 12")))
    assert (document.labels.tolist(), document.truncated) == ([2, 3, 4, 5, 6, 8, 9, 10], True)
    left = only(Encoder(Toy(), 3, "truncate-left").encode(Document("1 2 3 4 5 6")))
    assert (*shown(left), left.truncated) == ([4, 5, 6], [5, 6, EOS], [1, 1, 1], True)


@settings(deadline=None)
@given(length=st.integers(2, 40), seq_length=st.integers(1, 12), as_ids=st.booleans())
def test_a_split_text_loses_no_target_and_learns_none_twice(length, seq_length, as_ids):
    ids = [*range(10, 10 + length), EOS]
    item = TokenIds(np.array(ids)) if as_ids else Document(" ".join(map(str, ids[:-1])))
    pieces = Encoder(Toy(), seq_length, "split").encode(item)
    assert [label for piece in pieces for label in piece.labels.tolist()] == ids[1:]
    assert [token for piece in pieces for token in piece.tokens.tolist()] == ids[:-1]
    lengths = [piece.length for piece in pieces]
    assert lengths[:-1] == [seq_length] * (len(pieces) - 1)
    assert 1 <= lengths[-1] <= seq_length
    assert all(piece.loss_mask.all() and not piece.truncated for piece in pieces)
    before = [piece.labels.tolist() for piece in pieces]
    pieces[0].labels[:] = 0  # pieces are no views of one row (D9)
    assert [piece.labels.tolist() for piece in pieces[1:]] == before[1:]


def test_ids_with_a_mask_were_a_chat_and_are_never_split():
    row = Record("a.jsonl", 1, {"input_ids": [1, 2, 3, 4, 5], "labels": [-100, 2, 3, 4, 5]})
    for policy in ("split", "truncate-left"):
        with pytest.raises(SampleError, match="is for text"):
            Encoder(Toy(), 2, policy).encode(row)
    with pytest.raises(SampleError, match="ids run from 1 to 100; toy has 100 in all"):
        Encoder(Toy(), 2).encode(TokenIds(np.array([1, 100])))


def test_an_overlong_row_is_an_error_that_names_its_flags():  # D4
    for policy in ("error", "truncate-left", "split"):
        with pytest.raises(SampleError) as caught:
            Encoder(Toy(), 8, policy).encode(LONG, "train.jsonl", 18)
        assert caught.value.reason == "overlong"
        for word in ("train.jsonl:18: ", "has 14 tokens", "--seq-length is 8", "--packing-overlong"):
            assert word in str(caught.value)
    assert "a chat is never split" in str(caught.value)
    # Without targets a row is no sample, however long.
    assert Encoder(Toy(), 2).encode(Conversation(LONG.messages[:1])) == Dropped("no_targets")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"text": ""}, "empty"),
        ({"text": None}, "empty"),
        ({"text": " \n\t"}, "empty"),
        ({"text": "31"}, "too_short"),
        ({"text": "7"}, "too_short"),
        ({"text": "31 7"}, "too_short"),
        ({"messages": []}, "empty"),
        ({"messages": [{"role": "user", "content": " "}]}, "empty"),
        ({"messages": [{"role": "user", "content": "11 12"}]}, "no_targets"),
        ({"messages": [{"role": "user", "content": "11"}, {"role": "assistant", "content": " "}]}, "no_targets"),
        (
            {"messages": [{"role": "user", "content": "11"}, {"role": "assistant", "content": "2", "weight": 0}]},
            "no_targets",
        ),
    ],
)
def test_rows_with_nothing_to_learn_are_skipped_by_reason(fields, reason):  # D6
    assert Encoder(Toy(bos_id=1), 8).encode(Record("a.jsonl", 1, fields)) == Dropped(reason)


def test_bos_opens_once_and_eos_closes_once():
    encoder = Encoder(Toy(bos_id=1), 20)
    assert shown(encoder.encode(Document("31 32"))) == ([1, 31, 32], [31, 32, EOS], [1, 1, 1])
    assert shown(encoder.encode(Conversation((*A.messages, *B.messages))))[0] == [1, 11, 12, 21, 22, 7, 13, 23]
    # GPT-2's BOS is its EOS: opening with it would end a text before it begins.
    assert shown(Encoder(Toy(bos_id=EOS), 20).encode(Document("31 32")))[0] == [31, 32]


def test_which_turns_are_learned():
    chat = Conversation((*A.messages, Message("user", "14"), Message("assistant", "24", supervised=True), *B.messages))
    last = only(Encoder(Toy(), 20, train_on="last-assistant").encode(chat))
    assert last.labels[last.loss_mask > 0].tolist() == [24, EOS, 23, EOS]
    every = only(Encoder(Toy(), 20).encode(chat))
    assert every.labels[every.loss_mask > 0].tolist() == [21, 22, EOS, 24, EOS, 23, EOS]


@given(
    turns=st.lists(
        st.tuples(st.sampled_from(["system", "user", "assistant"]), st.lists(st.integers(8, 99), max_size=5)),
        max_size=6,
    ),
    seq_length=st.integers(1, 24),
    overlong=st.sampled_from(["drop", "truncate"]),
)
def test_a_sample_is_its_ids_shifted(turns, seq_length, overlong):
    """Against ids and targets written down turn by turn, for any turns, lengths and policies."""
    chat = Conversation(tuple(Message(role, " ".join(map(str, ids))) for role, ids in turns))
    ids, learned = [], []
    for role, content in turns:
        said = [*content, EOS] if role == "assistant" and content else content
        ids += said
        learned += [role == "assistant"] * len(said)
    made = Encoder(Toy(), seq_length, overlong).encode(chat)
    if isinstance(made, Dropped):
        kept = learned[1 : seq_length + 1]
        assert not any(kept) or (overlong == "drop" and len(ids) > seq_length + 1)
        return
    n = min(len(ids) - 1, seq_length)
    sample = only(made)
    assert sample.truncated == (len(ids) - 1 > seq_length)
    assert shown(sample) == (ids[:n], ids[1 : n + 1], learned[1 : n + 1])
    assert sample.loss_mask.sum() > 0


def test_samples_share_nothing():  # D9
    given_ids = np.array([11, 12, 13], dtype=np.int64)
    for item in (A, Document("31 32 33"), TokenIds(given_ids), given_ids):
        encoder = Encoder(Toy(), 8)
        first = only(encoder.encode(item))
        before = shown(first)
        first.tokens[:] = 0
        assert shown(first)[1:] == before[1:]  # tokens and labels are no views of one buffer
        first.labels[:] = 0
        first.loss_mask[:] = 0
        encoder.encode(B)
        assert shown(encoder.encode(item)) == before
    assert given_ids.tolist() == [11, 12, 13]


def test_ids_are_taken_as_they_are():
    encoder = Encoder(Toy(bos_id=1), 8)
    mask = np.array([True, False, True])
    assert shown(encoder.encode(TokenIds(np.array([5, 6, 8]), mask))) == ([5, 6], [6, 8], [0, 1])
    assert shown(encoder.encode(np.array([5, 6, 8], dtype=np.int32))) == ([5, 6], [6, 8], [1, 1])
    assert encoder.encode(np.array([5])) == Dropped("too_short")
    assert encoder.encode(np.array([])) == Dropped("empty")
    for bad in (
        TokenIds(np.zeros((2, 2), dtype=np.int64)),
        TokenIds(np.array([1, 2]), mask),
        TokenIds(np.array([0.5, 1])),
    ):
        with pytest.raises(SampleError, match=r"a\.jsonl:3: ids are"):
            encoder.encode(bad, "a.jsonl", 3)


def test_an_encoder_pickles_and_its_copy_agrees():
    encoder = Encoder(Toy(), 8, "truncate")
    data = pickle.dumps(encoder)
    assert len(data) < 2000
    assert shown(pickle.loads(data).encode(A)) == shown(encoder.encode(A))
    assert pickle.dumps(encoder) == data  # encoding leaves no trace


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"seq_length": 0}, "--seq-length is 0"),
        ({"overlong": "cut"}, "error, drop, truncate, truncate-left, split"),
        ({"train_on": "users"}, "all-assistant, last-assistant"),
        ({"chat": "chatml"}, "auto, megatron, template, plain, bare"),
        ({"chat": "template"}, "has no chat template"),
        ({"chat": "megatron"}, "is no SFTTokenizer"),
        ({"chat": "plain"}, "cannot encode"),
        ({"schema": "csv"}, "Known are auto, input_ids"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        Encoder(Toy(), **{"seq_length": 8, **settings})


def test_text_that_the_tokenizer_cannot_encode_is_the_rows_fault():
    with pytest.raises(SampleError, match=r"a\.jsonl:3: tokenizer toy cannot encode 'hello'") as caught:
        Encoder(Toy(), 8).encode(Document("hello"), "a.jsonl", 3)
    assert caught.value.reason == "not_encodable"


ROTTEN = b"""\xef\xbb\xbf{"messages":[{"role":"user","content":"11"},{"role":"assistant","content":"21"}]}

{"messages":"ping"}
{"messages":[{"role":"user","content":5}]}
{"conversations":[{"from":"human","value":"11"},{"from":"gpt","value":"21"}]}
{"instruction":"11","input":"12","output":"21"}
{"text":"00031 32"}
{"text":"31 3
"""


def test_a_rotten_file(tmp_path):  # D5
    path = tmp_path / "rotten.jsonl"
    path.write_bytes(ROTTEN)
    found = surveyed(open_source(path), Encoder(Toy(), 8))
    assert (found.rows, found.samples, found.tokens, found.targets) == (7, 4, 2 + 2 + 3 + 2, 2 + 2 + 2 + 2)
    assert found.skipped == {"bad_turns": 1, "bad_content": 1, "bad_json": 1}
    assert found.lengths.tolist() == [2, 2, 3, 2]
    with pytest.raises(SampleError, match=r"rotten\.jsonl:3: field 'messages' is 'ping'"):
        found.check()
    found.check(bad_rows="skip")


def test_a_file_with_one_good_row_starts_and_one_without_does_not(tmp_path):  # D3b, D6
    bad = '{"text":""}\n{"messages":[]}\n{"messages":[{"role":"user","content":"11"}]}\n{"text":"31"}\n{"text":"  "}\n'
    path = tmp_path / "some.jsonl"
    path.write_text(bad + '{"text":"31 32"}')
    found = surveyed(open_source(path), Encoder(Toy(), 8))
    assert found.skipped == {"empty": 3, "no_targets": 1, "too_short": 1}
    assert (found.rows, found.samples) == (6, 1)
    found.check()
    assert surveyed(open_source(path), Encoder(Toy(), 8), limit=5).samples == 0
    path.write_text(bad)
    with pytest.raises(
        ConfigError, match=r"some\.jsonl: none of the first 5 rows .*empty: 3, no_targets: 1, too_short: 1"
    ):
        surveyed(open_source(path), Encoder(Toy(), 8)).check()
    path.write_text('{"messages":[{"role":"user","content":"1 2 3 4 5 6"},{"role":"assistant","content":"21"}]}\n' * 4)
    with pytest.raises(ConfigError, match="truncated_no_targets: 4"):
        surveyed(open_source(path), Encoder(Toy(), 4, "truncate")).check()


def test_an_overlong_row_is_no_rotten_row(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text":"31 32"}\n{"text":"31 32 33 34 35"}\n')
    found = surveyed(open_source(path), Encoder(Toy(), 4))
    for bad_rows in ("error", "skip"):
        with pytest.raises(SampleError, match="has 5 tokens"):
            found.check(bad_rows=bad_rows)
    cut = surveyed(open_source(path), Encoder(Toy(), 4, "truncate"))
    assert (cut.samples, cut.truncated, cut.tokens) == (2, 1, 6)


def test_the_room_needs_neither_torch_nor_megatron():
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['torch', 'megatron', 'transformers', 'jinja2', "
        "'megatron_packing.schedule']));"
        "import megatron_packing.data as data; data.MockSource(None, 9, 0, eos_id=7, seq_length=8)[0];"
        "assert 'numpy' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


CONTENT = """
import sys
from megatron_packing.data import Encoder
from tests.pure.data_toys import Toy
print(Encoder(Toy(), 8, "truncate").fingerprint)
"""


def test_a_fingerprint_is_that_of_the_rules_in_every_process():
    usual = {"seq_length": 8, "overlong": "truncate"}
    here = Encoder(Toy(), **usual).fingerprint
    for seed in ("1", "2"):
        there = subprocess.run(
            [sys.executable, "-c", CONTENT],
            check=True,
            text=True,
            capture_output=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        assert there.stdout.strip() == here
    changes = (
        {"seq_length": 9},
        {"overlong": "drop"},
        {"train_on": "last-assistant"},
        {"schema": "text"},
        {"chat": "bare"},
    )
    others = [Encoder(Toy(), **{**usual, **change}).fingerprint for change in changes]
    others.append(Encoder(Toy(fingerprint="other words"), **usual).fingerprint)
    assert others[4] == here  # of numbers, bare is what auto takes: the same rules
    assert len({here, *others}) == len(others)


def test_a_fingerprint_covers_the_file_of_a_users_schema(tmp_path, monkeypatch):
    monkeypatch.setattr(schemas, "SCHEMAS", dict(schemas.SCHEMAS))
    monkeypatch.syspath_prepend(tmp_path)
    found = {Encoder(Toy(), 8).fingerprint}
    for body in ("x", "y"):
        (tmp_path / "own_rows.py").write_text(
            "from megatron_packing import Document, register_schema\n"
            f"def convert(row): return Document(row.fields[{body!r}])\n"
            "register_schema('own', lambda fields: 'x' in fields, convert, 'x')\n"
        )
        sys.modules.pop("own_rows", None)
        schemas.SCHEMAS.pop("own", None)
        found.add(Encoder(Toy(), 8, schema="own_rows:own").fingerprint)
    assert len(found) == 3
