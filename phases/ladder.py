"""The ladder: the sorted buckets of a phase, and which bucket a step takes."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from reprlib import repr as short_repr
from typing import TypeGuard

from ..errors import ConfigError
from .choices import Phase

# First bucket, last bucket unless a maximum is given, and buckets per doubling. Above the first bucket fewer than
# 1 / (1 + buckets per doubling) of the rows are padding: a fifth in decode, a third in prefill.
_DEFAULTS = {Phase.PREFILL: (16, 8192, 2), Phase.DECODE: (1, 256, 4)}


@dataclass(frozen=True, slots=True, init=False)
class BucketLadder:
    """Strictly ascending bucket sizes, in tokens (in decode, one token a request)."""

    buckets: tuple[int, ...]

    def __init__(self, buckets: Sequence[int]) -> None:
        """Raises: ConfigError if `buckets` is not a non-empty, strictly ascending list of positive integers."""
        object.__setattr__(self, "buckets", check_sizes(buckets, "buckets"))

    @classmethod
    def default(cls, phase: Phase | str, max_num_tokens: int | None = None) -> BucketLadder:
        """The ladder of a phase that names no buckets: it grows geometrically and ends in exactly `max_num_tokens`."""
        first, last, per_doubling = _DEFAULTS[Phase.parse(phase, "phase")]
        if max_num_tokens is not None:
            last = check_size(max_num_tokens, "max_num_tokens")
        buckets = []
        octave = first
        while octave < last:
            steps = (octave + octave * step // per_doubling for step in range(per_doubling))
            buckets += sorted({size for size in steps if size < last})  # small octaves hold fewer sizes than steps
            octave *= 2
        return cls((*buckets, last))

    @property
    def max(self) -> int:
        return self.buckets[-1]

    def __iter__(self) -> Iterator[int]:
        return iter(self.buckets)

    def __len__(self) -> int:
        return len(self.buckets)

    def __contains__(self, size: object) -> bool:
        return size in self.buckets

    def bucket_for(self, num_tokens: int) -> int | None:
        """The smallest bucket that holds `num_tokens`; None above the ladder."""
        index = bisect_left(self.buckets, num_tokens)
        return self.buckets[index] if index < len(self.buckets) else None

    def padding_waste(self, num_tokens: int) -> float:
        """The share of padded rows, 0 to 1, when `num_tokens` take their bucket; 0 above the ladder (no padding)."""
        bucket = self.bucket_for(num_tokens)
        return 0.0 if bucket is None else (bucket - num_tokens) / bucket

    def choose(self, num_tokens: int, max_padding_waste: float | None = None) -> tuple[int | None, str | None]:
        """The bucket of a step and None, or None and the reason why the step runs unpadded.

        A reason never contains `num_tokens`, so that it can key a counter.
        """
        bucket = self.bucket_for(num_tokens)
        if bucket is None:
            return None, "above the ladder"
        if max_padding_waste is not None and (bucket - num_tokens) / bucket > max_padding_waste:
            return None, f"padding waste above the limit {max_padding_waste:g}"
        return bucket, None


def check_size(value: object, where: str) -> int:
    """`value` as a number of tokens. Raises: ConfigError if it is not a positive integer."""
    if not _is_size(value):
        raise ConfigError(f"{where}: expected a positive integer, got {short_repr(value)}; give 1 or more")
    return value


def check_sizes(value: object, where: str) -> tuple[int, ...]:
    """`value` as a tuple of sizes. Raises: ConfigError if it is not what BucketLadder takes.

    An unsorted list is refused, not sorted: it is more often a typing error (`1 2 4 80 16`) than a wish.
    """
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise ConfigError(f"{where}: expected a list of positive integers, got {short_repr(value)}; list the sizes")
    if not value:
        raise ConfigError(f"{where}: expected at least one size, got an empty list; add one or leave {where} out")
    for size in value:
        if not _is_size(size):
            raise ConfigError(f"{where}: expected positive integers, got {short_repr(size)}; remove or correct it")
    for size, times in Counter(value).items():
        if times > 1:
            raise ConfigError(f"{where}: expected each size once, got {size} more than once; keep one")
    for size, following in pairwise(value):
        if following < size:
            raise ConfigError(f"{where}: expected ascending sizes, got {following} after {size}; sort the list")
    return tuple(value)


def _is_size(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
