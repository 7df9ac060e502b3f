import dataclasses
import re
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_packing import config
from megatron_packing.config import PackingConfig, check_megatron_flags
from megatron_packing.errors import ConfigError
from megatron_packing.schedule import SCHEDULERS
from megatron_packing.topology import Topology
from tests import strategies


def packed(**changes: Any) -> PackingConfig:
    values = {"topology": Topology(), "seq_length": 16, "scheduler": "first_fit", "max_tokens_per_rank": 16, **changes}
    return PackingConfig(**values)


def complaint_about_capacity(**changes: Any) -> str | None:
    """What is said of the capacity, whatever else is wrong with the settings."""
    try:
        packed(**changes)
    except ConfigError as error:
        return str(error) if "--max-seqlen-per-dp-cp-rank" in str(error) else None
    return None


# --- our own settings -----------------------------------------------------------------------------


@pytest.mark.parametrize("scheduler", sorted(SCHEDULERS))
def test_ordinary_settings_pass(scheduler: str) -> None:
    chosen = packed(topology=Topology(dp=8), scheduler=scheduler, max_seqs=4, overlong="truncate", bad_rows="skip")
    assert chosen.packed
    assert chosen.capacity == 16


def test_a_pack_is_filled_up_to_whole_units_of_every_rank() -> None:
    """Rows of a share, FP8 and alignment together: 12 a rank and 2*CP rows a sample are 24 of the pack."""
    chosen = packed(topology=Topology(cp=2), max_tokens_per_rank=24, pad_alignment=12)
    assert [chosen.rows_of(rows) for rows in (4, 24, 28, 48)] == [24, 24, 48, 48]
    assert chosen.num_boundaries is None
    fp8 = packed(topology=Topology(quantized_rows=16), max_tokens_per_rank=48, pad_alignment=6)
    assert [fp8.rows_of(rows) for rows in (1, 48)] == [48, 48]
    assert [packed(topology=Topology(quantized_rows=8)).rows_of(rows) for rows in (1, 9)] == [8, 16]


def test_packs_of_one_shape() -> None:
    fixed = packed(topology=Topology(cp=2), max_tokens_per_rank=8, pad_alignment="max", max_seqs=4)
    assert {fixed.rows_of(rows) for rows in (4, 8, 16)} == {16}
    assert (fixed.num_boundaries, fixed.most_samples) == (5, 3), "the tail is one of the four"
    free = packed(max_seqs=4)
    assert (free.num_boundaries, free.most_samples) == (None, 4)
    assert {free.rows_of(rows) == rows for rows in range(1, 17)} == {True}
    evaluation = packed(pad_alignment="max", max_seqs=4, eval_max_tokens_per_rank=32).for_evaluation()
    assert evaluation.rows_of(1) == 32


def test_the_reference_run_asks_nothing_of_packing() -> None:
    padded = packed(scheduler=None, max_tokens_per_rank=0, attention="stock", topology=Topology(cp=2, tp=2, pp=2))
    assert not padded.packed


def test_settings_cannot_change_later() -> None:
    with pytest.raises(FrozenInstanceError):
        packed().seq_length = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"seq_length": 0}, "--seq-length 0: must be at least 1", id="seq-length"),
        pytest.param({"log_interval": 0}, "--packing-log-interval 0: must be at least 1", id="log-interval"),
        pytest.param({"max_seqs": 0}, "--thd-max-packed-sequences 0: must be at least 1", id="max-seqs"),
        pytest.param(
            {"max_seqs": 1, "pad_alignment": 4},
            "--thd-max-packed-sequences 1 with --pad-packed-seq-alignment 4: the tail .*at least 2",
            id="no-room-beside-the-tail",
        ),
        pytest.param({"pad_alignment": 0}, "--pad-packed-seq-alignment 0: must be at least 1", id="rows-zero"),
        pytest.param(
            {"pad_alignment": 12},
            "--pad-packed-seq-alignment 12: .*multiples of 12 rows, but may hold 16 .*to a multiple of 12",
            id="rows-do-not-fill-a-pack",
        ),
        pytest.param(
            {"pad_alignment": 4, "scheduler": None},
            "--pad-packed-seq-alignment 4: the reference run does not pack",
            id="rows-of-the-reference-run",
        ),
        pytest.param(
            {"pad_alignment": "max", "scheduler": "dynamic_cp", "smallest_group": 1},
            "--pad-packed-seq-alignment max with dynamic context parallelism: not proven",
            id="rows-of-groups-that-change",
        ),
        pytest.param(
            {"max_tokens_per_rank": 0}, "--max-seqlen-per-dp-cp-rank 0: must be at least 1", id="capacity-zero"
        ),
        pytest.param(
            {"overlong": "cut"},
            "--packing-overlong cut: .*choose one of error, drop, truncate, truncate-left, split",
            id="overlong",
        ),
        pytest.param({"bad_rows": "drop"}, "--packing-bad-rows drop: .*choose one of error, skip", id="bad-rows"),
        pytest.param({"train_on": "users"}, "--packing-train-on users: .*all-assistant, last-assistant", id="train-on"),
        pytest.param({"overlong": "split", "scheduler": None}, "with --varlen-sbhd-validation", id="padded-split"),
        pytest.param({"overlong": "split", "dataset": "sft"}, "split with --sft", id="sft-split"),
        pytest.param({"attention": "stock"}, "--packing-attention stock: .*Use auto, sdpa or te", id="stock-attention"),
        pytest.param({"plan": "p", "scheduler": None}, "--packing-plan p with --varlen-sbhd-val", id="padded-plan"),
        pytest.param({"plan": "p", "dataset": "sft"}, "--packing-plan p with --packing-dataset sft", id="sft-plan"),
        pytest.param({"plan": "p", "dataset": "preference", "max_tokens_per_rank": 32}, "preference", id="pair-plan"),
        pytest.param({"plan": "p", "dataset": "mock"}, "--packing-plan p with --mock-data", id="mock-plan"),
        pytest.param({"plan": "p", "overlong": "split"}, "--packing-plan p with --packing-overlong", id="split-plan"),
        pytest.param(
            {"attention": "spec", "scheduler": "dynamic_cp", "smallest_group": 1},
            "dynamic_cp with the attention 'spec': .*Drop --spec",
            id="spec-of-groups-that-change",
        ),
        pytest.param({"plan": "p", "scheduler": "dynamic_cp"}, "with the scheduler dynamic_cp", id="groups-plan"),
        pytest.param({"fit_cost_steps": 5}, "fit-cost 5: only balanced looks at costs", id="fit-first-fit"),
        pytest.param({"prefetch": True, "scheduler": None}, "--packing-prefetch.*reference run", id="prefetch-padded"),
        pytest.param(
            {"prefetch": True, "fit_cost_steps": 5, "scheduler": "balanced"}, "--packing-fit-cost 5", id="prefetch-fit"
        ),
        pytest.param({"fit_cost_steps": -1}, "--packing-fit-cost -1: must be at least 1", id="fit-steps"),
        pytest.param(
            {"fit_cost_steps": 5, "scheduler": "balanced", "topology": Topology(pp=2)}, "PP 2, EP 1", id="fit-pipeline"
        ),
        pytest.param(
            {"fit_cost_steps": 5, "scheduler": "balanced", "topology": Topology(dp=2, ep=2)}, "EP 2", id="fit-experts"
        ),
    ],
)
def test_a_wrong_setting_names_its_flag_and_a_way_out(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        packed(**changes)


@pytest.mark.parametrize(
    "sizes", [{"tp": 2, "sequence_parallel": True, "cp": 2}, {"pp": 2, "vpp": 2, "cp": 2}, {"ep": 2, "pp": 2}]
)
def test_proven_layouts_pass(sizes: dict[str, Any]) -> None:
    assert packed(topology=Topology(**sizes), max_tokens_per_rank=16).packed


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("moe_token_dispatcher_type", "allgather", "--moe-token-dispatcher-type allgather"),
        ("moe_router_load_balancing_type", "sinkhorn", "--moe-router-load-balancing-type sinkhorn"),
        ("moe_router_load_balancing_type", ["sinkhorn"], "--moe-router-load-balancing-type .*padding included"),
        ("moe_router_load_balancing_type", "quantile_balancing", "--moe-router-load-balancing-type quantile_balancing"),
    ],
)
def test_what_a_packed_mixture_of_experts_is_refused(setting: str, value: Any, words: str) -> None:
    fine = {**ORDINARY, "num_experts": 8, "moe_token_dispatcher_type": "alltoall"}
    balanced: list[Any] = ["none", "aux_loss", ["aux_loss"], ["seq_aux_loss", "global_aux_loss"]]
    for balancing in balanced:
        fine |= {"moe_router_load_balancing_type": balancing, "moe_expert_capacity_factor": 1.5}
        check_megatron_flags(fine, packed=True, attention="te")
    check_megatron_flags({**fine, "num_experts": None, setting: value}, packed=True, attention="te")
    with pytest.raises(ConfigError, match=words):
        check_megatron_flags({**fine, setting: value}, packed=True, attention="te")


# --- capacity -------------------------------------------------------------------------------------

CP2_TP2 = Topology(cp=2, tp=2, sequence_parallel=True)  # alignment 8


def test_a_capacity_that_is_no_multiple_of_the_alignment_is_refused() -> None:
    said = complaint_about_capacity(topology=CP2_TP2, max_tokens_per_rank=14)
    assert said is not None
    assert "28 = 14 per rank x CP 2" in said
    assert "multiple of the alignment 8" in said
    assert "--max-seqlen-per-dp-cp-rank 12 (capacity 24) or 16 (capacity 32)." in said
    for fine in (12, 16):
        assert complaint_about_capacity(topology=CP2_TP2, max_tokens_per_rank=fine) is None


@pytest.mark.parametrize(
    ("topology", "seq_length", "too_low", "enough"),
    [(Topology(), 16, 15, 16), (Topology(cp=2), 13, 6, 8), (CP2_TP2, 9, 4, 8), (Topology(cp=3), 7, 2, 4)],
)
def test_a_capacity_below_the_longest_sample_is_refused(
    topology: Topology, seq_length: int, too_low: int, enough: int
) -> None:
    """The sample counts with its padding."""
    said = complaint_about_capacity(topology=topology, seq_length=seq_length, max_tokens_per_rank=too_low)
    assert said is not None
    assert f"--seq-length {seq_length}, padded" in said
    assert f"Raise it to at least {enough} or lower --seq-length" in said
    assert complaint_about_capacity(topology=topology, seq_length=seq_length, max_tokens_per_rank=enough) is None


def test_a_capacity_beyond_int32_is_refused() -> None:
    said = complaint_about_capacity(max_tokens_per_rank=2**31)
    assert said is not None
    assert "does not fit in int32 boundaries; the limit is 2147483647. Lower it." in said
    assert complaint_about_capacity(max_tokens_per_rank=2**31 - 1) is None


@given(topology=strategies.topologies(), max_tokens_per_rank=st.integers(1, 64), seq_length=st.integers(1, 64))
@settings(max_examples=200)
def test_a_refused_capacity_names_one_that_is_not(
    topology: Topology, max_tokens_per_rank: int, seq_length: int
) -> None:
    """Following the advice may take two steps, alignment and length, but the larger number always leads out."""
    tries = [max_tokens_per_rank]
    while (
        said := complaint_about_capacity(topology=topology, seq_length=seq_length, max_tokens_per_rank=tries[-1])
    ) and (len(tries) < 4):
        tries.append(int(re.findall(r"(?:or|at least|dp-cp-rank) (\d+)", said)[-1]))
    assert said is None, tries
    assert tries[-1] * topology.cp % topology.alignment == 0
    assert tries[-1] * topology.cp >= seq_length


def test_a_capacity_below_one_alignment_unit_is_not_advised_to_be_zero() -> None:
    said = complaint_about_capacity(topology=CP2_TP2, seq_length=1, max_tokens_per_rank=3)
    assert said is not None
    assert "--max-seqlen-per-dp-cp-rank 4 (capacity 8)." in said


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_tokens_per_rank": 8}, "2 samples of a row .* 32 together. Raise it to at least 16"),
        ({"max_seqs": 1}, "--thd-max-packed-sequences 1: 2 samples"),
        ({"scheduler": None}, "--varlen-sbhd-validation: a row of --packing-dataset preference makes 2 samples"),
        ({"eval_max_tokens_per_rank": 8}, "--packing-eval-max-seqlen-per-dp-cp-rank 8: .*at least 16"),
    ],
)
def test_pairs_need_room_for_both(changes: dict[str, Any], words: str) -> None:
    usual: dict[str, Any] = {"topology": CP2_TP2, "seq_length": 16, "scheduler": "first_fit", "dataset": "preference"}
    PackingConfig(**{**usual, "max_tokens_per_rank": 16, "max_seqs": 2})
    with pytest.raises(ConfigError, match=words):
        PackingConfig(**{**usual, "max_tokens_per_rank": 16, **changes})
    own = PackingConfig(**{**usual, "dataset": "my:Pairs", "max_tokens_per_rank": 8})
    own.check_together(1)
    with pytest.raises(ConfigError, match="2 samples"):
        own.check_together(2)


def test_evaluation_takes_training_s_settings_where_it_has_none_of_its_own() -> None:
    usual = PackingConfig(topology=CP2_TP2, seq_length=8, scheduler="first_fit", max_tokens_per_rank=8, overlong="drop")
    assert usual.for_evaluation() == usual
    own = dataclasses.replace(
        usual, eval_scheduler="dp_balanced", eval_max_tokens_per_rank=16, eval_overlong="error"
    ).for_evaluation()
    assert (own.scheduler, own.max_tokens_per_rank, own.overlong) == ("dp_balanced", 16, "error")
    assert own.for_evaluation() == own


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"eval_max_tokens_per_rank": 2}, "is 2, .*Set --packing-eval-max-seqlen-per-dp-cp-rank 4"),
        ({"eval_max_tokens_per_rank": 0}, "--packing-eval-max-seqlen-per-dp-cp-rank 0"),
        ({"eval_overlong": "shorten"}, "--packing-eval-overlong shorten"),
        ({"scheduler": None, "eval_scheduler": "first_fit"}, "--packing-eval-scheduler first_fit"),
        ({"scheduler": None, "eval_max_tokens_per_rank": 8}, "--packing-eval-max-seqlen-per-dp-cp-rank 8"),
    ],
)
def test_settings_of_evaluation_that_cannot_work(changes: dict[str, Any], words: str) -> None:
    usual: dict[str, Any] = {"topology": CP2_TP2, "seq_length": 8, "scheduler": "first_fit", "max_tokens_per_rank": 8}
    with pytest.raises(ConfigError, match=words):
        PackingConfig(**{**usual, **changes})


# --- Megatron's settings --------------------------------------------------------------------------

# What Megatron's parser gives for the settings that we look at, in an ordinary run.
ORDINARY: dict[str, Any] = {
    "reset_position_ids": False,
    "reset_attention_mask": False,
    "eod_mask_loss": False,
    "fim_data": False,
    "dataloader_type": None,
    "phase_transition_iterations": None,
    "perform_rl_step": False,
    "micro_batch_size": 1,
    "eval_micro_batch_size": None,
    "cuda_graph_impl": "none",
    "enable_cuda_graph": False,
    "external_cuda_graph": False,
    "overlap_moe_expert_parallel_comm": False,
    "dataloader_inter_document_masking": False,
    "hybrid_context_parallel": False,
    "position_embedding_type": "rope",
    "multi_latent_attention": False,
    "experimental_attention_variant": None,
    "inprocess_restart": False,
    "mtp_num_layers": None,
    "hybrid_layer_pattern": None,
    "hybrid_override_pattern": None,
    "heterogeneous_layers_config_path": None,
    "fp8": None,
    "fp4": None,
    "fp16": False,
    "use_torch_fsdp2": False,
    "use_megatron_fsdp": False,
    "logits_load_dir": None,
    "yaml_cfg": None,
    "window_size": None,
    "softmax_type": "vanilla",
    "qk_clip": False,
    "log_max_attention_logit": False,
    "attention_backend": "AttnBackend.auto",
}

ALWAYS = [
    ("reset_position_ids", True, "--reset-position-ids"),
    ("reset_attention_mask", True, "--reset-attention-mask"),
    ("eod_mask_loss", True, "--eod-mask-loss"),
    ("fim_data", True, "--fim-data"),
    ("dataloader_type", "external", "--dataloader-type external"),
    ("phase_transition_iterations", "5,9", "--phase-transition-iterations 5,9"),
    ("perform_rl_step", True, "--perform-rl-step"),
]
PACKED = [
    ("micro_batch_size", 2, "--micro-batch-size 2"),
    ("eval_micro_batch_size", 4, "--eval-micro-batch-size 4"),
    ("cuda_graph_impl", "local", "--cuda-graph-impl local"),
    ("cuda_graph_impl", "transformer_engine", "--cuda-graph-impl transformer_engine"),
    ("cuda_graph_impl", "full_iteration", "--cuda-graph-impl full_iteration"),
    ("enable_cuda_graph", True, "--enable-cuda-graph"),
    ("external_cuda_graph", True, "--external-cuda-graph"),
    ("overlap_moe_expert_parallel_comm", True, "--overlap-moe-expert-parallel-comm"),
    ("dataloader_inter_document_masking", True, "--dataloader-inter-document-masking"),
    ("hybrid_context_parallel", True, "--hybrid-context-parallel"),
    ("position_embedding_type", "yarn", "--position-embedding-type yarn"),
    ("position_embedding_type", "mrope", "--position-embedding-type mrope"),
    ("position_embedding_type", "relative", "--position-embedding-type relative"),
    ("multi_latent_attention", True, "--multi-latent-attention"),
    ("experimental_attention_variant", "dsa", "--experimental-attention-variant dsa"),
    ("inprocess_restart", True, "--inprocess-restart"),
    ("mtp_num_layers", 1, "--mtp-num-layers 1"),
    ("hybrid_layer_pattern", "M*M*", r"--hybrid-layer-pattern M\*M\*"),
    ("hybrid_override_pattern", "M*M*", r"--hybrid-override-pattern M\*M\*"),
    ("heterogeneous_layers_config_path", "layers.json", "--heterogeneous-layers-config-path"),
    ("fp4", "e2m1", "--fp4-format e2m1"),
    ("fp16", True, "--fp16"),
    ("use_torch_fsdp2", True, "--use-torch-fsdp2"),
    ("use_megatron_fsdp", True, "--use-megatron-fsdp"),
    ("logits_load_dir", "logits", "--logits-load-dir"),
    ("yaml_cfg", "model.yaml", "--yaml-cfg"),
    ("qk_clip", True, "--qk-clip"),
    ("attention_backend", "AttnBackend.local", "--attention-backend local"),
]
OUR_ATTENTION = [
    ("window_size", (128, 1), r"--window-size \(128, 1\)"),
    ("softmax_type", "learnable", "--softmax-type learnable"),
    ("log_max_attention_logit", True, "--log-max-attention-logit"),
    ("fp8", "hybrid", "--fp8-format hybrid"),
]


def refused(setting: str, value: Any, *, packed: bool = True, attention: str = "sdpa") -> str | None:
    try:
        check_megatron_flags({**ORDINARY, setting: value}, packed=packed, attention=attention)
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize("attention", ["sdpa", "te", "stock"])
@pytest.mark.parametrize("is_packed", [True, False])
def test_an_ordinary_run_passes(is_packed: bool, attention: str) -> None:
    check_megatron_flags(ORDINARY, packed=is_packed, attention=attention)
    check_megatron_flags({}, packed=is_packed, attention=attention)  # a Megatron that knows none of these


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("dataloader_type", "single"),
        ("dataloader_type", "cyclic"),
        ("micro_batch_size", None),  # its default before Megatron's own validation
        ("eval_micro_batch_size", 1),
        ("cuda_graph_impl", None),
        ("position_embedding_type", "learned_absolute"),
        ("position_embedding_type", "none"),
        ("softmax_type", None),
        ("window_size", (128, 0)),
    ],
)
def test_what_else_is_ordinary(setting: str, value: Any) -> None:
    assert refused(setting, value) is None


@pytest.mark.parametrize(("setting", "value", "flag"), ALWAYS + PACKED + OUR_ATTENTION)
def test_a_refusal_starts_with_the_flag_and_its_value(setting: str, value: Any, flag: str) -> None:
    said = refused(setting, value)
    assert said is not None
    assert re.match(flag + r"\b|" + flag + ":", said)


@pytest.mark.parametrize(("setting", "value", "flag"), ALWAYS)
def test_what_is_refused_of_the_reference_run_too(setting: str, value: Any, flag: str) -> None:
    assert refused(setting, value, packed=False, attention="stock") is not None, flag


@pytest.mark.parametrize(("setting", "value", "flag"), PACKED)
def test_what_only_packed_runs_are_refused(setting: str, value: Any, flag: str) -> None:
    assert refused(setting, value, packed=False, attention="stock") is None, flag
    assert refused(setting, value, attention="te") is not None, flag


@pytest.mark.parametrize(("setting", "value", "flag"), OUR_ATTENTION)
def test_what_only_our_attention_cannot_do(setting: str, value: Any, flag: str) -> None:
    assert refused(setting, value, attention="te") is None, flag


@pytest.mark.parametrize(
    ("setting", "value", "flag"),
    [
        ("apply_rope_fusion", True, "RoPE fusion"),
        ("fp8", "hybrid", "--fp8-format hybrid"),
        ("softmax_type", "learnable", "--softmax-type learnable"),
        ("log_max_attention_logit", True, "--log-max-attention-logit"),
    ],
)
def test_what_groups_that_change_are_refused(setting: str, value: Any, flag: str) -> None:
    assert refused(setting, value, attention="te") is None
    with pytest.raises(ConfigError, match=f"{flag}: not proven with dynamic context parallelism"):
        check_megatron_flags({**ORDINARY, setting: value}, packed=True, attention="te", groups_change=True)
    check_megatron_flags(ORDINARY, packed=True, attention="te", groups_change=True)


def test_fp8_asks_for_transformer_engines_own_layers() -> None:
    said = refused("fp8", "hybrid", attention="spec")
    assert said is not None
    assert "only Transformer Engine's layers compute in FP8" in said
    assert refused("fp8", "hybrid", packed=False, attention="stock") is None


def test_no_refusal_is_left_out_above() -> None:
    """Guards against passing vacuously: a new rule must join the lists above."""
    not_te = config._OUR_ATTENTION + config._NOT_TRANSFORMER_ENGINE
    rules = {rule.setting for rule in config._ALWAYS + config._PACKED + not_te}
    assert len(rules) > 30
    assert (
        rules | {"attention_backend"} == {setting for setting, _, _ in ALWAYS + PACKED + OUR_ATTENTION} == set(ORDINARY)
    )


def test_micro_batch_size_2_says_how_to_choose_the_work_of_a_microbatch() -> None:
    said = refused("micro_batch_size", 2)
    assert said is not None
    assert "Set --micro-batch-size 1" in said
    assert "--max-seqlen-per-dp-cp-rank" in said


WAY_OUT = re.compile(r"\b(Drop|Use|Set|Choose|Raise|Lower|give|[Ll]eave)\b")


def test_every_refusal_says_what_to_do() -> None:
    without = [
        flag
        for setting, value, flag in ALWAYS + PACKED + OUR_ATTENTION
        if not WAY_OUT.search(refused(setting, value) or "")
    ]
    assert without == []
