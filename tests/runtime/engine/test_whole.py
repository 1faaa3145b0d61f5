"""The engine with whole-forward compile: requests get the tokens that transformers gives, in and across promotions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from piecework.ops.activation import silu_and_mul
from piecework.ops.fused import FusedOp
from piecework.ops.linear import linear
from piecework.ops.norm import fused_add_rms_norm
from piecework.ops.opaque import like_two, opaque, with_half
from piecework.phases import GraphConfig, PhaseConfig
from piecework.runtime.engine.engine import LLMEngine
from piecework.runtime.engine.params import SamplingParams
from piecework.runtime.warm_up import WarmUp

from .test_tiered import straddle


@pytest.fixture(autouse=True)
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole programs are taken, whatever a busy machine measures."""
    monkeypatch.setattr(WarmUp, "seconds", lambda *arguments: [2e-3, 1e-3])


def config(compiler: str, **options: Any) -> GraphConfig:
    return GraphConfig(
        prefill=PhaseConfig(backend="breakable", buckets=(16, 64)),
        decode=PhaseConfig(backend="full", compiler=compiler, buckets=(1, 2, 4)),
        capture_device="tape",
        enable_torch_compile=True,
        **options,
    )


def kinds(engine: LLMEngine) -> dict[tuple[str, int | None], str]:
    return {(str(e.phase), e.bucket): e.program.kind for e in engine.runtime.entries if e.num_steps}


def test_tokens_are_those_of_transformers(checkpoint: Path, reference: Any) -> None:
    """Three requests, then two, then one: buckets above and below the bound."""
    lengths = (6, 12, 18)
    with LLMEngine(
        checkpoint, config("eager", torch_compile_max_bs=2, torch_compile_mode="default"), device="cpu"
    ) as engine:
        ids = [engine.add_request(f"Request {n}:", SamplingParams(max_new_tokens=n)) for n in lengths]
        finished: dict[str, Any] = {}
        while len(finished) < len(ids):
            finished |= {o.request_id: o for o in engine.step() if o.finish_reason is not None}
        for request, num_tokens in zip(ids, lengths, strict=True):
            output = finished[request]
            expected = reference.tokens(checkpoint, output.prompt_token_ids, num_tokens)
            assert output.token_ids == expected[: len(output.token_ids)]
        found = kinds(engine)
        assert {kind for (phase, _), kind in found.items() if phase == "prefill"} == {"eager"}
        assert {bucket: kind for (phase, bucket), kind in found.items() if phase == "decode"} == {
            1: "whole",
            2: "whole",
            4: "eager",
        }
        assert engine.runtime.counters["compiles_whole"] == 2
        assert engine.runtime.counters["fallbacks"] == {}


def test_a_worker_compiles_it_and_straddling_requests_keep_their_tokens(checkpoint: Path, reference: Any) -> None:
    options = {"startup": "tiered", "torch_compile_max_bs": 4, "compile_workers": 1}
    with LLMEngine(checkpoint, config("eager", torch_compile_mode="default", **options), device="cpu") as engine:
        assert straddle(engine, checkpoint, reference, 3) == {"eager", "whole"}
        events = engine.runtime.events
        compiles = [event.detail for event in events if event.kind == "compile_whole"]
        assert {(detail["where"], detail["mode"]) for detail in compiles} == {("worker", "default")}
        assert [event.detail["where"] for event in events if event.kind == "trace"] == ["worker"]
        assert engine.runtime.counters["in_step_seconds"] == 0
        assert engine.runtime.counters["compiles_whole"] == len(compiles) > 0
        assert engine.runtime.counters["compiles_general"] == 0, "a phase of compiler eager has none"
        assert engine.runtime.settled
        data = engine.runtime.manifest_data()["phases"]["decode"]["buckets"]["4"]
        assert (data["program"], data["compiled"]) == ("whole", ["whole"])


CALLS: list[str] = []
"""Names of the kernels that ran."""


def _fake_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@opaque("tests_engine_linear", fake=_fake_linear)
def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    CALLS.append("linear")
    return linear.native(x, weight, bias)


@opaque("tests_engine_silu", fake=with_half)
def _silu(gate_up: torch.Tensor) -> torch.Tensor:
    CALLS.append("silu_and_mul")
    return silu_and_mul.native(gate_up)


@opaque("tests_engine_add_norm", fake=like_two)
def _add_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, variance_size: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    CALLS.append("fused_add_rms_norm")
    return fused_add_rms_norm.native(x, residual, weight, eps, variance_size)


KERNELS: dict[FusedOp[Any, Any], Any] = {linear: _linear, silu_and_mul: _silu, fused_add_rms_norm: _add_norm}


def test_kernels_of_the_pieces_are_native_bodies_in_the_whole_and_tokens_stay(
    checkpoint: Path, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buckets 1 and 2 are whole, 4 is general: requests of different lengths run through all of them."""
    for op, operator in KERNELS.items():
        monkeypatch.setattr(op, "_kernels", {})
        op.kernel("mine", device_types=("cpu",), beats_inductor=True)(operator)
    lengths = (6, 12, 18)
    CALLS.clear()
    options = {"torch_compile_max_bs": 2, "torch_compile_mode": "default", "startup": "lazy"}
    with LLMEngine(checkpoint, config("aot_eager", **options), device="cpu") as engine:
        ids = [engine.add_request(f"Request {n}:", SamplingParams(max_new_tokens=n)) for n in lengths]
        finished: dict[str, Any] = {}
        while len(finished) < len(ids):
            finished |= {o.request_id: o for o in engine.step() if o.finish_reason is not None}
        for request, num_tokens in zip(ids, lengths, strict=True):
            output = finished[request]
            expected = reference.tokens(checkpoint, output.prompt_token_ids, num_tokens)
            assert output.token_ids == expected[: len(output.token_ids)]
        decode = {bucket: kind for (phase, bucket), kind in kinds(engine).items() if phase == "decode"}
        assert decode == {1: "whole", 2: "whole", 4: "general"}
        called = {
            (e.program.kind, node.target)
            for e in engine.runtime.entries
            if e.program.kind in ("general", "whole")
            for piece in e.program.graph.split.pieces
            for node in e.program.graph.built(piece).graph_module.graph.nodes
        }
        assert {kind for kind, target in called if target in KERNELS.values()} == {"general"}
        assert {target for kind, target in called if kind == "general"} >= {*KERNELS.values()}
    assert {*CALLS} == {op.name for op in KERNELS}
