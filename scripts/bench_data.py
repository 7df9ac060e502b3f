#!/usr/bin/env python3
"""How fast are rows found and tokenized, beside Hugging Face `datasets`, and how little memory does a large file take?

1. Indexing: a file of JSON lines and the same rows as one list, each opened for the first time by `open_source` and by
   `datasets`' json loader, in turns, both from the page cache and with empty caches of their own.
2. Encoding: Python's docstrings as chats and their BPE tokenizer; our `Encoder` beside `datasets.map`, which applies
   the same template with its assistant mask, or only tokenizes rendered text in batches. One process each.
3. Memory: two ranks with two loader workers each read a file of a million rows through `VarlenDataset`, and a file of
   one row for comparison; peak resident memory of each process, pickled dataset, seconds until the first item.

    python scripts/bench_data.py [--rows 1000000] [--rounds 3] [--encode-rows 2000] [--folder DIR]

Needs the extras hf and hub. Cost: two minutes or so, and 2 GB of disk at the most. No assertion over time: timing is
for looking at; that rows are the right ones is asserted.
"""

import argparse
import logging
import multiprocessing
import os
import pickle
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

RANKS, WORKERS = 2, 2
ROW_BYTES = 300
ITEMS_READ = 20_000
MEMORY_BUDGET_MB = 100
READY_BUDGET_SECONDS = 60
INDEXING_TARGET = 3.0
"""Times that indexing must be faster than the json loader."""
EOS = 255
OURS, MAP, MAP_BATCHES = "ours", "datasets.map, ids and mask", "datasets.map in batches, ids only"
SEQ_LENGTH = 8192


def main() -> None:
    """Run the three parts one after the other."""
    options = parse()
    os.environ["PYTHONWARNINGS"] = "ignore"  # Megatron's, about kernels that are not installed; for ranks, too
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench_data_") as folder:
        os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "home")
        lines, listed = write_files(Path(folder), options.rows)
        indexing(Path(folder), [lines, listed], options.rounds)
        encoding(Path(folder), options.encode_rows, options.rounds)
        memory(Path(folder), lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Rows per second and memory of the data room, beside datasets.")
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the large file (default: 1000000)")
    parser.add_argument("--rounds", type=int, default=3, help="times that each way is measured (default: 3)")
    parser.add_argument("--encode-rows", type=int, default=2_000, help="rows to tokenize (default: 2000)")
    parser.add_argument("--folder", type=Path, default=None, help="where to put files (default: the system's)")
    return parser.parse_args()


def row_text(row: int) -> str:
    """Row `row` as JSON, 300 bytes with its line end; its text is numbers, which NullTokenizer can encode."""
    head = f'{{"row": {row}, "text": "'
    body = " ".join(str((row * 7 + step) % 200 + 10) for step in range(ROW_BYTES // 3))
    return head + body[: ROW_BYTES - len(head) - 3].rstrip() + '"}'


def write_files(folder: Path, rows: int) -> tuple[Path, Path]:
    lines, listed = folder / "rows.jsonl", folder / "rows.json"
    with lines.open("w") as as_lines, listed.open("w") as as_list:
        for row in range(rows):
            text = row_text(row)
            as_lines.write(f"{text}\n")
            as_list.write(f"{',' if row else '['}\n{text}")
        as_list.write("\n]\n")
    return lines, listed


def in_turns(ways: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Name -> median seconds; the ways take turns, so that a busy moment meets them all."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(times) for name, times in seconds.items()}


# --- indexing -------------------------------------------------------------------------------------


def indexing(folder: Path, files: list[Path], rounds: int) -> None:
    """Print how long it takes until rows can be read."""
    import datasets

    from megatron_packing.data import open_source

    datasets.disable_progress_bars()
    table = new_table("finding the rows of a file, first time", "way", "seconds", "rows/s", "MB/s", "ratio")
    for file in files:
        caches = fresh_folders(folder)
        rows = len(open_source(file, cache=next(caches)))

        def ours(file: Path = file, rows: int = rows, caches: Iterator[str] = caches) -> None:
            assert len(open_source(file, cache=next(caches))) == rows

        def theirs(file: Path = file, rows: int = rows, caches: Iterator[str] = caches) -> None:
            loaded = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=next(caches))
            assert len(loaded) == rows

        found = in_turns({"ours": ours, "datasets": theirs}, rounds)
        megabytes = file.stat().st_size / 1e6
        for name, seconds in found.items():
            speed = (f"{seconds:.2f}", f"{rows / seconds:,.0f}", f"{megabytes / seconds:,.0f}")
            ratio = f"{found['datasets'] / seconds:.1f}x" + target(name, found, file)
            table.add_row(f"{file.name} ({megabytes:,.0f} MB), {name}", *speed, ratio)
    show(table)


def target(name: str, found: dict[str, float], file: Path) -> str:
    if name != "ours" or file.suffix != ".jsonl":
        return ""
    return f" (target {INDEXING_TARGET:g}x)"


def fresh_folders(parent: Path) -> Iterator[str]:
    """Empty folders without end; the one before is removed when the next is asked for."""
    while True:
        with tempfile.TemporaryDirectory(dir=parent) as folder:
            yield folder


# --- encoding -------------------------------------------------------------------------------------


def encoding(folder: Path, rows: int, rounds: int) -> None:
    """Print how fast rows become ids."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import datasets
    from docstring_corpus import build_corpus, render

    from megatron_packing.data import Encoder, open_source

    corpus = build_corpus(folder / "corpus")
    tokenizer = megatron_tokenizer(corpus.tokenizer_dir)
    source = open_source(corpus.jsonl)
    rows = min(rows, len(source))
    encoder = Encoder(tokenizer, SEQ_LENGTH, "truncate")
    chat = tokenizer.chat
    chats = [source[row].fields["messages"] for row in range(rows)]
    table = datasets.Dataset.from_dict({"messages": chats, "text": [render(turns) for turns in chats]})
    ids: dict[str, int] = {}

    def ours() -> None:
        encoded = [encoder.encode(source[row]) for row in range(rows)]
        ids[OURS] = sum(sample.length + 1 for samples in encoded if isinstance(samples, list) for sample in samples)

    def with_mask(row: dict[str, Any]) -> dict[str, Any]:
        encoded = chat.apply_chat_template(row["messages"], return_dict=True, return_assistant_tokens_mask=True)
        return {"input_ids": encoded["input_ids"], "mask": encoded["assistant_masks"]}

    def ids_only(rows: dict[str, Any]) -> dict[str, Any]:
        return {"input_ids": chat(rows["text"], add_special_tokens=False)["input_ids"]}

    def mapped(name: str, function: Callable[..., Any], **options: Any) -> Callable[[], None]:
        def run() -> None:
            done = table.map(function, load_from_cache_file=False, keep_in_memory=True, **options)
            ids[name] = sum(map(len, done["input_ids"]))

        return run

    ways = {
        OURS: ours,
        MAP: mapped(MAP, with_mask),
        MAP_BATCHES: mapped(MAP_BATCHES, ids_only, batched=True),
    }
    found = in_turns(ways, rounds)
    megabytes = sum(len(text.encode()) for text in table["text"]) / 1e6
    shown = new_table(f"tokenizing {rows:,} chats", "way", "seconds", "rows/s", "MB/s", "tokens/s", "ratio")
    for name, seconds in found.items():
        speed = (f"{rows / seconds:,.0f}", f"{megabytes / seconds:.1f}", f"{ids[name] / seconds:,.0f}")
        shown.add_row(name, f"{seconds:.2f}", *speed, f"{found[MAP] / seconds:.1f}x")
    show(shown)


def megatron_tokenizer(folder: Path) -> Any:
    from megatron.core.tokenizers import MegatronTokenizer as MegatronsOwn

    from megatron_packing.mcore.tokenizer import MegatronTokenizer

    built = MegatronsOwn.from_pretrained(str(folder), metadata_path={"library": "huggingface"})
    return MegatronTokenizer(built)


# --- memory ---------------------------------------------------------------------------------------


def memory(folder: Path, large: Path) -> None:
    """Print what ranks and workers hold, of the large file and of a file of one row."""
    small = folder / "one.jsonl"
    small.write_text(row_text(0) + "\n")
    runs = {name: ranks_of(folder, file) for name, file in (("one row", small), ("large", large))}
    table = new_table(
        f"{RANKS} ranks with {WORKERS} workers, {large.stat().st_size / 1e6:,.0f} MB, {ITEMS_READ:,} items a rank",
        "process",
        "one row, MB",
        "large file, MB",
        "more, MB",
        f"of {MEMORY_BUDGET_MB} MB",
    )
    for process in sorted(runs["large"]["memory"]):
        least, most = (runs[name]["memory"][process] / 1e6 for name in ("one row", "large"))
        table.add_row(
            process, f"{least:,.0f}", f"{most:,.0f}", f"{most - least:,.1f}", f"{(most - least) / MEMORY_BUDGET_MB:.0%}"
        )
    show(table)
    table = new_table("the same run", "", "one row", "large file", "budget")
    sizes = [f"{runs[name]['pickled']:,} bytes" for name in ("one row", "large")]
    ready = [f"{runs[name]['ready']:.1f} s" for name in ("one row", "large")]
    table.add_row("pickled dataset", *sizes, "10,000 bytes")
    table.add_row("ready, first time", *ready, f"{READY_BUDGET_SECONDS} s")
    show(table)


def ranks_of(folder: Path, file: Path) -> dict[str, Any]:
    """Peak resident bytes of each process, and the largest of what else ranks report."""
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory(dir=folder) as store:
        ranks = [context.Process(target=run_rank, args=(rank, store, str(file), results)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        answers = [results.get() for _ in ranks]
        for process in ranks:
            process.join()
    failed = [answer["failed"] for answer in answers if "failed" in answer]
    if failed:
        raise SystemExit(f"a rank failed: {failed[0]}")
    return {
        "memory": {name: peak for answer in answers for name, peak in answer["memory"].items()},
        "pickled": max(answer["pickled"] for answer in answers),
        "ready": max(answer["ready"] for answer in answers),
    }


def run_rank(rank: int, folder: str, file: str, results: Any) -> None:
    try:
        results.put(measured_rank(rank, folder, file))
    except Exception as error:
        results.put({"failed": f"{type(error).__name__}: {error}"})
        raise


def measured_rank(rank: int, folder: str, file: str) -> dict[str, Any]:
    """Open, read through workers, and check; rank 0 builds the index."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    logging.disable(logging.WARNING)  # torch's, about a missing GPU
    import numpy as np
    import torch
    import torch.distributed as dist
    from megatron.core.datasets.utils import Split

    from megatron_packing import VarlenDataset
    from megatron_packing.comm.turns import take_turn

    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    config = dataset_config(file, folder)
    started = time.perf_counter()

    def opened() -> Any:
        return VarlenDataset.build_low_level_dataset(file, config)

    take_turn(opened, is_mine=rank == 0, device="cpu")
    source = opened()
    rows = len(source)
    dataset = VarlenDataset(source, file, np.arange(rows, dtype=np.int32), ITEMS_READ, Split.train, config)
    peaks: dict[str, int] = {}
    ready: float | None = None
    sampler = torch.from_numpy(np.random.default_rng(rank).integers(rows, size=ITEMS_READ)).tolist()
    # Forked, as in a training run; a spawned rank would spawn.
    options = {"num_workers": WORKERS, "batch_size": None, "multiprocessing_context": "fork"}
    loader = torch.utils.data.DataLoader(WithPeak(dataset), sampler=sampler, **options)
    for worker, peak in loader:
        ready = ready or time.perf_counter() - started
        name = f"rank {rank}, worker {worker}"
        peaks[name] = max(peak, peaks.get(name, 0))
    for row in (0, rows // 2, rows - 1):
        assert (source[row].fields["row"], source[row].line) == (row, row + 1)
        assert dataset[row]["tokens"][0] == row * 7 % 200 + 10
    peaks[f"rank {rank}"] = peak_bytes()
    dist.barrier()
    dist.destroy_process_group()
    return {"memory": peaks, "pickled": len(pickle.dumps(dataset)), "ready": ready}


class WithPeak:
    """A dataset whose items are the worker's number and its memory; the dataset's own items are made and dropped."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, idx: int) -> tuple[int, int]:
        from torch.utils.data import get_worker_info

        assert self._dataset[idx]["tokens"].numel() > 0
        return get_worker_info().id, peak_bytes()


def peak_bytes() -> int:
    """Largest resident set of this process so far; a forked worker's begins with what its parent has."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def dataset_config(file: str, folder: str) -> Any:
    from megatron.core.tokenizers import MegatronTokenizer

    from megatron_packing.mcore.dataset import PackingDatasetConfig

    null = MegatronTokenizer.from_pretrained(metadata_path={"library": "null-text"}, vocab_size=256, eod_id=EOS)
    return PackingDatasetConfig(
        random_seed=1,
        sequence_length=512,
        tokenizer=null,
        blend=([file], None),
        split="100,0,0",
        path_to_cache=str(Path(folder) / "cache"),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )


# --- tables ---------------------------------------------------------------------------------------


def new_table(title: str, *columns: str) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", no_wrap=not number)
    return table


def show(table: Any) -> None:
    from rich.console import Console

    Console(markup=False, highlight=False, width=100).print(table)


if __name__ == "__main__":
    main()
