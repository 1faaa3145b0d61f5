"""`make demo`, with the compiler that generates no code: the whole way in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from piecework.runtime import demo


def run(*words: str, before: str = "", folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    code = f"{before}\nfrom piecework.runtime.demo import main\nraise SystemExit(main({list(words)!r}))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder)


@pytest.mark.slow
def test_the_demo_prints_text_and_the_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    # transformers makes toys and is not needed here.
    hidden = "import sys; sys.modules['transformers'] = None"
    words = ["--compiler", "aot_eager", "--json", str(tmp_path / "out.json"), "--duration", "3"]
    done = run(*words, before=hidden, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    for word in ("Traceback", "Warning", "warning"):
        assert word not in done.stdout + done.stderr
    texts = [line.partition("text:   ")[2] for line in done.stdout.splitlines() if line.startswith("text:")]
    assert len(texts) == len(demo.PROMPTS)
    assert all(texts)
    assert "7 pieces (3 distinct), 6 opaque regions" in done.stderr
    eager, lazy, tiered = json.loads((tmp_path / "out.json").read_text())
    # Three pieces for any size and three for each of four buckets.
    assert (eager["compiles_before_ready"], eager["in_step_compiles"]) == (15, 0)
    assert (lazy["compiles_before_ready"], lazy["in_step_compiles"]) == (0, 15)
    assert (tiered["compiles_before_ready"], tiered["in_step_compiles"]) == (0, 0)
    assert tiered["promotions"] > 0
    assert tiered["settled"]
    [head] = [line for line in done.stdout.splitlines() if line.split() == ["eager", "lazy", "tiered"]]
    assert done.stdout.index(head) > done.stdout.index(texts[-1])
    page = tmp_path / demo.PAGE
    assert done.stdout.endswith(f"\nThe timelines, to look at in a browser: {page}\n")
    assert page.read_text().count("<figure>") == 3
    assert list(temporary.iterdir()) == []


def test_without_tokenizers_it_says_what_to_install() -> None:
    done = run("--compiler", "aot_eager", before="import sys; sys.modules['tokenizers'] = None")
    assert done.returncode == 2
    assert done.stderr == (
        "piecework: error: tokenizer: reading tokenizer.json needs the tokenizers library, which is not installed; "
        "run: pip install 'piecework[hf]'\n"
    )


def test_what_inductor_misses_is_found_beforehand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert demo._missing_for_inductor() == (
        "there is no C++ compiler (no-such-compiler); on Debian or Ubuntu: apt install g++"
    )
    monkeypatch.setenv("CXX", sys.executable)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert demo._missing_for_inductor() == "Python.h is missing; on Debian or Ubuntu: apt install python3-dev"
    (tmp_path / "Python.h").touch()
    assert demo._missing_for_inductor() is None
