"""What takes the place of the script's dataset provider? Our datasets, looked at on every rank before step 1."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from megatron.core.datasets.megatron_dataset import LowLevelDataset, MegatronDataset
from megatron.core.datasets.utils import Split

from megatron_packing.config import PackingConfig
from megatron_packing.data import Dropped, TokenizedSample, survey
from megatron_packing.errors import ConfigError
from megatron_packing.mcore import peers
from megatron_packing.mcore.dataset import (
    MockVarlenDataset,
    PackingDatasetConfig,
    SFTDataset,
    VarlenDataset,
    merged_sample,
)
from megatron_packing.mcore.supply import check_requests, make_loaders


def make_provider(config: PackingConfig) -> Callable[..., Any]:
    """A dataset provider for `pretrain`: loaders for (train, valid, test), or Nones where a rank reads no data."""

    def provider(num_samples: Sequence[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
        from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
        from megatron.training import get_args

        if config.packed and vp_stage not in (None, 0):
            return None, None, None  # the first chunk's iterator feeds them all
        peers.connect()  # the first moment at which the ranks know each other and we are sure to be called on all
        dataset_class = dataset_class_of(config.dataset)
        dataset_config = dataset_config_of(config)
        _check_sources(dataset_class, dataset_config)
        several = get_args().multiple_validation_sets
        check_requests(config, dataset_config, num_samples, several=several)
        asked = [num_samples[0], None, None] if config.full_validation else list(num_samples)
        datasets = BlendedMegatronDatasetBuilder(
            dataset_class, asked, lambda: _reads_data(config, vp_stage), dataset_config
        ).build()
        return make_loaders(config, datasets, num_samples)

    provider.is_distributed = True  # type: ignore[attr-defined]  # Megatron: called on every rank
    return provider


def _reads_data(config: PackingConfig, vp_stage: int | None) -> bool:
    """Whether this rank needs a dataset.

    Packed: TP rank 0 of the first stage, which shares packs with the others. Padded: as in Megatron's own scripts,
    the first and the last stage each read their own.
    """
    from megatron.core import parallel_state
    from megatron.training.utils import is_first_or_last_pipeline_stage

    if parallel_state.get_tensor_model_parallel_rank() != 0:
        return False
    if config.packed:
        return parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    return is_first_or_last_pipeline_stage(vp_stage)


def dataset_class_of(name: str) -> type[MegatronDataset]:
    """The class behind `PackingConfig.dataset`.

    Raises:
        ConfigError: `module:Class` cannot be imported, or is no `MegatronDataset`.
    """
    own = {"varlen": VarlenDataset, "sft": SFTDataset, "mock": MockVarlenDataset}
    if name in own:
        return own[name]
    module_name, _, class_name = name.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"--packing-dataset {name}: {error}. Write module:Class, with the module importable from the script's "
            "folder or PYTHONPATH."
        ) from error
    if not (isinstance(found, type) and issubclass(found, MegatronDataset)):
        raise ConfigError(
            f"--packing-dataset {name}: not a MegatronDataset. Derive it from VarlenDataset or SFTDataset."
        )
    return found


def dataset_config_of(config: PackingConfig) -> PackingDatasetConfig:
    """Megatron's dataset settings for this run, from its global arguments."""
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training import get_args
    from megatron.training.utils import get_blend_and_blend_per_split

    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    return PackingDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=config.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        context_parallel_size=config.topology.cp,
        data_parallel_size=config.topology.dp,
        sequence_parallel_size=config.topology.tp if config.topology.sequence_parallel else 0,
        packing_overlong=config.overlong,
        packing_eval_overlong=config.eval_overlong,
        packing_bad_rows=config.bad_rows,
        packing_shuffle=config.shuffle,
        packing_chat_format=config.chat_format,
        varlen_sbhd_validation=not config.packed,
        varlen_mock_dataset_config_json=config.mock_config,
    )


def _check_sources(dataset_class: type[MegatronDataset], config: PackingDatasetConfig) -> None:
    """Look at the first rows of every file, on every rank, before Megatron's own barriers.

    Raises:
        PackingError: on every rank, when any rank finds a file that cannot be trained on.
    """
    import torch.distributed as dist
    from megatron.training.utils import print_rank_0

    from megatron_packing.comm.failures import raise_if_any_failed

    failure: Exception | None = None
    try:
        for line in survey_sources(dataset_class, config):
            print_rank_0(f"megatron_packing: {line}")
    except Exception as error:
        failure = error
    on_gpu = dist.get_backend() == "nccl"
    raise_if_any_failed(failure, group=dist.group.WORLD, device="cuda" if on_gpu else "cpu")


def survey_sources(dataset_class: type[MegatronDataset], config: PackingDatasetConfig) -> list[str]:
    """One line for the log about each file; raises what makes a run impossible.

    Raises:
        PackingError: a file is missing, empty, rotten in its first rows, or has nothing to learn in them.
    """
    if not issubclass(dataset_class, VarlenDataset):
        return []
    lines = []
    for path in _paths(config):
        rows = dataset_class.build_low_level_dataset(path, config)
        probe = dataset_class(rows, path, np.arange(len(rows)), None, _split_of(path, config), config)
        seen = survey(_Named(rows, str(path or "mock data")), _AsEncoder(probe))  # type: ignore[arg-type]
        seen.check(bad_rows=config.packing_bad_rows)
        if not lines:
            lines.append(probe.encoder.describe())
        skipped = ", ".join(f"{count:,} {reason}" for reason, count in sorted(seen.skipped.items())) or "none"
        lines.append(
            f"{seen.path}: {len(rows):,} rows; of the first {seen.rows:,}: {seen.samples:,} samples, {seen.tokens:,} "
            f"tokens, {seen.targets:,} targets, {seen.truncated:,} truncated, skipped: {skipped}"
        )
    return lines


def _paths(config: PackingDatasetConfig) -> list[str | None]:
    """Every data path of the run, once, in order; a single None for mock data."""
    blends = [config.blend] if config.blend is not None else config.blend_per_split or []
    paths = [path for blend in blends if blend is not None for path in blend[0]]
    return list(dict.fromkeys(paths)) or [None]


def _split_of(path: str | None, config: PackingDatasetConfig) -> Split:
    """The split whose rules the rows of `path` must pass: training's, unless they are only evaluated."""
    if config.blend is None and config.blend_per_split is not None:
        train = config.blend_per_split[Split.train.value]
        if train is None or path not in train[0]:
            return Split.valid
    return Split.train


class _Named:
    """A source under the name that the survey shows; a user's own source need not have one."""

    def __init__(self, rows: LowLevelDataset, path: str) -> None:
        self._rows = rows
        self.path = path

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> Any:
        return self._rows[row]


class _AsEncoder:
    """Lets the survey see rows as the dataset sees them: its own conversion, and several samples a row."""

    def __init__(self, dataset: VarlenDataset) -> None:
        self._dataset = dataset

    def encode(self, record: Any, path: str, line: int) -> TokenizedSample | Dropped:
        encoded = self._dataset.encode(record, line - 1)
        return encoded if isinstance(encoded, Dropped) else merged_sample(encoded)
