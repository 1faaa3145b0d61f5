"""What Triton compiles of the kernels that draw tokens for a GPU, found out without one: nothing is launched.

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

from piecework.errors import KernelNotReadyError
from piecework.ops.capturing import capturing_whole
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


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers that know no kernel yet, on a GPU that only compiles."""
    driver.set_active(Hopper())  # for the rest of this process: there may be no driver to go back to
    monkeypatch.setattr(launch, "check_device", lambda kernel, tensor: None)
    for launcher in LAUNCHERS:
        monkeypatch.setattr(launcher, "_ways", {})


LAUNCHERS = (sampling._PEAKS, sampling._TALLY, sampling._GATHER, sampling._PICK)
NAMES = ["draw_rows_peaks", "draw_rows_tally", "draw_rows_gather", "draw_rows_pick"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 128256, 151669])
def test_they_compile_and_read_in_whole_vectors(dtype: torch.dtype, vocab_size: int) -> None:
    logits = torch.empty(2, -(-vocab_size // 16) * 16, dtype=dtype)[:, :vocab_size]
    row_columns = [torch.empty(2, dtype=torch.float64)] * 4
    for step in sampling._steps(logits, row_columns, torch.empty(2, dtype=torch.int64)):
        kernel = step.launcher.kernel
        arguments = (*step.tensors, 2, vocab_size, logits.stride(0), *step.constants)
        compiled = kernel.warmup(*arguments, grid=(2, 1, 1), num_warps=step.num_warps)
        assert len(compiled.asm["cubin"]) > 1000
        assert compiled.metadata.shared <= 227 * 1024
        if vocab_size % 16 == 0 and kernel is not sampling._PICK.kernel:  # else masked element by element
            assert re.search(r"ld\.global\.(L1::evict_\w+\.)?v[48]\.b(16|32)", compiled.asm["ptx"])


def test_a_step_that_waits_for_nothing_draws_without_the_kernels_until_all_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the number of rows: one compile of each serves them all."""
    launched: list[tuple[str, int]] = []

    def note(call: launch.Call) -> object:
        launched.append((call.kernel.fn.__name__, call.grid[0]))
        return object()

    monkeypatch.setattr(launch.Call, "launch", note)
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
    assert (launched, compiled, len(submitted)) == ([], [], 4)
    with (
        capturing_whole(),
        defer_compiles(submitted.setdefault),
        pytest.raises(KernelNotReadyError, match="draw_rows_peaks: expected this Triton kernel to be compiled before"),
    ):
        kernel.body(*arguments)  # for ever, its replays would sort
    *others, last = submitted.values()
    for compile_it in others:
        compile_it()
    with defer_compiles(submitted.setdefault):
        assert torch.equal(kernel.body(*arguments), sample.native(*arguments))
    assert [(name, num_programs) for name, num_programs in launched if num_programs] == []
    last()
    assert compiled == NAMES
    launched.clear()
    with capturing_whole(), defer_compiles(submitted.setdefault):
        kernel.body(logits[:2], *(column[:2] for column in rows))
    assert [one for one in launched if one[1]] == [(name, 2) for name in NAMES]
    assert len(submitted) == 4


def test_a_compile_that_failed_is_made_again_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(call: launch.Call) -> None:
        raise RuntimeError("ptxas")

    monkeypatch.setattr(launch.Call, "compile", broken)
    monkeypatch.setattr(launch.Call, "launch", broken)
    submitted: dict[Hashable, Callable[[], None]] = {}
    arguments = (torch.randn(2, 64), *columns(*[(0.5, 1.0, 3, 0.9)] * 2))
    with defer_compiles(submitted.setdefault):
        sampling.sample_rows(*arguments)
        for compile_it in submitted.values():
            with pytest.raises(RuntimeError, match="ptxas"):
                compile_it()
        with pytest.raises(RuntimeError, match="ptxas"):
            sampling.sample_rows(*arguments)
