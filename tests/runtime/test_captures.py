"""Captures as a runtime's user sees them, on the tape: what is counted, what is replayed, and what makes it stop.

The toy has `LAYERS` layers with one split op each, so a step calls split-op bodies `LAYERS` times, captured or not.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import piecework as pw
from piecework.graphs.buffers import StaticInputs
from piecework.graphs.piece import CompiledPiece

from .toy_captures import (
    BACKENDS,
    BODIES,
    LAYERS,
    SEGMENTS,
    WIDTH,
    Slots,
    Toy,
    plain,
    runtime_of,
    step,
    x_of,
)


@pytest.mark.parametrize(("backend", "compiler"), BACKENDS)
def test_counters_of_a_worked_out_trace(backend: str, compiler: str) -> None:
    model, reference = Toy(), Toy()
    runtime = runtime_of(model, backend, compiler)
    trace = [
        # tokens, phase, captures and replays that the step adds
        (3, "decode", 1, 0),  # bucket 4 appears
        (4, "decode", 0, 1),
        (1, "decode", 1, 0),  # bucket 2
        (2, "prefill", 1, 0),  # bucket 2 of another phase
        (3, "decode", 0, 1),
        (2, "prefill", 0, 1),
        (9, "decode", 0, 0),  # above the ladder: unpadded, uncaptured
        (8, "decode", 1, 0),
        (5, "decode", 0, 1),
    ]
    for seed, (num_tokens, phase, captures, replays) in enumerate(trace):
        before = BODIES[0]
        with runtime.counters.expect(captures=captures, replays=replays, steps=1):
            got = step(runtime, num_tokens, seed, phase)
        assert BODIES[0] - before == LAYERS
        torch.testing.assert_close(got, plain(reference, num_tokens, seed))
    counters = runtime.counters.as_dict()
    assert counters["evictions"] == 0
    assert counters["in_step_seconds"] > 0
    assert sum(counters["fallbacks"].values()) == 1  # the step above the ladder
    for left, right in zip(model.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(left[:-1], right[:-1])
    captured = [entry for entry in runtime.explain().as_dict()["entries"] if entry["captured"]]
    assert {(e["phase"], e["bucket"]): e["segments"] for e in captured} == dict.fromkeys(
        [("decode", 2), ("decode", 4), ("decode", 8), ("prefill", 2)], SEGMENTS[backend]
    )


@pytest.mark.parametrize(("backend", "compiler"), BACKENDS)
def test_capture_256_then_64_then_replay_256(backend: str, compiler: str) -> None:
    model = Toy()
    runtime = runtime_of(model, backend, compiler, options={"buckets": (64, 256)})
    step_of = lambda n, seed: runtime.run("decode", {"x": x_of(n, seed)}, Slots(torch.full((n,), -1)), copy=True)  # noqa: E731
    first = step_of(256, 1)
    step_of(64, 2)
    with runtime.counters.expect(captures=0, replays=3):
        assert torch.equal(step_of(256, 1), first)
        other = step_of(64, 2)
        again = step_of(256, 1)
    assert torch.equal(again, first)
    assert not torch.equal(other, first[:64])


@pytest.mark.parametrize(("backend", "compiler"), BACKENDS)
def test_padded_rows_hold_nan_under_the_debug_mode_and_do_not_leak(backend: str, compiler: str) -> None:
    model, reference = Toy(), Toy()
    runtime = runtime_of(model, backend, compiler, options={"debug_captures": True})
    for seed, num_tokens in enumerate((3, 3, 1, 5, 1, 8)):
        torch.testing.assert_close(step(runtime, num_tokens, seed), plain(reference, num_tokens, seed))


class Mean(nn.Module):
    """A model in which padded rows show in the others."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x.mean(0)


@pytest.mark.parametrize("backend", ["full", "breakable", "tc_piecewise"])
def test_padding_that_leaks_is_found_by_the_debug_mode(backend: str) -> None:
    runtime = runtime_of(Mean(), backend, options={"debug_captures": True})
    runtime.run("decode", {"x": x_of(4)})
    with pytest.raises(pw.CaptureError, match=r"output '': expected no NaN.*leak"):
        runtime.run("decode", {"x": x_of(3)})


@pytest.mark.parametrize("backend", ["full", "breakable", "tc_piecewise"])
def test_the_debug_mode_looks_at_what_a_replay_reads(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = runtime_of(Mean(), backend, options={"debug_captures": True})
    runtime.run("decode", {"x": x_of(4)})
    runtime.run("decode", {"x": x_of(4, 1)})
    fill = StaticInputs.fill

    def spoiled(self: Any, *arguments: Any) -> Any:
        tensors = fill(self, *arguments)
        tensors["x"][1] += 1
        return tensors

    monkeypatch.setattr(StaticInputs, "fill", spoiled)
    with pytest.raises(pw.CaptureError, match="input 'x': expected the step's values"):
        runtime.run("decode", {"x": x_of(4)})
    monkeypatch.setattr(StaticInputs, "fill", lambda self, bound, bucket: {"x": fill(self, bound, bucket)["x"].clone()})
    with pytest.raises(pw.CaptureError, match="input 'x': expected it at"):
        runtime.run("decode", {"x": x_of(4)})


@pytest.mark.parametrize(("backend", "compiler"), BACKENDS)
def test_what_run_returns_is_valid_until_the_next_step_of_the_phase(backend: str, compiler: str) -> None:
    runtime = runtime_of(Toy(), backend, compiler)
    step(runtime, 4, 1)
    kept = step(runtime, 4, 2)
    own = kept.clone()
    step(runtime, 4, 3, "prefill")
    assert torch.equal(kept, own)
    step(runtime, 4, 3)
    assert not torch.equal(kept, own)
    mine = runtime.run("decode", {"x": x_of(4, 2)}, Slots(torch.arange(4)), copy=True)
    copied = mine.clone()
    step(runtime, 4, 3)
    assert torch.equal(mine, copied)


def test_a_compiled_callable_is_what_runs_at_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    original = CompiledPiece.__init__

    def counting(self: Any, **fields: Any) -> None:
        compiled = fields["call"]

        def call(*arguments: Any) -> Any:
            calls.append("piece")
            return compiled(*arguments)

        original(self, **{**fields, "call": call})

    monkeypatch.setattr(CompiledPiece, "__init__", counting)
    for backend in ("full", "tc_piecewise"):
        runtime = runtime_of(Toy(), backend, "aot_eager")
        calls.clear()
        step(runtime, 4)
        assert len(calls) == LAYERS + 1  # the step's own run; nothing while capturing
        step(runtime, 4)
        assert len(calls) == 2 * (LAYERS + 1)


@pytest.mark.parametrize(("backend", "compiler"), BACKENDS)
@pytest.mark.parametrize("how", ["rebound", "data", "buffer"])
def test_a_tensor_that_moved_drops_the_capture(backend: str, compiler: str, how: str) -> None:
    model, reference = Toy(), Toy()
    runtime = runtime_of(model, backend, compiler)
    step(runtime, 4)
    plain(reference, 4)
    for each in (model, reference):
        layer = each.layers[1]
        if how == "rebound":
            layer.up.weight = nn.Parameter(layer.up.weight.detach() * 2)
        elif how == "data":
            layer.up.weight.data = layer.up.weight.data * 2
        else:
            layer.cache = layer.cache + 1
    name = "cache" if how == "buffer" else "up.weight"
    with runtime.counters.expect(captures=1, replays=0):
        torch.testing.assert_close(step(runtime, 4, 1), plain(reference, 4, 1))
    assert (
        f"a capture was dropped: the model's tensor layers.1.{name} was replaced or moved"
        in (runtime.counters["fallbacks"])
    )
    with runtime.counters.expect(captures=0, replays=1):
        torch.testing.assert_close(step(runtime, 4, 2), plain(reference, 4, 2))


def test_a_bucket_whose_captures_go_stale_at_once_is_captured_no_more() -> None:
    model, reference = Toy(), Toy()
    runtime = runtime_of(model, "full")
    for seed in range(8):
        for each in (model, reference):
            each.layers[0].up.weight.data = each.layers[0].up.weight.data.clone()
        torch.testing.assert_close(step(runtime, 4, seed), plain(reference, 4, seed))
    assert runtime.counters["captures"] == 4
    assert any("not captured any more" in reason for reason in runtime.counters["fallbacks"])


@pytest.mark.parametrize("backend", ["full", "breakable", "tc_piecewise"])
def test_two_runtimes_of_one_model_do_not_disturb_each_other(backend: str) -> None:
    model, reference = Toy(), Toy()
    runtimes = [runtime_of(model, backend), runtime_of(model, backend)]
    for seed in range(6):
        torch.testing.assert_close(step(runtimes[seed % 2], 3, seed), plain(reference, 3, seed))
    runtimes[0].close()
    torch.testing.assert_close(step(runtimes[1], 3, 7), plain(reference, 3, 7))
    with pytest.raises(pw.RuntimeClosedError):
        step(runtimes[0], 3)


@pytest.mark.parametrize("backend", ["full", "breakable", "tc_piecewise"])
def test_a_side_thread_that_allocates_is_not_recorded(backend: str) -> None:
    model, reference = Toy(), Toy()
    runtime = runtime_of(model, backend)
    stop, wrong = threading.Event(), []

    def churn() -> None:
        while not stop.is_set():
            tensor = torch.full((32, 32), 3.0)
            if float((tensor @ tensor)[0, 0].item()) != 288.0:
                wrong.append("a side thread's operator did not run")

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for seed in range(12):
            num_tokens = 1 + seed % 8
            torch.testing.assert_close(step(runtime, num_tokens, seed), plain(reference, num_tokens, seed))
    finally:
        stop.set()
        thread.join()
    assert not wrong


def test_steps_of_two_threads_at_new_buckets() -> None:
    model, reference = Toy(), Toy()
    runtime = runtime_of(model, "breakable")
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for i in range(10):
                num_tokens = 1 + (seed + i) % 8
                x = x_of(num_tokens, seed)
                got = runtime.run("decode", {"x": x}, Slots(torch.full((num_tokens,), -1)), copy=True)
                with torch.inference_mode(), pw.use_context(Slots(torch.full((num_tokens,), -1))):
                    torch.testing.assert_close(got, reference(x))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


# What cannot be captured.


class Syncs(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum().item() > 1e9:
            return x
        return x * 2


@pytest.mark.parametrize("backend", ["full", "breakable"])
def test_a_model_that_waits_for_the_device_falls_back(backend: str) -> None:
    runtime = runtime_of(Syncs(), backend)
    for seed in range(3):
        torch.testing.assert_close(runtime.run("decode", {"x": x_of(3, seed)}), x_of(3, seed) * 2)
    (reason,) = runtime.counters["fallbacks"]
    assert "item" in reason or "_local_scalar_dense" in reason
    assert "test_captures.py:" in reason
    assert runtime.counters["captures"] == 0
    assert runtime.explain().as_dict()["entries"][0]["not_captured"] == reason


@pw.split_op(mutates_args=("out",), name="piecework_captures::plain")
def uncapturable(x: torch.Tensor, out: torch.Tensor) -> None:
    """An operator that does not say that it can be captured whole."""
    BODIES[0] += 1
    out.copy_(x[x[:, 0] > -100] * 2)


class Uncapturable(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        uncapturable(x, out)
        return out + 1


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_split_op_that_cannot_be_captured_whole(compiler: str) -> None:
    runtime = runtime_of(Uncapturable(), "full", compiler)
    for seed in range(3):
        before = BODIES[0]
        torch.testing.assert_close(runtime.run("decode", {"x": x_of(3, seed)}), x_of(3, seed) * 2 + 1)
        assert BODIES[0] - before == 1
    (reason,) = runtime.counters["fallbacks"]
    assert "piecework_captures::plain does not say that it can be captured" in reason
    for backend in ("breakable", "tc_piecewise"):
        runtime = runtime_of(Uncapturable(), backend)
        for seed in range(3):
            torch.testing.assert_close(runtime.run("decode", {"x": x_of(3, seed)}), x_of(3, seed) * 2 + 1)
        assert runtime.counters["captures"] == 1


class SetsAttributes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return x * 2


def test_a_forward_that_sets_attributes_is_not_captured() -> None:
    model = SetsAttributes()
    runtime = runtime_of(model, "full")
    for _ in range(3):
        runtime.run("decode", {"x": x_of(3)})
    assert model.num_calls == 3
    assert any("sets num_calls" in reason for reason in runtime.counters["fallbacks"])


class ReturnsANumber(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x, x.shape[0]


def test_an_eager_forward_that_returns_a_number_is_refused() -> None:
    runtime = runtime_of(ReturnsANumber(), "full")
    with pytest.raises(pw.InputError, match="output '1': expected a tensor"):
        runtime.run("decode", {"x": x_of(3)})
    traced = runtime_of(ReturnsANumber(), "tc_piecewise", "aot_eager")
    for num_tokens in (3, 3, 4):
        assert traced.run("decode", {"x": x_of(num_tokens)})[1] == num_tokens


def test_an_eager_forward_without_token_rows_is_refused() -> None:
    class Reduces(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum(0)

    with pytest.raises(pw.InputError, match=r"expected 4 rows.*output_dims"):
        runtime_of(Reduces(), "full").run("decode", {"x": x_of(3)})
    runtime = runtime_of(Reduces(), "full", output_dims=None)
    torch.testing.assert_close(runtime.run("decode", {"x": x_of(3)}), x_of(3).sum(0))


# Inputs that are written, and inputs without dynamic dims.


class Writes(nn.Module):
    def forward(self, x: torch.Tensor, log: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        log.add_(1)
        x.mul_(gain)
        return x + log


@pytest.mark.parametrize(("backend", "compiler"), BACKENDS)
def test_inputs_that_the_forward_writes(backend: str, compiler: str) -> None:
    runtime = runtime_of(Writes(), backend, compiler)
    log, their_log = torch.zeros(WIDTH), torch.zeros(WIDTH)
    for seed, num_tokens in enumerate((3, 4, 3, 1, 3)):
        x, gain = x_of(num_tokens, seed), torch.full((1,), float(seed + 1))
        theirs = x.clone()
        expected = Writes()(theirs, their_log, gain).clone()
        torch.testing.assert_close(runtime.run("decode", {"x": x, "log": log, "gain": gain}), expected)
        torch.testing.assert_close(x, theirs)
        torch.testing.assert_close(log, their_log)
    assert runtime.counters["replays"] == 3
    log = log.clone()  # another tensor: captured by address, so captured anew
    with runtime.counters.expect(captures=1):
        runtime.run("decode", {"x": x_of(3), "log": log, "gain": torch.ones(1)})
    torch.testing.assert_close(log, their_log + 1)


@pytest.mark.parametrize(("backend", "compiler"), BACKENDS)
def test_other_dynamic_dims_get_captures_of_their_own(backend: str, compiler: str) -> None:
    class TwoDims(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y.sum(0)

    runtime = runtime_of(TwoDims(), backend, compiler, dynamic_dims={"x": {0: "tokens"}, "y": {0: "rows"}})
    for num_tokens, num_rows in ((3, 2), (3, 5), (4, 2), (3, 5), (3, 6), (3, 7), (3, 8), (3, 8)):
        x, y = x_of(num_tokens), x_of(num_rows, 1)
        torch.testing.assert_close(runtime.run("decode", {"x": x, "y": y}), x + y.sum(0))
    assert runtime.counters["captures"] == 4
    assert runtime.counters["replays"] == 2
    assert runtime.counters["fallbacks"]["too many sizes of the dims beside tokens: not captured"] == 2
