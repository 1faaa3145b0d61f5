"""Rotary attention: with torch's operators against float64 loops and against the two ops that it is made of.

Its Triton kernel is tested in processes of their own: `rotary_attention_interpreted.py` and the two beside it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from piecework.errors import CaptureError, ContextError, InputError, NotAvailableError
from piecework.graphs.tape import TapeDevice
from piecework.ops import attention, fused
from piecework.ops.attention import AttentionContext, paged_attention
from piecework.ops.capturing import capture_refusal, capturing_whole
from piecework.ops.context import use_context
from piecework.ops.registry import REGISTRY
from piecework.ops.rotary import rotary_embedding
from piecework.ops.rotary_attention import rotary_paged_attention

from .paged_reference import Batch, batches, static_copy
from .rotary_reference import RotaryStep, check_rotary, make_rotary_step
from .test_triton_kernels import run_tests

PLAIN = Batch(
    requests=[(1, 6), (4, 0), (0, 3), (2, 8), (0, 0), (1, 0)],
    heads=(4, 2),
    head_size=8,
    block_size=4,
    window_size=0,
    padding=3,
    empty_slots=2,
    spare_blocks=1,
    seed=1,
)
on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Triton is for Linux only")


def through_the_operator(*args: Any) -> None:
    with use_context(args[-1]):
        rotary_paged_attention(*args[:-1])


def through_both(q: Any, k: Any, v: Any, cos: Any, sin: Any, *others: Any) -> None:
    q, k = rotary_embedding(q, k, cos, sin)
    with use_context(others[-1]):
        paged_attention(q, k, v, *others[:-1])


def prepared(*args: Any) -> None:
    with use_context(args[-1]):
        call = REGISTRY.prepares[rotary_paged_attention](*args[:-1])
        assert call is not None
        call()


def contexts(step: RotaryStep, batch: Batch) -> list[AttentionContext]:
    context = step.plain.context
    return [context, static_copy(context, empty_slots=batch.empty_slots, spare_blocks=batch.spare_blocks)]


# ---- what comes out


@given(batches())
@settings(max_examples=20)
@pytest.mark.parametrize("way", [through_the_operator, prepared])
def test_equals_the_loops_and_the_two_ops(way: Any, batch: Batch) -> None:
    for half in {0, batch.head_size // 4, batch.head_size // 2}:
        step = make_rotary_step(batch, torch.float64, half=half)
        for context in contexts(step, batch):
            check_rotary(step, way, context, tolerance=1e-10)
            mine, theirs = step.run(way, context), step.run(through_both, context)
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_other_dtypes(dtype: torch.dtype, tolerance: float) -> None:
    step = make_rotary_step(PLAIN, dtype)
    for context in contexts(step, PLAIN):
        check_rotary(step, through_the_operator, context, tolerance=tolerance)


def test_q_and_k_are_left_as_they_are() -> None:
    step = make_rotary_step(PLAIN, torch.float32)
    before = [tensor.clone() for tensor in step.layer]
    step.run(through_the_operator, step.plain.context)
    torch.testing.assert_close(list(step.layer), before, rtol=0, atol=0, equal_nan=True)


def test_a_prepared_call_serves_every_context_and_sees_new_values() -> None:
    step, other = (make_rotary_step(dataclasses.replace(PLAIN, seed=seed), torch.float64) for seed in (0, 2))
    caches, out = (step.plain.k_cache.clone(), step.plain.v_cache.clone()), torch.empty_like(step.plain.q)
    call = REGISTRY.prepares[rotary_paged_attention](*step.layer, *caches, out, step.plain.scale)
    assert call is not None
    first, second = step.expected(), other.expected()
    for source, expected in ((step, first), (other, second)):
        for mine, theirs in zip(step.layer, source.layer, strict=True):
            mine.copy_(theirs)
        for context in (*contexts(source, PLAIN), *contexts(source, PLAIN)):
            caches[0].copy_(source.plain.k_cache), caches[1].copy_(source.plain.v_cache)
            out.fill_(float("nan"))
            with torch.inference_mode(), use_context(context):
                assert call() is None  # type: ignore[func-returns-value]
            torch.testing.assert_close((out, *caches), expected, rtol=1e-10, atol=1e-12, equal_nan=True)


# ---- who rotates and who attends


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, torch.Tensor]]:
    """A table of two, for static contexts and for the rest, that note the q which they get."""
    seen: list[tuple[str, torch.Tensor]] = []

    def row(name: str, reject: Callable[[attention.AttentionSpec], str | None]) -> Any:
        def forward(q: torch.Tensor, *others: Any) -> None:
            seen.append((name, q))

        return attention.AttentionImplementation(name=name, why="", reject=reject, load=lambda: forward)

    table = (
        row("static", lambda spec: None if spec.is_static else "not this"),
        row("rest", lambda spec: "not this" if spec.is_static else None),
    )
    monkeypatch.setattr(attention, "IMPLEMENTATIONS", table)
    return seen


@pytest.mark.parametrize("way", [through_the_operator, prepared])
def test_every_row_of_the_table_gets_q_rotated(way: Any, rows: list[tuple[str, torch.Tensor]]) -> None:
    step = make_rotary_step(PLAIN, torch.float32)
    for context in contexts(step, PLAIN):
        step.run(way, context)
    q, k, _, cos, sin = step.layer
    expected = rotary_embedding.native(q, k, cos, sin)[0]
    assert [name for name, _ in rows] == ["rest", "static"]
    for _, got in rows:
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def test_a_runtimes_choice_for_rotary_embedding_rotates(
    rows: list[tuple[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused.FusedOp, "_body", lambda self, name: lambda q, k, cos, sin: (q * 0 + 7, k))
    step = make_rotary_step(PLAIN, torch.float32)
    step.run(through_the_operator, step.plain.context)
    assert rows[0][1][:8].eq(7).all()


# ---- captures


def test_a_capture_serves_steps_of_other_lengths() -> None:
    """Through the operator, on the tape, replayed over new requests in the same memory; 13 rows, 8 slots, 4 blocks."""
    device = TapeDevice()

    def padded(requests: list[tuple[int, int]], seed: int) -> tuple[RotaryStep, AttentionContext]:
        padding = 13 - sum(new for new, _ in requests)
        batch = dataclasses.replace(PLAIN, requests=requests, padding=padding, spare_blocks=0, seed=seed)
        step = make_rotary_step(batch, torch.float64)
        context = step.plain.context
        spare = 4 - context.block_table.shape[1]
        return step, static_copy(context, empty_slots=8 - len(requests), spare_blocks=spare)

    with torch.inference_mode():
        first, static = padded(PLAIN.requests, 0)
        inputs = tuple(x.clone() for x in first.layer)
        caches = torch.full((2, 20, 4, 2, 8), float("nan"), dtype=torch.float64)
        out = torch.full(first.plain.q.shape, float("nan"), dtype=torch.float64)
        with use_context(static), capturing_whole(), device.session(device.open_pool()) as session:
            session.begin()
            rotary_paged_attention(*inputs, caches[0], caches[1], out, first.plain.scale)
            segment = session.end()
        assert out.isnan().all()
        assert caches.isnan().all()
        for seed, requests in enumerate((PLAIN.requests, [(12, 0)], [(1, 14), (1, 1)], [])):
            step, context = padded(requests, seed)
            for name in ("slot_mapping", "query_start_loc", "seq_lens", "block_table"):
                getattr(static, name).copy_(getattr(context, name))
            for buffer, new in zip(inputs, step.layer, strict=True):
                buffer.copy_(new)
            used = len(step.plain.k_cache)
            caches[0, :used], caches[1, :used] = step.plain.k_cache, step.plain.v_cache
            with use_context(static):  # the tape runs the operator itself
                segment.replay()
            expected, *stored = step.expected()
            torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
            for cache, after in zip(caches, stored, strict=True):
                torch.testing.assert_close(cache[:used], after, rtol=1e-12, atol=1e-12, equal_nan=True)


def test_what_cannot_be_captured_says_why() -> None:
    step = make_rotary_step(PLAIN, torch.float32)
    arguments = (*step.layer, step.plain.k_cache, step.plain.v_cache, torch.empty_like(step.plain.q), 0.5)
    reason = "rotary_paged_attention: this call cannot be captured: torch_native reads lengths on the host"
    with use_context(step.plain.context), capturing_whole(), pytest.raises(CaptureError, match=reason):
        rotary_paged_attention(*arguments)
    with use_context(static_copy(step.plain.context)):
        assert capture_refusal(rotary_paged_attention, arguments, {}) is None
    assert "got no context" in str(capture_refusal(rotary_paged_attention, arguments, {}))


# ---- errors and opcheck


@pytest.mark.parametrize("way", [through_the_operator, prepared])
def test_bad_angles_are_refused_before_anything_is_written(way: Any) -> None:
    step = make_rotary_step(PLAIN, torch.float32)
    good, num_tokens = step.cos, step.cos.shape[0]
    for cos, sin, got in (
        (good[:-1], good[:-1], rf"got cos \[{num_tokens - 1}, 4\] and sin \[{num_tokens - 1}, 4\]; gather"),
        (good, good[:, :-1], rf"got cos \[{num_tokens}, 4\] and sin \[{num_tokens}, 3\]; gather"),
        (good.repeat(1, 2), good.repeat(1, 2), rf"to the head_size 8, got cos \[{num_tokens}, 8\]"),
        (good[:, None], good[:, None], rf"expected cos and sin \[{num_tokens}, rotary_size // 2\]"),
    ):
        caches = step.plain.k_cache.clone(), step.plain.v_cache.clone()
        others = (*caches, torch.empty_like(step.plain.q), 0.5, 0, step.plain.context)
        with pytest.raises(InputError, match=got):
            way(*step.layer[:3], cos, sin, *others)
        torch.testing.assert_close(caches[0], step.plain.k_cache, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("way", [through_the_operator, prepared])
def test_errors_are_those_of_paged_attention(way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_rotary_step(PLAIN, torch.float32)
    others = (step.plain.k_cache, step.plain.v_cache, torch.empty_like(step.plain.q), 0.5)
    with pytest.raises(ContextError, match="AttentionContext and got no context"):
        way(*step.layer, *others, 0, None)
    with pytest.raises(InputError, match="window_size: expected 1 or more"):
        way(*step.layer, *others, -1, step.plain.context)
    with pytest.raises(InputError, match="expected q and out"):
        way(*step.layer, *others[:2], others[2][:1], 0.5, 0, step.plain.context)
    monkeypatch.setattr(attention, "IMPLEMENTATIONS", ())
    with pytest.raises(NotAvailableError, match="no implementation supports"):
        way(*step.layer, *others, 0, dataclasses.replace(step.plain.context, scratch={}))


def test_opcheck() -> None:
    batch = dataclasses.replace(PLAIN, seed=0)
    step = make_rotary_step(batch, torch.float64)
    inputs = [tensor.nan_to_num() for tensor in (*step.layer, step.plain.k_cache, step.plain.v_cache)]
    for context in contexts(step, batch):
        with use_context(context):
            for window_size in ((), (2,)):
                arguments = (*inputs, torch.zeros_like(step.plain.q), 0.5, *window_size)
                torch.library.opcheck(rotary_paged_attention, arguments)


# ---- the Triton kernel, in processes of its own


@on_linux
@pytest.mark.slow
def test_the_kernel_under_the_interpreter() -> None:
    run_tests("rotary_attention_interpreted.py", at_least=40, TRITON_INTERPRET="1")


@on_linux
@pytest.mark.slow
def test_it_does_not_wait_for_its_kernels() -> None:
    run_tests("rotary_attention_deferred.py", at_least=8, TRITON_INTERPRET="1")


@on_linux
@pytest.mark.slow
def test_it_compiles_for_a_gpu(tmp_path: Path) -> None:
    environment = {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    run_tests("rotary_attention_compiled.py", at_least=8, **environment)
