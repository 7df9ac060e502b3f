"""The launcher as a user starts it: a fresh process, torchrun, a config file, and Megatron-LM's own script."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs.harness import MODEL, ROOT, TOKENIZER, TRAINING, Runner
from tests.runs.test_equals_unpacked import PACKED, assert_same_training, later_wins
from tests.runs.test_layouts import LAYOUTS, Layout, unpacked_run

pytestmark = pytest.mark.run

SCRIPT = "examples/pretrain_gpt.py"


def _python(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**inherited, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=200,
    )


def _losses(output: str) -> list[float]:
    return [float(x) for x in re.findall(r"lm loss: (\S+)", output)]


def test_torchrun_with_a_config_file_equals_the_same_flags(runner: Runner, chats: Path, tmp_path: Path) -> None:
    """Two ranks; the file says 9 iterations, the command line 4, and the command line wins."""
    words = [*MODEL.split(), *TRAINING.split(), *TOKENIZER.split(), *PACKED.split()]
    flags: dict[str, object] = {}
    for word in words:
        if word.startswith("--"):
            name = word[2:]
            flags[name] = True
        else:
            flags[name] = word
    config = tmp_path / "flags.yaml"
    config.write_text(json.dumps({**flags, "train-iters": 9, "split": "100,0,0"}))  # JSON is YAML
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint"]
    launch = ["localhost:0", "-m", "megatron_packing.launch", "--device", "cpu", "--config", str(config), SCRIPT]
    finished = _python(*torchrun, *launch, "--data-path", str(chats), "--train-iters", "4")
    assert finished.returncode == 0, finished.stderr[-3000:]
    in_harness = runner.train(PACKED, "--train-iters 4", data=chats, ranks=2)
    printed = _losses(finished.stdout)
    assert len(printed) == len(in_harness.losses) == 4
    # Megatron's second line shows the mean of the first two iterations.
    assert [printed[0], *printed[2:]] == pytest.approx([in_harness.losses[0], *in_harness.losses[2:]], rel=1e-6)
    assert "on CPU, added: --distributed-backend gloo" in finished.stdout


def test_of_two_config_files_the_later_one_wins(runner: Runner, tmp_path: Path) -> None:
    configs = []
    for name, text in {"model": "num-layers: 2\nseq-length: 64\nseed: 1", "run": "seed: 2\nlr: 3"}.items():
        (tmp_path / name).write_text(text)
        configs += ["--config", str(tmp_path / name)]
    run = runner.dry_run("--device", "cpu", "--dry-run", *configs, str(ROOT / SCRIPT), "--lr", "4", "--num-layers", "8")
    flags = "--seq-length 64 --seed 2 --lr 4 --num-layers 8"
    assert f"dry run of 1 ranks: {ROOT / SCRIPT} {flags} --distributed-backend gloo" in run.log


def test_help_lists_our_flags_in_two_groups() -> None:
    finished = _python("-m", "megatron_packing.launch", "--device", "cpu", SCRIPT, "--help")
    assert finished.returncode == 0, finished.stderr[-2000:]
    title = r"^(?:data for )?sequence packing \(megatron_packing\)"
    data, group = re.findall(rf"{title}:\n(.*?)(?:\n\n|\Z)", finished.stdout, re.S | re.M)
    for flag in ("--use-varlen-dataset", "--packing-overlong", "--packing-dataset"):
        assert flag in data
    assert "--sequence-packing-scheduler" in group
    # Megatron has this one already: ours steps aside.
    assert not re.search(r"^  --max-seqlen-per-dp-cp-rank", group, re.M)
    assert "--max-seqlen-per-dp-cp-rank" in finished.stdout


def test_missing_script_and_failing_run_give_a_code_and_one_line(tmp_path: Path) -> None:
    missing = _python("-m", "megatron_packing.launch", "no_such_script.py")
    assert missing.returncode == 2
    assert "no_such_script.py: no such script" in missing.stderr
    assert "Traceback" not in missing.stderr


@pytest.mark.parametrize("name", ["1 rank", "DP2", "TP2 SP", "PP2", "PP2 VPP2", "EP2", "CP2", "CP2 PP2"])
def test_megatron_lms_own_script(name: str, runner: Runner, chats: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set MEGATRON_LM to a checkout of Megatron-LM at core_r0.19.0; its pretrain_gpt.py is run unmodified."""
    checkout = os.environ.get("MEGATRON_LM")
    if checkout is None:
        pytest.skip("MEGATRON_LM names no checkout of Megatron-LM (branch core_r0.19.0); no registry ships its script")
    script = f"--own-script {Path(checkout) / 'pretrain_gpt.py'}"
    plain = {"1 rank": Layout(flags="", ranks=1), "DP2": Layout(flags="", ranks=2)}
    layout = {**LAYOUTS, **plain}[name]
    packed = runner.train(later_wins(PACKED, layout.flags), script, data=chats, ranks=layout.ranks)
    assert_same_training(packed, unpacked_run(layout, runner, chats, script))
    ours = runner.train(later_wins(PACKED, layout.flags), data=chats, ranks=layout.ranks)
    assert ours.iterations == packed.iterations


def test_example_dataset_of_a_user(runner: Runner, tmp_path: Path) -> None:
    """examples/custom_dataset.py, named as its docstring says: only the back of a card is learned."""
    cards = tmp_path / "cards.jsonl"
    rows = [{"front": f"{i} 1", "back": f"2 {i % 50} 3", "hints": ["9"]} for i in range(48)]
    cards.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = "--packing-dataset custom_dataset:FlashcardDataset --train-iters 6"
    packed = runner.train(flags, "--max-seqlen-per-dp-cp-rank 128", data=cards)
    padded = runner.train(flags, "--varlen-sbhd-validation", data=cards)
    assert [step.targets for step in packed.iterations] == [8 * 4] * 6  # three words and EOS
    assert [step.samples for step in packed.iterations] == [step.samples for step in padded.iterations]
    for name in ("flashcards", "auto"):  # examples/custom_schema.py says the same of a row
        schema = f"--use-varlen-dataset --packing-schema custom_schema:{name} --train-iters 6"
        by_schema = runner.train(schema, "--max-seqlen-per-dp-cp-rank 128", data=cards)
        assert by_schema.iterations == packed.iterations
    cards.write_text('{"front": "1"}\n')
    refused = runner.attempt(flags, "--seed 8", data=cards)
    assert not refused.ok
    assert f"{cards}:1: has the fields ['front']; a card needs front and back." in refused.log


def test_script_that_installs_the_hooks_itself(runner: Runner, chats: Path) -> None:
    """No launcher: the script imports Megatron's functions first, then calls install()."""
    script = f"--own-script {ROOT / 'tests' / 'runs' / 'installing_script.py'}"
    own = runner.train(PACKED, script, data=chats, hooks=False)
    assert own.iterations == runner.train(PACKED, data=chats).iterations
