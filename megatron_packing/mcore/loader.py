"""How do a rank's items come from its dataset? In a fixed order, read ahead by processes, handed over as they are.

The order is known before any worker starts; any number of workers gives the same items. For packing an item is not
collated: fields may differ from item to item, and no batch dimension is added. Items are not pinned, because the packer
takes them apart on the CPU.

A row that cannot be read is an item, too, until the main process meets it: a worker that raised would lose the error's
type and place, and one of two workers would be told of before the other.
"""

import itertools
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset
from torch.utils.data import DataLoader, Dataset, get_worker_info

from megatron_packing.errors import PackingError
from megatron_packing.mcore import peers
from megatron_packing.mcore.dataset import VarlenDataset

type AnyDataset = MegatronDataset | BlendedDataset
type Batch = Sequence[int | None]
"""Sample numbers of one rank's microbatch; None where an evaluation has no row left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Which part of each batch a rank takes."""

    rank: int
    """Data-parallel rank."""
    ranks: int
    """Data-parallel ranks, context parallelism not included."""
    micro_batch: int = 1
    """Samples that it takes at once."""


def batches_in_order(share: Share, *, first: int, end: int | None) -> Iterator[Batch]:
    """Samples from `first` on, in order: that of `MegatronPretrainingSampler`.

    Args:
        share: whose part.
        first: samples that were consumed before, over all ranks.
        end: samples that there are; None: the data begin anew. A last incomplete batch is left out.
    """
    width = share.ranks * share.micro_batch
    for start in itertools.count(first, width):
        if end is not None and start + width > end:
            return
        mine = start + share.rank * share.micro_batch
        yield range(mine, mine + share.micro_batch)


def batches_of_every_row(share: Share, *, rows: int, steps: int, step: int) -> Iterator[Batch]:
    """Each row once and then nothing until `steps` are full; then the same again, without end.

    Args:
        share: whose part.
        rows: how many there are.
        steps: steps of an evaluation, the same on every rank.
        step: rows of a step over all ranks, a multiple of `share.ranks * share.micro_batch`.
    """
    while True:
        for batch in batches_in_order(share, first=0, end=steps * step):
            yield [None if number is None or number >= rows else number for number in batch]


class Loader(Iterator[Any]):
    """The items of one rank, without end unless `order` has one. Reading ahead begins at once.

    Args:
        dataset: what is read.
        order: the same batches each time it is called.
        workers: processes that read ahead; 0 reads in this one.
        collate: items of a batch -> what is handed over.
        absent: makes the item where the order has None.
        seed: of the workers' own random numbers, which no order depends on.
        steps: steps of an evaluation of every row, which Megatron asks for as the loader's length.
    """

    def __init__(
        self,
        dataset: AnyDataset,
        order: Callable[[], Iterable[Batch]],
        *,
        workers: int,
        collate: Callable[[list[Any]], Any],
        absent: Callable[[], dict[str, Any]],
        seed: int,
        steps: int = 0,
    ) -> None:
        self._dataset = dataset
        self._steps = steps
        self._expected = iter(order())
        loader = DataLoader(
            _Readable(dataset, absent),
            batch_sampler=order(),  # type: ignore[arg-type]
            num_workers=workers,
            collate_fn=_Collate(collate),
            worker_init_fn=_begin_worker if workers else None,
            generator=torch.Generator().manual_seed(seed),  # else each loader would draw from the run's own
        )
        self._items = iter(loader)

    def __len__(self) -> int:
        return self._steps

    def __next__(self) -> Any:
        batch = next(self._expected, ())
        try:
            item = next(self._items)
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            said = str(error).splitlines()[0].strip().rstrip(".")
            raise PackingError(
                f"{said}. It may have been reading {self._names(batch)}, which is awaited, or a later "
                "one. A worker that the system kills has most often run out of memory: lower --num-workers."
            ) from error
        if isinstance(item, _Failed):
            raise item.as_error()
        return _received(item)

    def _names(self, batch: Batch) -> str:
        return ", ".join(name_of(self._dataset, number) for number in batch if number is not None)


class NoData(Iterator[Any]):
    """In the place of a loader where a rank reads nothing, but Megatron asks for one."""

    def __len__(self) -> int:
        return 0

    def __next__(self) -> Any:
        raise StopIteration


@dataclass(frozen=True, slots=True)
class _Failed:
    """Why a row could not be read."""

    message: str
    trace: str | None
    """The traceback, for errors that nobody foresaw."""

    def as_error(self) -> PackingError:
        error = PackingError(self.message)
        if self.trace is not None:
            error.__cause__ = RuntimeError(f"in the dataset:\n{self.trace}")
        return error


class _Readable(Dataset[Any]):
    """A dataset that never raises. Pickles if the dataset does."""

    def __init__(self, dataset: AnyDataset, absent: Callable[[], dict[str, Any]]) -> None:
        self._dataset = dataset
        self._absent = absent

    def __getitem__(self, number: int | None) -> Any:
        if number is None:
            return self._absent()
        try:
            return read(self._dataset, number)
        except PackingError as error:
            return _Failed(str(error), None)
        except Exception as error:
            said = f"{name_of(self._dataset, number)}: {peers.describe(error)}"
            return _Failed(said, traceback.format_exc())


@dataclass(frozen=True, slots=True)
class _Collate:
    collate: Callable[[list[Any]], Any]

    def __call__(self, items: list[Any]) -> Any:
        failed = next((item for item in items if isinstance(item, _Failed)), None)
        if failed is not None:
            return failed
        batch = self.collate(items)
        return batch if get_worker_info() is None else _sent(batch)


@dataclass(frozen=True, slots=True)
class _Sent:
    """A tensor on its way out of a worker, as bytes in the queue: torch would open a shared file for each of them."""

    array: np.ndarray


def _sent(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype is not torch.bfloat16 and not value.requires_grad:
        return _Sent(value.numpy())
    return _mapped(_sent, value)


def _received(value: Any) -> Any:
    return torch.from_numpy(value.array) if isinstance(value, _Sent) else _mapped(_received, value)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    if type(value) is dict:
        return {key: function(inner) for key, inner in value.items()}
    return [function(inner) for inner in value] if type(value) is list else value


def as_it_is(items: list[Any]) -> Any:
    """The only item of a microbatch."""
    (item,) = items
    return item


def read(dataset: AnyDataset, number: int) -> dict[str, Any]:
    """Item `number`; past the end of a list of files without weights, of their next epoch."""
    if not isinstance(dataset, BlendedDataset) or number < len(dataset):
        return dataset[number]
    part, number = _part_of(dataset, number)
    return part[number]


def _part_of(blend: BlendedDataset, number: int) -> tuple[MegatronDataset, int]:
    epoch, place = divmod(int(number), len(blend))
    part = blend.datasets[blend.dataset_index[place]]
    return part, int(blend.dataset_sample_index[place]) + epoch * len(part)


def name_of(dataset: AnyDataset, number: int) -> str:
    """A sample in words, with the row and file that it comes from."""
    part, own = _part_of(dataset, number) if isinstance(dataset, BlendedDataset) else (dataset, number)
    if not isinstance(part, VarlenDataset):
        return f"sample {number}"
    return f"sample {number} ({part.name_of(own)})"


def _begin_worker(worker: int) -> None:
    """A fork inherits the GPU's open files, and would keep its memory should the rank die first."""
    from megatron.training import get_args
    from megatron.training.dist_signal_handler import DistributedSignalHandler

    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("/dev/nvidia"):
                os.close(int(name))
        except OSError:  # the listing's own
            continue
    args = get_args()
    if args.exit_signal_handler:
        DistributedSignalHandler(args.exit_signal).__enter__()
