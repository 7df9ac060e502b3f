"""`megatron-packing doctor --probe`: what is right holds, and what is wrong is named, whatever is wrong with it."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.runs.harness import Runner

pytestmark = pytest.mark.run

LAYOUTS = ("nothing padded", "padded")
WHATS = ("forward", "gradients", "others' outputs", "others' gradients")


def test_our_attention_holds_in_both_precisions_and_layouts(runner: Runner) -> None:
    runner.call(_ours_holds)


@pytest.mark.parametrize("wrong", ["no boundaries", "late", "scale", "not causal", "backward", "nan", "raises"])
def test_a_wrong_attention_fails_by_name(wrong: str, runner: Runner) -> None:
    runner.call(_CALLS[wrong])


def test_the_command_names_what_fails_and_its_exit_status_says_so(runner: Runner) -> None:
    runner.call(_command_tells_right_from_wrong)


def test_a_megatron_that_cannot_be_imported_is_one_clear_error(runner: Runner) -> None:
    runner.call(_import_fails)


def _ours_holds() -> None:
    from megatron_packing.mcore.probe import LENGTHS, probe

    checks = list(probe("cpu"))
    assert [check.name for check in checks if not check.ok] == []
    expected = [
        f"{what} of ours in {precision}, {layout}"
        for precision in ("fp32", "bf16")
        for layout in LAYOUTS
        for what in WHATS
    ]
    assert [check.name for check in checks] == expected
    assert len(LENGTHS) > 2


def _fails_with(*whats: str, precision: torch.dtype = torch.float32) -> Callable[[Callable[..., Any]], None]:
    """What must fail, in both layouts and nothing besides, for a core attention built by the argument."""

    def check(build: Callable[..., Any]) -> None:
        from megatron_packing.mcore.probe import Candidate, probe

        found = list(probe("cpu", [Candidate(name="wrong", build=build, precisions=(precision,))]))
        names = [check.name for check in found if not check.ok]
        written = {torch.float32: "fp32", torch.bfloat16: "bf16"}[precision]
        assert names == [f"{what} of wrong in {written}, {layout}" for layout in LAYOUTS for what in whats], names

    return check


def _ours() -> Any:
    from megatron_packing.mcore.attention_spec import PackedDotProductAttention

    return PackedDotProductAttention


def _with_boundaries(change: Callable[[torch.Tensor], torch.Tensor]) -> type:
    class Wrong(_ours()):  # type: ignore[misc]
        def forward(self, *args: Any, packed_seq_params: Any, **keywords: Any) -> torch.Tensor:
            wrong = change(packed_seq_params.cu_seqlens_q)
            params = replace(packed_seq_params, cu_seqlens_q=wrong, cu_seqlens_q_padded=wrong)
            return super().forward(*args, packed_seq_params=params, **keywords)

    return Wrong


def _with_output(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> type:
    """`change` is given the output and the values."""

    class Wrong(_ours()):  # type: ignore[misc]
        def forward(self, query: Any, key: Any, value: Any, *args: Any, **keywords: Any) -> torch.Tensor:
            return change(super().forward(query, key, value, *args, **keywords), value)

    return Wrong


def _no_boundaries() -> None:
    for precision in (torch.float32, torch.bfloat16):
        _fails_with(*WHATS, precision=precision)(_with_boundaries(lambda cu: cu[[0, -1]]))


def _late() -> None:
    def one_row_late(cu: torch.Tensor) -> torch.Tensor:
        late = cu.clone()
        late[1:-1] += 1
        return late

    _fails_with(*WHATS)(_with_boundaries(one_row_late))


def _scale() -> None:
    """Every sample is still alone: only the comparison sees it."""

    class Wrong(_ours()):  # type: ignore[misc]
        def __init__(self, *args: Any, **keywords: Any) -> None:
            super().__init__(*args, **keywords)
            self.scale *= 1.001

    _fails_with("forward", "gradients")(Wrong)


def _not_causal() -> None:
    from megatron.core.transformer.enums import AttnMaskType

    class Wrong(_ours()):  # type: ignore[misc]
        def __init__(self, *args: Any, **keywords: Any) -> None:
            super().__init__(*args, **keywords)
            self.attn_mask_type = AttnMaskType.no_mask

        def forward(self, *args: Any, attn_mask_type: Any = None, **keywords: Any) -> torch.Tensor:
            return super().forward(*args, **keywords)

    _fails_with("forward", "gradients")(Wrong)


def _backward() -> None:
    """Outputs are right to the bit; gradients reach every sample's values."""
    leak = _with_output(lambda out, value: out + 1e-3 * (value.sum() - value.sum().detach()))
    _fails_with("gradients", "others' gradients")(leak)


def _nan() -> None:
    _fails_with(*WHATS)(_with_output(lambda out, value: out * float("nan")))


def _raises() -> None:
    def no_kernel(out: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel for this device")

    _fails_with("runs")(_with_output(no_kernel))


_CALLS = {
    "no boundaries": _no_boundaries,
    "late": _late,
    "scale": _scale,
    "not causal": _not_causal,
    "backward": _backward,
    "nan": _nan,
    "raises": _raises,
}


def _command_tells_right_from_wrong() -> None:
    from typer.testing import CliRunner

    from megatron_packing.cli import doctor
    from megatron_packing.cli.main import app
    from megatron_packing.mcore import probe
    from megatron_packing.mcore.verdicts import Installed

    doctor.look = lambda: Installed(torch="2.14.1", megatron_core="0.19.2", apex="0.9.10.dev0")
    usual = probe.candidates("cpu")
    right = CliRunner().invoke(app, ["doctor", "--probe", "--json"])
    assert right.exit_code == 0, right.output
    document = json.loads(right.stdout)
    assert (document["probe"]["device"], document["probe"]["passed"], document["probe"]["failed"]) == ("cpu", True, [])
    assert len(document["probe"]["checks"]) == 16
    assert document["features"]["sdpa"]["available"] is True
    assert "problem: apex 0.9.10.dev0 is not NVIDIA's Apex" in right.stderr

    wrong = _with_output(lambda out, value: out + 1e-3 * (value.sum() - value.sum().detach()))
    probe.candidates = lambda device: [*usual, probe.Candidate(name="new", build=wrong, precisions=(torch.float32,))]
    for words in (["--json"], []):
        failed = CliRunner().invoke(app, ["doctor", "--probe", *words])
        assert failed.exit_code == 1
        said = [line for line in failed.stderr.splitlines() if "probe failed: " in line]
        assert [line.split("probe failed: ")[1].split(":")[0] for line in said] == [
            f"{what} of new in fp32, {layout}" for layout in LAYOUTS for what in ("gradients", "others' gradients")
        ]
    assert "FAILS" in failed.stdout
    assert "holds" in failed.stdout


def _import_fails() -> None:
    import sys

    from megatron_packing.errors import MissingDependency
    from megatron_packing.mcore.probe import probe

    sys.modules["megatron.core.models.gpt"] = None  # type: ignore[assignment]
    with pytest.raises(MissingDependency, match=r"megatron.core cannot be imported here: ModuleNotFoundError: .*gpt"):
        next(probe("cpu"))
