"""How does Megatron's real training loop run on a machine without a GPU?

Megatron-Core says "cuda" everywhere, but almost all of what it does is ordinary torch. This module
stands in for the CUDA runtime, not for Megatron: the loop, the schedules, the optimizers, the
checkpoints and the collectives (gloo) are the real ones. It is what our tests run on and how a user
tries packing on a laptop. Cost: about 2 microseconds a torch call for the device rewriting.

What is emulated, and why
-------------------------
1. *Devices.* Tensors that Megatron asks for on "cuda" are made on the CPU (`_DeviceRewriter`).
   `Tensor.type()` still says `torch.cuda.*`, because Megatron groups gradients by that string.
2. *The CUDA API.* Streams, events, memory statistics and capability queries answer harmlessly. Random
   state calls go to the CPU generator, so that Megatron's RNG tracker forks and restores real state.
3. *Uneven collectives.* NCCL gathers and reduce-scatters parts of different sizes; gloo one part at a time.
4. *Compiled extras that the wheel lacks* (`patch_megatron`): the dataset helpers' Makefile, TE's or
   Apex's FusedAdam, a norm that tolerates sequence parallelism.

Call `install()` before anything imports Megatron, then `patch_megatron()`; `missing_flags(argv)` names
the Megatron flags that a CPU run needs and the user left open.
"""

import collections
import functools
import inspect
import os
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")

# Each entry: the flag as it is added, and every spelling that means the user has decided.
_NEEDED_FLAGS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("--distributed-backend", "gloo"), ("--distributed-backend",)),
    (("--transformer-impl", "local"), ("--transformer-impl",)),
    (("--use-cpu-initialization",), ("--use-cpu-initialization",)),
    (("--no-gradient-accumulation-fusion",), ("--no-gradient-accumulation-fusion",)),
    (("--no-persist-layer-norm",), ("--no-persist-layer-norm",)),
    (("--no-masked-softmax-fusion",), ("--no-masked-softmax-fusion",)),
    (("--no-rope-fusion",), ("--no-rope-fusion",)),
    (("--no-bias-gelu-fusion",), ("--no-bias-gelu-fusion",)),
    (("--no-bias-swiglu-fusion",), ("--no-bias-swiglu-fusion",)),
    (("--no-bias-dropout-fusion",), ("--no-bias-dropout-fusion",)),
)


def missing_flags(argv: Sequence[str]) -> list[str]:
    """Megatron flags that a CPU run needs and that `argv` does not set, ready to be appended."""
    given = {word.split("=", 1)[0] for word in argv}
    return [word for flag, spellings in _NEEDED_FLAGS if not given.intersection(spellings) for word in flag]


@functools.cache  # once a process, however often it is asked for
def install() -> None:
    """Stand in for the CUDA runtime, for the rest of the process. Call before importing Megatron."""
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # nothing to compile for; saves seconds at start
    import torch._dynamo  # noqa: F401  builds its tables from torch's functions, so before they are replaced

    _stub_device_queries()
    _stub_streams_and_memory()
    _route_random_state()
    _take_uneven_parts()
    _DeviceRewriter().__enter__()


def _take_uneven_parts() -> None:
    """Experts under tensor parallelism hold different numbers of tokens, and gloo wants equal parts.

    Each part then travels by itself, as NCCL does it underneath.
    """
    import torch.distributed as dist

    all_gather, reduce_scatter = dist.all_gather, dist.reduce_scatter

    @functools.wraps(all_gather)
    def gather_each(tensor_list, tensor, group=None, async_op=False):  # type: ignore[no-untyped-def]
        if len({part.shape for part in tensor_list}) == 1:
            return all_gather(tensor_list, tensor, group=group, async_op=async_op)
        for rank, part in enumerate(tensor_list):
            if rank == dist.get_rank(group):
                part.copy_(tensor)
            dist.broadcast(part, group=group, group_src=rank)
        return None

    @functools.wraps(reduce_scatter)
    def reduce_each(output, input_list, op=dist.ReduceOp.SUM, group=None, async_op=False):  # type: ignore[no-untyped-def]
        if len({part.shape for part in input_list}) == 1:
            return reduce_scatter(output, input_list, op=op, group=group, async_op=async_op)
        for rank, part in enumerate(input_list):
            whole = part.contiguous().clone()
            dist.reduce(whole, op=op, group=group, group_dst=rank)
            if rank == dist.get_rank(group):
                output.copy_(whole)
        return None

    dist.all_gather, dist.reduce_scatter = gather_each, reduce_each


@functools.cache
def patch_megatron() -> None:
    """Mend what Megatron-Core's wheel cannot do without a GPU. Imports Megatron."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron insists under TP and CP; no device reads it
    _keep_random_state_at_warmup()
    _allow_sequence_parallel_norms()
    _use_fused_adam_contract()
    _split_moe_counts_on_cpu()
    _fork_checkpoint_writers()
    _copy_what_is_saved()


# --- torch.cuda -----------------------------------------------------------------------------------


def _to_cpu(designator: Any) -> Any:
    """A CUDA device in any of torch's spellings becomes the CPU; everything else stays."""
    if isinstance(designator, str) and designator.startswith("cuda"):
        return "cpu"
    if isinstance(designator, torch.device) and designator.type == "cuda":
        return _CPU
    if type(designator) is int:  # a device's number
        return _CPU
    return designator


class _DeviceRewriter(TorchFunctionMode):
    """Sees every torch call and turns CUDA devices into the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("cuda", "pin_memory"):
            return args[0]
        if func is torch.device:
            return func(_to_cpu(args[0])) if args else func(**kwargs)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _to_cpu(kwargs["device"])}
        if name == "to":
            args = args[:1] + tuple(_to_cpu(a) for a in args[1:])
        if name == "type" and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


class _Idle:
    """Stands in for a stream, an event or a device context: everything has already happened."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> "_Idle":
        return self

    def __exit__(self, *exc: object) -> bool:
        return False

    def elapsed_time(self, other: "_Idle") -> float:
        return 0.0

    def query(self) -> bool:
        return True

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)

    def __getattr__(self, name: str) -> Callable[..., "_Idle"]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self  # record_event(), wait_stream(), synchronize(), ...


class _ThisDevice(str):
    """The current device: "cpu" to torch, and 0 where Megatron formats it into "cuda:{}" or counts with it.

    torch suspends the rewriter while it runs a nested backward (recomputation), so that this one must be right by
    itself.
    """

    def __format__(self, spec: str) -> str:
        return "0"

    def __index__(self) -> int:
        return 0

    __int__ = __index__


def _always(value: Any = None) -> Callable[..., Any]:
    """A function of its own for each use: torch keeps tables keyed on function objects."""
    return lambda *args, **kwargs: value


def _stub_device_queries() -> None:
    cuda = torch.cuda
    cuda.is_available, cuda.is_initialized = _always(True), _always(True)
    cuda._lazy_init = _always()
    cuda._lazy_call = lambda callback, **kwargs: callback()
    cuda.device_count = _always(1)  # Megatron skips the set-up of its groups at 0
    cuda.current_device = _always(_ThisDevice("cpu"))
    cuda.set_device = _always()
    cuda.get_device_capability = _always((8, 0))
    cuda.get_device_properties = _always(types.SimpleNamespace(major=8, minor=0, name="cpu"))
    cuda.get_device_name = _always("cpu")
    torch.accelerator.is_available = _always(False)  # a DataLoader would start a pinning thread
    torch.nn.Module.cuda = lambda self, device=None: self


def _stub_streams_and_memory() -> None:
    cuda = torch.cuda
    for name in ("synchronize", "empty_cache", "set_stream", "reset_peak_memory_stats"):
        setattr(cuda, name, _always())
    cuda.Stream = cuda.Event = cuda.device = cuda.stream = _Idle
    cuda.current_stream, cuda.default_stream = _always(_Idle()), _always(_Idle())
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, _always(0))
    cuda.memory_stats = lambda *args, **kwargs: collections.defaultdict(int)
    cuda.nvtx.range_push, cuda.nvtx.range_pop = _always(), _always()


def _route_random_state() -> None:
    """Megatron's RNG tracker saves, seeds and restores "the CUDA state": here that is the CPU generator's."""
    generator = torch.default_generator

    class _OneGenerator:
        def __getitem__(self, index: int) -> torch.Generator:
            return generator

    def set_state(state: torch.Tensor, device: Any = None) -> None:
        generator.set_state(state)

    def seed(value: int) -> None:
        generator.manual_seed(value)

    torch.cuda.default_generators = _OneGenerator()
    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state = lambda device=None: generator.get_state()
        module.set_rng_state = set_state
        module.manual_seed = seed
    torch._C._cuda_setRNGState = set_state


# --- Megatron -------------------------------------------------------------------------------------


def _keep_random_state_at_warmup() -> None:
    """Megatron warms fused kernels up with random tensors, as many as the layout says.

    On a GPU they come from a generator of their own; here they would come from the only one there is
    and make the weights depend on the layout.
    """
    import megatron.training.initialize as initialize

    initialize._warmup_jit_function = _always()


def _allow_sequence_parallel_norms() -> None:
    """Megatron's torch norm refuses sequence parallelism. Rows are independent, so nothing is missing.

    Only the gradients of the norm's own weights need the sum over TP ranks, which Megatron does for
    every parameter marked `sequence_parallel`.
    """
    from megatron.core.transformer import torch_norm

    build = torch_norm.WrappedTorchNorm.__new__

    def build_marked(cls, config, hidden_size, eps=1e-5, **kwargs):  # type: ignore[no-untyped-def]
        # The builder reads these five fields; it is shown the config with one of them off.
        without_sp = types.SimpleNamespace(
            layernorm_zero_centered_gamma=config.layernorm_zero_centered_gamma,
            persist_layer_norm=config.persist_layer_norm,
            memory_efficient_layer_norm=config.memory_efficient_layer_norm,
            normalization=config.normalization,
            sequence_parallel=False,
        )
        norm = build(cls, without_sp, hidden_size, eps, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    torch_norm.WrappedTorchNorm.__new__ = staticmethod(build_marked)


def _split_moe_counts_on_cpu() -> None:
    """The MoE dispatcher turns split sizes into numpy lists only when they live on a GPU."""
    from megatron.core.transformer.moe import token_dispatcher

    move = token_dispatcher.maybe_move_tensor_to_cpu

    def move_or_convert(tensor, as_numpy=False, record_stream=False):  # type: ignore[no-untyped-def]
        if as_numpy and torch.is_tensor(tensor):
            return tensor.numpy()
        return move(tensor, as_numpy, record_stream)

    token_dispatcher.maybe_move_tensor_to_cpu = move_or_convert


def _fork_checkpoint_writers() -> None:
    """Megatron spawns the processes that write checkpoints: fresh ones, in which nothing stands in for CUDA.

    The asynchronous writer would divide by a device count of 0 there, and its parent wait for it. A fork shares what
    is installed here, and saves the seconds that a fresh process takes to import everything.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    start = PersistentAsyncCaller._get_process.__func__

    def start_forked(cls, rank, mp_mode="fork", *rest):  # type: ignore[no-untyped-def]
        return start(cls, rank, "fork", *rest)

    PersistentAsyncCaller._get_process = classmethod(start_forked)
    # Callers hold the function itself and rely on its default, which lies under Megatron's decorator.
    inspect.unwrap(filesystem_async.get_write_results_queue).__defaults__ = ("fork",)


def _copy_what_is_saved() -> None:
    """An asynchronous save copies tensors off the device, so that training may go on. Here they lie on the CPU already.

    Uncopied they are memory that training shares with the writer's process, and a checkpoint might hold half of the
    next step.
    """
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    global _stage
    _stage = FileSystemWriterAsync.preload_tensors
    FileSystemWriterAsync.preload_tensors = staticmethod(_stage_copies)


_stage: Callable[..., Any]


def _stage_copies(write_buckets, non_blocking=True):  # type: ignore[no-untyped-def]
    """Runs in the writer's process, to which it is pickled, while training waits for it."""
    return [
        (file, key, (data, [(item, tensor.clone()) for item, tensor in tensors]))
        for file, key, (data, tensors) in _stage(write_buckets, non_blocking)
    ]


def _use_fused_adam_contract() -> None:
    """Give Megatron an Adam with FusedAdam's contract where neither TE nor NVIDIA's Apex brings one.

    Megatron then falls back to torch's AdamW, whose per-parameter step tensors do not survive a
    resume with the distributed optimizer.
    """
    import megatron.core.optimizer as optimizers
    from megatron.core.optimizer import distrib_optimizer

    if not distrib_optimizer.HAVE_APEX_OR_TE:
        optimizers.Adam = distrib_optimizer.Adam = FusedAdam
        optimizers.USING_PYTORCH_OPTIMIZER = False
        distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True
    # Loading writes main parameters, views of leaves, in place.
    load = distrib_optimizer.DistributedOptimizer.load_state_dict
    distrib_optimizer.DistributedOptimizer.load_state_dict = torch.no_grad()(load)


class FusedAdam(torch.optim.Optimizer):
    """Adam(W) with the interface of `apex.optimizers.FusedAdam`: the step count lives in the group.

    Update rule: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (adam_w_mode), or
    Kingma and Ba's Adam with L2 regularization.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        capturable: bool = False,
    ) -> None:
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(params, {**defaults, "weight_decay": weight_decay})
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        correct = group["bias_correction"]
        correction1 = 1 - beta1 ** group["step"] if correct else 1.0
        correction2 = 1 - beta2 ** group["step"] if correct else 1.0
        state = self.state[parameter]
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        grad = parameter.grad
        assert grad is not None
        if self.adam_w_mode:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        else:
            grad = grad + group["weight_decay"] * parameter
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denominator = (state["exp_avg_sq"] / correction2).sqrt_().add_(group["eps"])
        parameter.addcdiv_(state["exp_avg"], denominator, value=-group["lr"] / correction1)
