"""Which flags are ours, and how do they and Megatron's become a `PackingConfig`?

Upstream's names wherever its dev branch has them, so that moving either way is free; where the
installed Megatron already defines a flag, ours steps aside.
"""

import argparse
import os
from collections.abc import Callable
from typing import Any

from megatron_packing.config import (
    ATTENTION_BACKENDS,
    BAD_ROW_POLICIES,
    CHAT_FORMATS,
    FP8_ROWS,
    OUR_KERNELS,
    OVERLONG_POLICIES,
    TRAIN_ON,
    PackingConfig,
    check_megatron_flags,
    check_packed_inputs,
    rows_multiple,
    samples_kept_together,
)
from megatron_packing.errors import ConfigError, MissingDependency
from megatron_packing.mcore import te_versions
from megatron_packing.schedule import BALANCES, CHOOSES_GROUPS, GroupSizes, check_scheduler, check_trainable, objective
from megatron_packing.topology import Topology

DEFAULT_SCHEDULER = "first_fit"
DEFAULT_FIT_STEPS = 10
"""Steps of --packing-fit-cost: some hundred microbatches over all ranks of an ordinary run."""
DYNAMIC_SCHEDULER = "dynamic_cp"
DATA_GROUP = "data for sequence packing (megatron_packing)"
PACKING_GROUP = "sequence packing (megatron_packing)"
LOCAL_SPEC = ["megatron_packing.mcore.attention_spec", "local_layer_spec"]
LOCAL_SPEC_TE = ["megatron_packing.mcore.attention_spec", "local_layer_spec_te"]


def add_packing_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our flags to Megatron's parser, in two groups: what the data are, and how they are packed."""
    return _add_packing_flags(add_data_flags(parser))


def add_data_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags that say which samples a run sees: those that `megatron-packing inspect` takes as well."""
    add = _adder(parser, DATA_GROUP)
    add(
        "--use-varlen-dataset",
        action="store_true",
        help="train on samples of their own length (jsonl rows through --data-path), packed in THD format",
    )
    add(
        "--varlen-mock-dataset-config-json",
        type=str,
        default=None,
        help="lengths of the mock dataset (--use-varlen-dataset --mock-data): inline JSON or a file",
    )
    add(
        "--packing-dataset",
        type=str,
        default=None,
        metavar="NAME",
        help="preference (pairs of answers, for a loss of your own), or module:Class of your own subclass of a dataset",
    )
    add(
        "--packing-shuffle",
        action="store_true",
        help="give training rows a new order in each epoch, drawn from --seed (default: the file's order)",
    )
    add(
        "--packing-overlong",
        choices=OVERLONG_POLICIES,
        default="error",
        help="a sample longer than --seq-length (default: error)",
    )
    add(
        "--packing-bad-rows",
        choices=BAD_ROW_POLICIES,
        default="error",
        help="a row that cannot become a sample (default: error)",
    )
    add(
        "--packing-chat-format",
        choices=CHAT_FORMATS,
        default=CHAT_FORMATS[0],
        help="how conversations become tokens; auto takes the first that the tokenizer can do: megatron "
        "(SFTTokenizer), template (its chat template), plain (roles and contents), bare (contents only)",
    )
    add(
        "--packing-train-on",
        choices=TRAIN_ON,
        default=TRAIN_ON[0],
        help="assistant turns that are learned, where a turn does not say so itself (default: all-assistant)",
    )
    add(
        "--packing-schema",
        type=str,
        default="auto",
        metavar="NAME",
        help="how rows are understood; auto (default) decides row by row; module:name imports a schema of your own",
    )
    add(
        "--packing-token-cache",
        type=str,
        default=None,
        metavar="FOLDER",
        help="keep tokenized rows there, 9 bytes a token, and read them in later runs; all ranks must share it",
    )
    add(
        "--packing-eval-scheduler",
        type=str,
        default=None,
        metavar="NAME",
        help="how validation and test are packed (default: as training)",
    )
    add(
        "--packing-eval-max-seqlen-per-dp-cp-rank",
        type=int,
        default=None,
        metavar="TOKENS",
        help="capacity of a rank in evaluation, which keeps no activations (default: training's)",
    )
    add(
        "--packing-eval-overlong",
        choices=OVERLONG_POLICIES,
        default=None,
        help="a validation or test sample longer than --seq-length (default: as in training)",
    )
    return parser


def _add_packing_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    add = _adder(parser, PACKING_GROUP)
    add(
        "--varlen-sbhd-validation",
        action="store_true",
        help="the reference run: the same samples, one a row, padded to --seq-length, not packed",
    )
    add(
        "--sequence-packing-scheduler",
        type=str,
        default=None,
        help="how samples are packed: first_fit (default), dp_balanced, balanced or dynamic_cp; with --sft, packs SFT "
        "rows",
    )
    add(
        "--max-seqlen-per-dp-cp-rank",
        type=int,
        default=None,
        help="padded tokens that a rank holds in one microbatch; default: --seq-length / CP, rounded up",
    )
    add(
        "--dynamic-context-parallel",
        action="store_true",
        help="groups of ranks chosen for every microbatch, as --sequence-packing-scheduler dynamic_cp",
    )
    add(
        "--min-dynamic-context-parallel-size",
        type=int,
        default=1,
        help="ranks of the smallest such group (default: 1)",
    )
    add(
        "--thd-max-packed-sequences",
        type=int,
        default=None,
        help="most samples in one pack; with --pad-packed-seq-alignment the tail counts as one, and cu_seqlens always "
        "has one entry more than this",
    )
    add(
        "--pad-packed-seq-alignment",
        type=_rows_or_max,
        default=None,
        metavar="ROWS",
        help="fill every rank's share of a pack up to a multiple of so many rows, with a tail that no sample owns; "
        "max: to --max-seqlen-per-dp-cp-rank",
    )
    add(
        "--packing-balance",
        choices=BALANCES,
        default="auto",
        help="what balanced keeps small: the busiest rank's work over the whole step, or in each microbatch (lockstep; "
        "auto: with PP, EP or FSDP)",
    )
    add(
        "--packing-fit-cost",
        type=int,
        nargs="?",
        const=DEFAULT_FIT_STEPS,
        default=0,
        metavar="STEPS",
        help="let balanced go by the measured times of the first steps' microbatches instead of FLOPs (default: "
        f"{DEFAULT_FIT_STEPS} steps after the first)",
    )
    add(
        "--packing-prefetch",
        action="store_true",
        help="plan and exchange the next step's samples in a thread while this step computes (default: off)",
    )
    add(
        "--packing-plan",
        type=str,
        default=None,
        metavar="FILE",
        help="follow the packs that megatron-packing pack wrote for this data; each is one consumed sample",
    )
    add(
        "--packing-attention",
        choices=ATTENTION_BACKENDS,
        default=None,
        help="core attention; auto (default): te with --transformer-impl transformer_engine, else ours, by the first "
        "of varlen (torch's kernel), flash (FlashAttention) and sdpa that the device allows; without packing: ours "
        "for the inputs of --sft and --dataloader-inter-document-masking",
    )
    add("--packing-log-interval", type=int, default=1, help="steps between two lines of packing figures")
    add(
        "--packing-data-timeout",
        type=int,
        default=300,
        metavar="SECONDS",
        help="longest wait for one item of a dataset; then the run ends and says where it waited (default: 300, below "
        "the 10 minutes after which Megatron's collectives give up)",
    )
    return parser


def _adder(parser: argparse.ArgumentParser, title: str) -> Callable[..., None]:
    """What adds a flag to a group of this title, unless Megatron defines the flag already."""
    group = parser.add_argument_group(title)

    def add(flag: str, **options: Any) -> None:
        if flag not in parser._option_string_actions:
            group.add_argument(flag, **options)

    return add


def wants_packing(args: argparse.Namespace) -> bool:
    """Whether any of our features is switched on; otherwise every hook passes straight through."""
    return bool(
        args.use_varlen_dataset
        or args.varlen_sbhd_validation
        or args.packing_dataset is not None
        or args.packing_plan is not None
        or args.packing_fit_cost
        or args.packing_prefetch
        or args.sequence_packing_scheduler is not None
        or args.dynamic_context_parallel
        or args.min_dynamic_context_parallel_size != 1
    )


def resolve(args: argparse.Namespace, world: int | None = None) -> PackingConfig:
    """Turn Megatron's parsed, not yet validated arguments into our settings.

    Args:
        world: ranks of the run; None: the environment says how many.

    Raises:
        ConfigError: a combination that cannot work; see `megatron_packing.config`.
    """
    dataset = _dataset(args)
    scheduler = _trainable(_scheduler(args))
    eval_scheduler = _trainable(args.packing_eval_scheduler)
    groups_change = scheduler in CHOOSES_GROUPS
    if eval_scheduler is not None and (eval_scheduler in CHOOSES_GROUPS) != groups_change:
        raise ConfigError(
            f"--packing-eval-scheduler {eval_scheduler} with the training scheduler {scheduler}: only one of them "
            "chooses groups of ranks, which is not proven. Drop the flag."
        )
    attention = _attention(args, packed=scheduler is not None)
    check_megatron_flags(vars(args), packed=scheduler is not None, attention=attention, groups_change=groups_change)
    topology = topology_of(args, world)
    if groups_change:  # refuses a smallest group that does not divide the ranks
        GroupSizes(smallest=args.min_dynamic_context_parallel_size).of(topology.dp * topology.cp)
    if args.seq_length is None:
        raise ConfigError("--seq-length is missing: the longest sample that the model accepts, in tokens.")
    capacity = args.max_seqlen_per_dp_cp_rank
    if capacity is None:
        # Upstream's default, here in whole alignment units.
        rows = 1 if args.pad_packed_seq_alignment in (None, "max") else args.pad_packed_seq_alignment
        unit = rows_multiple(topology, rows)
        capacity = -(-samples_kept_together(dataset) * topology.pad(args.seq_length) // unit) * unit // topology.cp
        if groups_change:  # whatever the size of a group, its ranks' chunks are whole alignment units
            capacity += -capacity % (topology.widest.alignment // topology.widest.cp)
    _check_chat_format(args)
    _check_order(args)
    return PackingConfig(
        topology=topology,
        seq_length=args.seq_length,
        scheduler=scheduler,
        max_tokens_per_rank=capacity,
        max_seqs=args.thd_max_packed_sequences,
        pad_alignment=args.pad_packed_seq_alignment,
        smallest_group=args.min_dynamic_context_parallel_size if groups_change else None,
        balance=args.packing_balance,
        fit_cost_steps=args.packing_fit_cost,
        prefetch=args.packing_prefetch,
        plan=args.packing_plan,
        dataset=dataset,
        mock_config=args.varlen_mock_dataset_config_json,
        shuffle=args.packing_shuffle,
        overlong=args.packing_overlong,
        bad_rows=args.packing_bad_rows,
        attention=attention,  # type: ignore[arg-type]
        chat_format=args.packing_chat_format,
        train_on=args.packing_train_on,
        schema=args.packing_schema,
        token_cache=args.packing_token_cache,
        log_interval=args.packing_log_interval,
        data_timeout=args.packing_data_timeout,
        order=args.dataloader_type or "single",
        full_validation=args.full_validation,
        eval_scheduler=eval_scheduler,
        eval_max_tokens_per_rank=args.packing_eval_max_seqlen_per_dp_cp_rank,
        eval_overlong=args.packing_eval_overlong,
    )


def apply(config: PackingConfig, args: argparse.Namespace) -> list[str]:
    """Set, before Megatron validates, what must hold for this run; returns one line for each change."""
    said = []
    if not args.calculate_per_token_loss:
        args.calculate_per_token_loss = True
        said.append("per-token loss enforced (--calculate-per-token-loss)")
    said.append("objective: token-weighted cross-entropy, one mean over all targets of the step")
    if args.micro_batch_size is None:
        args.micro_batch_size = 1
        said.append("micro-batch size set to 1")
    said += _warnings_of_order(args)
    args.dataloader_type = "external"  # the provider hands over loaders of ours
    if args.full_validation and not args.multiple_validation_sets:
        args.full_validation = False  # Megatron's own fails with a single set; `supply` sets eval_iters instead
    args.create_attention_mask_in_dataloader = False  # causal within a sample; nothing to hand over
    if args.sft:
        args.sft = False  # Megatron would average evaluation by microbatch; our dataset is chosen already
    if config.attention == "spec":
        said.append(f"core attention: that of --spec {' '.join(args.spec)}")
    if config.attention == "sdpa":
        args.spec = list(LOCAL_SPEC)
        said.append("core attention: ours, within each sample's boundaries")
    if config.attention == "te" and args.transformer_impl == "local":
        args.spec = list(LOCAL_SPEC_TE)
        said.append("core attention: Transformer Engine's, in layers that are Megatron's own otherwise")
    if config.packed:
        said.append(
            f"scheduler {config.scheduler}, capacity {config.capacity} tokens = {config.max_tokens_per_rank} per rank "
            f"x CP {config.widest.cp}, alignment {config.widest.alignment}"
        )
        if config.num_boundaries is not None:
            said.append(
                f"fixed shapes: a pack of {config.rows_of(1)} rows or a multiple of it has {config.num_boundaries} "
                "boundaries, and max_seqlen is its rows"
            )
        if config.topology.quantized_rows > 1:
            said.append(
                f"FP8 recipe {args.fp8_recipe}: packs are multiples of {config.topology.pack_alignment} rows = "
                f"{config.topology.quantized_rows} on each rank. WARNING: packed training in FP8 was never run on a "
                "GPU; only its alignment is tested"
            )
        if config.smallest_group is not None:
            sizes = GroupSizes(smallest=config.smallest_group).of(config.widest.cp)
            said.append(
                f"dynamic context parallelism: each microbatch has groups of {', '.join(map(str, sizes))} ranks, "
                "chosen by an algorithm of our own, not Megatron-LM's default_dynamic_cp"
            )
        if config.scheduler == "balanced":
            said.append(
                f"balanced: keeps the busiest rank's work small, {_MEANING[objective(config.balance, config.topology)]}"
            )
        said += _warnings_of_experts(args)
        if args.attention_dropout or args.hidden_dropout:
            said.append(
                "dropout is on: a packed and an unpacked run draw different random numbers, so their losses differ by "
                "chance; set both dropouts to 0 to compare them"
            )
    return said


def kernel(args: argparse.Namespace) -> str:
    """What computes our attention, where it is ours that runs; `auto`: what the device and its type allow."""
    return str(args.packing_attention) if args.packing_attention in OUR_KERNELS else "auto"


def apply_to_packed_inputs(args: argparse.Namespace) -> list[str]:
    """Without packing of ours: set our attention for inputs that Megatron packs itself; returns what to say.

    Raises:
        ConfigError: there are no such inputs, or ours cannot attend to them.
    """
    flag = f"--packing-attention {args.packing_attention}"
    inputs = {"--sft": args.sft, "--dataloader-inter-document-masking": args.dataloader_inter_document_masking}
    if not any(inputs.values()):
        raise ConfigError(f"{flag}: nothing is packed here. Add {', '.join(inputs)} or --use-varlen-dataset.")
    if (attention := _attention(args, packed=True)) != "sdpa":
        raise ConfigError(
            f"{flag} with {next(name for name, given in inputs.items() if given)} and no scheduler: that attention "
            f"({attention}) is no business of ours. Drop the flag, or use --transformer-impl local without --spec."
        )
    check_packed_inputs(vars(args))
    args.spec = list(LOCAL_SPEC)
    args.create_attention_mask_in_dataloader = False  # the boundaries are the mask
    return ["core attention: ours, within the boundaries of inputs that Megatron packs"]


_MEANING = {"step": "over the whole step (step)", "lockstep": "in each microbatch (lockstep)"}


def check_transformer_engine(config: PackingConfig, args: argparse.Namespace, *, dry_run: bool) -> list[str]:
    """Refuse what the installed Transformer Engine cannot do, before anything is built; returns what is worth a line.

    Args:
        dry_run: without Transformer Engine the flags are checked as far as they can be.

    Raises:
        MissingDependency: the run needs Transformer Engine, and there is none that Megatron can load.
        ConfigError: see `te_versions.check`.
    """
    if config.attention != "te" or not config.packed:
        return []
    version = te_versions.installed()
    if version is None and dry_run:
        return ["Transformer Engine is not installed here, so that what its version can do was not checked"]
    groups = args.num_query_groups if args.group_query_attention else None
    sizes = () if config.smallest_group is None else GroupSizes(smallest=config.smallest_group).of(config.widest.cp)
    kinds = args.cp_comm_type
    if sizes and len(kinds) not in (1, args.num_layers):  # Megatron looks at it under a fixed group only
        raise ConfigError(
            f"--cp-comm-type {' '.join(kinds)}: names {len(kinds)} kinds for {args.num_layers} layers. Give one for "
            "all, or one for each layer."
        )
    asked = te_versions.asked_of(args, cp_comm_types=kinds, query_groups=groups, group_sizes=sizes)
    te_versions.check(version, asked)
    if not dry_run:
        _check_that_megatron_has_it(version)
    return [
        f"Transformer Engine {version}: takes packed samples (its Python is tested in {', '.join(te_versions.TESTED)})"
    ]


def _check_that_megatron_has_it(version: str | None) -> None:
    from megatron.core.extensions.transformer_engine import HAVE_TE

    if not HAVE_TE:
        raise MissingDependency(
            f"Transformer Engine {version} is installed, but Megatron could not import it. Try `python -c 'import "
            f"transformer_engine.pytorch'`, and install '{te_versions.INSTALL}' anew."
        )


def topology_of(args: argparse.Namespace, world: int | None = None) -> Topology:
    """Group sizes from parsed arguments, before any process group exists.

    Args:
        world: ranks of the run; None: the environment says how many.
    """
    tp, pp, cp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    world = int(os.environ.get("WORLD_SIZE", "1")) if world is None else world
    model = tp * pp * cp
    if world % model:
        raise ConfigError(
            f"world size {world}: no multiple of TP {tp} x PP {pp} x CP {cp} = {model}. Start a multiple of "
            f"{model} ranks."
        )
    interleaved = (
        args.num_layers_per_virtual_pipeline_stage is not None or args.num_virtual_stages_per_pipeline_rank is not None
    )
    return Topology(
        dp=world // model,
        cp=cp,
        tp=tp,
        pp=pp,
        vpp=2 if interleaved else 1,  # the exact number is Megatron's to work out; more than one is what matters
        ep=args.expert_model_parallel_size,
        fsdp=bool(args.use_torch_fsdp2 or args.use_megatron_fsdp),
        sequence_parallel=bool(args.sequence_parallel),
        quantized_rows=_quantized_rows(args),
    )


def _quantized_rows(args: argparse.Namespace) -> int:
    if not args.fp8:
        return 1
    if args.fp8_recipe not in FP8_ROWS:
        raise ConfigError(
            f"--fp8-recipe {args.fp8_recipe}: how many rows it wants a multiple of is not known. Use one of "
            f"{', '.join(FP8_ROWS)}."
        )
    return FP8_ROWS[args.fp8_recipe]


def _rows_or_max(word: str) -> int | str:
    if word != "max" and not word.isdecimal():
        raise argparse.ArgumentTypeError(f"{word!r} is neither a number of rows nor max")
    return word if word == "max" else int(word)


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _dataset(args: argparse.Namespace) -> str:
    chosen = [
        name
        for name, given in (
            ("--use-varlen-dataset", args.use_varlen_dataset),
            ("--sft", args.sft),
            ("--packing-dataset", args.packing_dataset is not None),
        )
        if given
    ]
    if args.use_varlen_dataset and args.sft:
        raise ConfigError("--use-varlen-dataset and --sft: each selects a dataset. Choose one.")
    if args.sft and args.varlen_sbhd_validation:
        raise ConfigError(
            "--sft with --varlen-sbhd-validation: an SFT row holds several samples. Use --use-varlen-dataset."
        )
    if not chosen:
        raise ConfigError(
            "packing needs a dataset of samples with their own lengths. Add --use-varlen-dataset, --sft, or "
            "--packing-dataset module:Class."
        )
    if args.packing_dataset is not None:
        return str(args.packing_dataset)
    if args.sft:
        return "sft"
    return "mock" if args.mock_data else "varlen"


def _scheduler(args: argparse.Namespace) -> str | None:
    named = _named_scheduler(args)
    if not args.varlen_sbhd_validation:
        return named or DEFAULT_SCHEDULER
    if named is not None:
        raise ConfigError(
            f"--varlen-sbhd-validation with --sequence-packing-scheduler {named}: the reference run does not pack. "
            "Drop one of them."
        )
    return None


def _trainable(name: str | None) -> str | None:
    return None if name is None else check_trainable(name)


def _named_scheduler(args: argparse.Namespace) -> str | None:
    """What --sequence-packing-scheduler says, or --dynamic-context-parallel says in its place."""
    named: str | None = args.sequence_packing_scheduler
    dynamic = named is not None and check_scheduler(named) == DYNAMIC_SCHEDULER
    if not args.dynamic_context_parallel:
        if not dynamic and args.min_dynamic_context_parallel_size != 1:
            raise ConfigError(
                f"--min-dynamic-context-parallel-size {args.min_dynamic_context_parallel_size}: without "
                "--dynamic-context-parallel every group has --context-parallel-size ranks. Drop the flag."
            )
        return named
    if named is not None and not dynamic:
        raise ConfigError(
            f"--dynamic-context-parallel with --sequence-packing-scheduler {named}: it is a scheduler of its own. Drop "
            "one of them."
        )
    return named or DYNAMIC_SCHEDULER


def _attention(args: argparse.Namespace, *, packed: bool) -> str:
    local = args.transformer_impl == "local"
    wanted = args.packing_attention or "auto"
    if wanted == "auto" and args.spec is not None:
        return "spec"
    if wanted == "auto":
        # The reference run keeps Megatron's own attention: it is what packed runs are compared with.
        return ("sdpa" if packed else "stock") if local else "te"
    if wanted in (*OUR_KERNELS, "stock") and not local:
        raise ConfigError(
            f"--packing-attention {wanted} with --transformer-impl {args.transformer_impl}. Use "
            "--transformer-impl local."
        )
    if local and wanted in (*OUR_KERNELS, "te") and args.spec is not None:
        raise ConfigError(
            f"--spec {' '.join(args.spec)} with --packing-attention {wanted}: two layer specs. Drop one of them."
        )
    return "sdpa" if wanted in OUR_KERNELS else str(wanted)


def _check_order(args: argparse.Namespace) -> None:
    if args.packing_shuffle and args.dataloader_type == "cyclic":
        raise ConfigError(
            "--packing-shuffle with --dataloader-type cyclic: two shuffles, one over the other. Drop --dataloader-type."
        )


def _warnings_of_experts(args: argparse.Namespace) -> list[str]:
    """What of a mixture of experts depends on how samples are packed. Padding does not count in any loss."""
    if not args.num_experts:
        return []
    said = []
    if any(_as_list(args.moe_aux_loss_coeff)):  # the z-loss is a sum over tokens, whatever their packs
        said.append(
            "WARNING: auxiliary losses of the experts' router are computed microbatch by microbatch, so that they "
            "depend on how samples are packed"
        )
    if args.moe_expert_capacity_factor is not None:
        said.append(
            f"WARNING: --moe-expert-capacity-factor {args.moe_expert_capacity_factor}: which tokens an expert drops "
            "depends on how samples are packed, and padding takes places too"
        )
    return said


def _warnings_of_order(args: argparse.Namespace) -> list[str]:
    if args.dataloader_type != "cyclic":
        return []
    said = (
        "--dataloader-type cyclic: Megatron shuffles all samples of the run at once, so that some rows come again "
        "before others came once, and another --train-iters is another order"
    )
    if args.data_sharding:
        said += "; on resuming with other data parallelism some samples come twice and others never"
    return [f"WARNING: {said}. --packing-shuffle does neither"]


def _check_chat_format(args: argparse.Namespace) -> None:
    if args.packing_chat_format == "plain" and args.tokenizer_type == "NullTokenizer":
        raise ConfigError("--packing-chat-format plain with NullTokenizer: it knows only numbers. Use bare.")
