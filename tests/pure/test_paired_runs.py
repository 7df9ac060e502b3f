"""Do the comparisons of runs say what they claim: ratios, differences, and that the samples were the same?"""

import importlib
import json
import sys
from argparse import Namespace
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts"))  # scripts/ is a folder of programs, not a package
paired = importlib.import_module("paired_runs")
quickstart = importlib.import_module("quickstart")
report = importlib.import_module("quickstart_report")
bench = importlib.import_module("bench_end_to_end")
balance = importlib.import_module("bench_balance")

SAMPLES = {"samples": 2, "real_tokens": 30, "targets": 20, "samples_digest": 77, "truncated": 1}


def figures(seconds, *, slots, flops, losses=(4.0, 3.0, 2.0), **more):
    turns = [
        {**SAMPLES, "loss": loss, "wall_s": s, "cpu_s": 2 * s, "slots": slots, "flops": flops, **more}
        for s, loss in zip(seconds, losses, strict=True)
    ]
    return paired.Figures(turns=turns)


def test_the_first_iteration_counts_for_no_speed():
    run = figures([1000.0, 2.0, 3.0], slots=64, flops=1.0)
    assert run.tokens_per_second("wall_s") == pytest.approx((30 / 2 + 30 / 3) / 2)
    slower = figures([1.0, 4.0, 9.0], slots=64, flops=1.0)
    assert paired.median_ratio(slower, run, "wall_s") == pytest.approx(2.5)


def test_difference_is_relative_and_absolute_below_one():
    assert paired.max_relative_difference([4.0, 0.5], [8.0, 0.25]) == 0.5
    assert paired.max_relative_difference([0.1], [0.01]) == pytest.approx(0.09)
    with pytest.raises(ValueError, match="argument"):
        paired.max_relative_difference([1.0], [1.0, 2.0])


@pytest.mark.parametrize("name", ["samples", "real_tokens", "targets", "samples_digest"])
def test_runs_on_different_samples_are_refused(name):
    paired.check_same_samples(1, {"a": SAMPLES, "b": dict(SAMPLES)})
    other = {**SAMPLES, name: SAMPLES[name] + 1}
    with pytest.raises(paired.DifferentSamples, match=rf"iteration 4: {name} is .* in the a run"):
        paired.check_same_samples(4, {"a": SAMPLES, "b": other})


def test_runs_differ_only_in_their_layout():
    training = paired.Training(seq_length=512, iterations=9, data_flags=["--data-path", "x"])
    layouts = [
        paired.Layout(name="padded"),
        paired.Layout(name="packed", capacity=1024),
        paired.Layout(name="stock", attention="stock"),
    ]
    padded, packed, stock = (paired.launch_command(training, layout, 9, 1) for layout in layouts)
    assert Counter(padded) - Counter(packed) == Counter(["--varlen-sbhd-validation", "4"])  # the micro-batch size
    scheduling = ["--sequence-packing-scheduler", "first_fit", "--packing-balance", "auto"]
    assert Counter(packed) - Counter(padded) == Counter(["--max-seqlen-per-dp-cp-rank", "1024", "1", *scheduling])
    assert Counter(padded) - Counter(stock) == Counter(["sdpa"])
    assert Counter(stock) - Counter(padded) == Counter(["stock"])


def test_a_shortened_run_keeps_the_whole_schedule():
    training = paired.Training(seq_length=512, iterations=30, data_flags=[])
    flags = training.flags(4)
    assert flags[flags.index("--train-iters") + 1] == "4"
    assert flags[flags.index("--lr-decay-iters") + 1] == "30"


def test_quickstart_result_is_what_the_report_takes():
    runs = {
        "padded": figures([9.0, 8.0, 8.0], slots=512, flops=90.0),
        "packed": figures([9.0, 2.0, 2.0], slots=128, flops=18.0, losses=(4.0, 3.0, 2.5)),
        "stock": figures([9.0, 16.0, 16.0], slots=512, flops=90.0),
    }
    result = quickstart.build_result(runs)
    report.check_result(result)
    assert (result["slot_ratio"], result["flop_ratio"], result["speed_ratio"]) == (4.0, 5.0, 4.0)
    assert result["max_relative_loss_difference"] == 0.25
    assert result["packed"]["slots"] == 3 * 128
    assert result["truncated"] == 3


def test_bench_puts_the_packed_run_in_relation_to_both_baselines():
    runs = {
        "padded": figures([9.0, 8.0, 8.0], slots=512, flops=90.0),
        "sorted": figures([9.0, 3.0, 3.0], slots=512, flops=90.0),
        "1024/4096 balanced": figures([9.0, 2.0, 2.0], slots=128, flops=18.0, plan_ms=6.0, exchange_ms=14.0),
    }
    row = bench.outcome(bench.SETTINGS["1024/4096"], "balanced", runs, ranks=2)
    assert (row.padded_over_packed, row.flop_ratio, row.of_flop_ratio) == (4.0, 5.0, 0.8)
    assert row.sorted_over_packed == 1.5
    assert row.share == pytest.approx(0.01)
    assert row.share_target == 0.05
    bench.table_of([row], Namespace(nproc=2, threads=1, iters=3))


def test_balance_is_measured_on_the_busiest_ranks():
    rows = {
        "first_fit": [[2.0, 6.0], [4.0, 1.0]],  # ranks, and their microbatches
        "dp_balanced": [[5.0, 1.0], [4.0, 2.0]],
        "balanced": [[3.0, 4.0], [3.0, 3.0]],
    }
    runs = {}
    for name, microbatches in rows.items():
        ranks = [sum(rank) + 1 for rank in microbatches]  # planning, exchange and update count in the step only
        packing = {"plan_ms": 1.0, "exchange_ms": 1.0, "step_imbalance": 1.5, "lockstep_imbalance": len(name)}
        run = figures([9.0, 2.0, 2.0], slots=64, flops=1.0, microbatches_cpu_s=microbatches, ranks_cpu_s=ranks)
        runs[name] = paired.Figures(turns=[{**row, **packing, **balance.busiest(row)} for row in run.turns])
    outcomes = [balance.outcome(name, runs, own_cores=name != "balanced") for name in rows]
    assert [row.lockstep_cpu_s for row in outcomes] == [10.0, 7.0, 7.0]
    assert [row.step_cpu_s for row in outcomes] == [9.0, 7.0, 8.0]
    assert [row.step_ratio for row in outcomes] == [9 / 8, 7 / 8, 1.0]
    assert [row.lockstep_ratio_planned for row in outcomes] == [9 / 8, 11 / 8, 1.0]
    assert [row.wall_ratio for row in outcomes] == [1.0, 1.0, None]
    step, lockstep = balance.CLUSTERS[2], balance.CLUSTERS[4]
    slower = [replace(row, step_ratio=1.1, wall_ratio=1.1) for row in outcomes]
    assert balance.is_fastest(slower, step)
    assert not balance.is_fastest(slower, lockstep)  # dp_balanced took as long
    assert not balance.is_fastest([replace(slower[0], wall_ratio=0.9), *slower[1:]], step)
    balance.table_of(outcomes, step, Namespace(nproc=2, iters=3))


def test_balance_is_measured_on_a_long_tail():
    lengths = balance.sample_lengths(2000)
    assert len(lengths) == 2000
    assert 250 < sum(lengths) / 2000 < 350
    assert 2000 < max(lengths) <= balance.CAPACITY


def test_bench_writes_samples_of_the_stated_lengths(tmp_path):
    path = tmp_path / "samples.jsonl"
    paired.write_samples(path, paired.alpaca_lengths())
    words = [len(json.loads(line)["text"].split()) for line in path.read_text().splitlines()]
    assert words == paired.alpaca_lengths()
    assert len(words) > 900
