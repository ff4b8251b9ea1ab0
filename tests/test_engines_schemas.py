"""Exported configurations, read by the systems' own parsers: `pytest --engines tests/test_engines_schemas.py`, in an
environment that has them. A system that is not installed is skipped.

    pip install --no-deps torchtitan && pip install tyro einops tensorboard triton torchdata spmd_types
    git clone https://github.com/NVIDIA/Megatron-LM (Python 3.12), and --megatron-lm with its folder
    git clone https://github.com/NVIDIA-NeMo/Megatron-Bridge (pip install "transformers>=5.8,<=5.12.1"), and
    --megatron-bridge with its folder
    git clone into one folder, and --checkouts with it: huggingface/nanotron (pip install dacite datasets triton),
    NVIDIA-NeMo/Automodel (pip install torchdata, without triton), axolotl-ai-cloud/axolotl (pip install pillow),
    hiyouga/LLaMA-Factory (pip install omegaconf), mosaicml/llm-foundry and mosaicml/composer (pip install omegaconf)
"""

import importlib.machinery
import importlib.util
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.numpy import save_file

from meshwright.engines.registry import WRITTEN
from meshwright.optim.schedule import lr_factor
from meshwright.spec.recipe import parse_spec
from meshwright.spec.run import ResolvedRun, Run
from meshwright.trainer.resolve import resolve_run
from test_engines_axolotl import RECIPE as FINE_TUNING
from test_engines_axolotl import VARIANTS as AXOLOTL
from test_engines_written import CONFIG, RECIPES, VARIANTS

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("default")]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(CONFIG)
    save_file({"none": np.zeros(1, np.float32)}, tmp_path / "base" / "model.safetensors")
    return tmp_path


def written(name: str, folder: Path, *overrides: str) -> tuple[Path, ResolvedRun]:
    run = resolve_run(parse_spec(RECIPES[name], Run, overrides), base_dir=Path())
    return WRITTEN[name].translate(run).write(folder), run


def ours(run: ResolvedRun) -> list[float]:
    """The factors of the learning rate, step by step."""
    steps, schedule = run.run.training.steps, run.run.training.lr_schedule
    return [lr_factor(schedule, step, steps) for step in range(1, steps + 1)]


@pytest.mark.parametrize("number", range(len(VARIANTS["torchtitan"])))
def test_torchtitan(folder, number):
    if not importlib.util.find_spec("torchtitan"):
        pytest.skip("torchtitan is not installed")
    pytest.importorskip("torchtitan.trainer")
    manager = importlib.import_module("torchtitan.config.manager").ConfigManager()
    _, run = written("torchtitan", folder, *VARIANTS["torchtitan"][number])
    sys.modules.pop("run_torchtitan", None)
    config = manager.parse_args(["--module", "run_torchtitan", "--config", "run"])
    training, layout = config.training, run.run.layout
    assert (training.steps, training.global_batch_size, training.seq_len) == (50, 32, 256)
    degrees = config.parallelism
    assert degrees.data_parallel_replicate_degree * degrees.data_parallel_shard_degree == layout.data_parallel
    assert (degrees.tensor_parallel_degree, degrees.pipeline_parallel_degree) == (layout.tp, layout.pp)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizers = [torch.optim.AdamW([parameter], lr=1.0)]
    rates = config.lr_scheduler.build(optimizers=optimizers, training_steps=training.steps)
    factor = rates.schedulers[0].lr_lambdas[0]
    schedule = run.run.training.lr_schedule
    falls = schedule.name in ("cosine", "linear")  # one step later: less than 1 / steps of the way, at most pi / 2
    allowed = np.pi / 2 / (training.steps - schedule.warmup_steps(training.steps)) if falls else 1e-12
    assert [factor(step) for step in range(50)] == pytest.approx(ours(run), abs=allowed)
    assert factor(49) == pytest.approx(ours(run)[-1], abs=1e-12)
    decoder = config.model_spec.model
    with torch.device("meta"):
        model = decoder.build()
    scale = run.model.rope_scaling.factor if run.model.rope_scaling else None
    rope = decoder.layers[0].attention.rope
    assert (rope.scaling_factor if rope.scaling == "llama" else None) == scale
    assert sum(parameter.numel() for parameter in model.parameters()) == SIZES[str(run.run.model.name)]
    groups = config.optimizer.param_groups
    for name, tensor in model.named_parameters():
        group = next(group for group in groups if re.match(group.pattern, name))
        decay = run.run.training.optimizer.weight_decay if tensor.dim() > 1 else 0.0
        assert group.optimizer_kwargs["weight_decay"] == decay, name


@pytest.mark.parametrize("number", range(len(VARIANTS["megatron_lm"])))
def test_megatron_lm(folder, monkeypatch, request, number):
    checkout = request.config.getoption("--megatron-lm")
    if checkout is None:
        pytest.skip("give --megatron-lm, the folder of NVIDIA/Megatron-LM")
    monkeypatch.setattr(sys, "path", [checkout, *sys.path])
    path, run = written("megatron_lm", folder, *VARIANTS["megatron_lm"][number])
    words = shlex.split(path.read_text().replace("\\\n", " "), comments=True)
    monkeypatch.setattr(sys, "argv", words[words.index("pretrain_gpt.py") :])
    hopper = SimpleNamespace(major=9, minor=0)  # is read for layouts with tp
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: hopper)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    exported = dict(re.findall(r"^export (\w+)=(\w+)$", path.read_text(), re.MULTILINE))
    for name, value in {"WORLD_SIZE": run.run.layout.world_size, "RANK": 0, **exported}.items():
        monkeypatch.setenv(name, str(value))
    arguments = importlib.import_module("megatron.training.arguments")
    given = arguments.parse_args()
    arguments.validate_args(given)
    layout, model, training = run.run.layout, run.model, run.run.training
    assert given.data_parallel_size == layout.data_parallel
    assert (given.num_layers, given.ffn_hidden_size, given.padded_vocab_size) == (
        model.num_layers,
        model.ffn,
        model.vocab,
    )
    if given.group_query_attention:
        assert given.num_query_groups == model.num_kv_heads
    assert given.untie_embeddings_and_output_weights != model.tied_embeddings
    assert given.bf16 == (training.precision == "bf16")
    assert given.accumulate_allreduce_grads_in_fp32 == (training.dtypes.narrow and training.reduce_dtype == "fp32")
    scheduler = importlib.import_module("megatron.core.optimizer_param_scheduler").OptimizerParamScheduler
    rates = scheduler(
        optimizer=SimpleNamespace(param_groups=[]), init_lr=0.0, max_lr=given.lr, min_lr=given.min_lr,
        lr_warmup_steps=given.lr_warmup_iters, lr_decay_steps=given.lr_decay_iters, start_wd=0.0, end_wd=0.0,
        lr_decay_style=given.lr_decay_style, wd_incr_steps=0, wd_incr_style="constant",
        wsd_decay_steps=given.lr_wsd_decay_iters, lr_wsd_decay_style=given.lr_wsd_decay_style,
    )  # fmt: skip
    for step, factor in enumerate(ours(run), start=1):  # theirs is one step later
        rates.num_steps = step
        assert rates.get_lr({}) == pytest.approx(factor * training.optimizer.lr, rel=1e-9), step


class Absent(type):
    """A class for every name of a package that exists only for GPUs."""

    def __getattr__(cls, name: str) -> "Absent":
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(name, (), {})


def pretend(*names: str) -> None:
    """Makes GPU-only modules importable if they are not installed; they have a class for every name."""
    if names[0] in sys.modules or importlib.util.find_spec(names[0]):
        return
    for name in names:
        module: Any = ModuleType(name)
        module.__path__, module.__version__, module.__getattr__ = [], "2.9.0", Absent("names", (), {}).__getattr__
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = module


def clone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, name: str, source: str) -> Path:
    """The folder of a clone, whose sources take precedence over other modules; skips the test if it is not given."""
    folder = request.config.getoption("--checkouts")
    if folder is None or not (Path(folder) / name).is_dir():
        pytest.skip(f"give --checkouts, a folder with a clone named {name}")
    monkeypatch.setattr(sys, "path", [str(Path(folder) / name / source), *sys.path])
    return Path(folder) / name


def bridge(lm: str, checkout: str) -> Any:
    """Megatron-Bridge's configurations. Its adapters import Transformer Engine, which needs a GPU."""
    sys.path[:0] = [lm, f"{checkout}/src"]
    for module in ("core.models.gpt", "core.tensor_parallel.inference_layers", "training.training"):
        importlib.import_module(f"megatron.{module}")
    pretend("transformer_engine", "transformer_engine.pytorch")
    return importlib.import_module("megatron.bridge.training.config").ConfigContainer


@pytest.mark.parametrize("number", range(len(VARIANTS["megatron_bridge"])))
def test_megatron_bridge(folder, request, number):
    lm, checkout = (request.config.getoption(name) for name in ("--megatron-lm", "--megatron-bridge"))
    if lm is None or checkout is None:
        pytest.skip("give --megatron-lm and --megatron-bridge, the folders of NVIDIA's repositories")
    path, run = written("megatron_bridge", folder, *VARIANTS["megatron_bridge"][number])
    config = bridge(lm, checkout).from_yaml(str(path))
    layout, model, training = run.run.layout, run.model, run.run.training
    assert (config.model.num_layers, config.model.num_query_groups) == (model.num_layers, model.num_kv_heads)
    assert config.model.activation_func is torch.nn.functional.silu
    assert config.model.tensor_model_parallel_size == layout.tp
    assert config.ddp.use_distributed_optimizer == (layout.zero_stage > 0)
    assert config.optimizer.lr == training.optimizer.lr
    assert config.scheduler.lr_warmup_iters == training.lr_schedule.warmup_steps(training.steps)
    assert config.dataset.sequence_length == run.run.data.sequence_length
    if training.dtypes.narrow:
        mixed = importlib.import_module("megatron.bridge.training.mixed_precision")
        precision = mixed.get_mixed_precision_config(config.mixed_precision)
        assert getattr(precision, training.precision)
        assert precision.grad_reduce_in_fp32


GPU_ONLY = (
    *("flash_attn", "flash_attn.flash_attn_interface", "flash_attn.layers", "flash_attn.layers.rotary"),
    *("flash_attn.ops", "flash_attn.ops.triton", "flash_attn.ops.triton.layer_norm", "flash_attn.bert_padding"),
)


@pytest.fixture
def alone(tmp_path):
    """A process group of one process, because one system logs by rank."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("number", range(len(VARIANTS["nanotron"])))
def test_nanotron(folder, request, monkeypatch, number):
    clone(request, monkeypatch, "nanotron", "src")
    pytest.importorskip("triton")
    pytest.importorskip("dacite")
    pretend(*GPU_ONLY)
    pretend("grouped_gemm", "grouped_gemm.ops")
    importlib.import_module("nanotron.logging")  # first, because its own imports are circular
    helpers = importlib.import_module("nanotron.helpers")
    path, run = written("nanotron", folder, *VARIANTS["nanotron"][number])
    config = importlib.import_module("nanotron.config").get_config_from_file(str(path))
    model, training, layout = run.model, run.run.training, run.run.layout
    sizes = config.model.model_config
    assert type(sizes).__name__ == ("Qwen2Config" if model.qkv_bias else "LlamaConfig")
    assert (sizes.num_key_value_heads, sizes.tie_word_embeddings) == (model.num_kv_heads, model.tied_embeddings)
    assert config.global_batch_size == run.global_batch
    degrees = config.parallelism
    assert degrees.dp * degrees.tp * degrees.pp * degrees.context_parallel_size == layout.world_size
    assert config.optimizer.clip_grad == training.clip
    scheduler = config.optimizer.learning_rate_scheduler
    base = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=scheduler.learning_rate)
    optimizer = SimpleNamespace(get_base_optimizer=lambda: base)
    rate = helpers.lr_scheduler_builder(optimizer, scheduler, training.steps).lr_lambdas[0]
    assert [rate(step) for step in range(1, training.steps + 1)] == pytest.approx(
        ours(run)
    )  # theirs comes one step later
    names = ["model.token_position_embeddings.pp_block.token_embedding.weight"]
    names += ["model.decoder.0.pp_block.attn.qkv_proj.weight", "model.decoder.0.pp_block.attn.qkv_proj.bias"]
    names += ["model.decoder.0.pp_block.input_layernorm.weight", "model.final_layer_norm.pp_block.weight"]
    tied = SimpleNamespace(get_full_name_from_module_id_to_prefix=lambda module_id_to_prefix: names[0])
    parameters = [
        (name, SimpleNamespace(is_tied=model.tied_embeddings and name == names[0], get_tied_info=lambda: tied))
        for name in names
    ]
    options = (config.optimizer.weight_decay, config.optimizer.weight_decay_exclude_named_params)
    groups = helpers.get_custom_weight_decay_for_named_parameters(parameters, None, {}, *options)
    decay = training.optimizer.weight_decay
    assert [group["weight_decay"] for group in groups] == [decay, decay, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("number", range(len(VARIANTS["automodel"])))
def test_automodel(folder, request, monkeypatch, number):
    clone(request, monkeypatch, "Automodel", "")
    pytest.importorskip("torchdata")
    path, run = written("automodel", folder, *VARIANTS["automodel"][number])
    load = importlib.import_module("nemo_automodel.components.config.loader").load_yaml_config
    config = importlib.import_module("nemo_automodel.recipes._typed_config").RecipeConfig(load(str(path)))
    parse = importlib.import_module("nemo_automodel.recipes._dist_utils").parse_distributed_section
    distributed = parse(config.distributed.to_dict())
    training, layout, sizes = run.run.training, run.run.layout, distributed["parallelism_sizes"]
    assert (sizes.dp_size, sizes.tp_size, sizes.pp_size) == (layout.data_parallel, layout.tp, layout.pp)
    assert sizes.dp_size * sizes.tp_size * sizes.pp_size * sizes.cp_size == layout.world_size
    assert distributed["activation_checkpointing"] == {"full": True, "none": False}.get(run.recompute[0], "selective")
    steps = SimpleNamespace(epoch_len=None, num_epochs=1, max_steps=config.step_scheduler.max_steps)
    assert (config.step_scheduler.global_batch_size, steps.max_steps) == (run.global_batch, training.steps)
    model = torch.nn.ModuleDict({"linear": torch.nn.Linear(2, 2), "norm": torch.nn.LayerNorm(2)})
    (optimizer,) = config.optimizer.build(model)
    assert {group.get("wd_mult", 1.0): len(group["params"]) for group in optimizer.param_groups} == {1.0: 1, 0.0: 3}
    (rates,) = config.lr_scheduler.build(optimizer, steps)
    for factor in ours(run):  # theirs is one step later
        rates.step(1)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([factor * training.optimizer.lr] * 2)
    decays = {group.get("wd_mult", 1.0): group["weight_decay"] for group in optimizer.param_groups}
    assert decays == {1.0: training.optimizer.weight_decay, 0.0: 0.0}
    dataset = config.dataloader.dataset_config
    assert dataset.seq_length == run.run.data.sequence_length
    if run.run.finetune is not None and run.run.finetune.method == "lora":
        adapters = config.peft.instantiate()
        assert (adapters.dim, adapters.match_all_linear, adapters.dropout_position) == (4, True, "pre")


@pytest.mark.parametrize("number", range(len(AXOLOTL)))
def test_axolotl(folder, request, monkeypatch, number):
    clone(request, monkeypatch, "axolotl", "src")
    pytest.importorskip("PIL")
    schema = importlib.import_module("axolotl.utils.schemas.config").AxolotlInputConfig
    run = resolve_run(parse_spec(FINE_TUNING, Run, AXOLOTL[number]), base_dir=Path())
    written = yaml.safe_load(WRITTEN["axolotl"].translate(run).write(folder).read_text())
    assert not [key for key in written if key not in schema.model_fields or schema.model_fields[key].deprecated]
    config = schema(**written)
    training = run.run.training
    assert (config.micro_batch_size, config.max_steps) == (run.micro_batch, training.steps)
    assert (config.warmup_steps, config.max_grad_norm) == (training.lr_schedule.warmup, training.clip or 0.0)
    assert config.learning_rate == training.optimizer.lr
    assert (config.fsdp_version, config.fsdp_config is not None) == (
        (2, True) if run.run.layout.zero_stage else (None, False)
    )
    assert config.sample_packing == (run.run.data.packing == "best_fit")


@pytest.mark.parametrize("number", range(len(VARIANTS["llama_factory"])))
def test_llama_factory(folder, request, monkeypatch, number):
    clone(request, monkeypatch, "LLaMA-Factory", "src")
    pytest.importorskip("omegaconf")
    pretend("torchaudio")
    monkeypatch.setenv("DISABLE_VERSION_CHECK", "1")
    parser = importlib.import_module("llamafactory.hparams.parser")
    datasets = importlib.import_module("llamafactory.data.parser")
    path, run = written("llama_factory", folder, *VARIANTS["llama_factory"][number])
    given = {**yaml.safe_load(path.read_text()), "use_cpu": True, "bf16": False, "fp16": False}  # these need a GPU
    model, data, training, finetuning, _ = parser._parse_train_args(given)
    assert (training.max_steps, training.learning_rate) == (50, run.run.training.optimizer.lr)
    assert training.max_grad_norm == (run.run.training.clip or 0.0)
    assert model.train_from_scratch == (run.run.model.weights == "random")
    assert model.disable_gradient_checkpointing == (run.recompute[0] != "full")
    assert finetuning.stage == ("dpo" if run.run.training.preference else finetuning.stage)
    found = datasets.get_dataset_list(data.dataset, str(folder))
    paths = [source.path.removeprefix("hub:") for source in run.run.data.sources]
    assert [attributes.dataset_name for attributes in found] == paths
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([parameter], lr=1.0)
    schedules = importlib.import_module("transformers.optimization")
    steps = run.run.training.steps
    rates = schedules.get_scheduler(training.lr_scheduler_type, optimizer, training.get_warmup_steps(steps), steps)
    factor = rates.lr_lambdas[0]
    assert [factor(step) for step in range(1, steps + 1)] == pytest.approx(ours(run), abs=1e-12)  # a step later


def partly(folder: Path, *names: str) -> None:
    """Makes a checkout's packages importable file by file, without their own imports: they have a class for every
    name."""
    for name in names:
        module: Any = ModuleType(name)
        module.__path__, module.__getattr__ = (
            [str(folder / name.replace(".", "/"))],
            Absent("names", (), {}).__getattr__,
        )
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = module


COMPOSER = ("composer", *(f"composer.{name}" for name in ("core", "loggers", "models", "optim", "utils")))
FOUNDRY = (
    *(
        "llmfoundry",
        "llmfoundry.registry",
        "llmfoundry.layers_registry",
        "llmfoundry.models",
        "llmfoundry.models.utils",
    ),
    *("llmfoundry.callbacks", "llmfoundry.data", "llmfoundry.data.dataloader", "llmfoundry.eval", "llmfoundry.utils"),
    *("llmfoundry.eval.datasets", "llmfoundry.eval.datasets.in_context_learning_evaluation"),
)


@pytest.fixture
def foundry(request, monkeypatch):
    """LLM-Foundry's configuration and builders; Composer's schedules, optimizer and time."""
    folders = [clone(request, monkeypatch, name, "") for name in ("composer", "llm-foundry")]
    pytest.importorskip("omegaconf")
    pretend("mlflow", "mlflow.data")
    pretend("torchmetrics")
    pretend("catalogue")
    for folder, names in zip(folders, (COMPOSER, FOUNDRY), strict=True):
        partly(folder, *names)
    load = importlib.import_module
    sys.modules["composer.utils"].StringEnum = load("composer.utils.string_enum").StringEnum  # type: ignore[attr-defined]
    time = load("composer.core.time")
    core: Any = sys.modules["composer.core"]
    core.Time, core.TimeUnit = time.Time, time.TimeUnit
    yield SimpleNamespace(
        config=load("llmfoundry.utils.config_utils"),
        groups=load("llmfoundry.utils.builders")._extract_param_groups,
        schedules=load("composer.optim.scheduler"),
        optimizer=load("composer.optim.decoupled_weight_decay").DecoupledAdamW,
        sharding=load("composer.utils.parallelism").FSDPConfig,
        time=time,
    )
    for name in [name for name in sys.modules if name.split(".")[0] in ("composer", "llmfoundry")]:
        del sys.modules[name]


FOUNDRY_SCHEDULES = {
    "cosine_with_warmup": "CosineAnnealingWithWarmupScheduler",
    "linear_decay_with_warmup": "LinearWithWarmupScheduler",
    "constant_with_warmup": "ConstantWithWarmupScheduler",
}
"""The names that `llmfoundry/optim/__init__.py` registers."""


@pytest.mark.parametrize("number", range(len(VARIANTS["llm_foundry"])))
def test_llm_foundry(folder, foundry, monkeypatch, number):
    path, run = written("llm_foundry", folder, *VARIANTS["llm_foundry"][number])
    training, steps = run.run.training, run.run.training.steps
    ranks = SimpleNamespace(get_world_size=lambda: run.run.layout.world_size)
    monkeypatch.setattr(foundry.config, "dist", ranks)
    omega = importlib.import_module("omegaconf").OmegaConf
    _, config = foundry.config.make_dataclass_and_log_config(
        omega.load(path),
        foundry.config.TrainConfig,
        foundry.config.TRAIN_CONFIG_KEYS,
        transforms=[foundry.config.update_batch_size_info],
    )
    assert (config.device_train_microbatch_size, config.device_train_grad_accum) == (run.micro_batch, run.accumulation)
    assert (config.max_seq_len, config.seed) == (run.run.data.sequence_length, training.seed)
    assert (config.fsdp_config or {}).keys() <= foundry.sharding.__dataclass_fields__.keys()
    if "peft_config" in config.model:
        pytest.importorskip("peft").LoraConfig(**config.model["peft_config"])
    name = FOUNDRY_SCHEDULES[config.scheduler.pop("name")]
    schedule = getattr(foundry.schedules, name)(**config.scheduler)
    duration = foundry.time.Time.from_timestring(config.max_duration)
    factors = [
        schedule(SimpleNamespace(max_duration=duration, timestamp=foundry.time.Timestamp(batch=step)))
        for step in range(1, steps + 1)
    ]
    assert factors == pytest.approx(ours(run), abs=1e-12)  # theirs is one step later
    assert config.optimizer.pop("name") == "decoupled_adamw"
    config.optimizer["betas"] = tuple(config.optimizer["betas"])
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"linear": torch.nn.Linear(2, 2), "norm": torch.nn.LayerNorm(2)}).double()
    other = torch.nn.ModuleDict({"linear": torch.nn.Linear(2, 2), "norm": torch.nn.LayerNorm(2)}).double()
    other.load_state_dict(model.state_dict())
    theirs = foundry.optimizer(foundry.groups(model, config.optimizer), **config.optimizer)
    optimizer, groups = (
        training.optimizer,
        ([other["linear"].weight], [other["linear"].bias, *other["norm"].parameters()]),
    )
    decays = (optimizer.weight_decay, 0.0)
    own = torch.optim.AdamW(
        [{"params": group, "weight_decay": decay} for group, decay in zip(groups, decays, strict=True)],
        lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps,
    )  # fmt: skip
    rates = torch.optim.lr_scheduler.LambdaLR(theirs, lambda step: factors[step])
    for factor in factors[:3]:
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            one.grad = two.grad = torch.randn_like(one)
        for group in own.param_groups:
            group["lr"] = optimizer.lr * factor
        theirs.step()
        own.step()
        rates.step()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=0)


SIZES = {"llama-3.1-8b": 8_030_261_248, "llama-3.2-1b": 1_235_814_400, "qwen3-0.6b": 596_049_920}
"""Parameters of the published models."""
