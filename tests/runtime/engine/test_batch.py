"""The inputs of a step, worked out by hand."""

from __future__ import annotations

import torch

from piecework.runtime.engine.batch import Request, step_inputs

CPU = torch.device("cpu")


def test_a_prefill_and_then_a_decode_step() -> None:
    long = Request(index=0, prompt_token_ids=[10, 11, 12, 13, 14], max_new_tokens=4, blocks=[7, 3])
    short = Request(index=1, prompt_token_ids=[20, 21], max_new_tokens=1, blocks=[5])
    assert (long.num_stored, short.num_stored) == (8, 2)

    step = step_inputs([long, short], block_size=4, device=CPU)
    assert step.inputs["input_ids"].tolist() == [10, 11, 12, 13, 14, 20, 21]
    assert step.inputs["positions"].tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert step.last_rows.tolist() == [4, 6]
    assert step.context.slot_mapping.tolist() == [28, 29, 30, 31, 12, 20, 21]
    assert step.context.block_table.tolist() == [[7, 3], [5, 0]]

    long.add(99, frozenset({1}))
    short.add(98, frozenset({1}))
    assert (long.finish_reason, short.finish_reason) == (None, "length")
    step = step_inputs([long], block_size=4, device=CPU)
    assert step.inputs["input_ids"].tolist() == [99]
    assert step.inputs["positions"].tolist() == [5]
    assert step.context.slot_mapping.tolist() == [13]
    assert step.context.seq_lens.tolist() == [6]
    long.add(97, frozenset({1}))
    assert long.pending == [97]


def test_only_blocks_in_use_are_in_the_table() -> None:
    request = Request(index=0, prompt_token_ids=[1, 2, 3], max_new_tokens=90, blocks=[9, 8, 7, 6])
    assert step_inputs([request], block_size=4, device=CPU).context.block_table.tolist() == [[9]]


def test_an_end_token_stops_and_belongs_to_the_answer() -> None:
    request = Request(index=0, prompt_token_ids=[5], max_new_tokens=3)
    request.add(4, frozenset({1, 2}))
    request.add(2, frozenset({1, 2}))
    assert (request.token_ids, request.finish_reason) == ([4, 2], "stop")


def test_an_end_token_in_the_last_place_is_a_stop() -> None:
    request = Request(index=0, prompt_token_ids=[5], max_new_tokens=1)
    request.add(1, frozenset({1}))
    assert request.finish_reason == "stop"
