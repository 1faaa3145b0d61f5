"""The engine with captured phases, on the tape: the same tokens as transformers, and counters worked out by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from piecework.errors import InputError
from piecework.ops import attention
from piecework.phases import GraphConfig, PhaseConfig
from piecework.runtime.engine.engine import LLMEngine
from piecework.runtime.engine.params import SamplingParams

PROMPTS = [
    "What is the capital of France? It is",
    "A",
    "The quick brown fox jumps over the lazy dog; the dog, being lazy,",
    "Once upon a time",
]
NEW_TOKENS = 8
GREEDY = SamplingParams(max_new_tokens=NEW_TOKENS)
NUM_LAYERS = 3

WAYS = [
    ("full", "eager"),
    ("full", "aot_eager"),
    ("breakable", "eager"),
    ("tc_piecewise", "eager"),
    ("tc_piecewise", "aot_eager"),
    pytest.param("full", "inductor", marks=pytest.mark.slow),
    pytest.param("tc_piecewise", "inductor", marks=pytest.mark.slow),
]


def config(
    backend: str, compiler: str = "eager", *, prefill: tuple[int, ...] = (16, 64), decode: tuple[int, ...] = (1, 2, 4)
) -> GraphConfig:
    return GraphConfig(
        prefill=PhaseConfig(backend=backend, compiler=compiler, buckets=prefill),
        decode=PhaseConfig(backend=backend, compiler=compiler, buckets=decode),
        capture_device="tape",
    )


def captured(engine: LLMEngine) -> set[tuple[str, int | None]]:
    entries = engine.runtime.explain().as_dict()["entries"]
    return {(entry["phase"], entry["bucket"]) for entry in entries if entry["captured"]}


# ---- the same tokens


@pytest.mark.parametrize(("backend", "compiler"), WAYS)
def test_tokens_equal_transformers_for_each_backend(
    checkpoint: Path, backend: str, compiler: str, reference: Any
) -> None:
    with LLMEngine(checkpoint, config(backend, compiler), device="cpu") as engine:
        for prompts in (PROMPTS, PROMPTS[:2], PROMPTS, PROMPTS * 2):  # the last one is above both ladders
            for output in engine.generate(prompts, GREEDY):
                assert output.token_ids == reference.tokens(checkpoint, output.prompt_token_ids, NEW_TOKENS)
        counters = engine.runtime.counters.as_dict()
        assert captured(engine) >= {("prefill", 64), ("decode", 2), ("decode", 4)}
        assert set(counters["fallbacks"]) <= {"above the ladder"}
        # Of the first two calls each first step of a bucket is captured, and the third replays all of its steps.
        assert (counters["captures"], counters["replays"]) == (4, 2 * (NEW_TOKENS - 2) + NEW_TOKENS)


@pytest.mark.parametrize("backend", ["full", "breakable", "tc_piecewise"])
def test_tokens_equal_transformers_while_requests_lose_their_blocks(
    checkpoint: Path, backend: str, reference: Any
) -> None:
    """Few blocks and small chunks: prompts are cut, mixed with decodes, thrown out and computed again."""
    ladders = config(backend, prefill=(2, 6), decode=(1, 2, 4))
    limits = {"num_blocks": 13, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 6}
    with LLMEngine(checkpoint, ladders, device="cpu", **limits) as engine:
        for output in engine.generate(PROMPTS, GREEDY):
            assert output.token_ids == reference.tokens(checkpoint, output.prompt_token_ids, NEW_TOKENS)
        assert engine.state.num_preemptions > 0
        assert engine.state.num_free_blocks == engine.state.num_blocks
        assert engine.runtime.counters["fallbacks"] == {}
        assert engine.runtime.counters["replays"] > 0


def test_one_phase_may_be_captured_and_the_other_not(checkpoint: Path, reference: Any) -> None:
    mixed = dataclasses.replace(config("full"), prefill=PhaseConfig(backend="disabled"))
    with LLMEngine(checkpoint, mixed, device="cpu") as engine:
        for output in engine.generate(PROMPTS, GREEDY):
            assert output.token_ids == reference.tokens(checkpoint, output.prompt_token_ids, NEW_TOKENS)
        assert captured(engine) == {("decode", 4)}


def test_the_debug_mode_finds_nothing_to_say_about_the_engine(checkpoint: Path, reference: Any) -> None:
    for backend in ("full", "breakable", "tc_piecewise"):
        debug = dataclasses.replace(config(backend), debug_captures=True)
        with LLMEngine(checkpoint, debug, device="cpu") as engine:
            for output in engine.generate(PROMPTS[:3], GREEDY):
                assert output.token_ids == reference.tokens(checkpoint, output.prompt_token_ids, NEW_TOKENS)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("backend", ["disabled", "full", "breakable", "tc_piecewise"])
def test_the_debug_mode_refuses_a_corrupted_block_table_before_anything_runs(
    checkpoint: Path, backend: str, phase: str, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    debug = dataclasses.replace(config(backend), debug_captures=True)
    with LLMEngine(checkpoint, debug, device="cpu") as engine:
        engine.generate(PROMPTS[:2], GREEDY)
        caches = [t for name, t in engine.model.named_buffers() if name.endswith("_cache")]
        before: list[torch.Tensor] = []
        run = engine.runtime.run

        def corrupted(step_phase: str, inputs: Any, *, context: Any) -> Any:
            if step_phase == phase:
                before[:] = [cache.clone() for cache in caches]
                context.block_table[1, 0] = 1_000_000
            return run(step_phase, inputs, context=context)

        with monkeypatch.context() as patched:
            patched.setattr(engine.runtime, "run", corrupted)
            last = engine.state.num_blocks - 1
            wrong = rf"block_table\[1, 0\]: expected a block of 0 to {last}, .* got 1000000; give the request its own"
            with pytest.raises(InputError, match=wrong):
                engine.generate(PROMPTS[:2], GREEDY)
        assert all(torch.equal(cache, old) for cache, old in zip(caches, before, strict=True))
        # The step was refused, not the engine.
        for output in engine.generate(PROMPTS[:2], GREEDY):
            assert output.token_ids == reference.tokens(checkpoint, output.prompt_token_ids, NEW_TOKENS)


def test_two_engines_do_not_share_what_they_captured(checkpoint: Path, reference: Any) -> None:
    with (
        LLMEngine(checkpoint, config("full"), device="cpu") as first,
        LLMEngine(checkpoint, config("full"), device="cpu") as second,
    ):
        for prompt in PROMPTS:
            for engine in (first, second):
                [output] = engine.generate([prompt], GREEDY)
                assert output.token_ids == reference.tokens(checkpoint, output.prompt_token_ids, NEW_TOKENS)
        assert first.runtime.counters["captures"] == second.runtime.counters["captures"]


# ---- what is counted


@pytest.mark.parametrize(
    ("backend", "num_segments"), [("full", 1), ("breakable", NUM_LAYERS + 1), ("tc_piecewise", NUM_LAYERS + 1)]
)
def test_counters_of_a_request_trace(checkpoint: Path, backend: str, num_segments: int) -> None:
    with LLMEngine(checkpoint, config(backend), device="cpu") as engine:
        # Two prompts of 10 and 2 tokens in one prefill, bucket 16; then 4 decode steps of two: bucket 2. The first
        # step of each bucket runs and is captured, the others are replays.
        first, second = engine.generate(PROMPTS[:2], SamplingParams(max_new_tokens=5, ignore_eos=True))
        assert len(first.prompt_token_ids) + len(second.prompt_token_ids) <= 16
        counters = engine.runtime.counters.as_dict()
        assert (counters["steps"], counters["captures"], counters["replays"]) == (5, 2, 3)
        # The same again: nothing but replays.
        engine.generate(PROMPTS[:2], SamplingParams(max_new_tokens=5, ignore_eos=True))
        counters = engine.runtime.counters.as_dict()
        assert (counters["steps"], counters["captures"], counters["replays"]) == (10, 2, 8)
        assert (counters["evictions"], counters["fallbacks"]) == (0, {})
        entries = {(e["phase"], e["bucket"]): e for e in engine.runtime.explain().as_dict()["entries"]}
        assert entries["prefill", 16]["segments"] == entries["decode", 2]["segments"] == num_segments


@pytest.mark.parametrize("backend", ["full", "breakable", "tc_piecewise"])
def test_attention_runs_once_per_layer_and_step_also_when_a_bucket_is_captured(
    checkpoint: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A split op that ran twice in a step would write the cache twice; one that did not run, not at all."""
    calls: list[int] = []
    table = {each.name: each for each in attention.IMPLEMENTATIONS}

    def counted(*args: Any) -> None:
        calls.append(1)
        [context] = [arg for arg in args if isinstance(arg, attention.AttentionContext)]
        table["torch_static" if context.is_static else "torch_native"].load()(*args)

    counting = dataclasses.replace(
        table["torch_static"], name="counting", reject=lambda spec: None, load=lambda: counted
    )
    monkeypatch.setattr(attention, "IMPLEMENTATIONS", (counting,))
    with LLMEngine(checkpoint, config(backend), device="cpu") as engine:
        for num_new, num_steps in ((1, 1), (5, 5), (5, 5)):  # the first appearance of prefill, of decode, replays
            calls.clear()
            engine.generate(PROMPTS[:2], SamplingParams(max_new_tokens=num_new, ignore_eos=True))
            assert len(calls) == NUM_LAYERS * num_steps
        assert engine.runtime.counters["captures"] == 2


# ---- before the first step


@pytest.mark.parametrize(("backend", "compiler"), WAYS[:5])
def test_eager_startup_captures_every_bucket_before_the_first_step(
    checkpoint: Path, backend: str, compiler: str, reference: Any
) -> None:
    eager = dataclasses.replace(config(backend, compiler, prefill=(16, 32), decode=(1, 4)), startup="eager")
    with LLMEngine(checkpoint, eager, device="cpu") as engine:
        caches = [t for name, t in engine.model.named_buffers() if name.endswith("_cache")]
        assert len(caches) == 2 * NUM_LAYERS
        assert not any(cache.any() for cache in caches), "padding was written into the cache"
        assert captured(engine) == {("prefill", 16), ("prefill", 32), ("decode", 1), ("decode", 4)}
        with engine.runtime.counters.expect(captures=0):
            for output in engine.generate(PROMPTS[:3], GREEDY):
                assert output.token_ids == reference.tokens(checkpoint, output.prompt_token_ids, NEW_TOKENS)
        assert engine.runtime.counters.as_dict()["in_step_seconds"] == 0


# ---- memory, and weights that change


def test_a_budget_and_a_cap_are_kept_while_the_tokens_stay_the_same(checkpoint: Path, reference: Any) -> None:
    capped = dataclasses.replace(config("full"), max_captures=1)
    with LLMEngine(checkpoint, capped, device="cpu") as engine:
        for prompts in (PROMPTS, PROMPTS[:2], PROMPTS[:1]):
            for output in engine.generate(prompts, GREEDY):
                assert output.token_ids == reference.tokens(checkpoint, output.prompt_token_ids, NEW_TOKENS)
            assert len(captured(engine)) <= 1
        counters = engine.runtime.counters.as_dict()
        assert "no room for a capture: other buckets are more useful" in counters["fallbacks"]


def test_a_moved_cache_drops_the_capture_and_says_why(checkpoint: Path, reference: Any) -> None:
    with LLMEngine(checkpoint, config("full"), device="cpu") as engine:
        engine.generate(PROMPTS[:2], GREEDY)
        layer = engine.model.model.layers[1].self_attn
        with torch.inference_mode():
            layer.k_cache = layer.k_cache.clone()
        for output in engine.generate(PROMPTS[:2], GREEDY):
            assert output.token_ids == reference.tokens(checkpoint, output.prompt_token_ids, NEW_TOKENS)
        [reason] = engine.runtime.counters.as_dict()["fallbacks"]
        assert "layers.1.self_attn.k_cache" in reason
