"""Rows of chosen and rejected answers: every usual layout, and only the answers are learned."""

from typing import Any

import pytest

from megatron_packing.data import Conversation, Pair, Record, convert_pair
from megatron_packing.errors import SampleError

GOOD, BAD = "good answer", "bad answer"


def understood(fields: dict[str, Any]) -> Pair:
    return convert_pair(Record("pairs.jsonl", 3, fields))


def said(side: Conversation) -> list[tuple[str, str]]:
    return [(turn.role, turn.content) for turn in side.messages]


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


ASKED = ("user", "why?")
LAYOUTS: dict[str, tuple[dict[str, Any], list[tuple[str, str]]]] = {
    "conversations": (
        {
            "conversations": [{"from": "system", "value": "be good"}, {"from": "human", "value": "why?"}],
            "chosen": {"from": "gpt", "value": GOOD},
            "rejected": {"from": "gpt", "value": BAD},
        },
        [("system", "be good"), ASKED],
    ),
    "messages": ({"messages": [user("why?")], "chosen": assistant(GOOD), "rejected": assistant(BAD)}, [ASKED]),
    "texts": ({"prompt": "why?", "chosen": GOOD, "rejected": BAD}, [ASKED]),
    "a system text": (
        {"prompt": "why?", "system": "be good", "chosen": GOOD, "rejected": BAD},
        [("system", "be good"), ASKED],
    ),
    "lists of turns": ({"prompt": [user("why?")], "chosen": [assistant(GOOD)], "rejected": [assistant(BAD)]}, [ASKED]),
    "instruction": (
        {"instruction": "why", "input": "this?", "chosen": GOOD, "rejected": BAD},
        [("user", "why\n\nthis?")],
    ),
    "whole conversations": (
        {"chosen": [user("why?"), assistant(GOOD)], "rejected": [user("why?"), assistant(BAD)]},
        [ASKED],
    ),
    "longer conversations": (
        {
            "chosen": [user("a"), assistant("b"), user("why?"), assistant(GOOD)],
            "rejected": [user("a"), assistant("b"), user("why?"), assistant(BAD)],
        },
        [("user", "a"), ("assistant", "b"), ASKED],
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name: str) -> None:
    fields, prompt = LAYOUTS[name]
    pair = understood(fields)
    assert said(pair.chosen) == [*prompt, ("assistant", GOOD)]
    assert said(pair.rejected) == [*prompt, ("assistant", BAD)]


def test_only_the_answer_is_learned_and_may_be_several_turns() -> None:
    prompt = [user("a"), {**assistant("b"), "weight": 1}, user("why?")]
    chosen = [assistant("x"), user("go on"), {**assistant("y"), "weight": 0}, assistant("z")]
    pair = understood({"messages": prompt, "chosen": chosen, "rejected": BAD})
    assert [turn.supervised for turn in pair.chosen.messages] == [False, False, False, True, False, False, True]
    assert [turn.supervised for turn in pair.rejected.messages] == [False, False, False, True]


def test_equal_answers_are_still_a_pair() -> None:
    whole = [user("why?"), assistant(GOOD)]
    pair = understood({"chosen": whole, "rejected": list(whole)})
    assert said(pair.chosen) == said(pair.rejected) == [ASKED, ("assistant", GOOD)]


FAULTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "no rejected": ({"prompt": "why?", "chosen": GOOD}, "lacks rejected; found: prompt, chosen", "missing_key"),
    "no prompt": ({"chosen": GOOD, "rejected": BAD}, "do not begin alike", "missing_key"),
    "other beginnings": (
        {"chosen": [user("why?"), assistant(GOOD)], "rejected": [user("how?"), assistant(BAD)]},
        "do not begin alike",
        "missing_key",
    ),
    "a number": ({"prompt": "why?", "chosen": GOOD, "rejected": 5}, "its rejected answer", "bad_content"),
    "an unknown role": (
        {"messages": [{"role": "narrator", "content": "x"}], "chosen": GOOD, "rejected": BAD},
        "narrator",
        "unknown_role",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_name_the_row(name: str) -> None:
    fields, words, reason = FAULTS[name]
    with pytest.raises(SampleError) as caught:
        understood(fields)
    assert str(caught.value).startswith("pairs.jsonl:3: ")
    assert words in str(caught.value)
    assert caught.value.reason == reason
