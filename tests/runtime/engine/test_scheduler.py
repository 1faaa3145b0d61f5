"""Who runs in which step, worked out by hand; and for any requests, that all come to their end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecework.phases import Phase
from piecework.runtime.engine.block_manager import BlockManager
from piecework.runtime.engine.detokenizer import Detokenizer
from piecework.runtime.engine.params import SamplingParams
from piecework.runtime.engine.request import Request
from piecework.runtime.engine.scheduler import Schedule, Scheduler
from piecework.runtime.engine.stop import StopStrings


def request(name: str, num_prompt: int, max_new_tokens: int = 100) -> Request:
    return Request(
        request_id=name,
        prompt=None,
        prompt_token_ids=(5,) * num_prompt,
        params=SamplingParams(),
        max_new_tokens=max_new_tokens,
        stop_token_ids=frozenset(),
        detokenizer=Detokenizer(lambda ids: ""),
        stop_strings=StopStrings([]),
    )


def scheduler(
    *requests: Request, num_blocks: int = 100, block_size: int = 4, seqs: int = 8, tokens: int = 8, chunked: bool = True
) -> tuple[Scheduler, BlockManager]:
    blocks = BlockManager(num_blocks=num_blocks, block_size=block_size)
    made = Scheduler(blocks, max_num_seqs=seqs, max_num_batched_tokens=tokens, enable_chunked_prefill=chunked)
    for each in requests:
        made.add(each)
    return made, blocks


def run(schedule: Schedule | None, scheduler: Scheduler) -> tuple[str, dict[str, int]]:
    """What the engine does with a step, and what the step was: its phase and the tokens of each request."""
    assert schedule is not None
    told = str(schedule.phase), {chunk.request.request_id: chunk.num_tokens for chunk in schedule.chunks}
    for chunk in schedule.chunks:
        if chunk.is_last:
            chunk.request.add(9, None)
            if chunk.request.finish_reason is not None:
                scheduler.remove(chunk.request)
        chunk.request.num_computed += chunk.num_tokens
    return told


def steps(scheduler: Scheduler, count: int) -> list[tuple[str, dict[str, int]]]:
    return [run(scheduler.schedule(), scheduler) for _ in range(count)]


def test_prompts_are_cut_into_chunks_and_decodes_go_on_beside_them() -> None:
    made, blocks = scheduler(request("a", 5), request("b", 13), request("c", 1))
    assert steps(made, 5) == [
        ("prefill", {"a": 5, "b": 3}),
        ("prefill", {"a": 1, "b": 7}),
        ("prefill", {"a": 1, "b": 3, "c": 1}),
        ("decode", {"a": 1, "b": 1, "c": 1}),
        ("decode", {"a": 1, "b": 1, "c": 1}),
    ]
    # 5 + 4, 13 + 2 and 1 + 2 tokens are in the cache.
    assert [len(each.blocks) for each in made.running] == [3, 4, 1]
    assert blocks.num_free_blocks == 100 - 8
    made.add(request("d", 1))
    assert steps(made, 1) == [("prefill", {"a": 1, "b": 1, "c": 1, "d": 1})]


def test_without_chunks_a_prompt_waits_until_it_fits() -> None:
    made, _ = scheduler(request("a", 5, 2), request("b", 8), request("c", 1), chunked=False)
    # c could run beside a, but came after b; and b needs all 8 tokens of a step.
    assert steps(made, 4) == [
        ("prefill", {"a": 5}),
        ("decode", {"a": 1}),
        ("prefill", {"b": 8}),
        ("prefill", {"b": 1, "c": 1}),
    ]


def test_no_more_requests_than_allowed() -> None:
    made, _ = scheduler(request("a", 1, 2), request("b", 1, 3), request("c", 1), seqs=2, tokens=2)
    assert steps(made, 4) == [
        ("prefill", {"a": 1, "b": 1}),
        ("decode", {"a": 1, "b": 1}),
        ("prefill", {"b": 1, "c": 1}),
        ("decode", {"c": 1}),
    ]


def test_more_requests_than_blocks_wait() -> None:
    made, blocks = scheduler(*(request(name, 4, 1) for name in "abc"), num_blocks=2)
    assert steps(made, 2) == [("prefill", {"a": 4, "b": 4}), ("prefill", {"c": 4})]
    assert (made.schedule(), blocks.num_free_blocks) == (None, 2)


def test_the_newest_is_preempted_and_comes_back_first_with_its_tokens() -> None:
    a, b, c = request("a", 4, 6), request("b", 3), request("c", 2)
    made, blocks = scheduler(a, b, num_blocks=3)
    assert steps(made, 2) == [("prefill", {"a": 4, "b": 3}), ("decode", {"a": 1, "b": 1})]
    made.add(c)
    # a has two blocks by now. b outgrows its block and finds none: it is the newest itself.
    assert steps(made, 1) == [("decode", {"a": 1})]
    assert (list(b.blocks), b.num_computed, b.num_preemptions, made.num_preemptions) == ([], 0, 1, 1)
    assert list(made.waiting) == [b, c]
    # It needs two blocks for 3 + 2 tokens and there is one; c, which would fit, waits behind it.
    assert steps(made, 3) == [("decode", {"a": 1})] * 3
    assert a.finish_reason == "length"
    assert steps(made, 2) == [("prefill", {"b": 5, "c": 2}), ("decode", {"b": 1, "c": 1})]
    assert (b.token_ids, blocks.num_free_blocks) == ([9] * 4, 0)


def test_an_older_request_takes_the_blocks_of_a_newer_one() -> None:
    a, b = request("a", 4), request("b", 8)
    made, blocks = scheduler(a, b, num_blocks=3, seqs=6, tokens=6)
    assert steps(made, 1) == [("prefill", {"a": 4, "b": 2})]
    assert blocks.num_free_blocks == 0
    assert steps(made, 1) == [("decode", {"a": 1})]
    assert (list(made.waiting), b.num_preemptions, len(a.blocks)) == ([b], 1, 2)


def test_the_next_step_is_the_same_until_it_has_run() -> None:
    made, blocks = scheduler(request("a", 4), request("b", 6), num_blocks=4)
    steps(made, 2)
    first, free = made.schedule(), blocks.num_free_blocks
    assert first == made.schedule()
    assert blocks.num_free_blocks == free


def test_a_removed_request_leaves_no_block() -> None:
    a, b = request("a", 4), request("b", 6)
    made, blocks = scheduler(a, b, seqs=1)
    steps(made, 1)
    for each in (a, b, a):
        made.remove(each)
    assert (made.schedule(), blocks.num_free_blocks) == (None, 100)


def test_a_request_that_never_fits_is_our_mistake() -> None:
    made, _ = scheduler(request("a", 4), num_blocks=1)
    steps(made, 1)
    with pytest.raises(AssertionError, match="does not fit into the cache alone"):
        made.schedule()


@given(
    requests=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 8), st.integers(0, 20)), min_size=1, max_size=12),
    num_blocks=st.integers(1, 12),
    block_size=st.integers(1, 5),
    seqs=st.integers(1, 5),
    spare_tokens=st.integers(0, 10),
    chunked=st.booleans(),
)
def test_every_request_comes_to_its_end(
    requests: Sequence[tuple[int, int, int]],
    num_blocks: int,
    block_size: int,
    seqs: int,
    spare_tokens: int,
    chunked: bool,
) -> None:
    """`requests`: prompt length, answer length and the step in which it comes."""
    made = {
        f"{i}": (request(f"{i}", num_prompt, num_new), arrives)
        for i, (num_prompt, num_new, arrives) in enumerate(requests)
        if num_prompt + num_new - 1 <= num_blocks * block_size
    }
    tokens = max(seqs + spare_tokens, 0 if chunked else 20)
    engine, blocks = scheduler(num_blocks=num_blocks, block_size=block_size, seqs=seqs, tokens=tokens, chunked=chunked)
    for step in range(10_000):
        for each, arrives in made.values():
            if arrives == step:
                engine.add(each)
        schedule = engine.schedule()
        if schedule is None:
            if step > 20:
                break
            continue
        assert len(schedule.chunks) <= seqs
        assert sum(chunk.num_tokens for chunk in schedule.chunks) <= tokens
        assert all(chunk.num_tokens >= 1 for chunk in schedule.chunks)
        held = [block for each in engine.running for block in each.blocks]
        assert len(set(held)) == len(held) == num_blocks - blocks.num_free_blocks
        assert not any(each.blocks for each in engine.waiting)
        chunks = {chunk.request.request_id: chunk for chunk in schedule.chunks}
        for each in engine.running:
            assert len(each.blocks) == blocks.blocks_for(each.num_tokens)
            if not each.is_prefilling:  # no decode is ever left out
                assert chunks[each.request_id].num_tokens == each.num_pending == 1
        if schedule.phase is Phase.DECODE:
            assert all(chunk.num_tokens == 1 and chunk.is_last for chunk in schedule.chunks)
        # Who came first runs, and the queue behind is in order too, but for those that came in the same step.
        order = [made[each.request_id][1] for each in (*engine.running, *engine.waiting)]
        assert order == sorted(order)
        run(schedule, engine)
    assert {each.finish_reason for each, _ in made.values()} <= {"length"}
    assert all(len(each.token_ids) == each.max_new_tokens for each, _ in made.values())
    assert blocks.num_free_blocks == num_blocks
