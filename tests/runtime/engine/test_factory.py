"""The engine's decoder from plain data: the program of a worker is that of the engine's own model."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
import torch

from piecework.errors import ModelError
from piecework.graphs.inputs import InputContract, Signature
from piecework.graphs.outputs import OutputContract
from piecework.graphs.portable import PortableProgram
from piecework.graphs.remarks import remarks_on
from piecework.graphs.stitched import PiecewiseGraph
from piecework.graphs.trace import trace
from piecework.ops.fused import tracing_with
from piecework.ops.fused_choice import choose
from piecework.runtime.engine.config import DTYPES, ModelConfig
from piecework.runtime.engine.factory import build_decoder, engine_factory
from piecework.runtime.engine.kv_cache import allocate_kv_cache
from piecework.runtime.engine.models import build_model
from piecework.runtime.engine.rope import LinearRope, Llama3Rope, Rope, YarnRope
from piecework.runtime.model_factory import ModelFactory, TraceRequest, trace_from_factory

CPU = torch.device("cpu")
BASE = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_layers=5,
    num_heads=4,
    num_kv_heads=2,
    head_size=8,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    rope=Rope(theta=10000.0),
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
    window_sizes=(0,) * 5,
    tie_word_embeddings=False,
    dtype=None,
    eos_token_ids=frozenset(),
)
LLAMA3 = Llama3Rope(
    theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
YARN = YarnRope(
    theta=1e4 / 3,
    factor=4.0,
    original_max_position_embeddings=16,
    temperature=0.1 * math.log(4) + 1,
    beta_fast=32.0,
    beta_slow=1.0,
    truncate=False,
)
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied, biases": {"tie_word_embeddings": True, "qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "qwen3, norms of heads": {"architecture": "Qwen3ForCausalLM", "qk_norm": True, "eos_token_ids": frozenset({3, 1})},
    "mistral, one window": {"architecture": "MistralForCausalLM", "window_sizes": (5,) * 5, "num_kv_heads": 4},
    "qwen2, windows differ": {"architecture": "Qwen2ForCausalLM", "qkv_bias": True, "window_sizes": (0, 0, 5, 5, 5)},
    "linear rope": {"rope": LinearRope(theta=1e4, factor=3.0)},
    "llama3 rope": {"rope": LLAMA3, "dtype": torch.bfloat16},
    "yarn rope": {"rope": YARN},
}


def config_of(name: str) -> ModelConfig:
    return dataclasses.replace(BASE, **CONFIGS[name])


def live_decoder(config: ModelConfig, dtype: torch.dtype, device: torch.device = CPU) -> torch.nn.Module:
    """What the engine gives its Runtime, without a checkpoint."""
    model = build_model(config)
    model.allocate(device, dtype)
    allocate_kv_cache(model, config, num_blocks=3, block_size=4)
    return model.model


def request_of(model: torch.nn.Module, device: torch.device = CPU, **changes: Any) -> TraceRequest:
    contract = InputContract({"input_ids": {0: "tokens"}, "positions": {0: "tokens"}})
    layouts = tuple((name, torch.int64, device, ("tokens",)) for name in contract.dynamic_dims)
    request = TraceRequest.of(
        Signature(layouts, ()),
        contract,
        OutputContract({"": 0}),
        {"tokens": 2},
        choose((), compiler="inductor", device_type=device.type),
        model=model,
    )
    return dataclasses.replace(request, **changes)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_survives_json(name: str) -> None:
    config = config_of(name)
    again = ModelConfig.from_json(json.loads(json.dumps(config.to_json(), allow_nan=False)))
    assert again == config
    assert type(again.rope) is type(config.rope)
    assert torch.equal(again.rope.inv_freq(8), config.rope.inv_freq(8))


@pytest.mark.parametrize(
    "change",
    [
        {"more": 1},
        {"dtype": "int4"},
        {"architecture": "GPT2LMHeadModel"},
        {"rope": {"rope_type": "longrope", "theta": 1.0}},
        {"rope": {"rope_type": "linear", "theta": 1.0}},
        {"rope": {"theta": 1.0}},
    ],
)
def test_what_is_no_config_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="expected"):
        ModelConfig.from_json({**BASE.to_json(), **change})
    missing = {key: value for key, value in BASE.to_json().items() if key not in change}
    if missing != BASE.to_json():
        with pytest.raises(ModelError, match="expected"):
            ModelConfig.from_json(missing)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_the_decoder_is_that_of_the_engine(dtype: torch.dtype) -> None:
    factory = engine_factory(BASE, dtype=dtype, device=CPU, num_blocks=3, block_size=4)
    made, live = ModelFactory.from_json(factory.to_json()).build(), live_decoder(BASE, dtype)
    layouts = [
        [(name, t.shape, t.dtype, t.device, t.stride()) for name, t in (*m.named_parameters(), *m.named_buffers())]
        for m in (made, live)
    ]
    assert layouts[0] == layouts[1]
    assert any("k_cache" in name for name, *_ in layouts[0])
    assert torch.equal(made.inv_freq, live.inv_freq)
    with pytest.raises(ModelError):
        build_decoder({}, "float32", "cpu", 3, 4)


def own_program(live: torch.nn.Module, request: TraceRequest) -> PortableProgram:
    """What a runtime's own trace gives."""
    contract = request.contract()
    with tracing_with(request.fused()):
        traced = trace(live, request.signature, contract, sizes=request.sizes, backed=request.backed)
        graph = PiecewiseGraph.from_trace(traced, contract)
    remarks = remarks_on(traced, contract)
    return PortableProgram.from_graph(graph, request.signature, kernels=request.kernels, remarks=remarks)


@pytest.mark.parametrize("backed", [False, True])
@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in ("linear rope", "llama3 rope")])
def test_the_program_is_that_of_the_engine(name: str, backed: bool) -> None:
    config, dtype = config_of(name), torch.bfloat16 if name == "llama" else torch.float32
    live = live_decoder(config, dtype)
    request = request_of(live, backed=backed)
    factory = engine_factory(config, dtype=dtype, device=CPU, num_blocks=3, block_size=4)
    made, own = PortableProgram.from_bytes(trace_from_factory(factory, request, CPU)), own_program(live, request)
    assert made.text == own.text
    assert made.fingerprints == own.fingerprints
    assert made.to_bytes() == own.to_bytes()
    assert made.bind(live).num_distinct == len(own.fingerprints)


@pytest.mark.gpu
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_the_program_is_that_of_the_engine_on_a_gpu(compiler: str) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    live = live_decoder(BASE, torch.bfloat16, device)
    request = request_of(live, device, kernels=choose((), compiler=compiler, device_type="cuda").kernels)
    factory = engine_factory(BASE, dtype=torch.bfloat16, device=device, num_blocks=3, block_size=4)
    before = torch.cuda.memory_allocated(device)
    made = PortableProgram.from_bytes(trace_from_factory(factory, request, device))
    assert torch.cuda.memory_allocated(device) - before < 1 << 20
    assert made.to_bytes() == own_program(live, request).to_bytes()
    assert made.bind(live)


def test_a_model_that_no_machine_could_hold_is_traced() -> None:
    """An embedding of 70 terabytes, and KV caches of as many each."""
    config = dataclasses.replace(BASE, vocab_size=1 << 40, num_layers=1, window_sizes=(0,))
    factory = engine_factory(config, dtype=torch.float32, device=CPU, num_blocks=1 << 36, block_size=16)
    request = request_of(live_decoder(dataclasses.replace(config, vocab_size=8), torch.float32))
    made = PortableProgram.from_bytes(trace_from_factory(factory, request, CPU))
    assert str([1 << 40, 16]) in made.text
    assert str([1 << 36, 16, 2, 8]) in made.text
