"""The implementations of paged attention: what each supports, and which is tried first."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from typing import cast

import torch

from .attention_table import AttentionForward, AttentionImplementation, AttentionPrepare, AttentionSpec, RefuseCapture
from .packages import missing

_TORCH_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TRITON_MAX_HEAD_SIZE = 512
FLASHINFER_DTYPES: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
FLASHINFER_DEVICES: tuple[str, ...] = ("cuda",)
FLASHINFER_HEAD_SIZES: tuple[int, ...] = (64, 128, 256)
"""Of FlashInfer's kernels, those that all of its ways to attend have."""


def _reject_dtypes(spec: AttentionSpec, dtypes: tuple[torch.dtype, ...]) -> str | None:
    if spec.dtype not in dtypes:
        *others, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
        return f"computes {', '.join(others)} and {last}, not {spec.dtype}"
    if spec.cache_dtype != spec.dtype:
        return f"needs the cache in the dtype of q, {spec.dtype}, not {spec.cache_dtype}"
    return None


def _reject_triton(spec: AttentionSpec) -> str | None:
    if spec.device_type != "cuda":
        return f"runs on cuda, not on {spec.device_type}"
    if (reason := missing("triton", "triton")) is not None:
        return reason
    if spec.head_size > _TRITON_MAX_HEAD_SIZE:
        return f"holds heads of at most {_TRITON_MAX_HEAD_SIZE} elements, not {spec.head_size}"
    return _reject_dtypes(spec, _TRITON_DTYPES)


def _reject_flashinfer(spec: AttentionSpec) -> str | None:
    if spec.device_type not in FLASHINFER_DEVICES:
        return f"runs on {' and '.join(FLASHINFER_DEVICES)}, not on {spec.device_type}"
    if (reason := missing("flashinfer", "flashinfer-python")) is not None:
        return reason
    if spec.head_size not in FLASHINFER_HEAD_SIZES:
        *others, last = map(str, FLASHINFER_HEAD_SIZES)
        return f"has heads of {', '.join(others)} and {last} elements, not {spec.head_size}"
    return _reject_dtypes(spec, FLASHINFER_DTYPES)


def _reject_torch_native(spec: AttentionSpec) -> str | None:
    if spec.is_static:
        return "reads lengths on the host, and a static context has none there"
    return _reject_dtypes(spec, _TORCH_DTYPES)


def _reject_torch_static(spec: AttentionSpec) -> str | None:
    return _reject_dtypes(spec, _TORCH_DTYPES)


def _load_triton() -> AttentionForward:
    return cast(AttentionForward, importlib.import_module("..triton.paged_attention", __name__).paged_attention)


def _load_triton_prepare() -> AttentionPrepare:
    return cast(AttentionPrepare, importlib.import_module("..triton.paged_attention", __name__).prepare)


def _load_flashinfer() -> AttentionForward:
    return cast(AttentionForward, importlib.import_module("..flashinfer_attention", __name__).paged_attention)


def _load_flashinfer_refusal() -> RefuseCapture:
    return cast(RefuseCapture, importlib.import_module("..flashinfer_attention", __name__).why_not_captured)


def load_torch_native() -> AttentionForward:
    """Imports it."""
    return cast(AttentionForward, importlib.import_module("..torch_native", __name__).paged_attention)


def load_torch_static() -> AttentionForward:
    """Imports it."""
    return cast(AttentionForward, importlib.import_module("..torch_static", __name__).paged_attention)


IMPLEMENTATIONS: tuple[AttentionImplementation, ...] = (
    AttentionImplementation(
        name="triton",
        why="two kernels, which read every length on the device",
        reject=_reject_triton,
        load=_load_triton,
        captures=True,
        load_prepare=_load_triton_prepare,
    ),
    AttentionImplementation(
        name="flashinfer",
        why="FlashInfer's paged kernels, planned on the host once a step",
        reject=_reject_flashinfer,
        load=_load_flashinfer,
        captures=True,
        load_refusal=_load_flashinfer_refusal,
    ),
    AttentionImplementation(
        name="torch_native",
        backend="torch",
        why="runs on every device, with torch's own operators",
        reject=_reject_torch_native,
        load=load_torch_native,
    ),
    AttentionImplementation(
        name="torch_static",
        backend="torch",
        why="runs on every device, with torch's own operators, and reads every length on the device",
        reject=_reject_torch_static,
        load=load_torch_static,
        captures=True,
    ),
)
"""In the order of preference, unless `preferred` says another one for a call."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Preference:
    """An order for a class of shapes; what is None does not matter."""

    order: tuple[str, ...]
    """Names of rows; the others stay where they are in the table."""
    why: str
    """Where that was measured."""
    is_prompt: bool | None = None
    """Whether requests may have several new tokens, read from the host: not so of a static context."""
    is_static: bool | None = None
    max_num_tokens: int | None = None
    """Rows of q, at most."""
    head_size: int | None = None

    def fits(self, spec: AttentionSpec) -> bool:
        """Whether calls of `spec` are of this class."""
        return (
            self.is_prompt in (None, not (spec.is_static or spec.is_decode))
            and self.is_static in (None, spec.is_static)
            and (self.max_num_tokens is None or spec.num_tokens <= self.max_num_tokens)
            and self.head_size in (None, spec.head_size)
        )


PREFERENCES: tuple[Preference, ...] = (
    Preference(order=("triton", "flashinfer"), why="not measured against each other yet"),
)
"""The first that fits a spec holds: `benchmarks/bench_attention.py` measures what belongs here."""


def preferred(spec: AttentionSpec) -> tuple[str, ...]:
    """Names of implementations in the order in which they are tried for `spec` under attention_backend auto."""
    return next((each.order for each in PREFERENCES if each.fits(spec)), ())


def in_order(table: Sequence[AttentionImplementation], spec: AttentionSpec) -> tuple[AttentionImplementation, ...]:
    """Rows of `table`, those that `preferred` names in its order; all others stay where they are."""
    ranks = {name: rank for rank, name in enumerate(preferred(spec))}
    named = iter(sorted((row for row in table if row.name in ranks), key=lambda row: ranks[row.name]))
    return tuple(next(named) if row.name in ranks else row for row in table)
