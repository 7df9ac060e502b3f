"""What would the run see in this file? Answered by a look at its first rows, before the first iteration.

Cost: reading and tokenizing `limit` rows, a second or so at 1,000.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_packing.data.encode import NOT_BAD_ROWS, Dropped, Encoder
from megatron_packing.data.sources import Source
from megatron_packing.errors import ConfigError, SampleError

SURVEY_ROWS = 1000
"""Rows looked at when a run starts: enough to see a wrong format, few enough to be free."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Survey:
    """Counts over the rows looked at."""

    path: str
    """The source they came from."""
    rows: int
    """Rows looked at."""
    samples: int
    """Samples made: one of each row that is not skipped, more of a row that holds several or is split."""
    skipped: Mapping[str, int]
    """Reason -> rows that make none, those with errors included."""
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
            counts = ", ".join(f"{reason}: {count:,}" for reason, count in sorted(self.skipped.items()))
            fault = f" First fault: {self.first_error}" if self.first_error is not None else ""
            raise ConfigError(
                f"{self.path}: none of the first {self.rows:,} rows has anything to learn ({counts}). Check the file's "
                f"format, the chat format, --seq-length and --packing-overlong.{fault}"
            )


def survey(source: Source, encoder: Encoder, limit: int = SURVEY_ROWS) -> Survey:
    """Count what the first `limit` rows of `source` would give. Raises nothing over a row: see `Survey.check`."""
    skipped: Counter[str] = Counter()
    lengths: list[int] = []
    errors: list[SampleError] = []
    truncated = targets = 0
    rows = min(limit, len(source))
    for row in range(rows):
        try:
            made = encoder.encode(source[row], source.path, row + 1)
        except SampleError as error:
            skipped[error.reason] += 1
            errors.append(error)
            continue
        if isinstance(made, Dropped):
            skipped[made.reason] += 1
            continue
        lengths += [sample.length for sample in made]
        truncated += sum(sample.truncated for sample in made)
        targets += sum(int(sample.loss_mask.sum()) for sample in made)
    return Survey(
        path=source.path,
        rows=rows,
        samples=len(lengths),
        skipped=dict(skipped),
        truncated=truncated,
        tokens=sum(lengths),
        targets=targets,
        lengths=np.array(lengths, dtype=np.int64),
        first_error=errors[0] if errors else None,
        first_setting_error=next((error for error in errors if error.reason in NOT_BAD_ROWS), None),
    )
