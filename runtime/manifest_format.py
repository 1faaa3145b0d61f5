"""The JSON form of a manifest: what may stand where. Somebody may have edited the file by hand."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from reprlib import repr as short_repr
from typing import Any

from ..phases import Phase

MAX_COUNT = 2**53 - 1
"""The largest integer that every reader of JSON takes as it is; counts stop there."""
MAX_SIZE = 1 << 40
MAX_FILE_BYTES = 4 << 20
"""A manifest that is within its other bounds has less."""
MAX_TEXT = 400
"""Characters of a name or a signature."""
OTHER = "other"
"""In place of a size: steps whose size nobody kept."""
PROGRAMS = ("eager", "general", "specialized", "whole")


def read_json(path: str | os.PathLike[str]) -> Any:
    """The data in a file.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it cannot be read, or is no JSON; the text is the reason.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # reading a pipe would wait for its writer
            raise ValueError("it is no regular file")
        with open(path, "rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"it cannot be read: {error.strerror or error}") from error
    if len(text) > MAX_FILE_BYTES:
        raise ValueError(f"it has more than {MAX_FILE_BYTES >> 20} MiB")
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it is no JSON: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"it is no JSON, or only a part of it: {str(error)[:100]}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    read = dict(pairs)
    if len(read) < len(pairs):
        raise ValueError("a key is there twice")
    return read


def _refuse_constant(word: str) -> None:
    raise ValueError(f"{word} is no number of JSON")


def parse(data: object, *, format: int, version: str, max_buckets: int, max_jit: int) -> Mapping[str, Any]:
    """Returns `data` if it is what a manifest should hold. Raises: ValueError with the first thing that is not."""
    top = _object(data, "the file")
    # First who wrote it: another format may have other keys.
    if type(top.get("format")) is not int or top["format"] != format:
        raise ValueError(f"its format is {short_repr(top.get('format'))}, and this version reads {format}")
    if top.get("piecework") != version:
        raise ValueError(f"piecework {short_repr(top.get('piecework'))} wrote it, and this is {version}")
    _keys(top, {"format", "piecework", "model", "phases", "jit", "runs"}, "the file")
    model = _text(top["model"], "model")
    if model.count("-") != 1:
        raise ValueError(f"model is {short_repr(model)}, no two hashes")
    _count(top["runs"], "runs")
    for name, phase in _object(top["phases"], "phases").items():
        if name not in list(Phase):
            raise ValueError(f"phases has {short_repr(name)}, which is no phase")
        _phase(phase, f"phases.{name}", max_buckets)
    for i, entry in enumerate(_list(top["jit"], "jit", max_jit)):
        _jit(entry, f"jit[{i}]")
    return top


def _phase(value: object, where: str, max_buckets: int) -> None:
    phase = _object(value, where)
    _keys(phase, {"buckets", "missed"}, where)
    buckets = _object(phase["buckets"], f"{where}.buckets")
    missed = _object(phase["missed"], f"{where}.missed")
    for name, sizes in (("buckets", buckets), ("missed", missed)):
        if len(sizes) > max_buckets:
            raise ValueError(f"{where}.{name} has {len(sizes)} sizes, more than {max_buckets}")
        for size in sizes:
            if not (name == "missed" and size == OTHER):
                _size(size, f"{where}.{name}")
    for bucket, record in buckets.items():
        _bucket(record, f"{where}.buckets.{bucket}")
    for size, count in missed.items():
        _count(count, f"{where}.missed.{size}")


def _bucket(value: object, where: str) -> None:
    record = _object(value, where)
    _keys(record, {"steps", "compiled", "captured", "program"}, where)
    _count(record["steps"], f"{where}.steps")
    for kind in (record["program"], *_list(record["compiled"], f"{where}.compiled", len(PROGRAMS))):
        if kind not in PROGRAMS:
            raise ValueError(f"{where} has {short_repr(kind)}, which is no kind of program")
    if not isinstance(record["captured"], bool):
        raise ValueError(f"{where}.captured is {short_repr(record['captured'])}, neither true nor false")


def _jit(value: object, where: str) -> None:
    entry = _object(value, where)
    _keys(entry, {"what", "name", "signature", "count"}, where)
    for name in ("what", "name", "signature"):
        _text(entry[name], f"{where}.{name}")
    _count(entry["count"], f"{where}.count")


def _keys(value: Mapping[str, Any], expected: set[str], where: str) -> None:
    for wrong, text in ((expected - set(value), "lacks"), (set(value) - expected, "has an unknown key")):
        if wrong:
            raise ValueError(f"{where} {text} {short_repr(min(wrong))}")


def _object(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {short_repr(value)}, no object")
    return value


def _list(value: object, where: str, longest: int) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{where} is {short_repr(value)}, no list")
    if len(value) > longest:
        raise ValueError(f"{where} has {len(value)} items, more than {longest}")
    return value


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise ValueError(f"{where} is {short_repr(value)}, no text of at most {MAX_TEXT} characters")
    return value


def _count(value: object, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_COUNT:
        raise ValueError(f"{where} is {short_repr(value)}, no count")


def _size(key: str, where: str) -> None:
    is_number = key.isascii() and key.isdigit() and len(key) < 15 and key[0] != "0"
    if not is_number or int(key) > MAX_SIZE:
        raise ValueError(f"{where} has {short_repr(key)}, no number of tokens")
