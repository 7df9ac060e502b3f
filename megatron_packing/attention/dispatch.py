"""Which kernel computes our attention here, and why? Decided by device, type and what is installed.

    sdpa     one SDPA call a sample (`core.packed_attention`): everywhere, with everything
    varlen   `torch.nn.attention.varlen`, one call a pack: CUDA, half precision, no dropout
    flash    FlashAttention 2 where it is installed, one call a pack: CUDA, half precision, dropout too

The two that take boundaries run a pack in one launch and never wait for the device; SDPA asks it for the lengths.
Decided once for each kind of input, at no cost afterwards.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_packing.errors import ConfigError, MissingDependency

KERNELS = ("auto", "sdpa", "varlen", "flash")
"""What may be asked for; `auto` takes the first of varlen, flash and sdpa that can be had."""

_NEEDED = {
    "varlen": ("cu_seq_q", "cu_seq_k", "max_q", "max_k", "scale", "window_size", "enable_gqa"),
    "flash": (
        *("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
        *("dropout_p", "softmax_scale", "causal", "deterministic"),
    ),
}
"""Parameters that a kernel's function must have; early versions of both lacked some."""
_PLACES = {"varlen": ("torch.nn.attention.varlen", "varlen_attn"), "flash": ("flash_attn", "flash_attn_varlen_func")}
_HALF = (torch.bfloat16, torch.float16)
_LARGEST_HEAD = 256
"""Of FlashAttention 2, which both kernels are; heads must also be a multiple of 8."""
_LEAST_CAPABILITY = (8, 0)
"""Ampere, FlashAttention 2's oldest device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel and the reason for it."""

    name: str
    """sdpa, varlen or flash."""
    why: str

    @property
    def takes_boundaries(self) -> bool:
        """Whether one call takes the whole pack; otherwise there is one for each sample."""
        return self.name != "sdpa"


def choose_kernel(q_TNH: Tensor, *, wanted: str = "auto", dropout: float = 0.0, cp_size: int = 1) -> Kernel:
    """The kernel for queries like `q_TNH`.

    Args:
        q_TNH: [T, N, H]; device, type and H count.
        wanted: one of `KERNELS`.
        dropout: probability of dropping an attention weight.
        cp_size: ranks that share the pack.

    Raises:
        ConfigError: the kernel that was asked for by name cannot compute this.
        MissingDependency: it is not installed.
    """
    return _choose(wanted, q_TNH.device, q_TNH.dtype, q_TNH.shape[-1], dropout > 0.0, cp_size > 1)


@functools.cache
def _choose(
    wanted: str, device: torch.device, dtype: torch.dtype, head: int, drops: bool, shared_by_ranks: bool
) -> Kernel:
    if wanted == "sdpa":
        return Kernel(name="sdpa", why="asked for")
    barrier = _barrier_of_flash(device, dtype, head, shared_by_ranks)
    passed_over = []
    for name in ("varlen", "flash") if wanted == "auto" else (wanted,):
        cannot = barrier or ("it has no dropout" if name == "varlen" and drops else None)
        why_not = cannot or why_missing(name)
        if why_not is None:
            found = "asked for" if wanted != "auto" else f"{_kind(device)}, {_type(dtype)}"
            return Kernel(name=name, why="; ".join([found, *passed_over]))
        if wanted != "auto":
            raise (ConfigError if cannot else MissingDependency)(
                f"--packing-attention {wanted}: {why_not}. Use auto, which takes a kernel that can compute this."
            )
        passed_over.append(f"{name}: {why_not}")
    return Kernel(name="sdpa", why=barrier or "; ".join(passed_over))


def _barrier_of_flash(device: torch.device, dtype: torch.dtype, head: int, shared_by_ranks: bool) -> str | None:
    """What keeps both kernels from computing this; None: nothing."""
    if device.type != "cuda":
        return f"the device is {device.type}, and the kernels that take boundaries need CUDA"
    if torch.version.hip is not None:
        return "the device is AMD's, on which the kernels that take boundaries are not proven"
    if torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        return f"{_kind(device)} is older than compute capability {_LEAST_CAPABILITY[0]}.{_LEAST_CAPABILITY[1]}"
    if dtype not in _HALF:
        return f"the type is {_type(dtype)}, and the kernels that take boundaries need bfloat16 or float16"
    if head % 8 or head > _LARGEST_HEAD:
        return f"heads have {head} dimensions, which must be a multiple of 8 up to {_LARGEST_HEAD}"
    if shared_by_ranks:
        return "context parallelism, where a rank's rows see keys of all ranks, runs one SDPA call a chunk"
    return None


def _kind(device: torch.device) -> str:
    return str(torch.cuda.get_device_name(device))


def _type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def why_missing(name: str) -> str | None:
    """Why the function of kernel `name` (varlen or flash) cannot be called in this installation; None: it can."""
    module = _PLACES[name][0]
    try:
        function = kernel_function(name)
    except (ImportError, AttributeError) as error:
        return f"{module} cannot be imported ({error})"
    lacking = [word for word in _NEEDED[name] if word not in inspect.signature(function).parameters]
    return f"this version of {module} lacks {', '.join(lacking)}" if lacking else None


def kernel_function(name: str) -> Callable[..., Any]:
    """The function of kernel `name`, imported on use."""
    module, function = _PLACES[name]
    return getattr(importlib.import_module(module), function)  # type: ignore[no-any-return]
