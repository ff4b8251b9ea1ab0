"""Megatron-LM's command line, from a shell script or a file of flags."""

import re
import shlex
from collections.abc import Mapping
from typing import Any

from meshwright.imports.reading import Reading, Rule, fact, nothing, positive, when, words
from meshwright.spec.errors import UserError

DECIDED_BY_US = (
    *("overlap-grad-reduce", "overlap-param-gather", "use-flash-attn", "transformer-impl", "use-mcore-models"),
    *("no-gradient-accumulation-fusion", "no-masked-softmax-fusion", "attention-softmax-in-fp32", "log-interval"),
    *("distributed-backend", "tokenizer-type", "dataloader-type", "num-workers", "log-throughput", "ckpt-format"),
    *("make-vocab-size-divisible-by", "distributed-timeout-minutes", "vocab-file", "merge-file"),
    *("no-async-tensor-model-parallel-allreduce", "tokenizer-hf-use-fast", "async-save", "no-bias-swiglu-fusion"),
    *("no-rope-fusion", "moe-grouped-gemm", "moe-token-dispatcher-type", "cp-comm-type", "no-bias-gelu-fusion"),
    *("eod-mask-loss", "wandb-exp-name"),
)
STAGES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""What Megatron-FSDP shards."""


def _data(reading: Reading, value: Any, origin: str) -> None:
    parts = str(value).split()
    pairs = [(None, parts[0])] if len(parts) == 1 else list(zip(parts[::2], parts[1::2], strict=False))
    sources = [
        {"path": f"{path}.bin"} | ({} if weight is None else {"weight": float(weight)}) for weight, path in pairs
    ]
    reading.set("data.sources", sources, origin)


def _recompute(reading: Reading, value: Any, origin: str) -> None:
    reading.set("training.recompute", {"full": "full", "selective": "selective"}.get(value, "full"), origin)


def _split(reading: Reading, value: Any, origin: str) -> None:
    shares = [float(share) for share in str(value).split(",")]
    reading.set("data.held_out", round(sum(shares[1:]) / sum(shares), 6), origin)


def _scaled(reading: Reading, value: Any, origin: str) -> None:
    if value is True:
        reading.fact("rope scaled", True, origin)


def _virtual(reading: Reading, value: Any, origin: str) -> None:
    if value > 1:
        reading.set("layout.schedule", "interleaved-1f1b", origin)
        reading.set("layout.stages_per_rank", value, origin)


def _sharding(reading: Reading, value: Any, origin: str) -> None:
    if value in STAGES:
        reading.fact("sharding", STAGES[value], origin)
    else:
        reading.give_up(origin, f"supported: {', '.join(STAGES)}")


def _last_step(path: str) -> Rule:
    """An interval; one as long as the run means after the last step only, once the steps are known."""

    def rule(reading: Reading, value: Any, origin: str) -> None:
        steps = reading.settings.get("training.steps", (None, ""))[0]
        reading.set(path, 0 if steps == value else value, origin)

    return rule


RULES: Mapping[str, Rule] = {
    "nproc_per_node": fact("ranks of a node"),
    "nproc-per-node": fact("ranks of a node"),
    "nnodes": fact("nodes"),
    **dict.fromkeys(("node_rank", "node-rank", "master_addr", "master_port"), nothing("set by the launcher")),
    "num-layers": "model.num_layers",
    "hidden-size": "model.hidden",
    "num-attention-heads": "model.num_heads",
    "num-query-groups": "model.num_kv_heads",
    "group-query-attention": lambda reading, value, origin: None,
    "ffn-hidden-size": "model.ffn",
    "kv-channels": "model.head_dim",
    "max-position-embeddings": "model.max_positions",
    "seq-length": "data.sequence_length",
    "rotary-base": "model.rope_theta",
    "use-rope-scaling": _scaled,
    "rope-scaling-factor": fact("rope factor"),
    "qk-layernorm": lambda reading, value, origin: reading.fact("qk norm", True, origin),
    "add-qkv-bias": lambda reading, value, origin: reading.fact("qkv bias", True, origin),
    "openai-gelu": lambda reading, value, origin: None,  # gpt2's own
    "padded-vocab-size": "model.vocab",
    "vocab-size": "model.vocab",
    "norm-epsilon": "model.norm_eps",
    "init-method-std": "model.init_std",
    "num-experts": "model.num_experts",
    "moe-router-topk": "model.experts_per_token",
    "moe-aux-loss-coeff": "model.balance_loss",
    "moe-ffn-hidden-size": "model.expert_ffn",
    "swiglu": fact("swiglu"),
    "normalization": fact("normalization"),
    "position-embedding-type": fact("positions"),
    "use-rotary-position-embeddings": lambda reading, value, origin: reading.fact("positions", "rope", origin),
    "untie-embeddings-and-output-weights": when("model.tied_embeddings", False),
    "disable-bias-linear": lambda reading, value, origin: None,
    "micro-batch-size": "training.micro_batch",
    "global-batch-size": "training.global_batch",
    "rampup-batch-size": nothing("batch size ramp-up is not supported"),
    "train-iters": "training.steps",
    "train-samples": fact("samples"),
    "lr": "training.optimizer.lr",
    "min-lr": fact("min_lr"),
    "lr-decay-style": words(
        "training.lr_schedule.name", {"cosine": "cosine", "linear": "linear", "constant": "constant", "wsd": "wsd"}
    ),
    "lr-wsd-decay-iters": "training.lr_schedule.decay",
    "lr-wsd-decay-style": lambda reading, value, origin: (
        None if value == "linear" else reading.give_up(origin, "wsd always decays linearly")
    ),
    "lr-warmup-iters": "training.lr_schedule.warmup",
    "lr-warmup-fraction": fact("warmup_ratio"),
    "lr-decay-iters": fact("decay steps"),
    "weight-decay": "training.optimizer.weight_decay",
    "adam-beta1": fact("beta1"),
    "adam-beta2": fact("beta2"),
    "adam-eps": "training.optimizer.eps",
    "clip-grad": positive("training.clip"),
    "optimizer": words("training.optimizer.name", {"adam": "adamw", "muon": "muon"}),
    "bf16": when("training.precision", "bf16"),
    "fp16": when("training.precision", "fp16"),
    "seed": "training.seed",
    "tensor-model-parallel-size": "layout.tp",
    "pipeline-model-parallel-size": "layout.pp",
    "num-virtual-stages-per-pipeline-rank": _virtual,
    "num-layers-per-virtual-pipeline-stage": nothing("set layout.schedule=interleaved-1f1b and layout.stages_per_rank"),
    "context-parallel-size": "layout.cp",
    "expert-model-parallel-size": "layout.ep",
    "sequence-parallel": lambda reading, value, origin: None,  # always with tp
    "use-distributed-optimizer": lambda reading, value, origin: reading.fact("zero", 1, origin),
    "use-megatron-fsdp": fact("Megatron-FSDP"),
    "data-parallel-sharding-strategy": _sharding,
    "num-distributed-optimizer-instances": fact("instances"),
    "accumulate-allreduce-grads-in-fp32": lambda reading, value, origin: reading.set(
        "training.reduce_dtype", "fp32", origin
    ),
    "grad-reduce-in-bf16": lambda reading, value, origin: reading.set("training.reduce_dtype", "bf16", origin),
    "deterministic-mode": when("training.deterministic", True),
    "use-torch-fsdp2": lambda reading, value, origin: reading.fact("zero", 3, origin),
    "recompute-activations": when("training.recompute", "selective"),
    "recompute-granularity": _recompute,
    "recompute-method": nothing("set training.recompute to {full: LAYERS} instead"),
    "recompute-num-layers": nothing("set training.recompute to {full: LAYERS} instead"),
    "data-path": _data,
    "split": _split,
    "tokenizer-model": "data.tokenizer",
    "save": "run_dir",
    "save-interval": _last_step("checkpoint.every"),
    "eval-interval": _last_step("training.evaluation.every"),
    "eval-iters": "training.evaluation.batches",
    "load": nothing("`meshwright train --resume` continues from the newest checkpoint"),
    "tensorboard-dir": lambda reading, value, origin: reading.set("trackers", ["tensorboard"], origin),
    "wandb-project": lambda reading, value, origin: reading.set("trackers", ["wandb"], origin),
    "hidden-dropout": nothing("models have no dropout"),
    "attention-dropout": nothing("models have no dropout"),
    "reset-attention-mask": when("data.separate_documents", True),
    "reset-position-ids": when("data.separate_documents", True),
    **dict.fromkeys(DECIDED_BY_US, nothing("Meshwright decides it")),
}


VARIABLE = re.compile(
    r"^[ \t]*(?:export[ \t]+)?(\w+)(\+?)=(?:([\w./:,+-]{1,1000})|\"([^\"]*)\"|'([^']*)')[ \t]*(?:#.*)?$",
    flags=re.MULTILINE,
)
"""A script's `NAME=word` or `NAME="words"`, on several lines too; `+=` appends."""
USED = re.compile(r"\"\$\{?(\w+)\}?\"|\$\{?(\w+)\}?")
HOLDS_FLAG = re.compile(r"(?:^|\s)--[a-z]")
HIDES_FLAGS = re.compile(r"\$\{?\w*(ARGS|OPTS|OPTIONS|FLAGS)\}?")
"""A word that stands for flags, of a variable that no line sets."""
ASSIGNED = re.compile(r"[A-Z_][A-Z0-9_]*=")
LONGEST = 2**20
"""Characters of a script with its variables put in."""


def is_flags(text: str) -> bool:
    """Whether a text holds Megatron's flags."""
    return bool(re.search(r"--(num-layers|hidden-size|tensor-model-parallel-size)\b", text))


def read_flags(text: str, file: str) -> dict[str, Any]:
    """Every `--flag value` of a script or command line; variables that the script sets to words are put in."""
    text = _expanded(text, file)
    lines = [_without_comment(line) for line in text.splitlines()]
    lines = "\n".join(lines).replace("\\\n", " ").splitlines()
    try:
        words = shlex.split(" ".join(lines).replace("(", " ").replace(")", " "), comments=False, posix=True)
    except ValueError as error:
        raise UserError(f"{file}: cannot be read as a shell script: {str(error).lower()}") from error
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if re.fullmatch(r"--[a-z][\w-]*(=.*)?", word):
            name, equals, value = word[2:].partition("=")
            found[name] = [value] if equals else []
        elif re.match(r"\d*[<>|&;]", word):  # what follows is not the flag's value
            name = ""
        elif HIDES_FLAGS.fullmatch(word):
            raise UserError(f"{file}: {word} holds flags, but the file does not set it; write them in the file")
        elif ASSIGNED.match(word):  # the next list of a script's arguments
            name = ""
        elif name:
            if not found[name] or name == "data-path" or not isinstance(_number(word), str):  # a batch that grows
                found[name].append(word)
            else:
                name = ""
    return {name: _number(" ".join(given)) if given else True for name, given in found.items()}


def _without_comment(line: str) -> str:
    """A line up to its comment, which begins with a # at the start of a word outside quotes."""
    for found in re.finditer(r"(?:^|(?<=\s))#", line):
        before = line[: found.start()]
        if before.count('"') % 2 == 0 and before.count("'") % 2 == 0:
            return before
    return line


def _expanded(text: str, file: str) -> str:
    """A script with its variables put in where it uses them.

    The flags of a string are read where the script uses it, or where it is set if only another script uses it.
    """
    variables: dict[str, str] = {}

    def value(found: re.Match[str]) -> str:
        known = variables.get(found[1] or found[2])
        if known is None:
            return found[0]
        return known if found[2] or HOLDS_FLAG.search(known) else f'"{known}"'

    def put_in(given: str) -> str:
        given = USED.sub(value, given)
        if len(given) > LONGEST:
            raise UserError(f"{file}: is longer than {LONGEST} characters once its variables are substituted")
        return given

    def assign(found: re.Match[str]) -> str:
        name, more, *given = found.groups()
        said = put_in(next(part for part in given if part is not None).replace("\\\n", " "))
        variables[name] = f"{variables.get(name, '')}{said}" if more else said
        if not HOLDS_FLAG.search(said):
            return found[0]
        return "" if name in used else said

    others = "".join(VARIABLE.split(text)[:: VARIABLE.groups + 1])  # the script without its assignments
    used = {name for pair in USED.findall(others) for name in pair}
    used |= {
        name
        for found in VARIABLE.finditer(text)
        for pair in USED.findall(found[0])
        for name in pair
        if name != found[1]
    }
    return put_in(VARIABLE.sub(assign, text))


def read_megatron(reading: Reading, values: Mapping[str, Any], file: str) -> None:
    """Read Megatron's flags."""
    open_ones = {flag: value for flag, value in values.items() if "$" in str(value)}
    for flag, value in open_ones.items():
        reading.give_up(f"{file}: {flag}={value}", "a shell variable that the file does not set")
    reading.take({flag: value for flag, value in values.items() if flag not in open_ones}, RULES, file)
    defaults = {"training.optimizer.betas": [0.9, 0.999], "training.optimizer.weight_decay": 0.01}
    defaults |= {"training.precision": "fp32", "training.lr_schedule.final": 0.0, "training.lr_schedule.warmup": 0}
    defaults |= {"training.lr_schedule.name": "linear", "training.seed": 1234}
    for path, default in defaults.items():
        reading.default(path, default, f"{file} (Megatron's default)")
    _family(reading, values, file)
    rope_scaling(reading)
    if "Megatron-FSDP" in reading.facts:
        reading.facts["zero"] = reading.facts.get("sharding", (3, reading.facts["Megatron-FSDP"][1]))
    if ranks := reading.known("ranks of a node"):
        nodes, where = reading.facts.get("nodes", (1, "one node"))
        reading.fact("ranks", ranks * nodes, f"{reading.facts['ranks of a node'][1]}; {where}")
    replicas(reading)


def rope_scaling(reading: Reading) -> None:
    """llama3's scaling, where a flag asks for it."""
    if reading.known("rope scaled"):
        factor, where = reading.facts.get("rope factor", (8.0, reading.facts["rope scaled"][1]))
        reading.set("model.rope_scaling", {"factor": float(factor)}, where)


def replicas(reading: Reading) -> None:
    """How many ranks share the optimizer's state, where there are several instances of it."""
    instances, where = reading.facts.get("instances", (1, ""))
    if instances > 1 and (ranks := reading.known("ranks")):
        split = [reading.settings.get(f"layout.{axis}", (1, ""))[0] for axis in ("tp", "pp", "cp")]
        reading.fact("shard", max(1, ranks // (split[0] * split[1] * split[2] * instances)), where)


def _family(reading: Reading, values: Mapping[str, Any], file: str) -> None:
    """The family that has these layers."""
    gated = reading.known("swiglu") or reading.known("positions") == "rope"
    kind = "llama" if gated else "gpt2"
    if "num-experts" in values:
        kind = "mixtral"
    elif gated and reading.known("qk norm"):
        kind = "qwen3"
    elif gated and reading.known("qkv bias"):
        kind = "qwen2"
    if kind == "mixtral" and "model.expert_ffn" in reading.settings:
        reading.settings["model.ffn"] = reading.settings.pop("model.expert_ffn")
    told = ("swiglu", "positions", "normalization", "qk norm", "qkv bias")
    origins = [reading.facts[name][1] for name in told if name in reading.facts]
    reading.set("model.family", kind, "; ".join(origins) or f"{file} (no flag sets another activation)")
    if "untie-embeddings-and-output-weights" not in values:
        reading.default("model.tied_embeddings", True, f"{file} (Megatron's default)")
    if kind != "gpt2" and "disable-bias-linear" not in values:
        reading.give_up(f"{file} (no --disable-bias-linear)", f"{kind} has no such biases")


def _number(word: str) -> Any:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word
