"""Models of other architectures, computed by transformers.

Shapes: B batch, T sequence, V vocabulary.
"""

import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from meshwright.families import parameter_table, state_table
from meshwright.families.wrapped import parsed
from meshwright.models.adapters import Lora
from meshwright.models.batch import TensorBatch
from meshwright.models.decoder import Decoder, Read
from meshwright.models.faces import with_face
from meshwright.models.foreign_context import ContextShare, context_arguments, row_of, share_context
from meshwright.models.foreign_stages import StageBlocks, keep_stages, run_stage
from meshwright.models.head import HeadSplit, LogitsHead
from meshwright.models.init import named_tensors
from meshwright.models.masks import document_positions
from meshwright.models.slots import Layer, Wrapped
from meshwright.models.widen import Float64InPlaceOfFloat32
from meshwright.spec.batch import Batch
from meshwright.spec.errors import UserError
from meshwright.spec.foreign import ForeignModel
from meshwright.spec.model import ModelSpec

_MIXES_DOCUMENTS = (
    "data.separate_documents: transformers' module for this model does not isolate the documents of a row, as "
    "data.separate_documents and training.preference require; use data.separate_documents=false, or "
    "data.packing=padded"
)


PROBE = 8
"""Tokens of a document in the checks of a model."""


class ForeignBlock(Wrapped):
    """A transformers block whose forward pass may be wrapped; its own class comes next in the method resolution
    order."""

    widens = False
    """See `ForeignDecoder.widen`: a recomputed block runs outside the model's forward pass."""

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass of transformers."""
        theirs: Any = super(Wrapped, self)
        with Float64InPlaceOfFloat32() if self.widens else nullcontext():
            return theirs.forward(*args, **kwargs)


class ForeignDecoder(Decoder):
    """A transformers causal language model with `Decoder`'s interface: parameters as in its table, one list of blocks,
    summed losses.

    The transformers class comes next in the method resolution order (`build_foreign`), so parameters keep their names
    there. The forward pass is transformers' own: all logits are held.
    """

    takes_positions: bool
    widens = False
    context: ContextShare | None = None
    """With context-parallel ranks, this rank's part of every row."""
    _sent_shapes: dict[tuple[int, ...], tuple[int, ...]]
    """The size of a batch -> of what stages send."""

    def forward(  # type: ignore[override]
        self,
        batch: TensorBatch,
        read: Read | None = None,
        *,
        layers: range | None = None,
        x_BTD: torch.Tensor | None = None,
    ) -> Any:
        """Like `Decoder.forward`, but without a cache; returns logits instead of the last hidden states. Stages cut
        the model as `derive/` has derived.

        transformers detects documents by their positions: where a position is not the previous one plus one, it masks
        all earlier tokens.
        """
        self.tell_draws(batch)
        stages = self.stages
        with Float64InPlaceOfFloat32() if self.widens else nullcontext():
            if layers is None or stages is None:
                logits_BTV = self._transformed(batch)
            else:
                ended, logits_BTV = run_stage(lambda: self._transformed(batch), stages, layers, x_BTD)
                if ended:
                    return logits_BTV
        return logits_BTV if read is None else read(logits_BTV, LogitsHead(self.head_split), batch)

    def _transformed(self, batch: TensorBatch) -> torch.Tensor:
        """transformers' forward pass: the logits [B, T, V]."""
        arguments = {"input_ids": batch.tokens}
        theirs: Any = super(Wrapped, self)
        if self.context is not None and self.context.splits:
            with row_of(batch, self.context):
                return theirs.forward(**arguments, **context_arguments(batch, self.context)).logits
        if batch.document_ids is not None:
            if not self.takes_positions:
                raise UserError(_MIXES_DOCUMENTS)
            positions_BT = batch.position_ids
            arguments["position_ids"] = document_positions(batch.document_ids) if positions_BT is None else positions_BT
        return theirs.forward(**arguments).logits

    @property
    def layers(self) -> nn.ModuleDict:  # type: ignore[override]
        """This rank's blocks by their numbers."""
        assert self.spec.foreign is not None
        return nn.ModuleDict(dict(self.get_submodule(self.spec.foreign.blocks).named_children()))

    @property
    def stages(self) -> StageBlocks | None:
        """The list of blocks, if this is a pipeline rank's part."""
        assert self.spec.foreign is not None
        blocks = self.get_submodule(self.spec.foreign.blocks)
        return blocks if isinstance(blocks, StageBlocks) else None

    def widen(self) -> None:
        """In float64, compute in float64 what transformers computes in float32 in a model of any dtype: norms,
        softmaxes, routers. For proofs, in which their rounding would hide a difference."""
        self.widens = self.like.dtype == torch.float64
        for block in self.layers.values():
            assert isinstance(block, ForeignBlock)
            block.widens = self.widens

    def share_context(self, share: ContextShare) -> None:
        """Make batches hold parts of rows."""
        problem = share_context(self, share)
        assert not problem, problem  # then `derive/` says so
        self.context = share

    @contextmanager
    def whole_rows(self) -> Iterator[None]:
        """Inside, batches hold whole rows on every rank."""
        if self.context is None:
            yield
            return
        self.context.splits = False
        try:
            yield
        finally:
            self.context.splits = True

    def keep_layers(self, parts: Iterable[range]) -> None:
        foreign = self.spec.foreign
        assert foreign is not None
        assert foreign.cuts is not None
        keep_stages(self, foreign.blocks, foreign.cuts, {i for part in parts for i in part})

    def sent_shape(self, batch: TensorBatch, like: torch.Tensor, sequence_split: int) -> tuple[int, ...]:
        """See `Decoder.sent_shape`: the shape of what the first block would get, by the model's own forward pass."""
        stages = self.stages
        assert stages is not None
        if (size := tuple(batch.tokens.shape)) not in self._sent_shapes:
            with torch.no_grad():
                _, sent = run_stage(lambda: self._transformed(batch), stages, range(0), like)
            self._sent_shapes[size] = tuple(sent.shape)
        return self._sent_shapes[size]

    @torch.no_grad()
    def skipped_adapters(self, logits: Callable[[Batch], torch.Tensor | None]) -> str:
        """The error if transformers reads the weight of a layer with an adapter without calling the layer, as Mamba's
        `dt_proj`: the adapter would have no effect. Collective, also for a rank without adapters; `logits` as for
        `acausal`. Experts are left out: tokens choose which are called."""
        waiting = {
            name: module
            for name, module in self.named_modules()
            if isinstance(module, Layer) and module.find(Lora) is not None and ".experts." not in name
        }
        names: dict[nn.Module, str] = {module: name for name, module in waiting.items()}

        def called(module: nn.Module, _: object) -> None:
            waiting.pop(names[module], None)

        hooks = [module.register_forward_pre_hook(called) for module in names]
        logits(Batch(self._probe(0)))
        for hook in hooks:
            hook.remove()
        if not waiting:
            return ""
        return (
            f"finetune.targets: transformers reads the weight of {next(iter(waiting))} without calling the layer, so "
            "its adapter would have no effect; leave it out of finetune.targets"
        )

    @torch.no_grad()
    def acausal(self, logits: Callable[[Batch], torch.Tensor | None]) -> str:
        """The error if a token's logits depend on later tokens. Collective, as is `logits`, which returns those of a
        batch, None on ranks without the head.

        The last token of a row is changed: the logits before it must not change.
        """
        row_BT = self._probe(0)
        changed_BT = row_BT.clone()
        changed_BT[:, -1] = (changed_BT[:, -1] + 1) % self.spec.vocab
        before, after = (logits(Batch(tokens_BT)) for tokens_BT in (row_BT, changed_BT))
        if before is None or after is None or self._same(before[:, :-1], after[:, :-1], same_shapes=True):
            return ""
        return (
            f"transformers' {self._class} is not causal with this config.json: its output for a token depends "
            "on later tokens, so training would only learn to copy; use another model, or make it causal "
            "(is_decoder, is_causal)"
        )

    @torch.no_grad()
    def mixes_documents(self, logits: Callable[[Batch], torch.Tensor | None]) -> str:
        """The error if a document of a packed row is not read as if alone; `logits` as for `acausal`.

        With two documents in a row, the second must have the same logits as alone and after any other document.
        """
        first_BT, second_BT, other_BT = self._probe(1), self._probe(2), self._probe(3)
        documents_BT = torch.arange(2, device=first_BT.device).repeat_interleave(PROBE)[None]

        def behind(before_BT: torch.Tensor) -> torch.Tensor | None:
            row = Batch(torch.cat((before_BT, second_BT), 1), document_ids=documents_BT)
            return logits(row)

        both_first, both_other, alone = behind(first_BT), behind(other_BT), logits(Batch(second_BT))
        if both_first is None or both_other is None or alone is None:
            return ""
        first, other = both_first[:, PROBE:], both_other[:, PROBE:]
        return "" if self._same(first, other, same_shapes=True) and self._same(first, alone) else _MIXES_DOCUMENTS

    @property
    def _class(self) -> str:
        return type(self).__name__.removeprefix("Foreign")

    def _probe(self, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self.spec.vocab, (1, PROBE), generator=generator).to(self.like.device)

    def _same(self, left: torch.Tensor, right: torch.Tensor, *, same_shapes: bool = False) -> bool:
        """Whether logits differ only by rounding. Computations of the `same_shapes` round the same way, except where
        experts get more or fewer rows."""
        room = 1e-4 if self.like.dtype.itemsize >= 4 else 2e-2
        left, right = left.double(), right.double()
        return bool((left - right).norm() <= (room / 10 if same_shapes else room) * left.norm())

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Implements `to` and `to_empty`; constants keep their values and dtypes, tied parameters stay tied."""
        constants = [(module, name, value) for module in self.modules() for name, value in module._buffers.items()]
        ties = _ties(self)
        super()._apply(fn, recurse)
        for module, name, value in constants:
            moved = module._buffers[name]
            if value is not None and moved is not None:
                module._buffers[name] = value.to(moved.device)
        for (module, name), (first, first_name) in ties:
            module._parameters[name] = first._parameters[first_name]
        if self.like.dtype == torch.float64:  # torch's grouped product has no fp64
            cast(Any, self).set_experts_implementation("eager")
        return self


class ForeignNeoX(ForeignDecoder):
    """GPT-NeoX, whose head is `embed_out` in files; transformers 5 uses another name and renames it when loading."""

    @property
    def lm_head(self) -> nn.Module:
        """The head, by transformers' name."""
        return self.get_submodule("embed_out")


def build_foreign(spec: ModelSpec) -> ForeignDecoder:
    """The model with its parameters on the meta device, in fp32, and its constants (rotary frequencies) in memory.

    Dropout is switched off, as everywhere here.

    Raises:
        UserError: transformers is not installed or does not know the architecture, or its module has other parameters
        than the files.
    """
    assert spec.foreign is not None
    model: Any = _build(spec.foreign)
    _take_state(model, spec.foreign)
    state = {name for name, _ in spec.foreign.buffers}
    on_meta = {parameter: nn.Parameter(parameter.to("meta")) for parameter in model.parameters()}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            module._parameters[name] = on_meta.get(parameter)
        constants = {name for name in module._buffers if f"{path}.{name}" not in state}
        module._non_persistent_buffers_set.difference_update(module._buffers.keys() - constants)
        module._non_persistent_buffers_set.update(constants)
    theirs = type(model)
    table = parameter_table(spec)
    renamed = "lm_head" in model._modules and any(row.name == "embed_out.weight" for row in table)
    model = with_face(ForeignNeoX if renamed else ForeignDecoder, model)
    if renamed:
        model._modules["embed_out"] = model._modules.pop("lm_head")
    model.spec, model.table, model.head_split = spec, table, HeadSplit()
    model._sent_shapes = {}
    model.takes_positions = "position_ids" in inspect.signature(theirs.forward).parameters
    _check_parameters(model)
    blocks = model.get_submodule(spec.foreign.blocks)
    for number, block in enumerate(blocks):
        blocks[number] = with_face(ForeignBlock, block)
    return model


def _build(foreign: ForeignModel) -> nn.Module:
    complete = parsed(without_dropout(json.loads(foreign.config)), where="config.json")
    from transformers import AutoModelForCausalLM  # heavy and optional, so imported only for models that need it

    with _MatricesOnMeta():
        return AutoModelForCausalLM.from_config(complete, dtype=torch.float32)


def without_dropout(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json without dropout and cache."""
    dropouts = [key for key in config if key.endswith(("dropout", "pdrop", "dropout_rate", "dropout_prob"))]
    return {**config, **dict.fromkeys(dropouts, 0.0), "use_cache": False}


class _MatricesOnMeta(TorchFunctionMode):
    """Puts uninitialized memory that layers allocate on the meta device; computed constants stay in memory."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _take_state(model: nn.Module, foreign: ForeignModel) -> None:
    """Make the files' tensors that are not parameters the model's state, in memory; give scalars the files' values."""
    modules = dict(model.named_modules())
    for name, shape in foreign.buffers:
        path, _, last = name.rpartition(".")
        module = modules.get(path)
        if module is None or not hasattr(module, last):
            continue  # reported with the parameters that do not fit
        kept = module._buffers.get(last)
        if kept is None and not getattr(module, last).requires_grad:  # in transformers it is a frozen parameter
            del module._parameters[last]
            module.register_buffer(last, torch.zeros(shape))
    for name, value in foreign.scalars:
        path, _, last = name.rpartition(".")
        kept = modules[path]._buffers.get(last) if path in modules else None
        if kept is None or kept.shape:
            raise UserError(f"{name} is a scalar in the files, but not a constant of transformers' module")
        kept.fill_(value)


def _check_parameters(model: ForeignDecoder) -> None:
    """Raise if the module's parameters differ from the files' parameters."""
    built = {name: tuple(tensor.shape) for name, tensor in named_tensors(model).items()}
    stored = {row.name: row.shape for row in (*model.table, *state_table(model.spec))}
    for name in sorted(built.keys() | stored.keys()):
        if built.get(name) != stored.get(name):
            theirs, files = (f"as {list(of[name])}" if name in of else "not at all" for of in (built, stored))
            raise UserError(
                f"{name} is in transformers' {model._class} {theirs} and in the files {files}; only models whose "
                "files store the parameters in this form can be trained (loading and saving them once with "
                "transformers may help)"
            )
    ends = {parameter for module in model.layers.values() for parameter in module.parameters()}
    for (module, name), _ in _ties(model):
        if module._parameters[name] in ends:
            raise UserError("two blocks of the model share parameters, which data parallelism does not support")


def _ties(model: nn.Module) -> list[tuple[tuple[nn.Module, str], tuple[nn.Module, str]]]:
    """(module, name) of every tied parameter, and of the parameter that it is tied to."""
    first: dict[nn.Parameter, tuple[nn.Module, str]] = {}
    places = [(module, name) for module in model.modules() for name in module._parameters]
    parameters = [(module._parameters[name], (module, name)) for module, name in places]
    return [
        (place, first[parameter])
        for parameter, place in parameters
        if parameter is not None and first.setdefault(parameter, place) != place
    ]
