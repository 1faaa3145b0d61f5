"""What kernels support, and the operator's `kernel_backend`: who runs, and what is said of the others."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from piecework.errors import ConfigError, NotAvailableError
from piecework.ops import fused
from piecework.ops.fused import FusedOp, Kernel, KernelSpec, fused_op, fused_ops
from piecework.ops.fused_choice import Choice, ChosenOp, choose
from piecework.ops.packages import needs


@pytest.fixture(autouse=True)
def only_toys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused ops are `toy`, with kernels of three sources, `bare`, with none, and `other`, with one."""
    fused_ops()
    monkeypatch.setattr(fused, "_OPS", {})
    monkeypatch.setattr(fused, "_OURS", ())
    toy = fused_op("toy")(same)
    toy.kernel("torch", device_types=("cpu", "cuda"))(same)
    toy.kernel(
        "triton", device_types=("cuda",), dtypes=(torch.bfloat16, torch.float16), min_capability=(8, 0), why="is quick"
    )(same)
    toy.kernel("sgl_kernel", device_types=("cuda",), available=needs("a_package_that_nobody_has", "sgl"))(same)
    fused_op("bare")(same)
    fused_op("other")(same).kernel("mine", device_types=("cpu",), captures=False)(same)
    fused_op("product", fuses=False)(same).kernel("triton", device_types=("cuda",))(same)


def same(x: torch.Tensor) -> torch.Tensor:
    return x


def op(name: str) -> FusedOp[Any, Any]:
    return next(each for each in fused_ops() if each.name == name)


def kernel(name: str) -> Kernel:
    return next(each for each in op("toy").kernels if each.name == name)


def choice(*items: str, compiler: str = "eager", device_type: str = "cuda", **more: Any) -> Choice:
    return choose(items, compiler=compiler, device_type=device_type, **more)


def chosen(name: str, *items: str, **more: Any) -> ChosenOp:
    return next(each for each in choice(*items, **more).ops if each.name == name)


# What a kernel supports.


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({}, None),
        ({"dtype": torch.float16, "capability": (8, 0), "captured": True}, None),
        ({"capability": (10, 0)}, None),
        ({"dtype": torch.float32}, "serves bfloat16, float16, not float32"),
        ({"capability": (7, 5)}, "needs compute capability 8.0 or higher, not 7.5"),
        ({"device_type": "cpu", "dtype": torch.float32}, "runs on cuda, not on cpu"),
    ],
)
def test_what_a_kernel_supports(spec: dict[str, Any], reason: str | None) -> None:
    assert kernel("triton").reject(KernelSpec(**{"device_type": "cuda", **spec})) == reason


def test_what_no_installation_mends_comes_first() -> None:
    both = dataclasses.replace(kernel("sgl_kernel"), dtypes=(torch.bfloat16,))
    assert both.reject(KernelSpec(device_type="cuda")) == "not installed: pip install sgl"
    assert both.reject(KernelSpec(device_type="cuda", dtype=torch.float32)) == "serves bfloat16, not float32"


def test_a_kernel_that_cannot_be_captured_serves_where_nothing_is() -> None:
    [mine] = op("other").kernels
    assert mine.reject(KernelSpec(device_type="cpu")) is None
    assert mine.reject(KernelSpec(device_type="cpu", captured=True)) == "cannot be captured"
    assert chosen("other", device_type="cpu").runs == "mine"
    assert chosen("other", device_type="cpu", captured=True).passed_over == (("mine", "cannot be captured"),)


def test_a_kernel_keeps_what_it_was_registered_with() -> None:
    triton, torchs = kernel("triton"), kernel("torch")
    assert (triton.dtypes, triton.min_capability, triton.captures, triton.why) == (
        (torch.bfloat16, torch.float16),
        (8, 0),
        True,
        "is quick",
    )
    assert (torchs.dtypes, torchs.min_capability, torchs.captures, torchs.why) == (None, None, True, "")


def test_the_choice_asks_for_dtype_and_capability() -> None:
    op("toy")._kernels.pop("torch")
    assert chosen("toy", dtype=torch.bfloat16, capability=(9, 0)).runs == "triton"
    wrong = chosen("toy", dtype=torch.float32, capability=(9, 0))
    assert wrong.runs == "native"
    assert wrong.reason == (
        "eager does not fuse, but no kernel can run: triton serves bfloat16, float16, not float32; "
        "sgl_kernel not installed: pip install sgl"
    )
    assert not wrong.by_default
    assert chosen("toy", capability=(7, 5)).runs == "native"


# A native body that compilers cannot fuse.


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
def test_a_kernel_is_the_default_where_nothing_can_be_fused(compiler: str) -> None:
    assert (op("product").fuses, op("toy").fuses) == (False, True)
    product = chosen("product", compiler=compiler)
    assert (product.runs, product.by_default) == ("triton", True)
    native = chosen("product", compiler=compiler, device_type="cpu")
    assert (native.runs, native.by_default) == ("native", True)
    assert chosen("product", "none", compiler=compiler).runs == "native"
    assert not chosen("product", "none", compiler=compiler).by_default


def test_inductor_says_that_it_does_not_fuse_it() -> None:
    assert chosen("product", compiler="inductor").reason == "inductor does not fuse the native body"
    assert chosen("toy", compiler="inductor").reason == "inductor fuses the native body"


# A kernel that was measured no slower than what inductor makes of the native body.


def quick() -> FusedOp[Any, Any]:
    """An op with one, and one behind it of which nothing was measured."""
    made = fused_op("quick")(same)
    made.kernel("triton", device_types=("cuda",), dtypes=(torch.bfloat16,), beats_inductor=True)(same)
    made.kernel("torch", device_types=("cuda",))(same)
    return made


def test_what_was_measured_to_be_faster_is_the_default_under_inductor() -> None:
    assert [kernel.beats_inductor for kernel in quick().kernels] == [True, False]
    bf16 = {"compiler": "inductor", "dtype": torch.bfloat16}
    fast = chosen("quick", **bf16)
    assert (fast.runs, fast.by_default, fast.is_asked) == ("triton", True, False)
    assert fast.reason == "measured no slower than what inductor makes of the native body"
    assert chosen("quick", dtype=torch.bfloat16).reason == "eager does not fuse"
    assert chosen("toy", **bf16).runs == "native", "as before"
    # Nothing was measured of the first that can serve.
    slow = chosen("quick", compiler="inductor", dtype=torch.float32)
    assert (slow.runs, slow.by_default, slow.reason) == ("native", True, "inductor fuses the native body")
    assert chosen("quick", dtype=torch.float32).runs == "torch"
    cpu = chosen("quick", compiler="inductor", device_type="cpu")
    assert (cpu.runs, cpu.by_default, cpu.reason) == ("native", True, "inductor fuses the native body")


def test_one_that_goes_behind_another_that_can_serve_is_no_default_under_inductor() -> None:
    made = fused_op("quick")(same)
    made.kernel("torch", device_types=("cuda",), dtypes=(torch.float32,))(same)
    made.kernel("triton", device_types=("cuda",), beats_inductor=True)(same)
    assert chosen("quick", compiler="inductor").runs == "native"
    assert chosen("quick", compiler="inductor", dtype=torch.float32).runs == "native"
    assert chosen("quick", compiler="inductor", dtype=torch.bfloat16).runs == "triton"


@pytest.mark.parametrize(
    ("items", "backend", "runs", "reason", "by_default"),
    [
        (("none",), "auto", "native", "fused_ops has none", False),
        (("all", "-quick"), "auto", "native", "fused_ops has -quick", False),
        (("all",), "auto", "triton", "fused_ops has all", True),
        (("none", "+quick"), "auto", "triton", "fused_ops has +quick", False),
        ((), "native", "native", "kernel_backend is native", False),
        ((), "torch", "torch", "kernel_backend is torch", False),
        ((), "triton", "triton", "kernel_backend is triton", True),
    ],
)
def test_the_operator_overrides_what_was_measured(
    items: tuple[str, ...], backend: str, runs: str, reason: str, by_default: bool
) -> None:
    quick()
    got = chosen("quick", *items, compiler="inductor", kernel_backend=backend)
    assert (got.runs, got.reason, got.by_default, got.is_asked) == (runs, reason, by_default, True)


def test_a_backend_that_it_has_not_leaves_it_as_it_was_measured() -> None:
    quick()
    got = chosen("quick", compiler="inductor", device_type="cuda", kernel_backend="triton", dtype=torch.bfloat16)
    assert (got.runs, got.is_asked) == ("triton", True)
    fused_op("another")(same).kernel("mine", device_types=("cuda",))(same)
    got = chosen("quick", compiler="inductor", kernel_backend="mine")
    told = "measured no slower than what inductor makes of the native body (kernel_backend: it has no mine kernel)"
    assert (got.runs, got.reason, got.is_asked) == ("triton", told, False)


# A forward that is compiled whole.


def test_a_whole_forward_has_the_native_bodies_where_nobody_asked_for_a_kernel() -> None:
    quick()

    def native(*items: str, **more: Any) -> tuple[str, ...]:
        return choice(*items, compiler="inductor", **more).native_in_whole

    assert native() == ("product", "quick")
    assert native("none") == native("all") == ()
    assert native("none", "+quick") == native("all", "-quick") == ()
    assert native(kernel_backend="triton") == native(kernel_backend="native") == ()
    assert native(kernel_backend="torch") == ("product",), "it has no such kernel"
    assert native(device_type="cpu") == ()
    assert native(dtype=torch.float32) == ("product",)


# kernel_backend.


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
def test_a_backend_runs_in_every_op_that_has_it_under_every_compiler(compiler: str) -> None:
    runs = choice(compiler=compiler, kernel_backend="triton").runs
    assert runs == {"toy": "triton", "product": "triton", "bare": "native", "other": "native"}
    assert chosen("toy", compiler=compiler, kernel_backend="triton").reason == "kernel_backend is triton"


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.parametrize("items", [(), ("all",), ("none",)])
def test_native_runs_no_kernel_that_is_not_asked_for_by_name(compiler: str, items: tuple[str, ...]) -> None:
    got = choice(*items, compiler=compiler, kernel_backend="native")
    assert set(got.runs.values()) == {"native"}
    assert {each.reason for each in got.ops} == {"kernel_backend is native"}
    named = choice("none", "+toy", compiler=compiler, kernel_backend="native").runs
    assert named == {"toy": "torch", "product": "native", "bare": "native", "other": "native"}


def test_a_backend_that_cannot_serve_an_op_leaves_it_as_under_auto() -> None:
    """In `toy` triton cannot serve float32, in `product` it can."""
    fp32 = {"dtype": torch.float32, "kernel_backend": "triton"}
    assert choice(**fp32).runs == {"toy": "torch", "product": "triton", "bare": "native", "other": "native"}
    toy = chosen("toy", **fp32)
    why_not = "serves bfloat16, float16, not float32"
    assert toy.reason == f"eager does not fuse (kernel_backend: triton {why_not})"
    assert toy.passed_over == (("triton", why_not),)
    assert not toy.by_default
    fused_by_inductor = chosen("toy", compiler="inductor", **fp32)
    assert fused_by_inductor.runs == "native"
    assert fused_by_inductor.reason == f"inductor fuses the native body (kernel_backend: triton {why_not})"
    assert fused_by_inductor.passed_over == (("triton", why_not),)


def test_an_op_without_a_kernel_of_the_backend_goes_on_as_under_auto() -> None:
    bare = chosen("bare", kernel_backend="triton")
    told = "eager does not fuse (kernel_backend: it has no triton kernel), but there is no kernel"
    assert (bare.runs, bare.reason, bare.by_default) == ("native", told, True)
    other = chosen("other", device_type="cpu", kernel_backend="torch")
    assert (other.runs, other.reason) == ("mine", "eager does not fuse (kernel_backend: it has no torch kernel)")


def test_the_list_wins_for_the_ops_that_it_names() -> None:
    assert chosen("toy", "all", "-toy", kernel_backend="triton").runs == "native"
    assert chosen("toy", "none", "+toy", kernel_backend="triton").runs == "triton"
    assert chosen("toy", "none", "+toy", kernel_backend="auto").runs == "torch"
    # Another kernel will do where that of the backend cannot serve.
    second = chosen("toy", "none", "+toy", kernel_backend="triton", dtype=torch.float32)
    assert (second.runs, second.reason) == ("torch", "fused_ops has +toy")
    assert second.passed_over == (("triton", "serves bfloat16, float16, not float32"),)
    # The base mode names nobody.
    assert chosen("toy", "none", kernel_backend="triton").runs == "triton"
    assert chosen("toy", "none", kernel_backend="triton", dtype=torch.float32).runs == "native"
    with pytest.raises(NotAvailableError, match=r"^fused_ops: \+bare needs a kernel that runs on cuda, and none can"):
        choice("none", "+bare", kernel_backend="triton")


def test_what_auto_would_do_counts_as_default() -> None:
    assert chosen("toy", kernel_backend="torch").by_default
    assert not chosen("toy", kernel_backend="torch", compiler="inductor").by_default
    assert not chosen("toy", kernel_backend="triton").by_default
    assert chosen("toy", kernel_backend="native", compiler="inductor").by_default
    assert not chosen("toy", kernel_backend="native").by_default


def test_a_backend_that_no_op_can_run_is_refused() -> None:
    with pytest.raises(NotAvailableError) as caught:
        choice(device_type="cpu", dtype=torch.float32, kernel_backend="triton")
    assert str(caught.value) == (
        "kernel_backend: expected one with a kernel that runs on cpu in float32, got triton, which has none; "
        "use one of auto, native, torch, mine:\n"
        "  product: runs on cuda, not on cpu\n"
        "  toy: runs on cuda, not on cpu"
    )
    with pytest.raises(NotAvailableError) as caught:
        choice(kernel_backend="sgl_kernel")
    assert str(caught.value) == (
        "kernel_backend: expected one with a kernel that runs on cuda, got sgl_kernel, which has none; "
        "use one of auto, native, torch, triton:\n"
        "  toy: not installed: pip install sgl"
    )
    with pytest.raises(NotAvailableError, match=r"use one of auto, native, torch, triton: no fused op has one$"):
        choice(kernel_backend="flashinfer")


def test_a_list_that_leaves_a_backend_nothing_to_do_is_no_error() -> None:
    assert choice("none", "-toy", "-product", kernel_backend="triton").kernels == ()


def test_an_unknown_backend_lists_the_sources_and_the_names_of_kernels() -> None:
    assert chosen("other", device_type="cpu", kernel_backend="mine").runs == "mine"
    with pytest.raises(ConfigError) as caught:
        choice(kernel_backend="tritn")
    assert str(caught.value) == (
        "kernel_backend: expected one of auto, native, torch, triton, sgl_kernel, flashinfer, mine, got 'tritn'; "
        "did you mean 'triton'?"
    )
