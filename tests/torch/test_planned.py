"""Which pack file may a run follow, and what does its dataset make of it? Without a run."""

import argparse
import copy
import functools
import json
import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets.utils import Split

from megatron_packing import PreferenceDataset, SFTDataset, VarlenDataset
from megatron_packing.errors import ConfigError
from megatron_packing.mcore.data_flags import DataRun, resolve_run
from megatron_packing.mcore.iterator import _Drawn
from megatron_packing.mcore.loader import name_of
from megatron_packing.mcore.look import DataPath, DatasetRows
from megatron_packing.mcore.planned import KEY_ROWS, first_lengths, key_of, planned_data, rules_of
from megatron_packing.schedule import PackedSet
from megatron_packing.schedule.pack_file import PackFile, PackKey, write_pack_file
from megatron_packing.topology import Topology

TEXTS = ["1 2 3", "4 5", "", "6 7 8 9", "10 11 12"]
PACKS = [[0, 3], [1, 4]]


class OtherVarlen(VarlenDataset):
    """Code of its own, and so samples of its own."""


class ManySystems(SFTDataset):
    """A dataset of one's own whose rows hold several samples."""


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


@functools.cache
def run_of(flags: str = "") -> DataRun:
    """As training resolves them: about a second."""
    paths = "" if "data" in flags.replace("dataset", "") else "--data-path rows.jsonl --split 100,0,0"

    def nothing(parser: argparse.ArgumentParser) -> None:
        pass

    return resolve_run(f"--tokenizer-model null:100 --seq-length 8 {paths} {flags}".split(), nothing)


def dataset_of(rows: Path, kind: type[VarlenDataset] = VarlenDataset, **settings: Any) -> VarlenDataset:
    config = copy.copy(run_of().config)
    for name, value in settings.items():
        setattr(config, name, value)
    return DatasetRows(kind, config, DataPath(path=str(rows))).dataset


def key(rows: Path, **settings: Any) -> PackKey:
    return key_of(dataset_of(rows, **settings))


def test_the_key_changes_with_whatever_rows_depend_on(rows: Path) -> None:
    first = key(rows)
    # Where a sample lies in the layout or the step has no bearing on it.
    assert key(rows, context_parallel_size=2, random_seed=9, packing_shuffle=True) == first
    settings: tuple[dict[str, Any], ...] = (
        {"tokenizer": run_of("--tokenizer-model null:90").config.tokenizer},
        {"sequence_length": 9},
        {"packing_overlong": "truncate"},
        {"packing_bad_rows": "skip"},
        {"packing_train_on": "last-assistant"},
        {"kind": OtherVarlen},
    )
    others = [key(rows, **changed) for changed in settings]
    for other in others:
        assert (other.data, other.lengths) == (first.data, first.lengths)
    assert len({first.tokenizer, *(other.tokenizer for other in others)}) == len(others) + 1


def test_a_file_changed_in_place_is_other_data(rows: Path) -> None:
    first = key(rows)
    swapped = rows.read_text().replace("4 5", "5 4")
    rows.write_text(swapped)
    os.utime(rows, ns=(1, 1))
    other = key(rows)
    assert other == replace(first, data=other.data)
    assert other.data != first.data


def test_lengths_that_neither_file_nor_settings_explain_are_seen(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that tokenizes otherwise than before, say."""
    dataset = dataset_of(rows)
    assert first_lengths(dataset).tolist() == [3, 2, 0, 4, 3]
    first = key_of(dataset)
    encode = VarlenDataset.encode
    monkeypatch.setattr(VarlenDataset, "encode", lambda self, record, row: encode(self, self.dataset[0], 0))
    other = key_of(dataset)
    assert other == replace(first, lengths=other.lengths)
    assert other.lengths != first.lengths


def test_only_the_first_rows_are_tokenized_for_the_key(rows: Path) -> None:
    rows.write_text((json.dumps({"text": "1 2"}) + "\n") * (2 * KEY_ROWS))
    assert len(first_lengths(dataset_of(rows))) == KEY_ROWS


def planned(rows: Path, **settings: Any) -> VarlenDataset:
    """The training set of a run that follows `PACKS`."""
    path = rows.with_name("packs.idx")
    packed = PackedSet(sample_ids=np.concatenate(PACKS), ends=np.array([2, 4]))
    write_pack_file(path, packed, key=key(rows), rules=rules_of(run_of().packing), left_out=1)
    return dataset_of(rows, packing_plan=str(path), **settings)


def test_an_item_is_a_pack_and_its_rows_share_a_unit(rows: Path) -> None:
    dataset = pickle.loads(pickle.dumps(planned(rows)))
    assert len(dataset) == 2
    drawn = _Drawn()
    for number in (0, 1, 2):  # the third is the next epoch's first
        drawn.add(dataset[number])
    tokens = [sample.tokens_L.tolist() for sample in drawn.samples]
    assert tokens == [[1, 2, 3], [6, 7, 8, 9], [4, 5], [10, 11, 12], [1, 2, 3], [6, 7, 8, 9]]
    assert drawn.joined == [False, True] * 3
    assert name_of(dataset, 3) == f"sample 3 (pack 2 of {rows.with_name('packs.idx')})"


def test_rows_that_a_pack_loses_or_cuts_are_counted_each(rows: Path) -> None:
    dataset = planned(rows, packing_overlong="truncate", sequence_length=2)
    drawn = _Drawn()
    dataset._packs = [[0, 2, 3], [2, 1]]  # type: ignore[assignment]
    for number in (0, 1):
        drawn.add(dataset[number])
    assert drawn.lost.counts == {"truncated": 2, "empty": 2}
    assert [sample.length for sample in drawn.samples] == [2, 2, 2]
    assert drawn.joined == [False, True, False], "a lost row does not join the next pack to the one before"


def test_packs_are_shuffled_each_epoch_as_rows_are(rows: Path) -> None:
    dataset = planned(rows, packing_shuffle=True)
    order = [dataset.row_of(number) for number in range(40)]
    assert all(sorted(order[at : at + 2]) == [0, 1] for at in range(0, 40, 2))
    assert len({tuple(order[at : at + 2]) for at in range(0, 40, 2)}) == 2


def test_the_flag_reaches_the_settings() -> None:
    assert run_of("--packing-plan p.idx").packing.plan == "p.idx"
    with pytest.raises(ConfigError, match=r"--packing-plan p\.idx with --packing-dataset sft"):
        run_of("--packing-plan p.idx --sft")


def test_data_that_no_plan_can_number() -> None:
    for flags, words in (
        ("--data-path 0.5 a.jsonl 0.5 b.jsonl --split 100,0,0", "with 2 training paths"),
        ("--data-path a.jsonl --split 90,10,0", "with --split 90,10,0"),
        ("--valid-data-path a.jsonl --test-data-path a.jsonl", "with 0 training paths"),
    ):
        run = run_of(flags)
        with pytest.raises(ConfigError, match=words):
            planned_data(run.dataset_class, run.config)
    run = run_of("--train-data-path a.jsonl --valid-data-path b.jsonl c.jsonl")
    assert planned_data(run.dataset_class, run.config).path == "a.jsonl"
    for kind in (SFTDataset, PreferenceDataset, ManySystems, torch.utils.data.Dataset):
        with pytest.raises(ConfigError, match=f"--packing-plan with {kind.__name__}"):
            planned_data(kind, run.config)  # type: ignore[arg-type]


def test_a_run_of_smaller_packs_is_refused(rows: Path) -> None:
    made_for = replace(run_of().packing, max_tokens_per_rank=16, max_seqs=4)
    path = rows.with_name("packs.idx")
    packed = PackedSet(sample_ids=np.arange(5), ends=np.array([3, 5]))
    write_pack_file(path, packed, key=key(rows), rules=rules_of(made_for))
    packs = PackFile(path)
    for changes, words in (
        ({"max_tokens_per_rank": 12}, "up to 16 tokens; this run has 12"),
        ({"max_seqs": 3}, "up to 4 samples; this run has 3"),
        ({"topology": Topology(cp=2)}, "alignment of 1; this run has 4"),
    ):
        with pytest.raises(ConfigError, match=words):
            packs.check(key=key(rows), rules=rules_of(replace(made_for, **changes)))
    packs.check(key=key(rows), rules=rules_of(replace(made_for, max_tokens_per_rank=32, max_seqs=None)))


def test_evaluation_takes_rows_as_they_stand(rows: Path) -> None:
    training = planned(rows)
    for split in (Split.valid, Split.test):
        other = VarlenDataset(training.dataset, "rows", np.arange(5), None, split, training.config)
        assert [other[number].keys() & {"pack", "tokens"} for number in (0, 3)] == [{"tokens"}] * 2
        assert len(other) == 5
