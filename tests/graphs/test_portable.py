"""A program leaves the process, is bound to a live model in another one, and does there what the model does."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import piecework
from piecework.errors import PortableError
from piecework.graphs.encode import encode_function
from piecework.graphs.inputs import InputContract
from piecework.graphs.portable import PortableProgram
from piecework.graphs.recorder import NullRecorder
from piecework.graphs.stitched import PiecewiseGraph
from piecework.phases import Compiler

from .portable_models import CASES, SIZES, Aliasing, Case, Layered, Tied, made, results
from .toys import Fn, accumulate, applied, assert_same, run_eager, trace_model

X = {"x": torch.linspace(-1, 1, 12).reshape(3, 4)}
ROOT = Path(piecework.__file__).parent


def graph_of(case: Case, model: nn.Module | None = None) -> PiecewiseGraph:
    traced = trace_model(model if model is not None else made(case), case.inputs(5), case.dynamic_dims)
    return PiecewiseGraph.from_trace(traced, InputContract(case.dynamic_dims))


def portable_of(case: Case, model: nn.Module | None = None) -> PortableProgram:
    signature = InputContract(case.dynamic_dims).bind(case.inputs(5)).signature
    return PortableProgram.from_graph(graph_of(case, model), signature)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
def test_another_process_runs_what_this_one_traced(compiler: str, tmp_path: Path) -> None:
    for name, case in CASES.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "program").write_bytes(portable_of(case).to_bytes())
    command = [sys.executable, "-W", "ignore", "-m", "tests.graphs.portable_models", str(tmp_path), compiler]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name, case in CASES.items():
        got, buffers = pickle.loads((tmp_path / name / "results").read_bytes())
        model = made(case)
        for size, result in zip((*SIZES, SIZES[-1]), got, strict=True):
            assert_same(result, run_eager(model, case.inputs(size)))
        assert_same(buffers, dict(model.named_buffers()))


@pytest.mark.parametrize("name", CASES)
def test_a_round_trip_changes_nothing(name: str) -> None:
    case = CASES[name]
    model = made(case)
    graph = graph_of(case, model)
    signature = InputContract(case.dynamic_dims).bind(case.inputs(5)).signature
    content = PortableProgram.from_graph(graph, signature).to_bytes()
    loaded = PortableProgram.from_bytes(content)
    bound = loaded.bind(model)
    assert loaded.signature == signature
    assert loaded.torch_version == torch.__version__
    assert loaded.fingerprints == tuple(graph.distinct_pieces())
    assert bound.texts == graph.texts
    assert [bound.built(p).canonical.text for p in bound.split.pieces] == list(graph.texts.values())
    assert bound.traced.intervals == graph.traced.intervals
    assert bound.traced.mode == graph.traced.mode
    assert bound.traced.frozen == graph.traced.frozen
    assert bound.rows == graph.rows
    assert bound.reduced == graph.reduced
    assert bound.split.matches == graph.split.matches
    assert bound.split.num_opaque == graph.split.num_opaque
    assert PortableProgram.from_graph(bound, signature).to_bytes() == content
    assert portable_of(case).to_bytes() == content, "the same in another trace of another instance"


def test_pieces_are_shared_with_those_of_a_trace() -> None:
    """A bound program compiles nothing that a trace in this process has compiled, whatever dims it is over."""
    case = CASES["two dims"]
    graph = graph_of(case)
    compiled: Any = {}
    graph.compile_general(Compiler.AOT_EAGER, compiled, NullRecorder())
    known = dict(compiled)
    model = made(case)
    program = portable_of(case).bind(model).compile_general(Compiler.AOT_EAGER, compiled, NullRecorder())
    assert compiled == known
    assert_same(results(program, case, 4), run_eager(model, case.inputs(4)))


def test_a_piece_travels_alone() -> None:
    case = CASES["layers"]
    portable = PortableProgram.from_bytes(portable_of(case).to_bytes())
    pieces = [portable.piece(fingerprint) for fingerprint in portable.fingerprints]
    assert tuple(piece.fingerprint for piece in pieces) == portable.fingerprints
    for piece in pieces:
        assert set(piece.dims) == {"tokens"}
        assert piece.compile(Compiler.AOT_EAGER).intervals.keys() == {"s0"}


def test_every_node_of_a_built_piece_has_a_value() -> None:
    """Without, AOTAutograd refuses to make an artifact that can be saved."""
    portable = PortableProgram.from_bytes(portable_of(CASES["layers"]).to_bytes())
    for fingerprint in portable.fingerprints:
        for node in portable.piece(fingerprint).graph_module.graph.nodes:
            assert node.op == "output" or "example_value" in node.meta


def test_weights_that_were_replaced_are_followed() -> None:
    case = CASES["layers"]
    model = made(case)
    program = portable_of(case).bind(model).compile_general(Compiler.EAGER, {}, NullRecorder())
    model.layers[2][0].weight = nn.Parameter(torch.ones(4, 4), requires_grad=False)
    model.cache = torch.ones(4)
    reference = copy.deepcopy(model)
    assert_same(results(program, case, 4), run_eager(reference, case.inputs(4)))


# What does not fit is refused, all of it at once.


def changed(model: nn.Module, change: Any) -> nn.Module:
    change(model)
    return model


def drop_layer(model: Any) -> None:
    del model.layers[4]


def reshape(model: Any) -> None:
    model.layers[1][0].weight = nn.Parameter(torch.ones(5, 4), requires_grad=False)
    model.layers[2][0].bias = nn.Parameter(torch.ones(5), requires_grad=False)


def cast(model: Any) -> None:
    model.cache = model.cache.double()


def restride(model: Any) -> None:
    model.layers[0][0].weight = nn.Parameter(torch.ones(4, 4).t(), requires_grad=False)


def tie(model: Any) -> None:
    model.layers[0][0].bias = model.layers[1][0].bias


def untie(model: Any) -> None:
    model.head.weight = nn.Parameter(model.head.weight.clone(), requires_grad=False)


def part(model: Any) -> None:
    model.row = model.row.clone()


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (Layered, drop_layer, r"layers\.4\.0\.weight: there is none\n  layers\.4\.0\.bias: there is none"),
        (
            Layered,
            reshape,
            r"layers\.1\.0\.weight: expected torch\.float32\[4, 4\].*got torch\.float32\[5, 4\]",
        ),
        (Layered, cast, r"cache: expected torch\.float32\[4\].*got torch\.float64\[4\]"),
        (Layered, restride, r"strides \[4, 1\], got .*strides \[1, 4\]"),
        (Layered, tie, r"layers\.0\.0\.bias, layers\.1\.0\.bias: share memory here, and did not"),
        (Tied, untie, r"head\.weight: expected the tensor that is embedding\.weight, got another"),
        (Aliasing, part, r"(row|whole): shared memory with another tensor, and does not here"),
    ],
)
def test_a_model_that_does_not_fit(kind: type[nn.Module], change: Any, message: str) -> None:
    case = next(case for case in CASES.values() if case.model is kind)
    with pytest.raises(PortableError, match=message) as caught:
        portable_of(case).bind(changed(made(case), change))
    assert "make a program for this one" in str(caught.value)


def test_a_model_of_another_class_is_one_error() -> None:
    with pytest.raises(PortableError, match=r"Linear(.|\n)*and 3 more"):
        portable_of(CASES["layers"]).bind(nn.Linear(4, 4))


def test_any_bit_that_is_flipped_is_noticed() -> None:
    """The stitch, the constants and the output are in no fingerprint; a checksum covers them."""
    content = portable_of(CASES["constants, backed"]).to_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    for place in (*range(8, header, 97), *range(header, len(content), 5)):
        broken = bytearray(content)
        broken[place] ^= 1
        try:
            loaded = PortableProgram.from_bytes(bytes(broken))
        except PortableError:
            continue
        assert loaded.to_bytes() == content, "only what is not read may differ"


def test_another_torch_made_it() -> None:
    portable = portable_of(CASES["layers"])
    PortableProgram({**portable._data, "torch": f"{torch.__version__.partition('+')[0]}+cu999"}, {}).bind(
        made(CASES["layers"])
    )
    other = PortableProgram({**portable._data, "torch": "1.0.0"}, {})
    with pytest.raises(PortableError, match=r"made with torch 1\.0\.0, and this is"):
        other.bind(made(CASES["layers"]))


def test_an_unknown_fingerprint() -> None:
    with pytest.raises(PortableError, match="expected one of the fingerprints"):
        portable_of(CASES["layers"]).piece("unknown")


def test_what_is_not_bytes() -> None:
    with pytest.raises(PortableError, match="got NoneType; read the file first"):
        PortableProgram.from_bytes(None)


WRITTEN = torch.zeros(4)
FROZEN_CONJUGATE = torch.complex(torch.ones(4), torch.ones(4)).conj()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda m, x: (accumulate(x, WRITTEN), x + WRITTEN)[1], "writes into a tensor that is no attribute"),
        (lambda m, x: applied(x) + FROZEN_CONJUGATE.real, "lazy conjugate"),
    ],
)
def test_frozen_tensors_that_cannot_travel(function: Any, message: str) -> None:
    graph = PiecewiseGraph.from_trace(trace_model(Fn(function), X), InputContract({"x": 0}))
    with pytest.raises(PortableError, match=message):
        PortableProgram.from_graph(graph, InputContract({"x": 0}).bind(X).signature)


ODD = torch.arange(17, dtype=torch.uint8)[:16].view(torch.float32)


def test_a_constant_in_an_odd_number_of_bytes() -> None:
    model = Fn(lambda m, x: applied(x) + ODD)
    graph = PiecewiseGraph.from_trace(trace_model(model, X), InputContract({"x": 0}))
    content = PortableProgram.from_graph(graph, InputContract({"x": 0}).bind(X).signature).to_bytes()
    program = PortableProgram.from_bytes(content).bind(model).compile_general(Compiler.EAGER, {}, NullRecorder())
    case = Case(model=Layered, dynamic_dims={"x": {0: "tokens"}}, inputs=lambda n: X)
    assert_same(results(program, case, 3), run_eager(model, X))


@pytest.mark.parametrize("damage", ["empty", "text", "truncated", "another safetensors", "format", "byte"])
def test_what_is_no_program(damage: str) -> None:
    content = portable_of(CASES["layers"]).to_bytes()
    from safetensors.torch import save

    if damage == "format":
        portable = portable_of(CASES["layers"])
        content = PortableProgram({**portable._data, "format": 9}, portable._tensors).to_bytes()
    broken = {
        "empty": b"",
        "text": b"hello, this is no program at all",
        "truncated": content[:-40],
        "another safetensors": save({"x": torch.ones(2)}),
        "format": content,
        "byte": b"\x07" + content[1:],
    }[damage]
    with pytest.raises(PortableError, match="make (it|the program) again"):
        PortableProgram.from_bytes(broken)


def test_a_piece_that_was_tampered_with() -> None:
    """Its canonical text is worked out anew, and differs."""
    portable = portable_of(CASES["layers"])
    data = json.loads(json.dumps(portable._data))
    fingerprint, node = next(
        (fingerprint, node)
        for fingerprint, piece in data["pieces"].items()
        for node in piece["nodes"]
        if node[0] == "call_function" and node[1].get("name") == "silu"
    )
    node[1]["name"] = "relu"
    with pytest.raises(PortableError, match="does not mean here what it meant"):
        PortableProgram(data, {}).piece(fingerprint)


def test_an_operator_that_does_not_exist_here() -> None:
    portable = portable_of(CASES["layers"])
    data = json.loads(json.dumps(portable._data).replace("piecework_toys::double", "piecework_toys::triple"))
    with pytest.raises(PortableError, match=r"calls piecework_toys::triple.default, which does not exist"):
        PortableProgram(data, {}).bind(made(CASES["layers"]))


def test_what_cannot_travel() -> None:
    def local(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    traced = trace_model(Fn(lambda m, x: applied(x) + 1), X)
    graph = PiecewiseGraph.from_trace(traced, InputContract({"x": 0}))
    node = next(n for n in graph.built(graph.split.pieces[-1]).graph_module.graph.nodes if n.op == "call_function")
    node.target = local
    signature = InputContract({"x": 0}).bind(X).signature
    with pytest.raises(PortableError, match=r"not found under a name of its own.*\(node add"):
        PortableProgram.from_graph(graph, signature)


def test_a_triton_kernel_cannot_travel() -> None:
    """Its node names it by an index into a table of this process."""
    from torch._higher_order_ops.triton_kernel_wrap import (
        triton_kernel_wrapper_functional,
        triton_kernel_wrapper_mutation,
    )

    for operator in (triton_kernel_wrapper_mutation, triton_kernel_wrapper_functional):
        with pytest.raises(PortableError, match="launches a Triton kernel"):
            encode_function(operator)


def test_a_key_that_cannot_travel() -> None:
    class Keyed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = {(1, 2): torch.ones(4)}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return applied(x) + self.tables[1, 2]

    graph = PiecewiseGraph.from_trace(trace_model(Keyed(), X), InputContract({"x": 0}))
    with pytest.raises(PortableError, match="under a key that is a tuple"):
        PortableProgram.from_graph(graph, InputContract({"x": 0}).bind(X).signature)
