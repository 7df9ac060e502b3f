"""What this version of Transformer Engine takes our parameters for, and what of it is refused before a run begins."""

import contextlib
import functools
import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_packing.errors import ConfigError
from megatron_packing.mcore import te_versions
from megatron_packing.mcore.te_versions import CP_COMM_TYPES, SAME_OBJECT
from megatron_packing.thd import PackedBatch, build_pack
from tests.runs.harness import RECORDED_SCRIPT, Runner
from tests.runs.test_equals_unpacked import PACKED
from tests.runs.toy_model import hooked, random_samples, toy_gpt

VERSION = te_versions.installed() or "0.0"


def test_these_tests_run_with_a_version_that_is_called_tested() -> None:
    assert VERSION in te_versions.TESTED


def test_it_concludes_that_nothing_lies_between_samples_even_where_it_has_to_guess(runner: Runner) -> None:
    runner.call(_guesses)


def _guesses() -> None:
    aligned, padded = (build_pack(random_samples(lengths), alignment=4) for lengths in ([8, 4], [7, 2]))
    for batch in (aligned, padded):
        assert _conclusion(batch) is False
        assert _conclusion(batch, pad_between_seqs=None) is False
    # The reason for one object: equal boundaries in two of them are padding to it, from 2.18 on.
    copied = {"pad_between_seqs": None, "cu_seqlens_q": aligned.cu_seqlens.clone()}
    assert _conclusion(aligned, **copied) is SAME_OBJECT.is_in(VERSION)
    # The guess sees padding where real boundaries say so, so that it is a guess about something.
    assert _conclusion(padded, pad_between_seqs=None, cu_seqlens_q=padded.cu_seqlens) is True


def _conclusion(batch: PackedBatch, **wrong: object) -> bool:
    """What its choice of a kernel is told about padding, in a call with our parameters but for these."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from transformer_engine.pytorch.attention.dot_product_attention import utils as dpa_utils

    from megatron_packing.mcore.params import to_packed_seq_params

    told: list[bool] = []

    def note(params: object) -> None:
        told.append(params.pad_between_seqs)
        raise InterruptedError

    core = next(
        module
        for module in toy_gpt(core_attention=TEDotProductAttention).modules()
        if isinstance(module, TEDotProductAttention)
    )
    query, key = torch.zeros(batch.num_rows, 4, 8), torch.zeros(batch.num_rows, 2, 8)
    packed = replace(to_packed_seq_params(batch), **wrong)
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(InterruptedError):
        patch.setattr(dpa_utils, "get_attention_backend", note)
        core(query, key, key, None, AttnMaskType.causal, packed_seq_params=packed)
    (flag,) = told
    return flag


@pytest.mark.parametrize("version", ["1.9.0", "2.1.0"])
def test_a_version_that_is_too_old_ends_the_run_at_start_up(version: str, runner: Runner, chats: Path) -> None:
    runner.call(functools.partial(_launch_with, version, chats))


def _launch_with(version: str, data: Path) -> None:
    from megatron_packing import launch

    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
        patch.setattr(te_versions, "installed", lambda: version)
        flags = f"{PACKED} --packing-attention te --num-layers 2 --seq-length 64 --data-path {data}"
        with pytest.raises(SystemExit) as leaving:
            launch.main(["--device", "cpu", str(RECORDED_SCRIPT), *flags.split()])
    assert leaving.value.code == 2
    assert f"error: Transformer Engine {version}: packing needs" in said.getvalue()


def test_a_users_own_spec_is_held_to_the_same_versions(runner: Runner) -> None:
    runner.call(_own_spec_on_an_old_version)


def _own_spec_on_an_old_version() -> None:
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    model = toy_gpt(core_attention=TEDotProductAttention)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(te_versions, "installed", lambda: "2.1.0")
        with pytest.raises(ConfigError, match=r"Transformer Engine 2\.1\.0: packing needs 2\.2"):
            hooked(model)


LACKING = {
    f"--cp-comm-type {kind}": f"--cp-comm-type {kind} with Transformer Engine {VERSION}: packed samples need"
    for kind, known in CP_COMM_TYPES.items()
    if not known.is_in(VERSION)
}
NEVER = {"--window-size 7,0": "--window-size with --cp-comm-type p2p: Transformer Engine has no sliding window"}


@pytest.mark.parametrize("flags", [*LACKING, *NEVER])
def test_what_it_cannot_do_under_context_parallelism_is_refused_by_name(
    flags: str, runner: Runner, chats: Path
) -> None:
    shared = f"{PACKED} --packing-attention te --bf16 --context-parallel-size 2"
    run = runner.attempt(shared, flags, data=chats, ranks=2)
    assert run.exit_codes == (2, 2)
    for log in run.logs:
        assert f"error: {(LACKING | NEVER)[flags]}" in log
