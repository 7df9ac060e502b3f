"""Which samples form which pack, for a whole data set? Packs ahead of time and writes the index that a run can follow.

The data are read by the code of training itself, under training's own flags, so that the run finds the same rows.

Cost: Megatron's import, some seconds; one reading and tokenizing of the data, unless --packing-token-cache or --lengths
spares it; a second of packing for a million lengths, or a few seconds where few samples make a pack.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from inspect import getdoc
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import typer
from rich.table import Table

from megatron_packing.cli.lengths import load_lengths
from megatron_packing.cli.output import console, print_json
from megatron_packing.cli.training_flags import SHORT_NAMES, help_of, in_full, resolved, wants_help
from megatron_packing.errors import CapacityError, ConfigError
from megatron_packing.schedule import PackedSet, pack_set
from megatron_packing.schedule.bounds import packs_lower_bound
from megatron_packing.schedule.pack_file import PackRules, write_pack_file

if TYPE_CHECKING:
    from megatron_packing.mcore.look import DatasetRows

_LONG_WORK = 5_000
"""Rows from which a progress bar is worth its place: about a second of tokenizing."""

_MATTER = "the packs"
_USAGE = (
    "megatron-packing pack --data FILE --tokenizer NAME --seq-length N --max-seqlen-per-dp-cp-rank N --out FILE [flags]"
)
_SHORT_NAMES = {
    **SHORT_NAMES,
    "--cp": "--context-parallel-size",
    "--tp": "--tensor-model-parallel-size",
    "--max-seqs": "--thd-max-packed-sequences",
}
_WITH_BEARING = frozenset({"--thd-max-packed-sequences", "--packing-plan"})
_PATHS_TO_SPLIT = ("--data-path", "--data-args-path")


@dataclass(slots=True)
class _Measured:
    """What the rows of a data file give."""

    lengths: np.ndarray
    """Tokens of each row, int64 [rows]; 0 where it makes no sample."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Reason -> rows without a sample."""
    truncated: int = 0


def pack(context: typer.Context) -> None:
    """Pack a whole data set ahead of time and write which rows form which pack: an index, without tokens.

    Takes every data and tokenizer flag of training. The file belongs to this data, this tokenizer and these settings,
    and a run with others refuses it. Give --max-seqlen-per-dp-cp-rank, --context-parallel-size (--cp),
    --tensor-model-parallel-size (--tp), --sequence-parallel and --thd-max-packed-sequences (--max-seqs) as to the run,
    then follow the file with --packing-plan.
    """
    words = list(context.args)
    if wants_help(words):
        print(help_of(_USAGE, getdoc(pack), _add_own_flags, matter=_MATTER))
        return
    words = _completed([in_full(word, _SHORT_NAMES) for word in words])
    run = resolved(words, _add_own_flags, matter=_MATTER, bearing=_WITH_BEARING)
    from megatron_packing.mcore.look import DatasetRows
    from megatron_packing.mcore.planned import key_of, planned_data, rules_of

    rows = DatasetRows(run.dataset_class, run.config, planned_data(run.dataset_class, run.config))
    rules = rules_of(run.packing)
    out, lengths = run.args.packing_plan, run.args.lengths
    measured = _measured(rows) if lengths is None else _Measured(lengths=_loaded(lengths, rows))
    started = perf_counter()
    packed, padded = _packed(measured.lengths, rules, rows.path)
    seconds = perf_counter() - started
    left_out = int((measured.lengths == 0).sum())
    write_pack_file(out, packed, key=key_of(rows.dataset), rules=rules, left_out=left_out)
    figures = {
        "rows": len(measured.lengths),
        "samples": len(padded),
        "skipped": dict(sorted(measured.skipped.items())),
        "truncated": measured.truncated,
        "packs": len(packed),
        "packs_lower_bound": packs_lower_bound(padded, rules.capacity, rules.max_seqs),
        "fill": int(measured.lengths.sum()) / (len(packed) * rules.capacity),
        "seconds": seconds,
    }
    if run.args.json:
        print_json({"out": out, **figures})
    else:
        console().print(_table(out, figures))


def _add_own_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("pack")
    group.add_argument(
        "--out", dest="packing_plan", required=True, metavar="FILE", help="the pack file to write (required)"
    )
    group.add_argument(
        "--lengths",
        type=Path,
        metavar="FILE",
        help="tokens of each row, in order, if they are known: .npy, .txt, or a list in .json; spares tokenizing",
    )
    group.add_argument("--json", action="store_true", help="JSON on standard output instead of a table")


def _completed(words: Sequence[str]) -> list[str]:
    """With every row in the training split, as a run that follows a plan must have it."""
    flags = {word.split("=", 1)[0] for word in words}
    splits = "--split" not in flags and any(flag in flags for flag in _PATHS_TO_SPLIT)
    return [*words, "--split", "100,0,0"] if splits else list(words)


def _measured(rows: "DatasetRows") -> _Measured:
    """Tokenizes every row.

    Raises:
        PackingError: a row is at fault, and is not to be skipped.
    """
    from megatron_packing.data import Dropped
    from megatron_packing.data.progress import progress_bar
    from megatron_packing.mcore.planned import length_of

    found = _Measured(lengths=np.zeros(len(rows), dtype=np.int64))
    with progress_bar(wanted=len(rows) >= _LONG_WORK) as progress:
        task = progress.add_task(f"tokenizing {rows.path}", total=len(rows))
        for row in range(len(rows)):
            rows.current = row
            try:
                encoded = rows.dataset.samples_of_row(row)
            except Exception as error:  # whatever a user's dataset raises
                raise rows.named(error) from error
            if isinstance(encoded, Dropped):
                found.skipped[encoded.reason] += 1
            else:
                found.truncated += any(sample.truncated for sample in encoded)
                found.lengths[row] = length_of(encoded)
            progress.advance(task)
    return found


def _loaded(path: Path, rows: "DatasetRows") -> np.ndarray:
    """The lengths that a file holds, if they can be those of the rows.

    Raises:
        ConfigError: they are not as many as the rows, or the first of them are not theirs.
    """
    from megatron_packing.mcore.planned import first_lengths

    _check_is_a_list(path)
    lengths = load_lengths(path, seed=0)  # a list keeps its order: nothing is drawn
    if len(lengths) != len(rows):
        raise ConfigError(f"{path} holds {len(lengths):,} lengths; {rows.path} has {len(rows):,} rows. Give one each.")
    first = first_lengths(rows.dataset)
    wrong = np.flatnonzero(first != lengths[: len(first)])
    if wrong.size:
        row = int(wrong[0])
        raise ConfigError(
            f"{path}: length {row}, counted from 0, is {int(lengths[row]):,}; that row of {rows.path} has "
            f"{int(first[row]):,} tokens after the shift of labels. Leave --lengths out to have the rows tokenized."
        )
    return lengths


def _check_is_a_list(path: Path) -> None:
    """Counts by length say nothing of which sample is how long."""
    if path.suffix.lower() != ".json" or not path.is_file():
        return
    with path.open("rb") as file:
        if file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
            raise ConfigError(f"{path} holds counts by length; a pack file needs the length of each sample, in a list.")


def _packed(lengths: np.ndarray, rules: PackRules, path: str) -> tuple[PackedSet, np.ndarray]:
    """The packs of the rows that make samples, and the padded lengths of those."""
    kept = np.flatnonzero(lengths)
    if not kept.size:
        raise ConfigError(f"{path}: none of its {len(lengths):,} rows makes a sample. Look at it with inspect.")
    padded = -(-lengths[kept] // rules.alignment) * rules.alignment
    _check_fit(padded, kept, path, rules.capacity)
    packed = pack_set(padded, rules.capacity, rules.max_seqs)
    of_rows = PackedSet(sample_ids=kept[packed.sample_ids], ends=packed.ends)
    return of_rows.in_order_of_data(), padded


def _check_fit(padded: np.ndarray, kept: np.ndarray, path: str, capacity: int) -> None:
    """Tokenized rows end at --seq-length, which fits; lengths from a file, or a dataset of one's own, may not."""
    too_long = np.flatnonzero(padded > capacity)
    if too_long.size:
        first = int(too_long[0])
        raise CapacityError(
            f"row {int(kept[first]) + 1} of {path} has {int(padded[first]):,} padded tokens; a pack holds {capacity:,} "
            f"({too_long.size:,} of {padded.size:,} are too long). Raise --max-seqlen-per-dp-cp-rank."
        )


def _table(out: str, figures: dict[str, Any]) -> Table:
    table = Table(title=out, title_justify="left")
    table.add_column("")
    table.add_column("", justify="right")
    table.add_row("rows", f"{figures['rows']:,}")
    for reason, count in figures["skipped"].items():
        table.add_row(f"  left out: {reason}", f"{count:,}")
    table.add_row("samples", f"{figures['samples']:,}")
    table.add_row("  truncated", f"{figures['truncated']:,}")
    table.add_row("packs", f"{figures['packs']:,}")
    table.add_row("  at least", f"{figures['packs_lower_bound']:,}")
    table.add_row("fill", f"{figures['fill']:.2%}")
    table.add_row("packing, seconds", f"{figures['seconds']:.2f}")
    return table
