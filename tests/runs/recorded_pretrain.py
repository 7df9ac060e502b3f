"""examples/pretrain_gpt.py, watched: what went through the model in each step, and what came out.

A user's script as far as packing is concerned. Records: loss, consumed samples, fingerprints of the
samples, how they lay in packs, targets, what the FLOP count is made of, a hash of weights and optimizer state
after each step, and the final weights.
"""

import hashlib
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.training import get_args, training

FOLDER = Path(os.environ["RECORD_TO"])
EOS = 255  # of the toy tokenizer
iterations: list[dict[str, Any]] = []
seen: dict[str, list[Any]] = {"samples": [], "packs": [], "targets": []}
built: dict[str, Any] = {}


def watch_forward() -> None:
    forward = GPTModel.forward

    def watched(self: GPTModel, input_ids: Any, position_ids: Any, attention_mask: Any, **keywords: Any) -> Any:
        if self.training and parallel_state.get_tensor_model_parallel_rank() == 0:
            if self.post_process:
                seen["targets"].append(int(keywords["loss_mask"].sum()))
            if self.pre_process:
                note_samples(input_ids, keywords.get("packed_seq_params"))
        return forward(self, input_ids, position_ids, attention_mask, **keywords)

    GPTModel.forward = watched


def note_samples(tokens_BR: torch.Tensor, packed: Any) -> None:
    """Fingerprint each sample on the first stage, whole, whatever the layout."""
    if packed is None:
        rows = list(tokens_BR)
    else:
        lengths = packed.cu_seqlens_q.diff().tolist()
        static = packed.local_cp_size is None
        group = parallel_state.get_context_parallel_group() if static else packed.cp_group  # None: of one rank
        rows = whole_pack(tokens_BR[0], lengths, group).split(lengths)
        if group is not None and group.rank() > 0:
            return
    seen["packs"].append([])
    for tokens in rows:
        # Padding is 0 or EOS and stands at the end; a sample's inputs end otherwise, or are cut alike in both layouts.
        real = torch.nonzero((tokens != 0) & (tokens != EOS))
        if real.numel():  # a dummy, and a dropped row in the padded run, hold nothing
            fingerprint = hashlib.sha256(tokens[: int(real[-1]) + 1].numpy().tobytes()).hexdigest()[:12]
            seen["samples"].append(fingerprint)
            seen["packs"][-1].append(fingerprint)


def whole_pack(tokens_R: torch.Tensor, lengths: list[int], group: Any) -> torch.Tensor:
    """All rows of a pack, in its order, from the ranks that share it."""
    if group is None or group.size() == 1:
        return tokens_R
    ranks = group.size()
    parts = [torch.empty_like(tokens_R) for _ in range(ranks)]
    torch.distributed.all_gather(parts, tokens_R.contiguous(), group=group)
    whole = torch.empty(sum(lengths), dtype=tokens_R.dtype)
    starts = [0] * ranks
    at = 0
    for length in lengths:
        chunk = length // (2 * ranks)
        for rank, part in enumerate(parts):
            for number in (rank, 2 * ranks - 1 - rank):
                whole[at + number * chunk : at + (number + 1) * chunk] = part[starts[rank] : starts[rank] + chunk]
                starts[rank] += chunk
        at += length
    return whole


def watch_setup() -> None:
    setup = training.setup_model_and_optimizer

    def watched(*args: Any, **keywords: Any) -> Any:
        built["model"], built["optimizer"], scheduler = setup(*args, **keywords)
        return built["model"], built["optimizer"], scheduler

    training.setup_model_and_optimizer = watched


def watch_log() -> None:
    log = training.training_log

    def watched(loss_dict: Any, total: Any, lr: Any, iteration: int, *args: Any, **keywords: Any) -> Any:
        loss = loss_dict.get("lm loss")
        iterations.append(
            {
                "iteration": iteration,
                "loss": None if loss is None else float(loss),
                "consumed_samples": get_args().consumed_train_samples,
                "samples": list(seen["samples"]),
                "packs": list(seen["packs"]),
                "targets": sum(seen["targets"]),
                "real_tokens": keywords["total_real_tokens_in_batch"],
                "squared_lengths": keywords["seqlen_squared_sum_in_batch"],
                "state": state_hash(),
                "skipped": args[2],  # loss_scale, report_memory_flag, skipped_iter
            }
        )
        for noted in seen.values():
            noted.clear()
        return log(loss_dict, total, lr, iteration, *args, **keywords)

    training.training_log = watched


def state_hash() -> str:
    digest = hashlib.sha256()
    for chunk in built["model"]:
        for parameter in chunk.parameters():
            digest.update(parameter.detach().float().numpy().tobytes())
    for optimizer in getattr(built["optimizer"], "chained_optimizers", [built["optimizer"]]):
        for state in optimizer.optimizer.state.values():
            for value in state.values():
                if torch.is_tensor(value):
                    digest.update(value.detach().float().numpy().tobytes())
    return digest.hexdigest()[:16]


def save() -> None:
    tp, pp = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
    first = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    weights = {
        f"tp{tp} pp{pp} chunk{number} {name}": parameter.detach().float().clone()
        for number, chunk in enumerate(built["model"])
        for name, parameter in chunk.named_parameters()
        if first
    }
    record = {
        "iterations": iterations,
        "unfinished": list(seen["packs"]),
        "weights": weights,
        "arguments": {name: repr(value) for name, value in vars(get_args()).items()},
    }
    torch.save(record, FOLDER / f"record{int(os.environ['RANK']):03d}.pt")


def script_to_watch() -> str:
    """The script after --own-script, which is taken out of the command line; else examples/pretrain_gpt.py."""
    examples = Path(__file__).parents[2] / "examples"
    sys.path.insert(0, str(examples))
    if "--own-script" not in sys.argv:
        return str(examples / "pretrain_gpt.py")
    at = sys.argv.index("--own-script")
    _, script = sys.argv[at : at + 2]
    del sys.argv[at : at + 2]
    sys.path.insert(0, str(Path(script).parent))
    return script


if __name__ == "__main__":
    watch_forward()
    watch_setup()
    watch_log()
    try:
        runpy.run_path(script_to_watch(), run_name="__main__")
    except SystemExit:  # --exit-interval, and a rerun that found a fault
        if built:
            save()
        raise
    save()
