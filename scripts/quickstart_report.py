"""What did packing change in the quickstart? Answered with a picture, a JSON file and two tables.

Takes the numbers of two runs over the same samples, one padded and one packed, as plain data; trains and measures
nothing itself. Cost: about a second, most of it for loading matplotlib (the `plot` extra).
"""

import json
import math
import numbers
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RUNS = ("padded", "packed")
RUN_KEYS = ("losses", "real_tokens_per_s", "slots", "real_tokens", "targets")
RATIO_KEYS = ("slot_ratio", "flop_ratio", "speed_ratio", "max_relative_loss_difference")

# From the palette of Okabe and Ito (2008), which readers with any colour vision tell apart.
BLUE, SKY, ORANGE, VERMILION = "#0072B2", "#56B4E9", "#E69F00", "#D55E00"
LIGHT_GREY, DARK_GREY, INK = "#DDDDDD", "#9A9A9A", "#333333"

FIGURE_INCHES = (18.0, 5.6)
FIGURE_DPI = 130

MAX_ROWS_TO_PACKS = 3
"""Height of all padded rows to that of all packs: beyond it the packs' samples cannot be made out."""

MAX_MARKED_ITERATIONS = 60
"""Beyond this many points, markers merge into a band and hide the curve."""


# --- the contract -----------------------------------------------------------------------------------------------------


def check_result(result: Mapping[str, Any]) -> None:
    """Refuse a result that lacks a number or holds one that cannot be shown.

    Raises:
        ValueError: naming every fault at once.
    """
    faults = list(_faults(result))
    if faults:
        raise ValueError(
            f"the quickstart's result has {len(faults)} fault(s): {'; '.join(faults)}. It needs "
            f"{', '.join(RUNS)}, each with {', '.join(RUN_KEYS)}; and {', '.join(RATIO_KEYS)}."
        )


def _faults(result: Mapping[str, Any]) -> Iterator[str]:
    for key in RATIO_KEYS:
        yield from _number_faults(result, key, key)
    for run in RUNS:
        if not isinstance(result.get(run), Mapping):
            yield f"{run} is missing or no mapping"
            continue
        for key in RUN_KEYS[1:]:
            yield from _number_faults(result[run], key, f"{run}.{key}")
        yield from _loss_faults(result[run], run)
        if result[run].get("slots") == 0:
            yield f"{run}.slots is 0, but a run that trains fills some"
    counts = [len(losses) for losses in map(_losses_of, (result.get(run) for run in RUNS)) if losses is not None]
    if len(set(counts)) > 1:
        yield f"padded.losses has {counts[0]} iterations and packed.losses {counts[1]}, but both run equally long"


def _losses_of(run: object) -> Sequence[Any] | None:
    losses = run.get("losses") if isinstance(run, Mapping) else None
    return losses if isinstance(losses, Sequence) and not isinstance(losses, str) else None


def _loss_faults(run: Mapping[str, Any], name: str) -> Iterator[str]:
    losses = _losses_of(run)
    if not losses:
        yield f"{name}.losses is missing, empty or no list"
        return
    for iteration, loss in enumerate(losses, start=1):
        if not _is_finite(loss):
            yield f"{name}.losses is {loss!r} at iteration {iteration}, which is no finite number"
            return


def _number_faults(mapping: Mapping[str, Any], key: str, name: str) -> Iterator[str]:
    if key not in mapping:
        yield f"{name} is missing"
    elif not _is_finite(mapping[key]):
        yield f"{name} is {mapping[key]!r}, which is no finite number"


def _is_finite(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def _check_layout(lengths: Sequence[int], packs: Sequence[Sequence[int]], capacity: int, seq_length: int) -> None:
    if not lengths:
        raise ValueError("lengths is empty; the report needs the length of at least 1 sample.")
    if not any(packs):
        raise ValueError(
            "packs holds no sample; the report needs the packs of one step, each a list of padded lengths."
        )
    if min(capacity, seq_length) < 1:
        raise ValueError(f"capacity is {capacity} and seq_length is {seq_length}; both count tokens, at least 1.")
    for index, pack in enumerate(packs):
        if sum(pack) > capacity:
            raise ValueError(
                f"packs[{index}] holds {sum(pack):,} padded tokens; the capacity is {capacity:,}. "
                "Pass the capacity that the plan was made with: tokens a rank x CP."
            )


# --- report.json ------------------------------------------------------------------------------------------------------


def write_report(
    result: Mapping[str, Any],
    lengths: Sequence[int],
    packs: Sequence[Sequence[int]],
    out_dir: str | Path,
    capacity: int,
    seq_length: int,
) -> tuple[Path, Path]:
    """Write report.json and report.png.

    Args:
        result: the two runs; `check_result` says what it must hold, and keys beyond that are kept.
        lengths: tokens of each sample of the corpus.
        packs: padded lengths of the samples of each pack, for one step.
        out_dir: the folder; made if missing.
        capacity: padded tokens that a pack may hold.
        seq_length: tokens to which the padded run fills up each sample.

    Returns:
        The paths of report.json and report.png.

    Raises:
        ValueError: the input is incomplete or contradicts itself.
    """
    check_result(result)
    lengths = [int(length) for length in lengths]
    packs = [[int(length) for length in pack] for pack in packs]
    _check_layout(lengths, packs, capacity, seq_length)

    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    report = {
        **result,
        "capacity": capacity,
        "seq_length": seq_length,
        "lengths": _summary(lengths),
        "step_packs": packs,
    }
    json_path, png_path = out_dir / "report.json", out_dir / "report.png"
    text = json.dumps(report, indent=2, default=_plain_number) + "\n"
    _replace(json_path, lambda path: path.write_text(text, encoding="utf-8"))
    _replace(png_path, lambda path: _draw(result, lengths, packs, capacity, seq_length, path))
    return json_path, png_path


def _summary(lengths: Sequence[int]) -> dict[str, float | int]:
    ordered = sorted(lengths)
    return {
        "samples": len(ordered),
        "mean": round(sum(ordered) / len(ordered), 1),
        "min": ordered[0],
        "p50": _percentile(ordered, 50),
        "p95": _percentile(ordered, 95),
        "max": ordered[-1],
    }


def _percentile(ordered: Sequence[int], percent: int) -> int:
    """Give the nearest rank: a length that occurs, never a mean of two."""
    return ordered[max(0, -(-percent * len(ordered) // 100) - 1)]


def _plain_number(value: object) -> float | int:
    """Let numpy's scalars through json."""
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise TypeError(f"{type(value).__name__} cannot be written to report.json; pass plain numbers, lists and texts.")


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file so that a reader sees the old one or the whole new one. The suffix stays: it names the format."""
    partial = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        write(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


# --- report.png -------------------------------------------------------------------------------------------------------


def _draw(
    result: Mapping[str, Any],
    lengths: Sequence[int],
    packs: Sequence[Sequence[int]],
    capacity: int,
    seq_length: int,
    path: Path,
) -> None:
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ModuleNotFoundError(
            "report.png needs matplotlib. Install it with: pip install 'megatron-packing[plot]'"
        ) from error

    style = {
        "font.size": 12,
        "axes.titlesize": 13,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": INK,
        "text.color": INK,
    }
    # A figure of its own, without pyplot: a caller's figures and backend stay as they are.
    with mpl.rc_context(style):
        figure = Figure(figsize=FIGURE_INCHES, dpi=FIGURE_DPI, layout="constrained")
        FigureCanvasAgg(figure)
        figure.get_layout_engine().set(w_pad=0.15, h_pad=0.08)
        left, middle, right = figure.subplots(1, 3, width_ratios=(1, 1.25, 1))
        _draw_lengths(left, lengths, seq_length)
        _draw_packs(middle, packs, capacity, seq_length)
        _draw_losses(right, result)
        figure.savefig(path)


def _draw_lengths(axes: "Axes", lengths: Sequence[int], seq_length: int) -> None:
    """Draw how long the samples are. The axis is logarithmic: a few are hundreds of times the median."""
    low, high = max(1, min(lengths)), max(*lengths, seq_length)
    num_bins = 40
    # A little wider than the data, so that rounding leaves no sample outside and equal lengths still make bins.
    ratio = (high * 1.02) / (low * 0.98)
    edges = [low * 0.98 * ratio ** (index / num_bins) for index in range(num_bins + 1)]
    axes.hist([max(1, length) for length in lengths], bins=edges, color=SKY, edgecolor="white", linewidth=0.5)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.xaxis.set_minor_locator(_no_ticks())
    axes.tick_params(axis="x", rotation=45)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("sample length (tokens, logarithmic)")
    axes.set_ylabel("samples")

    axes.axvline(seq_length, color=VERMILION, linestyle="--", linewidth=2)
    # Room above the bars, so that the label crosses none.
    axes.set_ylim(top=axes.get_ylim()[1] * 1.12)
    side = "right" if math.log(seq_length / low) > math.log(high / low) / 2 else "left"
    axes.annotate(
        f"sequence length {seq_length:,}",
        (seq_length, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(-6 if side == "right" else 6, -4),
        textcoords="offset points",
        ha=side,
        va="top",
        color=VERMILION,
    )
    summary = _summary(lengths)
    _title(
        axes,
        f"{summary['samples']:,} samples" + (", most of them short" if summary["p95"] < seq_length else ""),
        f"mean {summary['mean']:,.0f}, p95 {summary['p95']:,}, longest {summary['max']:,} tokens",
    )


def _no_ticks() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()


def _title(axes: "Axes", title: str, detail: str) -> None:
    """Write a title in bold and a line of detail between it and the axes."""
    axes.set_title(title, fontweight="bold", pad=26)
    axes.annotate(detail, (0, 1), xycoords="axes fraction", xytext=(0, 7), textcoords="offset points", va="bottom")


def _draw_packs(axes: "Axes", packs: Sequence[Sequence[int]], capacity: int, seq_length: int) -> None:
    """Draw one step: the packs above, and below in grey the rows that the padded run uses for the same samples."""
    # The padded run cuts what is longer than its rows.
    rows = [min(length, seq_length) for pack in packs for length in pack]
    num_packs, num_rows = len(packs), len(rows)
    # In units of a pack's height. Rows are as high as packs, so that equal areas are equal numbers of slots, unless
    # there are so many that the packs would shrink to lines.
    row_height = min(1.0, num_packs * MAX_ROWS_TO_PACKS / num_rows)
    gap = 0.08 * (num_packs + num_rows * row_height)
    first_row = num_packs + gap
    bottom = first_row + num_rows * row_height

    for index, pack in enumerate(packs):
        _draw_pack(axes, index, pack, capacity)
    tops = [first_row + index * row_height for index in range(num_rows)]
    height = 0.86 * row_height
    axes.barh(tops, [seq_length] * num_rows, height=height, color=LIGHT_GREY, align="edge")
    axes.barh(tops, rows, height=height, color=DARK_GREY, align="edge")

    axes.vlines(capacity, -gap * 0.3, num_packs + gap * 0.3, color=VERMILION, linestyle="--", linewidth=2)
    axes.set_ylim(bottom, -gap * 0.4)
    axes.set_xlim(0, max(capacity, seq_length) * 1.02)
    axes.set_yticks(
        [num_packs / 2, (first_row + bottom) / 2],
        [f"packed\n{_count(num_packs, 'pack')}", f"padded\n{_count(num_rows, 'row')}"],
    )
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("slots (tokens and padding)")
    _draw_pack_legend(axes, capacity, seq_length)

    packed_slots, padded_slots = sum(map(sum, packs)), num_rows * seq_length  # the room left in a pack is never run
    title = f"One step of {_count(num_rows, 'sample')}"
    if padded_slots > packed_slots:
        title += f": {padded_slots / packed_slots:.1f}x fewer slots"
    _title(axes, title, f"{packed_slots:,} slots packed, {padded_slots:,} padded")


def _draw_pack(axes: "Axes", top: float, pack: Sequence[int], capacity: int) -> None:
    bar = {"height": 0.86, "align": "edge"}
    axes.barh(top, capacity, color="white", edgecolor=DARK_GREY, linewidth=0.8, **bar)
    start = 0
    for number, length in enumerate(pack):
        axes.barh(top, length, left=start, color=(BLUE, SKY)[number % 2], edgecolor="white", linewidth=0.4, **bar)
        start += length


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _draw_pack_legend(axes: "Axes", capacity: int, seq_length: int) -> None:
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [
        (Patch(color=BLUE), Patch(color=SKY)),
        Patch(facecolor="white", edgecolor=DARK_GREY),
        Line2D([], [], color=VERMILION, linestyle="--", linewidth=2),
        Patch(color=DARK_GREY),
        Patch(color=LIGHT_GREY),
    ]
    labels = [
        "samples in a pack",
        "room left, not run",
        f"capacity {capacity:,}",
        "a sample alone",
        f"padding to {seq_length:,}",
    ]
    axes.legend(
        handles,
        labels,
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        # Below the axis label, where no bar can reach.
        loc="upper center",
        bbox_to_anchor=(0.5, -0.13),
        ncols=3,
        frameon=False,
        fontsize=11,
    )


def _draw_losses(axes: "Axes", result: Mapping[str, Any]) -> None:
    """Draw both curves: the padded one broad, so that it shows where the packed one lies on it."""
    from matplotlib.ticker import MaxNLocator

    padded, packed = (result[run]["losses"] for run in RUNS)
    iterations = range(1, len(padded) + 1)
    marker = "o" if len(padded) <= MAX_MARKED_ITERATIONS else None
    axes.plot(iterations, padded, color=ORANGE, linewidth=6, solid_capstyle="round", label="padded")
    axes.plot(iterations, packed, color=BLUE, linewidth=1.6, marker=marker, markersize=4, label="packed")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("iteration")
    axes.set_ylabel("loss (nats per target)")
    axes.grid(axis="y", color=LIGHT_GREY, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(frameon=False)
    _title(
        axes,
        f"Loss: largest relative difference {_scientific(result['max_relative_loss_difference'])}",
        f"padded and packed, {_count(len(padded), 'iteration')} on the same samples",
    )


def _scientific(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


# --- terminal ---------------------------------------------------------------------------------------------------------


def print_table(result: Mapping[str, Any], console: Console) -> None:
    """Print the losses of every iteration, then what the two runs spent on them.

    Raises:
        ValueError: the result is incomplete.
    """
    check_result(result)
    console.print(_loss_table(result))
    console.print(_cost_table(result))


def _loss_table(result: Mapping[str, Any]) -> Table:
    table = Table(title="Loss at each iteration")
    for column in ("iteration", *RUNS, "difference"):
        table.add_column(column, justify="right")
    for iteration, (padded, packed) in enumerate(zip(*(result[run]["losses"] for run in RUNS), strict=True), start=1):
        table.add_row(str(iteration), f"{padded:.6f}", f"{packed:.6f}", f"{packed - padded:+.1e}")
    table.caption = f"largest relative difference {_scientific(result['max_relative_loss_difference'])}"
    return table


def _cost_table(result: Mapping[str, Any]) -> Table:
    table = Table(title="Work for the same samples")
    table.add_column("")
    for column in (*RUNS, "ratio"):
        table.add_column(column, justify="right")
    runs = [result[run] for run in RUNS]
    table.add_row(
        "real tokens per second", *(f"{run['real_tokens_per_s']:,.0f}" for run in runs), _ratio(result, "speed")
    )
    table.add_row("slots (tokens and padding)", *(f"{run['slots']:,}" for run in runs), _ratio(result, "slot"))
    table.add_row("real tokens", *(f"{run['real_tokens']:,}" for run in runs), "")
    table.add_row("targets", *(f"{run['targets']:,}" for run in runs), "")
    table.add_row("fill (real tokens / slots)", *(f"{run['real_tokens'] / run['slots']:.1%}" for run in runs), "")
    table.add_row("FLOPs", "", "", _ratio(result, "flop"))
    return table


def _ratio(result: Mapping[str, Any], name: str) -> str:
    return f"{result[f'{name}_ratio']:.2f}x"
