"""Are the bytes that a microbatch keeps those of a count by hand, and of the paper that the counting is from?"""

import pytest

from megatron_packing.errors import ConfigError
from megatron_packing.schedule import LatentAttention, TransformerShape
from megatron_packing.schedule.memory import ActivationMemory
from megatron_packing.topology import Topology

LLAMA_3_8B = TransformerShape(
    layers=32, hidden=4096, heads=32, head_dim=128, groups=8, ffn=14336, gated=True, vocabulary=128256
)
GPT = TransformerShape(layers=24, hidden=1024, heads=16, head_dim=64, groups=16, ffn=4096)


def kept(shape: TransformerShape, recompute: str = "none", **topology: object) -> int:
    return ActivationMemory(shape=shape, recompute=recompute).of(1, Topology(**topology))  # type: ignore[arg-type]


def test_a_model_of_8_billion_parameters_by_hand() -> None:
    # Norm, QKV, norm and MLP inputs 4 x 4,096; queries and output 2 x 4,096; keys and values 2 x 1,024; gate and up
    # 2 x 14,336 and their product 14,336: 69,632 numbers of 2 bytes, and 32 of 4 bytes.
    layer = 2 * (4 * 4096 + 2 * 4096 + 2 * 1024 + 3 * 14336) + 4 * 32
    assert layer == 139_392
    output = 2 * 2 * 4096 + 4 * 128256
    assert kept(LLAMA_3_8B) == 32 * layer + output == 4_989_952
    assert ActivationMemory(shape=LLAMA_3_8B).of(8192, Topology()) == 8192 * 4_989_952
    assert kept(LLAMA_3_8B, "selective") == 32 * (layer - 128) + output
    assert kept(LLAMA_3_8B, "full") == 32 * 2 * 4096 + layer + output


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_it_is_the_papers_count_but_for_scores_and_dropout(tp: int) -> None:
    """34 h bytes a token and layer with the masks of two dropouts (h each) that are not kept here.

    With TP 10 h + 24 h / t, with sequence parallelism 34 h / t; what softmax keeps is not in the paper.
    """
    h, softmax = 1024, 4 * 16
    output = 2 * 2 * h
    assert kept(GPT, tp=tp) == round(24 * ((10 - 2) * h + (24 * h + softmax) / tp) + output)
    assert kept(GPT, tp=tp, sequence_parallel=True) == round((24 * ((34 - 2) * h + softmax) + output) / tp)
    assert kept(GPT, "full", tp=tp) == round(24 * 2 * h + (10 - 2) * h + (24 * h + softmax) / tp + output)


def test_a_pipelines_first_stage_keeps_all_layers_once_and_its_last_the_logits() -> None:
    layer = 32 * 1024 + 4 * 16
    assert kept(GPT, pp=4) == 24 * layer
    large = TransformerShape(layers=4, hidden=8, heads=1, head_dim=8, groups=1, ffn=32, vocabulary=100_000)
    assert kept(large, pp=4) == (32 * 8 + 4) + 2 * 2 * 8 + 4 * 100_000
    assert kept(GPT, pp=5) == 25 * layer, "a stage has five layers, where the layers do not divide"


def test_what_is_not_counted_is_refused() -> None:
    with pytest.raises(ConfigError, match="recompute is 'some'; it must be one of: none, selective, full"):
        ActivationMemory(shape=GPT, recompute="some")
    sizes = {"layers": 2, "hidden": 8, "heads": 1, "head_dim": 8, "groups": 1, "ffn": 8}
    latent = LatentAttention(query_rank=None, key_value_rank=4, key_dim=4, rotary_dim=4, value_dim=4)
    for changes in ({"expert_layers": 1, "experts": 2}, {"latent": latent}):
        with pytest.raises(ConfigError, match="not counted for models with experts or MLA"):
            ActivationMemory(shape=TransformerShape(**sizes, **changes))  # type: ignore[arg-type]
