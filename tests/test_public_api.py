"""The public names: what `piecework` exports, where it comes from, and what importing it costs."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import piecework as pw
from piecework import errors

CONTRACT = {
    *("Phase", "Backend", "Compiler", "Startup", "CaptureDevice", "PhaseConfig", "GraphConfig"),
    *(
        "BucketLadder",
        "resolve",
        "split_op",
        "split_ops",
        "fused_op",
        "fused_ops",
        "ModelFactory",
        "start_workers",
        "context_field",
        "get_context",
        "host_field",
        "use_context",
        "Runtime",
        "PortableProgram",
    ),
    *("PackedContext", "transformers_attention", "compilable"),
}


def run_python(code: str) -> str:
    """Runs `code` in a fresh interpreter outside the checkout and returns what it printed."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(sys.prefix))
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def names_for_type_checkers() -> dict[str, str]:
    """name -> module, from the imports under `if TYPE_CHECKING` of the package's `__init__.py`."""
    tree = ast.parse(Path(pw.__file__).read_text())
    [block] = [n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    found = {}
    for statement in block.body:
        assert isinstance(statement, ast.ImportFrom), ast.unparse(statement)
        for alias in statement.names:
            assert alias.asname == alias.name, f"{alias.name}: without 'as {alias.name}' it is no re-export"
            found[alias.name] = "." * statement.level + (statement.module or "")
    return found


def test_all_is_what_can_be_imported():
    exec("from piecework import *", namespace := {})
    assert {name for name in namespace if not name.startswith("_")} == set(pw.__all__)
    assert {name for name in dir(pw) if not name.startswith("_")} == {*pw.__all__, *pw._SUBMODULES}


def test_all_is_the_contract_and_every_exception():
    exceptions = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert set(pw.__all__) == CONTRACT | exceptions


@pytest.mark.parametrize("name", pw.__all__)
def test_name_comes_from_its_module(name):
    assert getattr(pw, name) is getattr(importlib.import_module(pw._EXPORTS[name], "piecework"), name)


def test_type_checkers_see_the_same_names():
    assert names_for_type_checkers() == {**pw._EXPORTS, **dict.fromkeys(pw._SUBMODULES, ".")}


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'piecework' has no attribute 'Runtimes'"):
        pw.Runtimes  # noqa: B018
    with pytest.raises(ImportError, match="Runtimes"):
        exec("from piecework import Runtimes")


@pytest.mark.parametrize("name", pw._SUBMODULES)
def test_submodule_is_an_attribute_without_an_import(name):
    assert run_python(f"import piecework as pw; print(pw.{name}.__name__)") == f"piecework.{name}"


@pytest.mark.parametrize("module", ["piecework", "piecework.errors", "piecework.phases"])
def test_import_loads_nothing_from_outside_the_standard_library(module):
    code = f"import sys; before = set(sys.modules); import {module}; print(*set(sys.modules) - before)"
    loaded = {name.partition(".")[0] for name in run_python(code).split()}
    assert loaded - sys.stdlib_module_names == {"piecework"}


def test_choosing_a_config_loads_no_torch():
    code = """
import sys, piecework as pw
pw.resolve, pw.BucketLadder((1, 2)), pw.GraphConfig(decode=pw.PhaseConfig(buckets=(1, 2)))
print("torch" in sys.modules)
"""
    assert run_python(code) == "False"


def test_every_name_works_without_the_extras():
    code = """
import sys
class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"transformers", "tokenizers", "triton", "flashinfer", "sgl_kernel"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NotInstalled())
import piecework as pw
print(all(getattr(pw, name) is not None for name in pw.__all__))
"""
    assert run_python(code) == "True"
