"""A compiled piece as one file, which another process loads instead of compiling.

The file says what it is of, for which sizes that holds and its own checksum; the rest are torch's own bytes. Those are
code and are unpickled: load only what this user's processes wrote.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import ArtifactError, NoArtifactError
from ..phases import Compiler
from .audit import Interval
from .compilers import (
    DEFAULT_OPTIONS,
    CompilerOptions,
    has_artifacts,
    load_artifact,
    share_memory,
    write_artifact,
)
from .piece import BuiltPiece, CompiledPiece

FORMAT = 1
"""Of the file; one of another format is refused."""
SUFFIX = ".piece"

_MAGIC = b"piecework artifact\n"
_DIGEST_BYTES = hashlib.sha256().digest_size
_LENGTH_BYTES = 8


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ArtifactFile:
    """One compiled piece on disk."""

    path: Path
    fingerprint: str
    """Of the piece; of a specialised one, its own and not the general piece's."""
    num_bytes: int


def save_piece(
    compiled: CompiledPiece,
    built: BuiltPiece,
    directory: Path,
    *,
    compiler: Compiler = Compiler.INDUCTOR,
    options: CompilerOptions = DEFAULT_OPTIONS,
) -> ArtifactFile:
    """Writes what `built.compile(compiler, options)` returned. The file appears whole or not at all.

    Raises:
        NoArtifactError: torch keeps nothing of it that could be saved, or the compiler has no artifacts.
        ArtifactError: the directory cannot be written to.
    """
    _check_compiler(compiler)
    header = {
        "torch": torch.__version__,
        "fingerprint": built.fingerprint,
        "compiler": str(compiler),
        "options": dataclasses.asdict(options),
        "intervals": {name: [interval.low, interval.high] for name, interval in compiled.intervals.items()},
    }
    path = directory / f"{built.fingerprint}{SUFFIX}"
    try:
        with tempfile.TemporaryDirectory(prefix=".saving-", dir=directory) as scratch:
            theirs, whole = Path(scratch, "torch"), Path(scratch, "whole")
            write_artifact(compiled.call, theirs)
            content = _encode(header, theirs.read_bytes())
            with whole.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())  # a name must not stand for less than the file, whatever ends the machine
            whole.replace(path)
    except OSError as error:
        raise ArtifactError(
            f"artifact: {path} cannot be written ({type(error).__name__}: {error}); make room there, or choose another "
            f"temporary directory (TMPDIR)"
        ) from error
    return ArtifactFile(path=path, fingerprint=built.fingerprint, num_bytes=len(content))


def load_piece(
    file: ArtifactFile | Path,
    built: BuiltPiece,
    compiler: Compiler,
    *,
    options: CompilerOptions | None = None,
) -> CompiledPiece:
    """What `built.compile(compiler, options)` would return, from a file; `seconds` is what the load took.

    Args:
        options: what it must have been compiled with; None: whatever it was.

    Raises:
        NoArtifactError: the compiler has no artifacts.
        ArtifactError: the file is missing, damaged, of another piece, compiler or build of torch.
    """
    started = time.perf_counter()
    _check_compiler(compiler)
    path = file.path if isinstance(file, ArtifactFile) else file
    header, content = _decode(path)
    expected = {"torch": torch.__version__, "fingerprint": built.fingerprint, "compiler": str(compiler)}
    if options is not None:
        expected["options"] = dataclasses.asdict(options)  # type: ignore[assignment]
    for name, value in expected.items():
        if header.get(name) != value:
            raise ArtifactError(
                f"artifact {path}: expected {name} {value}, got {header.get(name)!r}; compile the piece anew"
            )
    intervals = {name: Interval(*interval) for name, interval in header["intervals"].items()}
    call = load_artifact(content, built.graph_module)
    return CompiledPiece(call=call, intervals=intervals, seconds=time.perf_counter() - started)


def check_saveable(built: BuiltPiece, compiler: Compiler) -> None:
    """Before a compile: raises NoArtifactError where it is known that nothing could be saved of it."""
    _check_compiler(compiler)
    placeholders = built.graph_module.graph.find_nodes(op="placeholder")
    if share_memory([node.meta["example_value"] for node in placeholders]):
        raise NoArtifactError(
            "artifact: inputs of the piece share memory, and torch saves nothing of such a piece; compile it where it "
            "is to run"
        )


def _check_compiler(compiler: Compiler) -> None:
    if not has_artifacts(compiler):
        raise NoArtifactError(
            f"artifact: expected the compiler {Compiler.INDUCTOR}, got {compiler}, whose pieces are not saved; compile "
            f"them where they are to run"
        )


def _encode(header: Mapping[str, Any], content: bytes) -> bytes:
    text = json.dumps({"format": FORMAT, **header}, allow_nan=False).encode()
    body = len(text).to_bytes(_LENGTH_BYTES, "little") + text + content
    return _MAGIC + hashlib.sha256(body).digest() + body


def _decode(path: Path) -> tuple[dict[str, Any], bytes]:
    """The header and torch's bytes. Raises: ArtifactError unless each byte is as it was written."""
    try:
        whole = path.read_bytes()
        digest, body = whole[len(_MAGIC) :][:_DIGEST_BYTES], whole[len(_MAGIC) + _DIGEST_BYTES :]
        if not whole.startswith(_MAGIC):
            raise ValueError("it is no artifact")
        if hashlib.sha256(body).digest() != digest:
            raise ValueError("its checksum is another: it is truncated or damaged")
        end = _LENGTH_BYTES + int.from_bytes(body[:_LENGTH_BYTES], "little")
        header = json.loads(body[_LENGTH_BYTES:end])
    except (OSError, ValueError) as error:
        raise ArtifactError(
            f"artifact: {path} cannot be used ({type(error).__name__}: {error}); compile the piece anew"
        ) from error
    if header.get("format") != FORMAT:
        raise ArtifactError(
            f"artifact {path}: expected format {FORMAT}, got {header.get('format')!r}; compile the piece anew"
        )
    return header, body[end:]


__all__ = ["ArtifactFile", "check_saveable", "has_artifacts", "load_piece", "save_piece"]
