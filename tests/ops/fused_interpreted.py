"""The Triton kernels of norms, activations and rotary embeddings under Triton's interpreter: beyond their numbers.

Not collected by its name: `test_implementations.py` runs it in a process of its own, as the cases of Triton's kernels.
By hand: `TRITON_INTERPRET=1 pytest tests/ops/fused_interpreted.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st

from piecework.errors import InputError, KernelNotReadyError
from piecework.ops.activation import silu_and_mul
from piecework.ops.capturing import capturing_whole
from piecework.ops.deferred import defer_compiles
from piecework.ops.fused import tracing_with
from piecework.ops.fused_choice import choose
from piecework.ops.norm import fused_add_rms_norm, rms_norm
from piecework.ops.rotary import qk_norm_rotary, rotary_embedding
from piecework.ops.triton import activation, norm, operators, rotary
from piecework.ops.triton.operators import power_of_2, rows_of

from .implementation_cases import Case, body_of, cases

assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"

OPS = (rms_norm, fused_add_rms_norm, silu_and_mul, rotary_embedding, qk_norm_rotary)
KERNELS = (norm.norm_rows, activation.silu_and_mul_rows, rotary.rotate_heads)
OURS = [case for case in cases() if case.op in OPS]
EPS = 1e-5
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # numpy's


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def test_this_is_the_interpreter() -> None:
    for kernel in KERNELS:
        assert not isinstance(kernel, triton.runtime.JITFunction)


def tensors_of(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("case", OURS, ids=str)
def test_float32_is_that_of_the_native_body(case: Case) -> None:
    arguments = case.make(torch.float32)
    got, expected = (tensors_of(body_of(case.op, runs)(*arguments)) for runs in ("triton", "native"))
    for one, other in zip(got, expected, strict=True):
        assert one.is_contiguous()
        if other.numel():
            assert (one - other).abs().max() <= 1e-6 * other.abs().max()


@pytest.mark.parametrize("case", OURS, ids=str)
def test_opcheck(case: Case) -> None:
    arguments = case.make(torch.float32)
    if case.name == "no tokens":  # the check cannot copy views of nothing
        arguments = tuple(a.new_ones(a.shape) if isinstance(a, torch.Tensor) else a for a in arguments)
    if sum(a.numel() for a in arguments if isinstance(a, torch.Tensor)) < 20000:
        torch.library.opcheck(body_of(case.op, "triton"), arguments)


# ---- what the kernel lacks


def test_weights_of_another_dtype_are_the_native_bodys_business() -> None:
    x, weight = torch.randn(3, 8).bfloat16(), torch.rand(8)
    body = body_of(rms_norm, "triton")
    assert body(x, weight, EPS).dtype == torch.float32
    assert torch.equal(body(x, weight, EPS), rms_norm.native(x, weight, EPS))
    torch.library.opcheck(body, (x, weight, EPS))
    residual = torch.randn(3, 8)
    body = body_of(fused_add_rms_norm, "triton")
    for got, expected in zip(
        body(x, residual, weight, EPS), fused_add_rms_norm.native(x, residual, weight, EPS), strict=True
    ):
        assert torch.equal(got, expected)
    torch.library.opcheck(body, (x, residual, weight, EPS))
    q, k, cos = torch.randn(3, 2, 8).bfloat16(), torch.randn(3, 1, 8).bfloat16(), torch.rand(3, 4).bfloat16()
    body = body_of(qk_norm_rotary, "triton")
    arguments = (q, k, weight, weight, cos, cos, EPS)
    for got, expected in zip(body(*arguments), qk_norm_rotary.native(*arguments), strict=True):
        assert torch.equal(got, expected)
    torch.library.opcheck(body, arguments)


@pytest.mark.parametrize("wide", ["cos", "q"])
def test_float64_among_other_dtypes_is_the_native_bodys_business(wide: str) -> None:
    q, k, cos = torch.randn(3, 2, 8).bfloat16(), torch.randn(3, 1, 8).bfloat16(), torch.rand(3, 4)
    q, cos = (q, cos.double()) if wide == "cos" else (q.double(), cos)
    weights = torch.ones(8, dtype=q.dtype), torch.ones(8, dtype=k.dtype)
    for op, arguments in ((rotary_embedding, (q, k, cos, cos)), (qk_norm_rotary, (q, k, *weights, cos, cos, EPS))):
        for got, expected in zip(body_of(op, "triton")(*arguments), op.native(*arguments), strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize(
    ("op", "arguments", "text"),
    [
        (rms_norm, (torch.zeros(2, 4), torch.zeros(3), EPS), r"rms_norm: expected x \[..., size\] and weight"),
        (rms_norm, (torch.zeros(()), torch.zeros(3), EPS), r"rms_norm: expected x \[..., size\] and weight"),
        (rms_norm, (torch.zeros(2, 4), torch.zeros(4), EPS, 5), "variance_size: expected 1 to the size 4"),
        (
            fused_add_rms_norm,
            (torch.zeros(2, 4), torch.zeros(1, 4), torch.zeros(4), EPS),
            "fused_add_rms_norm: expected x and residual of one shape",
        ),
        (silu_and_mul, (torch.zeros(2, 5),), "silu_and_mul: expected"),
        (silu_and_mul, (torch.zeros(()),), "silu_and_mul: expected"),
        (rotary_embedding, (torch.zeros(3, 2, 8), *[torch.zeros(3, 1, 8)] * 3), "rotary_embedding: expected cos"),
        (
            qk_norm_rotary,
            (torch.zeros(3, 2, 8), torch.zeros(2, 1, 8), *[torch.zeros(8)] * 2, *[torch.zeros(3, 4)] * 2, EPS),
            "qk_norm_rotary: expected q and k",
        ),
        (
            qk_norm_rotary,
            (torch.zeros(3, 2, 8), torch.zeros(3, 1, 8), *[torch.zeros(7)] * 2, *[torch.zeros(3, 4)] * 2, EPS),
            "rms_norm: expected x",
        ),
    ],
)
def test_what_does_not_fit_is_the_native_bodys_error(op: Any, arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(InputError, match=text):
        body_of(op, "triton")(*arguments)


# ---- traced


def model(x: torch.Tensor, residual: torch.Tensor, cos: torch.Tensor) -> Any:
    torch._check(cos.shape[0] == x.shape[0])
    weight = x.new_ones(8)
    normed, total = fused_add_rms_norm(rms_norm(x, weight, EPS), residual, weight, EPS)
    q, k = normed.unflatten(-1, (2, 4)), total.unflatten(-1, (2, 4))
    q, k = rotary_embedding(*qk_norm_rotary(q, k, weight[:4], weight[4:], cos, cos, EPS), cos, cos)
    return silu_and_mul(q.flatten(1)), k


def test_a_graph_holds_the_operators_by_name_and_runs_them_for_any_number_of_rows() -> None:
    choice = choose((), compiler="aot_eager", device_type="cuda", kernel_backend="triton")
    assert {choice.runs[op.name] for op in OPS} == {"triton"}
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with tracing_with(choice), torch._dynamo.config.patch(error_on_recompile=True), torch.inference_mode():
        for num_rows in (8, 1, 3, 0):
            tensors = torch.randn(num_rows, 8), torch.randn(num_rows, 8), torch.randn(num_rows, 2)
            for tensor in tensors:
                torch._dynamo.decorators.mark_unbacked(tensor, 0)
            for got, expected in zip(compiled(*tensors), model(*tensors), strict=True):
                torch.testing.assert_close(got, expected)
    [graph] = graphs
    names = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
    assert names >= {f"piecework.triton_{op.name}.default" for op in OPS}


# ---- rows and sizes


@given(st.data())
def test_rows_are_where_they_are(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    x = torch.arange(torch.Size([2 * n for n in shape]).numel()).reshape([2 * n for n in shape])
    x = x.permute(data.draw(st.permutations(range(len(shape)))))
    slices = [slice(data.draw(st.integers(0, n - 1)), None, data.draw(st.sampled_from([1, 1, 2]))) for n in x.shape]
    x = x[tuple(slices)]
    tensor, (inner, outer_stride, inner_stride) = rows_of(x)
    flat = tensor.as_strided((tensor.untyped_storage().size() // 8,), (1,), 0)
    expected = x.reshape(-1, x.shape[-1])
    for row in range(len(expected)):
        begin = tensor.storage_offset() + (row // inner) * outer_stride + (row % inner) * inner_stride
        assert flat[begin : begin + x.shape[-1]].tolist() == expected[row].tolist()


def test_rows_of_a_projection_are_not_copied() -> None:
    heads = torch.randn(6, 8, 32)[:, 2:7]
    assert rows_of(heads).tensor is heads
    assert rows_of(heads).strides == (5, 256, 32)
    assert rows_of(heads[:1]).strides == (1, 32, 0)
    assert rows_of(torch.randn(6, 8, 32)).strides == (1, 32, 0)


@given(st.integers(1, 1 << 24), st.integers(1, 1 << 18), st.integers(1, 1 << 7))
def test_sizes_of_programs(num_rows: int, size: int, num_heads: int) -> None:
    rows_at_once, block, num_warps = norm.pick_blocks(num_rows, size)
    assert power_of_2(rows_at_once) == rows_at_once
    assert block == min(power_of_2(size), 1 << 14)
    assert rows_at_once * block <= 1 << 14
    for warps in (num_warps, *(pick.num_warps for pick in others(num_rows, size, num_heads))):
        assert power_of_2(warps) == warps <= 32
    assert activation.pick_blocks(num_rows, size).block <= 1024


def others(num_rows: int, size: int, num_heads: int) -> tuple[Any, Any]:
    return activation.pick_blocks(num_rows, size), rotary.pick_blocks(num_rows, num_heads, min(size, 512))


def test_few_rows_are_shared_by_more_programs_than_many() -> None:
    assert norm.pick_blocks(1, 4096) == (1, 4096, 8)
    assert norm.pick_blocks(4096, 4096) == (1, 4096, 4)
    assert norm.pick_blocks(32, 128) == (1, 128, 1)
    assert norm.pick_blocks(32 * 4096, 128) == (16, 128, 2)
    assert activation.pick_blocks(1, 14336) == (256, 1)
    assert activation.pick_blocks(4096, 14336) == (1024, 4)
    assert rotary.pick_blocks(1, 40, 128) == (4, 1)
    assert rotary.pick_blocks(4096, 40, 128) == (16, 4)
    assert [power_of_2(number) for number in (0, 1, 2, 3, 1025)] == [1, 1, 2, 4, 2048]


# ---- launches. The interpreter compiles nothing: a kernel that notes what is asked of it stands in its place.


class Compiled:
    """What Triton makes of a kernel: takes addresses as numbers."""

    metadata = type("Metadata", (), {"global_scratch_size": 0, "profile_scratch_size": 0})()
    function, packed_metadata = 17, (2, 1, 0)

    def __init__(self, jit: Jit) -> None:
        self.jit = jit

    def run(self, g0: int, g1: int, g2: int, stream: int, function: int, packed: Any, *others: Any) -> None:
        if self.jit.error is not None:
            raise self.jit.error
        self.jit.log.append("quick")
        self.jit.kernel[(g0, g1, g2)](*[self.jit.tensors.get(a, a) for a in others[3:]])


class Jit:
    """A JIT function that compiles whenever it is asked to."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.fn = kernel, kernel.fn
        self.log: list[str] = []
        self.tensors: dict[Any, torch.Tensor] = {}
        self.error: Exception | None = None

    def warmup(self, *arguments: Any, grid: Any, **options: int) -> Compiled:
        self.log.append("compile")
        if self.error is not None:
            raise self.error
        return Compiled(self)

    def __getitem__(self, grid: Any) -> Any:
        def run(*arguments: Any, **options: int) -> Compiled:
            self.log.append("ordinary")
            self.kernel[grid](*arguments)
            return Compiled(self)

        return run


@pytest.fixture
def jit(monkeypatch: pytest.MonkeyPatch) -> Jit:
    """The norm's kernel, which takes itself for one of a GPU."""
    jit = Jit(norm.norm_rows)
    addresses = operators.addresses_of

    def noted(*tensors: torch.Tensor) -> tuple[int, ...]:
        jit.tensors.update({tensor.data_ptr(): tensor for tensor in tensors})
        return addresses(*tensors)

    monkeypatch.setattr(operators, "addresses_of", noted)
    monkeypatch.setattr(operators, "is_interpreted", lambda kernel: False)
    monkeypatch.setattr(operators, "launch_on", lambda kernel, tensor: torch.inference_mode())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(norm, "_LAUNCHER", operators.Launcher(jit, overlaps=True))
    return jit


WEIGHT = torch.rand(64)


def call(num_rows: int = 3, dtype: torch.dtype = torch.float32) -> None:
    """One call of the operator, which must be right."""
    x, weight = torch.randn(num_rows, 64).to(dtype), WEIGHT.to(dtype)
    torch.testing.assert_close(body_of(rms_norm, "triton")(x, weight, EPS), rms_norm.native(x, weight, EPS))


def test_the_second_launch_of_a_kind_is_quick(jit: Jit) -> None:
    for num_rows in (3, 3, 1, 77):
        call(num_rows)
    assert jit.log == ["ordinary", "quick", "quick", "quick"]
    call(3, torch.float64)
    call(2000)  # several rows a program
    assert jit.log[4:] == ["ordinary", "ordinary"]


def test_addresses_of_another_kind_are_compiled_for(jit: Jit) -> None:
    memory = torch.randn(3 * 64 + 1)
    for x in (memory[1:].view(3, 64), memory[:-1].view(3, 64), memory[1:].view(3, 64)):
        body_of(rms_norm, "triton")(x, WEIGHT, EPS)
    assert jit.log == ["ordinary", "ordinary", "quick"]


def test_a_launcher_that_takes_something_else_is_not_asked_again(jit: Jit) -> None:
    call()
    jit.error = TypeError("function takes exactly 30 arguments")
    call()
    call()
    assert jit.log == ["ordinary"] * 3


def test_a_profiler_sees_ordinary_launches(jit: Jit, monkeypatch: pytest.MonkeyPatch) -> None:
    call()
    monkeypatch.setattr(operators, "has_hooks", lambda: True)
    call()
    assert jit.log == ["ordinary", "ordinary"]


def test_another_current_device_gets_an_ordinary_launch(jit: Jit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    current = [-1]  # what a tensor on the CPU says
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    call()
    call()
    current[0] = 1
    call()
    assert jit.log == ["ordinary", "quick", "ordinary"]


def test_a_tensor_on_another_device_is_refused_and_never_launched_quickly(
    jit: Jit, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, elsewhere = torch.randn(3, 64), WEIGHT.to("meta")
    body = norm.rms_norm
    body(x, WEIGHT, EPS, None)
    device_of = torch.Tensor.get_device
    monkeypatch.setattr(torch.Tensor, "get_device", lambda t: 1 if t.device.type == "meta" else device_of(t))
    with pytest.raises(InputError, match="norm_rows: expected all tensors on one device, got cpu, meta; move them"):
        body(x, elsewhere, EPS, None)
    assert jit.log == ["ordinary"]


def test_kinds_are_not_remembered_without_end(jit: Jit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "_MAX_WAYS", 1)
    for dtype in (torch.float32, torch.float64, torch.float64, torch.float32):
        call(3, dtype)
    assert jit.log == ["ordinary", "ordinary", "quick", "ordinary"]


def test_no_call_waits_for_a_compile_where_none_may(jit: Jit) -> None:
    submitted: dict[Hashable, Callable[[], None]] = {}
    with defer_compiles(submitted.setdefault):
        call()
        call(5)
        assert jit.log == []
        [compile] = submitted.values()
        compile()
        compile()
        assert jit.log == ["compile"]
        call()
        call(5)
        assert jit.log == ["compile", "quick", "quick"]
        with pytest.raises(KernelNotReadyError, match="norm_rows: expected this Triton kernel to be compiled before"):
            with capturing_whole():
                call(3, torch.float64)
        with capturing_whole():
            call()
    call(3, torch.float64)
    assert jit.log[3:] == ["quick", "ordinary"]


def test_a_compile_that_fails_fails_in_the_step_then(jit: Jit) -> None:
    submitted: dict[Hashable, Callable[[], None]] = {}
    jit.error = RuntimeError("out of registers")
    with defer_compiles(submitted.setdefault):
        call()
        [compile] = submitted.values()
        with pytest.raises(RuntimeError, match="out of registers"):
            compile()
        jit.error = None
        call()
    assert jit.log == ["compile", "ordinary"]
