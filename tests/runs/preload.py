"""Imported once by zygote.py, so that each test run starts in a forked process with Megatron in memory."""

import argparse

from megatron_packing.mcore import cpu_runtime

cpu_runtime.install()
cpu_runtime.patch_megatron()

import megatron.core.tokenizers.text  # noqa: E402  brings transformers, half of a short run's time
import megatron.training.training  # noqa: E402, F401  after the CUDA runtime is stood in for
import orjson  # noqa: E402, F401
import rich.progress  # noqa: E402, F401
import torch  # noqa: E402
from megatron.training.argument_utils import ArgumentGroupFactory  # noqa: E402

import megatron_packing.launch  # noqa: E402
import megatron_packing.mcore.provider  # noqa: E402
import megatron_packing.mcore.step  # noqa: E402, F401
from megatron_packing.schedule import warm_up  # noqa: E402

torch.set_num_threads(1)  # no thread pool may exist before the fork, and results must not depend on cores
for scheduler in ("balanced", "dynamic_cp"):
    warm_up(scheduler)  # numba and the compiled loops, which each rank would load anew


def _read_docstrings_once() -> None:
    """Megatron parses its own source for the help of its flags, twice a run: a tenth of a short run's time."""
    from megatron.training.arguments import add_megatron_arguments

    read, known = ArgumentGroupFactory._get_field_docstrings, {}

    def remembered(self: ArgumentGroupFactory, config_class: type) -> dict[str, str]:
        if config_class not in known:
            known[config_class] = read(self, config_class)
        return dict(known[config_class])

    ArgumentGroupFactory._get_field_docstrings = remembered
    add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


_read_docstrings_once()
