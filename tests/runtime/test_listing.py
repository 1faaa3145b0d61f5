"""What `piecework ops` says of a split op; of fused ops, see test_fused_ops.py."""

from __future__ import annotations

import pytest

from piecework.ops.registry import SplitOp
from piecework.runtime.listing import split_op_text


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
