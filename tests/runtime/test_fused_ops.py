"""Fused ops in a runtime: the operator's list, what is traced, what runs eagerly, and what is told about it.

The kernels of these tests are operators that add 10 and 100 to RMSNorm, so that a result says who ran. The model is two
norms with a split op between: two pieces that differ in nothing but tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import piecework as pw
from piecework.graphs.dynamo import COMPILE_LOCK
from piecework.ops import fused
from piecework.ops.norm import RMSNorm, rms_norm
from piecework.runtime import programs
from piecework.runtime.listing import fused_op_text, fused_ops_data

OFF: list[str] = []
"""Why `ten` is not available; empty when it is."""
HOOK: list[Callable[[], None]] = []
"""Called whenever the fake of `plus_ten` is, which is in the midst of a trace."""


@torch.library.custom_op("piecework_runtime_tests::plus_ten", mutates_args=())
def plus_ten(x: torch.Tensor, weight: torch.Tensor, eps: float, variance_size: int | None = None) -> torch.Tensor:
    return rms_norm.native(x, weight, eps, variance_size) + 10


@plus_ten.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, eps: float, variance_size: int | None = None) -> torch.Tensor:
    for call in HOOK:
        call()
    return torch.empty_like(x)


@torch.library.custom_op("piecework_runtime_tests::plus_hundred", mutates_args=())
def plus_hundred(x: torch.Tensor, weight: torch.Tensor, eps: float, variance_size: int | None = None) -> torch.Tensor:
    return rms_norm.native(x, weight, eps, variance_size) + 100


@plus_hundred.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, eps: float, variance_size: int | None = None) -> torch.Tensor:
    return torch.empty_like(x)


@pw.split_op(mutates_args=("out",), name="piecework_runtime_tests::center")
def center(x: torch.Tensor, out: torch.Tensor) -> None:
    """Takes the mean of each row away, which no offset survives."""
    out.copy_(x - x.mean(-1, keepdim=True))


@pytest.fixture(autouse=True)
def two_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers `ten` and `hundred` for RMSNorm on the CPU, and one for a device that is not here."""
    for op in fused.fused_ops():
        monkeypatch.setattr(op, "_kernels", {})
    rms_norm.kernel("ten", device_types=("cpu",), available=lambda: OFF[0] if OFF else None)(plus_ten)
    rms_norm.kernel("hundred", device_types=("cpu",))(plus_hundred)
    rms_norm.kernel("elsewhere", device_types=("cuda",))(plus_ten)
    OFF.clear()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(RMSNorm(4, 1e-5) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.norms
        x = first(x)
        center(x, out := torch.empty_like(x))
        return second(out)


X = torch.tensor([[1.0, 2.0, 3.0, 4.0]] * 3)


def runtime(*items: str, compiler: str = "aot_eager", model: nn.Module | None = None, **options: Any) -> pw.Runtime:
    phase = {"compiler": compiler, "buckets": (2, 4)}
    config = pw.GraphConfig(prefill=phase, decode=phase, fused_ops=items, **options)
    return pw.Runtime(model or Model(), config, dynamic_dims={"x": 0})


def offset(result: torch.Tensor) -> int:
    """What the last norm's body had added; the rows that it normed have mean 0."""
    assert result.shape == X.shape
    return round(result.mean().item())


def texts(one: pw.Runtime) -> set[str]:
    """The canonical texts of a runtime's pieces."""
    [family] = one._table.families.values()
    [program] = family.general
    return set(program.graph.texts.values())


@pytest.mark.parametrize(
    ("items", "eager", "aot_eager"),
    [((), 10, 10), (("all",), 10, 10), (("none",), 0, 0), (("none", "+rms_norm"), 10, 10)],
)
def test_the_list_rules_what_runs(items: tuple[str, ...], eager: int, aot_eager: int) -> None:
    for compiler, expected in (("eager", eager), ("aot_eager", aot_eager)):
        one = runtime(*items, compiler=compiler)
        for phase in ("prefill", "decode"):
            assert offset(one.run(phase, {"x": X})) == expected


def test_by_default_inductor_gets_the_native_body_and_a_list_overrides() -> None:
    assert offset(runtime(compiler="inductor").run("decode", {"x": X})) == 0
    assert offset(runtime("all", compiler="inductor").run("decode", {"x": X})) == 10


@pytest.mark.parametrize("compiler", ["aot_eager", "eager"])
def test_a_choice_is_taken_when_the_runtime_is_made(compiler: str) -> None:
    OFF.append("the driver is too old")
    first = runtime(compiler=compiler)
    OFF.clear()
    assert offset(first.run("decode", {"x": X})) == 100
    assert offset(runtime(compiler=compiler).run("decode", {"x": X})) == 10


def test_another_kernel_is_another_fingerprint_and_the_text_names_it() -> None:
    found = {}
    for name, items, off in (("ten", (), False), ("hundred", (), True), ("native", ("none",), False)):
        OFF[:] = ["off"] if off else []
        one = runtime(*items)
        one.run("decode", {"x": X})
        found[name] = texts(one)
        # Two pieces, of one text: the norm before and after the split op.
        assert one.counters["pieces"] == 2
    for name, operator in (("ten", "plus_ten"), ("hundred", "plus_hundred")):
        assert all(f"piecework_runtime_tests::{operator}" in text for text in found[name])
    assert not any("piecework_runtime_tests" in text for text in found["native"])
    assert len(found["ten"] | found["hundred"] | found["native"]) == sum(map(len, found.values()))


def test_equal_choices_have_equal_fingerprints_and_share_compiles() -> None:
    first, second = runtime(), runtime("none", "+rms_norm")
    second._table.compiled = first._table.compiled
    first.run("decode", {"x": X})
    with second.counters.expect(traces=1, compiles_general=0):
        second.run("decode", {"x": X})
    assert texts(first) == texts(second)
    third = runtime("none")
    third._table.compiled = first._table.compiled
    third.run("decode", {"x": X})
    assert third.counters["compiles_general"] == third.counters["distinct_pieces"] > 0
    with first.counters.expect(traces=0, compiles_general=0):  # the phases agree, and share one program
        first.run("prefill", {"x": X})


def test_phases_with_other_compilers_have_other_choices() -> None:
    config = pw.GraphConfig(prefill={"compiler": "inductor"}, decode={"compiler": "aot_eager"})
    one = pw.Runtime(Model(), config, dynamic_dims={"x": 0})
    assert (offset(one.run("prefill", {"x": X})), offset(one.run("decode", {"x": X}))) == (0, 10)


def test_a_step_that_no_trace_holds_for_runs_eager_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under inductor the traced body is native; the eager fallback takes the kernel, as eager code does."""
    monkeypatch.setattr(programs, "MAX_TRACES", 0)
    one = runtime(compiler="inductor")
    assert offset(one.run("decode", {"x": X})) == 10
    assert list(one.counters["fallbacks"].values()) == [1]


@pytest.mark.parametrize("compilers", [("eager", "eager"), ("aot_eager", "aot_eager"), ("eager", "aot_eager")])
def test_two_runtimes_over_one_model(compilers: tuple[str, str]) -> None:
    model = Model()
    kernels, native = (runtime(*i, compiler=c, model=model) for i, c in zip(((), ("none",)), compilers, strict=True))
    for _ in range(2):
        assert offset(kernels.run("decode", {"x": X})) == 10
        assert offset(native.run("decode", {"x": X})) == 0
        with torch.inference_mode():
            assert offset(model(x=X)) == 0  # alone, a model runs the native bodies


def test_a_trace_and_an_eager_step_at_the_same_time() -> None:
    """While one thread is inside a trace that takes a kernel, eager steps in another take theirs."""
    model = Model()
    traced, eager, native = (
        runtime(model=model),
        runtime(compiler="eager", model=model),
        runtime("none", compiler="eager", model=model),
    )
    OFF.append("off")
    hundred = runtime(compiler="eager", model=model)
    tracing, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        tracing.set()
        assert go_on.wait(60)

    HOOK.append(wait)
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(offset(traced.run("decode", {"x": X}))))
    try:
        thread.start()
        assert tracing.wait(60)
        assert [offset(r.run("decode", {"x": X})) for r in (eager, native, hundred)] == [10, 0, 100]
    finally:
        go_on.set()
        thread.join(60)
        HOOK.clear()
    assert results == [10]
    assert offset(native.run("decode", {"x": X})) == 0


def test_threads_that_trace_with_other_lists() -> None:
    model = Model()
    runtimes = [runtime(model=model), runtime("none", model=model)] * 2
    results: list[int | None] = [None] * len(runtimes)
    barrier = threading.Barrier(len(runtimes))

    def step(i: int) -> None:
        barrier.wait(60)
        results[i] = offset(runtimes[i].run("decode", {"x": X}))

    threads = [threading.Thread(target=step, args=(i,)) for i in range(len(runtimes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert results == [10, 0, 10, 0]


def test_a_choice_for_traces_holds_under_the_lock_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is process-wide, so that no other trace may run meanwhile."""
    owned: list[bool] = []

    def from_another_thread() -> None:
        free: list[bool] = []

        def attempt() -> None:
            free.append(COMPILE_LOCK.acquire(blocking=False))
            if free[0]:
                COMPILE_LOCK.release()

        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join(60)
        owned.append(not free[0])

    monkeypatch.setattr(
        programs, "trace", lambda *a, _trace=programs.trace, **k: (from_another_thread(), _trace(*a, **k))[1]
    )
    runtime().run("decode", {"x": X})
    assert owned == [True]


def test_the_debug_mode_checks_guards_with_the_same_choice() -> None:
    one = runtime(evaluate_guards=True)
    for _ in range(2):
        assert offset(one.run("decode", {"x": X})) == 10


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_list_that_cannot_be_had_fails_in_the_constructor(compiler: str) -> None:
    with pytest.raises(pw.ConfigError, match="fused_ops: expected names of fused ops: .*, got 'rmsnorm'; did you mean"):
        runtime("all", "-rmsnorm", compiler=compiler)
    with pytest.raises(pw.NotAvailableError, match=r"fused_ops: \+silu_and_mul needs a kernel that runs on cpu"):
        runtime("none", "+silu_and_mul", compiler=compiler)
    rms_norm._kernels.pop("ten"), rms_norm._kernels.pop("hundred")
    with pytest.raises(pw.NotAvailableError, match=r"drop it:\n  elsewhere: runs on cuda, not on cpu$"):
        runtime("none", "+rms_norm", compiler=compiler)


def test_explain_tells_what_is_not_the_default() -> None:
    one = runtime()
    assert "fused op" not in str(one.explain())
    told = one.explain().as_dict()["fused_ops"]
    assert set(told) == {"prefill", "decode"}
    assert told["decode"]["rms_norm"]["runs"] == "ten"
    assert told["decode"]["rms_norm"]["reason"] == "aot_eager does not fuse"
    assert told["decode"]["silu_and_mul"]["runs"] == "native"
    one = runtime("none", "+rms_norm")
    lines = str(one.explain()).splitlines()
    assert "fused op rms_norm runs ten (fused_ops has +rms_norm) in prefill and decode" in lines
    assert "fused op silu_and_mul runs native (fused_ops has none) in prefill and decode" in lines
    one.run("decode", {"x": X})
    assert [trace["kernels"] for trace in one.explain().as_dict()["traces"]] == [{"rms_norm": "ten"}]
    [event] = [event for event in one.events if event.kind == "trace"]
    assert event.detail["kernels"] == {"rms_norm": "ten"}


def test_explain_tells_of_a_kernel_for_this_device_that_cannot_run() -> None:
    OFF.append("the driver is too old")
    one = runtime()
    [line] = [line for line in str(one.explain()).splitlines() if line.startswith("fused op")]
    assert line == "fused op rms_norm runs hundred (aot_eager does not fuse) in prefill and decode"
    passed_over = one.explain().as_dict()["fused_ops"]["decode"]["rms_norm"]["passed_over"]
    assert [list(each) for each in passed_over] == [["ten", "the driver is too old"]]


def test_nothing_of_a_choice_is_listed_as_frozen_state() -> None:
    one = runtime()
    one.run("decode", {"x": X})
    [trace] = one.explain().as_dict()["traces"]
    assert not any("fused" in state or "_traced" in state or "rms_norm" in state for state in trace["frozen"])


def test_the_listing_has_kernels_and_what_runs() -> None:
    OFF.append("the driver is too old")
    config = pw.GraphConfig(prefill={"compiler": "inductor"})
    [op] = [op for op in fused_ops_data(config, "cpu") if op["name"] == "rms_norm"]
    assert [(k["name"], k["device_types"], k["rejected"]) for k in op["kernels"]] == [
        ("ten", ["cpu"], "the driver is too old"),
        ("hundred", ["cpu"], None),
        ("elsewhere", ["cuda"], "runs on cuda, not on cpu"),
    ]
    assert (op["choice"]["prefill"]["runs"], op["choice"]["decode"]["runs"]) == ("native", "hundred")
    head, native, ten, hundred, elsewhere, *runs = fused_op_text(op).splitlines()
    assert head == "fused op rms_norm"
    assert native.split() == ["native", rms_norm.location]
    assert ten.endswith(f"{op['kernels'][0]['location']}; the driver is too old")
    assert hundred.split() == ["hundred", op["kernels"][1]["location"]]
    assert elsewhere.endswith("; runs on cuda, not on cpu")
    assert [line.strip() for line in runs] == [
        "runs       native (inductor fuses the native body) in prefill",
        "runs       hundred (eager does not fuse) in decode",
    ]
    with pytest.raises(pw.ConfigError, match="got 'nothing'"):
        fused_ops_data(pw.GraphConfig(fused_ops=("all", "-nothing")), "cpu")
