"""The script that trains the default model: what it reads out of the package, and a run of seconds on the CPU."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import math
import random
import struct
import sys
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from piecework.runtime.engine.engine import LLMEngine
from piecework.runtime.engine.params import SamplingParams
from piecework.runtime.engine.toy_checkpoint import SENTENCES

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "train_default_model.py"
NOVEL = ["TITLE", "", "By Someone", "", "VOLUME I", "", "Chapter 1", "", "One _very_", "long line.", "", "Two."]
NOVEL += ["", "CHAPTER II", "", "* * *", "", "A £ is  a pound.", "", "[End volume one of this edition.", "", "FINIS"]
CLEAN = "One very long line.\nTwo.\n\nA £ is a pound.\n"
SIZES = "--steps 20 --batch-size 4 --context 32 --vocab-size 400 --hidden-size 32 --intermediate-size 64 --num-layers 2"
SIZES += " --num-heads 4 --num-kv-heads 2 --learning-rate 0.01 --eval-every 10 --device cpu"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("train_default_model", SCRIPT)
    assert spec is not None and spec.loader is not None  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def make_deb(path: Path, novels: list[list[str]], kind: int = 16) -> Path:
    """A Debian package that holds the novels as an R package does."""
    database = b""
    for lines in novels:
        strings = [line.encode() for line in lines]
        data = b"X\n" + struct.pack(">iii", 3, 0x40201, 0x30500) + struct.pack(">i", 5) + b"UTF-8"
        data += struct.pack(">ii", kind, len(strings))
        data += b"".join(struct.pack(">ii", 0x40009, len(string)) + string for string in strings)
        database += struct.pack(">I", len(data)) + zlib.compress(data)
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w:xz") as archive:
        member = tarfile.TarInfo("./usr/lib/R/site-library/janeaustenr/data/Rdata.rdb")
        member.size = len(database)
        archive.addfile(member, io.BytesIO(database))
    deb = b"!<arch>\n"
    for name, content in (("debian-binary", b"2.0"), ("data.tar.xz", tar.getvalue())):
        deb += f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode() + content
        deb += b"\n" * (len(content) % 2)
    path.write_bytes(deb)
    return path


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, words)])
    script.main()


def test_only_the_prose_of_the_novels_is_read(script: ModuleType, tmp_path: Path) -> None:
    deb = make_deb(tmp_path / "a.deb", [NOVEL, [script.LEFT_OUT, "", "Chapter 1", "", "Not this."], NOVEL])
    assert script.read_deb(deb) == CLEAN.rstrip() + "\n\n" + CLEAN


def test_another_text_is_refused(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deb = make_deb(tmp_path / "a.deb", [NOVEL])
    got = hashlib.sha256(CLEAN.encode()).hexdigest()
    with pytest.raises(SystemExit, match=f"expected a text with sha256 {script.TEXT_SHA256}, got {got}"):
        run(script, monkeypatch, "--deb", deb, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_another_package_is_refused(script: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="expected R character vectors"):
        script.read_deb(make_deb(tmp_path / "a.deb", [NOVEL], kind=13))
    (tmp_path / "b.deb").write_bytes(b"!<arch>\n")
    with pytest.raises(SystemExit, match=r"expected a Debian package with data\.tar"):
        script.read_deb(tmp_path / "b.deb")


def test_the_committed_weights_are_of_the_text_that_the_script_wants(script: ModuleType) -> None:
    training = json.loads((script.OUT / "training.json").read_text())
    assert training["text_sha256"] == script.TEXT_SHA256
    assert script.Settings(**training["settings"]) == script.Settings()


@pytest.mark.slow
def test_a_short_run_learns_and_repeats(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = random.Random(0)
    chapters = ["\n".join(draw.choices(SENTENCES, k=12)) for _ in range(12)]
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(chapters))
    for name, seed in (("a", 0), ("again", 0), ("other", 1)):
        run(script, monkeypatch, "--text", text, "--out", tmp_path / name, "--seed", seed, *SIZES.split())
    a, again, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "again", "other"))
    assert a == again
    assert a != other
    training = json.loads((tmp_path / "a" / "training.json").read_text())
    assert training["step"] == 20
    assert training["validation_loss"] < math.log(400) - 1
    assert "step 20: train " in capsys.readouterr().out
    with LLMEngine(tmp_path / "a", device="cpu") as engine:
        [output] = engine.generate(["A server"], SamplingParams(max_new_tokens=4, ignore_eos=True))
    assert len(output.token_ids) == 4


def test_a_text_that_is_too_short_is_refused(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("One.\n\nTwo.")
    with pytest.raises(SystemExit, match="expected more than 10 chapters, got 2"):
        run(script, monkeypatch, "--text", text, "--out", tmp_path, "--device", "cpu")
    text.write_text("\n\n".join(["One."] * 11))
    with pytest.raises(SystemExit, match="expected more than 512 tokens"):
        run(script, monkeypatch, "--text", text, "--out", tmp_path, "--device", "cpu")
