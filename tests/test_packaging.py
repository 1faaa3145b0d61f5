"""What an installation contains: every module and data file of the package, and neither tests nor benchmarks."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import piecework
from piecework.runtime.engine import default_model

ROOT = Path(__file__).resolve().parent.parent
BESIDE = {"tests", "benchmarks"}
"""Folders of the repository that are no part of the package."""


def files_under(folder: Path) -> list[Path]:
    """The files under `folder` that git would track, relative to it: no caches, nothing hidden."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return [path for path in found if not any(p.startswith(".") or p == "__pycache__" for p in path.parts)]


def package_files(root: Path) -> set[str]:
    """Every file that an installation must hold: the modules at the root, the rooms whole, and the type marker."""
    rooms = [init.parent for init in root.glob("*/__init__.py") if init.parent.name not in BESIDE]
    modules = {path.name for path in root.glob("*.py")}
    return modules | {"py.typed"} | {(room.name / file).as_posix() for room in rooms for file in files_under(room)}


def pip(*arguments: object) -> None:
    """Runs pip without a network."""
    command = [sys.executable, "-m", "pip", *map(str, arguments), "--no-deps", "--no-index", "--no-build-isolation"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository without what was built in it: setuptools would pack the leftovers of `build/`."""
    copy = tmp_path_factory.mktemp("checkout")
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy(path, copy)
    for folder in {path.parent.name for path in ROOT.glob("*/__init__.py")} | BESIDE:
        for file in files_under(ROOT / folder):
            (copy / folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / folder / file, copy / folder / file)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", checkout, "--wheel-dir", folder)
    [path] = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def dist_info(wheel: Path) -> dict[str, str]:
    """The text of the wheel's metadata files, by name."""
    with zipfile.ZipFile(wheel) as archive:
        return {Path(n).name: archive.read(n).decode() for n in archive.namelist() if ".dist-info/" in n}


def test_wheel_is_the_package_and_nothing_else(wheel, checkout):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {f"piecework/{name}" for name in package_files(checkout)}
    left_out, too_much = sorted(expected - names), sorted(names - expected)
    assert not left_out, f"add the package or the data to [tool.setuptools] in pyproject.toml: {left_out}"
    assert not too_much


def test_wheel_brings_the_default_model(wheel):
    folder = "piecework/runtime/engine/data/default/"
    with zipfile.ZipFile(wheel) as archive:
        sizes = {info.filename.removeprefix(folder): info.file_size for info in archive.infolist()}
    assert sizes["model.safetensors"] > 3e6
    for name in (*default_model.FILES, "NOTICE.md"):
        assert sizes[name] == (default_model.path() / name).stat().st_size


def test_every_folder_with_modules_is_a_package():
    folders = {path.parent for room in ROOT.glob("*/__init__.py") for path in room.parent.rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_wheel_runs_where_it_is_installed(wheel, tmp_path):
    pip("install", wheel, "--target", tmp_path / "site")
    code = "import piecework, piecework.phases as p; print(piecework.__file__, p.BucketLadder((1, 2)).bucket_for(2))"
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); {code}"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.stdout.split() == [str(tmp_path / "site" / "piecework" / "__init__.py"), "2"], done.stderr


def test_editable_install_finds_a_module_added_later(checkout, tmp_path):
    pip("install", "--editable", checkout, "--target", tmp_path / "site")
    later = checkout / "phases" / "added_later.py"
    later.write_text("from ..errors import PieceworkError\n")
    # -I and -S: without PYTHONPATH and the environment's own site-packages, which may hold this repository as well.
    code = f"import site; site.addsitedir({str(tmp_path / 'site')!r}); import piecework.phases.added_later as m; "
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code + "print(m.__file__)"], capture_output=True, text=True, cwd=tmp_path
    )
    later.unlink()
    assert done.stdout.strip() == str(later), done.stderr


def test_version_is_the_packages(dist_info):
    assert Parser().parsestr(dist_info["METADATA"])["Version"] == piecework.__version__


def test_core_dependencies_stay_few(dist_info):
    required = Parser().parsestr(dist_info["METADATA"]).get_all("Requires-Dist") or []
    names = {line.partition("<")[0].partition(">")[0].strip() for line in required if "extra ==" not in line}
    assert names == {"torch", "numpy", "safetensors", "filelock", "rich", "typing-extensions"}


def test_entry_points_name_modules_that_exist(dist_info):
    entry_points = configparser.ConfigParser()
    entry_points.read_string(dist_info["entry_points.txt"])
    targets = [target for section in entry_points.sections() for target in entry_points[section].values()]
    assert "piecework.runtime.cli:main" in targets
    assert "piecework.ops.attention" in targets
    for target in targets:
        module, _, attribute = target.partition(":")
        path = ROOT.joinpath(*module.split(".")[1:]).with_suffix(".py")
        assert path.exists(), f"{target}: there is no {path}"
        assert not attribute or f"def {attribute}(" in path.read_text()
