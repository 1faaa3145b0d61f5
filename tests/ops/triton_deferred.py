"""Paged attention's Triton kernels when no call may wait for their compile; the kernels run in Triton's interpreter.

Not collected by its name: `test_deferred.py` runs it in a process of its own, as `triton_interpreted.py`. By hand:
`TRITON_INTERPRET=1 pytest tests/ops/triton_deferred.py`. The interpreter compiles nothing: in its place stand kernels
that note what is asked of them, and whose quick launches take addresses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import inspect
import os
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
from triton.runtime.jit import KernelParam

from piecework.errors import CaptureError, KernelNotReadyError
from piecework.ops.attention import AttentionContext
from piecework.ops.capturing import capturing_whole
from piecework.ops.deferred import defer_compiles
from piecework.ops.triton import launch, layout, plan
from piecework.ops.triton import paged_attention as kernels

from .paged_reference import Batch, Step, make_step, static_copy

assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"

PROMPT = Batch(
    requests=[(1, 6), (4, 0), (9, 40)],
    heads=(4, 2),
    head_size=64,
    block_size=4,
    window_size=0,
    padding=0,
    empty_slots=0,
    spare_blocks=0,
    seed=0,
)
DECODE = dataclasses.replace(PROMPT, requests=[(1, 6), (1, 400)])
ROWS = ["compile store_rows", "compile attend_rows"]
TILES = ["compile store_rows", "compile attend_tiles"]


class World:
    """What the kernels of a test did, what was submitted, and which tensor begins where."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.submitted: dict[Hashable, Callable[[], None]] = {}
        self.num_submits = 0
        self.tensors: dict[int, torch.Tensor] = {}
        self.error: Exception | None = None

    def submit(self, key: Hashable, compile: Callable[[], None]) -> None:
        self.num_submits += 1
        self.submitted.setdefault(key, compile)

    def compile_all(self) -> list[str]:
        before = len(self.log)
        for compile in self.submitted.values():
            compile()
        return self.log[before:]

    def call(self, step: Step, context: Any = None, *, deferred: bool = True) -> list[str]:
        """One call, which must be right; what the kernels did."""
        before, expected = len(self.log), step.expected()
        out = torch.full_like(step.q, float("nan"))
        layer = (step.q, step.k, step.v, step.k_cache.clone(), step.v_cache.clone(), out)
        self.tensors.update({tensor.data_ptr(): tensor for tensor in layer})
        run = kernels.prepare(*layer, step.scale, step.window_size)
        context = step.context if context is None else context
        if deferred:
            with defer_compiles(self.submit):
                run(context)
        else:
            run(context)
        got = (out.double(), *layer[3:5])
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
        return self.log[before:]


class Compiled:
    """What Triton makes of a kernel: takes addresses as numbers."""

    metadata = type("Metadata", (), {"global_scratch_size": 0, "profile_scratch_size": 0})()
    function, packed_metadata = 17, (4, 1, 0)

    def __init__(self, jit: Jit) -> None:
        self.jit = jit

    def run(self, g0: int, g1: int, g2: int, stream: int, function: int, packed: Any, *others: Any) -> None:
        self.jit.world.log.append(f"quick {self.jit.name}")
        tensors = self.jit.world.tensors
        self.jit.kernel[(g0, g1, g2)](*[tensors.get(a, a) if a and a > 2**32 else a for a in others[3:]])


class Jit:
    """A JIT function: launches compile what was not compiled for such arguments, `warmup` does only that."""

    def __init__(self, kernel: Any, name: str, world: World) -> None:
        self.kernel, self.name, self.world, self.fn = kernel, name, world, kernel.fn
        exempt, unaligned = kernel.kwargs["do_not_specialize"], kernel.kwargs["do_not_specialize_on_alignment"] or ()
        self.params = [
            KernelParam(index, parameter, name in (exempt or ()), name in unaligned)
            for index, (name, parameter) in enumerate(inspect.signature(kernel.fn).parameters.items())
        ]
        self.compiled: dict[Hashable, Compiled] = {}

    def warmup(self, *arguments: Any, grid: Any, **options: int) -> Compiled:
        key = launch.Call(self, grid, arguments, options).key
        if key not in self.compiled:
            self.world.log.append(f"compile {self.name}")
            if self.world.error is not None:
                raise self.world.error
            self.compiled[key] = Compiled(self)
        return self.compiled[key]

    def __getitem__(self, grid: Any) -> Any:
        def run(*arguments: Any, **options: int) -> Compiled:
            compiled = self.warmup(*arguments, grid=grid, **options)
            self.world.log.append(f"ordinary {self.name}")
            self.kernel[grid](*arguments)
            return compiled

        return run


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()
    for name in ("store_rows", "attend_rows", "attend_tiles"):
        monkeypatch.setattr(plan, name, Jit(getattr(plan, name), name, world))
    addresses = plan.addresses_of

    def noted(*arguments: torch.Tensor) -> tuple[int, ...]:
        world.tensors.update({a.data_ptr(): a for a in arguments})
        return addresses(*arguments)

    monkeypatch.setattr(plan, "addresses_of", noted)
    monkeypatch.setattr(plan, "is_interpreted", lambda kernel: False)
    monkeypatch.setattr(plan, "_WAYS", {})
    monkeypatch.setattr(kernels, "_ALIGNMENT", 16)
    layout.layout_of.cache_clear()
    return world


def quick(kind: str) -> list[str]:
    return ["quick store_rows", f"quick attend_{kind}"]


def ordinary(kind: str) -> list[str]:
    return ["ordinary store_rows", f"ordinary attend_{kind}"]


@pytest.mark.parametrize(("batch", "kind"), [(PROMPT, "tiles"), (DECODE, "rows")], ids=["prompt", "decode"])
@pytest.mark.parametrize("is_static", [False, True])
def test_no_call_compiles(
    batch: Batch, kind: str, is_static: bool, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until somebody has compiled, torch's operators do the call; then the kernels do, without an ordinary launch."""
    step = make_step(batch, torch.float32)
    context = static_copy(step.context) if is_static else step.context
    for module in (kernels.torch_native, kernels.torch_static):
        name = module.__name__.rpartition(".")[2]
        attend = module.paged_attention
        noting = lambda *args, name=name, attend=attend, **how: (world.log.append(name), attend(*args, **how))  # noqa: E731
        monkeypatch.setattr(module, "paged_attention", noting)
    stand_in = ["torch_static" if is_static else "torch_native"]
    assert world.call(step, context) == stand_in
    assert world.call(step, context) == stand_in
    compiles = world.compile_all()
    assert sorted(compiles) == sorted({*ROWS, *TILES}), "nothing is launched in the other thread"
    assert compiles[:2] == ["compile store_rows", f"compile attend_{kind}"], "what is waited for comes first"
    for _ in range(2):
        assert world.call(step, context) == quick(kind)
    assert world.compile_all() == []


def test_without_kernels_only_what_requests_have_is_gathered(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A static context has a table for the longest requests that may come; a step that may wait asks the device."""
    step = make_step(DECODE, torch.float32)
    spare = static_copy(step.context, spare_blocks=64)
    asked: list[int] = []
    attend = kernels.torch_static.paged_attention
    monkeypatch.setattr(
        kernels.torch_static,
        "paged_attention",
        lambda *args, longest: (asked.append(longest), attend(*args, longest=longest)),
    )
    assert world.call(step, spare) == []
    assert asked == [401]


def test_the_layers_of_a_step_submit_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(plan, "_other_sizes", lambda *args, found=plan._other_sizes: asked.append(args) or found(*args))
    step = make_step(DECODE, torch.float32)
    layers = []
    for _ in range(4):
        layer = [step.q.clone(), step.k.clone(), step.v.clone(), step.k_cache.clone(), step.v_cache.clone()]
        layers.append(kernels.prepare(*layer, torch.empty_like(step.q), step.scale, 0))
    for num_steps in (1, 2, 3):
        with defer_compiles(world.submit):
            for layer in layers:
                layer(step.context)
        assert len(asked) == num_steps, "the other layers need not even look"
        assert world.num_submits == 3 * num_steps, "each step anew: whoever took the last one's may be gone"
    assert len(world.submitted) == 3
    assert len(world.compile_all()) == 3


@pytest.mark.parametrize(("first", "second", "kind"), [(PROMPT, DECODE, "rows"), (DECODE, PROMPT, "tiles")])
def test_steps_of_other_sizes_are_compiled_for_ahead(first: Batch, second: Batch, kind: str, world: World) -> None:
    world.call(make_step(first, torch.float32))
    world.compile_all()
    num_submits = world.num_submits
    for requests in (second.requests, second.requests * 2, second.requests * 5):
        step = make_step(dataclasses.replace(second, requests=requests), torch.float32)
        assert world.call(step) == quick(kind)
        assert world.call(step, static_copy(step.context)) == quick(kind)
    assert world.num_submits == num_submits


def test_what_an_ordinary_launch_compiled_is_ready(world: World) -> None:
    step = make_step(PROMPT, torch.float32)
    done = world.call(step, deferred=False)
    assert [line for line in done if "ordinary" in line] == ordinary("tiles")
    larger = make_step(dataclasses.replace(PROMPT, requests=PROMPT.requests * 2), torch.float32)
    assert world.call(larger) == quick("tiles"), "another layout, the same kernels"
    assert world.num_submits == 0


def test_outside_of_the_scope_a_launch_compiles(world: World) -> None:
    step = make_step(DECODE, torch.float32)
    world.call(step)
    done = world.call(step, deferred=False)
    assert [line for line in done if "ordinary" not in line] == ROWS
    assert world.call(step) == quick("rows"), "and steps that defer have it"


def test_a_run_on_nothing_but_padding_compiles_what_steps_of_all_sizes_need(world: World) -> None:
    """Before a server is ready: padding is rows, and the first prompt would wait for the kernel of tiles."""
    nothing = make_step(dataclasses.replace(PROMPT, requests=[], padding=8), torch.float32)
    done = world.call(nothing, deferred=False)
    assert sorted(line for line in done if "ordinary" not in line) == sorted({*ROWS, *TILES})
    for batch, kind in ((PROMPT, "tiles"), (DECODE, "rows")):
        assert world.call(make_step(batch, torch.float32)) == quick(kind)
    assert world.num_submits == 0


def test_a_compile_that_fails_fails_in_its_step(world: World) -> None:
    step = make_step(DECODE, torch.float32)
    world.call(step)
    world.error = RuntimeError("ptxas is missing")
    for compile in world.submitted.values():
        with pytest.raises(RuntimeError, match="ptxas"):  # whoever runs it is told
            compile()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="ptxas"):
            world.call(step)
    world.error = None
    assert ordinary("rows") == [line for line in world.call(step) if "ordinary" in line]
    assert world.call(step) == quick("rows")


@pytest.mark.parametrize("is_static", [False, True])
def test_a_capture_is_told_to_come_again(is_static: bool, world: World) -> None:
    step = make_step(DECODE, torch.float32)
    context = static_copy(step.context) if is_static else step.context
    out, caches = torch.full_like(step.q, 7.0), (step.k_cache.clone(), step.v_cache.clone())
    run = kernels.prepare(step.q, step.k, step.v, *caches, out, step.scale, 0)
    with capturing_whole(), defer_compiles(world.submit), pytest.raises(KernelNotReadyError, match="capture again"):
        run(context)
    assert issubclass(KernelNotReadyError, CaptureError)
    assert out.eq(7.0).all()
    torch.testing.assert_close(caches, (step.k_cache, step.v_cache), rtol=0, atol=0, equal_nan=True)
    assert world.compile_all() != [], "a capture asks for the kernels too"
    with capturing_whole():
        assert world.call(step, context) == quick("rows")


def test_kernels_of_the_interpreter_are_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step(DECODE, torch.float32)
    out = torch.full_like(step.q, float("nan"))
    run = kernels.prepare(step.q, step.k, step.v, step.k_cache, step.v_cache, out, step.scale, 0)
    monkeypatch.setattr(kernels, "_attend_without", None)
    with defer_compiles(lambda key, compile: pytest.fail("nothing to compile")):
        run(step.context)
    assert out.isfinite().all()


@pytest.mark.parametrize("why", ["a profiler", "no quick launch"])
def test_what_cannot_be_launched_quickly_goes_the_ordinary_way(
    why: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = make_step(DECODE, torch.float32)
    world.call(step)
    if why == "a profiler":
        monkeypatch.setattr(kernels, "has_hooks", lambda: True)
    else:
        monkeypatch.delattr(Compiled, "run")
    world.compile_all()
    for _ in range(2):
        assert world.call(step) == ordinary("rows"), "which compiles nothing"


def test_what_differs_for_triton_is_compiled_on_its_own(world: World) -> None:
    step = make_step(DECODE, torch.float32)
    world.call(step)
    assert len(world.submitted) == 3
    for batch, num_more in (
        (dataclasses.replace(DECODE, window_size=3), 1),  # tiles alone know of a window when they are compiled
        (dataclasses.replace(DECODE, block_size=3), 3),
        (dataclasses.replace(DECODE, heads=(8, 2)), 2),  # the store does not see q
        (dataclasses.replace(DECODE, heads=(6, 3)), 3),
        (dataclasses.replace(DECODE, requests=[(1, 3)] * 5, spare_blocks=4), 0),
    ):
        before = len(world.submitted)
        world.call(make_step(batch, torch.float32))
        assert len(world.submitted) - before == num_more, batch
    step_of_3 = make_step(dataclasses.replace(DECODE, requests=[(1, 3)] * 3), torch.float32)
    tables = {}
    for name in ("slot_mapping", "query_start_loc", "seq_lens", "block_table"):
        table = getattr(step_of_3.context, name)
        tables[name] = torch.empty(table.numel() + 1, dtype=table.dtype)[1:].view(table.shape).copy_(table)
        assert tables[name].data_ptr() % 16
    before = len(world.submitted)
    world.call(step_of_3, step_of_3.context.as_static(tables))
    assert len(world.submitted) == before, "a table may begin anywhere"
    shifted = torch.empty(step.q.numel() + 1)[1:].view(step.q.shape).copy_(step.q)
    before = len(world.submitted)
    world.call(dataclasses.replace(step, q=shifted, context=dataclasses.replace(step.context, scratch={})))
    assert len(world.submitted) - before == 2, "the attention kernels, of another stride and alignment of q"


def test_what_a_call_held_is_freed_at_once(world: World) -> None:
    """An eager step prepares each of its calls: their tensors must not wait for the garbage collector."""
    step = make_step(DECODE, torch.float32)
    gc.collect()
    gc.disable()
    try:
        for kind in ("without", "ordinary", "quick"):
            layer = (step.q, step.k, step.v, step.k_cache, step.v_cache, torch.empty_like(step.q))
            world.tensors.update({tensor.data_ptr(): tensor for tensor in layer})
            run = kernels.prepare(*layer, 1.0, 0)
            with contextlib.nullcontext() if kind == "ordinary" else defer_compiles(world.submit):
                run(step.context)
            held = weakref.ref(run)
            world.submitted.clear()
            del run
            assert held() is None, kind
    finally:
        gc.enable()


def test_a_sequence_of_steps_that_changes_over_in_the_middle(world: World) -> None:
    """Each step reads what the ones before it stored, whoever did that; the compile runs in another thread."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(12, 8, 64, generator=generator)
    results = {}
    for way in ("waits", "defers"):
        k_cache, v_cache = torch.zeros(2, 4, 4, 2, 64)
        outs, position, threads = [], 0, []
        for num_step, length in enumerate([5, 1, 1, 1, 3, 1]):
            q, k, v = tokens[position : position + length].clone().split([4, 2, 2], dim=1)
            position += length
            out = torch.full_like(q, float("nan"))
            world.tensors.update({tensor.data_ptr(): tensor for tensor in (q, k, v, k_cache, v_cache, out)})
            context = AttentionContext.build(
                query_lens=[length], seq_lens=[position], block_tables=[[2, 0, 3]], block_size=4
            )
            run = kernels.prepare(q, k, v, k_cache, v_cache, out, 0.125, 0)
            before = len(world.log)
            if way == "waits":
                run(context)
            else:
                with defer_compiles(world.submit):
                    run(context)
                assert bool(world.log[before:]) == (num_step >= 3)
                assert not any("ordinary" in line or "compile" in line for line in world.log[before:])
            outs.append(out)
            if way == "defers" and num_step == 2:
                threads.append(threading.Thread(target=world.compile_all))
                threads[0].start()
                threads[0].join()
        results[way] = (torch.cat(outs), k_cache, v_cache)
        for name in ("store_rows", "attend_rows", "attend_tiles"):
            getattr(plan, name).compiled.clear()
        plan._WAYS.clear()
        layout.layout_of.cache_clear()
    torch.testing.assert_close(results["defers"], results["waits"], rtol=1e-5, atol=1e-5)
