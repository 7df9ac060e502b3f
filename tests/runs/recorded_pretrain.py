"""examples/pretrain_gpt.py, watched: what went through the model in each step, and what came out.

A user's script as far as packing is concerned. Records: loss, consumed samples, fingerprints of the
samples, targets, a hash of weights and optimizer state after each step, and the final weights.
"""

import hashlib
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.training import get_args, training

FOLDER = Path(os.environ["RECORD_TO"])
iterations: list[dict[str, Any]] = []
seen: dict[str, list[Any]] = {"samples": [], "targets": []}
built: dict[str, Any] = {}


def watch_forward() -> None:
    forward = GPTModel.forward

    def watched(self: GPTModel, input_ids: Any, position_ids: Any, attention_mask: Any, **keywords: Any) -> Any:
        if self.training:
            note(input_ids, keywords["loss_mask"], keywords.get("packed_seq_params"))
        return forward(self, input_ids, position_ids, attention_mask, **keywords)

    GPTModel.forward = watched


def note(tokens_BT: torch.Tensor, mask_BT: torch.Tensor, packed: Any) -> None:
    seen["targets"].append(int(mask_BT.sum()))
    if packed is None:
        rows = list(zip(tokens_BT, mask_BT, strict=True))
    else:
        lengths = packed.cu_seqlens_q.diff().tolist()
        rows = list(zip(tokens_BT[0].split(lengths), mask_BT[0].split(lengths), strict=True))
    for tokens, mask in rows:
        learned = torch.nonzero(mask)
        if learned.numel():  # a dummy, and a dropped row in the padded run, hold nothing
            real = tokens[: int(learned[-1]) + 1]  # up to the last target: the same in both layouts
            seen["samples"].append(hashlib.sha256(real.numpy().tobytes()).hexdigest()[:12])


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
                "targets": sum(seen["targets"]),
                "state": state_hash(),
                "skipped": args[2],  # loss_scale, report_memory_flag, skipped_iter
            }
        )
        seen["samples"].clear()
        seen["targets"].clear()
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
    weights = {
        name: parameter.detach().float().clone()
        for chunk in built["model"]
        for name, parameter in chunk.named_parameters()
    }
    record = {
        "iterations": iterations,
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
    runpy.run_path(script_to_watch(), run_name="__main__")
    save()
