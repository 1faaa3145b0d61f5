"""Every backend on the device: replays equal the same program uncaptured to the bit, whatever comes in between."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import piecework as pw

pytestmark = pytest.mark.gpu

MIB = 1 << 20
BACKENDS = [("full", "eager"), ("full", "aot_eager"), ("breakable", "eager"), ("tc_piecewise", "aot_eager")]
each_backend = pytest.mark.parametrize(("backend", "compiler"), BACKENDS)


class Pair:
    """A runtime and the uncaptured program, on two copies of one model."""

    def __init__(self, gpu: Any, backend: str, compiler: str, model: torch.nn.Module | None = None, **options: Any):
        self.gpu = gpu
        self.model = gpu.model(model)
        self.reference = gpu.reference(self.model, compiler)
        self.runtime = gpu.runtime(self.model, backend, compiler, **options)

    def step(self, phase: str, num_tokens: int) -> None:
        inputs, context = self.gpu.step(num_tokens)
        got = self.runtime.run(phase, inputs, context=context)
        expected = self.reference.run(phase, inputs, context)
        assert torch.equal(got, expected), (phase, num_tokens, float((got - expected).abs().max()))

    @property
    def counters(self) -> dict[str, Any]:
        found: dict[str, Any] = self.runtime.counters.as_dict()
        return found


@each_backend
def test_sizes_around_each_bucket(gpu: Any, backend: str, compiler: str) -> None:
    pair = Pair(gpu, backend, compiler)
    sizes = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17]
    for num_tokens in [*sizes, *reversed(sizes)]:
        pair.step("decode", num_tokens)
    # 17 is above the ladder; a bucket's first step runs, the others replay.
    assert pair.counters["captures"] == 5
    assert pair.counters["replays"] == 2 * 10 - 5
    assert len(pair.counters["fallbacks"]) <= 1, pair.counters["fallbacks"]


@each_backend
def test_a_small_capture_after_a_large_one_leaves_it_alone(gpu: Any, backend: str, compiler: str) -> None:
    pair = Pair(gpu, backend, compiler)
    for num_tokens in (256, 64, 256, 255, 64, 30, 256):
        pair.step("prefill", num_tokens)
    assert (pair.counters["captures"], pair.counters["replays"]) == (2, 5)


@contextlib.contextmanager
def side_thread(gpu: Any) -> Iterator[None]:
    """Allocates, uses and frees memory of the device inside; what it wrote must still be there."""
    stop, errors = threading.Event(), []

    def work() -> None:
        try:
            for number in range(1_000_000):
                if stop.is_set():
                    return
                x = torch.full(((number % 13 + 1) << 16,), number, dtype=torch.int32, device=gpu.device)
                y = torch.empty_like(x).copy_(x)
                assert bool((y == number).all())
                del x, y
                time.sleep(0.001)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert not errors


@each_backend
def test_churn(gpu: Any, backend: str, compiler: str) -> None:
    pair = Pair(gpu, backend, compiler, max_captures=3)
    choose = random.Random(7)
    memory: list[int] = []
    for _ in range(2):
        noise: list[torch.Tensor] = []
        with side_thread(gpu):
            for number in range(60 if gpu.on_tape else 500):
                if number % 100 == 0:
                    favourites = choose.sample([("decode", n) for n in (1, 2, 4, 8, 16)] + [("prefill", 64)], 2)
                phase, bucket = choose.choice(favourites) if choose.random() < 0.95 else ("prefill", 256)
                pair.step(phase, choose.randint(bucket // 2 + 1, bucket))
                noise.append(torch.empty(choose.choice([100, 5000, 1 << 19, 3 << 20]), device=gpu.device).fill_(1e9))
                if len(noise) > 12:
                    del noise[choose.randrange(12)]
        noise.clear()
        if not gpu.on_tape:
            gpu.give_back()
            memory.append(torch.cuda.memory_reserved())
    assert pair.counters["steps"] == (120 if gpu.on_tape else 1000)
    assert pair.counters["replays"] > (40 if gpu.on_tape else 500)
    if not gpu.on_tape:
        assert pair.counters["evictions"] > 0
        assert memory[1] <= memory[0] + 4 * MIB


def test_steps_on_different_streams_see_each_other(gpu: Any, cuda_only: None) -> None:
    pair = Pair(gpu, "full", "eager")
    steps = [gpu.step(num_tokens) for num_tokens in (16, 13, 4, 16, 256, 200, 9, 16) * 5]
    phases = ["decode" if len(inputs["input_ids"]) <= 16 else "prefill" for inputs, _ in steps]
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    got = []
    for number, (phase, (inputs, context)) in enumerate(zip(phases, steps, strict=True)):
        with torch.cuda.stream(streams[number % 3]):
            got.append(pair.runtime.run(phase, inputs, context=context, copy=True))
    torch.cuda.synchronize()
    for phase, (inputs, context), output in zip(phases, steps, got, strict=True):
        assert torch.equal(output, pair.reference.run(phase, inputs, context))
    assert pair.counters["replays"] == 40 - pair.counters["captures"]


def test_two_runtimes_in_two_threads(gpu: Any, cuda_only: None) -> None:
    errors: list[BaseException] = []
    pairs = [Pair(gpu, "full", "eager"), Pair(gpu, "breakable", "eager")]
    torch.cuda.synchronize()

    def serve(pair: Pair) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for number in range(60):
                    pair.step(*[("decode", 16), ("decode", 3), ("prefill", 200), ("decode", 8)][number % 4])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=serve, args=(pair,)) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert [pair.counters["captures"] for pair in pairs] == [4, 4]


def synchronising_model(gpu: Any) -> torch.nn.Module:
    class Synchronising(gpu.Toy):  # type: ignore[misc]
        def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            x = super().forward(input_ids, positions)
            if self.waits:
                x = x * (1.0 if x[:1].sum().item() < 1e30 else 2.0)
            return x

    model = Synchronising()
    model.waits = True
    return model


@pytest.mark.parametrize("backend", ["full", "breakable"])
def test_a_model_that_waits_for_the_device_falls_back_and_says_where(gpu: Any, backend: str) -> None:
    pair = Pair(gpu, backend, "eager", synchronising_model(gpu))
    for num_tokens in (4, 4, 2, 4):
        inputs, context = gpu.step(num_tokens)
        got = pair.runtime.run("decode", inputs, context=context)
        torch.testing.assert_close(got, pair.reference.run("decode", inputs, context))
    assert (pair.counters["captures"], pair.counters["replays"]) == (0, 0)
    reasons = list(pair.counters["fallbacks"])
    assert len(reasons) == 1, reasons
    assert f"{__file__}:" in reasons[0]
    assert "item" in reasons[0] or "_local_scalar_dense" in reasons[0]
    assert pair.counters["fallbacks"][reasons[0]] >= 4
    # Nothing of the failed captures is left: other buckets, other runtimes and random numbers work.
    pair.model.waits = pair.reference.model.waits = False
    for num_tokens in (8, 8, 7):
        pair.step("decode", num_tokens)
    assert (pair.counters["captures"], pair.counters["replays"]) == (1, 2)
    assert torch.rand(4, device=gpu.device).sum() > 0


def test_a_stream_forked_off_over_a_split_op(gpu: Any, cuda_only: None) -> None:
    class Forked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(64, gpu.hidden)
            self.left, self.right = gpu.Layer(), gpu.Layer()
            self.side: list[torch.cuda.Stream] = []

        def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            here, (side,) = torch.cuda.current_stream(), self.side
            x = self.embed(input_ids) + positions[:, None] * 0.01
            side.wait_stream(here)
            with torch.cuda.stream(side):
                left = torch.tanh(self.left(x))
            right = self.right(x)
            here.wait_stream(side)
            return left + right * 2

    pair = Pair(gpu, "breakable", "eager", Forked())
    pair.model.side = pair.reference.model.side = [torch.cuda.Stream()]
    for num_tokens in (256, 200, 64, 256, 64, 256, 30):
        pair.step("prefill", num_tokens)
    assert (pair.counters["captures"], pair.counters["replays"]) == (2, 5), pair.counters["fallbacks"]


@each_backend
def test_a_rebound_parameter_drops_the_capture(gpu: Any, backend: str, compiler: str) -> None:
    pair = Pair(gpu, backend, compiler)
    for _ in range(3):
        pair.step("decode", 4)
    weight = torch.randn_like(pair.model.layers[0].up.weight)
    for model in (pair.model, pair.reference.model):
        model.layers[0].up.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    for _ in range(4):
        pair.step("decode", 4)
    assert (pair.counters["captures"], pair.counters["replays"]) == (2, 2 + 3)
    assert any("dropped" in reason for reason in pair.counters["fallbacks"]), pair.counters["fallbacks"]


class Wide(torch.nn.Module):
    """Needs 64 KiB of scratch a token, most of it in two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 8192), torch.nn.Linear(8192, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


WIDE = (256, 512, 1024, 2048)
"""16, 32, 64 and 128 MiB."""


def wide_runtime(gpu: Any, **options: Any) -> tuple[torch.nn.Module, pw.Runtime]:
    model = gpu.model(Wide())
    return model, pw.Runtime(model, gpu.config("full", prefill=WIDE, **options), dynamic_dims={"x": 0})


def wide_step(gpu: Any, model: torch.nn.Module, runtime: pw.Runtime, num_tokens: int) -> None:
    x = torch.randn(num_tokens, 64).to(gpu.device)
    with torch.inference_mode():
        torch.testing.assert_close(runtime.run("prefill", {"x": x}), model(x), rtol=1e-4, atol=1e-5)


def test_captures_in_the_wrong_order_are_compacted(gpu: Any, cuda_only: None) -> None:
    model, runtime = wide_runtime(gpu)
    for bucket in WIDE:
        wide_step(gpu, model, runtime, bucket)
    before = gpu.pool_bytes()
    assert before > 160 * MIB, "the smaller ones' memory did not serve the larger ones"
    runtime.compact()
    after = gpu.pool_bytes()
    assert 120 * MIB < after < 170 * MIB
    replays = runtime.counters["replays"]
    for bucket in (*WIDE, *reversed(WIDE)):
        wide_step(gpu, model, runtime, bucket - 1)
    assert runtime.counters["replays"] == replays + 8
    assert gpu.pool_bytes() == after


def test_a_budget_holds(gpu: Any, cuda_only: None) -> None:
    budget = 100 * MIB
    model, runtime = wide_runtime(gpu, cuda_graph_memory_budget=budget)
    choose = random.Random(3)
    for number in range(160):
        favourite = WIDE[number // 40 % 4]
        wide_step(gpu, model, runtime, favourite if choose.random() < 0.8 else choose.choice(WIDE))
    counters = runtime.counters.as_dict()
    assert any("cuda_graph_memory_budget: expected at least" in reason for reason in counters["fallbacks"])
    assert counters["replays"] > 40
    runtime.compact()
    assert 0 < gpu.pool_bytes() <= budget
    wide_step(gpu, model, runtime, 256)


@each_backend
def test_close_gives_the_memory_back(gpu: Any, cuda_only: None, backend: str, compiler: str) -> None:
    before = gpu.pool_bytes()
    pair = Pair(gpu, backend, compiler)
    for num_tokens in (256, 64):
        pair.step("prefill", num_tokens)
        pair.step("decode", num_tokens // 16)
    assert gpu.pool_bytes() > before
    pair.runtime.close()
    gc.collect()
    assert gpu.pool_bytes() <= before
    with pytest.raises(pw.RuntimeClosedError):
        pair.step("decode", 1)
