"""Writes docs/models.md from the families' presets and parameter tables: run it after changing one."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from meshwright.families import FAMILIES, PRESETS, active_parameters, parameter_table, resolve_model
from meshwright.spec.model import ModelFields, ModelSpec

PAGE = Path(__file__).with_name("models.md")

BEGIN = """\
# Models

Every published size that a recipe can name, as in `model: llama-3.2-1b`. Parameters are counted from the table that the
model is built from; a tied head counts once.

`model: NAME` initializes random weights of that size. To continue from published weights, download the Hugging Face
directory and set `model: path/to/directory`; `model: {name: path/to/directory, weights: random}` initializes random
weights instead. A published name keeps its published vocabulary, even if the run trains a smaller tokenizer; `model:
{name: gpt2, vocab: 4096}` shrinks the embedding.

Set any other size by fields, or as a change to a name:

```yaml
model: {family: llama, hidden: 512, num_layers: 8, num_heads: 8, num_kv_heads: 4}
```

```yaml
model: {name: qwen3-0.6b, num_layers: 8}
```

[The recipe](recipe.md#model) lists the fields. These properties define the family, and no field changes them:
"""

EXPERTS = """\

## Mixtures of experts

A router sends every token to a few of a layer's experts; only the parameters used for a token are *active* and cost
FLOPs. Experts have no capacity limit, so no token is dropped. Routing is always computed in fp32.

The load-balancing loss (with coefficient `model.balance_loss`) has Mixtral's form for each layer: the number of experts
times the sum, over experts, of the share of tokens times the mean probability. It is computed per sequence, and the
gradient of its mean over the sequences of the global batch is added. So it does not depend on how a batch is split into
microbatches and ranks, as a loss over whole microbatches would. The reported loss does not include it.

`model.router_z_loss` is the coefficient of the router's z-loss (Zoph et al., "ST-MoE", 2022, eq. 5): the mean over
tokens of the squared logarithm of the sum of the exponentials of a router's logits, which keeps them small. It is added
for each layer and sequence like the balance loss. The default is 0; ST-MoE used 0.001.

```yaml
model: {family: mixtral, hidden: 512, num_layers: 8, num_heads: 8, ffn: 1024, num_experts: 8, experts_per_token: 2}
```

`deepseek_v3`, `glm4_moe` and `minimax_m2` balance with a bias (Wang et al., 2024) and a small balance loss (none in
`minimax_m2`). The bias is added to an expert's score only for choosing experts. It is not trained: in every optimizer
step it moves by `model.balance_rate`, down for experts with more than the mean of the global batch's tokens, up for the
others. It is kept in fp32, saved in checkpoints, and exported. The published coefficient of the loss is for shares that
add up to 1 over a token's experts; ours add up to their number, so the default is smaller by that factor. Groups of
experts, shared experts and dense first layers are as published. Multi-token prediction layers (MTP) are not
implemented, and are skipped in directories that have them; exports do not have them. The shared expert of `qwen3_next`
and `qwen3_5_moe` has a gate, a number for each token.

In Hugging Face directories every expert has separate tensors, as transformers 4 and 5 write them (in `gpt_oss` all
experts share one, in bf16 or MXFP4, which is multiplied out when read); here, all experts of a layer are one tensor.
"""

DELTA = """
## The gated delta rule

Three of four layers of `qwen3_next`, `qwen3_5` and `qwen3_5_moe` have a state of fixed size in the place of keys and
values: a matrix for each head, which every token lets decay and corrects (Yang et al., "Gated Delta Networks", 2024).
It is computed in chunks of 64 tokens, by products of matrices, in fp32 under bf16 and fp16; tests compare it with the
token-by-token recurrence in float64, gradients included.

- Documents of a packed row stay apart: the state and the short convolution begin anew at each.
- Tensor parallelism splits the heads; `layout.tp` must divide `model.delta_key_heads`.
- Context parallelism passes what a run of tokens does to a state, an affine map, instead of keys and values, and the
  last tokens before a run to the convolution; the same with `ring`, `all_gather` and `ulysses`.
- In generation, the cache holds the state. The prefix of a conversation is not used again, because a state cannot be
  shortened, and compiled steps (`--compile`) do not support the layer.
- GGUF files are not written.
"""

ADDING = """
## Adding a family of known layers

A family is data: one file in `src/meshwright/families/` of less than 80 lines, a row in `families/registry.py`, and its
name in `FamilyName` (`spec/model.py`). `ModelSpec` has the options, and `spec/layers.py` says what they mean for each
layer: `spec.layer(i)` is a value with its mixer (heads or latent attention, with its window, rotary table and norms, or
the gated delta rule), its feed-forward part (dense, or experts with their router) and the places of its norms. Tables,
modules, masks, caches, FLOPs and plans read this value, so a new combination needs no other code.

OLMo 3 (`families/olmo.py`) as an example. It differs from Llama in four ways, each a switch:

```python
OLMO3 = replace(
    LLAMA,
    name="olmo3",
    switches={
        **LLAMA.switches,
        "norms": "after",  # outputs of attention and feed-forward are normed, not their inputs
        "qk_norm": "all",  # queries and keys are normed over all heads
        "window_layers": every(4),  # three layers with the window, then one without; the pattern repeats
        "window_scaled": False,  # yarn applies only to layers without the window
    },
    defaults={"max_positions": 8192, "norm_eps": 1e-6, "rope_theta": 500000.0, "sliding_window": 4096},
    # ... and what follows
)
```

The rest are its published sizes (`presets`), and Hugging Face's names: `hf_fields` maps our options to keys of
config.json, `hf_absent` has transformers' defaults, `hf_accepts` the values that other keys must have (any other value
is refused by name), `hf_layers=TYPED` reads `layer_types`, and `hf_modules` maps modules to tensors.

Then add its configuration class to `SCHEMA` in `tests/config_fuzz.py` and its name to `FAMILIES` in
`tests/test_native_families.py`: 32 drawn configurations have transformers' logits, gradients and tokens in float64, an
export opens there, and a step on every kind of layout equals one process's. `tests/test_families_table.py` pins the
published number of parameters. A layer of a new kind needs more: a value in `spec/layers.py`, its rows in
`families/table.py` and its module in `models/`; type checks name every place that must decide about it.
"""

FEED_FORWARD = {
    ("silu", True): "SwiGLU",
    ("silu", False): "SiLU",
    ("gelu_tanh", True): "GeGLU (tanh)",
    ("gelu_tanh", False): "GELU (tanh)",
    ("clamped_silu", True): "clamped SwiGLU",
}
"""A layer's usual name by activation and gate."""


def page() -> str:
    """The text of docs/models.md."""
    return "\n".join([BEGIN, *_families(), "", *_presets(), EXPERTS.rstrip(), DELTA.rstrip(), ADDING.rstrip()]) + "\n"


def _families() -> Iterator[str]:
    yield "| family | norm | feed-forward | positions | biases | queries and keys |"
    yield "|---|---|---|---|---|---|"
    for name, family in FAMILIES.items():
        model = family.model({"hidden": 64, "num_layers": 12, "num_heads": 1, "vocab": 1, "max_positions": 1})
        norm = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm", "offset_rmsnorm": "RMSNorm, 1 + weight"}[model.norm]
        norm += {"before": "", "after": " of outputs", "both": " of inputs and outputs"}[model.norms]
        feed_forward = FEED_FORWARD[model.activation, model.gated]
        feed_forward += " experts" if model.num_experts else ""
        positions = {"rope": "rotary", "learned": "learned"}[model.positions]
        positions += ", latent attention" if model.kv_rank else ""
        mixers = {layer.mixer for layer in model.layers}
        positions += f", {_pattern(model)}" if len(mixers) > 1 else ""
        positions += ", sinks" if model.sinks else ""
        positions += ", gated" if model.attention_gate else ""
        positions += ", a part of each head" if family.hf_rotated is not None else ""
        qk_norm = {"none": "no norm", "heads": "RMSNorm per head", "all": "RMSNorm over all heads"}[model.qk_norm]
        qk_norm += " in some sizes" if "qk_norm" in family.defaults else ""
        yield f"| `{name}` | {norm} | {feed_forward} | {positions} | {_biases(model)} | {qk_norm} |"


def _pattern(model: ModelSpec) -> str:
    """The different layers of a family."""
    if any(model.delta_layers):
        return f"the gated delta rule in {sum(model.delta_layers)} of {len(model.delta_layers)} layers"
    if model.sliding_window is None:
        return f"none in one of {len(model.rope_layers)} layers"
    return f"a window in {sum(model.window_layers)} of {len(model.window_layers)} layers"


def _biases(model: ModelSpec) -> str:
    if model.qkv_bias and model.output_bias and (model.ffn_bias or model.expert_bias):
        return "everywhere"
    return "queries, keys, values" if model.qkv_bias else "none"


def _presets() -> Iterator[str]:
    yield "| name | parameters | in blocks | layers | width | heads | kv heads | ffn | vocabulary | positions | notes |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|"
    for name in PRESETS:
        model = resolve_model(ModelFields(name=name), base_dir=Path())
        table = parameter_table(model)
        total = sum(row.numel for row in table)
        blocks = sum(row.numel for row in table if row.name.startswith("layers."))
        sizes = (model.num_layers, model.hidden, model.num_heads, model.num_kv_heads, model.ffn, model.vocab)
        cells = [f"{number:,}" for number in (total, blocks)] + [str(size) for size in sizes]
        yield f"| `{name}` | {' | '.join(cells)} | {model.max_positions} | {_notes(model)} |"


def _notes(model: ModelSpec) -> str:
    """Properties of a size that its family does not fix."""
    notes = ["tied head"] if model.tied_embeddings else []
    if model.num_experts:
        active = active_parameters(model) / 1e9
        notes.append(f"{model.experts_per_token} of {model.num_experts} experts per token: {active:.1f}B active")
    if model.shared_width:
        notes.append(f"{model.shared_experts or 1} shared")
    if model.dense_layers:
        notes.append(f"{model.dense_layers} dense layers")
    if model.sliding_window and model.windows != (None,):
        notes.append(f"window {model.sliding_window}")
    if model.rope_scaling:
        kind = "" if model.rope_scaling.kind == "llama3" else f"{model.rope_scaling.kind} "
        notes.append(f"rope scaling {kind}{model.rope_scaling.factor:g}")
    return ", ".join(notes)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page(), encoding="utf-8")
