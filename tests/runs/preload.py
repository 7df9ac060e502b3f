"""Imported once by zygote.py, so that each test run starts in a forked process with Megatron in memory."""

from megatron_packing.mcore import cpu_runtime

cpu_runtime.install()
cpu_runtime.patch_megatron()

import megatron.core.tokenizers.text  # noqa: E402  brings transformers, half of a short run's time
import megatron.training.training  # noqa: E402, F401  after the CUDA runtime is stood in for
import torch  # noqa: E402

from megatron_packing.schedule import warm_up  # noqa: E402

torch.set_num_threads(1)  # no thread pool may exist before the fork, and results must not depend on cores
for scheduler in ("balanced", "dynamic_cp"):
    warm_up(scheduler)  # numba and the compiled loops, which each rank would load anew
