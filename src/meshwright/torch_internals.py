"""Every private PyTorch API that this project uses; a test finds any use elsewhere.

Each entry gives its purpose, the tested releases and the public alternative. "2.11-2.15" means: tests of parallelism
ran on 2.11.0, 2.13.0 and 2.15.0, and the sources of 2.14.1 have it too. Code for a release that changes one belongs
here.
"""

import contextlib
import gc
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C import _distributed_c10d
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import ProcessGroup, Work, _resolve_process_group
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor, _utils
from torch.utils import _pytree, checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode_temporarily

aten = torch.ops.aten

# ---- operations ------------------------------------------------------------------------------------------------------

functional_collectives = torch.ops._c10d_functional
"""Collectives that torch.compile traces and selective recomputation sees. 2.11-2.15; public:
`torch.distributed.nn.functional`, which neither does."""

FLASH_CPU, FLASH_CPU_BACKWARD = (
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
)
"""Attention on a CPU that returns the logsumexp too. 2.11-2.15; public: `F.scaled_dot_product_attention`, which hides
it."""

FLASH_CUDA, FLASH_CUDA_BACKWARD = (
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_backward,
)
"""The same on a GPU."""

EXPENSIVE_OPS = (
    *((torch.ops.torch_attn._varlen_attn.default,) if hasattr(torch.ops.torch_attn, "_varlen_attn") else ()),
    aten._grouped_mm.default,
    *(getattr(aten, name).default for name in ("_scaled_mm", "_scaled_mm_v2") if hasattr(aten, name)),
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_attention_math.default,
)
"""The operations of attention, grouped products and products of codes that a recomputation policy sees. 2.11-2.15;
public: functions of `torch.nn.functional` that call them, which a policy does not see."""

LOCAL_SCALAR = aten._local_scalar_dense.default
"""The operation behind `tensor.item()`. 2.11-2.15."""


def softmax_backward(grad: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
    """The backward pass of softmax over the last dim, in one kernel. 2.11-2.15; public: `p * (g - (g * p).sum(-1,
    keepdim=True))`."""
    return torch._softmax_backward_data(grad, probabilities, -1, probabilities.dtype)


def assert_on_device(condition: torch.Tensor, message: str) -> None:
    """Fail if a 0-dim tensor is false, on a GPU asynchronously. 2.11-2.15; public: `assert`, which synchronizes."""
    torch._assert_async(condition, message)


def copy_all_(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target, in few kernels. 2.11-2.15; public: `copy_`, one by one."""
    torch._foreach_copy_(list(targets), list(sources))


def multiply_all_(tensors: Sequence[torch.Tensor], factor: float) -> None:
    """Multiply all in place, in few kernels. 2.11-2.15; public: `mul_`, one by one."""
    torch._foreach_mul_(list(tensors), factor)


def norms_of_all(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """The 2-norm of each tensor, 0-dim, accumulated in a dtype, in few kernels. 2.11-2.15; public:
    `torch.linalg.vector_norm`, one by one."""
    return list(torch._foreach_norm(list(tensors), 2, dtype))


def size_varies(tensor: torch.Tensor, dim: int) -> None:
    """Compile one program for every size of a dim. 2.11-2.15; public: `torch.compile(dynamic=True)`, for all dims."""
    torch._dynamo.mark_dynamic(tensor, dim)


# ---- oneDNN ----------------------------------------------------------------------------------------------------------

ONEDNN_LINEAR = torch.ops.mkldnn._linear_pointwise if torch.backends.mkldnn.is_available() else None
"""oneDNN's `a @ b.T + bias`, which `F.linear` does not use for fp32; None if torch is built without oneDNN. 2.11-2.15;
public: `torch.utils.mkldnn.to_mkldnn`, which copies the weights."""


def linear_by_onednn(a: torch.Tensor, b_ND: torch.Tensor, bias_N: torch.Tensor | None) -> torch.Tensor:
    """`a @ b.T + bias` by oneDNN, without autograd; see `ONEDNN_LINEAR`."""
    assert ONEDNN_LINEAR is not None
    return ONEDNN_LINEAR(a, b_ND, bias_N, "none", [], "")


def reorder_for_onednn(weight_ND: torch.Tensor, rows: int) -> torch.Tensor:
    """A copy of the weight in the order in which oneDNN reads it for a product with about `rows` rows, for
    `linear_by_onednn`. 2.11-2.15; public: none."""
    return torch.ops.mkldnn._reorder_linear_weight(weight_ND.contiguous(), rows)


def onednn_multiplies(dtype: torch.dtype) -> bool:
    """Whether oneDNN has products in this dtype on this processor: bf16 needs AVX-512. 2.11-2.15; public: none."""
    if ONEDNN_LINEAR is None:
        return False
    return dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


# ---- dispatch modes --------------------------------------------------------------------------------------------------

DispatchMode = TorchDispatchMode
"""Intercepts every operation below autograd while it is entered. 2.11-2.15; documented by PyTorch, but not public."""

FakeTensors = FakeTensorMode
"""Makes tensors with shapes but no data. 2.11-2.15; public: the meta device, whose tensors do not keep their device."""

leaves = _pytree.tree_leaves
"""The values in nested lists, tuples and dicts, without the containers. 2.11-2.15."""

tree_map = _pytree.tree_map
"""A function applied to each of those values, in containers of the same form. 2.11-2.15."""


def finished_work(result: Any) -> Work:
    """What a collective returns that has ended. 2.11-2.15; public: none."""
    future = torch.futures.Future()
    future.set_result(leaves(result))
    c10d: Any = _distributed_c10d
    return c10d._create_work_from_future(future)


def serve_by_gloo(group: ProcessGroup, gloo: dist.ProcessGroupGloo) -> None:
    """Give a process group written in Python, which torch calls for tensors, gloo for all else, as its name. 2.11-2.15;
    public: none."""
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)


def process_group_of(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ProcessGroup | None:
    """The process group among the arguments of a `c10d` or `_c10d_functional` operation. 2.11-2.15."""
    for index, argument in enumerate(operation._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        if value is not None and argument.name == "process_group":
            return ProcessGroup.unbox(value)
        if value is not None and argument.name == "group_name":
            return value if isinstance(value, ProcessGroup) else _resolve_process_group(value)
    return None


def in_backward_pass() -> bool:
    """Whether autograd is running a backward pass on this thread, recomputation included. 2.11-2.15."""
    return torch._C._current_graph_task_id() >= 0


def apart_from_recompute(hook: Callable[..., Any]) -> Callable[..., Any]:
    """`hook`, hidden from selective recomputation, which compares a block's operations with those of the original
    forward pass. 2.11-2.15; public: none."""

    def unseen(*args: object) -> object:
        selective = checkpoint._CachingTorchDispatchMode | checkpoint._CachedTorchDispatchMode
        if not isinstance(_get_current_dispatch_mode(), selective):
            return hook(*args)
        with _pop_mode_temporarily():
            return hook(*args)

    return unseen


def replace_hooks(module: nn.Module, replace: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace every hook before and after a module's forward pass by `replace(hook)`. 2.11-2.15; public: none; a hook
    can be removed only by a handle that its registration returned."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        hooks.update({key: replace(hook) for key, hook in hooks.items()})


def allocate_each(module: nn.Module, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace every parameter's and buffer's tensor by `make(tensor)`. 2.11-2.15; public: `to_empty`, whose
    tensors are all on one device."""
    module._apply(make)


# ---- meshes and distributed tensors ----------------------------------------------------------------------------------


def unflatten(mesh: DeviceMesh, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """A mesh of one axis, cut into several. It keeps its parent: FSDP2 requires one parent of all of a parameter's
    meshes. 2.11-2.15; public: `init_device_mesh`, whose meshes have no common parent."""
    return mesh._unflatten(0, sizes, names)


def local_part(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of this rank's part and its offset in the global tensor. 2.11-2.15; public: none for a dim that two
    strategies have split."""
    shape, offset = _utils.compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offset)


def version_of(tensor: torch.Tensor) -> int:
    """Autograd's count of in-place changes of a tensor's storage."""
    return tensor._version


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's local tensor itself. 2.11-2.15; public: `DTensor.to_local`, which may return a view of it."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def waited_for(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, after its collective has ended. 2.11-2.15; public: any operation on it waits."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


# ---- FSDP2 -----------------------------------------------------------------------------------------------------------


class FsdpAllGather(DefaultAllocMixin, AllGather):
    """The base of gathers that `FSDPModule.set_custom_all_gather` takes, with FSDP2's own allocation of buffers.
    2.11-2.15; public: this method, but not the classes."""


class FsdpReduceScatter(DefaultAllocMixin, ReduceScatter):
    """The same of reductions, for `FSDPModule.set_custom_reduce_scatter`."""


def _group(module: nn.Module | FSDPModule) -> Any:
    """FSDP2's group of parameters that it gathers and reduces together around `module`; None if there is none."""
    return module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None


def _parts(module: nn.Module | FSDPModule) -> Sequence[Any]:
    """FSDP2's records of the group's parameters; empty without a group."""
    group = _group(module)
    return () if group is None else group.fsdp_params


def sum_parts_in_reduce_dtype(module: nn.Module) -> None:
    """Make FSDP2 cast gradients to the reduction dtype before it accumulates them, for parameters that are replicated
    over tensor-parallel ranks and whose gradients are partial sums there; up to 2.14 it accumulates them in the compute
    dtype. Applies to the whole group, because FSDP2 reduces its parameters together.

    2.11-2.14; 2.15 does so by itself (`may_reduce_grad_outside_dp`).
    """
    group = _group(module)
    if group is None or not hasattr(FSDPParam, "accumulate_unsharded_grad_if_needed"):
        return
    hooked: set[Any] = set()
    with_parts = False

    def add_up(weight: torch.Tensor) -> None:
        nonlocal with_parts
        with_parts |= _is_part_of_sum(weight.grad)
        for part in hooked if with_parts else ():
            part.accumulate_unsharded_grad_if_needed()
            part.to_accumulated_grad_if_needed()

    def hook_weights(*_: object) -> None:
        for part in group.fsdp_params:
            if part not in hooked and part.sharded_param.requires_grad:
                hooked.add(part)
                part.unsharded_param.register_post_accumulate_grad_hook(add_up)

    module.register_forward_pre_hook(hook_weights)  # after FSDP2's own, which gathers the weights


def keep_gradients_as_reduced(module: nn.Module) -> None:
    """Make FSDP2 keep reduced gradients, and accumulate them over microbatches, in the reduction dtype; by itself it
    rounds them to the dtype of narrower weights. The weights must accept them (`grad_dtype`). 2.11-2.15; public:
    none."""
    group = _group(module)
    if group is None:
        return

    def keep(*_: object) -> None:
        group._orig_dtype = group._reduce_dtype or group._orig_dtype

    module.register_forward_pre_hook(keep)  # after FSDP2's own, which decides on dtypes before the first pass


def grouped_parts(module: FSDPModule) -> list[tuple[nn.Parameter, torch.Size]]:
    """The parameters of FSDP2's group around `module`, in its order, each with the shape of the part that a rank sends,
    padding included. 2.11-2.15; public: none."""
    return [(part.sharded_param, part.padded_sharded_param_size) for part in _parts(module)]


def keep_gradient_as_made(parameter: torch.Tensor) -> None:
    """Keep a low-precision parameter's gradient in the dtype in which autograd computes it, if FSDP2 does: since 2.15
    it no longer rounds a norm's fp32 gradient to the compute dtype. Does nothing before. Public: `grad_dtype`."""
    if not hasattr(FSDPParam, "accumulate_unsharded_grad_if_needed"):
        parameter.grad_dtype = None


def _is_part_of_sum(gradient: torch.Tensor | None) -> bool:
    return isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements)


def complete_gradients(modules: Iterable[nn.Module]) -> None:
    """Give trained, gathered weights without a gradient a gradient of zeros. Until gradients are summed over replicas,
    FSDP2 accumulates a buffer per group, which must hold the same weights each time, and drops it if nothing is added.
    2.11-2.15; public: none."""
    for part in (part for module in modules for part in _parts(module)):
        if part.sharded_param.requires_grad and hasattr(part, "_unsharded_param"):
            weight = part.unsharded_param
            if weight.grad is None and part.unsharded_accumulated_grad is None:
                weight.grad = torch.zeros_like(weight)


def end_backward(modules: Iterable[nn.Module]) -> None:
    """Run FSDP2's work at the end of a module's backward pass: accumulate its gradients, or reduce them. 2.11-2.15;
    public: none; torch's own pipelining makes the same call."""
    for module in modules:
        group = _group(module)
        if group is not None:
            group.post_backward()


def end_whole_backward(root: FSDPModule) -> None:
    """Run FSDP2's work at the end of a backward pass: wait for reductions. 2.11-2.15; public: 2.15's
    `finalize_backward`, which does not support reductions that wait for the last microbatch."""
    state = root._get_fsdp_state()
    context: Any = state._state_ctx
    if getattr(context, "manual_backward_finalization_active", False) is None:  # 2.15: no backward pass began
        context.manual_backward_finalization_active = False
    state._root_post_backward_final_callback()


def make_root(model: FSDPModule) -> None:
    """Make `model` FSDP2's root module, as its first forward pass would. 2.11-2.15; public: none."""
    model._get_fsdp_state()._lazy_init()


def passing_tensors(module: nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """The weights and gradients that FSDP2 holds between a gather and a reduction. 2.11-2.15; public: none."""
    weights: list[torch.Tensor] = []
    gradients: list[torch.Tensor | None] = []
    for part in _parts(module):
        weights += part.all_gather_outputs
        gradients.append(part.unsharded_accumulated_grad)
        if hasattr(part, "_unsharded_param"):
            gradients.append(part.unsharded_param.grad)
    return weights, gradients


def gathered_storages(module: nn.Module) -> list[torch.UntypedStorage]:
    """The storages of the weights that FSDP2 gathers around `module` and frees together, by resizing them to 0. Empty
    before the first gather. 2.11-2.15; public: none."""
    parts = _parts(module)
    if not parts or not hasattr(parts[-1], "_unsharded_param"):
        return []
    tensors = (tensor for part in parts for tensor in (*part.all_gather_outputs, *part._unsharded_inner_tensors))
    return [tensor.untyped_storage() for tensor in tensors]


def gathered_parameters(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in the model, whole parameter) of the weights gathered around `module`. 2.11-2.15; public: none."""
    for part in _parts(module):
        if hasattr(part, "_unsharded_param"):
            yield part._param_fqn or "", part.unsharded_param


def tensors_in_flight(module: nn.Module) -> list[torch.Tensor]:
    """The buffers of FSDP2's unfinished gathers and reductions around `module`. 2.11-2.15; public: none."""
    group = _group(module)
    if group is None or getattr(group, "comm_ctx", None) is None:
        return []
    context = group.comm_ctx
    states = [getattr(context, name, None) for name in ("all_gather_state", "reduce_scatter_state")]
    states += getattr(context, "reduce_scatter_states", [])
    return [leaf for leaf in leaves([group._all_gather_result, *states]) if isinstance(leaf, torch.Tensor)]


class Shards:
    """FSDP2's own references to this rank's shards. 2.11-2.15; public: none."""

    def __init__(self, model: nn.Module) -> None:
        parts = (part for module in model.modules() for part in _parts(module))
        self._parts = {id(part.sharded_param._local_tensor): part for part in parts}

    def __contains__(self, shard: torch.Tensor) -> bool:
        return id(shard) in self._parts

    def like(self, shard: torch.Tensor) -> torch.Tensor:
        """A tensor without data, of the size and dtype that FSDP2 gathers for a shard, padding included."""
        numel = self._parts[id(shard)].padded_sharded_param_size.numel() if shard in self else shard.numel()
        return torch.empty(numel, dtype=shard.dtype, device="meta")

    def padded(self) -> list[torch.Tensor]:
        """Shards that FSDP2 pads."""
        shards = [part.sharded_param._local_tensor for part in self._parts.values()]
        return [shard for shard in shards if shard.numel() < self.like(shard).numel()]

    def moved(self, shard: torch.Tensor, gathered: torch.Tensor) -> None:
        """Tell FSDP2 that a shard has moved: `gathered` holds the shard, then zeros."""
        self._parts[id(shard)]._sharded_param_data = gathered


# ---- tensors held by autograd's graph and by Python, read after an out-of-memory error -------------------------------


@dataclass(frozen=True)
class SavedByOperation:
    """The tensors that one operation of a graph keeps for its backward pass."""

    order: int
    """Operations that ran later have higher numbers."""
    name: str
    tensors: list[torch.Tensor]
    leaves: list[torch.Tensor]
    """The parameters that it reads."""


def saved_for_backward(roots: Iterable[torch.Tensor]) -> Iterator[SavedByOperation]:
    """The tensors that the operations behind `roots` still keep, in no order, without recomputed ones. The graph cannot
    be used afterwards: they are read through hooks, which cannot be removed. 2.11-2.15; the hooks are public (PyTorch's
    notes on autograd), an operation's number is not."""
    waiting = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen: set[Any] = set()
    while waiting:
        node: Any = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        following = [other for other, _ in node.next_functions if other is not None]
        waiting += following
        read = [other.variable for other in following if hasattr(other, "variable")]
        yield SavedByOperation(node._sequence_nr(), node.name(), _saved_by(node), read)


def _saved_by(node: Any) -> list[torch.Tensor]:
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    for name in dir(node):
        if name.startswith("_raw_saved_"):
            with contextlib.suppress(RuntimeError):  # freed
                raw = getattr(node, name)
                for saved in raw if isinstance(raw, list | tuple) else [raw]:
                    with contextlib.suppress(RuntimeError):  # freed, none, or recomputed
                        saved.register_hooks(keep, lambda tensor: tensor)
    return kept


def kept_by_recomputation() -> Iterator[tuple[Any, list[torch.Tensor]]]:
    """(forward pass, the tensors kept to recompute it, and recomputed ones) of every call of `checkpoint` whose
    backward pass has not ended. 2.11-2.15; public: none."""
    for frame in gc.get_objects():
        if type(frame) is checkpoint._CheckpointFrame:
            function: Any = frame.recompute_fn
            names = function.__code__.co_freevars
            cells = dict(_filled(names, function.__closure__))
            storage = getattr(cells.get("recompute_context"), "storage", {})
            results = leaves(list(storage.values()))
            recomputed = [tensor for made in frame.recomputed.values() for tensor in made.values()]
            kept = leaves([_inputs_of(frame), [getattr(result, "val", result) for result in results], recomputed])
            yield cells.get("fn", cells.get("function")), [leaf for leaf in kept if isinstance(leaf, torch.Tensor)]


def _filled(names: Iterable[str], cells: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(names, cells, strict=True):
        with contextlib.suppress(ValueError):  # not assigned
            yield name, cell.cell_contents


def _inputs_of(frame: Any) -> Any:
    if hasattr(frame, "get_inputs"):
        return frame.get_inputs()
    saver = getattr(frame.input_saver, "grad_fn", None)
    return [] if saver is None else saver.saved_tensors


def all_tensors() -> list[torch.Tensor]:
    """Every tensor that Python holds: 2.11-2.15 register them with the garbage collector; public: none."""
    return [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]


def record_allocations() -> None:
    """Start recording GPU allocations with their Python stacks. 2.11-2.15; documented by PyTorch, but not public."""
    torch.cuda.memory._record_memory_history(max_entries=1_000_000)


def save_allocations(path: Path) -> None:
    """Write the record and stop recording. 2.11-2.15; as above."""
    torch.cuda.memory._dump_snapshot(str(path))
    torch.cuda.memory._record_memory_history(enabled=None)


# ---- files that torch writes, and values that it reports -------------------------------------------------------------

StoredPlace = _StorageInfo
"""The file that holds a part of a tensor, from the index of `torch.distributed.checkpoint`. 2.11-2.15; public: none."""


def recorded_collectives() -> list[dict[str, Any]]:
    """The entries of torch's flight recorder for gloo, and for NCCL where torch has it. 2.11-2.15; public: files that
    `TORCH_FR_BUFFER_SIZE` and a dump on time-out leave."""
    entries: list[dict[str, Any]] = []
    for dump in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if hasattr(_distributed_c10d, dump):
            entries += json.loads(getattr(_distributed_c10d, dump)(True, False)).get("entries", [])
    return entries


def fake_store() -> Any:
    """A store for the backend `fake`, whose collectives do nothing; registers it. 2.11-2.15; public: none."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # torch's own tests, which nobody else needs

    return FakeStore()
