"""On a CUDA device the default model writes what it writes on the CPU: whoever compiles, captures and attends.

On the tape the same tests compare an engine that captures with one that does not, as far as there is no Triton in it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import piecework as pw
from piecework.ops import attention
from piecework.runtime.engine.engine import LLMEngine
from piecework.runtime.engine.params import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    # Inductor would rather have TF32, which is what must not be had here.
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]

PROMPTS = ("Early in the morning", "She was", "A good tool is one that")
NUM_NEW = 16
PARAMS = SamplingParams(max_new_tokens=NUM_NEW, logprobs=1)

Expected = list[tuple[tuple[int, ...], list[float]]]

COMPILED = [
    *[("disabled", compiler) for compiler in ("eager", "aot_eager", "inductor")],
    *[("full", compiler) for compiler in ("eager", "aot_eager", "inductor")],
    ("breakable", "eager"),
    *[("tc_piecewise", compiler) for compiler in ("eager", "aot_eager", "inductor")],
    ("auto", "eager"),
]
"""Every backend with every compiler it can have; the table of implementations is as it is."""

ATTENDING = [
    (backend, implementation)
    for backend in ("disabled", "full", "breakable", "tc_piecewise")
    for implementation in ("triton", "torch_native", "torch_static")
    # What reads lengths on the host cannot be captured whole.
    if (backend, implementation) != ("full", "torch_native")
]


def config(gpu: Any, backend: str, compiler: str) -> pw.GraphConfig:
    return gpu.config(backend, compiler, prefill=(8, 64), decode=(1, 4))  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def expected() -> Expected:
    plain = {"backend": "disabled", "compiler": "eager"}
    with LLMEngine(None, pw.GraphConfig(prefill=plain, decode=plain), device="cpu") as engine:
        outputs = engine.generate(PROMPTS, PARAMS)
    return [(o.token_ids, [p.logprob for p in o.logprobs or ()]) for o in outputs]


@pytest.fixture(autouse=True)
def in_full_precision() -> None:
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.backends.cuda.matmul.allow_tf32 is False


def check(engine: LLMEngine, expected: Expected) -> None:
    for output, (token_ids, logprobs) in zip(engine.generate(PROMPTS, PARAMS), expected, strict=True):
        assert output.token_ids == token_ids
        got = [p.logprob for p in output.logprobs or ()]
        torch.testing.assert_close(torch.tensor(got), torch.tensor(logprobs), atol=1e-4, rtol=0)


def check_twice(gpu: Any, backend: str, compiler: str, expected: Expected) -> None:
    """The tokens of a request that captures, then of one that replays; and that it did."""
    with LLMEngine(None, config(gpu, backend, compiler), device=gpu.device) as engine:
        check(engine, expected)
        check(engine, expected)
        counters = engine.runtime.counters.as_dict()
    # Each time one prefill of all prompts in the bucket 64, then 15 steps in the bucket 4; the first of each runs.
    captures, replays = (2, 2 * NUM_NEW - 2) if backend != "disabled" else (0, 0)
    assert not counters["fallbacks"]
    assert (counters["captures"], counters["replays"]) == (captures, replays)
    traced = compiler != "eager" or backend == "tc_piecewise"
    assert counters["traces"] == traced


@pytest.mark.parametrize(("backend", "compiler"), COMPILED)
def test_tokens_equal_those_of_the_cpu(gpu: Any, backend: str, compiler: str, expected: Expected) -> None:
    if gpu.on_tape and (compiler == "inductor" or backend == "auto"):
        pytest.skip("the CPU's tests have it")
    check_twice(gpu, backend, compiler, expected)


@pytest.mark.parametrize(("backend", "implementation"), ATTENDING)
def test_tokens_equal_those_of_the_cpu_whoever_attends(
    gpu: Any, backend: str, implementation: str, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    if gpu.on_tape and implementation == "triton":
        pytest.skip("Triton runs on a GPU")
    [row] = [row for row in attention.IMPLEMENTATIONS if row.name == implementation]
    alone = dataclasses.replace(row, reject=lambda spec: None)
    monkeypatch.setattr(attention, "IMPLEMENTATIONS", (alone,))
    check_twice(gpu, backend, "eager", expected)


@pytest.mark.parametrize("attends", ["triton", "torch"])
@pytest.mark.parametrize("kernels", ["native", "torch", "triton"])
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_tokens_equal_those_of_the_cpu_with_every_combination_of_implementations(
    gpu: Any, compiler: str, kernels: str, attends: str, expected: Expected
) -> None:
    """In float32, which the kernels of packages do not serve; those are compared in bf16 elsewhere."""
    if gpu.on_tape and (compiler == "inductor" or "triton" in (kernels, attends) or kernels == "torch"):
        pytest.skip("runs on a GPU")
    chosen = dataclasses.replace(
        gpu.config("tc_piecewise", compiler, prefill=(8, 64), decode=(1, 4)),
        kernel_backend=kernels,
        attention_backend=attends,
    )
    with LLMEngine(None, chosen, device=gpu.device) as engine:
        check(engine, expected)
        check(engine, expected)
        assert not engine.runtime.counters["fallbacks"]


def test_an_exported_program_is_bound_to_another_engine(gpu: Any) -> None:
    compiled = config(gpu, "disabled", "aot_eager")
    with LLMEngine(None, compiled, device=gpu.device) as engine:
        tokens = [o.token_ids for o in engine.generate(PROMPTS, PARAMS)]
        (program,) = engine.runtime.export()
    program = pw.PortableProgram.from_bytes(program.to_bytes())
    with LLMEngine(None, compiled, device=gpu.device) as engine:
        options: dict[str, Any] = {"dynamic_dims": {"input_ids": 0, "positions": 0}, "programs": [program]}
        engine.runtime = pw.Runtime(engine.model.model, compiled, **options)
        assert [o.token_ids for o in engine.generate(PROMPTS, PARAMS)] == tokens
        assert engine.runtime.counters["traces"] == 0
