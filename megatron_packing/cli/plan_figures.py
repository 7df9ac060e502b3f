"""What does `megatron-packing plan` say in figures? Tables in words, for the terminal and for the page."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron_packing.cli.baselines import Baseline
from megatron_packing.cli.capacity_advice import Advice
from megatron_packing.cli.model_flags import in_gib
from megatron_packing.cli.padded import PaddedAccount
from megatron_packing.cli.plan_report import PlanReport
from megatron_packing.cli.planning import Setting
from megatron_packing.schedule import Metrics

# Figure of a scheduler -> how it is written. What padding does in its place is in `_without_packing`.
_ROWS: tuple[tuple[str, Callable[[Metrics], str]], ...] = (
    ("microbatches per rank", lambda m: f"{m.microbatches_per_rank:,.2f}"),
    ("packs", lambda m: f"{m.packs:,.2f}"),
    ("  at least", lambda m: f"{m.packs_lower_bound:,.2f}"),
    ("fill", lambda m: f"{m.fill:.1%}"),
    ("largest pack / capacity", lambda m: f"{m.max_pack_load:.1%}"),
    ("padding tokens that run", lambda m: f"{m.padding_tokens:,.1f}"),
    ("step imbalance", lambda m: f"{m.step_imbalance:.3f}"),
    ("lockstep imbalance", lambda m: f"{m.lockstep_imbalance:.3f}"),
    ("  at least", lambda m: f"{m.lockstep_lower_bound:.3f}"),
    ("planning, ms", lambda m: f"{m.plan_ms:.2f}"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One table."""

    title: str
    columns: tuple[str, ...]
    """Their heads; one without a name holds labels."""
    rows: tuple[tuple[str, ...], ...]
    """As many cells as columns. A label that is indented belongs to the row above."""


def figures(report: PlanReport) -> Iterator[Figures]:
    """A mean step, packed and not, then what padding costs in all, then the choices that advice is made of."""
    yield _comparison(report)
    yield _padding(report.account, report.setting.seq_length, samples=report.samples)
    if report.advice is not None:
        yield _choices(report.advice)


def _comparison(report: PlanReport) -> Figures:
    setting = report.setting
    columns = [_without_packing(one) for one in report.baselines.values()]
    means = [one.mean for one in report.planned.values()]
    return Figures(
        title=f"Mean of a step (steps: {len(report.steps):,}, samples in each: {len(report.steps[0]):,}); "
        f"packs of {setting.capacity:,} tokens, alignment {setting.topology.alignment}{_memory_in_words(setting)}",
        columns=("", *report.baselines, *report.planned),
        rows=tuple(
            (label, *(column.get(label, "-") for column in columns), *(write(mean) for mean in means))
            for label, write in _ROWS
        ),
    )


def _memory_in_words(setting: Setting) -> str:
    """What a rank keeps, to end a sentence with; nothing where no model is known."""
    size = setting.activation_bytes
    return "" if size is None else f"; activations of {in_gib(size)} a rank"


def _without_packing(baseline: Baseline) -> dict[str, str]:
    """Row of the table -> what a way to batch without packing makes of the same steps; of some rows nothing."""
    return {
        "microbatches per rank": f"{baseline.microbatches_per_rank:,.2f}",
        "packs": f"{baseline.packs:,.2f}",
        "fill": f"{baseline.fill:.1%}",
        "padding tokens that run": f"{baseline.padding_tokens:,.1f}",
        "step imbalance": f"{baseline.step_imbalance:.3f}",
        "lockstep imbalance": f"{baseline.lockstep_imbalance:.3f}",
    }


def _padding(account: PaddedAccount, seq_length: int, *, samples: int) -> Figures:
    tail = account.tail_padding / account.bound_slots
    scores = account.score_half_squares / account.padded_half_squares
    return Figures(
        title=f"{samples:,} samples padded to {seq_length:,} tokens each, in all",
        columns=("", "tokens", "share"),
        rows=(
            ("slots", f"{account.slots:,}", ""),
            ("real tokens", f"{account.real_tokens:,}", f"{1 - account.waste:.1%}"),
            ("padding", f"{account.padding_tokens:,}", f"{account.waste:.1%}"),
            (f"slots of {account.bound_packs:,} full packs, the least", f"{account.bound_slots:,}", ""),
            ("  padding left in them", f"{account.tail_padding:,}", f"{tail:.1%}"),
            ("  slots saved, the most", f"{account.saved:,}", f"{account.saved / account.slots:.1%}"),
            ("attention scores / 2, padded", f"{account.padded_half_squares:,}", ""),
            ("attention scores / 2, packed", f"{account.score_half_squares:,}", f"{scores:.1%}"),
            ("causal pairs, packed", f"{account.causal_pairs:,}", ""),
        ),
    )


def _choices(advice: Advice) -> Figures:
    schedulers = list(dict.fromkeys(one.scheduler for one in advice.choices))
    rows: dict[tuple[str, ...], list[str]] = {}
    for one in advice.choices:
        memory = f"{one.memory:g}x" + ("" if one.activation_bytes is None else f", {in_gib(one.activation_bytes)}")
        cut = (f"{one.cp:,}", f"{one.dp:,}", f"{one.max_tokens_per_rank:,}", memory)
        rows.setdefault(cut, []).append(f"{one.imbalance:.3f} in {one.microbatches_per_rank:,.1f} microbatches")
    return Figures(
        title=f"The same ranks, cut otherwise ({advice.balance} imbalance)",
        columns=("CP", "DP", "tokens a rank", "memory", *schedulers),
        rows=tuple((*cut, *cells) for cut, cells in rows.items()),
    )
