"""What every test runs under: few threads, one private compile cache, no network, and the same seed.

The environment is set here, before anything imports torch, and a value that is already set wins.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parent.parent

_cache_dir = Path(tempfile.mkdtemp(prefix="piecework-tests-"))
for _name, _value in {
    # One for the whole run: Inductor meets the same small kernels in many tests.
    "TORCHINDUCTOR_CACHE_DIR": str(_cache_dir / "inductor"),
    "TRITON_CACHE_DIR": str(_cache_dir / "triton"),
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "OMP_NUM_THREADS": str(min(2, os.cpu_count() or 1)),
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}.items():
    os.environ.setdefault(_name, _value)

# The first example of a property often pays a trace, so there is no deadline; CI draws the same examples each time.
hypothesis.settings.register_profile("piecework", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("piecework")


class _RootIsNoTestPackage:
    """Keeps pytest from importing the root's `__init__.py` a second time, under the name of the checkout's folder."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collect_directory(self, path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        return pytest.Dir.from_parent(parent, path=path) if path == ROOT else None


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_RootIsNoTestPackage())


def pytest_unconfigure() -> None:
    shutil.rmtree(_cache_dir, ignore_errors=True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if os.environ.get("PIECEWORK_GPU_TESTS_ON") == "tape":
        return  # what needs CUDA all the same says so itself
    for mark, needed in (("gpu", 1), ("multi_gpu", 2)):
        if item.get_closest_marker(mark) is None:
            continue
        import torch

        found = torch.cuda.device_count()
        if found < needed:
            pytest.skip(f"{mark}: needs {needed} CUDA device(s), torch sees {found}")


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Seeds the generators. torch only where it is in use: a test of configs should not wait for its import."""
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
