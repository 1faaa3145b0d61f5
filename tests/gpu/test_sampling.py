"""Drawing tokens on the device: the Triton kernel at the sizes of a server, against loops, and in a captured graph."""

from __future__ import annotations

import pytest
import torch

from piecework.ops.sampling import sample

from ..ops.sampling_reference import Columns, check, columns

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_only")]

CUTS = [(0, 1.0), (0, 0.9), (50, 1.0), (1000, 0.8)]
draw = torch.ops.piecework.triton_sample.default


def on_device(arguments: Columns) -> torch.Tensor:
    return draw(*(argument.cuda() for argument in arguments)).cpu()


def rows(num_rows: int, vocab_size: int, dtype: torch.dtype, seed: int) -> Columns:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(num_rows, vocab_size, generator=generator) * 3).to(dtype)
    numbers = torch.rand(num_rows, generator=generator).tolist()
    heats = [0.0, 0.7, 1.0, 1.3]
    uniform, temperature, top_k, top_p = columns(
        *((number, heats[i % 4], *CUTS[i % 3 + i % 2]) for i, number in enumerate(numbers))
    )
    return logits, uniform, temperature, top_k, top_p


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 128256), (12, 128256), (8, 151669), (33, 1000), (3, 1)])
def test_draws_what_is_at_the_number(num_rows: int, vocab_size: int, dtype: torch.dtype) -> None:
    arguments = rows(num_rows, vocab_size, dtype, seed=num_rows)
    check(on_device(arguments), arguments)


def test_a_row_gets_the_same_in_any_company() -> None:
    logits, *others = rows(40, 128256, torch.float32, seed=3)
    together = on_device((logits, *others))
    for row in (0, 1, 17, 39):
        alone = on_device((logits[row : row + 1], *(column[row : row + 1] for column in others)))
        assert alone == together[row]


def test_a_capture_draws_by_the_numbers_of_each_replay() -> None:
    first, second = rows(4, 5000, torch.float32, seed=1), rows(4, 5000, torch.float32, seed=2)
    static = [argument.cuda() for argument in first]
    draw(*static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = draw(*static)
    for arguments in (second, first):
        for target, source in zip(static, arguments, strict=True):
            target.copy_(source)
        graph.replay()
        check(out.cpu(), arguments)
        assert (out == sample.native(*static)).sum() >= 3
