"""The rows of an eager forward's outputs, where shapes say little."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import piecework as pw

from .function_captures import EAGER, WIDTH, Model, Step, runtime_of, store, x_of


class Rows(nn.Module):
    """Outputs whose shapes say little."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.randn(8, WIDTH), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight.t()  # [tokens, 8]
        kinds = {"plain": y, "last": y[-1], "square": y @ y.t(), "turned": y.t(), "twice": torch.cat((y, y), 1)}
        return kinds.get(self.kind, self.weight)


@pytest.mark.parametrize("backend", EAGER)
@pytest.mark.parametrize("kind", ["plain", "square", "twice"])
def test_rows_of_an_eager_forward_whose_other_sizes_equal_the_bucket(backend: str, kind: str) -> None:
    """Bucket 8 and a width of 8: only a run at another size tells them apart, and it is one of fake tensors."""
    model = Rows(kind)
    runtime = runtime_of(model, backend)
    for num_tokens in (7, 7, 3, 8, 2):
        with torch.inference_mode():
            expected = model(x_of(num_tokens))
        torch.testing.assert_close(runtime.run("decode", {"x": x_of(num_tokens)}), expected)
    assert runtime.counters["replays"] == 2


@pytest.mark.parametrize("backend", EAGER)
def test_looking_for_the_rows_changes_nothing(backend: str) -> None:
    """The run at another size computes nothing and writes nothing, also where a forward writes into real tensors."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))
            self.register_buffer("sums", torch.zeros(WIDTH))
            self.register_buffer("cache", torch.zeros(8, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            self.sums += x.sum(0)
            torch.add(self.sums, 1, out=self.sums)
            store(x, self.cache)
            return x @ self.cache[: len(x)].t()  # [tokens, tokens]

    model, reference = Counting(), Counting()
    runtime = runtime_of(model, backend)
    state = torch.random.get_rng_state()
    for _ in range(3):
        context = Step(torch.ones(4))
        with torch.inference_mode(), pw.use_context(context):
            expected = reference(x_of(4))
        torch.testing.assert_close(runtime.run("decode", {"x": x_of(4)}, context), expected)
    for left, right in zip(model.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(left, right)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("backend", EAGER)
@pytest.mark.parametrize("kind", ["last", "weight"])
def test_an_output_without_rows_whose_size_equals_the_bucket_is_refused(backend: str, kind: str) -> None:
    for num_tokens in (7, 3):
        with pytest.raises(pw.InputError, match=r"output '': expected \d rows.*output_dims"):
            runtime_of(Rows(kind), backend).run("decode", {"x": x_of(num_tokens)})
    runtime = runtime_of(Rows(kind), backend, output_dims=None)
    for _ in range(2):
        assert runtime.run("decode", {"x": x_of(7)}).shape == ((8,) if kind == "last" else (8, WIDTH))


def test_an_output_whose_rows_are_on_another_dim_needs_a_word() -> None:
    with pytest.raises(pw.InputError, match="rows on dim 1"):
        runtime_of(Rows("turned"), "full").run("decode", {"x": x_of(7)})
    runtime = runtime_of(Rows("turned"), "full", output_dims=1)
    for _ in range(2):
        assert runtime.run("decode", {"x": x_of(7)}).shape == (8, 7)


def test_a_buffer_without_a_row_a_token_is_as_large_as_it_is() -> None:
    model = Model(lambda m, x: (x, m.table * 2), table=torch.ones(1024, 16))
    runtime = runtime_of(model, "full", buckets=(1, 2, 256), output_dims={"0": 0, "1": None})
    for num_tokens in (1, 2):
        runtime.run("decode", {"x": x_of(num_tokens)})
    assert runtime.explain().as_dict()["memory"]["buffer_bytes"] < 2 * model.table.nbytes
