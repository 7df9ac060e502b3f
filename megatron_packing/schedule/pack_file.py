"""Which samples did this data set's packs hold, when it was packed ahead of time? An index, without tokens, on disk.

Packing a whole set takes seconds and needs every length; a run only needs to know which samples form a pack. The file
holds that and nothing else, 4 to 8 bytes a sample (the number of its row), and is mapped, so that all processes of a
machine share it:

    "MPACKS2\\n" | bytes of the header, uint64 | header, JSON | 0 to 63 bytes of 0 | ends, int64 [P]
                | sample ids, uint32 or int64 [N] | BLAKE2b of all that, 16 bytes

It belongs to one *key*: the data, the tokenizer and the lengths that it was made of, each as a fingerprint. Sample 7
of other data is another sample, so a file with another key is refused, and so is one that is cut short or damaged.

Cost: writing and opening read the file once, about a second for a billion bytes; a pack is a slice.
"""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_packing.errors import ConfigError, PackingError
from megatron_packing.schedule.offline import PackedSet

type Int64Array = npt.NDArray[np.int64]

_MAGIC = b"MPACKS2\n"
_HEADER = len(_MAGIC) + 8
"""Where the header begins."""
_ALIGNMENT = 64
"""Bytes that the arrays begin at a multiple of."""
_DIGEST = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PackKey:
    """What a pack file was made of. Fingerprints: equal strings mean equal things."""

    data: str
    """Of the rows: what their source says it depends on."""
    tokenizer: str
    """Of whatever turns rows into tokens: tokenizer, chat template, truncation, a dataset's own code."""
    lengths: str
    """Of the first rows' lengths, as `fingerprint_of_lengths`: what the two above miss shows in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackRules:
    """What the packs of a file keep to."""

    capacity: int
    """Padded tokens that a pack may hold."""
    alignment: int
    """What each sample's tokens were rounded up to a multiple of."""
    max_seqs: int | None
    """Samples that a pack may hold; None means any number."""


def fingerprint_of_lengths(lengths: Int64Array) -> str:
    """Of lengths in tokens, int64 [N], in the order of the samples."""
    return hashlib.blake2b(lengths.astype("<i8").tobytes(), digest_size=_DIGEST).hexdigest()


def write_pack_file(
    path: str | os.PathLike[str], packed: PackedSet, *, key: PackKey, rules: PackRules, left_out: int = 0
) -> None:
    """Write the file whole, or not at all: under another name, then renamed.

    Args:
        path: the file; one that is there is replaced.
        packed: the packs; a sample's id is its row.
        key: what they were made of.
        rules: what they keep to; not checked.
        left_out: rows of the data that make no sample and so are in no pack.

    Raises:
        ConfigError: it cannot be written.
        PackingError: `packed` does not hold every row but those exactly once.
    """
    num_samples = len(packed.sample_ids)
    rows = num_samples + left_out
    times = np.bincount(packed.sample_ids, minlength=rows) if num_samples else np.zeros(rows)
    if len(times) != rows or (times == 1).sum() != num_samples or packed.ends[-1:].sum() != num_samples:
        raise PackingError(f"{path}: the packs to write do not hold each of {num_samples:,} samples exactly once.")
    dtype = np.dtype("<u4" if rows < 2**32 else "<i8")
    header = {
        "packs": len(packed),
        "left_out": left_out,
        "dtype": dtype.str,
        "key": asdict(key),
        "rules": asdict(rules),
    }
    place = Path(path)
    digest = hashlib.blake2b(digest_size=_DIGEST)
    with _told_as_ours(place), _replacing(place) as file:
        for block in (_head(header), packed.ends.astype("<i8").tobytes(), packed.sample_ids.astype(dtype).tobytes()):
            digest.update(block)
            file.write(block)
        file.write(digest.digest())


class PackFile:
    """The packs of a file that is whole. Pickles to its path and is opened anew, so that workers share its pages.

    Args:
        path: the file.

    Raises:
        ConfigError: there is no such file, or it is no whole pack file; says what to do.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        with _told_as_ours(self._path):
            size = self._path.stat().st_size
            # An empty file cannot be mapped.
            content = np.memmap(self._path, dtype=np.uint8, mode="r") if size else np.zeros(0, dtype=np.uint8)
        if content[: len(_MAGIC)].tobytes() != _MAGIC:
            raise ConfigError(f"{self._path} is no pack file. Write one with megatron-packing pack.")
        if hashlib.blake2b(content[:-_DIGEST], digest_size=_DIGEST).digest() != content[-_DIGEST:].tobytes():
            raise ConfigError(
                f"pack file {self._path} is cut short or damaged ({size:,} bytes, whose checksum is another). Copy it "
                "again, or write it anew with megatron-packing pack."
            )
        # What stands in front of a right checksum is what was written.
        header_ends = _HEADER + int.from_bytes(content[len(_MAGIC) : _HEADER].tobytes(), "little")
        header = json.loads(content[_HEADER:header_ends].tobytes())
        ends_at = _padded(header_ends)
        ids_at = ends_at + 8 * header["packs"]
        self._ends: npt.NDArray[Any] = content[ends_at:ids_at].view("<i8")
        self._sample_ids: npt.NDArray[Any] = content[ids_at:-_DIGEST].view(header["dtype"])
        self._checksum = content[-_DIGEST:].tobytes()
        self.left_out = int(header["left_out"])
        """Rows of the data that are in no pack."""
        self.key = PackKey(**header["key"])
        self.rules = PackRules(**header["rules"])

    @property
    def path(self) -> Path:
        """The file."""
        return self._path

    @property
    def num_samples(self) -> int:
        """Samples in all packs."""
        return len(self._sample_ids)

    @property
    def digest(self) -> int:
        """63 bits that are equal where the files are."""
        return int.from_bytes(self._checksum[:8], "little") >> 1

    def __len__(self) -> int:
        """Packs."""
        return len(self._ends)

    def __getitem__(self, pack: int) -> Int64Array:
        """The samples of pack number `pack`, int64 in an array of its own."""
        if not 0 <= pack < len(self):
            raise IndexError(f"pack {pack} of {len(self)}")
        first = int(self._ends[pack - 1]) if pack else 0
        return self._sample_ids[first : int(self._ends[pack])].astype(np.int64)

    def check(self, *, key: PackKey, rules: PackRules) -> None:
        """Nothing, if a run may follow these packs.

        Args:
            key: what the run's samples are made of.
            rules: what the run's packs must keep to.

        Raises:
            ConfigError: the file was made of something else, or its packs break the run's rules.
        """
        changed = [one.name for one in fields(PackKey) if getattr(key, one.name) != getattr(self.key, one.name)]
        if changed:
            raise ConfigError(
                f"--packing-plan {self._path}: made of other {' and other '.join(changed)} than this run's (its "
                f"{changed[0]}: {getattr(self.key, changed[0])!r}, the run's: {getattr(key, changed[0])!r}). Row "
                "numbers would mean other samples. Pack again with megatron-packing pack."
            )
        packs_seqs = self.num_samples if self.rules.max_seqs is None else self.rules.max_seqs
        for what, own, limit, wrong in (
            ("packs of up to {:,} tokens", self.rules.capacity, rules.capacity, self.rules.capacity > rules.capacity),
            ("an alignment of {:,}", self.rules.alignment, rules.alignment, self.rules.alignment != rules.alignment),
            ("packs of up to {:,} samples", packs_seqs, rules.max_seqs, rules.max_seqs and packs_seqs > rules.max_seqs),
        ):
            if wrong:
                raise ConfigError(
                    f"--packing-plan {self._path}: was made for {what.format(own)}; this run has {limit:,}. Pack again "
                    "with megatron-packing pack, or run with the file's settings."
                )

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self._path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["path"])  # type: ignore[misc]


def _head(header: dict[str, Any]) -> bytes:
    text = json.dumps(header).encode()
    start = _MAGIC + len(text).to_bytes(8, "little") + text
    return start.ljust(_padded(len(start)), b"\0")


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Any]:
    """A file that takes the place of `path` once it is whole and on the disk; if anything fails, nothing changes."""
    handle, unfinished = tempfile.mkstemp(prefix=f"{path.name}.unfinished-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(unfinished, 0o644)  # mkstemp's files are their owner's alone
        os.replace(unfinished, path)
    except BaseException:
        os.unlink(unfinished)
        raise


@contextlib.contextmanager
def _told_as_ours(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"pack file {path}: {error.strerror or error}.") from error
