"""One step of generation compiled for this machine: `decode.cpp`, by its C++ compiler.

`compile_step` fills the model's slot `next_step` with copies of its weights in the order in which the compiled code
reads them. The compiled code computes steps in which every sequence gets one token. The modules compute prompts, with
their own weights. Both share the KV cache.

Shapes: B rows, V vocabulary, O out, D in, P panels, C room for keys.
"""

import ctypes
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.machine import processor
from meshwright.models.attention import Attention, Core
from meshwright.models.batch import TensorBatch
from meshwright.models.cache import Cache, LayerCache
from meshwright.models.decoder import Block, Decoder
from meshwright.models.feed_forward import FeedForward
from meshwright.models.linear import Linear
from meshwright.models.norm import LayerNorm, RMSNorm
from meshwright.models.packed import COPIED_BYTES, DTYPES, all_plain, weight_bytes
from meshwright.models.rope import rope_tables
from meshwright.models.slots import View, Viewed
from meshwright.spec.errors import UserError
from meshwright.spec.layers import ActivationName, AttentionSpec, DenseSpec
from meshwright.spec.model import ModelSpec

SOURCE = Path(__file__).with_name("decode.cpp")
CACHE = Path.home() / ".cache" / "meshwright" / "decode"
"""Folder of compiled code; it may be deleted."""
COMPILERS = ("g++", "clang++", "c++")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-fopenmp")
ACTIVATIONS: dict[ActivationName, int] = {"silu": 0, "gelu_tanh": 1}
"""Their numbers in `decode.cpp`."""
PANEL = 32
"""Outputs that lie side by side in memory; as in `decode.cpp`."""
AHEAD = 4096
"""Bytes after a matrix that the code may prefetch."""
LANES = 16
"""Numbers computed together; as in `decode.cpp`."""
OPENMP = re.compile(r"lib(gomp|iomp|omp)\b.*\.so")


class _Matrix(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
        *((name, ctypes.c_long) for name in ("out", "into")),
    )


class _Norm(ctypes.Structure):
    _fields_ = (("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p), ("eps", ctypes.c_float))


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Norm) for name in ("before", "between", "q_norm", "k_norm")),
        *((name, _Matrix) for name in ("qkv", "out", "gate", "up", "down")),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("embeddings", "positions", "blocks")),
        ("last", _Norm),
        ("head", _Matrix),
        *(
            (name, ctypes.c_long)
            for name in ("count", "hidden", "heads", "groups", "width", "ffn", "window", "is_bf16", "activation")
        ),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        ("caches", ctypes.c_void_p),
        *((name, ctypes.c_long) for name in ("cache_rows", "room", "rows", "threads", "scratch")),
        *((name, ctypes.c_void_p) for name in ("tokens", "places", "cos", "sin", "memory", "logits")),
    )


class CompiledStep:
    """A step in which every sequence gets one token, with copies of a model's weights."""

    def __init__(self, model: Decoder, library: ctypes.CDLL) -> None:
        spec = model.spec
        self._decode = library.decode
        self._decode.restype = None
        self._spec, self._dtype = spec, model.like.dtype
        self._kept: list[Any] = []
        """Objects that the structures point to, kept alive."""
        layers = (_Layer * spec.num_layers)()
        for place, block in zip(layers, model.layers.values(), strict=True):
            assert isinstance(block, Block)
            self._fill(place, block)
        self._kept.append(layers)
        shape = _Model(
            count=spec.num_layers,
            hidden=spec.hidden,
            heads=spec.num_heads,
            groups=spec.num_kv_heads,
            width=spec.head_dim,
            ffn=spec.ffn,
            window=spec.layer(0).mixer.window or 0,
            is_bf16=self._dtype == torch.bfloat16,
            activation=ACTIVATIONS[spec.activation],
        )
        shape.embeddings = self._keep(model.tok_embeddings.merged()["weight"])
        shape.positions = None
        if model.pos_embeddings is not None:
            shape.positions = self._keep(model.pos_embeddings.merged()["weight"])
        shape.blocks = ctypes.addressof(layers)
        shape.last = self._norm(model.norm)
        shape.head = self._matrix(model.head_weight, None)
        self._model = shape
        self._turns = torch.empty(2, 0, 0)
        self._memory = torch.empty(0)

    def __call__(self, batch: TensorBatch, cache: Cache) -> torch.Tensor:
        """The logits [B, V] after the tokens of a step that `cache` has begun."""
        count, spec = cache.step.singles, self._spec
        for layer in cache.layers.values():
            assert isinstance(layer, LayerCache)  # `_why_not` refuses others
            layer.make_room(spec.num_kv_heads, spec.head_dim, self._dtype)
        room, threads = cache.capacity, torch.get_num_threads()
        scratch = spec.num_heads // spec.num_kv_heads * (room + LANES)
        heads = (2 * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        size = count * (2 * spec.hidden + heads + 2 * spec.ffn) + threads * scratch
        if len(self._memory) < size:
            self._memory = torch.empty(size)
        mixer = spec.layer(0).mixer
        if mixer.rope is not None and self._turns.shape[1] < room:
            rope = rope_tables(mixer.rope, mixer.rotated, torch.arange(room))
            self._turns = torch.stack((rope.cos, rope.sin)).squeeze(-2)
        caches = [layer.both_2MGCK.data_ptr() for layer in cache.layers.values() if isinstance(layer, LayerCache)]
        pointers = (ctypes.c_void_p * len(caches))(*caches)
        logits_BV = torch.empty(count, spec.vocab)
        step = _Step(
            caches=ctypes.addressof(pointers),
            cache_rows=cache.rows,
            room=room,
            rows=count,
            threads=threads,
            scratch=scratch,
            tokens=batch.tokens.data_ptr(),
            places=cache.step.places.data_ptr(),
            cos=self._turns[0].data_ptr(),
            sin=self._turns[1].data_ptr(),
            memory=self._memory.data_ptr(),
            logits=logits_BV.data_ptr(),
        )
        self._decode(ctypes.byref(self._model), ctypes.byref(step))
        return logits_BV.to(self._dtype)

    def __repr__(self) -> str:
        return "compiled"

    def _fill(self, place: _Layer, block: Block) -> None:
        attention, feed_forward = block.attention, block.feed_forward
        assert type(attention) is Attention
        assert isinstance(feed_forward, FeedForward)
        place.before, place.between = self._norm(block.attention_norm), self._norm(block.feed_forward_norm)
        if attention.q_norm is not None and attention.k_norm is not None:
            place.q_norm, place.k_norm = self._norm(attention.q_norm), self._norm(attention.k_norm)
        place.qkv = self._product(attention.wq, attention.wk, attention.wv)
        place.out = self._product(attention.wo)
        place.gate, place.down = self._product(feed_forward.w1), self._product(feed_forward.w2)
        up = feed_forward.w3
        if up is not None:
            place.up = self._product(up)

    def _keep(self, tensor: torch.Tensor) -> int:
        kept = tensor.detach().contiguous()
        self._kept.append(kept)
        return kept.data_ptr()

    def _norm(self, norm: nn.Module) -> _Norm:
        assert isinstance(norm, RMSNorm | LayerNorm)
        bias = self._keep(norm.bias.float()) if isinstance(norm, LayerNorm) else None
        eps = torch.finfo(norm.weight.dtype).eps if norm.eps is None else norm.eps
        return _Norm(self._keep(norm.weight.float()), bias, eps)

    def _product(self, *layers: Linear) -> _Matrix:
        """The products of one input with several layers, merged into one; adapters merged, quantized weights
        decoded."""
        merged = [layer.merged() for layer in layers]
        weight_OD = torch.cat([each["weight"].detach().to(self._dtype) for each in merged])
        bias_O = torch.cat([each["bias"].detach().float() for each in merged]) if "bias" in merged[0] else None
        return self._matrix(weight_OD, bias_O)

    def _matrix(self, weight_OD: torch.Tensor, bias_O: torch.Tensor | None) -> _Matrix:
        out, into = weight_OD.shape
        panels = -(-out // PANEL)
        kept = weight_OD.new_zeros(panels * PANEL * into + AHEAD)
        view_PDO = kept[: panels * PANEL * into].view(panels, into, PANEL)
        whole = out // PANEL
        view_PDO[:whole] = weight_OD[: whole * PANEL].detach().unflatten(0, (whole, PANEL)).transpose(1, 2)
        if whole < panels:
            view_PDO[whole, :, : out - whole * PANEL] = weight_OD[whole * PANEL :].detach().T
        return _Matrix(self._keep(kept), None if bias_O is None else self._keep(bias_O), out, into)


class _CompilerError(Exception):
    """The code cannot be compiled or loaded on this machine; its text gives the reason."""


def compile_step(model: Decoder, tell: Callable[[str], None]) -> None:
    """Fill the slot `next_step` of a model that from now on is used only for generation: later changes of its weights
    have no effect on it. `tell` is called if the compiler runs.

    Raises `UserError` if the code does not support the model, or cannot be compiled.
    """
    try:
        if (reason := _why_not(model)) is not None:
            raise _CompilerError(reason)
        model.next_step = CompiledStep(model, _library(tell))
    except _CompilerError as error:
        raise UserError(f"--compile: {error}; leave it out") from None


def compile_where_possible(model: Decoder, tell: Callable[[str], None]) -> None:
    """`compile_step` if the code supports the model, its weights are plain and their copies take at most
    `COPIED_BYTES`, and the machine has a compiler. `tell` is also called if the compiler fails."""
    layers = [layer for layer in model.modules() if isinstance(layer, Linear)]
    if weight_bytes(model) > COPIED_BYTES or not all_plain(*layers) or _why_not(model) or _compiler() is None:
        return
    try:
        model.next_step = CompiledStep(model, _library(tell))
    except _CompilerError as error:
        tell(f"slower generation, without compiled steps: {error}")


def _why_not(model: Decoder) -> str | None:
    """The feature of the model that the compiled code does not support, or None."""
    spec, like = model.spec, model.like
    if spec.foreign is not None:
        return "transformers computes this model"
    if like.device.type != "cpu":
        return "it supports only CPUs (--device cpu)"
    if like.dtype not in DTYPES:
        return f"it supports only fp32 and bf16 (--dtype), not {str(like.dtype).removeprefix('torch.')}"
    if (feature := _unsupported(spec)) is not None:
        return f"it does not support {feature}"
    for block in model.layers.values():
        if type(block) is not Block or block.wrappers or type(block.attention) is not Attention:
            return f"it does not support these blocks of {spec.family} (weights on disk, latent attention, plug-ins)"
        if type(block.feed_forward) is not FeedForward:
            return "it does not support mixtures of experts"
        views = {type(module.view) for module in block.modules() if isinstance(module, Viewed)}
        if type(block.attention.core) is not Core or views != {View}:
            return "it does not support layout.tp"
    return None


def _unsupported(spec: ModelSpec) -> str | None:
    """The option of a layer, or of the whole model, that the code does not have."""
    if spec.norm == "offset_rmsnorm":
        return "norms that add one to their weights"
    for kind in dict.fromkeys(spec.layers):
        mixer, dense = kind.mixer, kind.feed_forward
        if isinstance(mixer, AttentionSpec):
            if mixer.qk_norm == "all" or mixer.scale != 1 or mixer.sinks:
                return "norms over all heads, scaled scores, or sinks"
            if mixer.gated:
                return "gated attention"
            if mixer.rope is not None and mixer.rotated != mixer.head_dim:
                return "rotation of a part of each head"
        if kind.norms != "before":
            return "norms of a layer's outputs"
        if isinstance(dense, DenseSpec) and dense.activation not in ACTIVATIONS:
            return f"the activation {dense.activation}"
    if len({(kind.mixer.window, kind.mixer.rope) for kind in spec.layers}) > 1:
        return "layers with different windows or rotations"
    return "embeddings that are scaled" if spec.embedding_scaled else None


def _compiler() -> str | None:
    """The machine's C++ compiler; none outside Linux."""
    return next(filter(None, map(shutil.which, COMPILERS)), None) if sys.platform == "linux" else None


def _library(tell: Callable[[str], None]) -> ctypes.CDLL:
    """The compiled code. Raises `_CompilerError`."""
    compiler = _compiler()
    if compiler is None:
        raise _CompilerError(f"it needs Linux and a C++ compiler ({', '.join(COMPILERS)}); install g++")
    try:
        openmp = _openmp()
        built = CACHE / f"{_fingerprint(compiler, openmp)}.so"
        if not built.is_file():
            tell(f"{compiler} compiles {SOURCE.name} once for this machine; the result is kept in {CACHE}")
            built.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=built.parent) as folder:
                _build(compiler, openmp, Path(folder) / "decode")
                (Path(folder) / "decode.so").replace(built)
        return ctypes.CDLL(str(built))
    except OSError as error:  # a home directory that is read-only, full or mounted noexec
        raise _CompilerError(f"{SOURCE.name} cannot be compiled in {CACHE}: {error}") from error


def _openmp() -> str | None:
    """The file of the OpenMP library that torch has loaded, with its symbols made visible, so that the compiled code
    shares its threads. A second library would start its own threads."""
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    libraries = sorted(name for name in mapped if OPENMP.match(Path(name).name))
    if not libraries:
        return None
    ctypes.CDLL(libraries[0], mode=ctypes.RTLD_GLOBAL)
    return libraries[0]


def _fingerprint(compiler: str, openmp: str | None) -> str:
    """A hash of everything that the compiled code depends on; `-march=native` is this processor."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    parts = [SOURCE.read_bytes(), version, repr((compiler, FLAGS, openmp is None, processor())).encode()]
    return hashlib.sha256(b"/".join(parts)).hexdigest()[:16]


def _build(compiler: str, openmp: str | None, where: Path) -> None:
    """Compile to `where`.so. Raises `_CompilerError` with the compiler's first error."""
    compiled = [compiler, *FLAGS, "-c", str(SOURCE), "-o", f"{where}.o"]
    linked = [compiler, "-shared", f"{where}.o", "-o", f"{where}.so", *([] if openmp else ["-fopenmp"])]
    for command in (compiled, linked):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["?"]
            raise _CompilerError(f"{compiler} cannot compile {SOURCE.name}: {errors[0]}")
