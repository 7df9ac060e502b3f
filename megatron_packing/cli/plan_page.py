"""How does a plan look? One page with pictures and figures that needs no network, nor anything beside itself."""

import itertools
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

import numpy as np

from megatron_packing.cli.plan_figures import Figures, figures
from megatron_packing.cli.plan_report import PlanReport
from megatron_packing.cli.survey_tables import histogram
from megatron_packing.cli.svg import Frame, box, line, picture, text, ticks, y_axis
from megatron_packing.errors import ConfigError
from megatron_packing.schedule import Metrics, Pack, Plan, imbalance, objective

_MOST_PACKS = 64
"""Packs of a step that are drawn, one beside the other; more would be too thin to see."""
_MOST_POINTS = 400
"""Steps on a line; of more, every n-th."""
_MOST_BINS = 64
"""Bars of the histogram."""
_WIDTH = 900
"""Of a picture, in pixels."""
_SLOTS = (("real", "real tokens"), ("alignment", "padding that runs"), ("tail", "tail"), ("dummy", "dummies"))
"""What slots are: the style and the words."""


def write_page(path: Path, report: PlanReport) -> None:
    """Write the page.

    Raises:
        ConfigError: it cannot be written there.
    """
    try:
        path.write_text(page(report), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {path} cannot be written: {error.strerror or error}.") from error


def page(report: PlanReport) -> str:
    """The whole page, HTML."""
    kept_small = objective(report.setting.balance, report.setting.topology)
    comparison, *further = figures(report)
    sections = [
        _section(comparison.title, _table(comparison), _advice(report)),
        _section(
            f"Lengths: {report.samples:,} samples, {report.account.real_tokens:,} tokens",
            lengths_picture(np.concatenate(report.steps)),
        ),
        _section(
            "Where the slots go",
            "<p>Slots are places for tokens: packs x capacity, dummies included. What runs of padding is alignment; "
            "without packing, all of it. The tail of a pack does not run; of a dummy one unit of alignment does.</p>",
            waste_picture(report),
        ),
        _section(
            f"Imbalance of each step ({kept_small}): what it takes over the mean rank's work",
            imbalance_picture(report, kept_small),
        ),
        *(_section(one.title, _table(one)) for one in further),
    ]
    for name, planned in report.planned.items():
        shown, count = min(len(planned.first.packs), _MOST_PACKS), len(planned.first.packs)
        sections.append(
            _section(
                f"Packs of the first step: {name}",
                f"<p>{'All' if shown == count else f'The first {shown:,} of'} {count:,} packs. A column is a "
                "pack, a box a sample (its length and work under the mouse), what is empty is the pack's tail.</p>",
                packs_picture(planned.first, report.steps[0]),
            )
        )
    body = "".join(sections)
    title = f"megatron-packing plan: {report.source}"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f'<meta name="viewport" content="width=device-width"><title>{escape(title)}</title><style>{_STYLE}</style>'
        f"</head><body><h1>{escape(title)}</h1><p>{escape(_setting_in_words(report))}</p>{body}</body></html>\n"
    )


def _setting_in_words(report: PlanReport) -> str:
    topology = report.setting.topology
    return (
        f"DP {topology.dp}, CP {topology.cp}, TP {topology.tp}, PP {topology.pp}; a pack holds "
        f"{report.setting.capacity_of} tokens."
    )


def _section(title: str, *content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{''.join(content)}</section>"


def _table(shown: Figures) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in shown.columns)
    rows = []
    for first, *cells in shown.rows:
        part = ' class="part"' if first.startswith(" ") else ""  # of the row above
        row = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        rows.append(f"<tr><th{part}>{escape(first.strip())}</th>{row}</tr>")
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _advice(report: PlanReport) -> str:
    sentences = [] if report.recommended is None else [report.recommended.in_words()]
    sentences += [] if report.advice is None else report.advice.in_words()
    return "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)


# --- pictures -------------------------------------------------------------------------------------


def lengths_picture(lengths: np.ndarray) -> str:
    """Bars of how many samples have lengths in spans of one width."""
    edges, counts = histogram(lengths, most_bins=_MOST_BINS)
    frame = Frame(high=max(counts))
    wide = frame.width / len(counts)
    parts = [y_axis(frame, ticks(0, frame.high), ",.0f")]
    for place, count in enumerate(counts):
        tip = f"{edges[place]:,} to {edges[place + 1] - 1:,} tokens: {count:,} samples"
        x, y = frame.left + place * wide, frame.y(count)
        parts.append(box(x + 0.5, y, wide - 1, frame.bottom - y, "real", tip))
    every = -(-len(edges) // 10)
    for place in range(0, len(edges), every):
        parts.append(text(frame.left + place * wide, frame.bottom + 16, f"{edges[place]:,}", anchor="middle"))
    parts.append(text(frame.x(0.5), frame.bottom + 34, "tokens of a sample", anchor="middle"))
    return picture(parts, width=_WIDTH, height=frame.bottom + 42, label="histogram of lengths")


def waste_picture(report: PlanReport) -> str:
    """A bar for each way to batch: real tokens and what the other slots are."""
    bars: list[tuple[str, tuple[float, ...]]] = [
        (name, (one.fill, 1 - one.fill, 0.0, 0.0)) for name, one in report.baselines.items()
    ]
    bars += [(name, _shares(one.of_steps)) for name, one in report.planned.items()]
    frame = Frame(left=120, width=760, height=30.0 * len(bars))
    parts = []
    for place, (name, shares) in enumerate(bars):
        y, at = frame.top + 30 * place, 0.0
        parts.append(text(frame.left - 8, y + 16, name, anchor="end"))
        for (style, words), share in zip(_SLOTS, shares, strict=True):
            parts.append(box(frame.x(at), y, share * frame.width, 22, style, f"{name}, {words}: {share:.2%}"))
            if share > 0.06:
                written = "" if style == "tail" else "on"
                parts.append(text(frame.x(at + share / 2), y + 15, f"{share:.1%}", anchor="middle", style=written))
            at += share
    parts.append(_legend(frame.left, frame.bottom + 8, [(style, words) for style, words in _SLOTS]))
    return picture(parts, width=_WIDTH, height=frame.bottom + 32, label="waste by cause")


def _shares(of_steps: Sequence[Metrics]) -> tuple[float, ...]:
    """Real tokens, alignment, tail and dummies, as shares of a step's slots; means over steps."""
    shares = []
    for one in of_steps:
        wastes = (one.alignment_waste, one.tail_waste, one.dummy_waste)
        slots = sum(wastes) / (1 - one.fill) if sum(wastes) else 1.0
        shares.append((one.fill, *(waste / slots for waste in wastes)))
    return tuple(sum(column) / len(column) for column in zip(*shares, strict=True))


def imbalance_picture(report: PlanReport, kept_small: str) -> str:
    """A line for each scheduler over the steps; for lockstep also those that none can go below."""
    lines = {
        name: (f"s{number % 5}", [imbalance(one, kept_small) for one in planned.of_steps])
        for number, (name, planned) in enumerate(report.planned.items())
    }
    if kept_small == "lockstep":
        for planned in report.planned.values():
            which = "bound" if planned.first.group_sizes is None else "bound, groups that change"
            lines[which] = ("bound", [one.lockstep_lower_bound for one in planned.of_steps])
    highest = max(max(values) for _, values in lines.values())
    frame = Frame(low=1.0, high=max(1.0 + (highest - 1.0) * 1.05, 1.01))
    parts = [y_axis(frame, ticks(frame.low, frame.high), ".5g")]
    for name, (style, values) in lines.items():
        tip = f"{name}: mean {sum(values) / len(values):.3f}, highest {max(values):.3f}"
        parts.append(line(list(_points(frame, values)), style, tip))
    parts += [
        text(frame.left, frame.bottom + 16, "step 1"),
        text(frame.x(1), frame.bottom + 16, f"step {len(report.steps):,}", anchor="end"),
    ]
    parts.append(
        _legend(frame.left, frame.bottom + 26, [(f"{style} fill", name) for name, (style, _) in lines.items()])
    )
    return picture(parts, width=_WIDTH, height=frame.bottom + 50, label="imbalance of each step")


def _points(frame: Frame, values: Sequence[float]) -> Iterator[tuple[float, float]]:
    """Every n-th value; a single one as a line from side to side."""
    if len(values) == 1:
        values = [values[0], values[0]]
    every = -(-len(values) // _MOST_POINTS)
    for place in range(0, len(values), every):
        yield frame.x(place / (len(values) - 1)), frame.y(values[place])


def packs_picture(plan: Plan, lengths: np.ndarray) -> str:
    """A step's packs beside each other, microbatch by microbatch, rank by rank, their samples one on the other."""
    frame = Frame(height=240)
    shown = list(itertools.islice(_placed(plan), _MOST_PACKS))
    gaps = shown[-1][0]
    wide = (frame.width - 6 * gaps) / sum(plan.cp_size_of(pack) for _, _, pack in shown)
    parts = [y_axis(frame, [0.0, 0.25, 0.5, 0.75, 1.0], ".0%")]
    x, before = frame.left, -1
    for number, where, pack in shown:
        if number != before:
            x, before = x + (6 if number else 0), number
            parts.append(text(x, frame.bottom + 16, f"{number + 1}"))
        parts.append(_pack_column(frame, x, wide * plan.cp_size_of(pack), plan, pack, lengths, where))
        x += wide * plan.cp_size_of(pack)
    parts.append(text(frame.x(0.5), frame.bottom + 32, "microbatch; its ranks from left to right", anchor="middle"))
    return picture(parts, width=_WIDTH, height=frame.bottom + 40, label=f"packs of {plan.scheduler}")


def _placed(plan: Plan) -> Iterator[tuple[int, str, Pack]]:
    """Each pack with its microbatch and the ranks that run it: DP ranks, or those of DP x CP where groups change."""
    for number, microbatch in enumerate(plan.microbatches):
        first = 0
        for dp_rank, pack in enumerate(microbatch.packs):
            last = first + plan.cp_size_of(pack) - 1
            if plan.group_sizes is None:
                yield number, f"rank {dp_rank}", pack
            else:
                yield number, f"rank {first}" if first == last else f"ranks {first} to {last}", pack
            first = last + 1


def _pack_column(frame: Frame, x: float, wide: float, plan: Plan, pack: Pack, lengths: np.ndarray, where: str) -> str:
    capacity = plan.capacity_of(pack)
    gap = min(1.0, wide / 8)
    inside, wide = x + gap / 2, wide - gap
    tip = f"{where}: {pack.padded_tokens:,} of {capacity:,} tokens, {len(pack.sample_ids):,} samples"
    if pack.is_dummy:
        return box(inside, frame.top, wide, frame.height, "dummy", f"{where}: a dummy, fully masked")
    parts = [box(inside, frame.top, wide, frame.height, "free", tip)]
    at = 0
    for place, sample in enumerate(pack.sample_ids):
        tokens = int(lengths[sample])
        y = frame.y((at + tokens) / capacity)
        work = float(plan.cost.of(lengths[sample : sample + 1])[0])
        said = f"{where}: sample {sample}, {tokens:,} tokens, work {work:,.4g}"
        parts.append(box(inside, y, wide, frame.y(at / capacity) - y, f"sample{place % 3}", said))
        at += plan.topology.pad(tokens)
    return "".join(parts)


def _legend(x: float, y: float, entries: Sequence[tuple[str, str]]) -> str:
    parts = []
    for style, words in entries:
        parts += [box(x, y, 12, 12, style), text(x + 17, y + 11, words)]
        x += 40 + 7.2 * len(words)
    return "".join(parts)


_STYLE = """
:root{--ink:#1c2126;--paper:#fff;--grid:#d9dde2;--a:#3b6fb5;--b:#6f9bd6;--c:#a9c4e8;--warm:#d9822b;--pale:#e9ecf0;
--bad:#b8433a;--s1:#d9822b;--s2:#3c8d5a;--s3:#8a56a8;--s4:#7a6a53}
@media(prefers-color-scheme:dark){:root{--ink:#e4e7ea;--paper:#16191d;--grid:#3a4047;--a:#5b8fd6;--b:#41699f;--c:#2c4a73;
--pale:#262b31;--warm:#e0933f;--bad:#d0635a}}
body{font:14px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:940px;margin:24px auto;
padding:0 16px}
h1{font-size:20px;overflow-wrap:anywhere}h2{font-size:16px;margin:32px 0 8px}
svg{width:100%;height:auto;display:block}svg text{font-size:12px;fill:var(--ink)}svg text.on{fill:#fff}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}td,th{padding:3px 12px;text-align:right;
border-bottom:1px solid var(--grid);font-weight:normal}
th:first-child{text-align:left}th.part{padding-left:28px}
tr:first-child th{font-weight:600}
.real,.sample0{fill:var(--a)}.sample1{fill:var(--b)}.sample2{fill:var(--c)}.alignment{fill:var(--warm)}
.tail,.free{fill:var(--pale)}.dummy{fill:var(--bad)}
.line{fill:none;stroke-width:1.6}.grid{stroke:var(--grid);stroke-width:1}
.s0{stroke:var(--a)}.s1{stroke:var(--s1)}.s2{stroke:var(--s2)}.s3{stroke:var(--s3)}.s4{stroke:var(--s4)}
.bound{stroke:var(--ink);stroke-dasharray:4 3}
.s0.fill{fill:var(--a)}.s1.fill{fill:var(--s1)}.s2.fill{fill:var(--s2)}.s3.fill{fill:var(--s3)}.s4.fill{fill:var(--s4)}
.bound.fill{fill:none}
"""
