"""From safetensors files into a model: every name, shape and dtype is checked before the first value is read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ...errors import ModelError
from .json_keys import read_json
from .models.decoder import DecoderForCausalLM

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_STORED_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_MAX_LISTED = 8
_COMPARED_ROWS = 4096
"""Rows of a tensor and of its copy that are in memory at once while they are compared."""


def load_weights(
    model: DecoderForCausalLM, directory: Path, *, device: torch.device, dtype: torch.dtype | None = None
) -> None:
    """Gives `model`, built on the meta device, the weights of a checkpoint.

    Without `dtype` they get what config.json says, or else what the embedding is stored as.

    Raises:
        ModelError: a file is missing, truncated or no safetensors file; or tensors are missing, unknown, of another
            shape or of a dtype that cannot be used, all of them listed; or embeddings that config.json calls tied
            differ. The model is then as it was.
    """
    files = checkpoint_files(directory)
    with contextlib.ExitStack() as stack:
        readers = [(path, stack.enter_context(_open(path))) for path in files]
        stored = {name: (path, reader) for path, reader in readers for name in reader.keys()}  # noqa: SIM118
        _check(model, stored, directory)
        for copy, original in model.checkpoint_copies().items():
            if copy in stored:
                _check_copy(copy, original, stored)
        embedding = stored["model.embed_tokens.weight"][1].get_slice("model.embed_tokens.weight").get_dtype()
        model.allocate(device, dtype or model.config.dtype or _STORED_DTYPES[embedding])
        for name, target in model.checkpoint_tensors().items():
            path, reader = stored[name]
            with _reading(path, name):
                target.copy_(reader.get_tensor(name))


def checkpoint_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint: the single one, or all that the index names.

    Raises:
        ModelError: there is neither, the index is malformed, or it names files that do not exist.
    """
    if (directory / SINGLE_FILE).is_file():
        return [directory / SINGLE_FILE]
    index = directory / INDEX_FILE
    if not index.is_file():
        others = sorted(path.name for path in directory.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".gguf"))
        found = f"it has {', '.join(others)}, which are not read" if others else "there are no weights in it"
        raise ModelError(
            f"{directory}: expected {SINGLE_FILE} or {INDEX_FILE}, but {found}; download the checkpoint's safetensors "
            f"files"
        )
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise ModelError(f"{index}: weight_map: expected an object of tensor name to file name; download it again")
    shards = sorted(set(names.values()))
    outside = [shard for shard in shards if Path(shard).name != shard]
    if outside:
        raise ModelError(f"{index}: weight_map: expected names of files beside it, got {_listed(outside)}")
    missing = [shard for shard in shards if not (directory / shard).is_file()]
    if missing:
        raise ModelError(
            f"{index}: {len(missing)} of {len(shards)} files are missing: {_listed(missing)}; download them"
        )
    return [directory / shard for shard in shards]


def _open(path: Path) -> Any:
    """Opens a file and reads its header; the values stay on disk."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path}: not a whole safetensors file, {path.stat().st_size} bytes ({error}); it may be truncated, so "
            f"download it again"
        ) from error


@contextlib.contextmanager
def _reading(path: Path, name: str) -> Iterator[None]:
    """Says which tensor of which file could not be read."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: {name} cannot be read ({error}); download this file again") from error


def _check_copy(copy: str, original: str, stored: Mapping[str, tuple[Path, Any]]) -> None:
    """Refuses a copy that holds other values than the original: one of the two would be dropped without a word."""
    headers = [stored[name][1].get_slice(name) for name in (copy, original)]
    shape, original_shape = (list(header.get_shape()) for header in headers)
    same = shape == original_shape and headers[0].get_dtype() in _STORED_DTYPES
    for first in range(0, shape[0] if same else 0, _COMPARED_ROWS):
        parts = []
        for name, header in zip((copy, original), headers, strict=True):
            with _reading(stored[name][0], name):
                parts.append(header[first : first + _COMPARED_ROWS])
        dtype = torch.promote_types(parts[0].dtype, parts[1].dtype)
        same = same and torch.equal(parts[0].to(dtype), parts[1].to(dtype))
    if not same:
        raise ModelError(
            f"{stored[copy][0]}: {copy}: expected a copy of {original}, as tie_word_embeddings is true in config.json, "
            f"got other values; say false there, or use the files of one checkpoint"
        )


def _check(model: DecoderForCausalLM, stored: Mapping[str, tuple[Path, Any]], directory: Path) -> None:
    """Compares names, shapes and dtypes, and lists everything that does not fit in one error."""
    wanted = model.checkpoint_tensors()
    missing = [name for name in wanted if name not in stored]
    extra = [name for name in stored if name not in wanted and not model.ignores(name)]
    shapes, dtypes = [], []
    for name in wanted:
        if name not in stored:
            continue
        header = stored[name][1].get_slice(name)
        expected, got = list(wanted[name].shape), list(header.get_shape())
        if expected != got:
            shapes.append(f"{name} (expected {expected}, got {got})")
        if header.get_dtype() not in _STORED_DTYPES:
            dtypes.append(f"{name} (stored as {header.get_dtype()}, expected one of {', '.join(_STORED_DTYPES)})")
    groups = (("missing", missing), ("not of this model", extra), ("of another shape", shapes), ("dtype", dtypes))
    problems = [f"\n  {len(names)} {what}: {_listed(names)}" for what, names in groups if names]
    if problems:
        raise ModelError(
            f"{directory}: the weights do not fit the {model.config.architecture} of config.json; use the files of one "
            f"checkpoint:{''.join(problems)}"
        )


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more
