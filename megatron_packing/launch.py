"""How does an unmodified Megatron script get packing? Start it through this launcher.

    torchrun --nproc-per-node 8 -m megatron_packing.launch [options] SCRIPT [flags]

Options: --device cpu|cuda|auto, --config FILE ..., --dry-run; --help lists them and packing's flags.

The launcher decides the device, reads the config files, installs our hooks into Megatron and runs the
script as `__main__`, with its own folder first on the path. Flags after SCRIPT are the script's and
ours together. Works under torchrun, under srun (with torchrun's environment variables), and alone, as
one process.
"""

import argparse
import os
import runpy
import shlex
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from megatron_packing.errors import ConfigError, PackingError, SampleError

_PEERS = "megatron_packing.mcore.peers"  # loads torch, so that it is there only once a run has begun


def main(argv: Sequence[str] | None = None) -> None:
    """Run a training script with packing available to it. `argv` is the command line without the program."""
    options = _parse(sys.argv[1:] if argv is None else argv)
    try:
        _run(options)
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            _tell_others(f"it left with exit code {leaving.code}")
            raise
    except KeyboardInterrupt:
        _end_with(130, "interrupted")
    except BaseException as error:  # a checkpoint's failure is no Exception
        _print_what_nobody_foresaw(error)
        first = _first_cause(error)
        if first is not None:
            _end_with(1, f"another rank ended: {first}")
        # One clear line on every rank: what is a PackingError is the user's to mend.
        _end_with(2 if isinstance(error, PackingError) else 1, _in_one_line(error))
    if peers := sys.modules.get(_PEERS):
        peers.leave()


def _end_with(code: int, cause: str) -> NoReturn:
    """Tell the other ranks, say it in the last line, and end in bounded time."""
    _tell_others(cause)
    print(f"[rank {os.environ.get('RANK', '0')}] megatron_packing: error: {cause}", file=sys.stderr, flush=True)
    sys.exit(code)


def _print_what_nobody_foresaw(error: BaseException) -> None:
    """The traceback of a bug, also where it travels as a failure that every rank tells.

    A row that cannot be used is no bug: what a parser or a tokenizer said of it is in our message.
    """
    if isinstance(error, SampleError):
        return
    unforeseen = error.__cause__ if isinstance(error, PackingError) else error
    if unforeseen is not None and not isinstance(unforeseen, PackingError):
        traceback.print_exception(unforeseen)


def _first_cause(error: BaseException) -> str | None:
    """What another rank ended of, if that is why this one ends."""
    peers = sys.modules.get(_PEERS)
    return peers.first_cause(error) if peers else None


def _in_one_line(error: BaseException) -> str:
    peers = sys.modules.get(_PEERS)
    if isinstance(error, PackingError) or not peers:
        return str(error) or repr(error)  # many of Megatron's assertions say nothing; their line is in the traceback
    return str(peers.describe(error))


def _tell_others(cause: str) -> None:
    if peers := sys.modules.get(_PEERS):
        peers.tell(f"rank {peers.rank()}: {cause}")
        peers.bound_teardown()


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="megatron_packing.launch",
        description="Run a Megatron training script with sequence packing. The launcher's own options come first; "
        "flags of the script and of packing follow the script's name. SCRIPT --help lists Megatron's flags too.",
        formatter_class=_HelpWithPackingFlags,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: cuda where there is one"
    )
    parser.add_argument(
        "--config",
        type=Path,
        action="append",
        default=[],
        help="YAML file of flags for the script; of several the later one wins, and the command line over all",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check every flag as rank RANK of WORLD_SIZE would (environment; default: 0 of 1), then stop; no device "
        "and no file is needed",
    )
    parser.add_argument("script", type=Path, help="the training script, e.g. Megatron-LM's pretrain_gpt.py")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="flags of the script and of packing")
    return parser.parse_args(argv)


class _HelpWithPackingFlags(argparse.HelpFormatter):
    """The launcher's help, followed by packing's own flags in one group."""

    def format_help(self) -> str:
        from megatron_packing.mcore.args import add_packing_args

        flags = add_packing_args(argparse.ArgumentParser(add_help=False, usage=argparse.SUPPRESS))
        return super().format_help() + "\n" + argparse.ArgumentParser.format_help(flags).lstrip()


def _run(options: argparse.Namespace) -> None:
    if not options.script.is_file():
        raise ConfigError(f"{options.script}: no such script. Give the path of a Megatron training script.")
    flags, left_out = list(options.flags), {}
    if options.config:
        from megatron_packing.config_file import flags_left_out, merge_flags

        for path in reversed(options.config):
            flags = merge_flags(path, flags)
            left_out |= dict.fromkeys(flags_left_out(path), path)
    _become_single_process_if_alone()
    device = _choose_device(options.device, dry_run=options.dry_run)
    if device == "cpu":
        flags += _start_cpu_runtime(flags)
    from megatron_packing.mcore import hooks

    hooks.install(dry_run=options.dry_run, left_out=left_out)
    sys.argv = [str(options.script), *flags]
    if options.dry_run:
        print(f"megatron_packing: dry run of {os.environ['WORLD_SIZE']} ranks: {shlex.join(sys.argv)}", flush=True)
    sys.path.insert(0, str(options.script.resolve().parent))
    runpy.run_path(str(options.script), run_name="__main__")


def _choose_device(wanted: str, *, dry_run: bool) -> str:
    import torch

    found = torch.cuda.is_available()
    if wanted == "auto":
        return "cuda" if found else "cpu"
    if wanted == "cuda" and not found:
        if not dry_run:
            raise ConfigError("--device cuda: torch finds no CUDA device. Use --device cpu or auto.")
        # Flags for a cluster can be checked on a laptop: stand in for the devices, change no flag.
        from megatron_packing.mcore import cpu_runtime

        cpu_runtime.install()
    return wanted


def _start_cpu_runtime(flags: Sequence[str]) -> list[str]:
    """Stand in for CUDA; returns the flags that the script needs on top of the user's."""
    from megatron_packing.mcore import cpu_runtime

    cpu_runtime.install()
    cpu_runtime.patch_megatron()
    added = cpu_runtime.missing_flags(flags)
    if added and os.environ["RANK"] == "0":
        print(f"megatron_packing: on CPU, added: {' '.join(added)}", flush=True)
    return added


def _become_single_process_if_alone() -> None:
    """Without torchrun, be rank 0 of 1."""
    if "RANK" in os.environ:
        return
    # Port 0: the store takes a free one itself, which no other process can take between a look and the use.
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update(alone)


if __name__ == "__main__":
    main()
