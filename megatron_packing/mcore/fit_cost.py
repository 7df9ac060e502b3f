"""What do samples cost on this machine? `--packing-fit-cost`: microbatches of the first steps, timed and fitted.

Megatron asks for the next pack when it is done with the one before, forward and backward, so that the time between two
packs is that of a microbatch; the last one ends where gradients are finalized. With pipelines or experts ranks wait for
one another in between, so that the settings refuse both.

The times of all ranks are put together, one rank fits them and all take its numbers: they must plan alike. What was
measured and found goes into checkpoints, as a text among Megatron's arguments, so that a resumed run plans as the one
that did not stop: no two measurements are the same. Cost: two clock readings a microbatch, none once they are fitted;
after each measured step its times are gathered, for which a GPU is waited for.
"""

import contextlib
import json
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, MutableMapping, Sequence
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

KEPT_AS = "packing_measured_cost"
"""The one of Megatron's arguments that is ours and no flag: checkpoints hold all of them."""

type _Row = tuple[int, int, float]
"""Of a microbatch its tokens, their squares, and milliseconds."""


def take_over(saved: Namespace, args: Namespace) -> None:
    """Let a resumed run know what the run before it had measured.

    Args:
        saved: the arguments that a checkpoint holds.
        args: those of this run.
    """
    if hasattr(saved, KEPT_AS):
        setattr(args, KEPT_AS, getattr(saved, KEPT_AS))


class CostFitter:
    """Measures microbatches of a few steps, and then fits their cost once. One for a process.

    Args:
        steps: how many are measured; 0: nothing is done.
        layout: what times depend on; a checkpoint's are no use where it differs.
        store: Megatron's arguments by name; called when they are needed. Every rank's hold the same text of ours.
        clock: reads the time in milliseconds; None: that of the device the process group runs on.
    """

    def __init__(
        self,
        steps: int,
        *,
        layout: str,
        store: Callable[[], MutableMapping[str, Any]],
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._steps = steps
        self._layout = layout
        self._store = store
        self._clock = clock
        self._first: int | None = None
        """Iteration of this process's first step."""
        self._iteration = 0
        self._readings: list[Any] | None = None
        self._measured: dict[int, list[_Row]] = {}
        """Of each measured step, before a checkpoint too, the microbatches of all ranks."""

    def step_begins(self, iteration: int, use: Callable[[CostModel], None], said: Callable[[str], None]) -> None:
        """Note which step comes; once enough of them are measured, fit. Called on every rank.

        A step that Megatron runs again counts once, and is planned as before.

        Args:
            iteration: the training step's number, the same on all ranks.
            use: takes the cost that was found.
            said: takes a line for the log.
        """
        self._iteration = iteration
        if self._first is None:
            self._first = iteration
            self._resume(use, said)
        if self._steps and len(self._measured.keys() - {iteration}) >= self._steps:
            self._steps = 0
            self._fit(use, said)

    def _resume(self, use: Callable[[CostModel], None], said: Callable[[str], None]) -> None:
        """Go on from what a checkpoint holds, if it holds anything of ours."""
        text = self._store().get(KEPT_AS)
        if text is None:
            return
        kept = json.loads(text)
        if not self._steps:
            said(
                "megatron_packing: the checkpoint holds measured costs, which are not used without --packing-fit-cost: "
                "plans may differ from those of the run that it is of"
            )
        elif kept["layout"] != self._layout:
            said(
                f"megatron_packing: --packing-fit-cost: the checkpoint's costs were measured with {kept['layout']}, "
                f"this run has {self._layout}: measured anew"
            )
        elif kept["found"] is not None:
            self._steps = 0
            self._use(kept["found"], use, said, " (from the checkpoint)")
        else:
            self._measured = {int(step): rows for step, rows in kept["measured"].items()}
            count = sum(map(len, self._measured.values()))
            said(f"megatron_packing: --packing-fit-cost: {count} microbatches were measured before the checkpoint")

    def _keep(self, found: dict[str, Any] | None = None) -> None:
        kept = {"layout": self._layout, "measured": self._measured, "found": found}
        self._store()[KEPT_AS] = json.dumps(kept)

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
        whole = len(readings) == len(shares) + 1  # else the script takes packs in its own way
        texts = _gathered(json.dumps(_rows(readings, shares) if whole else []))
        self._measured[self._iteration] = [row for text in texts for row in json.loads(text)]
        self._keep()

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
        first = not dist.is_initialized() or dist.get_rank() == 0
        answer = _fitted([row for rows in self._measured.values() for row in rows]) if first else ""
        found = json.loads(_gathered(answer)[0])
        self._measured.clear()
        self._keep(found)
        self._use(found, use, said)

    @staticmethod
    def _use(
        found: dict[str, Any], use: Callable[[CostModel], None], said: Callable[[str], None], source: str = ""
    ) -> None:
        if "cost" in found:
            use(CostModel(**found["cost"]))
        said(f"megatron_packing: {found['said']}{source}")


def _gathered(text: str) -> list[str]:
    """The texts of all ranks."""
    group, device = (dist.group.WORLD, device_of()) if dist.is_initialized() else (None, "cpu")
    return all_gather_texts(text, group=group, device=device)


def _rows(readings: Sequence[Any], shares: Sequence[PackShare]) -> list[_Row]:
    """A step's microbatches; dummies are left out."""
    rows = []
    for number, (tokens, squares) in enumerate(map(_work_of, shares)):
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
