"""The one-file trainer compared with the modular one: same tokens, same seed, same losses, alone and on two
processes."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from meshwright.data.prepare import prepare_corpus
from meshwright.spec.run import Run
from meshwright.trainer.metrics import read_journal
from meshwright.trainer.run import train

SOLO = Path(__file__).parents[1] / "solo" / "train.py"
STEPS = 8
RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
SIZES = {"hidden": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn": 64, "tied_embeddings": True}
WORDS = "--width 48 --layers 2 --heads 4 --kv-heads 2 --inner 64 --length 32 --batch 8 --micro-batch 2 --warmup 3 --cpu"


def solo(folder: Path, *words: str, processes: int = 1, file: Path = SOLO) -> list[float]:
    """Losses of the steps that `solo/train.py` printed (the first, every tenth and the last)."""
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}"] if processes > 1 else []
    done = subprocess.run(
        [sys.executable, *launcher, str(file), *WORDS.split(), *words],
        cwd=folder,
        env={key: value for key, value in os.environ.items() if key not in RANK},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [float(loss) for loss in re.findall(r"^step \d+/\d+  loss (\S+)", done.stdout, flags=re.MULTILINE)]


@pytest.fixture(scope="module")
def modular(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[float]]:
    """(folder, token file, losses) of the modular trainer in float64; solo prints four digits of the losses."""
    folder = tmp_path_factory.mktemp("solo")
    text = "".join(f"def f{i}(x):\n    return x * {i} + {i * i % 97}\n\n" for i in range(1500))
    (folder / "text.py").write_text(text)
    run = modular_run(folder)
    train(run, base_dir=folder)
    return folder, prepare_corpus(run.data, base_dir=folder).streams[0].train.path, losses_of(folder / "run")


def modular_run(folder: Path, name: str = "run", **sections: Any) -> Run:
    return Run.model_validate(
        {
            "model": {"family": "llama", "weights": "random", **SIZES},
            "data": {"sources": ["text.py"], "sequence_length": 32, "tokenizer_vocab": 300,
                     "cache_dir": str(folder / "cache")},
            "training": {"steps": STEPS, "global_batch": 8, "micro_batch": 4, "precision": "fp64",
                         "optimizer": {"lr": 3e-3}, "lr_schedule": {"warmup": 3}, "evaluation": {"batches": 0}},
            "device": "cpu",
            "run_dir": str(folder / name),
            **sections,
        }
    )  # fmt: skip


def losses_of(run_dir: Path) -> list[float]:
    return [record["loss"] for record in read_journal(run_dir / "metrics.jsonl") if record["kind"] == "step"]


@pytest.fixture
def module() -> ModuleType:
    """`solo/train.py`, imported, with one thread like the modular trainer's ranks."""
    spec = importlib.util.spec_from_file_location("solo_train", SOLO)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.mark.slow
def test_the_same_losses_in_one_process(
    modular: tuple[Path, Path, list[float]], module: ModuleType, tmp_path: Path
) -> None:
    """Microbatches of two compared with four: only the order of float64 sums differs. AdamW, dividing by |gradient| +
    1e-8, enlarges this where a gradient is nearly zero: by at most lr / 1e-8 = 3e5 per step from 1e-16."""
    _, tokens, expected = modular
    words = [*WORDS.split(), "--tokens", str(tokens), "--vocab", "300", "--dtype", "float64"]
    losses = module.train(module.parse([*words, "--steps", str(STEPS), "--save", str(tmp_path / "solo.pt")]))
    assert losses == pytest.approx(expected, rel=1e-8)
    assert losses[0] - losses[-1] > 0.1  # the loss has fallen, so real steps were compared


@pytest.mark.exhaustive
def test_the_same_losses_on_two_processes(modular: tuple[Path, Path, list[float]]) -> None:
    folder, tokens, expected = modular
    words = ("--tokens", str(tokens), "--vocab", "300", "--dtype", "float64", "--steps", str(STEPS))
    losses = solo(folder, *words, processes=2)
    assert losses == [pytest.approx(loss, abs=0.51e-4) for loss in (expected[0], expected[-1])]  # as printed


@pytest.mark.slow
def test_zero_3_by_hand_has_the_same_losses(
    modular: tuple[Path, Path, list[float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes' parts, and the whole weights at the end; only the order of float64 sums differs. The file's two
    messages are its own, so the weights are compared with those of `train.py` too."""
    _, tokens, expected = modular
    words = ["--tokens", str(tokens), "--vocab", "300", "--dtype", "float64", "--steps", str(STEPS)]
    losses = solo(tmp_path, *words, processes=2, file=SOLO.with_name("train_fsdp.py"))
    assert losses == [pytest.approx(loss, abs=0.51e-4) for loss in (expected[0], expected[-1])]  # as printed
    monkeypatch.syspath_prepend(str(SOLO.parent))
    whole = importlib.import_module("train")
    one = whole.train(whole.parse([*WORDS.split(), *words, "--save", str(tmp_path / "one.pt")]))
    assert one == pytest.approx(expected, rel=1e-8)
    weights = [torch.load(tmp_path / name, weights_only=True)["model"] for name in ("solo.pt", "one.pt")]
    assert set(weights[0]) == set(weights[1])
    for name, weight in weights[0].items():
        torch.testing.assert_close(weight, weights[1][name], rtol=0, atol=1e-8)


def test_zero_3_by_hand_keeps_a_part_of_every_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding, cutting and the gradient of one layer on one process, where a part is the whole line."""
    monkeypatch.syspath_prepend(str(SOLO.parent))
    fsdp = importlib.import_module("train_fsdp")
    module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.RMSNorm(5)).double()
    x = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    module(x).square().sum().backward()
    gradients, into = [p.grad for p in module.parameters()], x.grad
    x.grad = None
    layer = fsdp.Layer(module, torch.device("cpu"))
    assert [len(part) for part in layer.parts] == [15, 10]
    assert all(weight.is_meta for weight in module.parameters())
    layer(fsdp.run, x).square().sum().backward()
    torch.testing.assert_close(x.grad, into)
    matrix, bias, norm = gradients
    torch.testing.assert_close(layer.parts[0].grad, matrix.flatten())
    torch.testing.assert_close(layer.parts[1].grad, torch.cat((bias, norm)))


@pytest.mark.slow
def test_qlora_has_the_same_losses(
    modular: tuple[Path, Path, list[float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float64 except the adapters' initial numbers, which two formulas round to fp32."""
    folder, tokens, plain = modular
    finetune = {"method": "qlora", "rank": 8, "alpha": 16, "double_quantization": False}
    train(modular_run(folder, "qlora", finetune=finetune), base_dir=folder)
    expected = losses_of(folder / "qlora")
    monkeypatch.syspath_prepend(str(SOLO.parent))
    qlora = importlib.import_module("finetune_qlora")
    words = [*WORDS.split(), "--tokens", str(tokens), "--vocab", "300", "--dtype", "float64", "--lr", "3e-3"]
    losses = qlora.main([*words, "--steps", str(STEPS), "--fresh", "--save", str(tmp_path / "adapters.pt")])
    assert losses == pytest.approx(expected, rel=1e-6)
    assert losses[0] - losses[-1] > 0.01  # the loss has fallen
    assert losses[0] != pytest.approx(plain[0], rel=1e-6)  # because the base is rounded


@pytest.mark.slow
def test_it_continues_bit_for_bit(
    modular: tuple[Path, Path, list[float]], module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, tokens, _ = modular
    words = [*WORDS.split(), "--tokens", str(tokens), "--vocab", "300", "--steps", "6", "--save-every", "3"]
    save = module.save

    def save_and_keep(path: Path, model: Any, optimizer: Any, step: int) -> None:
        save(path, model, optimizer, step)
        save(path.with_name(f"{step}.pt"), model, optimizer, step)

    monkeypatch.setattr(module, "save", save_and_keep)
    whole = module.train(module.parse([*words, "--save", str(tmp_path / "whole.pt")]))
    again = module.train(module.parse([*words, "--save", str(tmp_path / "3.pt"), "--resume"]))
    assert again == whole[3:]


def test_it_is_one_readable_file_of_torch_and_the_standard_library() -> None:
    source = SOLO.read_text()
    assert 350 <= source.count("\n") <= 500
    modules = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
        if name
    }
    assert modules <= set(sys.stdlib_module_names) | {"torch"}


@pytest.mark.parametrize(
    ("name", "libraries"),
    [
        ("train", {"torch"}),
        ("finetune_lora", {"torch", "safetensors", "tokenizers"}),
        ("finetune_qlora", {"torch", "train"}),
    ],
)
def test_a_file_imports_what_its_pages_say(name: str, libraries: set[str]) -> None:
    """As README.md and ARCHITECTURE.md say."""
    imported = set[str]()
    for node in ast.walk(ast.parse((SOLO.parent / f"{name}.py").read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").partition(".")[0])
    assert imported - sys.stdlib_module_names == libraries
