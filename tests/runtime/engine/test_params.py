"""Sampling parameters: what they take, and that each field out of its range says its name."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from piecework.errors import InputError
from piecework.runtime.engine.params import SamplingParams


def test_the_default_is_greedy() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.seed, params.logprobs) == (0, 0, 1, None, None)
    assert (params.stop, params.stop_token_ids, params.ignore_eos, params.max_new_tokens) == ((), (), False, 16)


def test_lists_become_tuples_and_nothing_changes_afterwards() -> None:
    params = SamplingParams(stop=["a", "b"], stop_token_ids={3})
    assert (params.stop, params.stop_token_ids) == (("a", "b"), (3,))
    assert hash(params) == hash(SamplingParams(stop=("a", "b"), stop_token_ids=[3]))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    "values",
    [{"seed": 2**64 - 1}, {"seed": 0}, {"temperature": 1}, {"temperature": 1e-300}, {"top_p": 1e-300}, {"logprobs": 0}],
)
def test_the_ends_of_the_ranges_belong_to_them(values: dict[str, Any]) -> None:
    [(name, value)] = values.items()
    assert getattr(SamplingParams(**values), name) == value


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: expected 1 or more, got 0; use an integer in this range"),
        ({"max_new_tokens": True}, "max_new_tokens: expected 1 or more, got True"),
        ({"max_new_tokens": 1.5}, "max_new_tokens: expected 1 or more, got 1.5"),
        ({"max_new_tokens": None}, "max_new_tokens: expected 1 or more, got None"),
        ({"temperature": -0.1}, "temperature: expected 0 or more, got -0.1; use a number in this range"),
        ({"temperature": math.nan}, "temperature: expected 0 or more, got nan"),
        ({"temperature": math.inf}, "temperature: expected 0 or more, got inf"),
        ({"temperature": 10**400}, "temperature: expected 0 or more, got 1000"),
        ({"temperature": "1"}, "temperature: expected 0 or more, got '1'"),
        ({"top_k": -1}, "top_k: expected 0 or more, got -1"),
        ({"top_k": 2.0}, "top_k: expected 0 or more, got 2.0"),
        ({"top_p": 0}, "top_p: expected more than 0 and at most 1, got 0"),
        ({"top_p": 1.01}, "top_p: expected more than 0 and at most 1, got 1.01"),
        ({"top_p": math.nan}, "top_p: expected more than 0 and at most 1, got nan"),
        ({"seed": -1}, f"seed: expected 0 to {2**64 - 1}, got -1"),
        ({"seed": 2**64}, f"seed: expected 0 to {2**64 - 1}, got {2**64}"),
        ({"seed": 0.5}, "seed: expected 0 to"),
        ({"logprobs": -1}, "logprobs: expected 0 or more, got -1"),
        ({"logprobs": True}, "logprobs: expected 0 or more, got True"),
        ({"ignore_eos": 1}, "ignore_eos: expected True or False, got 1"),
        ({"stop": "end"}, "stop: expected a list, got 'end'; put it into a list"),
        ({"stop": [""]}, "stop: expected texts of one character or more, got ''"),
        ({"stop": [3]}, "stop: expected texts of one character or more, got 3"),
        ({"stop": None}, "stop: expected a list, got None"),
        ({"stop_token_ids": 3}, "stop_token_ids: expected a list, got 3"),
        ({"stop_token_ids": [-1]}, "stop_token_ids: expected 0 or more, got -1"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids: expected 0 or more, got 'a'"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        SamplingParams(**values)
    assert str(caught.value).startswith(message)
