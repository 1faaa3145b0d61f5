"""Attention through FlashInfer's wrappers, with a stand-in for the package: see fake_flashinfer.py."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from piecework.errors import CaptureError, InputError, KernelNotReadyError, NotAvailableError
from piecework.ops import attention_rows, attention_table, flashinfer_kernels
from piecework.ops.attention import (
    AttentionContext,
    AttentionSpec,
    check_attention_backend,
    choose_implementation,
    paged_attention,
)
from piecework.ops.attention_choice import AttentionBackend, use_attention_backend
from piecework.ops.attention_plans import Lengths
from piecework.ops.capturing import capture_refusal, capturing_whole
from piecework.ops.context import use_context
from piecework.ops.deferred import defer_compiles
from piecework.ops.registry import REGISTRY

from . import fake_flashinfer
from .fake_flashinfer import CALLS
from .test_attention import BATCHES, HEAD_SIZE, Step, make_step


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FlashInfer is the stand-in, and takes what our tests have: small heads of float64, on the CPU."""
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer.module())
    monkeypatch.setattr(attention_rows, "FLASHINFER_DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(attention_rows, "FLASHINFER_DTYPES", (torch.float64, torch.float32))
    monkeypatch.setattr(attention_rows, "FLASHINFER_HEAD_SIZES", (8, 16))
    monkeypatch.setattr(flashinfer_kernels, "_BUILT", set())
    attention_table.choose.cache_clear()
    with use_attention_backend(AttentionBackend(name="flashinfer")):
        yield
    attention_table.choose.cache_clear()


def check(step: Step, out: torch.Tensor) -> None:
    torch.testing.assert_close(out[: len(step.expected)], step.expected, rtol=1e-10, atol=1e-12)
    assert not out[len(step.expected) :].any()


def static_of(step: Step, slots: int, width: int = 6) -> AttentionContext:
    """A static copy of `slots` request slots, filled with the step's context."""
    own = step.context
    pad = torch.nn.functional.pad
    more = slots - own.num_reqs
    start = torch.cat([own.query_start_loc, own.query_start_loc[-1:].expand(more)])
    table = pad(own.block_table, (0, width - own.block_table.shape[1], 0, more))
    fields = {"query_start_loc": start, "seq_lens": pad(own.seq_lens, (0, more)), "block_table": table}
    return own.as_static({**fields, "slot_mapping": own.slot_mapping.clone()})


def refill(static: AttentionContext, step: Step) -> None:
    """What the runtime does for a step."""
    source = static_of(step, static.num_reqs, static.block_table.shape[1])
    for name in ("slot_mapping", "query_start_loc", "seq_lens", "block_table"):
        getattr(static, name).copy_(getattr(source, name))
    static.plan_for(step.context)


def run(step: Step, context: AttentionContext) -> torch.Tensor:
    return dataclasses.replace(step, context=context).run()


# ---- a step's own context


@pytest.mark.parametrize("window_size", [0, 3])
@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (6, 1)])
@pytest.mark.parametrize("batch", BATCHES)
def test_equals_dense_attention(batch: str, heads: tuple[int, int], window_size: int) -> None:
    query_lens, prefix_lens = BATCHES[batch]
    step = make_step(
        query_lens, prefix_lens, num_heads=heads[0], num_kv_heads=heads[1], padding=2, window_size=window_size
    )
    check(step, step.run())
    assert (["decode plan", "decode run"] if set(query_lens) == {1} else ["prefill plan", "prefill run"]) == CALLS


def test_a_step_is_planned_once_for_all_layers_and_again_after_another_came_between() -> None:
    step, other = make_step([1, 1], [3, 6]), make_step([1, 1], [8, 0])
    for _ in range(3):
        check(step, step.run())
    assert ["decode plan", *["decode run"] * 3] == CALLS
    check(other, other.run())
    check(step, step.run())
    assert CALLS[4:] == ["decode plan", "decode run"] * 2


def test_kinds_of_calls_in_one_step_have_plans_of_their_own() -> None:
    step = make_step([2, 3], [3, 6])
    windowed = make_step([2, 3], [3, 6], window_size=2)
    windowed.context = step.context
    for _ in range(2):
        check(step, step.run())
        check(windowed, windowed.run())
    assert CALLS.count("prefill plan") == 2


def test_nothing_is_planned_without_tokens() -> None:
    step = make_step([], [], padding=3)
    check(step, step.run())
    assert CALLS == []


def test_what_its_kernels_cannot_read_is_copied_or_refused() -> None:
    step = make_step([2, 1], [3, 6])
    step.q = step.q.transpose(1, 2).contiguous().transpose(1, 2)
    out = torch.full((3, HEAD_SIZE, 4), float("nan"), dtype=torch.float64).transpose(1, 2)
    check(step, step.run(out))
    beside = torch.full((3 * 4 * HEAD_SIZE + 1,), float("nan"), dtype=torch.float64)
    check(step, step.run(beside[1:].view(3, 4, HEAD_SIZE)))
    step.v_cache = step.v_cache.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(InputError, match="flashinfer expects k_cache and v_cache with the same strides"):
        step.run()
    odd = torch.zeros((*step.k_cache.shape[:-1], HEAD_SIZE + 1), dtype=torch.float64)[..., :HEAD_SIZE]
    step.k_cache = step.v_cache = odd
    with pytest.raises(InputError, match="every head begins at a multiple of 16 bytes"):
        step.run()


def test_a_plan_that_needs_more_memory_gets_it() -> None:
    step = make_step([2, 1], [3, 6])
    fake_flashinfer.OVERFLOWS.append(128 << 20)
    check(step, step.run())
    assert CALLS == ["prefill plan", "prefill plan", "prefill run"]
    fake_flashinfer.OVERFLOWS.extend([512 << 20, 2 << 30])
    step.context = dataclasses.replace(step.context, scratch={})
    with pytest.raises(RuntimeError, match="Buffer overflow"):
        step.run()


# ---- a static context


@pytest.mark.parametrize("slots", [3, 6])
@pytest.mark.parametrize("batch", BATCHES)
def test_a_static_context_is_planned_anew_for_each_step(batch: str, slots: int) -> None:
    query_lens, prefix_lens = BATCHES[batch]
    slots = max(slots, len(query_lens))
    rows = max(sum(query_lens), slots) + 1
    step = make_step(query_lens, prefix_lens, padding=rows - sum(query_lens))
    static = static_of(step, slots)
    static.plan_for(step.context)
    check(step, run(step, static))
    num_plans = len([call for call in CALLS if "plan" in call])
    assert num_plans == 1
    for lens, prefixes in (([2, 1], [0, 7]), ([1], [11]), (query_lens, prefix_lens)):
        other = make_step(lens, prefixes, padding=rows - sum(lens))
        refill(static, other)
        check(other, run(other, static))
        check(other, run(other, static))


def test_rows_of_one_token_each_use_the_decode_wrapper_until_a_step_shows_that_they_are_not() -> None:
    step = make_step([1, 1, 1], [6, 0, 11], padding=1)
    static = static_of(step, 4)
    static.plan_for(step.context)
    assert static.plan_key() is None
    check(step, run(step, static))
    before = static.plan_key()
    fewer = make_step([1, 0, 1], [2, 5, 9], padding=2)
    refill(static, fewer)
    check(fewer, run(fewer, static))
    assert static.plan_key() == before is not None
    mixed = make_step([3, 1], [2, 5])
    refill(static, mixed)
    check(mixed, run(mixed, static))
    changed = static.plan_key()
    assert changed != before
    refill(static, step)
    check(step, run(step, static))
    assert static.plan_key() == changed, "it does not go back"
    fake_flashinfer.INFO[:] = [1]
    static.plan_for(step.context)
    assert static.plan_key() not in (before, changed), "what launches take from the host is part of it"


def test_a_capture_needs_a_plan_and_somebody_who_renews_it() -> None:
    step = make_step([1, 1], [3, 4])
    static = static_of(step, 2)
    arguments = (step.q, step.k, step.v, step.k_cache, step.v_cache, torch.empty_like(step.q), HEAD_SIZE**-0.5)
    with use_context(step.context):
        assert "not the static copy" in str(capture_refusal(paged_attention, arguments, {}))
    with use_context(static):
        assert "no plan for this context yet" in str(capture_refusal(paged_attention, arguments, {}))
    check(step, run(step, static))  # lengths come from the device
    with use_context(static):
        assert "nobody plans for this context" in str(capture_refusal(paged_attention, arguments, {}))
        static.plan_for(step.context)
        assert capture_refusal(paged_attention, arguments, {}) is None
        with capturing_whole():
            paged_attention(*arguments)
    check(step, arguments[5])
    static.plan_for(None)
    assert static.scratch[Lengths] == Lengths((), ())
    fresh = static_of(step, 2)
    with capturing_whole(), pytest.raises(CaptureError, match="expects a plan for the static context"):
        attention_table.choose(spec(), attention_rows.IMPLEMENTATIONS, "flashinfer").forward(*arguments, 0, fresh)


def test_prepared_calls_follow_the_backend() -> None:
    step = make_step([1, 1], [3, 4])
    out = torch.empty_like(step.q)
    call: Any = REGISTRY.prepares[paged_attention](  # made under another backend than it runs under
        step.q, step.k, step.v, step.k_cache, step.v_cache, out, HEAD_SIZE**-0.5
    )
    for name, expected in (
        ("flashinfer", ["decode plan", "decode run"]),
        ("torch", []),
        ("auto", ["decode run"]),  # before torch in the table, and planned for this step already
    ):
        CALLS.clear()
        out.fill_(float("nan"))
        with use_attention_backend(AttentionBackend(name=name)), use_context(step.context):
            call()
        assert expected == CALLS
        check(step, out)


# ---- compiles beside the steps


def test_torch_serves_until_kernels_are_compiled_and_a_capture_waits() -> None:
    step = make_step([1, 1], [3, 4])
    static = static_of(step, 2)
    static.plan_for(step.context)
    pending: dict[Any, Callable[[], None]] = {}
    with defer_compiles(pending.setdefault):  # type: ignore[arg-type]
        check(step, step.run())
        check(step, run(step, static))
        with pytest.raises(KernelNotReadyError, match="compiled before a capture"), capturing_whole():
            run(step, static)
        assert static.plan_key() is not None, "there will be a plan"
        static.plan_for(step.context)
    assert CALLS == []
    assert len(pending) == 2
    for compile_it in pending.values():
        compile_it()
    assert sorted(CALLS) == ["decode plan", "decode run", "prefill plan", "prefill run"], "launched before a capture"
    CALLS.clear()
    with defer_compiles(lambda key, compile_it: pytest.fail("it is compiled")):
        static.plan_for(step.context)
        assert CALLS == ["decode plan"]
        with capturing_whole():
            check(step, run(step, static))
        check(step, step.run())


def test_under_defer_compiles_a_replay_is_not_left_with_the_plan_of_an_earlier_step() -> None:
    step = make_step([1, 1], [3, 4])
    static = static_of(step, 2)
    static.plan_for(step.context)
    check(step, run(step, static))  # outside: only what it needs is built
    captured = static.plan_key()
    with defer_compiles(lambda key, compile_it: None):
        other = make_step([1, 1], [9, 0])
        CALLS.clear()
        refill(static, other)
        assert CALLS == ["decode plan"]
        assert static.plan_key() == captured
        prompts = make_step([2], [3])
        refill(static, prompts)
        assert CALLS == ["decode plan"], "nobody waits for the other wrapper's kernels"
        assert static.plan_key() != captured
        check(prompts, run(prompts, static))
        refill(static, step)
        assert static.plan_key() != captured, "it does not go back"
        check(step, run(step, static))


def test_captures_with_one_copy_may_not_follow_the_plans_of_another() -> None:
    step = make_step([1, 1], [3, 4])
    copies = [static_of(step, 2) for _ in range(2)]
    for static in copies:
        static.plan_for(step.context)
        check(step, run(step, static))
    assert copies[0].plan_key() != copies[1].plan_key(), "its lists are in other buffers"


def test_the_store_is_compiled_with_what_it_is_launched_with(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = pytest.importorskip("piecework.ops.triton.launch")
    calls: list[Any] = []
    monkeypatch.setattr(launch.Call, "compile", lambda call: calls.append(call))
    row, cache = torch.zeros(2, 2, 64), torch.zeros(4, 16, 2, 64)
    flashinfer_kernels._build_store("kind", (row, row, cache, cache), torch.zeros(2, dtype=torch.int64))
    [call] = calls
    assert len(call.arguments) == len(call.kernel.arg_names)


# ---- the choice


def spec(**changes: Any) -> AttentionSpec:
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_size": 8, "block_size": 4}
    plain = AttentionSpec(device_type="cpu", dtype=torch.float32, cache_dtype=torch.float32, **sizes)
    return dataclasses.replace(plain, **changes)


@pytest.mark.parametrize(
    ("changes", "allowed", "reason"),
    [
        ({"device_type": "xpu"}, "auto, torch", "runs on cuda and cpu, not on xpu"),
        ({"head_size": 24}, "auto, torch", "has heads of 8 and 16 elements, not 24"),
        (
            {"dtype": torch.bfloat16, "cache_dtype": torch.bfloat16},
            "auto, torch",
            "computes float64 and float32, not torch.bfloat16",
        ),
        ({"cache_dtype": torch.float64}, "none does", "needs the cache in the dtype of q"),
    ],
)
def test_what_it_does_not_support_is_an_error_that_says_what_may_be_asked_for(
    changes: dict[str, Any], allowed: str, reason: str
) -> None:
    message = f": {allowed}; got flashinfer, which cannot; .*\n  flashinfer: {reason}"
    with pytest.raises(NotAvailableError, match=message):
        choose_implementation(spec(**changes), "flashinfer")


def test_a_missing_package_is_a_reason_and_no_error_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "flashinfer")
    monkeypatch.setattr(attention_rows, "missing", lambda package, pip: f"not installed: pip install {pip}")
    assert ("flashinfer", "not installed: pip install flashinfer-python") in choose_implementation(spec()).passed_over
    with pytest.raises(NotAvailableError, match="not installed: pip install flashinfer-python"):
        check_attention_backend("flashinfer", "cpu")


def test_backends_are_checked_before_the_first_call_as_far_as_they_can_be() -> None:
    for backend in ("auto", "torch"):
        check_attention_backend(backend, "cpu", dtype=torch.float32, head_size=24)
    with pytest.raises(NotAvailableError, match="runs on cuda, not on cpu"):
        check_attention_backend("triton", "cpu")
    with pytest.raises(NotAvailableError, match="not 24"):
        check_attention_backend("flashinfer", "cpu", dtype=torch.float32, head_size=24)
    with pytest.raises(NotAvailableError, match="nothing has that name"):
        choose_implementation(spec(), "rocket")


def test_the_order_is_data_by_shape_class(monkeypatch: pytest.MonkeyPatch) -> None:
    first = attention_rows.Preference(order=("flashinfer", "triton"), why="a test", is_prompt=False, max_num_tokens=8)
    monkeypatch.setattr(attention_rows, "PREFERENCES", (first, *attention_rows.PREFERENCES))
    cases = {
        "flashinfer": (spec(is_decode=True, num_tokens=8), spec(is_static=True, num_tokens=1)),
        "triton": (spec(is_decode=True, num_tokens=9), spec(num_tokens=4)),
    }
    for name, specs in cases.items():
        for each in specs:
            rows = attention_rows.in_order(attention_rows.IMPLEMENTATIONS, each)
            assert rows[0].name == name
            assert {row.name for row in rows[2:]} == {"torch_native", "torch_static"}
