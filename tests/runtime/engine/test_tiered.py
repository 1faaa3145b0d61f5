"""The engine under `tiered`: requests that straddle promotions get the tokens that transformers gives."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from piecework.phases import GraphConfig, PhaseConfig
from piecework.runtime.engine.engine import LLMEngine
from piecework.runtime.engine.params import SamplingParams
from piecework.runtime.workers import WorkerPool

PROMPTS = ["What is the capital of France? It is", "A", "Once upon a time"]
NEW_TOKENS = 48
WAYS = [("full", "eager"), ("full", "aot_eager"), ("tc_piecewise", "aot_eager"), ("disabled", "aot_eager")]


def config(backend: str, compiler: str, **options: Any) -> GraphConfig:
    return GraphConfig(
        prefill=PhaseConfig(backend=backend, compiler=compiler, buckets=(16, 64)),
        decode=PhaseConfig(backend=backend, compiler=compiler, buckets=(1, 2, 4)),
        capture_device="tape",
        startup="tiered",
        **options,
    )


def straddle(engine: LLMEngine, checkpoint: Path, reference: Any, promote_at: int) -> set[str]:
    """Runs requests, waits for everything that can be promoted after some steps of them, and goes on.

    Returns the kinds of program that their decode steps ran.
    """
    ids = [engine.add_request(prompt, SamplingParams(max_new_tokens=NEW_TOKENS)) for prompt in PROMPTS]
    finished: dict[str, Any] = {}
    kinds: set[str] = set()
    num_steps = 0
    while len(finished) < len(ids):
        for output in engine.step():
            if output.finish_reason is not None:
                finished[output.request_id] = output
        num_steps += 1
        kinds |= {entry.program.kind for entry in engine.runtime.entries if entry.bucket == 4}
        if num_steps == promote_at:
            assert engine.runtime.wait_settled(240)
    for output in finished.values():
        expected = reference.tokens(checkpoint, output.prompt_token_ids, NEW_TOKENS)
        assert output.token_ids == expected[: len(output.token_ids)]
    return kinds


@pytest.mark.parametrize("promote_at", [2, 9])
@pytest.mark.parametrize(("backend", "compiler"), WAYS)
def test_tokens_of_requests_that_straddle_promotions(
    checkpoint: Path, reference: Any, backend: str, compiler: str, promote_at: int
) -> None:
    with LLMEngine(checkpoint, config(backend, compiler, compile_workers=0), device="cpu") as engine:
        kinds = straddle(engine, checkpoint, reference, promote_at)
        assert kinds == ({"eager", "general"} if compiler == "aot_eager" else {"eager"})
        compiles = [event for event in engine.runtime.events if event.kind.startswith(("compile", "trace"))]
        assert all(not event.scope.in_step for event in compiles)
        assert engine.runtime.settled


@pytest.fixture(scope="module")
def compiled(checkpoint: Path) -> Iterator[tuple[LLMEngine, list[Any]]]:
    """An engine whose programs come from compile workers; all tests below go on with it, one after the other."""
    with LLMEngine(checkpoint, config("full", "inductor", compile_workers=1), device="cpu") as engine:
        yield engine, []


def workers_of(engine: LLMEngine) -> WorkerPool:
    workers = engine.runtime._workers
    assert workers is not None
    return workers.pool


def test_steps_go_on_while_a_worker_is_held_and_replay_what_it_compiled(
    compiled: tuple[LLMEngine, list[Any]], checkpoint: Path, reference: Any
) -> None:
    engine, _ = compiled
    engine.generate(["A"], SamplingParams(max_new_tokens=2))
    while not any(event.kind == "worker_start" for event in engine.runtime.events):
        engine.generate(["A"], SamplingParams(max_new_tokens=1))
    [started] = [event for event in engine.runtime.events if event.kind == "worker_start"]
    os.kill(started.detail["pid"], signal.SIGSTOP)
    try:
        before = engine.runtime.counters["replays"]
        output = engine.generate(["A"], SamplingParams(max_new_tokens=20))[0]
        assert output.token_ids == reference.tokens(checkpoint, output.prompt_token_ids, 20)[: len(output.token_ids)]
        assert engine.runtime.counters["replays"] > before  # of eager captures
        assert not engine.runtime.settled
        assert {entry.program.kind for entry in engine.runtime.entries} == {"eager"}
    finally:
        os.kill(started.detail["pid"], signal.SIGCONT)
    assert "general" in straddle(engine, checkpoint, reference, 2)
    events = engine.runtime.events
    assert [event.detail["where"] for event in events if event.kind == "trace"] == ["worker"]
    assert {event.detail["where"] for event in events if event.kind == "compile_general"} == {"worker"}
    assert engine.runtime.counters["in_step_seconds"] == 0
    assert engine.runtime.counters["compiles_general"] == 3
    with engine.runtime.counters.expect(compiles_general=0, captures=0):
        before = engine.runtime.counters["replays"]
        engine.generate(["A"], SamplingParams(max_new_tokens=4))
        assert engine.runtime.counters["replays"] > before


def test_nothing_is_left_of_the_workers(compiled: tuple[LLMEngine, list[Any]]) -> None:
    engine, _ = compiled
    pids = [event.detail["pid"] for event in engine.runtime.events if event.kind == "worker_start"]
    engine.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert workers_of(engine).num_alive == 0
