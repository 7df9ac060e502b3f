"""Which samples form which pack, for a whole data set? Packs ahead of time and writes the index that a run can follow.

Cost: a second for a million lengths; where few samples make a pack, a few seconds; plus one reading of the data file.
"""

from pathlib import Path
from time import perf_counter
from typing import Annotated

import numpy as np
import typer
from rich.table import Table

from megatron_packing.cli.lengths import load_lengths
from megatron_packing.cli.output import console, print_json
from megatron_packing.errors import CapacityError, ConfigError
from megatron_packing.schedule import pack_set
from megatron_packing.schedule.bounds import packs_lower_bound
from megatron_packing.schedule.pack_file import (
    PackKey,
    PackRules,
    fingerprint_of,
    fingerprint_of_lengths,
    write_pack_file,
)
from megatron_packing.topology import Topology


def pack(
    lengths: Annotated[
        Path,
        typer.Option(
            help="Lengths of all samples in tokens, in the order of the data: .npy, .txt, or a list in .json."
        ),
    ],
    data: Annotated[Path, typer.Option("--data", "--data-path", help="The data file that they are of.")],
    tokenizer: Annotated[
        Path, typer.Option("--tokenizer", "--tokenizer-model", help="The tokenizer that made them, a file or a folder.")
    ],
    out: Annotated[Path, typer.Option(help="The pack file to write.")],
    max_seqlen_per_dp_cp_rank: Annotated[int, typer.Option(min=1, help="Tokens that a rank holds of a pack.")],
    cp: Annotated[int, typer.Option("--cp", "--context-parallel-size", min=1, help="Context-parallel ranks.")] = 1,
    tp: Annotated[int, typer.Option("--tp", "--tensor-model-parallel-size", min=1, help="Tensor-parallel ranks.")] = 1,
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="Pad to multiples of TP too, as sequence parallelism asks for.")
    ] = False,
    max_seqs: Annotated[
        int | None, typer.Option("--max-seqs", "--thd-max-packed-sequences", min=1, help="Most samples in one pack.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output instead of a table.")] = False,
) -> None:
    """Pack a whole data set ahead of time and write which samples form which pack: an index, without tokens.

    It belongs to this data, this tokenizer and these lengths, and is refused where one of them has changed.
    """
    topology = Topology(cp=cp, tp=tp, sequence_parallel=sequence_parallel)
    topology.check_capacity(max_seqlen_per_dp_cp_rank)
    rules = PackRules(capacity=max_seqlen_per_dp_cp_rank * cp, alignment=topology.alignment, max_seqs=max_seqs)
    _check_is_a_list(lengths)
    all_lengths = load_lengths(lengths, seed=0)  # a list keeps its order: nothing is drawn
    _check_fit(all_lengths, lengths, rules.capacity)
    key = PackKey(
        data=fingerprint_of(data), tokenizer=fingerprint_of(tokenizer), lengths=fingerprint_of_lengths(all_lengths)
    )
    padded = -(-all_lengths // topology.alignment) * topology.alignment
    started = perf_counter()
    packed = pack_set(padded, rules.capacity, max_seqs)
    seconds = perf_counter() - started
    write_pack_file(out, packed, key=key, rules=rules)
    figures = {
        "samples": len(all_lengths),
        "packs": len(packed),
        "packs_lower_bound": packs_lower_bound(padded, rules.capacity, max_seqs),
        "fill": int(all_lengths.sum()) / (len(packed) * rules.capacity),
        "seconds": seconds,
    }
    if as_json:
        print_json({"out": str(out), **figures})
    else:
        console().print(_table(out, figures))


def _check_is_a_list(path: Path) -> None:
    """Counts by length say nothing of which sample is how long."""
    if path.suffix.lower() != ".json" or not path.is_file():
        return
    with path.open("rb") as file:
        if file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
            raise ConfigError(f"{path} holds counts by length; a pack file needs the length of each sample, in a list.")


def _check_fit(lengths: np.ndarray, path: Path, capacity: int) -> None:
    too_long = np.flatnonzero(lengths > capacity)
    if too_long.size:
        first = int(too_long[0])
        raise CapacityError(
            f"{path}: length {first}, counted from 0, is {int(lengths[first]):,} tokens; a pack holds {capacity:,} "
            f"({too_long.size:,} of {lengths.size:,} are too long). Raise --max-seqlen-per-dp-cp-rank."
        )


def _table(out: Path, figures: dict[str, float]) -> Table:
    table = Table(title=f"{out}", title_justify="left")
    table.add_column("")
    table.add_column("", justify="right")
    table.add_row("samples", f"{figures['samples']:,}")
    table.add_row("packs", f"{figures['packs']:,}")
    table.add_row("  at least", f"{figures['packs_lower_bound']:,}")
    table.add_row("fill", f"{figures['fill']:.2%}")
    table.add_row("packing, seconds", f"{figures['seconds']:.2f}")
    return table
