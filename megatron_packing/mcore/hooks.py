"""Where does packing enter Megatron? At six places, all in this file; without our flags each passes straight through.

1. `parse_and_validate_args`: our flags join the parser; what must hold is set before validation. For inputs that
   Megatron packs itself (--packing-attention alone) that is all there is to do.
2. `pretrain`: our datasets take the place of the script's, our `get_batch` that of the script's.
3. `get_forward_backward_func`: each step's samples are packed, and the schedule runs the packs.
4. `compile_helpers`: skipped where the wheel ships the compiled helpers without their Makefile.
5. A forward pre-hook on each model chunk hands in the boundaries of the current pack, whatever the
   script built.
6. `check_checkpoint_args`: of the arguments in a checkpoint, ours is taken over where Megatron takes over its own.
"""

import argparse
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_packing.config import PackingConfig
from megatron_packing.errors import ConfigError
from megatron_packing.mcore import compat
from megatron_packing.schedule import warm_up

_installed = False
_dry_run = False
_config: PackingConfig | None = None
_kernel = "auto"
_left_out: Mapping[str, Path] = {}


def install(*, dry_run: bool = False, left_out: Mapping[str, Path] | None = None) -> None:
    """Patch Megatron. Call once, before it parses its arguments; the launcher does it for you.

    Args:
        dry_run: stop with exit code 0 once Megatron and we have checked every flag.
        left_out: flags that a file of flags switches off, with the file; they must exist all the same.
    """
    global _installed, _dry_run, _left_out
    _dry_run, _left_out = dry_run, left_out or {}
    if _installed:
        return
    compat.check_version()
    _chain_argument_parsing()
    _chain_pretrain()
    _chain_forward_backward()
    _skip_missing_makefile()
    _chain_checkpoint_arguments()
    _installed = True


def active_config() -> PackingConfig | None:
    """The settings of this run; None where none of our features is on, or arguments are not parsed yet."""
    return _config


def kernel_of_our_attention() -> str:
    """What --packing-attention says of our attention, with packing or without."""
    return _kernel


def _rebind_in_script(original: Callable[..., Any], replacement: Callable[..., Any]) -> None:
    """A script that imported a function before it called `install` holds the original under a name of its own."""
    script = vars(sys.modules["__main__"])
    for name, value in list(script.items()):
        if value is original:
            script[name] = replacement


# --- 1. arguments ---------------------------------------------------------------------------------


def _chain_argument_parsing() -> None:
    from megatron.training import arguments

    from megatron_packing.mcore import args as packing_args
    from megatron_packing.mcore.dry_run import check_model_and_stop

    original = arguments.parse_and_validate_args

    @functools.wraps(original)
    def parse_and_validate_args(
        extra_args_provider: Callable[..., Any] | None = None, *rest: Any, **keywords: Any
    ) -> argparse.Namespace:
        def provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
            parser = packing_args.add_packing_args(extra_args_provider(parser) if extra_args_provider else parser)
            compat.mend_help(parser)
            _check_spelling(parser)
            return parser

        parse = arguments.parse_args

        @functools.wraps(parse)
        def parse_args(*inner: Any, **inner_keywords: Any) -> argparse.Namespace:
            parsed = parse(*inner, **inner_keywords)
            _configure(parsed)
            return parsed

        # Validation reads these settings, so that they are set between parsing and validating.
        arguments.parse_args = parse_args
        if _dry_run:
            arguments.set_global_variables = check_model_and_stop
        try:
            return original(provider, *rest, **keywords)
        finally:
            arguments.parse_args = parse

    arguments.parse_and_validate_args = parse_and_validate_args
    _rebind_in_script(original, parse_and_validate_args)


def _check_spelling(parser: argparse.ArgumentParser) -> None:
    for flag, path in _left_out.items():
        if flag not in parser._option_string_actions:
            raise ConfigError(f"--config {path}: switches off {flag}, which is no flag. Correct or drop the key.")


def _configure(parsed: argparse.Namespace) -> None:
    global _config, _kernel
    from megatron_packing.mcore import args as packing_args
    from megatron_packing.mcore.checkpoints import check_tracker

    _config, _kernel, said = None, packing_args.kernel(parsed), []
    if packing_args.wants_packing(parsed):
        _config = packing_args.resolve(parsed)
        check_tracker(parsed.load)
        said = packing_args.check_transformer_engine(_config, parsed, dry_run=_dry_run)
        said += packing_args.apply(_config, parsed)
    elif parsed.packing_attention is not None:
        said = packing_args.apply_to_packed_inputs(parsed)
    for line in said if parsed.rank == 0 else []:
        print(f"megatron_packing: {line}", flush=True)


# --- 2. datasets and get_batch --------------------------------------------------------------------


def _chain_pretrain() -> None:
    import megatron.training
    from megatron.training import training

    original = training.pretrain

    @functools.wraps(original)
    def pretrain(
        cfg_container: Any,
        dataset_provider: Callable[..., Any],
        model_type: Any,
        forward_step_func: Callable[..., Any],
        *rest: Any,
        **keywords: Any,
    ) -> Any:
        if _config is not None:
            from megatron_packing.mcore.provider import make_provider

            dataset_provider = make_provider(_config)
            if _config.packed:
                _replace_get_batch(forward_step_func)
                warm_up(_config.scheduler or "")  # compiles now what the first step would wait for
        try:
            return original(cfg_container, dataset_provider, model_type, forward_step_func, *rest, **keywords)
        finally:  # Megatron leaves through sys.exit where --exit-interval and its kin say so
            if _config is not None and _config.packed:
                _packed_runner(_config).run_ends()

    # Scripts import the one, Megatron's own wrappers the other.
    training.pretrain = megatron.training.pretrain = pretrain
    _rebind_in_script(original, pretrain)


def _replace_get_batch(forward_step_func: Callable[..., Any]) -> None:
    """The script's forward step keeps everything but where its batch comes from."""
    while isinstance(forward_step_func, functools.partial):
        forward_step_func = forward_step_func.func
    script = forward_step_func.__globals__
    if "get_batch" not in script or "BATCH_KEYS" not in script:
        raise ConfigError(
            f"{script.get('__file__', 'the script')}: packing needs a forward step that takes its batch from get_batch "
            "in the order of BATCH_KEYS, as Megatron-LM's pretrain_gpt.py of core_r0.19.0 does. Use that script, or "
            "examples/pretrain_gpt.py."
        )
    keys = list(script["BATCH_KEYS"])

    def get_batch(data_iterator: Iterator[Any], vp_stage: int | None = None) -> list[Any]:
        share = next(data_iterator)
        rows = {
            "tokens": share.tokens_R,
            "labels": share.labels_R,
            "loss_mask": share.loss_mask_R,
            "position_ids": share.position_ids_R,
        }
        fields = {key: None if value is None else value[None] for key, value in rows.items()}
        # Boundaries are handed in by the forward pre-hook; with None here the stock step leaves them alone.
        return [fields.get(key) for key in keys]

    script["get_batch"] = get_batch


# --- 3. the schedule ------------------------------------------------------------------------------


def _chain_forward_backward() -> None:
    from megatron.training import training

    original = training.get_forward_backward_func

    @functools.wraps(original)
    def get_forward_backward_func(*args: Any, **keywords: Any) -> Callable[..., Any]:
        schedule = original(*args, **keywords)
        if _config is None or not _config.packed:
            return schedule
        return _packed_runner(_config).wrap(schedule)

    training.get_forward_backward_func = get_forward_backward_func


@functools.cache
def _packed_runner(config: PackingConfig) -> Any:
    """One runner for training and evaluation: they share the models' hooks and the counts."""
    from megatron_packing.mcore.step import PackedStepRunner

    return PackedStepRunner(config)


# --- 4. compiled helpers --------------------------------------------------------------------------


def _skip_missing_makefile() -> None:
    from megatron.core.datasets import utils

    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
        utils.compile_helpers = lambda: None


# --- 6. checkpoints -------------------------------------------------------------------------------


def _chain_checkpoint_arguments() -> None:
    from megatron.training import checkpointing
    from megatron.training.global_vars import get_args

    original = checkpointing.check_checkpoint_args

    @functools.wraps(original)
    def check_checkpoint_args(checkpoint_args: Any, *rest: Any, **keywords: Any) -> None:
        original(checkpoint_args, *rest, **keywords)
        if _config is not None and _config.packed:
            from megatron_packing.mcore.fit_cost import take_over

            take_over(checkpoint_args, get_args())

    checkpointing.check_checkpoint_args = check_checkpoint_args
