"""What a tape refuses to record, because a CUDA graph could not hold it, and where in the model it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from ..errors import CaptureError
from .model_line import calling_line
from .tape_kinds import TORCHS_OWN

aten = torch.ops.aten

_BY_TENSOR = "use a tensor operation instead (torch.where, masked_fill_), or move it out of the captured region"
_DYNAMIC = "its output's shape depends on the data; use an operator whose shape is known (torch.where, nonzero_static)"
_READS = f"it reads the data on the host, which a GPU would have to wait for; {_BY_TENSOR}"

_SPLIT = "it reads the indices on the host; pass them as a tuple of ints"

# Operators that read data on the host without a tag that says so.
_UNTAGGED = {
    aten._linalg_check_errors.default: "it reads an error code on the host; use the operator's _ex form",
    aten.tensor_split.tensor_indices_or_sections: _SPLIT,
}
_INDEXING = {
    aten.index.Tensor,
    aten.index.Tensor_out,
    aten.index_put.default,
    aten.index_put_.default,
    aten.index_put.out,
    aten._index_put_impl_.default,
    aten._index_put_impl.default,
    aten._unsafe_index.Tensor,
    aten._unsafe_index_put.default,
}
_MASKS = (torch.bool, torch.uint8)

_T = torch.Tensor
_METHODS: dict[Any, str] = {
    _T.tolist: "Tensor.tolist",
    _T.item: "Tensor.item",
    _T.numpy: "Tensor.numpy",
    _T.cpu: "Tensor.cpu",
    _T.__array__: "Tensor.__array__",
    _T.__bool__: "Tensor.__bool__",
    _T.__int__: "Tensor.__int__",
    _T.__float__: "Tensor.__float__",
    _T.__complex__: "Tensor.__complex__",
    _T.__index__: "Tensor.__index__",
    _T.__dlpack__: "Tensor.__dlpack__",
    _T.__repr__: "Tensor.__repr__",
}
_FROM_DATA: dict[Any, str] = {
    torch.tensor: "torch.tensor",
    torch.as_tensor: "torch.as_tensor",
    _T.new_tensor: "Tensor.new_tensor",
}


def refused_op(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Why a call of an operator cannot be recorded, and what to do; None if nothing speaks against it."""
    if func in _INDEXING:
        indices = args[1] if len(args) > 1 else kwargs["indices"]
        if any(index is not None and index.dtype in _MASKS for index in indices):
            return f"it indexes with a mask, so that the number of elements depends on the data; {_BY_TENSOR}"
        return None
    if func is aten.one_hot.default:
        num_classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
        return "it looks for the largest class; pass num_classes" if num_classes < 0 else None
    if func.name().startswith("aten::repeat_interleave"):
        if kwargs.get("output_size") is not None or func is aten.repeat_interleave.self_int:
            return None
        return "the sum of the repeats is read on the host; pass output_size=..."
    if torch.Tag.dynamic_output_shape in func.tags:
        return _DYNAMIC
    if torch.Tag.data_dependent_output in func.tags:
        return _READS
    if torch.Tag.cudagraph_unsafe in func.tags:
        return f"it is tagged cudagraph_unsafe; {_BY_TENSOR}"
    if func.is_view and func.namespace not in TORCHS_OWN:
        return "it returns a view of an argument, which an operator of torch.library may not; return a new tensor"
    return _UNTAGGED.get(func)


def refused_function(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, str] | None:
    """The name of a Python-level call that cannot be recorded and why; None if nothing speaks against it.

    On a tape each tensor stands for one on a GPU, so everything that brings data to the host is refused. A device
    object is taken as the model's own device (`x.to(y.device)`), the word `"cpu"` as the host.
    """
    try:
        name = _METHODS.get(func)
    except TypeError:  # not hashable
        return None
    if name is not None:
        return name, _READS
    if func is _T.to:
        if any(isinstance(value, str) and value.split(":")[0] == "cpu" for value in (*args[1:], kwargs.get("device"))):
            return 'Tensor.to("cpu")', _READS
        return None
    if func in (torch.tensor_split, _T.tensor_split):
        # Outside of inference mode it is taken apart above any dispatch mode.
        indices = [*args[1:2], kwargs.get("tensor_indices_or_sections")]
        return ("torch.tensor_split", _SPLIT) if any(isinstance(value, _T) for value in indices) else None
    name = _FROM_DATA.get(func)
    if name is None or (func is not _T.new_tensor and kwargs.get("device") is None):
        return None
    if any(isinstance(value, torch.Tensor) for value in args[func is _T.new_tensor :][:1]):
        return None
    return name, (
        "it copies Python data to the device, which a GPU would have to wait for; use torch.full, or make it before"
    )


def refusal(op: str, reason: str) -> CaptureError:
    """The error for a call that the model makes now."""
    line = calling_line()
    where = f"{line}: " if line else ""
    return CaptureError(f"{where}expected only work that a capture can record, got {op}: {reason}", op=op, line=line)
