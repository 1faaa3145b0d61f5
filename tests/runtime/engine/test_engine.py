"""The engine against transformers, token by token, and its life: batches, blocks, limits, errors, closing."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from piecework.errors import ConfigError, InputError, ModelError, RuntimeClosedError
from piecework.ops import attention
from piecework.phases import GraphConfig, PhaseConfig
from piecework.runtime.engine.engine import Engine, Generation

PROMPTS = [
    "What is the capital of France? It is",
    "A",
    "The quick brown fox jumps over the lazy dog; the dog, being lazy,",
    "Once upon a time",
]
NEW_TOKENS = 12


@functools.cache
def reference_model(directory: Path) -> Any:
    return transformers.LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@functools.cache
def reference(directory: Path, prompt: tuple[int, ...], max_new_tokens: int = NEW_TOKENS) -> tuple[int, ...]:
    """What transformers' own greedy generate adds to one prompt, in float32."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        result = reference_model(directory).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    return tuple(result[0, len(prompt) :].tolist())


def assert_equal_to_reference(directory: Path, generations: Sequence[Generation]) -> None:
    for generation in generations:
        assert generation.token_ids == reference(directory, generation.prompt_token_ids)
    # Else a model that repeats one token would pass with half of its layers missing.
    assert len({token for generation in generations for token in generation.token_ids}) > NEW_TOKENS


def config(compiler: str = "eager", *, specialize: Any = (), **shared: Any) -> GraphConfig:
    return GraphConfig(
        prefill=PhaseConfig(compiler=compiler, buckets=(16, 64), specialize=specialize),
        decode=PhaseConfig(compiler=compiler, buckets=(1, 2, 4), specialize=specialize),
        **shared,
    )


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Any:
    with Engine(checkpoint, config(), device="cpu") as engine:
        yield engine


def change_config(directory: Path, name: str = "config.json", **changes: Any) -> None:
    path = directory / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# ---- the same tokens as transformers


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_tokens_equal_transformers_for_each_compiler(checkpoint: Path, compiler: str) -> None:
    with Engine(checkpoint, config(compiler), device="cpu") as engine:
        assert_equal_to_reference(checkpoint, engine.generate(PROMPTS, max_new_tokens=NEW_TOKENS))
        # Beyond the ladder of the prefill, and alone: other buckets, no other tokens.
        assert_equal_to_reference(checkpoint, engine.generate(PROMPTS * 2, max_new_tokens=NEW_TOKENS))
        for prompt in PROMPTS:
            [generation] = engine.generate([prompt], max_new_tokens=NEW_TOKENS)
            assert generation.token_ids == reference(checkpoint, generation.prompt_token_ids)


@pytest.mark.parametrize("variant", ["all heads apart", "tied embeddings", "biases", "sharded"])
def test_tokens_equal_transformers_for_each_kind_of_checkpoint(
    checkpoint_variant: Callable[[str], Path], variant: str
) -> None:
    directory = checkpoint_variant(variant)
    with Engine(directory, config(), device="cpu") as engine:
        assert_equal_to_reference(directory, engine.generate(PROMPTS, max_new_tokens=NEW_TOKENS))


@pytest.mark.parametrize("startup", ["lazy", "eager"])
def test_tokens_equal_transformers_for_each_startup_policy(checkpoint: Path, startup: str) -> None:
    each = config("aot_eager", startup=startup, specialize="all")
    with Engine(checkpoint, each, device="cpu") as engine:
        ready = engine.runtime.counters.as_dict()
        assert_equal_to_reference(checkpoint, engine.generate(PROMPTS, max_new_tokens=NEW_TOKENS))
        after = engine.runtime.counters.as_dict()
    assert (ready["traces"], after["traces"]) == (int(startup == "eager"), 1)
    if startup == "eager":
        assert after["compiles_specialized"] == ready["compiles_specialized"] > 0
    else:
        assert after["compiles_specialized"] > ready["compiles_specialized"] == 0


def test_no_guard_of_the_trace_is_ever_broken(checkpoint: Path) -> None:
    with Engine(checkpoint, config("aot_eager", evaluate_guards=True), device="cpu") as engine:
        [generation] = engine.generate(PROMPTS[:1], max_new_tokens=4)
    assert generation.token_ids == reference(checkpoint, generation.prompt_token_ids)[:4]


@pytest.mark.parametrize("block_size", [1, 7, 256])
def test_the_block_size_changes_nothing(checkpoint: Path, block_size: int) -> None:
    with Engine(checkpoint, config(), device="cpu", block_size=block_size) as engine:
        assert_equal_to_reference(checkpoint, engine.generate(PROMPTS, max_new_tokens=NEW_TOKENS))


def test_a_bfloat16_checkpoint_runs_in_bfloat16_or_as_asked(checkpoint_variant: Callable[[str], Path]) -> None:
    directory = checkpoint_variant("bfloat16")
    with Engine(directory, config(), device="cpu") as engine:
        [attention_module] = [m.self_attn for m in engine.model.model.layers[:1]]
        assert attention_module.k_cache.dtype == attention_module.qkv_proj.weight.dtype == torch.bfloat16
        [generation] = engine.generate(PROMPTS[:1], max_new_tokens=3)
        assert len(generation.token_ids) == 3
    with Engine(directory, config(), device="cpu", dtype="float32") as engine:
        assert_equal_to_reference(directory, engine.generate(PROMPTS, max_new_tokens=NEW_TOKENS))


def test_prompts_may_be_token_ids(engine: Engine, checkpoint: Path) -> None:
    texts = engine.generate(PROMPTS, max_new_tokens=NEW_TOKENS)
    ids = engine.generate([list(generation.prompt_token_ids) for generation in texts], max_new_tokens=NEW_TOKENS)
    assert ids == texts
    for generation in texts:
        assert generation.text == engine.tokenizer.decode(generation.token_ids)


# ---- what runs


def test_attention_runs_once_per_layer_and_step(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    [native] = attention.IMPLEMENTATIONS

    def counted(*args: Any) -> None:
        calls.append(args[-1].num_tokens)
        native.load()(*args)

    counting = attention.AttentionImplementation(
        name="counting", why="counts", reject=lambda spec: None, load=lambda: counted
    )
    monkeypatch.setattr(attention, "IMPLEMENTATIONS", (counting,))
    num_layers = 3
    for compiler in ("eager", "aot_eager"):
        calls.clear()
        with Engine(checkpoint, config(compiler), device="cpu") as engine:
            assert calls == []
            first, second = engine.generate(PROMPTS[:2], max_new_tokens=5)
        prompt_tokens = len(first.prompt_token_ids) + len(second.prompt_token_ids)
        # One prefill of both prompts, and then four decode steps of both requests.
        assert calls == [prompt_tokens] * num_layers + [2] * num_layers * 4


def test_one_trace_and_three_distinct_pieces(checkpoint: Path) -> None:
    with Engine(checkpoint, config("aot_eager"), device="cpu") as engine:
        engine.generate(PROMPTS, max_new_tokens=4)
        counters = engine.runtime.counters.as_dict()
    # Three layers: four pieces around three attentions, of which the two in the middle are equal.
    assert (counters["traces"], counters["pieces"], counters["distinct_pieces"]) == (1, 4, 3)
    assert counters["compiles_general"] == 3
    assert counters["opaque_regions"] == 3


class Steps:
    """Records what the engine asks of its runtime."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[tuple[str, int]] = []
        run = engine.runtime.run

        def recorded(phase: str, inputs: dict[str, torch.Tensor], context: Any = None) -> Any:
            self.steps.append((str(phase), context.num_reqs))
            return run(phase, inputs, context=context)

        monkeypatch.setattr(engine.runtime, "run", recorded)


def test_a_finished_request_leaves_the_batch(
    own_checkpoint: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(checkpoint, config(), device="cpu") as engine:
        plain = engine.generate(PROMPTS, max_new_tokens=NEW_TOKENS)
    # The third token of the first answer becomes the end token.
    end = plain[0].token_ids[2]
    change_config(own_checkpoint, "generation_config.json", eos_token_id=[511, end])
    expected = [g.token_ids[: g.token_ids.index(end) + 1] if end in g.token_ids else g.token_ids for g in plain]
    with Engine(own_checkpoint, config(), device="cpu") as engine:
        steps = Steps(engine, monkeypatch).steps
        generations = engine.generate(PROMPTS, max_new_tokens=NEW_TOKENS)
        assert [g.token_ids for g in generations] == expected
        assert [g.finish_reason for g in generations] == ["stop" if end in g.token_ids else "length" for g in plain]
        assert "length" in {g.finish_reason for g in generations}
        running = [sum(len(tokens) > step for tokens in expected) for step in range(NEW_TOKENS)]
        assert steps == [("prefill", 4), *(("decode", n) for n in running[1:])]
        assert engine.kv_cache.num_free_blocks == engine.kv_cache.num_blocks


def test_prompts_that_do_not_fit_together_take_turns(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(checkpoint, config(), device="cpu", num_blocks=3) as engine:
        stored = [len(engine.tokenizer.encode(prompt)) + NEW_TOKENS - 1 for prompt in PROMPTS]
        assert [engine.kv_cache.blocks_for(num_tokens) for num_tokens in stored] == [2, 1, 2, 1]
        steps = Steps(engine, monkeypatch).steps
        assert_equal_to_reference(checkpoint, engine.generate(PROMPTS, max_new_tokens=NEW_TOKENS))
        assert [num_reqs for phase, num_reqs in steps if phase == "prefill"] == [2, 2]
        assert engine.kv_cache.num_free_blocks == 3


def test_tokens_are_reported_in_the_step_that_made_them(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(engine, monkeypatch).steps
    seen: list[tuple[int, int, int]] = []
    generations = engine.generate(
        PROMPTS[:2], max_new_tokens=3, on_token=lambda index, token: seen.append((len(steps), index, token))
    )
    assert seen == [(step + 1, index, generations[index].token_ids[step]) for step in range(3) for index in range(2)]


def test_blocks_are_free_after_an_error(engine: Engine) -> None:
    class Stop(Exception):
        pass

    def stop(index: int, token: int) -> None:
        if index == 1:
            raise Stop

    with pytest.raises(Stop):
        engine.generate(PROMPTS, max_new_tokens=4, on_token=stop)
    assert engine.kv_cache.num_free_blocks == engine.kv_cache.num_blocks


# ---- limits


def test_an_answer_ends_where_the_context_ends(checkpoint: Path) -> None:
    with Engine(checkpoint, config(), device="cpu", max_model_len=16) as engine:
        [generation] = engine.generate([[0] + [40] * 9], max_new_tokens=100)
        assert (len(generation.token_ids), generation.finish_reason) == (6, "length")
        assert generation.token_ids == reference(checkpoint, generation.prompt_token_ids)[:6]
        [generation] = engine.generate([[40] * 15], max_new_tokens=100)
        assert len(generation.token_ids) == 1
        assert engine.generate([], max_new_tokens=100) == []


@pytest.mark.parametrize(
    ("prompts", "max_new_tokens", "message"),
    [
        ([""], 4, "prompt 0: expected one token or more, got an empty prompt; write something there"),
        (["fine", []], 4, "prompt 1: expected one token or more"),
        ([[40] * 32], 4, "expected at most 31 tokens, .* context of 32 .*, got 32; shorten the prompt or raise max_m"),
        (["word " * 400], 4, r"the context of 32 has room for an answer, got \d+; shorten the prompt$"),
        (["fine", [1, 512]], 4, "prompt 1: expected token ids from 0 to 511, got 512"),
        ([[-1]], 4, "expected token ids from 0 to 511, got -1"),
        ([[True]], 4, "expected token ids from 0 to 511, got True"),
        ([["a"]], 4, "expected token ids from 0 to 511, got 'a'"),
        ("fine", 4, "expected a list of prompts, got one text"),
        (["fine"], 0, "max_new_tokens: expected 1 or more, got 0"),
        (["fine"], -3, "max_new_tokens: expected 1 or more, got -3"),
        (["fine"], True, "max_new_tokens: expected 1 or more, got True"),
        ([[40] * 20], 4, "20 tokens and an answer of 4 need 6 blocks of 4 in the KV cache, which has 5; raise num_blo"),
    ],
)
def test_bad_requests_are_refused_before_anything_runs(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, prompts: Any, max_new_tokens: int, message: str
) -> None:
    with Engine(checkpoint, config(), device="cpu", max_model_len=32, num_blocks=5, block_size=4) as engine:
        steps = Steps(engine, monkeypatch).steps
        with pytest.raises(InputError, match=message):
            engine.generate(prompts, max_new_tokens=max_new_tokens)
        assert steps == []
        assert engine.kv_cache.num_free_blocks == 5
        assert len(engine.generate(["fine"], max_new_tokens=2)[0].token_ids) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "int8"}, "dtype: expected auto or one of float32, .*, got 'int8'"),
        ({"dtype": torch.int8}, "dtype: expected auto or one of"),
        ({"device": "abacus"}, "device: expected cpu, cuda or cuda:N, got 'abacus'"),
        ({"device": torch.device("meta")}, "device: expected cpu, cuda or cuda:N, got 'meta'"),
        ({"device": "cuda:99"}, "device: expected one of .* CUDA devices, got cuda:99"),
        ({"block_size": 0}, "block_size: expected a positive integer, got 0"),
        ({"num_blocks": -1}, "num_blocks: expected a positive integer, got -1"),
        ({"max_model_len": 1.5}, "max_model_len: expected a positive integer, got 1.5"),
        ({"max_model_len": 257}, "max_model_len: expected at most the model's max_position_embeddings 256, got 257"),
        ({"config": GraphConfig(startup="tiered")}, "startup"),
    ],
)
def test_bad_arguments_are_refused_before_weights_are_read(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], message: str
) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("piecework.runtime.engine.engine.load_weights", never)
    with pytest.raises(ConfigError, match=message):
        Engine(checkpoint, **{"device": "cpu"} | arguments)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda d: (d / "tokenizer.json").unlink(), r"tokenizer\.json: the file is missing"),
        (lambda d: (d / "config.json").unlink(), r"config\.json: the file is missing"),
        (lambda d: change_config(d, architectures=["Nothing"]), "architectures: expected one of LlamaForCausalLM"),
        (lambda d: change_config(d, rope_scaling={"rope_type": "llama3"}), "rope_scaling"),
        (lambda d: change_config(d, num_hidden_layers=4), "9 missing: model.layers.3"),
        (lambda d: change_config(d, num_hidden_layers=2), "9 not of this model: model.layers.2"),
        (lambda d: change_config(d, intermediate_size=96), "9 of another shape"),
        (lambda d: (d / "model.safetensors").write_bytes(b"junk"), r"model\.safetensors: not a whole safetensors file"),
    ],
)
def test_a_bad_checkpoint_is_refused(own_checkpoint: Path, spoil: Callable[[Path], object], message: str) -> None:
    spoil(own_checkpoint)
    with pytest.raises(ModelError, match=message):
        Engine(own_checkpoint, config(), device="cpu")


def test_a_closed_engine_says_so(checkpoint: Path) -> None:
    with Engine(checkpoint, config(), device="cpu") as engine:
        engine.generate(["fine"], max_new_tokens=1)
    engine.close()
    with pytest.raises(RuntimeClosedError, match="the engine was closed"):
        engine.generate(["fine"], max_new_tokens=1)


def test_two_engines_in_one_process(checkpoint: Path, checkpoint_variant: Callable[[str], Path]) -> None:
    other = checkpoint_variant("tied embeddings")
    with Engine(checkpoint, config(), device="cpu") as first, Engine(other, config(), device="cpu") as second:
        for directory, engine in ((checkpoint, first), (other, second), (checkpoint, first)):
            assert_equal_to_reference(directory, engine.generate(PROMPTS, max_new_tokens=NEW_TOKENS))
