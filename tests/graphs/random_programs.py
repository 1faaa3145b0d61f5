"""Random models: what a step of one does, layers made of steps, and a strategy that draws them.

A model keeps a stack of tensors, of which each step may read and write older ones. `x` is [tokens, 4], `y` [rows, 4];
tensors of the stack are [tokens, 4] of float32 with memory of any kind: an input's, a view's, an operator's output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from piecework.ops.split_op import split_op

from .toys import accumulate, applied, double, halves

WIDTH = 4
TABLE_ROWS = 16
"""Also the largest number of tokens of a model that slices its table."""

FROZEN = torch.tensor([0.5, float("inf"), -1.0, 2.0])
"""No attribute of a model, so it becomes a constant of the trace."""


@split_op(mutates_args=("out", "log"), name="piecework_fuzz::many_kinds", capturable=True)
def many_kinds(
    x: torch.Tensor,
    out: torch.Tensor,
    log: list[torch.Tensor],
    size: int,
    scale: float,
    exact: bool,
    label: str,
    dims: list[int],
    bias: torch.Tensor | None = None,
) -> None:
    """A split op with arguments of every kind, one a symbolic size."""
    y = x * scale if exact else x - scale
    y = y + size + len(label) + sum(dims)
    out.copy_(y if bias is None else y + bias)
    for each in log:
        each.add_(1)


Step = tuple[str, int, int, float]
"""What to do, two places in the stack, a number."""

NUMBERS = (0.5, 2.0, -1.0, float("inf"), float("nan"))


class State:
    """What the steps of one forward work on."""

    def __init__(self, m: Any, x: torch.Tensor, y: torch.Tensor | None) -> None:
        self.m = m
        self.x = x
        self.y = y
        self.stack = [x, x + 1]
        self.extra: list[Any] = []

    def do(self, step: Step) -> None:
        kind, i, j, number = step
        a, b = self.stack[i % len(self.stack)], self.stack[j % len(self.stack)]
        made = STEPS[kind](self, a, b, number)
        if made is not None:
            self.stack.append(made)


def _setitem(s: State, a: torch.Tensor, b: torch.Tensor, k: float) -> None:
    a[..., 1] = k
    a[:, 2:3] = b[:, 1:2]


def _slice(s: State, a: torch.Tensor, b: torch.Tensor, k: float) -> None:
    s.extra.append(a[:, 1:3])
    a[:, 1:3].add_(k)


def _unbind(s: State, a: torch.Tensor, b: torch.Tensor, k: float) -> torch.Tensor:
    first, *_, last = a.unbind(1)
    return applied(b + first[:, None]) * last[:, None]


def _chunk(s: State, a: torch.Tensor, b: torch.Tensor, k: float) -> torch.Tensor:
    left, right = a.chunk(2, dim=-1)
    y = applied(left + 0)
    return torch.cat([right, y], 1)


def _split(s: State, a: torch.Tensor, b: torch.Tensor, k: float) -> torch.Tensor:
    parts = torch.split(a * 1, [1, 3], dim=1)
    parts[0].add_(k)
    first, second = halves(parts[1])
    return torch.cat([parts[0], first + second], 1)


def _into_view(s: State, a: torch.Tensor, b: torch.Tensor, k: float) -> torch.Tensor:
    out = torch.empty(a.shape[0], 2, 2)
    double(a.view(-1, 2, 2), out)
    return out.view(-1, WIDTH)


def _into_slice(s: State, a: torch.Tensor, b: torch.Tensor, k: float) -> torch.Tensor:
    out = torch.zeros_like(a)
    double(a[:, :2], out[:, 2:])
    return out


def _many(s: State, a: torch.Tensor, b: torch.Tensor, k: float) -> torch.Tensor:
    out = torch.empty_like(a)
    bias = s.m.weight[0] if k > 0 else None
    many_kinds(a, out, [s.m.cache, s.m.row], s.x.shape[0] * 2 + 1, k, k == 2.0, "ab", [1, 2], bias)
    return out


def _write(s: State, a: torch.Tensor, b: torch.Tensor, k: float) -> torch.Tensor:
    s.m.cache.add_(k)
    return a + s.m.cache


def _row(s: State, a: torch.Tensor, b: torch.Tensor, k: float) -> torch.Tensor:
    s.m.row.mul_(0.5)
    return a + s.m.whole.sum(0) + s.m.row


def _whole(s: State, a: torch.Tensor, b: torch.Tensor, k: float) -> torch.Tensor:
    accumulate(a, s.m.whole[2])
    return a * s.m.row


def _table(s: State, a: torch.Tensor, b: torch.Tensor, k: float) -> torch.Tensor:
    rows = s.m.table[: a.shape[0]]
    rows.add_(a)
    y = applied(rows)
    rows.mul_(0.5)
    return y + s.m.table[: a.shape[0]]


def _tied(s: State, a: torch.Tensor, b: torch.Tensor, k: float) -> torch.Tensor:
    s.m.tied[0] += 1
    return a @ s.m.weight + s.m.tied[0]


def _listed(s: State, a: torch.Tensor, b: torch.Tensor, k: float) -> torch.Tensor:
    s.m.tables[1].add_(1)
    return a * s.m.tables[1] + s.m.tables[0]


def _size(s: State, a: torch.Tensor, b: torch.Tensor, k: float) -> torch.Tensor:
    n = s.x.shape[0]
    s.extra += [n * 2 + 1, -n]
    return a + (n * 2 + 1) + torch.arange(n + 3, dtype=torch.float32).sum()


def _size_across(s: State, a: torch.Tensor, b: torch.Tensor, k: float) -> torch.Tensor:
    n = s.x.shape[0] // 2 + 1
    y = applied(a)
    return y + torch.full((n, 3), k if k == k else 1.0).sum()


def _strided(s: State, a: torch.Tensor, b: torch.Tensor, k: float) -> torch.Tensor:
    half = a[:, ::2]
    every = b[::1, None, ...].squeeze(1)
    return torch.cat([half, half], -1) + every[:, [3, 2, 1, 0]]


def _dtypes(s: State, a: torch.Tensor, b: torch.Tensor, k: float) -> torch.Tensor:
    y = a.to(torch.bfloat16).float() + a.to(dtype=torch.float64, copy=True).clamp(min=None, max=float("inf")).float()
    return y + torch.zeros(a.shape, dtype=torch.int32, device="cpu", layout=torch.strided).to(torch.uint8)


def _constants(s: State, a: torch.Tensor, b: torch.Tensor, k: float) -> torch.Tensor:
    y = torch.full_like(a, k).nan_to_num(1.5, posinf=7.0, neginf=-float("inf"))
    return (a + FROZEN).masked_fill(a > 2, -float("inf")) * y + torch.tensor([1.0, float("nan"), 3.0, 4.0]).nan_to_num()


def _complex(s: State, a: torch.Tensor, b: torch.Tensor, k: float) -> torch.Tensor:
    return torch.view_as_real(torch.view_as_complex(a.contiguous().view(-1, 2, 2)) * complex(0.0, 1.5)).flatten(1)


def _where(s: State, a: torch.Tensor, b: torch.Tensor, k: float) -> torch.Tensor:
    return torch.where(a > 0, b, k).roll(1, -1).transpose(0, 1).contiguous().t()


def _functional(s: State, a: torch.Tensor, b: torch.Tensor, k: float) -> torch.Tensor:
    y = nn.functional.silu(nn.functional.layer_norm(a, (WIDTH,), eps=1e-3), inplace=True)
    return nn.functional.pad(y[:, :3], (1, 0), value=k)


def _out(s: State, a: torch.Tensor, b: torch.Tensor, k: float) -> torch.Tensor:
    out = torch.empty(a.shape)  # Dynamo takes no other `out` than a contiguous one
    torch.add(a, b, alpha=2, out=out)
    return out


def _autocast(s: State, a: torch.Tensor, b: torch.Tensor, k: float) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = a @ s.m.weight
    return y.float()


def _no_grad(s: State, a: torch.Tensor, b: torch.Tensor, k: float) -> torch.Tensor:
    with torch.no_grad():
        return applied(a + 1) * 2


def _branch(s: State, a: torch.Tensor, b: torch.Tensor, k: float) -> torch.Tensor:
    """Makes the trace a backed one, valid on one side of the branch."""
    return a * 2 if s.x.shape[0] > 3 else b * 3


def _indices(s: State, a: torch.Tensor, b: torch.Tensor, k: float) -> torch.Tensor:
    ids = (a[:, 0].nan_to_num(0, 0, 0) * 3).long().remainder(TABLE_ROWS)
    s.m.table.index_add_(0, ids, b)
    return applied(s.m.table[ids]) + nn.functional.embedding(ids % WIDTH, s.m.weight)


def _masked(s: State, a: torch.Tensor, b: torch.Tensor, k: float) -> torch.Tensor:
    """A size that depends on data crosses a split op."""
    rows = a[a[:, 0] > 0]
    return b + applied(rows * 2).sum(0) + rows.shape[0]


def _other_dim(s: State, a: torch.Tensor, b: torch.Tensor, k: float) -> torch.Tensor:
    if s.y is None:
        return a.tanh()
    y = applied(s.y + s.y.shape[0])
    s.y.add_(1)
    return (a @ y.t()).sigmoid() @ y + s.y.shape[0] * s.x.shape[0]


def _other_piece(s: State, a: torch.Tensor, b: torch.Tensor, k: float) -> torch.Tensor:
    """The same piece over each dim."""
    if s.y is not None:
        s.extra.append(applied(s.y.relu() * 2).relu().sum(0))
    return applied(a.relu() * 2).relu()


def _returned_views(s: State, a: torch.Tensor, b: torch.Tensor, k: float) -> None:
    s.extra += [a.view(-1, 2, 2), a.t(), (a, b[:, 0]), None, k if k == k else "text"]


STEPS: dict[str, Callable[[State, torch.Tensor, torch.Tensor, float], torch.Tensor | None]] = {
    "add": lambda s, a, b, k: a + b,
    "mul": lambda s, a, b, k: a * k,
    "add_": lambda s, a, b, k: a.add_(k),
    "mul_": lambda s, a, b, k: a.mul_(b),
    "copy_": lambda s, a, b, k: a.copy_(b + k),
    "relu_": lambda s, a, b, k: nn.functional.relu(a, inplace=True),
    "matmul": lambda s, a, b, k: a @ s.m.weight,
    "view": lambda s, a, b, k: a.view(-1, 2, 2).transpose(1, 2).reshape(-1, WIDTH),
    "alias": lambda s, a, b, k: a.view(-1, 2, 2).view(-1, WIDTH),
    "double": lambda s, a, b, k: applied(a),
    "double_into": lambda s, a, b, k: double(a * 1, b),
    "accumulate": lambda s, a, b, k: accumulate(a, s.m.cache),
    "halves": lambda s, a, b, k: s.stack.extend(halves(a)),
    "setitem": _setitem,
    "slice": _slice,
    "unbind": _unbind,
    "chunk": _chunk,
    "split": _split,
    "into_view": _into_view,
    "into_slice": _into_slice,
    "many": _many,
    "write": _write,
    "row": _row,
    "whole": _whole,
    "table": _table,
    "tied": _tied,
    "listed": _listed,
    "size": _size,
    "size_across": _size_across,
    "strided": _strided,
    "dtypes": _dtypes,
    "constants": _constants,
    "complex": _complex,
    "where": _where,
    "functional": _functional,
    "out": _out,
    "autocast": _autocast,
    "no_grad": _no_grad,
    "branch": _branch,
    "indices": _indices,
    "masked": _masked,
    "other_dim": _other_dim,
    "other_piece": _other_piece,
    "returned_views": _returned_views,
}

IN_LAYERS = tuple(kind for kind in STEPS if kind not in ("returned_views", "size", "other_dim", "other_piece"))
"""A layer hands on one tensor."""


class _Tensors(nn.Module):
    """The tensors that steps read and write: views of one another, one under two names, some in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.ones(WIDTH))
        self.register_buffer("table", torch.linspace(0, 1, TABLE_ROWS * WIDTH).reshape(TABLE_ROWS, WIDTH))
        self.register_buffer("whole", torch.arange(3.0 * WIDTH).reshape(3, WIDTH))
        self.register_buffer("row", self.whole[1])
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
        self.tied = self.weight
        self.tables = [torch.ones(WIDTH), torch.arange(WIDTH, dtype=torch.float32)]


class Layer(_Tensors):
    """Steps on what came in; the newest tensor of its stack goes out."""

    def __init__(self, steps: tuple[Step, ...]) -> None:
        super().__init__()
        self.steps = steps
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = State(self, self.linear(x), None)
        for step in self.steps:
            state.do(step)
        return state.stack[-1] + x


class RandomModel(_Tensors):
    """Steps, then equal layers, then steps."""

    def __init__(self, before: tuple[Step, ...], layers: tuple[int, tuple[Step, ...]], after: tuple[Step, ...]) -> None:
        super().__init__()
        self.before, self.after = before, after
        num_layers, steps = layers
        self.layers = nn.ModuleList(Layer(steps) for _ in range(num_layers))
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> dict[str, Any]:
        state = State(self, x, y)
        for step in self.before:
            state.do(step)
        hidden = state.stack[-1]
        for layer in self.layers:
            hidden = layer(hidden)
        state.stack.append(hidden)
        for step in self.after:
            state.do(step)
        return {"stack": state.stack, "extra": tuple(state.extra), "cache": self.cache + 1, "row": self.row}


def _steps(kinds: tuple[str, ...], min_size: int, max_size: int) -> st.SearchStrategy[tuple[Step, ...]]:
    step = st.tuples(st.sampled_from(kinds), st.integers(0, 12), st.integers(0, 12), st.sampled_from(NUMBERS))
    return st.lists(step, min_size=min_size, max_size=max_size).map(tuple)


def models(kinds: tuple[str, ...] = tuple(STEPS)) -> st.SearchStrategy[tuple[Any, ...]]:
    """Arguments of a `RandomModel` whose steps are of these kinds."""
    in_layers = tuple(kind for kind in IN_LAYERS if kind in kinds)
    layers = st.just((0, ())) | st.tuples(st.sampled_from([2, 4, 5]), _steps(in_layers, 1, 4))
    return st.tuples(_steps(kinds, 1, 5), layers, _steps(kinds, 1, 5))
