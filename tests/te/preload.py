"""As tests/runs/preload.py, with Transformer Engine's Python in memory."""

import os
import sys

from megatron_packing.mcore import cpu_runtime

cpu_runtime.install()

from tests.te import standin  # noqa: E402

standin.install()
# Its optimizers and multi-tensor kernels are compiled; without them Megatron takes torch's, as the other tests do.
sys.modules["transformer_engine.pytorch.optimizers"] = None  # type: ignore[assignment]
os.environ["NVTE_MASKED_SOFTMAX_FUSION"] = "0"

import tests.runs.preload  # noqa: E402, F401, I001  before Megatron
from megatron.core.transformer import transformer_block  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402
from megatron.core.transformer.torch_norm import WrappedTorchNorm  # noqa: E402

transformer_block.LayerNormImpl = WrappedTorchNorm  # of the last norm, else Transformer Engine's, which is compiled
moe_utils.te_general_gemm = None  # of the router, likewise; then torch's
