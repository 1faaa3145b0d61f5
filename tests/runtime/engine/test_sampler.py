"""Which tokens can be drawn, how often they are, and that a draw depends on nothing but its own request."""

from __future__ import annotations

import dataclasses
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from piecework.ops.deferred import deferring
from piecework.ops.sampling import distribution, sample
from piecework.phases import GraphConfig
from piecework.runtime.engine.engine import LLMEngine
from piecework.runtime.engine.params import SamplingParams
from piecework.runtime.engine.sampler import Draw, Sampler, uniform

PROBABILITIES = torch.tensor([0.05, 0.4, 0.15, 0.1, 0.3])
LOGITS = PROBABILITIES.log()
ORDER = [1, 4, 2, 3, 0]
"""The tokens of LOGITS, the likeliest first."""


def of_row(logits: torch.Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> torch.Tensor:
    """The normalised probability of each token of one row."""
    column = lambda value: torch.tensor([[value]], dtype=torch.float64)  # noqa: E731
    probabilities, ids = distribution(
        logits[None], temperature=column(temperature), top_k=column(top_k), top_p=column(top_p)
    )
    result = torch.zeros(logits.shape[0], dtype=torch.float64).index_put_((ids[0],), probabilities[0])
    return result / result.sum()


def draws(count: int, logits: torch.Tensor = LOGITS, **params: Any) -> list[int]:
    """The tokens at the first `count` places of one request."""
    params = {"temperature": 1.0, "seed": 7} | params
    rows = [Draw(params=SamplingParams(**params), place=place) for place in range(count)]
    return [token for token, _ in Sampler().sample(logits.expand(count, -1), rows)]


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    kept = expected > 0
    return float(((counts - expected)[kept] ** 2 / expected[kept]).sum())


@pytest.mark.parametrize(("top_k", "support"), [(0, 5), (1, 1), (3, 3), (5, 5), (100, 5)])
def test_top_k(top_k: int, support: int) -> None:
    kept = ORDER[:support]
    expected = torch.zeros(5).index_copy(0, torch.tensor(kept), PROBABILITIES[kept])
    torch.testing.assert_close(of_row(LOGITS, top_k=top_k).float(), expected / expected.sum())
    assert set(draws(400, top_k=top_k)) == set(kept)


@pytest.mark.parametrize(
    ("top_p", "support"), [(1e-9, 1), (0.39, 1), (0.41, 2), (0.69, 2), (0.71, 3), (0.94, 4), (0.96, 5), (1.0, 5)]
)
def test_top_p_keeps_the_token_that_reaches_it(top_p: float, support: int) -> None:
    kept = ORDER[:support]
    expected = torch.zeros(5).index_copy(0, torch.tensor(kept), PROBABILITIES[kept])
    torch.testing.assert_close(of_row(LOGITS, top_p=top_p).float(), expected / expected.sum())
    assert set(draws(400, top_p=top_p)) == set(kept)


def test_a_top_k_that_no_float_holds_is_all() -> None:
    assert draws(100, top_k=10**400) == draws(100, top_k=0)


def test_top_p_counts_within_what_top_k_left() -> None:
    # 0.4 and 0.3 of 0.85 are 0.47 and 0.82.
    assert (of_row(LOGITS, top_k=3, top_p=0.8) > 0).nonzero().flatten().tolist() == [1, 4]
    assert (of_row(LOGITS, top_k=3, top_p=0.83) > 0).nonzero().flatten().tolist() == [1, 2, 4]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (7, 1.0), (0, 0.8), (20, 0.5)])
def test_the_distribution_is_that_of_transformers(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(64, generator=torch.Generator().manual_seed(1)) * 2
    scores = transformers.TemperatureLogitsWarper(temperature)(None, logits[None].clone())
    scores = transformers.TopKLogitsWarper(top_k)(None, scores) if top_k else scores
    scores = transformers.TopPLogitsWarper(top_p)(None, scores) if top_p < 1 else scores
    expected = scores.double().softmax(-1)[0]
    got = of_row(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    assert (got > 0).tolist() == (expected > 0).tolist()
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    count = 4000
    for params in ({}, {"temperature": 2.0}, {"top_k": 3}, {"top_p": 0.8}):
        expected = of_row(LOGITS, **params) * count
        counts = torch.bincount(torch.tensor(draws(count, **params)), minlength=5)
        # Four degrees of freedom at most: more than 18.5 comes once in a thousand, and the seed is fixed.
        assert chi_square(counts, expected) < 18.5, params


def test_the_random_numbers_are_even_and_depend_on_both_arguments() -> None:
    for numbers in ([uniform(seed, 3) for seed in range(5000)], [uniform(2**64 - 1, place) for place in range(5000)]):
        assert all(0 <= number < 1 for number in numbers)
        assert len(set(numbers)) == 5000
        counts = torch.histc(torch.tensor(numbers), bins=10, min=0, max=1)
        assert chi_square(counts, torch.full((10,), 500.0)) < 27.9  # nine degrees of freedom, once in a thousand
    assert uniform(1, 2) != uniform(2, 1)


def test_a_seeded_draw_is_the_same_in_any_company() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 300, generator=generator)
    params = [
        SamplingParams(temperature=0.9, seed=1),
        SamplingParams(),
        SamplingParams(temperature=1.5, top_k=40, seed=1, logprobs=3),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.4, top_p=0.7, seed=9),
        SamplingParams(temperature=1.0, top_k=2, top_p=0.2, seed=4),
    ]
    rows = [Draw(params=each, place=place) for place, each in enumerate(params)]
    sampler = Sampler()
    together = sampler.sample(logits, rows)
    for row in (0, 1, 2, 4, 5):
        assert sampler.sample(logits[row : row + 1], [rows[row]]) == [together[row]]


def test_seeds_and_places_differ_and_unseeded_draws_too() -> None:
    flat = torch.zeros(5000)
    assert draws(20, flat) == draws(20, flat)
    assert draws(20, flat) != draws(20, flat, seed=8)
    assert len(set(draws(20, flat))) > 15
    assert draws(20, flat, seed=None) != draws(20, flat, seed=None)


def test_temperature_0_takes_the_likeliest_and_a_tiny_one_too() -> None:
    logits = torch.tensor([1.0, 300.0, -torch.inf, 299.0])
    assert set(draws(50, logits, temperature=0.0)) == {1}
    assert set(draws(50, logits, temperature=1e-300)) == {1}
    assert set(draws(50, torch.tensor([-torch.inf, 0.0, -torch.inf]), temperature=5.0)) == {1}


def test_of_equal_logits_the_first_is_both_taken_and_the_likeliest() -> None:
    logits = torch.zeros(1, 4096).index_fill(1, torch.tensor([7, 100, 2000, 4095]), 5.0)
    [(token, logprobs)] = Sampler().sample(logits, [Draw(params=SamplingParams(logprobs=5), place=0)])
    assert logprobs is not None
    assert (token, [token for token, _ in logprobs.top]) == (7, [7, 100, 2000, 4095, 0])


def test_a_number_close_to_1_draws_the_last_token_that_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    for number, place in ((0.0, 0), (1 - 2**-53, 2)):
        monkeypatch.setattr("piecework.runtime.engine.sampler.uniform", lambda seed, at, number=number: number)
        assert draws(1, top_k=3) == [ORDER[place]]


def test_logprobs_are_of_the_logits_as_they_came() -> None:
    row = Draw(params=SamplingParams(temperature=3.0, top_k=1, seed=0, logprobs=2), place=0)
    none = Draw(params=SamplingParams(), place=0)
    own = Draw(params=SamplingParams(logprobs=0), place=0)
    (first, logprobs), (_, nothing), (_, only_own) = Sampler().sample(LOGITS.expand(3, -1), [row, none, own])
    assert logprobs is not None
    assert only_own is not None
    assert (first, nothing, logprobs.token_id) == (1, None, 1)
    assert logprobs.logprob == pytest.approx(math.log(0.4))
    assert [token for token, _ in logprobs.top] == [1, 4]
    assert [value for _, value in logprobs.top] == pytest.approx([math.log(0.4), math.log(0.3)])
    assert (only_own.top, only_own.logprob) == ((), pytest.approx(math.log(0.4)))


def test_greedy_rows_beside_drawn_ones() -> None:
    rows = [
        Draw(params=SamplingParams(temperature=heat, seed=7), place=place) for place, heat in enumerate((0, 1, 0, 1))
    ]
    together = [token for token, _ in Sampler().sample(LOGITS.expand(4, -1), rows)]
    alone = [Sampler().sample(LOGITS[None], [row])[0][0] for row in rows]
    assert together == alone
    assert together[0] == together[2] == 1


def test_the_engine_draws_with_the_kernel_that_its_config_chooses(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def counted(*arguments: torch.Tensor) -> torch.Tensor:
        calls.append(len(arguments[0]))
        return sample.native(*arguments)

    [kernel] = sample.kernels
    here = dataclasses.replace(kernel, device_types=("cpu",), body=counted, available=None)
    monkeypatch.setitem(sample._kernels, "triton", here)
    params = [SamplingParams(max_new_tokens=3, temperature=heat, seed=1) for heat in (1.0, 0.0, 0.7)]
    answers = []
    for backend, expected in (("auto", [2, 2, 2]), ("native", [])):
        calls.clear()
        phases = {"prefill": {"backend": "disabled"}, "decode": {"backend": "disabled"}}
        with LLMEngine(checkpoint, GraphConfig(**phases, kernel_backend=backend), device="cpu") as engine:
            answers.append([output.token_ids for output in engine.generate([[1, 2, 3]] * 3, params)])
        assert calls == expected, backend
    assert answers[0] == answers[1]


@pytest.mark.parametrize("startup", ["tiered", "lazy"])
def test_drawing_waits_for_compiles_where_steps_do(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, startup: str
) -> None:
    waits: list[bool] = []
    compiled = threading.Event()

    def noted(*arguments: torch.Tensor) -> torch.Tensor:
        submit = deferring()
        waits.append(submit is None)
        if submit is not None:
            submit("a kernel of the test", compiled.set)
        return sample.native(*arguments)

    [kernel] = sample.kernels
    here = dataclasses.replace(kernel, device_types=("cpu",), body=noted, available=None)
    monkeypatch.setitem(sample._kernels, "triton", here)
    phases = {"prefill": {"backend": "disabled"}, "decode": {"backend": "full", "buckets": (1,)}}
    config = GraphConfig(**phases, capture_device="tape", startup=startup)
    with LLMEngine(checkpoint, config, device="cpu") as engine:
        engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=4, temperature=1.0, seed=1))
        assert waits == [startup == "lazy"] * 4
        if startup == "tiered":
            assert compiled.wait(60)
