"""The Triton kernels that draw tokens under Triton's interpreter, on the CPU.

Not collected by its name: `test_sampling.py` runs it in a process of its own, since Triton decides when it is imported
whether it interprets. By hand: `TRITON_INTERPRET=1 pytest tests/ops/sampling_interpreted.py`.
"""

from __future__ import annotations

import os

import pytest
import torch
import triton
from hypothesis import given, settings

from piecework.errors import InputError
from piecework.ops.sampling import sample
from piecework.ops.triton import sampling

from .sampling_reference import Columns, check, columns, drawings

assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
draw = torch.ops.piecework.triton_sample.default


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a short row takes several."""
    monkeypatch.setattr(sampling, "_CHUNK", 64)
    monkeypatch.setattr(sampling, "_SEARCH_BLOCK", 32)


def test_this_is_the_interpreter() -> None:
    assert not isinstance(sampling.draw_rows_pick, triton.runtime.JITFunction)


@given(drawings())
@settings(max_examples=30, deadline=None)
def test_draws_what_is_at_the_number(arguments: Columns) -> None:
    check(draw(*arguments), arguments)


@given(drawings())
@settings(max_examples=12, deadline=None)
def test_candidates_that_do_not_fit_are_searched_among_all_logits(arguments: Columns) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "_CAPACITY", 0)
        check(draw(*arguments), arguments)


@pytest.mark.parametrize("capacity", [299, 300])
def test_ties_that_just_do_not_fit(capacity: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_CAPACITY", capacity)
    logits = torch.full((6, 300), 2.5)
    rows = [((place + 0.5) / 300, 0.7, 0, 1.0) for place in (0, 1, 63, 64, 255, 299)]
    assert draw(logits, *columns(*rows)).tolist() == [0, 1, 63, 64, 255, 299]


@pytest.mark.parametrize("vocab_size", [1, 2, 63, 64, 65, 129])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_edges_of_every_limit(vocab_size: int, dtype: torch.dtype) -> None:
    """All of the vocabulary, one token, next to no share, and numbers at both ends."""
    limits = [
        (number, heat, top_k, top_p)
        for number in (0.0, 0.5, 1 - 2**-53)
        for heat in (1e-5, 1.0, 50.0)
        for top_k, top_p in ((vocab_size, 1.0), (vocab_size + 1, 0.7), (1, 1.0), (0, 1e-12), (2, 1 - 2**-53))
    ]
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn(len(limits), vocab_size, generator=generator) * 2).to(dtype)
    check(draw(logits, *columns(*limits)), (logits, *columns(*limits)))


def test_one_finite_logit_is_drawn_whatever_the_limits() -> None:
    logits = torch.full((8, 200), -torch.inf)
    logits[:, 131] = -1e30
    rows = [(number, heat, top_k, 0.9) for number in (0.0, 1 - 2**-53) for heat in (0.0, 1.0) for top_k in (0, 7)]
    assert draw(logits, *columns(*rows)).tolist() == [131] * 8


# numpy's; on a GPU too it is -inf, which weighs nothing.
@pytest.mark.filterwarnings("ignore:overflow encountered in (subtract|multiply):RuntimeWarning")
def test_logits_of_both_ends_of_float32() -> None:
    logits = torch.tensor([[-3e38, 3e38, 0.0, 3e38]]).expand(3, -1)
    assert draw(logits, *columns((0.4, 1.0, 0, 1.0), (0.6, 1e300, 0, 1.0), (0.999, 0.1, 0, 1.0))).tolist() == [1, 3, 3]


def test_what_top_k_leaves_out_is_never_drawn_below_the_window() -> None:
    """The third of the largest ones is far more than a window below the peak."""
    logits = torch.tensor([[0.0, 90.0, -50.0, 89.0, 10.0]]).expand(2, -1)
    assert draw(logits, *columns((1 - 2**-53, 1.0, 3, 1.0), (0.0, 1.0, 3, 1.0))).tolist() == [3, 1]


def test_another_token_than_the_native_ones_is_rare() -> None:
    """And only where the number is close to where a token ends, as the test above wants."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 300, generator=generator) * 3
    numbers = torch.rand(40, generator=generator).tolist()
    arguments = (logits, *columns(*((number, 0.8, 50, 0.95) for number in numbers)))
    drawn = draw(*arguments)
    assert check(drawn, arguments) >= 38
    assert (drawn == sample.native(*arguments)).sum() >= 38


def test_a_vocabulary_of_real_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_CHUNK", 4096)
    monkeypatch.setattr(sampling, "_SEARCH_BLOCK", 2048)
    logits = torch.randn(2, 128256, generator=torch.Generator().manual_seed(1)) * 2
    logits[1] = logits[1].bfloat16()  # hundreds of each value
    arguments = (logits, *columns((0.37, 1.0, 0, 1.0), (0.81, 1.0, 1000, 0.8)))
    check(draw(*arguments), arguments)


@pytest.mark.parametrize("top_k", [0, 3, 9])
def test_of_equal_logits_the_lower_ids_come_first(top_k: int) -> None:
    """Nine equal ones among lower ones: every ninth of the numbers is the next of them."""
    ids = [3, 63, 64, 65, 128, 190, 191, 192, 299]
    logits = torch.full((1, 300), -torch.inf).index_fill(1, torch.tensor(ids), 5.0)
    kept = ids[: top_k or 9]
    rows = [((place + 0.5) / len(kept), 1.0, top_k, 1.0) for place in range(len(kept))]
    assert draw(logits.expand(len(rows), -1), *columns(*rows)).tolist() == kept


def test_top_p_may_end_among_equal_logits() -> None:
    logits = torch.zeros(1, 10).expand(5, -1)
    rows = [(number, 1.0, 0, 0.35) for number in (0.0, 0.26, 0.51, 0.76, 0.999)]
    assert draw(logits, *columns(*rows)).tolist() == [0, 1, 2, 3, 3]


def test_zeros_of_both_signs_are_equal() -> None:
    logits = torch.tensor([[0.0, -0.0, 0.0, -0.0]]).expand(4, -1)
    assert draw(logits, *columns(*((place / 4 + 0.1, 1.0, 0, 1.0) for place in range(4)))).tolist() == [0, 1, 2, 3]


def test_the_ends_of_the_numbers_draw_the_ends_of_the_order() -> None:
    logits = torch.tensor([[2.0, -torch.inf, 1.0, 3.0, -torch.inf, -200.0]]).expand(4, -1)
    ends = ((0.0, 1.0, 0, 1.0), (1 - 2**-53, 1.0, 0, 1.0), (1 - 2**-53, 1.0, 2, 1.0), (1 - 2**-53, 1.0, 0, 0.9))
    assert draw(logits, *columns(*ends)).tolist() == [3, 2, 0, 0]


def test_temperature_0_takes_the_first_of_the_largest() -> None:
    logits = torch.full((3, 200), -4.0)
    logits[0, [9, 70, 199]] = 1.0
    logits[1] = -torch.inf
    logits[2, 199] = torch.inf
    assert draw(logits, *columns(*[(0.99, 0.0, 5, 0.5)] * 3)).tolist() == [9, 0, 199]


def test_rows_of_other_memory_and_other_columns() -> None:
    logits = torch.randn(4, 90, generator=torch.Generator().manual_seed(2))
    plain = columns(*((0.1 + 0.2 * row, 1.0, 20, 0.9) for row in range(4)))
    want = draw(logits, *plain)
    wide = torch.full((4, 200), 50.0)
    wide[:, 7:97] = logits
    integers = (plain[0], plain[1], plain[2].to(torch.int32), plain[3])
    apart = tuple(torch.stack((column, column + 1), -1)[:, 0] for column in plain)
    for arguments in (
        (wide[:, 7:97], *plain),
        (logits.T.contiguous().T, *plain),
        (logits, *integers),
        (logits, *apart),
    ):
        assert torch.equal(draw(*arguments), want)
    for row in range(4):
        assert draw(logits[row : row + 1], *(column[row : row + 1] for column in plain)) == want[row]
    assert draw(logits[:0], *(column[:0] for column in plain)).shape == (0,)


def test_logits_that_are_no_numbers_give_some_token() -> None:
    logits = torch.tensor([[torch.nan] * 5, [1.0, torch.nan, 3.0, 2.0, -torch.nan], [torch.inf, 1.0, torch.inf, 0, 0]])
    for heat in (0.0, 1.0):
        drawn = draw(logits, *columns(*[(0.5, heat, 3, 0.9)] * 3))
        assert ((drawn >= 0) & (drawn < 5)).all()


def test_shapes_are_checked() -> None:
    with pytest.raises(InputError, match=r"sample: top_k: expected \[2\] on cpu"):
        draw(torch.zeros(2, 3), *(torch.ones(size, dtype=torch.float64) for size in (2, 2, 1, 2)))


def test_the_operator_is_sound() -> None:
    torch.library.opcheck(draw, (torch.randn(3, 40), *columns(*[(0.5, 1.0, 3, 0.9)] * 3)))
