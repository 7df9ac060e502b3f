"""No sample of a pack sees another: in the whole model, in values and in gradients, and in its positions."""

import pytest
import torch

from megatron_packing.thd import PackedBatch, SampleTensors, build_pack, share_of_rank
from tests import tolerances
from tests.runs.harness import Runner
from tests.runs.toy_model import VOCAB, hooked, random_samples, toy_gpt

pytestmark = pytest.mark.run

LENGTHS = (5, 4, 11, 1, 7)


@pytest.mark.parametrize("positions", ["rope", "learned_absolute", "none"])
def test_packed_logits_and_gradients_equal_each_sample_alone(positions: str, runner: Runner) -> None:
    runner.call(
        {"rope": _equals_alone_rope, "learned_absolute": _equals_alone_learned, "none": _equals_alone_none}[positions]
    )


def test_changing_one_sample_changes_the_others_by_exactly_nothing(runner: Runner) -> None:
    runner.call(_changing_one_changes_only_one)


def test_positions_restart_in_queries_keys_and_learned_embeddings(runner: Runner) -> None:
    runner.call(_positions_restart)


def test_wrong_boundaries_are_seen(runner: Runner) -> None:
    """The isolation check can fail: with a boundary moved by one, samples do see each other."""
    runner.call(_wrong_boundaries_leak)


def _logits(model: torch.nn.Module, batch: PackedBatch) -> torch.Tensor:
    """[T, vocabulary] of one pack."""
    model.current.share = share_of_rank(batch, cp_size=1, cp_rank=0)
    return model(batch.tokens_T[None], batch.position_ids_T[None], None)[0]


def _losses(model: torch.nn.Module, batch: PackedBatch) -> torch.Tensor:
    model.current.share = share_of_rank(batch, cp_size=1, cp_rank=0)
    return model(batch.tokens_T[None], batch.position_ids_T[None], None, labels=batch.labels_T[None])[0]


def _equals_alone(positions: str) -> None:
    model, samples = hooked(toy_gpt(positions=positions)), random_samples(LENGTHS)
    packed = build_pack(samples, alignment=1)
    logits = _logits(model, packed).split(LENGTHS)
    _losses(model, packed).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for sample, mine in zip(samples, logits, strict=True):
        # Alone, in Megatron's unpacked layout: [1, n] and no boundaries at all.
        model.current.share = None
        position_ids = torch.arange(sample.length)[None]
        alone = model(sample.tokens_L[None], position_ids, None)[0]
        assert (mine - alone).abs().max() <= tolerances.LOGITS * max(1.0, float(alone.abs().max()))
        model(sample.tokens_L[None], position_ids, None, labels=sample.labels_L[None]).sum().backward()
    for name, parameter in model.named_parameters():
        difference = (gradients[name] - parameter.grad).norm()
        assert difference <= 1e-5 * parameter.grad.norm() + 1e-6, f"gradient of {name}: {difference}"


def _equals_alone_rope() -> None:
    _equals_alone("rope")


def _equals_alone_learned() -> None:
    _equals_alone("learned_absolute")


def _equals_alone_none() -> None:
    _equals_alone("none")


def _changing_one_changes_only_one() -> None:
    model, samples = hooked(toy_gpt(positions="rope")), random_samples(LENGTHS)
    changed = [*samples]
    changed[1] = SampleTensors(
        tokens_L=(samples[1].tokens_L + 1) % VOCAB, labels_L=samples[1].labels_L, loss_mask_L=samples[1].loss_mask_L
    )
    before = _logits(model, build_pack(samples, alignment=4)).split([8, 4, 12, 4, 8])
    after = _logits(model, build_pack(changed, alignment=4)).split([8, 4, 12, 4, 8])
    assert not torch.equal(before[1], after[1])
    for index in (0, 2, 3, 4):
        assert torch.equal(before[index], after[index]), f"sample {index} changed with sample 1"
    # Gradients: the loss of sample 1 alone reaches no other sample's embedding.
    batch = build_pack(samples, alignment=1)
    embeddings: list[torch.Tensor] = []
    model.embedding.register_forward_hook(lambda module, args, out: (out.retain_grad(), embeddings.append(out))[1])
    _losses(model, batch).split(LENGTHS)[1].sum().backward()
    reached = embeddings[0].grad[:, 0].abs().sum(dim=1).split(LENGTHS)
    assert reached[1].sum() > 0
    assert all(float(reached[index].sum()) == 0.0 for index in (0, 2, 3, 4))


def _positions_restart() -> None:
    from megatron_packing.mcore.attention_spec import PackedDotProductAttention

    samples = random_samples(LENGTHS)
    repeated = SampleTensors(
        tokens_L=samples[0].tokens_L, labels_L=samples[0].labels_L, loss_mask_L=samples[0].loss_mask_L
    )
    batch = build_pack([samples[0], samples[2], repeated], alignment=1)
    assert batch.position_ids_T.tolist() == [*range(5), *range(11), *range(5)]
    model = hooked(toy_gpt(positions="rope"))
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    core = next(module for module in model.modules() if isinstance(module, PackedDotProductAttention))
    core.register_forward_pre_hook(lambda module, args: seen.append(args[:2]))
    _logits(model, batch)
    for rotated in seen[0]:  # queries, then keys: the same tokens at the same positions, twice in the pack
        first, _, again = rotated.split([5, 11, 5])
        assert torch.equal(first, again)
        assert not torch.equal(first[0], first[1])
    learned = hooked(toy_gpt(positions="learned_absolute"))
    embedded: list[torch.Tensor] = []
    learned.embedding.register_forward_hook(lambda module, args, out: embedded.append(out))
    _logits(learned, batch)
    first, _, again = embedded[0][:, 0].split([5, 11, 5])
    assert torch.equal(first, again)


def _wrong_boundaries_leak() -> None:
    from dataclasses import replace

    model, samples = hooked(toy_gpt(positions="rope")), random_samples(LENGTHS)[:2]
    batch = build_pack(samples, alignment=1)
    moved = torch.tensor([0, 4, 9], dtype=torch.int32)  # the samples have 5 and 4 tokens
    wrong = replace(batch, cu_seqlens=moved, cu_seqlens_padded=moved, max_seqlen=5)
    other = replace(wrong, tokens_T=torch.cat([(samples[0].tokens_L + 1) % VOCAB, samples[1].tokens_L]))
    assert not torch.equal(_logits(model, wrong)[5:], _logits(model, other)[5:])
