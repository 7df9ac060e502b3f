"""What --data-path may name, through Megatron's own builder: blends, paths of each split, tokenized documents."""

import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.datasets.utils import get_blend_from_list
from megatron.core.tokenizers import MegatronTokenizer

from megatron_packing import VarlenDataset
from megatron_packing.errors import ConfigError
from megatron_packing.mcore.dataset import PackingDatasetConfig
from megatron_packing.mcore.indexed import IndexedSource, open_data

EOS = 7


def built(tmp_path: Path, sizes: list[int | None], **settings: Any) -> list[Any]:
    """(train, valid, test) as a run builds them."""
    config = PackingDatasetConfig(
        random_seed=1,
        sequence_length=32,
        tokenizer=MegatronTokenizer.from_pretrained(metadata_path={"library": "null-text"}, vocab_size=512, eod_id=EOS),
        path_to_cache=str(tmp_path / "cache"),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        **settings,
    )
    return BlendedMegatronDatasetBuilder(VarlenDataset, sizes, lambda: True, config).build()


def lines(path: Path, ids: range) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"text": f"{i} {i}"}) + "\n" for i in ids))
    return str(path)


def documents(prefix: Path, docs: list[list[list[int]]], dtype: Any = np.uint16) -> str:
    """A `.bin/.idx` pair; a document is a list of sentences."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in docs:
        for sentence in document:
            builder.add_item(torch.tensor(sentence))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def first_ids(dataset: Any, count: int | None = None) -> list[int]:
    return [int(dataset[i]["tokens"][0]) for i in range(len(dataset) if count is None else count)]


def test_a_blend_draws_from_each_path_by_its_weight(tmp_path: Path) -> None:
    """A file, a folder and tokenized documents; the blend is Megatron's, the rows are ours."""
    file = lines(tmp_path / "a.jsonl", range(100, 120))
    lines(tmp_path / "folder" / "2.jsonl", range(205, 210))
    lines(tmp_path / "folder" / "1.jsonl", range(200, 205))
    pair = documents(tmp_path / "docs", [[[i, i, EOS]] for i in range(300, 310)])
    blend = get_blend_from_list(["5", file, "3", str(tmp_path / "folder"), "2", pair])
    train, valid, _ = built(tmp_path, [100, 0, 0], blend=blend, split="100,0,0")
    assert valid is None or len(valid) == 0
    ids = first_ids(train, 100)
    assert Counter(i // 100 for i in ids) == {1: 50, 2: 30, 3: 20}
    for hundred, rows in ((1, 20), (2, 10), (3, 10)):  # each in its own order, and from the start again
        drawn = [i for i in ids if i // 100 == hundred]
        assert drawn == [100 * hundred + i % rows for i in range(len(drawn))]
    assert sorted(path.name for path in (tmp_path / "folder").iterdir()) == ["1.jsonl", "2.jsonl"]


def test_paths_without_weights_are_read_whole(tmp_path: Path) -> None:
    paths = [lines(tmp_path / f"{n}.jsonl", range(100 * n, 100 * n + 4 * n)) for n in (1, 2, 3)]
    blend = get_blend_from_list(paths)
    train, _, _ = built(tmp_path, [None, None, None], blend=blend, split="100,0,0")
    ids = first_ids(train)
    assert sorted(ids) == [*range(100, 104), *range(200, 208), *range(300, 312)]


def test_each_split_has_its_own_paths(tmp_path: Path) -> None:
    train_path = lines(tmp_path / "train.jsonl", range(100, 110))
    valid_path = documents(tmp_path / "valid", [[[i, i, EOS]] for i in range(200, 205)])
    test_paths = [lines(tmp_path / f"test{n}.jsonl", range(n, n + 4)) for n in (300, 400)]
    per_split = [
        get_blend_from_list(paths) for paths in ([train_path], [valid_path], ["1", test_paths[0], "3", test_paths[1]])
    ]
    train, valid, test = built(tmp_path, [10, 5, 16], blend_per_split=per_split)
    assert first_ids(train) == list(range(100, 110))
    assert first_ids(valid) == list(range(200, 205))
    assert Counter(i // 100 for i in first_ids(test, 16)) == {3: 4, 4: 12}


def test_one_file_is_split_by_rows(tmp_path: Path) -> None:
    blend = get_blend_from_list([lines(tmp_path / "a.jsonl", range(100, 120))])
    train, valid, test = built(tmp_path, [16, 2, 2], blend=blend, split="80,10,10")
    assert first_ids(train) + first_ids(valid) + first_ids(test) == list(range(100, 120))


def test_tokenized_documents_are_taken_as_they_are(tmp_path: Path) -> None:
    docs = [[[11, 12, EOS]], [[1, 2], [3], [4, EOS]], [[21, 22, 23]], [[EOS]]]
    prefix = documents(tmp_path / "corpus_text_document", docs)
    source = open_data(prefix)
    copy = pickle.loads(pickle.dumps(source))
    assert len(pickle.dumps(source)) < 1000
    for reader in (source, copy):
        assert [reader[row].ids.tolist() for row in range(4)] == [
            [i for part in document for i in part] for document in docs
        ]
        assert all(reader[row].is_target is None for row in range(4))
    assert (source.path, source[-2].ids.tolist()) == (prefix, [21, 22, 23])
    config = {"blend": get_blend_from_list([prefix]), "split": "100,0,0"}
    train, _, _ = built(tmp_path, [4, 0, 0], **config)
    items = [train[i] for i in range(4)]
    assert [item["tokens"].tolist() for item in items] == [[11, 12], [1, 2, 3, 4], [21, 22], []]
    assert [item["labels"].tolist() for item in items] == [[12, EOS], [2, 3, 4, EOS], [22, 23], []]
    assert all((item["loss_mask"] == 1).all() for item in items)  # every id is learned
    assert items[3]["dropped"] == "too_short"


def test_editing_a_document_changes_nothing_later(tmp_path: Path) -> None:
    source = open_data(documents(tmp_path / "docs", [[[1, 2, 3]]], dtype=np.int32))
    source[0].ids[:] = 0
    assert source[0].ids.tolist() == [1, 2, 3]


def test_damaged_pairs_are_refused(tmp_path: Path) -> None:
    prefix = documents(tmp_path / "docs", [[[1, 2, 3]], [[4, 5, 6, 7]]])
    before = open_data(prefix).fingerprint
    whole = {suffix: Path(prefix + suffix).read_bytes() for suffix in (".bin", ".idx")}
    for suffix, data, why in (
        (".bin", whole[".bin"][:-2], r"12 bytes; .*\.idx tells of 14"),
        (".idx", whole[".idx"][:-8], "was cut short"),
        (".idx", b"", "no index of tokenized documents"),
        (".idx", whole[".idx"][:17] + b"\x06" + whole[".idx"][18:], "not integers"),
    ):
        for other in whole:
            Path(prefix + other).write_bytes(data if other == suffix else whole[other])
        with pytest.raises(ConfigError, match=why):
            open_data(prefix)
    for suffix, data in whole.items():
        Path(prefix + suffix).write_bytes(data)
    assert len(open_data(prefix)) == 2
    assert open_data(prefix).fingerprint != before  # written again


def test_a_half_of_a_pair_is_a_missing_file(tmp_path: Path) -> None:
    prefix = documents(tmp_path / "docs", [[[1, 2, 3]]])
    Path(f"{prefix}.idx").unlink()
    with pytest.raises(ConfigError, match=f"{prefix}: no such file"):
        open_data(prefix)
    with pytest.raises(ConfigError, match=r"none\.bin is empty"):
        IndexedSource(documents(tmp_path / "none", []))


@pytest.mark.parametrize("rows", [10, 100_000])
def test_a_dataset_pickles_small_whatever_its_rows(tmp_path: Path, rows: int) -> None:
    blend = get_blend_from_list([lines(tmp_path / "a.jsonl", [row % 500 for row in range(rows)])])
    train, _, _ = built(tmp_path, [rows, 0, 0], blend=blend, split="100,0,0")
    data = pickle.dumps(train)
    assert len(data) < 10_000
    copy = pickle.loads(data)
    assert copy[rows - 1]["tokens"].tolist() == train[rows - 1]["tokens"].tolist() == [(rows - 1) % 500] * 2
