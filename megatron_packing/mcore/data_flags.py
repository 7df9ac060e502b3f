"""What would a run with these flags read? Training's own parser and settings, without a run.

Whatever flag training takes is taken here: nothing is declared a second time. Imports Megatron: seconds.
"""

import argparse
import contextlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from megatron_packing.config import PackingConfig
from megatron_packing.errors import ConfigError
from megatron_packing.mcore import args as packing_args
from megatron_packing.mcore.compat import check_version

_NULL = "null:"

# What tokenizer libraries raise over files that they cannot use.
_BUILD_ERRORS = (ImportError, OSError, RuntimeError, ValueError, TypeError, LookupError, AssertionError)

_GROUPS_OF_DATA = frozenset({packing_args.DATA_GROUP, "data and dataloader", "tokenizer", "sft"})
"""Groups of Megatron's parser and of ours whose flags say what is read."""

_FLAGS_OF_DATA = frozenset(
    {
        "seed",
        "tensor_model_parallel_size",
        "context_parallel_size",
        "sequence_parallel",
        "max_seqlen_per_dp_cp_rank",
        "sequence_packing_scheduler",
        "varlen_sbhd_validation",
    }
)
"""Further flags, by their attribute, that change what is read or are checked with it."""

_DEFAULT_SPLIT = "969, 30, 1"
"""What Megatron takes where --split is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRun:
    """What a run reads, and how."""

    args: argparse.Namespace
    """Megatron's arguments, with the caller's own flags among them."""
    packing: PackingConfig
    dataset_class: type[Any]
    """A `MegatronDataset`."""
    config: Any
    """A `PackingDatasetConfig`, with the tokenizer in it."""
    ignored: tuple[str, ...]
    """Flags of training that were given and have no bearing on the data."""


def resolve_run(flags: Sequence[str], add_own: Callable[[argparse.ArgumentParser], object]) -> DataRun:
    """The data of a run with these flags.

    Args:
        flags: the command line: flags of training, and the caller's own. Without a choice of a dataset they mean
            --use-varlen-dataset; without --tokenizer-type it is guessed from --tokenizer-model.
        add_own: adds the caller's own flags to the parser, before training's.

    Raises:
        ConfigError: an unknown flag, or what training would refuse.
    """
    with _quietly():
        check_version()
        parser, own = _parser(add_own)
        args = parser.parse_args(list(flags))
        ignored = _without_bearing(parser, flags, own)
        _complete(args)
        model = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
        packing = packing_args.resolve(args, world=model * args.expert_model_parallel_size)
        from megatron_packing.mcore.provider import dataset_class_of, dataset_config_of

        dataset_class = dataset_class_of(packing.dataset)
        config = dataset_config_of(packing, args, _build_tokenizer(args))
    return DataRun(args=args, packing=packing, dataset_class=dataset_class, config=config, ignored=ignored)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Megatron warns at import about every kernel that is not installed, and libraries print into our results."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        logging.getLogger("megatron").setLevel(logging.WARNING)  # its settings, some of which mean nothing here
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # says that there is no GPU
        yield


class _Parser(argparse.ArgumentParser):
    """A parser with errors that are ours to print."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. Flags are those of --help and those of training.")


def _parser(add_own: Callable[[argparse.ArgumentParser], object]) -> tuple[argparse.ArgumentParser, set[str]]:
    """Training's parser with the caller's flags, and the words of the latter."""
    from megatron.training.arguments import add_megatron_arguments

    parser = _Parser(allow_abbrev=False, add_help=False)
    add_own(parser)
    own = set(parser._option_string_actions)
    return packing_args.add_packing_args(add_megatron_arguments(parser)), own


def _without_bearing(parser: argparse.ArgumentParser, flags: Sequence[str], own: set[str]) -> tuple[str, ...]:
    of_data = {
        word
        for group in parser._action_groups
        for action in group._group_actions
        if group.title in _GROUPS_OF_DATA or action.dest in _FLAGS_OF_DATA
        for word in action.option_strings
    }
    given = dict.fromkeys(word.split("=", 1)[0] for word in flags if word.startswith("--"))
    return tuple(word for word in given if word not in of_data | own)


def _complete(args: argparse.Namespace) -> None:
    """Fill in what Megatron fills in while it starts a run, and what is not asked for here."""
    args.rank, args.world_size = 0, 1
    args.pad_vocab_size = False  # the size of a model's embedding, which is not looked at here
    if args.split is None and (args.data_path or args.data_args_path):
        args.split = _DEFAULT_SPLIT
    if not (args.sft or args.packing_dataset or args.use_varlen_dataset):
        args.use_varlen_dataset = True
    given = [args.data_path or args.data_args_path]
    given += [args.train_data_path or args.valid_data_path or args.test_data_path or args.per_split_data_args_path]
    if sum(map(bool, [*given, args.mock_data])) != 1:
        raise ConfigError(
            "data: give exactly one of --data-path (or --data-args-path), --train-data-path with --valid-data-path and "
            "--test-data-path (or --per-split-data-args-path), and --mock-data."
        )
    if args.tokenizer_type is None:
        _guess_tokenizer(args)


def _guess_tokenizer(args: argparse.Namespace) -> None:
    name = args.tokenizer_model
    if name is None:
        raise ConfigError(
            "--tokenizer is missing: a Hugging Face folder, a SentencePiece file, or null:VOCAB for rows of numbers."
        )
    if name.startswith(_NULL):
        vocab_size = name.removeprefix(_NULL)
        if not (vocab_size.isascii() and vocab_size.isdigit() and int(vocab_size) > 0):
            raise ConfigError(f"--tokenizer {name}: after null: comes the size of the vocabulary, such as null:1000.")
        args.tokenizer_type, args.tokenizer_model, args.vocab_size = "NullTokenizer", None, int(vocab_size)
        return
    path = Path(name)
    if path.is_dir():
        args.tokenizer_type = "HuggingFaceTokenizer"
    elif not path.exists():  # before any library takes a mistyped name for something to download
        raise ConfigError(f"--tokenizer {name}: no such file or folder. Give --tokenizer-type too if it is a hub's id.")
    elif ".model" in path.suffixes:  # also tokenizer.model.v3
        args.tokenizer_type = "SentencePieceTokenizer"
    else:
        raise ConfigError(
            f"--tokenizer {name}: neither a folder (Hugging Face) nor a .model file (SentencePiece). Give "
            "--tokenizer-type."
        )


def _build_tokenizer(args: argparse.Namespace) -> Any:
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

    if args.tokenizer_type == "NullTokenizer" and not args.vocab_size:
        raise ConfigError(
            "--tokenizer-type NullTokenizer needs --vocab-size: the number of ids, the last one ends texts."
        )
    try:
        return build_tokenizer(args)
    except _BUILD_ERRORS as error:
        raise ConfigError(
            f"--tokenizer {args.tokenizer_model} cannot be built as a {args.tokenizer_type} "
            f"({type(error).__name__}: {error}). Check the path and --tokenizer-type."
        ) from error
