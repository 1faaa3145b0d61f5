"""The step context: found by type, scoped, per thread, and an error that says what to do."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import threading

import pytest
import torch

from piecework.errors import ContextError, InputError
from piecework.ops.context import (
    context_field,
    get_context,
    host_field,
    host_fields,
    padded_fields,
    plain_fields,
    use_context,
)
from piecework.ops.split_op import split_op


@dataclasses.dataclass
class Step:
    factor: int = 2


@dataclasses.dataclass
class Special(Step):
    pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fields:
    slots: torch.Tensor = context_field(pad=-1)
    table: torch.Tensor = context_field(pad=0.5, dims={1: "tokens", 0: "rows"}, default=None, repr=False)
    plain: int = 3
    kept: int = context_field(pad=0, metadata={"mine": 1}, default=0)


def test_no_context():
    with pytest.raises(ContextError, match=r"asked for this step's Step and got no context; pass context=Step\("):
        get_context(Step)


def test_another_kind_of_context():
    with use_context({"factor": 2}), pytest.raises(ContextError, match="this step's Step and got a dict"):
        get_context(Step)


def test_a_subclass_will_do_and_a_base_will_not():
    with use_context(Special()):
        assert get_context(Step) is get_context(Special)
    with use_context(Step()), pytest.raises(ContextError, match="Special and got a Step"):
        get_context(Special)


def test_nested_and_reset_also_by_an_error():
    with use_context(Step(1)):
        with contextlib.suppress(ZeroDivisionError), use_context(Step(2)):
            assert get_context(Step).factor == 2
            raise ZeroDivisionError
        assert get_context(Step).factor == 1
        with use_context(None), pytest.raises(ContextError):
            get_context(Step)
    with pytest.raises(ContextError):
        get_context(Step)


def test_each_thread_has_its_own():
    seen: list[object] = []

    def work(factor: int | None) -> None:
        try:
            if factor is None:
                seen.append(get_context(Step))
                return
            with use_context(Step(factor)):
                barrier.wait()
                seen.append(get_context(Step).factor)
        except ContextError as error:
            seen.append(type(error))

    barrier = threading.Barrier(2)
    with use_context(Step(9)):
        threads = [threading.Thread(target=work, args=(factor,)) for factor in (1, 2, None)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(map(str, seen)) == sorted(["1", "2", str(ContextError)])


def test_an_operator_body_reads_it():
    @split_op(mutates_args=("out",), name="piecework_tests_context::scaled")
    def scaled(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x * get_context(Step).factor)

    out = torch.empty(2)
    with use_context(Step(5)):
        scaled(torch.ones(2), out)
    assert out.tolist() == [5, 5]
    with pytest.raises(ContextError):
        scaled(torch.ones(2), out)


def test_padded_fields():
    fields = padded_fields(Fields(slots=torch.zeros(2)))
    assert list(fields) == ["slots", "table", "kept"]
    assert (fields["slots"].value, fields["slots"].dims) == (-1, {0: "tokens"})
    assert (fields["table"].value, fields["table"].dims) == (0.5, {1: "tokens", 0: "rows"})
    assert dict(dataclasses.fields(Fields)[3].metadata)["mine"] == 1


@pytest.mark.parametrize("context", [None, 3, {"slots": 1}, object()])
def test_what_is_no_dataclass_has_no_padded_fields(context):
    assert padded_fields(context) == {}


# What a field declares.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slots:
    start: torch.Tensor = context_field(pad="last", slots={0: "requests"}, plus={0: 1})
    rows: torch.Tensor = context_field(pad=0, dims={0: "tokens"}, slots={1: "blocks"}, default=None)
    lens: tuple[int, ...] = host_field(default=(), repr=False, metadata={"mine": 1})
    factor: int = 2


def test_slots_and_plus():
    fields = padded_fields(Slots(start=torch.zeros(2)))
    start, rows = fields["start"], fields["rows"]
    assert (start.value, start.dims, start.slots, start.plus) == ("last", {}, {0: "requests"}, {0: 1})
    assert (rows.dims, rows.slots, rows.plus) == ({0: "tokens"}, {1: "blocks"}, {})


def test_host_fields_are_neither_padded_nor_plain():
    step = Slots(start=torch.zeros(2))
    assert [field.name for field in host_fields(step)] == ["lens"]
    assert plain_fields(step) == ("factor",)
    assert dict(dataclasses.fields(Slots)[2].metadata)["mine"] == 1
    assert (step.lens, "lens" in repr(step)) == ((), False)


def test_the_class_of_a_context_has_no_fields_to_pad():
    assert (padded_fields(Slots), host_fields(Slots), plain_fields(Slots)) == ({}, (), ())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pad": "first"}, "pad: expected a number or \"last\", got 'first'; write pad=0"),
        ({"pad": None}, "pad: expected a number"),
        ({"pad": True}, "pad: expected a number"),
        ({"pad": 0, "dims": {-1: "tokens"}}, "dims: expected {dim: name} with dims counted from 0, got {-1: 'tokens'}"),
        ({"pad": 0, "slots": {-1: "requests"}}, "slots: expected {dim: name} with dims counted from 0"),
        ({"pad": 0, "slots": {True: "requests"}}, "slots: expected {dim: name}"),
        ({"pad": 0, "slots": {0: 256}}, "slots: expected {dim: name} with dims counted from 0, got {0: 256}"),
        (
            {"pad": 0, "dims": {0: "tokens"}, "slots": {0: "requests"}},
            "expected a dim either in dims or in slots, got 0 in both",
        ),
        ({"pad": 0, "slots": {0: "requests"}, "plus": {1: 1}}, "plus: expected dims of dims or slots, got 1"),
        ({"pad": 0, "dims": {}, "plus": {0: 1}}, "plus: expected dims of dims or slots, got 0"),
        ({"pad": 0, "plus": {0: -1}}, "plus: expected numbers of 1 or more, got -1 for dim 0"),
        ({"pad": 0, "plus": {0: 1.0}}, "plus: expected numbers of 1 or more, got 1.0"),
    ],
)
def test_a_field_that_makes_no_sense_is_refused_where_it_is_declared(options, message):
    with pytest.raises(InputError, match=re.escape(message)):
        context_field(**options)
