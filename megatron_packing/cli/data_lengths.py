"""How long are the samples of a data file? Through training's own data code, as `inspect` reads it.

Cost: Megatron's import, some seconds; then tokenizing every row, or the first --limit of each file.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_packing.cli.inspection import surveyed
from megatron_packing.cli.output import say
from megatron_packing.cli.training_flags import at_least, in_full
from megatron_packing.errors import ConfigError

type Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DataLengths:
    """The samples of a run's data, in the order of rows."""

    name: str
    """The data, in words."""
    lengths: Int64Array
    """int64 [samples], in tokens; at least one."""
    dropped: int
    """Rows that make no sample."""
    together: int
    """Samples of each of the other rows, which must share a pack, as a preference pair must; else 1."""


def data_lengths(flags: Sequence[str], *, seq_length: int, seed: int) -> DataLengths:
    """The lengths of the samples that training with these flags would see.

    Args:
        flags: data and tokenizer flags of training, under the short names of `inspect` too, and --limit.
        seq_length: the longest sample.
        seed: of made-up data.

    Raises:
        PackingError: an unknown flag, data or a tokenizer that cannot be used, or no row that makes a sample.
    """
    from megatron_packing.mcore.data_flags import resolve_run  # imports Megatron

    sys.path.insert(0, os.getcwd())  # as a script's folder is, for --packing-dataset
    ours = ["--seq-length", str(seq_length), "--seed", str(seed)]
    run = resolve_run([*map(in_full, flags), *ours], _add_limit)
    if run.ignored:
        say("note", f"no bearing on the data, passed over: {', '.join(run.ignored)}")
    from megatron_packing.mcore.look import data_paths  # after `resolve_run`, which keeps Megatron's import quiet

    paths = data_paths(run.config)
    looks = [look for data in paths for _, look, _ in surveyed(run, data, run.args.limit)]
    name = ", ".join("mock data" if data.path is None else data.path for data in paths)
    lengths = np.concatenate([look.lengths for look in looks])
    rows, dropped = sum(look.rows for look in looks), sum(sum(look.skipped.values()) for look in looks)
    if not lengths.size:
        raise ConfigError(f"{name}: none of {rows:,} rows makes a sample. `megatron-packing inspect` says why.")
    if dropped:
        say("note", f"{dropped:,} of {rows:,} rows make no sample; `megatron-packing inspect` says why.")
    together = getattr(run.dataset_class, "kept_together", 1)  # a class of the user's own may say nothing of it
    if len(lengths) != (rows - dropped) * together:
        together = 1
        say(
            "note",
            f"{rows:,} rows make {len(lengths):,} samples; --global-batch-size counts samples here, rows in a run.",
        )
    if len(paths) > 1:
        say("note", "the paths of a blend are planned one after the other; a run mixes them by their weights.")
    return DataLengths(name=name, lengths=lengths, dropped=dropped, together=together)


def _add_limit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--limit", type=at_least(1), metavar="N")
