"""What captures of the toy decoder take, give back, and do at startup."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import piecework as pw
from piecework.graphs.tape import TapeDevice

from .toy_captures import (
    BACKENDS,
    BODIES,
    Slots,
    Toy,
    plain,
    runtime_of,
    step,
    x_of,
)


@pytest.mark.parametrize(("backend", "compiler"), BACKENDS)
def test_a_cap_on_captures_evicts_the_least_useful(backend: str, compiler: str) -> None:
    model, reference = Toy(), Toy()
    runtime = runtime_of(model, backend, compiler, options={"max_captures": 2})
    for seed in range(400):
        num_tokens = (1, 3)[seed % 2] if seed < 40 else (3, 8)[seed % 2]
        torch.testing.assert_close(step(runtime, num_tokens, seed), plain(reference, num_tokens, seed))
    captured = {e["bucket"] for e in runtime.explain().as_dict()["entries"] if e["captured"]}
    assert captured == {4, 8}
    assert runtime.counters["evictions"] == 1


def test_a_budget_too_small_for_one_capture_says_so() -> None:
    model, reference = Toy(), Toy()
    runtime = runtime_of(model, "full", options={"cuda_graph_memory_budget": 1})
    for seed in range(4):
        torch.testing.assert_close(step(runtime, 3, seed), plain(reference, 3, seed))
    assert any(
        reason.startswith("cuda_graph_memory_budget: expected at least") for reason in runtime.counters["fallbacks"]
    )
    assert runtime.counters["captures"] == 1


@pytest.mark.parametrize(("backend", "compiler"), BACKENDS)
def test_compaction_keeps_every_capture(backend: str, compiler: str) -> None:
    model, reference = Toy(), Toy()
    runtime = runtime_of(model, backend, compiler)
    for seed, num_tokens in enumerate((1, 3, 8)):
        step(runtime, num_tokens, seed)
        plain(reference, num_tokens, seed)
    before = BODIES[0]
    with runtime.counters.expect(captures=3, replays=0):
        runtime.compact()
    assert BODIES[0] == before
    with runtime.counters.expect(captures=0, replays=3):
        for seed, num_tokens in enumerate((1, 3, 8)):
            torch.testing.assert_close(step(runtime, num_tokens, 5 + seed), plain(reference, num_tokens, 5 + seed))


@pytest.mark.parametrize(("backend", "compiler"), BACKENDS)
def test_close_gives_everything_back(backend: str, compiler: str) -> None:
    runtime = runtime_of(Toy(), backend, compiler)
    for num_tokens in (1, 3, 8, 8):
        step(runtime, num_tokens)
    captures = runtime._captures
    assert captures.pool_bytes > 0
    assert captures.buffer_bytes > 0
    runtime.close()
    gc.collect()
    assert captures.pool_bytes == 0
    assert captures.buffer_bytes == 0


# Startup.


def no_tokens() -> dict[str, Any]:
    return {"example_inputs": {"x": x_of(2)}, "example_context": Slots(torch.zeros(0, dtype=torch.int64))}


@pytest.mark.parametrize(("backend", "compiler"), BACKENDS)
def test_eager_startup_captures_everything_on_nothing_but_padding(backend: str, compiler: str) -> None:
    model, reference = Toy(), Toy()
    runtime = runtime_of(model, backend, compiler, options={"startup": "eager"}, **no_tokens())
    assert runtime.counters["captures"] == 6
    assert runtime.counters["in_step_seconds"] == 0
    for left, right in zip(model.buffers(), reference.buffers(), strict=True):
        assert torch.equal(left[:-1], right[:-1])  # the dump row took the padding
    with runtime.counters.expect(captures=0, replays=4):
        for seed, num_tokens in enumerate((1, 3, 8, 2)):
            torch.testing.assert_close(step(runtime, num_tokens, seed), plain(reference, num_tokens, seed))


def test_eager_startup_without_a_context_says_what_to_pass() -> None:
    with pytest.raises(pw.InputError, match="example_context"):
        runtime_of(Toy(), "full", options={"startup": "eager"}, example_inputs={"x": x_of(2)})


@pytest.mark.parametrize(("backend", "compiler"), BACKENDS)
def test_a_lazy_start_captures_the_largest_bucket_first_where_that_saves_memory(
    backend: str, compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TapeDevice, "wants_largest_first", True)
    model, reference = Toy(), Toy()
    runtime = runtime_of(model, backend, compiler, **no_tokens())
    with runtime.counters.expect(captures=2, replays=0):
        torch.testing.assert_close(step(runtime, 1, 0), plain(reference, 1, 0))
    captured = [event.scope.bucket for event in runtime.events if event.kind == "capture"]
    assert captured == [8, 2]
    with runtime.counters.expect(captures=0, replays=1):
        torch.testing.assert_close(step(runtime, 7, 1), plain(reference, 7, 1))
    with runtime.counters.expect(captures=1, replays=0):  # the step is of the largest bucket itself
        torch.testing.assert_close(step(runtime, 7, 2, "prefill"), plain(reference, 7, 2))


def test_a_context_that_fits_no_padding_costs_the_largest_bucket_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TapeDevice, "wants_largest_first", True)
    model, reference = Toy(), Toy()
    runtime = runtime_of(model, "full", **{**no_tokens(), "example_context": object()})
    torch.testing.assert_close(step(runtime, 1, 0), plain(reference, 1, 0))
    assert any("largest bucket could not be captured first" in reason for reason in runtime.counters["fallbacks"])
    assert runtime.counters["captures"] == 1
