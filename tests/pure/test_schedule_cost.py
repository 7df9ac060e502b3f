"""Do a model's sizes, or measured times, give the work that they should? Costs of lengths: test_schedule_metrics."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_packing.errors import ConfigError, PackingError
from megatron_packing.schedule import CostModel, LatentAttention, TransformerShape, make_plan
from megatron_packing.topology import Topology

LLAMA_2_7B = TransformerShape(
    layers=32, hidden=4096, heads=32, head_dim=128, groups=32, ffn=11008, gated=True, vocabulary=32000
)


def test_a_model_of_7_billion_parameters() -> None:
    # 6,738,415,616 parameters, of which the embedding (32,000 x 4,096) and 65 norms multiply nothing.
    assert LLAMA_2_7B.weights_a_token == 6_738_415_616 - 32000 * 4096 - 65 * 4096
    cost = CostModel.from_transformer(LLAMA_2_7B)
    # A pair costs 4 * 128 FLOPs a head forward, three times that with the backward pass; half of the pairs are masked.
    assert cost.quadratic == 32 * 32 * 4 * 128 * 3 / 2
    assert cost.linear == 6 * LLAMA_2_7B.weights_a_token + cost.quadratic
    assert 20_000 < cost.linear / cost.quadratic < 60_000


def test_each_size_counts_once() -> None:
    def work(**changes: object) -> tuple[int, int]:
        sizes = {"layers": 1, "hidden": 2, "heads": 4, "head_dim": 8, "groups": 1, "ffn": 16, **changes}
        shape = TransformerShape(**sizes)  # type: ignore[arg-type]
        return shape.weights_a_token, shape.products_a_pair

    attention, mlp = 2 * 8 * (4 + 1 + 1 + 4), 2 * 2 * 16
    assert work() == (attention + mlp, 4 * 16)
    assert work(layers=3) == (3 * (attention + mlp), 3 * 4 * 16)
    assert work(groups=4) == (attention + 2 * 8 * 6 + mlp, 4 * 16)
    assert work(gated=True) == (attention + 3 * 2 * 16, 4 * 16)
    assert work(vocabulary=100) == (attention + mlp + 200, 4 * 16)
    experts = {"expert_layers": 1, "experts": 10, "experts_a_token": 2, "expert_ffn": 5, "shared_ffn": 3}
    assert work(layers=2, **experts) == (2 * attention + mlp + 2 * 2 * (2 * 5 + 3) + 2 * 10, 2 * 4 * 16)
    mla = LatentAttention(query_rank=6, key_value_rank=5, key_dim=3, rotary_dim=2, value_dim=7)
    projections = 2 * 6 + 6 * 4 * (3 + 2) + 2 * (5 + 2) + 5 * 4 * (3 + 7) + 4 * 7 * 2
    assert work(latent=mla) == (projections + mlp, 4 * (3 + 2 + 7))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layers": 0}, "layers is 0"),
        ({"ffn": -1}, "ffn is -1"),
        ({"hidden": 2.5}, r"hidden is 2\.5"),
        ({"expert_layers": 33}, "expert_layers is 33; there are 32 layers"),
    ],
)
def test_sizes_that_are_none_are_refused(changes: dict[str, object], said: str) -> None:
    sizes = {"layers": 32, "hidden": 8, "heads": 1, "head_dim": 8, "groups": 1, "ffn": 8, **changes}
    with pytest.raises(ConfigError, match=said):
        TransformerShape(**sizes)  # type: ignore[arg-type]


def measured(
    cost: CostModel, overhead: float, noise: float, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, squares and milliseconds of 60 microbatches with 1 to 20 samples."""
    rng = np.random.default_rng(seed)
    rows = [rng.integers(16, 2000, rng.integers(1, 20)) for _ in range(60)]
    ms = np.array([cost.of(row).sum() for row in rows]) + overhead
    tokens, squares = (np.array([float((row**power).sum()) for row in rows]) for power in (1, 2))
    return tokens, squares, ms * (1 + noise * rng.standard_normal(len(rows)))


@settings(max_examples=50)
@given(st.floats(1e-6, 1e3), st.floats(1e-9, 1), st.floats(0, 100))
def test_a_fit_finds_what_the_times_were_made_of(linear: float, quadratic: float, overhead: float) -> None:
    fitted = CostModel.fitted(*measured(CostModel(linear=linear, quadratic=quadratic), overhead, noise=0))
    largest = linear * 40_000 + quadratic * 8e7  # a term of a millionth of the time cannot be seen
    assert fitted.linear == pytest.approx(linear, rel=1e-6, abs=1e-9 * largest / 1e4)
    assert fitted.quadratic == pytest.approx(quadratic, rel=1e-6, abs=1e-9 * largest / 1e7)


def test_a_fit_bears_noise_and_never_goes_below_zero() -> None:
    truth = CostModel(linear=2e-3, quadratic=1e-6)
    for seed in range(10):
        fitted = CostModel.fitted(*measured(truth, overhead=5, noise=0.02, seed=seed))
        assert fitted.linear == pytest.approx(truth.linear, rel=0.15)
        assert fitted.quadratic == pytest.approx(truth.quadratic, rel=0.3)
        without = CostModel.fitted(*measured(CostModel(linear=2e-3, quadratic=0), 0, noise=0.05, seed=seed))
        assert without.quadratic >= 0
        assert without.linear > 0


def test_a_fitted_cost_plans() -> None:
    cost = CostModel.fitted(*measured(CostModel(linear=1e-3, quadratic=1e-7), overhead=1, noise=0.01))
    lengths = [100, 200, 300, 400]
    plan = make_plan(lengths, "balanced", Topology(dp=2), 512, cost=cost)
    assert sorted(pack.padded_tokens for pack in plan.packs) == [500, 500]


@pytest.mark.parametrize(
    ("tokens", "squares", "ms", "said"),
    [
        ([1, 2], [1, 4], [1, 2], "2 measured microbatches cannot tell"),
        ([5] * 9, [25] * 9, range(9), "9 measured microbatches cannot tell"),
        ([1, 2, 3], [1, 4, 9], [1, 2], "three rows"),
        ([1, 2, 3], [1, 4, float("nan")], [1, 2, 3], "finite"),
        ([], [], [], "0 measured microbatches"),
    ],
)
def test_times_that_tell_nothing_are_refused(tokens: list, squares: list, ms: list, said: str) -> None:
    with pytest.raises(PackingError, match=said):
        CostModel.fitted(tokens, squares, list(ms))
