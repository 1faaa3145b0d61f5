"""The compilers `eager`, `aot_eager` and `inductor` behind one interface; the only file that touches torch._inductor.

A compiler gets a piece whose placeholders carry fake tensors and returns a callable of the same arguments. It runs
nothing of the piece.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch._functorch.config
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ..errors import CompileError
from ..phases import Compiler
from .dynamo import COMPILE_LOCK
from .memory import memory, memory_of

CompiledCallable = Callable[..., Sequence[Any]]


class PieceCompiler(Protocol):
    """Compiles a piece for the shapes of its placeholders' fake tensors, which may be symbolic."""

    def __call__(self, graph_module: GraphModule, example_inputs: Sequence[Any]) -> CompiledCallable: ...


def compile_piece(compiler: Compiler, graph_module: GraphModule, fake_mode: FakeTensorMode) -> CompiledCallable:
    """Compiles a piece; the piece itself is left as it is.

    Args:
        graph_module: placeholders with `example_value` of `fake_mode`; returns a tuple.

    Raises:
        CompileError: the compiler failed; its own error is the cause.
    """
    example_inputs = [node.meta["example_value"] for node in graph_module.graph.find_nodes(op="placeholder")]
    with COMPILE_LOCK, torch.inference_mode(), tracing(TracingContext(fake_mode)):
        try:
            compiled = _COMPILERS[compiler](copy.deepcopy(graph_module), example_inputs)
        except Exception as error:
            raise CompileError(
                f"compiler {compiler}: failed on a piece of {len(graph_module.graph.nodes)} nodes "
                f"({type(error).__name__}: {_first_line(error)}); see the cause above, or use compiler='eager'"
            ) from error
    return compiled if compiler is Compiler.EAGER else _own_outputs(compiled, graph_module)


def _own_outputs(compiled: CompiledCallable, graph_module: GraphModule) -> CompiledCallable:
    """Sees to it that outputs share memory only with what they share it with in the graph.

    A split op may write into an output. Inductor hands out one buffer for two outputs of equal value, or the memory of
    an input that the piece has written (seen with torch 2.13). Which outputs that is shows at the first call and is
    the same in each, since a compiler decides it; they are copied from then on.
    """
    (outputs,) = graph_module.graph.output_node().args
    assert isinstance(outputs, (tuple, list))
    nodes = [*graph_module.graph.find_nodes(op="placeholder"), *outputs]
    expected = [memory_of(node) for node in nodes]
    num_inputs = len(nodes) - len(outputs)
    shared: list[int] | None = None

    def call(*arguments: Any) -> Sequence[Any]:
        nonlocal shared
        results = compiled(*arguments)
        if shared is None:
            found = _wrongly_shared([*arguments, *results], expected, num_inputs)
            if all(result.numel() for result in results if isinstance(result, torch.Tensor)):
                shared = found  # empty tensors have no memory to tell by
        else:
            found = shared
        if not found:
            return results
        return [result.clone() if i in found else result for i, result in enumerate(results)]

    return call


def _wrongly_shared(values: Sequence[Any], expected: Sequence[Any], num_inputs: int) -> list[int]:
    """Indices of the outputs that share memory with an earlier value although their fake tensors do not."""
    owners: dict[int, set[Any]] = {}
    found = []
    for i, value in enumerate(values):
        if not isinstance(value, torch.Tensor) or not value.numel():
            continue
        group = owners.setdefault(value.untyped_storage().data_ptr(), set())
        if i >= num_inputs and group and expected[i] not in group:
            found.append(i - num_inputs)
        else:
            group.add(expected[i])
    return found


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def _eager(graph_module: GraphModule, example_inputs: Sequence[Any]) -> CompiledCallable:
    # The generated forward itself: no nn.Module call in between.
    forward: CompiledCallable = graph_module.forward
    return forward


def _aot_eager(graph_module: GraphModule, example_inputs: Sequence[Any]) -> CompiledCallable:
    from torch._dynamo.backends.debugging import aot_eager

    compiled: CompiledCallable = aot_eager(graph_module, list(example_inputs))
    return compiled


def _inductor(graph_module: GraphModule, example_inputs: Sequence[Any]) -> CompiledCallable:
    from torch._inductor import standalone_compile

    with _inductor_settings(), _autograd_cache_unless_shared(example_inputs), _sizes_hinted(example_inputs):
        artifact = standalone_compile(graph_module, list(example_inputs), dynamic_shapes="from_tracing_context")
    compiled: CompiledCallable = artifact
    return compiled


@contextlib.contextmanager
def _autograd_cache_unless_shared(example_inputs: Sequence[Any]) -> Iterator[None]:
    """AOTAutograd's cache does not ask which inputs share memory, and would hand out a piece made for ones that do not
    (seen with torch 2.13)."""
    storages = [memory(i) for i in example_inputs if isinstance(i, torch.Tensor)]
    if len(set(storages)) == len(storages):
        yield
        return
    with torch._functorch.config.patch(enable_autograd_cache=False):
        yield


_MAX_COMPILE_THREADS = 8


@contextlib.contextmanager
def _inductor_settings() -> Iterator[None]:
    """Inductor would start up to 32 threads in every rank; the environment's own choice stands."""
    import torch._inductor.config as inductor_config

    if "TORCHINDUCTOR_COMPILE_THREADS" in os.environ:
        yield
        return
    threads = min(_MAX_COMPILE_THREADS, os.cpu_count() or 1)
    with inductor_config.patch(compile_threads=threads):
        yield


SIZE_HINT = 64
"""What Inductor takes an unbacked size to be where that decides on speed alone: tokens of a busy decode step."""


@contextlib.contextmanager
def _sizes_hinted(example_inputs: Sequence[Any]) -> Iterator[None]:
    """Lets Inductor weigh unbacked sizes.

    It fuses what shares bytes, and counts none where a size is unbacked and nobody gave a hint: then an RMSNorm is
    three kernels and not one (seen with 2.11 and 2.13). A hint decides nothing about what a program is valid for.
    """
    import torch._inductor.config as inductor_config
    from torch._inductor.sizevars import SizeVarAllocator

    for shape_env, symbol in _unbacked_symbols(example_inputs):
        shape_env.var_to_hint_override.setdefault(symbol, SIZE_HINT)
    asks_for_hints = hasattr(SizeVarAllocator, "all_unbacked_explicitly_hinted")  # 2.13 and later
    weighed = contextlib.nullcontext() if asks_for_hints else _unbacked_sizes_weighed()
    # What 2.11 tries out while it compiles has as many rows, whatever the hint is.
    with inductor_config.patch(unbacked_symint_fallback=SIZE_HINT), weighed:
        yield


@contextlib.contextmanager
def _unbacked_sizes_weighed() -> Iterator[None]:
    """There is no setting for it before torch 2.13; nobody else compiles meanwhile."""
    from torch._inductor.graph import GraphLowering

    lowering: Any = GraphLowering
    known, lowering.get_dep_size_hint = lowering.get_dep_size_hint, _dep_size_hint
    try:
        yield
    finally:
        lowering.get_dep_size_hint = known


def _dep_size_hint(graph: Any, dep: Any, count_bytes: bool = True) -> int:
    """In place of Inductor's own before torch 2.13, which is 0 for unbacked sizes, with or without a hint."""
    key = (dep, count_bytes)
    if key not in graph.dep_size_hint_cache:
        try:
            graph.dep_size_hint_cache[key] = dep.numbytes_hint() if count_bytes else dep.numel_hint()
        except KeyError:  # of no buffer
            graph.dep_size_hint_cache[key] = 0
    hint: int = graph.dep_size_hint_cache[key]
    return hint


def _unbacked_symbols(example_inputs: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """The unbacked symbols in the sizes of fake inputs, each with its ShapeEnv."""
    sizes = [size for i in example_inputs for size in (i.shape if isinstance(i, torch.Tensor) else (i,))]
    for node in (size.node for size in sizes if isinstance(size, torch.SymInt)):
        for symbol in node.expr.free_symbols:
            if free_unbacked_symbols(symbol):
                yield node.shape_env, symbol


_COMPILERS: dict[Compiler, PieceCompiler] = {
    Compiler.EAGER: _eager,
    Compiler.AOT_EAGER: _aot_eager,
    Compiler.INDUCTOR: _inductor,
}
