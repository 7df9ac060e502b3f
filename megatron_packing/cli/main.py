"""The `megatron-packing` command: what will packing do, before a run is started?"""

from typing import Annotated

import typer

from megatron_packing import __version__
from megatron_packing.cli.doctor import doctor
from megatron_packing.cli.inspection import inspect
from megatron_packing.cli.output import PROGRAM, reports_errors
from megatron_packing.cli.pack import pack
from megatron_packing.cli.plan import plan

app = typer.Typer(
    name=PROGRAM,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help shows the long names of flags in full, also on 80 columns
    pretty_exceptions_enable=False,  # what is not our error is a bug: its plain traceback is what a report needs
)

# What `plan` does not know may be a flag of data or tokenizer; it refuses the others itself.
app.command("plan", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(reports_errors(plan))
# Training's own parser reads its flags, --help included, and refuses what it does not know.
_ALL_WORDS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
app.command("pack", context_settings=_ALL_WORDS)(reports_errors(pack))
app.command("inspect", context_settings=_ALL_WORDS)(reports_errors(inspect))
app.command("doctor")(reports_errors(doctor))


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"{PROGRAM} {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Look at sequence packing before a run: plan steps, inspect data, ask the machine. Nothing here needs a GPU."""
