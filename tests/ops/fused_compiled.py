"""What Triton compiles of norms, activations and rotary embeddings for a GPU, found out without one.

Not collected by its name: `test_implementations.py` runs it in a process of its own, in which Triton takes an H100 or
H200 for its device. The interpreter accepts much that the compiler does not.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime import JITFunction, driver

from piecework.ops.triton import activation, launch, norm, operators, rotary

from .overlapping import check_waits_first

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5


class Hopper:
    """As much of a Triton driver as compiling needs."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was compiled, one of each launch: launches only compile."""
    found: list[Any] = []
    run = JITFunction.run

    def warm_up(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        assert len(kernel.asm["cubin"]) > 1000
        assert len(args) == len(self.arg_names) == len(kernel.src.signature)
        check_waits_first(kernel.asm["ptx"])
        found.append(kernel)

    monkeypatch.setattr(JITFunction, "run", warm_up)
    monkeypatch.setattr(operators, "launch_on", lambda kernel, tensor: contextlib.nullcontext())
    monkeypatch.setattr(operators, "overlaps_on", lambda device: True)
    driver.set_active(Hopper())  # for the rest of this process: there may be no driver to go back to
    return found


def norms(num_rows: int, size: int, dtype: torch.dtype, variance_size: int | None = None) -> None:
    x, weight = torch.empty(num_rows, size, dtype=dtype), torch.empty(size, dtype=dtype)
    norm.rms_norm(x, weight, EPS, variance_size)
    norm.fused_add_rms_norm(x, x, weight, EPS, variance_size)


def silu(num_rows: int, size: int, dtype: torch.dtype) -> None:
    activation.silu_and_mul(torch.empty(num_rows, 2 * size, dtype=dtype))


def turns(num_tokens: int, head_size: int, dtype: torch.dtype, rotary_size: int | None = None) -> None:
    rows = torch.empty(num_tokens, 48, head_size, dtype=dtype)
    q, k, _ = rows.split([32, 8, 8], dim=1)
    cos = torch.empty(num_tokens, (rotary_size or head_size) // 2, dtype=dtype)
    weight = torch.empty(head_size, dtype=dtype)
    rotary.rotary_embedding(q, k, cos, cos)
    rotary.qk_norm_rotary(q, k, weight, weight, cos, cos, EPS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 4096])
def test_every_dtype_and_number_of_rows(num_rows: int, dtype: torch.dtype, compiled: list[Any], tmp_path: Path) -> None:
    """No registers spill where a row fits a program; 16 bytes a thread are moved at once."""
    norms(num_rows, 4096, dtype)
    norms(num_rows, 128, dtype)
    norms(num_rows, 16384, dtype)
    silu(num_rows, 14336, dtype)
    turns(num_rows, 128, dtype)
    assert len(compiled) == 9
    for kernel in compiled:
        ptx = kernel.asm["ptx"]
        # Double numbers take two registers, and only have to run.
        assert spilled_bytes(ptx, tmp_path) <= (0 if dtype != torch.float64 else 1024)
        if num_rows > 1:
            width = "v4" if dtype.itemsize < 8 else "v2"
            assert f"ld.global.{width}" in ptx
            assert f"st.global.{width}" in ptx


@pytest.mark.parametrize(
    "call",
    [
        lambda: norms(3, 20000, torch.bfloat16),
        lambda: norms(3, 1037, torch.bfloat16, 1000),
        lambda: norms(3, 20000, torch.float32, 100),
        lambda: silu(3, 1037, torch.float16),
        lambda: turns(3, 80, torch.bfloat16, 20),
        lambda: turns(3, 64, torch.float32, 32),
    ],
)
def test_unusual_sizes(call: Callable[[], None], compiled: list[Any]) -> None:
    call()
    assert compiled


def spilled_bytes(ptx: str, folder: Path) -> int:
    (folder / "kernel.ptx").write_text(ptx)
    command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", "kernel.ptx", "-o", "kernel.cubin"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    found = re.search(r"(\d+) bytes spill stores", done.stderr)
    assert found is not None, done.stderr
    return int(found[1])


def test_numbers_of_rows_share_their_kernels(compiled: list[Any]) -> None:
    """A compile within a step would stall it, and within a capture break it."""
    # Two norms, an activation, two rotations; of many rows all others but the activation, whose rows are short.
    for num_kernels, few_or_many in ((5, (1, 2, 7, 16)), (9, (2000, 2001, 4096, 1 << 14))):
        for num_rows in few_or_many:
            for call in (norms, silu, turns):
                call(num_rows, 128, torch.bfloat16)
        assert len({kernel.hash for kernel in compiled}) == num_kernels


def test_what_is_compiled_has_what_a_quick_launch_needs(compiled: list[Any]) -> None:
    """Without a driver nothing can be loaded: in its place a launcher that notes what it gets."""
    turns(1, 128, torch.bfloat16)
    for kernel in compiled:
        # Set by `run` when it loads the kernel for its first launch.
        kernel._run, kernel.function = (lambda *args: args), 1 << 40
        way = launch.quick_launch(kernel)
        assert way is not None
        launched = way[0](1, 1, 1, 0, *way[1], *range(len(kernel.src.signature)))
        assert launched[4] == 1 << 40
        assert launched[6:9] == (None, None, None)
