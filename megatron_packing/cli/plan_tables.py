"""How does `megatron-packing plan` show its figures? As tables for the terminal."""

from collections.abc import Callable

from rich.table import Table

from megatron_packing.cli.baselines import Baseline
from megatron_packing.cli.capacity_advice import Advice
from megatron_packing.cli.model_flags import in_gib
from megatron_packing.cli.output import console
from megatron_packing.cli.padded import PaddedAccount
from megatron_packing.cli.plan_report import PlanReport
from megatron_packing.cli.planning import Setting
from megatron_packing.schedule import Metrics

# Figure of a scheduler -> how it is written. What padding does in its place is in `without_packing`.
ROWS: tuple[tuple[str, Callable[[Metrics], str]], ...] = (
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


def print_tables(report: PlanReport) -> None:
    """Print a mean step, packed and not, then what padding costs in all, then the choices that advice is made of."""
    out = console()
    out.print(_comparison(report))
    out.print(_padding_table(report.account, report.setting.seq_length, samples=report.samples))
    if report.advice is not None:
        out.print(_choices_table(report.advice))


def _comparison(report: PlanReport) -> Table:
    setting = report.setting
    table = Table(
        title=f"Mean of a step (steps: {len(report.steps):,}, samples in each: {len(report.steps[0]):,}); "
        f"packs of {setting.capacity:,} tokens, alignment {setting.topology.alignment}{memory_in_words(setting)}",
        title_justify="left",
    )
    table.add_column("")
    for name in (*report.baselines, *report.planned):
        table.add_column(name, justify="right")
    columns = [without_packing(one) for one in report.baselines.values()]
    means = [one.mean for one in report.planned.values()]
    for label, write in ROWS:
        table.add_row(label, *(column.get(label, "-") for column in columns), *(write(mean) for mean in means))
    return table


def memory_in_words(setting: Setting) -> str:
    """What a rank keeps, to end a sentence with; nothing where no model is known."""
    size = setting.activation_bytes
    return "" if size is None else f"; activations of {in_gib(size)} a rank"


def without_packing(baseline: Baseline) -> dict[str, str]:
    """Row of the table -> what a way to batch without packing makes of the same steps; of some rows nothing."""
    return {
        "microbatches per rank": f"{baseline.microbatches_per_rank:,.2f}",
        "packs": f"{baseline.packs:,.2f}",
        "fill": f"{baseline.fill:.1%}",
        "padding tokens that run": f"{baseline.padding_tokens:,.1f}",
        "step imbalance": f"{baseline.step_imbalance:.3f}",
        "lockstep imbalance": f"{baseline.lockstep_imbalance:.3f}",
    }


def _choices_table(advice: Advice) -> Table:
    table = Table(title=f"The same ranks, cut otherwise ({advice.balance} imbalance)", title_justify="left")
    schedulers = list(dict.fromkeys(one.scheduler for one in advice.choices))
    for name in ("CP", "DP", "tokens a rank", "memory", *schedulers):
        table.add_column(name, justify="right")
    rows: dict[tuple[str, ...], list[str]] = {}
    for one in advice.choices:
        memory = f"{one.memory:g}x" + ("" if one.activation_bytes is None else f", {in_gib(one.activation_bytes)}")
        cut = (f"{one.cp:,}", f"{one.dp:,}", f"{one.max_tokens_per_rank:,}", memory)
        rows.setdefault(cut, []).append(f"{one.imbalance:.3f} in {one.microbatches_per_rank:,.1f} microbatches")
    for cut, cells in rows.items():
        table.add_row(*cut, *cells)
    return table


def _padding_table(account: PaddedAccount, seq_length: int, *, samples: int) -> Table:
    table = Table(title=f"{samples:,} samples padded to {seq_length:,} tokens each, in all", title_justify="left")
    table.add_column("")
    table.add_column("tokens", justify="right")
    table.add_column("share", justify="right")
    table.add_row("slots", f"{account.slots:,}", "")
    table.add_row("real tokens", f"{account.real_tokens:,}", f"{1 - account.waste:.1%}")
    table.add_row("padding", f"{account.padding_tokens:,}", f"{account.waste:.1%}")
    table.add_row(f"slots of {account.bound_packs:,} full packs, the least", f"{account.bound_slots:,}", "")
    table.add_row(
        "  padding left in them", f"{account.tail_padding:,}", f"{account.tail_padding / account.bound_slots:.1%}"
    )
    table.add_row("  slots saved, the most", f"{account.saved:,}", f"{account.saved / account.slots:.1%}")
    table.add_section()
    share = account.score_half_squares / account.padded_half_squares
    table.add_row("attention scores / 2, padded", f"{account.padded_half_squares:,}", "")
    table.add_row("attention scores / 2, packed", f"{account.score_half_squares:,}", f"{share:.1%}")
    table.add_row("causal pairs, packed", f"{account.causal_pairs:,}", "")
    return table
