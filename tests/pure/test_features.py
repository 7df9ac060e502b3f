"""What is said of machines that are made up: a new Transformer Engine and an old one, none, a CPU, a wrong apex."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_packing.cli import installed as installed_here
from megatron_packing.mcore import te_versions
from megatron_packing.mcore.features import FEATURES, refusal, table
from megatron_packing.mcore.verdicts import Device, Installed, Verdict, problems, release, verdicts

ROOT = Path(__file__).parents[2]
PROVEN = (0, 19)

HOPPER = Device(name="H100", capability=(9, 0))
BLACKWELL = Device(name="B200", capability=(10, 0))
CLUSTER = Installed(
    torch="2.14.1+cu130",
    torch_cuda="13.0",
    devices=(HOPPER, HOPPER),
    megatron_core="0.19.2",
    transformer_engine="2.20.2",
    flash_attn="2.8.3",
    apex="0.1",
    apex_is_nvidias=True,
)
LAPTOP = Installed(torch="2.14.1", megatron_core="0.19.2")

ALLOWED = [feature for feature in FEATURES if refusal(feature) is None]


def verdict(name: str, machine: Installed) -> Verdict:
    return verdicts(machine)[name]


def test_a_cluster_can_do_all_that_is_not_refused() -> None:
    newest = replace(CLUSTER, devices=(BLACKWELL,))
    assert {name: one.why for name, one in verdicts(newest).items() if not one.available} == {
        feature.name: refusal(feature) for feature in FEATURES if refusal(feature) is not None
    }
    assert len(ALLOWED) > 12


@pytest.mark.parametrize(
    ("version", "can", "cannot"),
    [
        ("2.20.2", ["cp_a2a+p2p", "cp_all_gather", "cp_a2a", "cp_p2p", "te_attention", "sinks"], []),
        ("2.19.0", ["cp_a2a+p2p"], []),
        ("2.18.0.dev0+abc", ["cp_all_gather"], ["cp_a2a+p2p"]),
        ("2.17.1", ["cp_a2a", "cp_p2p", "te_attention"], ["cp_all_gather", "cp_a2a+p2p"]),
        ("2.9.0", ["cp_p2p", "te_attention", "fused_rope", "largest_logit"], ["cp_a2a", "cp_all_gather", "sinks"]),
        ("2.1.0", [], ["te_attention", "cp_p2p", "sliding_window", "fused_rope", "moe_grouped_gemm"]),
    ],
)
def test_each_version_of_transformer_engine_can_what_it_can(version: str, can: list[str], cannot: list[str]) -> None:
    found = verdicts(replace(CLUSTER, transformer_engine=version))
    for name in can:
        assert found[name].available, name
        assert f"Transformer Engine {version}" in found[name].why
    for name in cannot:
        assert not found[name].available, name
        assert f"Transformer Engine {version} is too old; it needs " in found[name].why


def test_without_transformer_engine_ours_remains() -> None:
    found = verdicts(replace(CLUSTER, transformer_engine=None))
    assert found["sdpa"].available
    assert found["cp_ours"].available
    for feature in ALLOWED:
        if feature.transformer_engine is not None:
            assert found[feature.name].why.startswith("Transformer Engine is not installed; it needs 2.")


def test_transformer_engine_without_its_compiled_part_is_found_out() -> None:
    bare = replace(CLUSTER, engine_extension=False)
    assert not verdict("te_attention", bare).available
    assert "without its compiled extension" in verdict("te_attention", bare).why
    assert [verdict("te_attention", bare).why] == problems(bare, PROVEN)


@pytest.mark.parametrize(
    ("machine", "why"),
    [
        (replace(CLUSTER, torch="2.14.1+cpu", torch_cuda=None, devices=()), "torch 2.14.1+cpu is built without CUDA."),
        (replace(CLUSTER, devices=()), "torch finds no CUDA device."),
    ],
    ids=["CPU-only torch", "no device"],
)
def test_without_a_device_only_what_needs_none(machine: Installed, why: str) -> None:
    found = verdicts(machine)
    for feature in ALLOWED:
        assert found[feature.name].available == (not feature.needs_device), feature.name
        if feature.needs_device:
            assert found[feature.name].why == why
    assert found["sdpa"].available


def test_a_laptop_has_our_attention_and_no_problems() -> None:
    assert verdict("sdpa", LAPTOP).why.startswith("torch 2.14.1; any device")
    assert problems(LAPTOP, PROVEN) == []
    assert problems(CLUSTER, PROVEN) == []


def test_the_wrong_apex_is_named() -> None:
    wrong = replace(CLUSTER, apex="0.9.10.dev0", apex_is_nvidias=False)
    assert not verdict("apex", wrong).available
    assert "apex 0.9.10.dev0 is not NVIDIA's Apex" in verdict("apex", wrong).why
    assert "pip uninstall apex" in verdict("apex", wrong).why
    assert problems(wrong, PROVEN) == [verdict("apex", wrong).why]
    assert verdict("apex", CLUSTER) == Verdict(
        available=True, why="NVIDIA's Apex 0.1; fused optimizer and norms where Transformer Engine brings none"
    )
    assert "is not installed" in verdict("apex", LAPTOP).why


@pytest.mark.parametrize(("megatron", "wrong"), [("0.19.0", False), ("0.19.2", False), ("0.20.0", True), ("1.0", True)])
def test_another_megatron_is_a_problem(megatron: str, wrong: bool) -> None:
    said = problems(replace(LAPTOP, megatron_core=megatron), PROVEN)
    assert [f"megatron-core {megatron}: packing is proven on 0.19 only" in each for each in said] == [True] * wrong


def test_devices_and_cuda_of_a_feature(monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8's needs, were it not refused: of every device, and of what torch is built for."""
    from megatron_packing.mcore import verdicts as module

    monkeypatch.setattr(module, "refusal", lambda feature: None)
    ada, gaming = Device(name="L40", capability=(8, 9)), Device(name="RTX", capability=(12, 0))
    assert verdict("fp8", replace(CLUSTER, devices=(ada,))).available
    assert verdict("fp8", replace(CLUSTER, devices=(ada, Device(name="A100", capability=(8, 0))))).why == (
        "A100 has compute capability 8.0; it needs 8.9 or more."
    )
    assert verdict("fp8_blockwise", CLUSTER).available
    assert verdict("fp8_blockwise", replace(CLUSTER, torch_cuda="12.8")).why == (
        "torch is built for CUDA 12.8; it needs 12.9 or newer."
    )
    assert verdict("mxfp8", replace(CLUSTER, devices=(BLACKWELL,))).available
    assert verdict("mxfp8", replace(CLUSTER, devices=(gaming,))).why == (
        "RTX has compute capability 12.0; it needs one below 12.0."
    )


def test_an_extra_says_which_package_it_lacks() -> None:
    machine = replace(LAPTOP, extras={"data": {"pyarrow": ("17", "20.0"), "zstandard": ("0.22", "0.21.0")}})
    assert verdict("extra data", machine).why == (
        "zstandard 0.21.0 is too old; it needs 0.22 or newer. pip install 'megatron-packing[data]'"
    )
    machine = replace(LAPTOP, extras={"data": {"pyarrow": ("17", "20.0"), "zstandard": ("0.22", None)}})
    assert verdict("extra data", machine).why.startswith("zstandard is not installed")
    machine = replace(LAPTOP, extras={"data": {"pyarrow": ("17", "17.0.0")}})
    assert verdict("extra data", machine) == Verdict(available=True, why="pyarrow 17.0.0")


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("2.14.1+cu130", (2, 14, 1)), ("2.10.0", (2, 10)), ("2.18.0.dev0", (2, 18)), ("main", ()), ("10.0", (10,))],
)
def test_numbers_of_a_version(version: str, numbers: tuple[int, ...]) -> None:
    assert release(version) == numbers


def test_the_readme_holds_the_table() -> None:
    assert table() in (ROOT / "README.md").read_text(encoding="utf-8"), f"README.md needs this table:\n{table()}"


def test_every_context_parallel_kind_of_transformer_engine_has_a_line() -> None:
    by_name = {feature.name: feature for feature in FEATURES}
    assert len(by_name) == len(FEATURES)
    for kind, known in te_versions.CP_COMM_TYPES.items():
        assert by_name[f"cp_{kind}"].transformer_engine == known.since_text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mtp", ["--mtp-num-layers 1", "sample to sample"]),
        ("hybrid", ["--hybrid-layer-pattern", "carry state across samples"]),
        ("linear_attention", ["--experimental-attention-variant gated_delta_net", "carry state across samples"]),
        ("mla", ["--multi-latent-attention"]),
        ("moe_sinkhorn", ["--moe-router-load-balancing-type sinkhorn", "padding included"]),
        ("moe_dispatchers", ["--moe-token-dispatcher-type allgather"]),
    ],
)
def test_what_runs_refuse_is_refused_in_the_same_words(name: str, words: list[str]) -> None:
    """Also on the best of machines."""
    said = verdict(name, replace(CLUSTER, devices=(BLACKWELL,)))
    assert not said.available
    for word in words:
        assert word in said.why


# --- what is found on a disk ----------------------------------------------------------------------


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages that comes before the real ones."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(installed_here, "_devices", lambda: ())
    return tmp_path


def install(site: Path, name: str, version: str, *files: str) -> None:
    """A package that must not be imported."""
    metadata = site / f"{name}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    for file in (f"{name}/__init__.py", *files):
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).write_text("raise RuntimeError('imported')\n")
    importlib.invalidate_caches()


def test_apex_is_told_by_its_files_and_never_imported(site: Path) -> None:
    install(site, "apex", "0.9.10.dev0", "apex/lib/libapex.py", "apex/views.py")
    found = installed_here.look()
    assert (found.apex, found.apex_is_nvidias) == ("0.9.10.dev0", False)
    assert "apex" not in sys.modules
    (site / "apex" / "optimizers").mkdir()
    assert installed_here.look().apex_is_nvidias


def test_transformer_engine_s_compiled_part_is_looked_for_where_it_may_lie(site: Path) -> None:
    install(site, "transformer_engine", "2.20.2", "transformer_engine/pytorch/__init__.py")
    found = installed_here.look()
    assert (found.transformer_engine, found.engine_extension) == ("2.20.2", False)
    library = "transformer_engine_torch.cpython-312-x86_64-linux-gnu.so"
    for folder in ("", "transformer_engine", "transformer_engine/wheel_lib"):
        (site / folder).mkdir(exist_ok=True)
        (site / folder / library).touch()
        importlib.invalidate_caches()
        assert installed_here.look().engine_extension, folder
        (site / folder / library).unlink()
        importlib.invalidate_caches()
        assert not installed_here.look().engine_extension, folder


@pytest.mark.parametrize(
    ("text", "cuda"), [("cuda: Optional[str] = '13.0'", "13.0"), ("cuda = None", None), ("hip = '6'", None)]
)
def test_what_torch_is_built_for_is_read_and_not_imported(text: str, cuda: str | None, site: Path) -> None:
    install(site, "torch", "2.14.1", "torch/version.py")
    (site / "torch" / "version.py").write_text(f"from typing import Optional\n__version__ = '2.14.1'\n{text}\n")
    # Another test may have imported the real one, of which `find_spec` would then speak.
    loaded = sys.modules.pop("torch", None)
    try:
        found = installed_here.look()
    finally:
        if loaded is not None:
            sys.modules["torch"] = loaded
    assert (found.torch, found.torch_cuda) == ("2.14.1", cuda)


def test_extras_are_those_of_our_own_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [
        "numpy>=2",
        "pyarrow>=17; extra == 'data'",
        'zstandard>=0.22; extra == "data"',
        "pytest>=8.3; extra == 'dev'",
        "transformer-engine[pytorch]>=2.14; extra == 'te'",
        "nothing-of-that-name>=1; python_version > '3' and extra == 'lp'",
    ]
    monkeypatch.setattr(installed_here.metadata, "requires", lambda name: wanted)
    monkeypatch.setattr(installed_here, "_devices", lambda: ())
    found = installed_here.look().extras
    assert {extra: {name: least for name, (least, _) in packages.items()} for extra, packages in found.items()} == {
        "data": {"pyarrow": "17", "zstandard": "0.22"},
        "lp": {"nothing-of-that-name": "1"},
    }
    assert found["lp"]["nothing-of-that-name"][1] is None
