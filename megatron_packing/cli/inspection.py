"""What would a run see in this file? Answered by the data code of training itself.

Cost: Megatron's import, some seconds; then reading and tokenizing the rows looked at.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.progress import Progress, TaskID
from rich.table import Table
from rich.text import Text

from megatron_packing.cli.output import console, print_json, progress_bar, say
from megatron_packing.data import Dropped, Encoder, Source, Survey, TokenizedSample, Tokenizer, open_source, survey
from megatron_packing.data.encode import NOT_BAD_ROWS
from megatron_packing.data.tokenizer import tokenizer_errors
from megatron_packing.errors import ConfigError, SampleError

_LONG_WORK = 5_000
"""Rows from which a progress bar is worth its place: about a second of tokenizing."""

_TARGET_STYLE = "bold green"


def inspect(
    context: typer.Context,
    data: Annotated[Path, typer.Option("--data", "--data-path", help="The data file: .jsonl, .ndjson or .json.")],
    seq_length: Annotated[int, typer.Option(min=1, help="The longest sample, in tokens.")],
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            "--tokenizer-model",
            help="A Hugging Face folder, a SentencePiece .model file, or null:VOCAB for rows of numbers.",
        ),
    ] = None,
    tokenizer_type: Annotated[
        str | None, typer.Option(help="Megatron's name of the tokenizer. Default: guessed from --tokenizer.")
    ] = None,
    schema: Annotated[
        str,
        typer.Option("--schema", "--packing-schema", help="How rows are understood; auto decides row by row."),
    ] = "auto",
    row: Annotated[int | None, typer.Option(min=0, help="Show this one row, counted from 0, token by token.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Look at the first rows only. Default: all.")] = None,
    packing_overlong: Annotated[
        str, typer.Option(help="A sample longer than --seq-length: error, drop, truncate, truncate-left or split.")
    ] = "error",
    packing_chat_format: Annotated[
        str, typer.Option(help="Conversations without a chat template: auto, plain or bare.")
    ] = "auto",
    packing_train_on: Annotated[
        str, typer.Option(help="Assistant turns that are learned: all-assistant or last-assistant.")
    ] = "all-assistant",
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output instead of tables.")] = False,
) -> None:
    """Show what training would see in a data file: samples, targets, what is skipped and why.

    Takes Megatron's tokenizer flags too: --vocab-size, --chat-template, --tokenizer-special-tokens and the others.
    """
    from megatron_packing.mcore.tokenizer_flags import load_tokenizer  # imports Megatron

    source = open_source(data)
    if row is not None and row >= len(source):
        raise ConfigError(f"--row {row:,}: {data} has {len(source):,} rows, counted from 0. Choose a smaller one.")
    encoder = Encoder(
        load_tokenizer(tokenizer, tokenizer_type, context.args),
        seq_length,
        packing_overlong,
        chat=packing_chat_format,
        train_on=packing_train_on,
        schema=schema,
    )
    if row is None:
        _show_survey(_surveyed(source, encoder, limit or len(source)), encoder, as_json=as_json, total=len(source))
    else:
        _show_row(source, row, encoder, as_json=as_json)


# --- the whole file -------------------------------------------------------------------------------


class _Watched:
    """A source that moves a progress bar at every row read."""

    def __init__(self, source: Source, progress: Progress, task: TaskID) -> None:
        self._source, self._progress, self._task = source, progress, task

    @property
    def path(self) -> str:
        return self._source.path

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, row: int) -> Any:
        self._progress.advance(self._task)
        return self._source[row]


def _surveyed(source: Source, encoder: Encoder, limit: int) -> Survey:
    rows = min(limit, len(source))
    with progress_bar(wanted=rows >= _LONG_WORK) as progress:
        return survey(_Watched(source, progress, progress.add_task("tokenizing", total=rows)), encoder, rows)


def _show_survey(seen: Survey, encoder: Encoder, *, as_json: bool, total: int) -> None:
    if as_json:
        print_json(_survey_figures(seen))
    else:
        _print_survey(seen, encoder, total=total)
    fault = seen.first_error
    if fault is not None:
        by_setting = fault.reason in NOT_BAD_ROWS
        say("first fault", f"{fault}{'' if by_setting else ' (--packing-bad-rows skip lets training pass over it.)'}")
    if not seen.samples:
        say("note", f"{seen.path}: no row looked at makes a sample, so training on it would not start.")


def _survey_figures(seen: Survey) -> dict[str, Any]:
    return {
        "rows": seen.rows,
        "samples": seen.samples,
        "skipped": dict(sorted(seen.skipped.items())),
        "truncated": seen.truncated,
        "tokens": seen.tokens,
        "targets": seen.targets,
        "lengths": _spread(seen),
    }


def _spread(seen: Survey) -> dict[str, int | None]:
    """Smallest, median, 95th percentile and largest length, each one that occurs; None where there is no sample."""
    shares = {"min": 0, "p50": 50, "p95": 95, "max": 100}
    if not seen.samples:
        return dict.fromkeys(shares)
    return {name: int(np.percentile(seen.lengths, share, method="inverted_cdf")) for name, share in shares.items()}


def _print_survey(seen: Survey, encoder: Encoder, *, total: int) -> None:
    out = console()
    out.print(encoder.describe(), soft_wrap=True)
    looked_at = "all" if seen.rows == total else f"the first {seen.rows:,} of"
    table = Table(title=f"{seen.path}: {looked_at} {total:,} rows", title_justify="left")
    table.add_column("")
    table.add_column("count", justify="right")
    table.add_column("share", justify="right")
    table.add_row("samples", f"{seen.samples:,}", f"{seen.samples / seen.rows:.1%} of rows")
    for reason, count in sorted(seen.skipped.items()):
        table.add_row(f"skipped: {reason}", f"{count:,}", f"{count / seen.rows:.1%} of rows")
    table.add_row("truncated", f"{seen.truncated:,}", "")
    table.add_row("tokens", f"{seen.tokens:,}", "")
    table.add_row("targets", f"{seen.targets:,}", f"{seen.targets / seen.tokens:.1%} of tokens" if seen.tokens else "")
    table.add_section()
    for name, length in _spread(seen).items():
        table.add_row(f"length, {name}", "-" if length is None else f"{length:,}", "")
    out.print(table)


# --- one row --------------------------------------------------------------------------------------


def _show_row(source: Source, row: int, encoder: Encoder, *, as_json: bool) -> None:
    record = source[row]
    made = encoder.encode(record)
    if isinstance(made, Dropped):
        raise SampleError(
            record.path, record.line, f"makes no sample: {made.reason}. Choose another --row.", reason=made.reason
        )
    sample, *others = made
    if others:
        say("note", f"{record.path}:{record.line} is split into {len(made):,} samples; this is the first.")
    try:
        if as_json:
            print_json(_row_figures(sample, encoder.tokenizer))
        else:
            _print_row(sample, encoder.tokenizer, f"{record.path}:{record.line}")
    except tokenizer_errors() as error:
        raise SampleError(
            record.path,
            record.line,
            f"tokenizer {encoder.tokenizer.name} cannot decode its ids, the largest of which is "
            f"{int(sample.labels.max()):,} ({type(error).__name__}: {error}). Is it the tokenizer for this data?",
            reason="not_decodable",
        ) from error


def _row_figures(sample: TokenizedSample, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "tokens": sample.tokens.tolist(),
        "labels": sample.labels.tolist(),
        "loss_mask": sample.loss_mask.astype(int).tolist(),
        "position_ids": list(range(sample.length)),
        "target_texts": target_texts(sample, tokenizer),
    }


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


def _print_row(sample: TokenizedSample, tokenizer: Tokenizer, where: str) -> None:
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
