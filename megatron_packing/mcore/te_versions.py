"""What can the Transformer Engine of this or that version do with packed samples, and may a run ask it for that?

Read in its Python of versions 2.9 to 2.20, and in Megatron-Core's `TEDotProductAttention`; the two versions of `TESTED`
run in the tests. Loads neither torch nor Megatron. A version is compared by its first two numbers.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from megatron_packing.errors import ConfigError, MissingDependency

TESTED = ("2.17.1", "2.20.2")
"""Versions that tests/te runs with: 2.18 changed how it is told that nothing is padded."""

INSTALL = "transformer-engine[pytorch]>=2.14"
"""The requirement of our extra `te`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """Something that packed samples need of Transformer Engine."""

    name: str
    since: tuple[int, int]
    """The first version that has it."""
    without: str
    """What happens below that version."""

    def is_in(self, version: str) -> bool:
        """Whether a version such as `2.17.1` has it."""
        return release(version) >= self.since

    @property
    def since_text(self) -> str:
        """`since` as people write it."""
        return ".".join(map(str, self.since))


PADDED_BOUNDARIES = Feature(
    name="padded boundaries",
    since=(1, 10),
    without="Megatron drops the boundaries in rows, so that padding is attended to",
)
PADDING_FLAG = Feature(
    name="padding told by a flag",
    since=(2, 2),
    without="Megatron drops pad_between_seqs, and Transformer Engine guesses whether samples are padded",
)
NEEDED = (PADDED_BOUNDARIES, PADDING_FLAG)
"""Without one of these no packed run starts."""

PADDING_FLASH_3 = Feature(
    name="padding between samples in FlashAttention 3",
    since=(2, 16),
    without="exact padding needs cuDNN's fused attention",
)
SAME_OBJECT = Feature(
    name="no padding told by the identity of the boundaries",
    since=(2, 18),
    without="their values are compared",
)
SINKS = Feature(
    name="attention sinks (--softmax-type)",
    since=(2, 12),
    without="no kernel takes packed samples with them",
)
LARGEST_LOGIT = Feature(
    name="largest attention logit (--log-max-attention-logit)",
    since=(2, 9),
    without="it is not reported",
)

_P2P = PADDING_FLAG.since  # as old as all that we need
CP_COMM_TYPES = {
    kind: Feature(name=f"--cp-comm-type {kind}", since=since, without="it takes no packed samples")
    for kind, since in {"p2p": _P2P, "a2a": (2, 10), "all_gather": (2, 18), "a2a+p2p": (2, 19)}.items()
}
"""How the ranks that share a pack exchange keys and values."""
CP_WITH_WINDOW = ("a2a", "all_gather")
"""Those of them that know a sliding window, in every version so far."""
CP_WITH_SINKS = ("a2a",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a packed run wants of Transformer Engine's attention."""

    cp: int = 1
    """Ranks that share a pack; where that changes, the most of them."""
    group_sizes: tuple[int, ...] = ()
    """Ranks that may share a pack, where that changes from microbatch to microbatch; empty: always `cp`."""
    cp_comm_types: tuple[str, ...] = ("p2p",)
    """Of all layers; without order."""
    hierarchy: tuple[int, ...] = ()
    """Ranks of each level of a2a+p2p, the innermost first."""
    heads: int = 1
    """Query heads of a tensor-parallel rank."""
    groups: int = 1
    """Key and value heads of a tensor-parallel rank."""
    half_precision: bool = True
    """bf16 or fp16."""
    window: bool = False
    """A sliding window."""
    sinks: bool = False
    """A softmax other than the plain one."""
    largest_logit: bool = False
    """Whether its largest logit is reported."""


def asked_of(
    settings: Any, *, cp_comm_types: Sequence[str], query_groups: int | None, group_sizes: Sequence[int] = ()
) -> Asked:
    """What Megatron's arguments, or a model's `TransformerConfig`, ask: both call it the same.

    Args:
        settings: either of them.
        cp_comm_types: of its layers.
        query_groups: key and value heads; None: as many as query heads.
        group_sizes: ranks that may share a pack, where that changes; empty: the context-parallel ranks of `settings`.
    """
    tp = settings.tensor_model_parallel_size
    heads = settings.num_attention_heads or tp
    return Asked(
        cp=max(group_sizes, default=settings.context_parallel_size),
        group_sizes=tuple(group_sizes),
        cp_comm_types=tuple(cp_comm_types),
        hierarchy=tuple(settings.hierarchical_context_parallel_sizes or ()),
        heads=heads // tp,
        groups=max(1, (query_groups or heads) // tp),
        half_precision=bool(settings.bf16 or settings.fp16),
        window=settings.window_size is not None,
        sinks=settings.softmax_type != "vanilla",
        largest_logit=bool(settings.qk_clip or settings.log_max_attention_logit),
    )


def release(version: str) -> tuple[int, int]:
    """First two numbers of a version, such as (2, 17) of `2.17.1+cu12`.

    Raises:
        ConfigError: it does not begin with two numbers.
    """
    found = re.match(r"v?(\d+)\.(\d+)", version)
    if found is None:
        raise ConfigError(f"Transformer Engine {version!r}: not a version. Install '{INSTALL}'.")
    return int(found[1]), int(found[2])


def installed() -> str | None:
    """The version of Transformer Engine that is installed, as its package says; None where there is none."""
    try:
        return metadata.version("transformer-engine")
    except metadata.PackageNotFoundError:
        return None


def check(version: str | None, asked: Asked) -> None:
    """Refuse what this version cannot do with packed samples.

    Args:
        version: as `installed` gives it.
        asked: by the run.

    Raises:
        MissingDependency: there is none.
        ConfigError: it is too old, or a combination that it does not know, by name.
    """
    if version is None:
        raise MissingDependency(
            "--packing-attention te: Transformer Engine is not installed. Install "
            f"'{INSTALL}', or use --transformer-impl local."
        )
    for feature in NEEDED:
        _need(version, feature)
    if asked.sinks:
        _need(version, SINKS)
    if asked.largest_logit:
        _need(version, LARGEST_LOGIT)
    if asked.cp > 1:
        for kind in sorted(set(asked.cp_comm_types)):
            _check_context_parallel(version, kind, asked)


def _need(version: str, feature: Feature) -> None:
    if not feature.is_in(version):
        raise ConfigError(
            f"Transformer Engine {version}: packing needs {feature.since_text} or newer for {feature.name}; below it "
            f"{feature.without}. Install '{INSTALL}'."
        )


def _check_context_parallel(version: str, kind: str, asked: Asked) -> None:
    if kind not in CP_COMM_TYPES:
        raise ConfigError(f"--cp-comm-type {kind}: unknown; choose one of {', '.join(CP_COMM_TYPES)}.")
    feature = CP_COMM_TYPES[kind]
    if not feature.is_in(version):
        able = ", ".join(other for other, known in CP_COMM_TYPES.items() if known.is_in(version))
        raise ConfigError(
            f"--cp-comm-type {kind} with Transformer Engine {version}: packed samples need {feature.since_text} or "
            f"newer for it. Use one of {able}, or install 'transformer-engine[pytorch]>={feature.since_text}'."
        )
    shared = f"--context-parallel-size {asked.cp}"
    if asked.group_sizes:
        shared = f"--sequence-packing-scheduler dynamic_cp with groups of up to {asked.cp} ranks"
        if kind == "a2a+p2p":
            raise ConfigError(
                f"{shared} and --cp-comm-type {kind}: it exchanges over two levels of groups, of which a pack's group "
                "has one. Use one of the others."
            )
    if not asked.half_precision:
        raise ConfigError(f"{shared} in fp32: Transformer Engine has context parallelism in 16 bits only. Add --bf16.")
    if asked.window and kind not in CP_WITH_WINDOW:
        raise ConfigError(
            f"--window-size with --cp-comm-type {kind}: Transformer Engine has no sliding window under it. Use "
            f"{' or '.join(CP_WITH_WINDOW)}."
        )
    if asked.sinks and kind not in CP_WITH_SINKS:
        raise ConfigError(
            f"--softmax-type with --cp-comm-type {kind}: Transformer Engine knows only the plain softmax under it. Use "
            f"{' or '.join(CP_WITH_SINKS)}."
        )
    _check_heads(kind, asked)


def _check_heads(kind: str, asked: Asked) -> None:
    """All-to-all gives each rank some of the heads."""
    sizes = {"a2a": asked.group_sizes or (asked.cp,), "a2a+p2p": asked.hierarchy[:1]}.get(kind, ())
    for ranks in sizes:
        if asked.heads % ranks or asked.groups % ranks:
            raise ConfigError(
                f"--cp-comm-type {kind}: {asked.heads} query and {asked.groups} key heads of a tensor-parallel rank "
                f"cannot be shared out over {ranks} context-parallel ranks. Use p2p, or fewer of them."
            )
