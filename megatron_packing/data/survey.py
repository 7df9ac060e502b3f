"""What would the run see in this file? Answered by a look at its rows, before the first iteration.

The first rows are encoded: they show samples, lengths and targets. Many more are only read and understood, which finds
a bad row at a small part of the cost. Of a folder, the first rows of every file. Ranks may share the work: each looks
at its part, and `merged` puts the parts together in the order of rows, so that every rank says the same.

Cost: some 0.5 ms for a row encoded (the tokenizer's), 0.03 ms for one that is only read.
"""

import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from megatron_packing.data.encode import NOT_BAD_ROWS, Dropped, TokenizedSample
from megatron_packing.errors import ConfigError, SampleError

ENCODED_ROWS = 1_000
"""Rows of a path that are encoded when a run starts: enough to see a wrong format, few enough to be free."""

READ_ROWS = 100_000
"""Rows of a path that are read when a run starts, those encoded included; some seconds, shared by all ranks."""

READ_ROWS_OF_RUN = 300_000
"""Rows read when a run starts, over all of its paths; the first rows of each are encoded whatever their number."""

_ENCODING = 20
"""What encoding a row costs, in rows that are only read."""

EXAMPLES = 3
"""Rows named of each reason for which rows make no sample."""


class Rows(Protocol):
    """The rows of one data path, as the run's dataset understands them."""

    @property
    def path(self) -> str:
        """What to call them in messages."""

    def __len__(self) -> int: ...

    @property
    def starts(self) -> Sequence[int]:
        """[files + 1], the row at which each file of the path begins, and the number of rows."""

    def read(self, row: int) -> Any:
        """The row as it stands in its file; raises SampleError."""

    def understand(self, record: Any) -> object:
        """What a row that was read means, without its tokens; raises SampleError."""

    def encode(self, record: Any, row: int) -> Sequence[TokenizedSample] | Dropped:
        """The samples of a row that was read; raises SampleError."""

    def place(self, record: Any, row: int) -> str:
        """Where a row that was read stands, as file:line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Rows that follow each other and are looked at in one way."""

    rows: range
    encoded: bool
    """Or else only read and understood."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Survey:
    """Counts over the rows looked at."""

    path: str
    """What they are rows of."""
    total: int
    """Rows that there are."""
    files: int
    """Files that hold them; of a folder, several."""
    rows: int
    """Rows encoded."""
    rows_read: int
    """Further rows that were only read and understood."""
    samples: int
    """Samples that the encoded rows make. A row makes one; of some datasets, several."""
    skipped: Mapping[str, int]
    """Reason -> rows that make no sample, those with errors included."""
    examples: Mapping[str, Sequence[str]]
    """Reason -> its first rows, at most `EXAMPLES` of them, as "file:line: why"."""
    truncated: int
    """Samples that were cut to fit."""
    tokens: int
    """Sum of the samples' lengths."""
    targets: int
    """Labels that count in the loss."""
    lengths: npt.NDArray[np.int64]
    """int64 [samples], in tokens, in the order of rows."""
    first_error: SampleError | None
    """The first row that is at fault."""
    first_setting_error: SampleError | None
    """The first error that a setting causes, not a rotten row (see `NOT_BAD_ROWS`)."""

    def check(self, *, bad_rows: str = "error") -> None:
        """Refuse to start where training could not work.

        Args:
            bad_rows: "error" raises the first fault; "skip" only those that a setting causes.

        Raises:
            SampleError: see `bad_rows`.
            ConfigError: no row looked at has anything to learn.
        """
        error = self.first_error if bad_rows == "error" else self.first_setting_error
        if error is not None:
            raise error
        if not self.samples:
            counts = ", ".join(f"{reason}: {count:,}" for reason, count in self.skipped.items())
            fault = f" First fault: {self.first_error}" if self.first_error is not None else ""
            raise ConfigError(
                f"{self.path}: none of the first {self.rows:,} rows has anything to learn ({counts}). Check the file's "
                f"format, the chat format, --seq-length and --packing-overlong.{fault}"
            )

    def to_json(self) -> str:
        """Everything in it, for another process; see `from_json`."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name in ("first_error", "first_setting_error"):
            error = fields[name]
            fields[name] = None if error is None else error.args
        return json.dumps({**fields, "lengths": self.lengths.tolist()})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of `to_json`."""
        fields = json.loads(text)
        for name in ("first_error", "first_setting_error"):
            if fields[name] is not None:
                path, line, why, reason = fields[name]
                fields[name] = SampleError(path, line, why, reason=reason)
        return cls(**{**fields, "lengths": np.array(fields["lengths"], dtype=np.int64)})


def survey(rows: Rows, look_at: Sequence[Stretch], *, watch: Callable[[], object] = lambda: None) -> Survey:
    """Count what rows would give. Raises nothing over a row: see `Survey.check`.

    Args:
        look_at: which rows, in order.
        watch: called at every row, for a progress bar.
    """
    tally = _Tally()
    for stretch in look_at:
        for row in stretch.rows:
            watch()
            try:
                record = rows.read(row)
                if not stretch.encoded:
                    rows.understand(record)
                    continue
                encoded = rows.encode(record, row)
            except SampleError as error:
                tally.add_error(error)
                continue
            if isinstance(encoded, Dropped):
                tally.skip(encoded.reason, encoded.said(rows.place(record, row)))
            else:
                tally.add_samples(encoded)
    counts = {how: sum(len(one.rows) for one in look_at if one.encoded == how) for how in (True, False)}
    return tally.survey(rows, encoded=counts[True], read=counts[False])


def first_rows(starts: Sequence[int], *, encode: int = ENCODED_ROWS, most: int = READ_ROWS) -> list[Stretch]:
    """The rows that a look at a path takes, in order: the first ones of each of its files.

    Args:
        starts: [files + 1], the row at which each file begins, and the number of rows.
        encode: rows to encode, over all files; of each at least one.
        most: rows to look at, those encoded included.
    """
    files = len(starts) - 1
    stretches = []
    for start, end in itertools.pairwise(starts):
        encoded_end = min(end, start + max(1, encode // files)) if encode else start
        read_end = min(end, max(encoded_end, start + most // files))
        stretches.append(Stretch(rows=range(start, encoded_end), encoded=True))
        stretches.append(Stretch(rows=range(encoded_end, read_end), encoded=False))
    return [one for one in stretches if one.rows]


def share_of_rank(look_at: Sequence[Stretch], rank: int, ranks: int) -> list[Stretch]:
    """The part that one of several ranks takes: about as much work as the others', and rows that follow each other."""
    costs = [_ENCODING if one.encoded else 1 for one in look_at]
    work = sum(cost * len(one.rows) for cost, one in zip(costs, look_at, strict=True))
    low, high = work * rank // ranks, work * (rank + 1) // ranks
    share = []
    before = 0
    for cost, one in zip(costs, look_at, strict=True):
        # A row belongs to the rank in whose span its work begins.
        begin, end = (min(max(-(-(edge - before) // cost), 0), len(one.rows)) for edge in (low, high))
        if begin < end:
            share.append(Stretch(rows=one.rows[begin:end], encoded=one.encoded))
        before += cost * len(one.rows)
    return share


def merged(parts: Sequence[Survey]) -> Survey:
    """One survey of one file out of surveys of its parts, which must come in the order of rows."""
    first = parts[0]
    examples: dict[str, list[str]] = {}
    for part in parts:
        for reason, texts in part.examples.items():
            examples.setdefault(reason, []).extend(texts)
    return Survey(
        path=first.path,
        total=first.total,
        files=first.files,
        rows=sum(part.rows for part in parts),
        rows_read=sum(part.rows_read for part in parts),
        samples=sum(part.samples for part in parts),
        skipped=_sorted_counts(sum((Counter(part.skipped) for part in parts), Counter())),
        examples={reason: texts[:EXAMPLES] for reason, texts in sorted(examples.items())},
        truncated=sum(part.truncated for part in parts),
        tokens=sum(part.tokens for part in parts),
        targets=sum(part.targets for part in parts),
        lengths=np.concatenate([part.lengths for part in parts]),
        first_error=next((part.first_error for part in parts if part.first_error), None),
        first_setting_error=next((part.first_setting_error for part in parts if part.first_setting_error), None),
    )


def describe_losses(counts: Mapping[str, int], examples: Mapping[str, Sequence[str]]) -> list[str]:
    """Lines for the log: each reason, how many rows it took, and the first of them below one another."""
    width = max((len(reason) for reason in counts), default=0)
    lines = []
    for reason, count in sorted(counts.items()):
        first, *others = examples.get(reason, ("",))
        lines.append(f"  {reason:<{width}} {count:>9,}  {first}")
        lines += [f"  {'':<{width}} {'':>9}  {other}" for other in others]
    return lines


class _Tally:
    """Counts as they grow, row by row."""

    def __init__(self) -> None:
        self.skipped: Counter[str] = Counter()
        self.examples: dict[str, list[str]] = {}
        self.lengths: list[int] = []
        self.truncated = self.targets = 0
        self.first_error: SampleError | None = None
        self.first_setting_error: SampleError | None = None

    def add_samples(self, samples: Sequence[TokenizedSample]) -> None:
        for sample in samples:
            self.lengths.append(sample.length)
            self.truncated += sample.truncated
            self.targets += int(sample.loss_mask.sum())

    def add_error(self, error: SampleError) -> None:
        self.skip(error.reason, str(error))
        self.first_error = self.first_error or error
        if error.reason in NOT_BAD_ROWS:
            self.first_setting_error = self.first_setting_error or error

    def skip(self, reason: str, said: str) -> None:
        self.skipped[reason] += 1
        told = self.examples.setdefault(reason, [])
        if len(told) < EXAMPLES:
            told.append(said)

    def survey(self, rows: Rows, *, encoded: int, read: int) -> Survey:
        return Survey(
            path=rows.path,
            total=len(rows),
            files=len(rows.starts) - 1,
            rows=encoded,
            rows_read=read,
            samples=len(self.lengths),
            skipped=_sorted_counts(self.skipped),
            examples=dict(sorted(self.examples.items())),
            truncated=self.truncated,
            tokens=sum(self.lengths),
            targets=self.targets,
            lengths=np.array(self.lengths, dtype=np.int64),
            first_error=self.first_error,
            first_setting_error=self.first_setting_error,
        )


def _sorted_counts(counts: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items()))
