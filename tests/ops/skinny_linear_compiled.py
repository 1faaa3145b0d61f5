"""What Triton compiles of the skinny linear's kernels for a GPU, found out without one: nothing is launched.

Not collected by its name: `test_linear.py` runs it in a process of its own, in which Triton takes an H100 or H200 for
its device. The interpreter accepts much that the compiler does not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction, driver

from piecework.errors import KernelNotReadyError
from piecework.ops.capturing import capturing_whole
from piecework.ops.deferred import awaited, defer_compiles
from piecework.ops.linear import skinny_linear
from piecework.ops.triton import launch, linear_plan
from piecework.ops.triton.linear_table import LinearTuning

from .overlapping import check_waits_first

LLAMA = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)]


class Hopper:
    """As much of a Triton driver as compiling needs."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class World:
    """What was compiled, and what was launched."""

    compiles: list[tuple[str, Any]]
    launches: list[tuple[Any, ...]]

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.compiles]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Kernels compile, are not loaded, and note what they are launched with."""
    world = World(compiles=[], launches=[])
    compile: Callable[..., Any] = JITFunction._do_compile

    def noted(self: Any, *args: Any, **options: Any) -> Any:
        compiled = compile(self, *args, **options)
        world.compiles.append((self.fn.__name__, compiled))
        return compiled

    def load(self: Any) -> None:
        self.module, self.function, self._run = 1, 1 << 40, lambda *args: world.launches.append(args)

    monkeypatch.setattr(JITFunction, "_do_compile", noted)
    monkeypatch.setattr(CompiledKernel, "_init_handles", load)
    for module in (linear_plan, launch):
        monkeypatch.setattr(module, "launch_on", lambda kernel, tensor: contextlib.nullcontext())
    plain = linear_plan.is_interpreted
    # The tensors are on the CPU: plans are made for those of the interpreter, and launched as those of a GPU.
    monkeypatch.setattr(linear_plan, "_serves", lambda device: True)
    monkeypatch.setattr(linear_plan, "_num_sms", lambda device: 132)
    monkeypatch.setattr(linear_plan, "overlaps_on", lambda device: True)
    monkeypatch.setattr(linear_plan, "_WAYS", {})
    assert not plain(linear_plan.multiply_rows)
    driver.set_active(Hopper())  # for the rest of this process: there may be no driver to go back to
    for kernel in (linear_plan.multiply_rows, linear_plan.multiply_tiles):
        kernel.device_caches.clear()
    linear_plan._plan_of.cache_clear()
    return world


def weights(out_features: int, in_features: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """As large as it says, of memory that nobody touches."""
    return torch.empty(out_features, in_features, dtype=dtype)


def call(num_rows: int, weight: torch.Tensor, *, bias: bool = False, activates: bool = False, **how: Any) -> bool:
    out_features, in_features = weight.shape
    x = torch.empty(num_rows, in_features * (2 if activates else 1), dtype=weight.dtype)
    added = torch.empty(out_features, dtype=weight.dtype) if bias else None
    return linear_plan.multiply(x, weight, added, activates=activates, **how) is not None


def spilled_bytes(ptx: str, folder: Path) -> int:
    (folder / "kernel.ptx").write_text(ptx)
    command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", "kernel.ptx", "-o", "kernel.cubin"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    found = re.search(r"(\d+) bytes spill stores", done.stderr)
    assert found is not None, done.stderr
    return int(found[1])


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 16])
@pytest.mark.parametrize("activates", [False, True])
def test_a_model_of_even_sizes_has_few_kernels(
    num_rows: int, activates: bool, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop is for short sums or long ones; tiles are with the sum split or not, or many. No registers spill."""
    monkeypatch.setattr(linear_plan, "_compile_ahead", lambda *arguments: None)
    for sizes in LLAMA:
        assert call(num_rows, weights(*sizes), activates=activates) == (not activates or num_rows <= 3)
    if num_rows == 1:
        assert world.names == ["multiply_rows"] * 2
    elif not activates:
        assert world.names == ["multiply_tiles"] * 3
    elif num_rows <= 3:
        assert world.names == ["multiply_rows"]
    for name, compiled in world.compiles:
        assert spilled_bytes(compiled.asm["ptx"], tmp_path) == 0
        assert compiled.metadata.shared <= 227 * 1024
        ptx = compiled.asm["ptx"]
        check_waits_first(ptx)
        if name == "multiply_rows":  # 16 bytes of weights a thread at once, which leave the cache first
            assert re.search(r"ld\.global\S*\.v4", ptx)
            assert "evict_first" in ptx
        else:
            assert "wgmma" in ptx
            assert re.search(r"cp\.async\.cg\.shared\.global", ptx)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", [(70, 100), (5, 3000), (1, 1), (17, 33), (4096, 1000)], ids=str)
@pytest.mark.parametrize("num_rows", [1, 3, 7])
def test_odd_sizes_compile(num_rows: int, sizes: tuple[int, int], dtype: torch.dtype, world: World) -> None:
    assert call(num_rows, weights(*sizes, dtype), bias=True)
    assert sorted(world.names) == ["multiply_rows", "multiply_tiles"], "those of other rows too"


@pytest.mark.parametrize(
    "tuning",
    [
        LinearTuning(uses_tiles=False, block_n=4, block_k=1024, num_warps=4, unroll=2),
        LinearTuning(uses_tiles=False, block_n=1, block_k=2048, num_warps=8, unroll=4),
        LinearTuning(uses_tiles=True, block_n=16, block_k=256, num_warps=4, num_stages=4),
        LinearTuning(uses_tiles=True, block_n=128, block_k=64, num_warps=8, num_stages=4, splits=4),
    ],
)
def test_other_sizes_of_blocks_compile(tuning: LinearTuning, world: World) -> None:
    assert call(2, weights(6144, 4096), tuning=tuning)
    assert len(world.compiles) == 1


def test_the_last_split_sees_what_the_others_wrote(world: World) -> None:
    """All threads have written before one of them counts; the parts are read past the L1 cache."""
    call(8, weights(4096, 4096))
    (name, compiled), *_ = world.compiles
    assert name == "multiply_tiles"
    before, after = compiled.asm["ptx"].split("atom.global.gpu.acq_rel", 1)
    assert "st.global" not in before[before.rindex("bar.sync") :]
    assert "ld.global.cg" in after
    assert "bar.sync" in after[: after.index("ld.global.cg")]


def test_what_is_compiled_ahead_is_what_a_launch_takes(world: World) -> None:
    """After one step nothing is compiled for any number of rows, and all launches are quick."""
    weight = weights(4096, 4096)
    submitted: dict[Any, Any] = {}
    with defer_compiles(submitted.setdefault):
        assert not call(1, weight)
        assert world.compiles == world.launches == []
        for compile in submitted.values():
            compile()
        assert sorted(world.names) == ["multiply_rows", "multiply_tiles"]
        assert world.launches == []
        submitted.clear()
        for num_rows in range(1, 17):
            assert call(num_rows, weight)
    assert submitted == {}
    assert len(world.launches) == 16
    assert all(isinstance(argument, int | float) for each in world.launches for argument in each[9:]), "they were quick"
    for each in world.launches:
        assert len(each) - 9 in (len(linear_plan.multiply_tiles.arg_names), len(linear_plan.multiply_rows.arg_names))
    linear_plan._plan_of.cache_clear()
    for num_rows in (1, 3, 5, 16):  # the ordinary way, as where nothing is deferred: Triton has them too
        assert call(num_rows, weight)
        assert isinstance(world.launches[-1][9], torch.Tensor)
    assert len(world.compiles) == 2


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(torch.bfloat16)


@pytest.mark.parametrize("num_rows", [1, 3, 8])
def test_until_it_is_compiled_torchs_own_serves(num_rows: int, world: World) -> None:
    x, weight, bias = random(num_rows, 64), random(40, 64), random(40)
    submitted: dict[Any, Any] = {}
    with defer_compiles(submitted.setdefault):
        for _ in range(2):
            assert torch.equal(skinny_linear(x, weight, bias), F.linear(x, weight, bias))
        own, *others = submitted
        assert awaited() == {own}, "a capture does not wait for the kernels of other numbers of rows"
        assert others
    assert world.compiles == world.launches == []


def test_a_capture_is_told_to_come_again(world: World) -> None:
    x, weight = random(2, 64), random(40, 64)
    submitted: dict[Any, Any] = {}
    with capturing_whole(), defer_compiles(submitted.setdefault), pytest.raises(KernelNotReadyError, match="again"):
        skinny_linear(x, weight)
    assert world.launches == []
    for compile in submitted.values():
        compile()
    with capturing_whole(), defer_compiles(submitted.setdefault):
        skinny_linear(x, weight)
    assert len(world.launches) == 1


def test_a_compile_that_fails_fails_in_its_step(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Any, *args: Any, **options: Any) -> Any:
        raise RuntimeError("ptxas is missing")

    x, weight = random(2, 64), random(40, 64)
    submitted: dict[Any, Any] = {}
    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "_do_compile", fails)
        with defer_compiles(submitted.setdefault):
            skinny_linear(x, weight)
        for compile in submitted.values():
            with pytest.raises(RuntimeError, match="ptxas"):  # whoever runs it is told
                compile()
        with defer_compiles(submitted.setdefault), pytest.raises(RuntimeError, match="ptxas"):
            skinny_linear(x, weight)
    with defer_compiles(submitted.setdefault):
        skinny_linear(x, weight)
    assert world.names == ["multiply_tiles"]


def test_who_waits_for_one_kernel_waits_for_those_of_other_rows(world: World) -> None:
    assert call(2, weights(4096, 4096))
    assert sorted(world.names) == ["multiply_rows", "multiply_tiles"]
    for num_rows in range(1, 17):
        assert call(num_rows, weights(4096, 4096))
    assert len(world.compiles) == 2


def test_another_triton_is_launched_the_ordinary_way(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*arguments: Any) -> None:
        if not isinstance(arguments[9], torch.Tensor):
            raise TypeError("takes something else")
        world.launches.append(arguments)

    def load(self: Any) -> None:
        self.module, self.function, self._run = 1, 1 << 40, refuses

    monkeypatch.setattr(CompiledKernel, "_init_handles", load)
    weight = weights(64, 64)
    for _ in range(3):
        assert call(1, weight)
    assert len(world.launches) == 3
