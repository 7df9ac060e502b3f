"""Which Transformer Engine may do what: from version numbers alone."""

import subprocess
import sys

import pytest

from megatron_packing.errors import ConfigError, MissingDependency
from megatron_packing.mcore import te_versions
from megatron_packing.mcore.te_versions import CP_COMM_TYPES, Asked, check, release

ALL_KINDS = tuple(CP_COMM_TYPES)


def shared(*kinds: str, cp: int = 2, **settings: object) -> Asked:
    return Asked(cp=cp, cp_comm_types=kinds, heads=4, groups=4, **settings)  # type: ignore[arg-type]


def changing(*kinds: str, sizes: tuple[int, ...] = (1, 2, 4), **settings: object) -> Asked:
    return shared(*kinds, cp=max(sizes), group_sizes=sizes, **settings)


@pytest.mark.parametrize("version", te_versions.TESTED)
def test_the_tested_versions_do_what_one_rank_asks(version: str) -> None:
    check(version, Asked(window=True, sinks=True, largest_logit=True, half_precision=False))


@pytest.mark.parametrize(
    ("version", "asked", "message"),
    [
        ("1.9.0.post1", Asked(), "Transformer Engine 1.9.0.post1: packing needs 1.10 or newer for padded boundaries"),
        ("1.10.0", Asked(), "needs 2.2 or newer for padding told by a flag; below it Megatron drops pad_between_seqs"),
        ("2.1.0", Asked(), "needs 2.2 or newer"),
        ("2.11.0", Asked(sinks=True), "needs 2.12 or newer for attention sinks"),
        ("2.8.0", Asked(largest_logit=True), "needs 2.9 or newer for largest attention logit"),
        ("2.9.0", shared("a2a"), "--cp-comm-type a2a with Transformer Engine 2.9.0: packed samples need 2.10 or newer"),
        ("2.17.1", shared("p2p", "all_gather"), "need 2.18 or newer for it. Use one of p2p, a2a, or install"),
        ("2.18.0", shared("a2a+p2p"), "packed samples need 2.19 or newer for it"),
        ("2.20.2", shared("ring"), "--cp-comm-type ring: unknown; choose one of p2p, a2a, all_gather"),
        ("2.20.2", shared("p2p", window=True), "--window-size with --cp-comm-type p2p: .* Use a2a or all_gather"),
        ("2.20.2", shared("a2a+p2p", window=True), "no sliding window under it"),
        ("2.20.2", shared("all_gather", sinks=True), "--softmax-type with --cp-comm-type all_gather: .* Use a2a"),
        ("2.20.2", shared("p2p", half_precision=False), "--context-parallel-size 2 in fp32: .* Add --bf16"),
        ("2.20.2", shared("a2a", cp=8), "4 query and 4 key heads of a tensor-parallel rank .* over 8 context-parallel"),
        ("2.20.2", shared("a2a+p2p", cp=16, hierarchy=(8, 2)), "over 8 context-parallel ranks"),
        ("2.20.2", changing("a2a", sizes=(1, 2, 3)), "4 query and 4 key heads .* over 3 context-parallel ranks"),
        ("2.20.2", changing("a2a", sizes=(3, 4)), "over 3 context-parallel ranks"),
        ("2.17.1", changing("all_gather"), "need 2.18 or newer for it"),
        ("2.20.2", changing("p2p", "a2a+p2p"), "dynamic_cp with groups of up to 4 ranks and --cp-comm-type a2a.p2p: "),
        ("2.20.2", changing("p2p", half_precision=False), "dynamic_cp with groups of up to 4 ranks in fp32: .* --bf16"),
    ],
)
def test_what_a_version_cannot_do_is_refused_by_name(version: str, asked: Asked, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(version, asked)


@pytest.mark.parametrize(
    ("version", "asked"),
    [
        ("2.2.0", Asked(half_precision=False)),
        ("2.2.0", shared("p2p")),
        ("2.10.0", shared("p2p", "a2a")),
        ("2.18.0", shared("all_gather", window=True)),
        ("2.19.0", shared("a2a+p2p", cp=8, hierarchy=(4, 2))),
        ("2.20.2+cu13", shared(*ALL_KINDS)),
        ("2.20.2", changing("p2p", "a2a", "all_gather")),
        ("2.20.2", changing("p2p", sizes=(3, 6))),
        ("2.20.2", changing("a2a+p2p", sizes=(1,), half_precision=False)),  # of no use to a rank alone
        ("3.0.0", shared(*ALL_KINDS)),
        ("2.9.0", Asked(cp_comm_types=("all_gather", "ring"))),  # of no use to a rank alone
    ],
)
def test_what_a_version_can_do_passes(version: str, asked: Asked) -> None:
    check(version, asked)


def test_without_transformer_engine_the_remedy_is_named() -> None:
    with pytest.raises(MissingDependency, match=r"not installed\. Install 'transformer-engine"):
        check(None, Asked())


def test_versions_are_compared_as_numbers() -> None:
    assert release("2.9.0") < release("2.10.0.dev0+abc") < release("10.1")
    with pytest.raises(ConfigError, match="'main': not a version"):
        release("main")


def test_reading_versions_loads_nothing_heavy() -> None:
    code = "import sys, megatron_packing.mcore.te_versions; print(sorted({'torch', 'megatron'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
