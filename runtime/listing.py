"""What `piecework ops` says of split ops, fused ops and attention: as text for a person and as plain data.

Of each fused op and of attention there is a table of implementations: what each supports, and whether it is chosen or
why it is passed over. A package that is not installed is such a reason, and nothing is imported to find it out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..ops import attention
from ..ops.attention import AttentionImplementation, AttentionSpec
from ..ops.attention_choice import AUTO
from ..ops.attention_rows import in_order
from ..ops.fused import NATIVE, FusedOp, fused_ops
from ..ops.fused_choice import NONE_CAN_RUN, ChosenOp
from ..ops.kernel import KernelSpec, dtype_name
from ..ops.registry import SplitOp
from ..phases import GraphConfig, Phase, resolve
from .console import columns
from .fused_choices import choose_for, spec_for


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


def fused_ops_data(config: GraphConfig, device_type: str, dtype: torch.dtype | None = None) -> list[dict[str, Any]]:
    """Every fused op with its implementations, and what it runs in each phase under `config`.

    Args:
        device_type: that of the model; such a device need not be here.
        dtype: of the activations; None: any.

    Raises: ConfigError, NotAvailableError: as `piecework.phases.resolve` and `piecework.ops.fused_choice.choose`.
    """
    config = resolve(config, device_type=device_type, cuda_available=device_type == "cuda").config
    spec = spec_for(config, device_type, dtype)
    choices = choose_for(config, [config.phase(phase).compiler for phase in Phase], spec)
    of_phase = {phase: choices[config.phase(phase).compiler] for phase in Phase}
    chosen = {str(phase): {op.name: op for op in choice.ops} for phase, choice in of_phase.items()}
    return [
        {
            "name": op.name,
            "location": op.location,
            "fuses": op.fuses,
            "implementations": _implementations(op, spec, {phase: ops[op.name] for phase, ops in chosen.items()}),
            "choice": {phase: dataclasses.asdict(ops[op.name]) for phase, ops in chosen.items()},
        }
        for op in fused_ops()
    ]


def _implementations(op: FusedOp[Any, Any], spec: KernelSpec, chosen: Mapping[str, ChosenOp]) -> list[dict[str, Any]]:
    """The native body and each kernel, in the order of preference; None for what does not limit it."""
    native: dict[str, Any] = {
        "name": NATIVE,
        "location": op.location,
        "why": "",
        "device_types": None,
        "dtypes": None,
        "min_capability": None,
        "captures": True,
        "beats_inductor": False,
        "rejected": None,
    }
    kernels: list[dict[str, Any]] = [
        {
            "name": kernel.name,
            "location": kernel.location,
            "why": kernel.why,
            "device_types": list(kernel.device_types),
            "dtypes": None if kernel.dtypes is None else [dtype_name(dtype) for dtype in kernel.dtypes],
            "min_capability": None if kernel.min_capability is None else list(kernel.min_capability),
            "captures": kernel.captures,
            "beats_inductor": kernel.beats_inductor,
            "rejected": kernel.reject(spec),
        }
        for kernel in op.kernels
    ]
    return [
        {**row, "decision": {phase: _decision(row, choice) for phase, choice in chosen.items()}}
        for row in (native, *kernels)
    ]


def _decision(row: Mapping[str, Any], choice: ChosenOp) -> dict[str, Any]:
    """Whether an implementation runs in a phase, and why or why not."""
    if choice.runs == row["name"]:
        said = choice.reason.partition(f"{NONE_CAN_RUN}:")  # what follows is said in the kernels' own rows
        return {"chosen": True, "reason": said[0] + (NONE_CAN_RUN if said[1] else "")}
    if row["rejected"] is not None:
        return {"chosen": False, "reason": row["rejected"]}
    if NATIVE in (choice.runs, row["name"]):
        return {"chosen": False, "reason": choice.reason}
    return {"chosen": False, "reason": f"{choice.runs} goes before"}


def fused_op_text(op: Mapping[str, Any]) -> str:
    """One of `fused_ops_data` for a person."""
    rows = [("implementation", "devices", "dtypes", "capability", "captured")]
    for each in op["implementations"]:
        capability = each["min_capability"]
        rows.append(
            (
                each["name"],
                _any_of(each["device_types"]),
                _any_of(each["dtypes"]),
                "any" if capability is None else f"{'.'.join(map(str, capability))} or higher",
                "yes" if each["captures"] else "no",
            )
        )
    return "\n".join(
        (
            f"fused op {op['name']}, defined at {op['location']}",
            _table(rows, op["implementations"]),
            *(f"  {each['name']}: {said}" for each in op["implementations"] if (said := _merits(each))),
        )
    )


def _merits(implementation: Mapping[str, Any]) -> str:
    """What speaks for a kernel."""
    measured = "measured no slower than what inductor makes of the native body"
    return "; ".join(filter(None, (implementation["why"], measured if implementation["beats_inductor"] else "")))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AttentionShape:
    """What a model asks of attention; the default is a Llama-3-8B's."""

    dtype: torch.dtype = torch.bfloat16
    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    block_size: int = 16
    window_size: int = 0
    """The smallest of its layers' windows that is one."""


def attention_data(backend: str, device_type: str, shape: AttentionShape) -> dict[str, Any]:
    """The implementations of paged attention, and which one serves a prompt, a decode step, and either in a capture.

    Args:
        backend: `GraphConfig.attention_backend`.
        device_type: that of the model; such a device need not be here.
    """
    whole = AttentionSpec(device_type=device_type, cache_dtype=shape.dtype, **dataclasses.asdict(shape))
    cases = {
        "prefill": dataclasses.replace(whole, num_tokens=2048),
        "decode": dataclasses.replace(whole, num_tokens=32, is_decode=True),
        "captured": dataclasses.replace(whole, num_tokens=32, is_static=True),
    }
    return {
        "backend": backend,
        "cases": {case: _plain(dataclasses.asdict(spec)) for case, spec in cases.items()},
        "implementations": [
            {
                "name": row.name,
                "backend": row.backend,
                "why": row.why,
                "captures": row.captures,
                "decision": {case: _attention_decision(row, spec, backend) for case, spec in cases.items()},
            }
            for row in attention.IMPLEMENTATIONS
        ],
    }


def _attention_decision(row: AttentionImplementation, spec: AttentionSpec, backend: str) -> dict[str, Any]:
    """Whether `row` serves `spec`, and why or why not. Loads no implementation."""
    if backend not in (AUTO, row.backend):
        return {"chosen": False, "reason": f"attention_backend is {backend}"}
    rows = in_order(attention.IMPLEMENTATIONS, spec)
    reason = _reject_attention(row, spec)
    if reason is not None:
        return {"chosen": False, "reason": reason}
    first = next(each for each in rows if backend in (AUTO, each.backend) and _reject_attention(each, spec) is None)
    if first is not row:
        return {"chosen": False, "reason": f"{first.name} goes before"}
    why = "the first that supports it" if backend == AUTO else f"attention_backend is {backend}"
    return {"chosen": True, "reason": why}


def _reject_attention(row: AttentionImplementation, spec: AttentionSpec) -> str | None:
    if spec.is_static and not row.captures:
        return row.reject(spec) or "cannot be captured"
    return row.reject(spec)


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: dtype_name(value) if isinstance(value, torch.dtype) else value for key, value in values.items()}


def attention_text(data: Mapping[str, Any]) -> str:
    """What `attention_data` made, for a person."""
    case = data["cases"]["prefill"]
    window = f" and a window of {case['window_size']}" if case["window_size"] else ""
    rows = data["implementations"]
    facts = [("implementation",), *((row["name"],) for row in rows)]
    return "\n".join(
        (
            f"attention in {case['dtype']}, {case['num_heads']} heads over {case['num_kv_heads']} of "
            f"{case['head_size']} elements{window}",
            _table(facts, rows),
            *(f"  {row['name']}: {row['why']}" for row in rows),
        )
    )


def _any_of(words: Sequence[str] | None) -> str:
    return "any" if words is None else ", ".join(words)


def _table(facts: Sequence[tuple[str, ...]], rows: Sequence[Mapping[str, Any]]) -> str:
    """Facts, under a head, and behind them what is decided: a column for each case, or one for all that agree."""
    cases = list(rows[0]["decision"])
    texts = [tuple(_decision_text(row["decision"][case]) for case in cases) for row in rows]
    if all(len(set(each)) == 1 for each in texts):
        cases, texts = ["decision"], [each[:1] for each in texts]
    return columns([(f"  {fact[0]}", *fact[1:], *text) for fact, text in zip(facts, (cases, *texts), strict=True)])


def _decision_text(decision: Mapping[str, Any]) -> str:
    return f"chosen: {decision['reason']}" if decision["chosen"] else str(decision["reason"])
