"""How does a command take the flags of training? By training's own parser, with short names and a help of its own."""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_packing.cli.output import say

if TYPE_CHECKING:
    from megatron_packing.mcore.data_flags import DataRun

type AddFlags = Callable[[argparse.ArgumentParser], None]

SHORT_NAMES = {"--data": "--data-path", "--tokenizer": "--tokenizer-model", "--schema": "--packing-schema"}

_MEGATRONS = """
Short names: --data for --data-path, --tokenizer for --tokenizer-model, --schema for --packing-schema. A tokenizer is a
Hugging Face folder, a SentencePiece .model file, or null:VOCAB for rows of numbers; its --tokenizer-type is guessed.

Megatron's own flags of data and tokenizers are taken as in training, among them:
  --data-path [WEIGHT] PATH ...  --train-data-path, --valid-data-path, --test-data-path  --data-args-path
  --split  --data-cache-path  --mock-data  --seq-length N  --seed N  --sft  --sft-tokenizer-prompt-format
  --tokenizer-type  --tokenizer-model  --vocab-size  --chat-template  --tokenizer-special-tokens

Flags of training without bearing on {matter} are passed over, and named.
"""


def in_full(word: str, short_names: Mapping[str, str] = SHORT_NAMES) -> str:
    """A flag under training's name, with its value if that stands in the same word; other words as they are."""
    flag, equals, value = word.partition("=")
    return short_names.get(flag, flag) + equals + value


def wants_help(words: Sequence[str]) -> bool:
    """Whether help is asked for, which needs no import of Megatron."""
    return "--help" in words or "-h" in words


def resolved(
    words: Sequence[str], add_own: AddFlags, *, matter: str, bearing: frozenset[str] = frozenset()
) -> "DataRun":
    """The data of a run with these flags; says which of them had no bearing. Imports Megatron: seconds.

    Args:
        words: the command line, each of them `in_full`.
        add_own: adds the command's own flags.
        matter: what flags may have a bearing on, for the message.
        bearing: flags of training that have, besides those of data.

    Raises:
        ConfigError: an unknown flag, or what training would refuse.
    """
    from megatron_packing.mcore.data_flags import resolve_run

    sys.path.insert(0, os.getcwd())  # as a script's folder is, for --packing-dataset
    run = resolve_run(words, add_own)
    ignored = [flag for flag in run.ignored if flag not in bearing]
    if ignored:
        say("note", f"no bearing on {matter}, passed over: {', '.join(ignored)}")
    return run


def help_of(usage: str, described: str | None, add_own: AddFlags, *, matter: str) -> str:
    """Help for a command: its own flags, ours of data, and what else is taken.

    Args:
        usage: program, command and the usual flags.
        described: what the command does.
        add_own: adds its own flags.
        matter: what flags may have a bearing on.
    """
    from megatron_packing.mcore.args import add_data_flags

    parser = argparse.ArgumentParser(
        prog=" ".join(usage.split()[:2]),
        usage=usage,
        description=described,
        epilog=_MEGATRONS.format(matter=matter),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    add_own(parser)
    add_data_flags(parser)
    return parser.format_help()


def at_least(lowest: int) -> Any:
    """A type of argument: an integer from `lowest` on."""

    def number(word: str) -> int:
        value = int(word)
        if value < lowest:
            raise argparse.ArgumentTypeError(f"{value} is less than {lowest}")
        return value

    return number
