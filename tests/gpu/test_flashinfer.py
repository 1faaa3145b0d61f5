"""FlashInfer's attention on the device: against plain loops in float64, planned anew under one capture, in an engine.

FlashInfer compiles its kernels at their first use, a minute each. These need four of them: heads of 128 in bf16, decode
and prompts, without a window and with one. On the tape a stand-in for the package tries the tests themselves out.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import pad

from piecework import use_context
from piecework.ops import attention_rows, attention_table
from piecework.ops.attention import IMPLEMENTATIONS, AttentionContext, AttentionSpec, paged_attention
from piecework.ops.attention_choice import use_attention_backend
from piecework.runtime.engine import default_model
from piecework.runtime.engine.engine import LLMEngine
from piecework.runtime.engine.output import RequestOutput
from piecework.runtime.engine.params import SamplingParams

from ..ops import fake_flashinfer
from .test_attention import error, expected, grown

BLOCK, DTYPE = 16, torch.bfloat16
NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 8, 2, 128
SCALE = HEAD_SIZE**-0.5
WITHIN = 1e-2
"""Relative norm of a difference: bf16 rounds what comes out, and the weights before they meet V, to 4e-3 each."""
BATCHES = {
    "decode": ((1, 1, 1, 1), (300, 1, 17, 1064)),
    "prompts": ((5, 200, 33), (5, 200, 33)),
    "cached": ((5, 64, 33), (205, 64, 1057)),
    "mixed": ((5, 1, 0, 77), (5, 200, 0, 133)),
}
"""New tokens and length of each request."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),  # a build is a part of the first test that needs it
    # What its dependency says when it cannot compile something optional.
    pytest.mark.filterwarnings("ignore::UserWarning:tvm_ffi"),
]
# Each group needs kernels of its own. Two workers that want the same ones wait for one build.
without_window = pytest.mark.xdist_group("flashinfer")
with_window = pytest.mark.xdist_group("flashinfer, windows")


@pytest.fixture(autouse=True)
def flashinfer(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Attention is FlashInfer's; where it cannot be, the test is skipped with its reason."""
    if gpu.on_tape:
        monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer.module())
        monkeypatch.setattr(attention_rows, "FLASHINFER_DEVICES", ("cuda", "cpu"))
        attention_table.choose.cache_clear()
    sizes = {"num_heads": NUM_HEADS, "num_kv_heads": NUM_KV_HEADS, "head_size": HEAD_SIZE, "block_size": BLOCK}
    [row] = [row for row in IMPLEMENTATIONS if row.name == "flashinfer"]
    reason = row.reject(AttentionSpec(device_type=gpu.device, dtype=DTYPE, cache_dtype=DTYPE, **sizes))
    if reason is not None:
        pytest.skip(f"flashinfer: {reason}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it and its dependencies warn of when they are imported is theirs
        importlib.import_module("flashinfer")
    with use_attention_backend("flashinfer"):
        yield
    attention_table.choose.cache_clear()


# ---- single calls


@dataclasses.dataclass(kw_only=True)
class Call:
    """One call's arguments. Rows of padding hold NaN."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    own: AttentionContext
    """Of the step, not padded."""
    tables: list[list[int]]
    window: int

    def run(self, context: AttentionContext) -> torch.Tensor:
        out = torch.full(self.q.shape, float("nan"), dtype=DTYPE, device=self.q.device)
        caches = self.k_cache.clone(), self.v_cache.clone()
        with use_context(context):
            paged_attention(self.q, self.k, self.v, *caches, out, SCALE, self.window)
        return out

    def check(self, out: torch.Tensor) -> None:
        total = self.own.num_tokens
        stored = self.k_cache.clone(), self.v_cache.clone()
        for cache, new in zip(stored, (self.k, self.v), strict=True):
            cache.view(-1, NUM_KV_HEADS, HEAD_SIZE)[self.own.slot_mapping] = new[:total]
        assert error(out[:total], expected(self.q, *stored, self.own, self.tables, SCALE, self.window)) < WITHIN
        assert not out[total:].any(), "padded rows are zeros"

    def static(self, num_reqs: int) -> AttentionContext:
        """A static copy of so many request slots, planned for."""
        static = grown(self.own, self.q.shape[0], num_reqs)
        static.plan_for(self.own)
        return static


def context_of(
    gpu: Any, query_lens: Sequence[int], seq_lens: Sequence[int]
) -> tuple[AttentionContext, list[list[int]], int]:
    """A step whose blocks lie in any order, its block tables, and of how many blocks they are."""
    needed = [-(-seq_len // BLOCK) for seq_len in seq_lens]
    order = torch.randperm(sum(needed) + 4).tolist()
    tables = [[order.pop() for _ in range(n)] for n in needed]
    sizes = {"query_lens": query_lens, "seq_lens": seq_lens, "block_tables": tables, "block_size": BLOCK}
    return AttentionContext.build(**sizes, device=gpu.device), tables, sum(needed) + 4


def tensors_of(gpu: Any, num_rows: int, num_blocks: int) -> list[torch.Tensor]:
    """q, k, v, k_cache and v_cache; as in a model q, k and v are views of one projection."""
    heads = torch.randn(num_rows, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_SIZE).to(DTYPE).to(gpu.device)
    caches = torch.randn(2, num_blocks, BLOCK, NUM_KV_HEADS, HEAD_SIZE, device=gpu.device).to(DTYPE)
    return [*heads.split([NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], 1), *caches.unbind()]


def call_of(gpu: Any, batch: str, *, padding: int = 3, window: int = 0, unwritten: float = 1000.0) -> Call:
    """`unwritten`: what lies behind the last token of a request."""
    query_lens, seq_lens = BATCHES[batch]
    own, tables, num_blocks = context_of(gpu, query_lens, seq_lens)
    q, k, v, k_cache, v_cache = tensors_of(gpu, sum(query_lens) + padding, num_blocks)
    for tensor in (q, k, v):
        tensor[sum(query_lens) :] = float("nan")
    for table, seq_len in zip(tables, seq_lens, strict=True):
        if seq_len % BLOCK:
            k_cache[table[-1], seq_len % BLOCK :] = v_cache[table[-1], seq_len % BLOCK :] = unwritten
    return Call(q=q, k=k, v=v, k_cache=k_cache, v_cache=v_cache, own=own, tables=tables, window=window)


def padded(context: AttentionContext, num_tokens: int) -> AttentionContext:
    slots = context.slot_mapping
    return dataclasses.replace(context, slot_mapping=pad(slots, (0, num_tokens - len(slots)), value=-1), scratch={})


@without_window
@pytest.mark.parametrize("unwritten", [1000.0, float("nan")])
@pytest.mark.parametrize("batch", BATCHES)
def test_a_steps_own_context(gpu: Any, batch: str, unwritten: float) -> None:
    call = call_of(gpu, batch, unwritten=unwritten)
    for num_layers in (2, 1):  # the second layer follows the plan of the first, and another step has its own
        context = padded(call.own, len(call.q))
        for _ in range(num_layers):
            call.check(call.run(context))


@without_window
@pytest.mark.parametrize("slots", ["more than rows", "few"])
@pytest.mark.parametrize("batch", BATCHES)
def test_a_static_context(gpu: Any, batch: str, slots: str) -> None:
    call = call_of(gpu, batch)
    static = call.static(len(call.q) + 2 if slots == "more than rows" else call.own.num_reqs)
    for _ in range(2):
        call.check(call.run(static))
    assert static.plan_key() is not None


@without_window
def test_prompts_change_the_key_of_a_decode_capture(gpu: Any) -> None:
    decode, mixed = call_of(gpu, "decode", padding=79), call_of(gpu, "mixed", padding=0)
    static = grown(decode.own, 83, 90, num_blocks=80)
    static.plan_for(decode.own)
    decode.check(decode.run(static))
    captured = static.plan_key()
    for call, same in ((decode, True), (mixed, False), (decode, False)):
        refill(static, call.own)
        assert (static.plan_key() == captured) == same
        call.check(call.run(static))


def refill(static: AttentionContext, own: AttentionContext | None) -> None:
    """What a runtime does before a replay; None: nothing but padding."""
    if own is None:
        static.slot_mapping.fill_(-1)
        for tensor in (static.query_start_loc, static.seq_lens, static.block_table):
            tensor.zero_()
    else:
        filled = grown(own, len(static.slot_mapping), static.num_reqs, static.block_table.shape[1])
        for name in ("slot_mapping", "query_start_loc", "seq_lens", "block_table"):
            getattr(static, name).copy_(getattr(filled, name))
    static.plan_for(own)


STEPS = {
    "decode": (
        (4, 4),
        [((1, 1), (5, 1)), ((1, 1), (9, 130)), ((1,) * 4, (1, 10000, 64, 1500)), ((0, 1), (0, 32768)), ((1,), (1,))],
    ),
    "prompts": (
        (48, 3),
        [((7, 1), (7, 3)), ((40, 8), (40, 130)), ((1, 0, 33), (1000, 0, 33)), ((48,), (32768,)), ((16,), (16,))],
    ),
}
"""Rows and request slots of a capture; the steps that it serves, and with the first of which it was made."""


@without_window
@pytest.mark.parametrize("kind", STEPS)
def test_one_capture_follows_the_plans_of_many_steps(gpu: Any, kind: str) -> None:
    """In two layers, whose caches hold the tokens of all steps."""
    (rows, slots), steps = STEPS[kind]
    room = 32768 // BLOCK
    layers = [(*tensors_of(gpu, rows, room + 800), torch.empty(rows, NUM_HEADS, HEAD_SIZE)) for _ in range(2)]
    layers = [(*tensors, out.to(gpu.device, DTYPE)) for *tensors, out in layers]
    first, *_ = context_of(gpu, *steps[0])
    static = grown(first, rows, slots, num_blocks=room)
    static.plan_for(first)

    def call() -> None:
        with use_context(static):
            for layer in layers:
                paged_attention(*layer, SCALE)

    call()
    replay = captured(gpu, call)
    key = static.plan_key()
    for query_lens, seq_lens in (*steps, steps[1]):
        own, tables, _ = context_of(gpu, query_lens, seq_lens)
        refill(static, own)
        assert static.plan_key() == key
        for *_, out in layers:
            out.fill_(float("nan"))
        replay()
        total = sum(query_lens)
        for q, _, _, k_cache, v_cache, out in layers:
            want = expected(q, k_cache, v_cache, own, tables, SCALE, 0)
            assert error(out[:total], want) < WITHIN
            assert not out[total:].any()
        before = layers[0][-1].clone()
        replay()
        assert torch.equal(layers[0][-1], before)
    refill(static, None)
    replay()
    assert not any(out.any() for *_, out in layers), "nothing but padding"


def captured(gpu: Any, call: Callable[[], None]) -> Callable[[], None]:
    """A replay of a capture; on the tape the call itself."""
    if gpu.on_tape:
        return call
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


# ---- in an engine

PROMPTS = ("Early in the morning", "She was", "A good tool is one that")
NUM_NEW, NUM_TOP = 16, 8
LOGITS_WITHIN = 0.15
"""Of log-probabilities: bf16 rounds logits of up to 8 to steps of 0.03, after two layers that round in their way."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers with heads of 128 and random weights, behind the default model's tokenizer."""
    folder = tmp_path_factory.mktemp("flashinfer") / "model"
    shutil.copytree(default_model.path(), folder)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    heads = {"num_attention_heads": NUM_HEADS, "num_key_value_heads": NUM_KV_HEADS, "head_dim": HEAD_SIZE}
    config = json.loads((folder / "config.json").read_text())
    config |= {**sizes, **heads, "dtype": "bfloat16", "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(3)

    def matrix(rows: int, columns: int, std: float) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * std).to(DTYPE)

    weights = {"model.embed_tokens.weight": matrix(config["vocab_size"], 256, 1.0)}
    weights |= {
        "lm_head.weight": matrix(config["vocab_size"], 256, 0.1),
        "model.norm.weight": torch.ones(256).to(DTYPE),
    }
    for layer in range(2):
        names = {"q": NUM_HEADS * HEAD_SIZE, "k": NUM_KV_HEADS * HEAD_SIZE, "v": NUM_KV_HEADS * HEAD_SIZE}
        own = {f"self_attn.{name}_proj": matrix(rows, 256, 1 / 16) for name, rows in names.items()}
        own |= {"self_attn.o_proj": matrix(256, NUM_HEADS * HEAD_SIZE, 1 / 16)}
        own |= {f"mlp.{name}_proj": matrix(512, 256, 1 / 16) for name in ("gate", "up")}
        own |= {"mlp.down_proj": matrix(256, 512, 1 / 16)}
        own |= {name: torch.ones(256).to(DTYPE) for name in ("input_layernorm", "post_attention_layernorm")}
        weights |= {f"model.layers.{layer}.{name}.weight": tensor for name, tensor in own.items()}
    save_file(weights, folder / "model.safetensors")
    return folder


def num_same(ours: RequestOutput, theirs: RequestOutput) -> int:
    """Places with the same token and nearly the same likeliest ones, up to one where two tokens tie."""
    assert ours.logprobs is not None
    assert theirs.logprobs is not None
    for place, (one, other) in enumerate(zip(ours.logprobs, theirs.logprobs, strict=True)):
        tops = dict(one.top), dict(other.top)
        both = tops[0].keys() & tops[1].keys()
        assert max(abs(tops[0][token] - tops[1][token]) for token in both) < LOGITS_WITHIN
        for top, last in zip(tops, (min(tops[1].values()), min(tops[0].values())), strict=True):
            assert all(top[token] < last + LOGITS_WITHIN for token in top.keys() - both), "one may just fall out"
        if one.token_id != other.token_id:
            assert abs(one.logprob - other.logprob) < LOGITS_WITHIN
            assert {one.token_id, other.token_id} <= both
            return place
    return len(ours.logprobs)


@without_window
@pytest.mark.parametrize("backend", ["full", "breakable"])
def test_an_engine_writes_what_it_writes_on_triton(gpu: Any, backend: str, checkpoint: Path) -> None:
    params = SamplingParams(max_new_tokens=NUM_NEW, ignore_eos=True, logprobs=NUM_TOP)
    outputs: dict[str, list[RequestOutput]] = {}
    for attention in ("torch" if gpu.on_tape else "triton", "flashinfer"):
        config = gpu.config(backend, prefill=(8, 64), decode=(1, 4), attention_backend=attention)
        with LLMEngine(checkpoint, config, device=gpu.device) as engine:
            # The second time every step is a replay, the third time of another bucket.
            rounds = [engine.generate(prompts, params) for prompts in (PROMPTS, PROMPTS, PROMPTS[:1])]
            counters = engine.runtime.counters.as_dict()
        assert counters["replays"] > 2 * NUM_NEW
        assert not counters["fallbacks"]
        outputs[attention] = [output for each in rounds for output in each]
    same = [num_same(*pair) for pair in zip(*outputs.values(), strict=True)]
    assert sum(same) > len(same) * NUM_NEW // 2, same


# ---- windows, last: they need other kernels


@with_window
@pytest.mark.parametrize("batch", ["decode", "mixed"])
def test_a_window(gpu: Any, batch: str) -> None:
    call = call_of(gpu, batch, window=70)
    call.check(call.run(padded(call.own, len(call.q))))
    call.check(call.run(call.static(len(call.q) + 2)))
