"""The tensors of a step, worked out by hand."""

from __future__ import annotations

import pytest
import torch

from piecework.runtime.engine.batch import step_inputs
from piecework.runtime.engine.detokenizer import Detokenizer
from piecework.runtime.engine.params import SamplingParams
from piecework.runtime.engine.request import Request
from piecework.runtime.engine.scheduler import Chunk
from piecework.runtime.engine.stop import StopStrings

CPU = torch.device("cpu")


def request(prompt: list[int], blocks: list[int]) -> Request:
    return Request(
        request_id="",
        prompt=None,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(),
        max_new_tokens=100,
        stop_token_ids=frozenset(),
        detokenizer=Detokenizer(lambda ids: ""),
        stop_strings=StopStrings([]),
        blocks=blocks,
    )


def test_a_chunk_beside_a_decode() -> None:
    long, short = request([10, 11, 12, 13, 14, 15], [7, 3]), request([20, 21], [5])
    step = step_inputs(
        [Chunk(request=long, num_tokens=3), Chunk(request=short, num_tokens=2)], block_size=4, device=CPU
    )
    assert step.inputs["input_ids"].tolist() == [10, 11, 12, 20, 21]
    assert step.inputs["positions"].tolist() == [0, 1, 2, 0, 1]
    assert step.last_rows.tolist() == [4]  # the long prompt has three tokens to come
    assert step.context.slot_mapping.tolist() == [28, 29, 30, 20, 21]
    assert step.context.block_table.tolist() == [[7], [5]]  # only blocks in use

    long.num_computed, short.num_computed = 3, 2
    short.add(99, None)
    step = step_inputs(
        [Chunk(request=long, num_tokens=3), Chunk(request=short, num_tokens=1)], block_size=4, device=CPU
    )
    assert step.inputs["input_ids"].tolist() == [13, 14, 15, 99]
    assert step.inputs["positions"].tolist() == [3, 4, 5, 2]
    assert step.last_rows.tolist() == [2, 3]
    assert step.context.slot_mapping.tolist() == [31, 12, 13, 22]
    assert step.context.seq_lens.tolist() == [6, 3]
    assert step.context.block_table.tolist() == [[7, 3], [5, 0]]


def test_a_preempted_request_runs_its_answer_again() -> None:
    again = request([10, 11], [2, 1])
    for token in (30, 31, 32):
        again.add(token, None)
    step = step_inputs([Chunk(request=again, num_tokens=3)], block_size=4, device=CPU)
    assert step.inputs["input_ids"].tolist() == [10, 11, 30]
    assert step.last_rows.tolist() == []
    again.num_computed = 3
    step = step_inputs([Chunk(request=again, num_tokens=2)], block_size=4, device=CPU)
    assert step.inputs["input_ids"].tolist() == [31, 32]
    assert step.inputs["positions"].tolist() == [3, 4]
    assert step.last_rows.tolist() == [1]


@pytest.mark.parametrize(
    ("num_tokens", "max_blocks", "width"),
    [(4, None, 1), (9, None, 4), (16, None, 4), (17, None, 8), (17, 6, 6), (24, 6, 6), (4, 1, 1)],
)
def test_block_tables_have_few_widths(num_tokens: int, max_blocks: int | None, width: int) -> None:
    """Powers of two, but no more blocks than a request can have: the runtime has no room for them."""
    long = request([5] * num_tokens, list(range(1, 7)))
    step = step_inputs(
        [Chunk(request=long, num_tokens=num_tokens)], block_size=4, device=CPU, num_blocks=7, max_blocks=max_blocks
    )
    used = -(-num_tokens // 4)
    assert step.context.block_table.tolist() == [[*range(1, used + 1), *[0] * (width - used)]]
    assert (step.context.num_blocks, step.context.block_size) == (7, 4)
    step.context.check()
