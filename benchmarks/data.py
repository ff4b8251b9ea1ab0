"""Data preparation compared with other tools: tokens, memory, packing and loading.

    python benchmarks/data.py                 # a quarter of an hour on 2 quiet cores
    python benchmarks/data.py --quick         # proves that it runs
    python benchmarks/data.py --only packing  # one part of it

- prepare: .jsonl to tokens on disk, with the same tokenizer on the same file: ours, `datasets` (loading the file and
  `map` with as many processes, each with its own share of the time), and a loop like Megatron-LM's `preprocess_data.py`
  (a pool that encodes line by line, one writer). Every engine is a process of its own; they take turns.
- memory: ours on 1, 4 and 16 times the corpus, the largest resident size of any process.
- packing: best-fit bins compared with trl's `bfd_split`, on the same lengths. `--trl PATH` is a folder of packages with
  trl.
- loader: how long a step of the demo waits for its batches, and how long the thread reads them, beside the step.

Needs `pip install -e '.[bench]'`.
"""

import argparse
import json
import multiprocessing
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from meshwright.data.best_fit import assign_bins
from meshwright.data.encoders import num_cores
from meshwright.data.loader import BatchShare, Loader
from meshwright.data.mixture import training_samples
from meshwright.data.prepare import prepare_corpus
from meshwright.data.readers import read_documents
from meshwright.data.sources import find_files
from meshwright.data.tokenizer import load_tokenizer, train_tokenizer
from meshwright.spec.data import DataSpec, SourceSpec

VOCABULARY = 16384
LENGTHS = 4096
"""Capacity of a bin."""


def main() -> int:
    """Measure, print, and write the page."""
    arguments = parse()
    if arguments.engine:
        print(json.dumps(ENGINES[arguments.engine](arguments)))
        return 0
    parts = [
        f"# Data, {datetime.now(UTC):%Y-%m-%d}\n\n{num_cores()} cores ({platform.processor() or platform.machine()}), "
        f"Python {platform.python_version()}, tokenizers {version('tokenizers')}, datasets {version('datasets')}.\n"
    ]
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        arguments.work = Path(folder)
        make_corpus(arguments.work, arguments.megabytes)
        for name in arguments.only:
            parts.append(TABLES[name](arguments))
            print(parts[-1], flush=True)
    if arguments.write:
        arguments.write.write_text("\n".join(parts))
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=64, help="size of the corpus")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--documents", type=int, default=1_000_000, help="documents to pack")
    parser.add_argument("--steps", type=int, default=40, help="steps of the demo to train")
    parser.add_argument("--only", nargs="+", choices=TABLES, default=list(TABLES), help="parts to measure")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--trl", help="a folder of packages that holds trl")
    parser.add_argument("--folder", type=Path, help="where temporary files go")
    parser.add_argument("--write", type=Path, help="the page to write")
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--name", default="1", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.megabytes, arguments.rounds, arguments.documents, arguments.steps = 2, 1, 20_000, 6
    return arguments


def make_corpus(folder: Path, megabytes: int) -> None:
    """`1.jsonl`: documents of the standard library's text, shuffled lines of a thousand words at most, none twice."""
    texts = [document.text for document in read_documents(find_files(DataSpec(), Path()))]
    train_tokenizer(texts[::4], VOCABULARY).save(folder / "tokenizer")
    lines = [line for text in texts for line in text.splitlines(keepends=True)]
    generator, written, number = random.Random(0), 0, 0
    with (folder / "1.jsonl").open("w") as file:
        while written < megabytes * 10**6:
            start = generator.randrange(len(lines) - 200)
            text = f"# {number}\n" + "".join(lines[start : start + generator.randrange(5, 200)])
            written += file.write(json.dumps({"text": text}) + "\n")
            number += 1


def run_engine(arguments: argparse.Namespace, engine: str, **options: str) -> dict[str, Any]:
    """The report of an engine's process, and the largest resident size of its processes in bytes."""
    command = [sys.executable, __file__, "--engine", engine, "--work", str(arguments.work)]
    command += [word for name, value in options.items() for word in (f"--{name}", value)]
    environment = dict(os.environ)
    if engine == "trl":
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), arguments.trl]))
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def prepare_table(arguments: argparse.Namespace) -> str:
    """Megabytes of text a second, in turns."""
    engines = ["meshwright", "datasets", "megatron_loop"]
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    reports: dict[str, dict[str, Any]] = {}
    for turn in range(arguments.rounds):
        for name in engines if turn % 2 == 0 else engines[::-1]:
            reports[name] = run_engine(arguments, name)
            seconds[name].append(reports[name]["seconds"])
    size = (arguments.work / "1.jsonl").stat().st_size / 1e6
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    rows = [
        f"| {name} | {medians[name]:.2f} | {size / medians[name]:.2f} | {medians[name] / medians['meshwright']:.2f} "
        f"| {reports[name]['tokens']} | {reports[name].get('note', '')} |"
        for name in engines
    ]
    head = "| engine | seconds | MB/s | times ours | tokens | |\n|---|---|---|---|---|---|\n"
    return f"## Prepare: {size:.0f} MB of .jsonl, median of {arguments.rounds}\n\n{head}" + "\n".join(rows) + "\n"


def memory_table(arguments: argparse.Namespace) -> str:
    """Our largest process as the corpus grows."""
    rows = []
    for times in (1, 4, 16):
        content = (arguments.work / "1.jsonl").read_bytes()
        with (arguments.work / f"{times}-times.jsonl").open("wb") as file:
            for _ in range(times):
                file.write(content)
        found = run_engine(arguments, "meshwright", name=f"{times}-times")
        rows.append(f"| {times} | {found['own'] / 2**20:.0f} | {found['largest_child'] / 2**20:.0f} |")
        (arguments.work / f"{times}-times.jsonl").unlink()
    head = "| corpus | MiB of the reading process | MiB of the largest encoding process |\n|---|---|---|\n"
    return "## Memory of preparing\n\n" + head + "\n".join(rows) + "\n"


def packing_table(arguments: argparse.Namespace) -> str:
    """How full bins are, and how long packing takes."""
    rows = []
    for name, lengths in packed_lengths(arguments.documents).items():
        began = time.perf_counter()
        _, num_bins = assign_bins(lengths, LENGTHS)
        seconds = time.perf_counter() - began
        rows.append(f"| {name} | meshwright | {lengths.sum() / num_bins / LENGTHS:.5%} | {seconds:.2f} |")
        if arguments.trl:
            np.save(arguments.work / "lengths.npy", lengths)
            for found in run_engine(arguments, "trl")["found"]:
                rows.append(f"| {name} | {found['name']} | {found['fill']:.5%} | {found['seconds']:.2f} |")
    head = (
        f"## Packing {arguments.documents} documents into bins of {LENGTHS}\n\n| lengths | engine | full | seconds |\n"
    )
    return head + "|---|---|---|---|\n" + "\n".join(rows) + "\n"


def packed_lengths(count: int) -> dict[str, np.ndarray]:
    """Lengths like web text's, like chats', and with few short ones to fill holes."""
    generator = np.random.default_rng(0)
    drawn = {
        "log-normal, median 400": generator.lognormal(6, 1.1, count),
        "log-normal, median 150": generator.lognormal(5, 0.8, count),
        "uniform, 500 to 4096": generator.uniform(500, LENGTHS, count),
    }
    return {name: np.clip(lengths, 1, LENGTHS).astype(np.int64) for name, lengths in drawn.items()}


def loader_table(arguments: argparse.Namespace) -> str:
    """The demo's loader beside the demo's step."""
    run_dir = arguments.work / "run"
    command = [sys.executable, "-m", "meshwright"]
    recipe = subprocess.run([*command, "init", "demo"], check=True, stdout=subprocess.PIPE).stdout
    (arguments.work / "demo.yaml").write_bytes(recipe)
    changes = [f"run_dir={run_dir}", f"training.steps={arguments.steps}", "training.lr_schedule.warmup=0"]
    changes += ["training.evaluation.batches=0", f"data.cache_dir={arguments.work / 'cache'}"]
    trained = [*command, "train", str(arguments.work / "demo.yaml"), *changes]
    subprocess.run(trained, check=True, stdout=subprocess.DEVNULL)
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    step = statistics.median(record["step_time"] for record in records if record.get("step_time"))
    rows = []
    for packing in ("concatenated", "best_fit"):
        data = DataSpec(sequence_length=256, packing=packing, separate_documents=packing == "best_fit",
                        cache_dir=str(arguments.work / "cache"))  # fmt: skip
        mixture = training_samples(prepare_corpus(data, base_dir=Path()), data)
        with Loader(mixture, BatchShare(rank=0, world_size=2), seed=0, global_batch=8, micro_batch=4) as loader:
            began = time.perf_counter()
            for number in range(500):
                loader._read(number)
            read = (time.perf_counter() - began) / 500
            waits = []
            for number in range(50):
                began = time.perf_counter()
                loader.microbatches(number)
                waits.append(time.perf_counter() - began)
                time.sleep(step / 4)
        wait = statistics.median(waits)
        rows.append(f"| {packing} | {1e3 * step:.0f} | {1e3 * read:.3f} | {1e3 * wait:.3f} | {read / step:.3%} |")
    head = "## Loader at the demo's size\n\n| packing | step ms | reading ms, in a thread | waiting ms | of a step |\n"
    return head + "|---|---|---|---|---|\n" + "\n".join(rows) + "\n"


def prepare_ours(arguments: argparse.Namespace) -> dict[str, Any]:
    """Our own, all cores, into a cache that does not exist yet."""
    with tempfile.TemporaryDirectory(dir=arguments.work) as cache:
        data = DataSpec(
            sources=(SourceSpec(path=f"{arguments.name}.jsonl"),), tokenizer="tokenizer", held_out=0, cache_dir=cache
        )
        began = time.perf_counter()
        corpus = prepare_corpus(data, base_dir=arguments.work, processes=num_cores())
        seconds = time.perf_counter() - began
    used = {who: resource.getrusage(which).ru_maxrss * 1024 for who, which in
            (("own", resource.RUSAGE_SELF), ("largest_child", resource.RUSAGE_CHILDREN))}  # fmt: skip
    return {"seconds": seconds, "tokens": corpus.num_tokens, **used}


def prepare_datasets(arguments: argparse.Namespace) -> dict[str, Any]:
    """`datasets`: load the file, then map with the tokenizer in batches on as many processes."""
    import datasets

    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory(dir=arguments.work) as cache:
        began = time.perf_counter()
        rows = datasets.load_dataset("json", data_files=str(arguments.work / "1.jsonl"), split="train", cache_dir=cache)
        loaded = time.perf_counter()
        tokenizer = load_tokenizer(arguments.work / "tokenizer")
        tokens = rows.map(
            encode_rows,
            batched=True,
            num_proc=num_cores(),
            remove_columns=["text"],
            fn_kwargs={"directory": str(arguments.work / "tokenizer"), "eos": tokenizer.eos_id},
        )
        done = time.perf_counter()
        total = sum(tokens["length"])
    return {"seconds": done - began, "tokens": total, "note": f"of these {loaded - began:.2f} s load the file"}


_tokenizers: dict[str, Any] = {}


def encode_rows(rows: dict[str, list[str]], directory: str, eos: int) -> dict[str, Any]:
    """The function for `map`."""
    tokenizer = _tokenizers.setdefault(directory, load_tokenizer(Path(directory)))
    ids = [np.array([*found, eos], np.int32) for found in tokenizer.encode_batch(rows["text"])]
    return {"input_ids": ids, "length": [len(found) for found in ids]}


def prepare_megatron_loop(arguments: argparse.Namespace) -> dict[str, Any]:
    """The loop of Megatron-LM's preprocess_data.py: workers encode a line each, one process appends what they send."""
    directory, total = str(arguments.work / "tokenizer"), 0
    began = time.perf_counter()
    lengths = []
    with (
        (arguments.work / "1.jsonl").open() as lines,
        (arguments.work / "loop.bin").open("wb") as out,
        multiprocessing.Pool(num_cores(), initializer=start_worker, initargs=(directory,)) as pool,
    ):
        for ids in pool.imap(encode_line, lines, 32):
            out.write(np.array(ids, np.uint16).tobytes(order="C"))
            lengths.append(len(ids))
            total += len(ids)
    return {"seconds": time.perf_counter() - began, "tokens": total}


def start_worker(directory: str) -> None:
    """A worker's tokenizer."""
    _tokenizers["worker"] = load_tokenizer(Path(directory))


def encode_line(line: str) -> list[int]:
    """One document's tokens and its end token."""
    tokenizer = _tokenizers["worker"]
    return [*tokenizer.encode(json.loads(line)["text"]), tokenizer.eos_id]


def pack_by_trl(arguments: argparse.Namespace) -> dict[str, Any]:
    """trl's `bfd_split`, in its default batches and all at once."""
    import datasets

    pack_dataset = import_module("trl").pack_dataset

    datasets.disable_progress_bars()
    lengths = np.load(arguments.work / "lengths.npy")
    rows = datasets.Dataset.from_dict({"input_ids": [np.zeros(length, np.uint8) for length in lengths]})
    found = []
    for name, options in (
        ("trl bfd_split, batches of 1000", {}),
        ("trl bfd_split, at once", {"batch_size": len(rows)}),
    ):
        began = time.perf_counter()
        packed = pack_dataset(rows, LENGTHS, "bfd_split", map_kwargs=options)
        seconds = time.perf_counter() - began
        found.append({"name": name, "fill": lengths.sum() / (len(packed) * LENGTHS), "seconds": seconds})
    return {"found": found}


TABLES = {"prepare": prepare_table, "memory": memory_table, "packing": packing_table, "loader": loader_table}

ENGINES = {
    "meshwright": prepare_ours,
    "datasets": prepare_datasets,
    "megatron_loop": prepare_megatron_loop,
    "trl": pack_by_trl,
}

if __name__ == "__main__":
    sys.exit(main())
