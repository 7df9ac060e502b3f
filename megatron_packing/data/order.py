"""Which row stands at each place of a shuffled epoch? A pure function of seed, epoch and place; nothing is kept.

A permutation that is computed and not stored: a Feistel network over the smallest square of a power of two that holds
all rows (Luby and Rackoff, 1988), walked on until it lands on a row (Black and Rogaway, 2002: that keeps it a
permutation). It needs no memory whatever the number of rows, and is the same for every rank, worker, machine and
version of numpy. Cost: some 10 microseconds a row.
"""

_ROUNDS = 8
"""Four are proven for large domains; the others even out files of a few rows."""

_MASK64 = 2**64 - 1


def shuffled_row(place: int, rows: int, *, seed: int, epoch: int) -> int:
    """The row at `place` of an epoch; over all places of the epoch, each row once.

    Args:
        place: 0 <= place < rows.
        rows: how many there are.
        seed: of the run.
        epoch: from 0; each has an order of its own.
    """
    if not 0 <= place < rows:
        raise IndexError(f"place {place} of an epoch of {rows} rows")
    half = max(1, ((rows - 1).bit_length() + 1) // 2)
    key = _mixed(_mixed(seed & _MASK64) ^ epoch)
    row = _permuted(place, half, key)
    while row >= rows:  # at most 4 values for each row, so that a few steps do
        row = _permuted(row, half, key)
    return row


def _permuted(value: int, half: int, key: int) -> int:
    """A permutation of the numbers of 2 * `half` bits."""
    mask = (1 << half) - 1
    left, right = value >> half, value & mask
    for turn in range(_ROUNDS):
        left, right = right, left ^ (_mixed(key ^ (right * _ROUNDS + turn)) & mask)
    return left << half | right


def _mixed(value: int) -> int:
    """64 bits, each of which depends on all of `value`'s: SplitMix64's finalizer (Steele, Lea and Flood, 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK64
    return value ^ value >> 31


def describe_epochs(rows: int, step: int, rows_are: str = "rows") -> str:
    """In words, what becomes of the rows at an epoch's end.

    Args:
        rows: of an epoch.
        step: rows of an optimizer step (`--global-batch-size`).
        rows_are: what to call them.
    """
    steps, left = divmod(rows, step)
    if not left:
        return f"an epoch of {rows:,} {rows_are} is {steps:,} steps of {step:,}"
    return (
        f"an epoch of {rows:,} {rows_are} is {steps:,} steps of {step:,} and {left:,} {rows_are} left, whose step the "
        f"next epoch's first {rows_are} fill up; none is left out"
    )
