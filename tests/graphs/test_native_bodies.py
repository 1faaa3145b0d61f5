"""Operators of kernels in a whole forward: native bodies come in their places, and nothing else changes.

The operators here compute something else than their bodies, so that a result says who ran.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._ops import OpOverload

from piecework.errors import CompileError
from piecework.graphs.inputs import InputContract
from piecework.graphs.native_bodies import Bodies, expand
from piecework.graphs.portable import PortableProgram
from piecework.graphs.stitched import PiecewiseGraph
from piecework.graphs.whole import whole_graph
from piecework.ops.activation import silu_and_mul
from piecework.ops.fused import is_traced
from piecework.ops.norm import fused_add_rms_norm, rms_norm
from piecework.ops.opaque import like_first, like_two, opaque, with_half
from piecework.ops.rotary import qk_norm_rotary, rotary_embedding

from .test_whole import as_it_stands, bound, compiled_with_code, graph, piece_of, texts_of
from .toys import TOKENS_FIRST, Fn, applied, assert_same, run, run_eager, x_of


@opaque("tests_shifted", fake=like_first)
def shifted(x: torch.Tensor, by: float = 10.0) -> torch.Tensor:
    return x + by


@opaque("tests_pair", fake=like_two)
def pair(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x + 10, y + 20


TRACED: list[bool] = []
"""One for each trace of `own_shift`: whether it knew of it."""


def own_shift(value: torch.Tensor, offset: float) -> torch.Tensor:
    TRACED.append(is_traced())
    return value * 2 + offset


def swapped(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Its arguments themselves, which an operator would never return."""
    return second, first


BODIES: Bodies = {shifted: own_shift, pair: swapped}


def targets(whole: PiecewiseGraph) -> set[Any]:
    """What the nodes of a whole graph call, nested ones too."""
    modules = piece_of(whole).graph_module.modules()
    return {node.target for m in modules if isinstance(m, torch.fx.GraphModule) for node in m.graph.nodes}


def both(function: Any, reference: Any, bodies: Bodies = BODIES, **tensors: torch.Tensor) -> PiecewiseGraph:
    """The whole graph of `function` with bodies does what `reference` does; without them and before it is unchanged."""
    model, expected = Fn(function, **tensors), Fn(reference, **tensors)
    cut = graph(model, x_of(5))
    before = texts_of(cut)
    whole = whole_graph(cut, 3, bodies)
    assert_same(run(as_it_stands(whole), x_of(3)), run_eager(expected, x_of(3)))
    assert not targets(whole) & set(bodies)
    assert texts_of(cut) == before
    kept = whole_graph(cut, 3)
    assert targets(kept) & set(bodies)
    assert_same(run(as_it_stands(kept), x_of(3)), run_eager(model, x_of(3)))
    assert whole.fingerprints != kept.fingerprints
    assert whole.rows == kept.rows
    from_elsewhere = whole_graph(bound(cut, model, x_of(5)), 3, bodies)
    assert from_elsewhere.texts == whole.texts
    return whole


def test_a_body_takes_the_place_of_each_call() -> None:
    TRACED.clear()
    both(
        lambda m, x: shifted(applied(shifted(x)), by=3.0) + shifted(x + 1),
        lambda m, x: applied(x * 2 + 10) * 2 + 3 + ((x + 1) * 2 + 10),
    )
    # In each of two whole graphs: one trace a default, one for the other number.
    assert TRACED == [True] * 4
    assert not is_traced()


def test_a_result_may_be_what_the_model_returns() -> None:
    both(lambda m, x: (shifted(x), applied(x), 3), lambda m, x: (x * 2 + 10, applied(x), 3))


def test_results_are_memory_of_their_own() -> None:
    """As those of an operator are: what the model writes into one is in nothing else."""

    def function(m: Any, x: torch.Tensor, call: Any = pair) -> Any:
        first, second = call(x, m.held)
        first.add_(1)
        second.mul_(3)
        return first, second, applied(x), m.held + 0

    def reference(m: Any, x: torch.Tensor) -> Any:
        return function(m, x, lambda a, b: (b.clone(), a.clone()))

    both(function, reference, held=torch.arange(20.0).view(5, 4)[:3].clone().expand(3, 4))
    both(lambda m, x: (pair(x, x)[0], applied(x)), lambda m, x: (x, applied(x)))
    turned = {shifted: lambda x, by: x.t().contiguous().t() + by}
    whole = both(lambda m, x: shifted(applied(x)).view(-1), lambda m, x: (applied(x) + 10).view(-1), turned)
    assert any("contiguous_format" in text for text in whole.texts.values())


def test_constants_of_a_body_come_along() -> None:
    def body(x: torch.Tensor, by: float) -> torch.Tensor:
        return x + torch.tensor([by, 0.0, 0.0, 1.0])

    whole = both(
        lambda m, x: shifted(applied(shifted(x))) + shifted(x, by=2.0),
        lambda m, x: body(applied(body(x, 10.0)), 10.0) + body(x, 2.0),
        {shifted: body},
    )
    # Of each number one, which two of the calls share.
    assert len(list(piece_of(whole).graph_module.buffers())) == 2


def test_calls_in_nested_graphs() -> None:
    def function(m: Any, x: torch.Tensor) -> torch.Tensor:
        chosen = torch.cond(m.flag, lambda a: shifted(a) + 1, lambda a: shifted(a, by=2.0), (m.held,))
        return applied(x + chosen) + torch.cond(m.flag, lambda a: a + 1, lambda a: a - 1, (m.held,))

    def reference(m: Any, x: torch.Tensor) -> torch.Tensor:
        chosen = m.held * 2 + 11 if m.flag else m.held * 2 + 2
        return applied(x + chosen) + (m.held + 1 if m.flag else m.held - 1)

    for flag in (True, False):
        tensors = {"flag": torch.tensor(flag), "held": torch.arange(4.0)}
        cut = graph(Fn(function, **tensors), x_of(5))
        nested = [m for p in cut.split.pieces for m in cut.built(p).graph_module.modules()]
        before = [str(m.graph) for m in nested if isinstance(m, torch.fx.GraphModule)]
        whole = whole_graph(cut, 3, BODIES)
        kept = whole_graph(cut, 3)
        for each, expected in ((whole, reference), (kept, function)):
            assert_same(run(as_it_stands(each), x_of(3)), run_eager(Fn(expected, **tensors), x_of(3)))
        assert (shifted in targets(whole), shifted in targets(kept)) == (False, True)
        assert [str(m.graph) for m in nested if isinstance(m, torch.fx.GraphModule)] == before


def test_sizes_of_other_dims_stay_symbolic() -> None:
    dims = {"x": {0: "tokens"}, "y": {0: "rows"}}
    model = Fn(lambda m, x, y: (applied(shifted(x)), shifted(y).sum(0)))
    reference = Fn(lambda m, x, y: (applied(x * 2 + 10), (y * 2 + 10).sum(0)))
    cut = graph(model, {**x_of(5), "y": torch.randn(6, 4)}, dims)
    whole = whole_graph(cut, 3, BODIES)
    for num_rows in (6, 2, 0):
        now = {**x_of(3), "y": torch.randn(num_rows, 4)}
        assert_same(run(as_it_stands(whole), now, dims), run_eager(reference, now))
    assert shifted not in targets(whole)


def test_a_body_that_fails_says_so() -> None:
    def failing(x: torch.Tensor, by: float) -> torch.Tensor:
        raise ValueError("no such size")

    cut = graph(Fn(lambda m, x: applied(shifted(x))), x_of(5))
    with pytest.raises(CompileError, match=r"cannot be put together for 3 tokens \(ValueError: no such size\)"):
        whole_graph(cut, 3, {shifted: failing})


def test_a_graph_without_such_calls_is_left_alone() -> None:
    cut = graph(Fn(lambda m, x: applied(x)), x_of(5))
    built = piece_of(whole_graph(cut, 3))
    before = str(built.graph_module.graph)
    expand(built.graph_module, BODIES, built.fake_mode)
    assert str(built.graph_module.graph) == before
    assert whole_graph(cut, 3, BODIES).fingerprints == whole_graph(cut, 3).fingerprints


def test_the_generated_code_has_the_body_and_it_travels() -> None:
    model = Fn(lambda m, x: shifted(applied(x)) * m.scale, scale=torch.full((4,), 0.5))
    cut = graph(model, x_of(5))
    code = {}
    for name, bodies in (("bodies", BODIES), ("operators", {})):
        whole = whole_graph(cut, 3, bodies)
        program, code[name] = compiled_with_code(whole)
        expected = (applied(x_of(3)["x"]) * 2 + 10) * 0.5 if bodies else (applied(x_of(3)["x"]) + 10) * 0.5
        assert_same(run(program, x_of(3)), expected)
        signature = InputContract(TOKENS_FIRST).bind(x_of(5)).signature
        portable = PortableProgram.from_bytes(PortableProgram.from_graph(whole, signature).to_bytes())
        assert portable.piece(portable.fingerprints[0]).fingerprint == whole.fingerprints["piece_0"]
    assert "tests_shifted" in code["operators"]
    assert "tests_shifted" not in code["bodies"]


# Ours.


@opaque("tests_norm", fake=like_first)
def norm_operator(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return rms_norm.native(x, weight, eps)


@opaque("tests_add_norm", fake=like_two)
def add_norm_operator(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, variance_size: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    return fused_add_rms_norm.native(x, residual, weight, eps, variance_size)


@opaque("tests_silu", fake=with_half)
def silu_operator(gate_up: torch.Tensor) -> torch.Tensor:
    return silu_and_mul.native(gate_up)


@opaque("tests_rotary", fake=like_two)
def rotary_operator(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return rotary_embedding.native(q, k, cos, sin)


@opaque("tests_qk_norm", fake=like_two)
def qk_norm_operator(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return qk_norm_rotary.native(q, k, q_weight, k_weight, cos, sin, eps)


OURS: dict[OpOverload, Any] = {
    norm_operator: rms_norm,
    add_norm_operator: fused_add_rms_norm,
    silu_operator: silu_and_mul,
    rotary_operator: rotary_embedding,
    qk_norm_operator: qk_norm_rotary,
}


class Layer(nn.Module):
    """One of each of our fused ops that a layer may have, as operators."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.linspace(0.5, 1.5, 4))

    def forward(self, x: torch.Tensor) -> Any:
        normed, total = add_norm_operator(x, applied(norm_operator(x, self.weight, 1e-5)), self.weight, 1e-5, 3)
        heads = normed.view(-1, 1, 4)
        angles = total[:, :2].contiguous()
        q, k = rotary_operator(heads, heads, angles, angles)
        q, k = qk_norm_operator(q, k, self.weight, self.weight, angles, angles, 1e-5)
        return applied(silu_operator(torch.cat((q, k), -1).view(-1, 8))), total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_our_native_bodies(dtype: torch.dtype) -> None:
    model = Layer().to(dtype)
    inputs = {"x": x_of(5)["x"].to(dtype)}
    cut = graph(model, inputs)
    whole = whole_graph(cut, 5, {operator: op.native for operator, op in OURS.items()})
    assert not targets(whole) & set(OURS)
    assert targets(whole_graph(cut, 5)) >= set(OURS)
    got, expected = run(as_it_stands(whole), inputs), run_eager(model, inputs)
    # The sum is that of the wide dtype, rounded: what eager code has anyway.
    assert_same(got, expected)
