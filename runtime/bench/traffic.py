"""The requests of a benchmark, as data: an open-loop trace with its arrival times, and batches of known sizes."""

from __future__ import annotations

import dataclasses
import itertools
import random

from ...errors import ConfigError
from ...phases import BucketLadder

Batch = list[list[int]]
"""Prompts that are sent together, as token ids."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TimedRequest:
    """A request of a trace; plain data, so that it travels as JSON."""

    arrival_s: float
    """When it is sent, in seconds of the trace, whether or not anybody is ready for it."""
    prompt: list[int]
    """Token ids."""
    max_new_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrafficShape:
    """What a trace looks like."""

    duration_s: float
    """No request arrives later."""
    arrivals_per_s: float
    """Of the Poisson process; an arrival is one request or several at once."""
    max_new_tokens: int
    """Answers are of 2 to so many tokens."""
    seed: int
    new_sizes_until_s: float = 10.0
    """Every size comes before this second, and none comes for the first time later."""


def make_trace(
    prefill: BucketLadder, decode: BucketLadder, shape: TrafficShape, *, vocab_size: int, max_prompt_tokens: int
) -> list[TimedRequest]:
    """Requests by their arrival; the same arguments give the same ones.

    Arrivals are a Poisson process. Each brings one of a fixed set of sizes: prompts that fill a prefill bucket together
    or fall between two, or as many requests as fill a decode bucket or fall between two. In the beginning every size
    comes at least once, in a random order: where the process would bring fewer arrivals than there are sizes, there
    are as many as sizes, at times drawn uniformly, which is what a Poisson process of a known count is.

    Args:
        max_prompt_tokens: the longest prompt.

    Raises:
        ConfigError: as `check_ladders`.
    """
    check_ladders(prefill, decode)
    generator = random.Random(shape.seed)
    sizes = [(size, 0) for size in _sizes(prefill, generator)] + [(0, size) for size in _sizes(decode, generator)]
    until = min(shape.new_sizes_until_s, shape.duration_s)
    times = list(_poisson(shape.arrivals_per_s, shape.duration_s, generator))
    early = sum(at < until for at in times)
    if early < len(sizes):
        times = sorted([generator.uniform(0, until) for _ in sizes] + times[early:])
        early = len(sizes)
    first = sizes + [generator.choice(sizes) for _ in range(early - len(sizes))]
    generator.shuffle(first)
    drawn = first + [generator.choice(sizes) for _ in times[early:]]
    return [
        TimedRequest(arrival_s=at, prompt=prompt, max_new_tokens=generator.randint(2, shape.max_new_tokens))
        for at, (num_tokens, num_requests) in zip(times, drawn, strict=True)
        for prompt in _prompts(num_tokens, num_requests, prefill, vocab_size, max_prompt_tokens, generator)
    ]


def make_round(
    prefill: BucketLadder, decode: BucketLadder, *, vocab_size: int, max_prompt_tokens: int, seed: int
) -> list[Batch]:
    """Batches that meet every bucket of both ladders once, and a size between each two; seeded.

    Raises:
        ConfigError: as `check_ladders`.
    """
    check_ladders(prefill, decode)
    generator = random.Random(seed)
    sizes = [(size, 0) for size in _sizes(prefill, generator)] + [(0, size) for size in _sizes(decode, generator)]
    generator.shuffle(sizes)
    return [_prompts(*each, prefill, vocab_size, max_prompt_tokens, generator) for each in sizes]


def check_ladders(prefill: BucketLadder, decode: BucketLadder) -> None:
    """Raises: ConfigError if a batch for the largest decode bucket would be above the prefill ladder."""
    if decode.max > prefill.max:
        raise ConfigError(
            f"decode.buckets: {decode.max} requests have more than {prefill.max} prompt tokens, which is the largest "
            f"bucket of prefill; add {decode.max} to prefill.buckets, or lower decode.buckets"
        )


def _poisson(rate: float, duration_s: float, generator: random.Random) -> itertools.takewhile[float]:
    gaps = iter(lambda: generator.expovariate(rate), None)
    return itertools.takewhile(lambda at: at < duration_s, itertools.accumulate(gaps))


def _prompts(
    num_tokens: int,
    num_requests: int,
    prefill: BucketLadder,
    vocab_size: int,
    max_prompt_tokens: int,
    generator: random.Random,
) -> Batch:
    """Prompts of so many tokens together, or (where that is 0) of so many requests and any length that fits."""
    if num_tokens:
        few = -(-num_tokens // max_prompt_tokens)
        num_requests = max(few, min(2, num_tokens))
    else:
        num_tokens = generator.randint(num_requests, min(prefill.max, num_requests * max_prompt_tokens))
    lengths = _unequal(num_tokens, num_requests, max_prompt_tokens, generator)
    return [[generator.randrange(vocab_size) for _ in range(length)] for length in lengths]


def _sizes(ladder: BucketLadder, generator: random.Random) -> list[int]:
    sizes = list(ladder)
    for below, bucket in zip((0, *ladder), ladder, strict=False):
        if bucket - below > 1:
            sizes.append(generator.randint(below + 1, bucket - 1))
    return sizes


def _unequal(total: int, num_parts: int, most: int, generator: random.Random) -> list[int]:
    """`total` in `num_parts` random parts from 1 to `most`."""
    parts = []
    for left in range(num_parts - 1, -1, -1):
        part = generator.randint(max(1, total - left * most), min(most, total - left))
        parts.append(part)
        total -= part
    return parts
