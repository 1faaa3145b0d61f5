"""Models whose split ops take and leave tensors of every kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from piecework.ops.split_op import split_op

from .toys import CALLS, applied, double, halves

WIDTH = 4


@split_op(mutates_args=("cache",), name="piecework_stage::store")
def store(k: torch.Tensor, cache: torch.Tensor) -> None:
    """Keeps what it last saw."""
    CALLS["store"] += 1
    cache.mul_(0.5).add_(k.sum(0))


@split_op(mutates_args=("out",), name="piecework_stage::attend", capturable=True)
def attend(q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor) -> None:
    """Reads what was stored."""
    CALLS["attend"] += 1
    out.copy_(q * cache)


@split_op(mutates_args=("a", "b"), name="piecework_stage::fill_both")
def fill_both(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Writes two tensors, which may be parts of one."""
    CALLS["fill_both"] += 1
    a.copy_(x[:, : a.shape[1]] + 1)
    b.copy_(x[:, : b.shape[1]] - 1)


@split_op(mutates_args=("out",), name="piecework_stage::some_rows")
def some_rows(x: torch.Tensor, out: torch.Tensor) -> None:
    """Writes every other row."""
    CALLS["some_rows"] += 1
    out[::2] = x[::2] * 10


@split_op(mutates_args=("outs",), name="piecework_stage::to_list")
def to_list(xs: list[torch.Tensor], outs: list[torch.Tensor], scale: float, bias: torch.Tensor | None = None) -> None:
    """Lists in, lists out."""
    CALLS["to_list"] += 1
    for x, out in zip(xs, outs, strict=True):
        out.copy_(x * scale if bias is None else x * scale + bias)


@split_op(mutates_args=(), name="piecework_stage::in_list", fake=lambda x: [x.new_empty(x.shape), x.new_empty(1)])
def in_list(x: torch.Tensor) -> list[torch.Tensor]:
    """A list of two."""
    CALLS["in_list"] += 1
    return [x + 1, x.sum().reshape(1)]


@split_op(mutates_args=(), name="piecework_stage::turned", fake=lambda x: x.new_empty(x.shape[::-1]).t())
def turned(x: torch.Tensor) -> torch.Tensor:
    """A result of other strides than a new tensor's."""
    CALLS["turned"] += 1
    return (x + 1).t().contiguous().t()


@split_op(mutates_args=(), name="piecework_stage::spread", fake=lambda x: x.new_empty(x.shape[0], 1).expand(-1, WIDTH))
def spread(x: torch.Tensor) -> torch.Tensor:
    """A result whose elements share memory."""
    CALLS["spread"] += 1
    return (x + 1).sum(1, keepdim=True).expand(-1, WIDTH)


def out_after_the_next_call(m: Any, x: torch.Tensor) -> Any:
    first = applied(x + 1)
    second = applied(first.relu())
    third = applied(second - 1)
    return first * 3, second + third, first


def out_of_two_calls_ago(m: Any, x: torch.Tensor) -> Any:
    outs = [x + 1]
    for _ in range(4):
        outs.append(applied(outs[-1] * 0.5 + outs[0]))
    return sum(outs)


def view_made_before(m: Any, x: torch.Tensor) -> Any:
    out = torch.empty_like(x)
    cube, column = out.view(-1, 2, 2), out[:, 1:3]
    double(x + 1, out)
    return cube * 2, column + 1, out


def view_kept_across_calls(m: Any, x: torch.Tensor) -> Any:
    out = torch.empty_like(x)
    cube = out.view(-1, 2, 2)
    double(x + 1, out)
    other = applied(x * 2)
    return cube.flatten(1) * other


def view_is_written(m: Any, x: torch.Tensor) -> Any:
    y = x * 2
    double(x[:, :2] + 1, y[:, 1:3])
    return y + 1, y


def views_of_one_tensor(m: Any, x: torch.Tensor) -> Any:
    y = x * 2
    left, right = y[:, :2], y[:, 2:]
    double(x[:, :2] + 1, left)
    double(x[:, 2:] - 1, right)
    return y.relu(), left * right


def results_kept(m: Any, x: torch.Tensor) -> Any:
    a, b = halves(x + 1)
    c, d = halves(a * 2)
    e, f = halves(c - b)
    return a + d, b * e, f, c


def result_written_later(m: Any, x: torch.Tensor) -> Any:
    a, b = halves(x + 1)
    a.add_(1)
    c, d = halves(a)
    c.mul_(b)
    return a, c, d


def args_share_what_is_written(m: Any, x: torch.Tensor) -> Any:
    base = x * 1
    double(base[:, :2], base[:, 2:])
    return base.relu(), applied(base)


def blank_parts_are_written(m: Any, x: torch.Tensor) -> Any:
    y, base, out = x + 1, torch.empty_like(x), torch.empty_like(x)
    fill_both(y, base[:, :2], base[:, 2:])
    double(base, out)
    return out, base


def stored_then_attended(m: Any, x: torch.Tensor) -> Any:
    for _ in range(2):
        q, k = x * 2, x + 1
        out = torch.empty_like(q)
        store(k, m.cache)
        attend(q, m.cache, out)
        x = x + out
    return x


def stored_then_attended_with_glue(m: Any, x: torch.Tensor) -> Any:
    for _ in range(2):
        qk = torch.cat((x * 2, x + 1), 1)
        out = torch.empty(x.shape[0], 2, 2)
        store(qk[:, WIDTH:], m.cache)
        attend(qk[:, :WIDTH].view(-1, WIDTH), m.cache, out.view(-1, WIDTH))
        x = x + out.flatten(1)
    return x


def one_op_twice_in_a_row(m: Any, x: torch.Tensor) -> Any:
    y, z = x + 1, x * 3
    first, second = torch.empty_like(x), torch.empty_like(x)
    double(y, first)
    double(z, second)
    return first - second


def one_op_on_its_own_out(m: Any, x: torch.Tensor) -> Any:
    y, first, second = x + 1, torch.empty_like(x), torch.empty_like(x)
    double(y, first)
    double(first, second)
    double(second, first)
    return first, second, y


def one_op_on_its_own_results(m: Any, x: torch.Tensor) -> Any:
    a, b = halves(x + 1)
    c, d = halves(a)
    e, f = halves(b)
    return a, c + d, e * f


def two_ops_in_turn(m: Any, x: torch.Tensor) -> Any:
    y, z, out, other = x + 1, x - 1, torch.empty_like(x), torch.empty_like(x)
    double(y, out)
    a, b = halves(z)
    double(z, other)
    c, d = halves(y)
    return out * other, a + b + c + d


def out_read_before_the_op_is_called_again(m: Any, x: torch.Tensor) -> Any:
    first = applied(x + 1)
    y, z = first.relu(), x * 3
    store(first, m.cache)
    double(y, z)
    a, _ = halves(z + 1)
    w = a.relu()
    store(a, m.cache)
    b, c = halves(w)
    return z, b, c


def read_after_a_write_in_a_row(m: Any, x: torch.Tensor) -> Any:
    y, z, out = x + 1, x * 3, torch.empty_like(x)
    a, b = halves(y)
    some_rows(a, z)
    double(z, out)
    return out, b


def lists_of_tensors(m: Any, x: torch.Tensor) -> Any:
    y, first, second = x + 1, torch.empty_like(x), torch.empty_like(x)
    to_list([y, m.row, x], [first, m.cache, second], 0.5)
    to_list([first.relu(), second], [second, first], 2.0, m.row)
    return first + second, first


def list_returned(m: Any, x: torch.Tensor) -> Any:
    y, total = in_list(x * 2)
    z, other = in_list(y + total)
    return y * z, total + other


def returned_as_it_came(m: Any, x: torch.Tensor) -> Any:
    early = x + 1
    y = applied(early)
    z = applied(y.relu())
    return {"x": x, "part": x[:, 1:], "row": m.row, "view": m.cache[:2], "twice": (y, y), "early": early, "z": z.t()}


def other_strides(m: Any, x: torch.Tensor) -> Any:
    wide = (x + 1).sum(1, keepdim=True).expand(-1, WIDTH)
    a, b = halves(wide)
    c, d = halves((x * 2).t())
    qkv = torch.cat((x, x + 1, x + 2), 1)
    e, f = halves(qkv[:, WIDTH : 2 * WIDTH])
    return a + b, c * d, e - f


def results_of_other_strides(m: Any, x: torch.Tensor) -> Any:
    a, b = turned(x * 2), spread(x * 3)
    return a.t() + b.t(), turned(a) * spread(b)


def nothing_in_it(m: Any, x: torch.Tensor) -> Any:
    a, b = halves(x[:, :0] + 1)
    empty = torch.empty(x.shape[0], 0)
    double(a, empty)
    double(x[:, 2:2], empty)
    return torch.cat((a, b, empty, x), 1), applied(x)


def some_rows_are_written(m: Any, x: torch.Tensor) -> Any:
    y = x * 3
    some_rows(x + 1, y)
    z = y + 1
    some_rows(z, y)
    return y, z


def sizes_grow(m: Any, x: torch.Tensor) -> Any:
    small = applied(x[:, :1] + 1)
    wide = applied(torch.cat((x, x, x, x), 1))
    again = applied(wide[:, :1] * 2)
    a, _ = halves(x.sum(0))
    b, _ = halves(x @ x.t())
    return small + again, wide, a, b


def input_is_written(m: Any, x: torch.Tensor) -> Any:
    double(x + 1, x)
    return x * 2


def buffer_is_written(m: Any, x: torch.Tensor) -> Any:
    double(m.table[: x.shape[0]] + x, m.table[: x.shape[0]])
    return m.table.sum(0) + x


def made_of_numbers(m: Any, x: torch.Tensor) -> Any:
    start = torch.tensor([1.0, 2.0, 3.0, 4.0])
    store(x + 1, start)
    start += x.sum(0)
    return x * start


CONSTANT = torch.ones(WIDTH)
"""A tensor that no model holds."""


def constant_is_written(m: Any, x: torch.Tensor) -> Any:
    store(x + 1, CONSTANT)
    return x * CONSTANT


MODELS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        out_after_the_next_call, out_of_two_calls_ago, view_made_before, view_kept_across_calls, view_is_written,
        views_of_one_tensor, results_kept, result_written_later, args_share_what_is_written, blank_parts_are_written,
        stored_then_attended, stored_then_attended_with_glue, one_op_twice_in_a_row, one_op_on_its_own_out,
        one_op_on_its_own_results, two_ops_in_turn, lists_of_tensors, list_returned, returned_as_it_came,
        out_read_before_the_op_is_called_again, read_after_a_write_in_a_row, other_strides, results_of_other_strides,
        nothing_in_it, some_rows_are_written, sizes_grow, input_is_written, buffer_is_written, constant_is_written,
        made_of_numbers,
    )
}  # fmt: skip
