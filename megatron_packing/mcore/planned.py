"""May this run follow the packs of `--packing-plan`? The key of its data, formed alike here and by the command.

Sample numbers mean nothing without the data, the tokenizer and the settings that they were counted under. So a pack
file names all of them, and a run that has others is refused before step 1, on every rank.

Cost: the file is read once for its checksum, and each rank tokenizes the first rows: a tenth of a second.
"""

from typing import Any

import numpy as np
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.utils import Split

from megatron_packing.comm.failures import device_of
from megatron_packing.comm.lengths import check_same
from megatron_packing.comm.turns import take_turn
from megatron_packing.config import PackingConfig
from megatron_packing.data import Dropped
from megatron_packing.errors import ConfigError
from megatron_packing.mcore.dataset import PackingDatasetConfig, SFTDataset, VarlenDataset
from megatron_packing.mcore.look import DataPath, DatasetRows
from megatron_packing.schedule.pack_file import PackFile, PackKey, PackRules, fingerprint_of_lengths

KEY_ROWS = 512
"""First rows whose lengths are part of the key."""


def follow_plan(config: PackingConfig, dataset_class: type[MegatronDataset], datasets: PackingDatasetConfig) -> str:
    """Let the training set of `datasets` follow the run's pack file; called on every rank.

    Returns:
        A line for the log.

    Raises:
        ConfigError: on every rank, when it is not this run's, or not the same on all ranks.
    """
    import torch.distributed as dist

    device = device_of()
    found: list[PackFile] = []
    take_turn(lambda: found.append(_checked(config, dataset_class, datasets)), is_mine=True, device=device)
    (packs,) = found
    check_same(packs.digest, f"--packing-plan {config.plan}", group=dist.group.WORLD, device=device)
    datasets.packing_plan = config.plan
    out = f", {packs.left_out:,} rows that make no sample left out" if packs.left_out else ""
    return (
        f"--packing-plan {config.plan}: {len(packs):,} packs of {packs.num_samples:,} rows{out}; each pack is one "
        "consumed sample, and --global-batch-size and --train-iters count packs"
    )


def _checked(config: PackingConfig, dataset_class: type[MegatronDataset], datasets: PackingDatasetConfig) -> PackFile:
    assert config.plan is not None
    data = planned_data(dataset_class, datasets)
    packs = PackFile(config.plan)
    assert issubclass(dataset_class, VarlenDataset), "planned_data refuses others"
    packs.check(key=key_of(DatasetRows(dataset_class, datasets, data).dataset), rules=rules_of(config))
    return packs


def planned_data(dataset_class: type[MegatronDataset], datasets: PackingDatasetConfig) -> DataPath:
    """The path whose rows a pack file of this run numbers: the whole of its training data.

    Raises:
        ConfigError: it is not the one path, or rows are no single samples.
    """
    single = issubclass(dataset_class, VarlenDataset) and not issubclass(dataset_class, SFTDataset)
    if not single or dataset_class.kept_together != 1:
        raise ConfigError(
            f"--packing-plan with {dataset_class.__name__}: packs are made of rows that are one sample each. Derive it "
            "from VarlenDataset, or drop the flag."
        )
    blend = datasets.blend
    if datasets.blend_per_split is not None:
        blend = datasets.blend_per_split[Split.train.value]
    paths = [] if blend is None else blend[0]
    if len(paths) != 1:
        raise ConfigError(
            f"--packing-plan with {len(paths)} training paths ({', '.join(paths)}): it numbers the rows of one. Name "
            "the files together as a folder or a pattern, or drop the flag."
        )
    whole = (0.0, 1.0)
    if datasets.blend_per_split is None and datasets.split_matrix[Split.train.value] != whole:
        raise ConfigError(
            f"--packing-plan with --split {datasets.split}: it packs every row of the file for training. Set --split "
            "100,0,0, or give --train-data-path and --valid-data-path."
        )
    return DataPath(path=paths[0])


def key_of(dataset: VarlenDataset) -> PackKey:
    """What a pack file of this dataset belongs to.

    Raises:
        ConfigError: the source does not say what it depends on.
        SampleError: one of the first rows is at fault.
    """
    source, rules = dataset.fingerprints("--packing-plan")
    return PackKey(data=source, tokenizer=rules, lengths=fingerprint_of_lengths(first_lengths(dataset)))


def first_lengths(dataset: VarlenDataset) -> np.ndarray:
    """Tokens of the first rows, int64 [at most `KEY_ROWS`]; 0 where a row makes no sample."""
    rows = min(KEY_ROWS, len(dataset.dataset))  # type: ignore[arg-type]
    return np.array([length_of(dataset.encode_row(row)) for row in range(rows)], dtype=np.int64)


def length_of(encoded: Any) -> int:
    """Tokens of a row's samples; 0 of a row that makes none."""
    return 0 if isinstance(encoded, Dropped) else sum(sample.length for sample in encoded)


def rules_of(config: PackingConfig) -> PackRules:
    """What the packs of a run keep to."""
    return PackRules(capacity=config.capacity, alignment=config.topology.alignment, max_seqs=config.most_samples)
