"""The engine's arguments: what is refused, before weights are read, and what is worked out where they are left open."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from piecework.errors import ConfigError, ModelError
from piecework.phases import GraphConfig
from piecework.runtime.engine.arguments import reachable_buckets
from piecework.runtime.engine.engine import LLMEngine


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "int8"}, "dtype: expected auto or one of float32, .*, got 'int8'"),
        ({"dtype": torch.int8}, "dtype: expected auto or one of"),
        ({"device": "abacus"}, "device: expected cpu, cuda or cuda:N, got 'abacus'"),
        ({"device": torch.device("meta")}, "device: expected cpu, cuda or cuda:N, got 'meta'"),
        ({"device": "cuda:99"}, "device: expected (one of .* CUDA devices|cpu, since there is no .*), got cuda:99"),
        ({"block_size": 0}, "block_size: expected a positive integer, got 0"),
        ({"num_blocks": -1}, "num_blocks: expected a positive integer, got -1"),
        ({"max_model_len": 1.5}, "max_model_len: expected a positive integer, got 1.5"),
        ({"max_model_len": 257}, "max_model_len: expected at most the model's max_position_embeddings 256, got 257"),
        ({"max_num_seqs": 0}, "max_num_seqs: expected a positive integer, got 0"),
        ({"max_num_batched_tokens": True}, "max_num_batched_tokens: expected a positive integer, got True"),
        (
            {"max_num_seqs": 9, "max_num_batched_tokens": 8},
            "max_num_batched_tokens: expected at least max_num_seqs 9, .*, got 8; raise it or lower max_num_seqs",
        ),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 255},
            "expected at least max_model_len 256, .*, got 255; raise it, lower max_model_len or enable chunked prefill",
        ),
        ({"config": GraphConfig(enable_torch_compile=True)}, "^enable_torch_compile: expected a phase with"),
        (
            {"config": GraphConfig(decode={"buckets": (1, 4, 8, 16, 32)}), "max_num_seqs": 5},
            r"^decode\.buckets: expected buckets that a step of at most 5 tokens \(max_num_seqs\) can take, got 16, 32 "
            r"above 8, which holds it; remove them or raise max_num_seqs$",
        ),
        (
            {"config": GraphConfig(prefill={"buckets": (16, 64, 65)}), "max_num_batched_tokens": 64, "max_num_seqs": 4},
            r"^prefill\.buckets: expected buckets that a step of at most 64 tokens \(max_num_batched_tokens\) can take"
            r", got 65 above 64, which holds it; remove them or raise max_num_batched_tokens$",
        ),
        (
            {"config": GraphConfig(decode={"specialize": (8,)}), "max_num_seqs": 4},
            r"^decode\.specialize: expected 'all' or buckets of the ladder 1, 2, 3, 4, got 8; remove 8 or",
        ),
    ],
)
def test_bad_arguments_are_refused_before_weights_are_read(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], message: str
) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("piecework.runtime.engine.engine.load_weights", never)
    with pytest.raises(ConfigError, match=message):
        LLMEngine(checkpoint, **{"device": "cpu"} | arguments)


def test_ladders_end_where_a_step_can() -> None:
    """A default ladder ends in exactly the largest step; one that is named stays, its last bucket may be larger."""
    named = GraphConfig(prefill={"buckets": (16, 34)}, decode={"buckets": (1, 4, 8)})
    assert reachable_buckets(named, max_num_seqs=5, max_num_batched_tokens=17) == named
    default = reachable_buckets(GraphConfig(), max_num_seqs=5, max_num_batched_tokens=40)
    assert default.decode.ladder("decode").buckets == (1, 2, 3, 4, 5)
    assert default.prefill.ladder("prefill").buckets == (16, 24, 32, 40)
    asked = GraphConfig(decode={"max_num_tokens": 6}, prefill={"max_num_tokens": 20})
    assert reachable_buckets(asked, max_num_seqs=256, max_num_batched_tokens=8192) == asked
    assert reachable_buckets(asked, max_num_seqs=4, max_num_batched_tokens=8192).decode.max_num_tokens == 4
    # More than the default ladder has is no reason to let it grow.
    assert reachable_buckets(GraphConfig(), max_num_seqs=999, max_num_batched_tokens=99_999) == GraphConfig()


def test_the_engine_cuts_its_default_ladders(checkpoint: Path) -> None:
    with LLMEngine(checkpoint, device="cpu", max_num_seqs=3, max_num_batched_tokens=20) as engine:
        ladders = engine.runtime.resolved.ladders
        assert (ladders["decode"].buckets, ladders["prefill"].buckets) == ((1, 2, 3), (16, 20))


@pytest.mark.parametrize(("cuda", "built"), [("12.9", "built for CUDA 12.9"), (None, "built without CUDA")])
def test_cuda_without_a_gpu_says_what_is_there(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, cuda: str | None, built: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(ConfigError) as caught:
        LLMEngine(checkpoint, device="cuda")
    assert str(caught.value) == (
        f"device: expected cpu, since there is no CUDA device here (torch {torch.__version__}, {built}), got cuda; "
        f"use cpu, or install a torch and a driver that find the GPU"
    )


def test_an_index_beyond_the_gpus_says_how_many_there_are(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="device: expected one of 2 CUDA devices, got cuda:2; use cpu or another"):
        LLMEngine(checkpoint, device="cuda:2")


def test_limits_that_are_left_open(checkpoint: Path) -> None:
    for given, expected in (
        ({}, (256, 8192)),
        ({"max_num_batched_tokens": 10}, (10, 10)),
        ({"max_num_seqs": 9000}, (9000, 9000)),
        ({"enable_chunked_prefill": False, "max_model_len": 40, "max_num_batched_tokens": 40}, (40, 40)),
    ):
        with LLMEngine(checkpoint, device="cpu", num_blocks=16, **given) as engine:
            assert (engine.max_num_seqs, engine.max_num_batched_tokens) == expected


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda d: (d / "tokenizer.json").unlink(), r"tokenizer\.json: the file is missing"),
        (lambda d: (d / "config.json").unlink(), r"config\.json: the file is missing"),
        (lambda d: change_config(d, architectures=["Nothing"]), "architectures: expected one of .*LlamaForCausalLM"),
        (lambda d: change_config(d, rope_scaling={"rope_type": "longrope"}), "rope_scaling"),
        (lambda d: change_config(d, vocab_size=500), r"tokenizer\.json: .* vocab_size 500, got ids up to 511; use the"),
        (lambda d: change_config(d, num_hidden_layers=4), "9 missing: model.layers.3"),
        (lambda d: change_config(d, num_hidden_layers=2), "9 not of this model: model.layers.2"),
        (lambda d: change_config(d, intermediate_size=96), "9 of another shape"),
        (lambda d: (d / "model.safetensors").write_bytes(b"junk"), r"model\.safetensors: not a whole safetensors file"),
    ],
)
def test_a_bad_checkpoint_is_refused(own_checkpoint: Path, spoil: Callable[[Path], object], message: str) -> None:
    spoil(own_checkpoint)
    with pytest.raises(ModelError, match=message):
        LLMEngine(own_checkpoint, device="cpu")


def test_a_last_bucket_far_beyond_the_largest_step_is_refused() -> None:
    config = GraphConfig(decode={"buckets": (1, 513)})
    with pytest.raises(ConfigError, match=r"decode.buckets: expected a last bucket of at most twice .*256.*got 513"):
        reachable_buckets(config, max_num_seqs=256, max_num_batched_tokens=8192)
    assert reachable_buckets(config, max_num_seqs=257, max_num_batched_tokens=8192) is config
