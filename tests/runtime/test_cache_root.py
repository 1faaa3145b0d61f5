"""cache_dir: Inductor's and Triton's caches are where it says, unless it is no place for code that is run."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import pytest

from piecework.errors import ConfigError
from piecework.runtime import cache_root
from piecework.runtime.cache_root import use_cache_dir

INDUCTOR, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As in a process that has no cache directory yet; undone after each test."""
    monkeypatch.setattr(cache_root, "_used", None)
    for name in (INDUCTOR, TRITON):
        monkeypatch.setenv(name, "")  # so that whatever is set is taken back
        monkeypatch.delenv(name)
    return monkeypatch


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def text_of(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        use_cache_dir(str(path))
    assert INDUCTOR not in os.environ
    assert cache_root._used is None
    return str(caught.value)


def test_the_directory_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    before = os.umask(0o002)
    try:
        assert use_cache_dir(str(tmp_path / "a" / "b")) == ()
    finally:
        os.umask(before)
    root = tmp_path / "a" / "b"
    assert os.environ[INDUCTOR] == str(root / "inductor")
    assert os.environ[TRITON] == str(root / "triton")
    assert [mode(path) for path in (root.parent, root, root / "inductor", root / "triton")] == [0o700] * 4
    assert mode(tmp_path) == 0o755  # what was there stays as it is
    assert {path.name for path in root.iterdir()} == {"inductor", "triton"}


def test_a_directory_that_is_there_keeps_its_mode_and_what_is_in_it(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "inductor").mkdir(mode=0o750)
    (tmp_path / "inductor" / "kept").write_text("x")
    assert use_cache_dir(str(tmp_path)) == ()
    assert (tmp_path / "inductor" / "kept").read_text() == "x"
    assert (mode(tmp_path), mode(tmp_path / "inductor")) == (0o755, 0o750)


def test_another_directory_in_one_process_is_refused_and_the_same_is_not(tmp_path: Path) -> None:
    use_cache_dir(str(tmp_path / "a"))
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert use_cache_dir(str(tmp_path / "a")) == use_cache_dir(str(tmp_path / "link")) == ()
    with pytest.raises(ConfigError) as caught:
        use_cache_dir(str(tmp_path / "b"))
    assert str(caught.value) == (
        f"cache_dir: expected {tmp_path / 'a'}, where an earlier Runtime of this process keeps what is compiled, got "
        f"{tmp_path / 'b'}; use one directory a process"
    )
    assert not (tmp_path / "b").exists()
    assert os.environ[INDUCTOR] == str(tmp_path / "a" / "inductor")


def test_what_others_have_set_stands_and_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INDUCTOR, "/somewhere/inductor")
    for root in (tmp_path / "a", tmp_path / "a"):
        assert use_cache_dir(str(root)) == (
            f"cache_dir: inductor is in /somewhere/inductor all the same ({INDUCTOR} was set before)",
        )
    assert os.environ[INDUCTOR] == "/somewhere/inductor"
    assert os.environ[TRITON] == str(tmp_path / "a" / "triton")
    assert not (tmp_path / "a" / "inductor").exists()
    # Where nothing is left to decide, nothing is made, and no directory contradicts another.
    monkeypatch.setenv(TRITON, "/somewhere/triton")
    assert len(use_cache_dir(str(tmp_path / "b"))) == 2
    assert not (tmp_path / "b").exists()


def test_what_torch_has_set_by_itself_is_nobodys_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    default = os.path.join(tempfile.gettempdir(), "torchinductor_somebody")
    monkeypatch.setenv(INDUCTOR, default)
    monkeypatch.setenv(TRITON, os.path.join(default, "triton", "0"))
    assert use_cache_dir(str(tmp_path)) == ()
    assert (os.environ[INDUCTOR], os.environ[TRITON]) == (str(tmp_path / "inductor"), str(tmp_path / "triton"))


@pytest.mark.parametrize("below", ["mine", "torchinductor_somebody/mine", "torchinductor_somebody/triton/0/mine"])
def test_a_place_beside_torchs_own_is_a_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str) -> None:
    chosen = os.path.join(tempfile.gettempdir(), below)
    monkeypatch.setenv(INDUCTOR, chosen)
    monkeypatch.setenv(TRITON, chosen)
    assert len(use_cache_dir(str(tmp_path / "a"))) == 2
    assert (os.environ[INDUCTOR], os.environ[TRITON]) == (chosen, chosen)


@pytest.mark.parametrize("folder", [".", "inductor", "triton"])
def test_a_file_in_the_way(tmp_path: Path, folder: str) -> None:
    place = tmp_path / "cache" / folder
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("")
    assert text_of(tmp_path / "cache") == (
        f"cache_dir: expected a directory, not a file, got {place}; name another one, or remove the file"
    )


def test_a_file_above_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert text_of(tmp_path / "file" / "cache") == (
        f"cache_dir: expected a directory that can be made (Not a directory), got {tmp_path / 'file' / 'cache'}; "
        "name another one"
    )


@pytest.mark.parametrize("folder", [".", "triton"])
@pytest.mark.parametrize("bits", [0o770, 0o702])
def test_a_directory_that_others_can_write(tmp_path: Path, folder: str, bits: int) -> None:
    place = tmp_path / "cache" / folder
    place.mkdir(parents=True)
    place.chmod(bits)
    text = text_of(tmp_path / "cache")
    assert text == (
        "cache_dir: expected a directory that nobody else can write, since what is in it is run, not one of mode "
        f"{bits:04o}, got {place}; run: chmod go-w {place}"
    )
    subprocess.run(text.partition("; run: ")[2].split(), check=True)
    assert use_cache_dir(str(tmp_path / "cache")) == ()


def test_a_directory_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert text_of(tmp_path) == (
        f"cache_dir: expected a directory of user {owner + 1}, since what is in it is run, not one of user {owner}, "
        f"got {tmp_path}; run: chown -R {owner + 1} {tmp_path}"
    )


def test_a_place_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(tempfile, "TemporaryFile", read_only)
    expected = "cache_dir: expected a directory that can be {} (Read-only file system), got {}; name another one"
    assert text_of(tmp_path) == expected.format("written", tmp_path)
    monkeypatch.setattr(Path, "mkdir", read_only)
    assert text_of(tmp_path / "new") == expected.format("made", tmp_path / "new")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_its_owner_may_not_write(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        assert "a directory that can be made (Permission denied)" in text_of(tmp_path / "new")
        assert "a directory that can be written (Permission denied)" in text_of(tmp_path)
    finally:
        tmp_path.chmod(0o700)


def test_a_file_system_that_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: types.SimpleNamespace(f_flag=os.ST_NOEXEC))
    assert text_of(tmp_path) == (
        "cache_dir: expected a file system that code can be run from, not one mounted noexec, got "
        f"{tmp_path}; name another one"
    )


LIBRARIES = """
import os, sys, importlib.util
from pathlib import Path
import torch
import torch._inductor.compile_fx
import piecework.graphs.compilers as compilers  # which imports Dynamo
assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).name.startswith("torchinductor_"), "torch has chosen a place"
if importlib.util.find_spec("triton"):
    import triton
    before = triton.knobs.cache.dir
from piecework.runtime.cache_root import use_cache_dir
root = Path(sys.argv[1])
assert use_cache_dir(str(root)) == ()
if importlib.util.find_spec("triton"):
    assert triton.knobs.cache.dir == str(root / "triton") != before
    from triton.runtime.cache import FileCacheManager
    FileCacheManager("a-key").put(b"x", "file")
    assert [path.name for path in (root / "triton").rglob("file")] == ["file"]
compilers.compile_something(torch.device("cpu"))
found = {path.suffix for path in (root / "inductor").rglob("*")}
assert {".py", ".so"} <= found, found
"""


def test_both_libraries_look_there_also_where_they_were_imported_before(tmp_path: Path) -> None:
    """In a process of its own: in this one torch has its place from the tests' environment."""
    environment = {name: value for name, value in os.environ.items() if name not in (INDUCTOR, TRITON)}
    environment["TMPDIR"] = str(tmp_path)
    command = [sys.executable, "-W", "ignore", "-c", LIBRARIES, str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert not [*tmp_path.glob("torchinductor_*/**/*.so")]
