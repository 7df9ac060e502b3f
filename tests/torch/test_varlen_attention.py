"""Our attention by kernels that take boundaries: what they are called with, and when they are chosen.

No kernel runs here without a GPU. Stand-ins take its place: they bind what they are given to its own signature,
check what it would check, and compute by the reference. What is marked `gpu` runs the kernels themselves.

Legend: T rows of the pack, N query heads, G key/value heads, H head dimension.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from megatron_packing import config
from megatron_packing.attention import core, dispatch, reference_attention
from megatron_packing.attention.core import packed_attention, varlen_attention
from megatron_packing.attention.dispatch import Kernel, choose_kernel
from megatron_packing.errors import ConfigError, MissingDependency
from megatron_packing.mcore import attention_spec
from megatron_packing.thd.pack import boundaries_of
from tests.tolerances import ATTENTION_FP32, BF16_ERROR_FACTOR
from tests.torch.test_attention import (
    LENGTHS,
    SCALE,
    H,
    inputs,
    largest_error,
    output_and_gradients,
    reference,
)

SEEN = [(True, None), (False, None), (True, 3)]
VARLEN = Kernel(name="varlen", why="a test")
FLASH = Kernel(name="flash", why="a test")


def flash_signature(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> None:
    """Parameters and defaults of `flash_attn.flash_attn_varlen_func` 2.7, as its documentation gives them."""


class StandIn:
    """In the place of a kernel's function: every call is bound to the real signature, checked, and remembered."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._signature = inspect.signature(varlen_attn if kernel is VARLEN else flash_signature)
        self.calls: list[dict[str, Any]] = []

    def __call__(self, *args: Any, **keywords: Any) -> Tensor:
        bound = self._signature.bind(*args, **keywords)
        bound.apply_defaults()
        given = bound.arguments
        self.calls.append(dict(given))
        q, k, v = (given[name] for name in (("query", "key", "value") if self._kernel is VARLEN else "qkv"))
        assert all(x.stride(-1) == 1 for x in (q, k, v))
        if self._kernel is VARLEN:
            names, scale = ("cu_seq_q", "cu_seq_k", "max_q", "max_k"), given["scale"]
            assert given["enable_gqa"] == (q.shape[1] != k.shape[1]), "the kernel refuses unequal heads otherwise"
            assert type(given["window_size"]) is tuple, "compared as one by the kernel"
            causal = given["window_size"][1] == 0
        else:
            names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
            scale, causal = given["softmax_scale"], given["causal"]
        assert given["window_size"][1] == (0 if causal else -1)
        window = None if given["window_size"][0] == -1 else given["window_size"][0]
        boundaries, longest = given[names[0]], given[names[2]]
        assert given[names[1]] is boundaries
        assert boundaries.dtype == torch.int32
        assert type(longest) is int
        assert given[names[3]] == longest >= int(boundaries.diff().max())
        return reference_attention(q, k, v, boundaries, scale=scale, causal=causal, window=window)


@pytest.fixture(params=[VARLEN, FLASH], ids=["varlen", "flash"])
def kernel(request: pytest.FixtureRequest) -> Kernel:
    return request.param


@pytest.fixture
def stand_in(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    made = StandIn(kernel)
    monkeypatch.setattr(core, "kernel_function", lambda name: {kernel.name: made}[name])
    return made


def by_boundaries(lengths: Sequence[int], kernel: Kernel, **settings: Any) -> Callable[..., Tensor]:
    given = {"max_seqlen": max(lengths), "kernel": kernel, "scale": SCALE, **settings}
    return lambda q, k, v: varlen_attention(q, k, v, boundaries_of(lengths).to(q.device), **given)


@pytest.mark.parametrize(("causal", "window"), SEEN, ids=["causal", "full", "window"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_one_call_computes_what_one_call_a_sample_does(
    lengths: list[int], kv_heads: int, causal: bool, window: int | None, kernel: Kernel, stand_in: StandIn
) -> None:
    given = inputs(sum(lengths), kv_heads=kv_heads)
    how = {"causal": causal, "window": window}
    found = output_and_gradients(by_boundaries(lengths, kernel, **how), given)
    true = output_and_gradients(lambda q, k, v: packed_attention(q, k, v, lengths, scale=SCALE, **how), given)
    assert len(stand_in.calls) == 1
    for name, ours, theirs in zip(("output", "dq", "dk", "dv"), found, true, strict=True):
        assert largest_error(ours, theirs) <= ATTENTION_FP32, name


@pytest.mark.parametrize("determined", [False, True])
def test_flash_is_told_of_dropout_and_of_determinism(determined: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = StandIn(FLASH)
    monkeypatch.setattr(core, "kernel_function", lambda name: made)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: determined)
    given = inputs(9)
    by_boundaries([5, 4], FLASH, dropout=0.25)(given.q, given.k, given.v)
    assert (made.calls[0]["dropout_p"], made.calls[0]["deterministic"]) == (0.25, determined)


def test_torchs_operator_takes_the_call_and_has_gradients() -> None:
    """The operator itself, without values: shapes and types go through its schema, forward and backward."""
    with torch.device("meta"):
        q = torch.empty(9, 4, H, dtype=torch.bfloat16, requires_grad=True)
        k, v = (torch.empty(9, 2, H, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        out = varlen_attention(
            q, k, v, torch.empty(3, dtype=torch.int32), max_seqlen=5, kernel=VARLEN, scale=SCALE, causal=True
        )
    out.sum().backward()
    assert out.shape == q.shape
    assert [x.grad.shape for x in (q, k, v)] == [x.shape for x in (q, k, v)]


# --- which kernel, and why ------------------------------------------------------------------------


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Kernel]]:
    """Choices for queries that claim to be on an H100, where torch's kernel and FlashAttention are installed."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    monkeypatch.setattr(torch.version, "hip", None)
    functions = {"varlen": varlen_attn, "flash": flash_signature}
    monkeypatch.setattr(dispatch, "kernel_function", functions.__getitem__)
    dispatch._choose.cache_clear()

    def choose(*, dtype: torch.dtype = torch.bfloat16, head: int = 128, **how: Any) -> Kernel:
        query = SimpleNamespace(device=torch.device("cuda:0"), dtype=dtype, shape=(9, 4, head))
        return choose_kernel(query, **how)  # type: ignore[arg-type]

    yield choose
    dispatch._choose.cache_clear()


def test_a_gpu_takes_torchs_kernel_and_says_why(cuda: Callable[..., Kernel]) -> None:
    assert cuda() == Kernel(name="varlen", why="NVIDIA H100, bfloat16")
    assert cuda(dtype=torch.float16).name == "varlen"


def test_dropout_takes_flash_attention(cuda: Callable[..., Kernel]) -> None:
    assert cuda(dropout=0.1) == Kernel(name="flash", why="NVIDIA H100, bfloat16; varlen: it has no dropout")


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"dtype": torch.float32}, "the type is float32"),
        ({"head": 100}, "heads have 100 dimensions"),
        ({"head": 264}, "heads have 264 dimensions"),
        ({"cp_size": 2}, "context parallelism"),
    ],
)
def test_what_the_kernels_cannot_compute_goes_sample_by_sample(
    cuda: Callable[..., Kernel], how: dict[str, Any], why: str
) -> None:
    chosen = cuda(**how)
    assert (chosen.name, chosen.takes_boundaries) == ("sdpa", False)
    assert why in chosen.why
    with pytest.raises(ConfigError, match=f"--packing-attention varlen: .*{why}.*Use auto"):
        cuda(wanted="varlen", **how)


def test_old_devices_and_amds_go_sample_by_sample(cuda: Callable[..., Kernel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "older than compute capability 8.0" in cuda().why
    dispatch._choose.cache_clear()
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert (cuda().name, "AMD's" in cuda().why) == ("sdpa", True)


def test_what_is_not_installed_is_passed_over_and_named(
    cuda: Callable[..., Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_scale(query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor) -> None: ...

    def found(name: str) -> Callable[..., Any]:
        if name == "flash":
            raise ModuleNotFoundError("No module named 'flash_attn'")
        return without_scale

    monkeypatch.setattr(dispatch, "kernel_function", found)
    chosen = cuda()
    assert chosen.name == "sdpa"
    assert "torch.nn.attention.varlen lacks max_q, max_k, scale, window_size, enable_gqa" in chosen.why
    assert "flash: flash_attn cannot be imported (No module named 'flash_attn')" in chosen.why
    with pytest.raises(MissingDependency, match="--packing-attention flash: flash_attn cannot be imported"):
        cuda(wanted="flash")


def test_the_installed_torch_has_the_kernel_and_the_cpu_has_not() -> None:
    assert dispatch.why_missing("varlen") is None
    chosen = choose_kernel(torch.empty(9, 4, H))
    assert chosen == Kernel(name="sdpa", why="the device is cpu, and the kernels that take boundaries need CUDA")
    assert choose_kernel(torch.empty(9, 4, H), wanted="sdpa") == Kernel(name="sdpa", why="asked for")
    with pytest.raises(ConfigError, match="--packing-attention varlen: the device is cpu"):
        choose_kernel(torch.empty(9, 4, H), wanted="varlen")


def test_settings_and_dispatch_know_the_same_kernels() -> None:
    """Two rooms know these names; the attention may not import the settings."""
    assert ("auto", *config.OUR_KERNELS) == dispatch.KERNELS


# --- in Megatron's place --------------------------------------------------------------------------


def module(kernel: str = "auto") -> torch.nn.Module:
    one = SimpleNamespace(size=lambda: 1)
    return attention_spec.PackedDotProductAttention(
        config=TransformerConfig(num_layers=1, hidden_size=4 * H, num_attention_heads=4, attention_dropout=0.0),
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        pg_collection=SimpleNamespace(cp=one, tp=one),  # type: ignore[arg-type]
        kernel=kernel,
    )


def test_the_core_attention_hands_its_boundaries_to_the_kernel(
    kernel: Kernel, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given, boundaries = inputs(9, kv_heads=2), boundaries_of([5, 4])
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=boundaries, cu_seqlens_q_padded=boundaries, max_seqlen_q=5, max_seqlen_kv=5
    )
    true = module()(given.q, given.k, given.v, packed_seq_params=packed)
    assert not stand_in.calls
    capsys.readouterr()
    wanted = []
    monkeypatch.setattr(
        attention_spec, "choose_kernel", lambda q, **how: (wanted.append((how["wanted"], how["cp_size"])), kernel)[1]
    )
    attention_spec._say_once.cache_clear()
    core_attention = module(kernel.name)
    for _ in range(2):
        found = core_attention(given.q, given.k, given.v, packed_seq_params=packed)
    assert wanted == [(kernel.name, 1)] * 2
    (said,) = [line for line in capsys.readouterr().out.splitlines() if "our attention" in line]
    assert said == f"megatron_packing: our attention runs by {kernel.name} (a test)"
    name = "cu_seq_q" if kernel is VARLEN else "cu_seqlens_q"
    assert stand_in.calls[0][name] is boundaries, "nothing is copied, nothing waits for the device"
    assert largest_error(found, true) <= ATTENTION_FP32


# --- the kernels themselves -----------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("causal", "window"), SEEN, ids=["causal", "full", "window"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_the_kernel_adds_no_error_to_what_bf16_costs_anyway(
    lengths: list[int], kv_heads: int, causal: bool, window: int | None, kernel: Kernel
) -> None:
    if (missing := dispatch.why_missing(kernel.name)) is not None:
        pytest.skip(missing)
    exact = inputs(sum(lengths), kv_heads=kv_heads).to(torch.bfloat16)
    on_gpu = type(exact)(q=exact.q.cuda(), k=exact.k.cuda(), v=exact.v.cuda(), weight=exact.weight.cuda())
    how = {"causal": causal, "window": window}
    found = output_and_gradients(by_boundaries(lengths, kernel, **how), on_gpu)
    true = output_and_gradients(reference(lengths, **how), exact.to(torch.float32))
    sample_by_sample = output_and_gradients(
        lambda q, k, v: packed_attention(q, k, v, lengths, scale=SCALE, **how), on_gpu
    )
    for name, ours, plain, truth in zip(("output", "dq", "dk", "dv"), found, sample_by_sample, true, strict=True):
        allowed = BF16_ERROR_FACTOR * float((plain.float().cpu() - truth).abs().max())
        assert float((ours.float().cpu() - truth).abs().max()) <= allowed, name
