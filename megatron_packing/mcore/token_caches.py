"""How does `--packing-token-cache` come about? Every rank tokenizes its part of the rows, once, before step 1."""

from collections.abc import Iterator

import numpy as np
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.utils import Split

from megatron_packing.comm.failures import device_of
from megatron_packing.comm.turns import take_turn
from megatron_packing.data.progress import progress_bar
from megatron_packing.data.token_cache import Encoded, complete, open_cache, part_rows, write_part
from megatron_packing.errors import ConfigError
from megatron_packing.mcore.dataset import MockVarlenDataset, PackingDatasetConfig, VarlenDataset
from megatron_packing.mcore.look import data_paths, rows_by_split

_LONG_WORK = 5_000
"""Rows of one rank from which a progress bar is worth its place: some seconds of tokenizing."""


def build_token_caches(dataset_class: type[MegatronDataset], config: PackingDatasetConfig) -> None:
    """Make each cache that the run will read and that is not there yet; called on every rank.

    Raises:
        PackingError: on every rank, when a row cannot become a sample, or the folder cannot be used.
    """
    from megatron.training.utils import print_rank_0

    folder = config.packing_token_cache
    if folder is None:
        return
    if not issubclass(dataset_class, VarlenDataset) or issubclass(dataset_class, MockVarlenDataset):
        raise ConfigError(
            f"--packing-token-cache {folder}: it keeps the rows of data files. Leave it out for made-up data, and for "
            "datasets that are not derived from VarlenDataset or SFTDataset."
        )
    for dataset in _datasets(dataset_class, config):
        was_there = _build_one(dataset, folder)
        said = "read from" if was_there else "tokenized into"
        print_rank_0(f"megatron_packing: {dataset.dataset_path}: {len(dataset.dataset):,} rows {said} {folder}")


def _build_one(dataset: VarlenDataset, folder: str) -> bool:
    """Whether the cache was there."""
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = device_of()
    rows = len(dataset.dataset)
    found: list[bool] = []
    take_turn(lambda: found.append(open_cache(folder, dataset.cache_key) is not None), is_mine=True, device=device)
    if _holds_on_all_ranks(found[0], device):
        return True
    take_turn(lambda: _write(dataset, folder, dataset.cache_key, rank, ranks), is_mine=True, device=device)
    take_turn(lambda: complete(folder, dataset.cache_key, rows=rows, parts=ranks), is_mine=rank == 0, device=device)
    take_turn(lambda: _check_seen(folder, dataset.cache_key), is_mine=True, device=device)
    return False


def _datasets(dataset_class: type[VarlenDataset], config: PackingDatasetConfig) -> Iterator[VarlenDataset]:
    """One for each cache: each file under the rules of training, of evaluation, or of both where they differ."""
    for data in data_paths(config):
        source = dataset_class.build_low_level_dataset(data.path, config)
        splits = {data.split}
        in_split = rows_by_split(config, data, range(len(source)), len(source))
        if config.packing_eval_overlong is not None and (in_split["valid"] or in_split["test"]):
            splits.add(Split.valid)
        for split in sorted(splits, key=lambda split: split.value):
            yield dataset_class(source, data.path, np.arange(len(source)), None, split, config)


def _holds_on_all_ranks(value: bool, device: str) -> bool:
    """Whether it holds on every rank: they must not part ways over a folder that one of them sees otherwise."""
    import torch
    import torch.distributed as dist

    all_have = torch.tensor([int(value)], device=device)
    dist.all_reduce(all_have, op=dist.ReduceOp.MIN)
    return bool(all_have.item())


def _write(dataset: VarlenDataset, folder: str, key: str, rank: int, ranks: int) -> None:
    rows = len(dataset.dataset)
    mine = len(part_rows(rows, rank, ranks))
    with progress_bar(wanted=rank == 0 and mine >= _LONG_WORK) as progress:
        task = progress.add_task(f"tokenizing {dataset.dataset_path}", total=mine)

        def encode(row: int) -> Encoded:
            progress.advance(task)
            return dataset.encode_row(row)

        write_part(folder, key, rows=rows, part=rank, parts=ranks, encode=encode)


def _check_seen(folder: str, key: str) -> None:
    if open_cache(folder, key) is None:
        raise ConfigError(
            f"--packing-token-cache {folder}: rank 0 has completed the cache, but this rank does not see it. Name a "
            "folder on a file system that all ranks share."
        )
