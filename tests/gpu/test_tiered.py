"""Tiered startup on a CUDA device: workers compile for it beside the steps, and no token changes in float32.

On the tape the same tests run with compile workers for the CPU.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch

import piecework as pw
from piecework.runtime.engine.engine import LLMEngine
from piecework.runtime.engine.params import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]

PROMPTS = ("Early in the morning", "She was", "A good tool is one that")
NUM_NEW = 24
PARAMS = SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True)


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    plain = {"backend": "disabled", "compiler": "eager"}
    with LLMEngine(None, pw.GraphConfig(prefill=plain, decode=plain), device="cpu") as engine:
        return [output.token_ids for output in engine.generate(PROMPTS, PARAMS)]


def serve(engine: LLMEngine, promote_at: int | None, limit_s: float = 240.0) -> list[tuple[int, ...]]:
    """The tokens of all prompts together; after some steps, waits for everything that can be promoted."""
    ids = [engine.add_request(prompt, PARAMS) for prompt in PROMPTS]
    answers: dict[str, tuple[int, ...]] = {}
    num_steps = 0
    while len(answers) < len(ids):
        for output in engine.step():
            if output.finish_reason is not None:
                answers[output.request_id] = output.token_ids
        num_steps += 1
        if num_steps == promote_at:
            assert engine.runtime.wait_settled(limit_s)
    return [answers[each] for each in ids]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("backend", "compiler"), [("full", "inductor"), ("tc_piecewise", "inductor"), ("full", "aot_eager")]
)
def test_tokens_of_requests_that_straddle_a_promotion(
    gpu: Any, expected: list[tuple[int, ...]], backend: str, compiler: str
) -> None:
    config = gpu.config(backend, compiler, prefill=(8, 64), decode=(1, 4), startup="tiered", compile_workers=1)
    with LLMEngine(None, config, device=gpu.device) as engine:
        runtime = engine.runtime
        assert serve(engine, 5) == expected
        assert {entry.program.kind for entry in runtime.entries if entry.num_steps} == {"general"}
        with runtime.counters.expect(captures=0, promotions=0):
            before = runtime.counters["replays"]
            assert serve(engine, None) == expected
            assert runtime.counters["replays"] - before == NUM_NEW
        assert [event.detail.get("where") for event in runtime.events if event.kind == "trace"] == ["worker"]
        assert runtime.counters["in_step_seconds"] == 0
        made = [event for event in runtime.events if event.kind.startswith(("compile", "trace", "capture"))]
        assert all(not event.scope.in_step for event in made)
        called = [event for event in runtime.events if event.kind == "first_call"]
        assert called
        assert all("error" not in event.detail for event in called)
        pids = [event.detail["pid"] for event in runtime.events if event.kind == "worker_start"]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.timeout(300)
def test_a_worker_that_is_killed_costs_no_token(gpu: Any, expected: list[tuple[int, ...]]) -> None:
    config = gpu.config("full", "inductor", prefill=(8, 64), decode=(1, 4), startup="tiered", compile_workers=1)
    with LLMEngine(None, config, device=gpu.device) as engine:
        runtime = engine.runtime
        while not any(event.kind == "worker_start" for event in runtime.events):
            assert serve(engine, None) == expected
        first = next(event.detail["pid"] for event in runtime.events if event.kind == "worker_start")
        os.kill(first, signal.SIGKILL)
        assert serve(engine, None) == expected
        assert runtime.wait_settled(240)
        assert serve(engine, None) == expected
        assert runtime.counters["workers_lost"] == 1
        assert {entry.program.kind for entry in runtime.entries if entry.num_steps} == {"general"}


@pytest.mark.timeout(300)
def test_what_a_step_returned_is_its_own_while_programs_are_called_on_another_stream(gpu: Any) -> None:
    """Uncaptured steps, replays and a first call in a thread, at once; each step against the plain model."""
    model = gpu.model()
    inputs, context = gpu.step(0)
    config = gpu.config("full", "aot_eager", startup="tiered", compile_workers=0)
    more = {"example_inputs": gpu.step(2)[0], "example_context": context}
    reference = gpu.reference(model, "eager")
    with pw.Runtime(model, config, dynamic_dims=gpu.dynamic_dims, **more) as runtime:
        for seed in range(2000):
            inputs, context = gpu.step(1 + seed % 4)
            got = runtime.run("decode", inputs, context)
            torch.testing.assert_close(got, reference.run("decode", inputs, context), atol=1e-4, rtol=1e-4)
            if runtime.settled:
                break
        assert runtime.settled
        assert [event.detail for event in runtime.events if event.kind == "first_call"] == [{}]
        assert runtime.counters["promotions"] >= 1
