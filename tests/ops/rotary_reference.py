"""Rotary attention as loops in float64: heads are turned as complex numbers, then attend as in `paged_reference`."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from piecework.ops.attention import AttentionContext

from .paged_reference import Batch, Step, make_step


@dataclasses.dataclass(kw_only=True)
class RotaryStep:
    """The arguments of one call: those of `plain`, whose q and k are not rotated yet, and each token's angles."""

    plain: Step
    cos: torch.Tensor
    sin: torch.Tensor

    @property
    def layer(self) -> tuple[torch.Tensor, ...]:
        """q, k, v, cos and sin."""
        return (self.plain.q, self.plain.k, self.plain.v, self.cos, self.sin)

    def expected(self) -> tuple[torch.Tensor, ...]:
        """(out, k_cache, v_cache): `out` and the attention in float64, what is rotated rounded to the dtype."""
        turned = [turn(x, self.cos, self.sin).to(x.dtype) for x in (self.plain.q, self.plain.k)]
        return dataclasses.replace(self.plain, q=turned[0], k=turned[1]).expected()

    def run(self, implementation: Any, context: AttentionContext) -> tuple[torch.Tensor, ...]:
        """As `Step.run`, of an implementation that takes cos and sin behind v."""

        def with_angles(q: Any, k: Any, v: Any, *others: Any) -> None:
            implementation(q, k, v, self.cos, self.sin, *others)

        return self.plain.run(with_angles, context)


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [num_tokens, heads, head_size]; entry `i` and entry `half + i` are the parts of one complex number."""
    half = cos.shape[1]
    turned = x.double().clone()
    number = torch.complex(turned[..., :half], turned[..., half : 2 * half])
    number = number * torch.complex(cos.double(), sin.double()).unsqueeze(1)
    turned[..., :half], turned[..., half : 2 * half] = number.real, number.imag
    return turned


def make_rotary_step(batch: Batch, dtype: torch.dtype, *, half: int | None = None) -> RotaryStep:
    """A step with random angles, all of a head's entries rotated unless `half` says how many pairs."""
    plain = make_step(batch, dtype)
    half = batch.head_size // 2 if half is None else half
    generator = torch.Generator().manual_seed(batch.seed + 1)
    angles = 10 * torch.randn(plain.q.shape[0], half, generator=generator, dtype=torch.float64)
    return RotaryStep(plain=plain, cos=angles.cos().to(dtype), sin=angles.sin().to(dtype))


def check_rotary(step: RotaryStep, implementation: Any, context: AttentionContext, *, tolerance: float) -> None:
    """The outputs and the keys are close to the loops', what was not written is the same to the bit, and values are."""
    got, expected = step.run(implementation, context), step.expected()
    torch.testing.assert_close(got[0].double(), expected[0], rtol=tolerance, atol=tolerance)
    num_tokens = int(step.plain.context.query_start_loc[-1])
    assert torch.equal(got[0][num_tokens:], torch.zeros_like(got[0][num_tokens:]))
    torch.testing.assert_close(got[1], expected[1], rtol=tolerance, atol=tolerance, equal_nan=True)
    torch.testing.assert_close(got[2], expected[2], rtol=0, atol=0, equal_nan=True)
    block_size = got[1].shape[1]
    is_new = torch.zeros(got[1].shape[:2], dtype=torch.bool)
    for slot in step.plain.context.slot_mapping.tolist():
        if slot != -1:
            is_new[slot // block_size, slot % block_size] = True
    torch.testing.assert_close(got[1][~is_new], step.plain.k_cache[~is_new], rtol=0, atol=0, equal_nan=True)
