"""How does Megatron see our samples? As `MegatronDataset`s, so that its splits, blends and samplers work.

Subclass one of the three for a corpus of your own and name it with `--packing-dataset module:Class`:
override `build_low_level_dataset` for another kind of file, `convert` for another kind of row.
"""

import contextlib
import dataclasses
import hashlib
import inspect
import warnings
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.megatron_dataset import LowLevelDataset, MegatronDataset
from megatron.core.datasets.utils import Split
from torch import Tensor

from megatron_packing.data import (
    Conversation,
    Document,
    Dropped,
    Encoder,
    MockSource,
    Pair,
    Record,
    TokenIds,
    TokenizedSample,
    convert,
    convert_pair,
    split_conversations,
)
from megatron_packing.data.encode import NOT_BAD_ROWS
from megatron_packing.data.order import shuffled_row
from megatron_packing.data.token_cache import TokenCache, open_cache
from megatron_packing.errors import ConfigError, SampleError
from megatron_packing.mcore.indexed import open_data
from megatron_packing.mcore.tokenizer import MegatronTokenizer
from megatron_packing.schedule.pack_file import PackFile


@dataclasses.dataclass
class PackingDatasetConfig(GPTDatasetConfig):
    """Megatron's dataset settings and ours. A plain `GPTDatasetConfig` means our defaults."""

    packing_overlong: str = "error"
    """What happens to a sample longer than `sequence_length`."""
    packing_eval_overlong: str | None = None
    """The same for validation and test; None: as in training."""
    packing_bad_rows: str = "error"
    """What happens to a row that cannot become a sample."""
    packing_shuffle: bool = False
    """Give training rows a new order in each epoch, from `random_seed`; else the file's order."""
    packing_chat_format: str = "auto"
    """How conversations become tokens; see `megatron_packing.data.chat`."""
    packing_train_on: str = "all-assistant"
    """Which assistant turns are learned."""
    packing_schema: str = "auto"
    """How rows are understood."""
    packing_token_cache: str | None = None
    """Folder that keeps tokenized rows; None: rows are tokenized as they are drawn."""
    packing_plan: str | None = None
    """Pack file that training follows, checked by `mcore.planned`; None: a row is an item."""
    varlen_sbhd_validation: bool = False
    """Pad every sample to `sequence_length`: the reference run."""
    varlen_mock_dataset_config_json: str | None = None
    """Lengths of the mock dataset: inline JSON or a file."""


class VarlenDataset(MegatronDataset):
    """One sample a row, of its own length. Arguments are `MegatronDataset`'s.

    An item holds `tokens`, `labels` (int64), `loss_mask` (float32) and `position_ids` (int64), all of shape
    [padded_seq_len]; labels are already shifted; `original_seq_len` and `padded_seq_len` are int32 [1].
    With `varlen_sbhd_validation` the four fields have shape [sequence_length] and there are no lengths.

    A row that makes no sample is an item of length 0 with one more field, `dropped`, its reason: it
    leaves its step with one sample fewer. A truncated sample has one more field, `truncated`. Both have
    a field `why`: the row's file and line, and what befell it, in words.

    A text that `--packing-overlong split` cut is still one row and one consumed sample. Its item holds the pieces
    one after the other, unpadded: the four fields of shape [sum of lengths], positions restarting in each piece,
    `cu_seqlens` (int32 [pieces + 1]) and `max_seqlen` (int32 [], the longest piece) in place of the two lengths.

    With `packing_plan` an item of the training split is one pack of that file, and one consumed sample: its only field
    `pack` holds the items of the pack's rows, in order, which the packer does not part.
    """

    kept_together = 1
    """Samples of one row that must share a pack."""

    def __init__(
        self,
        dataset: LowLevelDataset,
        dataset_path: str | None,
        indices: np.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        self._packs = _planned_packs(index_split, config)
        exposed = _as_range(indices) if self._packs is None else range(len(self._packs))
        super().__init__(dataset, dataset_path, exposed, num_samples, index_split, config)
        if num_samples and not len(indices):
            raise ConfigError(
                f"{dataset_path}: --split gives the {index_split.name} split none of its {len(dataset)} rows, but "
                f"{num_samples} samples are asked of it. Change --split, add rows, or set --eval-iters 0."
            )

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: LowLevelDataset) -> int:
        """Rows of the source."""
        return len(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: GPTDatasetConfig) -> LowLevelDataset:
        """Open the rows of `dataset_path`. The result has `len()`, `[row]` and `path`."""
        if dataset_path is None:
            raise ConfigError("no data: give --data-path FILE.jsonl, or --mock-data for made-up samples.")
        return open_data(dataset_path, config.path_to_cache)

    def __len__(self) -> int:
        return len(self.indices) if self.num_samples is None else self.num_samples

    def __getitem__(self, idx: int) -> dict[str, Any]:
        number = self.row_of(idx)
        if self._packs is None:
            return self._item_of_row(number)
        return {"pack": [self._item_of_row(int(row)) for row in self._packs[number]]}

    def _item_of_row(self, row: int) -> dict[str, Any]:
        encoded = self.samples_of_row(row)
        return self._with_why(self._item(encoded), encoded, row)

    def name_of(self, idx: int) -> str:
        """What sample `idx` is made of, in words."""
        number = self.row_of(idx) + 1
        if self._packs is None:
            return f"row {number} of {self.dataset_path or 'mock data'}"
        return f"pack {number} of {self._packs.path}"

    def row_of(self, idx: int) -> int:
        """The source's row, or the plan's pack, that sample `idx` is made of; past the last of an epoch, the next
        epoch's first.

        A function of the arguments and settings alone, so that every rank, worker and resumed run agrees.
        """
        rows = len(self.indices)
        epoch, place = divmod(int(idx), rows)  # a blend counts in numpy's integers, which overflow
        if self._shuffled:
            place = shuffled_row(place, rows, seed=self.config.random_seed, epoch=epoch)
        return int(self.indices[place])

    def convert(self, row: Any) -> Conversation | Document | TokenIds | np.ndarray:
        """What a row of the source says. Override for rows of your own kind.

        Raises:
            SampleError: the row cannot be understood.
        """
        own = isinstance(self.config, PackingDatasetConfig)
        return convert(row, self.config.packing_schema if own else "auto") if isinstance(row, Record) else row

    def encode(self, record: Any, row: int) -> list[TokenizedSample] | Dropped:
        """The samples that one row of the source makes; or why it makes none.

        Raises:
            SampleError: the row, or a setting, is at fault.
        """
        return self.encoder.encode(self.convert(record), *self._origin(record, row))

    def samples_of_row(self, row: int) -> list[TokenizedSample] | Dropped:
        """The samples of a row: from `--packing-token-cache` where there is one, else encoded."""
        return self.encode_row(row) if self._token_cache is None else self._token_cache[row]

    def encode_row(self, row: int) -> list[TokenizedSample] | Dropped:
        """`encode`, with rows at fault dropped where `--packing-bad-rows skip` says so."""
        try:
            return self.encode(self.dataset[row], row)
        except SampleError as error:
            skip = isinstance(self.config, PackingDatasetConfig) and self.config.packing_bad_rows == "skip"
            if skip and error.reason not in NOT_BAD_ROWS:
                return Dropped(error.reason, str(error))
            raise

    def _with_why(self, item: dict[str, Any], encoded: list[TokenizedSample] | Dropped, row: int) -> dict[str, Any]:
        """`item`, with the place of a row that was lost or cut: such rows are rare, so that it is looked up anew."""
        if isinstance(encoded, Dropped):
            reason, why = encoded.reason, encoded.why or encoded.said(self._place(row))
        elif any(sample.truncated for sample in encoded):
            reason, why = "truncated", f"{self._place(row)}: {self._said_of_cut()}"
        else:
            return item
        if not self._padded_to_sequence_length:
            return {**item, "why": why}
        # Megatron's own loop runs it, and counts nothing; its collate takes tensors only.
        if reason not in self._told:
            self._told.add(reason)
            warnings.warn(f"megatron_packing: a row was lost or cut ({reason}), the first of some: {why}", stacklevel=2)
        return item

    def _said_of_cut(self) -> str:
        return f"cut to --seq-length {self.config.sequence_length:,}"

    @cached_property
    def _told(self) -> set[str]:
        return set()

    def _place(self, row: int) -> str:
        path, line = self._origin(self.dataset[row], row)
        return f"{path}:{line}"

    def _item(self, encoded: list[TokenizedSample] | Dropped) -> dict[str, Any]:
        if not isinstance(encoded, Dropped) and len(encoded) > 1:
            assert not self._padded_to_sequence_length, "the configuration refuses split for the padded run"
            return _pieces_item(encoded)
        sample = encoded if isinstance(encoded, Dropped) else encoded[0]
        if self._padded_to_sequence_length:
            return _padded_item(sample, self.config.sequence_length, self._tokenizer.pad_id)
        return _varlen_item(sample, self.alignment, self._tokenizer.pad_id)

    @cached_property
    def encoder(self) -> Encoder:
        """How this dataset's rows become tokens."""
        return make_encoder(self._tokenizer, self.config, self.index_split)

    @cached_property
    def cache_key(self) -> str:
        """32 hexadecimal digits over all that the samples of a row depend on; equal in every process.

        Of a class of your own its file is part of it, but not what that imports: delete the cache after such a change.

        Raises:
            ConfigError: the source does not say what it depends on.
        """
        return _digest_of(self.fingerprints("--packing-token-cache"))

    def fingerprints(self, flag: str) -> tuple[str, str]:
        """Texts that change with the source's rows, and with what becomes of a row; equal in every process.

        Args:
            flag: what needs them, for the message.

        Raises:
            ConfigError: the source does not say what it depends on.
        """
        if not hasattr(self.dataset, "fingerprint"):
            raise ConfigError(
                f"{flag} with a source of your own ({type(self.dataset).__name__}): give it a property fingerprint, a "
                "text that changes with its rows, or leave the flag out."
            )
        skip = isinstance(self.config, PackingDatasetConfig) and self.config.packing_bad_rows == "skip"
        return self.dataset.fingerprint, _digest_of((self.encoder.fingerprint, str(skip), *_code_of(type(self))))

    @cached_property
    def _token_cache(self) -> TokenCache | None:
        folder = self.config.packing_token_cache if isinstance(self.config, PackingDatasetConfig) else None
        return None if folder is None else open_cache(folder, self.cache_key)

    @property
    def alignment(self) -> int:
        """Tokens that a padded length is a multiple of; see `Topology.alignment`."""
        cp, sp = self.config.context_parallel_size or 1, self.config.sequence_parallel_size or 1
        return (2 * cp if cp > 1 else 1) * sp

    @cached_property
    def _tokenizer(self) -> MegatronTokenizer:
        return MegatronTokenizer(self.config.tokenizer)

    @property
    def _shuffled(self) -> bool:
        """Evaluation takes its rows as they stand: their order changes nothing there."""
        wanted = isinstance(self.config, PackingDatasetConfig) and self.config.packing_shuffle
        return wanted and self.index_split is Split.train

    @property
    def _padded_to_sequence_length(self) -> bool:
        return isinstance(self.config, PackingDatasetConfig) and self.config.varlen_sbhd_validation

    def _origin(self, record: Any, row: int) -> tuple[str, int]:
        """File and line for messages; a source of the user's own may know only the row."""
        return (record.path, record.line) if isinstance(record, Record) else (str(self.dataset_path), row + 1)


class SFTDataset(VarlenDataset):
    """The conversations of one row, one after the other in a buffer of `sequence_length` tokens.

    A messages list is cut at every system turn. One row is one consumed sample, however many
    conversations it holds; under a scheduler they are taken apart and packed anew.

    An item holds `tokens`, `labels`, `loss_mask`, `position_ids` of shape [sequence_length] (positions
    restart in each conversation), `cu_seqlens` (int32 [sequence_length + 1], filled up with the buffer's
    length) and `max_seqlen` (int32 [], the longest segment). The buffer's tail is a segment of its own
    that belongs to no conversation.
    """

    def encode(self, record: Any, row: int) -> list[TokenizedSample] | Dropped:
        """The samples of one row, together at most `sequence_length` tokens; or why there are none.

        Raises:
            SampleError: a conversation is at fault, or together they do not fit.
        """
        origin = self._origin(record, row)
        converted = self.convert(record)
        parts = split_conversations(converted) if isinstance(converted, Conversation) else (converted,)
        encoded = [self.encoder.encode(part, *origin) for part in parts]
        samples = [sample for made in encoded if not isinstance(made, Dropped) for sample in made]
        dropped = [made for made in encoded if isinstance(made, Dropped)]
        if not samples:
            return dropped[0] if dropped else Dropped("empty")
        if dropped:  # counted with the rows that were cut, as the rest of the row is there
            samples[-1] = dataclasses.replace(samples[-1], truncated=True)
        return self._fitted(samples, *origin)

    def _said_of_cut(self) -> str:
        return f"{super()._said_of_cut()}, or without those of its conversations that make no sample"

    def _item(self, encoded: list[TokenizedSample] | Dropped) -> dict[str, Any]:
        if isinstance(encoded, Dropped):
            return super()._item(encoded)
        return _buffer_item(encoded, self.config.sequence_length, self._tokenizer.pad_id)

    def _fitted(self, samples: list[TokenizedSample], path: str, line: int) -> list[TokenizedSample] | Dropped:
        limit = self.config.sequence_length
        total = sum(sample.length for sample in samples)
        if total <= limit:
            return samples
        policy = self.encoder.overlong
        if policy == "drop":
            return Dropped("overlong")
        if policy != "truncate":
            raise SampleError(
                path,
                line,
                f"{len(samples)} conversations have {total:,} tokens together; --seq-length is {limit:,}. Raise "
                "--seq-length, or set --packing-overlong drop or truncate.",
                reason="overlong",
            )
        return _cut_to(samples, limit)


class PreferenceDataset(VarlenDataset):
    """Pairs: a chosen and a rejected answer to one conversation, in one pack, for a loss of your own.

    A row is understood by `megatron_packing.data.convert_pair`; only the answers are targets. One row is one consumed
    sample. An item holds `together`: two items of `VarlenDataset`, the chosen answer's first, which the packer does not
    part: they become neighbouring samples of one pack (see `megatron_packing.pair_log_probs`). A pair of which one side
    makes no sample is dropped whole.
    """

    kept_together = 2

    def convert(self, row: Any) -> Pair:
        """The two conversations of a row. Override for rows of your own kind."""
        return convert_pair(row)

    def encode(self, record: Any, row: int) -> list[TokenizedSample] | Dropped:
        """The chosen and the rejected sample; or why there is no pair.

        Raises:
            SampleError: either of them, or a setting, is at fault.
        """
        pair = self.convert(record)
        samples: list[TokenizedSample] = []
        for name, side in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            try:
                encoded = self.encoder.encode(side, *self._origin(record, row))
            except SampleError as error:
                raise SampleError(error.path, error.line, f"{name}: {error.why}", reason=error.reason) from error
            if isinstance(encoded, Dropped):
                return encoded
            samples += encoded  # one: a chat is never split
        return samples

    def _item(self, encoded: list[TokenizedSample] | Dropped) -> dict[str, Any]:
        if isinstance(encoded, Dropped):
            return super()._item(encoded)
        item = {"together": [VarlenDataset._item(self, [sample]) for sample in encoded]}
        return {**item, "truncated": True} if any(sample.truncated for sample in encoded) else item


class MockVarlenDataset(VarlenDataset):
    """Made-up samples whose lengths follow `--varlen-mock-dataset-config-json`; else a `VarlenDataset`."""

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: GPTDatasetConfig) -> LowLevelDataset:
        """A source of made-up ids; `dataset_path` is ignored."""
        lengths = config.varlen_mock_dataset_config_json if isinstance(config, PackingDatasetConfig) else None
        tokenizer = MegatronTokenizer(config.tokenizer)
        return MockSource(
            lengths,
            seq_length=config.sequence_length,
            vocab_size=config.tokenizer.vocab_size,
            eos_id=tokenizer.eos_id,
            seed=config.random_seed,
        )


def _planned_packs(split: Split, config: GPTDatasetConfig) -> PackFile | None:
    """The packs that a split follows; None: its rows stand alone, as those of evaluation always do."""
    path = config.packing_plan if isinstance(config, PackingDatasetConfig) and split is Split.train else None
    return None if path is None else PackFile(path)


def _digest_of(texts: Sequence[str]) -> str:
    """32 hexadecimal digits."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:32]


def _code_of(dataset_class: type) -> list[str]:
    """Names of the class and its bases, with the content of the files of a user's own."""
    code = []
    for base in dataset_class.__mro__:
        code.append(f"{base.__module__}.{base.__qualname__}")
        if base.__module__.split(".")[0] not in ("megatron_packing", "megatron", "torch", "typing", "builtins", "abc"):
            with contextlib.suppress(OSError, TypeError):  # defined at a prompt: there is no file
                code.append(hashlib.sha256(Path(inspect.getfile(base)).read_bytes()).hexdigest())
    return code


def _as_range(indices: np.ndarray) -> Any:
    """Megatron's splits are rows in a row: two numbers, where an array would go to every worker with every row."""
    if len(indices) and (np.diff(indices) == 1).all():
        return range(int(indices[0]), int(indices[-1]) + 1)
    return indices


def make_encoder(tokenizer: MegatronTokenizer, config: GPTDatasetConfig, split: Split = Split.train) -> Encoder:
    """The encoder that `config` asks for in a split."""
    if not isinstance(config, PackingDatasetConfig):
        return Encoder(tokenizer, config.sequence_length)
    overlong = config.packing_overlong
    if split is not Split.train and config.packing_eval_overlong is not None:
        overlong = config.packing_eval_overlong
    return Encoder(
        tokenizer,
        config.sequence_length,
        overlong,
        chat=config.packing_chat_format,
        train_on=config.packing_train_on,
        schema=config.packing_schema,
    )


def _varlen_item(encoded: TokenizedSample | Dropped, alignment: int, pad_id: int) -> dict[str, Any]:
    if isinstance(encoded, Dropped):
        nothing = TokenizedSample(tokens=_no_ids(), labels=_no_ids(), loss_mask=np.zeros(0, dtype=np.float32))
        return {**_varlen_item(nothing, alignment, pad_id), "dropped": encoded.reason}
    padded = -(-encoded.length // alignment) * alignment
    item = {
        **_padded_fields(encoded, padded, pad_id),
        "original_seq_len": torch.tensor([encoded.length], dtype=torch.int32),
        "padded_seq_len": torch.tensor([padded], dtype=torch.int32),
    }
    return {**item, "truncated": True} if encoded.truncated else item


def _pieces_item(pieces: Sequence[TokenizedSample]) -> dict[str, Any]:
    merged = merged_sample(pieces)
    return {
        **_padded_fields(merged, merged.length, pad_id=0),  # nothing is padded
        "position_ids": torch.cat([torch.arange(piece.length, dtype=torch.int64) for piece in pieces]),
        "cu_seqlens": torch.from_numpy(np.cumsum([0, *(piece.length for piece in pieces)], dtype=np.int32)),
        "max_seqlen": torch.tensor(max(piece.length for piece in pieces), dtype=torch.int32),
    }


def _padded_item(encoded: TokenizedSample | Dropped, length: int, pad_id: int) -> dict[str, Any]:
    if isinstance(encoded, Dropped):  # a row without any target adds nothing to sum or count
        encoded = TokenizedSample(tokens=_no_ids(), labels=_no_ids(), loss_mask=np.zeros(0, dtype=np.float32))
    return _padded_fields(encoded, length, pad_id)


def absent_row(length: int) -> dict[str, Tensor]:
    """A row of the reference run without any target, where an evaluation has no row left."""
    return _padded_item(Dropped("absent"), length, 0)


def _padded_fields(sample: TokenizedSample, length: int, pad_id: int) -> dict[str, Tensor]:
    """Fresh tensors of `length`; padding is masked by position, whatever its id."""
    return {
        "tokens": torch.from_numpy(_extended(sample.tokens, length, pad_id)),
        "labels": torch.from_numpy(_extended(sample.labels, length, pad_id)),
        "loss_mask": torch.from_numpy(_extended(sample.loss_mask, length, 0)),
        "position_ids": torch.arange(length, dtype=torch.int64),
    }


def merged_sample(samples: Sequence[TokenizedSample]) -> TokenizedSample:
    """`samples` one after the other as one."""
    return TokenizedSample(
        tokens=np.concatenate([s.tokens for s in samples]),
        labels=np.concatenate([s.labels for s in samples]),
        loss_mask=np.concatenate([s.loss_mask for s in samples]),
        truncated=any(s.truncated for s in samples),
    )


def _buffer_item(samples: Sequence[TokenizedSample], length: int, pad_id: int) -> dict[str, Any]:
    merged = merged_sample(samples)
    edges = np.cumsum([0, *(s.length for s in samples)])
    boundaries = np.full(length + 1, length, dtype=np.int32)
    boundaries[: len(edges)] = edges
    segments = [*(s.length for s in samples), length - merged.length]
    item = {
        **_padded_fields(merged, length, pad_id),
        "position_ids": torch.cat([torch.arange(n, dtype=torch.int64) for n in segments]),
        "cu_seqlens": torch.from_numpy(boundaries),
        "max_seqlen": torch.tensor(max(segments), dtype=torch.int32),
    }
    return {**item, "truncated": True} if merged.truncated else item


def _cut_to(samples: Sequence[TokenizedSample], limit: int) -> list[TokenizedSample] | Dropped:
    """The first samples up to `limit` tokens, the last of them cut; a part without targets is left out."""
    kept: list[TokenizedSample] = []
    room = limit
    for sample in samples:
        part = sample
        if sample.length > room:
            part = TokenizedSample(
                tokens=sample.tokens[:room],
                labels=sample.labels[:room],
                loss_mask=sample.loss_mask[:room],
                truncated=True,
            )
        if part.loss_mask.any():
            kept.append(part)
        room -= part.length
        if room == 0:
            break
    if not kept:
        return Dropped("truncated_no_targets")
    return [*kept[:-1], dataclasses.replace(kept[-1], truncated=True)]  # something was cut, here or behind it


def _extended(values: np.ndarray, length: int, filler: int) -> np.ndarray:
    out = np.full(length, filler, dtype=values.dtype)
    out[: len(values)] = values
    return out


def _no_ids() -> np.ndarray:
    return np.zeros(0, dtype=np.int64)
