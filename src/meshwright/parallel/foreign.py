"""Tensor parallelism of models that transformers computes, as `derive/` has derived it.

Between blocks, and in modules that are not split, every rank computes the same. Where a split module begins, gradients
are summed over ranks, and where it ends, outputs:

    x -> enter -> q k v by columns -> attention -> o by rows -> sum over ranks

Parameters are DTensors on the axis `tp`. A split parameter's gradient is complete on its rank. A whole parameter's
gradient is partial, and summed over ranks, inside split modules; elsewhere it is whole on every rank.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from meshwright.comm import collectives
from meshwright.families.split import split_dim
from meshwright.models.adapters import Lora
from meshwright.models.faces import Face, put_faces, with_face
from meshwright.models.foreign import ForeignDecoder
from meshwright.models.foreign_stages import StageView, replace_module
from meshwright.models.linear import Linear
from meshwright.models.slots import View, Viewed
from meshwright.parallel.view import LocalView
from meshwright.spec.foreign import SplitModule
from meshwright.spec.model import Parameter


def apply_foreign_tensor_parallel(model: ForeignDecoder, mesh: DeviceMesh) -> None:
    """Turn `model` (on the meta device) in place into the part of one rank of `mesh`, the axis `tp`.

    It takes whole tokens and labels; hidden states between blocks, logits and loss are the same on every rank.
    """
    foreign = model.spec.foreign
    assert foreign is not None
    assert foreign.split is not None
    sharing = RankSharing(mesh)
    rows = {row.name: row for row in model.table}
    _distribute(model, rows, mesh)
    for split in foreign.split.modules:
        for layer in split.layers:
            if str(layer) not in model.layers:  # a pipeline rank has only some of them
                continue
            path = ".".join(filter(None, (foreign.blocks, str(layer), split.name)))
            module = model.get_submodule(path)
            views = dict(_views_within(module, split, path, rows, model, sharing))
            replace_module(model, path, put_faces(module, split, sharing, views))
    module: Any
    for path, module in list(model.named_modules()):
        if module._parameters and not isinstance(module, Viewed):
            module = with_face(Face, module, module._parameters)
            replace_module(model, path, module)
        whole = LocalView({}, {}, f"tp {mesh.size()}", repeated=tuple(module._parameters))
        if module._parameters and isinstance(module.view, StageView):
            module.view.inner = whole
        elif module._parameters and type(module.view) is View:  # every rank computes it whole
            module.view = whole


def _distribute(model: ForeignDecoder, rows: dict[str, Parameter], mesh: DeviceMesh) -> None:
    """Make every parameter a DTensor on `mesh`; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                dim = split_dim(rows[f"{path}.{name}"], model.spec, mesh.size())
                placement = Replicate() if dim is None else Shard(dim)
                split = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
                made[id(parameter)] = nn.Parameter(split, requires_grad=parameter.requires_grad)
                made[id(made[id(parameter)])] = made[id(parameter)]
            module._parameters[name] = made[id(parameter)]


def _views_within(
    module: nn.Module,
    split: SplitModule,
    path: str,
    rows: dict[str, Parameter],
    model: ForeignDecoder,
    sharing: "RankSharing",
) -> Iterator[tuple[str, View]]:
    """The view of each module with parameters within a split module, by its path there."""
    kept = {one.name: one.kept[sharing.rank] for one in split.parameters if one.kept}
    absent = split.once if sharing.rank else ()
    shared = {one.name for one in split.parameters} | set(split.partial)
    for inner_path, inner in module.named_modules():
        prefix = f"{inner_path}." if inner_path else ""
        full = f"{path}.{prefix}"
        names = [name for name, parameter in inner._parameters.items() if parameter is not None]
        if not names or (isinstance(inner, Viewed) and type(inner.view) is not View):
            continue  # the second: of a split module inside this one
        dims = {name: split_dim(rows[full + name], model.spec, sharing.size) for name in names}
        adapted = any(f"{prefix}{name}" in shared for name in names)
        repeated = [
            name
            for name in names
            if dims[name] is None and f"{prefix}{name}" not in shared and not (adapted and rows[full + name].adapter)
        ]
        if isinstance(inner, Linear) and inner_path == split.summed and (adapter := inner.find(Lora)) is not None:
            adapter.sum_over_inputs = sharing.sum
            if adapter.dropout is not None:
                adapter.dropout.part = sharing.rank
        yield (
            inner_path,
            LocalView(
                {name: dim for name, dim in dims.items() if dim is not None},
                {name: kept[f"{prefix}{name}"] for name in names if f"{prefix}{name}" in kept},
                f"tp {sharing.size}",
                repeated,
                [name for name in names if f"{prefix}{name}" in absent],
            ),
        )


class RankSharing:
    """What the ranks of one tensor-parallel group do together."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group = mesh.get_group()
        self.size, self.rank = mesh.size(), mesh.get_local_rank()

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """`x`; backward, the sum over ranks of its gradient."""
        return collectives.entered(x, self.group)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks; backward, the whole gradient."""
        return collectives.all_reduce(x.contiguous(), self.group)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' parts along the last dim; backward, the sum over ranks of this part's gradient."""
        return collectives.all_gather(x, self.group, dim=x.dim() - 1)

    def __repr__(self) -> str:
        return f"tp {self.size}"
