"""Packed attention against dense float64 attention, its checks, and what opcheck says about it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from piecework.errors import ContextError, InputError
from piecework.ops.context import use_context
from piecework.ops.packed_attention import PackedContext, packed_attention

SCALE = 0.3


@dataclasses.dataclass
class Step:
    """The arguments of one call, and what it has to produce."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    context: PackedContext

    def run(self, causal: bool, out: torch.Tensor | None = None) -> torch.Tensor:
        shape = (*self.q.shape[:2], self.v.shape[2])
        out = torch.full(shape, float("nan"), dtype=self.q.dtype) if out is None else out
        with use_context(self.context):
            packed_attention(self.q, self.k, self.v, out, SCALE, causal)
        return out

    def expected(self, causal: bool) -> torch.Tensor:
        """[num_tokens, num_heads, value_size], float64, one score at a time."""
        group, first, rows = self.q.shape[1] // self.k.shape[1], 0, []
        for length in self.context.seq_lens_host:
            for row in range(first, first + length):
                seen = slice(first, row + 1 if causal else first + length)
                for head in range(self.q.shape[1]):
                    scores = self.k[seen, head // group].double() @ self.q[row, head].double() * SCALE
                    rows.append(scores.softmax(0) @ self.v[seen, head // group].double())
            first += length
        return torch.stack(rows).view(first, self.q.shape[1], -1)


def make_step(
    seq_lens: list[int],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 4,
    padding: int = 0,
    dtype: torch.dtype = torch.float64,
    value_size: int = 8,
) -> Step:
    """q, k and v are views with strides of their own; what is past the sequences is NaN."""
    num_tokens, generator = sum(seq_lens), torch.Generator().manual_seed(0)

    def make(heads: int, size: int) -> torch.Tensor:
        x = torch.randn(heads, num_tokens + padding, size, generator=generator, dtype=torch.float64).to(dtype)
        x[:, num_tokens:] = float("nan")
        return x.transpose(0, 1)

    context = PackedContext.build(seq_lens=seq_lens)
    return Step(make(num_heads, 8), make(num_kv_heads, 8), make(num_kv_heads, value_size), context)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)], ids=str)
@pytest.mark.parametrize("seq_lens", [[1], [7], [3, 1, 5], [0, 2, 0, 4, 0]], ids=str)
def test_equals_dense_attention(seq_lens: list[int], heads: tuple[int, int], causal: bool) -> None:
    step = make_step(seq_lens, num_heads=heads[0], num_kv_heads=heads[1])
    torch.testing.assert_close(step.run(causal), step.expected(causal), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_keeps_its_own(dtype: torch.dtype) -> None:
    step = make_step([40, 3], dtype=dtype)
    out = step.run(causal=False)
    assert out.dtype == dtype
    error = (out.double() - step.expected(causal=False)).norm() / step.expected(causal=False).norm()
    assert error < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("causal", [False, True])
def test_nan_in_padded_rows_leaks_into_no_row_and_they_become_zeros(causal: bool) -> None:
    step = make_step([3, 4], padding=5)
    out = step.run(causal)
    assert torch.equal(out[7:], torch.zeros_like(out[7:]))
    torch.testing.assert_close(out[:7], step.expected(causal), rtol=1e-10, atol=1e-12)


def test_a_step_without_sequences_is_all_padding() -> None:
    step = make_step([], padding=3)
    assert torch.equal(step.run(causal=False), torch.zeros(3, 4, 8, dtype=torch.float64))


def test_values_may_have_another_size_and_out_strides_of_its_own() -> None:
    step = make_step([2, 3], value_size=5)
    out = torch.full((4, 5, 5), float("nan"), dtype=torch.float64).transpose(0, 1)
    torch.testing.assert_close(step.run(False, out), step.expected(False), rtol=1e-10, atol=1e-12)


def test_opcheck() -> None:
    step = make_step([3, 2], padding=2)
    arguments = (step.q.nan_to_num(), step.k.nan_to_num(), step.v.nan_to_num(), torch.zeros(7, 4, 8).double())
    with use_context(step.context):
        torch.library.opcheck(packed_attention, (*arguments, SCALE, True))


# ---- the context


def test_the_context_says_where_sequences_begin() -> None:
    context = PackedContext.build(seq_lens=[3, 0, 2])
    assert (context.num_seqs, context.num_tokens) == (3, 5)
    assert (context.seq_start_loc.tolist(), context.seq_start_loc.dtype) == ([0, 3, 3, 5], torch.int32)
    assert (context.positions().tolist(), context.positions().dtype) == ([0, 1, 2, 0, 1], torch.int64)
    assert PackedContext(seq_start_loc=context.seq_start_loc).seq_lens_host == (3, 0, 2)
    assert PackedContext.build(seq_lens=[]).positions().tolist() == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seq_start_loc": torch.zeros(0)}, r"begin with 0, got shape \[0\]"),
        ({"seq_start_loc": torch.zeros(2, 2)}, r"begin with 0, got shape \[2, 2\]"),
        ({"seq_start_loc": torch.tensor([0, 3, 5]), "seq_lens_host": (3,)}, r"speaks of 2 sequences, .* is \(3,\)"),
        ({"seq_start_loc": torch.tensor([0, 3, 2])}, r"is \(3, -1\); give one length a sequence, none negative"),
        ({"seq_start_loc": torch.tensor([1, 3])}, r"begin with 0, got \[1, 3\]"),
    ],
)
def test_fields_that_disagree_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        PackedContext(**fields)


def test_a_negative_length_is_refused() -> None:
    with pytest.raises(InputError, match=r"is \(3, -1\)"):
        PackedContext.build(seq_lens=[3, -1])


# ---- the checks


def test_needs_a_context_of_its_kind() -> None:
    step = make_step([2])
    with pytest.raises(ContextError, match="PackedContext and got no context"):
        packed_attention(step.q, step.k, step.v, torch.empty_like(step.q), SCALE, False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: {"q": s.q[0]}, r"expected \[num_tokens, heads, head_size\].* got q \[4, 8\]"),
        (lambda s: {"q": s.q[:, :3], "k": s.k[:, :2], "v": s.v[:, :2]}, "a multiple of the key heads"),
        (lambda s: {"k": s.k[:2], "v": s.v[:2]}, "a key and a value for each of the 3 query tokens.*use_cache=False"),
        (lambda s: {"k": s.k[..., :4]}, r"k with head_size 8.* got .*k \[3, 4, 4\]"),
        (lambda s: {"v": s.v[:, :2]}, r"v with 4 heads.* got .*v \[3, 2, 8\]"),
        (lambda s: {"context": PackedContext.build(seq_lens=[4])}, "q has 3 tokens, .* sequences have 4"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change, message: str) -> None:
    step = make_step([3])
    with pytest.raises(InputError, match=message):
        dataclasses.replace(step, **change(step)).run(causal=False)


def test_out_of_another_shape_is_refused() -> None:
    step = make_step([3])
    with pytest.raises(InputError, match=r"out \[3, 4, 8\]; got .*out \[2, 4, 8\]"):
        step.run(False, torch.empty(2, 4, 8, dtype=torch.float64))
