"""The registry: which graph nodes call a split op, and the set that can always be read, entry points and all."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from piecework.errors import RegistrationError
from piecework.ops import registry
from piecework.ops.registry import SplitOp, match, record_matches, split_ops
from piecework.ops.split_op import split_op

pytestmark = pytest.mark.usefixtures("own_registry")


def define(name: str = "piecework_tests::op") -> Any:
    @split_op(mutates_args=("out",), name=name)
    def op(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x * 2)

    return op


def entry_of(op: Any) -> SplitOp:
    (found,) = [entry for entry in split_ops() if entry.op is op]
    return found


# Matching.


def test_match_compares_objects():
    op = define()
    assert match(op) is op
    assert match(torch.ops.piecework_tests.op) is op
    assert str(torch.ops.piecework_tests.op) != str(op), "so names would miss one of the two"
    for target in (torch.relu, "piecework_tests::op", "piecework_tests.op.default", None, torch.ops.aten.cos):
        assert match(target) is None


def test_a_packet_of_which_only_some_overloads_are_split_ops():
    split_op.register("aten::add.Tensor")
    with pytest.raises(RegistrationError, match="without an overload, and only aten.add.Tensor of its"):
        match(torch.ops.aten.add)


def test_matches_are_counted_and_unmatched_ops_reported(caplog):
    op, other = define(), define(name="piecework_tests::other")
    assert entry_of(op).num_matched is None
    with caplog.at_level(logging.INFO, logger="piecework.ops.registry"):
        unmatched = record_matches({op: 3})
    assert "piecework_tests::other" in unmatched
    assert "piecework_tests::op" not in unmatched
    assert "piecework_tests::other" in caplog.text
    assert entry_of(op).num_matched == 3
    assert entry_of(other).num_matched == 0
    record_matches({op: 2, other: 1})
    assert (entry_of(op).num_matched, entry_of(other).num_matched) == (5, 1)


def test_the_set_is_sorted():
    define(name="piecework_tests::z")
    define(name="piecework_tests::a")
    split_op.register("aten::cos")
    names = [entry.name for entry in split_ops()]
    assert names == sorted(names)
    assert {"piecework_tests::z", "piecework_tests::a", "aten::cos"} <= set(names)


# Entry points.


class EntryPoint(types.SimpleNamespace):
    """As importlib.metadata gives them."""

    def load(self) -> Any:
        self.loads.append(self.name)
        return self.function()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    points: list[EntryPoint] = []

    def entry_points(*, group: str) -> list[EntryPoint]:
        assert group == "piecework.ops"
        return points

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    return points


def test_entry_points_are_loaded_once(installed):
    loads: list[str] = []
    installed.append(
        EntryPoint(name="mine", value="mine.ops", loads=loads, function=lambda: define(name="piecework_tests::entry"))
    )
    for _ in range(2):
        assert "piecework_tests::entry" in {entry.name for entry in split_ops()}
    assert loads == ["mine"]


def test_an_entry_point_that_fails_is_warned_about_once_and_the_others_are_loaded(installed):
    def fails() -> None:
        raise ImportError("no module named mine")

    loads: list[str] = []
    installed.append(EntryPoint(name="broken", value="mine.broken", loads=loads, function=fails))
    installed.append(
        EntryPoint(name="fine", value="mine.fine", loads=loads, function=lambda: define(name="piecework_tests::fine"))
    )
    with pytest.warns(RuntimeWarning, match=r"piecework.ops: broken = mine.broken could not be imported \(ImportError"):
        split_ops()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "piecework_tests::fine" in {entry.name for entry in split_ops()}
    assert loads == ["broken", "fine"]


def test_our_own_entry_point_names_the_attention_op():
    text = (Path(registry.__file__).parent.parent / "pyproject.toml").read_text()
    assert 'attention = "piecework.ops.attention"' in text
