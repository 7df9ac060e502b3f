"""What is installed here? Asked of package metadata and files; torch is imported only where it may know of a device.

Nothing else is imported: what is broken must be found, not met.
"""

import ast
import re
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from megatron_packing.mcore import te_versions
from megatron_packing.mcore.verdicts import Device, Installed

_EXTENSION = "transformer_engine_torch"
"""Transformer Engine's compiled part for torch: a module beside it, in it, or in its `wheel_lib`."""


def look() -> Installed:
    """What this machine has. Imports torch where it is built for CUDA, 3 to 5 s."""
    cuda = _torch_cuda()
    return Installed(
        torch=version("torch"),
        torch_cuda=cuda,
        devices=_devices() if cuda else (),
        megatron_core=version("megatron-core"),
        transformer_engine=te_versions.installed(),
        engine_extension=_has_engine_extension(),
        flash_attn=version("flash-attn"),
        apex=_apex(),
        apex_is_nvidias=_apex_is_nvidias(),
        extras=_extras(),
    )


def version(distribution: str) -> str | None:
    """The version of an installed distribution."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _folder(package: str) -> Path | None:
    """Where a package lies; it is not imported. None where there is none, or a mere folder of that name."""
    spec = find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def _torch_cuda() -> str | None:
    """CUDA that torch was built for, as its `version.py` says."""
    folder = _folder("torch")
    if folder is None or not (file := folder / "version.py").is_file():
        return None
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.AnnAssign | ast.Assign) and isinstance(node.value, ast.Constant):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            if any(isinstance(target, ast.Name) and target.id == "cuda" for target in targets):
                return str(node.value.value) if node.value.value else None
    return None


def _devices() -> tuple[Device, ...]:
    import torch

    if not torch.cuda.is_available():
        return ()
    numbers = range(torch.cuda.device_count())
    return tuple(
        Device(name=torch.cuda.get_device_name(n), capability=torch.cuda.get_device_capability(n)) for n in numbers
    )


def _has_engine_extension() -> bool:
    if find_spec(_EXTENSION) is not None:
        return True
    folder = _folder("transformer_engine")
    if folder is None:
        return False
    places = (folder.parent, folder, folder / "wheel_lib")
    return any(path.name.startswith(f"{_EXTENSION}.") for place in places if place.is_dir() for path in place.iterdir())


def _apex() -> str | None:
    """The version of whatever is named apex; NVIDIA's may also lie on the path without metadata."""
    return version("apex") or ("of unknown version" if _folder("apex") is not None else None)


def _apex_is_nvidias() -> bool:
    folder = _folder("apex")
    return folder is not None and (folder / "optimizers").is_dir()


def _extras() -> dict[str, dict[str, tuple[str, str | None]]]:
    """Our extras for users, as our own metadata names them -> package -> least version, version found."""
    try:
        wanted = metadata.requires("megatron-packing") or []
    except metadata.PackageNotFoundError:  # a checkout that is not installed
        return {}
    found: dict[str, dict[str, tuple[str, str | None]]] = {}
    for extra, package, least in _requirements(wanted):
        found.setdefault(extra, {})[package] = (least, version(package))
    return {extra: found[extra] for extra in sorted(found) if extra not in _NO_FEATURE}


_NO_FEATURE = ("bench", "dev", "te")
"""Extras that give a run nothing, or what has lines of its own."""


def _requirements(lines: list[str]) -> Iterator[tuple[str, str, str]]:
    """(extra, package, least version) of metadata such as `pyarrow>=17; extra == 'data'`."""
    for line in lines:
        read = re.match(r"([\w.-]+)(?:\[.*\])?.*?>=([\w.]+).*;.*extra == ['\"]([\w-]+)['\"]", line)
        if read:
            yield read[3], read[1], read[2]
