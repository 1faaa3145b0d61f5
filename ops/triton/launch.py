"""Where a Triton kernel may be launched, and on which device."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton

from ...errors import NotAvailableError


def launch_on(kernel: Any, tensor: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """Makes the device of `tensor` the current one, on which Triton launches.

    Raises:
        NotAvailableError: it is no GPU, and the kernel was not made for Triton's interpreter.
    """
    if tensor.is_cuda:
        guard: contextlib.AbstractContextManager[None] = torch.cuda.device(tensor.device)
        return guard
    if isinstance(kernel, triton.runtime.JITFunction):
        raise NotAvailableError(
            f"triton kernels: expected tensors on a GPU, got {tensor.device}; move them there, or set "
            f"TRITON_INTERPRET=1 before the process imports triton to run them, slowly, on the CPU"
        )
    return contextlib.nullcontext()
