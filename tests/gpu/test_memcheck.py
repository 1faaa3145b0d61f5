"""The script that compute-sanitizer is to watch runs, without a sanitizer and under Triton's interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("memcheck.py")


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Triton is for Linux only")
def test_the_script_runs_on_the_cpu() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--device", "cpu"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # 2 layouts, 2 batches, 2 paddings, 2 contexts and 2 forms, each with 3 tensors; 3 backends with 2 times 5 steps.
    assert re.search(r"memcheck: 126 comparisons, 0 wrong", done.stdout), done.stdout


def test_a_wrong_kernel_is_told(tmp_path: Path) -> None:
    """A kernel that forgets the last row is found by the script's own comparison."""
    code = (
        "import sys; sys.argv = ['memcheck.py', '--device', 'cpu']\n"
        f"sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        "import memcheck\n"
        "whole = memcheck.kernels.paged_attention\n"
        "def forgetful(q, k, v, k_cache, v_cache, out, *rest):\n"
        "    whole(q, k, v, k_cache, v_cache, out, *rest)\n"
        "    out[-1] += 1\n"
        "memcheck.kernels.paged_attention = forgetful\n"
        "memcheck.LAYOUTS = memcheck.LAYOUTS[:1]\n"
        "memcheck.check_replays = lambda *arguments: None\n"
        "raise SystemExit(memcheck.main())\n"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1, done.stdout + done.stderr
    # 2 batches, 2 paddings and 2 contexts.
    assert re.search(r"memcheck: 48 comparisons, 8 wrong", done.stdout), done.stdout + done.stderr
