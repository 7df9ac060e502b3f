"""Where does real chat text of very different lengths come from, without a download? Python's own docstrings.

Every docstring of the running interpreter's standard library becomes one question and its answer. So does every topic
of `help()`: these are chapters of the language reference, the longest nearly 300 times the median. A byte-level BPE
tokenizer is then trained on the pairs and saved as a Hugging Face folder with a ChatML template. The result in the
chosen folder:

    docstrings.jsonl     one {"messages": [user, assistant]} a line
    tokenizer/           tokenizer.json and tokenizer_config.json, for AutoTokenizer.from_pretrained
    manifest.json        what it was built from, so that a second call returns at once

Cost: some seconds of one core. Sources are parsed, never imported; only modules compiled into the interpreter are asked
directly. The same interpreter and options give the same bytes.
"""

import argparse
import ast
import hashlib
import importlib
import inspect
import json
import os
import platform
import random
import sys
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

END_OF_TEXT, TURN_START, TURN_END, PAD = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")

MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
"""A byte-level vocabulary needs every byte, or some text has no encoding."""

SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "lib2to3", "site-packages", "dist-packages", "__pycache__"})
"""Folders whose docstrings are about tests, a dead 2to3 grammar, or no part of the standard library."""

PUBLIC_NAMES = {
    "_collections_abc": "collections.abc",
    "_io": "io",
    "_pydatetime": "datetime",
    "_pydecimal": "decimal",
    "_signal": "signal",
    "nt": "os",
    "posix": "os",
}
"""Modules that implement a public one: people ask by the public name."""

TOPICS_MODULE = "pydoc_data.topics"
"""The source behind `help("with")` and the like."""

MAX_CALL_CHARS = 90
"""A longer signature reads as noise in a question; the question then names the callable only."""

# ChatML. The generation block holds what the assistant writes: its content and the mark that ends its turn. The line
# break after that mark is the template's, so it lies outside.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}
{%- else -%}
{{- message['content'] + '<|im_end|>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

QUESTIONS = (
    "What does `{call}` do?",
    "Explain the Python {kind} `{call}`.",
    "How do I use `{call}` in Python?",
    "Can you describe Python's {kind} `{call}`?",
    "I came across `{call}` in some Python code. What is it for?",
    "Please give me the documentation of the {kind} `{call}`.",
    "In Python, what should I know about `{call}`?",
)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Entry:
    """One documented name."""

    name: str
    """Dotted, from the module down: `textwrap.TextWrapper.wrap`."""
    kind: str
    """module, class, function, method, attribute, or topic of `help()`."""
    call: str
    """The name as the question writes it: with the signature if there is one."""
    doc: str
    """The docstring, cleaned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusStats:
    """What the corpus holds. Token counts are of whole conversations, with the template's marks."""

    pairs: int
    """Question and answer pairs written."""
    tokens: int
    """Tokens of all pairs together."""
    mean: float
    """Tokens of a pair, on average."""
    p50: int
    """Tokens: half of the pairs have at most this many."""
    p95: int
    """Tokens: 95 of 100 pairs have at most this many."""
    longest: int
    """Tokens of the longest pair."""
    vocab_size: int
    """Entries of the tokenizer; below the size asked for when the text has too few distinct pairs to merge."""
    duplicates: int
    """Docstrings dropped because an earlier name has the same text, upper case and white space aside."""
    unusable: int
    """Docstrings dropped because they cannot be written as UTF-8 or spell out a special token."""
    unparsed: int
    """Sources left out because this Python cannot parse them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusPaths:
    """Where the corpus lies."""

    jsonl: Path
    """The conversations, one a line."""
    tokenizer_dir: Path
    """The Hugging Face tokenizer's folder."""
    stats: CorpusStats
    """What is in it."""


# --- collecting: sources --------------------------------------------------------------------------------------------


def stdlib_sources(root: Path) -> list[tuple[str, Path]]:
    """Give (module name, file) for every source of the standard library, sorted by module name."""
    found = []
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        if SKIPPED_FOLDERS.intersection(parts[:-1]):
            continue
        # Folders such as config-3.12-x86_64-linux-gnu hold build files, which are no modules. The sysconfigdata of a
        # build is one, but it describes a machine.
        if all(part.isidentifier() for part in parts) and not parts[-1].startswith("_sysconfigdata"):
            found.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    if not found:
        raise FileNotFoundError(
            f"{root} holds no Python sources; the corpus is made of the standard library's. "
            "Run this with an interpreter that is installed with its library as .py files."
        )
    return sorted(found)


def entries_of_source(module: str, source: bytes) -> Iterator[Entry]:
    """Yield what a module's source documents: itself, its classes, functions and methods."""
    with warnings.catch_warnings():
        # Some sources hold escapes that the compiler warns of; they are not ours to mend.
        warnings.simplefilter("ignore")
        tree = ast.parse(source)
    module = PUBLIC_NAMES.get(module, module)
    if doc := ast.get_docstring(tree):
        yield Entry(name=module, kind="module", call=module, doc=doc.strip())
    yield from _entries_below(tree, module, in_class=False)


def _entries_below(node: ast.AST, prefix: str, *, in_class: bool) -> Iterator[Entry]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            name = f"{prefix}.{child.name}"
            if doc := ast.get_docstring(child):
                yield Entry(name=name, kind="class", call=name, doc=doc.strip())
            yield from _entries_below(child, name, in_class=True)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{prefix}.{child.name}"
            if doc := ast.get_docstring(child):
                call = _shorten(name, _source_signature(child, bound=in_class))
                yield Entry(name=name, kind="method" if in_class else "function", call=call, doc=doc.strip())
        elif isinstance(child, ast.If | ast.Try | ast.With):
            # Definitions that depend on the platform; what a function defines inside has no name outside of it.
            yield from _entries_below(child, prefix, in_class=in_class)


def entries_of_topics(source: bytes) -> Iterator[Entry]:
    """Yield the topics of `help()` from the source that holds them: a dictionary of names and texts."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            for name, text in ast.literal_eval(node.value).items():
                yield Entry(name=name, kind="topic", call=name, doc=inspect.cleandoc(text).strip())


def _source_signature(node: ast.FunctionDef | ast.AsyncFunctionDef, *, bound: bool) -> str:
    arguments = ast.unparse(node.args)
    decorators = {decorator.id for decorator in node.decorator_list if isinstance(decorator, ast.Name)}
    if bound and "staticmethod" not in decorators:
        # The caller does not pass the first argument; `/` after it alone would then stand first.
        arguments = arguments.partition(",")[2].strip().removeprefix("/").removeprefix(",").strip()
    return f"({arguments})"


def _shorten(name: str, signature: str) -> str:
    if not signature:
        return name
    call = name + signature
    return call if len(call) <= MAX_CALL_CHARS else f"{name}()"


# --- collecting: modules without a source ---------------------------------------------------------------------------


def entries_of_builtins() -> Iterator[Entry]:
    """Yield what the modules that are compiled into the interpreter document; importing them has no effects."""
    for module in sorted(sys.builtin_module_names):
        yield from _entries_of_compiled(module)


def _entries_of_compiled(module: str) -> Iterator[Entry]:
    namespace = vars(importlib.import_module(module))
    public = PUBLIC_NAMES.get(module, module)
    if doc := namespace.get("__doc__"):
        yield from _compiled_entry(public, "module", "", doc)
    for attribute in sorted(namespace):
        # Hooks are there to be replaced; `sys` keeps the first `sys.excepthook` as `sys.__excepthook__`, and so on.
        value = namespace.get(f"__{attribute}__", namespace[attribute])
        # `site`, a debugger or a test runner may have put things of their own here; what is compiled says where it is
        # from.
        if getattr(value, "__module__", None) not in (module, public):
            continue
        name = attribute if module == "builtins" else f"{public}.{attribute}"
        if isinstance(value, type):
            yield from _entries_of_compiled_class(name, value)
        elif inspect.isbuiltin(value):
            yield from _compiled_entry(name, "function", value.__text_signature__, value.__doc__)


def _entries_of_compiled_class(name: str, cls: type) -> Iterator[Entry]:
    yield from _compiled_entry(name, "class", "", vars(cls).get("__doc__"))
    for attribute, value in sorted(vars(cls).items()):
        if inspect.isroutine(value) or inspect.isdatadescriptor(value):
            signature = getattr(value, "__text_signature__", None)
            kind = "method" if inspect.isroutine(value) else "attribute"
            yield from _compiled_entry(f"{name}.{attribute}", kind, signature, getattr(value, "__doc__", None))


def _compiled_entry(name: str, kind: str, signature: str | None, doc: object) -> Iterator[Entry]:
    """Yield one entry, or none if the text is empty (or, for `__doc__` overridden by a descriptor, no text)."""
    if isinstance(doc, str) and (cleaned := inspect.cleandoc(doc).strip()):
        yield Entry(name=name, kind=kind, call=_shorten(name, _compiled_signature(signature)), doc=cleaned)


def _compiled_signature(text_signature: str | None) -> str:
    """Turn the C notation `($self, sep=None, /)` into what a caller writes: `(sep=None, /)`."""
    if not text_signature:
        return ""
    arguments = [argument.strip() for argument in text_signature.strip("()").split(",")]
    if arguments[0].startswith("$"):
        arguments = arguments[1:]
        if arguments[:1] == ["/"]:
            arguments = arguments[1:]
    return f"({', '.join(arguments)})"


# --- choosing -------------------------------------------------------------------------------------------------------


def drop_duplicates(entries: Iterable[Entry]) -> list[Entry]:
    """Keep one entry of each text; of equal texts the one with a public name, then the first by name."""
    kept: dict[str, Entry] = {}
    for entry in sorted(entries, key=lambda entry: (_is_private(entry.name), entry)):
        kept.setdefault(" ".join(entry.doc.casefold().split()), entry)
    return sorted(kept.values())


def _is_private(name: str) -> bool:
    return any(part.startswith("_") for part in name.split("."))


def is_usable(entry: Entry) -> bool:
    """Tell whether a text survives being written and tokenized: no lone surrogate, no special token spelled out."""
    try:
        entry.doc.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return not any(token in entry.doc for token in SPECIAL_TOKENS)


def conversation(entry: Entry) -> list[dict[str, str]]:
    """Make the question and the answer. A hash of the name picks the wording, so that it never changes by order."""
    digest = hashlib.sha256(entry.name.encode("utf-8")).digest()
    question = QUESTIONS[int.from_bytes(digest[:8], "big") % len(QUESTIONS)]
    return [
        {"role": "user", "content": question.format(call=entry.call, kind=entry.kind)},
        {"role": "assistant", "content": entry.doc},
    ]


def render(messages: list[dict[str, str]]) -> str:
    """Write a conversation as CHAT_TEMPLATE does, for counting tokens without transformers."""
    return "".join(f"{TURN_START}{turn['role']}\n{turn['content']}{TURN_END}\n" for turn in messages)


# --- tokenizer ------------------------------------------------------------------------------------------------------


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """Train a byte-level BPE `tokenizers.Tokenizer`; the special tokens get the ids from 0."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # No post-processor: it would trim white space off the offsets, and the assistant's mask is made from offsets.
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer


def tokenizer_config() -> dict[str, Any]:
    """Give tokenizer_config.json. Written by hand: transformers 5 would name a class that version 4 does not know."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        # The end of the assistant's turn is what a chat model must learn to stop with.
        "eos_token": TURN_END,
        "pad_token": PAD,
        "additional_special_tokens": [END_OF_TEXT, TURN_START],
        "clean_up_tokenization_spaces": False,
        # No limit of its own; left out, transformers would say the same with a float of 30 digits.
        "model_max_length": 1 << 30,
        "chat_template": CHAT_TEMPLATE,
    }


def count_tokens(tokenizer: Any, texts: list[str], advance: Callable[[int], None]) -> list[int]:
    """Count the tokens of each text, some at a time so that a bar can move."""
    chunk = 512
    counts: list[int] = []
    for start in range(0, len(texts), chunk):
        encodings = tokenizer.encode_batch_fast(texts[start : start + chunk], add_special_tokens=False)
        counts += [len(encoding) for encoding in encodings]
        advance(len(encodings))
    return counts


# --- building -------------------------------------------------------------------------------------------------------


def build_corpus(
    out_dir: str | Path,
    vocab_size: int = 4096,
    limit: int | None = None,
    seed: int = 1234,
    progress: Progress | None = None,
) -> CorpusPaths:
    """Build the corpus and its tokenizer in `out_dir`, or return what an equal call left there.

    Args:
        out_dir: the folder; made if missing.
        vocab_size: entries of the tokenizer, at least 260: every byte and the special tokens.
        limit: pairs to keep after shuffling; None keeps all.
        seed: of the shuffle.
        progress: a running rich progress display to report to; None is silent.

    Raises:
        ValueError: an option that cannot work.
        FileNotFoundError: this interpreter has no standard library sources.
    """
    _check_options(vocab_size, limit)
    out_dir = Path(out_dir)
    recipe = _recipe(vocab_size, limit, seed)
    if (existing := _existing(out_dir, recipe)) is not None:
        return existing

    progress = progress or Progress(disable=True)
    # Gone before anything changes: a build that is interrupted must not be taken for a whole one.
    _manifest(out_dir).unlink(missing_ok=True)
    documented, num_unparsed = _collect(progress)
    usable = [entry for entry in documented if is_usable(entry)]
    entries = drop_duplicates(usable)
    num_unique = len(entries)
    random.Random(seed).shuffle(entries)
    conversations = [conversation(entry) for entry in entries[:limit]]

    lines = (json.dumps({"messages": messages}, ensure_ascii=False) for messages in conversations)
    _write(_jsonl(out_dir), "".join(line + "\n" for line in lines))
    tokenizer, counts = _tokenize(conversations, vocab_size, progress)
    tokenizer_dir = _jsonl(out_dir).with_name("tokenizer")
    _write(tokenizer_dir / "tokenizer.json", tokenizer.to_str(pretty=False))
    _write(tokenizer_dir / "tokenizer_config.json", json.dumps(tokenizer_config(), indent=2) + "\n")

    stats = CorpusStats(
        **_length_stats(counts),
        vocab_size=tokenizer.get_vocab_size(),
        duplicates=len(usable) - num_unique,
        unusable=len(documented) - len(usable),
        unparsed=num_unparsed,
    )
    manifest = {"recipe": recipe, "stats": asdict(stats), "sha256": _digests(out_dir)}
    _write(_manifest(out_dir), json.dumps(manifest, indent=2) + "\n")
    return CorpusPaths(jsonl=_jsonl(out_dir), tokenizer_dir=tokenizer_dir, stats=stats)


def _check_options(vocab_size: int, limit: int | None) -> None:
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(
            f"vocab_size is {vocab_size}; a byte-level vocabulary holds at least {MIN_VOCAB_SIZE} entries, 256 bytes "
            f"and {len(SPECIAL_TOKENS)} special tokens. Raise --vocab-size."
        )
    if limit is not None and limit < 1:
        raise ValueError(
            f"limit is {limit}; a corpus holds at least 1 pair. Raise --limit or leave it out for all pairs."
        )


def _collect(progress: Progress) -> tuple[list[Entry], int]:
    """Give all that is documented, and the number of sources that could not be read for it."""
    sources = stdlib_sources(Path(sysconfig.get_path("stdlib")))
    entries: list[Entry] = []
    num_unparsed = 0
    for module, path in progress.track(sources, description="Reading sources"):
        source = path.read_bytes()
        try:
            entries += entries_of_source(module, source)
        except SyntaxError:
            # A library may carry files for another Python on purpose.
            num_unparsed += 1
            continue
        if module == TOPICS_MODULE:
            entries += entries_of_topics(source)
    entries += entries_of_builtins()
    return entries, num_unparsed


def _tokenize(conversations: list[list[dict[str, str]]], vocab_size: int, progress: Progress) -> tuple[Any, list[int]]:
    # Training cannot report how far it is.
    training = progress.add_task("Training tokenizer", total=None)
    texts = (turn["content"] for messages in conversations for turn in messages)
    tokenizer = train_tokenizer(texts, vocab_size)
    progress.update(training, total=1, completed=1)

    counting = progress.add_task("Counting tokens", total=len(conversations))
    rendered = [render(messages) for messages in conversations]
    return tokenizer, count_tokens(tokenizer, rendered, lambda count: progress.advance(counting, count))


def _length_stats(counts: list[int]) -> dict[str, Any]:
    ordered = sorted(counts)

    def percentile(percent: int) -> int:
        """Nearest rank: a length that occurs, never a mean of two."""
        return ordered[max(0, -(-percent * len(ordered) // 100) - 1)]

    return {
        "pairs": len(counts),
        "tokens": sum(counts),
        "mean": round(sum(counts) / len(counts), 1),
        "p50": percentile(50),
        "p95": percentile(95),
        "longest": ordered[-1],
    }


# --- files and reuse ------------------------------------------------------------------------------------------------


def _jsonl(out_dir: Path) -> Path:
    return out_dir / "docstrings.jsonl"


def _manifest(out_dir: Path) -> Path:
    return out_dir / "manifest.json"


def _recipe(vocab_size: int, limit: int | None, seed: int) -> dict[str, Any]:
    """Name everything that the bytes depend on."""
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()} {sys.platform}",
        "tokenizers": version("tokenizers"),
        "code": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
        "vocab_size": vocab_size,
        "limit": limit,
        "seed": seed,
    }


def _digests(out_dir: Path) -> dict[str, str]:
    names = (_jsonl(out_dir).name, "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json")
    return {name: hashlib.sha256((out_dir / name).read_bytes()).hexdigest() for name in names}


def _existing(out_dir: Path, recipe: dict[str, Any]) -> CorpusPaths | None:
    """Give the corpus that lies in `out_dir` if it is whole, unchanged and made from this recipe."""
    try:
        manifest = json.loads(_manifest(out_dir).read_text("utf-8"))
        if manifest["recipe"] != recipe or manifest["sha256"] != _digests(out_dir):
            return None
        stats = CorpusStats(**manifest["stats"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        # Nothing there, or not written by this script: build anew.
        return None
    return CorpusPaths(jsonl=_jsonl(out_dir), tokenizer_dir=out_dir / "tokenizer", stats=stats)


def _write(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old one or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The process id keeps two builds in one folder from sharing a half-written file.
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        partial.write_text(text, encoding="utf-8", newline="\n")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


# --- command line ---------------------------------------------------------------------------------------------------


def print_summary(paths: CorpusPaths, seconds: float, console: Console) -> None:
    """Print what was built, and where."""
    stats = paths.stats
    table = Table(title="Docstring corpus", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_row("pairs", f"{stats.pairs:,}")
    table.add_row("tokens in all", f"{stats.tokens:,}")
    table.add_row("tokens a pair, mean", f"{stats.mean:,.1f}")
    table.add_row("tokens a pair, p50", f"{stats.p50:,}")
    table.add_row("tokens a pair, p95", f"{stats.p95:,}")
    table.add_row("tokens a pair, longest", f"{stats.longest:,}")
    table.add_row("vocabulary", f"{stats.vocab_size:,}")
    table.add_row("dropped: same text as another", f"{stats.duplicates:,}")
    table.add_row("dropped: unusable text", f"{stats.unusable:,}")
    table.add_row("dropped: sources that do not parse", f"{stats.unparsed:,}")
    table.add_row("seconds", f"{seconds:.1f}")
    console.print(table)
    # Plain lines: a path that wraps cannot be copied.
    console.print(f"data       {paths.jsonl}", soft_wrap=True, highlight=False)
    console.print(f"tokenizer  {paths.tokenizer_dir}", soft_wrap=True, highlight=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Build a chat corpus from the docstrings of Python's standard library, and a tokenizer for it.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write to")
    parser.add_argument("--vocab-size", type=int, default=4096, metavar="N", help="entries of the tokenizer")
    parser.add_argument("--limit", type=int, metavar="N", help="keep N pairs only, taken after shuffling")
    parser.add_argument("--seed", type=int, default=1234, metavar="N", help="seed of the shuffle")
    return parser


def main() -> None:
    """Run the command line."""
    parser = _parser()
    options = parser.parse_args()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    start = time.perf_counter()
    try:
        # The display goes to standard error, so that the summary can be piped.
        with Progress(*columns, console=Console(stderr=True)) as progress:
            paths = build_corpus(options.out, options.vocab_size, options.limit, options.seed, progress)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print_summary(paths, time.perf_counter() - start, Console())


if __name__ == "__main__":
    main()
