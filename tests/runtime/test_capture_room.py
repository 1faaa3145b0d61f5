"""The pool of a runtime's captures: its budget, evictions, compaction, and what is counted of them."""

from __future__ import annotations

import dataclasses
import gc

import pytest
import torch

import piecework as pw
from piecework.runtime.capture_slot import Slot

from .function_captures import ALL, EAGER, WIDTH, Model, runtime_of, x_of


def test_the_time_of_a_capture_that_failed_is_counted() -> None:
    runtime = runtime_of(Model(lambda m, x: x * x.sum().item()), "full")
    runtime.run("decode", {"x": x_of()})
    (event,) = [event for event in runtime.events if event.kind == "capture_failed"]
    assert 0 < event.seconds <= runtime.counters["in_step_seconds"]


def test_a_compaction_is_counted_once_and_its_captures_where_they_belong() -> None:
    runtime = runtime_of(Model(lambda m, x: x * 2), "full")
    for num_tokens in (1, 3):
        runtime.run("decode", {"x": x_of(num_tokens)})
    before = runtime.counters["in_step_seconds"]
    runtime.compact()
    assert runtime.counters["in_step_seconds"] == before
    shares = runtime.counters.by_phase_and_bucket()
    assert [shares["decode", bucket]["captures"] for bucket in (2, 4)] == [2, 2]


def test_an_eviction_is_counted_where_the_evicted_was() -> None:
    runtime = runtime_of(Model(lambda m, x: x * 2), "full", max_captures=1)
    for num_tokens in (1, *[3] * 20):
        runtime.run("decode", {"x": x_of(num_tokens)})
    shares = runtime.counters.by_phase_and_bucket()
    assert shares["decode", 2]["evictions"] == 1
    assert "evictions" not in shares["decode", 4]


@pytest.mark.parametrize("backend", ALL)
def test_what_is_evicted_is_released_and_a_compaction_takes_a_new_pool(backend: str) -> None:
    runtime = runtime_of(Model(lambda m, x: (x @ m.table).tanh() * 2, table=torch.eye(WIDTH)), backend, max_captures=1)
    room = runtime._captures._room
    for num_tokens in (1, *[3] * 20):
        runtime.run("decode", {"x": x_of(num_tokens)})
    assert room.pool.num_captures == 1
    old = room.pool
    runtime.compact()
    assert room.pool is not old
    assert (old.num_captures, old.num_bytes) == (0, 0)
    assert room.pool.num_captures == 1


def test_a_pool_over_its_budget_is_compacted_by_itself() -> None:
    """A bucket that needs more than the budget leaves the pool too large; it is made anew when that pays."""
    wide = lambda m, x: x.repeat(1, 64).tanh().sum(1, keepdim=True) + x  # noqa: E731
    runtime = runtime_of(Model(wide), "full", buckets=(2, 512), cuda_graph_memory_budget=16_384)
    runtime.run("decode", {"x": x_of(1)})
    runtime.run("decode", {"x": x_of(512)})
    for _ in range(1500):
        runtime.run("decode", {"x": x_of(1)})
    assert runtime.explain().as_dict()["memory"]["pool_bytes"] <= 16_384
    assert any(event.kind == "compact" for event in runtime.events)


@pytest.mark.parametrize("backend", EAGER)
def test_warming_up_what_is_captured_replays_nothing(backend: str) -> None:
    runtime = runtime_of(Model(lambda m, x: x * 2), backend, example_inputs={"x": x_of()})
    runtime.warm_up()
    with runtime.counters.expect(captures=0, replays=0):
        runtime.warm_up()


def test_a_step_with_more_requests_than_there_is_room_for_runs_uncaptured() -> None:
    @dataclasses.dataclass(frozen=True)
    class Requests:
        gain: torch.Tensor = pw.context_field(pad=0, slots={0: "requests"})

    runtime = runtime_of(Model(lambda m, x: x * 2), "full", context_sizes={"requests": 2})
    for num_requests in (1, 2, 3, 2):
        result = runtime.run("decode", {"x": x_of()}, Requests(torch.ones(num_requests)))
        torch.testing.assert_close(result, x_of() * 2)
    assert runtime.counters["fallbacks"] == {"the step has more requests than context_sizes": 1}
    assert runtime.counters["replays"] == 2


def test_a_pool_is_looked_at_again_when_a_compaction_had_to_wait() -> None:
    """Right after a compaction none is worth it, so that the pool stays too large at first."""
    wide = lambda m, x: x.repeat(1, 64).tanh().sum(1, keepdim=True) + x  # noqa: E731
    runtime = runtime_of(Model(wide), "full", buckets=(2, 512), cuda_graph_memory_budget=16_384)
    runtime.run("decode", {"x": x_of(1)})
    runtime.compact()
    runtime.run("decode", {"x": x_of(512)})
    assert runtime.explain().as_dict()["memory"]["pool_bytes"] > 16_384
    for _ in range(1500):
        runtime.run("decode", {"x": x_of(1)})
    assert runtime.explain().as_dict()["memory"]["pool_bytes"] <= 16_384


def test_sizes_that_gave_way_are_forgotten() -> None:
    runtime = runtime_of(
        Model(lambda m, x, y: x + y.sum(0)), "full", dynamic_dims={"x": {0: "tokens"}, "y": {0: "rows"}}
    )
    for num_rows in range(1, 12):
        for _ in range(70):
            runtime.run("decode", {"x": x_of(), "y": x_of(num_rows)})
    gc.collect()
    ours = [each for each in gc.get_objects() if type(each) is Slot and each.entry in runtime.entries]
    assert len(ours) == len(runtime._captures._slots) == 4


@pytest.mark.parametrize("backend", ALL)
def test_a_compaction_under_other_settings_captures_nothing_that_was_made_without_them(backend: str) -> None:
    runtime = runtime_of(Model(lambda m, x: (x @ m.table).float(), table=torch.rand(WIDTH, WIDTH)), backend)
    for _ in range(2):
        before = runtime.run("decode", {"x": x_of(3)}, copy=True)
    with torch.autocast("cpu", torch.bfloat16):
        lower = runtime.run("decode", {"x": x_of(3)}, copy=True)
        assert not torch.equal(lower, before)
        runtime.compact()
        for _ in range(2):
            assert torch.equal(runtime.run("decode", {"x": x_of(3)}), lower)
    for _ in range(2):
        assert torch.equal(runtime.run("decode", {"x": x_of(3)}), before)
    assert runtime.counters["captures"] == 4  # two, one of them again at the compaction, and the other at its next step
