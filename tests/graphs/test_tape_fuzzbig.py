"""Random programs: a replay on new values equals the same program made eagerly, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from .tape_recording import AMBIENTS, DEVICE, record

ROWS, WIDTH = 4, 6

Operation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Of two float tensors [ROWS, WIDTH], for another one; may write the first."""


def _column(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x[:, 1:3] = y[:, :2] * 2
    return x


def _row(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.select(0, 1).add_(y[2])
    return y


def _turned(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x + y
    z.t_()
    return z.t()


OPERATIONS: tuple[Operation, ...] = (
    torch.add,
    torch.sub,
    lambda x, y: torch.maximum(x, y) * 0.5,
    lambda x, y: x @ y.t() @ x * 0.1,
    lambda x, y: F.linear(x, y[:, :WIDTH].repeat(2, 1)[:WIDTH]).tanh(),
    lambda x, y: x.softmax(-1),
    lambda x, y: F.rms_norm(x, (WIDTH,), y[0]),
    lambda x, y: F.layer_norm(x, (WIDTH,)),
    lambda x, y: F.gelu(x),
    lambda x, y: torch.where(x > y, x, y.neg()),
    lambda x, y: torch.cat([x[:, 3:], y[:, :3]], -1),
    lambda x, y: x.add_(y).clamp_(-3, 3),
    lambda x, y: x.mul_(0.5),
    lambda x, y: x.copy_(y),
    lambda x, y: x.masked_fill_(y > 1, 0.25),
    lambda x, y: x.gather(1, y.argsort(1)),
    lambda x, y: x.scatter(1, y.topk(2).indices, 0.5),
    lambda x, y: x[y.argmax(0) % ROWS][:ROWS],
    lambda x, y: x.t().contiguous().t(),
    lambda x, y: x.t().reshape(ROWS, WIDTH),
    lambda x, y: x.view(2, 2, WIDTH).transpose(0, 1).reshape(ROWS, WIDTH),
    lambda x, y: torch.stack(x.unbind(0)[::-1]),
    lambda x, y: x.cumsum(0).cos(),
    lambda x, y: x.to(torch.bfloat16).to(x.dtype) + y.mean(),
    lambda x, y: F.scaled_dot_product_attention(x[None, None], y[None, None], x[None, None])[0, 0],
    lambda x, y: torch.einsum("ij,kj->ik", x, y)[:, :, None].expand(ROWS, ROWS, WIDTH).mean(1),
    lambda x, y: torch.add(x, y, out=torch.empty(0)),
    lambda x, y: torch._foreach_add([x, y], 1.0)[1],
    lambda x, y: F.conv1d(x[None], torch.ones(ROWS, ROWS, 3), padding=1)[0].sin(),
    _column,
    _row,
    _turned,
)

programs = st.lists(
    st.tuples(st.integers(0, len(OPERATIONS) - 1), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12
)


def run(program: Sequence[tuple[int, int, int]], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    values = list(inputs)
    for operation, x, y in program:
        values.append(OPERATIONS[operation](values[x % len(values)], values[y % len(values)]))
    return values


@pytest.mark.parametrize("ambient", AMBIENTS)
@settings(max_examples=900)
@given(program=programs, seed=st.integers(0, 1000))
def test_a_replay_equals_eager(ambient: str, program: Sequence[tuple[int, int, int]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def fresh() -> list[torch.Tensor]:
        return [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(2)]

    with AMBIENTS[ambient]():
        inputs = fresh()
        before = [tensor.clone() for tensor in inputs]
        random_state = torch.get_rng_state()
        pool = DEVICE.open_pool()
        outputs, segment = record(run, program, inputs, pool=pool)
        assert all(map(torch.equal, inputs, before)), "an input changed while recording"
        assert torch.equal(torch.get_rng_state(), random_state)
        addresses = [output.data_ptr() for output in outputs]
        for _ in range(2):
            values = fresh()
            for tensor, value in zip(inputs, values, strict=True):
                tensor.copy_(value)
            segment.replay()
            expected = run(program, values)
            for got, wanted in zip(outputs, expected, strict=True):
                assert (got.shape, got.stride(), got.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
                assert torch.equal(got.nan_to_num(7.0), wanted.nan_to_num(7.0))
        assert addresses == [output.data_ptr() for output in outputs]
        segment.release()
        del outputs, got
        assert pool.num_bytes == 0
