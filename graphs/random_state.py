"""Random generators of the process, while a thread traces beside others that draw from them.

Dynamo and AOTAutograd put the generators back to where they were when they are done, seconds later: what others drew
meanwhile would be drawn again.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

_lock = threading.Lock()
_threads: dict[int, int] = {}
"""Threads whose restores are ignored, and how often each has asked for that."""
_theirs: list[tuple[Any, str, Callable[..., Any]]] = []
"""(module, name, function) of what is replaced while there are such threads."""


@contextlib.contextmanager
def restores_ignored() -> Iterator[None]:
    """Inside, this thread sets no generator of the process to another state; other threads do as always."""
    me = threading.get_ident()
    with _lock:
        if not _threads:
            _replace()
        _threads[me] = _threads.get(me, 0) + 1
    try:
        yield
    finally:
        with _lock:
            _threads[me] -= 1
            if not _threads[me]:
                del _threads[me]
            if not _threads:
                _put_back()


def _replace() -> None:
    for module, name in ((random, "setstate"), (torch.random, "set_rng_state"), (torch.cuda, "set_rng_state")):
        function = getattr(module, name)
        _theirs.append((module, name, function))
        setattr(module, name, _unless_ignored(function))


def _unless_ignored(function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*arguments: Any, **options: Any) -> Any:
        return None if threading.get_ident() in _threads else function(*arguments, **options)

    return called


def _put_back() -> None:
    while _theirs:
        module, name, function = _theirs.pop()
        setattr(module, name, function)
