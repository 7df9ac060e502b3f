"""What will a run see in its data? Every file of it looked at before step 1, the work divided over the ranks.

A rank that looks at a part tells the others what it found, so that all of them say the same, whether that is a
summary or the first bad row in the order of the file.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from megatron.core.datasets.megatron_dataset import LowLevelDataset, MegatronDataset
from megatron.core.datasets.utils import Split

from megatron_packing.data import Dropped, Record, Survey, TokenizedSample, survey
from megatron_packing.data.progress import progress_bar
from megatron_packing.data.sources import ManySource
from megatron_packing.data.survey import (
    READ_ROWS,
    READ_ROWS_OF_RUN,
    describe_losses,
    first_rows,
    merged,
    share_of_rank,
)
from megatron_packing.errors import PackingError
from megatron_packing.mcore import peers
from megatron_packing.mcore.dataset import MockVarlenDataset, PackingDatasetConfig, VarlenDataset

_LONG_WORK = 20_000
"""Rows that one rank looks at from which a progress bar is worth its place: about a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPath:
    """One path that a run reads."""

    path: str | None
    """As the user gave it; None for made-up data."""
    split: Split = Split.train
    """The split whose rules its rows must pass: training's, unless they are only evaluated."""
    uses: tuple[str, ...] = ()
    """What it is read for, in words: its split where paths are given by split, and its weight in the blend."""


def data_paths(config: PackingDatasetConfig) -> list[DataPath]:
    """Every data path of the run, once, in order; a single one without a path for made-up data."""
    if config.blend is not None:
        blends = [(Split.train, "", config.blend)]
    else:
        by_split = zip(Split, config.blend_per_split or [], strict=False)
        blends = [(split, split.name, blend) for split, blend in by_split if blend]
    found: dict[str, DataPath] = {}
    for split, name, (paths, weights) in blends:
        for place, path in enumerate(paths):
            weight = f"weight {weights[place]:g}" if weights else ""
            use = " ".join(word for word in (name, weight) if word)
            known = found.setdefault(path, DataPath(path=path, split=split))
            found[path] = dataclasses.replace(known, uses=(*known.uses, use) if use else known.uses)
    return list(found.values()) or [DataPath(path=None)]


def rows_by_split(config: PackingDatasetConfig, data: DataPath, rows: range, total: int) -> dict[str, int]:
    """train, valid, test -> how many of `rows`, which are some of a path's `total`, are in it."""
    names = [split.name for split in Split]
    if config.blend is None and config.blend_per_split is not None:
        blends = zip(names, config.blend_per_split, strict=True)
        return {name: len(rows) if blend and data.path in blend[0] else 0 for name, blend in blends}
    # As Megatron's builder cuts a path.
    bounds = [span or (0.0, 0.0) for span in config.split_matrix]
    spans = [range(max(rows.start, round(low * total)), min(rows.stop, round(high * total))) for low, high in bounds]
    return {name: len(span) for name, span in zip(names, spans, strict=True)}


class DatasetRows:
    """The rows of one path as the run's dataset sees them: its own way to read, to convert and to encode.

    Args:
        dataset_class: the run's dataset.
        config: its settings.
        data: the path.

    Raises:
        PackingError: there is no such data.
    """

    def __init__(self, dataset_class: type[VarlenDataset], config: PackingDatasetConfig, data: DataPath) -> None:
        source: LowLevelDataset = dataset_class.build_low_level_dataset(data.path, config)
        self.path = "mock data" if data.path is None else data.path
        self.dataset = dataset_class(source, data.path, np.arange(len(source)), None, data.split, config)
        self.current = 0
        """The row read last."""
        self._source: Any = source

    def __len__(self) -> int:
        return len(self._source)

    def read(self, row: int) -> Any:
        """See `megatron_packing.data.survey.Rows`; so the others."""
        self.current = row
        return self._source[row]

    def understand(self, record: Any) -> object:
        """A row's meaning, without its tokens."""
        return self.dataset.convert(record)

    def encode(self, record: Any, row: int) -> Sequence[TokenizedSample] | Dropped:
        """A row's samples."""
        return self.dataset.encode(record, row)

    def place(self, record: Any, row: int) -> str:
        """A row's file and line."""
        return f"{record.path}:{record.line}" if isinstance(record, Record) else f"{self.path}:{row + 1}"

    def named(self, error: Exception) -> PackingError:
        """`error`, raised over the row read last; where nobody foresaw it, with the row's number."""
        if isinstance(error, PackingError):
            return error
        said = PackingError(f"row {self.current + 1} of {self.path}: {peers.describe(error)}")
        said.__cause__ = error
        return said

    @property
    def starts(self) -> Sequence[int]:
        """The row at which each file of the path begins, and the number of rows."""
        return self._source.starts if isinstance(self._source, ManySource) else (0, len(self))

    @property
    def files(self) -> list[tuple[str, range]]:
        """Each file of the path, and its rows; of data that lie in no files, the path itself."""
        names = self._source.files if isinstance(self._source, ManySource) else [self.path]
        spans = (range(a, b) for a, b in itertools.pairwise(self.starts))
        return list(zip(names, spans, strict=True))

    @property
    def worth_reading(self) -> bool:
        """Whether rows can be bad at all."""
        return not isinstance(self.dataset, MockVarlenDataset)


def check_sources(dataset_class: type[MegatronDataset], config: PackingDatasetConfig) -> None:
    """Look at every file before Megatron's own barriers; called on every rank.

    Raises:
        PackingError: on every rank, when a file is missing, empty, has a bad row among those looked at, or nothing to
            learn in them.
    """
    import torch.distributed as dist
    from megatron.training.utils import print_rank_0

    from megatron_packing.comm.failures import device_of

    for line in survey_sources(dataset_class, config, group=dist.group.WORLD, device=device_of()):
        print_rank_0(f"megatron_packing: {line}")


def survey_sources(
    dataset_class: type[MegatronDataset], config: PackingDatasetConfig, *, group: Any = None, device: str = "cpu"
) -> Iterator[str]:
    """Lines for the log about each file; raises what makes a run impossible.

    Args:
        group: the ranks that share the work, all of which must take part; None for a single one.
        device: where the group's backend wants its tensors.

    Raises:
        PackingError: see `check_sources`.
    """
    if not issubclass(dataset_class, VarlenDataset):
        return
    paths = data_paths(config)
    most = min(READ_ROWS, READ_ROWS_OF_RUN // len(paths))
    for number, data in enumerate(paths):
        told, seen = _look_together(dataset_class, config, data, most=most, group=group, device=device)
        if not number:
            yield told
        seen.check(bad_rows=config.packing_bad_rows)
        yield from describe_survey(seen)


def _look_together(
    dataset_class: type[VarlenDataset],
    config: PackingDatasetConfig,
    data: DataPath,
    *,
    most: int,
    group: Any,
    device: str,
) -> tuple[str, Survey]:
    """How rows become samples, in words, and what all ranks together found in a file: the same on each of them."""
    from megatron_packing.comm.failures import raise_if_any_failed
    from megatron_packing.comm.texts import all_gather_texts

    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    rows: DatasetRows | None = None
    failure: Exception | None = None
    part: Survey | None = None
    told = ""
    try:
        rows = DatasetRows(dataset_class, config, data)
        told = rows.dataset.encoder.describe()
        part = _look(rows, most=most if rows.worth_reading else 0, rank=rank, ranks=ranks)
    except Exception as error:  # whatever a user's dataset raises must reach every rank
        failure = error if rows is None else rows.named(error)
    raise_if_any_failed(failure, group=group, device=device)
    assert part is not None, "a rank without it has failed"
    sent = all_gather_texts(part.to_json(), group=group, device=device)
    parts = [Survey.from_json(text) for text in sent]
    totals = {part.total for part in parts}
    if len(totals) > 1:
        raise PackingError(
            f"{parts[0].path} has {', '.join(f'{total:,}' for total in sorted(totals))} rows, depending on the rank. "
            "Every node must see the same file: copy it anew, or wait until it is written."
        )
    return told, merged(parts)


def _look(rows: DatasetRows, *, most: int, rank: int, ranks: int) -> Survey:
    """What this rank's rows show."""
    mine = share_of_rank(first_rows(rows.starts, most=most), rank, ranks)
    count = sum(len(stretch.rows) for stretch in mine)
    with progress_bar(wanted=rank == 0 and count >= _LONG_WORK) as progress:
        task = progress.add_task(f"looking at {rows.path}", total=count)
        return survey(rows, mine, watch=lambda: progress.advance(task))


def describe_survey(seen: Survey) -> list[str]:
    """What a look at a file found, for the log."""
    in_files, of_each = (f" in {seen.files:,} files", " (those of each file)") if seen.files > 1 else ("", "")
    head = (
        f"{seen.path}: {seen.total:,} rows{in_files}; of the first {seen.rows:,}{of_each}: {seen.samples:,} samples, "
        f"{seen.tokens:,} tokens, {seen.targets:,} targets, {seen.truncated:,} truncated"
    )
    if seen.rows_read:
        head += f"; {seen.rows_read:,} more were read"
    if not seen.skipped:
        return [f"{head}; every one is good"]
    return [f"{head}; skipped, in all {seen.rows + seen.rows_read:,}:", *describe_losses(seen.skipped, seen.examples)]
