"""How is one row shown, token by token? As JSON, and as a table for humans."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table
from rich.text import Text

from megatron_packing.cli.output import console, print_json
from megatron_packing.data import Dropped, TokenizedSample, Tokenizer
from megatron_packing.data.tokenizer import tokenizer_errors
from megatron_packing.errors import SampleError

if TYPE_CHECKING:
    from megatron_packing.mcore.look import DatasetRows

_TARGET_STYLE = "bold green"


def show_row(rows: "DatasetRows", row: int, *, as_json: bool) -> None:
    """Print the samples of one row, counted from 0.

    Raises:
        SampleError: the row makes none, or its ids are none of the tokenizer's.
    """
    record = rows.read(row)
    path, _, line = rows.place(record, row).rpartition(":")
    samples = rows.encode(record, row)
    if isinstance(samples, Dropped):
        raise SampleError(
            path, int(line), f"makes no sample: {samples.reason}. Choose another --row.", reason=samples.reason
        )
    tokenizer = rows.dataset.encoder.tokenizer
    try:
        if as_json:
            print_json(_row_figures(samples, tokenizer))
        else:
            for number, sample in enumerate(samples):
                of_several = f", sample {number + 1} of {len(samples)}" if len(samples) > 1 else ""
                _print_sample(sample, tokenizer, f"{path}:{line}{of_several}")
    except tokenizer_errors() as error:
        largest = max(int(sample.labels.max()) for sample in samples)
        raise SampleError(
            path,
            int(line),
            f"tokenizer {tokenizer.name} cannot decode its ids, the largest of which is {largest:,} "
            f"({type(error).__name__}: {error}). Is it the tokenizer for this data?",
            reason="not_decodable",
        ) from error


def _row_figures(samples: Sequence[TokenizedSample], tokenizer: Tokenizer) -> dict[str, Any]:
    """Of a row's samples one after the other; positions restart in each."""
    figures: dict[str, Any] = {
        "tokens": [token for sample in samples for token in sample.tokens.tolist()],
        "labels": [label for sample in samples for label in sample.labels.tolist()],
        "loss_mask": [int(counts) for sample in samples for counts in sample.loss_mask],
        "position_ids": [position for sample in samples for position in range(sample.length)],
        "target_texts": [text for sample in samples for text in target_texts(sample, tokenizer)],
    }
    if len(samples) > 1:
        figures["sample_lengths"] = [sample.length for sample in samples]
    return figures


def target_texts(sample: TokenizedSample, tokenizer: Tokenizer) -> list[str]:
    """The text of each target, in order. Those of one unbroken run of targets, joined, are the run's decoded text."""
    edges = np.flatnonzero(np.diff(sample.loss_mask, prepend=0, append=0))
    runs = edges.reshape(-1, 2)
    return [text for start, end in runs for text in _pieces(sample.labels[start:end].tolist(), tokenizer)]


def _pieces(ids: Sequence[int], tokenizer: Tokenizer) -> Iterator[str]:
    """The text that each id adds to the ids before it.

    Ids are not decoded one by one: that would lose the spaces between words, and a character written in several
    tokens would come out as none at all. It goes to the last of its tokens, the others add "".
    """
    start = done = 0  # ids[start:done] are decoded along as context: one id's text may depend on the one before
    for end in range(1, len(ids) + 1):
        before = tokenizer.decode(ids[start:done]) if start < done else ""
        text = tokenizer.decode(ids[start:end])
        if text.endswith("\N{REPLACEMENT CHARACTER}") and end < len(ids):
            yield ""
            continue
        yield text[len(before) :]
        start, done = done, end


def _print_sample(sample: TokenizedSample, tokenizer: Tokenizer, where: str) -> None:
    targets = int(sample.loss_mask.sum())
    cut = ", truncated" if sample.truncated else ""
    table = Table(title=f"{where}: {sample.length:,} tokens, {targets:,} targets (marked *){cut}", title_justify="left")
    for name in ("position", "token", "text", "label", "text", "target"):
        table.add_column(name, justify="left" if name in ("text", "target") else "right")
    ids = [*sample.tokens.tolist(), int(sample.labels[-1])]
    shown = list(zip(map(str, ids), _shown(ids, tokenizer), strict=True))
    for position, ((token, label), counts) in enumerate(zip(pairwise(shown), sample.loss_mask, strict=True)):
        style = _TARGET_STYLE if counts else ""
        learned = (Text(cell, style=style) for cell in (*label, "*" if counts else ""))
        table.add_row(str(position), *token, *learned)
    console().print(table)


def _shown(ids: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    """The text of each id in quotes, so that spaces, line ends and terminal codes are seen and not obeyed."""
    special = {tokenizer.eos_id: "EOS", tokenizer.bos_id: "BOS"}
    return [special.get(i, repr(text)) for i, text in zip(ids, _pieces(ids, tokenizer), strict=True)]
