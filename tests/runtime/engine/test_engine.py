"""The engine's `generate` against transformers, and its life: batches, limits, errors, closing."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from piecework.errors import InputError, RuntimeClosedError
from piecework.ops import attention
from piecework.phases import GraphConfig, PhaseConfig
from piecework.runtime.engine.engine import LLMEngine
from piecework.runtime.engine.output import RequestOutput
from piecework.runtime.engine.params import SamplingParams

PROMPTS = [
    "What is the capital of France? It is",
    "A",
    "The quick brown fox jumps over the lazy dog; the dog, being lazy,",
    "Once upon a time",
]
NEW_TOKENS = 12
GREEDY = SamplingParams(max_new_tokens=NEW_TOKENS)

AssertEqual = Callable[[Path, Sequence[RequestOutput]], None]


@pytest.fixture
def assert_equal_to_reference(reference: Any) -> AssertEqual:
    def check(directory: Path, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            assert output.token_ids == reference.tokens(directory, output.prompt_token_ids, NEW_TOKENS)
        # Else a model that repeats one token would pass with half of its layers missing.
        assert len({token for output in outputs for token in output.token_ids}) > NEW_TOKENS

    return check


def config(
    compiler: str = "eager",
    *,
    specialize: Any = (),
    prefill: tuple[int, ...] = (16, 64),
    decode: tuple[int, ...] = (1, 2, 4),
    **shared: Any,
) -> GraphConfig:
    return GraphConfig(
        prefill=PhaseConfig(compiler=compiler, buckets=prefill, specialize=specialize),
        decode=PhaseConfig(compiler=compiler, buckets=decode, specialize=specialize),
        **shared,
    )


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Any:
    with LLMEngine(checkpoint, config(), device="cpu") as engine:
        yield engine


def change_config(directory: Path, name: str = "config.json", **changes: Any) -> None:
    path = directory / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# ---- the same tokens as transformers


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_tokens_equal_transformers_for_each_compiler(
    checkpoint: Path, compiler: str, assert_equal_to_reference: AssertEqual
) -> None:
    with LLMEngine(checkpoint, config(compiler), device="cpu") as engine:
        assert_equal_to_reference(checkpoint, engine.generate(PROMPTS, GREEDY))
        # Beyond the ladder of both phases, and alone: other buckets, no other tokens.
        assert_equal_to_reference(checkpoint, engine.generate(PROMPTS * 2, GREEDY))
        assert_equal_to_reference(checkpoint, [engine.generate([prompt], GREEDY)[0] for prompt in PROMPTS])


@pytest.mark.parametrize("variant", ["all heads apart", "tied embeddings", "biases", "sharded"])
def test_tokens_equal_transformers_for_each_kind_of_checkpoint(
    checkpoint_variant: Callable[[str], Path], variant: str, assert_equal_to_reference: AssertEqual
) -> None:
    directory = checkpoint_variant(variant)
    with LLMEngine(directory, config(), device="cpu") as engine:
        assert_equal_to_reference(directory, engine.generate(PROMPTS, GREEDY))


@pytest.mark.parametrize("startup", ["lazy", "eager"])
def test_tokens_equal_transformers_for_each_startup_policy(
    checkpoint: Path, startup: str, assert_equal_to_reference: AssertEqual
) -> None:
    each = config("aot_eager", startup=startup, specialize="all")
    with LLMEngine(checkpoint, each, device="cpu") as engine:
        ready = engine.runtime.counters.as_dict()
        assert_equal_to_reference(checkpoint, engine.generate(PROMPTS, GREEDY))
        after = engine.runtime.counters.as_dict()
    assert (ready["traces"], after["traces"]) == (int(startup == "eager"), 1)
    if startup == "eager":
        assert after["compiles_specialized"] == ready["compiles_specialized"] > 0
    else:
        assert after["compiles_specialized"] > ready["compiles_specialized"] == 0


@pytest.mark.parametrize("chunked", [True, False])
def test_a_step_has_no_more_requests_and_tokens_than_allowed(
    checkpoint: Path, chunked: bool, monkeypatch: pytest.MonkeyPatch, assert_equal_to_reference: AssertEqual
) -> None:
    limits = {"max_num_batched_tokens": 7 if chunked else 32, "enable_chunked_prefill": chunked}
    ladders = config(prefill=(8,) if chunked else (16, 64), decode=(1, 2))
    with LLMEngine(checkpoint, ladders, device="cpu", max_num_seqs=2, max_model_len=32, **limits) as engine:
        steps = Steps(engine, monkeypatch).steps
        assert_equal_to_reference(checkpoint, engine.generate(PROMPTS, GREEDY))
    assert max(num_reqs for _, num_reqs, _ in steps) == 2
    assert max(num_tokens for *_, num_tokens in steps) <= limits["max_num_batched_tokens"]
    prefills = sum(phase == "prefill" for phase, *_ in steps)
    # 10 and 2 tokens, and when both have their 12, 17 and 5 of them: in chunks of at most 7 tokens a step 7, 3 + 2 and
    # 7, 7, 3 + 4, 1 beside a decode.
    assert prefills == (6 if chunked else 2)


def test_no_guard_of_the_trace_is_ever_broken(checkpoint: Path, reference: Any) -> None:
    with LLMEngine(checkpoint, config("aot_eager", evaluate_guards=True), device="cpu") as engine:
        [output] = engine.generate(PROMPTS[:1], SamplingParams(max_new_tokens=4))
    assert output.token_ids == reference.tokens(checkpoint, output.prompt_token_ids, 4)


@pytest.mark.parametrize("block_size", [1, 7, 256])
def test_the_block_size_changes_nothing(
    checkpoint: Path, block_size: int, assert_equal_to_reference: AssertEqual
) -> None:
    with LLMEngine(checkpoint, config(), device="cpu", block_size=block_size) as engine:
        assert_equal_to_reference(checkpoint, engine.generate(PROMPTS, GREEDY))


def test_a_bfloat16_checkpoint_runs_in_bfloat16_or_as_asked(
    checkpoint_variant: Callable[[str], Path], assert_equal_to_reference: AssertEqual
) -> None:
    directory = checkpoint_variant("bfloat16")
    with LLMEngine(directory, config(), device="cpu") as engine:
        [attention_module] = [m.self_attn for m in engine.model.model.layers[:1]]
        assert attention_module.k_cache.dtype == attention_module.qkv_proj.weight.dtype == torch.bfloat16
        [output] = engine.generate(PROMPTS[:1], SamplingParams(max_new_tokens=3))
        assert len(output.token_ids) == 3
    with LLMEngine(directory, config(), device="cpu", dtype="float32") as engine:
        assert_equal_to_reference(directory, engine.generate(PROMPTS, GREEDY))


def test_prompts_may_be_token_ids(engine: LLMEngine) -> None:
    texts = engine.generate(PROMPTS, GREEDY)
    ids = engine.generate([list(output.prompt_token_ids) for output in texts], GREEDY)
    assert [output.prompt for output in texts] == PROMPTS
    for from_text, from_ids in zip(texts, ids, strict=True):
        assert from_ids.prompt is None
        assert (from_ids.token_ids, from_ids.text) == (from_text.token_ids, from_text.text)
        assert from_text.text == engine.tokenizer.decode(from_text.token_ids)


@pytest.mark.parametrize("startup", ["lazy", "eager"])
def test_the_callers_autocast_is_none_of_the_engines(checkpoint: Path, startup: str, engine: LLMEngine) -> None:
    expected = engine.generate(PROMPTS, GREEDY)
    phase = PhaseConfig(compiler="aot_eager", buckets=(64,))
    graphs = GraphConfig(prefill=phase, decode=phase, startup=startup)
    with torch.autocast("cpu", dtype=torch.bfloat16), LLMEngine(checkpoint, graphs, device="cpu") as other:
        outputs = other.generate(PROMPTS, GREEDY)
        traces = other.runtime.counters.as_dict()["traces"]
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    assert traces == 1


def test_token_ids_may_be_integers_of_another_library(engine: LLMEngine) -> None:
    expected, got = engine.generate([[3, 40], list(torch.tensor([3, 40]))], GREEDY)
    assert got.prompt_token_ids == (3, 40)
    assert all(type(token) is int for token in got.prompt_token_ids)
    assert got.token_ids == expected.token_ids


def test_each_prompt_may_have_its_own_params(engine: LLMEngine) -> None:
    each = [SamplingParams(max_new_tokens=n) for n in (3, 1, 5, 2)]
    outputs = engine.generate(PROMPTS, each)
    assert [len(output.token_ids) for output in outputs] == [3, 1, 5, 2]
    longer = engine.generate(PROMPTS, GREEDY)
    assert all(a.token_ids == b.token_ids[: len(a.token_ids)] for a, b in zip(outputs, longer, strict=True))
    assert len(engine.generate(PROMPTS[:1])[0].token_ids) == 16
    with pytest.raises(InputError, match="params: expected one for each of 4 prompts, got 2; give one, or one each"):
        engine.generate(PROMPTS, each[:2])


# ---- what runs


def test_attention_runs_once_per_layer_and_step(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    [native] = [each for each in attention.IMPLEMENTATIONS if each.name == "torch_native"]

    def counted(*args: Any) -> None:
        [context] = [arg for arg in args if isinstance(arg, attention.AttentionContext)]
        calls.append(context.num_tokens)
        native.load()(*args)

    counting = dataclasses.replace(native, name="counting", reject=lambda spec: None, load=lambda: counted)
    monkeypatch.setattr(attention, "IMPLEMENTATIONS", (counting,))
    num_layers = 3
    for compiler in ("eager", "aot_eager"):
        calls.clear()
        with LLMEngine(checkpoint, config(compiler), device="cpu") as engine:
            assert calls == []
            first, second = engine.generate(PROMPTS[:2], SamplingParams(max_new_tokens=5))
        prompt_tokens = len(first.prompt_token_ids) + len(second.prompt_token_ids)
        # One prefill of both prompts, and then four decode steps of both requests.
        assert calls == [prompt_tokens] * num_layers + [2] * num_layers * 4


def test_one_trace_and_three_distinct_pieces(checkpoint: Path) -> None:
    with LLMEngine(checkpoint, config("aot_eager"), device="cpu") as engine:
        engine.generate(PROMPTS, SamplingParams(max_new_tokens=4))
        counters = engine.runtime.counters.as_dict()
    # Three layers: four pieces around three attentions, of which the two in the middle are equal.
    assert (counters["traces"], counters["pieces"], counters["distinct_pieces"]) == (1, 4, 3)
    assert counters["compiles_general"] == 3
    assert counters["opaque_regions"] == 3


class Steps:
    """Records what the engine asks of its runtime: phase, requests and tokens."""

    def __init__(self, engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[tuple[str, int, int]] = []
        run = engine.runtime.run

        def recorded(phase: str, inputs: dict[str, torch.Tensor], context: Any = None) -> Any:
            self.steps.append((str(phase), context.num_reqs, context.num_tokens))
            return run(phase, inputs, context=context)

        monkeypatch.setattr(engine.runtime, "run", recorded)


def test_a_finished_request_leaves_the_batch(
    own_checkpoint: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLMEngine(checkpoint, config(), device="cpu") as engine:
        plain = engine.generate(PROMPTS, GREEDY)
    # The third token of the first answer becomes the end token.
    end = plain[0].token_ids[2]
    change_config(own_checkpoint, "generation_config.json", eos_token_id=[511, end])
    expected = [g.token_ids[: g.token_ids.index(end) + 1] if end in g.token_ids else g.token_ids for g in plain]
    with LLMEngine(own_checkpoint, config(), device="cpu") as engine:
        steps = Steps(engine, monkeypatch).steps
        outputs = engine.generate(PROMPTS, GREEDY)
        assert [output.token_ids for output in outputs] == expected
        assert [output.finish_reason for output in outputs] == [
            "stop" if end in output.token_ids else "length" for output in plain
        ]
        assert [output.stop_reason for output in outputs] == [
            end if end in output.token_ids else None for output in plain
        ]
        assert "length" in {output.finish_reason for output in outputs}
        # The end token is one of the tokens and not of the text.
        assert outputs[0].text == engine.tokenizer.decode(expected[0][:-1])
        running = [sum(len(tokens) > step for tokens in expected) for step in range(NEW_TOKENS)]
        assert [step[:2] for step in steps] == [("prefill", 4), *(("decode", n) for n in running[1:])]
        assert engine.state.num_free_blocks == engine.state.num_blocks
        ignoring = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
        assert [output.token_ids for output in engine.generate(PROMPTS, ignoring)] == [g.token_ids for g in plain]


def test_outputs_are_reported_in_the_step_that_made_them(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(engine, monkeypatch).steps
    seen: list[tuple[int, int, tuple[int, ...]]] = []
    outputs = engine.generate(
        PROMPTS[:2],
        SamplingParams(max_new_tokens=3),
        on_output=lambda index, output: seen.append((len(steps), index, output.new_token_ids)),
    )
    assert seen == [
        (step + 1, index, outputs[index].token_ids[step : step + 1]) for step in range(3) for index in (0, 1)
    ]


def test_nothing_is_left_after_an_error_in_a_callback(engine: LLMEngine) -> None:
    class Stop(Exception):
        pass

    def stop(index: int, output: RequestOutput) -> None:
        if index == 1:
            raise Stop

    with pytest.raises(Stop):
        engine.generate(PROMPTS, SamplingParams(max_new_tokens=4), on_output=stop)
    state = engine.state
    assert (state.num_free_blocks, state.num_running, state.num_waiting) == (state.num_blocks, 0, 0)
    assert not engine.has_unfinished


# ---- limits


def test_an_answer_ends_where_the_context_ends(checkpoint: Path, reference: Any) -> None:
    hundred = SamplingParams(max_new_tokens=100)
    with LLMEngine(checkpoint, config(), device="cpu", max_model_len=16) as engine:
        [output] = engine.generate([[0] + [40] * 9], hundred)
        assert (len(output.token_ids), output.finish_reason) == (6, "length")
        assert output.token_ids == reference.tokens(checkpoint, output.prompt_token_ids, 6)
        [output] = engine.generate([[40] * 15], hundred)
        assert len(output.token_ids) == 1
        assert engine.generate([], hundred) == []


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([""], {}, "prompt 0: expected one token or more, got an empty prompt; write something there"),
        (["fine", []], {}, "prompt 1: expected one token or more"),
        ([[40] * 32], {}, "expected at most 31 tokens, .* context of 32 .*, got 32; shorten the prompt or raise max_m"),
        (["word " * 400], {}, r"the context of 32 has room for an answer, got \d+; shorten the prompt$"),
        (["fine", [1, 512]], {}, "prompt 1: expected token ids from 0 to 511, got 512"),
        ([[-1]], {}, "expected token ids from 0 to 511, got -1"),
        ([[True]], {}, "expected token ids from 0 to 511, got True"),
        ([["a"]], {}, "expected token ids from 0 to 511, got 'a'"),
        ([3, 4], {}, "prompt 0: expected a text or a list of token ids, got 3; put ids into a list"),
        ([b"fine"], {}, "prompt 0: expected a text or a list of token ids, got b'fine'; decode the bytes first"),
        (["a\ud800b"], {}, "prompt 0: expected a text, got half of a surrogate pair in 'a.ud800b'; decode it as UTF-8"),
        ([[torch.tensor(1.0)]], {}, "prompt 0: expected token ids from 0 to 511, got tensor"),
        ("fine", {}, "expected a list of prompts, got one text"),
        (b"fine", {}, "expected a list of prompts, got one text"),
        (None, {}, "prompts: expected a list, got NoneType; put it into a list"),
        ({"fine": 1}, {}, "prompts: expected a list, got dict; put it into a list"),
        (
            [[40] * 20],
            {},
            "20 tokens and an answer of 4 need 6 blocks of 4 in the KV cache, which has 5; raise num_blo",
        ),
        (["fine"], {"logprobs": 513}, "logprobs: expected at most the model's vocab_size 512, got 513; lower it"),
        (["fine"], {"stop_token_ids": [1, 512]}, "stop_token_ids: expected token ids from 0 to 511, got 512"),
    ],
)
def test_bad_requests_are_refused_before_anything_runs(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, prompts: Any, params: dict[str, Any], message: str
) -> None:
    with LLMEngine(checkpoint, config(), device="cpu", max_model_len=32, num_blocks=5, block_size=4) as engine:
        steps = Steps(engine, monkeypatch).steps
        with pytest.raises(InputError, match=message):
            engine.generate(prompts, SamplingParams(max_new_tokens=4, **params))
        assert steps == []
        assert (engine.state.num_waiting, engine.state.num_free_blocks) == (0, 5)
        assert len(engine.generate(["fine"], SamplingParams(max_new_tokens=2))[0].token_ids) == 2
        with pytest.raises(InputError, match=r"params: expected SamplingParams, got int; make SamplingParams\(...\)"):
            engine.generate(["fine"], [4])
        with pytest.raises(InputError, match="params: expected a list, got int; put it into a list"):
            engine.generate(["fine"], 4)


def test_without_a_directory_it_takes_the_model_of_the_package(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, assert_equal_to_reference: AssertEqual
) -> None:
    monkeypatch.setattr("piecework.runtime.engine.default_model.path", lambda: checkpoint)
    with LLMEngine(config=config(), device="cpu") as engine:
        assert engine.directory == checkpoint
        assert_equal_to_reference(checkpoint, engine.generate(PROMPTS, GREEDY))


def test_a_closed_engine_says_so(checkpoint: Path) -> None:
    with LLMEngine(checkpoint, config(), device="cpu") as engine:
        engine.add_request("fine")
        engine.step()
    engine.close()
    calls: dict[str, Callable[[], object]] = {
        "generate": lambda: engine.generate(["fine"]),
        "add_request": lambda: engine.add_request("fine"),
        "step": engine.step,
    }
    for name, call in calls.items():
        with pytest.raises(
            RuntimeClosedError, match=rf"LLMEngine\.{name}: the engine was closed; make a new LLMEngine"
        ):
            call()
    assert not engine.has_unfinished
    assert engine.state.num_free_blocks == engine.state.num_blocks


def test_two_engines_in_one_process(
    checkpoint: Path, checkpoint_variant: Callable[[str], Path], assert_equal_to_reference: AssertEqual
) -> None:
    other = checkpoint_variant("tied embeddings")
    with LLMEngine(checkpoint, config(), device="cpu") as first, LLMEngine(other, config(), device="cpu") as second:
        for directory, engine in ((checkpoint, first), (other, second), (checkpoint, first)):
            assert_equal_to_reference(directory, engine.generate(PROMPTS, GREEDY))
