"""The dump is Python that runs and equals the model, in a process that knows nothing of Piecework's graphs."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from piecework.graphs.dump import dump_program
from piecework.graphs.inputs import InputContract
from piecework.graphs.stitched import PiecewiseGraph

from .toys import Fn, accumulate, applied, assert_same, halves, run_eager, trace_model

X = {"x": torch.randn(3, 4)}
GLOBAL = torch.full((4,), 3.0)


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports the `program.py` of a dump in `tmp_path`."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield lambda: importlib.import_module("program")
    for name in set(sys.modules) - before:
        if name == "program" or name.startswith("piece_"):
            del sys.modules[name]


def tensors_of(model: nn.Module) -> dict[str, Any]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def layers(m: Any, x: torch.Tensor) -> Any:
    for _ in range(3):
        x = applied(x @ m.weight) + x
    accumulate(x, m.cache)
    first, second = halves(x)
    return first * second + m.cache, x.shape[0]


def arithmetic(m: Any, x: torch.Tensor) -> Any:
    n = x.shape[0]
    y = applied(x + (n // 2) + n**2 - n % 3 + max(n, 2) + min(n, 9))
    return y * -n / (n + 1) + torch.arange(n)[:, None], math.inf * y, y.clamp(max=2.0), y[..., ::2], ~(y > 0)


def constants(m: Any, x: torch.Tensor) -> Any:
    table = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    return (applied(x + GLOBAL) + table).to(torch.float16), torch.zeros(2, device="cpu"), x.t()


def in_place(m: Any, x: torch.Tensor) -> Any:
    y = x * 1
    y += 1
    y[0] = 5
    y.mul_(2)
    m.cache.add_(1)
    return torch.nn.functional.silu(applied(y)), torch.nn.functional.gelu(y, approximate="tanh")


@pytest.mark.parametrize("function", [layers, arithmetic, constants, in_place])
def test_a_dump_runs_and_equals_the_model(function, tmp_path, load):
    model = Fn(function, weight=torch.randn(4, 4), cache=torch.zeros(4))
    graph = PiecewiseGraph.from_trace(trace_model(model, X), InputContract({"x": 0}))
    path = dump_program(graph, tmp_path)
    assert path == tmp_path / "program.py"
    program = load()
    reference = Fn(function, weight=model.weight.clone(), cache=torch.zeros(4))
    for n in (3, 7):
        inputs = {"x": torch.randn(n, 4)}
        with torch.inference_mode():
            outputs = program.forward(inputs, tensors_of(model), {"tokens": n})
        expected = run_eager(reference, inputs)
        expected = [e for e in expected if isinstance(e, torch.Tensor)]
        assert_same([o for o in outputs if isinstance(o, torch.Tensor)], expected)
    assert_same(model.cache, reference.cache)


def test_a_dump_is_readable(tmp_path):
    """One file a distinct piece, named by its fingerprint; the main file says where it was cut and for which sizes."""
    model = Fn(layers, weight=torch.randn(4, 4), cache=torch.zeros(4))
    graph = PiecewiseGraph.from_trace(trace_model(model, X), InputContract({"x": 0}))
    text = dump_program(graph, tmp_path / "deep" / "dump").read_text()
    pieces = sorted(p.name for p in (tmp_path / "deep" / "dump").glob("piece_*.py"))
    assert len(pieces) == graph.num_distinct
    assert pieces == sorted({f"piece_{f[:12]}.py" for f in graph.fingerprints.values()})
    assert "split at piecework_toys::accumulate, piecework_toys::double, piecework_toys::halves" in text
    assert "valid for [0, inf) tokens" in text
    assert "tensors['weight']" in text
    assert "inputs['x']" in text
