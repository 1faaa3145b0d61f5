"""How an operator of one kernel launches it: with little Python, and waiting for no compile where nothing may wait."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from ...errors import KernelNotReadyError
from ..capturing import is_capturing_whole
from ..deferred import deferring
from .launch import Call, Grid, Launch, addresses_of, has_hooks, is_interpreted, launch_on, quick_launch

_MAX_WAYS = 4096
"""Kinds of launches that a launcher remembers; past that it forgets them, and Triton finds what it compiled again."""


class _Quick(NamedTuple):
    run: Launch
    middle: tuple[Any, ...]
    holds: Any
    """The compiled kernel, which a Triton unloads when nobody holds it."""
    is_only_device: bool


class Launcher:
    """Launches one JIT function, whose parameters are in this order: tensors, `num_rows`, numbers, constants.

    The function must not specialise on `num_rows`, so that a launch of another number of rows is of the same kind.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._ways: dict[Hashable, _Quick | None] = {}
        """By kind; None: it has no quick launch, or its compile failed. An ordinary launch then says why."""

    def launch(
        self,
        tensors: tuple[torch.Tensor, ...],
        num_rows: int,
        numbers: tuple[int, ...],
        constants: tuple[int | float, ...],
        *,
        num_programs: int,
        num_warps: int,
    ) -> bool:
        """Launches `num_programs` programs; False: nothing was launched, since a compile must not be waited for here.

        Args:
            tensors: all on one device.
            numbers: strides and the like, of few different values.

        Raises:
            KernelNotReadyError: under `defer_compiles`, in a capture: the kernel is not compiled yet.
            NotAvailableError: the tensors are on no GPU, and this is not Triton's interpreter.
        """
        addresses = addresses_of(*tensors)
        device = tensors[0].get_device()
        kind = (
            device,
            num_warps,
            num_rows >> 31,  # it takes 64 bits
            numbers,
            constants,
            tuple([tensor.dtype for tensor in tensors]),
            tuple([address % 16 == 0 for address in addresses]),
        )
        quick = self._ways.get(kind)
        if quick is not None and not has_hooks() and (quick.is_only_device or torch.cuda.current_device() == device):
            stream = torch._C._cuda_getCurrentRawStream(device)
            try:
                quick.run(num_programs, 1, 1, stream, *quick.middle, *addresses, num_rows, *numbers, *constants)
                return True
            except TypeError:  # another Triton, whose launcher takes something else
                self._ways[kind] = None
        grid: Grid = (num_programs, 1, 1)
        call = Call(self.kernel, grid, (*tensors, num_rows, *numbers, *constants), {"num_warps": num_warps})
        if kind not in self._ways and not is_interpreted(self.kernel):
            submit = deferring()
            if submit is not None:
                if is_capturing_whole() or (tensors[0].is_cuda and torch.cuda.is_current_stream_capturing()):
                    raise KernelNotReadyError(
                        f"{self.kernel.fn.__name__}: expected this Triton kernel to be compiled before a capture, got "
                        f"one while that is left to others (defer_compiles); capture again later, or outside of "
                        f"defer_compiles to wait for the compile"
                    )
                submit((self.kernel.fn, kind), functools.partial(self._compile, kind, call))
                return False
        with launch_on(self.kernel, tensors[0]):
            compiled = call.launch()
        if kind not in self._ways and not is_interpreted(self.kernel):
            self._note(kind, quick_launch(compiled))
        return True

    def _compile(self, kind: Hashable, call: Call) -> None:
        """Compiles, and notes the quick launch or that it failed. Raises: whatever Triton raises, after that."""
        if kind not in self._ways:
            way = None
            try:
                way = call.compile()
            finally:
                self._note(kind, way)

    def _note(self, kind: Hashable, way: tuple[Launch, tuple[Any, ...], Any] | None) -> None:
        if len(self._ways) >= _MAX_WAYS:
            self._ways.clear()
        self._ways[kind] = None if way is None else _Quick(*way, torch.cuda.device_count() == 1)


class Rows(NamedTuple):
    """[..., size] as rows whose last dim is contiguous: row `i` begins at
    `(i // inner) * outer_stride + (i % inner) * inner_stride`."""

    tensor: torch.Tensor
    strides: tuple[int, int, int]
    """`inner`, `outer_stride`, `inner_stride`; the numbers of a kernel."""


def rows_of(x: torch.Tensor) -> Rows:
    """x: [..., size], with one dim or more. A copy where its rows do not lie in such an order."""
    size = x.shape[-1]
    if x.is_contiguous():
        return Rows(x, (1, size, 0))
    if x.stride(-1) != 1 and size > 1:
        return Rows(x.contiguous(), (1, size, 0))
    dims: list[tuple[int, int]] = []
    for length, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if length == 1:
            continue
        if dims and dims[-1][1] == length * stride:
            dims[-1] = (dims[-1][0] * length, stride)
        else:
            dims.append((length, stride))
    if len(dims) > 2:
        return Rows(x.contiguous(), (1, size, 0))
    if len(dims) == 2:
        return Rows(x, (dims[1][0], dims[0][1], dims[1][1]))
    return Rows(x, (1, dims[0][1] if dims else size, 0))


def power_of_2(number: int) -> int:
    """The least power of two that is `number` or more, and at least 1."""
    return 1 << max(number - 1, 0).bit_length()
