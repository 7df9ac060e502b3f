"""What takes the place of the script's dataset provider? Our datasets, looked at by all ranks before step 1."""

import argparse
import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any

from megatron.core.datasets.megatron_dataset import MegatronDataset

from megatron_packing.config import PackingConfig
from megatron_packing.errors import ConfigError
from megatron_packing.mcore import peers
from megatron_packing.mcore.dataset import (
    MockVarlenDataset,
    PackingDatasetConfig,
    PreferenceDataset,
    SFTDataset,
    VarlenDataset,
)
from megatron_packing.mcore.look import check_sources, data_paths
from megatron_packing.mcore.planned import follow_plan
from megatron_packing.mcore.supply import check_requests, make_loaders
from megatron_packing.mcore.token_caches import build_token_caches


def make_provider(config: PackingConfig) -> Callable[..., Any]:
    """A dataset provider for `pretrain`: loaders for (train, valid, test), or Nones where a rank reads no data."""

    def provider(num_samples: Sequence[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
        from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
        from megatron.training import get_args
        from megatron.training.utils import print_rank_0

        if config.packed and vp_stage not in (None, 0):
            return None, None, None  # the first chunk's iterator feeds them all
        peers.connect()  # the first moment at which the ranks know each other and we are sure to be called on all
        dataset_class = dataset_class_of(config.dataset)
        dataset_config = _config_of_this_run(config)
        if issubclass(dataset_class, VarlenDataset):
            config.check_together(dataset_class.kept_together)
        _build_indexes(dataset_class, dataset_config)
        check_sources(dataset_class, dataset_config)
        build_token_caches(dataset_class, dataset_config)
        if config.plan is not None:
            print_rank_0(f"megatron_packing: {follow_plan(config, dataset_class, dataset_config)}")
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
    own = {"varlen": VarlenDataset, "sft": SFTDataset, "mock": MockVarlenDataset, "preference": PreferenceDataset}
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


def _config_of_this_run(config: PackingConfig) -> PackingDatasetConfig:
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training import get_args

    args = get_args()
    return dataset_config_of(config, args, build_tokenizer(args))


def dataset_config_of(config: PackingConfig, args: argparse.Namespace, tokenizer: Any) -> PackingDatasetConfig:
    """Megatron's dataset settings for a run with these arguments.

    Args:
        config: our settings, resolved from the same arguments.
        args: Megatron's arguments.
        tokenizer: as Megatron built it.

    Raises:
        ConfigError: the paths are no list of paths, nor of weights and paths.
    """
    from megatron.training.utils import get_blend_and_blend_per_split

    try:
        blend, blend_per_split = get_blend_and_blend_per_split(args)
    except (AssertionError, OSError, LookupError, ValueError) as error:
        raise ConfigError(
            f"data paths cannot be understood ({type(error).__name__}: {error}). Give one path, several paths, or a "
            "weight before each path; files of --data-args-path hold the same."
        ) from error
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
        tokenizer=tokenizer,
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
        packing_train_on=config.train_on,
        packing_schema=config.schema,
        packing_token_cache=config.token_cache,
        varlen_sbhd_validation=not config.packed,
        varlen_mock_dataset_config_json=config.mock_config,
    )


def _build_indexes(dataset_class: type[MegatronDataset], config: PackingDatasetConfig) -> None:
    """Let one rank find out about each file what takes long, once; the others then find it beside the file.

    Rank 0 does it for a file system that all nodes share. Then the first rank of every other node looks, and does it
    again where it cannot see what rank 0 wrote.

    Raises:
        PackingError: on every rank, when a file cannot be read.
    """
    import torch.distributed as dist

    from megatron_packing.comm.failures import device_of
    from megatron_packing.comm.turns import take_turn

    if not issubclass(dataset_class, VarlenDataset):
        return

    def build() -> None:
        for data in data_paths(config):
            dataset_class.build_low_level_dataset(data.path, config)

    on_rank_0, leads_node = dist.get_rank() == 0, os.environ.get("LOCAL_RANK") == "0"
    device = device_of()
    take_turn(build, is_mine=on_rank_0, device=device)
    if os.environ.get("LOCAL_WORLD_SIZE") != str(dist.get_world_size()):
        take_turn(build, is_mine=leads_node and not on_rank_0, device=device)
