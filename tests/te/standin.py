"""Transformer Engine's own Python, on a machine without a GPU: a stand-in for what it has compiled.

`install()` before anything imports Megatron or Transformer Engine. Everything in Python is then the real thing: its
argument checks, its choice of a kernel, its unfused attention forward and backward, its context parallelism. Of the
compiled extension there are the names, numbers in enumerations, a version of cuDNN, and the few functions below; any
other function raises when it is called. `onnx` and `onnxscript` are stood in for as well: they are large, and serve an
export that no test calls.
"""

import contextlib
import enum
import functools
import importlib
import itertools
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any
from unittest import mock

import torch

from tests.te import kernels

EXTENSION = "transformer_engine_torch"
RELEASE = tuple(int(number) for number in metadata.version("transformer-engine").split(".")[:2])


class DType(enum.IntEnum):
    """Transformer Engine's numbering of data types."""

    kByte = 0
    kInt32 = 2
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


_BACKENDS = {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2}
if RELEASE < (2, 18):
    _BACKENDS["NVTE_F16_max512_seqlen"] = 0
FusedBackend = enum.IntEnum("FusedBackend", _BACKENDS)


class _Growing(type):
    """An enumeration that has every member that is asked for."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        member = cls(len([known for known in vars(cls).values() if isinstance(known, cls)]))
        member.name = name
        setattr(cls, name, member)
        return member


class _Extension(types.ModuleType):
    """Has every name: an enumeration where it is written large, else a function that says that it is missing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _Growing(name, (int,), {}) if name[0].isupper() else _missing(name)
        setattr(self, name, value)
        return value


def _missing(name: str) -> Callable[..., Any]:
    def raise_missing(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{EXTENSION}.{name} is compiled, and nothing stands in for it here")

    return raise_missing


def install() -> None:
    """Put the stand-in where Transformer Engine looks for its extension, and import Transformer Engine."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # asks for none of CUDA's libraries
    extension = _Extension(EXTENSION)
    extension.DType = DType
    extension.NVTE_Fused_Attn_Backend = FusedBackend
    extension.get_cudnn_version = lambda: 92400
    extension.convert_thd_to_bshd, extension.convert_bshd_to_thd = convert_thd_to_bshd, convert_bshd_to_thd
    extension.get_fused_attn_backend = _any_fused_kernel
    for kernel in kernels.EXTENSION:
        setattr(extension, kernel.__name__, kernel)
    sys.modules[EXTENSION] = extension
    for name in ("onnx", "onnxscript"):
        sys.modules[name] = mock.MagicMock(name=name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        import transformer_engine  # does without its torch part, as its extension is no file
    transformer_engine.common.load_framework_extension = lambda framework: None
    for name in [name for name in sys.modules if name.startswith("transformer_engine.pytorch")]:
        del sys.modules[name]
    transformer_engine.pytorch = importlib.import_module("transformer_engine.pytorch")
    # It does `from transformer_engine_torch import *`, which finds only what is there already.
    importlib.import_module("transformer_engine.pytorch.cpp_extensions").__getattr__ = lambda name: getattr(
        extension, name
    )
    _believe_tensors_on_cuda()
    cp = importlib.import_module("transformer_engine.pytorch.attention.dot_product_attention.context_parallel")
    cp.fused_attn_fwd, cp.fused_attn_bwd = kernels.fused_attn_fwd, kernels.fused_attn_bwd
    exchange = cp.flash_attn_p2p_communicate
    cp.flash_attn_p2p_communicate = lambda *args: [_WaitedOnce(work) for work in exchange(*args)]


class _WaitedOnce:
    """A message that may be waited for again, as NCCL's may; gloo would wait for the next one."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
        self._work = None


def _any_fused_kernel(*args: Any, **kwargs: Any) -> Any:
    """cuDNN has a kernel for whatever Python has not ruled out."""
    found = FusedBackend.NVTE_F16_arbitrary_seqlen
    return (found, "") if RELEASE >= (2, 20) else found


def convert_thd_to_bshd(rows: torch.Tensor, cu_seqlens: torch.Tensor, batch: int, longest: int) -> torch.Tensor:
    """[T, N, H] to [batch, longest, N, H]; 0 where a sequence is shorter."""
    padded = rows.new_zeros(batch, longest, *rows.shape[1:])
    for number, (start, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        padded[number, : end - start] = rows[start:end]
    return padded


def convert_bshd_to_thd(padded: torch.Tensor, cu_seqlens: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The inverse, [num_rows, N, H]; 0 in rows that no sequence has."""
    rows = padded.new_zeros(num_rows, *padded.shape[2:])
    for number, (start, end) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        rows[start:end] = padded[number, : end - start]
    return rows


class _OnCuda(torch.overrides.TorchFunctionMode):
    """Tensors say that they are on a CUDA device, as Transformer Engine insists."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func == torch.Tensor.is_cuda.__get__:
            return True
        return func(*args, **(kwargs or {}))


def _believe_tensors_on_cuda() -> None:
    """In its attention's forward only: Megatron asks tensors too, and goes other ways for CUDA."""
    from transformer_engine.pytorch import DotProductAttention

    forward = DotProductAttention.forward

    @functools.wraps(forward)
    def believing(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _OnCuda():
            return forward(self, *args, **kwargs)

    DotProductAttention.forward = believing


class _Fp32IsHalf:
    """torch, where a list of 16-bit types has fp32 in it."""

    float16 = torch.float32

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextlib.contextmanager
def fused_in_fp32() -> Iterator[None]:
    """Under context parallelism it takes its fused kernel in fp32, whose rounding hides nothing, as it does in bf16."""
    from transformer_engine.pytorch.attention.dot_product_attention import backends, utils

    fused = (False, None, True, FusedBackend.NVTE_F16_arbitrary_seqlen, False, [False, True, False])
    choose = utils.get_attention_backend
    with (
        mock.patch.object(utils, "get_attention_backend", lambda it: fused if it.context_parallel else choose(it)),
        mock.patch.object(backends, "torch", _Fp32IsHalf()),
    ):
        yield
