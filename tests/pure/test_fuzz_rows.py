"""Rows of anything, from bytes of a file to samples: an error with file and line, a stated drop, or a right sample.

What is right is said here from the row's JSON alone: which strings a row says, and that they are in the ids, in order.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from megatron_packing.data import Dropped, Encoder, TokenizedSample, open_source
from megatron_packing.data.chat import TRAIN_ON
from megatron_packing.errors import SampleError
from tests.pure.chat_templates import TOOLS

EOS, BOS = 256, 257
FUZZ = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@dataclass(frozen=True, slots=True, kw_only=True)
class Bytes:
    """One id a byte: nothing is lost, so decoding gives the text back."""

    name: str = "bytes"
    fingerprint: str = "bytes"
    vocab_size: int = 258
    eos_id: int = EOS
    bos_id: int | None = BOS
    pad_id: int = EOS
    chat: Any = None
    conversation: Any = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


# --- rows -----------------------------------------------------------------------------------------

WORDS = ("a", "\u4f60", "\U0001f642", " ", "\n", "User:\n", "Assistant:", "[1]", '{"name": "f", "arguments": {"x": 1}}')
TEXT = st.lists(st.sampled_from(WORDS), max_size=4).map("".join) | st.text(max_size=6).filter(
    lambda text: not any("\ud800" <= c <= "\udfff" for c in text)
)
KEYS = st.sampled_from(
    [
        "messages",
        "conversations",
        "role",
        "content",
        "from",
        "value",
        "text",
        "type",
        "prompt",
        "completion",
        "instruction",
        "input",
        "output",
        "history",
        "system",
        "tools",
        "tool_calls",
        "function_call",
        "name",
        "arguments",
        "weight",
        "train",
        "loss",
        "input_ids",
        "labels",
        "loss_mask",
        "attention_mask",
        "chat_template_kwargs",
        "chosen",
        "rejected",
        "image",
        "reasoning_content",
    ]
)
NUMBERS = st.integers(-3, 300) | st.integers() | st.floats(allow_nan=False)
ANYTHING = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | TEXT, inner, max_size=3),
    max_leaves=8,
)
PART = st.fixed_dictionaries({"type": st.sampled_from(["text", "output_text"]), "text": TEXT}) | TEXT
CALL = st.fixed_dictionaries({"name": st.just("f"), "arguments": st.dictionaries(TEXT, TEXT, max_size=2)})
CONTENT = TEXT | st.none() | st.lists(PART, max_size=3) | st.tuples(PART, PART).map(list) | CALL.map(json.dumps)
ROLES = st.sampled_from(["system", "user", "assistant", "tool", "human", "gpt", "function_call", "observation"])
MORE = {"weight": st.sampled_from([0, 1, True]), "tool_calls": st.lists(CALL, max_size=1), "name": TEXT}
TURN = st.fixed_dictionaries({"role": ROLES, "content": CONTENT}, optional=MORE) | st.fixed_dictionaries(
    {"from": ROLES, "value": CONTENT}
)
TURNS = st.lists(TURN, max_size=4)
SAID = {"role": st.just("assistant"), "content": st.sampled_from(["z", " z\n", ["z", {"type": "text", "text": "z "}]])}
ANSWERED = st.tuples(st.lists(TURN, max_size=3), st.fixed_dictionaries(SAID)).map(lambda both: [*both[0], both[1]])
LONG_TEXT = st.fixed_dictionaries({"text": st.lists(TEXT, min_size=4, max_size=8).map("".join)})
IDS = st.lists(st.integers(0, 260), max_size=6)
ROW = st.one_of(
    st.fixed_dictionaries({"messages": ANSWERED}, optional={"tools": st.lists(CALL, max_size=1), "system": TEXT}),
    st.fixed_dictionaries({"messages": ANSWERED}),
    st.fixed_dictionaries({"conversations": TURNS | ANSWERED}),
    st.fixed_dictionaries({"prompt": TURNS, "completion": ANSWERED}),
    st.fixed_dictionaries({"prompt": TEXT, "completion": TEXT}),
    st.fixed_dictionaries({"instruction": TEXT, "output": TEXT | st.none()}, optional={"input": TEXT, "system": TEXT}),
    st.fixed_dictionaries({"text": TEXT}),
    IDS.flatmap(lambda ids: st.fixed_dictionaries({"input_ids": st.just(ids), "labels": st.just(ids)})),
    st.dictionaries(KEYS, ANYTHING, max_size=4),
)


@st.composite
def spoilt(draw: st.DrawFn) -> Any:
    """A row with one of its values, at any depth, replaced by anything."""
    row = json.loads(json.dumps(draw(ROW)))  # its own at every depth
    places = list(_places(row))
    if places and draw(st.integers(0, 2)) == 0:
        holder, key = draw(st.sampled_from(places))
        holder[key] = draw(ANYTHING)
    return row


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        yield value, key
        yield from _places(inner)


def _line(row: Any) -> bytes:
    try:
        return orjson.dumps(row)
    except orjson.JSONEncodeError:  # a number of more than 64 bits
        return json.dumps(row).encode()


# --- what must hold -------------------------------------------------------------------------------


def check_sample(sample: TokenizedSample, seq_length: int) -> None:
    n = sample.length
    assert 1 <= n <= seq_length
    assert sample.tokens.dtype == sample.labels.dtype == np.int64
    assert sample.loss_mask.dtype == np.float32
    assert sample.tokens.shape == sample.labels.shape == sample.loss_mask.shape == (n,)
    assert sample.tokens[1:].tolist() == sample.labels[:-1].tolist()
    assert set(sample.loss_mask.tolist()) <= {0.0, 1.0}
    assert sample.loss_mask.any()
    assert all(0 <= i < 258 for i in (*sample.tokens.tolist(), *sample.labels.tolist()))


def spoken(row: Any) -> list[str]:
    """Every text that the row says, in order, as far as one can see without knowing schemas."""
    if row.get("input_ids"):
        return [bytes(i for i in row["input_ids"] if i < 256).decode(errors="replace")]
    for name in ("messages", "conversations"):
        if row.get(name):
            return [text for turn in row[name] for text in _said(turn)]
    if isinstance(row.get("prompt"), list):
        return [text for turn in (*row["prompt"], *row["completion"]) for text in _said(turn)]
    asked = [row.get(name) for name in ("instruction", "prompt")]
    if any(asked) and ("output" in row or "completion" in row):
        answer = row.get("output") or row.get("completion") or ""
        return [next(text for text in asked if text), row.get("input") or "", answer]
    return [row["text"]] if isinstance(row.get("text"), str) and not any(asked) else []


def _said(turn: dict[str, Any]) -> list[str]:
    content = turn.get("content") or turn.get("value") or ""
    parts = content if isinstance(content, list) else [content]
    return ["".join(part if isinstance(part, str) else part["text"] for part in parts)]


def made_of(encoder: Encoder, source: Any, number: int) -> list[TokenizedSample] | Dropped | SampleError:
    try:
        return encoder.encode(source[number])
    except SampleError as error:
        return error


def check_row(encoder: Encoder, source: Any, number: int, line: int) -> list[TokenizedSample]:
    """The samples of a row, none if it makes none; nothing but a `SampleError` may be raised."""
    made = made_of(encoder, source, number)
    event(made.reason if isinstance(made, SampleError | Dropped) else "samples")
    if isinstance(made, SampleError):
        assert (made.path, made.line) == (source.path, line)
        assert made.reason
        return []
    if isinstance(made, Dropped):
        assert made.reason in {"empty", "too_short", "no_targets", "overlong", "truncated_no_targets"}
        return []
    for sample in made:
        check_sample(sample, encoder.seq_length)
    return made


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Any:
    numbers = itertools.count()
    folder = tmp_path_factory.mktemp("rows")

    def write(data: bytes) -> Any:
        path = folder / f"rows{next(numbers)}.jsonl"  # a name of its own: what was learned of a file is kept by name
        path.write_bytes(data)
        return path

    return write


LONG = Encoder(Bytes(), 4096)


@FUZZ
@given(lines=st.lists(st.binary(max_size=60).map(lambda b: b.replace(b"\n", b"")), min_size=1, max_size=8))
def test_lines_of_any_bytes(file: Any, lines: list[bytes]) -> None:
    path = file(b"{}\n" + b"\n".join(lines) + b"\n")
    numbers = [n for n, line in enumerate((b"{}", *lines), 1) if line.strip(b" \t\r")]
    with closing(open_source(path)) as source:
        assert len(source) == len(numbers)
        for number, line in enumerate(numbers):
            check_row(LONG, source, number, line)


@FUZZ
@given(row=spoilt(), train_on=st.sampled_from(TRAIN_ON), cut=st.just(b"") | st.binary(max_size=2))
def test_rows_of_any_json(file: Any, row: Any, train_on: str, cut: bytes) -> None:
    path = file(b"\n" + _line(row) + cut.replace(b"\n", b"") + b"\n")
    with closing(open_source(path)) as source:
        made = check_row(Encoder(Bytes(), 4096, train_on=train_on), source, 0, 2)
    if not made or cut.strip(b" \t\r"):
        return
    (sample,) = made
    ids = [*sample.tokens.tolist(), int(sample.labels[-1])]
    text, at = Bytes().decode(ids), 0
    for said in spoken(row):
        at = text.find(said, at)
        assert at >= 0, f"{said!r} is lost or changed in {text!r}"
        at += len(said)
    if not row.get("input_ids"):
        assert (ids[0], ids.count(BOS)) == (BOS, 1)
        assert all(ids[place + 1] == EOS for place in np.flatnonzero(np.diff(sample.loss_mask, append=0) < 0))


@FUZZ
@given(
    row=spoilt() | LONG_TEXT,
    seq_length=st.integers(1, 12),
    policy=st.sampled_from(["drop", "truncate", "truncate-left", "split"]),
)
def test_what_a_policy_leaves_is_part_of_the_whole(file: Any, row: Any, seq_length: int, policy: str) -> None:
    with closing(open_source(file(_line(row) + b"\n"))) as source:
        whole = check_row(LONG, source, 0, 1)
        parts = check_row(Encoder(Bytes(), seq_length, policy), source, 0, 1)
    if not whole:
        assert not parts
        return
    tokens, labels, mask = whole[0].tokens.tolist(), whole[0].labels.tolist(), whole[0].loss_mask.tolist()
    kept = [list(itertools.chain(*(getattr(part, name).tolist() for part in parts))) for name in FIELDS]
    if len(tokens) <= seq_length or policy == "split":
        assert not parts or kept == [tokens, labels, mask]
    elif parts:
        keep = slice(-seq_length, None) if policy == "truncate-left" else slice(seq_length)
        assert kept == [tokens[keep], labels[keep], mask[keep]]
        assert all(part.truncated for part in parts)


FIELDS = ("tokens", "labels", "loss_mask")


@FUZZ
@given(row=spoilt())
def test_rows_of_any_json_through_a_template(file: Any, row: Any, templated: Encoder) -> None:
    with closing(open_source(file(_line(row) + b"\n"))) as source:
        made = check_row(templated, source, 0, 1)
    for sample in made:
        text = templated.tokenizer.decode([*sample.tokens.tolist(), int(sample.labels[-1])])
        turns = row.get("messages") or row.get("conversations") or []
        # A call is written in the template's own way.
        kept = [turn for turn in turns if (turn.get("role") or turn.get("from")) != "function_call"]
        assert all(said in text for turn in kept for said in _said(turn))


@pytest.fixture(scope="module")
def templated() -> Encoder:
    """Byte by byte through transformers, with a template that writes tools."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    from tests.pure.data_toys import Real

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe.add_special_tokens(["</s>"])
    chat = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>")
    chat.chat_template = TOOLS.template(blocks=False)
    return Encoder(Real(chat=chat), 4096)
