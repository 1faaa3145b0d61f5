"""Where kernels are launched as dependent ones."""

from __future__ import annotations

import ctypes
import sys
import types
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Triton is for Linux only")


@pytest.fixture
def dependent() -> Any:
    from piecework.ops.triton import dependent

    dependent._overlaps.cache_clear()
    yield dependent
    dependent._overlaps.cache_clear()


@pytest.mark.parametrize(
    ("capability", "driver", "expected"),
    [((9, 0), 12_030, True), ((10, 0), 13_000, True), ((8, 9), 13_000, False), ((9, 0), 12_020, False)],
)
def test_it_takes_a_gpu_and_a_driver_that_can(
    capability: tuple[int, int], driver: int, expected: bool, dependent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(dependent, "driver_version", lambda: driver)
    assert dependent.overlaps_on(torch.device("cuda", 0)) is expected
    assert dependent.overlaps_on(torch.device("cpu")) is False
    assert dependent.overlap_options(expected) == ({"launch_pdl": True} if expected else {})


def test_the_driver_is_asked_for_its_version(dependent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(version: Any) -> int:
        version._obj.value = 13_000
        return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda name: types.SimpleNamespace(cuDriverGetVersion=answer))
    assert dependent.driver_version() == 13_000
    monkeypatch.setattr(ctypes, "CDLL", lambda name: types.SimpleNamespace(cuDriverGetVersion=lambda version: 3))
    assert dependent.driver_version() == 0

    def missing(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert dependent.driver_version() == 0
