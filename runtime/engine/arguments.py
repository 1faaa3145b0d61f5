"""The engine's arguments: checked, and worked out where they are left open."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import torch

from ...errors import ConfigError
from ...phases import GraphConfig, Phase
from .config import DTYPES

_DEFAULT_MAX_NUM_SEQS = 256
_DEFAULT_MAX_NUM_BATCHED_TOKENS = 8192
"""Where the default ladders of decode and of prefill end."""


def directory_of(model_dir: str | os.PathLike[str] | None) -> Path:
    """The checkpoint's directory; without one, that of the model that comes with the package."""
    if model_dir is not None:
        return Path(model_dir)
    from . import default_model

    return default_model.path()


def device_of(device: torch.device | str | None) -> torch.device:
    """Raises: ConfigError if there is no such device."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except RuntimeError:
        found = None
    if found is None or found.type not in ("cpu", "cuda"):
        raise ConfigError(f"device: expected cpu, cuda or cuda:N, got {str(device)!r}; use one of these")
    if found.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
            raise ConfigError(
                f"device: expected cpu, since there is no CUDA device here (torch {torch.__version__}, {built}), got "
                f"{found}; use cpu, or install a torch and a driver that find the GPU"
            )
        if (found.index or 0) >= count:
            raise ConfigError(f"device: expected one of {count} CUDA devices, got {found}; use cpu or another index")
        return found if found.index is not None else torch.device("cuda", torch.cuda.current_device())
    return found


def dtype_of(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """None for the checkpoint's own. Raises: ConfigError if weights cannot have it."""
    if dtype is None or dtype == "auto":
        return None
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found not in DTYPES.values():
        raise ConfigError(f"dtype: expected auto or one of {', '.join(DTYPES)}, got {dtype!r}; use one of these")
    return found


def max_model_len_of(asked: int | None, limit: int) -> int:
    """The longest request in tokens; `limit` is the model's. Raises: ConfigError if more is asked for."""
    if asked is not None and asked > limit:
        raise ConfigError(
            f"max_model_len: expected at most the model's max_position_embeddings {limit}, got {asked}; lower it"
        )
    return asked if asked is not None else limit


def step_limits_of(
    *,
    max_num_seqs: int | None,
    max_num_batched_tokens: int | None,
    enable_chunked_prefill: bool,
    max_model_len: int,
) -> tuple[int, int]:
    """How many requests and how many tokens a step has at most.

    Raises:
        ConfigError: a step has fewer tokens than requests, or without chunks than the longest prompt.
    """
    tokens = max_num_batched_tokens
    if tokens is None:
        tokens = max(_DEFAULT_MAX_NUM_BATCHED_TOKENS, max_num_seqs or 0, max_model_len)
    if max_num_seqs is not None and max_num_seqs > tokens:
        raise ConfigError(
            f"max_num_batched_tokens: expected at least max_num_seqs {max_num_seqs}, since each running request needs "
            f"a token a step, got {tokens}; raise it or lower max_num_seqs"
        )
    if not enable_chunked_prefill and max_model_len > tokens:
        raise ConfigError(
            f"max_num_batched_tokens: expected at least max_model_len {max_model_len}, since prompts are not cut into "
            f"chunks, got {tokens}; raise it, lower max_model_len or enable chunked prefill"
        )
    return max_num_seqs if max_num_seqs is not None else min(_DEFAULT_MAX_NUM_SEQS, tokens), tokens


def reachable_buckets(config: GraphConfig, *, max_num_seqs: int, max_num_batched_tokens: int) -> GraphConfig:
    """`config` with ladders that end where a step can: a prefill step in tokens, a decode step in requests.

    A ladder that the config names is left as it is; a default one ends in exactly the largest step.

    Raises:
        ConfigError: a bucket that the config names is not the smallest that fits for any step, or the last is more
            than twice the largest step.
    """
    limits = {
        Phase.PREFILL: ("max_num_batched_tokens", max_num_batched_tokens),
        Phase.DECODE: ("max_num_seqs", max_num_seqs),
    }
    for phase, (name, limit) in limits.items():
        chosen = config.phase(phase)
        if chosen.buckets is None:
            if chosen.ladder(phase).max > limit:
                config = config.with_phase(phase, max_num_tokens=limit)
            continue
        unreachable = [bucket for below, bucket in pairwise(chosen.buckets) if below >= limit]
        if unreachable:
            raise ConfigError(
                f"{phase}.buckets: expected buckets that a step of at most {limit} tokens ({name}) can take, got "
                f"{', '.join(map(str, unreachable))} above {chosen.buckets[-len(unreachable) - 1]}, which holds it; "
                f"remove them or raise {name}"
            )
        if chosen.buckets[-1] > 2 * limit:
            raise ConfigError(
                f"{phase}.buckets: expected a last bucket of at most twice the largest step, {limit} tokens ({name}), "
                f"got {chosen.buckets[-1]}, of which every step would be padding for the most part; end the ladder at "
                f"{limit} or raise {name}"
            )
    return config


def check_positive(**values: int | None) -> None:
    """Raises: ConfigError with the name of a value that is no positive integer, or None where it is left open."""
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"{name}: expected a positive integer, got {value!r}; use 1 or more")
