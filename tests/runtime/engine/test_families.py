"""Every family of models through the engine: the greedy tokens of transformers, chunked, preempted or not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from piecework.phases import GraphConfig, PhaseConfig
from piecework.runtime.engine.engine import LLMEngine
from piecework.runtime.engine.params import SamplingParams
from piecework.runtime.engine.toy_checkpoint import make_checkpoint

PROMPTS = [
    "What is the capital of France? It is",
    "A",
    "The quick brown fox jumps over the lazy dog; the dog, being lazy,",
    "Once upon a time",
]
NEW_TOKENS = 20

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "mistral": {"sliding_window": 9},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_size": 24},
}
"""Each with what sets it apart: llama's rope scaling, a window shorter than prompts, tied embeddings, wide heads."""

WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunked": {"max_num_batched_tokens": 6},
    "not chunked": {"enable_chunked_prefill": False, "max_model_len": 64, "max_num_batched_tokens": 64},
    "preempted": {"num_blocks": 13, "block_size": 4, "max_num_batched_tokens": 6},
}


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @functools.cache
    def make(family: str) -> Path:
        return make_checkpoint(tmp_path_factory.mktemp(family), family=family, **FAMILIES[family])

    return make


def check(directory: Path, compiler: str, way: str, reference: Any) -> None:
    # No bucket beyond the first that holds the largest step: the engine refuses what no step can take.
    prefill = (4, 8) if "max_num_batched_tokens" in WAYS[way] and way != "not chunked" else (8, 64)
    config = GraphConfig(
        prefill=PhaseConfig(compiler=compiler, buckets=prefill), decode=PhaseConfig(compiler=compiler, buckets=(4,))
    )
    with LLMEngine(directory, config, device="cpu", max_num_seqs=4, **WAYS[way]) as engine:
        outputs = engine.generate(PROMPTS, SamplingParams(max_new_tokens=NEW_TOKENS, logprobs=3))
        state, traces = engine.state, engine.runtime.counters.as_dict()["traces"]
    assert (state.num_preemptions > 0) == (way == "preempted")
    assert state.num_free_blocks == state.num_blocks
    assert traces == int(compiler != "eager")
    for output in outputs:
        assert output.token_ids == reference.tokens(directory, output.prompt_token_ids, NEW_TOKENS)
        expected = reference.logprobs(directory, output.prompt_token_ids, output.token_ids)
        for each, row in zip(output.logprobs or (), expected, strict=True):
            assert abs(each.logprob - row[each.token_id]) < 1e-4
            assert all(abs(value - row[token]) < 1e-4 for token, value in each.top)
    # Else a model that repeats one token would pass with half of its layers missing.
    assert len({token for output in outputs for token in output.token_ids}) > 10


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_and_logprobs_equal_transformers(
    family: str, compiler: str, way: str, directory_of: Callable[[str], Path], reference: Any
) -> None:
    check(directory_of(family), compiler, way, reference)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["whole", "preempted"])
def test_the_same_under_inductor(way: str, directory_of: Callable[[str], Path], reference: Any) -> None:
    check(directory_of("qwen3"), "inductor", way, reference)
