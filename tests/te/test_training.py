"""Real runs on Transformer Engine's attention: from rows of a file to its own forward, and back."""

from pathlib import Path

from tests.runs.harness import Runner
from tests.runs.test_equals_unpacked import PACKED, PADDED, assert_same_training


def test_a_packed_run_equals_megatrons_own_unpacked_run(runner: Runner, chats: Path) -> None:
    reference = runner.train(PADDED, data=chats)
    packed = runner.train(PACKED, "--packing-attention te", data=chats)
    assert_same_training(packed, reference)
