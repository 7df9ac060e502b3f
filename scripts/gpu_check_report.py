"""What did the check find: which comparisons hold, how fast was each run, and how is that written down?

`Comparison`s judge losses; `speed_rows` puts runs in relation to the padded one; `write_report` makes report.md and
report.json of it all. Needs the standard library only.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paired_runs import Figures, max_relative_difference

LEAST_DIFFERENCE = 1e-6
"""In fp32, what packed and unpacked losses may differ by in any case, relative, and absolute below 1: what the tests on
CPU hold over 30 iterations."""

FACTOR = 2.0
"""Beyond that, how much more than an unpacked run's own rounding: of fp32 when only its microbatches' size is changed,
of bf16 against fp32. Both round the same values in another order, so that single ones fall to the other side."""

PADDED = "padded"
"""Name of the run that others are measured by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A packed run's losses against those of Megatron's own unpacked run."""

    run: str
    what: str
    """What the numbers are."""
    found: float
    limit: float

    @property
    def holds(self) -> bool:
        """False also for a loss that is no number."""
        return self.found <= self.limit


def compare_fp32(run: str, packed: Figures, unpacked: Figures, other_microbatch: Figures) -> Comparison:
    """Hold a packed run to an unpacked one.

    Args:
        run: the packed run's name.
        packed: its figures.
        unpacked: Megatron's own run.
        other_microbatch: the same with microbatches of another size, so that its sums are taken in another order.
    """
    noise = _largest(other_microbatch, unpacked)
    return Comparison(
        run=run,
        what="largest difference of a loss, fp32",
        found=_largest(packed, unpacked),
        limit=max(LEAST_DIFFERENCE, FACTOR * noise),
    )


def compare_bf16(run: str, packed: Figures, unpacked: Figures, exact: Figures) -> Comparison:
    """Hold a packed bf16 run's error to that of an unpacked bf16 run; `exact` is the unpacked run in fp32."""
    return Comparison(
        run=run,
        what="error of the losses against fp32, root mean square, bf16",
        found=_root_mean_square(packed, exact),
        limit=FACTOR * _root_mean_square(unpacked, exact),
    )


def _largest(run: Figures, reference: Figures) -> float:
    losses = run.all("loss")
    # `max` may pass over a value that is no number.
    return max_relative_difference(losses, reference.all("loss")) if all(map(math.isfinite, losses)) else math.nan


def _root_mean_square(run: Figures, reference: Figures) -> float:
    pairs = zip(run.all("loss"), reference.all("loss"), strict=True)
    return math.sqrt(statistics.fmean((a - b) ** 2 for a, b in pairs))


def speed_rows(runs: Mapping[str, Figures], clock: str) -> list[dict[str, Any]]:
    """Speed, fill and memory of each run; `over_padded` only where there is a padded run.

    Times are medians over iterations by `clock` (wall_s or cpu_s), the first left out.
    """
    rows = []
    for name, run in runs.items():
        speed = run.tokens_per_second(clock)
        padded = runs.get(PADDED)
        rows.append(
            {
                "run": name,
                "real_tokens_per_s": speed,
                "over_padded": None if padded is None else speed / padded.tokens_per_second(clock),
                "iteration_s": statistics.median(run.after_first(clock)),
                "fill": run.total("real_tokens") / run.total("slots"),
                "flops_saved": None if padded is None else padded.total("flops") / run.total("flops"),
                "peak_gib": max(run.all("peak_bytes")) / 2**30,
            }
        )
    return rows


# --- the report -------------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Findings:
    """Everything that goes into the report."""

    device: str
    """cuda, or cpu for the reduced form."""
    ranks: int
    machine: Mapping[str, str]
    """What the check ran on: devices and versions."""
    settings: Mapping[str, str]
    """Of each part."""
    probe: Mapping[str, Any] | None = None
    """What `megatron-packing doctor --probe` says of it; None: not run."""
    comparisons: list[Comparison]
    speed: list[dict[str, Any]]
    failures: list[str]
    """What could not be run at all, and why."""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether all that was run holds, and something was."""
        probed = self.probe is None or bool(self.probe["passed"])
        ran = bool(self.comparisons or self.speed or self.probe)
        return ran and not self.failures and probed and all(one.holds for one in self.comparisons)


def write_report(found: Findings, folder: Path) -> tuple[Path, Path]:
    """Write report.md and report.json into `folder`; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    markdown, document = folder / "report.md", folder / "report.json"
    comparisons = [{**asdict(one), "holds": one.holds} for one in found.comparisons]
    content = {"passed": found.passed, "reduced": found.device == "cpu", **asdict(found), "comparisons": comparisons}
    document.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    markdown.write_text("\n".join(markdown_lines(found)) + "\n", encoding="utf-8")
    return markdown, document


def markdown_lines(found: Findings) -> list[str]:
    """The report for people."""
    lines = [f"# megatron-packing on this machine: {'passed' if found.passed else 'FAILED'}", ""]
    if found.device == "cpu":
        lines += ["Reduced form, on the CPU: small models over gloo, no kernels and no memory of a GPU.", ""]
    lines += [f"- {name}: {value}" for name, value in found.machine.items()]
    lines += [f"- ranks: {found.ranks}", f"- took {found.seconds:.0f} s", ""]
    for failure in found.failures:
        lines += ["## FAILED to run", "", "```", failure, "```", ""]
    if found.probe is not None:
        lines += _probe_lines(found.probe)
    if found.comparisons:
        lines += ["## Packed against Megatron's own unpacked run", "", found.settings["numerics"], ""]
        lines += _table(
            ["run", "measure", "found", "limit", ""],
            [[c.run, c.what, f"{c.found:.1e}", f"{c.limit:.1e}", _verdict(c.holds)] for c in found.comparisons],
        )
    if found.speed:
        lines += ["## Padded against packed", "", found.settings["speed"], ""]
        lines += _table(
            ["run", "real tokens/s", "over padded", "s an iteration", "fill", "FLOPs saved", "peak memory a rank"],
            [_speed_cells(row) for row in found.speed],
        )
    return lines


def _probe_lines(probe: Mapping[str, Any]) -> list[str]:
    checks = probe["checks"]
    lines = ["## A small model, packed against each sample alone", ""]
    if probe["passed"]:
        return [*lines, f"All {len(checks)} checks of `megatron-packing doctor --probe` hold on {probe['device']}.", ""]
    failed = [[check["name"], check["found"], _verdict(False)] for check in checks if not check["passed"]]
    return [*lines, *_table(["check", "found", ""], failed)]


def _speed_cells(row: Mapping[str, Any]) -> list[str]:
    ratios = ["-" if row[name] is None else f"{row[name]:.2f}x" for name in ("over_padded", "flops_saved")]
    return [
        row["run"],
        f"{row['real_tokens_per_s']:,.0f}",
        ratios[0],
        f"{row['iteration_s']:.2f}",
        f"{row['fill']:.1%}",
        ratios[1],
        f"{row['peak_gib']:.1f} GiB",
    ]


def _verdict(holds: bool) -> str:
    return "holds" if holds else "**FAILS**"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [_cells(head), _cells(["---"] * len(head)), *map(_cells, rows), ""]


def _cells(words: Sequence[str]) -> str:
    return f"| {' | '.join(words)} |"
