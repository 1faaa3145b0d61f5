"""Fused ops: how they are registered, who is chosen and why, and that the choice reaches traces and eager code."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from piecework.errors import ConfigError, NotAvailableError, RegistrationError
from piecework.ops import fused
from piecework.ops.fused import (
    expanding,
    fused_op,
    fused_ops,
    is_traced,
    native_bodies,
    tracing_with,
    use_choice,
)
from piecework.ops.fused_choice import Choice, choose

HERE = re.escape(__file__)
OURS = [
    "fused_add_rms_norm",
    "linear",
    "qk_norm_rotary",
    "rms_norm",
    "rotary_embedding",
    "sample",
    "silu_and_mul",
    "silu_and_mul_linear",
]
"""The fused ops that Piecework has, by name."""


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone afterwards."""
    ops = fused_ops()
    monkeypatch.setattr(fused, "_OPS", dict(fused._OPS))
    for op in ops:
        monkeypatch.setattr(op, "_kernels", dict(op._kernels))


@torch.library.custom_op("piecework_fused_tests::plus_ten", mutates_args=())
def plus_ten(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
    return x * scale + 10


@plus_ten.register_fake
def _(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("piecework_fused_tests::plus_hundred", mutates_args=())
def plus_hundred(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
    return x * scale + 100


@plus_hundred.register_fake
def _(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
    return torch.empty_like(x)


def native_body(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
    """x times scale."""
    return x * scale


def toy() -> Any:
    """A fused op `toy` whose kernels add 10 and 100, so that the result says who ran."""
    op = fused_op("toy")(native_body)
    op.kernel("ten", device_types=("cpu",))(plus_ten)
    op.kernel("hundred", device_types=("cpu", "cuda"))(torch.ops.piecework_fused_tests.plus_hundred.default)
    return op


def choice_of(*items: str, compiler: str = "eager", device_type: str = "cpu") -> Choice:
    return choose(items, compiler=compiler, device_type=device_type)


def runs(name: str, *items: str, **options: Any) -> str:
    return choice_of(*items, **options).runs[name]


def offset(result: torch.Tensor) -> int:
    """What the body that ran had added to 2 * 1."""
    return round(result.flatten()[0].item()) - 2


@pytest.mark.parametrize("kernel", [plus_ten, plus_hundred])
def test_the_kernels_of_these_tests_are_sound_operators(kernel: Any) -> None:
    for shape in ((3, 4), (1,), (0, 2)):
        torch.library.opcheck(kernel._opoverload, (torch.randn(shape), 0.5))


# Registration.


def test_an_op_is_called_like_its_native_body_and_looks_like_it() -> None:
    op = toy()
    assert op(torch.ones(2)).tolist() == [2, 2]
    assert op(x=torch.ones(2), scale=3).tolist() == [3, 3]
    assert (op.__name__, op.__doc__, op.__module__, repr(op)) == (
        "native_body",
        "x times scale.",
        __name__,
        "<fused op toy>",
    )
    assert re.fullmatch(f"{HERE}:\\d+", op.location)
    assert [(k.name, k.device_types) for k in op.kernels] == [("ten", ("cpu",)), ("hundred", ("cpu", "cuda"))]
    assert all(kernel.location.startswith(f"{__file__}:") for kernel in op.kernels)


def test_fused_ops_lists_ours_and_others_by_name() -> None:
    assert [op.name for op in fused_ops()] == OURS
    op = toy()
    assert fused_ops()[-1] is op
    assert len(fused_ops()) == len(OURS) + 1


def test_the_list_does_not_depend_on_what_was_imported() -> None:
    code = "from piecework.ops.fused import fused_ops; print(*[op.name for op in fused_ops()])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == OURS


def test_a_copy_of_a_module_holds_the_same_op() -> None:
    from piecework.ops.activation import silu_and_mul

    module = torch.nn.Module()
    module.act = silu_and_mul
    assert copy.deepcopy(module).act is silu_and_mul
    assert pickle.loads(pickle.dumps(silu_and_mul)) is silu_and_mul


def test_a_second_op_of_a_name_names_both_places() -> None:
    first = toy()
    with pytest.raises(RegistrationError) as caught:
        fused_op("toy")(same)
    where = f"{__file__}:{same.__code__.co_firstlineno}"
    assert f"{where}: the fused op toy was registered at {first.location} already" in str(caught.value)
    assert next(op for op in fused_ops() if op.name == "toy") is first


def test_a_factory_called_twice_makes_two_ops_of_one_name() -> None:
    def make(factor: int) -> Any:
        @fused_op("made")
        def made(x: torch.Tensor) -> torch.Tensor:
            return x * factor

        return made

    make(1)
    with pytest.raises(RegistrationError, match=f"the fused op made was registered at {HERE}"):
        make(2)


def test_a_second_kernel_of_a_name_names_both_places() -> None:
    op = toy()

    def other(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        return x

    with pytest.raises(RegistrationError) as caught:
        op.kernel("ten", device_types=("cuda",))(other)
    where = f"{__file__}:{other.__code__.co_firstlineno}"
    assert f"{where}: kernel ten of toy was registered at {op.kernels[0].location} already" in str(caught.value)
    assert op.kernels[0].device_types == ("cpu",)


def test_a_reload_replaces(tmp_path: Path) -> None:
    path = tmp_path / "fused_reloaded.py"
    path.write_text(
        "from piecework.ops.fused import fused_op\n\n"
        "@fused_op('reloaded')\ndef reloaded(x):\n    return x\n\n"
        "@reloaded.kernel('k', device_types=('cpu',))\ndef kernel(x):\n    return x\n"
    )
    spec = importlib.util.spec_from_file_location("fused_reloaded", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    first = module.reloaded
    spec.loader.exec_module(module)
    assert module.reloaded is not first
    assert next(op for op in fused_ops() if op.name == "reloaded") is module.reloaded
    assert runs("reloaded") == "k"
    op = toy()
    for _ in range(2):  # of an operator, the place is that of the call
        op.kernel("again", device_types=("cpu",))(plus_ten)


def same(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
    return x


BAD: list[tuple[Callable[[], object], str]] = [
    (lambda: fused_op("a-b")(same), "fused_op: expected an identifier, got 'a-b'; choose another name"),
    (lambda: fused_op("a")(plus_ten), "fused_op: expected a function, got a CustomOpDef; write a function around it"),
    (
        lambda: toy().kernel("k", device_types="cuda")(same),
        "device_types: expected a tuple of device types, got 'cuda'; write device_types=(\"cuda\",)",
    ),
    (lambda: toy().kernel("k", device_types=())(same), "device_types: expected a tuple of device types, got ()"),
    (
        lambda: toy().kernel("native", device_types=("cpu",))(same),
        "kernel of toy: expected a name that is an identifier and not native or auto, got 'native'; choose another",
    ),
    (
        lambda: toy().kernel("auto", device_types=("cpu",))(same),
        "kernel of toy: expected a name that is an identifier and not native or auto, got 'auto'; choose another",
    ),
    (
        lambda: toy().kernel("k", device_types=("cpu",), dtypes=torch.float32)(same),
        "kernel k of toy: dtypes: expected a tuple of dtypes, got torch.float32; write dtypes=(torch.bfloat16,), or",
    ),
    (
        lambda: toy().kernel("k", device_types=("cpu",), dtypes=())(same),
        "kernel k of toy: dtypes: expected a tuple of dtypes, got (); write dtypes=(torch.bfloat16,), or",
    ),
    (
        lambda: toy().kernel("k", device_types=("cpu",), dtypes=("float32",))(same),
        "kernel k of toy: dtypes: expected a tuple of dtypes, got ('float32',); write dtypes=(torch.bfloat16,), or",
    ),
    (
        lambda: toy().kernel("k", device_types=("cpu",), min_capability=9)(same),
        "kernel k of toy: min_capability: expected two integers, got 9; write min_capability=(8, 0), or",
    ),
    (
        lambda: toy().kernel("k", device_types=("cpu",), min_capability=(9,))(same),
        "kernel k of toy: min_capability: expected two integers, got (9,); write min_capability=(8, 0), or",
    ),
    (
        lambda: toy().kernel("a b", device_types=("cpu",))(same),
        "kernel of toy: expected a name that is an identifier and not native or auto, got 'a b'; choose another",
    ),
    (
        lambda: toy().kernel("k", device_types=("cpu",))(lambda x, scale: x),
        "kernel k of toy: expected the native body's parameters (x, scale=), got (x, scale); ",
    ),
    (
        lambda: toy().kernel("k", device_types=("cpu",))(torch.ops.aten.relu),
        "kernel k of toy: expected the native body's parameters (x, scale=), got (self); ",
    ),
]


@pytest.mark.parametrize(("register", "text"), BAD)
def test_a_bad_registration(register: Callable[[], object], text: str) -> None:
    with pytest.raises(RegistrationError) as caught:
        register()
    assert re.match(f"{HERE}:\\d+: ", str(caught.value))
    assert text in str(caught.value)


# What a trace holds in a native body's place.


@torch.library.custom_op("piecework_fused_tests::shorter", mutates_args=())
def shorter(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


@shorter.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_kernels_know_the_operators_that_a_trace_of_them_holds() -> None:
    op = toy()
    ten, hundred = torch.ops.piecework_fused_tests.plus_ten.default, plus_hundred._opoverload
    assert [kernel.operators for kernel in op.kernels] == [(ten,), (hundred,)]

    def calls(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        result: torch.Tensor = shorter(x) if scale == 2 else plus_ten(x, scale)
        return result

    op.kernel("calls", device_types=("cpu",), operators=(shorter, torch.ops.piecework_fused_tests.plus_ten))(calls)
    op.kernel("silent", device_types=("cpu",))(lambda x, scale=2.0: x)
    assert [kernel.operators for kernel in op.kernels[2:]] == [(shorter._opoverload, ten), ()]
    assert native_bodies(["toy"]) == dict.fromkeys((ten, hundred, shorter._opoverload), native_body)
    assert native_bodies([]) == native_bodies(["another"]) == {}
    for wrong in ((native_body,), [plus_ten], plus_ten):
        with pytest.raises(
            RegistrationError, match=f"{HERE}:.*kernel k of toy: operators: expected a tuple of torch op"
        ):
            op.kernel("k", device_types=("cpu",), operators=wrong)(calls)


def test_our_kernels_of_packages_and_triton_know_theirs() -> None:
    """So that a whole forward can do without them; torch's own are nothing that a trace could tell from the model's."""
    for op in fused_ops():
        for kernel in op.kernels:
            if op.name != "sample":  # what is sampled is no part of a forward
                names = [operator._schema.name for operator in kernel.operators]
                assert len(names) == (kernel.name != "torch"), (op.name, kernel.name)
                assert all(name.startswith("piecework::") for name in names)


def test_a_native_body_knows_that_it_is_traced_in_this_thread_alone() -> None:
    assert not is_traced()
    seen: list[bool] = []
    with expanding():
        thread = threading.Thread(target=lambda: seen.append(is_traced()))
        thread.start()
        thread.join(60)
        assert is_traced()
    assert seen == [False]
    assert not is_traced()
    told = torch.compile(lambda x: x + (10 if is_traced() else 0), backend="eager", fullgraph=True)
    assert told(torch.zeros(1)).item() == 10


# The choice.


@pytest.mark.parametrize(
    ("items", "compiler", "expected"),
    [
        ((), "eager", "ten"),
        ((), "aot_eager", "ten"),
        ((), "inductor", "native"),
        (("all",), "inductor", "ten"),
        (("none",), "eager", "native"),
        (("none", "+toy"), "inductor", "ten"),
        (("all", "-toy"), "eager", "native"),
    ],
)
def test_who_runs(items: tuple[str, ...], compiler: str, expected: str) -> None:
    toy()
    chosen = choice_of(*items, compiler=compiler)
    assert chosen.runs["toy"] == expected
    assert chosen.kernels == (() if expected == "native" else (("toy", expected),))
    assert [op.name for op in chosen.ops] == sorted(op.name for op in fused_ops())


def test_the_first_kernel_that_can_run_is_chosen() -> None:
    op = toy()
    assert runs("toy", device_type="cuda") == "hundred"
    assert runs("toy", device_type="mps") == "native"
    state: list[str | None] = ["the moon is wrong"]
    op._kernels["ten"] = dataclasses.replace(op.kernels[0], available=lambda: state[0])
    [chosen] = [c for c in choice_of("all").ops if c.name == "toy"]
    assert (chosen.runs, chosen.passed_over) == ("hundred", (("ten", "the moon is wrong"),))
    state[0] = None
    assert runs("toy") == "ten"


def test_a_kernel_that_cannot_be_imported_is_passed_over() -> None:
    def needs_a_package() -> str | None:
        import a_package_that_nobody_has  # type: ignore[import-not-found]  # noqa: F401

        return None

    op = fused_op("toy")(native_body)
    op.kernel("imported", device_types=("cpu",), available=needs_a_package)(plus_ten)
    [chosen] = [c for c in choice_of().ops if c.name == "toy"]
    reason = "cannot be imported: No module named 'a_package_that_nobody_has'"
    assert chosen.passed_over == (("imported", reason),)
    assert chosen.reason == f"eager does not fuse, but no kernel can run: imported {reason}"
    assert not chosen.by_default


@pytest.mark.parametrize("answer", [True, False, ""])
def test_available_must_say_why(answer: Any) -> None:
    op = fused_op("toy")(native_body)
    op.kernel("k", device_types=("cpu",), available=lambda: answer)(plus_ten)
    with pytest.raises(
        RegistrationError, match=r"available of kernel k: expected None or the reason why it cannot run"
    ):
        choice_of()


def test_reasons_and_what_counts_as_default() -> None:
    def told(*items: str, **options: Any) -> tuple[str, bool]:
        [chosen] = [c for c in choice_of(*items, **options).ops if c.name == "toy"]
        return chosen.reason, chosen.by_default

    toy()
    assert told() == ("eager does not fuse", True)
    assert told(compiler="inductor") == ("inductor fuses the native body", True)
    assert told("all") == ("fused_ops has all", True)
    assert told("all", compiler="inductor") == ("fused_ops has all", False)
    assert told("none") == ("fused_ops has none", False)
    assert told("none", compiler="inductor") == ("fused_ops has none", True)
    assert told("all", "-toy") == ("fused_ops has -toy", False)
    assert told("none", "+toy") == ("fused_ops has +toy", False)
    fused_op("bare")(same)
    [bare] = [c for c in choice_of("all").ops if c.name == "bare"]
    assert (bare.runs, bare.reason, bare.by_default) == ("native", "fused_ops has all, but there is no kernel", True)
    # No kernel is for this device: nothing is missing.
    assert told(device_type="mps") == (
        "eager does not fuse, but no kernel can run: ten runs on cpu, not on mps; "
        "hundred runs on cpu, cuda, not on mps",
        True,
    )


def test_equal_outcomes_are_equal_kernels() -> None:
    toy()
    assert choice_of().kernels == choice_of("all").kernels == choice_of("none", "+toy").kernels == (("toy", "ten"),)
    assert choice_of() == choice_of()
    assert hash(choice_of()) == hash(choice_of())


def test_a_name_that_does_not_exist_lists_those_that_do() -> None:
    with pytest.raises(ConfigError) as caught:
        choice_of("all", "-rmsnorm")
    assert str(caught.value) == (
        f"fused_ops: expected names of fused ops: {', '.join(OURS)}, got 'rmsnorm'; did you mean 'rms_norm'?"
    )


def test_a_list_of_another_shape_is_refused_here_too() -> None:
    with pytest.raises(ConfigError, match="exactly one of all and none"):
        choice_of("+rms_norm")
    with pytest.raises(ConfigError, match="compiler: expected one of eager"):
        choice_of(compiler="gcc")


def test_an_op_that_must_have_a_kernel_and_has_none() -> None:
    op = toy()
    op._kernels["hundred"] = dataclasses.replace(op.kernels[1], available=lambda: "no such card")
    with pytest.raises(NotAvailableError) as caught:
        choice_of("none", "+toy", device_type="cuda")
    assert str(caught.value) == (
        "fused_ops: +toy needs a kernel that runs on cuda, and none can; drop it:\n"
        "  ten: runs on cpu, not on cuda\n"
        "  hundred: no such card"
    )
    fused_op("bare")(same)
    with pytest.raises(NotAvailableError, match=r"\+bare needs a kernel .* drop it: it has no kernel at all$"):
        choice_of("none", "+bare")


# How the choice reaches a call.


def trace(function: Callable[..., Any], *arguments: torch.Tensor) -> torch.fx.GraphModule:
    """The one graph that Dynamo makes of it."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, example_inputs: object) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    with torch.inference_mode():
        torch.compile(function, backend=backend, fullgraph=True)(*arguments)
    [graph] = graphs
    return graph


def targets(graph: torch.fx.GraphModule) -> list[str]:
    nodes = [node for module in graph.modules() for node in module.graph.nodes]
    return [str(node.target) for node in nodes if node.op in ("call_function", "call_method")]


def test_eager_calls_follow_use_choice() -> None:
    op, x = toy(), torch.ones(2)
    with use_choice(choice_of()):
        assert offset(op(x)) == 10
        with use_choice(choice_of("none")):
            assert offset(op(x)) == 0
        assert offset(op(x)) == 10
        with use_choice(choice_of(device_type="cuda")):
            assert offset(op(x)) == 100
        with pytest.raises(ZeroDivisionError), use_choice(choice_of("none")):
            raise ZeroDivisionError
        assert offset(op(x)) == 10
    assert offset(op(x)) == 0


def test_eager_calls_ignore_what_is_traced_and_traces_what_is_eager() -> None:
    op, x = toy(), torch.ones(2)
    with tracing_with(choice_of()):
        assert offset(op(x)) == 0
    with use_choice(choice_of()):
        assert not any("plus_ten" in target for target in targets(trace(lambda x: op(x), x)))


def test_an_op_that_a_choice_does_not_know_is_native() -> None:
    known = choice_of()
    op, x = toy(), torch.ones(2)
    with use_choice(known), tracing_with(known):
        assert offset(op(x)) == 0
        assert not any("plus" in target for target in targets(trace(lambda x: op(x), x)))


@pytest.mark.parametrize(("device_type", "kernel"), [("cpu", "plus_ten"), ("cuda", "plus_hundred"), ("mps", "mul")])
def test_a_trace_is_one_graph_that_names_the_kernel(device_type: str, kernel: str) -> None:
    op, x = toy(), torch.ones(2)
    with tracing_with(choice_of(device_type=device_type)):
        graph = trace(lambda x: op(op(x, scale=3.0), 1.0).relu(), x)
    names = targets(graph)
    assert len(names) == 3
    assert sum(kernel in name for name in names) == 2


def test_a_trace_inside_a_region_names_the_kernel() -> None:
    op, x = toy(), torch.ones(2)

    @torch.compiler.nested_compile_region
    def region(x: torch.Tensor) -> torch.Tensor:
        return op(x) + 1

    def model(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = region(x)
        return x

    for items, kernel in (((), True), (("none",), False)):
        with tracing_with(choice_of(*items)):
            names = targets(trace(model, x))
        assert sum("invoke_subgraph" in name for name in names) == 3
        assert sum("plus_ten" in name for name in names) == kernel


def test_a_choice_for_traces_is_restored_after_an_error() -> None:
    op, x = toy(), torch.ones(2)
    outer, inner = choice_of(), choice_of(device_type="cuda")
    with tracing_with(outer):
        with pytest.raises(ZeroDivisionError), tracing_with(inner):
            raise ZeroDivisionError
        assert any("plus_ten" in target for target in targets(trace(lambda x: op(x), x)))
    assert not any("plus" in target for target in targets(trace(lambda x: op(x), x)))


def test_somebody_elses_compile_is_not_left_with_a_choice() -> None:
    """Dynamo guards on the bodies: what it traced under a choice is not used without it."""
    op, x = toy(), torch.ones(2)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: op(x), backend="eager", fullgraph=True)
    with tracing_with(choice_of()):
        assert offset(compiled(x)) == 10
    assert offset(compiled(x)) == 0


def test_a_traced_call_leaves_no_frozen_state() -> None:
    """What the choice adds to the guards is no plain Python value, which `explain` would list as the model's."""
    op, x = toy(), torch.ones(2)
    guards: list[Any] = []

    def keep(entries: Any) -> list[bool]:
        guards.extend(entries)
        return [False] * len(entries)

    torch._dynamo.reset()
    with tracing_with(choice_of()):
        torch.compile(
            lambda x: op(x), backend="eager", fullgraph=True, options={"guard_filter_fn": keep}, dynamic=None
        )(x)
    assert guards
    plain = [g.name for g in guards if g.has_value and isinstance(g.value, (str, int, float, bool, type(None)))]
    assert plain == []


def test_threads_do_not_see_each_others_choice() -> None:
    op, x = toy(), torch.ones(2)
    inside, done = threading.Event(), threading.Event()
    seen: list[int] = []

    def other() -> None:
        inside.wait(10)
        seen.append(offset(op(x)))
        with use_choice(choice_of(device_type="cuda")):
            seen.append(offset(op(x)))
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with use_choice(choice_of()), tracing_with(choice_of()):
        inside.set()
        assert done.wait(10)
        assert offset(op(x)) == 10
    thread.join()
    assert seen == [0, 100]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()
