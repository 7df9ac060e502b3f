"""How does `megatron-packing plan` show its figures? As tables for the terminal."""

from rich.table import Table

from megatron_packing.cli.output import console
from megatron_packing.cli.plan_figures import Figures, figures
from megatron_packing.cli.plan_report import PlanReport


def print_tables(report: PlanReport) -> None:
    """Print all figures, one table under the other."""
    out = console()
    for one in figures(report):
        out.print(_table(one))


def _table(shown: Figures) -> Table:
    table = Table(title=shown.title, title_justify="left")
    for name in shown.columns:
        table.add_column(name, justify="right" if name else "left")
    for row in shown.rows:
        table.add_row(*row)
    return table
