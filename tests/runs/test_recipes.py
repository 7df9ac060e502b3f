"""examples/sft and configs: each recipe prints what it would start, and the real parsers and checks take all its flags.

The scripts run with a stand-in for Python that notes what it was given; that is then run in a process which has
Megatron in memory. One script is run as a user runs it.
"""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.runs.harness import ROOT, Run, Runner

pytestmark = pytest.mark.run

FOLDER = ROOT / "examples" / "sft"
RECIPES = sorted(path.name for path in FOLDER.glob("*_*.sh"))
NODES = [
    pytest.param(name, nodes, id=f"{name}-{nodes}") for name in RECIPES for nodes in ([2, 4], [1])["1node" in name]
]
TP_AND_CP = ("--tensor-model-parallel-size", "--context-parallel-size")


@dataclass(frozen=True, kw_only=True)
class Started:
    """What a script gave to Python."""

    words: list[str]
    environment: dict[str, str]
    printed: str

    @property
    def flags(self) -> list[str]:
        return self.words[self.words.index("megatron_packing.launch") + 1 :]

    @property
    def run_environment(self) -> dict[str, str]:
        return {name: self.environment[name] for name in WATCHED if name in self.environment}


WATCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "CUDA_DEVICE_MAX_CONNECTIONS")


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `python`, which notes its words and environment, and with Slurm's `scontrol` and `srun`."""
    folder = tmp_path_factory.mktemp("bin")
    noted = f"{sys.executable} -S -c 'import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))'"
    programs = {
        "python": f'{noted} "$@"',
        "srun": f'{noted} srun "$@"',
        "scontrol": '[ "$*" = "show hostnames gpu[3-6]" ] && printf "gpu3\\ngpu4\\ngpu5\\ngpu6\\n"',
    }
    for name, body in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    return folder


def start(stand_in: Path, recipe: str, *flags: str, **environment: str) -> Started:
    kept = {name: value for name, value in os.environ.items() if name not in WATCHED and "SLURM" not in name}
    finished = subprocess.run(
        ["bash", str(FOLDER / recipe), *flags],
        env={**kept, "PATH": f"{stand_in}:{kept['PATH']}", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    *printed, noted = finished.stdout.splitlines()
    words, seen = json.loads(noted)
    return Started(words=words, environment=seen, printed="\n".join(printed))


def check(runner: Runner, started: Started) -> Run:
    return runner.dry_run(*started.flags, **started.run_environment)


def test_there_are_recipes_for_one_node_and_for_several() -> None:
    assert len(RECIPES) == 6
    assert len([name for name in RECIPES if "_nodes" in name]) == 3


@pytest.mark.parametrize(("recipe", "nodes"), NODES)
def test_recipe_is_good_for_its_number_of_ranks(recipe: str, nodes: int, stand_in: Path, runner: Runner) -> None:
    started = start(stand_in, recipe, "--dry-run", NNODES=str(nodes))
    assert started.environment["WORLD_SIZE"] == str(8 * nodes)
    run = check(runner, started)
    assert run.ok, run.log[-3000:]
    assert "dry run: every flag is good" in run.log
    assert f"dry run of {8 * nodes} ranks: {ROOT / 'examples' / 'pretrain_gpt.py'} --num-layers" in run.log
    assert f"using world size: {8 * nodes}, data-parallel size:" in run.log
    assert ("CUDA_DEVICE_MAX_CONNECTIONS" in started.environment) == bool({*TP_AND_CP} & {*started.flags})


@pytest.mark.parametrize(("recipe", "nodes"), NODES)
def test_what_is_printed_is_what_is_started(recipe: str, nodes: int, stand_in: Path) -> None:
    environment = {"NNODES": str(nodes), "MASTER_ADDR": "head", "DATA": "a b.jsonl", "TOKENIZER": "t"}
    shown = start(stand_in, recipe, "--dry-run", "--lr", "2e-5", **environment)
    real = start(stand_in, recipe, "--lr", "2e-5", **environment)
    printed = shlex.split(shown.printed)
    variables = [word for word in printed[:1] if "=" in word]
    assert printed[len(variables) :] == ["python", *real.words]
    assert dict(word.split("=") for word in variables) == real.run_environment
    assert real.flags == [word for word in shown.flags if word != "--dry-run"]
    assert real.flags[-2:] == ["--lr", "2e-5"]
    assert "a b.jsonl" in real.flags


def test_every_config_is_in_use(stand_in: Path, runner: Runner) -> None:
    used = {Path(word).name for name in RECIPES for word in start(stand_in, name, "--dry-run").flags if ".yaml" in word}
    assert used | {"tiny_cpu.yaml"} == {path.name for path in (ROOT / "configs").glob("*.yaml")}
    tiny = ["--device", "cpu", "--dry-run", "--config", str(ROOT / "configs" / "tiny_cpu.yaml")]
    run = runner.dry_run(*tiny, str(ROOT / "examples" / "pretrain_gpt.py"), "--tokenizer-type", "NullTokenizer")
    assert "dry run: every flag is good" in run.log


@pytest.mark.parametrize(
    ("recipe", "change", "words"),
    [
        ("llama3_8b_1node.sh", ["--no-such-flag", "1"], "unrecognized arguments: --no-such-flag"),
        ("llama3_8b_1node.sh", ["--lr", "small"], "argument --lr: invalid float value"),
        ("llama3_8b_1node.sh", ["--tensor-model-parallel-size", "3"], "no multiple of TP 3"),
        ("llama3_8b_1node.sh", ["--num-attention-heads", "30"], "hidden_size % args.num_attention_heads"),
        ("llama3_8b_1node.sh", ["--global-batch-size", "30"], "global_batch_size (30) must be divisible"),
        ("llama3_8b_1node.sh", ["--max-seqlen-per-dp-cp-rank", "4096"], "a pack holds 4096 tokens"),
        ("llama3_8b_1node.sh", ["--recompute-modules", "all"], "recompute_modules"),
        ("qwen2.5_7b_nodes.sh", ["--num-layers-per-virtual-pipeline-stage", "5"], "virtual pipeline stage"),
        ("qwen1.5_moe_1node.sh", ["--num-experts", "62"], "Number of experts should be a multiple of expert"),
        ("qwen1.5_moe_1node.sh", ["--moe-token-dispatcher-type", "allgather"], "which only alltoall allows"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_a_wrong_flag_fails(recipe: str, change: Sequence[str], words: str, stand_in: Path, runner: Runner) -> None:
    """Each is found by another check: the parser, Megatron's validation, its model's configuration, ours."""
    run = check(runner, start(stand_in, recipe, "--dry-run", *change))
    assert not run.ok
    assert words in run.log
    assert "every flag is good" not in run.log


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("num-leyers: 32", "unrecognized arguments: --num-leyers 32"),
        ("sequence-parralel: false", "llama3_8b.yaml: switches off --sequence-parralel, which is no flag"),
    ],
)
def test_a_wrong_key_of_a_config_fails(key: str, words: str, stand_in: Path, runner: Runner, tmp_path: Path) -> None:
    started = start(stand_in, "llama3_8b_1node.sh", "--dry-run")
    wrong = tmp_path / "llama3_8b.yaml"
    wrong.write_text((ROOT / "configs" / "llama3_8b.yaml").read_text() + f"{key}\n")
    flags = [str(wrong) if Path(word).name == wrong.name else word for word in started.flags]
    run = runner.dry_run(*flags, **started.run_environment)
    assert not run.ok
    assert words in run.log


def test_the_environment_that_tensor_parallelism_needs_is_checked(stand_in: Path, runner: Runner) -> None:
    started = start(stand_in, "llama3_8b_1node.sh", "--dry-run")
    run = runner.dry_run(*started.flags, RANK="0", WORLD_SIZE="8")
    assert not run.ok
    assert "require setting the environment variable CUDA_DEVICE_MAX_CONNECTIONS to 1" in run.log


def test_as_a_user_runs_it() -> None:
    """In a fresh process, on a machine without GPUs; a wrong flag is the script's exit code."""
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    good, bad = (
        subprocess.Popen(
            ["bash", str(FOLDER / "llama3_8b_1node.sh"), "--dry-run", *flags],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for flags in ([], ["--no-such-flag"])
    )
    printed = good.communicate(timeout=200)[0]
    assert good.returncode == 0, printed[-3000:]
    assert "every flag is good" in printed
    assert "without Transformer Engine here, not checked: RoPE fusion" in printed
    assert "unrecognized arguments: --no-such-flag" in bad.communicate(timeout=200)[0]
    assert bad.returncode == 2


# --- Slurm ------------------------------------------------------------------------------------------------------------

TASK = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_JOB_NODELIST": "gpu[3-6]",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[3-6]",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_NODEID": "2",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "DATA": "d",
    "TOKENIZER": "t",
}


def test_a_task_a_node_starts_torchrun(stand_in: Path) -> None:
    started = start(stand_in, "llama3_8b_nodes.sh", **TASK)
    torchrun = "-m torch.distributed.run --nproc-per-node 8 --nnodes 4 --node-rank 2 --master-addr gpu3"
    expected = f"{torchrun} --master-port 24567 -m megatron_packing.launch"
    assert started.words[: len(expected.split())] == expected.split()


def test_a_task_a_gpu_is_a_rank(stand_in: Path) -> None:
    task = {**TASK, "SLURM_STEP_NUM_TASKS": "32", "SLURM_PROCID": "19", "SLURM_LOCALID": "3"}
    started = start(stand_in, "llama3_8b_nodes.sh", **task)
    assert started.words[:2] == ["-m", "megatron_packing.launch"]
    place = {"RANK": "19", "LOCAL_RANK": "3", "WORLD_SIZE": "32", "MASTER_ADDR": "gpu3", "MASTER_PORT": "24567"}
    assert {name: started.environment[name] for name in place} == place


def test_a_step_of_one_node_needs_no_other(stand_in: Path) -> None:
    task = {**TASK, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NODEID": "0"}
    assert "--standalone" in start(stand_in, "llama3_8b_1node.sh", **task).words


def test_the_job_finds_the_first_node_before_its_tasks_start(stand_in: Path) -> None:
    """Tasks may run in containers without scontrol."""
    job = {name: value for name, value in TASK.items() if "STEP" not in name}
    recipe = str(FOLDER / "qwen2.5_7b_nodes.sh")
    started = start(stand_in, "slurm.sh", recipe, "--lr", "1e-6", **job)
    assert started.words == ["srun", "--kill-on-bad-exit=1", "bash", recipe, "--lr", "1e-6"]
    assert (started.environment["MASTER_ADDR"], started.environment["MASTER_PORT"]) == ("gpu3", "24567")
    shown = start(stand_in, "slurm.sh", recipe, "--dry-run", NNODES="2")
    assert shown.printed.splitlines()[0].split() == ["srun", "--kill-on-bad-exit=1", "bash", recipe, "--dry-run"]
    assert shown.environment["WORLD_SIZE"] == "16"


def test_what_a_recipe_needs_is_named(stand_in: Path) -> None:
    for missing, environment in {"DATA": {}, "TOKENIZER": {"DATA": "d"}}.items():
        with pytest.raises(subprocess.CalledProcessError) as caught:
            start(stand_in, "llama3_8b_1node.sh", **environment)
        assert f"{missing}: " in caught.value.stderr
    with pytest.raises(subprocess.CalledProcessError) as caught:
        start(stand_in, "llama3_8b_nodes.sh", DATA="d", TOKENIZER="t", NNODES="2")
    assert "MASTER_ADDR: the host name of the first of 2 nodes" in caught.value.stderr
