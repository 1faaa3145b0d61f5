"""Operators on the tape: a replay equals the same calls made eagerly, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.two_tensor import TwoTensor

from .tape_recording import AMBIENTS, record


@pytest.fixture(params=AMBIENTS)
def ambient(request: pytest.FixtureRequest) -> Iterator[str]:
    with AMBIENTS[request.param]():
        yield request.param


class Block(torch.nn.Module):
    """A decoder layer with everything that one usually has."""

    def __init__(self, hidden: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm = torch.nn.Parameter(torch.rand(hidden))
        self.qkv = torch.nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = torch.nn.Linear(hidden, hidden)
        self.gate_up = torch.nn.Linear(hidden, 4 * hidden)
        self.down = torch.nn.Linear(2 * hidden, hidden)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        tokens, hidden = x.shape
        q, k, v = self.qkv(F.rms_norm(x, (hidden,), self.norm, 1e-6)).chunk(3, dim=-1)
        q, k, v = (t.reshape(tokens, self.heads, -1).transpose(0, 1)[None] for t in (q, k, v))
        q, k = (t * cos + torch.cat([-t.chunk(2, -1)[1], t.chunk(2, -1)[0]], -1) * sin for t in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed[0].transpose(0, 1).reshape(tokens, hidden))
        gate, up = self.gate_up(F.layer_norm(x, (hidden,))).split(2 * hidden, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Model(torch.nn.Module):
    """Ids to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(32, 16)
        self.layers = torch.nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = positions[:, None] * torch.pow(100.0, -torch.arange(0, 4) / 4.0)
        x = self.embed(ids)
        angles = torch.cat([angles, angles], -1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.linear(x, self.embed.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_transformer_replays_as_it_runs(ambient: str, dtype: torch.dtype) -> None:
    model = Model().to(dtype)
    ids, positions = torch.randint(0, 32, (7,)), torch.arange(7)
    logits, segment = record(model, ids, positions)
    assert logits.isnan().all()
    for seed in range(3):
        ids.copy_(torch.randint(0, 32, (7,), generator=torch.Generator().manual_seed(seed)))
        segment.replay()
        assert torch.equal(logits, model(ids, positions))


def _rotary(x: torch.Tensor) -> torch.Tensor:
    turned = torch.view_as_complex(x.reshape(6, 4, 2)) * torch.polar(torch.ones(4), torch.arange(4.0))
    return torch.view_as_real(turned).flatten(1).conj()


def _in_place(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x.clone()
    y[1:3].mul_(2).add_(1)
    y[:, 0] = 5
    y += x
    return y, y.masked_fill_(x > 0, -1.0), y.zero_()


def _out(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    first, grown = torch.empty(6, 8), torch.empty(0)
    values, indices = torch.empty(0), torch.empty(0, dtype=torch.long)
    torch.add(x, 1, out=first)
    torch.mul(first, x, out=grown)
    torch.topk(x, 3, out=(values, indices))
    turned = torch.exp(x.t(), out=torch.empty(0))
    return first, grown, values, indices, grown.t() + 1, turned, torch.arange(3, out=torch.empty(0))


def _changes_of_metadata(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y = x * 2
    total = y.sum(1)
    y.t_()
    return y, total, y.sum(1), y.unsqueeze_(0) + 1


def _foreach(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    sums = torch._foreach_add([x, x[:2]], 1.0)
    torch._foreach_mul_(sums, 3.0)
    return *sums, *torch._foreach_exp(sums)


PROGRAMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "linear": lambda x: F.linear(x, torch.ones(3, 8), torch.ones(3)),
    "matmuls": lambda x: (x @ x.t(), torch.bmm(x[None], x.t()[None]), torch.einsum("ij,kj->ki", x, x), x @ x[0]),
    "softmax": lambda x: (x.softmax(-1), x.log_softmax(0), x.logsumexp(0), F.gelu(x), F.gelu(x, approximate="tanh")),
    "norms": lambda x: (F.rms_norm(x, (8,)), F.layer_norm(x, (8,)), F.group_norm(x[None], 2), x.var(0), x.mean()),
    "sdpa": lambda x: _attention(x.view(1, 2, 6, 4)),
    "indexing": lambda x: (x[x.argmax(0)], x.index_select(1, x.argmin(1)), x.gather(1, x.argsort(1)), x[..., ::2]),
    "scatter": lambda x: (
        torch.zeros(6, 8).scatter_(1, x.argsort(1), x),
        x.clone().index_add_(0, x.argmax(0), x[:1].repeat(8, 1)),
    ),
    "index_put": lambda x: x.clone().index_put_((x.argmax(0),), x[:1].repeat(8, 1).sort().values, accumulate=True),
    "where": lambda x: (
        torch.where(x > 0, x, -x),
        x.clamp(min=0),
        torch.where(x > 0, 1.0, 0.0),
        x.masked_fill(x > 0, 2),
    ),
    "sorts": lambda x: (*x.topk(3), *x.sort(), x.cumsum(0), *x.max(0), *x.kthvalue(2)),
    "casts": lambda x: (x.to(torch.bfloat16), x.half().float(), x.long() / 3, x.int().float().mean(), x.type_as(x)),
    "convs": lambda x: (
        F.conv1d(x[None], torch.ones(6, 6, 3), padding=1),
        F.conv1d(x[None], torch.ones(6, 1, 2), groups=6),
    ),
    "views": lambda x: (*x.chunk(2), *x.unbind(1), *x.split([2, 4]), x.t(), x.expand(2, 6, 8), x.view(torch.int32)),
    "reshapes": lambda x: (
        x.t().reshape(-1),
        x.t().contiguous(),
        x.flatten(),
        x.reshape(3, 16),
        x.roll(1),
        x.repeat(2, 1),
    ),
    "factories": lambda x: (
        torch.arange(5) * x[0, 0],
        torch.ones_like(x),
        torch.full((2,), 3.0),
        x.new_zeros(2),
        torch.eye(3),
    ),
    "one_hot": lambda x: (
        F.one_hot(x.argmax(0), 6),
        torch.repeat_interleave(x, 2, 0),
        torch.tril(x),
        torch.outer(x[0], x[0]),
    ),
    "repeats": lambda x: torch.repeat_interleave(x, torch.arange(6), dim=0, output_size=15),
    "complex": _rotary,
    "in place": _in_place,
    "out": _out,
    "metadata": _changes_of_metadata,
    "foreach": _foreach,
    "constants": lambda x: x + torch.tensor([1.0] * 8) * torch.tensor(2.0),
    "dropout": lambda x: F.dropout(x, 0.5, training=False),
    "profiled": lambda x: _profiled(x),
}


def _attention(q: torch.Tensor) -> tuple[torch.Tensor, ...]:
    mask = torch.ones(6, 6).tril() > 0
    return tuple(F.scaled_dot_product_attention(q, q, q, attn_mask=m) for m in (None, mask, mask.float()))


def _profiled(x: torch.Tensor) -> torch.Tensor:
    with torch.profiler.record_function("here"):
        return x + 1


def _flat(outputs: Any) -> Sequence[torch.Tensor]:
    return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_replay_equals_the_same_calls_made_eagerly(name: str, ambient: str) -> None:
    x = torch.randn(6, 8)
    before = x.clone()
    outputs, segment = record(PROGRAMS[name], x)
    assert torch.equal(x, before)
    for _ in range(2):
        x.copy_(torch.randn(6, 8))
        segment.replay()
        for got, expected in zip(_flat(outputs), _flat(PROGRAMS[name](x)), strict=True):
            assert (got.dtype, got.shape, got.stride()) == (expected.dtype, expected.shape, expected.stride())
            assert torch.equal(got, expected)


def test_the_operators_inside_a_tensor_subclass_are_recorded() -> None:
    a, b = torch.ones(2), torch.zeros(2)
    out, segment = record(lambda: F.relu(TwoTensor(a, b) - 0.5))
    assert isinstance(out, TwoTensor)
    assert out.a.isnan().all()
    segment.replay()
    assert torch.equal(out.a, torch.full((2,), 0.5))
    assert torch.equal(out.b, torch.zeros(2))
