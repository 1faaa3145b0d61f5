"""What the tests of ops/ share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from piecework.ops import registry


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The test registers into a copy of the registry; the operators that it defines are gone afterwards."""
    registry.load_entry_points()  # a module is imported once: what it registers must not go away with a test
    ours, theirs = registry.Registry(), registry.REGISTRY
    ours.ops.update(theirs.ops)
    ours.capturable.update(theirs.capturable)
    ours.prepares.update(theirs.prepares)
    ours.libraries.update(theirs.libraries)
    ours.bodies.update(theirs.bodies)
    ours.loaded_entry_points.update(theirs.loaded_entry_points)
    monkeypatch.setattr(registry, "REGISTRY", ours)
    yield
    for name, library in ours.libraries.items():
        if theirs.libraries.get(name) is not library:
            library._destroy()
