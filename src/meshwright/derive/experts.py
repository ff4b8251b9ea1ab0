"""How ranks share the experts of a model of transformers: each holds some of them, and rows are dispatched.

The proof: a module whose experts are in parts, each computing the rows of its own, gives the output and the gradients
of the whole module, of parameters and arguments.
"""

import torch
from torch import nn

from meshwright.derive.calls import Key, RecordedCall, UnsplitError, close, gradients, record
from meshwright.derive.derive import Blocks
from meshwright.derive.slice_test import GRADIENTS, VALUES, PartView, expected_of
from meshwright.models.expert_faces import ExpertsFace
from meshwright.models.faces import with_face
from meshwright.models.moe import ComputeRows, Dispatch, Rows
from meshwright.spec.foreign import ExpertModule, ForeignExperts


def derive_experts(blocks: Blocks) -> ForeignExperts:
    """The experts of a model; with a `problem` if ranks cannot share them."""
    stacks = {
        (layer, name): module
        for layer in blocks.kinds
        for name, module in blocks.block(layer).named_modules()
        if any(_is_stack(parameter) for parameter in module._parameters.values())
    }
    calls = record(lambda: blocks.model(input_ids=blocks.tokens), stacks)
    modules: list[ExpertModule] = []
    problems: list[str] = []
    for (layer, name), module in stacks.items():
        try:
            described = _described(module, calls.get((layer, name)), name, blocks.kinds[layer])
            check_experts(module, calls[layer, name], described)
        except UnsplitError as error:
            problems.append(f"{blocks.path}.{layer}.{name} ({type(module).__name__}): {error}")
            continue
        modules.append(described)
    problem = next((one for one in problems if "expert" in one.lower()), "")
    if problem or not modules:
        return ForeignExperts(problem=problem or "it has no experts in stacked matrices")
    return ForeignExperts(modules=tuple(modules))


def _is_stack(parameter: nn.Parameter | None) -> bool:
    return parameter is not None and parameter.dim() == 3


def _described(module: nn.Module, call: RecordedCall | None, name: str, layers: tuple[int, ...]) -> ExpertModule:
    """Raises `UnsplitError` if the module is not one of experts, or has more than a stack of matrices."""
    if call is None:
        raise UnsplitError("is not called")
    parameters = {key: one for key, one in module._parameters.items() if one is not None}
    counts = {one.shape[0] for one in parameters.values()}
    if len(counts) > 1 or not all(map(_is_stack, parameters.values())):
        raise UnsplitError("has other parameters than stacks of matrices")
    if len(list(module.parameters())) > len(parameters):
        raise UnsplitError("has modules with parameters inside")
    (count,) = counts
    attributes = tuple(key for key, value in vars(module).items() if value == count and "expert" in key)
    return ExpertModule(
        name=name,
        layers=layers,
        arguments=_arguments(call),
        parameters=tuple(parameters),
        count=count,
        attributes=attributes,
    )


def _arguments(call: RecordedCall) -> tuple[Key, Key, Key]:
    """Where the module gets tokens [N, D], their experts [N, K], and the weights of these [N, K]."""
    items: list[tuple[Key, torch.Tensor]] = [
        (key, value)
        for key, value in (*enumerate(call.args), *call.kwargs.items())
        if isinstance(value, torch.Tensor) and value.dim() == 2
    ]
    chosen = [(key, value) for key, value in items if not value.is_floating_point()]
    if len(chosen) == 1:
        (experts, indices), floats = chosen[0], [one for one in items if one[1].is_floating_point()]
        weights = [key for key, value in floats if value.shape == indices.shape]
        tokens = [key for key, value in floats if value.shape != indices.shape and len(value) == len(indices)]
        if len(weights) == len(tokens) == 1:
            return tokens[0], experts, weights[0]
    raise UnsplitError("does not get tokens, their experts and the weights of these")


class _Parts(Dispatch):
    """Has each part compute its own rows, in turn."""

    def __init__(self, parts: list[ExpertsFace]) -> None:
        self.parts = parts

    def __call__(
        self, experts: ComputeRows, x_MD: torch.Tensor, counts_E: torch.Tensor, numbers_M: torch.Tensor | None = None
    ) -> torch.Tensor:
        counts = counts_E.chunk(len(self.parts))
        pieces = x_MD.split([int(one.sum()) for one in counts])
        computed = zip(self.parts, pieces, counts, strict=True)
        return torch.cat([part.compute_rows(piece, Rows(one[:, None])) for part, piece, one in computed])


def _part(module: nn.Module, described: ExpertModule, experts: range) -> ExpertsFace:
    """The module with these experts; its parameters are still whole."""
    numbers = dict.fromkeys(described.attributes, len(experts))
    face = with_face(ExpertsFace, module, described.parameters, numbers)
    face.described = described
    face.view = PartView(dict.fromkeys(described.parameters, (experts.start, experts.stop)), frozenset(), True)
    return face


def check_experts(module: nn.Module, call: RecordedCall, described: ExpertModule) -> None:
    """Raise `UnsplitError` unless parts of the experts compute what the module does."""
    count = described.count
    parts = next((number for number in range(2, count + 1) if count % number == 0), 0)
    if not parts:
        raise UnsplitError("has a single expert")
    if call.buried:
        raise UnsplitError("an argument holds hidden states inside a list")
    whole, share = expected_of(module, call), count // parts
    face = _part(module, described, range(count))
    face.dispatch = _Parts([_part(module, described, range(start, start + share)) for start in range(0, count, share)])
    try:
        output, leaves = call.on(face)
    except Exception as error:  # transformers' code, with some of the experts
        raise UnsplitError(" ".join(f"a part of it fails: {type(error).__name__}: {error}".split())[:200]) from error
    if not close(output.detach(), whole.output, VALUES):
        raise UnsplitError("parts of the experts do not compute its output")
    inputs = dict(module.named_parameters()) | {("argument", key): leaf for key, leaf in leaves.items()}
    computed = gradients(output, whole.direction, inputs)
    largest = max(float(gradient.norm()) for gradient in whole.gradients.values())
    for name, gradient in whole.gradients.items():
        if name not in computed or not close(computed[name], gradient, GRADIENTS, largest):
            raise UnsplitError(f"in parts of the experts the gradient of {name} is not the module's")
