"""Inductor behind the common interface; the cases are few, since each costs seconds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import nn
from torch._inductor import async_compile
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from piecework.errors import CompileError
from piecework.graphs.compilers import CompilerOptions, compile_piece, start_compiling
from piecework.graphs.recorder import NullRecorder
from piecework.phases import Compiler

from .toys import Fn, accumulate, applied, assert_equals_model, assert_same, double, make_program, run, run_eager


def test_inductor_with_a_view_of_the_output_buffer_and_a_residual():
    """The operator fills a view of a buffer that Inductor made, and the next piece reads the base; another piece
    writes into its input in place."""

    def function(m: Any, x: torch.Tensor) -> torch.Tensor:
        residual = x * 1
        out = torch.zeros(x.shape[0], 4)
        double((x + 1).view(-1, 2, 2), out.view(-1, 2, 2))
        residual.add_(out @ m.weight)
        return residual.mul_(2) + applied(residual)

    inputs = {"x": torch.randn(3, 4)}
    also = [{"x": torch.randn(n, 4)} for n in (0, 1, 2, 50)] + [{"x": torch.randn(4, 7).t()}]
    model = Fn(function, weight=torch.randn(4, 4))
    program = assert_equals_model(model, inputs, compiler="inductor", also=also)
    assert len(program.graph.split.pieces) == 3


class Writes(nn.Module):
    def forward(self, cache, row):  # without annotations: AOTAutograd's cache takes no graph that carries them as text
        before = torch.mul(row, 2)
        torch.ops.aten.add_.Tensor(cache, 1)
        return (torch.add(before, row),)


def compiled_for(*, shared: bool) -> Any:
    graph_module = torch.fx.symbolic_trace(Writes())
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        cache = torch.empty(32).as_strided((8, 4), (4, 1))
        row = cache.as_strided((4,), (1,)) if shared else torch.empty(4)
    for node, value in zip(graph_module.graph.find_nodes(op="placeholder"), (cache, row), strict=True):
        node.meta["example_value"] = value
    return compile_piece(Compiler.INDUCTOR, graph_module, mode)


def test_inductor_does_not_confuse_inputs_that_share_memory_with_ones_that_do_not():
    """AOTAutograd's cache does not ask which inputs alias, and would hand out the first of these two for the second."""
    for shared in (False, True):
        cache = torch.ones(32).view(8, 4)
        row = cache[0] if shared else torch.ones(4)
        with torch.inference_mode():
            (result,) = compiled_for(shared=shared)(cache, row)
        assert torch.equal(result, torch.full((4,), 4.0 if shared else 3.0))


def test_a_compiler_leaves_the_piece_as_it_is():
    graph_module = torch.fx.symbolic_trace(Writes())
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        values = torch.empty(8, 4), torch.empty(4)
    for node, value in zip(graph_module.graph.find_nodes(op="placeholder"), values, strict=True):
        node.meta["example_value"] = value
    before = str(graph_module.graph)
    for compiler in (Compiler.EAGER, Compiler.AOT_EAGER):
        compile_piece(compiler, graph_module, mode)
        assert str(graph_module.graph) == before
        assert all("example_value" in n.meta for n in graph_module.graph.find_nodes(op="placeholder"))


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_outputs_share_memory_with_nothing_but_what_they_share_it_with_in_the_graph(compiler):
    """Seen with torch 2.13: Inductor returns an input that the piece has written as the fresh copy of it, and the next
    split op writes into both."""

    def function(m: Any, x: torch.Tensor) -> Any:
        e = x * 2
        accumulate(x, e)
        e[:, 2] = x[:, 1]
        o = torch.empty_like(e)
        o.copy_(e)
        twin, other = e.clone(), e.clone()
        accumulate(x, o)
        accumulate(x, twin)
        return e, o, other

    model, inputs = Fn(function), {"x": torch.randn(3, 4)}
    program = make_program(model, inputs, compiler=compiler)
    special = program.graph.compile_specialized(3, Compiler(compiler), {}, NullRecorder())
    expected = run_eager(model, inputs)
    for _ in range(2):
        assert_same(run(program, inputs), expected)
        assert_same(run(special, inputs), expected)


def test_inductor_starts_few_threads_and_leaves_the_setting_alone(monkeypatch):
    """The hazard: up to 32 compile threads in each rank."""
    import torch._inductor
    import torch._inductor.config as inductor_config

    before, seen = inductor_config.compile_threads, []

    def fake_compile(graph_module: Any, example_inputs: Any, **kwargs: Any) -> Any:
        seen.append(inductor_config.compile_threads)
        return graph_module.forward

    monkeypatch.setattr(torch._inductor, "standalone_compile", fake_compile)
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    make_program(Fn(lambda m, x: x + 1), {"x": torch.randn(3, 4)}, compiler="inductor")
    assert seen == [8]
    assert inductor_config.compile_threads == before


@pytest.mark.parametrize("mode", [None, "default", "max-autotune-no-cudagraphs", "max-autotune", "reduce-overhead"])
def test_a_mode_of_torch_compile_applies_but_for_cuda_graphs(monkeypatch, mode):
    """Captures are made by backends; what else the mode says is what torch.compile does in it."""
    names = ("max_autotune", "coordinate_descent_tuning", "triton.cudagraphs")
    seen: list[list[Any]] = []

    def fake_compile(graph_module: Any, example_inputs: Any, **kwargs: Any) -> Any:
        settings = inductor_config.get_config_copy()
        seen.append([settings[name] for name in names])
        return graph_module.forward

    before = [inductor_config.get_config_copy()[name] for name in names]
    monkeypatch.setattr(torch._inductor, "standalone_compile", fake_compile)
    graph = make_program(Fn(lambda m, x: x + 1), {"x": torch.randn(3, 4)}).graph
    graph.compile_general(Compiler.INDUCTOR, {}, NullRecorder(), CompilerOptions(mode=mode))
    graph.compile_whole(3, {}, NullRecorder(), CompilerOptions(mode=mode))
    tunes = mode is not None and mode.startswith("max-autotune")
    assert seen == [[True, True, False] if tunes else before] * 2
    assert [inductor_config.get_config_copy()[name] for name in names] == before


def test_a_mode_that_torch_does_not_know_is_an_error_of_inductor_alone():
    graph = make_program(Fn(lambda m, x: x + 1), {"x": torch.randn(3, 4)}).graph
    options = CompilerOptions(mode="fastest")
    with pytest.raises(CompileError, match=r"expected a mode of torch.compile \(default, .*, got 'fastest'"):
        graph.compile_general(Compiler.INDUCTOR, {}, NullRecorder(), options)
    graph.compile_general(Compiler.EAGER, {}, NullRecorder(), options)


def test_inductor_fuses_what_has_unbacked_rows():
    """Without a hint it counts no byte of a tensor of unbacked size, and fuses none of the loops over its rows."""
    import torch._inductor.config as inductor_config
    from torch._inductor import metrics

    def function(m: Any, x: torch.Tensor) -> torch.Tensor:
        total = x + 1
        normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-5) * m.weight
        double(normed, out := torch.empty_like(x))
        return out

    metrics.reset()
    with inductor_config.patch(force_disable_caches=True):  # what is fused is known to who compiles
        program = make_program(Fn(function, weight=torch.randn(40)), {"x": torch.randn(3, 40)}, compiler="inductor")
    assert len(program.graph.split.pieces) == 1
    assert [fused.inner_kernel_number for fused in metrics.cpp_outer_loop_fused_inner_counts] == [2]


def test_kernels_are_tried_out_briefly_and_with_pauses_beside_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU Inductor's benchmarker would take 25 ms and more for each way to run a kernel."""
    from torch._inductor.runtime.benchmarking import benchmarker

    from piecework.graphs import compilers

    calls: list[dict[str, Any]] = []
    slept: list[float] = []
    clock = [0.0]

    def measure(self: Any, call: Any, memory_warmup_iters: int = 100, **options: Any) -> float:
        calls.append({"memory_warmup_iters": memory_warmup_iters, **options})
        clock[0] += 0.004
        if call is None:
            raise RuntimeError("no kernel")
        return 1.5

    monkeypatch.setattr(type(benchmarker), "benchmark_gpu", measure)
    monkeypatch.setattr(compilers.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(compilers.time, "sleep", slept.append)
    with compilers.benchmarks_capped():
        assert benchmarker.benchmark_gpu(len, benchmark_iters=1000) == 1.5
        with pytest.raises(RuntimeError, match="no kernel"):
            benchmarker.benchmark_gpu(None)
    assert [call["memory_warmup_iters"] for call in calls] == [10, 10]
    assert [call["benchmark_iters"] for call in calls] == [20, 20]
    assert slept == pytest.approx([0.036, 0.036])
    benchmarker.benchmark_gpu(len)
    assert calls[-1] == {"memory_warmup_iters": 100}
    assert len(slept) == 2


def test_processes_that_compile_kernels_start_where_a_gpu_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take seconds, and a trace takes as long: they start beside it."""
    started: list[tuple[str, int]] = []
    for name in ("warm_pool", "wakeup"):
        noting = lambda name=name: started.append((name, inductor_config.compile_threads))  # noqa: E731
        monkeypatch.setattr(async_compile.AsyncCompile, name, noting)
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 5)
    for is_used in (False, True):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda is_used=is_used: is_used)
        for compiler in Compiler:
            start_compiling(compiler)
    assert started == [("warm_pool", 5), ("wakeup", 5)]
