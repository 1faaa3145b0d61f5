"""`make demo`: text from the default model through the lazy runtime, then what eager, lazy and tiered startup cost."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from . import cli
from .console import exit_code

PROMPTS = ("Early in the morning", "In the evening,", "They walked")
PAGE = "piecework-startup.html"
"""What the comparison leaves in the current directory, unless told otherwise."""
LENGTH = ("--max-new-tokens", "32")
BUCKETS = ("--cuda-graph-bs-prefill", "16", "64", "--cuda-graph-bs-decode", "1", "4")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo and returns its exit code; not 0 after any failure."""
    parser = argparse.ArgumentParser(prog="piecework.runtime.demo", description="Shows Piecework at work.")
    parser.add_argument(
        "--compiler", choices=("inductor", "aot_eager"), help="what compiles a piece (default: inductor where it works)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the numbers of the comparison to FILE")
    parser.add_argument("--html", metavar="FILE", default=PAGE, help=f"the page of the comparison (default: {PAGE})")
    parser.add_argument("--trace", metavar="FILE", help="write the timelines to FILE, for https://ui.perfetto.dev")
    parser.add_argument(
        "--duration", default="20", metavar="S", help="seconds in which the comparison's requests arrive (default: 20)"
    )
    arguments = parser.parse_args(argv)
    return exit_code(lambda: _demo(arguments))


def _demo(arguments: argparse.Namespace) -> int:
    compiler: str | None = arguments.compiler
    missing = _missing_for_inductor() if compiler is None else None
    if missing is not None:
        _say(f"Inductor cannot build here: {missing}. Using aot_eager, which generates no code.\n")
    compiler = compiler or ("inductor" if missing is None else "aot_eager")
    compiler_flag = ("--cuda-graph-tc-compiler", compiler)
    with tempfile.TemporaryDirectory(prefix="piecework-demo-") as folder, _inductor_cache(Path(folder) / "inductor"):
        model = str(_default_model())
        _say("The model comes with the package: a small Llama that has read five novels of Jane Austen.\n")
        prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
        code = _command("generate", *prompts, *LENGTH, *compiler_flag, *BUCKETS, "--explain")
        if code != 0:
            return code
        _say("")
        files = {"--html": arguments.html, "--json": arguments.json, "--trace": arguments.trace}
        flags = [word for flag, file in files.items() if file is not None for word in (flag, file)]
        # A second worker that shares two cores with the steps would slow them down.
        flags += ["--duration", arguments.duration, "--compile-workers", "1" if (os.cpu_count() or 1) <= 2 else "2"]
        code = _command("bench", "startup", "--model", model, *compiler_flag, *flags)
        if code == 0:
            _say(f"\nThe timelines, to look at in a browser: {Path(arguments.html).absolute()}")
        return code


@contextlib.contextmanager
def _inductor_cache(directory: Path) -> Iterator[None]:
    """Lets Inductor keep its files in `directory`, to go away with it; restores the environment."""
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(directory)
    try:
        yield
    finally:
        if before is None:
            del os.environ["TORCHINDUCTOR_CACHE_DIR"]
        else:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


def _default_model() -> Path:
    from .engine import default_model

    return default_model.path()


def _command(*words: str) -> int:
    """Shows a command as it would be typed, and runs it."""
    _say(f"$ piecework {shlex.join(words)}\n")
    return cli.main(words)


def _say(text: str) -> None:
    print(text, flush=True)


def _missing_for_inductor() -> str | None:
    """What Inductor needs to build code for a CPU and this machine lacks."""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        return f"there is no C++ compiler ({compiler}); on Debian or Ubuntu: apt install g++"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "Python.h is missing; on Debian or Ubuntu: apt install python3-dev"
    return None


if __name__ == "__main__":
    raise SystemExit(main())
