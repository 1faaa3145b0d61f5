"""What Triton compiles for a GPU when steps of all sizes come, found out without one: nothing is launched.

Not collected by its name: `test_triton_kernels.py` runs it in a process of its own, in which Triton takes an H100 or
H200 for its device. The interpreter accepts much that the compiler does not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction, driver

from piecework.ops.deferred import defer_compiles
from piecework.ops.triton import kv_store, launch, layout, paged_attention, plan

from .overlapping import check_waits_first
from .paged_reference import Batch, make_step, static_copy

STEP = Batch(
    requests=[],
    heads=(32, 8),
    head_size=128,
    block_size=16,
    window_size=0,
    padding=0,
    empty_slots=0,
    spare_blocks=0,
    seed=0,
)


class Hopper:
    """As much of a Triton driver as compiling needs."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """One launch: what was compiled for it."""

    name: str
    compiled: Any
    num_arguments: int
    """Of the launch, constants included."""


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[Kernel]:
    """One of each call: launches only compile."""
    found: list[Kernel] = []
    run = JITFunction.run

    def warm_up(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = run(self, *args, grid=grid, warmup=True, **options)
        assert len(compiled.asm["cubin"]) > 1000
        assert len(args) == len(self.arg_names)
        if self.fn.__name__ == "attend_tiles":  # launched the ordinary way
            assert "griddepcontrol" not in compiled.asm["ptx"]
        else:
            check_waits_first(compiled.asm["ptx"])
        found.append(Kernel(name=self.fn.__name__, compiled=compiled, num_arguments=len(args)))

    monkeypatch.setattr(JITFunction, "run", warm_up)
    for module in (kv_store, layout):
        monkeypatch.setattr(module, "overlaps_on", lambda device: True)
    layout.layout_of.cache_clear()
    for module in (kv_store, plan):
        monkeypatch.setattr(module, "launch_on", lambda kernel, tensor: contextlib.nullcontext())
    monkeypatch.setattr(paged_attention, "check_device", lambda kernel, tensor: None)
    driver.set_active(Hopper())  # for the rest of this process: there may be no driver to go back to
    return found


def call(batch: Batch, dtype: torch.dtype, **static: int) -> None:
    step = make_step(batch, dtype)
    context = static_copy(step.context, **static) if static else step.context
    out = torch.empty(step.q.shape, dtype=dtype)
    arguments = (step.q, step.k, step.v, step.k_cache, step.v_cache, out, step.scale, batch.window_size, context)
    paged_attention.paged_attention(*arguments)


def test_steps_of_every_size_share_their_kernels(kernels: list[Kernel]) -> None:
    """A compile within a step would stall it, and within a capture break it. A window is a layer's own constant."""
    for requests in ([(1, 0)], [(1, 6), (1, 3)], [(7, 9)], [(1, 200)] * 16, [(1, 40)] * 33):
        for window_size in (0, 1, 16):
            batch = dataclasses.replace(STEP, requests=requests, window_size=window_size)
            call(batch, torch.bfloat16)
            call(batch, torch.bfloat16, empty_slots=3, spare_blocks=1)
            call(batch, torch.bfloat16, empty_slots=40)
    different = {(kernel.name, kernel.compiled.hash) for kernel in kernels}
    assert sorted(name for name, _ in different) == ["attend_rows", "attend_tiles", "attend_tiles", "store_rows"]


@pytest.mark.parametrize(
    ("dtype", "heads", "head_size"),
    [
        (torch.bfloat16, (8, 8), 64),
        (torch.bfloat16, (32, 8), 128),
        (torch.float16, (7, 1), 80),
        (torch.bfloat16, (64, 2), 128),
        (torch.bfloat16, (8, 1), 256),
        (torch.bfloat16, (64, 2), 512),
        (torch.float32, (8, 8), 80),
        (torch.float32, (64, 2), 128),
        (torch.float32, (4, 2), 512),
    ],
    ids=str,
)
def test_every_shape_fits(
    dtype: torch.dtype, heads: tuple[int, int], head_size: int, kernels: list[Kernel], tmp_path: Path
) -> None:
    """A program has 227 KiB of shared memory at most; registers that spill cost bandwidth."""
    batch = dataclasses.replace(STEP, requests=[(2, 3)], heads=heads, head_size=head_size)
    call(batch, dtype)
    call(batch, dtype, empty_slots=3)
    assert [kernel.name for kernel in kernels] == ["store_rows", "attend_tiles", "store_rows", "attend_rows"]
    for kernel in kernels[1:]:
        assert kernel.compiled.metadata.shared <= 227 * 1024
        # On tensor cores up to heads of 256; float32 and what is larger only has to run.
        is_fast = dtype != torch.float32 and head_size <= 256
        assert spilled_bytes(kernel.compiled.asm["ptx"], tmp_path) <= (0 if is_fast else 1024)
        assert ("mma" in kernel.compiled.asm["ptx"]) == (dtype != torch.float32 and kernel.name != "store_rows")


def spilled_bytes(ptx: str, folder: Path) -> int:
    (folder / "kernel.ptx").write_text(ptx)
    command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", "kernel.ptx", "-o", "kernel.cubin"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    found = re.search(r"(\d+) bytes spill stores", done.stderr)
    assert found is not None, done.stderr
    return int(found[1])


def test_rows_are_read_in_whole_vectors(kernels: list[Kernel]) -> None:
    """16 bytes a thread at once, from the cache to shared memory while the tile before is computed."""
    batch = dataclasses.replace(STEP, requests=[(2, 3)])
    call(batch, torch.bfloat16)
    call(batch, torch.bfloat16, empty_slots=3)
    for kernel in kernels:
        ptx = kernel.compiled.asm["ptx"]
        if kernel.name == "store_rows":
            assert "ld.global.v4" in ptx
            assert "st.global.v4" in ptx
        else:
            assert re.search(r"cp\.async\.cg\.shared\.global \[.*\], \[.*\], 0x10", ptx)
            assert ("wgmma" in ptx) == (kernel.name == "attend_tiles")


def test_the_last_split_sees_what_the_others_wrote(kernels: list[Kernel]) -> None:
    """All threads have written before one of them counts; the parts are read past the L1 cache."""
    call(dataclasses.replace(STEP, requests=[(1, 3)]), torch.bfloat16)
    [ptx] = [kernel.compiled.asm["ptx"] for kernel in kernels if kernel.name == "attend_rows"]
    before, after = ptx.split("atom.global.gpu.acq_rel", 1)
    assert "st.global" not in before[before.rindex("bar.sync") :]
    assert "ld.global.cg" in after
    assert "bar.sync" in after[: after.index("ld.global.cg")]


def test_what_is_compiled_has_what_a_quick_launch_needs(kernels: list[Kernel], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a driver nothing can be loaded: in its place a launcher that notes what it gets."""
    call(dataclasses.replace(STEP, requests=[(1, 3)]), torch.bfloat16)
    for kernel in kernels:
        # Set by `run` when it loads the kernel for its first launch.
        kernel.compiled._run, kernel.compiled.function = (lambda *args: args), 1 << 40
        way = launch.quick_launch(kernel.compiled)
        assert way is not None
        launched = way[0](1, 1, 1, 0, *way[1], *range(kernel.num_arguments))
        assert launched[4] == 1 << 40
        assert launched[5] == kernel.compiled.packed_metadata
        assert launched[6:9] == (None, None, None)
        assert kernel.num_arguments == len(kernel.compiled.src.signature)


# ---- compiled in another thread


SIZES = ([(1, 0)], [(1, 6), (1, 3)], [(7, 9)], [(1, 200)] * 16, [(1, 40)] * 33)


def test_calls_of_one_key_are_one_kernel(kernels: list[Kernel], monkeypatch: pytest.MonkeyPatch) -> None:
    """And calls of several keys are several, so that nothing is compiled twice."""
    found: dict[Any, set[Any]] = {}

    def compile(call: launch.Call) -> Any:
        call.launch()
        found.setdefault(call.key, set()).add((kernels[-1].name, kernels[-1].compiled.hash))

    monkeypatch.setattr(launch.Call, "compile", compile)
    monkeypatch.setattr(plan, "_WAYS", {})
    layout.layout_of.cache_clear()
    for requests in SIZES:
        for changes in ({}, {"window_size": 16}, {"head_size": 120}):
            for static in ({}, {"empty_slots": 3, "spare_blocks": 1}):
                with defer_compiles(lambda key, compile: (compile(), plan._WAYS.clear())):
                    call(dataclasses.replace(STEP, requests=requests, **changes), torch.bfloat16, **static)
    assert all(len(hashes) == 1 for hashes in found.values())
    hashes = [next(iter(each)) for each in found.values()]
    assert len(set(hashes)) == len(hashes)
    # Of 128: a store, tiles, tiles with a window, rows with and without an SM for each. Of 120: all but the window.
    assert len(hashes) == 9


def test_what_is_compiled_ahead_is_what_a_launch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that Triton does but to load and to launch: after one prompt, steps of no other size compile anything."""
    compiles: list[str] = []
    launches: list[tuple[Any, ...]] = []
    do_compile = JITFunction._do_compile

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        compiles.append(self.fn.__name__)
        return do_compile(self, *args, **options)

    def load(self: Any) -> None:
        self.module, self.function, self._run = 1, 1 << 40, lambda *args: launches.append(args)

    monkeypatch.setattr(JITFunction, "_do_compile", counted)
    monkeypatch.setattr(CompiledKernel, "_init_handles", load)
    for module in (kv_store, plan, launch):
        monkeypatch.setattr(module, "launch_on", lambda kernel, tensor: contextlib.nullcontext())
    monkeypatch.setattr(paged_attention, "check_device", lambda kernel, tensor: None)
    monkeypatch.setattr(plan, "_WAYS", {})
    driver.set_active(Hopper())
    for kernel in (plan.store_rows, plan.attend_rows, plan.attend_tiles):
        kernel.device_caches.clear()
    layout.layout_of.cache_clear()

    submitted: dict[Any, Any] = {}
    with defer_compiles(submitted.setdefault):
        call(dataclasses.replace(STEP, requests=[(7, 9)]), torch.bfloat16)
        assert compiles == launches == []
        for compile in submitted.values():
            compile()
        assert sorted(compiles) == ["attend_rows", "attend_rows", "attend_tiles", "store_rows"]
        assert launches == []
        submitted.clear()
        for requests in SIZES:
            call(dataclasses.replace(STEP, requests=requests), torch.bfloat16)
            call(dataclasses.replace(STEP, requests=requests), torch.bfloat16, empty_slots=3, spare_blocks=1)
    assert submitted == {}
    assert len(launches) == 4 * len(SIZES)
    assert all(isinstance(argument, int | float) for each in launches for argument in each[9:]), "they were quick"
    launches.clear()
    layout.layout_of.cache_clear()
    for requests in SIZES:  # the ordinary way, as where nothing is deferred: Triton has them too
        call(dataclasses.replace(STEP, requests=requests), torch.bfloat16)
        assert isinstance(launches[-1][9], torch.Tensor)
    assert len(compiles) == 4
