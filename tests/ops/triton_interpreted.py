"""The Triton kernels under Triton's interpreter, on the CPU, against loops in float64.

Not collected by its name: `test_triton_kernels.py` runs it in a process of its own, since Triton decides when it is
imported whether it interprets. By hand: `TRITON_INTERPRET=1 pytest tests/ops/triton_interpreted.py`.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
import torch
import triton
from hypothesis import given, settings

from piecework.errors import InputError
from piecework.ops import attention
from piecework.ops.attention import AttentionContext
from piecework.ops.attention import paged_attention as operator
from piecework.ops.context import use_context
from piecework.ops.torch_native import store as torch_store
from piecework.ops.triton import launch, layout, plan, tuning
from piecework.ops.triton import paged_attention as kernels
from piecework.ops.triton.kv_store import store
from piecework.ops.triton.paged_attention import paged_attention, prepare

from .paged_reference import Batch, batches, check, make_step, static_copy

assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"

PLAIN = Batch(
    requests=[(1, 6), (4, 0), (0, 3), (2, 8), (0, 0), (1, 0), (1, 70), (19, 5)],
    heads=(4, 2),
    head_size=8,
    block_size=4,
    window_size=0,
    padding=3,
    empty_slots=2,
    spare_blocks=1,
    seed=0,
)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Relative and absolute. Weights are rounded to the dtype of V, and the interpreter does not round to nearest."""
SMALL = {"row_tile": 16, "row_min_chunk": 16, "tile_m": 16, "tile_n": 16}
WAYS = {
    "rows": {"row_splits": 1},
    "split rows": {"row_splits": 3},
    "rows split by shapes": {},
    "tiles": {},
    "larger tiles": {"tile_m": 64, "tile_n": 32},
}


class Way:
    """One of the kernels, whatever the lengths are, with sizes so small that a few tokens take several tiles."""

    def __init__(self, name: str) -> None:
        self.takes_tiles = "tiles" in name
        self.changes = {**SMALL, **WAYS[name]}

    def __call__(self, q: Any, k: Any, *others: Any) -> None:
        plain = tuning.pick_tuning(q.dtype, q.shape[2], q.shape[1] // k.shape[1])
        *tensors, context = others
        sizes = dataclasses.replace(plain, **self.changes)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plan, "takes_tiles", lambda num_rows, context: self.takes_tiles)
            prepare(q, k, *tensors, _tuning=sizes)(context)


def contexts(step: Any, batch: Batch) -> list[AttentionContext]:
    static = static_copy(step.context, empty_slots=batch.empty_slots, spare_blocks=batch.spare_blocks)
    return [step.context, static]


def only_plan(context: AttentionContext) -> Any:
    [made] = context.scratch[plan.Plan]
    return made


def test_this_is_the_interpreter() -> None:
    for kernel in (plan.attend_rows, plan.attend_tiles, plan.store_rows):
        assert not isinstance(kernel, triton.runtime.JITFunction)


# ---- what comes out


@given(batches())
@settings(max_examples=8)
@pytest.mark.parametrize("way", ["split rows", "tiles"])
def test_equals_the_loops(way: str, batch: Batch) -> None:
    step = make_step(batch, torch.float32)
    for context in contexts(step, batch):
        check(step, Way(way), context, rtol=1e-5, atol=1e-5)


@given(batches(max_new_tokens=1))
@settings(max_examples=8)
def test_equals_the_loops_in_decode_steps(batch: Batch) -> None:
    batch = dataclasses.replace(batch, requests=[(1, old) for _, old in batch.requests], padding=0)
    step = make_step(batch, torch.float32)
    for context in contexts(step, batch):
        check(step, paged_attention, context, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("heads", "head_size"), [((3, 1), 5), ((7, 1), 80), ((4, 2), 64)])
@pytest.mark.parametrize(
    ("dtype", "window_size"),
    [(torch.float32, 0), (torch.float32, 1), (torch.float32, 21), (torch.bfloat16, 0), (torch.float16, 21)],
    ids=str,
)
def test_every_shape(dtype: torch.dtype, window_size: int, heads: tuple[int, int], head_size: int, way: str) -> None:
    batch = dataclasses.replace(PLAIN, window_size=window_size, heads=heads, head_size=head_size)
    step = make_step(batch, dtype)
    _, static = contexts(step, batch)
    check(step, Way(way), static, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("way", ["split rows", "tiles"])
@pytest.mark.parametrize("head_size", [96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_large_heads(dtype: torch.dtype, head_size: int, way: str) -> None:
    batch = dataclasses.replace(PLAIN, requests=[(1, 6), (0, 3), (5, 20)], head_size=head_size)
    step = make_step(batch, dtype)
    check(step, Way(way), contexts(step, batch)[1], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("way", ["split rows", "tiles", "larger tiles"])
@pytest.mark.parametrize("heads", [(12, 1), (17, 1), (33, 1), (24, 2)])
def test_a_group_of_many_heads(heads: tuple[int, int], way: str) -> None:
    step = make_step(dataclasses.replace(PLAIN, heads=heads, requests=[(1, 6), (3, 30), (0, 2)]), torch.float32)
    check(step, Way(way), step.context, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", ["rows", "tiles"])
def test_more_requests_than_are_searched_at_once(way: str) -> None:
    requests = [(1, 2) if slot in (3, 255, 256, 290) else (0, 1) for slot in range(300)]
    step = make_step(dataclasses.replace(PLAIN, requests=requests, heads=(1, 1)), torch.float32)
    check(step, Way(way), static_copy(step.context, empty_slots=2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", ["split rows", "tiles"])
@pytest.mark.parametrize("requests", [[], [(0, 0)]])
def test_a_step_of_padding_alone(requests: list[tuple[int, int]], way: str) -> None:
    step = make_step(dataclasses.replace(PLAIN, requests=requests), torch.float32)
    check(step, Way(way), step.context, rtol=0, atol=0)
    check(step, Way(way), static_copy(step.context, empty_slots=2), rtol=0, atol=0)


def test_a_step_of_no_tokens_launches_nothing() -> None:
    step = make_step(dataclasses.replace(PLAIN, requests=[(0, 3)], padding=0), torch.float32)
    check(step, paged_attention, step.context, rtol=0, atol=0)


@pytest.mark.parametrize("way", ["split rows", "tiles"])
def test_tables_may_have_strides_of_their_own(way: str) -> None:
    step = make_step(PLAIN, torch.float32)
    names = ("slot_mapping", "query_start_loc", "seq_lens", "block_table")
    tables = {name: getattr(step.context, name) for name in names}
    apart = {name: torch.stack((table, torch.full_like(table, 10**6)), -1)[..., 0] for name, table in tables.items()}
    assert not apart["seq_lens"].is_contiguous()
    check(step, Way(way), step.context.as_static(apart), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", ["rows", "tiles"])
def test_offsets_do_not_wrap_in_a_large_cache(way: str) -> None:
    """Two blocks behind element 2**31 of a cache. It is of int8 for its size; memory that is not touched costs none."""
    num_blocks = 2**31 // 128 + 4
    caches = torch.empty(num_blocks * 128, dtype=torch.int8).view(num_blocks, 2, 4, 2, 8)
    blocks = [num_blocks - 1, num_blocks - 3]
    k, v = torch.randint(-3, 4, (2, 6, 2, 8), dtype=torch.int8)
    q, out = torch.randn(6, 4, 8), torch.empty(6, 4, 8)
    context = AttentionContext.build(query_lens=[6], seq_lens=[6], block_tables=[blocks], block_size=4)
    Way(way)(q, k, v, caches[:, 0], caches[:, 1], out, 0.5, 0, context)
    assert torch.equal(caches[blocks, 0].flatten(0, 1)[:6], k)
    assert torch.equal(caches[blocks, 1].flatten(0, 1)[:6], v)
    few = caches[blocks].float()
    context = AttentionContext.build(query_lens=[6], seq_lens=[6], block_tables=[[0, 1]], block_size=4)
    again = torch.empty_like(out)
    Way(way)(q, k.float(), v.float(), few[:, 0], few[:, 1], again, 0.5, 0, context)
    assert torch.equal(out, again)


@pytest.mark.parametrize("way", ["rows", "tiles"])
def test_offsets_do_not_wrap_in_a_cache_whose_blocks_lie_across_its_memory(way: str) -> None:
    """The last token of each block is behind element 2**31; as above, nearly all of it is never touched."""
    distance = 2**31 // 3 + 16
    cache = torch.empty(3 * distance + 64, dtype=torch.int8).as_strided((4, 4, 2, 8), (16, distance, 8, 1))
    k = torch.randint(-3, 4, (6, 2, 8), dtype=torch.int8)
    q, out = torch.randn(6, 4, 8), torch.empty(6, 4, 8)
    context = AttentionContext.build(query_lens=[6], seq_lens=[6], block_tables=[[3, 1]], block_size=4)
    Way(way)(q, k, k, cache, cache, out, 0.5, 0, context)
    dense, again = torch.zeros(4, 4, 2, 8), torch.empty_like(out)
    context = AttentionContext.build(query_lens=[6], seq_lens=[6], block_tables=[[3, 1]], block_size=4)
    Way(way)(q, k.float(), k.float(), dense, dense, again, 0.5, 0, context)
    assert torch.equal(out, again)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
@pytest.mark.parametrize("skipped", [(), (0,), (0, 1, 2, 3, 4)])
@pytest.mark.parametrize("heads_at_once", [1, 2, 4])
def test_the_store_copies_bits(
    heads_at_once: int, skipped: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("piecework.ops.triton.kv_store._MAX_ELEMENTS", 8 * heads_at_once)
    projection = torch.randint(-100, 100, (5, 9, 6)).to(dtype)
    k, v = projection[:, :3], projection[:, 4:7].flip(2).transpose(0, 2).contiguous().transpose(0, 2)
    slots = torch.tensor([7, 0, 11, 3, 5])
    slots[list(skipped)] = -1
    ours, theirs = torch.full((2, 2, 3, 4, 3, 6), 55, dtype=dtype)
    store(k, v, ours[0], ours[1], slots)
    torch_store(k, v, theirs[0], theirs[1], slots)
    assert torch.equal(ours, theirs)


# ---- who is launched


def test_which_kernel_serves_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes decide for a static context, the lengths on the host for a step's own."""
    decode = AttentionContext.build(query_lens=[1, 1], seq_lens=[3, 1], block_tables=[[0], [1]], block_size=4)
    empty = AttentionContext.build(query_lens=[1, 0], seq_lens=[3, 1], block_tables=[[0], [1]], block_size=4)
    prompt = AttentionContext.build(query_lens=[1, 2], seq_lens=[3, 2], block_tables=[[0], [1]], block_size=4)
    assert not plan.takes_tiles(2, decode)
    assert not plan.takes_tiles(9, decode)
    assert not plan.takes_tiles(9, empty)
    assert plan.takes_tiles(3, prompt)
    assert not plan.takes_tiles(3, static_copy(prompt, empty_slots=1))
    assert plan.takes_tiles(3, static_copy(prompt))


def test_the_grid_of_a_static_context_holds_for_every_length() -> None:
    """With 4 "processors" and 4 programs each, 2 rows and 2 heads are split in 4; a step's own lengths need fewer."""
    batch = dataclasses.replace(PLAIN, requests=[(1, 6), (1, 400)], padding=0)
    step = make_step(batch, torch.float32)
    static = static_copy(step.context)
    short = dataclasses.replace(step.context, seq_lens_host=(7, 128), scratch={})
    grids = []
    for context in (step.context, static, short):
        check(step, paged_attention, context, rtol=1e-5, atol=1e-5)
        grids.append(only_plan(context).grid)
    assert grids == [(2, 2, 4), (2, 2, 4), (2, 2, 1)]


def test_through_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row of the table calls it right; on the CPU it must be asked for, interpreter or not."""
    assert attention.choose_implementation(_spec(is_static=True)).name == "torch_static"
    row = dataclasses.replace(attention.IMPLEMENTATIONS[0], reject=lambda spec: None)
    assert row.name == "triton"
    monkeypatch.setattr(attention, "IMPLEMENTATIONS", (row,))
    step = make_step(PLAIN, torch.float32)

    def through_the_operator(*args: Any) -> None:
        with use_context(args[-1]):
            operator(*args[:-1])

    check(step, through_the_operator, static_copy(step.context, empty_slots=2), rtol=1e-5, atol=1e-5)


def _spec(**changes: Any) -> attention.AttentionSpec:
    plain = {"dtype": torch.float32, "num_heads": 4, "num_kv_heads": 2, "head_size": 8, "block_size": 4}
    return attention.AttentionSpec(device_type="cpu", cache_dtype=torch.float32, **plain, **changes)


# ---- what is kept


LENGTHS = [
    [(1, 6), (4, 0), (0, 3), (2, 90)],
    [(1, 60), (1, 31), (3, 1), (2, 1)],
    [(7, 0), (0, 80), (0, 0), (0, 0)],
    [(1, 0), (1, 0), (0, 3), (2, 88)],
]


@pytest.mark.parametrize("way", ["split rows", "tiles"])
def test_a_launch_holds_for_other_lengths_in_the_same_tensors(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a capture's: the static copy is filled anew, the memory that splits share is the same, counts are zero."""
    monkeypatch.setattr(kernels, "_ALIGNMENT", 1)  # this CPU's addresses are of several kinds
    static, plans = None, set()
    for requests in LENGTHS:
        num_tokens = sum(new for new, _ in requests)
        batch = dataclasses.replace(PLAIN, requests=requests, padding=8 - num_tokens)
        step = make_step(batch, torch.float32)
        filled = static_copy(step.context, empty_slots=1, spare_blocks=30 - step.context.block_table.shape[1])
        if static is None:
            static = filled
        else:
            for name in ("slot_mapping", "query_start_loc", "seq_lens", "block_table"):
                getattr(static, name).copy_(getattr(filled, name))
        for _ in range(2):
            check(step, Way(way), static, rtol=1e-5, atol=1e-5)
        made = only_plan(static)
        plans.add(id(made))
        if way == "split rows":
            arrivals = made.memory[2]
            assert arrivals.tolist() == [0] * 16
    assert len(plans) == 1


def test_memory_is_a_contexts_own_and_the_layers_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_ALIGNMENT", 1)
    step = make_step(PLAIN, torch.float32)
    first, second = static_copy(step.context), static_copy(step.context)
    for _ in range(3):  # layers: the same layout, other tensors
        for context in (first, second):
            check(step, paged_attention, context, rtol=1e-5, atol=1e-5)
    assert only_plan(first) is not only_plan(second)


def test_a_prepared_call_serves_every_context() -> None:
    step = make_step(PLAIN, torch.float32)
    k_cache, v_cache, out = step.k_cache.clone(), step.v_cache.clone(), torch.empty_like(step.q)
    call = prepare(step.q, step.k, step.v, k_cache, v_cache, out, step.scale, 0)
    want, *caches = step.expected()
    for context in (step.context, *contexts(step, PLAIN), static_copy(step.context, empty_slots=60)):
        k_cache.copy_(step.k_cache), v_cache.copy_(step.v_cache)
        out.fill_(float("nan"))
        call(context)
        torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close([k_cache, v_cache], caches, rtol=0, atol=0, equal_nan=True)


def test_copies_of_a_context_share_its_scratch_and_not_its_tensors() -> None:
    step = make_step(PLAIN, torch.float32)
    k_cache, v_cache, out = step.k_cache.clone(), step.v_cache.clone(), torch.empty_like(step.q)
    call = prepare(step.q, step.k, step.v, k_cache, v_cache, out, step.scale, 0)
    want = step.expected()[0]
    names = ("slot_mapping", "query_start_loc", "seq_lens", "block_table")
    copies = [step.context]
    for name in names:
        copies.append(dataclasses.replace(step.context, **{name: getattr(step.context, name).clone()}))
        assert copies[-1].scratch is step.context.scratch
    for context in (*copies, step.context):
        out.fill_(float("nan"))
        call(context)
        torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
        made = context.scratch[next(key for key in context.scratch if isinstance(key, layout.Layout))]
        tensors = (made.slots, made.start, made.lens, made.table)
        assert all(mine is getattr(context, name) for mine, name in zip(tensors, names, strict=True))
    assert len(step.context.scratch[plan.Plan]) == 5, "memory stays: a capture may hold its address"


def test_a_context_on_another_device_is_refused() -> None:
    """Its addresses would be launched as they are."""
    step = make_step(PLAIN, torch.float32)
    tensors = (step.q, step.k, step.v, step.k_cache, step.v_cache, torch.empty_like(step.q))
    call = prepare(*tensors, step.scale, 0)
    elsewhere = dataclasses.replace(step.context, block_table=step.context.block_table.to("meta"), scratch={})
    with pytest.raises(InputError, match=r"expected a context on cpu, where q is, got one on cpu, meta; build it with"):
        call(elsewhere)
    with pytest.raises(InputError, match="expected all tensors on one device, got cpu, meta; move them to one"):
        prepare(*tensors[:5], tensors[5].to("meta"), step.scale, 0)


# ---- the quick launch


class Compiled:
    """What an ordinary launch returns: takes what a launcher of Triton takes, addresses as numbers above all."""

    def __init__(self, kernel: Any, tensors: dict[int, torch.Tensor], log: list[Any], **metadata: int) -> None:
        self.kernel, self.tensors, self.log = kernel, tensors, log
        sizes = {"global_scratch_size": 0, "profile_scratch_size": 0, **metadata}
        self.metadata = type("Metadata", (), sizes)()
        self.function, self.packed_metadata = 17, (4, 1, 0)

    def run(
        self, g0: int, g1: int, g2: int, stream: int, function: int, packed: Any, *hooks_and_arguments: Any
    ) -> None:
        assert (stream, function, packed) == (0, 17, (4, 1, 0))
        assert hooks_and_arguments[:3] == (None, None, None)
        arguments = hooks_and_arguments[3:]
        assert not any(isinstance(argument, torch.Tensor) for argument in arguments)
        self.log.append("quick")
        self.kernel[(g0, g1, g2)](*[self.tensors.get(a, a) if a and a > 2**32 else a for a in arguments])


class Jit:
    """A kernel of the interpreter whose launches return a compiled one, as on a GPU."""

    def __init__(self, kernel: Any, tensors: dict[int, torch.Tensor], log: list[Any], **metadata: int) -> None:
        self.kernel, self.tensors, self.log, self.metadata = kernel, tensors, log, metadata

    def __getitem__(self, grid: Any) -> Any:
        def launch(*arguments: Any, **options: int) -> Compiled:
            self.log.append("ordinary")
            self.kernel[grid](*arguments, **options)
            return Compiled(self.kernel, self.tensors, self.log, **self.metadata)

        return launch


def quick(monkeypatch: pytest.MonkeyPatch, **metadata: int) -> tuple[dict[int, torch.Tensor], list[str]]:
    tensors: dict[int, torch.Tensor] = {}
    log: list[str] = []
    for name in ("store_rows", "attend_rows", "attend_tiles"):
        monkeypatch.setattr(plan, name, Jit(getattr(plan, name), tensors, log, **metadata))
    addresses = plan.addresses_of

    def noted(*arguments: torch.Tensor) -> tuple[int, ...]:
        tensors.update({a.data_ptr(): a for a in arguments})
        return addresses(*arguments)

    monkeypatch.setattr(plan, "addresses_of", noted)
    monkeypatch.setattr(kernels, "_ALIGNMENT", 1)  # this CPU's addresses are of several kinds
    layout.layout_of.cache_clear()
    return tensors, log


@pytest.mark.parametrize("requests", [[(1, 6), (1, 400)], [(1, 6), (9, 40)]], ids=["rows", "tiles"])
def test_layers_of_one_layout_launch_what_the_first_compiled(
    requests: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, log = quick(monkeypatch)
    step = make_step(dataclasses.replace(PLAIN, requests=requests, head_size=64, heads=(4, 2)), torch.float32)
    want, *caches = step.expected()
    layers = []
    for _ in range(3):
        outs = torch.full_like(step.q, float("nan"))
        layer = (step.q.clone(), step.k.clone(), step.v.clone(), step.k_cache.clone(), step.v_cache.clone(), outs)
        tensors.update({tensor.data_ptr(): tensor for tensor in layer})
        layers.append((layer, prepare(*layer, step.scale, 0)))
    for index, context in enumerate([step.context, static_copy(step.context), step.context]):
        log.clear()
        for _, call in layers:
            call(context)
        if index == 0:
            assert log == ["ordinary"] * 2 + ["quick"] * 4
        if index == 2:
            assert log == ["quick"] * 6
        for (*_, k_cache, v_cache, out), _ in layers:
            torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close([k_cache, v_cache], caches, rtol=0, atol=0, equal_nan=True)
            out.fill_(float("nan"))


@pytest.mark.parametrize("why", ["another triton", "another launcher", "memory of its own", "a profiler"])
def test_what_cannot_be_launched_quickly_goes_the_ordinary_way(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, log = quick(monkeypatch, **({"global_scratch_size": 64} if why == "memory of its own" else {}))
    step = make_step(dataclasses.replace(PLAIN, requests=[(1, 6)], padding=0), torch.float32)
    out = torch.full_like(step.q, float("nan"))
    call = prepare(step.q, step.k, step.v, step.k_cache, step.v_cache, out, step.scale, 0)
    if why == "another triton":
        monkeypatch.delattr(Compiled, "run")
    elif why == "a profiler":
        monkeypatch.setattr(kernels, "has_hooks", lambda: True)
    elif why == "another launcher":
        monkeypatch.setattr(Compiled, "run", lambda self, grid, stream: None)
    for _ in range(3):
        call(step.context)
    assert log == ["ordinary"] * 6
    torch.testing.assert_close(out.double(), step.expected()[0], rtol=1e-5, atol=1e-5)


def test_a_hook_is_noticed_however_it_was_put_there(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = triton.knobs.runtime
    assert not launch.has_hooks()
    hook = lambda metadata: None  # noqa: E731
    for chain in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        chain.add(hook)
        assert launch.has_hooks()
        chain.remove(hook)
        assert not launch.has_hooks()
    monkeypatch.setattr(runtime, "launch_exit_hook", hook)
    assert launch.has_hooks()
    monkeypatch.setattr(runtime, "launch_exit_hook", None)
    monkeypatch.setattr(runtime, "launch_enter_hook", None)
    assert not launch.has_hooks()


def test_another_alignment_is_another_layout() -> None:
    """A kernel that was compiled for addresses that are multiples of 16 must not get others."""
    step = make_step(dataclasses.replace(PLAIN, requests=[(1, 6)], padding=0, head_size=6, heads=(1, 1)), torch.float32)
    memory = torch.zeros(512)
    first = -memory.data_ptr() % 256 // 4
    for shift in (0, 1, 64, 3):  # elements of 4 bytes
        q = memory[first + shift : first + shift + 6].view(1, 1, 6)
        prepare(q, step.k, step.v, step.k_cache, step.v_cache, step.q, 1.0, 0)(step.context)
    assert len(step.context.scratch[plan.Plan]) == 3


def test_other_dtypes_are_another_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that was compiled for K or V in one dtype must not get another one."""
    tensors, log = quick(monkeypatch)
    step = make_step(dataclasses.replace(PLAIN, requests=[(1, 6)], padding=0), torch.float32)
    first = (step.q, step.k, step.v, step.k_cache, step.v_cache, torch.empty_like(step.q))
    for place in (None, 1, 2, 3, 4, 5):
        layer = [tensor.half() if index == place else tensor for index, tensor in enumerate(first)]
        tensors.update({tensor.data_ptr(): tensor for tensor in layer})
        log.clear()
        prepare(*layer, step.scale, 0)(dataclasses.replace(step.context, scratch={}))
        assert log == ["ordinary"] * 2, place
