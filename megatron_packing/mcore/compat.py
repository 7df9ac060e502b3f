"""Is this a Megatron-Core that our hooks were proven on, and what of it must be mended?"""

import argparse

from megatron_packing.errors import ConfigError, MissingDependency

PROVEN = (0, 19)
"""The release of Megatron-Core."""


def check_version() -> None:
    """Refuse a Megatron-Core whose internals the hooks were never run against.

    Raises:
        MissingDependency: Megatron-Core, or its training loop, is not installed.
        ConfigError: another release than 0.19.
    """
    try:
        import megatron.training  # noqa: F401
        from megatron.core.package_info import MAJOR, MINOR, __version__
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"megatron-core's training loop cannot be imported ({error}). Install megatron-core[training]."
        ) from error
    if (MAJOR, MINOR) != PROVEN:
        raise ConfigError(
            f"megatron-core {__version__}: packing is proven on {PROVEN[0]}.{PROVEN[1]} only. Install "
            f"'megatron-core[training]=={PROVEN[0]}.{PROVEN[1]}.*'."
        )


def mend_help(parser: argparse.ArgumentParser) -> None:
    """Let `--help` print: Megatron-Core 0.19.2 has help texts with a bare percent sign, at which argparse raises."""
    formatter = parser._get_formatter()
    for action in parser._actions:
        try:
            formatter._expand_help(action)
        except (ValueError, TypeError, KeyError):
            action.help = (action.help or "").replace("%", "%%")
