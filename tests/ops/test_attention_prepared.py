"""Paged attention at replays: calls that are prepared, and contexts that are checked once for all layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from piecework.errors import ContextError, InputError, NotAvailableError
from piecework.ops import attention
from piecework.ops.attention import AttentionContext, AttentionSpec, paged_attention
from piecework.ops.context import use_context
from piecework.ops.registry import REGISTRY

from .test_attention import BATCHES, HEAD_SIZE, Step, make_step


def prepared(step: Step, out: torch.Tensor) -> Callable[[], None]:
    """The step's call, made ready; it takes the context that is set when it is made."""
    prepare = REGISTRY.prepares[paged_attention]
    call = prepare(step.q, step.k, step.v, step.k_cache, step.v_cache, out, HEAD_SIZE**-0.5, step.window_size)
    assert call is not None
    return call


def nan_like(step: Step) -> torch.Tensor:
    return torch.full(step.q.shape, float("nan"), dtype=step.q.dtype)


@pytest.mark.parametrize("window_size", [0, 3])
@pytest.mark.parametrize("batch", BATCHES)
def test_a_prepared_call_serves_every_context(batch: str, window_size: int) -> None:
    step = make_step(*BATCHES[batch], padding=2, window_size=window_size)
    out = nan_like(step)
    call = prepared(step, out)
    static = step.context.as_static({})
    for context in (step.context, static, dataclasses.replace(step.context), static, step.context):
        out.fill_(float("nan"))
        with torch.inference_mode(), use_context(context):
            assert call() is None  # type: ignore[func-returns-value]
        torch.testing.assert_close(out[: len(step.expected)], step.expected, rtol=1e-10, atol=1e-12)
        assert torch.equal(out[len(step.expected) :], torch.zeros(2, *out.shape[1:], dtype=out.dtype))


def test_a_prepared_call_sees_new_values_at_the_same_addresses() -> None:
    step, other = make_step([2, 3], [4, 0]), make_step([4, 1], [3, 0])
    out = nan_like(step)
    call = prepared(step, out)
    with use_context(step.context):
        call()
    torch.testing.assert_close(out, step.expected, rtol=1e-10, atol=1e-12)
    for mine, theirs in ((step.q, other.q), (step.k, other.k), (step.v, other.v)):
        mine.copy_(theirs)
    step.k_cache.copy_(other.k_cache), step.v_cache.copy_(other.v_cache)
    with use_context(other.context):
        call()
    torch.testing.assert_close(out, other.expected, rtol=1e-10, atol=1e-12)


def test_errors_of_a_prepared_call_are_those_of_the_operator() -> None:
    step = make_step([3], [0], stale=0.0)
    before = step.k_cache.clone()
    call = prepared(step, nan_like(step))
    with pytest.raises(ContextError, match="AttentionContext and got no context"):
        call()
    shorter = step.context.slot_mapping[:2]
    for context, message in (
        (make_step([2], [0]).context, "q has 3 tokens, but the context has 2"),
        (dataclasses.replace(step.context, seq_lens_host=(9,)), "a request has 9 tokens, but block_table"),
        (dataclasses.replace(step.context, query_lens_host=(4,)), "q has 3 tokens, but the context has 4"),
        (dataclasses.replace(step.context, slot_mapping=shorter), r"has a slot_mapping of|slot_mapping of \[2\]"),
        (dataclasses.replace(step.context, block_table=step.context.block_table[:, :0]), "hold 0"),
        (step.context.as_static({"slot_mapping": shorter}), "the context is a static copy with a slot_mapping of"),
    ):
        with use_context(step.context):
            call()  # what was found of another context with the same scratch does not count
        step.k_cache.copy_(before)
        with use_context(context), pytest.raises(InputError, match=message):
            call()
        assert torch.equal(step.k_cache, before)
    step.q = step.q[:2]
    with pytest.raises(InputError, match="expected q and out"):
        prepared(step, nan_like(step)[:1])


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A table of three, for static contexts, for decode and for the rest; what they do, in order."""
    log: list[str] = []

    def row(name: str, reject: Callable[[AttentionSpec], bool], with_prepare: bool) -> Any:
        def forward(*args: Any) -> None:
            log.append(f"{name} {args[6]} {args[7]}")

        def prepare(*args: Any) -> Callable[[AttentionContext], None]:
            log.append(f"prepare {name} {args[6]} {args[7]}")
            return lambda context: log.append(f"prepared {name} {context.num_reqs}")

        return attention.AttentionImplementation(
            name=name,
            why="for tests",
            reject=lambda spec: "not this" if reject(spec) else None,
            load=lambda: forward,
            load_prepare=(lambda: prepare) if with_prepare else None,
        )

    rows = (
        row("static", lambda spec: not spec.is_static, True),
        row("decode", lambda spec: not spec.is_decode, True),
        row("rest", lambda spec: False, False),
    )
    monkeypatch.setattr(attention, "IMPLEMENTATIONS", rows)
    return log


def test_each_kind_of_context_has_its_implementation_prepared_once(table: list[str]) -> None:
    step, mixed = make_step([1, 1], [3, 4], window_size=2), make_step([2, 0], [3, 4])
    call = prepared(step, nan_like(step))
    assert not table
    contexts = (step.context, mixed.context, step.context.as_static({}))
    for context in (*contexts, *contexts):
        with use_context(context):
            call()
    scale = HEAD_SIZE**-0.5
    assert table == [
        *(f"prepare decode {scale} 2", "prepared decode 2", f"rest {scale} 2"),
        *(f"prepare static {scale} 2", "prepared static 2"),
        *("prepared decode 2", f"rest {scale} 2", "prepared static 2"),
    ]


def test_a_context_is_checked_once_for_all_layers(table: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[AttentionContext] = []
    monkeypatch.setattr(attention, "check_context", lambda context, *_: checks.append(context))
    step = make_step([1, 1], [3, 4])
    layers = [prepared(dataclasses.replace(step, k_cache=step.k_cache.clone()), nan_like(step)) for _ in range(3)]
    other = prepared(dataclasses.replace(step, window_size=4), nan_like(step))
    for num_steps in (1, 2):
        context = dataclasses.replace(step.context, scratch={}, slot_mapping=step.context.slot_mapping.clone())
        for _ in range(2):
            with use_context(context):
                for layer in layers:
                    layer()
            dataclasses.replace(step, context=context).run()
            assert len(checks) == num_steps, "of layers and of the operator, which are of one kind"
    with use_context(context):
        other()
    assert len(checks) == 3, "another window may have another implementation"
    assert all(context is not value for value in context.scratch.values())


@pytest.mark.parametrize(
    "name", ["slot_mapping", "query_start_loc", "seq_lens", "block_table", "query_lens_host", "seq_lens_host"]
)
def test_what_lies_in_the_scratch_is_of_one_copy_of_a_context(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels keep addresses there, by layouts that do not depend on which tables a copy has."""
    seen: list[object] = []

    def forward(*args: Any) -> None:
        seen.append(args[8].scratch.setdefault("kept", getattr(args[8], name)))

    row = attention.AttentionImplementation(name="row", why="", reject=lambda spec: None, load=lambda: forward)
    monkeypatch.setattr(attention, "IMPLEMENTATIONS", (row,))
    step = make_step([1, 1], [3, 4])
    own = getattr(step.context, name)
    other = own.clone() if isinstance(own, torch.Tensor) else own[:1] + own[1:]
    copied = dataclasses.replace(step.context, **{name: other})
    assert copied.scratch is step.context.scratch
    more_blocks = torch.cat((step.k_cache, step.k_cache))
    for context, cache, expected in (
        (step.context, step.k_cache, own),
        (copied, more_blocks, other),
        (copied, step.k_cache, other),
        (step.context, step.k_cache, own),
    ):
        dataclasses.replace(step, context=context, k_cache=cache, v_cache=cache.clone()).run()
        assert seen.pop() is expected
    dataclasses.replace(step, context=step.context.as_static({})).run()
    assert "kept" in step.context.scratch, "a static copy has its own"


def test_the_operator_sees_another_table(monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step([1, 3], [4, 0])
    torch.testing.assert_close(step.run(), step.expected, rtol=1e-10, atol=1e-12)
    context = dataclasses.replace(step.context, scratch={})
    monkeypatch.setattr(attention, "IMPLEMENTATIONS", ())
    for each in (step.context, context):
        step.context = each
        with pytest.raises(NotAvailableError, match="no implementation supports"):
            step.run()
