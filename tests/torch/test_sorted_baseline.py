"""Is the benchmark's sorted baseline an honest one: the same samples, none cut, no more padding than it must have?"""

import importlib
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "scripts"))  # scripts/ is a folder of programs, not a package
paired = importlib.import_module("paired_pretrain")

SEQ_LENGTH = 16


def padded_row(number, length):
    tokens = torch.zeros(SEQ_LENGTH, dtype=torch.int64)
    tokens[:length] = 100 * number + torch.arange(1, length + 1)
    mask = (torch.arange(SEQ_LENGTH) < length).float()
    return {"tokens": tokens, "labels": tokens + 1, "loss_mask": mask, "position_ids": torch.arange(SEQ_LENGTH)}


def padded_microbatches(lengths, size):
    rows = [padded_row(number, length) for number, length in enumerate(lengths, start=1)]
    chunks = [rows[at : at + size] for at in range(0, len(rows), size)]
    return [{name: torch.stack([row[name] for row in chunk]) for name in paired.ROW_FIELDS} for chunk in chunks]


@pytest.mark.parametrize("lengths", [[7, 2, 16, 3, 3, 9], [5, 5, 5, 5], [1, 0, 4, 0]])  # 0: a row that was dropped
def test_sorted_microbatches_hold_the_same_samples_and_are_as_wide_as_their_longest(lengths):
    given = padded_microbatches(lengths, size=2)
    made = list(paired.SortedMicrobatches(iter(given), len(given), lengths))
    assert [batch["tokens"].shape[0] for batch in made] == [2] * len(given)
    widths = [batch["tokens"].shape[1] for batch in made]
    ordered = sorted(lengths)
    assert widths == [max(1, *ordered[at : at + 2]) for at in range(0, len(ordered), 2)]
    for name in ("tokens", "labels"):
        kept = sorted(x for batch in made for x in batch[name][batch["loss_mask"] > 0].tolist())
        assert kept == sorted(x for batch in given for x in batch[name][batch["loss_mask"] > 0].tolist())


def test_lengths_may_be_filled_in_while_drawing():
    lengths = []

    def draw():
        for batch, drawn in zip(padded_microbatches([4, 1], size=1), [4, 1], strict=True):
            lengths.append(drawn)
            yield batch

    made = list(paired.SortedMicrobatches(draw(), 2, lengths))
    assert [batch["tokens"].shape[1] for batch in made] == [1, 4]
