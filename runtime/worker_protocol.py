"""What a runtime and its compile workers say to each other: frames of a JSON object and raw bytes, over two pipes.

Nothing is pickled. To a worker go jobs, each a message with its number under `job`:

    {"kind": "compile", "job", "settings", "modules", "fingerprint", "compiler", "bucket"}     and a portable program
    {"kind": "trace", "job", "settings", "modules", "factory", "request"}

From a worker come:

    {"kind": "ready", "pid", "seconds"}      it takes jobs from now on
    {"kind": "warm", "error"}                it has compiled something trivial, or could not
    {"kind": "started", "job"}
    {"kind": "done", "job", "file"}          the name of an artifact in the pool's directory, or raw bytes of a program
    {"kind": "failed", "job", "error", "message", "traceback"}      `error`: the name of a class of `piecework.errors`

Each of them may hold `gpu_bytes`, and whether that is `assumed`. End of file on its input ends a worker.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

_LENGTHS = struct.Struct("<IQ")
MAX_MESSAGE_BYTES = 1 << 24
"""A length above it is no length: something else was written to the pipe."""

ASSUMED_GPU_BYTES = 600 << 20
"""Of a worker's CUDA context with its kernels, where the driver does not tell (527 MiB were seen on an H200)."""

Frame = tuple[dict[str, Any], bytes]


class ProtocolError(Exception):
    """What came over the pipe is no frame."""


def encode_frame(message: Mapping[str, Any], content: bytes = b"") -> bytes:
    """One message with raw bytes."""
    text = json.dumps(message).encode()
    return _LENGTHS.pack(len(text), len(content)) + text + content


class FrameReader:
    """Cuts what comes over a pipe into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that are complete now. Raises: ProtocolError."""
        self._buffer += data
        while len(self._buffer) >= _LENGTHS.size:
            text_end, end = _ends(bytes(self._buffer[: _LENGTHS.size]))
            if len(self._buffer) < end:
                return
            frame = bytes(self._buffer[_LENGTHS.size : end])
            del self._buffer[:end]
            yield _message(frame[: text_end - _LENGTHS.size]), frame[text_end - _LENGTHS.size :]


def read_frame(pipe: BinaryIO) -> Frame | None:
    """Waits for one frame; None at the end of the file, also in the middle of a frame. Raises: ProtocolError."""
    lengths = pipe.read(_LENGTHS.size)
    if len(lengths) < _LENGTHS.size:
        return None
    text_end, end = _ends(lengths)
    text, content = pipe.read(text_end - _LENGTHS.size), pipe.read(end - text_end)
    if len(text) + len(content) < end - _LENGTHS.size:
        return None
    return _message(text), content


def _ends(lengths: bytes) -> tuple[int, int]:
    num_text, num_content = _LENGTHS.unpack(lengths)
    if num_text > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"expected a frame, got {lengths!r}")
    return _LENGTHS.size + num_text, _LENGTHS.size + num_text + num_content


def _message(text: bytes) -> dict[str, Any]:
    try:
        message = json.loads(text)
    except ValueError as error:
        raise ProtocolError(f"expected a message, got {text[:80]!r}") from error
    if not isinstance(message, dict):
        raise ProtocolError(f"expected a message, got {text[:80]!r}")
    return message
