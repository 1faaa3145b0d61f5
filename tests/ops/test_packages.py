"""Optional packages: what is said of one that is missing, and that nothing is imported to find out."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

import pytest

from piecework.ops.packages import missing, needs


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package that is installed and cannot be imported."""
    name = "piecework_test_package"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    return name


def test_an_installed_package_is_found_and_not_imported(package: str) -> None:
    assert missing(package, "it") is None
    assert needs(package, "it")() is None
    assert package not in sys.modules


def test_a_missing_package_says_how_to_install_it() -> None:
    assert missing("a_package_that_nobody_has", "some-package") == "not installed: pip install some-package"


def test_it_is_asked_anew_each_time(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = needs(package, "it")
    monkeypatch.setitem(sys.modules, package, None)  # as after an import that is forbidden
    assert ask() == "not installed: pip install it"
    monkeypatch.setitem(sys.modules, package, types.ModuleType(package))  # made by hand: it has no spec
    assert ask() is None
    monkeypatch.delitem(sys.modules, package)
    assert ask() is None
