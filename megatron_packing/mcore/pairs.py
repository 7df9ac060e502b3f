"""What does a loss over preference pairs need of a pack? The log-probability of each answer, the chosen one's first.

In a pack of pairs, samples 2i and 2i + 1 are the chosen and the rejected answer of pair i. A loss like DPO's stands
where the script computes its own, right after the forward pass:

    def loss_func(loss_mask, token_losses):
        chosen_P, rejected_P = pair_log_probs(token_losses, loss_mask)
        losses_P = -logsigmoid(beta * (chosen_P - rejected_P))
        loss, pairs = losses_P.sum(), torch.tensor(losses_P.numel(), device=losses_P.device)
        return loss, pairs.int(), {"preference loss": torch.stack([loss.detach(), pairs])}

Megatron then divides the sum of all losses by the sum of all pairs, over every pack and rank of the step. Ranks that
share a pack (context parallelism) each count its pairs, in both sums alike.
"""

from torch import Tensor

from megatron_packing.errors import PackingError
from megatron_packing.mcore.step import current_pack
from megatron_packing.thd import sum_by_sample


def pair_log_probs(token_losses: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Summed log-probabilities of the answers in the pack that runs now, on the last stage.

    Args:
        token_losses: what the model gives for labels, minus the log-probability of each; R elements in any shape.
        loss_mask: float32, as many: 1 on the answers.

    Returns:
        float32 [P] of the chosen and [P] of the rejected answers; P is 0 in a dummy pack. With context parallelism
        each of its ranks has the same numbers, and the gradient reaches all of them.

    Raises:
        PackingError: no pack runs, or its samples do not form pairs.
    """
    pack = current_pack()
    sums_S = sum_by_sample(-token_losses.float().view(-1) * loss_mask.view(-1), pack)
    if sums_S.numel() % 2:
        raise PackingError(
            f"the pack holds {sums_S.numel()} samples, which are no pairs. Use --packing-dataset preference, or a "
            "dataset of your own derived from PreferenceDataset."
        )
    sums_S = _over_context_parallel_ranks(sums_S)
    return sums_S[0::2], sums_S[1::2]


def _over_context_parallel_ranks(sums_S: Tensor) -> Tensor:
    """The sum over the ranks that share a pack; its gradient goes to all of them."""
    from megatron.core import parallel_state
    from torch.distributed.nn.functional import all_reduce

    if parallel_state.get_context_parallel_world_size() == 1:
        return sums_S
    whole: Tensor = all_reduce(sums_S, group=parallel_state.get_context_parallel_group())
    return whole
