"""The whole forward in one graph: what is put together, that it travels, and that it writes without copies.

Each compile by Inductor costs seconds; what the one graph does is mostly asked of it as it stands, compiler eager.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import itertools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._inductor.ir import FallbackKernel
from torch._inductor.scheduler import SchedulerNode
from torch._inductor.utils import run_and_get_code

from piecework.errors import CompileError
from piecework.graphs import whole_inputs
from piecework.graphs.artifact import load_piece, save_piece
from piecework.graphs.audit import Interval
from piecework.graphs.compilers import CompilerOptions
from piecework.graphs.fakes import describe
from piecework.graphs.inputs import InputContract
from piecework.graphs.piece import BuiltPiece
from piecework.graphs.portable import PortableProgram
from piecework.graphs.program import Program
from piecework.graphs.recorder import NullRecorder
from piecework.graphs.stitched import PiecewiseGraph
from piecework.graphs.whole import whole_graph
from piecework.graphs.whole_inputs import may_overlap
from piecework.ops.context import use_context
from piecework.ops.split_op import split_op
from piecework.phases import Compiler

from .random_programs import STEPS, models
from .test_fuzz import BUCKET, DIMS, assert_does_what, graph_of, inputs_of, quick
from .toys import (
    TOKENS_FIRST,
    Fn,
    accumulate,
    applied,
    assert_same,
    double,
    halves,
    plain,
    run,
    run_eager,
    trace_model,
    x_of,
)

INDUCTOR = Compiler.INDUCTOR
EXACT = CompilerOptions(emulate_precision_casts=True)


def graph(model: nn.Module, inputs: Mapping[str, Any], dims: Any = TOKENS_FIRST) -> PiecewiseGraph:
    return PiecewiseGraph.from_trace(trace_model(model, inputs, dims), InputContract(dims))


def bound(graph: PiecewiseGraph, model: nn.Module, inputs: Mapping[str, Any], dims: Any = TOKENS_FIRST) -> Any:
    """The graph as another process's, bound to the model."""
    signature = InputContract(dims).bind(inputs).signature
    return PortableProgram.from_bytes(PortableProgram.from_graph(graph, signature).to_bytes()).bind(model)


def piece_of(whole: PiecewiseGraph) -> BuiltPiece:
    (piece,) = whole.split.pieces
    return whole.built(piece)


def as_it_stands(whole: PiecewiseGraph) -> Program:
    """The program of a whole graph, not compiled."""
    call = piece_of(whole).compile(Compiler.EAGER).call
    return Program(whole, {"piece_0": call}, kind="whole", intervals={})


def texts_of(graph: PiecewiseGraph) -> list[str]:
    return [str(graph.split.root), *(str(graph.built(piece).graph_module.graph) for piece in graph.split.pieces)]


# What is put together.


@settings(quick, max_examples=25)
@given(models(), st.booleans())
def test_random_models_do_the_same_in_one_graph(arguments: Any, with_y: bool) -> None:
    model, cut = graph_of(arguments, with_y, Compiler.EAGER)
    before = texts_of(cut)
    try:
        whole = whole_graph(cut, BUCKET)
    except CompileError as error:
        assert "depends on data" in str(error) or "one dtype" in str(error)  # noqa: PT017
        return
    assert texts_of(cut) == before
    assert_does_what(as_it_stands(whole), model, Compiler.EAGER, [BUCKET, BUCKET], with_y)
    from_elsewhere = whole_graph(bound(cut, model, inputs_of(BUCKET, with_y), DIMS), BUCKET)
    assert from_elsewhere.texts == whole.texts
    signature = InputContract(DIMS).bind(inputs_of(BUCKET, with_y)).signature
    portable = PortableProgram.from_bytes(PortableProgram.from_graph(whole, signature).to_bytes())
    assert portable.fingerprints == (whole.fingerprints["piece_0"],)
    assert portable.piece(portable.fingerprints[0]).fingerprint == whole.fingerprints["piece_0"]


def test_two_buckets_of_one_graph_are_apart() -> None:
    model = Fn(plain)
    cut = graph(model, x_of(5))
    small, large = whole_graph(cut, 3), whole_graph(cut, 8)
    assert small.fingerprints != large.fingerprints
    for whole, size in ((large, 8), (small, 3), (large, 8)):
        assert_same(run(as_it_stands(whole), x_of(size)), run_eager(model, x_of(size)))
    assert_same(run(as_it_stands(whole_graph(cut, 5)), x_of(5)), run_eager(model, x_of(5)))


def test_it_is_one_piece_with_the_facts_of_the_graph_that_was_cut() -> None:
    def function(m: Any, x: torch.Tensor) -> Any:
        y = applied(x * 2)
        x.add_(1)
        return {"y": y, "size": x.shape[0] * 2, "x": x, "text": "a"}

    cut = graph(Fn(function), x_of(5))
    whole = whole_graph(cut, 4)
    assert whole.traced is cut.traced
    assert whole.written_inputs == ("x",)
    assert whole.rows == cut.rows
    assert whole.num_distinct == 1
    assert [s.kind for s in whole.split.subgraphs] == ["piece"]
    assert len(whole.split.root.find_nodes(op="placeholder")) == len(cut.split.root.find_nodes(op="placeholder"))
    ours, theirs = x_of(4), x_of(4)
    got = as_it_stands(whole)(ours, {"tokens": 4}, {"tokens": 3})
    assert got["size"] == 6, "sizes without padding, as from any program"
    assert_same({**got, "size": 8}, run_eager(Fn(function), theirs))
    assert_same(ours, theirs)
    assert whole_graph(whole, 4) is whole


def test_writes_of_split_ops_do_not_count_as_writes_of_the_piece() -> None:
    def function(m: Any, x: torch.Tensor) -> torch.Tensor:
        accumulate(x, m.cache)
        return applied(x + m.cache)

    def writes(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.cache.add_(1)
        return applied(x + m.cache)

    for each, expected in ((function, False), (writes, True)):
        cut = graph(Fn(each, cache=torch.zeros(4)), x_of(5))
        assert cut.pieces_write_model is expected
        assert whole_graph(cut, 3).pieces_write_model is expected


def test_a_model_without_split_ops_has_a_piece_of_its_own() -> None:
    """An equal piece that was compiled for a bucket in another mode must not be taken for it."""
    cut = graph(Fn(lambda m, x: x * 2), x_of(5))
    whole = whole_graph(cut, 3)
    special = cut.built(cut.split.pieces[0]).specialized(3)
    assert piece_of(whole).canonical.text.startswith(special.canonical.text)
    assert whole.fingerprints["piece_0"] != special.fingerprint


class TakesMore(nn.Module):
    """Inputs and a size that only split ops take, views between split ops, a constant in a piece, and one twice."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("pair", torch.zeros(2, 4))

    def forward(self, x: torch.Tensor, z: torch.Tensor, fixed: torch.Tensor) -> Any:
        accumulate(z, self.pair[0])
        accumulate(fixed, self.pair[1])
        out = torch.empty_like(x)
        double(x.view(-1, 2, 2), out.view(-1, 2, 2))
        left, right = halves(out)
        y = left + right * torch.tensor([1.0, 2.0, 3.0, 4.0])
        return y, y + self.pair.sum(), (y * torch.tensor([1.0, 2.0, 3.0, 4.0])), self.pair


def test_what_only_split_ops_take_is_known_wherever_the_graph_comes_from() -> None:
    inputs = {**x_of(5), "z": torch.randn(6, 4), "fixed": torch.randn(4, 3).t()}
    dims = {"x": {0: "tokens"}, "z": {0: "rows"}}
    model, reference = TakesMore(), TakesMore()
    cut = graph(model, inputs, dims)
    for each in (cut, bound(cut, model, inputs, dims)):
        whole = whole_graph(each, 5)
        (fixed,) = [n for n in piece_of(whole).graph_module.graph.nodes if n.name == "fixed"]
        assert fixed.meta["example_value"].stride() == (1, 3)
        for num_rows in (6, 3, 0):
            now = {**inputs, "z": torch.randn(num_rows, 4)}
            assert_same(run(as_it_stands(whole), now, dims), run_eager(reference, now))


# What there is no whole forward of.


def test_a_size_outside_of_the_trace_is_refused() -> None:
    cut = graph(Fn(lambda m, x: applied(x * 2 if x.shape[0] > 3 else x)), x_of(5))
    assert str(cut.traced.interval) == "[4, inf)"
    with pytest.raises(CompileError, match=r"expected a number of tokens in \[4, inf\), .* got 3; take a trace"):
        whole_graph(cut, 3)
    with pytest.raises(CompileError, match="got the whole forward for 4 tokens; make the one for 5 from"):
        whole_graph(whole_graph(cut, 4), 5)


def test_a_size_that_depends_on_data_is_refused() -> None:
    cut = graph(Fn(lambda m, x: applied(x) + x[x[:, 0] > 0].sum(0)), x_of(5))
    with pytest.raises(CompileError, match="expected sizes that follow from those of the inputs"):
        whole_graph(cut, 5)


def test_a_tensor_that_is_more_than_its_layout_is_refused() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("held", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return applied(x) + self.held

    model = Model()
    cut = graph(model, x_of(5))
    model.held = torch.conj(torch.zeros(4, dtype=torch.complex64)).imag
    assert model.held.is_neg()
    with pytest.raises(CompileError, match="model tensor 'held': expected a dense torch.Tensor"):
        whole_graph(cut, 5)


def test_a_write_through_a_view_of_another_dtype_is_refused() -> None:
    """AOTAutograd would hand the operator the base's dtype, and the values would be other ones."""

    def function(m: Any, x: torch.Tensor) -> torch.Tensor:
        accumulate(x, m.cache.view(torch.float32))
        return applied(x)

    cut = graph(Fn(function, cache=torch.zeros(4, dtype=torch.int32)), x_of(5))
    with pytest.raises(CompileError, match="accumulate.default: expected to write into memory of one dtype"):
        whole_graph(cut, 5)


def test_a_forward_that_cannot_be_put_together_says_for_how_many_tokens() -> None:
    """`view` takes what its symbols allow; an odd number is found out where it is filled in."""
    cut = graph(Fn(lambda m, x: applied(x + 1)), x_of(4))
    (piece, *_) = cut.split.pieces
    (node,) = [n for n in cut.built(piece).graph_module.graph.nodes if n.op == "call_function" and "add" in n.name]
    node.args = (node.args[0], torch.nn.Identity())  # nothing that can be added
    with pytest.raises(CompileError, match="cannot be put together for 4 tokens .TypeError"):
        whole_graph(cut, 4)


# How it is compiled.


class Events(NullRecorder):
    """Keeps what was recorded and shown."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Mapping[str, Any]]] = []
        self.shown: list[str] = []

    def record(self, kind: str, *, seconds: float = 0.0, **detail: Any) -> None:
        assert seconds > 0
        self.events.append((kind, detail))

    def progress(
        self, title: str, *, total: int | None = None
    ) -> contextlib.AbstractContextManager[Callable[[], None]]:
        self.shown.append(title)
        return super().progress(title, total=total)


def test_it_is_compiled_once_and_its_artifact_serves_wherever_it_came_from(tmp_path: Path) -> None:
    """A worker gets the portable form of the whole, and nothing else."""

    def function(m: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        accumulate(x, m.cache)
        return applied(x @ m.weight) + m.cache, y * y.shape[0] + x.sum()

    dims = {"x": {0: "tokens"}, "y": {0: "rows"}}
    inputs = {**x_of(5), "y": torch.randn(7, 4)}
    model, reference = (Fn(function, cache=torch.ones(4), weight=torch.full((4, 4), 0.5)) for _ in range(2))
    cut = graph(model, inputs, dims)
    whole = whole_graph(cut, 5)
    content = PortableProgram.from_graph(whole, InputContract(dims).bind(inputs).signature).to_bytes()
    (fingerprint,) = (there := PortableProgram.from_bytes(content)).fingerprints
    built = there.piece(fingerprint)
    options = CompilerOptions(mode="max-autotune-no-cudagraphs")
    file = save_piece(built.compile(INDUCTOR, options), built, tmp_path, options=options)
    compiled: dict[Any, Any] = {(fingerprint, INDUCTOR): load_piece(file, piece_of(whole), INDUCTOR, options=options)}
    recorder = Events()
    program = whole.compile_whole(5, compiled, recorder, options)
    assert (whole.num_compiles, recorder.events) == (0, [])
    assert (program.kind, program.interval) == ("whole", Interval(5, 5))
    for num_rows in (7, 2, 0):
        now = {**x_of(5, seed=num_rows), "y": torch.randn(num_rows, 4)}
        assert_same(run(program, now, dims), run_eager(reference, now))
        assert_same(model.cache, reference.cache)
    again = bound(cut, model, inputs, dims).compile_whole(5, compiled, recorder, options)
    assert (again.graph.whole_bucket, recorder.events, recorder.shown) == (5, [], recorder.shown)
    assert set(recorder.shown) == {"compiling the whole forward for 5 tokens"}


def test_a_compile_is_recorded_with_its_bucket_and_mode() -> None:
    compiled: dict[Any, Any] = {}
    recorder = Events()
    cut = graph(Fn(plain), x_of(5))
    for _ in range(2):
        program = cut.compile_whole(2, compiled, recorder)
    assert_same(run(program, x_of(2)), run_eager(Fn(plain), x_of(2)))
    ((kind, detail),) = recorder.events
    assert kind == "compile_whole"
    assert {"bucket": 2, "mode": "default", "compiler": "inductor"}.items() <= detail.items()
    assert not program.holds_at({"tokens": 3})
    assert program.holds_padded_from(1)


def reads_before_it_is_written(m: Any, x: torch.Tensor) -> Any:
    """`a` is computed from what `double` then writes, and needed later."""
    a = x + 1
    double(a * 1, x)
    return nn.functional.relu(a, inplace=True), m.cache + 1


def reads_in_a_loop_of_another_shape(m: Any, x: torch.Tensor) -> Any:
    """What reads `out` after the operator wrote it is of the shape [20], and what is written to `a` of [5, 4]."""
    a = x + 1
    double(a, out := torch.empty_like(a))
    after = out + a
    a[:, 1:3].add_(2.0)
    return a, after


@pytest.mark.parametrize("function", [reads_before_it_is_written, reads_in_a_loop_of_another_shape])
def test_what_an_operator_writes_is_read_before_or_after_as_the_model_says(function: Any) -> None:
    """Wrong with Inductor as it is: the first with torch 2.11 to 2.14, the second with 2.11 and 2.13 on a CPU."""
    model = Fn(function, cache=torch.zeros(4))
    theirs = FallbackKernel.__dict__["create"], SchedulerNode.recompute_size_and_body
    program = graph(model, x_of(5)).compile_whole(5, {}, NullRecorder())
    assert (FallbackKernel.__dict__["create"], SchedulerNode.recompute_size_and_body) == theirs
    for seed in range(2):
        got, expected = x_of(5, seed=seed), x_of(5, seed=seed)
        assert_same(run(program, got), run_eager(model, expected))
        assert_same(got, expected)


COMPILED_STEPS = tuple(kind for kind in STEPS if kind not in ("complex", "masked"))
"""Inductor has no code for complex numbers, and a mask makes a size that depends on data."""


@settings(quick, max_examples=3)
@given(models(COMPILED_STEPS))
def test_random_models_compiled_whole(arguments: Any) -> None:
    model, cut = graph_of(arguments, True, Compiler.EAGER)
    program = cut.compile_whole(BUCKET, {}, NullRecorder(), EXACT)
    reference = copy.deepcopy(model)
    got, expected = inputs_of(BUCKET, True), inputs_of(BUCKET, True)
    assert_close(run(program, got, DIMS), run_eager(reference, expected))
    assert_close(got, expected)
    assert_close(dict(model.named_buffers()), dict(reference.named_buffers()))


def assert_close(got: Any, expected: Any) -> None:
    """Close by the largest element: differences of large numbers are drawn too."""
    for left, right in zip(*(torch.utils._pytree.tree_leaves(value) for value in (got, expected)), strict=True):
        if isinstance(right, torch.Tensor):
            largest = float(right.nan_to_num(0, 0, 0).abs().amax()) if right.numel() else 0.0
            torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-3 * (1 + largest), equal_nan=True)
        else:
            assert left == right


# A KV cache is written where it is.

ROWS = 3001
"""Of a cache; nothing else in these models has so many elements, or a multiple of them."""


@split_op(mutates_args=("k_cache", "v_cache"), name="piecework_whole::store", capturable=True)
def store(k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    """Adds to the first rows of the caches."""
    k_cache[: len(k)].add_(k)
    v_cache[: len(v)].add_(v)


@split_op(mutates_args=("out",), name="piecework_whole::attend", capturable=True)
def attend(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor) -> None:
    """out = q k + v."""
    out.copy_(q * k_cache[: len(q)] + v_cache[: len(q)])


@split_op(mutates_args=("k_cache", "v_cache", "out"), name="piecework_whole::both", capturable=True)
def both(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """`store`, then `attend`."""
    store(k, v, k_cache, v_cache)
    attend(q, k_cache, v_cache, out)


Caches = tuple[torch.Tensor, torch.Tensor]


class CacheLayer(nn.Module):
    """Projections, and caches that the layer holds as one of LAYOUTS has them."""

    def __init__(self, held: tuple[torch.Tensor, ...], caches: Callable[..., Caches], *, apart: bool) -> None:
        super().__init__()
        self.qkv, self.apart, self.caches = nn.Linear(4, 12), apart, caches
        for i, tensor in enumerate(held):
            setattr(self, f"cache_{i}", tensor)
        self.names = [f"cache_{i}" for i in range(len(held))]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).split(4, -1)
        k_cache, v_cache = self.caches(*(getattr(self, name) for name in self.names))
        out = torch.empty_like(q)
        if self.apart:
            store(k, v, k_cache, v_cache)
            attend(q, k_cache, v_cache, out)
        else:
            both(q, k, v, k_cache, v_cache, out)
        return x + out.relu()


def _own(num_layers: int) -> list[tuple[torch.Tensor, ...]]:
    return [(torch.zeros(ROWS, 4), torch.zeros(ROWS, 4)) for _ in range(num_layers)]


def _cut_out_of_one(num_layers: int) -> list[tuple[torch.Tensor, ...]]:
    return [(k, v) for k, v in torch.zeros(num_layers, 2, ROWS, 4)]


def _alternating(num_layers: int) -> list[tuple[torch.Tensor, ...]]:
    return [(blocks[:, 0], blocks[:, 1]) for blocks in torch.zeros(num_layers, ROWS, 2, 4)]


def _one_for_all(num_layers: int) -> list[tuple[torch.Tensor, ...]]:
    return _own(1) * num_layers


def _overlapping(num_layers: int) -> list[tuple[torch.Tensor, ...]]:
    return [(rows[: ROWS // 2 + 9], rows[ROWS // 2 :]) for rows in torch.zeros(num_layers, ROWS, 4)]


LAYOUTS: Mapping[str, tuple[Callable[[int], list[tuple[torch.Tensor, ...]]], Callable[..., Caches]]] = {
    "own": (_own, lambda k, v: (k, v)),
    "cut out of one": (_cut_out_of_one, lambda k, v: (k, v)),
    "alternating": (_alternating, lambda k, v: (k, v)),
    "one for all layers": (_one_for_all, lambda k, v: (k, v)),
    "views that the forward makes": (lambda n: [(t,) for t in torch.zeros(n, ROWS, 8)], lambda kv: kv.chunk(2, -1)),
    "overlapping": (_overlapping, lambda k, v: (k, v)),
}


def cache_model(layout: str, *, apart: bool, num_layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    held, caches = LAYOUTS[layout]
    with torch.inference_mode():
        layers = [CacheLayer(each, caches, apart=apart) for each in held(num_layers)]
    return nn.Sequential(*layers).requires_grad_(False)


class Named(nn.Module):
    """A module whose input is called x."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


def compiled_with_code(whole: PiecewiseGraph, options: CompilerOptions = EXACT) -> tuple[Program, str]:
    """The program of a whole graph, and the code that Inductor generated."""
    assert whole.whole_bucket is not None
    with inductor_config.patch(force_disable_caches=True):
        compiled: dict[Any, Any] = {}
        program, code = run_and_get_code(
            lambda: whole.compile_whole(whole.whole_bucket, compiled, NullRecorder(), options)
        )
    return program, "\n".join(code)


def peak_bytes(call: Callable[[], Any]) -> int:
    """The most bytes that torch's CPU allocator had given at once during a call, beyond those of before."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profile:
        call()
    # Generated code allocates outside of operators, so that operators' own numbers have nothing of it.
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in events))


def large_sizes(code: str, num_elements: int) -> set[str]:
    """Allocations and loops in generated code of so many elements or more."""
    found = set()
    for line in code.splitlines():
        allocated = re.search(r"empty_strided\w*\(\(([\d, ]*)\)", line)
        if allocated:
            sizes = [int(size) for size in allocated[1].split(",") if size.strip()]
            if torch.Size(sizes).numel() >= num_elements:
                found.add(line.strip())
        loops = re.search(r"for\(int64_t \w+=.*<static_cast<int64_t>\((\d+)L?\)", line)
        if loops and int(loops[1]) >= num_elements:
            found.add(line.strip())
        if "clone(" in line or ".copy_(" in line:
            found.add(line.strip())
    return found


def check_no_copy(layout: str, *, apart: bool) -> None:
    """Compiles a model and runs it against its eager forward; nothing of a cache's size is allocated or gone over."""
    model, reference = (Named(cache_model(layout, apart=apart)) for _ in range(2))
    program, code = compiled_with_code(whole_graph(graph(model, x_of(5)), 5))
    for seed in range(2):
        assert_same(run(program, x_of(5, seed=seed)), run_eager(reference, x_of(5, seed=seed)))
        layers: list[Any] = [model.layers, reference.layers]
        for ours, theirs in zip(*layers, strict=True):
            assert all(torch.equal(getattr(ours, name), getattr(theirs, name)) for name in ours.names)
    assert not large_sizes(code, ROWS)
    assert peak_bytes(lambda: run(program, x_of(5))) < ROWS


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cache_is_not_copied_where_store_and_attention_are_two_operators(layout: str) -> None:
    check_no_copy(layout, apart=True)


def test_a_cache_is_not_copied_where_one_operator_writes_and_reads_it() -> None:
    check_no_copy("cut out of one", apart=False)


def test_a_copy_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches in one allocation that may overlap, as far as the compiler knows, are made anew for each write."""
    monkeypatch.setattr(whole_inputs, "may_overlap", lambda left, right: True)
    model = Named(cache_model("cut out of one", apart=True))
    program, code = compiled_with_code(whole_graph(graph(model, x_of(5)), 5))
    assert large_sizes(code, ROWS)
    assert peak_bytes(lambda: run(program, x_of(5))) > ROWS * 4 * 4


def test_a_llama_with_paged_attention_in_the_mode_that_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal to the eager forward and the general program; the caches are written in place."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")  # scripts, which no package has
    model = importlib.import_module("llama").Llama("cpu", torch.float32, num_layers=2, shape="tiny", num_blocks=1024)
    caches = [cache for layer in model.decoder.layers for cache in (layer.self_attn.k_cache, layer.self_attn.v_cache)]
    dims = {"input_ids": {0: "tokens"}, "positions": {0: "tokens"}}
    inputs, _ = model.decode_step(4, 20)
    cut = graph(model.decoder, inputs, dims)
    program, code = compiled_with_code(whole_graph(cut, 4), CompilerOptions(mode="max-autotune-no-cudagraphs"))
    general = cut.compile_general(Compiler.EAGER, {}, NullRecorder())
    before = [cache.clone() for cache in caches]
    for seed in range(3):
        inputs, context = model.decode_step(4, 20, seed=seed)
        results, written = [], []
        calls = [lambda i=inputs, p=p: run(p, i, dims) for p in (general, program)]
        for call in (lambda i=inputs: model.decoder(**i), *calls):
            with torch.inference_mode(), use_context(context):
                for cache, value in zip(caches, before, strict=True):
                    cache.copy_(value)
                results.append(call())
            written.append([cache.clone() for cache in caches])
        for result, values in zip(results[1:], written[1:], strict=True):
            torch.testing.assert_close(result, results[0], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(values, written[0], rtol=1e-4, atol=1e-5)
        assert any(not torch.equal(cache, value) for cache, value in zip(caches, before, strict=True))
    # The vocabulary of 256 by the width of 64 is the largest of the other tensors.
    assert caches[0].numel() > 1 << 17
    assert not large_sizes(code, 1 << 17)
    with torch.inference_mode(), use_context(context):
        assert peak_bytes(lambda: run(program, inputs, dims)) < caches[0].nbytes // 8


# Which tensors are apart.


@st.composite
def layouts(draw: st.DrawFn) -> torch.Tensor:
    """A view of 64 bytes."""
    dtype = draw(st.sampled_from([torch.int8, torch.int16, torch.int32]))
    num_elements = 64 // dtype.itemsize
    sizes = draw(st.lists(st.integers(0, 4), min_size=0, max_size=3))
    strides = [draw(st.integers(0, num_elements // 2)) for _ in sizes]
    last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True) if size)
    offset = draw(st.integers(0, num_elements - 1))
    if 0 not in sizes and offset + last >= num_elements:
        sizes = [1 for _ in sizes]
    return MEMORY.view(dtype).as_strided(sizes, strides, offset)


MEMORY = torch.zeros(64, dtype=torch.int8)


def bytes_of(tensor: torch.Tensor) -> set[int]:
    size = tensor.dtype.itemsize
    places = torch.arange(MEMORY.numel() // size).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return {place * size + i for place in places.flatten().tolist() for i in range(size)}


@settings(max_examples=400)
@given(layouts(), layouts())
def test_tensors_that_are_told_apart_have_no_byte_in_common(left: torch.Tensor, right: torch.Tensor) -> None:
    assert may_overlap(describe(left), describe(right)) == may_overlap(describe(right), describe(left))
    if bytes_of(left) & bytes_of(right):
        assert may_overlap(describe(left), describe(right))


def test_the_usual_ways_to_cut_an_allocation_are_told_apart() -> None:
    whole = torch.zeros(2, 6, 2, 4)
    pairs = [
        (whole[0], whole[1]),
        (whole[:, :3], whole[:, 3:]),
        (whole[:, :, 0], whole[:, :, 1]),
        (whole[0, :, 0], whole[1, 1:, 1]),
        (whole[..., :1], whole[..., 1:]),
        (whole.view(torch.int16)[0], whole[1]),
        (whole[0, :0], whole),
        (whole[..., ::2], whole[..., 1::2]),
        (whole[0].transpose(0, 1), whole[1]),
    ]
    for left, right in pairs:
        assert not may_overlap(describe(left), describe(right))
    for left, right in [(whole, whole), (whole[0], whole[:, 0]), (whole[0, :4], whole[0, 3:])]:
        assert may_overlap(describe(left), describe(right))
