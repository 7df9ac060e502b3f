"""One process that forks, one cache of finished runs, and the data files that runs train on, for the whole session."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runs.harness import Runner


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    runner = Runner(tmp_path_factory.mktemp("runs"))
    yield runner
    runner.close()


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """400 chats of 3 to 60 tokens in the toy vocabulary: a prompt, and an answer that continues it."""
    rng = random.Random(0)
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    path.write_text("\n".join(json.dumps(_chat(rng)) for _ in range(400)) + "\n", encoding="utf-8")
    return path


def _chat(rng: random.Random) -> dict:
    start, prompt, answer = rng.randrange(250), rng.randint(2, 20), rng.randint(1, 40)
    words = [str((start + step) % 250) for step in range(prompt + answer)]
    return {
        "messages": [
            {"role": "user", "content": " ".join(words[:prompt])},
            {"role": "assistant", "content": " ".join(words[prompt:])},
        ]
    }
