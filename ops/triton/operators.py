"""How an operator of one kernel launches it: with little Python, and waiting for no compile where nothing may wait."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

from ...errors import InputError, KernelNotReadyError
from ..capturing import is_capturing_whole
from ..deferred import deferring
from .dependent import overlap_options, overlaps_on
from .launch import Call, Grid, Launch, Way, addresses_of, has_hooks, is_interpreted, launch_on, quick_launch

_MAX_WAYS = 4096
"""Kinds of launches that a launcher remembers; past that it forgets them, and Triton finds what it compiled again."""


class _Quick(NamedTuple):
    run: Launch
    middle: tuple[Any, ...]
    holds: Any
    """The compiled kernel, which a Triton unloads when nobody holds it."""
    is_only_device: bool
    last: tuple[bool, ...]
    """Constants behind those of the call."""


class Launcher:
    """Launches one JIT function, whose parameters are in this order: tensors, `num_rows`, numbers, constants.

    The function must not specialise on `num_rows`, so that a launch of another number of rows is of the same kind.
    With `overlaps` it has a last constant, `overlaps`, and keeps the rule of `piecework.ops.triton.dependent`.
    """

    def __init__(self, kernel: Any, *, overlaps: bool = False) -> None:
        self.kernel = kernel
        self.overlaps = overlaps
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
            tensors: all on one device; the quick launch would read any address.
            numbers: strides and the like, of few different values.

        Raises:
            InputError: the tensors are on several devices.
            KernelNotReadyError: under `defer_compiles`, in a capture: the kernel is not compiled yet.
            NotAvailableError: the tensors are on no GPU, and this is not Triton's interpreter.
        """
        addresses = addresses_of(*tensors)
        devices = tuple(map(torch.Tensor.get_device, tensors))
        device = devices[0]
        kind = (
            devices,
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
                arguments = (*addresses, num_rows, *numbers, *constants, *quick.last)
                quick.run(num_programs, 1, 1, stream, *quick.middle, *arguments)
                return True
            except TypeError:  # another Triton, whose launcher takes something else
                self._ways[kind] = None
        if len(every := {str(tensor.device) for tensor in tensors}) > 1:
            raise InputError(
                f"{self.kernel.fn.__name__}: expected all tensors on one device, got {', '.join(sorted(every))}; "
                f"move them to one"
            )
        grid: Grid = (num_programs, 1, 1)
        options: dict[str, int] = {"num_warps": num_warps}
        last: tuple[bool, ...] = ()
        if self.overlaps:
            last = (overlaps_on(tensors[0].device),)
            options |= overlap_options(*last)
        call = Call(self.kernel, grid, (*tensors, num_rows, *numbers, *constants, *last), options)
        if kind not in self._ways and not is_interpreted(self.kernel):
            submit = deferring()
            if submit is not None:
                if is_capturing_whole() or (tensors[0].is_cuda and torch.cuda.is_current_stream_capturing()):
                    raise KernelNotReadyError(
                        f"{self.kernel.fn.__name__}: expected this Triton kernel to be compiled before a capture, got "
                        f"one while that is left to others (defer_compiles); capture again later, or outside of "
                        f"defer_compiles to wait for the compile"
                    )
                submit((self.kernel.fn, kind), functools.partial(self._compile, kind, call, last))
                return False
        with launch_on(self.kernel, tensors[0]):
            compiled = call.launch()
        if kind not in self._ways and not is_interpreted(self.kernel):
            self._note(kind, quick_launch(compiled), last)
        return True

    def _compile(self, kind: Hashable, call: Call, last: tuple[bool, ...]) -> None:
        """Compiles, and notes the quick launch or that it failed. Raises: whatever Triton raises, after that."""
        if kind not in self._ways:
            way = None
            try:
                way = call.compile()
            finally:
                self._note(kind, way, last)

    def _note(self, kind: Hashable, way: Way | None, last: tuple[bool, ...]) -> None:
        if len(self._ways) >= _MAX_WAYS:
            self._ways.clear()
        self._ways[kind] = None if way is None else _Quick(*way, torch.cuda.device_count() == 1, last)


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
