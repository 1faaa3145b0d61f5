"""On a CUDA device the default model writes what it writes on the CPU, whoever compiles it, and its program travels."""

from __future__ import annotations

import pytest
import torch

import piecework as pw
from piecework.runtime.engine.engine import LLMEngine
from piecework.runtime.engine.params import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    # Inductor would rather have TF32, which is what must not be had here.
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]

PROMPTS = ("Early in the morning", "She was", "A good tool is one that")
PARAMS = SamplingParams(max_new_tokens=16, logprobs=1)


def config(compiler: str, backend: str = "disabled") -> pw.GraphConfig:
    phase = {"compiler": compiler, "backend": backend, "max_padding_waste": 1.0}
    return pw.GraphConfig(prefill={**phase, "buckets": (8, 64)}, decode={**phase, "buckets": (1, 4)})


@pytest.fixture(scope="module")
def expected() -> list[tuple[tuple[int, ...], list[float]]]:
    with LLMEngine(None, config("eager"), device="cpu") as engine:
        outputs = engine.generate(PROMPTS, PARAMS)
    return [(o.token_ids, [p.logprob for p in o.logprobs or ()]) for o in outputs]


@pytest.fixture(autouse=True)
def on_cuda_in_full_precision() -> None:
    if not torch.cuda.is_available():
        pytest.skip("compares the GPU with the CPU")
    assert torch.backends.cuda.matmul.allow_tf32 is False


CAPTURED = [
    ("full", "eager"),
    ("breakable", "eager"),
    ("tc_piecewise", "aot_eager"),
    ("tc_piecewise", "inductor"),
    ("auto", "eager"),
]


def check(engine: LLMEngine, expected: list[tuple[tuple[int, ...], list[float]]]) -> None:
    for output, (token_ids, logprobs) in zip(engine.generate(PROMPTS, PARAMS), expected, strict=True):
        assert output.token_ids == token_ids
        got = [p.logprob for p in output.logprobs or ()]
        torch.testing.assert_close(torch.tensor(got), torch.tensor(logprobs), atol=1e-4, rtol=0)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
def test_tokens_equal_those_of_the_cpu(compiler: str, expected: list[tuple[tuple[int, ...], list[float]]]) -> None:
    with LLMEngine(None, config(compiler), device="cuda") as engine:
        check(engine, expected)
        counters = engine.runtime.counters.as_dict()
    assert counters["traces"] == (compiler != "eager")
    assert (counters["captures"], counters["replays"]) == (0, 0)


@pytest.mark.parametrize(("backend", "compiler"), CAPTURED)
def test_captured_tokens_equal_those_of_the_cpu(
    backend: str, compiler: str, expected: list[tuple[tuple[int, ...], list[float]]]
) -> None:
    with LLMEngine(None, config(compiler, backend), device="cuda") as engine:
        check(engine, expected)
        check(engine, expected)
        counters = engine.runtime.counters.as_dict()
    # Each time one prefill of all prompts in the bucket 64, then 15 steps in the bucket 4; the first of each runs.
    assert not counters["fallbacks"]
    assert (counters["captures"], counters["replays"]) == (2, 2 * (1 + 15) - 2)


def test_an_exported_program_is_bound_to_another_engine() -> None:
    with LLMEngine(None, config("aot_eager"), device="cuda") as engine:
        tokens = [o.token_ids for o in engine.generate(PROMPTS, PARAMS)]
        (program,) = engine.runtime.export()
    program = pw.PortableProgram.from_bytes(program.to_bytes())
    with LLMEngine(None, config("aot_eager"), device="cuda") as engine:
        options = {"dynamic_dims": {"input_ids": 0, "positions": 0}, "programs": [program]}
        engine.runtime = pw.Runtime(engine.model.model, config("aot_eager"), **options)
        assert [o.token_ids for o in engine.generate(PROMPTS, PARAMS)] == tokens
        assert engine.runtime.counters["traces"] == 0
