"""Fixtures of the tests of graphs/."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch._ops import OpOverload

from piecework.ops import registry


@pytest.fixture
def registry_snapshot() -> Iterator[set[OpOverload]]:
    """A set for operators that a test registers: they are no split ops any more afterwards."""
    added: set[OpOverload] = set()
    yield added
    for op in added:
        registry.REGISTRY.ops.pop(op, None)
        registry.REGISTRY.matched.pop(op, None)
