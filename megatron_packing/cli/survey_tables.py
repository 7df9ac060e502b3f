"""How is a survey of files shown? As JSON, and as tables for humans."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.table import Table

from megatron_packing.cli.output import console
from megatron_packing.data import Survey

_MOST_BINS = 16
_BAR_COLUMNS = 40
_MOST_FILES = 30
"""Files that the table lists."""
_EXAMPLE_COLUMNS = 160
"""Of an example's text; a whole schema list in every row hides the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SurveyedPath:
    """One file of a data path, and what it is read for."""

    path: str
    """The file; of data that lie in none, the path as the user gave it."""
    seen: Survey
    total_rows: int
    """Rows that it has."""
    uses: tuple[str, ...]
    """Its split and its weight, in words; see `DataPath`."""
    rows_by_split: Mapping[str, int]
    """train, valid, test -> rows of the file in it, as --split or the flag that names it says."""


def figures(total: Survey, paths: Sequence[SurveyedPath]) -> dict[str, Any]:
    """What --json prints: over all paths, and for each."""
    return {
        **_figures_of(total),
        "examples": {reason: list(texts) for reason, texts in total.examples.items()},
        "files": [
            {
                "path": one.path,
                "total_rows": one.total_rows,
                "uses": list(one.uses),
                "rows_by_split": dict(one.rows_by_split),
                **_figures_of(one.seen),
                "examples": {reason: list(texts) for reason, texts in one.seen.examples.items()},
            }
            for one in paths
        ],
    }


def _figures_of(seen: Survey) -> dict[str, Any]:
    return {
        "rows": seen.rows,
        "samples": seen.samples,
        "skipped": dict(seen.skipped),
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


# --- for humans -----------------------------------------------------------------------------------


def print_tables(total: Survey, paths: Sequence[SurveyedPath], told: str) -> None:
    """The way from rows to samples, each path, what is skipped, and how long samples are."""
    out = console()
    out.print(told, soft_wrap=True)
    out.print(_paths_table(total, paths))
    if total.skipped:
        out.print(_skipped_table(total))
    if total.samples:
        out.print(_lengths_table(total))


def _paths_table(total: Survey, paths: Sequence[SurveyedPath]) -> Table:
    table = Table(title=_title(paths), title_justify="left")
    uses = any(one.uses for one in paths)
    splits = [name for name in ("train", "valid", "test") if any(one.rows_by_split.get(name) for one in paths)]
    for name in ("path", *(["read for"] if uses else [])):
        table.add_column(name, overflow="fold")
    columns = ("rows", *splits, "samples", "skipped", "truncated", "tokens", "targets", "share")
    for name in columns:
        table.add_column(name, justify="right")
    for one in paths[:_MOST_FILES]:
        words = [one.path, *([", ".join(one.uses)] if uses else [])]
        by_split = [f"{one.rows_by_split.get(name, 0):,}" for name in splits]
        table.add_row(*words, f"{one.seen.rows:,}", *by_split, *_counts(one.seen))
    if len(paths) > _MOST_FILES:
        table.add_row(f"and {len(paths) - _MOST_FILES:,} more (--json lists all)")
    if len(paths) > 1:
        table.add_section()
        sums = [f"{sum(one.rows_by_split.get(name, 0) for one in paths):,}" for name in splits]
        table.add_row("all", *([""] if uses else []), f"{total.rows:,}", *sums, *_counts(total))
    return table


def _title(paths: Sequence[SurveyedPath]) -> str:
    rows, total = sum(one.seen.rows for one in paths), sum(one.total_rows for one in paths)
    looked_at = f"all {total:,} rows" if rows == total else f"the first {rows:,} of {total:,} rows"
    return f"{paths[0].path if len(paths) == 1 else f'{len(paths):,} files'}: {looked_at}"


def _counts(seen: Survey) -> list[str]:
    share = f"{seen.targets / seen.tokens:.1%} of tokens" if seen.tokens else ""
    skipped = sum(seen.skipped.values())
    return [f"{count:,}" for count in (seen.samples, skipped, seen.truncated, seen.tokens, seen.targets)] + [share]


def _skipped_table(total: Survey) -> Table:
    table = Table(title="rows that make no sample", title_justify="left")
    table.add_column("reason")
    table.add_column("rows", justify="right")
    table.add_column("share", justify="right")
    table.add_column("the first of them", overflow="fold")
    for reason, count in total.skipped.items():
        texts = [_shortened(text) for text in total.examples[reason]]
        table.add_row(f"skipped: {reason}", f"{count:,}", f"{count / total.rows:.1%} of rows", "\n".join(texts))
    return table


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _EXAMPLE_COLUMNS else line[: _EXAMPLE_COLUMNS - 3] + "..."


def _lengths_table(total: Survey) -> Table:
    spread = ", ".join(f"{name} {length:,}" for name, length in _spread(total).items())
    table = Table(title=f"length, in tokens: {spread}", title_justify="left")
    table.add_column("tokens", justify="right")
    table.add_column("samples", justify="right")
    table.add_column("share", justify="right")
    table.add_column("")
    edges, counts = histogram(total.lengths)
    for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True):
        bar = "#" * int(np.ceil(_BAR_COLUMNS * count / max(counts)))
        shortest = max(low, 1)
        span = f"{shortest:,}" if high - shortest == 1 else f"{shortest:,} to {high - 1:,}"
        table.add_row(span, f"{count:,}", f"{count / total.samples:.1%}", bar)
    return table


def histogram(lengths: npt.NDArray[np.int64], most_bins: int = _MOST_BINS) -> tuple[list[int], list[int]]:
    """Counts over spans of one width, which is 1, 2 or 5 times a power of 10.

    Args:
        lengths: int64 [N], at least one of them, each at least 1.
        most_bins: spans, counted from 0 tokens.

    Returns:
        edges: [bins + 1]; span i holds lengths from edges[i] up to, not including, edges[i + 1].
        counts: [bins]; they sum to N.
    """
    longest = int(lengths.max())
    steps = (factor * 10**power for power in range(19) for factor in (1, 2, 5))
    width = next(step for step in steps if longest // step < most_bins)
    counts = np.bincount(lengths // width)
    first = int(np.flatnonzero(counts)[0])
    return [width * place for place in range(first, len(counts) + 1)], counts[first:].tolist()
