"""What a worker must know beside the model to make the trace that the server would make."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from ..errors import PieceworkError, TraceError
from ..graphs.encode import decode_constant, encode_constant
from ..graphs.inputs import InputContract, Signature
from ..graphs.outputs import OutputContract, OutputDims
from ..graphs.portable_signature import decode_signature, encode_signature
from ..ops import registry
from ..ops.fused import NATIVE, fused_ops
from ..ops.fused_choice import Choice, ChosenOp
from ..phases import Compiler

JSON = Any
"""What JSON can hold."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TraceRequest:
    """One trace of one signature, as `ProgramFamily` would make it in the server."""

    signature: Signature
    """The inputs to trace for, and torch's settings (`ambient`) to trace under."""
    dynamic_dims: Mapping[str, Mapping[int, str]]
    pad: Mapping[str, int | float]
    output_dims: OutputDims
    sizes: Mapping[str, int]
    """Of each dynamic dim, to trace with."""
    compiler: Compiler
    device_type: str
    kernels: tuple[tuple[str, str], ...]
    """(fused op, kernel) where that is not the native body."""
    split_ops: tuple[str, ...]
    """Qualified names of the server's split ops."""
    training: tuple[str, ...] | None = None
    """Dotted names of the modules that are in training mode; None: not checked."""
    backed: bool = False
    """Whether the attempt without known sizes is left out."""

    @classmethod
    def of(
        cls,
        signature: Signature,
        contract: InputContract,
        outputs: OutputContract,
        sizes: Mapping[str, int],
        fused: Choice,
        *,
        model: torch.nn.Module | None = None,
        backed: bool = False,
    ) -> TraceRequest:
        """The request for the trace that `graphs.trace.trace` would make of these.

        Args:
            model: the live one: what a factory makes must be in its mode of `train()` or `eval()`.
        """
        return cls(
            signature=signature,
            dynamic_dims=contract.dynamic_dims,
            pad=contract.pad,
            output_dims=outputs.dims,
            sizes=dict(sizes),
            compiler=fused.compiler,
            device_type=fused.device_type,
            kernels=fused.kernels,
            split_ops=tuple(sorted({op.name for op in registry.split_ops()})),
            training=training_modules(model) if model is not None else None,
            backed=backed,
        )

    def contract(self) -> InputContract:
        """The declared dynamic dims and pad values."""
        return InputContract(self.dynamic_dims, self.pad)

    def outputs(self) -> OutputContract:
        """Which dims of the outputs carry tokens."""
        return OutputContract(self.output_dims)

    def fused(self) -> Choice:
        """What the fused ops are in the trace.

        Raises:
            TraceError: a kernel is not registered in this process.
        """
        known = {op.name: {kernel.name for kernel in op.kernels} for op in fused_ops()}
        for name, kernel in self.kernels:
            if kernel not in known.get(name, ()):
                raise TraceError(
                    f"trace: expected the kernel {kernel} of the fused op {name}, which the server runs, and it is not "
                    f"registered in this process; import the module that registers it in the factory's module"
                )
        runs = dict(self.kernels)
        chosen = tuple(
            ChosenOp(name=name, runs=runs.get(name, NATIVE), reason="as in the server", by_default=False)
            for name in known
        )
        return Choice(compiler=self.compiler, device_type=self.device_type, ops=chosen)

    def split_differences(self, graph_module: torch.fx.GraphModule) -> tuple[list[str], list[str]]:
        """Operators of a graph that are split ops in this process only, and in the server only."""
        ours: set[str] = set()
        theirs: set[str] = set()
        for node in graph_module.graph.nodes:
            name = _qualified_name(node.target) if node.op == "call_function" else None
            if name is not None and (registry.match(node.target) is not None) != (name in self.split_ops):
                (theirs if name in self.split_ops else ours).add(name)
        return sorted(ours), sorted(theirs)

    def to_json(self) -> JSON:
        """The request as plain JSON data. Raises: PortableError for a constant that JSON cannot hold."""
        output_dims = self.output_dims
        if isinstance(output_dims, Mapping):
            output_dims = {str(path): dim for path, dim in output_dims.items()}
        return {
            "signature": encode_signature(self.signature),
            "dynamic_dims": {name: list(map(list, dims.items())) for name, dims in self.dynamic_dims.items()},
            "pad": {name: encode_constant(value) for name, value in self.pad.items()},
            "output_dims": output_dims,
            "sizes": dict(self.sizes),
            "compiler": str(self.compiler),
            "device_type": self.device_type,
            "kernels": [list(choice) for choice in self.kernels],
            "split_ops": list(self.split_ops),
            "training": None if self.training is None else list(self.training),
            "backed": self.backed,
        }

    @classmethod
    def from_json(cls, data: JSON) -> TraceRequest:
        """The request that `to_json` wrote down. Raises: TraceError for other data."""
        try:
            training = data["training"]
            return cls(
                signature=decode_signature(data["signature"]),
                dynamic_dims={name: dict(dims) for name, dims in data["dynamic_dims"].items()},
                pad={name: decode_constant(value) for name, value in data["pad"].items()},
                output_dims=data["output_dims"],
                sizes=dict(data["sizes"]),
                compiler=Compiler(data["compiler"]),
                device_type=data["device_type"],
                kernels=tuple((op, kernel) for op, kernel in data["kernels"]),
                split_ops=tuple(data["split_ops"]),
                training=None if training is None else tuple(training),
                backed=data["backed"],
            )
        except (PieceworkError, KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise TraceError(
                f"trace: expected a request that TraceRequest.to_json wrote, got something else "
                f"({type(error).__name__}: {error}); run both processes with one version of Piecework"
            ) from error


def training_modules(model: torch.nn.Module) -> tuple[str, ...]:
    """Dotted names of the modules that are in training mode; the model's own is empty."""
    return tuple(name for name, module in model.named_modules() if module.training)


def _qualified_name(target: Any) -> str | None:
    if isinstance(target, OpOverload):
        return str(target._schema.name)
    return str(target._qualified_op_name) if isinstance(target, OpOverloadPacket) else None
