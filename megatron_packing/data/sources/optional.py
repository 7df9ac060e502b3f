"""How is a library loaded that only some kinds of file need? On use, with a clear word where it is missing."""

import importlib
from typing import Any

from megatron_packing.errors import MissingDependency


def needed(module: str, *, extra: str, to: str) -> Any:
    """The module, or MissingDependency that says what to install.

    Args:
        module: its name.
        extra: the extra of this package that brings it.
        to: what for, as in "to read FILE".
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingDependency(
            f"{package} is needed {to} and cannot be imported ({error}). Install it: "
            f"pip install 'megatron-packing[{extra}]'"
        ) from error
