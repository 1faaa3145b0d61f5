"""The Triton kernels at odd sizes, and replays of a small model that calls them, for compute-sanitizer to watch.

    compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 python tests/gpu/memcheck.py

A plain script, since the sanitizer slows everything down. Nothing is taken from torch's caching allocator while the
kernels run, so that each tensor ends where its memory does and a byte beyond it is seen; the model's weights and caches
are allocated like that as well, and only its captures need the allocator. Results are compared with torch's operators,
so a clean run is not one that did nothing. Exits with 1 if one is wrong.

On a CPU: `TRITON_INTERPRET=1 python tests/gpu/memcheck.py --device cpu`, a few of the cases.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import piecework as pw
from piecework.ops import torch_native
from piecework.ops.attention import AttentionContext
from piecework.ops.triton import paged_attention as kernels
from piecework.runtime.engine.config import ModelConfig
from piecework.runtime.engine.kv_cache import allocate_kv_cache
from piecework.runtime.engine.models import build_model
from piecework.runtime.engine.rope import Rope

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Of results whose elements are about 1."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Sizes for which the kernels are compiled anew."""

    dtype: torch.dtype
    num_kv_heads: int
    group_size: int
    head_size: int
    block_size: int
    window_size: int = 0

    def __str__(self) -> str:
        window = f" window {self.window_size}" if self.window_size else ""
        return (
            f"{str(self.dtype).removeprefix('torch.')} heads {self.num_kv_heads} x {self.group_size} x "
            f"{self.head_size} blocks of {self.block_size}{window}"
        )


def layout(dtype: torch.dtype, kv_heads: int, group: int, head: int, block: int, window: int = 0) -> Layout:
    return Layout(
        dtype=dtype, num_kv_heads=kv_heads, group_size=group, head_size=head, block_size=block, window_size=window
    )


LAYOUTS = (
    layout(torch.bfloat16, 2, 3, 80, 16),
    layout(torch.float32, 1, 7, 96, 3, window=19),
    layout(torch.bfloat16, 3, 1, 96, 1),
    layout(torch.float32, 2, 3, 80, 1),
    layout(torch.bfloat16, 1, 7, 128, 3, window=33),
    layout(torch.float32, 3, 1, 96, 16),
    layout(torch.bfloat16, 2, 4, 128, 16),
    layout(torch.float16, 1, 3, 80, 3),
    layout(torch.bfloat16, 1, 1, 256, 3),
    layout(torch.float32, 1, 1, 64, 1, window=1),
)
ON_CPU = 2
"""Layouts that the interpreter tries."""

LENGTHS = (1, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 300, 1025)
"""Of requests that decode: around the ends of tiles and of what splits of a row take."""
PROMPTS = ((17, 17), (1, 5), (0, 3), (64, 64), (65, 130), (3, 41), (0, 0))
"""(new tokens, length) of requests with prompts."""
SHORT_LENGTHS, SHORT_PROMPTS = (1, 16, 17), ((5, 5), (0, 3), (3, 19))
"""The same for the interpreter."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    name: str
    query_lens: Sequence[int]
    seq_lens: Sequence[int]


def batches(on_cpu: bool) -> Iterator[Batch]:
    lengths, prompts = (SHORT_LENGTHS, SHORT_PROMPTS) if on_cpu else (LENGTHS, PROMPTS)
    yield Batch(name="decode", query_lens=[1] * len(lengths), seq_lens=lengths)
    yield Batch(name="prompt", query_lens=[new for new, _ in prompts], seq_lens=[length for _, length in prompts])


@dataclasses.dataclass(kw_only=True, slots=True)
class Case:
    """One call's tensors, each as large as it has to be."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    scale: float
    window_size: int

    def call(self, form: str, context: AttentionContext) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(out, k_cache, v_cache) after a call with caches of its own; `prepared`: after the third call of three."""
        caches = self.k_cache.clone(), self.v_cache.clone()
        out = torch.full(self.q.shape, float("nan"), dtype=self.q.dtype, device=self.q.device)
        tensors = (self.q, self.k, self.v, *caches, out, self.scale, self.window_size)
        if form == "torch":
            torch_native.paged_attention(*tensors, context)
        elif form == "plain":
            kernels.paged_attention(*tensors, context)
        else:
            run = kernels.prepare(*tensors)
            for _ in range(3):  # each finds counters as the one before left them
                run(context)
        return (out, *caches)


def random_case(shape: Layout, batch: Batch, device: str, padding: int) -> tuple[Case, AttentionContext]:
    """A case whose blocks lie in any order; what was never written, and the rows of padding, are NaN."""
    needed = [-(-length // shape.block_size) for length in batch.seq_lens]
    order = torch.randperm(sum(needed)).tolist()
    tables = [[order.pop() for _ in range(count)] for count in needed]
    context = AttentionContext.build(
        query_lens=batch.query_lens,
        seq_lens=batch.seq_lens,
        block_tables=tables,
        block_size=shape.block_size,
        num_blocks=sum(needed),
        device=device,
    )
    context.check()
    in_cache = (sum(needed), shape.block_size, shape.num_kv_heads, shape.head_size)
    caches = [torch.full(in_cache, float("nan"), dtype=shape.dtype, device=device) for _ in range(2)]
    cached = AttentionContext.build(  # all tokens of all requests, as if they were new
        query_lens=batch.seq_lens, seq_lens=batch.seq_lens, block_tables=tables, block_size=shape.block_size
    )
    for cache in caches:
        rows = torch.randn(sum(batch.seq_lens), *in_cache[2:]).to(shape.dtype)
        cache.flatten(0, 1)[cached.slot_mapping.to(device)] = rows.to(device)
    num_rows = sum(batch.query_lens) + padding
    num_heads = shape.num_kv_heads * shape.group_size
    # Views of one projection, as in a model: v ends where the memory does.
    heads = torch.randn(num_rows, num_heads + 2 * shape.num_kv_heads, shape.head_size).to(shape.dtype)
    heads[num_rows - padding :] = float("nan")
    q, k, v = heads.to(device).split([num_heads, shape.num_kv_heads, shape.num_kv_heads], 1)
    scale = shape.head_size**-0.5
    case = Case(q=q, k=k, v=v, k_cache=caches[0], v_cache=caches[1], scale=scale, window_size=shape.window_size)
    return case, context


def padded(context: AttentionContext, padding: int) -> AttentionContext:
    """The step's own context for inputs with rows of padding."""
    slots = torch.nn.functional.pad(context.slot_mapping, (0, padding), value=-1)
    return dataclasses.replace(context, slot_mapping=slots, scratch={})


def static(context: AttentionContext, padding: int) -> AttentionContext:
    """The static copy that a runtime makes, with two empty requests and a block more than needed."""
    pad = torch.nn.functional.pad
    last = context.query_start_loc[-1:].expand(2)
    return context.as_static(
        {
            "slot_mapping": pad(context.slot_mapping, (0, padding), value=-1),
            "query_start_loc": torch.cat([context.query_start_loc, last]),
            "seq_lens": pad(context.seq_lens, (0, 2)),
            "block_table": pad(context.block_table, (0, 1, 0, 2)),
        }
    )


class Checks:
    """What was compared, and what was wrong."""

    def __init__(self) -> None:
        self.num_compared = 0
        self.wrong: list[str] = []

    def close(self, where: str, got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
        self.num_compared += 1
        try:
            torch.testing.assert_close(got.float(), expected.float(), atol=tolerance, rtol=tolerance, equal_nan=True)
        except AssertionError as error:
            self.wrong.append(f"{where}: {str(error).splitlines()[0]}")
            print("WRONG", self.wrong[-1], flush=True)


def check_kernels(shape: Layout, device: str, checks: Checks) -> None:
    for batch in batches(device == "cpu"):
        for padding in (0, 5):
            case, context = random_case(shape, batch, device, padding)
            own = padded(context, padding)
            out, *caches = case.call("torch", own)
            for kind, of_kind in (("own", own), ("static", static(context, padding))):
                for form in ("plain", "prepared"):
                    where = f"{shape}: {batch.name}, {padding} rows of padding, {kind} context, {form}"
                    got, *got_caches = case.call(form, of_kind)
                    checks.close(where, got, out, TOLERANCE[shape.dtype])
                    for name, cache, expected in zip(("k_cache", "v_cache"), got_caches, caches, strict=True):
                        checks.close(f"{where}, {name}", cache, expected, 0)


BACKENDS = ("full", "breakable", "tc_piecewise")
MODEL_BLOCK, BLOCKS_EACH, NUM_REQS = 3, 12, 3
STEPS = (("prefill", (7, 17, 1)), ("decode", (1, 1, 1)), ("decode", (1, 1)), ("prefill", (2, 9)), ("decode", (1, 1)))


def odd_model(device: str) -> tuple[torch.nn.Module, ModelConfig]:
    """Two layers with three query heads for each KV head, of 80 elements."""
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=61,
        hidden_size=72,
        intermediate_size=100,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_size=80,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope=Rope(theta=10000.0),
        qkv_bias=True,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        window_sizes=(0, 11),
        tie_word_embeddings=True,
        dtype=None,
        eos_token_ids=frozenset(),
    )
    causal = build_model(config)
    causal.allocate(torch.device(device), torch.float32)
    with torch.inference_mode():
        for parameter in causal.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.2)
    allocate_kv_cache(causal, config, num_blocks=NUM_REQS * BLOCKS_EACH, block_size=MODEL_BLOCK)
    return causal.model, config


def run_steps(model: torch.nn.Module, vocab_size: int, backend: str, device: str) -> tuple[list[torch.Tensor], Any]:
    """The outputs of the steps, twice: the second time captured ones are replays."""
    phase = {"backend": backend, "compiler": "eager", "max_padding_waste": 1.0}
    config = pw.GraphConfig(
        prefill={**phase, "buckets": (13, 29)},
        decode={**phase, "buckets": (3,)},
        capture_device="cuda" if device == "cuda" else "tape",
    )
    tables = [list(range(r, NUM_REQS * BLOCKS_EACH, NUM_REQS)) for r in range(NUM_REQS)]
    outputs = []
    with pw.Runtime(
        model,
        config,
        dynamic_dims={"input_ids": 0, "positions": 0},
        context_sizes={"requests": NUM_REQS, "blocks": BLOCKS_EACH},
    ) as runtime:
        for _ in range(2):
            lens = [0] * NUM_REQS
            generator = torch.Generator().manual_seed(3)
            for name, query_lens in STEPS:
                positions = [lens[r] + i for r, new in enumerate(query_lens) for i in range(new)]
                lens = [old + new for old, new in zip(lens, query_lens, strict=False)]
                context = AttentionContext.build(
                    query_lens=query_lens,
                    seq_lens=lens,
                    block_tables=tables[: len(lens)],
                    block_size=MODEL_BLOCK,
                    num_blocks=NUM_REQS * BLOCKS_EACH,
                    device=device,
                )
                context.check()
                ids = torch.randint(0, vocab_size, (len(positions),), generator=generator).to(device)
                inputs = {"input_ids": ids, "positions": torch.tensor(positions, device=device)}
                outputs.append(runtime.run(name, inputs, context=context).clone())
        return outputs, runtime.counters.as_dict()


def check_replays(model: torch.nn.Module, vocab_size: int, device: str, checks: Checks) -> None:
    expected, _ = run_steps(model, vocab_size, "disabled", device)
    for backend in BACKENDS:
        got, counters = run_steps(model, vocab_size, backend, device)
        for number, (output, plain) in enumerate(zip(got, expected, strict=True)):
            checks.close(f"{backend}, step {number}", output, plain, 1e-4)
        if (counters["captures"], counters["replays"]) != (3, 2 * len(STEPS) - 3):
            checks.wrong.append(f"{backend}: {counters}")
            print("WRONG", checks.wrong[-1], flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    device = parser.parse_args().device
    on_cpu = device == "cpu"
    checks = Checks()
    torch.manual_seed(0)
    if not on_cpu:
        torch.cuda.init()
        torch.cuda.caching_allocator_enable(False)
    with torch.inference_mode():
        for shape in LAYOUTS[:ON_CPU] if on_cpu else LAYOUTS:
            started = time.monotonic()
            check_kernels(shape, device, checks)
            print(f"{time.monotonic() - started:6.1f} s  {shape}", flush=True)
    model, config = odd_model(device)
    if not on_cpu:
        torch.cuda.caching_allocator_enable(True)
    started = time.monotonic()
    check_replays(model, config.vocab_size, device, checks)
    print(f"{time.monotonic() - started:6.1f} s  replays of {', '.join(BACKENDS)}", flush=True)
    print(f"memcheck: {checks.num_compared} comparisons, {len(checks.wrong)} wrong")
    return int(bool(checks.wrong))


if __name__ == "__main__":
    raise SystemExit(main())
