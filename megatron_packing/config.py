"""What did the user ask of packing, and can it be had? One frozen value, validated in one place.

`PackingConfig` holds our own settings; `check_megatron_flags` holds what of Megatron cannot be
combined with them. Both work on plain values, so that they can be tested without Megatron.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import lcm
from typing import Any, Literal

from megatron_packing.errors import ConfigError
from megatron_packing.topology import Topology

OVERLONG_POLICIES = ("error", "drop", "truncate", "truncate-left", "split")
TRAIN_ON = ("all-assistant", "last-assistant")
"""Every assistant turn is learned, or the last one only."""
CHAT_FORMATS = ("auto", "megatron", "template", "plain", "bare")
BAD_ROW_POLICIES = ("error", "skip")
OUR_KERNELS = ("sdpa", "varlen", "flash")
"""What may compute our own attention."""
ATTENTION_BACKENDS = ("auto", "te", *OUR_KERNELS, "stock")

FP8_ROWS = {"delayed": 16, "tensorwise": 16, "mxfp8": 32, "blockwise": 128}
"""Recipe -> rows that a matrix product in FP8 wants a multiple of: 16 as Megatron-Core's `get_fp8_align_size` says, 32
and 128 for the blocks of rows that share a scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingConfig:
    """The resolved settings of one run. Built from the command line by `mcore.args`."""

    topology: Topology
    seq_length: int
    """Longest sample that the model accepts, in tokens."""
    scheduler: str | None
    """A name that `schedule.check_scheduler` knows; None: samples are padded, not packed (the reference run)."""
    max_tokens_per_rank: int
    """Padded tokens that one DP x CP rank may hold; the capacity of a pack is this times CP."""
    max_seqs: int | None = None
    """Most samples in one pack, less one where `pad_alignment` is set, whose tail is one of them; None: no limit."""
    pad_alignment: int | Literal["max"] | None = None
    """Rows that each rank's share of a pack is filled up to a multiple of; max: to max_tokens_per_rank. None: no more
    than the topology asks for. With `max_seqs`, a pack's shapes follow from its rows alone."""
    smallest_group: int | None = None
    """Ranks of the smallest group that may share a pack, where the scheduler chooses groups of DP x CP ranks anew in
    every microbatch; None: every pack is shared by CP ranks."""
    balance: str = "auto"
    """What a scheduler that balances keeps small, of `schedule.BALANCES`."""
    fit_cost_steps: int = 0
    """Steps whose microbatches are timed, for `balanced` to go by; 0: it goes by the model's FLOPs."""
    prefetch: bool = False
    """Whether the next step of training is planned and exchanged while this one computes."""
    plan: str | None = None
    """Pack file that training follows, each of its packs one consumed sample; None: rows are packed step by step."""
    dataset: str = "varlen"
    """varlen, sft, mock, preference, or module:Class of a user's own dataset."""
    mock_config: str | None = None
    """Inline JSON or a path: how the mock dataset draws its lengths."""
    order: Literal["single", "cyclic"] = "single"
    """Of training samples: in order, or shuffled by Megatron."""
    shuffle: bool = False
    """Whether training rows get a new order in each epoch."""
    overlong: str = "error"
    """What happens to a sample longer than seq_length."""
    bad_rows: str = "error"
    """What happens to a row that cannot become a sample: `error` stops, `skip` counts and goes on."""
    attention: Literal["te", "sdpa", "stock", "spec"] = "sdpa"
    """The core attention of the run: Transformer Engine's, ours (sdpa), Megatron's own, or that of the user's --spec,
    which is looked at once the model is built."""
    chat_format: str = "auto"
    """How conversations become tokens."""
    train_on: str = "all-assistant"
    """Which assistant turns are learned."""
    schema: str = "auto"
    """How rows are understood; looked up once the data modules are imported, as it may be a user's own."""
    token_cache: str | None = None
    """Folder that keeps tokenized rows from run to run; None: none is kept."""
    log_interval: int = 1
    """Steps between two lines of packing figures."""
    data_timeout: float = 300.0
    """Seconds that a reader may take for one item."""
    full_validation: bool = False
    """Whether an evaluation takes every row once."""
    eval_scheduler: str | None = None
    """Of validation and test, as the two below; None: as in training."""
    eval_max_tokens_per_rank: int | None = None
    eval_overlong: str | None = None

    @property
    def packed(self) -> bool:
        """Whether samples are packed; otherwise each is padded to seq_length."""
        return self.scheduler is not None

    def for_evaluation(self) -> "PackingConfig":
        """The settings that validation and test are packed under.

        Raises:
            ConfigError: they cannot work.
        """
        return dataclasses.replace(
            self,
            scheduler=self.eval_scheduler or self.scheduler,
            max_tokens_per_rank=self.eval_max_tokens_per_rank or self.max_tokens_per_rank,
            overlong=self.eval_overlong or self.overlong,
            eval_scheduler=None,
            eval_max_tokens_per_rank=None,
            eval_overlong=None,
        )

    @property
    def widest(self) -> Topology:
        """The topology, as it is for a pack that as many ranks share as may."""
        return self.topology if self.smallest_group is None else self.topology.widest

    @property
    def capacity(self) -> int:
        """Padded tokens that a pack may hold; where groups are chosen, that of all ranks."""
        return self.max_tokens_per_rank * self.widest.cp

    @property
    def most_samples(self) -> int | None:
        """Samples that a pack may hold; None: no limit."""
        return self.max_seqs if self.max_seqs is None or self.pad_alignment is None else self.max_seqs - 1

    @property
    def num_boundaries(self) -> int | None:
        """Entries of every pack's `cu_seqlens`; None: as many as its samples need."""
        return None if self.max_seqs is None or self.pad_alignment is None else self.max_seqs + 1

    def rows_of(self, padded: int) -> int:
        """Rows that run of a pack whose samples, or dummy, have `padded` rows."""
        if self.smallest_group is not None:  # whole units of its own group's alignment already, and no more is asked
            return padded
        multiple = self._rows_multiple
        return -(-padded // multiple) * multiple

    @property
    def _rows_multiple(self) -> int:
        if self.pad_alignment == "max":
            return self.capacity
        return rows_multiple(self.topology, self.pad_alignment or 1)

    def __post_init__(self) -> None:
        _check_choice("--packing-overlong", self.overlong, OVERLONG_POLICIES)
        _check_choice("--packing-bad-rows", self.bad_rows, BAD_ROW_POLICIES)
        _check_choice("--packing-chat-format", self.chat_format, CHAT_FORMATS)
        _check_choice("--packing-train-on", self.train_on, TRAIN_ON)
        self._check_split()
        self._check_plan()
        self._check_fit_cost()
        self._check_prefetch()
        _check_positive("--seq-length", self.seq_length)
        _check_positive("--packing-log-interval", self.log_interval)
        _check_positive("--packing-data-timeout", self.data_timeout)
        if self.max_seqs is not None:
            _check_positive("--thd-max-packed-sequences", self.max_seqs)
        self._check_shape()
        if self.packed:
            if self.smallest_group is not None:
                self._check_groups()
            self._check_capacity()
            self._check_attention()
        self._check_evaluation()
        self.check_together(samples_kept_together(self.dataset))

    def check_together(self, samples: int) -> None:
        """Refuse settings under which the samples of a row that must share a pack might not fit in one.

        Args:
            samples: of a row; a dataset's `kept_together`.
        """
        if samples == 1:
            return
        if self.smallest_group is not None:
            raise ConfigError(
                f"--sequence-packing-scheduler dynamic_cp with --packing-dataset {self.dataset}: {samples} samples of "
                "a row must share a pack, which it cannot promise. Use another scheduler."
            )
        if not self.packed:
            raise ConfigError(
                f"--varlen-sbhd-validation: a row of --packing-dataset {self.dataset} makes {samples} samples, which "
                "cannot be one padded row. Drop the flag."
            )
        if self.most_samples is not None and self.most_samples < samples:
            assert self.max_seqs is not None
            raise ConfigError(
                f"--thd-max-packed-sequences {self.max_seqs}: {samples} samples of a row must share a pack. Raise it "
                f"to at least {samples + self.max_seqs - self.most_samples}."
            )
        longest = samples * self.topology.pad(self.seq_length)
        if self.capacity < longest:
            raise ConfigError(
                f"--max-seqlen-per-dp-cp-rank {self.max_tokens_per_rank}: a pack holds {self.capacity} tokens, but "
                f"{samples} samples of a row must share it and may have {longest} together. Raise it to at least "
                f"{-(-longest // self.topology.cp)} or lower --seq-length."
            )

    def _check_evaluation(self) -> None:
        given = {
            "--packing-eval-scheduler": self.eval_scheduler,
            "--packing-eval-max-seqlen-per-dp-cp-rank": self.eval_max_tokens_per_rank,
        }
        for flag, value in given.items():
            if value is not None and not self.packed:
                raise ConfigError(f"{flag} {value}: the reference run does not pack. Drop the flag.")
        if self.eval_overlong is not None:
            _check_choice("--packing-eval-overlong", self.eval_overlong, OVERLONG_POLICIES)
        if self.eval_max_tokens_per_rank is not None:
            _check_positive("--packing-eval-max-seqlen-per-dp-cp-rank", self.eval_max_tokens_per_rank)
            try:
                self.for_evaluation()
            except ConfigError as error:
                flag = "--packing-eval-max-seqlen-per-dp-cp-rank"
                raise ConfigError(str(error).replace("--max-seqlen-per-dp-cp-rank", flag)) from None

    def _check_split(self) -> None:
        if self.overlong != "split":
            return
        if not self.packed:
            raise ConfigError(
                "--packing-overlong split with --varlen-sbhd-validation: a row that makes several samples cannot be "
                "one padded row. Use drop, truncate or truncate-left in both runs that you compare."
            )
        if self.dataset == "sft":
            raise ConfigError(
                "--packing-overlong split with --sft: a row's chats share a buffer of --seq-length tokens, and chats "
                "are never split. Use drop or truncate."
            )

    def _check_plan(self) -> None:
        """What can be seen before the data are; `mcore.planned` looks at the rest."""
        if self.plan is None:
            return
        refused = {
            "--varlen-sbhd-validation: the reference run has no packs": not self.packed,
            f"--packing-dataset {self.dataset}: a row of a plan is one sample": self.dataset in ("sft", "preference"),
            "--mock-data: made-up samples are not packed ahead of time": self.dataset == "mock",
            "--packing-overlong split: a row of a plan is one sample": self.overlong == "split",
            f"the scheduler {self.scheduler}: it cuts packs anew, for groups of ranks": self.scheduler == "dynamic_cp",
        }
        for why, is_so in refused.items():
            if is_so:
                raise ConfigError(f"--packing-plan {self.plan} with {why}. Drop one of them.")

    def _check_fit_cost(self) -> None:
        if self.fit_cost_steps == 0:
            return
        flag = f"--packing-fit-cost {self.fit_cost_steps}"
        _check_positive("--packing-fit-cost", self.fit_cost_steps)
        if self.scheduler != "balanced":
            raise ConfigError(f"{flag}: only balanced looks at costs. Add --sequence-packing-scheduler balanced.")
        if self.topology.pp > 1 or self.topology.ep > 1:
            raise ConfigError(
                f"{flag} with PP {self.topology.pp}, EP {self.topology.ep}: ranks wait for one another within "
                "microbatches there, so that a pack's time is not its own. Drop the flag."
            )

    def _check_prefetch(self) -> None:
        if not self.prefetch:
            return
        if not self.packed:
            raise ConfigError(
                "--packing-prefetch with --varlen-sbhd-validation: the reference run plans nothing. Drop the flag."
            )
        if self.fit_cost_steps:
            raise ConfigError(
                f"--packing-prefetch with --packing-fit-cost {self.fit_cost_steps}: a step that was planned ahead "
                "cannot go by costs measured since. Drop one of them."
            )

    def _check_shape(self) -> None:
        if self.pad_alignment is None:
            return
        flag = f"--pad-packed-seq-alignment {self.pad_alignment}"
        if not self.packed:
            raise ConfigError(f"{flag}: the reference run does not pack. Drop the flag.")
        if self.smallest_group is not None:
            raise ConfigError(f"{flag} with dynamic context parallelism: not proven yet. Drop one of them.")
        if self.max_seqs == 1:
            raise ConfigError(
                f"--thd-max-packed-sequences 1 with {flag}: the tail that fills a pack up counts as one, which leaves "
                "none for a sample. Raise it to at least 2."
            )
        if self.pad_alignment == "max":
            return
        _check_positive("--pad-packed-seq-alignment", self.pad_alignment)
        if self.capacity % self._rows_multiple:
            raise ConfigError(
                f"{flag}: packs are filled up to multiples of {self._rows_multiple} rows, but may hold "
                f"{self.capacity} tokens = {self.max_tokens_per_rank} per rank x CP {self.topology.cp}, which is none. "
                f"Set --max-seqlen-per-dp-cp-rank to a multiple of {self._rows_multiple // self.topology.cp}."
            )

    def _check_capacity(self) -> None:
        _check_positive("--max-seqlen-per-dp-cp-rank", self.max_tokens_per_rank)
        topology, capacity = self.widest, self.capacity
        made_of = f"{self.max_tokens_per_rank} per rank x CP {topology.cp}"
        topology.check_capacity(self.max_tokens_per_rank)
        longest = topology.pad(self.seq_length)
        if capacity < longest:
            raise ConfigError(
                f"--max-seqlen-per-dp-cp-rank {self.max_tokens_per_rank}: a pack holds {capacity} tokens = {made_of}, "
                f"but a sample may have {longest} (--seq-length {self.seq_length}, padded to the alignment of "
                f"{topology.alignment}). Raise it to at least {-(-longest // topology.cp)} or lower --seq-length."
            )
        if capacity >= 2**31:
            raise ConfigError(
                f"--max-seqlen-per-dp-cp-rank {self.max_tokens_per_rank}: a pack of {capacity} tokens does not fit in "
                f"int32 boundaries; the limit is {2**31 - 1}. Lower it."
            )

    def _check_groups(self) -> None:
        """Refuse what groups of ranks that change from microbatch to microbatch are not proven with."""
        what = "--sequence-packing-scheduler dynamic_cp"
        if self.attention not in ("sdpa", "te"):
            raise ConfigError(
                f"{what} with the attention {self.attention!r}: proven with ours and with Transformer Engine's only. "
                "Drop --spec."
            )

    def _check_attention(self) -> None:
        if self.attention == "stock":
            raise ConfigError(
                "--packing-attention stock: Megatron's local DotProductAttention has no notion of boundaries and would "
                "let samples see each other. Use auto, sdpa or te."
            )


def rows_multiple(topology: Topology, pad_alignment: int) -> int:
    """Rows that a pack is filled up to a multiple of, where each rank's are to be one of `pad_alignment`."""
    return lcm(topology.pack_alignment, pad_alignment * topology.cp)


def samples_kept_together(dataset: str) -> int:
    """Samples of a row that must share a pack, of our own datasets; a user's own says so once it is imported."""
    return 2 if dataset == "preference" else 1


def _check_choice(flag: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{flag} {value}: unknown; choose one of {', '.join(known)}.")


def _check_positive(flag: str, value: float) -> None:
    if value < 1:
        raise ConfigError(f"{flag} {value}: must be at least 1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refusal:
    """One setting of Megatron that packing cannot be combined with."""

    setting: str
    """The attribute of Megatron's arguments."""
    refused: Callable[[Any], bool]
    message: str
    """Flag, why, and what to do; `{value}` is filled in."""


def _is_set(value: Any) -> bool:
    return bool(value)


def _refuse(setting: str, message: str, refused: Callable[[Any], bool] = _is_set) -> _Refusal:
    return _Refusal(setting=setting, refused=refused, message=message)


# What holds for every run on our datasets, packed or padded.
_ALWAYS = (
    _refuse("reset_position_ids", "--reset-position-ids: positions already restart in each sample. Drop the flag."),
    _refuse("reset_attention_mask", "--reset-attention-mask: samples never see each other already. Drop the flag."),
    _refuse(
        "eod_mask_loss",
        "--eod-mask-loss: the end of a sample is supervised so that the model learns to stop; masking it is not "
        "supported. Drop the flag.",
    ),
    _refuse(
        "fim_data", "--fim-data: fill-in-the-middle rewriting is not supported with packing's datasets. Drop the flag."
    ),
    _refuse(
        "dataloader_type",
        "--dataloader-type {value}: a step's samples must come from Megatron's own samplers. Use single or cyclic.",
        lambda value: value not in (None, "single", "cyclic"),
    ),
    _refuse(
        "phase_transition_iterations",
        "--phase-transition-iterations {value}: phases that begin their data anew are not proven. Drop the flag.",
    ),
    _refuse(
        "perform_rl_step",
        "--perform-rl-step: RL has a packer of its own; packing cannot be combined with it. Drop one.",
    ),
)

# What holds for packed runs.
_PACKED = (
    _refuse(
        "micro_batch_size",
        "--micro-batch-size {value}: a packed microbatch is one pack; the limit is 1. Set --micro-batch-size 1 and "
        "choose the work of a microbatch with --max-seqlen-per-dp-cp-rank.",
        lambda value: value not in (None, 1),
    ),
    _refuse(
        "eval_micro_batch_size",
        "--eval-micro-batch-size {value}: a packed microbatch is one pack; the limit is 1. Set it to 1.",
        lambda value: value not in (None, 1),
    ),
    _refuse(
        "cuda_graph_impl",
        "--cuda-graph-impl {value}: graphs are not proven for packs, which differ in shape, nor for packs of one "
        "shape. Set it to none.",
        lambda value: value not in (None, "none"),
    ),
    _refuse("enable_cuda_graph", "--enable-cuda-graph: graphs are not proven for packs of any shape. Drop the flag."),
    _refuse(
        "external_cuda_graph", "--external-cuda-graph: graphs are not proven for packs of any shape. Drop the flag."
    ),
    _refuse(
        "overlap_moe_expert_parallel_comm",
        "--overlap-moe-expert-parallel-comm: its forward step drops the samples' boundaries. Drop the flag.",
    ),
    _refuse(
        "dataloader_inter_document_masking",
        "--dataloader-inter-document-masking: packing draws the boundaries itself. Drop the flag.",
    ),
    _refuse("hybrid_context_parallel", "--hybrid-context-parallel: has a schedule of its own. Drop the flag."),
    _refuse(
        "position_embedding_type",
        "--position-embedding-type {value}: not proven under packing. Use rope, learned_absolute or none.",
        lambda value: value not in ("rope", "learned_absolute", "none"),
    ),
    _refuse(
        "multi_latent_attention",
        "--multi-latent-attention: not proven under packing yet. Use grouped-query attention or leave packing out.",
    ),
    _refuse(
        "experimental_attention_variant",
        "--experimental-attention-variant {value}: gated_delta_net would carry state across samples, dsa is not proven "
        "under packing. Drop the flag, or leave packing out.",
    ),
    _refuse(
        "qk_clip",
        "--qk-clip: rows of padding would count in the largest logit, by which it clips. Drop the flag.",
    ),
    _refuse(
        "mtp_num_layers",
        "--mtp-num-layers {value}: its shifted labels would cross from sample to sample. Drop the flag.",
    ),
    _refuse(
        "hybrid_layer_pattern",
        "--hybrid-layer-pattern {value}: recurrent layers would carry state across samples. Leave packing out.",
    ),
    _refuse(
        "hybrid_override_pattern",
        "--hybrid-override-pattern {value}: recurrent layers would carry state across samples. Leave packing out.",
    ),
    _refuse(
        "heterogeneous_layers_config_path",
        "--heterogeneous-layers-config-path: not proven under packing. Leave packing out.",
    ),
    _refuse("fp4", "--fp4-format {value}: its alignment is not proven under packing yet. Use --bf16."),
    _refuse("fp16", "--fp16: not proven under packing. Use --bf16."),
    _refuse("use_torch_fsdp2", "--use-torch-fsdp2: not proven under packing yet. Use --use-distributed-optimizer."),
    _refuse("use_megatron_fsdp", "--use-megatron-fsdp: not proven under packing yet. Use --use-distributed-optimizer."),
    _refuse(
        "inprocess_restart",
        "--inprocess-restart: not proven under packing, whose ranks end together when one fails. Drop the flag.",
    ),
    _refuse(
        "logits_load_dir", "--logits-load-dir: cached logits are laid out for unpacked samples. Leave packing out."
    ),
    _refuse(
        "yaml_cfg", "--yaml-cfg: give the flags on the command line, or in a file through the launcher's --config."
    ),
)

# What holds for packed runs of a mixture of experts.
_PACKED_EXPERTS = (
    _refuse(
        "moe_token_dispatcher_type",
        "--moe-token-dispatcher-type {value}: packs differ in length, which only alltoall allows. Set it to alltoall.",
        lambda value: value != "alltoall",
    ),
    _refuse(
        "moe_router_load_balancing_type",
        "--moe-router-load-balancing-type {value}: it balances over every row of a microbatch, padding included. Use "
        "aux_loss, seq_aux_loss, global_aux_loss or none.",
        lambda value: bool({"sinkhorn", "quantile_balancing"} & set(value if isinstance(value, list) else [value])),
    ),
)

# What packed runs can have with Transformer Engine's layers only.
_NOT_TRANSFORMER_ENGINE = (
    _refuse(
        "fp8",
        "--fp8-format {value}: only Transformer Engine's layers compute in FP8. Use --transformer-impl "
        "transformer_engine without --spec, or --bf16 alone.",
    ),
)

# What our own attention does not compute.
_OUR_ATTENTION = (
    _refuse(
        "window_size",
        "--window-size {value}: in our attention no row sees later ones. Set the second number to 0.",
        lambda value: value is not None and tuple(value)[1] != 0,
    ),
    _refuse(
        "softmax_type",
        "--softmax-type {value}: our attention computes the plain softmax only. Use Transformer Engine.",
        lambda value: value not in (None, "vanilla"),
    ),
    _refuse("qk_clip", "--qk-clip: our attention does not report its largest logit. Use Transformer Engine."),
    _refuse(
        "log_max_attention_logit",
        "--log-max-attention-logit: our attention does not report its largest logit. Use Transformer Engine.",
    ),
)


# What groups of ranks that change from microbatch to microbatch are not proven with.
_GROUPS_CHANGE = (
    _refuse(
        "apply_rope_fusion",
        "RoPE fusion: not proven with dynamic context parallelism. Add --no-rope-fusion.",
    ),
    _refuse(
        "fp8",
        "--fp8-format {value}: not proven with dynamic context parallelism, whose packs are not filled up to the rows "
        "that a recipe wants. Use --bf16 alone.",
    ),
    _refuse(
        "softmax_type",
        "--softmax-type {value}: not proven with dynamic context parallelism. Drop the flag.",
        lambda value: value not in (None, "vanilla"),
    ),
    _refuse(
        "log_max_attention_logit",
        "--log-max-attention-logit: not proven with dynamic context parallelism. Drop the flag.",
    ),
)


# What of packed runs holds for inputs that Megatron packs itself, each as long as the others: the model, not the data.
_NOT_OF_PACKED_INPUTS = (
    *("micro_batch_size", "eval_micro_batch_size", "dataloader_inter_document_masking", "inprocess_restart"),
    *("logits_load_dir", "yaml_cfg"),
)


def check_packed_inputs(flags: Mapping[str, Any]) -> None:
    """Refuse settings of Megatron under which our attention is not proven on inputs that Megatron packs itself.

    Args:
        flags: attribute name -> value, as Megatron parsed them, before its own validation.

    Raises:
        ConfigError: for the first such setting.
    """
    kept = tuple(rule for rule in _PACKED if rule.setting not in _NOT_OF_PACKED_INPUTS)
    _apply_rules(kept + _OUR_ATTENTION + _NOT_TRANSFORMER_ENGINE, flags)
    _check_backend(flags)
    ranks = flags.get("context_parallel_size")
    if ranks is not None and ranks > 1:
        raise ConfigError(
            f"--context-parallel-size {ranks} with inputs that Megatron packs itself: not proven with our attention. "
            "Set it to 1, or let --sequence-packing-scheduler pack."
        )


def check_megatron_flags(
    flags: Mapping[str, Any], *, packed: bool, attention: str, groups_change: bool = False
) -> None:
    """Refuse settings of Megatron that cannot be combined with packing.

    Args:
        flags: attribute name -> value, as Megatron parsed them, before its own validation.
        packed: whether samples are packed (else padded).
        attention: the resolved core attention, see `PackingConfig.attention`.
        groups_change: whether the ranks that share a pack change from microbatch to microbatch.

    Raises:
        ConfigError: for the first such setting, with flag, value, reason and remedy.
    """
    rules = _ALWAYS + (_PACKED if packed else ()) + (_OUR_ATTENTION if attention == "sdpa" else ())
    if packed and flags.get("num_experts"):
        rules += _PACKED_EXPERTS
    if packed and attention != "te":
        rules += _NOT_TRANSFORMER_ENGINE
    if groups_change:
        rules += _GROUPS_CHANGE
    _apply_rules(rules, flags)
    if packed and attention in ("sdpa", "te"):
        _check_backend(flags)


def _apply_rules(rules: tuple[_Refusal, ...], flags: Mapping[str, Any]) -> None:
    for rule in rules:
        # A setting that this version of Megatron does not know cannot be wrong.
        if rule.setting in flags and rule.refused(flags[rule.setting]):
            raise ConfigError(rule.message.format(value=flags[rule.setting]))


def _check_backend(flags: Mapping[str, Any]) -> None:
    if str(flags.get("attention_backend")) in ("AttnBackend.local", "local"):
        raise ConfigError(
            "--attention-backend local: puts Megatron's own attention in the place of the one that honours boundaries. "
            "Drop the flag."
        )
