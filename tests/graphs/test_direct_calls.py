"""How a split op is called at replays: prepared, as its body, or as the operator; and when which of them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from piecework.errors import RegistrationError
from piecework.graphs.direct_calls import are_operators_watched, direct_call
from piecework.ops import registry
from piecework.ops.capturing import capturing_whole
from piecework.ops.split_op import split_op

SEEN: list[tuple[Any, ...]] = []
"""What the bodies and `prepare` of this file were given."""


@split_op(mutates_args=("out",), name="piecework_direct::scaled")
def scaled(
    x: torch.Tensor,
    out: torch.Tensor,
    by: float = 2.0,
    name: str | None = None,
    *,
    shift: float = 0.0,
    flag: bool = False,
) -> None:
    """Arguments of many kinds."""
    SEEN.append((by, name, shift, flag))
    out.copy_(x * by + shift)


@split_op(mutates_args=("outs",), name="piecework_direct::listed")
def listed(xs: list[torch.Tensor], outs: list[torch.Tensor]) -> None:
    """Lists, which the dispatcher makes anew for each call."""
    for x, out in zip(xs, outs, strict=True):
        out.copy_(x)


def prepare(x: torch.Tensor, out: torch.Tensor, by: float = 2.0) -> Any:
    """Prepared only for a factor that is no whole number."""
    SEEN.append((by,))
    return None if by.is_integer() else functools.partial(torch.mul, x, by, out=out)


@split_op(mutates_args=("out",), name="piecework_direct::prepared", prepare=prepare)
def prepared(x: torch.Tensor, out: torch.Tensor, by: float = 2.0) -> None:
    """x times a factor."""
    SEEN.append(("body", by))
    out.copy_(x * by)


@pytest.fixture(autouse=True)
def _nothing_seen() -> Iterator[None]:
    SEEN.clear()
    yield
    SEEN.clear()


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[OpOverload]:
    """The calls of operators as such, from Python."""
    calls: list[OpOverload] = []
    original = OpOverload.__call__

    def counted(self: OpOverload, /, *args: Any, **kwargs: Any) -> Any:
        if self.namespace.startswith("piecework"):
            calls.append(self)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(OpOverload, "__call__", counted)
    return calls


X = torch.arange(3.0)


def test_a_body_gets_what_the_dispatcher_would_give_it(dispatched: list[OpOverload]) -> None:
    out = torch.empty(3)
    for args, kwargs in (
        ((X, out), {}),
        ((X, out, 3, "name"), {"shift": 1}),
        ((X,), {"out": out, "flag": True, "by": 0.5}),
    ):
        with torch.inference_mode():
            scaled(*args, **kwargs)
            expected, dispatched[:] = out.clone(), []
            call = direct_call(scaled, args, kwargs)
            for _ in range(2):
                out.fill_(-1)
                assert call() is None
                assert torch.equal(out, expected)
        assert not dispatched
        assert SEEN[-1] == SEEN[-2] == SEEN[-3]
        assert [*map(type, SEEN[-1])] == [*map(type, SEEN[-3])]


def test_what_the_dispatcher_would_do_something_to_is_an_operator(dispatched: list[OpOverload]) -> None:
    class Subclass(torch.Tensor):
        pass

    out = torch.empty(3)
    twin = torch.ones(3, dtype=torch.complex64).conj().imag
    assert twin.is_neg()
    for op, args in (
        (scaled, (torch.arange(3.0).as_subclass(Subclass), out)),
        (scaled, (twin, out)),
        (prepared, (twin, out, 0.5)),
        (scaled, (X, out, True)),
        (listed, ([X], [out])),
        (torch.ops.aten.copy_.default, (out, X)),
    ):
        with torch.inference_mode():
            call = direct_call(op, args, {})
            dispatched.clear()
            call()
        assert set(dispatched) == ({op} if op.namespace != "aten" else set())
        assert isinstance(call, functools.partial)
        assert call.func is op
    dispatched.clear()
    with torch.inference_mode():
        direct_call(scaled, (nn.Parameter(X.clone()), out), {})()
    assert not dispatched


@pytest.mark.filterwarnings("ignore:.*Overriding a previously registered kernel")
@pytest.mark.parametrize("op", [scaled, prepared], ids=str)
@pytest.mark.parametrize(
    ("key", "is_direct"),
    [
        ("CPU", False),
        ("AutocastCPU", False),
        ("ADInplaceOrView", False),
        ("BackendSelect", False),
        ("CompositeExplicitAutograd", False),
        ("CompositeExplicitAutogradNonFunctional", False),
        ("CUDA", True),
    ],
)
def test_a_kernel_of_somebody_else_is_called(key: str, is_direct: bool, op: OpOverload) -> None:
    library = torch.library.Library("piecework_direct", "FRAGMENT")
    try:
        library.impl(op._schema.name, lambda *args, **kwargs: args[1].fill_(7) and None, key, allow_override=True)
        call = direct_call(op, (X, torch.empty(3), 0.5), {})
        assert (call.func is not op) == is_direct  # type: ignore[attr-defined]
    finally:
        library._destroy()
    assert direct_call(op, (X, torch.empty(3), 0.5), {}).func is not op  # type: ignore[attr-defined]


def test_another_overload_has_another_body() -> None:
    library = torch.library.Library("piecework_direct", "FRAGMENT")
    op = None
    try:
        library.define("scaled.plus(Tensor x, Tensor(a!) out, float by) -> ()")
        library.impl("scaled.plus", lambda x, out, by: torch.add(x, by, out=out) and None, "CPU")
        op = split_op.register("piecework_direct::scaled.plus")
        assert direct_call(op, (X, torch.empty(3), 2.0), {}).func is op  # type: ignore[attr-defined]
    finally:
        if op is not None:
            registry.REGISTRY.remove(op)
        library._destroy()


@split_op(mutates_args=("out",), name="piecework_direct::looking")
def looking(x: torch.Tensor, out: torch.Tensor) -> None:
    """Notes what state of torch a body sees, and what it makes."""
    product = x @ x.t()
    SEEN.append((product.dtype, torch.is_inference(product), torch.is_grad_enabled(), torch.get_autocast_dtype("cpu")))
    out.copy_(product.sum(0))


@pytest.mark.parametrize("is_autocast", [False, True])
@pytest.mark.parametrize("is_made_inside", [False, True])
def test_a_body_sees_the_same_torch_either_way(is_autocast: bool, is_made_inside: bool) -> None:
    with torch.inference_mode(is_made_inside):
        x, out, other = torch.randn(3, 3), torch.empty(3), torch.empty(3)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        looking(x, out)
        direct_call(looking, (x, other), {})()
    assert SEEN[0] == SEEN[1]
    assert SEEN[0][0] is (torch.bfloat16 if is_autocast else torch.float32)
    assert torch.equal(out, other)
    assert is_made_inside or out._version == other._version == 1


def test_a_prepared_call_is_used_unless_there_is_none(dispatched: list[OpOverload]) -> None:
    out = torch.empty(3)
    with torch.inference_mode():
        call = direct_call(prepared, (X, out, 0.5), {})
        assert SEEN == [(0.5,)]
        call(), call()
        assert out.tolist() == [0, 0.5, 1]
        assert SEEN == [(0.5,)], "once, and no body"
        SEEN.clear()
        direct_call(prepared, (X, out), {"by": 3})()
    assert SEEN == [(3.0,), ("body", 3.0)]
    assert out.tolist() == [0, 3, 6]
    assert not dispatched


def test_an_operator_of_somebody_else_can_be_prepared(registry_snapshot: set[OpOverload]) -> None:
    def of_cos(x: torch.Tensor) -> Any:
        return lambda: "prepared"

    op = split_op.register("aten::cos", prepare=of_cos)
    registry_snapshot.add(op)
    assert direct_call(op, (X,), {})() == "prepared"
    registry.REGISTRY.prepares.pop(op)
    assert torch.equal(direct_call(op, (X,), {})(), X.cos())


def test_prepare_must_return_a_function_or_none() -> None:
    def body(x: torch.Tensor, out: torch.Tensor) -> None: ...

    def prepare(x: torch.Tensor, out: torch.Tensor) -> Any:
        return 3

    wrong = split_op(mutates_args=("out",), name="piecework_direct::wrong", prepare=prepare)(body)
    with pytest.raises(RegistrationError, match=r"py:\d+: piecework_direct::wrong: prepare: expected to .* got 3"):
        direct_call(wrong, (X, torch.empty(3)), {})


def test_who_watches() -> None:
    assert are_operators_watched(), "gradients"

    class Functions(TorchFunctionMode):
        pass

    with torch.inference_mode():
        assert not are_operators_watched()
        with torch.autocast("cpu"):
            assert not are_operators_watched()
        for context in (
            TorchDispatchMode(),
            Functions(),
            torch.inference_mode(False),
            torch.device("cpu"),
            torch.autograd.profiler.profile(),
            capturing_whole(),
        ):
            with context:
                assert are_operators_watched(), context
        assert not are_operators_watched()
