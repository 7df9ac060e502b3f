"""What would a run see in its data? Answered by the data code of training itself, under training's own flags.

Cost: Megatron's import, some seconds; then reading and tokenizing the rows looked at. Help loads nothing heavy.
"""

import argparse
from collections.abc import Iterator, Sequence
from inspect import getdoc
from typing import TYPE_CHECKING

import typer

from megatron_packing.cli.output import print_json, say
from megatron_packing.cli.training_flags import at_least, help_of, in_full, resolved, wants_help
from megatron_packing.errors import ConfigError

if TYPE_CHECKING:
    from megatron_packing.data import Survey
    from megatron_packing.mcore.data_flags import DataRun
    from megatron_packing.mcore.look import DataPath, DatasetRows

_LONG_WORK = 5_000
"""Rows from which a progress bar is worth its place: about a second of tokenizing."""

_MOCK_ROWS = 10_000
"""Made-up rows looked at where --limit is missing: there are a million of them."""

_MATTER = "the data"


def inspect(context: typer.Context) -> None:
    """Show what training would see in its data: samples, targets, what is skipped and why.

    Takes every data and tokenizer flag of training.
    """
    words = list(context.args)
    if wants_help(words):
        usage = "megatron-packing inspect --data PATH --tokenizer NAME --seq-length N [flags]"
        print(help_of(usage, getdoc(inspect), _add_own_flags, matter=_MATTER))
        return
    run = resolved(list(map(in_full, words)), _add_own_flags, matter=_MATTER)
    if run.args.row is None:
        _show_paths(run)
    else:
        _show_row(run, run.args.row)


def _add_own_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("inspect")
    group.add_argument(
        "--row",
        type=at_least(0),
        metavar="I",
        help="show this one row, counted from 0 through all paths in order, token by token",
    )
    group.add_argument(
        "--limit", type=at_least(1), metavar="N", help="look at the first N rows of each file only (default: all)"
    )
    group.add_argument("--json", action="store_true", help="JSON on standard output instead of tables")


def _rows_of(run: "DataRun", data: "DataPath") -> "DatasetRows":
    from megatron_packing.mcore.dataset import VarlenDataset
    from megatron_packing.mcore.look import DatasetRows

    if not issubclass(run.dataset_class, VarlenDataset):
        raise ConfigError(
            f"--packing-dataset {run.packing.dataset}: rows cannot be looked at one by one. Derive it from "
            "VarlenDataset or SFTDataset."
        )
    return DatasetRows(run.dataset_class, run.config, data)


# --- whole files ----------------------------------------------------------------------------------


def _show_paths(run: "DataRun") -> None:
    from megatron_packing.cli.survey_tables import SurveyedPath, figures, print_tables
    from megatron_packing.data.encode import NOT_BAD_ROWS
    from megatron_packing.data.survey import merged
    from megatron_packing.mcore.look import data_paths, rows_by_split

    surveyed: list[SurveyedPath] = []
    told = ""
    for data in data_paths(run.config):
        rows = _rows_of(run, data)
        told = told or rows.dataset.encoder.describe()
        for name, seen, span in _surveyed(rows, run.args.limit):
            by_split = rows_by_split(run.config, data, span, len(rows))
            one = SurveyedPath(path=name, seen=seen, total_rows=len(span), uses=data.uses, rows_by_split=by_split)
            surveyed.append(one)
    total = merged([one.seen for one in surveyed])
    if run.args.json:
        print_json(figures(total, surveyed))
    else:
        print_tables(total, surveyed, told)
    fault = total.first_error
    if fault is not None:
        by_setting = fault.reason in NOT_BAD_ROWS or run.packing.bad_rows == "skip"
        say("first fault", f"{fault}{'' if by_setting else ' (--packing-bad-rows skip lets training pass over it.)'}")
    for one in surveyed:
        if not one.seen.samples:
            say("note", f"{one.path}: no row looked at makes a sample, so training on it would not start.")


def surveyed(run: "DataRun", data: "DataPath", limit: int | None) -> Iterator[tuple[str, "Survey", range]]:
    """Each file of a path of the run's data: its name, what its first `limit` rows give, and all of its rows."""
    return _surveyed(_rows_of(run, data), limit)


def _surveyed(rows: "DatasetRows", limit: int | None) -> Iterator[tuple[str, "Survey", range]]:
    """Each file of a path: its name, what its first rows give, and all of its rows."""
    from megatron_packing.data import survey
    from megatron_packing.data.progress import progress_bar
    from megatron_packing.data.survey import Stretch

    limit = limit or (len(rows) if rows.worth_reading else _MOCK_ROWS)
    looked_at = sum(min(limit, len(span)) for _, span in rows.files)
    with progress_bar(wanted=looked_at >= _LONG_WORK) as progress:
        task = progress.add_task(f"tokenizing {rows.path}", total=looked_at)
        for name, span in rows.files:
            try:
                stretch = Stretch(rows=span[:limit], encoded=True)
                yield name, survey(rows, [stretch], watch=lambda: progress.advance(task)), span
            except Exception as error:  # whatever a user's dataset raises
                raise rows.named(error) from error


# --- one row --------------------------------------------------------------------------------------


def _show_row(run: "DataRun", row: int) -> None:
    from megatron_packing.cli.row_tables import show_row
    from megatron_packing.mcore.look import data_paths

    before = 0
    for data in data_paths(run.config):
        rows = _rows_of(run, data)
        if row < before + len(rows):
            show_row(rows, row - before, as_json=run.args.json)
            return
        before += len(rows)
    paths: Sequence[str] = [str(data.path) for data in data_paths(run.config)]
    raise ConfigError(f"--row {row:,}: {', '.join(paths)} has {before:,} rows, counted from 0. Choose a smaller one.")
