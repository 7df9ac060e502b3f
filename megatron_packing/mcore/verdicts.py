"""What can packing use on this machine, and why not the rest? `features` against what is installed.

Loads neither torch nor Megatron: what is installed is handed in, so that any machine can be asked about.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_packing.mcore.features import FEATURES, Capability, Feature, dotted, refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A CUDA device."""

    name: str
    capability: Capability
    """Compute capability: (9, 0) is Hopper's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """What a machine has. A version is None where the package is missing."""

    torch: str | None = None
    torch_cuda: str | None = None
    """CUDA that torch was built for; None: built without."""
    devices: tuple[Device, ...] = ()
    megatron_core: str | None = None
    transformer_engine: str | None = None
    engine_extension: bool = True
    """Whether Transformer Engine's compiled part for torch is there; its Python can be installed alone."""
    flash_attn: str | None = None
    apex: str | None = None
    apex_is_nvidias: bool = False
    extras: Mapping[str, Mapping[str, tuple[str, str | None]]] = field(default_factory=dict)
    """Extra of ours -> package -> least version that it asks for, version found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a feature can be used, and why, or why not."""

    available: bool
    why: str


def verdicts(installed: Installed) -> dict[str, Verdict]:
    """Every feature by name, then our extras as `extra NAME`: available on such a machine or not, and why."""
    found = {feature.name: _verdict(feature, installed) for feature in FEATURES}
    return found | {f"extra {name}": _extra(name, wanted) for name, wanted in installed.extras.items()}


def titles() -> dict[str, str]:
    """Name of each feature -> what people call it."""
    return {feature.name: feature.title for feature in FEATURES}


def problems(installed: Installed, proven: tuple[int, int]) -> list[str]:
    """What is wrong with what is installed, rather than missing.

    Args:
        installed: what the machine has.
        proven: release of Megatron-Core that packing is proven on.
    """
    said = []
    if installed.apex is not None and not installed.apex_is_nvidias:
        said.append(_wrong_apex(installed.apex))
    if installed.transformer_engine is not None and not installed.engine_extension:
        said.append(_bare_engine(installed.transformer_engine))
    if installed.megatron_core is not None and release(installed.megatron_core)[:2] != proven:
        wanted = ".".join(map(str, proven))
        said.append(f"megatron-core {installed.megatron_core}: packing is proven on {wanted} only, and refuses others.")
    return said


def release(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with, less zeros at their end: "2.14.0+cu130" is (2, 14)."""
    found = re.match(r"\d+(\.\d+)*", version)
    numbers = list(map(int, found[0].split("."))) if found else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _verdict(feature: Feature, installed: Installed) -> Verdict:
    unmet = refusal(feature) or _first_unmet(feature, installed)
    if unmet is not None:
        return Verdict(available=False, why=unmet)
    have = [*_versions_used(feature, installed), *([feature.note] if feature.note else [])]
    return Verdict(available=True, why="; ".join(have) or "needs nothing more")


def _first_unmet(feature: Feature, installed: Installed) -> str | None:
    unmet = [
        _below("torch", installed.torch, feature.torch),
        _engine_unmet(feature, installed),
        _below("flash-attn", installed.flash_attn, feature.flash_attn),
        _apex_unmet(installed) if feature.apex else None,
        _device_unmet(feature, installed) if feature.needs_device else None,
    ]
    return next((why for why in unmet if why is not None), None)


def _below(name: str, found: str | None, least: str | None) -> str | None:
    if least is None:
        return None
    if found is None:
        return f"{name} is not installed; it needs {least} or newer."
    if release(found) < release(least):
        return f"{name} {found} is too old; it needs {least} or newer."
    return None


def _engine_unmet(feature: Feature, installed: Installed) -> str | None:
    if feature.transformer_engine is None:
        return None
    if installed.transformer_engine is not None and not installed.engine_extension:
        return _bare_engine(installed.transformer_engine)
    return _below("Transformer Engine", installed.transformer_engine, feature.transformer_engine)


def _bare_engine(version: str) -> str:
    return (
        f"transformer-engine {version} is here without its compiled extension for torch, so that importing Megatron "
        "fails. Install 'transformer-engine[pytorch]', or uninstall it."
    )


def _apex_unmet(installed: Installed) -> str | None:
    if installed.apex is None:
        return "NVIDIA's Apex is not installed; Megatron does without."
    return None if installed.apex_is_nvidias else _wrong_apex(installed.apex)


def _wrong_apex(version: str) -> str:
    return (
        f"apex {version} is not NVIDIA's Apex but an unrelated web toolkit, which has that name on PyPI. pip uninstall "
        "apex; NVIDIA's is built from github.com/NVIDIA/apex, and is optional."
    )


def _device_unmet(feature: Feature, installed: Installed) -> str | None:
    if installed.torch_cuda is None:
        return f"torch {installed.torch} is built without CUDA." if installed.torch else "torch is not installed."
    if feature.cuda is not None and release(installed.torch_cuda) < release(feature.cuda):
        return f"torch is built for CUDA {installed.torch_cuda}; it needs {feature.cuda} or newer."
    if not installed.devices:
        return "torch finds no CUDA device."
    for device in installed.devices:
        least, below = feature.capability, feature.below_capability
        if least is not None and device.capability < least:
            return (
                f"{device.name} has compute capability {dotted(device.capability)}; it needs {dotted(least)} or more."
            )
        if below is not None and device.capability >= below:
            return (
                f"{device.name} has compute capability {dotted(device.capability)}; it needs one below {dotted(below)}."
            )
    return None


def _versions_used(feature: Feature, installed: Installed) -> Sequence[str]:
    used = {
        "torch": installed.torch if feature.torch else None,
        "Transformer Engine": installed.transformer_engine if feature.transformer_engine else None,
        "flash-attn": installed.flash_attn if feature.flash_attn else None,
        "NVIDIA's Apex": installed.apex if feature.apex else None,
    }
    return [f"{name} {version}" for name, version in used.items() if version]


def _extra(name: str, wanted: Mapping[str, tuple[str, str | None]]) -> Verdict:
    unmet = [_below(package, found, least) for package, (least, found) in wanted.items()]
    first = next((why for why in unmet if why is not None), None)
    if first is not None:
        return Verdict(available=False, why=f"{first} pip install 'megatron-packing[{name}]'")
    return Verdict(available=True, why=", ".join(f"{package} {found}" for package, (_, found) in wanted.items()))
