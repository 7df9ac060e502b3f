"""Pretrain as examples/pretrain_gpt.py does, one iteration a turn, and say what each iteration took.

Started by the quickstart, the benchmarks and the check for GPUs, through the real launcher:

    python -m megatron_packing.launch scripts/paired_pretrain.py --use-varlen-dataset --data-path FILE.jsonl ...

Without a parent that gives turns (see turns.py) it trains straight on. One flag of its own: `--sort-microbatches`, the
baseline that sorts a step's samples by length and pads each microbatch to its own longest. The data loader must run in
this process (`--num-workers 0`): that is where samples are counted.
"""

import argparse
import resource
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from turns import TurnTaker

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

ROW_FIELDS = ("tokens", "labels", "loss_mask", "position_ids")
"""Fields of a padded item, each with a place for every token."""


class Recorder:
    """What one iteration saw and took on this rank, measured by the same means for every way of laying samples out.

    Samples are counted where the dataset makes them, slots where the loss is taken: padded, sorted and packed runs pass
    through both.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget the last iteration and start the clocks."""
        self.samples: list[Any] = []
        """The `TokenizedSample`s drawn."""
        self.drawn_lengths: list[int] = []
        """Tokens of each row drawn, 0 where a row was dropped; in the order drawn."""
        self.slots = 0
        self.targets: list[torch.Tensor] = []
        """Of each microbatch; added up after the clocks stop, as reading one would make a GPU wait."""
        self.row_lengths: list[int] = []
        """Slots of each row that ran, for runs that do not pack."""
        self.packed_step: Any = None
        self.marks: list[float] = []
        """CPU time of this process where a pack begins, and where the last one ends."""
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def end(self, loss: float) -> dict[str, Any]:
        """Figures of the iteration, over all ranks. Stops the clocks first: what follows is no part of training."""
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        if not draws_for_its_group():
            self.samples, self.drawn_lengths = [], []
        lengths = self._sequence_lengths()
        sums = summed_over_ranks(
            {
                "cpu_s": cpu,
                "slots": self.slots,
                "real_tokens": sum(self.drawn_lengths),
                "targets": sum(map(int, self.targets)),
                "samples": len(self.samples),
                "truncated": sum(sample.truncated for sample in self.samples),
                "dropped": self.drawn_lengths.count(0),
                "samples_digest": sum(zlib.crc32(sample.tokens.tobytes()) for sample in self.samples),
                "tokens": sum(lengths),
                "tokens_squared": sum(length * length for length in lengths),
            }
        )
        flops = flops_of(sums.pop("tokens"), sums.pop("tokens_squared"))
        ranks_cpu_s = gathered_from_ranks([cpu])
        memory = max(gathered_from_ranks([peak_memory()]))
        figures = {"loss": loss, "wall_s": wall, "ranks_cpu_s": ranks_cpu_s, "peak_bytes": memory, **sums}
        figures["flops"] = flops
        return figures | self._packing_figures()

    def _sequence_lengths(self) -> list[int]:
        """Slots of each sequence that attention keeps apart. Dummies do no useful work, so they are left out."""
        if self.packed_step is None:
            return self.row_lengths
        return [length for pack in self._packs() for length in pack]

    def _packs(self) -> list[list[int]]:
        if not draws_for_its_group():
            return []
        batches = [batch for batch in self.packed_step.batches if not batch.is_dummy]
        return [batch.cu_seqlens_padded.diff().tolist() for batch in batches]

    def _packing_figures(self) -> dict[str, Any]:
        if self.packed_step is None:
            return {}
        figures = self.packed_step.figures
        return {
            "plan_ms": figures.plan_ms,
            "exchange_ms": figures.exchange_ms,
            "step_imbalance": figures.step_imbalance,
            "lockstep_imbalance": figures.lockstep_imbalance,
            "packs": gathered_from_ranks(self._packs()),
            "microbatches_cpu_s": gathered_from_ranks([self._microbatches_cpu_s()]),
        }

    def _microbatches_cpu_s(self) -> list[float]:
        expected = self.packed_step.figures.microbatches + 1
        if len(self.marks) != expected:
            raise RuntimeError(
                f"{len(self.marks)} marks of microbatches in a step; {expected} were expected. This Megatron finalizes "
                "gradients elsewhere: mend record_microbatches."
            )
        return [end - start for start, end in pairwise(self.marks)]


def draws_for_its_group() -> bool:
    """Whether this rank's samples and packs count: context-parallel ranks draw the same ones, and share their packs."""
    from megatron.core import mpu

    return bool(mpu.get_context_parallel_rank() == 0)


def summed_over_ranks(figures: dict[str, float]) -> dict[str, float]:
    """Each figure summed over all ranks; counts stay integers."""
    if dist.get_world_size() == 1:
        return dict(figures)
    from megatron_packing.comm.failures import device_of

    # Exact for counts up to 2**53.
    sums = torch.tensor(list(figures.values()), dtype=torch.float64, device=device_of())
    dist.all_reduce(sums)
    values = zip(figures, sums.tolist(), strict=True)
    return {name: value if name.endswith("_s") else int(value) for name, value in values}


def gathered_from_ranks(items: list[Any]) -> list[Any]:
    """The lists of all ranks, one after the other."""
    if dist.get_world_size() == 1:
        return items
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, items)
    return [item for part in parts for item in part]


def peak_memory() -> int:
    """Bytes that this rank has held at most: allocated on its GPU, or on the CPU the process's own."""
    return torch.cuda.max_memory_allocated() or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def flops_of(tokens: float, tokens_squared: float) -> float:
    """Megatron's own count, logits included, of sequences with these sums of lengths and of squared lengths."""
    from megatron.training import get_args
    from megatron.training.training import num_floating_point_operations

    return float(
        num_floating_point_operations(
            get_args(),
            batch_size=0,  # only a default for the two sums
            seqlen_squared_sum_in_batch=tokens_squared,
            total_real_tokens_in_batch=tokens,
        )
    )


# --- where the figures are taken --------------------------------------------------------------------------------------


def record_samples(recorder: Recorder) -> None:
    """Count rows where every dataset of ours makes its samples."""
    from megatron_packing.data import Dropped
    from megatron_packing.mcore.dataset import VarlenDataset

    original = VarlenDataset.samples_of_row

    def samples_of_row(self: Any, row: int) -> Any:
        samples = original(self, row)
        if isinstance(samples, Dropped):
            recorder.drawn_lengths.append(0)
        else:
            recorder.samples += samples
            recorder.drawn_lengths.append(sum(sample.length for sample in samples))
        return samples

    VarlenDataset.samples_of_row = samples_of_row


def record_slots(recorder: Recorder, script: Any) -> None:
    """Count slots and targets where the script takes its loss: every slot has its place in the mask."""
    original = script.loss_func

    def loss_func(loss_mask: torch.Tensor, output_tensor: torch.Tensor) -> Any:
        loss, num_tokens, report = original(loss_mask, output_tensor)
        recorder.slots += loss_mask.numel()
        recorder.targets.append(num_tokens)
        recorder.row_lengths += [loss_mask.shape[1]] * loss_mask.shape[0]
        return loss, num_tokens, report

    script.loss_func = loss_func


def record_packs(recorder: Recorder) -> None:
    """Keep each step's packs."""
    from megatron_packing.mcore.iterator import StepPacker

    original = StepPacker.pack

    def pack(self: Any, data_iterator: Iterator[Any], count: int) -> Any:
        recorder.packed_step = original(self, data_iterator, count)
        return recorder.packed_step

    StepPacker.pack = pack


def record_microbatches(recorder: Recorder) -> None:
    """Note the CPU time at which this rank takes each pack, and at which it is done with the last one."""
    from megatron.training import training

    from megatron_packing.mcore.step import PackIterator

    take, finalize = PackIterator.__next__, training.finalize_model_grads

    def mark_and_take(self: Any) -> Any:
        recorder.marks.append(time.process_time())
        return take(self)

    def mark_and_finalize(*args: Any, **keywords: Any) -> Any:
        recorder.marks.append(time.process_time())
        return finalize(*args, **keywords)

    PackIterator.__next__ = mark_and_take
    training.finalize_model_grads = mark_and_finalize


def take_turns(recorder: Recorder, taker: TurnTaker | None) -> None:
    """Make Megatron's loop wait for its turn before each iteration, and report after it."""
    from megatron.training import training

    original = training.train_step

    def train_step(*args: Any, **keywords: Any) -> Any:
        if taker is not None:
            taker.wait()
        if dist.get_world_size() > 1:
            dist.barrier()  # the other ranks wait here for the one that waits for the turn
        torch.cuda.synchronize()  # does nothing on the CPU, which is never behind
        recorder.begin()
        result = original(*args, **keywords)
        torch.cuda.synchronize()
        figures = recorder.end(float(result[0]["lm loss"]))
        if taker is not None:
            taker.report(figures)
        return result

    training.train_step = train_step


# --- the sorted baseline ----------------------------------------------------------------------------------------------


class SortedMicrobatches(Iterator[dict[str, torch.Tensor]]):
    """A step's padded microbatches, rearranged: samples sorted by length, each microbatch cut to its longest.

    Args:
        padded: gives microbatches of items that are padded to the sequence length.
        count: microbatches of a step.
        lengths: tokens of the rows drawn for this step, in order; read after drawing.
    """

    def __init__(self, padded: Iterator[dict[str, torch.Tensor]], count: int, lengths: list[int]) -> None:
        drawn = [next(padded) for _ in range(count)]
        rows = {name: torch.cat([batch[name] for batch in drawn]) for name in ROW_FIELDS}
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        size = len(lengths) // count
        self._microbatches = iter(
            [self._cut(rows, order[at : at + size], lengths) for at in range(0, len(order), size)]
        )

    @staticmethod
    def _cut(rows: dict[str, torch.Tensor], members: list[int], lengths: list[int]) -> dict[str, torch.Tensor]:
        longest = max(1, *(lengths[member] for member in members))
        return {name: values[members, :longest].contiguous() for name, values in rows.items()}

    def __next__(self) -> dict[str, torch.Tensor]:
        return next(self._microbatches)


def sort_microbatches(recorder: Recorder) -> None:
    """Hand every step's samples to Megatron's schedule in sorted microbatches."""
    from megatron.training import training

    original = training.get_forward_backward_func

    def get_forward_backward_func(*args: Any, **keywords: Any) -> Callable[..., Any]:
        schedule = original(*args, **keywords)

        def run(*, data_iterator: Any, num_microbatches: int, **rest: Any) -> Any:
            microbatches = SortedMicrobatches(data_iterator, num_microbatches, recorder.drawn_lengths)
            return schedule(data_iterator=microbatches, num_microbatches=num_microbatches, **rest)

        return run

    training.get_forward_backward_func = get_forward_backward_func


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Flags of this script."""
    parser.add_argument(
        "--sort-microbatches",
        action="store_true",
        help="with --varlen-sbhd-validation: sort a step's samples by length, pad each microbatch to its longest",
    )
    return parser


def main() -> None:
    """Train, in turns if a parent gives them."""
    sys.path.append(str(EXAMPLES))
    import pretrain_gpt as script
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    args = parse_and_validate_args(extra_args_provider=add_flags)
    recorder = Recorder()
    record_samples(recorder)
    record_slots(recorder, script)
    record_packs(recorder)
    record_microbatches(recorder)
    if args.sort_microbatches:
        sort_microbatches(recorder)
    take_turns(recorder, TurnTaker.from_environment() if args.rank == 0 else None)
    script.train_valid_test_datasets_provider.is_distributed = True
    pretrain(
        pretrain_cfg_container_from_args(args, gpt_config_from_args(args)),
        script.train_valid_test_datasets_provider,
        ModelType.encoder_or_decoder,
        script.forward_step,
    )


if __name__ == "__main__":
    main()
