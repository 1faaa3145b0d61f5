"""A compiled piece is a file that another process loads: what it does there, and which files are refused."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import piecework
from piecework.errors import ArtifactError, NoArtifactError
from piecework.graphs import artifact
from piecework.graphs.artifact import ArtifactFile, check_saveable, has_artifacts, load_piece, save_piece
from piecework.graphs.compilers import CompilerOptions, compile_something, write_artifact
from piecework.graphs.piece import BuiltPiece
from piecework.graphs.portable import PortableProgram
from piecework.graphs.recorder import NullRecorder
from piecework.phases import Compiler

from .artifact_models import BUCKET, SAVED, SPECIALIZED, portable_of
from .portable_models import CASES, made, results
from .toys import assert_same, run_eager

ROOT = Path(piecework.__file__).parent
INDUCTOR = Compiler.INDUCTOR


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs by name, and an artifact for each of their pieces, made by another process with caches of its own."""
    directory = tmp_path_factory.mktemp("artifacts")
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))}
    command = [sys.executable, "-W", "ignore", "-m", "tests.graphs.artifact_models", str(directory)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not list(directory.glob(".*")), "temporary files are gone"
    return directory


@pytest.fixture
def piece(saved: Path) -> BuiltPiece:
    portable = PortableProgram.from_bytes((saved / "two dims").read_bytes())
    return portable.piece(portable.fingerprints[0])


@pytest.fixture
def file(saved: Path, piece: BuiltPiece, tmp_path: Path) -> Path:
    """A copy of the artifact of `piece`."""
    return Path(shutil.copy(saved / f"{piece.fingerprint}{artifact.SUFFIX}", tmp_path))


@pytest.mark.parametrize("name", SAVED)
def test_what_another_process_compiled_does_what_the_model_does(saved: Path, name: str) -> None:
    case = SAVED[name]
    model, reference = made(case), made(case)
    graph = PortableProgram.from_bytes((saved / name).read_bytes()).bind(model)
    compiled: dict[Any, Any] = {}
    for piece in graph.split.pieces:
        built = graph.built(piece)
        for each in [built, built.specialized(BUCKET)] if name == SPECIALIZED else [built]:
            path = saved / f"{each.fingerprint}{artifact.SUFFIX}"
            compiled[each.fingerprint, INDUCTOR] = load_piece(path, each, INDUCTOR)
    programs = [(graph.compile_general(INDUCTOR, compiled, NullRecorder()), (3, BUCKET, 1, 50, 0, 3))]
    if name == SPECIALIZED:
        programs.append((graph.compile_specialized(BUCKET, INDUCTOR, compiled, NullRecorder()), (BUCKET, BUCKET)))
    assert graph.num_compiles == 0
    for program, sizes in programs:
        for size in sizes:
            if size in program.interval:
                assert_same(results(program, case, size), run_eager(reference, case.inputs(size)))
                assert_same(dict(model.named_buffers()), dict(reference.named_buffers()))


def test_intervals_travel(saved: Path) -> None:
    case = "constants, backed"
    portable = PortableProgram.from_bytes((saved / case).read_bytes())
    for fingerprint in portable.fingerprints:
        built = portable.piece(fingerprint)
        loaded = load_piece(saved / f"{fingerprint}{artifact.SUFFIX}", built, INDUCTOR)
        assert str(loaded.intervals["s0"]) == "[3, inf)"
        assert loaded.seconds > 0


def test_it_is_what_was_saved_and_not_what_else_inductors_cache_has_under_its_key(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own load takes the first entry of the key, whatever sizes that was made for."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    case = SAVED["two dims"]
    graph = PortableProgram.from_bytes((saved / "two dims").read_bytes()).bind(made(case))
    built = {piece.name: graph.built(piece) for piece in graph.split.pieces}
    paths = {name: saved / f"{each.fingerprint}{artifact.SUFFIX}" for name, each in built.items()}
    for name, each in built.items():
        load_piece(paths[name], each, INDUCTOR)
    entries = sorted(each for folder in (tmp_path / "aotautograd").iterdir() for each in folder.iterdir())
    assert len(entries) == graph.num_distinct
    for entry, other in zip(entries, [*entries[1:], entries[0]], strict=True):
        shutil.copy(other, entry.with_name("0"))
    compiled = {(each.fingerprint, INDUCTOR): load_piece(paths[name], each, INDUCTOR) for name, each in built.items()}
    program = graph.compile_general(INDUCTOR, compiled, NullRecorder())
    assert_same(results(program, case, 4), run_eager(made(case), case.inputs(4)))


# What does not fit is refused.


def rewritten(file: Path, **changes: Any) -> Path:
    """The file with parts of its header, or torch's bytes, replaced, and the checksum that goes with that."""
    header, content = artifact._decode(file)
    file.write_bytes(artifact._encode({**header, **changes.pop("header", {})}, changes.pop("content", content)))
    return file


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"format": 9}, "expected format 1, got 9"),
        ({"torch": "1.0.0"}, r"expected torch .*, got '1\.0\.0'"),
        ({"fingerprint": "another"}, "expected fingerprint .*, got 'another'"),
        ({"compiler": "eager"}, "expected compiler inductor, got 'eager'"),
    ],
)
def test_a_file_of_something_else(file: Path, piece: BuiltPiece, header: dict[str, Any], message: str) -> None:
    with pytest.raises(ArtifactError, match=f"{message}; compile the piece anew"):
        load_piece(rewritten(file, header=header), piece, INDUCTOR)


def test_a_file_of_other_options(file: Path, piece: BuiltPiece) -> None:
    load_piece(file, piece, INDUCTOR, options=CompilerOptions())
    with pytest.raises(ArtifactError, match="expected options .*True.*, got .*False"):
        load_piece(file, piece, INDUCTOR, options=CompilerOptions(emulate_precision_casts=True))
    with pytest.raises(ArtifactError, match="expected options .*'mode': 'default'.*, got .*'mode': None"):
        load_piece(file, piece, INDUCTOR, options=CompilerOptions(mode="default"))


@pytest.mark.parametrize("damage", ["missing", "empty", "text", "folder", "half", "one byte less"])
def test_a_damaged_file(file: Path, piece: BuiltPiece, damage: str) -> None:
    content = file.read_bytes()
    file.unlink()
    if damage == "folder":
        file.mkdir()
    elif damage != "missing":
        damaged = {"empty": b"", "text": b"no artifact", "half": content[: len(content) // 2]}
        file.write_bytes(damaged.get(damage, content[:-1]))
    with pytest.raises(ArtifactError, match=f"artifact: .*{file.name} cannot be used .*; compile the piece anew"):
        load_piece(file, piece, INDUCTOR)


def test_any_bit_that_is_flipped_is_noticed(file: Path, piece: BuiltPiece) -> None:
    content = file.read_bytes()
    for place in (*range(0, 200, 7), *range(200, len(content), 997)):
        broken = bytearray(content)
        broken[place] ^= 1
        file.write_bytes(broken)
        with pytest.raises(ArtifactError):
            load_piece(file, piece, INDUCTOR)


def test_another_build_of_torch_with_the_same_version(
    file: Path, piece: BuiltPiece, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch keeps a key of its own sources in what it saves."""
    monkeypatch.setattr("torch._inductor.codecache.torch_key", lambda: b"another")
    with pytest.raises(ArtifactError, match="another build of torch made it") as caught:
        load_piece(file, piece, INDUCTOR)
    assert isinstance(caught.value.__cause__, AssertionError)


def test_bytes_that_are_not_torchs(file: Path, piece: BuiltPiece) -> None:
    for content in (b"", b"hello", artifact._decode(file)[1][:-100]):
        with pytest.raises(ArtifactError, match=r"torch .* cannot load it"):
            load_piece(rewritten(file, content=content), piece, INDUCTOR)


# What cannot be saved.


def test_only_inductor_has_artifacts(piece: BuiltPiece, tmp_path: Path) -> None:
    assert [compiler for compiler in Compiler if has_artifacts(compiler)] == [INDUCTOR]
    with pytest.raises(NoArtifactError, match="got eager, whose pieces are not saved"):
        save_piece(piece.compile(Compiler.EAGER), piece, tmp_path, compiler=Compiler.EAGER)
    with pytest.raises(NoArtifactError, match="got aot_eager, whose pieces are not saved"):
        load_piece(tmp_path / "none", piece, Compiler.AOT_EAGER)
    with pytest.raises(NoArtifactError, match="torch keeps nothing of this piece"):
        save_piece(piece.compile(Compiler.EAGER), piece, tmp_path)
    assert not list(tmp_path.iterdir())


def test_inputs_that_share_memory_are_told_before_the_compile(piece: BuiltPiece) -> None:
    check_saveable(piece, INDUCTOR)
    portable = portable_of(CASES["aliasing"])
    with pytest.raises(NoArtifactError, match="inputs of the piece share memory"):
        check_saveable(portable.piece(portable.fingerprints[0]), INDUCTOR)


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may grow over 1000 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Saveable:
    """Stands in for what Inductor made, of more bytes than a full disk takes."""

    def is_saveable(self) -> bool:
        return True

    def save(self, *, path: str) -> None:
        Path(path).write_bytes(bytes(10_000))


def test_a_write_that_fails_leaves_nothing(piece: BuiltPiece, tmp_path: Path, small_files: None) -> None:
    compiled = piece.compile(Compiler.AOT_EAGER)
    compiled.call.artifact = Saveable()
    with pytest.raises(ArtifactError, match=r"cannot be written \(OSError: .*\); make room there") as caught:
        save_piece(compiled, piece, tmp_path)
    assert not isinstance(caught.value, NoArtifactError)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ArtifactError, match="cannot be written"):
        save_piece(compiled, piece, tmp_path / "missing")


def test_the_header_says_what_it_is_of(saved: Path, file: Path, piece: BuiltPiece) -> None:
    header, _ = artifact._decode(file)
    assert json.loads(json.dumps(header)) == header
    assert header["torch"] == torch.__version__
    assert header["fingerprint"] == piece.fingerprint
    assert header["options"] == {"emulate_precision_casts": False, "mode": None}
    made_of = ArtifactFile(path=file, fingerprint=piece.fingerprint, num_bytes=file.stat().st_size)
    assert load_piece(made_of, piece, INDUCTOR).intervals == load_piece(file, piece, INDUCTOR).intervals


def test_options_reach_inductor_and_are_undone(piece: BuiltPiece, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor
    import torch._inductor.config as inductor_config

    seen = []

    def fake_compile(graph_module: Any, example_inputs: Any, **kwargs: Any) -> Any:
        seen.append(inductor_config.emulate_precision_casts)
        return graph_module.forward

    monkeypatch.setattr(torch._inductor, "standalone_compile", fake_compile)
    before = inductor_config.emulate_precision_casts
    piece.compile(INDUCTOR)
    piece.compile(INDUCTOR, CompilerOptions(emulate_precision_casts=True))
    piece.specialized(4).compile(INDUCTOR)
    assert seen == [before, True, before]
    assert inductor_config.emulate_precision_casts == before


def test_something_trivial_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def fake_compile(graph_module: Any, example_inputs: Any, **kwargs: Any) -> Any:
        seen.append([tuple(each.shape) for each in example_inputs])
        return graph_module.forward

    monkeypatch.setattr(torch._inductor, "standalone_compile", fake_compile)
    compile_something(torch.device("cpu"))
    assert seen == [[(8,)]]


def test_what_was_loaded_is_not_saved_again(file: Path, piece: BuiltPiece, tmp_path: Path) -> None:
    loaded = load_piece(file, piece, INDUCTOR)
    with pytest.raises(NoArtifactError):
        write_artifact(loaded.call, tmp_path / "again")
