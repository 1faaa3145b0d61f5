"""What `piecework ops` says of a split op and of attention; of fused ops, see test_fused_ops.py."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from piecework.ops import attention
from piecework.ops.attention import AttentionForward, AttentionImplementation, AttentionSpec
from piecework.ops.registry import SplitOp
from piecework.runtime.listing import AttentionShape, attention_data, attention_text, split_op_text


@pytest.mark.parametrize(
    ("capturable", "text"),
    [(True, "in a whole forward"), (False, "not in a whole forward"), (None, "in a whole forward, if the call can be")],
)
@pytest.mark.parametrize(("num_matched", "matched"), [(None, "not traced"), (3, "3 graph nodes")])
def test_a_split_op(capturable: bool | None, text: str, num_matched: int | None, matched: str) -> None:
    op = SplitOp(
        name="mine::op",
        overload="default",
        schema="mine::op(Tensor x) -> ()",
        mutates_args=(),
        location="mine.py:3",
        capturable=capturable,
        num_matched=num_matched,
    )
    assert split_op_text(op).splitlines() == [
        "mine::op.default",
        "  schema   mine::op(Tensor x) -> ()",
        "  mutates  nothing",
        f"  capture  {text}",
        "  defined  mine.py:3",
        f"  matched  {matched}",
    ]


# Attention.


def row(name: str, *, backend: str = "", captures: bool = True, least: int = 0) -> AttentionImplementation:
    """A row that serves heads of `least` elements or more, and cannot be loaded."""

    def load() -> AttentionForward:
        raise AssertionError("a listing loads nothing")

    def reject(spec: AttentionSpec) -> str | None:
        if spec.dtype is torch.float64:
            return "not installed: pip install it"
        return f"has heads of {least} elements or more" if spec.head_size < least else None

    return AttentionImplementation(
        name=name, why=f"why {name}", reject=reject, load=load, captures=captures, backend=backend
    )


@pytest.fixture
def three_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (row("big", least=256), row("host", backend="torch", captures=False), row("static", backend="torch"))
    monkeypatch.setattr(attention, "IMPLEMENTATIONS", rows)


def decisions(backend: str = "auto", **shape: Any) -> dict[str, dict[str, tuple[bool, str]]]:
    data = attention_data(backend, "cpu", AttentionShape(**shape))
    json.dumps(data)
    return {
        row["name"]: {case: (each["chosen"], each["reason"]) for case, each in row["decision"].items()}
        for row in data["implementations"]
    }


@pytest.mark.usefixtures("three_rows")
def test_attention_says_which_row_serves_and_why_the_others_do_not() -> None:
    told = decisions()
    first = (True, "the first that supports it")
    assert told["big"] == dict.fromkeys(("prefill", "decode", "captured"), (False, "has heads of 256 elements or more"))
    assert told["host"] == {"prefill": first, "decode": first, "captured": (False, "cannot be captured")}
    after = (False, "host goes before")
    assert told["static"] == {"prefill": after, "decode": after, "captured": first}
    assert set(decisions(head_size=256)["big"].values()) == {first}
    unserved = decisions(dtype=torch.float64)
    assert all(case == (False, "not installed: pip install it") for each in unserved.values() for case in each.values())


@pytest.mark.usefixtures("three_rows")
def test_attention_follows_the_operators_backend() -> None:
    told = decisions("torch", head_size=256)
    assert set(told["big"].values()) == {(False, "attention_backend is torch")}
    assert told["host"]["prefill"] == told["static"]["captured"] == (True, "attention_backend is torch")
    assert set(decisions("big")["big"].values()) == {(False, "has heads of 256 elements or more")}


@pytest.mark.usefixtures("three_rows")
def test_attention_as_a_table() -> None:
    shape = AttentionShape(dtype=torch.float32, num_heads=4, num_kv_heads=2, head_size=64, window_size=8)
    assert attention_text(attention_data("auto", "cpu", shape)).splitlines() == [
        "attention in float32, 4 heads over 2 of 64 elements and a window of 8",
        "  implementation  prefill                             decode                              captured",
        "  big             has heads of 256 elements or more   has heads of 256 elements or more   has heads of 256 "
        "elements or more",
        "  host            chosen: the first that supports it  chosen: the first that supports it  cannot be captured",
        "  static          host goes before                    host goes before                    chosen: the first "
        "that supports it",
        "  big: why big",
        "  host: why host",
        "  static: why static",
    ]
    only = attention_text(attention_data("big", "cpu", shape)).splitlines()
    assert only[1:4] == [
        "  implementation  decision",
        "  big             has heads of 256 elements or more",
        "  host            attention_backend is big",
    ]


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_our_own_rows_are_the_choice_of_the_operator(device_type: str) -> None:
    """What the listing calls chosen is what a call would get."""
    if device_type == "cuda":
        pytest.importorskip("triton")
    data = attention_data("auto", device_type, AttentionShape())
    for case in ("prefill", "decode", "captured"):
        [chosen] = [row["name"] for row in data["implementations"] if row["decision"][case]["chosen"]]
        values = {**data["cases"][case], "dtype": torch.bfloat16, "cache_dtype": torch.bfloat16}
        assert attention.choose_implementation(AttentionSpec(**values)).name == chosen
