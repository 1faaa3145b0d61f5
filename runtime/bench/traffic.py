"""The requests of a benchmark: every bucket of both ladders, and sizes between them, in a seeded order."""

from __future__ import annotations

import random

from ...errors import ConfigError
from ...phases import BucketLadder

Batch = list[list[int]]
"""Prompts that are sent together, as token ids."""


def make_traffic(
    prefill: BucketLadder, decode: BucketLadder, *, vocab_size: int, max_prompt_tokens: int, num_rounds: int, seed: int
) -> list[list[Batch]]:
    """Rounds of batches; the same arguments give the same requests.

    A round has, for each bucket of the prefill ladder, one batch whose prompts fill it and one whose prompts fall
    between it and the bucket below, where there is room between them; and the same for the decode ladder with the
    number of prompts. So the first round meets every bucket, and the rounds after it nothing new.

    Args:
        max_prompt_tokens: the longest prompt.

    Raises:
        ConfigError: a batch for the largest decode bucket would be above the prefill ladder.
    """
    if decode.max > prefill.max:
        raise ConfigError(
            f"decode.buckets: {decode.max} requests have more than {prefill.max} prompt tokens, which is the largest "
            f"bucket of prefill; add {decode.max} to prefill.buckets, or lower decode.buckets"
        )
    generator = random.Random(seed)

    def batch(num_tokens: int, num_prompts: int) -> Batch:
        lengths = _unequal(num_tokens, num_prompts, max_prompt_tokens, generator)
        return [[generator.randrange(vocab_size) for _ in range(length)] for length in lengths]

    rounds = []
    for _ in range(num_rounds):
        batches = []
        for num_tokens in _sizes(prefill, generator):
            few = -(-num_tokens // max_prompt_tokens)
            batches.append(batch(num_tokens, max(few, min(2, num_tokens))))
        for num_prompts in _sizes(decode, generator):
            most = min(prefill.max, num_prompts * max_prompt_tokens)
            batches.append(batch(generator.randint(num_prompts, most), num_prompts))
        generator.shuffle(batches)
        rounds.append(batches)
    return rounds


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
