"""Legend: T rows of the pack, N query heads, G key/value heads, H head dimension."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_packing.attention import packed_attention, reference_attention
from megatron_packing.attention.core import batched_attention
from megatron_packing.attention.reference import visible_TT
from megatron_packing.thd.pack import boundaries_of
from tests.tolerances import ATTENTION_FP32, BF16_ERROR_FACTOR

H = 16
SCALE = H**-0.5

LENGTHS = [
    pytest.param([5, 4], id="two"),
    pytest.param([3, 2, 4], id="three"),
    pytest.param([24], id="one-sample"),
    pytest.param([1] * 12, id="many-of-length-1"),
    pytest.param([1, 17, 30, 2], id="uneven"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    weight: Tensor
    """Gradient that arrives at the output."""

    def all(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v, self.weight

    def to(self, dtype: torch.dtype) -> "Inputs":
        q, k, v, weight = (x.to(dtype) for x in self.all())
        return Inputs(q=q, k=k, v=v, weight=weight)


def inputs(rows: int, heads: int = 4, kv_heads: int = 4, seed: int = 0) -> Inputs:
    g = torch.Generator().manual_seed(seed)
    q, weight = (torch.randn(rows, heads, H, generator=g) for _ in range(2))
    k, v = (torch.randn(rows, kv_heads, H, generator=g) for _ in range(2))
    return Inputs(q=q, k=k, v=v, weight=weight)


def output_and_gradients(attention: Callable[[Tensor, Tensor, Tensor], Tensor], given: Inputs) -> list[Tensor]:
    """The output and the gradients of q, k and v."""
    q, k, v = (x.clone().requires_grad_() for x in (given.q, given.k, given.v))
    out = attention(q, k, v)
    return [out.detach(), *torch.autograd.grad((out * given.weight).sum(), (q, k, v))]


def packed(
    lengths: Sequence[int], *, causal: bool = True, window: int | None = None, dropout: float = 0.0
) -> Callable[..., Tensor]:
    how = {"causal": causal, "window": window, "dropout": dropout}
    return lambda q, k, v: packed_attention(q, k, v, lengths, scale=SCALE, **how)


def reference(lengths: Sequence[int], *, causal: bool = True, window: int | None = None) -> Callable[..., Tensor]:
    how = {"causal": causal, "window": window}
    return lambda q, k, v: reference_attention(q, k, v, boundaries_of(lengths), scale=SCALE, **how)


def each_alone(lengths: Sequence[int]) -> Callable[..., Tensor]:
    """Plain causal SDPA, one sample after the other, each on tensors of its own."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outputs, start = [], 0
        for length in lengths:
            one = (x[start : start + length].transpose(0, 1).contiguous()[None] for x in (q, k, v))
            outputs.append(F.scaled_dot_product_attention(*one, is_causal=True, scale=SCALE)[0].transpose(0, 1))
            start += length
        return torch.cat(outputs)

    return attention


def largest_error(found: Tensor, true: Tensor) -> float:
    """Relative to the largest value, but never to less than 1: softmax's gradients may cancel to zero."""
    return float((found - true).abs().max()) / max(1.0, float(true.abs().max()))


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_equals_the_reference_with_gradients(lengths: list[int], kv_heads: int, causal: bool) -> None:
    given = inputs(sum(lengths), kv_heads=kv_heads)
    found = output_and_gradients(packed(lengths, causal=causal), given)
    true = output_and_gradients(reference(lengths, causal=causal), given)
    for name, ours, theirs in zip(("output", "dq", "dk", "dv"), found, true, strict=True):
        assert ours.shape == theirs.shape
        assert largest_error(ours, theirs) <= ATTENTION_FP32, name


@pytest.mark.parametrize("window", [0, 2, 16, 29, 99])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_a_sliding_window_equals_the_reference_with_gradients(lengths: list[int], window: int) -> None:
    given = inputs(sum(lengths), kv_heads=2)
    found = output_and_gradients(packed(lengths, window=window), given)
    true = output_and_gradients(reference(lengths, window=window), given)
    for name, ours, theirs in zip(("output", "dq", "dk", "dv"), found, true, strict=True):
        assert largest_error(ours, theirs) <= ATTENTION_FP32, name
    whole = reference(lengths)(given.q, given.k, given.v)
    assert torch.equal(true[0], whole) == (window + 1 >= max(lengths)), "the window cuts something off, or has no end"


def test_reference_equals_a_softmax_written_out_row_by_row() -> None:
    """The truth itself, against loops: head n of the query uses head n // 2 of the keys."""
    lengths, given = [3, 2], inputs(5, heads=4, kv_heads=2)
    out = reference(lengths)(given.q, given.k, given.v)
    for row, start in ((0, 0), (2, 0), (3, 3), (4, 3)):
        for head in range(4):
            keys = given.k[start : row + 1, head // 2]
            weights = torch.softmax(keys @ given.q[row, head] * SCALE, dim=0)
            torch.testing.assert_close(out[row, head], weights @ given.v[start : row + 1, head // 2])


def test_what_the_reference_lets_each_row_see() -> None:
    sees = visible_TT(boundaries_of([2, 3]))
    assert sees.int().tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1]]
    narrow = visible_TT(boundaries_of([1, 3]), window=1).int().tolist()
    assert narrow == [[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert visible_TT(boundaries_of([1, 2]), causal=False).int().tolist() == [[1, 0, 0], [0, 1, 1], [0, 1, 1]]


@pytest.mark.parametrize("attention", [packed, reference], ids=["packed", "reference"])
def test_equal_scores_average_the_sample_s_own_values(attention: Callable[..., Callable[..., Tensor]]) -> None:
    q = k = torch.zeros(4, 1, H)
    v = torch.tensor([1.0, 1.0, 1.0, 10.0])[:, None, None].expand(4, 1, H)
    assert attention([3, 1])(q, k, v)[3].unique().tolist() == [10.0]
    assert attention([4])(q, k, v)[3].unique().tolist() == [3.25]  # what a lost boundary looks like


def leak(boundaries: Sequence[int], *, dropout: float = 0.0, kv_heads: int = 2) -> float:
    """How much outputs and gradients of rows 3 and later change when everything of rows 0 to 2 changes."""
    lengths = [after - before for before, after in itertools.pairwise(boundaries)]
    one, other = inputs(9, kv_heads=kv_heads), inputs(9, kv_heads=kv_heads, seed=1)
    for kept, changed in zip(one.all(), other.all(), strict=True):
        changed[3:] = kept[3:]
        assert not torch.equal(kept[:3], changed[:3])
    results = []
    for given in (one, other):
        torch.manual_seed(0)
        results.append(output_and_gradients(packed(lengths, dropout=dropout), given))
    return max(float((a[3:] - b[3:]).abs().max()) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("boundaries", [[0, 3, 5, 9], [0, 3, 9]])
def test_no_sample_changes_another_by_a_single_bit(boundaries: list[int], dropout: float) -> None:
    assert leak(boundaries, dropout=dropout) == 0.0


@pytest.mark.parametrize("boundaries", [[0, 4, 5, 9], [0, 9]])
def test_the_isolation_check_sees_wrong_boundaries(boundaries: list[int]) -> None:
    """Lengths [3, 2, 4] with a boundary one row late, and with none at all."""
    assert leak(boundaries) > 1e-3


def test_a_sample_of_nan_stays_alone() -> None:
    given = inputs(9)
    for tensor in given.all():
        tensor[:5] = float("nan")
    for result in output_and_gradients(packed([5, 4]), given):
        assert result[:5].isnan().all()
        assert result[5:].isfinite().all()


def test_no_gradient_flows_to_another_sample_under_dropout() -> None:
    given = inputs(9)
    given.weight[:5] = 0.0  # the loss is the second sample's alone
    torch.manual_seed(0)
    _, *gradients = output_and_gradients(packed([5, 4], dropout=0.3), given)
    for gradient in gradients:
        assert not gradient[:5].any()
        assert gradient[5:].any()


def test_dropout_follows_the_seed_and_drops() -> None:
    given = inputs(30)

    def draw(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        return output_and_gradients(packed([20, 10], dropout=0.4), given)

    first, again, other = draw(1), draw(1), draw(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    # A sample's first row sees only itself: its one weight is kept and scaled up, or dropped.
    scaled = first[0][0] / given.v[0]
    assert {round(float(x), 4) for x in scaled.unique()} <= {0.0, round(1 / 0.6, 4)}


def test_a_row_s_heads_drop_apart() -> None:
    """Guards the check above: over many samples of one token both outcomes occur, about as often as they should."""
    given = inputs(400, heads=2, kv_heads=2)
    torch.manual_seed(0)
    out = packed([1] * 400, dropout=0.4)(given.q, given.k, given.v)
    dropped = float((out == 0).all(-1).float().mean())
    assert 0.3 < dropped < 0.5


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 3), (False, None)])
def test_samples_side_by_side_equal_the_reference_one_by_one(causal: bool, window: int | None, kv_heads: int) -> None:
    length, samples = 7, 3
    g = torch.Generator().manual_seed(0)
    q = torch.randn(length, samples, 4, H, generator=g)
    k, v = (torch.randn(length, samples, kv_heads, H, generator=g) for _ in range(2))
    out = batched_attention(q, k, v, scale=SCALE, causal=causal, window=window)
    assert out.shape == (length, samples, 4, H)
    for b in range(samples):
        true = reference([length], causal=causal, window=window)(q[:, b], k[:, b], v[:, b])
        assert largest_error(out[:, b], true) <= ATTENTION_FP32


@pytest.mark.parametrize("lengths", LENGTHS)
def test_bf16_adds_no_error_to_what_bf16_costs_anyway(lengths: list[int]) -> None:
    exact = inputs(sum(lengths), kv_heads=2).to(torch.bfloat16)
    true = output_and_gradients(reference(lengths), exact.to(torch.float32))
    grouped = Inputs(  # plain SDPA is handed expanded heads
        q=exact.q, k=exact.k.repeat_interleave(2, 1), v=exact.v.repeat_interleave(2, 1), weight=exact.weight
    )
    plain = output_and_gradients(each_alone(lengths), grouped)
    plain[2:] = [gradient.unflatten(1, (2, 2)).sum(2) for gradient in plain[2:]]
    found = output_and_gradients(packed(lengths), exact)
    for name, ours, theirs, truth in zip(("output", "dq", "dk", "dv"), found, plain, true, strict=True):
        assert ours.dtype == torch.bfloat16
        allowed = BF16_ERROR_FACTOR * float((theirs.float() - truth).abs().max())
        assert float((ours.float() - truth).abs().max()) <= allowed, name


def test_lengths_that_do_not_cover_the_pack_are_an_error() -> None:
    given = inputs(9)
    with pytest.raises(RuntimeError, match="split_with_sizes"):
        packed([5, 3])(given.q, given.k, given.v)
