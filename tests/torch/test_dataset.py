"""Megatron datasets of packing: the fields that upstream's scheduler knows, and what becomes of each row."""

import json
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.utils import Split
from megatron.core.tokenizers import MegatronTokenizer

from megatron_packing import MockVarlenDataset, PreferenceDataset, SFTDataset, VarlenDataset
from megatron_packing.errors import ConfigError, PackingError, SampleError
from megatron_packing.mcore.dataset import PackingDatasetConfig
from megatron_packing.mcore.iterator import samples_of_row
from megatron_packing.mcore.look import survey_sources
from megatron_packing.mcore.provider import dataset_class_of

EOS = 7
VARLEN_FIELDS = {"tokens", "labels", "loss_mask", "position_ids", "original_seq_len", "padded_seq_len"}


def _config(**settings: Any) -> PackingDatasetConfig:
    usual: dict[str, Any] = {
        "random_seed": 1,
        "sequence_length": 8,
        "tokenizer": _null_tokenizer(),
        "split": "100,0,0",
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
    }
    return PackingDatasetConfig(**{**usual, **settings})


def _null_tokenizer(**settings: int) -> Any:
    return MegatronTokenizer.from_pretrained(
        metadata_path={"library": "null-text"}, vocab_size=64, eod_id=EOS, **settings
    )


def _dataset(
    tmp_path: Path, rows: list[dict], kind: type[VarlenDataset] = VarlenDataset, **settings: Any
) -> VarlenDataset:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = _config(blend=([str(path)], None), **settings)
    source = kind.build_low_level_dataset(str(path), config)
    return kind(source, str(path), np.arange(len(source)), None, Split.train, config)


def _chat(prompt: str, answer: str | None) -> dict:
    turns = [{"role": "user", "content": prompt}]
    return {"messages": turns if answer is None else [*turns, {"role": "assistant", "content": answer}]}


def test_item_has_upstreams_fields_shapes_and_types(tmp_path: Path) -> None:
    item = _dataset(tmp_path, [_chat("11 12", "21 22")])[0]
    assert set(item) == VARLEN_FIELDS
    assert item["tokens"].tolist() == [11, 12, 21, 22]
    assert item["labels"].tolist() == [12, 21, 22, EOS]
    assert item["loss_mask"].tolist() == [0, 1, 1, 1]
    assert item["position_ids"].tolist() == [0, 1, 2, 3]
    types = {name: value.dtype for name, value in item.items()}
    assert {types[n] for n in ("tokens", "labels", "position_ids")} == {torch.int64}
    assert types["loss_mask"] == torch.float32
    for name in ("original_seq_len", "padded_seq_len"):
        assert types[name] == torch.int32
        assert item[name].tolist() == [4]


def test_padding_follows_the_alignment_and_is_masked_by_position(tmp_path: Path) -> None:
    """D1 with A = 2 * CP * TP = 8, and pad = EOS, because this tokenizer has no pad id (D8)."""
    layout = {"context_parallel_size": 2, "sequence_parallel_size": 2, "sequence_length": 16}
    item = _dataset(tmp_path, [_chat("11 12", "21 22")], **layout)[0]
    assert item["tokens"].tolist() == [11, 12, 21, 22, EOS, EOS, EOS, EOS]
    assert item["labels"].tolist()[:4] == [12, 21, 22, EOS]
    assert item["loss_mask"].tolist() == [0, 1, 1, 1, 0, 0, 0, 0]
    assert (item["original_seq_len"].item(), item["padded_seq_len"].item()) == (4, 8)


def test_own_pad_id_is_used(tmp_path: Path) -> None:
    layout = {"context_parallel_size": 2, "tokenizer": _null_tokenizer(pad_id=3)}
    assert _dataset(tmp_path, [{"text": "1 2"}], **layout)[0]["tokens"].tolist() == [1, 2, 3, 3]


def test_reference_pads_to_sequence_length(tmp_path: Path) -> None:
    rows = [_chat("11 12", "21 22"), _chat("5", None)]
    padded = _dataset(tmp_path, rows, varlen_sbhd_validation=True)
    assert set(padded[0]) == {"tokens", "labels", "loss_mask", "position_ids"}
    assert padded[0]["tokens"].tolist() == [11, 12, 21, 22, EOS, EOS, EOS, EOS]
    assert padded[0]["loss_mask"].tolist() == [0, 1, 1, 1, 0, 0, 0, 0]
    assert padded[1]["loss_mask"].sum() == 0
    assert padded[1]["tokens"].shape == (8,)


def test_plain_megatron_config_means_our_defaults(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "1 2 3"}\n')
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=8,
        tokenizer=_null_tokenizer(),
        blend=([str(path)], None),
        split="1,0,0",
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    source = VarlenDataset.build_low_level_dataset(str(path), config)
    item = VarlenDataset(source, str(path), np.arange(1), 1, Split.train, config)[0]
    assert item["labels"].tolist() == [2, 3, EOS]


D9_ROWS: dict[type[VarlenDataset], list[dict]] = {
    VarlenDataset: [{"text": "1 2 3"}, {"text": "4 5"}],
    SFTDataset: [_chat("1 2", "3"), _chat("4", "5 6")],
    PreferenceDataset: [
        {"prompt": "1 2", "chosen": "3 4", "rejected": "5"},
        {"prompt": "1", "chosen": "6", "rejected": "8 9"},
    ],
    MockVarlenDataset: [],
}


@pytest.mark.parametrize(
    ("kind", "padded"), [*((kind, False) for kind in D9_ROWS), (VarlenDataset, True), (MockVarlenDataset, True)]
)
def test_items_share_no_buffers(kind: type[VarlenDataset], padded: bool, tmp_path: Path) -> None:
    """D9: 0, 1, 0 again; editing what was handed out changes nothing later."""
    dataset = _dataset(tmp_path, D9_ROWS[kind], kind, varlen_sbhd_validation=padded)
    first, other, again = (_tensors(dataset[i]) for i in (0, 1, 0))
    assert len(first) >= 4
    assert any(one.tolist() != two.tolist() for one, two in zip(first, other, strict=True))
    kept = [tensor.clone() for tensor in first]
    for tensor in (*first, *other):
        tensor.zero_()
    for read in (again, _tensors(dataset[0])):
        assert all(torch.equal(one, two) for one, two in zip(kept, read, strict=True))
    for number, tensor in enumerate(again):  # nor do two fields share one
        tensor += 1
        assert all(torch.equal(one, two) for one, two in zip(kept[number + 1 :], again[number + 1 :], strict=True))


def _tensors(item: dict[str, Any]) -> list[torch.Tensor]:
    parts = item.get("together", [item])
    return [value for part in parts for value in part.values() if torch.is_tensor(value)]


def test_rows_follow_file_order_and_wrap_around(tmp_path: Path) -> None:
    dataset = _dataset(tmp_path, [{"text": f"{i} {i} {i}"} for i in range(10, 15)])
    assert len(dataset) == 5
    assert [dataset[i]["tokens"][0].item() for i in range(12)] == [10 + i % 5 for i in range(12)]


def test_shuffled_epochs_hold_each_row_once_and_differ(tmp_path: Path) -> None:
    rows = [{"text": f"{i} {i} {i}"} for i in range(10, 30)]
    dataset = _dataset(tmp_path, rows, packing_shuffle=True)
    order = [dataset[i]["tokens"][0].item() for i in range(60)]
    epochs = [order[i : i + 20] for i in (0, 20, 40)]
    assert all(sorted(epoch) == list(range(10, 30)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, list(range(10, 30))]}) == 4
    assert [pickle.loads(pickle.dumps(dataset)).row_of(i) + 10 for i in range(60)] == order
    other_seed = _dataset(tmp_path, rows, packing_shuffle=True, random_seed=2)
    assert [other_seed.row_of(i) + 10 for i in range(20)] != epochs[0]
    padded = _dataset(tmp_path, rows, packing_shuffle=True, varlen_sbhd_validation=True)
    assert [padded[i]["tokens"][0].item() for i in range(60)] == order


def test_only_training_rows_are_shuffled(tmp_path: Path) -> None:
    dataset = _dataset(tmp_path, [{"text": f"{i} {i}"} for i in range(20)], packing_shuffle=True)
    for split in (Split.valid, Split.test):
        other = VarlenDataset(dataset.dataset, "rows", np.arange(5, 15), None, split, dataset.config)
        assert [other.row_of(i) for i in range(10)] == list(range(5, 15))
    part = VarlenDataset(dataset.dataset, "rows", np.arange(5, 15), None, Split.train, dataset.config)
    assert sorted(part.row_of(i) for i in range(10)) == list(range(5, 15))


def test_row_without_targets_leaves_with_its_reason(tmp_path: Path) -> None:
    dataset = _dataset(tmp_path, [_chat("1 2", None), {"text": ""}, {"text": "1 2"}])
    assert dataset[0]["dropped"] == "no_targets"
    assert dataset[1]["dropped"] == "empty"
    assert dataset[0]["original_seq_len"].item() == 0
    assert dataset[0]["tokens"].numel() == 0
    assert "dropped" not in dataset[2]
    assert dataset[0]["why"].endswith("rows.jsonl:1: has nothing that is to be learned, such as an assistant turn")
    assert dataset[1]["why"].endswith("rows.jsonl:2: says nothing")
    assert "why" not in dataset[2]


def test_bad_rows_stop_or_are_skipped_but_settings_always_stop(tmp_path: Path) -> None:
    rows = [{"text": 5}, {"text": "1 2 3 4 5 6 7 8 9 10"}]
    with pytest.raises(SampleError, match=r"rows\.jsonl:1: "):
        _dataset(tmp_path, rows)[0]
    skipping = _dataset(tmp_path, rows, packing_bad_rows="skip")
    assert skipping[0]["dropped"] == "bad_content"
    assert "rows.jsonl:1: field 'text' is 5" in skipping[0]["why"]
    with pytest.raises(SampleError, match="--packing-overlong"):
        skipping[1]


def test_truncated_sample_says_so(tmp_path: Path) -> None:
    dataset = _dataset(
        tmp_path, [{"text": "1 2 3 4 5 6 8 9 10"}, {"text": "1 2 3 4 5 6 8 9"}], packing_overlong="truncate"
    )
    assert dataset[0]["truncated"]
    assert dataset[0]["why"].endswith("rows.jsonl:1: cut to --seq-length 8")
    assert dataset[0]["labels"].tolist() == [2, 3, 4, 5, 6, 8, 9, 10]  # no EOS is made up
    assert "truncated" not in dataset[1]  # seq_length + 1 raw ids fit (D2)


def test_a_split_text_is_one_item_of_several_samples(tmp_path: Path) -> None:
    dataset = _dataset(
        tmp_path, [{"text": " ".join(map(str, range(10, 29)))}, {"text": "1 2"}], packing_overlong="split"
    )
    item = dataset[0]
    assert set(item) == {"tokens", "labels", "loss_mask", "position_ids", "cu_seqlens", "max_seqlen"}
    assert item["position_ids"].tolist() == [*range(8), *range(8), 0, 1, 2]
    assert (item["cu_seqlens"].tolist(), item["cu_seqlens"].dtype) == ([0, 8, 16, 19], torch.int32)
    assert item["max_seqlen"].item() == 8
    pieces = samples_of_row(item)
    assert [piece.tokens_L.tolist() for piece in pieces] == [list(range(10, 18)), list(range(18, 26)), [26, 27, 28]]
    assert [piece.labels_L.tolist() for piece in pieces] == [list(range(11, 19)), list(range(19, 27)), [27, 28, EOS]]
    assert all(piece.loss_mask_L.all() for piece in pieces)
    assert set(dataset[1]) == VARLEN_FIELDS


def test_the_turns_learned_and_the_schema_are_the_runs_to_choose(tmp_path: Path) -> None:
    turns = [*_chat("1", "2")["messages"], *_chat("3", "4")["messages"]]
    rows = [{"messages": turns, "text": "5 6 8"}]
    assert _dataset(tmp_path, rows)[0]["loss_mask"].tolist() == [1, 1, 0, 1, 1]
    last = _dataset(tmp_path, rows, packing_train_on="last-assistant")
    assert last[0]["loss_mask"].tolist() == [0, 0, 0, 1, 1]
    assert _dataset(tmp_path, rows, packing_schema="text")[0]["tokens"].tolist() == [5, 6, 8]


def test_the_padded_run_tells_each_loss_once(tmp_path: Path) -> None:
    """Megatron's own loop counts nothing, and its collate takes the four tensors alone."""
    rows = [{"text": ""}, {"text": ""}, {"text": "1 2 3 4 5 6 8 9 10"}]
    dataset = _dataset(tmp_path, rows, packing_overlong="truncate", varlen_sbhd_validation=True)
    with pytest.warns(UserWarning, match="rows.jsonl:") as told:
        items = [dataset[i] for i in range(3)]
    assert [str(one.message).split(" (")[1].split(")")[0] for one in told] == ["empty", "truncated"]
    assert {len(item) for item in items} == {4}


def test_empty_split_is_an_error_that_names_it(tmp_path: Path) -> None:
    dataset = _dataset(tmp_path, [{"text": "1 2"}])
    with pytest.raises(ConfigError, match="valid split none of its 1 rows"):
        VarlenDataset(dataset.dataset, "rows", np.arange(0), 4, Split.valid, dataset.config)


def test_dataset_pickles_without_its_rows(tmp_path: Path) -> None:
    """D7: what each worker is given does not grow with the file."""
    sizes = []
    for rows in (10, 1000):
        dataset = _dataset(tmp_path, [{"text": "1 2 3"}] * rows)
        dataset[0]
        pickled = pickle.dumps(dataset)
        assert pickle.loads(pickled)[3]["tokens"].tolist() == [1, 2, 3]
        sizes.append(len(pickled))
    assert sizes[1] - sizes[0] < 20
    some = VarlenDataset(dataset.dataset, "rows", np.array([5, 7, 6]), None, Split.train, dataset.config)
    assert [some.row_of(i) for i in range(4)] == [5, 7, 6, 5]


SFT_ROW = {
    "messages": [
        {"role": "system", "content": "1"},
        {"role": "user", "content": "11"},
        {"role": "assistant", "content": "21 22"},
        {"role": "system", "content": "2"},
        {"role": "user", "content": "12"},
        {"role": "assistant", "content": "23"},
    ]
}


def test_sft_buffer(tmp_path: Path) -> None:
    """Two conversations of 4 and 3 tokens in a buffer of 12; the tail belongs to neither."""
    dataset = _dataset(tmp_path, [SFT_ROW], SFTDataset, sequence_length=12)
    item = dataset[0]
    assert set(item) == {"tokens", "labels", "loss_mask", "position_ids", "cu_seqlens", "max_seqlen"}
    assert item["tokens"].tolist() == [1, 11, 21, 22, 2, 12, 23, *[EOS] * 5]
    assert item["labels"].tolist()[:7] == [11, 21, 22, EOS, 12, 23, EOS]
    assert item["loss_mask"].tolist() == [0, 1, 1, 1, 0, 1, 1, 0, 0, 0, 0, 0]
    assert item["position_ids"].tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3, 4]
    assert item["cu_seqlens"].tolist() == [0, 4, 7, *[12] * 10]
    assert item["cu_seqlens"].dtype == torch.int32
    assert (item["max_seqlen"].item(), item["max_seqlen"].dtype) == (5, torch.int32)
    parts = samples_of_row(item)
    assert [part.tokens_L.tolist() for part in parts] == [[1, 11, 21, 22], [2, 12, 23]]
    assert [part.labels_L.tolist() for part in parts] == [[11, 21, 22, EOS], [12, 23, EOS]]


@pytest.mark.parametrize(("policy", "lengths"), [("truncate", [4, 2]), ("drop", None), ("error", None)])
def test_sft_row_that_is_too_long(policy: str, lengths: list[int] | None, tmp_path: Path) -> None:
    dataset = _dataset(tmp_path, [SFT_ROW], SFTDataset, sequence_length=6, packing_overlong=policy)
    if policy == "error":
        with pytest.raises(SampleError, match="2 conversations have 7 tokens together; --seq-length is 6"):
            dataset[0]
    elif policy == "drop":
        assert dataset[0]["dropped"] == "overlong"
    else:
        assert [part.length for part in samples_of_row(dataset[0])] == lengths
        assert dataset[0]["truncated"]


@pytest.mark.parametrize("learned", [True, False])
def test_sft_row_that_loses_one_of_its_conversations_says_so(learned: bool, tmp_path: Path) -> None:
    """Here the second has nothing to learn: its answer is empty."""
    row = {"messages": [*SFT_ROW["messages"][:5], {"role": "assistant", "content": "23" if learned else ""}]}
    item = _dataset(tmp_path, [row], SFTDataset, sequence_length=12)[0]
    assert [part.length for part in samples_of_row(item)] == ([4, 3] if learned else [4])
    assert ("truncated" in item) is not learned
    if not learned:
        assert re.search(r"rows\.jsonl:1: cut to .*, or without those of its conversations", item["why"])


def _preference(prompt: str, chosen: str, rejected: str) -> dict:
    turns = [{"from": "human", "value": prompt}]
    sides = {"chosen": chosen, "rejected": rejected}
    return {"conversations": turns} | {name: {"from": "gpt", "value": answer} for name, answer in sides.items()}


def test_preference_row_makes_two_items_that_stay_together(tmp_path: Path) -> None:
    dataset = _dataset(tmp_path, [_preference("11 12", "21 22", "23")], PreferenceDataset, context_parallel_size=2)
    item = dataset[0]
    assert set(item) == {"together"}
    assert all(set(side) == VARLEN_FIELDS for side in item["together"])
    chosen, rejected = (samples_of_row(side)[0] for side in item["together"])
    assert (chosen.tokens_L.tolist(), chosen.labels_L.tolist()) == ([11, 12, 21, 22], [12, 21, 22, EOS])
    assert (rejected.tokens_L.tolist(), rejected.labels_L.tolist()) == ([11, 12, 23], [12, 23, EOS])
    assert (chosen.loss_mask_L.tolist(), rejected.loss_mask_L.tolist()) == ([0, 1, 1, 1], [0, 1, 1])
    assert [side["padded_seq_len"].item() for side in item["together"]] == [4, 4]
    assert [side["position_ids"].tolist() for side in item["together"]] == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize("policy", ["error", "drop", "truncate"])
def test_pair_of_which_one_answer_is_too_long(policy: str, tmp_path: Path) -> None:
    row = _preference("1", "2 3 4", "2 3 4 5 6 8")
    dataset = _dataset(tmp_path, [row], PreferenceDataset, sequence_length=5, packing_overlong=policy)
    if policy == "error":
        with pytest.raises(SampleError, match=r"rows\.jsonl:1: rejected: has 7 tokens; --seq-length is 5"):
            dataset[0]
    elif policy == "drop":
        assert dataset[0]["dropped"] == "overlong"
    else:
        assert dataset[0]["truncated"]
        assert [side["original_seq_len"].item() for side in dataset[0]["together"]] == [4, 5]


def test_pair_of_which_one_answer_teaches_nothing_is_dropped_whole(tmp_path: Path) -> None:
    dataset = _dataset(tmp_path, [_preference("1", "2", " "), {"prompt": "1", "chosen": "2"}], PreferenceDataset)
    assert dataset[0]["dropped"] == "no_targets"
    with pytest.raises(SampleError, match="lacks rejected"):
        dataset[1]
    skipping = _dataset(tmp_path, [{"prompt": "1", "chosen": "2"}], PreferenceDataset, packing_bad_rows="skip")
    assert skipping[0]["dropped"] == "missing_key"


def test_mock_lengths_and_learnable_ids() -> None:
    config = _config(sequence_length=16, varlen_mock_dataset_config_json='{"mode":"lengths","lengths":[3,16,1]}')
    source = MockVarlenDataset.build_low_level_dataset(None, config)
    dataset = MockVarlenDataset(source, None, np.arange(len(source)), 6, Split.train, config)
    assert [dataset[i]["original_seq_len"].item() for i in range(6)] == [3, 16, 1, 3, 16, 1]
    assert dataset[0]["labels"][-1].item() == EOS
    assert dataset[1]["loss_mask"].sum() == 16
    assert torch.equal(dataset[0]["tokens"], dataset[3]["tokens"])


def test_survey_goes_through_the_users_own_conversion(tmp_path: Path) -> None:
    class Reversed(VarlenDataset):
        def convert(self, row: Any) -> Any:
            return np.array([*reversed(row.fields["ids"]), EOS])

    path = tmp_path / "rows.jsonl"
    path.write_text('{"ids": [1, 2, 3]}\n')
    lines = list(survey_sources(Reversed, _config(blend=([str(path)], None))))
    assert any("1 samples, 3 tokens, 3 targets" in line for line in lines)
    with pytest.raises(SampleError, match="ids"):
        list(survey_sources(VarlenDataset, _config(blend=([str(path)], None))))


def test_every_file_of_a_folder_is_looked_at(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "1 2 3"}\n' * 1_200)
    lines = list(survey_sources(VarlenDataset, _config(blend=([str(tmp_path)], None))))
    assert lines[1].startswith(f"{tmp_path}: 3,600 rows in 3 files; of the first 999 (those of each file): 999 samples")
    (tmp_path / "c.jsonl").write_text('{"text": "1 2 3"}\n' * 1_199 + "{")
    with pytest.raises(SampleError, match=r"c\.jsonl:1200: not valid JSON"):
        list(survey_sources(VarlenDataset, _config(blend=([str(tmp_path)], None))))


def test_what_nobody_foresaw_names_its_row(tmp_path: Path) -> None:
    class Faulty(VarlenDataset):
        def convert(self, row: Any) -> Any:
            return np.array([1, 1 // (row.line - 2), EOS])

    path = tmp_path / "rows.jsonl"
    path.write_text("{}\n" * 3)
    with pytest.raises(PackingError, match=r"row 2 of .*rows\.jsonl: ZeroDivisionError: .*test_dataset\.py"):
        list(survey_sources(Faulty, _config(blend=([str(path)], None))))


def test_own_class_is_found_or_refused() -> None:
    assert dataset_class_of("megatron_packing.mcore.dataset:SFTDataset") is SFTDataset
    for name in ("json:loads", "no.such.module:Thing", "json", "json:Nothing"):
        with pytest.raises(ConfigError, match="--packing-dataset"):
            dataset_class_of(name)
