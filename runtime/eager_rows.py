"""Which dims of an eager forward's outputs grow with `tokens`: a trace would know, a shape tells only so much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ..errors import InputError
from ..graphs.dynamo import unchanged
from ..graphs.inputs import TOKENS, InputContract
from ..graphs.outputs import OutputContract, Rows, map_leaves
from ..graphs.program import SizesByName, TensorsByName
from ..graphs.trace import OutputRef
from .programs import AnyProgram

Shapes = Mapping[str, tuple[int, ...]]
"""Of each output tensor, by path."""


def shapes_of(structure: Any, outputs: Sequence[Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of a forward's outputs."""
    shapes: dict[str, tuple[int, ...]] = {}

    def leaf(path: str, value: Any) -> Any:
        if isinstance(value, OutputRef):
            shapes[path] = tuple(outputs[value.index].shape)
        return value

    map_leaves(structure, leaf)
    return shapes


def find_rows(
    program: AnyProgram,
    model: torch.nn.Module,
    shapes: Shapes,
    tensors: TensorsByName,
    sizes: SizesByName,
    contract: InputContract,
    outputs: OutputContract,
) -> dict[str, Rows]:
    """The token rows of each output, from a run at the bucket `sizes["tokens"]`, which is 2 or more.

    A dim that was declared for the output is it. So is the one dim of the bucket's size, if nothing in the model has
    that size. Anything else is looked at by running the forward with fake tensors of another size, which computes
    nothing; where that is not possible, the shape has to do.
    """
    bucket = sizes[TOKENS]
    declared = {path: dim for path in shapes if (dim := outputs.declared_dim(path)) is not None}
    rows: dict[str, Rows] = {path: {dim: 1} for path, dim in declared.items()}
    shapes = {path: shape for path, shape in shapes.items() if path not in rows and not outputs.leaves_alone(path)}
    own = {size for tensor in (*model.parameters(), *model.buffers()) for size in tensor.shape}
    own |= {
        size for name, tensor in tensors.items() for size in _own_sizes(tensor, contract.dynamic_dims.get(name, {}))
    }
    if bucket not in own and all(shape.count(bucket) == 1 for shape in shapes.values()):
        return rows | {path: {shape.index(bucket): 1} for path, shape in shapes.items()}
    larger = _shapes_at(program, model, tensors, sizes, bucket + 1, contract) if shapes else {}
    for path, shape in shapes.items():
        if larger is None or len(larger.get(path, ())) != len(shape):
            rows[path] = outputs.likely_rows(path, shape, bucket)
        else:
            rows[path] = {
                dim: size // bucket
                for dim, (size, grown) in enumerate(zip(shape, larger[path], strict=True))
                if size and size % bucket == 0 and grown == size // bucket * (bucket + 1)
            }
    return rows


def check_rows(rows: Mapping[str, Rows], shapes: Shapes, bucket: int, outputs: OutputContract) -> None:
    """Refuses outputs of which padded rows could not be cut off, and those unlike what other buckets have shown.

    Raises:
        InputError: an output has no token rows, or not where it had them, and `output_dims` does not say None for it.
    """
    for path, shape in shapes.items():
        known = rows.get(path, {})
        holds = all(dim < len(shape) and shape[dim] == per_token * bucket for dim, per_token in known.items())
        if outputs.leaves_alone(path) or (known and holds):
            continue
        raise InputError(
            f"output {path!r}: expected {bucket} rows, one a token of the bucket, got shape {list(shape)}; return the "
            f'rows of all tokens, or say output_dims={{"{path}": None}} if padded rows do not change it'
        )


def _own_sizes(tensor: torch.Tensor, dims: Mapping[int, str]) -> list[int]:
    return [size for dim, size in enumerate(tensor.shape) if dims.get(dim) != TOKENS]


class _FakeEverything(TorchDispatchMode):
    """Runs operators on fake tensors only, and on fake stand-ins of real ones: nothing is computed and nothing written.

    A FakeTensorMode by itself would run an operator for real that gets real tensors alone, such as `buffer.add_(1)`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake_mode = FakeTensorMode()
        self._stand_ins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, self._faked, (args, kwargs or {}))
        with self._fake_mode:
            return func(*args, **kwargs)

    def _faked(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        if id(tensor) not in self._stand_ins:
            self._stand_ins[id(tensor)] = tensor, self._fake_mode.from_tensor(tensor, static_shapes=True)
        return self._stand_ins[id(tensor)][1]


def _shapes_at(
    program: AnyProgram,
    model: torch.nn.Module,
    tensors: TensorsByName,
    sizes: SizesByName,
    num_tokens: int,
    contract: InputContract,
) -> dict[str, tuple[int, ...]] | None:
    """The outputs' shapes at another number of tokens; None when the forward cannot run on fake tensors."""
    try:
        with unchanged(model), _FakeEverything():
            fakes = {}
            for name, tensor in tensors.items():
                dims = contract.dynamic_dims.get(name, {})
                shape = [num_tokens if dims.get(dim) == TOKENS else size for dim, size in enumerate(tensor.shape)]
                fakes[name] = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
            outputs, structure = program.flat(fakes, {**sizes, TOKENS: num_tokens})
            return shapes_of(structure, outputs)
    except Exception:  # whatever a forward does with a tensor that has no values
        return None
