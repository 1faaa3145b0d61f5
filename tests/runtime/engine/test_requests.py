"""Requests of `add_request` and `step`: outputs, stops, streaming, log-probabilities, preemption, errors, threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from piecework.errors import InputError
from piecework.phases import GraphConfig
from piecework.runtime.engine.engine import LLMEngine
from piecework.runtime.engine.output import RequestOutput
from piecework.runtime.engine.params import SamplingParams

PROMPTS = [
    "What is the capital of France? It is",
    "A",
    "The quick brown fox jumps over the lazy dog; the dog, being lazy,",
    "Once upon a time",
]
SAMPLED = SamplingParams(max_new_tokens=20, temperature=1.0, top_k=50, top_p=0.95, seed=11)


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Any:
    with LLMEngine(checkpoint, GraphConfig(), device="cpu") as engine:
        yield engine


@pytest.fixture
def few_blocks(checkpoint: Path) -> Any:
    """A cache of 12 blocks of 4 tokens: two or three of PROMPTS, and a chunk of 5 tokens a step."""
    limits: dict[str, Any] = {"num_blocks": 12, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 5}
    with LLMEngine(checkpoint, GraphConfig(), device="cpu", **limits) as engine:
        yield engine


def finish(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    """Steps until everything has finished: the outputs of each request."""
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    assert engine.state.num_free_blocks == engine.state.num_blocks
    return outputs


def last(outputs: dict[str, list[RequestOutput]]) -> dict[str, RequestOutput]:
    return {name: each[-1] for name, each in outputs.items()}


# ---- outputs


def test_each_step_tells_what_is_new(engine: LLMEngine) -> None:
    params = SamplingParams(max_new_tokens=6)
    expected = engine.generate(PROMPTS[:2], params)
    assert engine.add_request(PROMPTS[0], params, request_id="one") == "one"
    made_up = engine.add_request(list(expected[1].prompt_token_ids), params)
    outputs = finish(engine)
    assert set(outputs) == {"one", made_up}
    for name, whole in (("one", expected[0]), (made_up, expected[1])):
        assert [len(output.new_token_ids) for output in outputs[name]] == [1] * 6
        for count, output in enumerate(outputs[name], 1):
            assert output.token_ids == whole.token_ids[:count]
            assert output.new_token_ids == whole.token_ids[count - 1 : count]
            assert output.finish_reason == ("length" if count == 6 else None)
            assert output.text == "".join(each.new_text for each in outputs[name][:count])
        assert outputs[name][-1].text == whole.text == engine.tokenizer.decode(whole.token_ids)
    assert engine.step() == []


def test_a_request_joins_others_that_run(engine: LLMEngine, reference: Any, checkpoint: Path) -> None:
    params = SamplingParams(max_new_tokens=8)
    first = engine.add_request(PROMPTS[0], params)
    for _ in range(3):
        engine.step()
    second = engine.add_request(PROMPTS[2], params)
    [one, two] = engine.step()
    assert (one.request_id, len(one.token_ids), two.request_id, len(two.token_ids)) == (first, 4, second, 1)
    for output in last(finish(engine)).values():
        assert output.token_ids == reference.tokens(checkpoint, output.prompt_token_ids, 8)


def test_two_requests_of_one_id(engine: LLMEngine) -> None:
    engine.add_request(PROMPTS[0], request_id="same")
    with pytest.raises(InputError, match="request_id: expected one that no request has, got 'same'; choose another"):
        engine.add_request(PROMPTS[1], request_id="same")
    with pytest.raises(InputError, match=r"request_id: expected a text, got 5; make it one with str\(\.\.\.\)"):
        engine.add_request(PROMPTS[1], request_id=5)  # type: ignore[arg-type]
    assert list(finish(engine)) == ["same"]
    engine.add_request(PROMPTS[1], SamplingParams(max_new_tokens=1), request_id="same")  # it is free again
    assert len(finish(engine)["same"]) == 1


def test_an_id_that_is_made_up_is_not_one_that_was_given(engine: LLMEngine) -> None:
    number = int(engine.add_request(PROMPTS[1]).removeprefix("request-"))
    engine.add_request(PROMPTS[1], request_id=f"request-{number + 1}")
    assert engine.add_request(PROMPTS[1]) == f"request-{number + 2}"
    assert len(finish(engine)) == 3


def test_bad_requests_leave_nothing(few_blocks: LLMEngine) -> None:
    with pytest.raises(InputError, match="prompt: expected one token or more, got an empty prompt"):
        few_blocks.add_request("")
    with pytest.raises(InputError, match="prompt: 40 tokens and an answer of 16 need 14 blocks of 4 .*, which has 12"):
        few_blocks.add_request([40] * 40)
    assert few_blocks.state.num_waiting == 0
    assert not few_blocks.has_unfinished


def test_abort_a_running_and_a_waiting_request(few_blocks: LLMEngine) -> None:
    params = SamplingParams(max_new_tokens=30)
    running = few_blocks.add_request(PROMPTS[0], params)
    waiting = few_blocks.add_request(PROMPTS[2], params)
    for _ in range(3):
        few_blocks.step()
    assert (few_blocks.state.num_running, few_blocks.state.num_waiting) == (2, 0)
    later = few_blocks.add_request([40] * 40, SamplingParams(max_new_tokens=8))
    few_blocks.step()
    assert few_blocks.state.num_waiting == 1
    assert few_blocks.abort(running)
    assert few_blocks.abort(later)
    assert not few_blocks.abort(running)
    assert not few_blocks.abort("nobody")
    ended = {output.request_id: output for output in few_blocks.step()}
    assert {name: output.finish_reason for name, output in ended.items() if name != waiting} == {
        running: "abort",
        later: "abort",
    }
    assert ended[later].token_ids == ()
    assert last(finish(few_blocks))[waiting].finish_reason == "length"


def test_a_callback_may_abort(engine: LLMEngine) -> None:
    def on_output(index: int, output: RequestOutput) -> None:
        if index == 0 and len(output.token_ids) == 2 and output.finish_reason is None:
            assert engine.abort(output.request_id)

    first, second = engine.generate(PROMPTS[:2], SamplingParams(max_new_tokens=5), on_output=on_output)
    assert (first.finish_reason, len(first.token_ids)) == ("abort", 2)
    assert (second.finish_reason, len(second.token_ids)) == ("length", 5)


# ---- stops


def test_stop_tokens_end_an_answer_and_are_not_in_its_text(engine: LLMEngine) -> None:
    [plain] = engine.generate(PROMPTS[:1], SamplingParams(max_new_tokens=8))
    token = plain.token_ids[3]
    place = plain.token_ids.index(token)
    [stopped] = engine.generate(PROMPTS[:1], SamplingParams(max_new_tokens=8, stop_token_ids=[token], ignore_eos=True))
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", token)
    assert stopped.token_ids == plain.token_ids[: place + 1]
    assert stopped.text == engine.tokenizer.decode(plain.token_ids[:place])


def test_stop_strings_cut_the_text_and_are_never_streamed(engine: LLMEngine) -> None:
    [plain] = engine.generate(PROMPTS[3:], SamplingParams(max_new_tokens=16))
    # From within one token into another; before it nothing like it.
    stop = plain.text[7:12]
    assert plain.text.index(stop) == 7
    params = SamplingParams(max_new_tokens=16, stop=["never comes", stop])
    streamed: list[str] = []
    [stopped] = engine.generate(PROMPTS[3:], params, on_output=lambda index, output: streamed.append(output.new_text))
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    assert stopped.text == "".join(streamed) == plain.text[:7]
    assert stopped.token_ids == plain.token_ids[: len(stopped.token_ids)]
    assert stop in engine.tokenizer.decode(stopped.token_ids)
    assert stop not in engine.tokenizer.decode(stopped.token_ids[:-1])


def test_what_was_held_back_comes_when_the_answer_ends(engine: LLMEngine) -> None:
    [plain] = engine.generate(PROMPTS[3:], SamplingParams(max_new_tokens=5))
    stop = plain.text[-3:] + "?"
    [same] = engine.generate(PROMPTS[3:], SamplingParams(max_new_tokens=5, stop=[stop]))
    assert (same.text, same.finish_reason, same.stop_reason) == (plain.text, "length", None)


def test_a_stop_string_in_the_last_token_is_a_stop(engine: LLMEngine) -> None:
    [plain] = engine.generate(PROMPTS[3:], SamplingParams(max_new_tokens=5))
    [stopped] = engine.generate(PROMPTS[3:], SamplingParams(max_new_tokens=5, stop=[plain.text[-1]]))
    assert (stopped.finish_reason, stopped.text) == ("stop", plain.text[: plain.text.index(plain.text[-1])])


def test_a_stop_string_in_the_bytes_that_are_left_is_a_stop(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = engine.tokenizer.encode("a🌊")[1:-1]  # the last character never becomes whole
    spelled = iter(tokens)

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor([next(spelled)]), 512).float()

    monkeypatch.setattr(engine.model, "logits", logits)
    params = SamplingParams(max_new_tokens=len(tokens), stop=["\ufffd"])
    [output] = engine.generate(PROMPTS[:1], params)
    assert (output.text, output.finish_reason, output.stop_reason) == ("a", "stop", "\ufffd")


def test_streamed_text_has_no_half_characters(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    # The toy knows no such text by itself: its logits are replaced by ones that spell it.
    text = "naïve 東京 🌊 end"
    tokens = engine.tokenizer.encode(text)[1:]
    spelled = iter(tokens)

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor([next(spelled)]), 512).float()

    monkeypatch.setattr(engine.model, "logits", logits)
    engine.add_request(PROMPTS[0], SamplingParams(max_new_tokens=len(tokens)), request_id="one")
    outputs = finish(engine)["one"]
    assert len(outputs) == len(tokens) > len(text)
    assert outputs[-1].text == "".join(output.new_text for output in outputs) == text
    assert not any("\ufffd" in output.new_text for output in outputs)
    assert "" in [output.new_text for output in outputs]


# ---- numbers


def test_logprobs_equal_transformers(few_blocks: LLMEngine, checkpoint: Path, reference: Any) -> None:
    for params in (
        SamplingParams(max_new_tokens=10, logprobs=5),
        SamplingParams(max_new_tokens=10, logprobs=5, temperature=2.0, top_k=9, seed=3),
    ):
        for output in few_blocks.generate(PROMPTS, params):
            expected = reference.logprobs(checkpoint, output.prompt_token_ids, output.token_ids)
            assert output.logprobs is not None
            assert [each.token_id for each in output.logprobs] == list(output.token_ids)
            for each, row in zip(output.logprobs, expected, strict=True):
                assert abs(each.logprob - row[each.token_id]) < 1e-4
                best = row.topk(5)
                assert [token for token, _ in each.top] == best.indices.tolist()
                assert all(abs(a - b) < 1e-4 for (_, a), b in zip(each.top, best.values.tolist(), strict=True))


def test_logprobs_only_for_who_asks(engine: LLMEngine) -> None:
    asks = [SamplingParams(logprobs=0), SamplingParams(), SamplingParams(logprobs=2), SamplingParams()]
    outputs = engine.generate(PROMPTS, asks)
    assert [output.logprobs is None for output in outputs] == [False, True, False, True]
    assert [[len(each.top) for each in output.logprobs or ()] for output in outputs] == [[0] * 16, [], [2] * 16, []]


@pytest.mark.parametrize("seeded", [True, False])
def test_a_seed_gives_the_same_tokens_in_any_company(engine: LLMEngine, few_blocks: LLMEngine, seeded: bool) -> None:
    params = SAMPLED if seeded else SamplingParams(max_new_tokens=20, temperature=1.0)
    alone = [engine.generate([prompt], params)[0].token_ids for prompt in PROMPTS]
    together = [output.token_ids for output in engine.generate(PROMPTS, params)]
    preempted = few_blocks.generate(PROMPTS, params)
    assert few_blocks.state.num_preemptions > 0
    assert (alone == together) is seeded
    assert ([output.token_ids for output in preempted] == alone) is seeded


def test_another_seed_gives_other_tokens(engine: LLMEngine) -> None:
    seeds = [SamplingParams(max_new_tokens=20, temperature=1.0, seed=seed) for seed in range(4)]
    outputs = engine.generate([PROMPTS[0]] * 4, seeds)
    assert len({output.token_ids for output in outputs}) == 4


# ---- preemption


def test_preempted_requests_get_the_same_tokens(few_blocks: LLMEngine, checkpoint: Path, reference: Any) -> None:
    outputs = few_blocks.generate(PROMPTS, SamplingParams(max_new_tokens=24))
    assert few_blocks.state.num_preemptions > 0
    assert sum(output.num_preemptions for output in outputs) == few_blocks.state.num_preemptions
    assert outputs[0].num_preemptions == 0  # the oldest goes on
    for output in outputs:
        assert output.token_ids == reference.tokens(checkpoint, output.prompt_token_ids, 24)
    assert few_blocks.state.num_free_blocks == 12


def test_more_requests_than_blocks_wait(checkpoint: Path, reference: Any) -> None:
    with LLMEngine(checkpoint, GraphConfig(), device="cpu", num_blocks=6, block_size=4) as engine:
        for number in range(10):
            engine.add_request(PROMPTS[number % 4], SamplingParams(max_new_tokens=6), request_id=str(number))
        engine.step()
        assert engine.state.num_waiting > 6
        outputs = last(finish(engine))
    assert [outputs[str(number)].token_ids for number in range(10)] == [
        reference.tokens(checkpoint, outputs[str(number % 4)].prompt_token_ids, 6) for number in range(10)
    ]


# ---- errors and threads


class Broken(Exception):
    pass


@pytest.mark.parametrize("where", ["run", "logits"])
def test_a_step_that_failed_can_be_tried_again(
    few_blocks: LLMEngine, monkeypatch: pytest.MonkeyPatch, where: str, checkpoint: Path, reference: Any
) -> None:
    """Every third step fails, after the model wrote the cache or before the tokens were chosen."""
    owner: Any = few_blocks.runtime if where == "run" else few_blocks.model
    plain, calls = getattr(owner, where), 0

    def breaks(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        result = plain(*args, **kwargs)
        if calls % 3 == 0:
            raise Broken
        return result

    monkeypatch.setattr(owner, where, breaks)
    for prompt in PROMPTS:
        few_blocks.add_request(prompt, SamplingParams(max_new_tokens=16))
    outputs: dict[str, RequestOutput] = {}
    failures = 0
    while few_blocks.has_unfinished:
        before = few_blocks.state
        try:
            outputs |= {output.request_id: output for output in few_blocks.step()}
        except Broken:
            failures += 1
            after = few_blocks.state
            assert before.num_running + before.num_waiting == after.num_running + after.num_waiting
    assert failures > 5
    for output in outputs.values():
        assert output.token_ids == reference.tokens(checkpoint, output.prompt_token_ids, 16)
    assert few_blocks.state.num_free_blocks == 12


def test_generate_takes_its_requests_back_when_a_step_fails(
    few_blocks: LLMEngine, monkeypatch: pytest.MonkeyPatch, checkpoint: Path, reference: Any
) -> None:
    other = few_blocks.add_request(PROMPTS[0], SamplingParams(max_new_tokens=4))
    with monkeypatch.context() as patch:

        def breaks(hidden: torch.Tensor) -> torch.Tensor:
            raise Broken

        patch.setattr(few_blocks.model, "logits", breaks)
        with pytest.raises(Broken):
            few_blocks.generate(PROMPTS)
    assert (few_blocks.state.num_running, few_blocks.state.num_waiting) == (1, 0)
    output = last(finish(few_blocks))[other]
    assert output.token_ids == reference.tokens(checkpoint, output.prompt_token_ids, 4)


def in_threads(*calls: Callable[[], object]) -> None:
    errors: list[BaseException] = []

    def guarded(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert errors == []


def test_calls_from_several_threads_share_their_steps(
    engine: LLMEngine, few_blocks: LLMEngine, checkpoint: Path, reference: Any
) -> None:
    params = SamplingParams(max_new_tokens=16)
    for each in (engine, few_blocks):
        steps_before = each.runtime.counters.as_dict()["steps"]
        results: dict[int, list[RequestOutput]] = {}

        def generate(number: int, each: LLMEngine = each, results: Any = results) -> None:
            results[number] = each.generate([PROMPTS[number], PROMPTS[-1 - number]], params)

        def step(each: LLMEngine = each, results: Any = results) -> None:
            for prompt in PROMPTS[:2]:
                each.add_request(prompt, params)
            results[-1] = list(last(finish_own(each)).values())

        in_threads(*(lambda n=n: generate(n) for n in range(4)), step)  # type: ignore[misc]
        assert sorted(results) == [-1, 0, 1, 2, 3]
        for outputs in results.values():
            assert len(outputs) == 2
            for output in outputs:
                assert output.token_ids == reference.tokens(checkpoint, output.prompt_token_ids, 16)
        assert each.state.num_free_blocks == each.state.num_blocks
        if each is engine:  # alone, every one of the five would take 16
            assert each.runtime.counters.as_dict()["steps"] - steps_before < 5 * 16


def finish_own(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    """As `finish`, while others still hold blocks."""
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
            assert output.text == "".join(each.new_text for each in outputs[output.request_id])
    return outputs


def test_closing_ends_a_generate_of_another_thread(checkpoint: Path) -> None:
    engine = LLMEngine(checkpoint, GraphConfig(), device="cpu")
    begun = threading.Event()
    errors: list[str] = []

    def generate() -> None:
        try:
            engine.generate(PROMPTS, SamplingParams(max_new_tokens=200), on_output=lambda *_: begun.set())
        except Exception as error:
            errors.append(str(error))

    in_threads(generate, lambda: (begun.wait(60), engine.close()))
    assert errors == ["LLMEngine.generate: the engine was closed; make a new LLMEngine"]
    assert engine.state.num_free_blocks == engine.state.num_blocks
