"""From Megatron's real parser to our settings, and what is set before Megatron validates."""

import argparse
from collections.abc import Iterator

import pytest
from megatron.training.arguments import add_megatron_arguments

from megatron_packing.config import CHAT_FORMATS, OVERLONG_POLICIES, TRAIN_ON, PackingConfig
from megatron_packing.data import chat, encode
from megatron_packing.errors import ConfigError
from megatron_packing.mcore import args as packing_args

LOCAL = "--transformer-impl local --seq-length 64"
TE = "--transformer-impl transformer_engine --seq-length 64"


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    return packing_args.add_packing_args(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))


def _settled(parser: argparse.ArgumentParser, flags: str) -> tuple[PackingConfig, argparse.Namespace]:
    parsed = parser.parse_args(flags.split())
    config = packing_args.resolve(parsed)
    packing_args.apply(config, parsed)
    return config, parsed


def test_local_layers_get_our_attention_and_transformer_engines_spec_is_untouched(
    parser: argparse.ArgumentParser,
) -> None:
    config, parsed = _settled(parser, f"{LOCAL} --use-varlen-dataset")
    assert (config.attention, parsed.spec) == ("sdpa", packing_args.LOCAL_SPEC)
    config, parsed = _settled(parser, f"{TE} --use-varlen-dataset")
    assert (config.attention, parsed.spec) == ("te", None)


def test_reference_run_keeps_stock_attention_unless_told_otherwise(parser: argparse.ArgumentParser) -> None:
    reference = f"{LOCAL} --use-varlen-dataset --varlen-sbhd-validation"
    config, parsed = _settled(parser, reference)
    assert (config.attention, config.packed, parsed.spec) == ("stock", False, None)
    assert parsed.calculate_per_token_loss
    config, parsed = _settled(parser, f"{reference} --packing-attention sdpa --micro-batch-size 4")
    assert (config.attention, parsed.spec) == ("sdpa", packing_args.LOCAL_SPEC)


def test_defaults_of_a_packed_run(parser: argparse.ArgumentParser) -> None:
    config, parsed = _settled(parser, f"{LOCAL} --use-varlen-dataset")
    assert (config.scheduler, config.max_tokens_per_rank, config.dataset) == ("first_fit", 64, "varlen")
    assert (config.overlong, config.bad_rows, config.max_seqs) == ("error", "error", None)
    assert parsed.micro_batch_size == 1
    assert parsed.calculate_per_token_loss
    assert not parsed.create_attention_mask_in_dataloader


def test_the_flags_of_data_reach_the_settings(parser: argparse.ArgumentParser) -> None:
    flags = "--packing-train-on last-assistant --packing-schema cards:deck --packing-overlong split"
    config, _ = _settled(parser, f"{LOCAL} --use-varlen-dataset {flags}")
    assert (config.train_on, config.schema, config.overlong) == ("last-assistant", "cards:deck", "split")
    # Two rooms know these names; the data room may not import the settings.
    assert (OVERLONG_POLICIES, TRAIN_ON) == (encode.OVERLONG, encode.TRAIN_ON)
    assert ("auto", *chat._WAYS) == CHAT_FORMATS


def test_sft_is_taken_over_and_cleared(parser: argparse.ArgumentParser) -> None:
    config, parsed = _settled(parser, f"{LOCAL} --sft --sequence-packing-scheduler dp_balanced")
    assert (config.dataset, config.scheduler, parsed.sft) == ("sft", "dp_balanced", False)


def test_megatrons_own_shuffle_is_warned_of(parser: argparse.ArgumentParser) -> None:
    def warnings(flags: str) -> list[str]:
        parsed = parser.parse_args(f"{LOCAL} --use-varlen-dataset {flags}".split())
        return [line for line in packing_args.apply(packing_args.resolve(parsed), parsed) if "WARNING" in line]

    assert warnings("") == warnings("--packing-shuffle") == []
    (said,) = warnings("--dataloader-type cyclic")
    assert "come again" in said
    assert "other data parallelism" in said
    assert "other data parallelism" not in warnings("--dataloader-type cyclic --no-data-sharding")[0]


def test_sft_alone_is_megatrons_own(parser: argparse.ArgumentParser) -> None:
    assert not packing_args.wants_packing(parser.parse_args(["--sft"]))


def test_world_size_gives_data_parallelism(parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    config, _ = _settled(parser, f"{LOCAL} --use-varlen-dataset")
    assert config.topology.dp == 8
    with pytest.raises(ConfigError, match="world size 8: no multiple of TP 3"):
        _settled(parser, f"{LOCAL} --use-varlen-dataset --tensor-model-parallel-size 3")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            f"{LOCAL} --use-varlen-dataset --packing-attention te",
            "--packing-attention te with --transformer-impl local",
        ),
        (f"{TE} --use-varlen-dataset --packing-attention sdpa", "--packing-attention sdpa with --transformer-impl"),
        (f"{LOCAL} --use-varlen-dataset --packing-attention sdpa --spec a b", "two layer specs"),
        (f"{LOCAL} --use-varlen-dataset --packing-shuffle --dataloader-type cyclic", "two shuffles"),
        ("--transformer-impl local --use-varlen-dataset", "--seq-length is missing"),
        (
            f"{LOCAL} --use-varlen-dataset --packing-chat-format plain --tokenizer-type NullTokenizer",
            "--packing-chat-format plain with NullTokenizer",
        ),
        (f"{LOCAL} --dynamic-context-parallel", "--use-varlen-dataset"),
        # A planner that `megatron-packing plan` shows, and no run may use.
        (f"{LOCAL} --use-varlen-dataset --sequence-packing-scheduler offline", "a whole set ahead of time"),
        (
            f"{LOCAL} --use-varlen-dataset --dynamic-context-parallel --sequence-packing-scheduler first_fit",
            "--dynamic-context-parallel with --sequence-packing-scheduler first_fit",
        ),
        (
            f"{LOCAL} --use-varlen-dataset --min-dynamic-context-parallel-size 2",
            "--min-dynamic-context-parallel-size 2: without --dynamic-context-parallel",
        ),
        (
            f"{LOCAL} --use-varlen-dataset --varlen-sbhd-validation --dynamic-context-parallel",
            "--varlen-sbhd-validation with --sequence-packing-scheduler dynamic_cp",
        ),
    ],
)
def test_settings_that_contradict_each_other(parser: argparse.ArgumentParser, flags: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _settled(parser, flags)


DYNAMIC = f"{LOCAL} --use-varlen-dataset --no-rope-fusion --dynamic-context-parallel"


@pytest.mark.parametrize(
    "chosen",
    [
        "--dynamic-context-parallel",
        "--sequence-packing-scheduler dynamic_cp",
        "--sequence-packing-scheduler default_dynamic_cp --dynamic-context-parallel",
    ],
)
def test_dynamic_context_parallelism(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch, chosen: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    flags = f"{LOCAL} --use-varlen-dataset --no-rope-fusion {chosen} --min-dynamic-context-parallel-size 2"
    parsed = parser.parse_args(flags.split())
    config = packing_args.resolve(parsed)
    assert (config.scheduler, config.smallest_group, config.capacity) == ("dynamic_cp", 2, 4 * 64)
    assert config.for_evaluation().smallest_group == 2
    said = "\n".join(packing_args.apply(config, parsed))
    assert "each microbatch has groups of 2, 4 ranks, chosen by an algorithm of our own" in said


@pytest.mark.parametrize(
    ("flags", "tokens"),
    [
        ("", 16),  # of a sample of 15 tokens, a group of several ranks has two chunks on each
        ("--tensor-model-parallel-size 2", 16),
        ("--tensor-model-parallel-size 2 --sequence-parallel", 16),  # whose halves are cut in two once more
        ("--tensor-model-parallel-size 4 --sequence-parallel", 16),
        ("--context-parallel-size 2", 8),
        ("--context-parallel-size 4 --tensor-model-parallel-size 2 --sequence-parallel", 4),
        ("--pipeline-model-parallel-size 2 --num-experts 4 --moe-token-dispatcher-type alltoall", 16),
    ],
)
def test_a_rank_holds_as_many_tokens_as_every_size_of_group_can_fill_unless_told(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch, flags: str, tokens: int
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    config, _ = _settled(parser, f"{DYNAMIC} --seq-length 15 {flags}")
    assert config.max_tokens_per_rank == tokens
    ranks = config.topology.dp * config.topology.cp
    assert config.capacity == ranks * tokens
    assert all(tokens * size % config.topology.alignment_of(size) == 0 for size in (1, 2, 4, 8) if size <= ranks)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--min-dynamic-context-parallel-size 3", "is 3; it must divide the 4 DP x CP ranks"),
        ("--min-dynamic-context-parallel-size 0", "is 0; it counts ranks"),
        ("--context-parallel-size 2 --min-dynamic-context-parallel-size 3", "must divide the 4 DP x CP ranks"),
        ("--transformer-impl transformer_engine", "attention 'te': proven with ours only"),
        ("--spec a b", "attention 'spec': proven with ours only"),
        ("--packing-dataset preference", "--packing-dataset preference: 2 samples of a row"),
        ("--packing-eval-scheduler first_fit", "--packing-eval-scheduler first_fit with the training scheduler"),
        ("--max-seqlen-per-dp-cp-rank 3", "a multiple of the alignment 8"),
        ("--max-seqlen-per-dp-cp-rank 2", "a pack holds 8 tokens = 2 per rank x CP 4"),
    ],
)
def test_what_dynamic_context_parallelism_is_not_proven_with(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch, flags: str, words: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    given = DYNAMIC.replace("--use-varlen-dataset", "") if "--packing-dataset" in flags else DYNAMIC
    with pytest.raises(ConfigError, match=words):
        _settled(parser, f"{given} {flags}")


def test_dynamic_context_parallelism_with_fused_rope_is_not_proven(parser: argparse.ArgumentParser) -> None:
    with pytest.raises(ConfigError, match="Add --no-rope-fusion"):
        _settled(parser, DYNAMIC.replace("--no-rope-fusion", ""))
    with pytest.raises(ConfigError, match="--packing-eval-scheduler dynamic_cp with the training scheduler first_fit"):
        _settled(parser, f"{LOCAL} --use-varlen-dataset --packing-eval-scheduler dynamic_cp")


def test_what_balanced_keeps_small_follows_the_layout_unless_told(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    flags = f"{LOCAL} --use-varlen-dataset --sequence-packing-scheduler balanced"
    for more, balance, said in (
        ("", "auto", "over the whole step (step)"),
        ("--expert-model-parallel-size 2", "auto", "in each microbatch (lockstep)"),
        ("--expert-model-parallel-size 2 --packing-balance step", "step", "over the whole step (step)"),
    ):
        parsed = parser.parse_args(f"{flags} {more}".split())
        config = packing_args.resolve(parsed)
        assert config.balance == balance
        assert any(line.endswith(said) for line in packing_args.apply(config, parsed))
