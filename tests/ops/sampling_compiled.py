"""What Triton compiles of the kernel that draws tokens for a GPU, found out without one: nothing is launched.

Not collected by its name: `test_sampling.py` runs it in a process of its own, in which Triton takes an H100 or H200 for
its device.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from piecework.ops.deferred import defer_compiles
from piecework.ops.sampling import sample
from piecework.ops.triton import launch, sampling

from .sampling_reference import columns


class Hopper:
    """As much of a Triton driver as compiling needs."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab_size", [128256, 151669])
def test_it_compiles_and_reads_ahead_in_whole_vectors(dtype: torch.dtype, vocab_size: int) -> None:
    driver.set_active(Hopper())  # for the rest of this process: there may be no driver to go back to
    column = torch.empty(2, dtype=torch.float64)
    out = torch.empty(2, dtype=torch.int64)
    stride = -(-vocab_size // 16) * 16
    arguments = (torch.empty(2, stride, dtype=dtype), column, column, column, column, out, vocab_size, stride)
    options = {"block": sampling._BLOCK, "stages": sampling._STAGES, "num_warps": sampling._WARPS}
    compiled = sampling.draw_rows.warmup(*arguments, grid=(2, 1, 1), **options)
    assert len(compiled.asm["cubin"]) > 1000
    assert compiled.metadata.shared <= 227 * 1024
    copied = re.findall(r"cp\.async\.c[ag]\.shared\.global \[.*?\], \[.*?\], (0x[0-9a-f]+)", compiled.asm["ptx"])
    if vocab_size % 16:  # masked element by element
        assert "ld.global" in compiled.asm["ptx"] or copied
    else:
        assert {int(size, 0) for size in copied} == {16}


def test_a_step_that_waits_for_nothing_draws_without_the_kernel_until_it_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the number of rows, and wherever the columns begin: one compile serves them all."""
    driver.set_active(Hopper())
    monkeypatch.setattr(launch, "check_device", lambda kernel, tensor: None)
    monkeypatch.setattr(sampling, "_COMPILED", set())
    launched: list[int] = []
    monkeypatch.setattr(launch.Call, "launch", lambda call: launched.append(len(call.arguments[0])))
    compiled: list[str] = []
    warmup = JITFunction.warmup

    def noted(self: JITFunction, *arguments: object, **options: object) -> object:
        compiled.append(self.fn.__name__)
        return warmup(self, *arguments, **options)

    monkeypatch.setattr(JITFunction, "warmup", noted)
    monkeypatch.setattr(launch, "quick_launch", lambda compiled: None)
    submitted: dict[Hashable, Callable[[], None]] = {}
    logits = torch.randn(5, 64)
    rows = columns(*[(0.5, 1.0, 3, 0.9)] * 5)
    [kernel] = sample.kernels
    with defer_compiles(submitted.setdefault):
        for num_rows in (5, 4, 3):
            arguments = (logits[:num_rows], *(column[-num_rows:] for column in rows))
            assert torch.equal(kernel.body(*arguments), sample.native(*arguments))
    assert (launched, compiled, len(submitted)) == ([], [], 1)
    for compile_it in submitted.values():
        compile_it()
    assert compiled == ["draw_rows"]
    with defer_compiles(submitted.setdefault):
        kernel.body(logits[:2], *(column[:2] for column in rows))
    assert (launched, len(submitted)) == ([2], 1)


def test_a_compile_that_failed_is_made_again_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    driver.set_active(Hopper())
    monkeypatch.setattr(launch, "check_device", lambda kernel, tensor: None)
    monkeypatch.setattr(sampling, "_COMPILED", set())

    def broken(call: launch.Call) -> None:
        raise RuntimeError("ptxas")

    monkeypatch.setattr(launch.Call, "compile", broken)
    monkeypatch.setattr(launch.Call, "launch", broken)
    submitted: dict[Hashable, Callable[[], None]] = {}
    arguments = (torch.randn(2, 64), *columns(*[(0.5, 1.0, 3, 0.9)] * 2))
    with defer_compiles(submitted.setdefault):
        sampling.sample_rows(*arguments)
        [compile_it] = submitted.values()
        with pytest.raises(RuntimeError, match="ptxas"):
            compile_it()
        with pytest.raises(RuntimeError, match="ptxas"):
            sampling.sample_rows(*arguments)
