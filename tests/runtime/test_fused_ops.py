"""Fused ops in a runtime: the operator's list, what is traced, what runs eagerly, and what is told about it.

The kernels of these tests are operators that add 10 and 100 to RMSNorm, so that a result says who ran. The model is two
norms with a split op between: two pieces that differ in nothing but tensors.
"""

from __future__ import annotations

import dataclasses
import json
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
from piecework.runtime.fused_choices import choose_for, spec_for
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


def test_what_was_measured_to_be_faster_runs_under_inductor() -> None:
    rms_norm._kernels["ten"] = dataclasses.replace(rms_norm._kernels["ten"], beats_inductor=True)
    one = runtime(compiler="inductor")
    assert offset(one.run("decode", {"x": X})) == 10
    assert "fused op" not in str(one.explain()), "it is the default"
    assert offset(runtime("none", compiler="inductor").run("decode", {"x": X})) == 0


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


def test_a_backend_rules_what_runs_under_every_compiler() -> None:
    for compiler, backend, expected in (
        ("eager", "hundred", 100),
        ("inductor", "hundred", 100),
        ("aot_eager", "native", 0),
        ("eager", "native", 0),
    ):
        one = runtime(compiler=compiler, kernel_backend=backend)
        assert offset(one.run("decode", {"x": X})) == expected
    told = "fused op rms_norm runs hundred (kernel_backend is hundred) in prefill and decode"
    assert told in str(runtime(kernel_backend="hundred").explain())


def test_a_backend_that_cannot_be_had_fails_in_the_constructor() -> None:
    with pytest.raises(pw.NotAvailableError, match=r"^kernel_backend: .* cpu in float32, got elsewhere, "):
        runtime(kernel_backend="elsewhere")
    with pytest.raises(pw.ConfigError, match=r"^kernel_backend: expected one of .*, ten, got 'eleven'"):
        runtime(kernel_backend="eleven")


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ((torch.bfloat16, torch.bfloat16), "ten"),
        ((torch.float32, torch.float32), "hundred"),
        ((torch.bfloat16, torch.float32), "ten"),  # not known, and no reason to reject
    ],
)
def test_a_kernel_is_asked_whether_it_serves_the_models_dtype(
    dtypes: tuple[torch.dtype, torch.dtype], expected: str
) -> None:
    rms_norm._kernels["ten"] = dataclasses.replace(rms_norm._kernels["ten"], dtypes=(torch.bfloat16,))
    model = Model()
    for norm, dtype in zip(model.norms, dtypes, strict=True):
        norm.to(dtype)
    model.register_parameter("index", nn.Parameter(torch.zeros(1, dtype=torch.int64), requires_grad=False))
    assert runtime(model=model)._fused["aot_eager"].runs["rms_norm"] == expected


@pytest.mark.parametrize(("options", "expected"), [({}, "ten"), ({"capture_device": "tape"}, "hundred")])
def test_a_kernel_that_cannot_be_captured_is_passed_over_where_steps_are(
    options: dict[str, str], expected: str
) -> None:
    rms_norm._kernels["ten"] = dataclasses.replace(rms_norm._kernels["ten"], captures=False)
    assert runtime(compiler="eager", **options)._fused["eager"].runs["rms_norm"] == expected


def test_a_kernel_is_asked_whether_it_serves_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA device of capability 8.9, as far as what asks for it can tell."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    config = pw.GraphConfig(prefill={"backend": "disabled"}, decode={"backend": "disabled"})
    spec = spec_for(config, torch.device("cuda", 0), None)
    assert spec == fused.KernelSpec(device_type="cuda", capability=(8, 9))
    assert spec_for(config, "cpu", None).capability is None
    for least, expected in (((8, 9), "elsewhere"), ((9, 0), "native")):
        rms_norm._kernels["elsewhere"] = dataclasses.replace(rms_norm._kernels["elsewhere"], min_capability=least)
        assert choose_for(config, ["eager"], spec)["eager"].runs["rms_norm"] == expected
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert spec_for(config, "cuda", None).capability is None


# What `piecework ops` says.


def listed(config: pw.GraphConfig, **more: Any) -> dict[str, Any]:
    [op] = [op for op in fused_ops_data(config, "cpu", **more) if op["name"] == "rms_norm"]
    return op


def test_the_listing_has_implementations_and_what_runs() -> None:
    OFF.append("not installed: pip install ten")
    op = listed(pw.GraphConfig(prefill={"compiler": "inductor"}))
    assert [(row["name"], row["device_types"], row["rejected"]) for row in op["implementations"]] == [
        ("native", None, None),
        ("ten", ["cpu"], "not installed: pip install ten"),
        ("hundred", ["cpu"], None),
        ("elsewhere", ["cuda"], "runs on cuda, not on cpu"),
    ]
    assert all(f"{__file__}:" in row["location"] for row in op["implementations"][1:])
    assert (op["choice"]["prefill"]["runs"], op["choice"]["decode"]["runs"]) == ("native", "hundred")
    decisions = {row["name"]: row["decision"] for row in op["implementations"]}
    assert decisions["native"] == {
        "prefill": {"chosen": True, "reason": "inductor fuses the native body"},
        "decode": {"chosen": False, "reason": "eager does not fuse"},
    }
    assert decisions["hundred"] == {
        "prefill": {"chosen": False, "reason": "inductor fuses the native body"},
        "decode": {"chosen": True, "reason": "eager does not fuse"},
    }
    assert fused_op_text(op).splitlines() == [
        f"fused op rms_norm, defined at {rms_norm.location}",
        "  implementation  devices  dtypes  capability  captured  prefill                                 decode",
        "  native          any      any     any         yes       chosen: inductor fuses the native body  eager does "
        "not fuse",
        "  ten             cpu      any     any         yes       not installed: pip install ten          not "
        "installed: pip install ten",
        "  hundred         cpu      any     any         yes       inductor fuses the native body          chosen: "
        "eager does not fuse",
        "  elsewhere       cuda     any     any         yes       runs on cuda, not on cpu                runs on "
        "cuda, not on cpu",
    ]
    json.dumps(op)


def test_the_listing_says_what_kernels_support() -> None:
    rms_norm.kernel(
        "limited",
        device_types=("cpu",),
        dtypes=(torch.bfloat16, torch.float16),
        min_capability=(9, 0),
        captures=False,
        beats_inductor=True,
        why="is small",
    )(plus_ten)
    op = listed(pw.GraphConfig(), dtype=torch.float32)
    row = op["implementations"][-1]
    keys = ("name", "dtypes", "min_capability", "captures", "beats_inductor", "why", "rejected")
    assert {key: row[key] for key in keys} == {
        "name": "limited",
        "dtypes": ["bfloat16", "float16"],
        "min_capability": [9, 0],
        "captures": False,
        "beats_inductor": True,
        "why": "is small",
        "rejected": "serves bfloat16, float16, not float32",
    }
    lines = fused_op_text(op).splitlines()
    assert [line.split() for line in lines if "limited" in line] == [
        "limited cpu bfloat16, float16 9.0 or higher no serves bfloat16, float16, not float32".split(),
        "limited: is small; measured no slower than what inductor makes of the native body".split(),
    ]
    assert lines[1].endswith("decision")  # the phases agree
    decided = {row["name"]: row["decision"]["decode"] for row in op["implementations"]}
    assert decided["ten"] == {"chosen": True, "reason": "eager does not fuse"}
    assert decided["hundred"] == {"chosen": False, "reason": "ten goes before"}
    tape = listed(pw.GraphConfig(capture_device="tape"))
    assert tape["implementations"][-1]["rejected"] == "cannot be captured"


def test_the_listing_follows_the_operators_words() -> None:
    assert listed(pw.GraphConfig(kernel_backend="hundred"))["choice"]["prefill"]["runs"] == "hundred"
    with pytest.raises(pw.ConfigError, match="got 'nothing'"):
        listed(pw.GraphConfig(fused_ops=("all", "-nothing")))
    with pytest.raises(pw.NotAvailableError, match="^kernel_backend: "):
        listed(pw.GraphConfig(kernel_backend="elsewhere"))
