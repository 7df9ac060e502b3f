"""Which of Megatron's tokenizers is meant, and how is it built without a training run? Imports Megatron: seconds."""

import argparse
import contextlib
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from megatron_packing.errors import ConfigError
from megatron_packing.mcore.compat import check_version
from megatron_packing.mcore.tokenizer import MegatronTokenizer

_NULL = "null:"

# What tokenizer libraries raise over files that they cannot use.
_BUILD_ERRORS = (ImportError, OSError, RuntimeError, ValueError, TypeError, LookupError, AssertionError)


def load_tokenizer(name: str | None, kind: str | None, flags: Sequence[str]) -> MegatronTokenizer:
    """The tokenizer that a training run with these flags would use.

    Args:
        name: a folder, a file, "null:VOCAB", or whatever `kind` takes as --tokenizer-model; None where it needs none.
        kind: --tokenizer-type; None: guessed from `name`.
        flags: further tokenizer flags of Megatron, such as --vocab-size.

    Raises:
        ConfigError: no tokenizer can be told or built from these, or a flag is none of Megatron's tokenizer flags.
    """
    if kind is None:
        name, kind, flags = _guess(name, flags)
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        # Megatron warns at import about every kernel that is not installed; a tokenizer needs none. And libraries
        # that print would spoil our JSON.
        warnings.simplefilter("ignore")
        check_version()
        model = [] if name is None else ["--tokenizer-model", name]
        return _build(_parse(["--tokenizer-type", kind, *model, *flags]))


def _guess(name: str | None, flags: Sequence[str]) -> tuple[str | None, str, Sequence[str]]:
    if name is None:
        raise ConfigError(
            "--tokenizer is missing: a Hugging Face folder, a SentencePiece file, or null:VOCAB for rows of numbers."
        )
    if name.startswith(_NULL):
        vocab_size = name.removeprefix(_NULL)
        if not (vocab_size.isascii() and vocab_size.isdigit() and int(vocab_size) > 0):
            raise ConfigError(f"--tokenizer {name}: after null: comes the size of the vocabulary, such as null:1000.")
        return None, "NullTokenizer", ["--vocab-size", vocab_size, *flags]
    path = Path(name)
    if path.is_dir():
        return name, "HuggingFaceTokenizer", flags
    if not path.exists():  # before any library takes a mistyped name for something to download
        raise ConfigError(f"--tokenizer {name}: no such file or folder. Give --tokenizer-type too if it is a hub's id.")
    if ".model" in path.suffixes:  # also tokenizer.model.v3
        return name, "SentencePieceTokenizer", flags
    raise ConfigError(
        f"--tokenizer {name}: neither a folder (Hugging Face) nor a .model file (SentencePiece). Give --tokenizer-type."
    )


class _Parser(argparse.ArgumentParser):
    """Megatron's tokenizer flags, with errors that are ours to print."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. inspect takes its own flags (see --help) and Megatron's tokenizer flags.")


def _parse(flags: Sequence[str]) -> argparse.Namespace:
    """Megatron's defaults and its reading of `flags`; tokenizer flags alone, as any other would have no effect."""
    from megatron.training import arguments

    parser = _Parser(allow_abbrev=False, add_help=False)
    arguments._add_tokenizer_args(parser)
    arguments._add_sft_args(parser)
    args = parser.parse_args(flags)
    if args.sft:
        raise ConfigError("--sft: inspect shows each row as one sample, not cut into conversations. Drop the flag.")
    return args


def _build(args: argparse.Namespace) -> MegatronTokenizer:
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    args.pad_vocab_size = False  # the size of a model's embedding, which is not looked at here
    if args.tokenizer_type == "NullTokenizer" and not args.vocab_size:
        raise ConfigError(
            "--tokenizer-type NullTokenizer needs --vocab-size: the number of ids, the last one ends texts."
        )
    try:
        return MegatronTokenizer(build_tokenizer(args))
    except _BUILD_ERRORS as error:
        raise ConfigError(
            f"--tokenizer {args.tokenizer_model} cannot be built as a {args.tokenizer_type} "
            f"({type(error).__name__}: {error}). Check the path and --tokenizer-type."
        ) from error
