"""Which loaders does a run get, and where do they begin? Those of training where it stopped, those of evaluation anew.

Megatron passes loaders of ours through (`--dataloader-type external`), so that nothing of it is patched. The order of
training is that of its own samplers: of each batch of consecutive samples every data-parallel rank takes the next few.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.utils import Split
from torch.utils.data import default_collate

from megatron_packing.config import PackingConfig
from megatron_packing.data.order import describe_epochs
from megatron_packing.errors import ConfigError
from megatron_packing.mcore.dataset import PackingDatasetConfig, VarlenDataset, absent_row
from megatron_packing.mcore.loader import (
    AnyDataset,
    Batch,
    Loader,
    NoData,
    Share,
    as_it_is,
    batches_in_order,
    batches_of_every_row,
)
from megatron_packing.mcore.prefetch import ReadAhead


def check_requests(
    config: PackingConfig, datasets: PackingDatasetConfig, num_samples: Sequence[int | None], *, several: bool
) -> None:
    """Refuse, on every rank, an evaluation that cannot be had, and a shuffle that would lose rows.

    Args:
        config: the run's settings.
        datasets: those of its datasets.
        num_samples: what Megatron asks of each split.
        several: whether `--multiple-validation-sets` is set.

    Raises:
        ConfigError: what and why.
    """
    valid = _paths_and_weights(datasets, Split.valid)
    files, weights = _paths_and_weights(datasets, Split.train)
    if config.order == "cyclic" and len(files) > 1 and weights is None:
        raise ConfigError(
            "--dataloader-type cyclic with several files without weights: Megatron would leave out the last rows of "
            "each epoch. Drop it and use --packing-shuffle, or give weights."
        )
    if several and not (config.full_validation and datasets.blend_per_split and config.topology.vpp == 1):
        raise ConfigError(
            "--multiple-validation-sets: needs --full-validation, --valid-data-path FILE FILE ..., and no interleaved "
            "pipeline; Megatron evaluates them no other way."
        )
    if several and datasets.blend_per_split and datasets.blend_per_split[Split.test.value] is not None:
        raise ConfigError(
            "--multiple-validation-sets with test data: Megatron cannot evaluate a test set beside them. Drop "
            "--test-data-path, or give it as one more validation set."
        )
    if not valid[0] and not datasets.mock and (config.full_validation or num_samples[1]):
        raise ConfigError(
            "there is nothing to evaluate, but --eval-iters is not 0 (100 unless you set it). Give --valid-data-path, "
            "use --data-path with --split, or set --eval-iters 0."
        )
    if config.full_validation and valid[1] is not None:
        raise ConfigError(
            "--full-validation with weights: every row is evaluated once, so that weights have no say. List the files "
            "of --valid-data-path without weights."
        )


def _paths_and_weights(datasets: PackingDatasetConfig, split: Split) -> tuple[Sequence[str], Sequence[float] | None]:
    blend = datasets.blend if datasets.blend_per_split is None else datasets.blend_per_split[split.value]
    return ((), None) if blend is None else blend


def make_loaders(config: PackingConfig, datasets: Sequence[Any], num_samples: Sequence[int]) -> tuple[Any, Any, Any]:
    """(train, valid, test) for Megatron to pass through; None where a rank reads no data or none is asked for.

    Called on every rank. Sets Megatron's `eval_iters` where every row is to be evaluated.

    Args:
        config: the run's settings.
        datasets: as built; None where this rank reads no data. The second may be a list of several.
        num_samples: what Megatron asks of each split.

    Raises:
        ConfigError: on every rank, when there is nothing to evaluate.
    """
    from megatron.training import get_args
    from megatron.training.utils import print_rank_0

    args = get_args()
    train, valid, test = datasets
    train_loader = None
    if train is not None and num_samples[0] and not args.skip_train:
        train_loader = _training_loader(config, train)
        order = describe_order(config, train, step=args.global_batch_size, seed=args.seed)
        print_rank_0(f"megatron_packing: {order}")
    if config.full_validation:
        return (train_loader, *_loaders_of_every_row(config, valid, test))
    consumed = 0 if args.skip_train else args.consumed_valid_samples
    return (
        train_loader,
        _evaluating_loader(config, valid, first=consumed) if num_samples[1] else None,
        _evaluating_loader(config, test, first=0) if num_samples[2] else None,
    )


def describe_order(config: PackingConfig, dataset: AnyDataset, *, step: int, seed: int) -> str:
    """One line for the log: in which order rows come, and what becomes of them at an epoch's end.

    Args:
        config: the run's settings.
        dataset: of training.
        step: samples of an optimizer step.
        seed: of the run.
    """
    order = "Megatron's cyclic shuffle"
    if config.order == "single":
        order = f"shuffled in each epoch, seed {seed}" if config.shuffle else "as the rows stand in the file"
    if not isinstance(dataset, BlendedDataset):
        rows = len(dataset.indices)
        if config.plan is not None:
            order = order.replace("rows stand in the file", "packs stand in the plan")
            return f"order: {order}; {describe_epochs(rows, step, 'packs')}"
    elif any(part.num_samples is not None for part in dataset.datasets):  # by weight, and not all rows of each
        return f"order: {order}; each file of the blend begins anew when its rows are used up"
    else:
        rows = sum(len(part.indices) for part in dataset.datasets)
    return f"order: {order}; {describe_epochs(rows, step)}"


def _training_loader(config: PackingConfig, dataset: AnyDataset) -> Iterator[Any]:
    from megatron.training import get_args

    args = get_args()
    share = _share(args.micro_batch_size)
    first = args.consumed_train_samples

    def order() -> Iterator[Batch]:
        if config.order == "cyclic":
            return _cyclic(dataset, first)
        return batches_in_order(share, first=first, end=_end(dataset))

    loader = _loader(config, dataset, order)
    return ReadAhead(loader) if config.prefetch else loader


def _cyclic(dataset: AnyDataset, consumed: int) -> Iterator[Batch]:
    """Megatron's own shuffle, epoch after epoch."""
    from megatron.training import get_args
    from megatron.training.datasets.data_samplers import MegatronPretrainingRandomSampler

    args = get_args()
    share = _share(args.micro_batch_size)
    sampler = MegatronPretrainingRandomSampler(
        dataset, len(dataset), consumed, share.micro_batch, share.rank, share.ranks, args.data_sharding
    )
    while True:
        yield from sampler


def _evaluating_loader(config: PackingConfig, dataset: AnyDataset | None, *, first: int) -> Loader | None:
    from megatron.training import get_args

    if dataset is None:
        return None
    share = _share(get_args().eval_micro_batch_size)
    return _loader(config, dataset, lambda: batches_in_order(share, first=first, end=_end(dataset)))


def _loaders_of_every_row(config: PackingConfig, valid: Any, test: AnyDataset | None) -> tuple[Any, Any]:
    """Loaders that give each row once an evaluation; a last step that is not full is filled up with nothing."""
    from megatron.training import get_args
    from megatron.training.utils import print_rank_0

    args = get_args()
    several = args.multiple_validation_sets
    sets = list(valid) if isinstance(valid, list) else [valid]
    found = [0 if dataset is None else len(dataset) for dataset in (*sets, test)]
    rows = _largest(found)  # of every set, on every rank
    if 0 in rows[:-1]:
        raise ConfigError(
            "--full-validation: a validation set has no rows. Give --valid-data-path, change --split, or drop the flag."
        )
    steps = [math.ceil(count / args.eval_global_batch_size) for count in rows]
    if not several:
        # Megatron evaluates validation and test for equally many steps; the shorter of them ends in empty ones.
        args.eval_iters = max(steps)
        steps = [args.eval_iters] * len(steps)
    print_rank_0(
        f"megatron_packing: every row is evaluated once: {' + '.join(f'{count:,}' for count in rows if count)} rows in "
        f"steps of {args.eval_global_batch_size:,}"
    )
    share = _share(args.eval_micro_batch_size)

    def loader(dataset: AnyDataset | None, number: int) -> Loader | NoData | None:
        if dataset is None:
            return NoData() if several else None
        size = {"rows": rows[number], "steps": steps[number], "step": args.eval_global_batch_size}
        return _loader(config, dataset, lambda: batches_of_every_row(share, **size), steps=steps[number])

    loaders = [loader(dataset, number) for number, dataset in enumerate(sets)]
    return (loaders if several else loaders[0]), (None if several or not rows[-1] else loader(test, len(sets)))


def _largest(counts: list[int]) -> list[int]:
    """Each number's maximum over all ranks."""
    largest = torch.tensor(counts, dtype=torch.long, device="cuda")
    torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX)
    return [int(count) for count in largest.tolist()]


def _share(micro_batch: int) -> Share:
    from megatron.core import parallel_state

    return Share(
        rank=parallel_state.get_data_parallel_rank(),
        ranks=parallel_state.get_data_parallel_world_size(),
        micro_batch=micro_batch,
    )


def _end(dataset: AnyDataset) -> int | None:
    """Where the data end: never, with datasets of ours, which begin anew."""
    parts = dataset.datasets if isinstance(dataset, BlendedDataset) else [dataset]
    return None if all(isinstance(part, VarlenDataset) for part in parts) else len(dataset)


def _absent_item() -> dict[str, Any]:
    return {"absent": True}


def _loader(
    config: PackingConfig, dataset: AnyDataset, order: Callable[[], Iterable[Batch]], *, steps: int = 0
) -> Loader:
    from megatron.training import get_args

    args = get_args()
    rank = _share(1).rank
    return Loader(
        dataset,
        order,
        workers=args.num_workers,
        collate=as_it_is if config.packed else default_collate,
        absent=_absent_item if config.packed else functools.partial(absent_row, args.seq_length),
        seed=int(np.random.SeedSequence([args.seed, rank, args.consumed_train_samples]).generate_state(1)[0]),
        steps=steps,
    )
