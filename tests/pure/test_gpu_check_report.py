"""Does the check for GPUs fail where it must, and does its report say all that was found?"""

import importlib
import json
import math
import sys
from pathlib import Path

import pytest

from tests.pure.test_paired_runs import figures

sys.path.append(str(Path(__file__).parents[2] / "scripts"))  # scripts/ is a folder of programs, not a package
report = importlib.import_module("gpu_check_report")

EXACT = (4.0, 3.0, 2.0)
GIB = 2**30


def losses(*errors):
    return figures([1.0, 1.0, 1.0], slots=1, flops=1.0, losses=[a + b for a, b in zip(EXACT, errors, strict=True)])


@pytest.mark.parametrize(
    ("packed", "noise", "holds"),
    [
        pytest.param(0.0, 0.0, True, id="equal"),
        pytest.param(0.9e-6, 0.0, True, id="below-what-is-allowed-in-any-case"),
        pytest.param(4e-6, 0.0, False, id="above-it"),
        pytest.param(4e-6, 3e-6, True, id="below-twice-the-noise"),
        pytest.param(7e-6, 3e-6, False, id="above-it-too"),
        pytest.param(math.nan, 3e-6, False, id="no-number"),
    ],
)
def test_fp32_is_held_to_what_another_microbatch_size_changes(packed, noise, holds):
    # Losses of 4, so that a difference of 4e-6 is one of 1e-6 in relative terms.
    packed, noise = 4 * packed, 4 * noise
    found = report.compare_fp32("packed", losses(packed, 0, 0), losses(0, 0, 0), losses(noise, 0, 0))
    assert found.holds == holds


@pytest.mark.parametrize(("error", "holds"), [(1.9e-3, True), (2.1e-3, False), (math.nan, False), (math.inf, False)])
def test_bf16_may_err_twice_as_much_as_unpacked(error, holds):
    unpacked = losses(1e-3, -1e-3, 1e-3)
    found = report.compare_bf16("packed", losses(error, error, -error), unpacked, losses(0, 0, 0))
    assert found.holds == holds


def test_a_loss_that_is_no_number_late_in_a_run_fails():
    later = losses(0, 0, math.nan)
    assert not report.compare_fp32("packed", later, losses(0, 0, 0), losses(0, 0, 0)).holds


@pytest.fixture
def found():
    runs = {
        "padded": figures([9.0, 8.0, 8.0], slots=512, flops=90.0, peak_bytes=6 * GIB),
        "packed": figures([9.0, 2.0, 2.0], slots=128, flops=18.0, peak_bytes=3 * GIB),
    }
    return report.Findings(
        device="cuda",
        ranks=2,
        machine={"devices": "2 x a GPU"},
        settings={"numerics": "small", "speed": "large"},
        probe={"passed": True, "device": "cuda", "checks": [{"name": "forward", "passed": True, "found": "0"}]},
        comparisons=[report.Comparison(run="packed", what="difference", found=1e-7, limit=1e-6)],
        speed=report.speed_rows(runs, "wall_s"),
        failures=[],
    )


def test_speed_is_told_in_relation_to_the_padded_run(found):
    padded, packed = found.speed
    assert (padded["over_padded"], packed["over_padded"], packed["flops_saved"]) == (1.0, 4.0, 5.0)
    assert (packed["iteration_s"], packed["peak_gib"]) == (2.0, 3.0)
    assert packed["fill"] == pytest.approx(30 / 128)


def test_the_report_has_it_all_in_both_forms(found, tmp_path):
    markdown, document = report.write_report(found, tmp_path / "new")
    text, content = markdown.read_text(), json.loads(document.read_text())
    assert content["passed"]
    assert not content["reduced"]
    assert content["comparisons"] == [
        {"run": "packed", "what": "difference", "found": 1e-7, "limit": 1e-6, "holds": True}
    ]
    assert content["speed"] == found.speed
    for words in (
        "on this machine: passed",
        "devices: 2 x a GPU",
        "| packed | difference | 1.0e-07 | 1.0e-06 | holds |",
        "| packed | 15 | 4.00x | 2.00 | 23.4% | 5.00x | 3.0 GiB |",
        "All 1 checks of `megatron-packing doctor --probe` hold on cuda.",
    ):
        assert words in text
    assert "Reduced" not in text
    found.device = "cpu"
    assert "Reduced form, on the CPU" in "\n".join(report.markdown_lines(found))


@pytest.mark.parametrize("broken", ["comparison", "probe", "failure", "nothing"])
def test_one_fault_fails_the_whole(found, broken, tmp_path):
    assert found.passed
    if broken == "comparison":
        found.comparisons.append(report.Comparison(run="bad", what="difference", found=2.0, limit=1.0))
    if broken == "probe":
        found.probe = {**found.probe, "passed": False}
        found.probe["checks"].append({"name": "gradients", "passed": False, "found": "1.9"})
    if broken == "failure":
        found.failures.append("speed: the padded run ended")
    if broken == "nothing":
        found.comparisons, found.speed, found.probe = [], [], None
    markdown, document = report.write_report(found, tmp_path)
    assert not json.loads(document.read_text())["passed"]
    said = {"comparison": "| bad |", "probe": "| gradients | 1.9 | **FAILS** |", "failure": "the padded run ended"}
    assert said.get(broken, "FAILED") in markdown.read_text()
    assert "on this machine: FAILED" in markdown.read_text()
