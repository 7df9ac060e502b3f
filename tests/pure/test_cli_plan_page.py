"""Does the page of `megatron-packing plan --html` show the figures, and refer to nothing outside itself?"""

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from megatron_packing.cli.main import app
from megatron_packing.cli.plan_page import packs_picture
from megatron_packing.cli.svg import ticks
from megatron_packing.schedule import CostModel, Microbatch, Pack, make_plan
from megatron_packing.topology import Topology

FLAGS = "--dp 4 --cp 2 --max-seqlen-per-dp-cp-rank 512 --global-batch-size 60 --ep 2"
SCHEDULERS = ("first_fit", "balanced", "dynamic_cp")


class Page(HTMLParser):
    """What a page says and draws."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def boxes(self, *styles: str) -> int:
        return sum(tag == "rect" and attributes.get("class") in styles for tag, attributes in self.tags)


@pytest.fixture(scope="module")
def lengths() -> np.ndarray:
    return np.clip(np.random.default_rng(3).lognormal(4.5, 1.0, 180).astype(np.int64), 4, 1024)


@pytest.fixture(scope="module")
def written(lengths: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict]:
    folder = tmp_path_factory.mktemp("page")
    np.save(folder / "<b>.npy", lengths)
    page = folder / "page.html"
    words = ["plan", "--lengths", str(folder / "<b>.npy"), *FLAGS.split(), "--html", str(page), "--json"]
    result = CliRunner().invoke(app, [*words, *(word for name in SCHEDULERS for word in ("--scheduler", name))])
    assert result.exit_code == 0, result.output
    assert f"{page} is written" in result.stderr
    return page.read_text(encoding="utf-8"), json.loads(result.stdout)


def test_it_refers_to_nothing_outside_itself(written: tuple[str, dict]) -> None:
    text, _ = written
    for outside in ("http:", "https:", "//", "url(", "@import", "<script", "<link", "<iframe", "<img"):
        assert outside not in text.lower(), outside
    page = Page(text)
    assert not page.open, "every element is closed"
    assert not {name for _, attributes in page.tags for name in attributes} & {"src", "href", "srcset", "data"}
    assert "default-src 'none'" in text, "so that a browser would refuse it, too"
    assert "<b>" not in text, "names of files are text"


def test_it_shows_every_figure(written: tuple[str, dict]) -> None:
    text, report = written
    words = " ".join(Page(text).words)
    for name in SCHEDULERS:
        figures = report["schedulers"][name]
        for shown in (
            f"{figures['fill']:.1%}",
            f"{figures['packs']:,.2f}",
            f"{figures['step_imbalance']:.3f}",
            f"{figures['lockstep_imbalance']:.3f}",
            f"{name}, real tokens: {figures['fill']:.2%}",
            f"{name}: mean {figures['lockstep_imbalance']:.3f}",
        ):
            assert shown in words, (name, shown)
    for which, name in (("bound", "first_fit"), ("bound, groups that change", "dynamic_cp")):
        assert f"{which}: mean {report['schedulers'][name]['lockstep_lower_bound']:.3f}" in words
    for name, figures in report["baselines"].items():
        assert f"{figures['lockstep_imbalance']:.3f}" in words
        assert f"{name}, padding that runs: {1 - figures['fill']:.2%}" in words
    for figure in ("slots", "padding_tokens", "bound_slots", "saved", "score_half_squares", "causal_pairs"):
        assert f"{report['padded'][figure]:,}" in words, figure
    assert report["advice"]["choices"]
    for choice in report["advice"]["choices"]:
        shown = f"{choice['imbalance']:.3f} in {choice['microbatches_per_rank']:,.1f} microbatches"
        assert shown in words, shown
    assert "Advice (lockstep imbalance): --max-seqlen-per-dp-cp-rank" in words


def test_it_draws_every_sample_of_the_first_step_where_its_pack_has_it(
    written: tuple[str, dict], lengths: np.ndarray
) -> None:
    text, _ = written
    pictures = text.split("<section>")
    for name in SCHEDULERS:
        (section,) = [one for one in pictures if one.startswith(f"<h2>Packs of the first step: {name}<")]
        drawn = re.findall(r"(ranks? [\d to]+): sample (\d+), ([\d,]+) tokens", section)
        plan = make_plan(lengths[:60], name, Topology(dp=4, cp=2, ep=2), 512, cost=CostModel(linear=0, quadratic=1))
        expected = [
            (where, str(i), f"{lengths[i]:,}")
            for microbatch in plan.microbatches
            for where, pack in _placed(microbatch, grouped=name == "dynamic_cp")
            for i in pack.sample_ids
        ]
        assert drawn == expected
        assert name != "dynamic_cp" or any(where.startswith("ranks") for where, _, _ in drawn)
        picture = Page("<section>" + section.split("</section>")[0])
        assert picture.boxes("sample0", "sample1", "sample2") == 60
        assert picture.boxes("free") == sum(not pack.is_dummy for pack in plan.packs)


def test_a_dummy_is_drawn_as_one() -> None:
    lengths = np.array([8])
    picture = Page(packs_picture(make_plan(lengths, topology=Topology(dp=3), max_tokens_per_rank=8), lengths))
    assert (picture.boxes("dummy"), picture.boxes("free"), picture.boxes("sample0")) == (2, 1, 1)


def _placed(microbatch: Microbatch, *, grouped: bool) -> Iterator[tuple[str, Pack]]:
    """Packs, and the ranks that run them, in words."""
    first = 0
    for dp_rank, pack in enumerate(microbatch.packs):
        if not grouped:
            yield f"rank {dp_rank}", pack
            continue
        last = first + (pack.cp_size or 0) - 1
        yield (f"rank {first}" if first == last else f"ranks {first} to {last}"), pack
        first = last + 1


def test_bars_lie_within_the_picture_and_account_for_every_slot(written: tuple[str, dict]) -> None:
    (section,) = [one for one in written[0].split("<section>") if one.startswith("<h2>Where the slots go")]
    bars: dict[str, float] = {}
    for tag in re.finditer(r'width="([\d.]+)" height="22.00"><title>(\w+), ', section):
        bars[tag[2]] = bars.get(tag[2], 0.0) + float(tag[1])
    assert set(bars) == {"padded", "sorted", *SCHEDULERS}
    for width in bars.values():
        assert width == pytest.approx(760, abs=0.05)
    for sizes in re.findall(r' (?:y|height)="(-?[\d.]+)"', written[0]):
        assert float(sizes) >= 0


def test_a_page_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("4\n5\n")
    page = tmp_path / "missing" / "page.html"
    words = ["plan", "--lengths", str(tmp_path / "lengths.txt"), "--seq-length", "8", "--html", str(page)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert f"--html {page} cannot be written: No such file" in result.stderr


@pytest.mark.parametrize(("low", "high"), [(0, 1), (1, 1.01), (1, 3.2), (0, 12_345), (1, 67.3)])
def test_ticks_are_few_and_within(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 2 <= len(found) <= 8
    assert low - 1e-9 <= min(found) <= max(found) <= high + 1e-9
