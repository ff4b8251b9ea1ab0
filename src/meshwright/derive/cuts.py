"""Where pipeline stages cut a model of transformers: between its blocks. What they send is derived, and then proved.

The hidden states are sent: the argument of blocks that depends on parameters. Each stage computes the other arguments
from tokens and positions. A module outside the blocks belongs to the first stage if it is called before them, and to
the last if after.

The proof: stages of a single block each, and of two halves, have the whole model's logits and gradients.
"""

import copy
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from meshwright.derive.calls import RecordedCall, UnsplitError, close, direction_like, first_float, gradients
from meshwright.derive.derive import Blocks
from meshwright.derive.slice_test import GRADIENTS, VALUES
from meshwright.models.foreign_stages import keep_stages, run_stage
from meshwright.spec.foreign import ForeignCuts


def derive_cuts(blocks: Blocks) -> ForeignCuts:
    """The cuts of a model; with a `problem` if it cannot be cut."""
    try:
        cuts = _observed(blocks)
        check_cuts(blocks, cuts)
    except UnsplitError as error:
        return ForeignCuts(problem=str(error))
    return cuts


def _observed(blocks: Blocks) -> ForeignCuts:
    """The cuts that one forward pass shows."""
    model, layers = blocks.model, list(blocks.model.get_submodule(blocks.path).children())
    trace = _Trace()
    within = {id(module) for layer in layers for module in layer.modules()}
    outside = {
        name: module for name, module in model.named_modules() if id(module) not in within and module._parameters
    }
    around = [name for name in outside if f"{blocks.path}.".startswith(f"{name}." if name else "")]
    if around:
        bare = next(iter(outside[around[0]]._parameters))
        raise UnsplitError(
            f"the parameter {bare} belongs to the model itself, not to a part before or after the blocks"
        )
    with trace.of(dict(enumerate(layers)), outside):
        try:
            model(input_ids=blocks.tokens)
        except Exception as error:  # transformers' own, for a config.json that it cannot compute
            raise UnsplitError(
                " ".join(f"transformers fails: {type(error).__name__}: {error}".split())[:200]
            ) from error
    if [number for number, _, _ in trace.calls] != list(range(len(layers))):
        raise UnsplitError("its forward pass does not call the blocks one after another, each once")
    shared = [name for name, times in trace.used.items() if times - {"before"} and times - {"after"}]
    if shared:
        raise UnsplitError(f"{shared[0]} is used between the blocks")
    before = tuple(name for name in outside if trace.used.get(name, {"before"}) == {"before"})
    after = tuple(name for name in outside if name not in before)
    early, late = (
        {parameter for name in names for parameter in outside[name].parameters()} for names in (before, after)
    )
    copied = tuple(name for name, parameter in model.named_parameters() if parameter in early & late)
    output = trace.outputs[0]
    return ForeignCuts(
        hidden=_hidden(trace),
        outputs=len(output) if isinstance(output, tuple | list) else 0,
        before=before,
        after=after,
        copied=copied,
    )


class _Trace:
    """The blocks' calls in a forward pass, and when the modules outside them are called."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, tuple[Any, ...], dict[str, Any]]] = []
        self.outputs: list[Any] = []
        self.used: dict[str, set[str]] = {}

    def of(self, layers: dict[int, nn.Module], outside: dict[str, nn.Module]) -> "_Hooks":
        """Hooks that note the calls."""

        def enters(number: int) -> Callable[..., None]:
            return lambda _, args, kwargs: self.calls.append((number, args, dict(kwargs)))

        def leaves(_: nn.Module, args: Any, output: Any) -> None:
            self.outputs.append(output)

        def called(name: str) -> Callable[..., None]:
            def note(_: nn.Module, args: Any) -> None:
                when = "before" if not self.calls else "after" if len(self.outputs) == len(layers) else "between"
                self.used.setdefault(name, set()).add(when)

            return note

        handles = [
            layer.register_forward_pre_hook(enters(number), with_kwargs=True) for number, layer in layers.items()
        ]
        handles += [layer.register_forward_hook(leaves) for layer in layers.values()]
        handles += [module.register_forward_pre_hook(called(name)) for name, module in outside.items()]
        return _Hooks(handles)


class _Hooks:
    """Removes hooks at the end of a `with`."""

    def __init__(self, handles: list[Any]) -> None:
        self.handles = handles

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()


def _hidden(trace: _Trace) -> int | str:
    """The argument of blocks that depends on parameters. Raises `UnsplitError` if there are several, or none."""
    calls = [(RecordedCall.of(args, kwargs), args, kwargs) for _, args, kwargs in trace.calls]
    keys = sorted(set().union(*(call.differentiable for call, _, _ in calls)), key=str)
    if any(call.buried for call, _, _ in calls):
        raise UnsplitError("blocks get tensors that depend on parameters in a tuple or dict")
    if len(keys) != 1:
        raise UnsplitError(f"blocks get several arguments that depend on parameters: {', '.join(map(str, keys))}")
    (key,) = keys
    holders: list[Any] = [kwargs if isinstance(key, str) else args for _, args, kwargs in calls]
    if any(holder[key] is not first_float(output) for holder, output in zip(holders[1:], trace.outputs, strict=False)):
        raise UnsplitError("a block's output is not the next block's input")
    if len({(holder[key].shape, holder[key].dtype) for holder in holders}) > 1:
        raise UnsplitError("the hidden states have another shape or dtype between other blocks")
    return key


def check_cuts(blocks: Blocks, cuts: ForeignCuts) -> None:
    """Raise `UnsplitError` unless stages compute the whole model's logits and gradients."""
    count = len(list(blocks.model.get_submodule(blocks.path).children()))
    logits = first_float(blocks.model(input_ids=blocks.tokens))
    direction = direction_like(logits)
    expected = gradients(logits, direction, dict(blocks.model.named_parameters()))
    largest = max(float(gradient.norm()) for gradient in expected.values())
    for ends in ([*range(1, count + 1)], [count // 2, count]):
        stages = [range(start, stop) for start, stop in zip([0, *ends], ends, strict=False)]
        try:
            ours, computed = _in_stages(blocks, cuts, stages, direction)
        except UnsplitError:
            raise
        except Exception as error:  # transformers' code, without what another stage has
            raise UnsplitError(" ".join(f"a stage fails: {type(error).__name__}: {error}".split())[:200]) from error
        if not close(ours.detach(), logits.detach(), VALUES):
            raise UnsplitError("stages that send hidden states do not compute the model's logits")
        for name, gradient in expected.items():
            if name not in computed or not close(computed[name], gradient, GRADIENTS, largest):
                raise UnsplitError(f"in stages the gradient of {name} is not the model's")


def _in_stages(
    blocks: Blocks, cuts: ForeignCuts, stages: list[range], direction: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The logits of stages, each with its own copy of the model, and the gradients, summed over copies."""
    x, chain = None, []
    for stage in stages:
        model = copy.deepcopy(blocks.model)
        kept = keep_stages(model, blocks.path, cuts, stage)
        entering = None if x is None else x.detach().requires_grad_()
        ended, y = run_stage(lambda model=model: model(input_ids=blocks.tokens), kept, stage, entering)
        if ended == (stage is stages[-1]):
            raise UnsplitError("its forward pass does not call the blocks one after another")
        x = y if ended else first_float(y)
        chain.append((model, entering, x))
    assert x is not None
    computed: dict[str, torch.Tensor] = {}
    gradient = direction
    for model, entering, y in reversed(chain):
        torch.autograd.backward(y, gradient)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                computed[name] = computed[name] + parameter.grad if name in computed else parameter.grad
        if entering is not None:
            assert entering.grad is not None
            gradient = entering.grad
    return x, computed


def with_name(cuts: ForeignCuts, theirs: str, files: str) -> ForeignCuts:
    """The cuts with another name of a module."""

    def change(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(re.sub(rf"^{re.escape(theirs)}(?=\.|$)", files, name) for name in names)

    fields = {name: change(getattr(cuts, name)) for name in ("before", "after", "copied")}
    return cuts.model_copy(update=fields)
