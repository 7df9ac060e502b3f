"""Does the quickstart's report keep every number, refuse what is incomplete, and draw a picture?"""

import copy
import importlib.util
import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

SCRIPT = Path(__file__).parents[2] / "scripts" / "quickstart_report.py"
PACKS = [[100, 60, 40], [200], []]
LENGTHS = [100, 60, 40, 200, 900]
LAYOUT = {"capacity": 256, "seq_length": 256}


def load_script():
    # scripts/ is a folder of programs, not a package.
    spec = importlib.util.spec_from_file_location("quickstart_report", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


report = load_script()


def run(losses, slots, speed):
    return {"losses": losses, "real_tokens_per_s": speed, "slots": slots, "real_tokens": 400, "targets": 300}


@pytest.fixture
def result():
    return {
        "padded": run([8.0, 7.0, 6.5], 1024, 812.4),
        "packed": run([8.0, 7.0, 6.500001], 768, 3220.0),
        "slot_ratio": 1024 / 768,
        "flop_ratio": 4.125,
        "speed_ratio": 3.96,
        "max_relative_loss_difference": 1.5e-7,
        "extra": {"anything": [1, 2]},
    }


def test_the_json_keeps_every_number_and_adds_the_layout(result, tmp_path):
    pytest.importorskip("matplotlib", reason="draws; install megatron-packing[plot]")
    json_path, _ = report.write_report(result, LENGTHS, PACKS, tmp_path / "new", **LAYOUT)
    written = json.loads(json_path.read_text("utf-8"))
    assert {key: written[key] for key in result} == result
    assert {key: written[key] for key in written.keys() - result.keys()} == {
        "capacity": 256,
        "seq_length": 256,
        "step_packs": PACKS,
        "lengths": {"samples": 5, "mean": 260.0, "min": 40, "p50": 100, "p95": 900, "max": 900},
    }


def test_the_picture_shows_three_panels(result, tmp_path):
    image = pytest.importorskip("matplotlib.image", reason="draws; install megatron-packing[plot]")
    _, png_path = report.write_report(result, LENGTHS, PACKS, tmp_path, **LAYOUT)
    pixels = image.imread(png_path)[..., :3]
    height, width, _ = pixels.shape
    assert width > 2 * height > 1000
    for panel in range(3):
        part = pixels[:, panel * width // 3 : (panel + 1) * width // 3]
        assert 0.01 < (part.min(axis=2) < 0.9).mean() < 0.8
    # Nothing else stays: no half-written file.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json", "report.png"]


@pytest.mark.parametrize(
    ("lengths", "packs", "losses"),
    [([5], [[5]], [1.0]), ([7] * 300, [[7] * 30] * 10, [1.0] * 100), ([0, 3], [[], [3]], [0.0, 0.0])],
    ids=["one of each", "many equal", "zeros"],
)
def test_extremes_are_drawn_without_warnings(result, tmp_path, recwarn, lengths, packs, losses):
    pytest.importorskip("matplotlib", reason="draws; install megatron-packing[plot]")
    for name in ("padded", "packed"):
        result[name]["losses"] = losses
    _, png_path = report.write_report(result, lengths, packs, tmp_path, **LAYOUT)
    assert png_path.stat().st_size > 10_000
    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.parametrize("key", ["slot_ratio", "flop_ratio", "speed_ratio", "max_relative_loss_difference"])
def test_a_missing_ratio_is_named(result, key):
    del result[key]
    with pytest.raises(ValueError, match=f"{key} is missing"):
        report.check_result(result)


@pytest.mark.parametrize("name", ["padded", "packed"])
@pytest.mark.parametrize("key", ["losses", "real_tokens_per_s", "slots", "real_tokens", "targets"])
def test_a_missing_number_of_a_run_is_named(result, name, key, tmp_path):
    del result[name][key]
    with pytest.raises(ValueError, match=f"{name}.{key} is missing"):
        report.write_report(result, LENGTHS, PACKS, tmp_path / "new", **LAYOUT)
    assert not (tmp_path / "new").exists()


def test_every_fault_is_told_at_once(result):
    faulty = copy.deepcopy(result)
    del faulty["packed"]
    faulty["speed_ratio"] = "fast"
    faulty["padded"]["losses"][1] = float("nan")
    with pytest.raises(ValueError, match=r"3 fault\(s\)") as caught:
        report.check_result(faulty)
    assert "packed is missing" in str(caught.value)
    assert "speed_ratio is 'fast'" in str(caught.value)
    assert "padded.losses is nan at iteration 2" in str(caught.value)


def test_runs_of_different_lengths_are_refused(result):
    result["packed"]["losses"].append(6.0)
    with pytest.raises(ValueError, match=r"3 iterations and packed\.losses 4"):
        report.check_result(result)


def test_a_pack_above_the_capacity_is_refused(result, tmp_path):
    with pytest.raises(ValueError, match=r"packs\[1\] holds 300 padded tokens; the capacity is 256"):
        report.write_report(result, LENGTHS, [[5], [300]], tmp_path, **LAYOUT)


@pytest.mark.parametrize(("lengths", "packs"), [([], PACKS), (LENGTHS, []), (LENGTHS, [[]])])
def test_nothing_to_draw_is_refused(result, tmp_path, lengths, packs):
    with pytest.raises(ValueError, match=r"at least 1 sample|no sample"):
        report.write_report(result, lengths, packs, tmp_path, **LAYOUT)


def test_the_tables_show_losses_fill_and_ratios(result):
    console = Console(width=100, record=True, file=io.StringIO())
    report.print_table(result, console)
    text = console.export_text()
    for shown in ("6.500001", "+1.0e-06", "1.5e-07", "812", "3,220", "39.1%", "52.1%", "1.33x", "4.12x", "3.96x"):
        assert shown in text
