"""What would packing make of these lengths? Plans every step of an epoch; without a data file no Megatron is needed.

Cost: 3 to 6 s for a million lengths, a scheduler; of a data file, tokenizing its rows first.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import typer

from megatron_packing.cli.baselines import padded_baseline, sorted_baseline
from megatron_packing.cli.capacity_advice import advise
from megatron_packing.cli.lengths import load_lengths
from megatron_packing.cli.model_flags import ModelFlags, cost_of
from megatron_packing.cli.output import console, print_json, say
from megatron_packing.cli.padded import padded_account
from megatron_packing.cli.plan_page import write_page
from megatron_packing.cli.plan_report import PlanReport
from megatron_packing.cli.plan_tables import print_tables
from megatron_packing.cli.planning import Setting, plan_steps, recommended
from megatron_packing.errors import CapacityError, ConfigError
from megatron_packing.schedule import (
    CHOOSES_GROUPS,
    NOT_IN_TRAINING,
    SCHEDULERS,
    CostModel,
    GroupSizes,
    check_scheduler,
)
from megatron_packing.schedule.memory import ActivationMemory
from megatron_packing.topology import Topology

type Int64Array = npt.NDArray[np.int64]


def plan(
    context: typer.Context,
    lengths: Annotated[
        Path | None,
        typer.Option(help='Sample lengths in tokens: .npy, .txt (one a line), .json (a list, or {"length": count}).'),
    ] = None,
    dp: Annotated[int, typer.Option("--dp", "--data-parallel-size", min=1, help="Data-parallel ranks.")] = 1,
    cp: Annotated[int, typer.Option("--cp", "--context-parallel-size", min=1, help="Context-parallel ranks.")] = 1,
    tp: Annotated[int, typer.Option("--tp", "--tensor-model-parallel-size", min=1, help="Tensor-parallel ranks.")] = 1,
    pp: Annotated[int, typer.Option("--pp", "--pipeline-model-parallel-size", min=1, help="Pipeline stages.")] = 1,
    ep: Annotated[int, typer.Option("--ep", "--expert-model-parallel-size", min=1, help="Expert-parallel ranks.")] = 1,
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="Pad to multiples of TP too, as sequence parallelism asks for.")
    ] = False,
    max_seqlen_per_dp_cp_rank: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens that a rank holds in one microbatch. Default: --seq-length / CP, rounded up."),
    ] = None,
    seq_length: Annotated[
        int | None, typer.Option(min=1, help="The longest sample; what is padded to without packing. Default: a pack.")
    ] = None,
    global_batch_size: Annotated[
        int | None, typer.Option(min=1, help="Samples of an optimizer step. Default: all of them in one step.")
    ] = None,
    scheduler: Annotated[
        list[str] | None,
        typer.Option(
            "--scheduler",
            "--sequence-packing-scheduler",
            help=f"One of {', '.join(SCHEDULERS)}; repeat to compare. Default: first_fit.",
        ),
    ] = None,
    packing_balance: Annotated[
        str,
        typer.Option(
            help="What balanced keeps small: the busiest rank's work over the step, or in each microbatch (lockstep). "
            "auto: lockstep with --pp or --ep above 1, else step."
        ),
    ] = "auto",
    max_seqs: Annotated[
        int | None, typer.Option("--max-seqs", "--thd-max-packed-sequences", min=1, help="Most samples in one pack.")
    ] = None,
    cost_linear: Annotated[
        float | None,
        typer.Option(
            help="Work of a token, in query-key pairs; 24576 is about a dense model of 7B parameters. Default: by the "
            "model's sizes, if they are given, else 0."
        ),
    ] = None,
    cost_quadratic: Annotated[float, typer.Option(help="Work of a query-key pair.")] = 1.0,
    cost_communication: Annotated[
        float, typer.Option(help="Work of a token, on every rank, where several ranks share its pack.")
    ] = 0.0,
    num_layers: Annotated[int | None, typer.Option(min=1, help="Of the model, for its memory and its work.")] = None,
    hidden_size: Annotated[int | None, typer.Option(min=1, help="Of the model.")] = None,
    num_attention_heads: Annotated[int | None, typer.Option(min=1, help="Of the model.")] = None,
    num_query_groups: Annotated[int | None, typer.Option(min=1, help="Default: as many as heads.")] = None,
    kv_channels: Annotated[int | None, typer.Option(min=1, help="Default: hidden size / heads.")] = None,
    ffn_hidden_size: Annotated[int | None, typer.Option(min=1, help="Default: as training's.")] = None,
    swiglu: Annotated[bool, typer.Option("--swiglu", help="The model's MLPs are gated.")] = False,
    padded_vocab_size: Annotated[
        int | None, typer.Option(min=1, help="Entries of the output layer; without it logits are not counted.")
    ] = None,
    recompute_granularity: Annotated[
        str | None, typer.Option(help="selective or full: what is computed again instead of kept.")
    ] = None,
    min_dynamic_context_parallel_size: Annotated[
        int, typer.Option(help="dynamic_cp: ranks of the smallest group; groups have 1, 2, 4, ... times as many.")
    ] = 1,
    any_group_size: Annotated[
        bool, typer.Option("--any-group-size", help="dynamic_cp: groups have any multiple of the smallest's ranks.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Shuffles lengths given as counts; a list keeps its order.")] = 1234,
    html: Annotated[
        Path | None, typer.Option(help="Also write a page with pictures here; it needs no network to be read.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output instead of tables.")] = False,
) -> None:
    """Show what packing would make of a file of lengths, or of a data file, next to padding.

    Instead of --lengths: --data PATH --tokenizer NAME, and every data and tokenizer flag that `inspect` takes, with
    --limit N for the first N rows of each file; that needs Megatron. Steps are consecutive global batches; an
    incomplete last one is left out. With --num-layers, --hidden-size and --num-attention-heads, work is the model's
    FLOPs, and what a rank keeps of activations is estimated in bytes. Nothing needs a GPU.
    """
    names = list(dict.fromkeys(map(check_scheduler, scheduler or ["first_fit"])))
    memory = ModelFlags(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_attention_heads=num_attention_heads,
        num_query_groups=num_query_groups,
        kv_channels=kv_channels,
        ffn_hidden_size=ffn_hidden_size,
        swiglu=swiglu,
        padded_vocab_size=padded_vocab_size,
        recompute_granularity=recompute_granularity,
    ).memory()
    setting = _setting(
        topology=Topology(dp=dp, cp=cp, tp=tp, pp=pp, ep=ep, sequence_parallel=sequence_parallel),
        max_tokens_per_rank=max_seqlen_per_dp_cp_rank,
        seq_length=seq_length,
        max_seqs=max_seqs,
        cost=cost_of(memory, linear=cost_linear, quadratic=cost_quadratic, communication=cost_communication),
        memory=memory,
        group_sizes=GroupSizes(smallest=min_dynamic_context_parallel_size, any_size=any_group_size),
        schedulers=names,
        balance=packing_balance,
    )
    for name in names:  # no samples are a valid step: it refuses a wrong setting before a large file is read
        setting.metrics(np.zeros(0, dtype=np.int64), name)
    if setting.topology.pad(setting.seq_length) > setting.capacity:
        say(
            "note",
            f"a run would refuse this setting: a pack holds {setting.capacity:,} tokens, and --seq-length lets a "
            f"sample have {setting.seq_length:,}.",
        )
    source, all_lengths, dropped, together = _read(lengths, context.args, setting, seed)
    if together > 1:
        capacity = setting.max_tokens_per_rank * (1 if max_seqlen_per_dp_cp_rank else together)  # as training's default
        setting = replace(setting, together=together, max_tokens_per_rank=capacity)
        say("note", f"each row's {together} samples share a pack; --global-batch-size counts rows, as in a run.")
    _check_fit(all_lengths, source, setting, seq_length_given=seq_length is not None)
    for name in names:
        if name in NOT_IN_TRAINING:
            say("note", f"training refuses {name}: {NOT_IN_TRAINING[name]}.")
    steps = _steps(all_lengths, source, None if global_batch_size is None else global_batch_size * together)
    report = _report(source, steps, names, setting, dropped=dropped)
    if html is not None:
        write_page(html, report)
        say("note", f"{html} is written; open it in a browser.")
    if as_json:
        print_json(_figures(report))
    else:
        print_tables(report)
        words = [] if report.recommended is None else [report.recommended.in_words()]
        for sentence in [*words, *([] if report.advice is None else report.advice.in_words())]:
            console().print(sentence)


def _read(lengths: Path | None, words: Sequence[str], setting: Setting, seed: int) -> tuple[str, Int64Array, int, int]:
    """What the lengths are of, the lengths, the rows that make no sample, and the samples of a row that stay together.

    Args:
        lengths: a file of lengths, or None for a data file.
        words: of the command line that are no flags of ours: those of data and tokenizer.
        setting: its sequence length is the longest sample's.
        seed: see `load_lengths`; of made-up data.
    """
    if lengths is not None:
        if words:
            raise ConfigError(f"{words[0]}: no flag that goes with --lengths. See megatron-packing plan --help.")
        return str(lengths), load_lengths(lengths, seed), 0, 1
    if not words:
        raise ConfigError("nothing to plan: give --lengths FILE, or --data PATH with --tokenizer NAME.")
    from megatron_packing.cli.data_lengths import data_lengths

    found = data_lengths(words, seq_length=setting.seq_length, seed=seed)
    return found.name, found.lengths, found.dropped, found.together


def _report(
    source: str, steps: Sequence[Int64Array], names: Sequence[str], setting: Setting, *, dropped: int
) -> PlanReport:
    planned = plan_steps(steps, names, setting, dropped=dropped)
    static = setting.max_tokens_per_rank * setting.topology.cp
    baselines = {"padded": padded_baseline(steps, setting.seq_length, setting.topology, setting.cost)}
    if max(int(step.max()) for step in steps) <= static:  # else a sample fits in groups only
        baselines["sorted"] = sorted_baseline(steps, static, setting.topology, setting.cost)
    return PlanReport(
        source=source,
        setting=setting,
        steps=steps,
        account=padded_account(np.concatenate(steps), setting.seq_length),
        baselines=baselines,
        planned=planned,
        recommended=recommended(steps, {name: one.mean for name, one in planned.items()}, setting),
        advice=advise(steps, setting),
    )


def _figures(report: PlanReport) -> dict[str, object]:
    """For JSON."""
    return {
        "padded": report.account.as_dict(),
        "schedulers": {name: one.mean.as_dict() for name, one in report.planned.items()},
        "recommended": None if report.recommended is None else asdict(report.recommended),
        "baselines": {name: one.as_dict() for name, one in report.baselines.items()},
        "advice": None if report.advice is None else report.advice.as_dict(),
        "activation_bytes": report.setting.activation_bytes,
    }


def _setting(
    *,
    topology: Topology,
    max_tokens_per_rank: int | None,
    seq_length: int | None,
    max_seqs: int | None,
    cost: CostModel,
    memory: ActivationMemory | None,
    group_sizes: GroupSizes,
    schedulers: Sequence[str],
    balance: str,
) -> Setting:
    """The setting with its defaults filled in, as training fills them in."""
    if max_tokens_per_rank is None:
        if seq_length is None:
            raise ConfigError(
                "--max-seqlen-per-dp-cp-rank is missing: the tokens that a rank holds in one microbatch. Give it, or "
                "--seq-length to take it from."
            )
        max_tokens_per_rank = topology.pad(seq_length) // topology.cp
    widest_cp = topology.cp * (topology.dp if CHOOSES_GROUPS.issuperset(schedulers) else 1)
    return Setting(
        topology=topology,
        max_tokens_per_rank=max_tokens_per_rank,
        widest_cp=widest_cp,
        seq_length=seq_length or max_tokens_per_rank * widest_cp,
        max_seqs=max_seqs,
        cost=cost,
        memory=memory,
        group_sizes=group_sizes,
        balance=balance,
    )


def _check_fit(lengths: Int64Array, path: str, setting: Setting, *, seq_length_given: bool) -> None:
    """No length is above what a sample or a pack may have; checked before planning, to name the place in the file."""
    sample = f"--seq-length is {setting.seq_length:,}"
    pack = f"a pack holds {setting.capacity_of}"
    limits = [(setting.seq_length, sample, "Raise --seq-length")] if seq_length_given else []
    for limit, what, remedy in [*limits, (setting.capacity, pack, "Raise --max-seqlen-per-dp-cp-rank")]:
        too_long = np.flatnonzero(lengths > limit)
        if too_long.size:
            first = int(too_long[0])
            raise CapacityError(
                f"{path}: length {first}, counted from 0, is {int(lengths[first]):,} tokens; {what} ({too_long.size:,} "
                f"of {lengths.size:,} are too long). {remedy}, or take these lengths out."
            )


def _steps(lengths: Int64Array, path: str, global_batch_size: int | None) -> list[Int64Array]:
    """Consecutive global batches, at least one."""
    size = global_batch_size or len(lengths)
    num_steps, left_out = divmod(len(lengths), size)
    if not num_steps:
        raise ConfigError(
            f"{path} holds {len(lengths):,} lengths; one step takes {size:,} (--global-batch-size). Lower it, or give "
            "more lengths."
        )
    if left_out:
        say(
            "note",
            f"{left_out:,} of {len(lengths):,} lengths are left out: they fill no global batch of {size:,} "
            f"({num_steps:,} steps are planned).",
        )
    return np.split(lengths[: num_steps * size], num_steps)
