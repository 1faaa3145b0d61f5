"""Piecework compiles and captures a PyTorch model piece by piece, bucket by bucket, while it serves.

This module is the public API and nothing else. Names are looked up when first used (PEP 562), so that
`import piecework` and `import piecework.phases` load no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_EXPORTS = {
    # what an operator chooses
    "Backend": ".phases",
    "BucketLadder": ".phases",
    "CaptureDevice": ".phases",
    "Compiler": ".phases",
    "GraphConfig": ".phases",
    "Phase": ".phases",
    "PhaseConfig": ".phases",
    "Startup": ".phases",
    "resolve": ".phases",
    # what a model calls
    "fused_op": ".ops.fused",
    "fused_ops": ".ops.fused",
    "PackedContext": ".ops.packed_attention",
    "context_field": ".ops.context",
    "get_context": ".ops.context",
    "host_field": ".ops.context",
    "use_context": ".ops.context",
    "split_op": ".ops.split_op",
    "split_ops": ".ops.registry",
    "transformers_attention": ".ops.transformers_attention",
    # what an engine holds
    "PortableProgram": ".graphs.portable",
    "Runtime": ".runtime.runtime",
    "ModelFactory": ".runtime.model_factory",
    "start_workers": ".runtime.building",
    "compilable": ".runtime.compilable",
    # what can go wrong
    "ArtifactError": ".errors",
    "CaptureError": ".errors",
    "CompileError": ".errors",
    "ConfigError": ".errors",
    "ContextError": ".errors",
    "DynamicDimError": ".errors",
    "GuardError": ".errors",
    "InputError": ".errors",
    "KernelNotReadyError": ".errors",
    "ModelError": ".errors",
    "NoArtifactError": ".errors",
    "NotAvailableError": ".errors",
    "PortableError": ".errors",
    "PieceworkError": ".errors",
    "RecompileError": ".errors",
    "RegistrationError": ".errors",
    "RuntimeClosedError": ".errors",
    "TraceError": ".errors",
    "WorkerLostError": ".errors",
}
_SUBMODULES = ("errors", "graphs", "ops", "phases", "runtime")

__all__ = sorted(_EXPORTS)

if TYPE_CHECKING:
    from . import errors as errors
    from . import graphs as graphs
    from . import ops as ops
    from . import phases as phases
    from . import runtime as runtime
    from .errors import ArtifactError as ArtifactError
    from .errors import CaptureError as CaptureError
    from .errors import CompileError as CompileError
    from .errors import ConfigError as ConfigError
    from .errors import ContextError as ContextError
    from .errors import DynamicDimError as DynamicDimError
    from .errors import GuardError as GuardError
    from .errors import InputError as InputError
    from .errors import KernelNotReadyError as KernelNotReadyError
    from .errors import ModelError as ModelError
    from .errors import NoArtifactError as NoArtifactError
    from .errors import NotAvailableError as NotAvailableError
    from .errors import PieceworkError as PieceworkError
    from .errors import PortableError as PortableError
    from .errors import RecompileError as RecompileError
    from .errors import RegistrationError as RegistrationError
    from .errors import RuntimeClosedError as RuntimeClosedError
    from .errors import TraceError as TraceError
    from .errors import WorkerLostError as WorkerLostError
    from .graphs.portable import PortableProgram as PortableProgram
    from .ops.context import context_field as context_field
    from .ops.context import get_context as get_context
    from .ops.context import host_field as host_field
    from .ops.context import use_context as use_context
    from .ops.fused import fused_op as fused_op
    from .ops.fused import fused_ops as fused_ops
    from .ops.packed_attention import PackedContext as PackedContext
    from .ops.registry import split_ops as split_ops
    from .ops.split_op import split_op as split_op
    from .ops.transformers_attention import transformers_attention as transformers_attention
    from .phases import Backend as Backend
    from .phases import BucketLadder as BucketLadder
    from .phases import CaptureDevice as CaptureDevice
    from .phases import Compiler as Compiler
    from .phases import GraphConfig as GraphConfig
    from .phases import Phase as Phase
    from .phases import PhaseConfig as PhaseConfig
    from .phases import Startup as Startup
    from .phases import resolve as resolve
    from .runtime.building import start_workers as start_workers
    from .runtime.compilable import compilable as compilable
    from .runtime.model_factory import ModelFactory as ModelFactory
    from .runtime.runtime import Runtime as Runtime
else:  # hidden from type checkers, to which a module with __getattr__ has every name

    def __getattr__(name: str) -> object:
        if name in _SUBMODULES:
            return importlib.import_module(f".{name}", __name__)
        if name not in _EXPORTS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_EXPORTS[name], __name__), name)
        globals()[name] = value  # the next look-up does not come here
        return value

    def __dir__() -> list[str]:
        return sorted({*__all__, *_SUBMODULES, *(name for name in globals() if name.startswith("__"))})
