"""What bench_startup.py asks of the process of one policy: the policy, the shape, the steps and their pace."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

from llama import BLOCK_SIZE

Bucket = tuple[str, int]
"""A phase and a number of tokens."""
PLAIN, COMPILED = "plain eager", "plain torch.compile"
WHOLE = "tiered+whole"
WHOLE_MAX_BS = 1
"""Under `WHOLE`, the decode buckets up to it get a whole forward, which tries kernels out for the better part of the
run; the others are what runs beside that."""
POLICIES = ("tiered", "eager", "lazy", COMPILED, PLAIN)
"""What a run compares unless it is asked for others; `WHOLE` is one of those."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """What a child does; plain data, so that it travels as JSON."""

    policy: str
    device: str
    shape: str
    num_layers: int
    decode: list[int]
    prefill: list[int]
    seq_len: int
    """Tokens of each decoding request, the new one counted."""
    interval_s: float
    """Between the beginnings of two steps, at least."""
    meet_s: float
    """Every bucket has come after so many seconds of steps at this pace."""
    linger_s: float
    """Steps go on for so long after everything is settled."""
    cap_s: float
    """No paced step begins later."""
    steady_steps: int
    """Steps of each bucket, one after the other, for its steady time."""
    out: str
    """Where the result goes."""

    @property
    def buckets(self) -> list[Bucket]:
        """Of both phases."""
        return [("decode", n) for n in self.decode] + [("prefill", n) for n in self.prefill]

    @property
    def num_blocks(self) -> int:
        """Cache blocks of the largest step."""
        return max(max(self.decode) * -(-self.seq_len // BLOCK_SIZE), -(-max(self.prefill) // BLOCK_SIZE))


def schedule(spec: Spec) -> Iterator[Bucket]:
    """The bucket of each step: all come in the first `meet_s`, in a mixed order and those that came again between
    them; then they go round."""
    draw = random.Random(0)
    new = draw.sample(spec.buckets, len(spec.buckets))
    num_first = max(len(new), round(spec.meet_s / spec.interval_s))
    places = {i * num_first // len(new): bucket for i, bucket in enumerate(new)}
    met: list[Bucket] = []
    for i in range(num_first):
        if i in places:
            met.append(places[i])
        yield places.get(i) or draw.choice(met)
    while True:
        yield from draw.sample(new, len(new))
