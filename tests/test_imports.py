"""Imports go one way: errors, phases <- ops <- graphs <- runtime. Read from the source, so that nothing is imported.

Also checked: who may touch `torch._inductor` and `runtime/engine`, that the rooms without torch have none, that nothing
imports a room by its bare name, and that there is no `utils.py`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RANK = {"errors": 0, "phases": 1, "ops": 2, "graphs": 3, "runtime": 4}
"""A room imports from rooms of a lower rank and from itself."""
NO_TORCH = {"errors", "phases"}
INDUCTOR = "piecework.graphs.compilers"
ENGINE = "piecework.runtime.engine"
ENGINE_USERS = ("piecework.runtime.cli", "piecework.runtime.demo", "piecework.runtime.bench")


def is_under(module: str, *parents: str) -> bool:
    return any(module == parent or module.startswith(parent + ".") for parent in parents)


def room_of(module: str) -> str:
    """The room of a module of the package; "" for the package itself and for a name that it defines."""
    first = module.removeprefix("piecework.").partition(".")[0]
    return first if is_under(module, "piecework") and first in RANK else ""


def absolute(name: str, level: int, package: str) -> str:
    """The absolute form of an import of `name`, `level` dots up from `package`."""
    if not level:
        return name
    parts = package.split(".")
    base = parts[: max(0, len(parts) - level + 1)]
    return ".".join([*base, name] if name else base) if base else f"<above piecework>.{name}"


def import_by_call(call: ast.Call, module: str, package: str) -> str | None:
    """The absolute name that `import_module("..a", __name__)` or `__import__("a")` imports, if its text says it."""
    called = ast.unparse(call.func).rpartition(".")[2]
    if called not in ("import_module", "__import__") or not call.args:
        return None
    name = call.args[0].value if isinstance(call.args[0], ast.Constant) else None
    if not isinstance(name, str):
        return None
    anchor = module if len(call.args) > 1 and ast.unparse(call.args[1]) == "__name__" else package
    return absolute(name.lstrip("."), len(name) - len(name.lstrip(".")), anchor)


def imports_in(tree: ast.AST, module: str, package: str) -> Iterator[tuple[int, str]]:
    """(line, absolute name) of each import, wherever it stands. `from a import b` counts as an import of `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node.module or "", node.level, package)
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and (name := import_by_call(node, module, package)):
            yield node.lineno, name


def mentions_of_inductor(tree: ast.AST) -> Iterator[int]:
    """Lines that reach `torch._inductor` by an attribute or by its name in a string; a docstring may speak of it."""
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "_inductor":
            yield node.lineno
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            if node.value.startswith("torch._inductor"):
                yield node.lineno


def problems_of_import(module: str, target: str) -> Iterator[str]:
    """What is wrong when `module` imports `target`; both are absolute names, `module` one of the package."""
    room, target_room = room_of(module), room_of(target)
    if target.partition(".")[0] in {*RANK, "tests", "benchmarks"}:
        yield f"bare import of {target}; use a relative import or piecework.{target}"
    if is_under(target, "torch._inductor") and module != INDUCTOR:
        yield f"torch._inductor belongs to {INDUCTOR} alone"
    if is_under(target, "<above piecework>", "piecework.tests", "piecework.benchmarks"):
        yield f"{target} is not part of the package"
    elif not room:  # the package's own __init__.py may import from every room
        return
    elif is_under(target, "piecework") and not target_room:
        if room != "runtime" and target != "piecework.__version__":
            yield f"{room} must not import from the public API ({target}); import it from its room"
    elif target_room and RANK[target_room] > RANK[room]:
        yield f"{room} must not import from {target_room} ({target})"
    elif is_under(target, "torch") and room in NO_TORCH:
        yield f"{room} must load without torch ({target})"
    elif is_under(target, ENGINE) and not is_under(module, ENGINE, *ENGINE_USERS):
        yield f"only {', '.join(ENGINE_USERS)} may import from {ENGINE} ({target})"


def problems(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """What is wrong with the imports of `module`, whose text is `source`: "line: problem", by line."""
    tree = ast.parse(source)
    package = module if is_package else module.rpartition(".")[0]
    imports = imports_in(tree, module, package)
    found = [(line, problem) for line, target in imports for problem in problems_of_import(module, target)]
    if module != INDUCTOR:
        found += [(line, f"torch._inductor belongs to {INDUCTOR} alone") for line in mentions_of_inductor(tree)]
    return [f"{line}: {problem}" for line, problem in sorted(set(found))]


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


PACKAGE = [*sorted(ROOT.glob("*.py")), *sources(*RANK)]
BESIDE = sources("tests", "benchmarks")


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", PACKAGE, ids=relative)
def test_package_imports_go_one_way(path):
    parts = ("piecework", *path.relative_to(ROOT).with_suffix("").parts)
    is_package = parts[-1] == "__init__"
    module = ".".join(parts[:-1] if is_package else parts)
    assert problems(path.read_text(encoding="utf-8"), module, is_package=is_package) == []


@pytest.mark.parametrize("path", BESIDE, ids=relative)
def test_tests_and_benchmarks_import_the_package_by_its_name(path):
    targets = {target for _, target in imports_in(ast.parse(path.read_text(encoding="utf-8")), "", "")}
    assert [target for target in targets if target.partition(".")[0] in RANK] == []


def test_every_room_was_read():
    assert {room_of("piecework." + relative(path).replace("/", ".")) for path in PACKAGE} >= {"", *RANK}


def test_root_holds_only_the_api_its_command_and_the_errors():
    assert {path.name for path in ROOT.glob("*.py")} == {"__init__.py", "__main__.py", "errors.py"}


def test_no_utils():
    named = [path for path in [*PACKAGE, *BESIDE] if "utils" in path.relative_to(ROOT).with_suffix("").parts]
    assert named == []


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("errors", "from .phases import Phase", "errors must not import from phases (piecework.phases.Phase)"),
        ("phases.config", "from ..ops.split_op import split_op", "phases must not import from ops"),
        ("phases.config", "def f():\n    import torch", "2: phases must load without torch (torch)"),
        ("phases.config", "from torch import Tensor", "phases must load without torch (torch.Tensor)"),
        ("ops.triton", "from .. import graphs", "ops must not import from graphs (piecework.graphs)"),
        ("ops.triton.norm", "from ...graphs import split", "ops must not import from graphs (piecework.graphs.split)"),
        ("ops.norm", "import piecework.runtime.events", "ops must not import from runtime (piecework.runtime.events)"),
        ("graphs.piece", "from piecework.runtime import entries", "graphs must not import from runtime"),
        ("graphs.piece", "from .. import Runtime", "graphs must not import from the public API (piecework.Runtime)"),
        ("graphs.piece", "import piecework as pw", "graphs must not import from the public API (piecework)"),
        ("graphs.piece", "if TYPE_CHECKING:\n    from ..runtime import x", "2: graphs must not import from runtime"),
        ("graphs.piece", "importlib.import_module('piecework.runtime')", "graphs must not import from runtime"),
        ("graphs.piece", "import_module('..runtime.x', __package__)", "graphs must not import from runtime"),
        ("graphs.piece", "import_module('...runtime.x', __name__)", "graphs must not import from runtime"),
        ("graphs.piece", "from torch import _inductor", "torch._inductor belongs to piecework.graphs.compilers alone"),
        ("graphs.piece", "import torch._inductor.config as c", "torch._inductor belongs to"),
        ("graphs.piece", "import torch\ntorch._inductor.config", "2: torch._inductor belongs to"),
        ("graphs.piece", "x = {'torch._inductor.config': 1}", "torch._inductor belongs to"),
        ("graphs.piece", "from ....x import y", "<above piecework>.x.y is not part of the package"),
        ("graphs.piece", "from ..tests.toys import y", "piecework.tests.toys.y is not part of the package"),
        ("graphs.piece", "import ops", "bare import of ops; use a relative import or piecework.ops"),
        ("runtime.cli", "from phases.config import Phase", "bare import of phases.config.Phase"),
        ("runtime.cli", "import tests.toys", "bare import of tests.toys"),
        ("runtime.runtime", "from .engine import weights", "may import from piecework.runtime.engine"),
        ("runtime.benchmark", "from .engine import weights", "may import from piecework.runtime.engine"),
        ("runtime.cache.key", "from ..engine.weights import x", "may import from piecework.runtime.engine"),
    ],
)
def test_checker_fires(module, source, expected):
    [problem] = problems(source, f"piecework.{module}")
    assert expected in problem


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("phases.config", "from ..errors import ConfigError\nfrom .ladder import BucketLadder"),
        ("ops.registry", "import torch\nfrom piecework.errors import RegistrationError"),
        ("graphs.piece", "from ..ops import registry\nfrom ..phases import Phase\nfrom . import split"),
        ("graphs.piece", "'''Never torch._inductor here.'''\nimport torch._dynamo"),
        ("ops.attention", "importlib.import_module('..torch_native', __name__)"),
        ("graphs.compilers", "import torch._inductor\nfrom torch._inductor import standalone_compile"),
        ("graphs.piece", "from .. import __version__"),
        ("runtime.cli", "from .engine.weights import load\nimport piecework as pw"),
        ("runtime.bench.startup", "from ..engine import engine"),
        ("runtime.engine.models.llama", "from ..kv_cache import x\nfrom .... import ops"),
        ("runtime.engine.engine", "import operators, graphslib, torch.utils"),
    ],
)
def test_checker_accepts(module, source):
    assert problems(source, f"piecework.{module}") == []


def test_checker_knows_a_package_from_a_module():
    source = "from .runtime import Runtime\nfrom ..graphs import split"
    assert problems(source, "piecework.runtime", is_package=True) == []
    assert problems(source, "piecework.graphs.runtime") == []
    [problem] = problems(source.replace("graphs", "runtime"), "piecework.graphs", is_package=True)
    assert problem.startswith("2: graphs must not import from runtime")
