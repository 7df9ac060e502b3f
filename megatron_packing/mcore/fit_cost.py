"""What do samples cost on this machine? `--packing-fit-cost`: microbatches of the first steps, timed and fitted.

Megatron asks for the next pack when it is done with the one before, forward and backward, so that the time between two
packs is that of a microbatch; the last one ends where gradients are finalized. With pipelines or experts ranks wait for
one another in between, so that the settings refuse both.

The times of all ranks are put together, one rank fits them and all take its numbers: they must plan alike. Cost: two
clock readings a microbatch, none once they are fitted; on a GPU they are events, waited for once.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_packing.comm.failures import device_of
from megatron_packing.comm.texts import all_gather_texts
from megatron_packing.errors import PackingError
from megatron_packing.schedule import CostModel
from megatron_packing.thd import PackShare

WARM_UP_STEPS = 1
"""First steps that are not measured: memory is allocated and kernels are chosen in them."""

type _Times = tuple[list[Any], list[tuple[int, int]]]
"""Clock readings around each microbatch of a step, and its tokens and their squares."""


class CostFitter:
    """Measures microbatches of a few steps, and then fits their cost once. One for a process.

    Args:
        steps: how many are measured; 0: nothing is done.
        clock: reads the time in milliseconds; None: that of the device the process group runs on.
    """

    def __init__(self, steps: int, clock: Callable[[], float] | None = None) -> None:
        self._steps = steps
        self._clock = clock
        self._first: int | None = None
        """Iteration of the first step."""
        self._iteration = 0
        self._readings: list[Any] | None = None
        self._measured: dict[int, _Times] = {}

    def step_begins(self, iteration: int, use: Callable[[CostModel], None], said: Callable[[str], None]) -> None:
        """Note which step comes; before the first one that is not to be measured, fit. Called on every rank.

        A step that Megatron runs again counts once, and is planned as before.

        Args:
            iteration: the training step's number, the same on all ranks.
            use: takes the cost that was found.
            said: takes a line for the log.
        """
        self._iteration = iteration
        if self._first is None:
            self._first = iteration
        if self._steps and iteration >= self._first + WARM_UP_STEPS + self._steps:
            self._steps = 0
            self._fit(use, said)

    @contextlib.contextmanager
    def timing(self, model: Any, shares: Sequence[PackShare]) -> Iterator[None]:
        """Time the microbatches of the step that runs within, if it is one to be measured.

        Args:
            model: its config; what finalizes gradients is wrapped meanwhile.
            shares: the step's packs, in the order in which they run.
        """
        assert self._first is not None, "step_begins comes first"
        if not self._steps or self._iteration < self._first + WARM_UP_STEPS:
            yield
            return
        self._readings = []
        finalize = model.finalize_model_grads_func

        def mark_and_finalize(*args: Any, **keywords: Any) -> Any:
            self.mark()
            return finalize(*args, **keywords)

        model.finalize_model_grads_func = mark_and_finalize
        try:
            yield
        finally:
            model.finalize_model_grads_func = finalize
            readings, self._readings = self._readings, None
        if len(readings) == len(shares) + 1:  # else the script takes packs in its own way
            self._measured[self._iteration] = readings, [_work_of(share) for share in shares]

    def mark(self) -> None:
        """A microbatch begins, and with it the one before ends."""
        if self._readings is not None:
            self._readings.append(self._now())

    def _now(self) -> Any:
        if self._clock is not None:
            return self._clock()
        if _on_gpu():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        return time.perf_counter() * 1e3

    def _fit(self, use: Callable[[CostModel], None], said: Callable[[str], None]) -> None:
        group, device = (dist.group.WORLD, device_of()) if dist.is_initialized() else (None, "cpu")
        texts = all_gather_texts(json.dumps(self._rows()), group=group, device=device)
        self._measured.clear()
        first = group is None or group.rank() == 0
        answer = _fitted([row for text in texts for row in json.loads(text)]) if first else ""
        found = json.loads(all_gather_texts(answer, group=group, device=device)[0])
        if "cost" in found:
            use(CostModel(**found["cost"]))
        said(f"megatron_packing: {found['said']}")

    def _rows(self) -> list[tuple[int, int, float]]:
        """(tokens, their squares, ms) of each microbatch; dummies are left out."""
        rows = []
        for readings, works in self._measured.values():
            for number, (tokens, squares) in enumerate(works):
                if tokens:
                    rows.append((tokens, squares, _between(readings[number], readings[number + 1])))
        return rows


def _work_of(share: PackShare) -> tuple[int, int]:
    """Tokens of a pack, and the sum of its samples' squared; 0 of a dummy."""
    if share.is_dummy:
        return 0, 0
    lengths = share.cu_seqlens.diff().long()
    return int(lengths.sum()), int((lengths * lengths).sum())


def _between(first: Any, second: Any) -> float:
    if isinstance(first, float):
        return float(second - first)
    second.synchronize()
    return float(first.elapsed_time(second))


def _on_gpu() -> bool:
    return dist.is_initialized() and device_of() == "cuda"


def _fitted(rows: Sequence[Sequence[float]]) -> str:
    """JSON: what to say, and the cost unless none was found."""
    tokens, squares, ms = zip(*rows, strict=True) if rows else ((), (), ())
    kept = "--packing-fit-cost: balanced keeps to the model's FLOPs"
    try:
        cost = CostModel.fitted(tokens, squares, ms)
    except PackingError as error:
        return json.dumps({"said": f"WARNING: {kept}: {error}"})
    if not (cost.linear or cost.quadratic):
        return json.dumps({"said": f"WARNING: {kept}: the {len(rows)} times measured do not grow with the tokens."})
    weight = f"a token weighs {cost.linear / cost.quadratic:,.0f} pairs" if cost.quadratic else "pairs weigh nothing"
    said = (
        f"--packing-fit-cost: {len(rows)} microbatches measured: {cost.linear * 1e3:.4g} ms a thousand tokens and "
        f"{cost.quadratic * 1e6:.4g} ms a million pairs, so that {weight}; balanced goes by that from here on"
    )
    return json.dumps({"said": said, "cost": {"linear": cost.linear, "quadratic": cost.quadratic}})
