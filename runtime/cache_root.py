"""Where the caches of Inductor and Triton are, for this process and for the compile workers that it starts.

Both libraries read an environment variable at each use (Inductor of torch 2.11 to 2.14, Triton 3.6 to 3.9; seen, also
where both were imported before), so setting the two is all there is to do. They are the process's: what two runtimes
compile goes into one directory.
"""

from __future__ import annotations

import os
import stat
import tempfile
import threading
from pathlib import Path

from ..errors import ConfigError

_FOLDERS = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""Environment variable -> the folder in the cache directory that it is to name."""
_lock = threading.Lock()
_used: str | None = None
"""The directory that this process has its caches in since a first runtime asked for it."""


def use_cache_dir(path: str) -> tuple[str, ...]:
    """Keeps what Inductor and Triton compile and try out from now on in `path`, so that a restart finds it.

    Sets environment variables of this process, and leaves them set: the caches outlive a runtime. What others have set
    stands. What was started before, such as compile workers, keeps what it has; so does what Inductor had tried out.

    Args:
        path: a directory, made if there is none, for its owner alone: what is in it is run.

    Returns:
        A line for each library whose place others have chosen.

    Raises:
        ConfigError: an earlier runtime of this process uses another directory; or this one cannot be made, is not a
            directory, cannot be written, holds no code that may be run, or is one that others could write code into.
    """
    global _used
    root = os.path.realpath(path)
    with _lock:
        others = {name: value for name in _FOLDERS if (value := _set_by_others(name)) is not None}
        mine = {name: os.path.join(root, folder) for name, folder in _FOLDERS.items() if name not in others}
        if mine:
            if _used is not None and _used != root:
                raise ConfigError(
                    f"cache_dir: expected {_used}, where an earlier Runtime of this process keeps what is compiled, "
                    f"got {root}; use one directory a process"
                )
            for place in (root, *mine.values()):
                _make_private(Path(place))
            os.environ.update(mine)
            _used = root
    return tuple(
        f"cache_dir: {_FOLDERS[name]} is in {value} all the same ({name} was set before)"
        for name, value in others.items()
    )


def _set_by_others(name: str) -> str | None:
    """What an environment variable was set to, if not here.

    Importing Dynamo sets Inductor's to torch's own default, and Inductor's first kernel Triton's to a folder in it:
    nobody has chosen these.
    """
    value = os.environ.get(name)
    if not value or (_used is not None and value == os.path.join(_used, _FOLDERS[name])):
        return None
    parts = Path(os.path.abspath(value)).parts
    temporary = Path(os.path.abspath(tempfile.gettempdir())).parts
    rest = parts[len(temporary) :] if parts[: len(temporary)] == temporary else ()
    is_default = bool(rest) and rest[0].startswith("torchinductor_")
    if name == "TRITON_CACHE_DIR":
        is_default = is_default and rest[1:2] == ("triton",) and len(rest) == 3
    else:
        is_default = is_default and len(rest) == 1
    return None if is_default else value


def _make_private(place: Path) -> None:
    """Makes a directory, and those above it, for the owner alone; or checks the one that is there.

    Raises: ConfigError.
    """
    try:
        for missing in reversed([each for each in (place, *place.parents) if not each.exists()]):
            missing.mkdir(mode=0o700, exist_ok=True)
        found = place.stat()
    except OSError as error:
        raise _refused(place, f"a directory that can be made ({_reason(error)})", "name another one") from error
    if not stat.S_ISDIR(found.st_mode):
        raise _refused(place, "a directory, not a file", "name another one, or remove the file")
    if found.st_uid != os.geteuid():
        raise _refused(
            place,
            f"a directory of user {os.geteuid()}, since what is in it is run, not one of user {found.st_uid}",
            f"run: chown -R {os.geteuid()} {place}",
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _refused(
            place,
            "a directory that nobody else can write, since what is in it is run, "
            f"not one of mode {stat.S_IMODE(found.st_mode):04o}",
            f"run: chmod go-w {place}",
        )
    if os.statvfs(place).f_flag & getattr(os, "ST_NOEXEC", 0):
        raise _refused(place, "a file system that code can be run from, not one mounted noexec", "name another one")
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise _refused(place, f"a directory that can be written ({_reason(error)})", "name another one") from error


def _refused(place: Path, expected: str, do: str) -> ConfigError:
    return ConfigError(f"cache_dir: expected {expected}, got {place}; {do}")


def _reason(error: OSError) -> str:
    return error.strerror or type(error).__name__
