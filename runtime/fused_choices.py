"""What the fused ops of a runtime run: `choose` of `piecework.ops.fused_choice`, for a config, a device and a dtype."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..ops.fused_choice import Choice, choose
from ..ops.kernel import KernelSpec
from ..phases import Compiler, GraphConfig, Phase, Startup
from ..phases.values import AUTO
from .entry_table import is_captured


def choose_for(config: GraphConfig, compilers: Iterable[Compiler], spec: KernelSpec) -> dict[Compiler, Choice]:
    """What the fused ops run under each of `compilers`, where kernels have to serve `spec`.

    Eager code that is no phase's best, and that a tiered start begins with, runs no kernel that has to be compiled
    first, unless the operator asked for it: steps would do without meanwhile, and captures would wait for it.

    Raises: ConfigError, NotAvailableError: as `choose`.
    """
    is_tiered = any(config.startup_of(phase) is Startup.TIERED for phase in Phase)
    is_passing = is_tiered and all(config.phase(phase).compiler is not Compiler.EAGER for phase in Phase)
    return {
        compiler: choose(
            config.fused_ops,
            compiler=compiler,
            device_type=spec.device_type,
            dtype=spec.dtype,
            capability=spec.capability,
            captured=spec.captured,
            at_once=is_passing and compiler == Compiler.EAGER and config.kernel_backend == AUTO,
            kernel_backend=config.kernel_backend,
        )
        for compiler in dict.fromkeys(compilers)
    }


def spec_for(config: GraphConfig, device: torch.device | str, dtype: torch.dtype | None) -> KernelSpec:
    """What kernels have to serve under a resolved config, on a device, or on any of a type: it need not be here."""
    device_type = device if isinstance(device, str) else device.type
    capability = None
    if device_type == "cuda" and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability(device)
    captured = any(is_captured(config.phase(phase)) for phase in Phase)
    return KernelSpec(device_type=device_type, dtype=dtype, capability=capability, captured=captured)


def floating_dtype(model: torch.nn.Module) -> torch.dtype | None:
    """The dtype of the model's floating parameters, which is that of its activations; None where they differ."""
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return dtypes.pop() if len(dtypes) == 1 else None
