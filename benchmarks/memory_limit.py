"""Training under a limit of memory that is a quarter of the optimizer's state: `python -P benchmarks/memory_limit.py`.

The state is what ZeRO's authors count as such: fp32 master weights and AdamW's two moments, 12 bytes a parameter. The
limit (RLIMIT_DATA) is on all private writable memory: weights, activations, buffers, heap, thread stacks. A quarter of
the state is allowed above what the process takes once its libraries are imported, which is measured first; with
`--whole` the libraries are within the quarter, which takes a larger model. The limit does not count files that are
mapped: program text, and pages of state, which the kernel writes back and drops when it needs the memory; resident
memory, with these, is reported beside it.

One process trains a llama in bf16, with its gradients in files too. Arms:
    memory   everything in memory, no limit: the losses and the final state to compare with
    refused  the same under the limit: it must end as out of memory
    disk     layout.offload.optimizer=disk under the limit, losses and checkpoint compared bit for bit
    killed   the same; SIGKILL in the middle of a step's writes to disk, resumed; SIGKILL in the middle of writing a
             checkpoint, resumed
    weights  the same with layout.offload.parameters=disk, under a lower limit: half of the weights in bf16, so that
             neither they nor anything else of the state fits
    zero     DeepSpeed's ZeRO-Infinity (`--zero PYTHON`: an interpreter that has it), sizes and batch the same
    zero-limited  that, under our limit
"""

import argparse
import json
import os
import re
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from meshwright.families import parameter_table, resolve_model
from meshwright.spec.model import ModelFields

STATE_BYTES = 12
WEIGHT_BYTES = 2
STEPS = 3
KILLED = "killed"


@dataclass(frozen=True)
class Sizes:
    """The model, and the tokens of a step, all in one microbatch."""

    layers: int
    hidden: int = 768
    heads: int = 12
    ffn: int = 2048
    length: int = 256
    batch: int = 1

    @property
    def parameters(self) -> int:
        """Of the model with a vocabulary of 280."""
        fields = ModelFields(
            family="llama",
            hidden=self.hidden,
            num_layers=self.layers,
            num_heads=self.heads,
            ffn=self.ffn,
            vocab=280,
            max_positions=self.length,
        )
        return sum(row.numel for row in parameter_table(resolve_model(fields, base_dir=Path())))


@dataclass
class Watched:
    """What a process came to."""

    code: int = 0
    private: int = 0
    """Largest of private writable memory, which the limit counts."""
    resident: int = 0
    """Largest of resident memory, with program text and pages of files."""
    output: str = ""


RECIPE = """\
model:
  {{family: llama, hidden: {hidden}, ffn: {ffn}, num_layers: {layers}, num_heads: {heads}, max_positions: {length}}}
data: {{sources: texts/*.txt, tokenizer_vocab: 280, sequence_length: {length}}}
training:
  steps: {steps}
  global_batch: {batch}
  micro_batch: {batch}
  precision: bf16
  recompute: full
  lr_schedule: {{warmup: 1}}
  evaluation: {{batches: 0}}
checkpoint: {{every: 100, asynchronous: false, keep_last: 1}}
device: cpu
"""


def main() -> None:
    """Run the arms and print what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28, help="of 7.1 million parameters each")
    parser.add_argument("--rounds", type=int, default=1, help="turns of `disk` and `zero`")
    parser.add_argument("--zero", help="a Python interpreter that has DeepSpeed with its ops built")
    parser.add_argument("--arms", default="memory,refused,disk,killed", help="which, with commas")
    parser.add_argument("--whole", action="store_true", help="the limit is a quarter of the state in all")
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to measure, empty or ours")
    arguments = parser.parse_args()
    sizes, folder, arms = Sizes(arguments.layers), arguments.folder.resolve(), arguments.arms.split(",")
    prepare(sizes, folder)
    bare = 0 if arguments.whole else imported(folder)
    limit = bare + STATE_BYTES * sizes.parameters // 4
    print(f"{sizes.parameters:,} parameters, state {STATE_BYTES * sizes.parameters / 1e6:,.0f} MB, limit "
          f"{limit / 1e6:,.0f} MB, of which {bare / 1e6:,.0f} MB are for what is imported", flush=True)  # fmt: skip
    expected = None
    if "memory" in arms:
        report("memory", train(folder, "memory"), folder)
        expected = result(folder / "memory")
        shutil.rmtree(folder / "memory")
    if "refused" in arms:
        found = train(folder, "refused", limit=limit)  # it ends before its first step
        report("refused", found, folder)
        assert "out of memory" in found.output, found.output
    disk = ("layout.offload={optimizer: disk}",)
    all_disk = ("layout.offload={optimizer: disk, parameters: disk}",)
    for _ in range(arguments.rounds):
        if "disk" in arms:
            report("disk", train(folder, "disk", *disk, limit=limit), folder)
            check(result(folder / "disk"), expected)
            shutil.rmtree(folder / "disk")
        if "weights" in arms:
            less = bare + WEIGHT_BYTES * sizes.parameters // 2
            print(f"limit {less / 1e6:,.0f} MB; weights in bf16 {WEIGHT_BYTES * sizes.parameters / 1e6:,.0f} MB")
            report("weights", train(folder, "weights", *all_disk, limit=less), folder)
            check(result(folder / "weights"), expected)
            shutil.rmtree(folder / "weights")
        if arguments.zero:
            zero(arguments.zero, sizes, folder, None)
    if "killed" in arms:
        killed_twice(folder, disk, limit, sizes.parameters)
        check(result(folder / KILLED), expected)
    if "zero-limited" in arms:
        zero(arguments.zero, sizes, folder, limit)


def imported(folder: Path) -> int:
    """Private memory of a process that has imported the trainer, and has no model."""
    code = "import meshwright.cli.main, meshwright.trainer.run; print(open('/proc/self/status').read())"
    return field(watched([sys.executable, "-c", code], folder, None).output, "VmData")


def prepare(sizes: Sizes, folder: Path) -> None:
    """The recipe and its texts."""
    (folder / "texts").mkdir(parents=True, exist_ok=True)
    words = ["fish", "sea", "number", "swims", "in", "the", "blue", "net", "boat", "salt"]
    for part in range(4):
        text = "\n".join(" ".join(words[(i * 7 + j * j + part) % 10] for j in range(12)) for i in range(3000))
        (folder / f"texts/{part}.txt").write_text(text)
    (folder / "run.yaml").write_text(RECIPE.format(**vars(sizes), steps=STEPS))


def killed_twice(folder: Path, disk: tuple[str, ...], limit: int, parameters: int) -> None:
    """End a run while it writes its state, and its successor while it writes a checkpoint; then let it end."""
    run, log = folder / KILLED, folder / KILLED / "metrics.jsonl"

    def in_state(pid: int) -> bool:
        """In step 3: gradients, 4 bytes a parameter, are written, and half of the state."""
        if not log.exists() or "step-00000002" not in log.read_text():
            return False
        now = written(pid)
        begun.append(now)
        return now - begun[0] > (4 + STATE_BYTES // 2) * parameters

    def in_checkpoint(pid: int) -> bool:
        parts = run.glob("checkpoints/.writing-step-00000003-*/*.distcp")
        return any(part.stat().st_size > STATE_BYTES * parameters // 2 for part in parts)

    begun: list[int] = []
    disk = (*disk, "checkpoint.every=2")
    found = train(folder, KILLED, *disk, limit=limit, kill=in_state)
    report("killed while it wrote state", found, folder)
    assert found.code == -signal.SIGKILL, found.output
    found = train(folder, KILLED, *disk, "--resume", limit=limit, kill=in_checkpoint)
    report("killed while it wrote a checkpoint", found, folder)
    assert found.code == -signal.SIGKILL, found.output
    left = {path.name for path in (run / "checkpoints").iterdir()}
    print(f"  left in its folder of checkpoints: {sorted(left)}")
    report("resumed", train(folder, KILLED, *disk, "--resume", limit=limit), folder)


def train(
    folder: Path, name: str, *words: str, limit: int | None = None, kill: Callable[[int], bool] | None = None
) -> Watched:
    """`meshwright train` in a process of its own."""
    if "--resume" not in words:
        shutil.rmtree(folder / name, ignore_errors=True)
    command = [sys.executable, "-m", "meshwright", "train", "run.yaml", f"run_dir={name}", *words]
    return watched(command, folder, limit, kill)


def watched(command: list[str], folder: Path, limit: int | None, kill: Callable[[int], bool] | None = None) -> Watched:
    """A command under a limit, until it ends or is to be killed."""

    def restrict() -> None:
        resource.setrlimit(resource.RLIMIT_STACK, (2**21, 2**21))  # threads' stacks count in full
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    found = Watched()
    with (folder / "output.txt").open("w+") as output:
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT, preexec_fn=restrict)
        while process.poll() is None:
            status = Path(f"/proc/{process.pid}/status").read_text()
            found.private = max(found.private, field(status, "VmData"))
            found.resident = max(found.resident, field(status, "VmHWM"))
            if kill is not None and kill(process.pid):
                process.kill()
            time.sleep(0.02)
        output.seek(0)
        found.code, found.output = process.returncode, output.read()
    return found


def field(status: str, name: str) -> int:
    """Bytes of a field of /proc/PID/status; 0 where the process is gone."""
    found = re.search(name + r":\s+(\d+) kB", status)
    return int(found[1]) * 1024 if found else 0


def written(pid: int) -> int:
    """Bytes that a process has sent to disks."""
    found = re.search(r"^write_bytes: (\d+)", Path(f"/proc/{pid}/io").read_text(), re.MULTILINE)
    return int(found[1]) if found else 0


def result(run: Path) -> tuple[dict[int, float], str]:
    """The losses of a run, by step, and the checksum of all state in its last checkpoint."""
    losses = {record["step"]: record["loss"] for record in records(run) if record["kind"] == "step"}
    manifest = json.loads((run / f"checkpoints/step-{STEPS:08}/manifest.json").read_text())
    return losses, manifest["files"]["__0_0.distcp"]["sha256"]


def records(run: Path) -> list[dict]:
    """The lines of a run's metrics."""
    log = run / "metrics.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def check(found: tuple[dict[int, float], str], expected: tuple[dict[int, float], str] | None) -> None:
    """Compare a result with that of training in memory, to the bit."""
    if expected is not None:
        same = found == expected
        print(f"  losses {list(found[0].values())}, state {found[1][:16]}: {'the same bits' if same else 'DIFFERENT'}")
        assert same, (found, expected)


def report(arm: str, found: Watched, folder: Path, seconds: list[float] | None = None, tokens: int = 0) -> None:
    """Print a line."""
    if seconds is None:
        steps = [record for record in records(folder / arm) if record["kind"] == "step" and record["step_time"]]
        seconds = [record["step_time"] for record in steps]
        tokens = steps[0]["tokens"] // steps[0]["step"] if steps else 0
    speed = (
        f"{statistics.median(seconds):.1f} s a step, {tokens / statistics.median(seconds):.1f} tokens/s"
        if seconds
        else "-"
    )
    print(f"{arm}: status {found.code}, private {found.private / 1e6:,.0f} MB, "
          f"resident {found.resident / 1e6:,.0f} MB, {speed}", flush=True)  # fmt: skip


def zero(python: str, sizes: Sizes, folder: Path, limit: int | None) -> None:
    """DeepSpeed's ZeRO-Infinity on the same sizes."""
    shutil.rmtree(folder / "zero", ignore_errors=True)
    program = Path(__file__).parent / "engine/zero_infinity.py"
    words = {**vars(sizes), "steps": STEPS, "folder": str(folder / "zero")}
    found = watched([python, "-P", str(program), json.dumps(words)], folder, limit)
    line = next((line for line in found.output.splitlines() if line.startswith('{"seconds"')), None)
    seen = json.loads(line) if line else {}
    name = "zero" if limit is None else "zero-limited"
    report(name, found, folder, seen.get("seconds", [])[1:], sizes.length * sizes.batch)
    if line is None:
        print("  " + "\n  ".join(found.output.splitlines()[-4:]))
    else:
        print(f"  losses {seen['losses']}, {seen['disk'] / 1e6:,.0f} MB on disk")
    shutil.rmtree(folder / "zero", ignore_errors=True)


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[1] / "src")
    main()
