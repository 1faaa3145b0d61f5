"""The output structures that a model may return, and how their padded rows are cut."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from piecework.errors import InputError
from piecework.graphs.outputs import OutputContract, map_leaves


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    hidden: Any
    rest: Any = None


@dataclasses.dataclass
class Checked:
    """Its `__post_init__` understands tensors only."""

    hidden: Any
    num_rows: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.num_rows = self.hidden.shape[0]


def test_paths():
    seen = []
    map_leaves(
        {"a": [1, Pair(2, Frozen(hidden=3))], "b": (), 7: "x"}, lambda path, value: seen.append((path, value)) or value
    )
    assert seen == [("a.0", 1), ("a.1.0", 2), ("a.1.1.hidden", 3), ("a.1.1.rest", None), ("7", "x")]


structures = st.recursive(
    st.integers() | st.none() | st.text(max_size=2),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(Pair, inner, inner)
        | st.builds(Frozen, inner, inner)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3).map(collections.OrderedDict)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3).map(lambda d: collections.defaultdict(list, d))
    ),
    max_leaves=8,
)


@given(structures)
def test_the_structure_survives(value):
    before = repr(value)
    same = map_leaves(value, lambda path, leaf: leaf)
    assert repr(same) == before
    marked = map_leaves(value, lambda path, leaf: "marked")
    assert repr(value) == before, "the original was changed"
    assert map_leaves(marked, lambda path, leaf: None) == map_leaves(value, lambda path, leaf: None)


def test_post_init_does_not_run_on_leaves_that_it_cannot_understand():
    marked = map_leaves(Checked(torch.zeros(3)), lambda path, leaf: path)
    assert (marked.hidden, marked.num_rows) == ("hidden", "num_rows")


def test_model_output():
    from transformers.modeling_outputs import BaseModelOutput

    output = BaseModelOutput(last_hidden_state=torch.zeros(4, 2), hidden_states=(torch.zeros(4), torch.zeros(4)))
    cut = OutputContract().cut(output, padded=4, num_tokens=3)
    assert type(cut) is BaseModelOutput
    assert list(cut.keys()) == ["last_hidden_state", "hidden_states"]
    assert cut["last_hidden_state"].shape == cut.last_hidden_state.shape == (3, 2)
    assert cut[1][0].shape == (3,)
    assert output.last_hidden_state.shape == (4, 2), "the model's own output was changed"


def test_cut_with_the_rows_of_a_trace():
    outputs = {"hidden": torch.arange(8.0).view(4, 2), "pairs": torch.zeros(8), "table": torch.zeros(4)}
    rows = {"hidden": {0: 1}, "pairs": {0: 2}, "table": {}}
    cut = OutputContract().cut(outputs, padded=4, num_tokens=3, rows=rows)
    assert torch.equal(cut["hidden"], outputs["hidden"][:3])
    assert cut["hidden"].data_ptr() == outputs["hidden"].data_ptr(), "a view, not a copy"
    assert cut["pairs"].shape == (6,)
    assert cut["table"].shape == (4,), "a size that is equal by chance is no row"


def test_cut_without_a_trace_takes_the_padded_size_for_rows():
    cut = OutputContract().cut((torch.zeros(4, 4), torch.zeros(3)), padded=4, num_tokens=2)
    assert [t.shape for t in cut] == [(2, 4), (3,)]


@pytest.mark.parametrize(
    ("output_dims", "shapes"),
    [
        (0, [(2, 4), (2,)]),
        ({"0": 1}, [(4, 2), (2,)]),
        ({0: 1}, [(4, 2), (2,)]),
        ({"0": None}, [(4, 4), (2,)]),
        (None, [(4, 4), (4,)]),
    ],
)
def test_output_dims(output_dims, shapes):
    cut = OutputContract(output_dims).cut((torch.zeros(4, 4), torch.zeros(4)), padded=4, num_tokens=2)
    assert [tuple(t.shape) for t in cut] == shapes


def test_nothing_is_cut_when_nothing_was_padded():
    x = torch.zeros(4)
    assert OutputContract().cut(x, padded=4, num_tokens=4) is x


def test_rows_on_another_dim_than_declared():
    with pytest.raises(InputError, match=r'output \'h\': expected the padded rows on dim 0.*output_dims=\{"h": 1\}'):
        OutputContract().cut({"h": torch.zeros(3, 4)}, padded=4, num_tokens=2, rows={"h": {1: 1}})


@pytest.mark.parametrize("num_tokens", [2, 4])
def test_an_output_that_the_model_does_not_return(num_tokens):
    with pytest.raises(InputError, match="output_dims: the model returns 'a', 'b', got 'c'"):
        OutputContract({"c": 0}).cut({"a": torch.zeros(4), "b": torch.zeros(4)}, padded=4, num_tokens=num_tokens)


@pytest.mark.parametrize("output_dims", [0, 1, None, {"": 1}])
@pytest.mark.parametrize("rows", [None, {"": {0: 1, 1: 1}}, {"": {1: 2}}])
@pytest.mark.parametrize("num_tokens", [0, 3, 4])
def test_cuts_of_a_lone_output_are_what_cut_does(output_dims: Any, rows: Any, num_tokens: int) -> None:
    contract = OutputContract(output_dims)
    value = torch.arange(32).view(4, 8) if rows == {"": {1: 2}} else torch.arange(16).view(4, 4)
    try:
        expected = contract.cut(value, padded=4, num_tokens=num_tokens, rows=rows)
    except InputError:
        with pytest.raises(InputError, match="padded rows"):
            contract.lone_cuts(value, padded=4, num_tokens=num_tokens, rows=rows)
        return
    cut = value
    for dim, size in contract.lone_cuts(value, padded=4, num_tokens=num_tokens, rows=rows):
        cut = cut.narrow(dim, 0, size)
    assert torch.equal(cut, expected)
