"""Is packing right on this machine? A small model's packed run, held against each of its samples alone.

The packed run takes training's own way: `build_pack`, the hooks of `prepare_chunk`, the core attention that a run would
use. What it is held against shares none of it: Megatron's own `DotProductAttention` on one sample at a time, unpacked,
in the next higher precision. Every other part of the two models, and every weight, is the same.

How far the two may lie apart is not guessed but measured: the same unpacked run in the packed run's own precision errs
too, for its rounding alone, and the packed run may err at most twice as much (`ERROR_FACTOR`), or one unit in the last
place (`LEAST_ERROR`). What must not differ at all has no tolerance: a sample is changed, and the
others' outputs stay as they were, bit by bit.

Cost: some seconds after Megatron's import; one process, no launcher, any device.

Legend: T rows of the pack, V vocabulary.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron_packing.errors import MissingDependency
from megatron_packing.thd import PackedBatch, SampleTensors, build_pack, share_of_rank

LENGTHS = (37, 1, 90, 5, 130)
"""Tokens of the samples: one of them alone in its sequence, two beyond the tiles of 64 and 128 rows of GPU kernels."""

CHANGED = 2
"""Which of them is changed. It has neighbours on both sides."""

ALIGNMENTS = {"nothing padded": 1, "padded": 8}
"""Name of a layout -> multiple of tokens that each sample is padded to."""

VOCABULARY = 64

ERROR_FACTOR = 2.0
"""The packed run's error may be this many times the unpacked run's: both round the same values, but not in the same
order, so that single roundings fall to the other side. A sample that sees another errs by 1e4 times as much in fp32."""

LEAST_ERROR = 1.0
"""Units in the last place that any error may have: where the unpacked run happens to be exact, twice nothing is no
measure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A core attention to be probed."""

    name: str
    build: Callable[..., nn.Module]
    """Takes the place of `core_attention` in Megatron's local layer spec."""
    precisions: tuple[torch.dtype, ...]
    """Which it can run in."""
    rope_fusion: bool = False
    """Whether Transformer Engine's kernel rotates queries and keys, as in its users' runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that must hold, and whether it does."""

    attention: str
    precision: str
    layout: str
    what: str
    """`forward`, `gradients`, `others' outputs`, `others' gradients`, or `runs` where nothing could be compared."""
    ok: bool
    found: str
    """What was measured, and the limit."""

    @property
    def name(self) -> str:
        """What a failure is called."""
        return f"{self.what} of {self.attention} in {self.precision}, {self.layout}"


def candidates(device: str) -> list[Candidate]:
    """The core attentions that a run on this device would use: ours, and Transformer Engine's where it is installed."""
    from megatron.core.extensions import transformer_engine as megatron_te

    from megatron_packing.mcore.attention_spec import PackedDotProductAttention

    found = [Candidate(name="ours", build=PackedDotProductAttention, precisions=(torch.float32, torch.bfloat16))]
    if device == "cuda" and megatron_te.HAVE_TE:
        # Its fast kernels know 16-bit types only.
        engine, precisions = megatron_te.TEDotProductAttention, (torch.bfloat16,)
        found.append(Candidate(name="Transformer Engine's", build=engine, precisions=precisions, rope_fusion=True))
    return found


def probe(device: str, chosen: Sequence[Candidate] | None = None) -> Iterator[Check]:
    """Check each attention in each precision and layout; yields what was found as it is found.

    On a CPU call `cpu_runtime.install` before Megatron is imported.

    Args:
        device: cpu or cuda.
        chosen: core attentions; None: `candidates`.

    Raises:
        MissingDependency: Megatron-Core cannot be imported.
    """
    _check_import()
    with _one_rank():
        for candidate in candidates(device) if chosen is None else chosen:
            for precision in candidate.precisions:
                yield from _probe_one(candidate, precision, device)


def _check_import() -> None:
    try:
        import megatron.core.models.gpt  # noqa: F401
    except Exception as error:  # Megatron is ready for an ImportError; a half-installed package raises others
        raise MissingDependency(
            f"megatron.core cannot be imported here: {type(error).__name__}: {error}. megatron-packing doctor without "
            "--probe says what is installed."
        ) from error


def _probe_one(candidate: Candidate, precision: torch.dtype, device: str) -> Iterator[Check]:
    """All checks of one attention in one precision. What it raises is a failed check: it would end a run."""
    samples = _samples(seed=1)
    exact = _alone(_HIGHER[precision], device, samples)
    plain = _error(_alone(precision, device, samples), exact)
    for layout, alignment in ALIGNMENTS.items():
        place = {"attention": candidate.name, "precision": _NAMES[precision], "layout": layout}
        try:
            model = _Packed(candidate, precision, device, alignment)
            yield from _equal_to_alone(model, samples, exact, plain, place)
            yield from _isolated(model, samples, plain, place)
        except Exception as error:  # whatever a kernel, an assertion or a missing library raises
            yield Check(**place, what="runs", ok=False, found=f"{type(error).__name__}: {error}")


_HIGHER = {torch.bfloat16: torch.float32, torch.float32: torch.float64}
_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


# --- what is compared -----------------------------------------------------------------------------


@dataclass(slots=True)
class _Result:
    """What a model makes of the samples."""

    logits: list[Tensor]
    """Of each sample, [length, V]."""
    gradients: dict[str, Tensor]
    """Of the sum of all logits, each times a number of its own, in every parameter."""


@dataclass(slots=True, kw_only=True)
class _Errors:
    """Relative L2 distance from the exact result: the worst sample's logits, the worst parameter's gradient."""

    forward: float
    gradients: float


def _error(result: _Result, exact: _Result) -> _Errors:
    return _Errors(
        forward=max(map(_distance, result.logits, exact.logits)),
        gradients=max(_distance(result.gradients[name], true) for name, true in exact.gradients.items()),
    )


def _distance(found: Tensor, true: Tensor) -> float:
    """Relative L2 distance; NaN and infinities are infinitely far away."""
    distance = float((found.double() - true.double()).norm() / true.double().norm())
    return distance if math.isfinite(distance) else math.inf


def _equal_to_alone(
    model: "_Packed", samples: Sequence[SampleTensors], exact: _Result, plain: _Errors, place: dict[str, str]
) -> Iterator[Check]:
    found = _error(model.result(samples), exact)
    for what, error, of_plain in (
        ("forward", found.forward, plain.forward),
        ("gradients", found.gradients, plain.gradients),
    ):
        limit = model.limit(of_plain)
        said = f"error {error:.1e}, unpacked {of_plain:.1e}, limit {limit:.1e}"
        yield Check(**place, what=what, ok=error <= limit, found=said)


def _isolated(
    model: "_Packed", samples: Sequence[SampleTensors], plain: _Errors, place: dict[str, str]
) -> Iterator[Check]:
    """One sample is changed: the others must not notice, and it must."""
    changed = [*samples]
    changed[CHANGED] = _samples(seed=2)[CHANGED]
    (before, reach_before), (after, reach_after) = (model.with_reach(these) for these in (samples, changed))
    others = [index for index in range(len(samples)) if index != CHANGED]
    moved = [_largest(before[index] - after[index]) for index in range(len(samples))]
    said = f"largest change {max(moved[i] for i in others):.1g}, limit 0; of the changed sample {moved[CHANGED]:.1g}"
    yield Check(
        **place, what="others' outputs", ok=moved[CHANGED] > 0 and all(moved[i] == 0 for i in others), found=said
    )
    # Kernels of a GPU may add gradients up in any order, so that two equal runs differ by rounding there.
    limit = model.limit(plain.gradients) if model.device == "cuda" else 0
    shifted = max(_distance(reach_after[i], reach_before[i]) for i in others)
    leaked = max(_largest(model.reach_of_one(samples, CHANGED)[i]) for i in others)
    said = f"largest change {shifted:.1g}, limit {limit:.1g}; from the changed sample's loss {leaked:.1g}, limit 0"
    yield Check(**place, what="others' gradients", ok=shifted <= limit and leaked == 0, found=said)


def _largest(values: Tensor) -> float:
    largest = float(values.abs().max())
    return largest if math.isfinite(largest) else math.inf


# --- the two runs ---------------------------------------------------------------------------------


def _alone(precision: torch.dtype, device: str, samples: Sequence[SampleTensors]) -> _Result:
    """Megatron's own attention, one sample at a time, [1, length], nothing packed and nothing padded."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    model = _model(DotProductAttention, precision, device)
    logits = []
    for sample, weights in zip(samples, _loss_weights(samples), strict=True):
        tokens = sample.tokens_L.to(device)
        out = model(tokens[None], torch.arange(sample.length, device=device)[None], None)[0]
        (out * weights.to(out)).sum().backward()
        logits.append(out.detach())
    return _Result(logits=logits, gradients=_gradients(model))


class _Packed:
    """A model that a packed run has prepared."""

    def __init__(self, candidate: Candidate, precision: torch.dtype, device: str, alignment: int) -> None:
        from megatron_packing.mcore.step import CurrentMicrobatch, prepare_chunk

        self.device = device
        self._precision = precision
        self._alignment = alignment
        self._model = _model(candidate.build, precision, device, rope_fusion=candidate.rope_fusion)
        self._current = CurrentMicrobatch()
        self._embedded: list[Tensor] = []
        prepare_chunk(self._model, self._current)
        self._model.embedding.register_forward_hook(self._keep_embedding)

    def limit(self, of_plain: float) -> float:
        """How far a relative error may go where the unpacked run's is `of_plain`."""
        return max(ERROR_FACTOR * of_plain, LEAST_ERROR * torch.finfo(self._precision).eps)

    def result(self, samples: Sequence[SampleTensors]) -> _Result:
        """Logits and parameters' gradients."""
        self._model.zero_grad(set_to_none=True)
        logits = self._logits(samples)
        _weighted(logits, samples).backward()
        return _Result(logits=[each.detach() for each in logits], gradients=_gradients(self._model))

    def with_reach(self, samples: Sequence[SampleTensors]) -> tuple[list[Tensor], list[Tensor]]:
        """Each sample's logits, and the gradient that reaches its embedded tokens, [length, hidden]."""
        logits = self._logits(samples)
        return [each.detach() for each in logits], self._reach(_weighted(logits, samples), samples)

    def reach_of_one(self, samples: Sequence[SampleTensors], index: int) -> list[Tensor]:
        """The gradient that one sample's loss sends to each sample's embedded tokens."""
        logits = self._logits(samples)
        return self._reach(_weighted(logits[index : index + 1], samples[index : index + 1]), samples)

    def _logits(self, samples: Sequence[SampleTensors]) -> list[Tensor]:
        pack = build_pack(samples, alignment=self._alignment)
        self._embedded.clear()
        self._current.share = share_of_rank(pack, cp_size=1, cp_rank=0).to(self.device)
        rows = (pack.tokens_T, pack.position_ids_T)
        out = self._model(*(row.to(self.device)[None] for row in rows), None)[0]
        return _of_samples(out, pack)

    def _reach(self, loss: Tensor, samples: Sequence[SampleTensors]) -> list[Tensor]:
        (gradient,) = torch.autograd.grad(loss, self._embedded)
        return _of_samples(gradient[:, 0], build_pack(samples, alignment=self._alignment))

    def _keep_embedding(self, module: nn.Module, args: Any, out: Tensor) -> None:
        self._embedded.append(out)


def _of_samples(rows: Tensor, pack: PackedBatch) -> list[Tensor]:
    """[T, ...] -> each sample's own rows, without its padding."""
    padded, lengths = pack.cu_seqlens_padded.diff().tolist(), pack.cu_seqlens.diff().tolist()
    return [piece[:length] for piece, length in zip(rows.split(padded), lengths, strict=True)]


def _weighted(logits: Sequence[Tensor], samples: Sequence[SampleTensors]) -> Tensor:
    pairs = zip(logits, _loss_weights(samples), strict=True)
    return torch.stack([(out * weights.to(out)).sum() for out, weights in pairs]).sum()


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


# --- what both runs are given ---------------------------------------------------------------------


def _samples(seed: int) -> list[SampleTensors]:
    rng = torch.Generator().manual_seed(seed)
    made = []
    for length in LENGTHS:
        tokens, labels = torch.randint(VOCABULARY, (2, length), generator=rng)
        made.append(SampleTensors(tokens_L=tokens, labels_L=labels, loss_mask_L=torch.ones(length)))
    return made


def _loss_weights(samples: Sequence[SampleTensors]) -> list[Tensor]:
    """What each logit counts in the loss: its sample's labels' entries, as the gradient of a cross-entropy has them."""
    return [
        torch.nn.functional.one_hot(sample.labels_L, VOCABULARY) - torch.full((VOCABULARY,), 1 / VOCABULARY)
        for sample in samples
    ]


def _model(
    core_attention: Callable[..., nn.Module], precision: torch.dtype, device: str, *, rope_fusion: bool = False
) -> nn.Module:
    """A GPT of two layers, grouped queries, rotary positions; the same weights whatever its attention."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_packing.mcore.attention_spec import put_core_attention

    config = TransformerConfig(
        num_layers=2,
        hidden_size=128,
        num_attention_heads=4,
        num_query_groups=2,
        normalization="RMSNorm",
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=precision == torch.bfloat16,
        params_dtype=precision,
        attention_softmax_in_fp32=True,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=rope_fusion,
    )
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    put_core_attention(layer, core_attention)
    block = TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers, layer_norm=WrappedTorchNorm)
    model = GPTModel(
        config=config,
        transformer_layer_spec=block,
        vocab_size=VOCABULARY,
        max_sequence_length=max(LENGTHS),
        position_embedding_type="rope",
    ).to(device=device, dtype=precision)
    _set_weights(model)
    return model


def _set_weights(model: nn.Module) -> None:
    """The same in every precision: bf16's, which fp32 and fp64 can hold; large enough that attention looks at few."""
    rng = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=rng)
            values = 1 + drawn / 8 if parameter.dim() == 1 else drawn / math.sqrt(parameter.shape[-1])
            parameter.copy_(values.to(torch.bfloat16))


@contextlib.contextmanager
def _one_rank() -> Iterator[None]:
    """Megatron's process groups for this process alone, unless there are some, and the random state that it forks."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    tracker, state = get_cuda_rng_tracker(), "model-parallel-rng"
    if state not in tracker.get_states():
        tracker.add(state, 0)  # dropout at probability 0 draws nothing from it, and forks it all the same
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
