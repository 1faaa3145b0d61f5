"""A split op's body under the caller's autocast: the same in a bucket's first run as at its replays."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import piecework as pw

seen: list[torch.dtype] = []


@pw.split_op(mutates_args=("out",), name="piecework_autocast::product")
def product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """out = x weight^T."""
    y = x @ weight.t()
    seen.append(y.dtype)
    out.copy_(y)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).float()
        out = torch.empty_like(y)
        product(y, self.linear.weight, out)
        return self.linear(out)


@pytest.mark.parametrize("backend", ["disabled", "breakable", "tc_piecewise"])
def test_a_body_sees_the_callers_autocast_in_every_step(backend: str) -> None:
    model, x = Model(), torch.randn(4, 4)
    config = pw.PhaseConfig(backend=backend, compiler="eager", buckets=(2, 4))
    with pw.Runtime(
        model, pw.GraphConfig(prefill=config, decode=config, capture_device="tape"), dynamic_dims={"x": 0}
    ) as runtime:
        for dtype, is_on in ((torch.bfloat16, True), (torch.float16, True), (torch.float32, False)):
            seen.clear()
            with torch.autocast("cpu", dtype if is_on else torch.bfloat16, enabled=is_on), torch.inference_mode():
                expected = model(x)
                outputs = [runtime.run("decode", {"x": x}, copy=True) for _ in range(3)]
            assert seen == [dtype] * 4
            for output in outputs:
                torch.testing.assert_close(output, expected)
