"""A model made of nothing but names gives the program that the live model gives, in this process and in another."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import piecework
from piecework.errors import ConfigError, InputError, PortableError, TraceError
from piecework.graphs import trace as trace_module
from piecework.graphs.inputs import InputContract, Signature
from piecework.graphs.outputs import OutputContract, map_leaves
from piecework.graphs.portable import PortableProgram
from piecework.graphs.recorder import NullRecorder
from piecework.graphs.remarks import remarks_on
from piecework.graphs.stitched import PiecewiseGraph
from piecework.graphs.trace import trace
from piecework.ops import registry
from piecework.ops.fused import tracing_with
from piecework.ops.fused_choice import Choice, choose
from piecework.phases import Compiler
from piecework.runtime.model_factory import ModelFactory, TraceRequest, trace_from_factory

from ..graphs.portable_models import SIZES, results
from . import factory_models
from .factory_models import ALL_CASES, build_case, build_half

ROOT = Path(piecework.__file__).parent
CPU = torch.device("cpu")
NATIVE = choose((), compiler="inductor", device_type="cpu")
CASE_FACTORY = f"{factory_models.__name__}:build_case"
BAD_FACTORY = f"{factory_models.__name__}:build_bad"


def factory_of(name: str) -> ModelFactory:
    return ModelFactory(target=CASE_FACTORY, arguments={"name": name})


def request_of(name: str, model: nn.Module | None = None, fused: Choice = NATIVE, **changes: Any) -> TraceRequest:
    """What a runtime would ask of a worker."""
    case = ALL_CASES[name]
    contract = InputContract(case.dynamic_dims)
    bound = contract.bind(case.inputs(5))
    request = TraceRequest.of(
        bound.signature, contract, OutputContract(None), bound.sizes, fused, model=model, backed=False
    )
    return dataclasses.replace(request, **changes)


def live_program(model: nn.Module, request: TraceRequest) -> PortableProgram:
    """What a runtime's own trace gives."""
    contract = request.contract()
    with tracing_with(request.fused()):
        traced = trace(model, request.signature, contract, sizes=request.sizes, backed=request.backed)
        graph = PiecewiseGraph.from_trace(traced, contract, ambient=request.signature.ambient)
    return PortableProgram.from_graph(
        graph, request.signature, kernels=request.kernels, remarks=remarks_on(traced, contract)
    )


def assert_identical(got: Any, expected: Any) -> None:
    """The same leaves, bit by bit."""

    def leaves_of(value: Any) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = []
        map_leaves(value, lambda path, leaf: found.append((path, leaf)))
        return found

    for (path, left), (other, right) in zip(leaves_of(got), leaves_of(expected), strict=True):
        assert path == other
        if isinstance(left, torch.Tensor):
            torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)
        else:
            assert left == right


@pytest.mark.parametrize("backed", [False, True])
@pytest.mark.parametrize("name", ALL_CASES)
def test_the_program_is_that_of_the_live_model(name: str, backed: bool) -> None:
    case, live = ALL_CASES[name], build_case(name).requires_grad_(False)
    request = request_of(name, live, backed=backed)
    made = PortableProgram.from_bytes(trace_from_factory(factory_of(name), request, CPU))
    own = live_program(live, request)
    assert made.text == own.text
    assert made.fingerprints == own.fingerprints
    assert made.to_bytes() == own.to_bytes()
    twin = copy.deepcopy(live)
    ours = made.bind(live).compile_general(Compiler.EAGER, {}, NullRecorder())
    theirs = own.bind(twin).compile_general(Compiler.EAGER, {}, NullRecorder())
    for size in SIZES:
        assert_identical(results(ours, case, size), results(theirs, case, size))
    torch.testing.assert_close(dict(live.named_buffers()), dict(twin.named_buffers()), rtol=0, atol=0)


def test_kernels_are_those_that_were_chosen() -> None:
    kernels = (("fused_add_rms_norm", "torch"), ("rms_norm", "torch"))
    request, live = request_of("tables", kernels=kernels), build_case("tables")
    made = PortableProgram.from_bytes(trace_from_factory(factory_of("tables"), request, CPU))
    assert made.kernels == kernels
    assert made.text == live_program(live, request).text
    assert made.text != live_program(live, request_of("tables")).text


def test_a_kernel_that_is_not_here_is_refused() -> None:
    with pytest.raises(TraceError, match="the kernel nowhere of the fused op rms_norm"):
        trace_from_factory(factory_of("tables"), request_of("tables", kernels=(("rms_norm", "nowhere"),)), CPU)


def test_a_model_that_is_moved_and_cast_after_it_was_made() -> None:
    live = build_half("tied weights")
    request = request_of("tied weights", live)
    inputs = InputContract(request.dynamic_dims).bind({"x": torch.zeros(5, 4, dtype=torch.bfloat16)})
    request = dataclasses.replace(request, signature=inputs.signature)
    factory = ModelFactory(target=f"{factory_models.__name__}:build_half", arguments={"name": "tied weights"})
    made = PortableProgram.from_bytes(trace_from_factory(factory, request, CPU))
    assert made.text == live_program(live, request).text
    made.bind(live)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_default_dtype_is_the_servers(dtype: torch.dtype) -> None:
    contract = InputContract({"input": 0})
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        live = factory_models.build_plain("")
        bound = contract.bind({"input": torch.zeros(5, 4)})
        request = TraceRequest.of(bound.signature, contract, OutputContract(), bound.sizes, NATIVE)
        own = live_program(live, request)
    finally:
        torch.set_default_dtype(before)
    factory = ModelFactory(target=f"{factory_models.__name__}:build_plain", arguments={"default": str(dtype)})
    made = PortableProgram.from_bytes(trace_from_factory(factory, request, CPU))
    assert torch.get_default_dtype() is before
    assert made.text == own.text
    assert made.bind(live)


@pytest.mark.parametrize("setting", ["autocast", "deterministic"])
def test_other_settings_are_the_servers(setting: str) -> None:
    live = build_case("layers")
    if setting == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            request = request_of("layers", live)
            own = live_program(live, request)
    else:
        torch.use_deterministic_algorithms(True)
        try:
            request = request_of("layers", live)
            own = live_program(live, request)
        finally:
            torch.use_deterministic_algorithms(False)
    assert request.signature.ambient
    made = PortableProgram.from_bytes(trace_from_factory(factory_of("layers"), request, CPU))
    assert made.text == own.text
    assert made.text != live_program(live, request_of("layers")).text
    assert not torch.is_autocast_enabled("cpu")
    assert not torch.are_deterministic_algorithms_enabled()


def test_settings_that_the_server_does_not_have_are_refused() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(TraceError, match="expected torch under its def"):
        trace_from_factory(factory_of("layers"), _without_ambient(request_of("layers")), CPU)
    strange = dataclasses.replace(request_of("layers").signature, ambient=("phase of the moon",))
    with pytest.raises(TraceError, match="phase of the moon"):
        trace_from_factory(factory_of("layers"), request_of("layers", signature=strange), CPU)
    strange = dataclasses.replace(strange, ambient=("default dtype torch.float7",))
    with pytest.raises(TraceError, match="float7"):
        trace_from_factory(factory_of("layers"), request_of("layers", signature=strange), CPU)


def _without_ambient(request: TraceRequest) -> TraceRequest:
    return dataclasses.replace(request, signature=dataclasses.replace(request.signature, ambient=()))


def test_another_process_makes_the_same_program() -> None:
    live = build_case("layers")
    request = request_of("layers", live)
    data = {"factory": factory_of("layers").to_json(), "request": request.to_json(), "device": "cpu"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "from tests.runtime.factory_models import main; main()"],
        cwd=ROOT,
        env={**os.environ},
        input=json.dumps(data, allow_nan=False).encode(),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == live_program(live, request).to_bytes()


def test_a_runtime_takes_the_program_and_traces_nothing() -> None:
    live = build_case("layers").requires_grad_(False)
    made = PortableProgram.from_bytes(trace_from_factory(factory_of("layers"), request_of("layers", live), CPU))
    config = piecework.GraphConfig(
        prefill=piecework.PhaseConfig(backend="tc_piecewise", compiler="aot_eager", buckets=(4, 8)),
        decode=piecework.PhaseConfig(backend="disabled", compiler="eager"),
        capture_device="tape",
    )
    twin, inputs = copy.deepcopy(live), ALL_CASES["layers"].inputs(4)
    with piecework.Runtime(live, config, dynamic_dims=ALL_CASES["layers"].dynamic_dims, programs=[made]) as runtime:
        got = runtime.run("prefill", inputs)
        assert runtime.counters.as_dict()["traces"] == 0
        assert runtime.counters.as_dict()["programs_bound"] == 1
        torch.testing.assert_close(got["hidden"], twin(**inputs)["hidden"])


def test_what_is_to_be_said_of_the_trace_travels() -> None:
    name = "constants, backed"
    made = PortableProgram.from_bytes(trace_from_factory(factory_of(name), request_of(name), CPU))
    [remark] = [remark for remark in made.remarks if "decides on a size" in remark.text]
    assert remark.because is not None
    assert "u0" in remark.because


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("item", r"looks at no tensor's values.*give no factory"),
        ("branch", r"looks at no tensor's values"),
        ("nonzero", r"looks at no tensor's values"),
        ("file", r"failed in a worker.*nowhere/weights.pt.*give no factory"),
        ("meta", r"norm.weight on meta"),
        ("closure", r"register it as a buffer"),
    ],
)
def test_a_factory_that_needs_values_is_told(kind: str, expected: str) -> None:
    factory = ModelFactory(target=BAD_FACTORY, arguments={"kind": kind})
    with pytest.raises(TraceError, match=expected):
        trace_from_factory(factory, request_of("tables"), CPU)


def test_a_model_that_is_no_graph_fails_as_the_live_one_does() -> None:
    factory = ModelFactory(target=BAD_FACTORY, arguments={"kind": "python"})
    with pytest.raises(TraceError) as live:
        live_program(factory.build(), request_of("tables"))
    with pytest.raises(TraceError) as fake:
        trace_from_factory(factory, request_of("tables"), CPU)
    assert type(fake.value) is type(live.value)
    assert "graph_break" in str(fake.value)


def test_what_is_no_model_is_refused() -> None:
    factory = ModelFactory(target=BAD_FACTORY, arguments={"kind": "number"})
    with pytest.raises(ConfigError, match="expected it to return a torch.nn.Module, got int"):
        factory.build()
    with pytest.raises(ConfigError, match="expected it to return a torch.nn.Module, got int"):
        trace_from_factory(factory, request_of("tables"), CPU)


def test_a_model_in_another_mode_is_refused() -> None:
    request = request_of("layers", build_case("layers").eval())
    with pytest.raises(TraceError, match=r"another one of the model, layers, layers.0, .* and \d+ more; call train"):
        trace_from_factory(factory_of("layers"), request, CPU)


def test_an_output_without_rows_is_refused_as_in_the_server() -> None:
    with pytest.raises(InputError, match="expected a dim that grows with 'tokens'"):
        trace_from_factory(factory_of("two dims"), request_of("two dims", output_dims=0), CPU)


def test_split_ops_must_be_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    request = request_of("layers")
    others = tuple(name for name in request.split_ops if name != "piecework_toys::double")
    with pytest.raises(TraceError, match="piecework_toys::double, which is a split op only in this process"):
        trace_from_factory(factory_of("layers"), dataclasses.replace(request, split_ops=others), CPU)
    ours = dict(registry.REGISTRY.ops)
    ours.pop(torch.ops.piecework_toys.double.default)
    monkeypatch.setattr(registry.REGISTRY, "ops", ours)
    with pytest.raises(TraceError, match="piecework_toys::double, which is a split op only in the server"):
        trace_from_factory(factory_of("layers"), request, CPU)


def test_the_model_is_on_the_runtimes_device_and_costs_nothing() -> None:
    """A machine without a GPU has no inputs there, so they are fake: backed, since torch loses the unbacked mark."""
    if not torch.backends.cuda.is_built():
        pytest.skip("a torch that is built without CUDA cannot trace for it")
    cuda, case = torch.device("cuda", 0), ALL_CASES["layers"]
    request = request_of("layers", backed=True)
    tensors = tuple((name, dtype, cuda, sizes) for name, dtype, _, sizes in request.signature.tensors)
    request = dataclasses.replace(request, signature=Signature(tensors, ()))
    real, mode = trace_module.make_samples, FakeTensorMode()
    with pytest.MonkeyPatch.context() as patched:

        def fake_samples(*args: Any) -> Any:
            with mode:
                return real(*args)

        patched.setattr(trace_module, "make_samples", fake_samples)
        made = PortableProgram.from_bytes(trace_from_factory(factory_of("layers"), request, cuda))
    assert "cuda:0" in made.text
    assert "meta" not in made.text
    assert '"cpu"' not in made.text
    with pytest.raises(PortableError, match="on cuda:0"):
        made.bind(case.model())


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("no colon", "expected 'package.module:function', got 'no colon'"),
        ("a.b:", "expected 'package.module:function'"),
        (":f", "expected 'package.module:function'"),
        ("a b:f", "expected 'package.module:function'"),
        ("a:f()", "expected 'package.module:function'"),
        (3, "got 3"),
        ("__main__:build", "__main__ is another module in a worker"),
        ("no_such_module_anywhere:f", "PYTHONPATH"),
        ("math:no_such_function", "there is nothing of that name"),
        ("math:pi", "there is a float of that name"),
    ],
)
def test_targets_that_no_worker_can_call_are_refused(target: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        ModelFactory(target=target)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"name": torch.zeros(2)}, r"arguments\['name'\]: expected what JSON can hold.*Tensor"),
        ({"name": {"a": [1, {2: 3}]}}, r"arguments\['name'\]\['a'\]\[1\]: .*a dict with keys \[2\]"),
        ({"name": float("nan")}, "got nan, float"),
        ({"name": Compiler.EAGER}, "Compiler"),
        ({"name": b"bytes"}, "bytes"),
        ([1], "expected {name: value}, got list"),
        ({}, r"expected those of .*build_case\(name: 'str'\).*, got none"),
        ({"name": "layers", "other": 1}, "got name, other"),
    ],
)
def test_arguments_that_are_no_json_or_no_arguments_are_refused(arguments: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        ModelFactory(target=CASE_FACTORY, arguments=arguments)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda values: st.lists(values) | st.dictionaries(st.text(), values),
    max_leaves=10,
)


@given(JSON_VALUES)
def test_a_factory_survives_json(value: Any) -> None:
    factory = ModelFactory(target=CASE_FACTORY, arguments={"name": value})
    again = ModelFactory.from_json(json.loads(json.dumps(factory.to_json(), allow_nan=False)))
    assert again == factory
    assert hash(again) == hash(factory)
    assert again.arguments == {"name": value}
    assert repr(again) == repr(factory)


def test_a_factory_holds_a_copy() -> None:
    names = ["layers"]
    factory = ModelFactory(target=CASE_FACTORY, arguments={"name": names})
    names.append("others")
    assert factory.arguments == {"name": ["layers"]}
    assert factory == ModelFactory(target=CASE_FACTORY, arguments={"name": ("layers",)})
    one, true = (ModelFactory(target=CASE_FACTORY, arguments={"name": value}) for value in (1, True))
    assert one != true
    assert isinstance(factory_of("layers").build(), nn.Module)


@pytest.mark.parametrize("data", [None, 3, {}, {"target": CASE_FACTORY}, {"target": 1, "arguments": {}, "more": 2}])
def test_what_is_no_factory_is_refused(data: Any) -> None:
    with pytest.raises(ConfigError, match="model factory: expected target and arguments"):
        ModelFactory.from_json(data)


NAMES = st.text(min_size=1, max_size=5)


@given(
    st.lists(st.tuples(NAMES, st.sampled_from([torch.int64, torch.bfloat16])), max_size=3),
    st.dictionaries(NAMES, st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()), max_size=3),
    st.one_of(st.none(), st.integers(0, 3), st.dictionaries(NAMES, st.none() | st.integers(0, 3), min_size=1)),
    st.dictionaries(NAMES, st.integers(0, 1 << 40)),
    st.booleans(),
)
def test_a_request_survives_json(
    tensors: list[tuple[str, torch.dtype]], constants: dict[str, Any], output_dims: Any, sizes: Any, flag: bool
) -> None:
    layouts = tuple((name, dtype, torch.device("cuda", 1), ("tokens", 4)) for name, dtype in tensors)
    signature = Signature(layouts, tuple(constants.items()), (("w", (1, 4)),), ("deterministic algorithms",) * flag)
    contract = InputContract({"x": {0: "tokens", 2: "rows"}, "y": 1}, {"x": -1.5, "y": float("-inf")})
    request = TraceRequest.of(signature, contract, OutputContract(output_dims), sizes, NATIVE, backed=flag)
    again = TraceRequest.from_json(json.loads(json.dumps(request.to_json(), allow_nan=False)))
    assert str(again.signature) == str(signature)  # not equal where a constant is nan
    assert again.signature.tensors == signature.tensors
    assert again == dataclasses.replace(request, signature=again.signature)
    assert again.contract().dynamic_dims == contract.dynamic_dims
    assert again.outputs().dims == OutputContract(output_dims).dims
    assert again.fused().kernels == NATIVE.kernels


@pytest.mark.parametrize("change", [{"signature": None}, {"sizes": 3}, {"compiler": "gcc"}, {"kernels": [["a"]]}])
def test_what_is_no_request_is_refused(change: dict[str, Any]) -> None:
    data = request_of("layers").to_json()
    for broken in ({**data, **change}, {k: v for k, v in data.items() if k not in change}, None):
        with pytest.raises(TraceError, match="expected a request that TraceRequest.to_json wrote"):
            TraceRequest.from_json(broken)
