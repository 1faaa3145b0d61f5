"""What `piecework ops` says of split ops and fused ops: as text for a person and as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..ops.fused import Kernel, fused_ops
from ..ops.fused_choice import choose
from ..ops.registry import SplitOp
from ..phases import GraphConfig, Phase
from .console import columns


def split_op_text(op: SplitOp) -> str:
    """A split op with its schema, its place and how many nodes it matched."""
    whole = {
        True: "in a whole forward",
        False: "not in a whole forward",
        None: "in a whole forward, if the call can be",
    }
    matched = "not traced" if op.num_matched is None else f"{op.num_matched} graph nodes"
    facts = [
        ("  schema", op.schema),
        ("  mutates", ", ".join(op.mutates_args) or "nothing"),
        ("  capture", whole[op.capturable]),
        ("  defined", op.location),
        ("  matched", matched),
    ]
    return f"{op.name}.{op.overload}\n{columns(facts)}"


def fused_ops_data(config: GraphConfig, device_type: str) -> list[dict[str, Any]]:
    """Every fused op with its kernels and what it runs in each phase under `config` on a device.

    Raises: ConfigError, NotAvailableError: as `piecework.ops.fused_choice.choose`.
    """
    choices = {
        phase: choose(config.fused_ops, compiler=config.phase(phase).compiler, device_type=device_type)
        for phase in Phase
    }
    chosen = {str(phase): {op.name: dataclasses.asdict(op) for op in choice.ops} for phase, choice in choices.items()}
    return [
        {
            "name": op.name,
            "location": op.location,
            "kernels": [_kernel(kernel, device_type) for kernel in op.kernels],
            "choice": {phase: ops[op.name] for phase, ops in chosen.items()},
        }
        for op in fused_ops()
    ]


def _kernel(kernel: Kernel, device_type: str) -> dict[str, Any]:
    return {
        "name": kernel.name,
        "device_types": list(kernel.device_types),
        "location": kernel.location,
        "rejected": kernel.reject(device_type),
    }


def fused_op_text(op: Mapping[str, Any]) -> str:
    """One of `fused_ops_data` for a person."""
    phases: dict[str, list[str]] = {}
    for phase, chosen in op["choice"].items():
        phases.setdefault(f"{chosen['runs']} ({chosen['reason']})", []).append(phase)
    facts = [("  native", op["location"])]
    for kernel in op["kernels"]:
        why_not = f"; {kernel['rejected']}" if kernel["rejected"] is not None else ""
        facts.append((f"  {kernel['name']}", f"{kernel['location']}{why_not}"))
    facts += [("  runs", f"{what} in {' and '.join(where)}") for what, where in phases.items()]
    return f"fused op {op['name']}\n{columns(facts)}"
