"""What can packing use on this machine, and why not the rest? From the versions found; on request proven on the spot.

Cost: importing torch, where it is built for CUDA; with --probe Megatron too, and some seconds of a small model.
"""

import contextlib
import logging
import platform
import sys
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from megatron_packing import __version__
from megatron_packing.cli.installed import look, version
from megatron_packing.cli.output import console, print_json, say
from megatron_packing.errors import MissingDependency
from megatron_packing.mcore.compat import PROVEN
from megatron_packing.mcore.verdicts import Installed, Verdict, problems, titles, verdicts

if TYPE_CHECKING:
    from megatron_packing.mcore.probe import Check

_PROBE_FAILED = 1
"""Exit status where something that was probed does not hold; errors of the user's have another."""


def doctor(
    probe: Annotated[
        bool,
        typer.Option("--probe", help="Run a small model packed and each sample alone, on the device that is there."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output instead of tables.")] = False,
) -> None:
    """Say which packed features this machine's versions and devices allow, and why not the others.

    With --probe a model of two layers proves it: packed against each sample alone, one sample changed, outputs and
    gradients. What fails is named, and the exit status is 1.
    """
    installed = look()
    found = verdicts(installed)
    wrong = problems(installed, PROVEN)
    checks = list(_probe(installed)) if probe else None
    if as_json:
        print_json(_figures(installed, found, wrong, checks))
    else:
        _print_tables(installed, found, checks)
    for problem in wrong:
        say("problem", problem)
    failed = [check for check in checks or [] if not check.ok]
    for check in failed:
        say("probe failed", f"{check.name}: {check.found}")
    if failed:
        raise typer.Exit(_PROBE_FAILED)


def _probe(installed: Installed) -> "Iterator[Check]":
    """Each check as it is made. What Megatron prints meanwhile goes where it is in no pipe's way."""
    if installed.megatron_core is None:
        raise MissingDependency("--probe builds a model by megatron-core, which is not installed. Install it.")
    device = device_of(installed)
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kernels that are not used here
        logging.getLogger("megatron").setLevel(logging.ERROR)
        if device == "cpu":
            from megatron_packing.mcore import cpu_runtime

            cpu_runtime.install()
        from megatron_packing.mcore.probe import probe

        yield from probe(device)


def device_of(installed: Installed) -> str:
    """Where a run would compute: cuda or cpu."""
    return "cuda" if installed.devices else "cpu"


def _versions(installed: Installed) -> dict[str, str | None]:
    return {
        "megatron-packing": __version__,
        "python": platform.python_version(),
        "torch": installed.torch,
        "cuda of torch": installed.torch_cuda,
        "megatron-core": installed.megatron_core,
        "transformer-engine": installed.transformer_engine,
        "flash-attn": installed.flash_attn,
        "flash-attn-3": version("flash-attn-3"),
        "apex": installed.apex,
    }


def _figures(
    installed: Installed, found: dict[str, Verdict], wrong: list[str], checks: "list[Check] | None"
) -> dict[str, Any]:
    document: dict[str, Any] = {
        "versions": _versions(installed),
        "devices": [{"name": one.name, "capability": list(one.capability)} for one in installed.devices],
        "features": {name: {"available": one.available, "why": one.why} for name, one in found.items()},
        "problems": wrong,
    }
    if checks is not None:
        document["probe"] = {
            "device": device_of(installed),
            "passed": all(check.ok for check in checks),
            "failed": [check.name for check in checks if not check.ok],
            "checks": [{"name": check.name, "passed": check.ok, "found": check.found} for check in checks],
        }
    return document


def _print_tables(installed: Installed, found: dict[str, Verdict], checks: "list[Check] | None") -> None:
    out = console()
    out.print(_versions_table(installed))
    features = Table(title="Packed runs can use", title_justify="left")
    for column in ("feature", "", "why"):
        features.add_column(column, overflow="fold")
    named = titles()
    for name, verdict in found.items():
        features.add_row(named.get(name, name), "yes" if verdict.available else "no", verdict.why)
    out.print(features)
    if checks is None:
        out.print("Not proven, only read off versions: --probe proves it on this machine.")
        return
    probed = Table(title=f"Probed on {device_of(installed)}", title_justify="left")
    for column in ("packed against each sample alone", "", "found"):
        probed.add_column(column, overflow="fold")
    for check in checks:
        probed.add_row(check.name, "holds" if check.ok else "FAILS", check.found)
    out.print(probed)


def _versions_table(installed: Installed) -> Table:
    table = Table(title="Found", title_justify="left")
    table.add_column("")
    table.add_column("version", overflow="fold")
    for name, found in _versions(installed).items():
        table.add_row(name, found or "-")
    for device in installed.devices:
        table.add_row("device", f"{device.name}, compute capability {'.'.join(map(str, device.capability))}")
    if not installed.devices:
        table.add_row("device", "cpu")
    return table
