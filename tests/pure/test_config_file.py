import argparse
from pathlib import Path

import pytest

from megatron_packing.config_file import flags_left_out, merge_flags
from megatron_packing.errors import ConfigError


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(
        """
        # a comment
        seq-length: 512
        micro_batch_size: 1
        lr: 3.0e-4
        bf16: true
        use-varlen-dataset: True
        sequence-parallel: false
        split: 99,1,0
        packing-dataset: corpus:Rows
        data-path: [0.5, a.jsonl, 0.5, b.jsonl]
        tokenizer-model: null
        """,
        encoding="utf-8",
    )
    return path


def test_keys_become_flags_in_the_order_of_the_file(config: Path) -> None:
    assert merge_flags(config, []) == [
        *("--seq-length", "512"),
        *("--micro-batch-size", "1"),
        *("--lr", "0.0003"),
        "--bf16",
        "--use-varlen-dataset",
        *("--split", "99,1,0"),
        *("--packing-dataset", "corpus:Rows"),
        *("--data-path", "0.5", "a.jsonl", "0.5", "b.jsonl"),
    ]


def test_flags_that_the_file_switches_off_can_be_looked_up(config: Path) -> None:
    assert flags_left_out(config) == ["--sequence-parallel", "--tokenizer-model"]


def test_argparse_reads_what_the_file_says(config: Path) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seq-length", type=int)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--data-path", nargs="*")
    parsed, _ = parser.parse_known_args(merge_flags(config, ["--train-iters", "5"]))
    assert vars(parsed) == {
        "seq_length": 512,
        "lr": 3e-4,
        "bf16": True,
        "sequence_parallel": False,
        "data_path": ["0.5", "a.jsonl", "0.5", "b.jsonl"],
    }


@pytest.mark.parametrize(
    "argv",
    [
        pytest.param(["--seq-length", "64"], id="two-words"),
        pytest.param(["--seq-length=64"], id="one-word"),
    ],
)
def test_the_command_line_wins(config: Path, argv: list[str]) -> None:
    merged = merge_flags(config, argv)
    assert [word for word in merged if word.startswith("--seq-length")] == [argv[0]]
    assert "512" not in merged
    assert merged[-len(argv) :] == argv


def test_the_command_line_replaces_a_whole_list_and_a_key_with_underscores(config: Path) -> None:
    merged = merge_flags(config, ["--data-path", "c.jsonl", "--micro-batch-size", "2"])
    assert merged.count("--data-path") == merged.count("--micro-batch-size") == 1
    assert not {"a.jsonl", "b.jsonl"} & set(merged)
    assert merged[-4:] == ["--data-path", "c.jsonl", "--micro-batch-size", "2"]


def test_a_flag_whose_name_starts_alike_does_not_count_as_given(config: Path) -> None:
    merged = merge_flags(config, ["--seq-length-extra", "9"])
    assert "512" in merged


def test_a_value_is_no_flag(config: Path) -> None:
    assert "512" in merge_flags(config, ["--save", "seq-length"])


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_negative_number_is_a_value(tmp_path: Path) -> None:
    assert merge_flags(write(tmp_path, "seed: -1"), []) == ["--seed", "-1"]


@pytest.mark.parametrize("text", ["model: {layers: 2}", "split: [99, [1, 0]]", "split: [a, {b: 1}]"])
def test_a_nested_value_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.yaml: --(model|split) holds a nested value; use a plain value or a"):
        merge_flags(write(tmp_path, text), [])


@pytest.mark.parametrize("text", ["- seq-length", "seq-length", ""])
def test_a_file_that_maps_nothing_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.yaml: holds (list|str|NoneType); it must map flags to values"):
        merge_flags(write(tmp_path, text), [])


@pytest.mark.parametrize("text", ["a: [1", "a: b: c", "\t: 1"])
def test_a_file_that_is_no_yaml_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.yaml: not valid YAML: "):
        merge_flags(write(tmp_path, text), [])


def test_a_file_that_is_no_text_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"seq-length: \xff\xfe")
    with pytest.raises(ConfigError, match=r"run\.yaml: not valid YAML: "):
        merge_flags(path, [])


@pytest.mark.parametrize(
    "text", ["seq-length: 512\nseq-length: 64", "seq-length: 512\nlr: 1\nseq_length: 64"], ids=["same", "spelled-apart"]
)
def test_a_flag_that_is_set_twice_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.yaml: sets --seq-length 2 times. Keep one"):
        merge_flags(write(tmp_path, text), [])


@pytest.mark.parametrize("name", ["missing.yaml", "."])
def test_a_missing_file_is_an_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"--config .*: no such file\. Give a YAML file of flags"):
        merge_flags(tmp_path / name, [])
