"""Rows that belong to no sample reach no statistic and no loss of a router of experts, wherever they lie.

What a router counts is held against the same samples alone, in Megatron's unpacked layout and without a mask, and
against its formulas written out.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_packing.thd import PackedBatch, SampleTensors, build_pack, dummy_pack, share_of_rank
from megatron_packing.thd.pack import fill_up
from tests import tolerances
from tests.runs.harness import Run, Runner
from tests.runs.test_equals_unpacked import PACKED, PADDED, assert_same_training, later_wins
from tests.runs.test_layouts import EP2, EXPERTS

pytestmark = pytest.mark.run

LENGTHS = (5, 4, 11, 1, 7)
VOCABULARY, EXPERT_COUNT, TOP_K = 64, 4, 2
AUX, Z = 1e-2, 1e-3
WITH_BIAS = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}


@pytest.mark.parametrize("scores", ["softmax", "sigmoid with expert bias"])
def test_a_router_counts_what_it_counts_of_each_sample_alone(scores: str, runner: Runner) -> None:
    runner.call({"softmax": _counts_softmax, "sigmoid with expert bias": _counts_sigmoid}[scores])


def test_a_dummy_adds_nothing(runner: Runner) -> None:
    runner.call(_dummy_adds_nothing)


def test_layers_that_look_from_sample_to_sample_are_refused_whoever_built_them(runner: Runner) -> None:
    runner.call(_unproven_layers_are_refused)


# --- one pack -------------------------------------------------------------------------------------


def _model(*, pre_process: bool = True, **settings: Any) -> Any:
    """A GPT of two layers of experts, as a packed run prepares it; the first stage of a pipeline or a later one."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_packing.mcore.attention_spec import PackedDotProductAttention, put_core_attention
    from megatron_packing.mcore.step import CurrentMicrobatch, prepare_chunk

    model_parallel_cuda_manual_seed(5)
    torch.manual_seed(5)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method_std=0.3,
        gradient_accumulation_fusion=False,
        add_bias_linear=False,
        normalization="RMSNorm",
        num_moe_experts=EXPERT_COUNT,
        moe_router_topk=TOP_K,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type=["aux_loss", "seq_aux_loss", "global_aux_loss"],
        moe_aux_loss_coeff=[AUX] * 3,
        moe_z_loss_coeff=Z,
        calculate_per_token_loss=True,
        **settings,
    )
    spec = get_gpt_layer_local_spec(num_experts=EXPERT_COUNT, normalization="RMSNorm")
    put_core_attention(spec, PackedDotProductAttention)
    model = GPTModel(config, spec, VOCABULARY, 32, pre_process=pre_process, position_embedding_type="rope")
    model.current = CurrentMicrobatch()
    prepare_chunk(model, model.current)
    return model


def _samples(lengths: Sequence[int] = LENGTHS) -> list[SampleTensors]:
    rng = torch.Generator().manual_seed(1)
    made = []
    for length in lengths:
        tokens, labels = torch.randint(VOCABULARY, (2, length), generator=rng)
        made.append(SampleTensors(tokens_L=tokens, labels_L=labels, loss_mask_L=torch.ones(length)))
    return made


def _counted(batch: PackedBatch, settings: dict[str, Any], change: Callable[[Any], None] = lambda model: None) -> Any:
    """Each loss of each layer as it is logged, the tokens of each expert, and every gradient, of one pack."""
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    tracker = get_moe_metrics_tracker()
    tracker.clear()
    model = _model(**settings)
    change(model)
    model.current.share = share_of_rank(batch, cp_size=1, cp_rank=0)
    rows = (batch.tokens_T[None], batch.position_ids_T[None], None)
    losses = model(*rows, labels=batch.labels_T[None])[0]
    (losses * batch.loss_mask_T).sum().backward()
    logged = {name: entry.values.clone() for name, entry in tracker.metrics.items()}
    routers = [layer.mlp.router for layer in model.decoder.layers]
    tokens = [router.global_tokens_per_expert.tolist() for router in routers]
    if settings:
        assert [router.local_tokens_per_expert.tolist() for router in routers] == tokens
    return logged, tokens, {name: parameter.grad for name, parameter in model.named_parameters()}


def _alone(samples: list[SampleTensors], settings: dict[str, Any]) -> tuple[dict[str, list[float]], list[list[float]]]:
    """The same of the samples one by one: from the logits that the routers compute, by the losses' formulas in fp64.

    Switch Transformers, eq. 4: experts * sum over experts of (share of tokens) * (mean score); ST-MoE, eq. 5: the mean
    of squared log-sum-exps.
    """
    model = _model(**settings)
    logits: list[list[torch.Tensor]] = [[], []]
    for layer, seen in zip(model.decoder.layers, logits, strict=True):
        gating = layer.mlp.router.gating
        layer.mlp.router.gating = lambda x, gating=gating, seen=seen: seen.append(gating(x)) or seen[-1]
    for sample in samples:
        model(sample.tokens_L[None], torch.arange(sample.length)[None], None)
    losses: dict[str, list[float]] = {"balance": [], "z": []}
    tokens = []
    for seen in logits:
        rows = torch.cat([each.flatten(0, 1) for each in seen]).double()
        scores = rows.sigmoid() / rows.sigmoid().sum(1, keepdim=True) if settings else rows.softmax(1)
        counts = torch.zeros(EXPERT_COUNT).double()
        counts.index_add_(0, scores.topk(TOP_K).indices.flatten(), torch.ones(TOP_K * len(rows)).double())
        shares, means = counts / counts.sum(), scores.mean(0)
        losses["balance"].append(float(EXPERT_COUNT * (shares * means).sum()))
        losses["z"].append(float(rows.logsumexp(1).square().mean()))
        tokens.append(counts.tolist())
    return losses, tokens


def _counts(settings: dict[str, Any]) -> None:
    samples = _samples()
    expected, tokens = _alone(samples, settings)
    unpadded = _counted(build_pack(samples, alignment=1), settings)
    packs = {f"alignment {alignment}": build_pack(samples, alignment=alignment) for alignment in (1, 4, 16)}
    packs["one shape"] = fill_up(packs["alignment 4"], rows=96, num_boundaries=9)  # a tail, and sentinels behind it
    for name_of_pack, pack in packs.items():
        logged, counted, gradients = _counted(pack, settings)
        assert counted == tokens, name_of_pack
        for name, values in logged.items():
            true = torch.tensor(expected["z" if name == "z_loss" else "balance"])
            assert ((values - true).abs() <= tolerances.LOGITS * true).all(), (name_of_pack, name, values, true)
        assert len(logged) == 4
        for name, gradient in gradients.items():
            distance = (gradient - unpadded[2][name]).norm()
            assert distance <= tolerances.WEIGHTS_REL_L2 * unpadded[2][name].norm() + 1e-6, (name_of_pack, name)

    def without_mask(model: Any) -> None:
        model.current.router_mask = _NoMask()

    logged, counted, _ = _counted(build_pack(samples, alignment=16), settings, without_mask)
    assert counted != tokens, "padding reaches the router unless it is masked, or the checks above say little"
    assert all(((values - unpadded[0][name]).abs() > 1e-3).all() for name, values in logged.items())


class _NoMask:
    def of(self, share: Any) -> None:
        return None


def _counts_softmax() -> None:
    _counts({})


def _counts_sigmoid() -> None:
    _counts(WITH_BIAS)


def _dummy_adds_nothing() -> None:
    for settings in ({}, WITH_BIAS):
        logged, tokens, gradients = _counted(dummy_pack(alignment=8), settings)
        assert all(values.tolist() == [0.0, 0.0] for values in logged.values())
        assert tokens == [[0.0] * EXPERT_COUNT] * 2
        assert all(gradient is None or not gradient.any() for gradient in gradients.values())  # and none is NaN


def _unproven_layers_are_refused() -> None:
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet
    from megatron.core.ssm.mamba_mixer import MambaMixer
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock

    from megatron_packing.errors import ConfigError
    from megatron_packing.mcore.step import CurrentMicrobatch, prepare_chunk

    refused = {
        MambaMixer: "carry its state from sample to sample",
        GatedDeltaNet: "carry its state from sample to sample",
        MultiTokenPredictionBlock: "shift labels from sample to sample",
        MLASelfAttention: "not proven",
    }
    for kind, why in refused.items():
        layer = kind.__new__(kind)  # their kernels are not needed to know them
        torch.nn.Module.__init__(layer)
        chunk = torch.nn.Sequential(torch.nn.Identity(), layer)
        with pytest.raises(ConfigError, match=f"1 is {kind.__name__}, which .*{why}"):
            prepare_chunk(chunk, CurrentMicrobatch())


# --- several ranks --------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["first", "later"])
def test_ranks_that_hold_unlike_shares_of_the_padding_count_alike(stage: str, runner: Runner) -> None:
    """TP 2 with sequence parallelism: the first stage cuts the mask itself, later ones are given their part."""
    runner.call({"first": _shares_of_first_stage, "later": _shares_of_later_stage}[stage], ranks=2)


def _shares_of_first_stage() -> None:
    _shares(first=True)


def _shares_of_later_stage() -> None:
    _shares(first=False)


def _shares(*, first: bool) -> None:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    whole = _samples((6, 4, 12, 2, 8))  # the ranks' rows without any padding: Megatron counts them rightly itself
    _assert_counted_alike(_of_share(whole, 2, first=first), _of_share(whole, 2, first=first, masked=False))
    little, most = (_of_share(_samples(), alignment, first=first) for alignment in (2, 16))
    assert [sum(tokens) for tokens in little[1]] == [TOP_K * sum(LENGTHS)] * 2
    _assert_counted_alike(most, little)


def _assert_counted_alike(mine: Any, theirs: Any) -> None:
    assert mine[1] == theirs[1]
    for name, values in theirs[0].items():
        torch.testing.assert_close(mine[0][name], values, rtol=tolerances.LOGITS, atol=0)
    for gradient, true in zip(mine[2], theirs[2], strict=True):
        assert (gradient - true).norm() <= tolerances.WEIGHTS_REL_L2 * true.norm()


def _of_share(samples: list[SampleTensors], alignment: int, *, first: bool, masked: bool = True) -> Any:
    """The losses, tokens and router gradients of a pack, summed over the ranks."""
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    tracker = get_moe_metrics_tracker()
    tracker.clear()
    sharded = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "num_query_groups": 2}
    model = _model(pre_process=first, **sharded, **WITH_BIAS)
    if not masked:
        model.current.router_mask = _NoMask()
    batch = build_pack(samples, alignment=alignment)
    model.current.share = share_of_rank(batch, cp_size=1, cp_rank=0)
    rows = (batch.tokens_T[None], batch.position_ids_T[None], None)
    if not first:
        embedding = torch.randn(VOCABULARY, 32, generator=torch.Generator().manual_seed(2))
        mine = embedding[batch.tokens_T].chunk(2)[torch.distributed.get_rank()]
        model.set_input_tensor(mine[:, None].requires_grad_())
    losses = model(*rows, labels=batch.labels_T[None])[0]
    (losses * batch.loss_mask_T).sum().backward()
    logged = {name: _summed(entry.values) for name, entry in tracker.metrics.items() if name != "z_loss"}
    routers = [layer.mlp.router for layer in model.decoder.layers]
    tokens = [router.global_tokens_per_expert.tolist() for router in routers]
    return logged, tokens, [_summed(router.weight.grad) for router in routers]


def _summed(values: torch.Tensor) -> torch.Tensor:
    total = values.clone()
    torch.distributed.all_reduce(total)
    return total


BALANCED = (
    f"{EP2.replace('--moe-router-load-balancing-type none', '--moe-router-load-balancing-type aux_loss')} "
    f"--moe-aux-loss-coeff {AUX} --moe-z-loss-coeff {Z} --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --train-iters 6 --lr-decay-iters 6"
)


def test_a_run_s_router_losses_do_not_depend_on_its_padding(runner: Runner, chats: Path) -> None:
    """CP 2 pads to 4 and shares each pack; DP 2 on the same two ranks pads nothing. One sample a pack: equal packs."""
    one_each = later_wins(PACKED, BALANCED, "--thd-max-packed-sequences 1")
    padded = runner.train(one_each, "--context-parallel-size 2", data=chats, ranks=2)
    unpadded = runner.train(one_each, data=chats, ranks=2)
    assert _padding(padded) > 0 == _padding(unpadded)
    for mine, theirs in zip(padded.losses, unpadded.losses, strict=True):
        assert abs(mine - theirs) <= tolerances.LOSS_PER_ITERATION * max(1.0, theirs)
    # The z-loss in the log is the mean of the ranks' means, so that it would tell on which rank the padding lies.
    for (name, mine), (_, theirs) in zip(_router_losses(padded), _router_losses(unpadded), strict=True):
        assert name == "z_loss" or mine == pytest.approx(theirs, rel=2e-6)  # printed with 7 digits


def test_router_losses_are_logged_as_means_over_packs(runner: Runner, chats: Path) -> None:
    """Megatron would divide by samples, of which each pack has some four; a balanced router's loss is 1."""
    run = runner.train(later_wins(PACKED, BALANCED), data=chats, ranks=2)
    assert all(0.99 < loss < 1.1 for name, loss in _router_losses(run) if name == "load_balancing_loss")
    warning = "WARNING: auxiliary losses of the experts' router are computed microbatch by microbatch"
    assert run.log.count(warning) == 1


def _router_losses(run: Run) -> list[tuple[str, float]]:
    found = re.findall(r" (load_balancing_loss|z_loss): (\S+)", run.log)
    assert len(found) == 2 * len(run.losses) == 12
    return [(name, float(value)) for name, value in found]


def _padding(run: Run) -> int:
    return sum(int(rows.replace(",", "")) for rows in re.findall(r"\| padding: ([\d,]+)", run.log))


def test_capacity_that_drops_nothing_trains_as_the_unpacked_run(runner: Runner, chats: Path) -> None:
    roomy = f"{EXPERTS} --moe-expert-capacity-factor {EXPERT_COUNT / TOP_K} --moe-pad-expert-input-to-capacity"
    packed = runner.train(later_wins(PACKED, roomy), data=chats)
    assert_same_training(packed, runner.train(later_wins(PADDED, roomy), data=chats))
    assert packed.log.count("WARNING: --moe-expert-capacity-factor 2.0: which tokens an expert drops depends on") == 1


def test_capacity_that_drops_runs_with_one_warning(runner: Runner, chats: Path) -> None:
    few = "--train-iters 4 --lr-decay-iters 4"
    tight = runner.train(later_wins(PACKED, EXPERTS, "--moe-expert-capacity-factor 0.5", few), data=chats)
    free = runner.train(later_wins(PACKED, EXPERTS, few), data=chats)
    assert tight.log.count("WARNING: --moe-expert-capacity-factor 0.5") == 1
    assert len(tight.losses) == 4
    assert tight.losses != free.losses
    assert "WARNING" not in "".join(line for line in free.log.splitlines() if line.startswith("megatron_packing:"))
