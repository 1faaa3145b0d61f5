"""Whole-forward compile on a CUDA device: the same tokens, logits near those of float32, and no copy of the KV cache.

On the tape the same tests compile for the CPU; what reads the GPU's memory is left out there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import piecework as pw
from piecework.ops import attention
from piecework.runtime.engine.engine import LLMEngine
from piecework.runtime.engine.kv_cache import allocate_kv_cache
from piecework.runtime.engine.params import SamplingParams
from piecework.runtime.warm_up import WarmUp

from ..runtime.whole_checks import allocations, has_number, start_twice
from .conftest import HIDDEN, StepContext
from .test_llama import (
    BEYOND_PLAIN,
    BLOCK_SIZE,
    BLOCKS_EACH,
    LLAMA_3_8B,
    NUM_BLOCKS,
    SMALL,
    WITHIN,
    Step,
    difference,
    in_bfloat16,
    model_config,
    random_model,
    steps,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    pytest.mark.timeout(200),
]

AUTOTUNED = "max-autotune-no-cudagraphs"
PROMPTS = ("Early in the morning", "She was", "A good tool is one that")
PARAMS = SamplingParams(max_new_tokens=16)
MANY_BLOCKS = 4099
"""A prime: no other tensor has as many elements as a cache of so many blocks."""
NUM_ROWS = 65537
"""Of the cache of a model whose store and attention are two operators."""


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole forwards are taken, whatever is measured: their results are what a test is about."""
    monkeypatch.setattr(WarmUp, "seconds", lambda *arguments: [2e-3, 1e-3])


def compiled_whole(runtime: pw.Runtime) -> list[tuple[str, int | None]]:
    """Phase and bucket of each whole forward that was compiled."""
    return sorted((str(e.scope.phase), e.scope.bucket) for e in runtime.events if e.kind == "compile_whole")


@pytest.fixture(scope="module")
def tokens() -> list[tuple[int, ...]]:
    plain = {"backend": "disabled", "compiler": "eager"}
    with LLMEngine(None, pw.GraphConfig(prefill=plain, decode=plain), device="cpu") as engine:
        return [output.token_ids for output in engine.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize(("compiler", "mode"), [("eager", AUTOTUNED), ("inductor", "default")])
def test_greedy_tokens_are_those_without(
    gpu: Any, taken: None, tokens: list[tuple[int, ...]], compiler: str, mode: str
) -> None:
    """In float32; without whole-forward compile, test_engine.py holds the same tokens against the CPU."""
    compiler = "aot_eager" if gpu.on_tape and compiler == "inductor" else compiler
    config = gpu.config(
        "full", compiler, prefill=(8, 64), decode=(1, 4), enable_torch_compile=True, torch_compile_mode=mode
    )
    with LLMEngine(None, config, device=gpu.device) as engine:
        for _ in range(2):
            assert [output.token_ids for output in engine.generate(PROMPTS, PARAMS)] == tokens
        # The prompts are one step of 64 tokens, above the bound; all others decode in the bucket 4.
        assert compiled_whole(engine.runtime) == [("decode", 4)]
        counters = engine.runtime.counters.as_dict()
        kinds = {(str(e.phase), e.bucket): e.program.kind for e in engine.runtime.entries if e.num_steps}
    assert kinds == {("prefill", 64): "eager" if compiler == "eager" else "general", ("decode", 4): "whole"}
    assert not counters["fallbacks"]
    assert (counters["captures"], counters["replays"]) == (2, 2 * 16 - 2)
    # Phases of Inductor share the trace of the whole forward.
    assert (counters["compiles_whole"], counters["traces"]) == (1, 2 if compiler == "aot_eager" else 1)


def decoder(gpu: Any, sizes: dict[str, Any], num_blocks: int) -> tuple[Any, list[Step]]:
    """A decoder in bf16 with random weights, and steps with the logits that its float32 twin computes."""
    config = model_config(sizes)
    model = random_model(config, gpu.device)
    allocate_kv_cache(model, config, num_blocks=num_blocks, block_size=BLOCK_SIZE)
    made = list(steps(config, gpu.device))

    def logits(step: Step) -> torch.Tensor:
        with pw.use_context(step.context):
            result: torch.Tensor = model.logits(model.model(**step.inputs)[step.last_rows])
        return result

    native = tuple(row for row in attention.IMPLEMENTATIONS if row.name == "torch_native")
    with pytest.MonkeyPatch.context() as patched, torch.inference_mode():
        patched.setattr(attention, "IMPLEMENTATIONS", native)
        for step in made:
            step.logits = logits(step)
        in_bfloat16(model, config, gpu.device)
        allocate_kv_cache(model, config, num_blocks=num_blocks, block_size=BLOCK_SIZE)
        for step in made:
            step.plain = difference(logits(step), step)
    allocate_kv_cache(model, config, num_blocks=num_blocks, block_size=BLOCK_SIZE)
    return model, made


def runtime_of(gpu: Any, model: torch.nn.Module) -> pw.Runtime:
    options = {"enable_torch_compile": True, "torch_compile_mode": "default"}
    return pw.Runtime(
        model,
        gpu.config("full", "eager", prefill=(128,), decode=(4,), **options),
        dynamic_dims={"input_ids": {0: "tokens"}, "positions": {0: "tokens"}},
        context_sizes={"requests": 4, "blocks": BLOCKS_EACH},
    )


def test_logits_in_bf16_are_near_those_of_float32(gpu: Any, taken: None) -> None:
    """Four layers of the width of Llama 3 8B, within the tolerances of test_llama.py."""
    sizes = SMALL if gpu.on_tape else {**LLAMA_3_8B, "num_layers": 4}
    model, made = decoder(gpu, sizes, NUM_BLOCKS)
    with runtime_of(gpu, model.model) as runtime:
        for turn in ("first", "again"):
            for number, step in enumerate(made):
                hidden = runtime.run(step.phase, step.inputs, context=step.context)
                with torch.inference_mode():
                    got = difference(model.logits(hidden[step.last_rows]), step)
                print(f"{turn} {number} {step.phase}: {got:.4f} from float32; plain bf16 {step.plain:.4f}")
                assert 0 < got < min(WITHIN, BEYOND_PLAIN * step.plain), (turn, number, step.phase)
        assert compiled_whole(runtime) == [("decode", 4)]
        assert runtime.counters["replays"] == 2 * len(made) - 2
        assert not runtime.counters["fallbacks"]


def generated_code(runtime: pw.Runtime, inputs: Any, context: object) -> str:
    """What Inductor generates in a step that compiles one whole forward and nothing else."""
    from torch._inductor.utils import fresh_cache, run_and_get_code

    with fresh_cache():
        _, codes = run_and_get_code(runtime.run, "decode", inputs, context=context)
    (code,) = codes
    return str(code)


def peak_bytes(runtime: pw.Runtime, inputs: Any, context: object) -> int:
    """What the whole forward takes of the GPU at most beside what is there, uncaptured."""
    (entry,) = (entry for entry in runtime.entries if entry.program.kind == "whole")
    num_tokens = len(inputs["input_ids"])
    assert entry.bucket == num_tokens, "no padding"
    before = 0
    for _ in range(2):  # the first call sets up
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with torch.inference_mode(), pw.use_context(context):
            entry.program(inputs, {"tokens": num_tokens})
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def check_no_copy(gpu: Any, runtime: pw.Runtime, cache: torch.Tensor, inputs: Any, context: object) -> str:
    """Nothing is allocated or worked through that is as large as the cache of one layer; returns the code."""
    code = generated_code(runtime, inputs, context)
    sizes = list(allocations(code))
    assert sizes, "the code allocates nothing: it is not what was expected"
    assert max(sizes) < cache.numel()
    assert not has_number(code, cache.numel())
    if not gpu.on_tape:
        assert peak_bytes(runtime, inputs, context) < cache.nbytes
    return code


def test_the_kv_cache_is_not_copied(gpu: Any, taken: None) -> None:
    model, made = decoder(gpu, SMALL, MANY_BLOCKS)
    cache = model.model.layers[0].self_attn.k_cache
    step = next(step for step in made if step.phase == "decode")
    with runtime_of(gpu, model.model) as runtime:
        for prompt in made[:2]:
            runtime.run(prompt.phase, prompt.inputs, context=prompt.context)
        code = check_no_copy(gpu, runtime, cache, step.inputs, step.context)
        assert code.count("ops.piecework.rotary_paged_attention.default(") == SMALL["num_layers"]
        hidden = runtime.run("decode", step.inputs, context=step.context)
        with torch.inference_mode():
            assert 0 < difference(model.logits(hidden[step.last_rows]), step) < min(WITHIN, BEYOND_PLAIN * step.plain)


@pw.split_op(mutates_args=("cache",), name="piecework_gpu::store_rows", capturable=True)
def store_rows(x: torch.Tensor, cache: torch.Tensor) -> None:
    """Stores each row at its slot."""
    cache.index_copy_(0, pw.get_context(StepContext).slots, x)


@pw.split_op(mutates_args=("out",), name="piecework_gpu::see_rows", capturable=True)
def see_rows(x: torch.Tensor, cache: torch.Tensor, out: torch.Tensor) -> None:
    """Gives each token its row and the one that it sees."""
    torch.add(x, cache.index_select(0, pw.get_context(StepContext).sources), alpha=0.5, out=out)


class TwoOps(torch.nn.Module):
    """Two layers whose store and attention are two operators, the second of which reads what the first has written."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(64, HIDDEN)
        self.projections = torch.nn.ModuleList(torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(2))
        for i in range(2):
            self.register_buffer(f"cache_{i}", torch.zeros(NUM_ROWS, HIDDEN), persistent=False)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids) + positions[:, None] * 0.01
        for i, projection in enumerate(self.projections):
            y, cache = projection(x), getattr(self, f"cache_{i}")
            out = torch.empty_like(y)
            store_rows(y, cache)
            see_rows(y, cache, out)
            x = x + torch.tanh(out)
        return x


def test_buckets_up_to_the_bound_are_compiled_whole_once_without_a_copy(gpu: Any, taken: None) -> None:
    """Store and attention are two operators here."""
    model = gpu.model(TwoOps())
    reference = gpu.reference(model, "eager")
    config = pw.GraphConfig(
        prefill={"backend": "tc_piecewise", "compiler": "aot_eager", "buckets": (2, 16)},
        decode={"backend": "full", "buckets": (2, 4, 8), "max_padding_waste": 1.0},
        capture_device="tape" if gpu.on_tape else "cuda",
        enable_torch_compile=True,
        torch_compile_max_bs=4,
        torch_compile_mode="default",
    )
    with pw.Runtime(model, config, dynamic_dims=gpu.dynamic_dims) as runtime:

        def check(phase: str, num_tokens: int) -> None:
            inputs, context = gpu.step(num_tokens)
            result = runtime.run(phase, inputs, context=context)
            expected = reference.run(phase, inputs, context, (2, 4, 8) if phase == "decode" else (2, 16))
            torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)

        inputs, context = gpu.step(2)
        code = check_no_copy(gpu, runtime, model.cache_0, inputs, context)
        reference.run("decode", inputs, context, (2,))  # its cache holds the same then
        for name in ("store_rows", "see_rows"):
            assert code.count(f"ops.piecework_gpu.{name}.default(") == 2
        for _ in range(2):
            for num_tokens in (2, 1, 4, 3, 8, 5):
                check("decode", num_tokens)
            check("prefill", 2)
        assert compiled_whole(runtime) == [("decode", 2), ("decode", 4)]
        assert runtime.counters["compiles_whole"] == 2
        kinds = {(str(e.phase), e.bucket): e.program.kind for e in runtime.entries}
        assert kinds == {
            ("decode", 2): "whole",
            ("decode", 4): "whole",
            ("decode", 8): "eager",
            ("prefill", 2): "general",
        }
        assert not runtime.counters["fallbacks"]


def test_a_restart_reuses_what_was_tried_out(gpu: Any, tmp_path: Path) -> None:
    first, again = start_twice(gpu.device, tmp_path / "cache", timeout_s=90.0)
    print(first, again)
    assert first["compiles_whole"] == again["compiles_whole"] == 1
    assert max(first["difference"], again["difference"]) < 1e-4
    assert first["num_benchmarks"] > 0
    if torch.__version__ < (2, 13):
        # It forgets which of the kernels that it loads were tuned, and tunes those again whose first form was the best.
        assert again["num_benchmarks"] < first["num_benchmarks"] / 5, again["benchmarks"]
    else:
        assert again["num_benchmarks"] == 0, again["benchmarks"]
    assert again["compile_s"] < first["compile_s"]
    assert again["inductor"] == str(tmp_path / "cache" / "inductor")
