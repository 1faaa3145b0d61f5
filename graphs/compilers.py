"""The compilers `eager`, `aot_eager` and `inductor` behind one interface; the only file that touches torch._inductor.

A compiler gets a piece whose placeholders carry fake tensors and returns a callable of the same arguments. It runs
nothing of the piece. What Inductor made can be saved as bytes, which another process turns into the same callable.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import json
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch._functorch.config
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols

from ..errors import ArtifactError, CompileError, NoArtifactError
from ..phases import Compiler
from .dynamo import COMPILE_LOCK
from .memory import memory, memory_of
from .propagate import propagate

CompiledCallable = Callable[..., Sequence[Any]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CompilerOptions:
    """What a config says to the compilers; a compiler passes over what it does not know."""

    emulate_precision_casts: bool = False
    """Inductor rounds to a tensor's dtype wherever eager code does, also inside a fused kernel."""
    mode: str | None = None
    """Inductor has the settings of this mode of `torch.compile`, but for CUDA graphs: captures are made here."""


DEFAULT_OPTIONS = CompilerOptions()


class PieceCompiler(Protocol):
    """Compiles a piece for the shapes of its placeholders' fake tensors, which may be symbolic."""

    def __call__(self, graph_module: GraphModule, example_inputs: Sequence[Any]) -> CompiledCallable: ...


def compile_piece(
    compiler: Compiler,
    graph_module: GraphModule,
    fake_mode: FakeTensorMode,
    options: CompilerOptions = DEFAULT_OPTIONS,
) -> CompiledCallable:
    """Compiles a piece; the piece itself is left as it is.

    Args:
        graph_module: placeholders with `example_value` of `fake_mode`; returns a tuple.

    Raises:
        CompileError: the compiler failed; its own error is the cause. Or torch knows no such mode.
    """
    settings = _settings(options, compiler)
    example_inputs = [node.meta["example_value"] for node in graph_module.graph.find_nodes(op="placeholder")]
    with COMPILE_LOCK, torch.inference_mode(), tracing(TracingContext(fake_mode)):
        try:
            with inductor_set(settings):
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

    call.artifact = compiled  # type: ignore[attr-defined]  # for `write_artifact`; an object would cost each call more
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

    _fill_in_values(graph_module)
    with (
        _inductor_settings(),
        _autograd_cache_unless_shared(example_inputs),
        _sizes_hinted(example_inputs),
        _writes_in_order(),
    ):
        artifact = standalone_compile(graph_module, list(example_inputs), dynamic_shapes="from_tracing_context")
    compiled: CompiledCallable = artifact
    return compiled


def _fill_in_values(graph_module: GraphModule) -> None:
    """AOTAutograd's cache takes methods of tensors only, and what has no fake value is none to it: specialised pieces
    have them on placeholders alone."""
    if all("example_value" in node.meta or node.op == "output" for node in graph_module.graph.nodes):
        return
    fake_mode = TracingContext.get().fake_mode
    assert fake_mode is not None
    propagate(graph_module, fake_mode)


@contextlib.contextmanager
def _writes_in_order() -> Iterator[None]:
    """Inside, Inductor reads what an operator of ours writes before or after it, as the graph says.

    Two mistakes of Inductor, for which there is no setting; nobody else compiles meanwhile. What reads a buffer and is
    not computed yet is put behind the operator that writes it (seen with torch 2.11 to 2.14); and a loop that reads
    what the operator wrote is put before it, into a loop of another shape (on a CPU, with torch 2.11 and 2.13).
    """
    import torch._inductor.config as inductor_config
    from torch._inductor.ir import FallbackKernel
    from torch._inductor.scheduler import SchedulerNode

    kernels: Any = FallbackKernel
    loops: Any = SchedulerNode
    create, reshape = kernels.__dict__["create"], loops.recompute_size_and_body

    def create_after_readers(cls: Any, kernel: Any, *arguments: Any, **named: Any) -> Any:
        _compute_readers(kernel, arguments, named)
        return create.__func__(cls, kernel, *arguments, **named)

    # Nothing reads it here, but it is in the keys of Inductor's caches: code that was made without is another entry.
    mark = {"aot_inductor.metadata": {**inductor_config.aot_inductor.metadata, "piecework": "writes in order"}}
    kernels.create, loops.recompute_size_and_body = classmethod(create_after_readers), _with_order(reshape)
    try:
        with inductor_config.patch(mark):
            yield
    finally:
        kernels.create, loops.recompute_size_and_body = create, reshape


def _compute_readers(kernel: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Makes buffers of what reads those that a call of an operator will write."""
    from torch._inductor.virtualized import V

    if not isinstance(kernel, torch._ops.OpOverload):
        return
    for i, argument in enumerate(kernel._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = named.get(argument.name, arguments[i] if i < len(arguments) else None)
        for written in value if isinstance(value, (list, tuple)) else (value,):
            if written is not None:
                written.realize()
                V.graph.mark_buffer_mutated(written.get_name())


def _with_order(reshape: Callable[..., None]) -> Callable[..., None]:
    """`SchedulerNode.recompute_size_and_body`, after which the loop still depends on what it depended on."""
    from torch._inductor.dependencies import StarDep, WeakDep
    from torch.utils._ordered_set import OrderedSet

    def reshape_in_order(node: Any, *arguments: Any, **named: Any) -> None:
        order = OrderedSet(each for each in node.read_writes.reads if isinstance(each, (WeakDep, StarDep)))
        reshape(node, *arguments, **named)
        node.set_read_writes(node.read_writes.with_read(order).rename(node.mutation_renames))

    return reshape_in_order


@contextlib.contextmanager
def _autograd_cache_unless_shared(example_inputs: Sequence[Any]) -> Iterator[None]:
    """AOTAutograd's cache does not ask which inputs share memory, and would hand out a piece made for ones that do not
    (seen with torch 2.13)."""
    if not share_memory(example_inputs):
        yield
        return
    with torch._functorch.config.patch(enable_autograd_cache=False):
        yield


def share_memory(example_inputs: Sequence[Any]) -> bool:
    """Whether two of a piece's inputs are in one memory. What Inductor makes of such a piece cannot be saved."""
    storages = [memory(i) for i in example_inputs if isinstance(i, torch.Tensor)]
    return len(set(storages)) < len(storages)


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


def _settings(options: CompilerOptions, compiler: Compiler) -> dict[str, Any]:
    """Settings of Inductor that the options ask for; the others are as the environment says. Raises: CompileError."""
    if compiler is not Compiler.INDUCTOR:
        return {}
    settings: dict[str, Any] = {}
    if options.mode is not None:
        from torch._inductor import list_mode_options

        modes = list_mode_options()
        if options.mode not in modes:
            raise CompileError(
                f"compiler {compiler}: expected a mode of torch.compile ({', '.join(modes)}), got {options.mode!r}"
            )
        settings |= {name: value for name, value in modes[options.mode].items() if "cudagraph" not in name}
    if options.emulate_precision_casts:
        settings["emulate_precision_casts"] = True
    return settings


def inductor_changes() -> tuple[dict[str, Any], list[str]]:
    """Settings of Inductor that are not its defaults here: those that JSON can hold, and the names of the others."""
    config: Any = sys.modules.get("torch._inductor.config")
    if config is None:
        return {}, []  # nobody can have changed any
    changes: dict[str, Any] = {}
    others: list[str] = []
    values = config.get_config_copy()
    for name in config._config:
        if name.startswith("_") or name not in values or config._is_default(name):
            continue
        try:
            is_plain = json.loads(json.dumps(values[name])) == values[name]
        except (TypeError, ValueError):
            is_plain = False
        if is_plain:
            changes[name] = values[name]
        else:
            others.append(name)
    return changes, others


def inductor_set(changes: Mapping[str, Any]) -> contextlib.AbstractContextManager[Any]:
    """Inside, Inductor has these settings."""
    if not changes:
        return contextlib.nullcontext()
    import torch._inductor.config as config

    patched: contextlib.AbstractContextManager[Any] = config.patch(dict(changes))
    return patched


BENCHMARK_SHARE = 0.1
"""Of the time of a compile beside steps, what trying kernels out may take of the device."""
_BRIEF = {"warmup": 1, "rep": 4, "memory_warmup_iters": 10, "benchmark_iters": 20, "max_benchmark_duration": 4}
"""Arguments of torch's benchmarkers, in milliseconds and iterations: theirs take up to 125 ms a kernel and way."""


@contextlib.contextmanager
def benchmarks_capped() -> Iterator[None]:
    """Inside, Inductor tries kernels on a GPU out briefly, and pauses in between: others run on the device."""
    from torch._inductor.runtime.benchmarking import benchmarker

    theirs: Any = benchmarker
    measure = theirs.benchmark_gpu
    accepted = inspect.signature(measure).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())

    def capped(*arguments: Any, **options: Any) -> Any:
        started = time.perf_counter()
        options |= {name: value for name, value in _BRIEF.items() if name in accepted or takes_any}
        try:
            return measure(*arguments, **options)
        finally:
            time.sleep((time.perf_counter() - started) * (1 / BENCHMARK_SHARE - 1))

    theirs.benchmark_gpu = capped
    try:
        yield
    finally:
        del theirs.benchmark_gpu  # the class's own is found again


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


def has_artifacts(compiler: Compiler) -> bool:
    """Whether what a compiler makes can be saved; the others are quick enough to compile where they run."""
    return compiler is Compiler.INDUCTOR


def write_artifact(call: CompiledCallable, path: Path) -> None:
    """Writes what `compile_piece` made to a file, for `load_artifact` in any process with the same build of torch.

    Raises:
        NoArtifactError: torch keeps nothing of it that could be saved.
        OSError: the file cannot be written.
    """
    artifact: Any = getattr(call, "artifact", None)
    if not hasattr(artifact, "is_saveable") or not artifact.is_saveable():
        raise NoArtifactError(
            "artifact: torch keeps nothing of this piece that could be saved (its inputs share memory, it computes "
            "nothing, or Inductor's caches are off); compile it where it is to run"
        )
    artifact.save(path=str(path))


def prepare_to_load() -> None:
    """Does once what the first `load_artifact` would wait for: Inductor's imports, and the hash of torch's source."""
    import torch._inductor.compile_fx  # noqa: F401
    from torch._inductor.codecache import torch_key

    torch_key()


def load_artifact(content: bytes, graph_module: GraphModule) -> CompiledCallable:
    """The callable that `compile_piece` made of `graph_module` where `write_artifact` wrote `content`.

    It holds for the sizes that the compile did; nothing here checks them. Inductor's cache directory gets what the
    artifact holds, since the code is run from files.

    Raises:
        ArtifactError: another build of torch made it, or torch cannot make a callable of it; its error is the cause.
    """
    with COMPILE_LOCK, torch.inference_mode():
        try:
            return _own_outputs(_load(content), graph_module)
        except Exception as error:  # AssertionError for another build; whatever unpickling and importing may raise
            raise ArtifactError(
                f"artifact: torch {torch.__version__} cannot load it ({type(error).__name__}: {_first_line(error)}); "
                f"it may be from another build; compile the piece anew"
            ) from error


def _load(content: bytes) -> CompiledCallable:
    """As torch's `CompiledArtifact.load`, but exactly what was saved.

    That one takes the first entry of its key in Inductor's cache, whatever guards it was made under: after a compile of
    the same graph for other sizes, the wrong one.
    """
    import_compilers()  # which sets attributes of torch that a load uses
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCacheArtifact
    from torch._inductor.codecache import torch_key
    from torch._inductor.cudagraph_utils import BoxedDeviceIndex
    from torch._inductor.standalone_compile import CacheCompiledArtifact
    from torch._inductor.utils import BoxedBool
    from torch.compiler._cache import CacheArtifactManager
    from torch.utils._appending_byte_serializer import BytesReader

    reader = BytesReader(content)
    assert reader.read_bytes() == CacheCompiledArtifact.CACHE_HEADER, "it is no artifact of torch's"
    assert reader.read_bytes() == torch_key(), "another build of torch made it"
    key, bundle = reader.read_str(), reader.read_bytes()
    artifacts = CacheArtifactManager.deserialize(bundle)
    assert artifacts is not None, "it cannot be unpickled"
    CacheArtifactManager.populate_caches(artifacts)
    (saved,) = [each for each in artifacts[AOTAutogradCacheArtifact.type()] if each.key == key]
    entry = pickle.loads(saved.content)
    entry.guards_expr = None  # there are no sizes yet to try them on; the artifact's intervals are what they amount to
    settings: Any = {"cudagraphs": BoxedBool(False), "boxed_forward_device_index": BoxedDeviceIndex(0)}
    with tracing(TracingContext(FakeTensorMode(shape_env=ShapeEnv()))):
        compiled = entry.wrap_post_compile([], entry.sanitized_aot_config, settings)
    return lambda *arguments: compiled([*arguments])


def import_compilers() -> None:
    """Imports what compilers are made of, which takes seconds and is else done in the first compile."""
    import torch._inductor.async_compile
    import torch._inductor.compile_fx
    import torch._inductor.standalone_compile  # noqa: F401


def start_compiling(compiler: Compiler) -> None:
    """Starts what a compiler compiles kernels for a GPU in: processes that need seconds. Does not wait for them."""
    if compiler is not Compiler.INDUCTOR or not torch.cuda.is_initialized():
        return
    from torch._inductor.async_compile import AsyncCompile

    with COMPILE_LOCK, _inductor_settings():  # before torch 2.12 settings are the process's
        AsyncCompile.warm_pool()
        AsyncCompile.wakeup()


def compile_something(device: torch.device) -> None:
    """Compiles `x + 1` on a device, to start Inductor's machinery. Raises: CompileError."""

    def trivial(x: torch.Tensor) -> Any:  # called by FX's symbolic tracer alone
        return (x + 1,)

    graph_module = torch.fx.symbolic_trace(trivial)
    fake_mode = FakeTensorMode(shape_env=ShapeEnv())
    (placeholder,) = graph_module.graph.find_nodes(op="placeholder")
    with fake_mode:
        placeholder.meta["example_value"] = torch.empty(8, device=device)
    compile_piece(Compiler.INDUCTOR, graph_module, fake_mode)
