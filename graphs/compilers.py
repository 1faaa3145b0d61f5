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

    with _inductor_settings(), _autograd_cache_unless_shared(example_inputs):
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


_COMPILERS: dict[Compiler, PieceCompiler] = {
    Compiler.EAGER: _eager,
    Compiler.AOT_EAGER: _aot_eager,
    Compiler.INDUCTOR: _inductor,
}
