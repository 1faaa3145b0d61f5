"""Which tokens `sample` may draw, in loops of Python's floats, and rows of every kind to draw from."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st

SLACK = 1e-5
"""How far from the place where one token ends and the next begins another one may be drawn in float32."""
Columns = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""The arguments of `sample`."""


def order_of(row: list[float]) -> list[int]:
    """The ids, the likeliest first, and of equal ones the lower first."""
    return sorted(range(len(row)), key=lambda token: (-row[token], token))


def place_of(values: list[float], uniform: float, temperature: float, top_k: int, top_p: float) -> int:
    """The place that is drawn in a row that is in order."""
    weights = [math.exp((value - values[0]) / temperature) for value in values]
    if top_k > 0:
        weights = weights[:top_k]
    if top_p < 1:
        kept: list[float] = []
        whole, before = math.fsum(weights), 0.0
        for weight in weights:
            if kept and before >= top_p * whole:
                break
            kept.append(weight)
            before += weight
        weights = kept
    wanted, before = uniform * math.fsum(weights), 0.0
    for place, weight in enumerate(weights):
        before += weight
        if before > wanted:
            return place
    return max(place for place, weight in enumerate(weights) if weight > 0)


def allowed(
    row: list[float], uniform: float, temperature: float, top_k: int, top_p: float, slack: float = SLACK
) -> set[int]:
    """The tokens that a number and a `top_p` no farther than `slack` off would draw."""
    order = order_of(row)
    if temperature == 0:
        return set(order[:1])
    values = [row[token] for token in order]
    first, last = (
        place_of(
            values,
            min(max(uniform + change, 0.0), 1 - 2**-53),
            temperature,
            top_k,
            1.0 if top_p == 1 else min(max(top_p + change, 1e-300), 1.0),
        )
        for change in (-slack, slack)
    )
    return set(order[first : last + 1])


def check(drawn: torch.Tensor, arguments: Columns, slack: float = SLACK) -> int:
    """Compares each row with what is allowed; returns in how many rows that was one token."""
    logits, *columns = arguments
    assert drawn.shape == logits.shape[:1]
    assert drawn.dtype == torch.int64
    num_certain = 0
    rows = zip(drawn.tolist(), logits.double().tolist(), *(column.tolist() for column in columns), strict=True)
    for number, (token, row, uniform, temperature, top_k, top_p) in enumerate(rows):
        tokens = allowed(row, uniform, temperature, int(top_k), top_p, slack)
        assert token in tokens, f"row {number}: {token} is not in {tokens}"
        num_certain += len(tokens) == 1
    return num_certain


def columns(*rows: tuple[float, float, float, float]) -> tuple[torch.Tensor, ...]:
    """(uniform, temperature, top_k, top_p) of each row, as `sample` takes them."""
    uniform, temperature, top_k, top_p = torch.tensor(rows, dtype=torch.float64).reshape(-1, 4).unbind(-1)
    return uniform, temperature, top_k, top_p


@st.composite
def drawings(draw: st.DrawFn, max_rows: int = 6, max_vocab: int = 300) -> Columns:
    """Rows with ties, tokens that cannot be drawn, flat and steep ones, and cuts anywhere."""
    num_rows, vocab_size = draw(st.integers(1, max_rows)), draw(st.integers(1, max_vocab))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    logits = torch.randn(num_rows, vocab_size, generator=generator) * draw(st.sampled_from((0.0, 0.1, 3.0, 40.0)))
    logits += draw(st.sampled_from((0.0, -30.0, 30.0)))
    if draw(st.booleans()):
        logits = logits.round()  # equal ones, and zeros with a sign
    if draw(st.booleans()):
        forbidden = torch.rand(num_rows, vocab_size, generator=generator) < 0.5
        forbidden[:, draw(st.integers(0, vocab_size - 1))] = False
        logits = logits.masked_fill(forbidden, -torch.inf)
    dtype = draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float16)))
    rows = [
        (
            draw(st.floats(0, 1 - 2**-53)),
            draw(st.sampled_from((0.0, 1e-300, 0.3, 1.0, 2.5, 1e300))),
            draw(st.sampled_from((0, 0, 1, 2, 7, vocab_size, vocab_size + 9))),
            draw(st.sampled_from((1.0, 1.0, 1e-9, 0.3, 0.9, 0.999))),
        )
        for _ in range(num_rows)
    ]
    uniform, temperature, top_k, top_p = columns(*rows)
    return logits.to(dtype), uniform, temperature, top_k, top_p
