"""A loss over pairs, packed, is the loss over the same answers one by one; its gradient, too."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, logsigmoid

from megatron_packing.attention.reference import reference_attention
from megatron_packing.errors import PackingError
from megatron_packing.mcore import pairs, step
from megatron_packing.thd import PackedBatch, SampleTensors, build_pack, dummy_pack, share_of_rank, sum_by_sample
from tests.torch.toys import numbered

BETA = 0.5
LENGTHS = [(5, 3), (2, 9), (4, 4)]


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process group: the sums are this rank's own."""
    monkeypatch.setattr(pairs, "_over_context_parallel_ranks", lambda sums_S: sums_S)
    yield
    step._running.clear()


def run_now(pack: PackedBatch) -> None:
    step._running[:] = [share_of_rank(pack, cp_size=1, cp_rank=0)]


def some_pairs() -> list[tuple[SampleTensors, SampleTensors]]:
    draw = torch.Generator().manual_seed(1)

    def sample(length: int) -> SampleTensors:
        ids = torch.randint(16, (length + 1,), generator=draw)
        mask = torch.ones(length)
        mask[: length // 3] = 0
        return SampleTensors(tokens_L=ids[:-1], labels_L=ids[1:], loss_mask_L=mask)

    return [(sample(a), sample(b)) for a, b in LENGTHS]


class Model(nn.Module):
    """One layer of attention within boundaries."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed, self.place = nn.Embedding(16, 8), nn.Embedding(16, 8)
        self.mix, self.out = nn.Linear(8, 24), nn.Linear(8, 16)

    def forward(self, pack: PackedBatch) -> Tensor:
        """float32 [T]: minus the log-probability of each label."""
        hidden_TC = self.embed(pack.tokens_T) + self.place(pack.position_ids_T)
        q, k, v = (part[:, None] for part in self.mix(hidden_TC).split(8, dim=-1))
        attended_TC = reference_attention(q, k, v, pack.cu_seqlens_padded, scale=8**-0.5)[:, 0]
        return cross_entropy(self.out(attended_TC), pack.labels_T, reduction="none")


@pytest.mark.parametrize("alignment", [1, 4])
def test_packed_loss_and_gradient_are_those_of_answers_one_by_one(alignment: int) -> None:
    model, rows = Model(), some_pairs()
    pack = build_pack([side for row in rows for side in row], alignment=alignment)
    run_now(pack)
    chosen, rejected = pairs.pair_log_probs(model(pack)[None], pack.loss_mask_T[None])
    losses = -logsigmoid(BETA * (chosen - rejected))
    losses.sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()

    def alone(sample: SampleTensors) -> Tensor:
        only = build_pack([sample], alignment=1)
        return -(model(only) * only.loss_mask_T).sum()

    expected = torch.stack([-logsigmoid(BETA * (alone(a) - alone(b))) for a, b in rows])
    expected.sum().backward()
    assert torch.allclose(losses, expected, rtol=0, atol=1e-6)
    assert len(gradients) == 6
    for mine, parameter in zip(gradients, model.parameters(), strict=True):
        assert parameter.grad is not None
        assert torch.allclose(mine, parameter.grad, rtol=0, atol=1e-6)
        assert mine.abs().max() > 1e-3


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_sums_by_sample_over_the_ranks_of_a_pack(cp: int) -> None:
    samples = numbered([3, 9, 1, 8])
    pack = build_pack(samples, alignment=2 * cp if cp > 1 else 1)
    total = torch.zeros(4)
    for rank in range(cp):
        share = share_of_rank(pack, cp_size=cp, cp_rank=rank)
        assert share.loss_mask_R is not None
        total += sum_by_sample(share.loss_mask_R, share)
    assert total.tolist() == [sample.loss_mask_L.sum().item() for sample in samples]


def test_a_dummy_has_no_pair_and_its_gradient_is_zero() -> None:
    pack = dummy_pack(alignment=4)
    run_now(pack)
    losses = torch.ones(4, requires_grad=True)
    chosen, rejected = pairs.pair_log_probs(losses, pack.loss_mask_T)
    assert chosen.shape == rejected.shape == (0,)
    (chosen - rejected).sum().backward()
    assert losses.grad is not None
    assert losses.grad.tolist() == [0.0] * 4


def test_what_is_no_pair_is_refused() -> None:
    with pytest.raises(PackingError, match="no pack is running"):
        pairs.pair_log_probs(torch.ones(4), torch.ones(4))
    pack = build_pack(numbered([3, 2, 4]), alignment=1)
    run_now(pack)
    with pytest.raises(PackingError, match="3 samples, which are no pairs"):
        pairs.pair_log_probs(torch.ones(9), pack.loss_mask_T)
