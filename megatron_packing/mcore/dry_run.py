"""Would a run with these flags start? Asked of Megatron's own checks, before there are devices, files or other ranks.

Megatron checks in two places: `validate_args`, and the `TransformerConfig` that every layer is built from. Both are the
real ones. Left out is what needs more than flags: devices, data, tokenizer, checkpoints. Cost: milliseconds.
"""

import argparse
import copy
import importlib.util
from typing import NoReturn

_TE_FUSIONS = {"apply_rope_fusion": "RoPE fusion", "moe_permute_fusion": "--moe-permute-fusion"}
"""Kernels that Transformer Engine brings, and without which the `TransformerConfig` refuses the flag."""


def check_model_and_stop(args: argparse.Namespace) -> NoReturn:
    """Build the model's configuration from validated arguments, say what was checked, and end with exit code 0.

    Takes the place of Megatron's `set_global_variables`, which would load the tokenizer and open the log's files.
    """
    from megatron.training.arguments import core_transformer_config_from_args

    unchecked = _switch_off_what_is_not_installed(settings := copy.copy(args))
    core_transformer_config_from_args(settings)
    print("megatron_packing: dry run: every flag is good; not training.", flush=True)
    if unchecked:
        names = ", ".join(unchecked)
        print(f"megatron_packing: dry run: without Transformer Engine here, not checked: {names}", flush=True)
    raise SystemExit(0)


def _switch_off_what_is_not_installed(settings: argparse.Namespace) -> list[str]:
    """Changes `settings`; the names of what was on and cannot be checked here."""
    if settings.transformer_impl == "local" or importlib.util.find_spec("transformer_engine") is not None:
        return []
    given = [name for name in _TE_FUSIONS if getattr(settings, name)]
    for name in given:
        setattr(settings, name, False)
    return [_TE_FUSIONS[name] for name in given]
