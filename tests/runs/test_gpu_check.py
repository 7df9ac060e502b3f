"""The check for GPUs: its runs are good for GPUs as far as that can be told here, and its reduced form runs."""

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.runs.harness import ROOT, Runner

sys.path.append(str(ROOT / "scripts"))  # scripts/ is a folder of programs, not a package
gpu_check = importlib.import_module("gpu_check")
report = importlib.import_module("gpu_check_report")
paired = importlib.import_module("paired_runs")

pytestmark = pytest.mark.run


def options(device: str, ranks: int, out: Path) -> argparse.Namespace:
    return argparse.Namespace(device=device, nproc=ranks, iters=2, out=out, parts=list(gpu_check.PARTS))


@pytest.mark.parametrize(("engine", "ranks"), [(True, 2), (False, 1)], ids=["te, 2 GPUs", "no te, 1 GPU"])
def test_every_run_for_gpus_is_dry_run(
    engine: bool, ranks: int, runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "uses_transformer_engine", lambda device: engine)
    given = options("cuda", ranks, tmp_path)
    layouts = [layout for group in gpu_check.groups(given, ranks) for layout in group.layouts]
    runs = [(gpu_check.SMALL, layout) for layout in layouts]
    runs += [(gpu_check.LARGE, layout) for layout in gpu_check.speed_layouts(given, gpu_check.LARGE)]
    names = [layout.name for _, layout in runs]
    assert {"packed", "packed, bf16"} <= set(names)
    assert ("TE packed, bf16" in names) == engine
    assert ("packed, CP 2" in names) == ("packed, balanced" in names) == (ranks > 1)
    for form, layout in runs:
        command = paired.launch_command(form.training(given, ranks), layout, given.iters, ranks)
        words = command[command.index("megatron_packing.launch") + 1 :]
        variables = gpu_check.environment(given, ranks)
        run = runner.dry_run("--dry-run", *words, **variables, RANK="0", WORLD_SIZE=str(ranks))
        assert run.ok, f"{layout.name}\n{run.log[-3000:]}"
        assert "every flag is good" in run.log
        assert "on CPU" not in run.log


def test_the_reduced_form_holds_a_packed_run_to_megatrons_own(tmp_path: Path) -> None:
    """Two of its runs, smaller still; and the wrong run is told from the right one."""
    given = options("cpu", 1, tmp_path)
    paired.write_samples(tmp_path / "samples.jsonl", paired.alpaca_lengths())
    model = paired.Model(layers=2, hidden=64, heads=4)
    form = gpu_check.Form(model=model, seq_length=128, capacity=gpu_check.SMALL.capacity, samples_a_rank=8)
    layouts = {layout.name: layout for layout in gpu_check.ours(given, 1).layouts}
    assert list(layouts) == ["unpacked", "unpacked, 4 rows", "packed", "unpacked, bf16", "packed, bf16"]
    chosen = [layouts["unpacked"], layouts["packed"]]
    runs = gpu_check.take(chosen, form.training(given, 1), given, 1, at_once=2)
    unpacked, packed = runs["unpacked"], runs["packed"]
    assert report.compare_fp32("packed", packed, unpacked, unpacked).holds
    assert unpacked.all("slots") == [8 * 128] * 2
    assert packed.total("slots") < unpacked.total("slots")
    assert min(packed.all("peak_bytes")) > 2**26
    packed.turns[1] = {**packed.turns[1], "loss": packed.turns[1]["loss"] * 1.001}
    assert not report.compare_fp32("packed", packed, unpacked, unpacked).holds


def _findings() -> Any:
    return report.Findings(device="cpu", ranks=1, machine={}, settings={}, comparisons=[], speed=[], failures=[])


@pytest.mark.parametrize(
    ("printed", "passed", "failures"),
    [
        (json.dumps({"probe": {"passed": True, "device": "cpu", "checks": []}}), True, 0),
        (json.dumps({"probe": {"passed": False, "device": "cpu", "checks": []}}), False, 0),
        (json.dumps({"versions": {}}), False, 1),
        ("Traceback", False, 1),
    ],
    ids=["holds", "fails", "no-probe", "no-json"],
)
def test_the_probe_counts(
    printed: str, passed: bool, failures: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*args: Any, **keywords: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(args, 1, stdout=printed, stderr="why")

    monkeypatch.setattr(subprocess, "run", run)
    found = _findings()
    gpu_check.probe(options("cpu", 1, tmp_path), found)
    assert (found.passed, len(found.failures)) == (passed, failures)


def test_a_run_that_dies_is_in_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def take(*args: Any, **keywords: Any) -> None:
        raise gpu_check.RunFailed("the packed run ended")

    monkeypatch.setattr(gpu_check, "take", take)
    found = _findings()
    gpu_check.check_numerics(options("cpu", 1, tmp_path), found)
    gpu_check.measure_speed(options("cpu", 1, tmp_path), found)
    assert found.failures == ["numerics, our attention: the packed run ended", "speed: the packed run ended"]
    assert not found.passed


def test_the_command_says_what_it_needs() -> None:
    script = ["bash", str(ROOT / "scripts" / "gpu_check.sh")]
    told = subprocess.run([*script, "--help"], capture_output=True, text=True, check=True, timeout=60)
    assert "--device cuda|cpu" in told.stdout
    refused = subprocess.run(
        [*script, "--python", sys.executable, "--device", "cpu", "--iters", "1"],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert refused.returncode == 2
    assert "--iters 1: speeds leave out iteration 1" in refused.stderr
