"""The loader: Megatron's order, the same for any number of workers, items as they are, failures that name their row."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.training.datasets.data_samplers import MegatronPretrainingSampler

from megatron_packing import VarlenDataset
from megatron_packing.errors import PackingError
from megatron_packing.mcore import loader as loading
from megatron_packing.mcore.loader import Batch, Loader, Share, batches_in_order, batches_of_every_row
from tests.torch.test_dataset import _config, _dataset


@pytest.fixture(autouse=True)
def _no_run_s_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker asks the run's arguments for its signal handler; here is no run."""
    monkeypatch.setattr(loading, "_begin_worker", None)


def loader_of(dataset: VarlenDataset, order: list[Batch], workers: int) -> Loader:
    return Loader(
        dataset, lambda: iter(order), workers=workers, collate=loading.as_it_is, absent=lambda: {"absent": True}, seed=1
    )


def flat(items: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items without tensors, to compare."""
    return [
        {name: (str(v.dtype), v.shape, v.tolist()) if torch.is_tensor(v) else v for name, v in item.items()}
        for item in items
    ]


# --- order ----------------------------------------------------------------------------------------

shares = st.integers(1, 4).flatmap(
    lambda ranks: st.builds(Share, ranks=st.just(ranks), rank=st.integers(0, ranks - 1), micro_batch=st.integers(1, 3))
)


@given(share=shares, consumed=st.integers(0, 30), more=st.integers(1, 40))
def test_order_is_that_of_megatrons_sampler(share: Share, consumed: int, more: int) -> None:
    end = consumed + more
    theirs = MegatronPretrainingSampler(end, consumed, share.micro_batch, share.rank, share.ranks)
    ours = [list(batch) for batch in batches_in_order(share, first=consumed, end=end)]
    assert ours == list(theirs)
    assert [list(b) for b in islice(batches_in_order(share, first=consumed, end=None), len(ours))] == ours


@given(ranks=st.integers(1, 4), micro=st.integers(1, 2), per_rank=st.integers(1, 3), rows=st.integers(1, 40))
def test_an_evaluation_takes_every_row_once(ranks: int, micro: int, per_rank: int, rows: int) -> None:
    step = ranks * micro * per_rank
    steps = -(-rows // step) + 1  # one more, as for the shorter of two sets
    of_rank = []
    for rank in range(ranks):
        share = Share(rank=rank, ranks=ranks, micro_batch=micro)
        batches = batches_of_every_row(share, rows=rows, steps=steps, step=step)
        twice = [number for batch in islice(batches, 2 * steps * per_rank) for number in batch]
        once = len(twice) // 2
        assert twice[:once] == twice[once:], "the next evaluation is the same"
        assert once == steps * per_rank * micro, "as many items on every rank"
        of_rank.append(twice[:once])
    assert sorted(number for numbers in of_rank for number in numbers if number is not None) == list(range(rows))


# --- items ----------------------------------------------------------------------------------------


def test_items_come_as_they_are_and_in_order_for_any_number_of_workers(tmp_path: Path) -> None:
    rows = [{"text": " ".join("1" * (1 + i % 9))} for i in range(20)]  # a row of one token makes no sample
    dataset = _dataset(tmp_path, rows, packing_overlong="truncate", packing_shuffle=True)
    order: list[Batch] = [[i] for i in range(3, 43)] + [[None]]
    expected = flat(iter([dataset[i] for i in range(3, 43)] + [{"absent": True}]))
    assert {"dropped", "truncated"} < {field for item in expected for field in item}
    for workers in (0, 1, 3):
        assert flat(loader_of(dataset, order, workers)) == expected


def test_items_of_any_shape_come_out_of_a_worker_and_are_our_own() -> None:
    class Odd(torch.utils.data.Dataset[Any]):
        def __getitem__(self, number: int) -> dict[str, Any]:
            side = {"tokens": torch.arange(3) + number, "scalar": torch.tensor(7, dtype=torch.int32)}
            half = torch.ones(2, dtype=torch.bfloat16)
            return {"together": [side, {"none": torch.zeros(0)}], "half": half, "why": "x", "array": np.ones(2)}

    items = [list(loader_of(Odd(), [[0], [1]], workers)) for workers in (0, 1)]  # type: ignore[arg-type]
    for item, expected in zip(items[1], items[0], strict=True):
        assert item.keys() == expected.keys()
        for name in ("tokens", "scalar"):
            mine, theirs = item["together"][0][name], expected["together"][0][name]
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine, theirs)
        assert item["together"][1]["none"].shape == (0,)
        assert torch.equal(item["half"], expected["half"])
        assert isinstance(item["array"], np.ndarray)
        item["together"][0]["tokens"] += 1  # writable
    assert items[1][1]["together"][0]["tokens"].tolist() == [2, 3, 4]


def test_reading_draws_no_random_number_of_the_run(tmp_path: Path) -> None:
    dataset = _dataset(tmp_path, [{"text": "1 2 3"}] * 4)
    before = torch.get_rng_state()
    for workers in (0, 1):
        list(loader_of(dataset, [[0], [1]], workers))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_list_of_files_begins_anew_with_new_orders(tmp_path: Path) -> None:
    """Megatron's own blend ends after one epoch."""
    parts = []
    for name, first, rows in (("a", 10, 3), ("b", 20, 5)):
        (tmp_path / name).mkdir()
        parts.append(
            _dataset(tmp_path / name, [{"text": f"{first + i} 1 1"} for i in range(rows)], packing_shuffle=True)
        )
    blend = BlendedDataset(parts, [3, 5], None, _config())
    assert len(blend) == 8
    first_tokens = [loading.read(blend, i)["tokens"][0].item() for i in range(24)]
    epochs = [first_tokens[i : i + 8] for i in (0, 8, 16)]
    assert all(sorted(epoch) == [10, 11, 12, 20, 21, 22, 23, 24] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert "a/rows.jsonl" in loading.name_of(blend, 8) or "b/rows.jsonl" in loading.name_of(blend, 8)


# --- failures -------------------------------------------------------------------------------------


class Broken(VarlenDataset):
    """Row 3 has a bug."""

    def convert(self, row: Any) -> Any:
        if row.fields["text"] == "3":
            raise KeyError("a bug")
        return super().convert(row)


@pytest.mark.parametrize("workers", [0, 2])
def test_what_nobody_foresaw_names_sample_row_and_place(workers: int, tmp_path: Path) -> None:
    dataset = _dataset(tmp_path, [{"text": "1 2"}, {"text": "1 2"}, {"text": "3"}], Broken)
    items = loader_of(dataset, [[0], [4], [5], [1]], workers)
    assert "tokens" in next(items)
    assert "tokens" in next(items)
    with pytest.raises(PackingError) as caught:
        next(items)
    for words in ("sample 5 (row 3 of ", "rows.jsonl)", "KeyError", "a bug", "test_loader.py:"):
        assert words in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert "Traceback" in str(caught.value.__cause__)
    assert ["tokens" in item for item in items] == [True], "the others are not lost"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_row_keeps_its_own_words(workers: int, tmp_path: Path) -> None:
    dataset = _dataset(tmp_path, [{"text": "1 2"}, {"text": 5}])
    items = loader_of(dataset, [[0], [1]], workers)
    next(items)
    with pytest.raises(PackingError, match=r"rows\.jsonl:2: ") as caught:
        next(items)
    assert "sample" not in str(caught.value).split(":2: ")[0]
    assert list(items) == []


def test_a_worker_that_is_killed_leaves_the_name_of_what_it_read(tmp_path: Path) -> None:
    """In torch's words; that they come, and reach every rank, the fault drill shows."""

    def killed() -> Iterator[Any]:
        yield {"absent": True}
        raise RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")

    items = loader_of(_dataset(tmp_path, [{"text": "1 2"}] * 2), [[0], [1]], 0)
    items._items = killed()  # type: ignore[assignment]
    next(items)
    with pytest.raises(PackingError) as caught:
        next(items)
    for words in (
        "DataLoader worker (pid(s) 7) exited unexpectedly. It",
        "sample 1 (row 2 of",
        "rows.jsonl)",
        "memory",
        "--num-workers",
    ):
        assert words in str(caught.value)
