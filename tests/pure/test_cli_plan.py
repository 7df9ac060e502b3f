"""Does `megatron-packing plan` count right, say what it left out, and refuse what it cannot plan?"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from megatron_packing import __version__
from megatron_packing.cli.lengths import load_lengths
from megatron_packing.cli.main import app
from megatron_packing.cli.model_flags import ModelFlags
from megatron_packing.cli.padded import padded_account
from megatron_packing.schedule import CostModel, make_plan, mean_metrics
from megatron_packing.topology import Topology
from tests.pure.test_schedule_memory import LLAMA_3_8B
from tests.pure.test_schedule_metrics import KEYS as SCHEDULER_KEYS

PADDED_KEYS = [
    "slots",
    "real_tokens",
    "padding_tokens",
    "waste",
    "bound_packs",
    "bound_slots",
    "tail_padding",
    "saved",
    "score_half_squares",
    "causal_pairs",
]


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def planned(*words: object) -> dict[str, Any]:
    result = run("plan", *words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refused(*words: object) -> str:
    """The one line that a refused command says."""
    result = run("plan", *words)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("megatron-packing: error: ")
    return line


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def written(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return written


@pytest.fixture
def lengths_file(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.npy"
    np.save(path, np.random.default_rng(0).integers(1, 100, size=70))
    return path


# --- the accounts of padding ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "seq_length", "expected"),
    [
        pytest.param(
            [2048, 512, 256, 128],
            2048,
            {
                "slots": 8192,
                "real_tokens": 2944,
                "padding_tokens": 5248,
                "waste": 5248 / 8192,
                "bound_packs": 2,
                "bound_slots": 4096,
                "tail_padding": 1152,
                "saved": 4096,
                "score_half_squares": 2_269_184,
                "causal_pairs": 2_269_184 + 2944 // 2,
            },
            id="half-saved",
        ),
        pytest.param(
            [1024, 768, 512, 256, 96],
            2048,
            {
                "slots": 10_240,
                "real_tokens": 2656,
                "padding_tokens": 7584,
                "waste": 7584 / 10_240,
                "bound_packs": 2,
                "bound_slots": 4096,
                "tail_padding": 1440,
                "saved": 6144,
                "score_half_squares": 987_648,
                "causal_pairs": 988_976,
            },
            id="sixty-percent-saved",
        ),
        pytest.param(
            [2048, 128],
            131_072,
            {"padding_tokens": 259_968, "waste": 259_968 / 262_144, "bound_packs": 1},
            id="long-context",
        ),
        pytest.param(
            [3, 2, 4], 4, {"slots": 12, "real_tokens": 9, "score_half_squares": 14.5, "causal_pairs": 19}, id="by-hand"
        ),
        pytest.param(
            [9], 9, {"slots": 9, "score_half_squares": 81 / 2, "causal_pairs": 45}, id="by-hand-as-one-sequence"
        ),
        pytest.param([5], 5, {"padding_tokens": 0, "waste": 0.0, "tail_padding": 0, "saved": 0}, id="one-full"),
    ],
)
def test_padding_is_accounted_for_exactly(
    write: Any, lengths: list[int], seq_length: int, expected: dict[str, float]
) -> None:
    path = write("lengths.json", json.dumps(lengths))
    padded = planned("--lengths", path, "--seq-length", seq_length)["padded"]
    assert list(padded) == PADDED_KEYS
    assert {key: padded[key] for key in expected} == expected
    assert all(type(padded[key]) is int for key in PADDED_KEYS if key not in ("waste", "score_half_squares"))


def test_the_padded_scores_are_half_the_padded_squares() -> None:
    account = padded_account(np.array([2048, 512, 256, 128]), 2048)
    assert account.padded_half_squares == 8_388_608
    assert account.score_half_squares / account.padded_half_squares == pytest.approx(0.2705, abs=5e-5)
    assert padded_account(np.array([3, 2, 4]), 4).padded_half_squares == 48 / 2


def test_sums_of_squares_beyond_64_bits_stay_exact(write: Any) -> None:
    length = 2**31 - 1
    path = write("lengths.json", json.dumps([length] * 8))
    padded = planned("--lengths", path, "--max-seqlen-per-dp-cp-rank", length, "--global-batch-size", 1)["padded"]
    assert padded["score_half_squares"] == 4 * length**2 > 2**63
    assert padded["causal_pairs"] == 4 * length * (length + 1)


# --- the schedulers -------------------------------------------------------------------------------


def test_schedulers_get_the_mean_of_their_steps(lengths_file: Path) -> None:
    flags = "--dp 2 --cp 2 --tp 2 --sequence-parallel --max-seqlen-per-dp-cp-rank 64 --global-batch-size 35"
    flags += " --max-seqs 5 --cost-linear 100 --scheduler dp_balanced --scheduler first_fit"
    report = planned("--lengths", lengths_file, *flags.split())
    assert list(report) == ["padded", "schedulers", "recommended", "baselines", "advice", "activation_bytes"]
    assert report["activation_bytes"] is None, "no model was named"
    assert list(report["schedulers"]) == ["dp_balanced", "first_fit"]
    lengths = np.load(lengths_file)
    for name, figures in report["schedulers"].items():
        assert list(figures) == SCHEDULER_KEYS
        steps = [
            make_plan(
                step,
                scheduler=name,
                topology=Topology(dp=2, cp=2, tp=2, sequence_parallel=True),
                max_tokens_per_rank=64,
                max_seqs=5,
                cost=CostModel(linear=100, quadratic=1),
            ).metrics(step)
            for step in (lengths[:35], lengths[35:])
        ]
        expected = mean_metrics(steps).as_dict()
        del expected["plan_ms"]
        assert expected["steps"] == 2
        assert figures.pop("plan_ms") > 0
        assert figures == expected


def test_trainings_own_flag_names_mean_the_same(lengths_file: Path) -> None:
    ours = {"--cp": 2, "--tp": 2, "--max-seqs": 3, "--scheduler": "dp_balanced"}
    trainings = (
        "--context-parallel-size",
        "--tensor-model-parallel-size",
        "--thd-max-packed-sequences",
        "--sequence-packing-scheduler",
    )
    reports = []
    for names in (ours, trainings):
        flags = dict(zip(names, ours.values(), strict=True))
        report = planned(
            "--lengths", lengths_file, "--seq-length", 200, *(word for flag in flags.items() for word in flag)
        )
        del report["schedulers"]["dp_balanced"]["plan_ms"]
        reports.append(report)
    assert reports[0] == reports[1]


def test_an_incomplete_last_batch_is_left_out_and_said(write: Any) -> None:
    path = write("lengths.txt", "1\n2\n3\n4\n5\n")
    result = run("plan", "--lengths", path, "--seq-length", 8, "--global-batch-size", 2, "--json")
    report = json.loads(result.stdout)
    assert report["padded"]["real_tokens"] == 1 + 2 + 3 + 4
    assert report["schedulers"]["first_fit"]["steps"] == 2
    assert "1 of 5 lengths are left out" in result.stderr


# --- lengths --------------------------------------------------------------------------------------


def test_each_kind_of_file_gives_the_same_lengths(write: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.array([7, 3, 5], dtype=np.uint16))
    paths = [tmp_path / "lengths.npy", write("lengths.txt", "7\r\n\n3\n 5"), write("lengths.json", "[7, 3, 5]")]
    assert [load_lengths(path, 0).tolist() for path in paths] == [[7, 3, 5]] * 3


def test_a_histogram_is_written_out_and_shuffled_by_the_seed(write: Any) -> None:
    one = write("one.json", '{"5": 40, "9": 0, "2": 30}')
    other = write("other.json", '{"2": 30, "5": 40}')
    lengths = load_lengths(one, 1).tolist()
    assert sorted(lengths) == [2] * 30 + [5] * 40 != lengths
    assert load_lengths(one, 1).tolist() == load_lengths(other, 1).tolist() == lengths
    assert load_lengths(one, 2).tolist() != lengths


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("missing.npy", None, "missing.npy cannot be read: No such file"),
        ("lengths.csv", "1", "'.csv'; lengths are read from .npy, .txt, .json"),
        ("lengths.npy", "1 2 3", "lengths.npy is no .npy file"),
        ("lengths.txt", "", "holds no lengths"),
        ("lengths.txt", "4\n-3\n", "lengths.txt:2 is '-3'; a length is an integer of at least 1"),
        ("lengths.txt", "4\n1_0\n", "lengths.txt:2 is '1_0'"),
        ("lengths.txt", "4\n0\n", "lengths[1] is 0"),
        ("lengths.json", "[4,", "lengths.json:1: not valid JSON"),
        ("lengths.json", "7", "neither a list of lengths nor counts by length"),
        ("lengths.json", "[4, 2.0]", "item 1, counted from 0, is 2.0"),
        ("lengths.json", "[4, true]", "item 1, counted from 0, is True"),
        ("lengths.json", '{"4": 1, "4": 2}', "length 4 is counted twice"),
        ("lengths.json", '{"x": 1}', "a key is 'x'"),
        ("lengths.json", '{"4": -1}', "length 4 counts -1"),
        ("lengths.json", '{"4": 1000000000}', "counts 1,000,000,000 lengths; the limit is 100,000,000"),
    ],
)
def test_a_file_of_no_lengths_is_refused(write: Any, tmp_path: Path, name: str, text: str | None, said: str) -> None:
    path = tmp_path / name if text is None else write(name, text)
    assert said in refused("--lengths", path, "--seq-length", 8)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--seq-length 8", "length 1, counted from 0, is 9 tokens; --seq-length is 8 (2 of 3 are too long)"),
        ("--max-seqlen-per-dp-cp-rank 4 --cp 2", "a pack holds 8 = 4 per rank x CP 2 (2 of 3 are too long)"),
        ("--seq-length 16 --global-batch-size 4", "holds 3 lengths; one step takes 4"),
        (
            "--seq-length 16 --scheduler best_fit",
            "'best_fit'; it must be one of: balanced, dp_balanced, dynamic_cp, first_fit",
        ),
        ("--max-seqlen-per-dp-cp-rank 15 --tp 2 --sequence-parallel", "must be a multiple of the alignment 2"),
        ("--seq-length 16 --cost-linear=-1", "CostModel.linear is -1.0"),
        ("", "--max-seqlen-per-dp-cp-rank is missing"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(write: Any, flags: str, said: str) -> None:
    assert said in refused("--lengths", write("lengths.txt", "4\n9\n10\n"), *flags.split())


def test_a_pack_shorter_than_a_sample_may_be_is_what_a_run_refuses(write: Any) -> None:
    flags = ("--seq-length", 16, "--max-seqlen-per-dp-cp-rank", 8)
    fits = run("plan", "--lengths", write("lengths.txt", "8\n"), *flags, "--json")
    assert (fits.exit_code, json.loads(fits.stdout)["padded"]["slots"]) == (0, 16)
    assert "a run would refuse this setting" in fits.stderr
    too_long = run("plan", "--lengths", write("lengths.txt", "4\n9\n"), *flags)
    assert too_long.exit_code == 2
    assert "length 1, counted from 0, is 9 tokens; a pack holds 8" in too_long.stderr


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "seq_length", "shares"),
    [
        ([2048, 512, 256, 128], 2048, ("64.1%", "28.1%", "50.0%")),
        ([1024, 768, 512, 256, 96], 2048, ("74.1%", "35.2%", "60.0%")),
        ([2048, 128], 131_072, ("99.2%",)),
    ],
)
def test_the_tables_show_shares(write: Any, lengths: list[int], seq_length: int, shares: tuple[str, ...]) -> None:
    shown = run("plan", "--lengths", write("lengths.json", json.dumps(lengths)), "--seq-length", seq_length).stdout
    for share in shares:
        assert f" {share} " in shown


def test_the_tables_show_padding_and_each_scheduler(write: Any) -> None:
    path = write("lengths[red].json", "[2048, 512, 256, 128]")
    flags = "--seq-length 2048 --scheduler first_fit --scheduler dp_balanced"
    result = run("plan", "--lengths", path, *flags.split())
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
    for shown in ("padded", "first_fit", "dp_balanced", "64.1%", "28.1%", "50.0%", "8,388,608", "2,269,184", "27.1%"):
        assert shown in result.stdout


def test_help_and_version() -> None:
    assert run("--version").stdout == f"megatron-packing {__version__}\n"
    assert "--max-seqlen-per-dp-cp-rank" in run("plan", "--help").stdout
    assert {"plan", "inspect"} <= set(run("--help").stdout.split())


def test_a_mistyped_flag_is_a_usage_error(lengths_file: Path) -> None:
    result = run("plan", "--lengths", lengths_file, "--max-seqlen", 8)
    assert result.exit_code == 2
    assert "--max-seqlen" in result.stderr


_BLOCKED = """
import sys
for name in ("torch", "megatron", "transformers"):
    sys.modules[name] = None
from megatron_packing.cli.main import app
app()
"""


@pytest.mark.parametrize("command", ["plan", "inspect"])
def test_plan_loads_neither_torch_nor_megatron(lengths_file: Path, tmp_path: Path, command: str) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "1 2 3"}\n')
    inputs = ["--lengths", lengths_file] if command == "plan" else ["--data", rows, "--tokenizer", "null:9"]
    done = subprocess.run(
        [sys.executable, "-c", _BLOCKED, command, *map(str, inputs), "--seq-length", "100", "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if command == "plan":
        assert (done.returncode, done.stderr) == (0, "")
        assert json.loads(done.stdout)["schedulers"]["first_fit"]["steps"] == 1
    else:  # which shows that the block works
        assert done.returncode != 0
        assert "torch" in done.stderr or "megatron" in done.stderr


# --- groups of ranks that change ------------------------------------------------------------------


def test_groups_are_planned_beside_static_packs(lengths_file: Path) -> None:
    words = ["--lengths", lengths_file, "--dp", 4, "--max-seqlen-per-dp-cp-rank", 128, "--cost-communication", 30]
    both = planned(*words, "--scheduler", "first_fit", "--scheduler", "default_dynamic_cp")["schedulers"]
    assert list(both) == ["first_fit", "dynamic_cp"]
    lengths = np.load(lengths_file)
    cost = CostModel(linear=0, quadratic=1, communication=30)
    expected = make_plan(lengths, "dynamic_cp", Topology(dp=4), 128, cost=cost).metrics(lengths).as_dict()
    assert {k: v for k, v in both["dynamic_cp"].items() if k != "plan_ms"} == {
        k: v for k, v in expected.items() if k != "plan_ms"
    }
    assert both["dynamic_cp"]["lockstep_imbalance"] < both["first_fit"]["lockstep_imbalance"]


def test_only_groups_can_hold_what_no_static_pack_can(write: Any) -> None:
    words = ["--lengths", write("lengths.txt", "300\n5\n"), "--dp", 4, "--max-seqlen-per-dp-cp-rank", 128]
    assert planned(*words, "--scheduler", "dynamic_cp")["schedulers"]["dynamic_cp"]["max_pack_load"] <= 1
    assert "a pack holds 128 = 128 per rank x CP 1" in refused(
        *words, "--scheduler", "dynamic_cp", "--scheduler", "first_fit"
    )
    assert "a pack holds 256 = 128 per rank x CP 2" in refused(*words[:3], 2, *words[4:], "--scheduler", "dynamic_cp")


def test_groups_of_a_smallest_size(lengths_file: Path) -> None:
    words = ["--lengths", lengths_file, "--dp", 6, "--max-seqlen-per-dp-cp-rank", 128, "--scheduler", "dynamic_cp"]
    assert planned(*words, "--min-dynamic-context-parallel-size", 3)["schedulers"]["dynamic_cp"]["max_pack_load"] <= 1
    assert "is 4; it must divide the 6" in refused(*words, "--min-dynamic-context-parallel-size", 4)
    sizes = planned(*words, "--any-group-size", "--min-dynamic-context-parallel-size", 2, "--cost-communication", 9)
    assert sizes["schedulers"]["dynamic_cp"]["packs"] >= 1


def test_what_training_refuses_is_said(lengths_file: Path) -> None:
    for scheduler, refused_in_training in (("offline", True), ("dynamic_cp", False)):
        result = run("plan", "--lengths", lengths_file, "--max-seqlen-per-dp-cp-rank", 128, "--scheduler", scheduler)
        assert result.exit_code == 0
        said = f"megatron-packing: note: training refuses {scheduler}: " in result.stderr
        assert said == refused_in_training


# --- what is recommended --------------------------------------------------------------------------


@pytest.fixture
def long_tailed(tmp_path: Path) -> Path:
    path = tmp_path / "long_tailed.npy"
    np.save(path, np.clip(np.random.default_rng(0).lognormal(5.8, 1.1, 512).astype(np.int64), 16, 8192))
    return path


@pytest.mark.parametrize(("flags", "kept_small"), [("", "step"), ("--ep 2", "lockstep"), ("--pp 2", "lockstep")])
def test_balanced_is_recommended_with_the_figure(long_tailed: Path, flags: str, kept_small: str) -> None:
    flags += " --dp 4 --seq-length 8192 --global-batch-size 256"
    report = planned("--lengths", long_tailed, *flags.split())
    assert list(report["schedulers"]) == ["first_fit"]
    recommended = report["recommended"]
    key = f"{kept_small}_imbalance"
    asked = planned("--lengths", long_tailed, *flags.split(), "--scheduler", "balanced", "--scheduler", "dp_balanced")
    assert recommended == {
        "scheduler": "balanced",
        "balance": kept_small,
        "imbalance": asked["schedulers"]["balanced"][key],
        "in_place_of": "first_fit",
        "its_imbalance": report["schedulers"]["first_fit"][key],
    }
    assert asked["recommended"]["in_place_of"] == "dp_balanced"
    words = run("plan", "--lengths", long_tailed, *flags.split()).stdout
    assert f"{recommended['imbalance']:.3f} times" in words
    assert f"first_fit {recommended['its_imbalance']:.3f} times ({kept_small} imbalance)" in words


@pytest.mark.parametrize(
    "flags",
    [
        "--dp 1 --seq-length 8192",  # one rank waits for nobody
        "--dp 4 --seq-length 8192 --scheduler balanced",
        "--dp 2 --seq-length 8192 --cost-linear 1 --cost-quadratic 0 --global-batch-size 2 --max-seqs 1",
    ],
)
def test_nothing_is_recommended_where_nothing_is_gained(long_tailed: Path, flags: str) -> None:
    assert planned("--lengths", long_tailed, *flags.split())["recommended"] is None
    assert "Recommended" not in run("plan", "--lengths", long_tailed, *flags.split()).stdout


def test_what_balanced_keeps_small_is_the_users_choice(long_tailed: Path) -> None:
    flags = "--dp 4 --seq-length 8192 --scheduler balanced --packing-balance"
    step, lockstep = (planned("--lengths", long_tailed, *flags.split(), one) for one in ("step", "lockstep"))
    of_step, of_lockstep = step["schedulers"]["balanced"], lockstep["schedulers"]["balanced"]
    assert of_step["step_imbalance"] < of_lockstep["step_imbalance"]
    assert of_lockstep["lockstep_imbalance"] < of_step["lockstep_imbalance"]
    assert "'both'; set --packing-balance to one of" in refused("--lengths", long_tailed, *flags.split(), "both")


# --- a model ----------------------------------------------------------------------------------------

SIZES = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --num-query-groups 8 --ffn-hidden-size 14336 --swiglu "
    "--padded-vocab-size 128256"
)
"""Of `LLAMA_3_8B`."""


def test_a_model_s_flops_are_its_work_and_its_bytes_are_estimated(lengths_file: Path, tmp_path: Path) -> None:
    flags = ["--lengths", lengths_file, "--dp", 2, "--max-seqlen-per-dp-cp-rank", 8192, "--global-batch-size", 35]
    report = planned(*flags, *SIZES.split())
    assert report["activation_bytes"] == 8192 * 4_989_952, "see test_schedule_memory"
    flops = CostModel.from_transformer(LLAMA_3_8B)
    steps = np.split(np.load(lengths_file), 2)
    plans = [make_plan(step, topology=Topology(dp=2), max_tokens_per_rank=8192, cost=flops) for step in steps]
    mean = mean_metrics([plan.metrics(step) for plan, step in zip(plans, steps, strict=True)])
    assert report["schedulers"]["first_fit"]["step_imbalance"] == pytest.approx(mean.step_imbalance)
    assert planned(*flags)["schedulers"]["first_fit"]["step_imbalance"] != pytest.approx(mean.step_imbalance)
    given = planned(*flags, *SIZES.split(), "--cost-linear", 0)
    assert _without_times(given) == _without_times(planned(*flags)), "what is given goes before what follows"
    for choice in report["advice"]["choices"]:
        assert choice["activation_bytes"] == choice["max_tokens_per_rank"] * 4_989_952
    page = tmp_path / "plan.html"
    said = " ".join(run("plan", *flags, *SIZES.split(), "--html", page).stdout.split())  # a terminal breaks lines
    assert "activations of about 38.1 GiB a rank" in said
    assert "x the memory for activations, about " in said
    assert "0.5x, about 19.0 GiB" in said
    assert "activations of about 38.1 GiB a rank" in page.read_text()
    assert "GiB)" in page.read_text()


def _without_times(report: dict[str, Any]) -> dict[str, Any]:
    figures = report["schedulers"]["first_fit"]
    return {name: figure for name, figure in figures.items() if name != "plan_ms"}


def test_parallel_ranks_and_recomputation_keep_less(lengths_file: Path) -> None:
    def size(*more: object) -> int:
        flags = ["--lengths", lengths_file, "--max-seqlen-per-dp-cp-rank", 8192, *SIZES.split(), *more]
        return planned(*flags)["activation_bytes"]

    whole = size()
    assert size("--tp", 8, "--sequence-parallel") == whole // 8
    assert whole // 8 < size("--tp", 8) < whole
    assert size("--recompute-granularity", "full") < size("--recompute-granularity", "selective") < whole
    assert size("--cp", 2) == whole, "the tokens are a rank's"


def test_a_model_without_its_sizes_is_refused(lengths_file: Path) -> None:
    flags = ["--lengths", lengths_file, "--max-seqlen-per-dp-cp-rank", 128]
    said = refused(*flags, "--num-layers", 2, "--swiglu")
    assert "without --hidden-size, --num-attention-heads: give all three, or none" in said
    sizes = ["--num-layers", 2, "--hidden-size", 8, "--num-attention-heads", 2]
    assert "recompute is 'some'" in refused(*flags, *sizes, "--recompute-granularity", "some")
    defaults = ModelFlags(
        num_layers=2,
        hidden_size=1024,
        num_attention_heads=16,
        num_query_groups=None,
        kv_channels=None,
        ffn_hidden_size=None,
        swiglu=True,
        padded_vocab_size=None,
        recompute_granularity=None,
    ).memory()
    assert defaults is not None
    shape = defaults.shape
    assert (shape.head_dim, shape.groups, shape.ffn, shape.vocabulary) == (64, 16, 2688, 0), "as Megatron's"
