"""What the placeholders of a whole forward look like: told from the live model and the inputs' layouts.

A graph that another process traced has no fake tensors of its own on what only split ops take, such as KV caches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..errors import CompileError
from .bindings import Bindings, FrozenTensor, InputBinding, ModelTensor
from .fakes import Size, TensorDescription, describe
from .inputs import InputContract, Layout, Signature
from .layouts import PLAIN_TENSORS
from .trace import Traced

_DESCRIBABLE = (*PLAIN_TENSORS, FakeTensor)  # a model may be a fake one, in a process that only compiles


def layouts_of_inputs(traced: Traced, contract: InputContract) -> Signature:
    """The layouts of the inputs that a trace takes; `InputContract` makes those with dynamic dims contiguous."""
    layouts: list[Layout] = []
    strides: list[tuple[str, tuple[int, ...]]] = []
    placeholders = traced.graph_module.graph.find_nodes(op="placeholder")
    for node, binding in zip(placeholders, traced.bindings.placeholders, strict=True):
        if isinstance(binding, InputBinding):
            value = node.meta["example_value"]
            dims = contract.dynamic_dims.get(binding.name, {})
            sizes = tuple(dims[i] if i in dims else int(size) for i, size in enumerate(value.shape))
            layouts.append((binding.name, value.dtype, value.device, sizes))
            if not dims:
                strides.append((binding.name, tuple(value.stride())))
    return Signature(tuple(layouts), (), tuple(strides))


def describe_placeholders(
    bindings: Bindings, inputs: Signature, sizes: Mapping[str, Size]
) -> list[TensorDescription | Size]:
    """Of each placeholder in order its tensor, or the size that it is.

    Tensors of the model share memory in the descriptions where one element of it may be in both: see Note [A write in
    the one graph is no copy]. Inputs share none, as in a trace.

    Args:
        inputs: the layouts of the inputs, of which those with dynamic dims are contiguous.
        sizes: what stands for the size of each dynamic dim.

    Raises:
        CompileError: a tensor has more to it than a layout.
    """
    layouts = {name: (dtype, device, shape) for name, dtype, device, shape in inputs.tensors}
    strides = dict(inputs.strides)
    live: dict[int, TensorDescription] = {}
    described: list[TensorDescription | Size] = []
    for i, binding in enumerate(bindings.placeholders):
        if isinstance(binding, (ModelTensor, FrozenTensor)):
            live[i] = _describe_live(binding)
            described.append(live[i])
        elif isinstance(binding, InputBinding):
            dtype, device, shape = layouts[binding.name]
            filled = tuple(sizes[size] if isinstance(size, str) else size for size in shape)
            described.append(_of_input(dtype, device, filled, strides.get(binding.name), memory=-1 - i))
        else:
            described.append(sizes[binding.name])
    for memory, group in enumerate(_sharing(live)):
        for i in group:
            # Alone it begins where it begins: torch 2.11 adds an input's offset twice where a view of it is written.
            offset = live[i].offset if len(group) > 1 else 0
            described[i] = dataclasses.replace(live[i], memory=memory, offset=offset)
    return described


def _of_input(
    dtype: torch.dtype, device: torch.device, sizes: tuple[Size, ...], strides: tuple[int, ...] | None, *, memory: int
) -> TensorDescription:
    contiguous: list[Size] = []
    num_elements: Size = 1
    for size in reversed(sizes):
        contiguous.insert(0, num_elements)
        num_elements = num_elements * size
    return TensorDescription(
        dtype=dtype,
        device=device,
        sizes=sizes,
        strides=tuple(contiguous) if strides is None else strides,
        offset=0,
        memory=memory,
        memory_bytes=num_elements * dtype.itemsize,  # of memory with one user nobody asks
    )


def _describe_live(binding: ModelTensor | FrozenTensor) -> TensorDescription:
    tensor = binding.current() if isinstance(binding, ModelTensor) else binding.tensor
    if (
        type(tensor) not in _DESCRIBABLE
        or tensor.layout is not torch.strided
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor.is_quantized
    ):
        where = f"model tensor {binding.path!r}" if isinstance(binding, ModelTensor) else "a tensor outside the model"
        raise CompileError(
            f"whole: {where}: expected a dense torch.Tensor or Parameter, got a {type(tensor).__name__} of layout "
            f"{tensor.layout}; a model that holds one is compiled piece by piece only"
        )
    return describe(tensor)


def _sharing(tensors: Mapping[int, TensorDescription]) -> list[list[int]]:
    """The tensors in groups, of which none has an element of memory in common with one of another group.

    All that have one in common with another are one group for each memory: torch 2.11 finds such tensors by their
    memory at each call again, and there must be as many as when it compiled.
    """
    groups: list[list[int]] = []
    by_memory: dict[int, list[int]] = {}
    for i, tensor in tensors.items():
        by_memory.setdefault(tensor.memory, []).append(i)
    for members in by_memory.values():
        found: list[list[int]] = []
        for i in members:
            touched = [g for g in found if any(may_overlap(tensors[i], tensors[j]) for j in g)]
            found = [g for g in found if g not in touched] + [[*(j for g in touched for j in g), i]]
        several = [i for group in found if len(group) > 1 for i in group]
        groups += [*([several] if several else []), *(group for group in found if len(group) == 1)]
    return groups


def may_overlap(left: TensorDescription, right: TensorDescription) -> bool:
    """Whether two tensors in one memory may have a byte in common; False is sure. Sizes are numbers."""
    if _is_empty(left) or _is_empty(right):
        return False
    periods = {step for tensor in (left, right) for step, _ in _dims(tensor)}
    return not any(_are_apart(left, right, period) for period in (None, *periods))


def _are_apart(left: TensorDescription, right: TensorDescription, period: int | None) -> bool:
    """Whether they are in different bytes of each `period`: as keys and values that alternate are, or columns.

    With None: of the memory as a whole.
    """
    (low, high), (other_low, other_high) = _window(left, period), _window(right, period)
    if period is None:
        return high <= other_low or other_high <= low
    fits = high <= period and other_high <= period  # a window that goes over the end begins again at the start
    return fits and (high <= other_low or other_high <= low)


def _window(tensor: TensorDescription, period: int | None) -> tuple[int, int]:
    """The first byte and the one behind the last of what a tensor takes of each period."""
    first = int(tensor.offset) * tensor.dtype.itemsize
    length = tensor.dtype.itemsize + sum(
        (size - 1) * step for step, size in _dims(tensor) if period is None or step % period
    )
    first = first if period is None else first % period
    return first, first + length


def _dims(tensor: TensorDescription) -> Sequence[tuple[int, int]]:
    """Bytes from one to the next, and how many, of each dim that has a next one."""
    dims = zip(tensor.strides, tensor.sizes, strict=True)
    return [(int(stride) * tensor.dtype.itemsize, int(size)) for stride, size in dims if size > 1 and stride > 0]


def _is_empty(tensor: TensorDescription) -> bool:
    return 0 in tensor.sizes
