"""How does the time of packed attention grow with the pack? Linearly, if samples stay as they are.

Forward and backward of `megatron_packing.attention.packed_attention` on packs of alpaca-like lengths, against dense
attention with a block mask, which computes every pair of rows of the pack. A larger pack repeats the samples of the
smallest, so that only the pack grows. CPU time of this process, the best of several rounds; the packs take turns within
a round. Exit code 1 if the largest pack takes more than the allowed multiple of the smallest one's time. Cost: about
half a minute.
"""

import argparse
import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from megatron_packing.attention import packed_attention
from megatron_packing.attention.reference import visible_TT

LENGTHS = Path(__file__).resolve().parent / "data" / "alpaca_lengths.json"
HEADS, QUERY_GROUPS, HEAD_DIM = 8, 2, 32
"""The attention of the end-to-end benchmark's model: 4 query heads share a key and a value."""

SEED = 1234

MAX_DENSE_TOKENS = 4096
"""Beyond it dense attention takes gigabytes and minutes."""

MAX_DIFFERENCE = 1e-4
"""Between packed and dense outputs in float32; both round sums of up to a thousand terms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """Random rows, cut into samples."""

    lengths: tuple[int, ...]
    q_TNH: Tensor
    k_TGH: Tensor
    v_TGH: Tensor

    def run(self, attention: Callable[..., Tensor]) -> Tensor:
        """Forward and backward; the output."""
        for tensor in (self.q_TNH, self.k_TGH, self.v_TGH):
            tensor.grad = None
        out = attention(self.q_TNH, self.k_TGH, self.v_TGH, self.lengths, scale=HEAD_DIM**-0.5)
        out.sum().backward()
        return out.detach()


def draw_lengths(tokens: int, seed: int) -> list[int]:
    """Lengths from the list that fill `tokens`, the last one cut to fit."""
    listed = json.loads(LENGTHS.read_text(encoding="utf-8"))["lengths"]
    draw = random.Random(seed)
    return fill(tokens, iter(lambda: draw.choice(listed), None))


def fill(tokens: int, lengths: Iterable[int]) -> list[int]:
    """The first of `lengths` that make up `tokens`, the last one cut to fit."""
    filled: list[int] = []
    room = tokens
    for length in lengths:
        filled.append(min(length, room))
        room -= filled[-1]
        if room == 0:
            break
    return filled


def make_pack(lengths: Sequence[int], seed: int) -> Pack:
    """Random rows for `lengths`."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(sum(lengths), heads, HEAD_DIM, generator=generator, requires_grad=True)
        for heads in (HEADS, QUERY_GROUPS, QUERY_GROUPS)
    )
    return Pack(lengths=tuple(lengths), q_TNH=q, k_TGH=k, v_TGH=v)


def dense_attention(q_TNH: Tensor, k_TGH: Tensor, v_TGH: Tensor, lengths: Sequence[int], *, scale: float) -> Tensor:
    """The same result from one call over the whole pack, with a mask of who may see whom."""
    mask_TT = visible_TT(torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32))
    q, k, v = (x.transpose(0, 1)[None] for x in (q_TNH, k_TGH, v_TGH))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_TT, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def best_seconds(packs: Sequence[Pack], attention: Callable[..., Tensor], rounds: int) -> list[float]:
    """CPU seconds of each pack's best round, after one that does not count."""
    best = [float("inf")] * len(packs)
    for number, (place, pack) in itertools.product(range(rounds + 1), enumerate(packs)):
        started = time.process_time()
        pack.run(attention)
        if number:
            best[place] = min(best[place], time.process_time() - started)
    return best


def table_of(packs: Sequence[Pack], packed: Sequence[float], dense: Sequence[float | None]) -> Table:
    """One row a pack."""
    table = Table(title=f"Attention, forward and backward: {HEADS}/{QUERY_GROUPS} heads of {HEAD_DIM}, float32")
    for column in ("tokens", "samples", "packed ms", "growth", "us / token", "dense mask ms", "dense / packed"):
        table.add_column(column, justify="right")
    for pack, seconds, dense_seconds in zip(packs, packed, dense, strict=True):
        tokens = sum(pack.lengths)
        table.add_row(
            f"{tokens:,}",
            f"{len(pack.lengths):,}",
            f"{seconds * 1e3:,.1f}",
            f"{seconds / packed[0]:.2f}x",
            f"{seconds / tokens * 1e6:.2f}",
            "" if dense_seconds is None else f"{dense_seconds * 1e3:,.1f}",
            "" if dense_seconds is None else f"{dense_seconds / seconds:.1f}x",
        )
    return table


def main() -> int:
    """Run the command line; the exit code."""
    options = _parse()
    torch.set_num_threads(options.threads)
    sizes = sorted(options.tokens)
    lengths = draw_lengths(sizes[0], SEED)
    packs = [make_pack(fill(tokens, itertools.cycle(lengths)), SEED) for tokens in sizes]
    packed = best_seconds(packs, packed_attention, options.rounds)
    dense: list[float | None] = [None] * len(packs)
    for place, pack in enumerate(packs):
        if sum(pack.lengths) <= MAX_DENSE_TOKENS:
            difference = float((pack.run(packed_attention) - pack.run(dense_attention)).abs().max())
            if difference > MAX_DIFFERENCE:
                print(f"packed and dense attention differ by {difference:.1e}; the limit is {MAX_DIFFERENCE:.0e}.")
                return 1
            (dense[place],) = best_seconds([pack], dense_attention, rounds=1)
    Console().print(table_of(packs, packed, dense))
    growth, tokens = packed[-1] / packed[0], sum(packs[-1].lengths) / sum(packs[0].lengths)
    print(f"{tokens:.2f} times the tokens take {growth:.2f} times as long; allowed: {options.max_growth:.2f}")
    return int(growth > options.max_growth)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Measure how packed attention grows with the pack.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384], metavar="N", help="sizes of the packs")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="rounds, of which the best counts")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads of torch")
    parser.add_argument(
        "--max-growth", type=float, default=4.5, metavar="X", help="allowed, largest over smallest pack"
    )
    options = parser.parse_args()
    if min(options.tokens) < 1 or options.rounds < 1:
        parser.error("--tokens and --rounds: every number must be at least 1.")
    return options


if __name__ == "__main__":
    sys.exit(main())
