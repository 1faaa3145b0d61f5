"""The launches of skinny linears: prepared once for shapes, strides, dtypes and alignments, then launched quickly.

A launch compiles its kernel if it has to, and waits for that. Under `piecework.ops.deferred.defer_compiles` no call
waits for a compile: until the kernel is there, torch's own linear serves.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import weakref
from collections.abc import Hashable
from typing import Any

import torch

from ...errors import KernelNotReadyError
from ..capturing import is_capturing_whole
from ..deferred import Deferred, deferring
from .arrivals import NUM_ARRIVALS, arrivals_of, prepare_arrivals
from .dependent import overlap_options, overlaps_on
from .launch import Call, Grid, Way, addresses_of, has_hooks, is_interpreted, launch_on, quick_launch
from .linear_table import MAX_LOOPED_ROWS, MAX_ROWS, LinearTuning, pick_tuning
from .skinny_linear import multiply_rows, multiply_tiles

_ALIGNMENT = 16
"""Bytes. Addresses that are equal modulo this are of one kind to Triton."""
_CPU_SMS = 4
"""In place of the number of SMs under the interpreter."""

_WAYS: dict[Hashable, Way | None] = {}
"""By `Call.key`: what was compiled, for the process. None: it failed, or has no quick launch; then an ordinary launch
finds what Triton has, or fails in its own words."""

Kind = tuple[torch.device, torch.dtype, tuple[int, ...], tuple[int, ...], int]
"""Device, dtype, shape, strides and address modulo `_ALIGNMENT` of a tensor."""


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class Plan:
    """The launch of a linear for tensors of these kinds."""

    device: torch.device
    dtype: torch.dtype
    out_shape: tuple[int, ...]
    num_rows: int
    has_bias: bool
    activates: bool
    tuning: LinearTuning
    kernel: Any
    grid: Grid
    num_parts: int
    """Elements of float32 that the splits of a sum leave; 0 without splits."""
    numbers: tuple[int | bool, ...]
    """The arguments after the tensors."""
    options: dict[str, int]
    """Of the compiler."""
    is_only_device: bool
    quick: Way | None = None
    """None until it was compiled."""
    is_ahead: bool = False
    """Whether it was looked after what steps of other numbers of rows are to launch."""
    given_to: weakref.ref[Deferred] | None = None
    """In which step the compile was submitted last. Weak: a plan outlives its users."""


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    activates: bool = False,
    tuning: LinearTuning | None = None,
) -> torch.Tensor | None:
    """`x @ weight.T + bias` by one of our kernels, or None where torch's own linear is to do it.

    It is where they do not take these tensors, by shape, strides, dtype or device, and where a kernel would have to be
    compiled in a step that does not wait for that. Accumulates in float32, rounds once; does not wait for the device
    but in a device's first call.

    Args:
        x: [..., in_features] of one to MAX_ROWS rows; [..., 2 * in_features] with `activates`.
        activates: `silu(gate) * up` of x is what is multiplied, rounded to its dtype.
        tuning: instead of the table's.

    Raises:
        KernelNotReadyError: under `defer_compiles`, in a capture: the kernel is not compiled yet.
    """
    kind_of_bias = None if bias is None else _kind(bias)
    plan = _plan_of(_kind(x), _kind(weight), kind_of_bias, activates, tuning)
    if plan is None:
        return None
    if plan.quick is None and (submit := deferring()) is not None and not _is_ready(plan, x, weight, bias, submit):
        if is_capturing_whole() or _is_stream_capturing(x):
            raise KernelNotReadyError(
                "linear: expected its Triton kernel to be compiled before a capture, got one while that is left to "
                "others (defer_compiles); capture again later, or outside of defer_compiles to wait for the compile"
            )
        return None
    quick = plan.quick
    if quick is None or has_hooks() or not (plan.is_only_device or torch.cuda.current_device() == plan.device.index):
        out = _launch(plan, x, weight, bias)
        if quick is None and tuning is None and not plan.is_ahead and not _is_stream_capturing(x):
            _compile_ahead(plan, x, weight, bias)
        return out
    out = torch.empty(plan.out_shape, dtype=plan.dtype, device=plan.device)
    stream = torch._C._cuda_getCurrentRawStream(plan.device.index) if x.is_cuda else 0
    run, middle, _ = quick
    added = weight if bias is None else bias
    at = addresses_of(x, weight, added, out)
    try:
        if plan.num_parts:
            shared = _split_memory(plan, stream)  # held until the launch
            at += addresses_of(*shared)
        run(*plan.grid, stream, *middle, *at, *plan.numbers)
    except TypeError:  # another Triton, whose launcher takes something else
        _forget_quick(plan, x, weight, bias)
        return _launch(plan, x, weight, bias)
    return out


def _kind(tensor: torch.Tensor) -> Kind:
    return tensor.device, tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr() % _ALIGNMENT


@functools.lru_cache(maxsize=4096)
def _plan_of(x: Kind, weight: Kind, bias: Kind | None, activates: bool, tuning: LinearTuning | None) -> Plan | None:
    """The one plan for tensors of these kinds; None where torch's own linear is to multiply them."""
    device, dtype, shape, strides, _ = x
    kinds = [weight] if bias is None else [weight, bias]
    if dtype not in (torch.bfloat16, torch.float16) or any(kind[:2] != (device, dtype) for kind in kinds):
        return None
    if not _serves(device):
        return None
    x_row = _row_stride(shape, strides) if shape else None
    if x_row is None or len(weight[2]) != 2:
        return None
    out_features, in_features = weight[2]
    if shape[-1] != in_features * (2 if activates else 1) or weight[3] != (in_features, 1):
        return None
    if bias is not None and (bias[2], bias[3]) != ((out_features,), (1,)):
        return None
    num_rows = functools.reduce(int.__mul__, shape[:-1], 1)
    tuning = tuning or pick_tuning(num_rows, out_features, in_features, _num_sms(device), activates)
    if tuning is None:
        return None
    plan = _plan(tuning, num_rows, out_features, in_features, x_row, bias is not None, activates, device, dtype)
    plan.out_shape = (*shape[:-1], out_features)
    return plan


def _row_stride(shape: tuple[int, ...], strides: tuple[int, ...]) -> int | None:
    """Elements from one row of [..., elements] to the next; None where that is not one number, or rows have gaps."""
    if strides[-1] != 1 and shape[-1] != 1:
        return None
    rows = [(size, stride) for size, stride in zip(shape[:-1], strides[:-1], strict=True) if size != 1]
    if not rows:
        return shape[-1]
    for (_, outer), (size, inner) in itertools.pairwise(rows):
        if outer != size * inner:
            return None
    return rows[-1][1]


def _plan(
    tuning: LinearTuning,
    num_rows: int,
    out_features: int,
    in_features: int,
    x_row: int,
    has_bias: bool,
    activates: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> Plan:
    num_blocks = -(-out_features // tuning.block_n)
    is_even = in_features % tuning.block_k == 0
    sizes = (out_features, in_features, x_row, num_rows)
    overlaps = overlaps_on(device)
    options = {"num_warps": tuning.num_warps, **overlap_options(overlaps)}
    num_parts = 0
    numbers: tuple[int | bool, ...]
    if tuning.uses_tiles:
        assert not activates
        chunk = tuning.chunk(in_features)
        num_splits = -(-tuning.num_blocks_of_sum(in_features) // chunk)
        is_split = num_splits > 1
        assert not is_split or num_blocks <= NUM_ARRIVALS
        constants = (has_bias, is_split, is_even, tuning.block_n, tuning.block_k, MAX_ROWS)
        numbers = (*sizes, chunk, *constants, is_interpreted(multiply_tiles), overlaps)
        options["num_stages"] = tuning.num_stages
        grid = (num_blocks, num_splits, 1)
        if is_split:
            num_parts = num_splits * num_blocks * tuning.block_n * MAX_ROWS
            prepare_arrivals(device)
    else:
        assert num_rows <= MAX_LOOPED_ROWS
        numbers = (*sizes, has_bias, activates, is_even, tuning.block_n, tuning.block_k, tuning.unroll, overlaps)
        grid = (num_blocks, 1, 1)
    return Plan(
        device=device,
        dtype=dtype,
        out_shape=(num_rows, out_features),
        num_rows=num_rows,
        has_bias=has_bias,
        activates=activates,
        tuning=tuning,
        kernel=multiply_tiles if tuning.uses_tiles else multiply_rows,
        grid=grid,
        num_parts=num_parts,
        numbers=numbers,
        options=options,
        is_only_device=device.type != "cuda" or torch.cuda.device_count() == 1,
    )


def _serves(device: torch.device) -> bool:
    return device.type == "cuda" or is_interpreted(multiply_rows)


@functools.cache
def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return _CPU_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _is_stream_capturing(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _split_memory(plan: Plan, stream: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(parts, arrivals) for a launch on a stream."""
    parts = torch.empty(plan.num_parts, dtype=torch.float32, device=plan.device)
    return parts, arrivals_of(plan.device, stream)


# ---- ordinary launches, and compiles


def _launch(plan: Plan, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Launches the ordinary way; from then on the plan knows the quick one, if there is one."""
    out = torch.empty(plan.out_shape, dtype=plan.dtype, device=plan.device)
    stream = torch._C._cuda_getCurrentRawStream(plan.device.index) if x.is_cuda else 0
    shared = _split_memory(plan, stream) if plan.num_parts else None
    call = _call(plan, x, weight, bias, out, shared)
    with launch_on(plan.kernel, x):
        compiled = call.launch()
    if not is_interpreted(plan.kernel):
        key = call.key
        if key not in _WAYS:
            _WAYS[key] = quick_launch(compiled)
        plan.quick = _WAYS[key]
    return out


def _call(
    plan: Plan,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None = None,
    shared: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Call:
    """The launch; without memory for its results it is for a compile, to which their dtypes are enough."""
    out = _nothing(plan.device, plan.dtype) if out is None else out
    tensors = [x, weight, weight if bias is None else bias, out]
    if plan.tuning.uses_tiles:
        none = (_nothing(plan.device, torch.float32), _nothing(plan.device, torch.int32))
        tensors += none if shared is None else shared
    return Call(plan.kernel, plan.grid, (*tensors, *plan.numbers), plan.options)


@functools.cache
def _nothing(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=device)


def _is_ready(plan: Plan, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, submit: Deferred) -> bool:
    """Whether a launch of the plan has nothing to compile; if it has, `submit` is given that.

    With it, what steps of other numbers of rows are to launch with these weights. Kernels of Triton's interpreter are
    ready.
    """
    if is_interpreted(plan.kernel):
        return True
    key = _call(plan, x, weight, bias).key
    if key in _WAYS:
        plan.quick = _WAYS[key]
        return True
    if plan.given_to is None or plan.given_to() is not submit:
        for each in (plan, *_other_rows(plan, x, weight)):
            call = _call(each, x, weight, bias)
            if (key := call.key) not in _WAYS:
                submit(key, functools.partial(_compile, key, call), ahead=each is not plan)
        plan.given_to = weakref.ref(submit)
    return False


def _compile_ahead(plan: Plan, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Compiles what steps of other numbers of rows are to launch with these weights.

    Whoever waited for one kernel waits for the few others too: the number of rows that are projected to logits is that
    of the requests, whatever was warmed up.
    """
    plan.is_ahead = True
    if is_interpreted(plan.kernel):
        return
    for each in _other_rows(plan, x, weight):
        call = _call(each, x, weight, bias)
        if (key := call.key) not in _WAYS:
            _compile(key, call)


def _other_rows(plan: Plan, x: torch.Tensor, weight: torch.Tensor) -> list[Plan]:
    """Plans that stand for those of steps with other numbers of rows."""
    out_features, in_features = weight.shape
    plans = []
    for num_rows in (*range(1, MAX_LOOPED_ROWS + 1), MAX_ROWS):
        tuning = pick_tuning(num_rows, out_features, in_features, _num_sms(plan.device), plan.activates)
        if num_rows != plan.num_rows and tuning is not None:
            sizes = (num_rows, out_features, in_features, x.shape[-1])
            plans.append(_plan(tuning, *sizes, plan.has_bias, plan.activates, plan.device, plan.dtype))
    return plans


def _compile(key: Hashable, call: Call) -> None:
    """Compiles it and notes its quick launch, or that it failed. Raises: whatever Triton raises, after that."""
    if key not in _WAYS:
        way = None
        try:
            way = call.compile()
        finally:
            _WAYS[key] = way


def _forget_quick(plan: Plan, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """From now on such calls are launched the ordinary way."""
    _WAYS[_call(plan, x, weight, bias).key] = plan.quick = None
