"""200 random requests through continuous batching: each comes out as it does alone, and nothing is left behind."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from piecework.phases import GraphConfig, PhaseConfig
from piecework.runtime.engine.engine import LLMEngine
from piecework.runtime.engine.output import RequestOutput
from piecework.runtime.engine.params import SamplingParams
from piecework.runtime.engine.toy_checkpoint import make_checkpoint

NUM_REQUESTS = 200
PREFILL, DECODE = (8, 32), (1, 4, 8)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), num_layers=2)


def engine_of(directory: Path, **limits: Any) -> LLMEngine:
    config = GraphConfig(
        prefill=PhaseConfig(compiler="aot_eager", buckets=PREFILL, specialize="all"),
        decode=PhaseConfig(compiler="aot_eager", buckets=DECODE, specialize="all"),
    )
    limits = {"max_num_seqs": DECODE[-1], "max_num_batched_tokens": PREFILL[-1], "block_size": 4} | limits
    return LLMEngine(directory, config, device="cpu", **limits)


def random_request(generator: random.Random) -> tuple[list[int], SamplingParams]:
    prompt = [generator.randrange(512) for _ in range(generator.choice((1, 3, 8, generator.randint(1, 48))))]
    sampled = generator.random() < 0.6
    params = SamplingParams(
        max_new_tokens=generator.randint(1, 14),
        temperature=generator.uniform(0.2, 2.0) if sampled else 0.0,
        top_k=generator.choice((0, 1, 5, 50)),
        top_p=generator.choice((1.0, 0.9, 0.5)),
        seed=generator.randrange(2**64),
        stop=generator.sample(["e", "th", " the", "zz", "o"], generator.choice((0, 0, 0, 1, 2))),
        stop_token_ids=generator.sample(range(512), generator.choice((0, 0, 30))),
        ignore_eos=generator.random() < 0.5,
        logprobs=generator.choice((None, None, 0, 3)),
    )
    return prompt, params


def what(output: RequestOutput) -> dict[str, Any]:
    """All that must not depend on who else runs; log-probabilities apart, which are rounded differently."""
    names = ("prompt_token_ids", "token_ids", "text", "finish_reason", "stop_reason")
    return {name: getattr(output, name) for name in names}


def test_each_equals_its_own_run_alone(tiny: Path) -> None:
    generator = random.Random(17)
    requests = [random_request(generator) for _ in range(NUM_REQUESTS)]
    with engine_of(tiny, num_blocks=24) as engine:
        outputs: dict[str, list[RequestOutput]] = {}
        waiting = list(enumerate(requests))
        ladder = {*(("prefill", bucket) for bucket in PREFILL), *(("decode", bucket) for bucket in DECODE)}
        settled: dict[str, Any] | None = None
        while waiting or engine.has_unfinished:
            for _ in range(min(len(waiting), generator.choice((0, 0, 1, 2, 5)))):
                number, (prompt, params) = waiting.pop(0)
                engine.add_request(prompt, params, request_id=str(number))
            for output in engine.step():
                outputs.setdefault(output.request_id, []).append(output)
            if settled is None and {(str(entry.phase), entry.bucket) for entry in engine.runtime.entries} >= ladder:
                settled = engine.runtime.counters.as_dict()
        counters, state = engine.runtime.counters.as_dict(), engine.state
    assert len(outputs) == NUM_REQUESTS
    # Nothing is left behind, and blocks were scarce.
    assert (state.num_free_blocks, state.num_running, state.num_waiting) == (24, 0, 0)
    assert state.num_preemptions > 10
    # One trace; and no compile once each bucket had been seen, which was early.
    assert settled is not None
    assert settled["steps"] < counters["steps"] / 4
    assert counters["traces"] == 1
    for name in ("compiles_general", "compiles_specialized"):
        assert counters[name] == settled[name] > 0
    assert counters["fallbacks"] == {}

    with engine_of(tiny) as alone:
        reasons = set()
        for number, (prompt, params) in enumerate(requests):
            each = outputs[str(number)]
            [expected] = alone.generate([prompt], params)
            assert what(each[-1]) == what(expected)
            assert "".join(output.new_text for output in each) == expected.text
            assert sum((output.new_token_ids for output in each), ()) == expected.token_ids
            if params.logprobs is not None:
                for got, wanted in zip(each[-1].logprobs or (), expected.logprobs or (), strict=True):
                    assert got.token_id == wanted.token_id
                    assert got.logprob == pytest.approx(wanted.logprob, abs=1e-4)
                    assert len(got.top) == params.logprobs
            reasons.add((expected.finish_reason, type(expected.stop_reason)))
    # Every way to end came up.
    assert reasons == {("length", type(None)), ("stop", int), ("stop", str)}
