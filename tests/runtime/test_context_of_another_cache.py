"""A context that was built for another cache than the layers have: refused by every backend, also once captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import piecework as pw
from piecework.ops.attention import AttentionContext, paged_attention

BACKENDS = ("disabled", "full", "breakable", "tc_piecewise")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.k_cache, self.v_cache = (nn.Buffer(torch.randn(4, 4, 1, 16)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = (x * 2).unsqueeze(1)
        out = torch.empty_like(q)
        paged_attention(q, q + 1, q - 1, self.k_cache, self.v_cache, out, 0.25)
        return out.flatten(1) + x


def context(block_size: int) -> AttentionContext:
    return AttentionContext.build(
        query_lens=[1, 1], seq_lens=[3, 2], block_tables=[[0, 1], [2, 3]], block_size=block_size, num_blocks=4
    )


@pytest.mark.parametrize("is_captured", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_context_for_other_blocks_is_refused(backend: str, is_captured: bool) -> None:
    config: dict[str, Any] = {"backend": backend, "buckets": (2, 4)}
    with pw.Runtime(
        Layer(),
        pw.GraphConfig(prefill={"backend": "disabled"}, decode=config, capture_device="tape"),
        dynamic_dims={"x": 0},
        context_sizes={"requests": 4, "blocks": 4},
    ) as runtime:
        x = torch.randn(2, 16)
        for _ in range(3 if is_captured else 0):
            before = runtime.run("decode", {"x": x}, context=context(4), copy=True)
        with pytest.raises(pw.InputError, match="cache of 4 blocks of 4 tokens, got one for 4 blocks of 2 tokens"):
            runtime.run("decode", {"x": x}, context=context(2))
        if is_captured:
            assert torch.equal(runtime.run("decode", {"x": x}, context=context(4)), before)
