"""From Megatron's real parser to our settings, and what is set before Megatron validates."""

import argparse
from collections.abc import Iterator

import pytest
from megatron.training.arguments import add_megatron_arguments

from megatron_packing.config import CHAT_FORMATS, FP8_ROWS, OVERLONG_POLICIES, TRAIN_ON, PackingConfig
from megatron_packing.data import chat, encode
from megatron_packing.errors import ConfigError, MissingDependency
from megatron_packing.mcore import args as packing_args
from megatron_packing.mcore import te_versions

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
    config, parsed = _settled(parser, f"{LOCAL} --use-varlen-dataset --packing-attention te --window-size 7,0")
    assert (config.attention, parsed.spec) == ("te", packing_args.LOCAL_SPEC_TE)


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
        (f"{TE} --use-varlen-dataset --packing-attention sdpa", "--packing-attention sdpa with --transformer-impl"),
        (f"{LOCAL} --use-varlen-dataset --packing-attention sdpa --spec a b", "attention sdpa: two layer specs"),
        (f"{LOCAL} --use-varlen-dataset --packing-attention te --spec a b", "attention te: two layer specs"),
        (f"{LOCAL} --use-varlen-dataset --packing-shuffle --dataloader-type cyclic", "two shuffles"),
        ("--transformer-impl local --use-varlen-dataset", "--seq-length is missing"),
        (
            f"{LOCAL} --use-varlen-dataset --packing-chat-format plain --tokenizer-type NullTokenizer",
            "--packing-chat-format plain with NullTokenizer",
        ),
        (f"{LOCAL} --dynamic-context-parallel", "--use-varlen-dataset"),
        (f"{LOCAL} --use-varlen-dataset --fp8-format hybrid", "--fp8-format hybrid: only Transformer Engine's layers"),
        (f"{TE} --use-varlen-dataset --fp8-format hybrid --fp8-recipe custom", "--fp8-recipe custom: how many rows"),
        (f"{TE} --use-varlen-dataset --fp8-format e4m3 --max-seqlen-per-dp-cp-rank 72", "16 rows a rank for FP8"),
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


FP8 = f"{TE} --use-varlen-dataset --fp8-format hybrid"


def test_packs_of_one_shape_and_of_whole_units(
    parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = f"{LOCAL} --use-varlen-dataset --thd-max-packed-sequences 9"
    parsed = parser.parse_args(f"{flags} --pad-packed-seq-alignment max".split())
    config = packing_args.resolve(parsed)
    assert (config.pad_alignment, config.num_boundaries, config.most_samples) == ("max", 10, 8)
    said = [line for line in packing_args.apply(config, parsed) if "fixed shapes" in line]
    assert said == ["fixed shapes: a pack of 64 rows or a multiple of it has 10 boundaries, and max_seqlen is its rows"]
    config, _ = _settled(parser, f"{flags} --pad-packed-seq-alignment 48")
    assert (config.pad_alignment, config.max_tokens_per_rank, config.rows_of(50)) == (48, 96, 96)
    config, _ = _settled(parser, flags)
    assert (config.pad_alignment, config.num_boundaries, config.rows_of(50)) == (None, None, 50)
    with pytest.raises(SystemExit):
        parser.parse_args(["--pad-packed-seq-alignment", "most"])
    assert "'most' is neither a number of rows nor max" in capsys.readouterr().err


@pytest.mark.parametrize(("recipe", "rows"), [("", 16), ("tensorwise", 16), ("mxfp8", 32), ("blockwise", 128)])
def test_fp8_fills_packs_up_for_its_recipe_and_says_what_is_not_proven(
    parser: argparse.ArgumentParser, recipe: str, rows: int
) -> None:
    flags = f"{FP8} --seq-length 60 {f'--fp8-recipe {recipe}' if recipe else ''}"
    parsed = parser.parse_args(flags.split())
    config = packing_args.resolve(parsed)
    assert (config.topology.quantized_rows, config.topology.alignment) == (rows, 1)
    assert config.max_tokens_per_rank == {16: 64, 32: 64, 128: 128}[rows], "the default is a whole number of units"
    assert config.rows_of(17) == max(32, rows)
    (said,) = [line for line in packing_args.apply(config, parsed) if "FP8" in line]
    assert f"multiples of {rows} rows = {rows} on each rank. WARNING: packed training in FP8 was never run" in said


def test_a_recipe_s_rows_are_what_megatron_pads_its_own_matrices_to() -> None:
    """For blocks of 128 x 128 Megatron says 16, which holds the matrix product alone and cuts blocks."""
    from megatron.core.enums import Fp8Recipe
    from megatron.core.fp8_utils import get_fp8_align_size

    assert {recipe.value for recipe in Fp8Recipe} == {*FP8_ROWS, "custom"}
    for name, rows in FP8_ROWS.items():
        assert rows % get_fp8_align_size(Fp8Recipe(name)) == 0
        assert name == "blockwise" or rows == get_fp8_align_size(Fp8Recipe(name))


PACKED_INPUTS = (f"{LOCAL} --sft", f"{LOCAL} --dataloader-inter-document-masking")


@pytest.mark.parametrize("inputs", PACKED_INPUTS)
@pytest.mark.parametrize("kernel", ["auto", "sdpa", "varlen", "flash"])
def test_our_attention_alone_for_what_megatron_packs_itself(
    parser: argparse.ArgumentParser, inputs: str, kernel: str
) -> None:
    parsed = parser.parse_args(f"{inputs} --packing-attention {kernel} --micro-batch-size 2".split())
    before = vars(parsed).copy()
    assert not packing_args.wants_packing(parsed)
    assert packing_args.kernel(parsed) == kernel
    assert packing_args.apply_to_packed_inputs(parsed) == [
        "core attention: ours, within the boundaries of inputs that Megatron packs"
    ]
    changed = {name for name, value in vars(parsed).items() if value != before[name]}
    assert changed == {"spec", "create_attention_mask_in_dataloader"}, "data, loss and steps stay Megatron's"
    assert parsed.spec == packing_args.LOCAL_SPEC


def test_it_is_not_on_unless_asked_for(parser: argparse.ArgumentParser) -> None:
    parsed = parser.parse_args(f"{LOCAL} --sft".split())
    assert (parsed.packing_attention, packing_args.kernel(parsed)) == (None, "auto")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (f"{LOCAL} --packing-attention sdpa", "--packing-attention sdpa: nothing is packed here. Add --sft"),
        (f"{TE} --sft --packing-attention auto", r"--packing-attention auto with --sft .* \(te\) is no business"),
        (f"{TE} --sft --packing-attention sdpa", "--packing-attention sdpa with --transformer-impl transformer_engine"),
        (f"{LOCAL} --sft --packing-attention stock", r"\(stock\) is no business of ours"),
        (f"{LOCAL} --sft --packing-attention auto --spec a b", r"\(spec\) is no business of ours"),
        (f"{LOCAL} --sft --packing-attention varlen --spec a b", "two layer specs"),
        (f"{LOCAL} --sft --packing-attention auto --context-parallel-size 2", "--context-parallel-size 2 with inputs"),
        (f"{LOCAL} --sft --packing-attention auto --multi-latent-attention", "--multi-latent-attention: not proven"),
        (f"{LOCAL} --sft --packing-attention auto --softmax-type learnable", "--softmax-type learnable: our"),
        (f"{LOCAL} --sft --packing-attention auto --fp8-format hybrid", "--fp8-format hybrid: only Transformer"),
        (f"{LOCAL} --sft --packing-attention auto --attention-backend local", "--attention-backend local: puts"),
    ],
)
def test_what_our_attention_alone_is_not_proven_with(parser: argparse.ArgumentParser, flags: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        packing_args.apply_to_packed_inputs(parser.parse_args(flags.split()))


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
        ("--spec a b", "attention 'spec': proven with ours and with Transformer Engine's only"),
        ("--transformer-impl transformer_engine --fp8-format hybrid", "--fp8-format hybrid: not proven with dynamic"),
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


SHARED = f"{TE} --use-varlen-dataset --bf16 --num-attention-heads 8 --group-query-attention --num-query-groups 2"


def _te_check(
    parser: argparse.ArgumentParser,
    monkeypatch: pytest.MonkeyPatch,
    flags: str,
    version: str | None,
    *,
    dry_run: bool = True,
) -> list[str]:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(te_versions, "installed", lambda: version)
    parsed = parser.parse_args(flags.split())
    return packing_args.check_transformer_engine(packing_args.resolve(parsed), parsed, dry_run=dry_run)


@pytest.mark.parametrize(
    ("flags", "version", "words"),
    [
        ("", "1.9.0", "Transformer Engine 1.9.0: packing needs 1.10 or newer for padded boundaries"),
        ("", "2.1.0", "Transformer Engine 2.1.0: packing needs 2.2 or newer"),
        ("--softmax-type learnable", "2.11.0", "2.12 or newer for attention sinks"),
        ("--context-parallel-size 2 --cp-comm-type all_gather", "2.17.1", "--cp-comm-type all_gather with .* 2.17.1"),
        ("--context-parallel-size 2 --window-size 7,0", "2.20.2", "--window-size with --cp-comm-type p2p"),
        ("--context-parallel-size 4 --cp-comm-type a2a", "2.20.2", "8 query and 2 key heads .* over 4"),
        (
            "--context-parallel-size 2 --tensor-model-parallel-size 2 --cp-comm-type a2a",
            "2.20.2",
            "4 query and 1 key heads",
        ),
        (
            "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 4 1",
            "2.20.2",
            "over 4 context-parallel ranks",
        ),
    ],
)
def test_what_the_installed_transformer_engine_cannot_do_is_refused_at_start_up(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch, flags: str, version: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        _te_check(parser, monkeypatch, f"{SHARED} {flags}", version)


CHANGING = f"{SHARED} --no-rope-fusion --dynamic-context-parallel"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--cp-comm-type a2a", "8 query and 2 key heads .* over 4 context-parallel ranks"),
        ("--cp-comm-type a2a+p2p", "dynamic_cp with groups of up to 4 ranks and --cp-comm-type a2a.p2p"),
        ("--window-size 7,0", "--window-size with --cp-comm-type p2p"),
        ("--cp-comm-type p2p p2p p2p --num-layers 2", "--cp-comm-type p2p p2p p2p: names 3 kinds for 2 layers"),
        ("--rope-fusion", "RoPE fusion: not proven"),
    ],
)
def test_what_it_cannot_do_with_groups_that_change_is_refused(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch, flags: str, words: str
) -> None:
    changing = CHANGING.replace("--no-rope-fusion", "") if flags == "--rope-fusion" else f"{CHANGING} {flags}"
    with pytest.raises(ConfigError, match=words):
        _te_check(parser, monkeypatch, changing, "2.20.2")


@pytest.mark.parametrize(
    "flags",
    ["", "--cp-comm-type p2p all_gather --num-layers 2", "--tensor-model-parallel-size 2 --sequence-parallel"],
)
def test_groups_that_change_pass_with_it(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch, flags: str
) -> None:
    (said,) = _te_check(parser, monkeypatch, f"{CHANGING} {flags}", "2.20.2")
    assert said.startswith("Transformer Engine 2.20.2")


def test_fp32_has_no_context_parallelism_in_transformer_engine(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="--context-parallel-size 2 in fp32"):
        _te_check(parser, monkeypatch, f"{SHARED} --context-parallel-size 2".replace("--bf16", ""), "2.20.2")


def test_what_it_can_do_passes_and_is_said(parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = f"{SHARED} --context-parallel-size 2 --cp-comm-type a2a --window-size 7,0 --softmax-type learnable"
    (said,) = _te_check(parser, monkeypatch, flags, "2.17.1")
    assert said.startswith("Transformer Engine 2.17.1")


def test_without_transformer_engine_only_a_dry_run_goes_on(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    (said,) = _te_check(parser, monkeypatch, SHARED, None)
    assert "not installed here" in said
    with pytest.raises(MissingDependency, match="not installed"):
        _te_check(parser, monkeypatch, SHARED, None, dry_run=False)
    # One that its package names, and Megatron cannot load: this environment's.
    with pytest.raises(MissingDependency, match="Megatron could not import it"):
        _te_check(parser, monkeypatch, SHARED, "2.20.2", dry_run=False)


def test_runs_that_do_not_use_it_ask_nothing_of_it(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _te_check(parser, monkeypatch, f"{LOCAL} --use-varlen-dataset", None, dry_run=False) == []
    reference = f"{TE} --use-varlen-dataset --varlen-sbhd-validation"
    assert _te_check(parser, monkeypatch, reference, "1.9.0", dry_run=False) == []
