"""Split ops at their definition: every rule with a test that breaks it."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import re
import sys
from typing import Any

import pytest
import torch

from piecework.errors import RegistrationError
from piecework.ops import registry
from piecework.ops.registry import SplitOp, match, split_ops
from piecework.ops.split_op import split_op

pytestmark = pytest.mark.usefixtures("own_registry")


def define(name: str | None = "piecework_tests::op", **options: Any) -> Any:
    def op(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x * 2)

    return split_op(**{"mutates_args": ("out",), "name": name, **options})(op)


def entry_of(op: Any) -> SplitOp:
    (found,) = [entry for entry in split_ops() if entry.op is op]
    return found


# What a definition does.


def test_a_mutating_operator():
    op = define()
    out = torch.empty(3)
    assert op(torch.ones(3), out) is None
    assert out.tolist() == [2, 2, 2]
    entry = entry_of(op)
    assert (entry.name, entry.overload, entry.mutates_args) == ("piecework_tests::op", "default", ("out",))
    assert entry.schema == "piecework_tests::op(Tensor x, Tensor(a1!) out) -> ()"
    assert re.fullmatch(r".*test_split_op\.py:\d+", entry.location)
    assert entry.num_matched is None
    torch.library.opcheck(op, (torch.ones(3), torch.empty(3)))


def test_a_functional_operator():
    @split_op(
        mutates_args=(), name="piecework_tests::both", fake=lambda x, scale=2.0: (torch.empty_like(x), x.new_empty(()))
    )
    def both(x: torch.Tensor, scale: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
        return x * scale, x.sum()

    assert both(torch.ones(2))[0].tolist() == [2, 2]
    assert both(torch.ones(2), scale=3.0)[0].tolist() == [3, 3]
    torch.library.opcheck(both, (torch.ones(2),))


def test_the_namespace_is_the_top_level_package():
    assert entry_of(define(name=None)).name == f"{__name__.partition('.')[0]}::op"
    assert entry_of(define(name="short")).name.endswith("::short")

    def body(x: torch.Tensor, out: torch.Tensor) -> None: ...

    body.__module__ = "__main__"
    assert entry_of(split_op(mutates_args=("out",))(body)).name == "main::body"


def test_optional_list_and_keyword_arguments():
    @split_op(mutates_args=("out", "caches", "log"), name="piecework_tests::many")
    def many(
        x: torch.Tensor, caches: list[torch.Tensor], log: torch.Tensor | None = None, *, out: torch.Tensor
    ) -> None:
        out.copy_(x)
        caches[0].copy_(x)

    assert entry_of(many).mutates_args == ("caches", "log", "out")
    out, cache = torch.empty(2), torch.empty(2)
    many(torch.ones(2), [cache], out=out)
    assert out.tolist() == cache.tolist() == [1, 1]


# What a definition may not do.


def x_to_x(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def returns_out(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    out.copy_(x)
    return out


def returns_out_in_a_tuple(x: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * 2, out


def not_annotated(x, out: torch.Tensor) -> None: ...


def odd_annotation(x: dict, out: torch.Tensor) -> None: ...


def no_result(x: torch.Tensor, out: torch.Tensor): ...


def writes_an_int(x: torch.Tensor, n: int) -> None: ...


@pytest.mark.parametrize(
    ("body", "options", "message"),
    [
        (x_to_x, {"mutates_args": "unknown"}, "got 'unknown'; list the arguments that it writes to"),
        (
            x_to_x,
            {"mutates_args": "x"},
            r"expected a sequence of argument names, got 'x'; write mutates_args=\(\"x\",\)",
        ),
        (x_to_x, {"mutates_args": ("out", "y")}, "names out, y, which .* does not take; its arguments are x"),
        (x_to_x, {"mutates_args": ()}, "returns Tensor and has no fake; pass fake="),
        (returns_out, {"mutates_args": ("out",)}, "returns out, which it mutates; return nothing"),
        (returns_out_in_a_tuple, {"mutates_args": ("out",)}, "returns out, which it mutates; return nothing"),
        (writes_an_int, {"mutates_args": ("n",)}, "no schema can be inferred .*only Tensors"),
        (not_annotated, {"mutates_args": ("out",)}, "no schema can be inferred .*must have a type annotation"),
        (odd_annotation, {"mutates_args": ("out",)}, "no schema can be inferred .*unsupported type"),
        (no_result, {"mutates_args": ("out",)}, "no schema can be inferred|returns"),
        (functools.partial(returns_out), {"mutates_args": ("out",)}, "expected a function, got a partial"),
        (3, {"mutates_args": ()}, "expected a function, got a int"),
        (x_to_x, {"mutates_args": None}, "mutates_args must be one of them"),
    ],
)
def test_rules(body, options, message):
    before = split_ops()
    with pytest.raises(RegistrationError, match=message):
        split_op(name="piecework_tests::refused", **options)(body)
    assert split_ops() == before
    define(name="piecework_tests::refused"), "the name is free after an error"


@pytest.mark.parametrize(
    "name", ["a::b::c", "a b::c", "1a::b", "a::", "::b", "a.b::c", "a::b.c", "a-b::c", "class::def", "none::lambda"]
)
def test_bad_names(name):
    with pytest.raises(RegistrationError, match="name: expected `op` or `namespace::op` made of identifiers"):
        define(name=name)


def test_a_lambda_has_no_name():
    with pytest.raises(RegistrationError, match="identifiers, got '.*<lambda>'"):
        split_op(mutates_args=())(lambda x: x)


def test_without_parentheses():
    def op(x: torch.Tensor, out: torch.Tensor) -> None: ...

    with pytest.raises(
        RegistrationError, match=r"test_split_op.py:\d+: split_op takes keyword arguments.*mutates_args"
    ):
        split_op(op)
    with pytest.raises(
        RegistrationError, match=r"test_split_op.py:\d+: split_op takes keyword arguments.*mutates_args"
    ):
        split_op()


def test_errors_say_where():
    line = writes_an_int.__code__.co_firstlineno
    with pytest.raises(RegistrationError, match=rf"test_split_op\.py:{line}: "):
        split_op(mutates_args=("n",))(writes_an_int)


def test_a_second_place_is_an_error_that_names_both():
    def first(x: torch.Tensor, out: torch.Tensor) -> None: ...

    def second(x: torch.Tensor, out: torch.Tensor) -> None: ...

    split_op(mutates_args=("out",), name="piecework_tests::twice")(first)
    lines = first.__code__.co_firstlineno, second.__code__.co_firstlineno
    with pytest.raises(RegistrationError, match=rf"py:{lines[1]}: .*piecework_tests::twice .*py:{lines[0]} already"):
        split_op(mutates_args=("out",), name="piecework_tests::twice")(second)
    assert entry_of(torch.ops.piecework_tests.twice.default).location.endswith(f":{lines[0]}")


def test_an_operator_of_somebody_else_may_not_be_redefined():
    with pytest.raises(RegistrationError, match=r'aten::relu exists already; use split_op.register\("aten::relu"\)'):
        define(name="aten::relu")


MODULE = """
import torch
from piecework.ops.split_op import split_op

@split_op(mutates_args=("out",), name="piecework_tests::reloaded")
def op(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x * {factor})
"""


def test_the_same_place_may_define_again(tmp_path, monkeypatch):
    """A reload: the new body counts, also through the name and through the old handle's packet."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    path = tmp_path / "piecework_reloaded.py"
    results = []
    for factor in (2, 3):
        path.write_text(MODULE.format(factor=factor))
        spec = importlib.util.spec_from_file_location("piecework_reloaded", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        importlib.invalidate_caches()
        spec.loader.exec_module(module)
        out = torch.empty(1)
        module.op(torch.ones(1), out)
        results.append(out.item())
        torch.ops.piecework_tests.reloaded(torch.ones(1), out)
        results.append(out.item())
        assert match(module.op) is module.op
    assert results == [2, 2, 3, 3]
    assert len([entry for entry in split_ops() if entry.name == "piecework_tests::reloaded"]) == 1


def test_a_factory_called_twice_needs_two_names():
    """The first operator would silently run the second one's body."""

    def make(factor: int, name: str = "piecework_tests::scaled") -> Any:
        @split_op(mutates_args=("out",), name=name)
        def scaled(x: torch.Tensor, out: torch.Tensor) -> None:
            out.copy_(x * factor)

        return scaled

    first, out = make(2), torch.empty(1)
    with pytest.raises(
        RegistrationError, match=r"piecework_tests::scaled before, with other values of factor; .*name="
    ):
        make(3)
    second = make(3, "piecework_tests::scaled_by_3")
    first(torch.ones(1), out)
    assert out.item() == 2
    second(torch.ones(1), out)
    assert out.item() == 3


# Whether a call can be captured.


@pytest.mark.parametrize(
    ("capturable", "listed"), [(False, False), (True, True), (lambda x, out: None, None), (str, None)]
)
def test_capturable_is_listed(capturable, listed):
    assert entry_of(define(capturable=capturable)).capturable is listed
    assert entry_of(split_op.register("aten::cos", capturable=capturable)).capturable is listed


def test_no_operator_is_capturable_by_default():
    assert entry_of(define()).capturable is False
    assert entry_of(split_op.register("aten::cos")).capturable is False


@pytest.mark.parametrize("capturable", [None, 1, "yes"])
def test_capturable_is_a_bool_or_a_function(capturable):
    before = split_ops()
    with pytest.raises(RegistrationError, match=r"py:\d+: piecework_tests::op: capturable: expected True, False or a"):
        define(capturable=capturable)
    with pytest.raises(RegistrationError, match=r"py:\d+: split_op.register: capturable: expected True, False or a"):
        split_op.register("aten::cos", capturable=capturable)
    assert split_ops() == before


def test_a_factory_called_twice_defines_once_unless_it_says_something_else_of_captures():
    def body(x: torch.Tensor, out: torch.Tensor) -> None: ...

    def make(capturable: Any) -> Any:
        return split_op(mutates_args=("out",), name="piecework_tests::again", capturable=capturable)(body)

    def by_call() -> Any:
        return lambda x, out: None

    first = make(by_call())
    assert make(by_call()) is first, "made of the same lines"
    for capturable, listed in ((True, True), (False, False), (lambda x, out: "no", None)):
        op = make(capturable)
        assert entry_of(op).capturable is listed
        assert make(capturable) is op


# What makes a call ready for many times.


def test_prepare_is_kept_and_goes_with_its_operator():
    def prepare(x: torch.Tensor, out: torch.Tensor) -> Any:
        return None

    op = define(prepare=prepare)
    assert registry.REGISTRY.prepares[op] is prepare
    assert define("piecework_tests::none") not in registry.REGISTRY.prepares
    cos = split_op.register("aten::cos", prepare=prepare)
    assert registry.REGISTRY.prepares[cos] is prepare
    registry.REGISTRY.remove(cos)
    assert cos not in registry.REGISTRY.prepares


def test_what_is_registered_anew_without_prepare_has_none():
    for prepare in (lambda x: None, None):
        cos = split_op.register("aten::cos", prepare=prepare)
    assert cos not in registry.REGISTRY.prepares


@pytest.mark.parametrize("prepare", [True, 3, "prepare"])
def test_prepare_is_a_function(prepare):
    before = split_ops()
    with pytest.raises(RegistrationError, match=r"py:\d+: piecework_tests::op: prepare: expected a function of the op"):
        define(prepare=prepare)
    with pytest.raises(RegistrationError, match=r"py:\d+: split_op.register: prepare: expected a function of the oper"):
        split_op.register("aten::cos", prepare=prepare)
    assert split_ops() == before


def test_a_factory_called_twice_defines_once_unless_it_prepares_otherwise():
    def body(x: torch.Tensor, out: torch.Tensor) -> None: ...

    def make(prepare: Any) -> Any:
        return split_op(mutates_args=("out",), name="piecework_tests::again", prepare=prepare)(body)

    def by_call() -> Any:
        return lambda x, out: None

    first = make(by_call())
    assert make(by_call()) is first
    other = make(None)
    assert other not in registry.REGISTRY.prepares
    assert first not in registry.REGISTRY.prepares
    assert make(None) is other


def test_defaults_and_keyword_arguments_reach_the_body():
    """The registered body is the decorated function; torch runs it behind a guard."""

    def body(x: torch.Tensor, out: torch.Tensor, scale: float = 3.0, *, shift: float = 1.0) -> None:
        out.copy_(x * scale + shift)

    op = split_op(mutates_args=("out",), name="piecework_tests::options")(body)
    assert registry.REGISTRY.bodies["piecework_tests::options"] is body
    out = torch.empty(1)
    op(torch.ones(1), out)
    assert out.item() == 4
    op(torch.ones(1), out, 2.0, shift=5.0)
    assert out.item() == 7


# Somebody else's operators.


def test_register():
    op = split_op.register("aten::cos")
    assert op is torch.ops.aten.cos.default
    assert match(op) is op
    entry = entry_of(op)
    assert (entry.name, entry.overload, entry.mutates_args) == ("aten::cos", "default", ())
    assert re.fullmatch(r".*test_split_op\.py:\d+", entry.location)


def test_register_an_overload():
    assert split_op.register("aten::add.Tensor") is torch.ops.aten.add.Tensor
    assert match(torch.ops.aten.add.Tensor) is torch.ops.aten.add.Tensor
    assert match(torch.ops.aten.add.Scalar) is None


def test_register_again():
    for _ in range(2):
        split_op.register("aten::cos")
    with pytest.raises(RegistrationError, match=r"aten::cos was registered at .*test_split_op.py:\d+ already"):
        split_op.register("aten::cos")
    define()
    with pytest.raises(
        RegistrationError, match=r"piecework_tests::op was registered at .*test_split_op.py:\d+ already"
    ):
        split_op.register("piecework_tests::op")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("aten::no_such_op", "expected an existing operator .*'aten::no_such_op'; import the module that defines it"),
        ("no_such_namespace::op", "expected an existing operator"),
        ("cos", "expected an existing operator `namespace::op`, got 'cos'"),
        ("", "expected an existing operator"),
        ("aten::cos.nope", r"expected one of the overloads .*write \"aten::cos"),
        ("aten::relu_", "returns an argument that it mutates"),
        ("aten::add.out", "returns an argument that it mutates"),
    ],
)
def test_what_cannot_be_registered(name, message):
    before = split_ops()
    with pytest.raises(RegistrationError, match=message):
        split_op.register(name)
    assert split_ops() == before
