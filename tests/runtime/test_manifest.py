"""The manifest: what it holds, how runs add up in one file, and that no file of any kind stops a server."""

from __future__ import annotations

import errno
import gc
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st

import piecework.runtime.manifest_keeper as keeper_module
from piecework import __version__
from piecework.errors import ConfigError
from piecework.phases import GraphConfig, Phase, PhaseConfig
from piecework.runtime.events import Counters, Recorder, Scope
from piecework.runtime.manifest import (
    MAX_BUCKETS,
    MAX_JIT,
    MAX_MISSED,
    AnotherModelError,
    BucketRecord,
    Manifest,
    PhaseRecord,
    model_id,
)
from piecework.runtime.manifest_format import MAX_COUNT, MAX_FILE_BYTES
from piecework.runtime.manifest_keeper import ManifestKeeper, MissedSizes, manifest_of

MODEL = "11-22"
PREFILL, DECODE = Phase.PREFILL, Phase.DECODE


class View:
    """A runtime, as far as a manifest looks at it."""

    def __init__(self) -> None:
        self.counters = Counters()
        self.recorder = Recorder(self.counters, progress=False)
        self.entries: list[Any] = []

    @property
    def events(self) -> Any:
        return self.recorder.events

    def step(self, phase: Phase, bucket: int | None, times: int = 1) -> None:
        self.counters.add("steps", times, Scope(phase=phase, bucket=bucket))

    def entry(self, phase: Phase, bucket: int | None, kind: str) -> None:
        self.entries.append(SimpleNamespace(phase=phase, bucket=bucket, program=SimpleNamespace(kind=kind)))

    def capture(self, phase: Phase, bucket: int) -> None:
        self.recorder.within(Scope(phase=phase, bucket=bucket)).record("capture")

    def jit(self, name: str = "kernel", signature: str = "x: *bf16") -> None:
        self.recorder.record("jit", what="triton", name=name, signature=signature)

    @property
    def warnings(self) -> dict[str, int]:
        return self.counters["warnings"]

    @property
    def actions(self) -> list[str]:
        return [event.detail["action"] for event in self.events if event.kind == "manifest"]


@pytest.fixture
def view() -> View:
    return View()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "manifest.json"


def keeper(path: Path, view: View, **kwargs: Any) -> ManifestKeeper:
    return ManifestKeeper(path, view, view.recorder, **{"model": MODEL, **kwargs})


def example(steps: int = 3, model: str = MODEL) -> Manifest:
    decode = PhaseRecord(
        buckets={
            1: BucketRecord(steps=steps, compiled=("general",), captured=True, program="general"),
            8: BucketRecord(steps=steps + 1, compiled=("general", "specialized"), program="specialized"),
        },
        missed={300: 2, None: 4},
    )
    jit = {("triton", "kernel", "x: *bf16"): 2}
    return Manifest(model=model, phases={DECODE: decode}, jit=jit, runs=1)


# ---- what it holds


def test_the_file_is_the_json_that_is_documented(path: Path) -> None:
    example().write(path)
    assert json.loads(path.read_text()) == {
        "format": 1,
        "piecework": __version__,
        "model": MODEL,
        "phases": {
            "decode": {
                "buckets": {
                    "1": {"steps": 3, "compiled": ["general"], "captured": True, "program": "general"},
                    "8": {
                        "steps": 4,
                        "compiled": ["general", "specialized"],
                        "captured": False,
                        "program": "specialized",
                    },
                },
                "missed": {"300": 2, "other": 4},
            }
        },
        "jit": [{"what": "triton", "name": "kernel", "signature": "x: *bf16", "count": 2}],
        "runs": 1,
    }
    assert Manifest.load(path) == example()
    assert os.listdir(path.parent) == [path.name]


records = st.builds(
    BucketRecord,
    steps=st.integers(0, MAX_COUNT),
    compiled=st.sets(st.sampled_from(["general", "specialized"])).map(sorted).map(tuple),
    captured=st.booleans(),
    program=st.sampled_from(["eager", "general", "specialized"]),
)
phases = st.builds(
    PhaseRecord,
    buckets=st.dictionaries(st.integers(1, 1 << 20), records, max_size=5),
    missed=st.dictionaries(st.none() | st.integers(1, 1 << 20), st.integers(1, MAX_COUNT), max_size=5),
)
manifests = st.builds(
    Manifest,
    model=st.just(MODEL),
    phases=st.dictionaries(st.sampled_from(list(Phase)), phases),
    jit=st.dictionaries(st.tuples(st.text(max_size=9), st.text(max_size=9), st.text(max_size=9)), st.integers(0, 99)),
    runs=st.integers(0, MAX_COUNT),
)


@given(manifests)
def test_json_round_trip(manifest: Manifest) -> None:
    assert Manifest.from_dict(json.loads(json.dumps(manifest.as_dict()))) == manifest


@given(manifests, manifests)
def test_runs_add_up(first: Manifest, second: Manifest) -> None:
    both = first.merged(second)
    assert both.runs == min(first.runs + second.runs, MAX_COUNT)
    for phase in Phase:
        one, two, sum_ = (each.phases.get(phase, PhaseRecord()) for each in (first, second, both))
        assert set(sum_.buckets) == {*one.buckets, *two.buckets}
        for bucket, record in sum_.buckets.items():
            parts = [each.buckets[bucket] for each in (one, two) if bucket in each.buckets]
            assert record.steps == min(sum(part.steps for part in parts), MAX_COUNT)
            assert record.captured == any(part.captured for part in parts)
            assert set(record.compiled) == {kind for part in parts for kind in part.compiled}
        assert {s: min(one.missed.get(s, 0) + two.missed.get(s, 0), MAX_COUNT) for s in sum_.missed} == sum_.missed
    assert Manifest.from_dict(json.loads(json.dumps(both.as_dict()))) == both


def test_the_order_is_by_frequency() -> None:
    buckets = {size: BucketRecord(steps=steps) for size, steps in ((1, 5), (2, 9), (4, 5), (8, 0))}
    manifest = Manifest(model=MODEL, phases={DECODE: PhaseRecord(buckets=buckets)})
    assert manifest.order("decode") == (2, 1, 4)
    assert manifest.order(DECODE, among=(4, 1, 16)) == (1, 4)
    assert manifest.order(PREFILL) == ()


def test_its_size_is_bounded() -> None:
    one = Manifest(
        model=MODEL,
        phases={
            DECODE: PhaseRecord(
                buckets={size: BucketRecord(steps=size) for size in range(1, MAX_BUCKETS + 9)},
                missed={size: size for size in range(1, 4 * MAX_MISSED)},
            )
        },
        jit={("triton", '"' * 400, "\u1234" * 390 + str(i)): i for i in range(MAX_JIT + 9)},
    )
    bounded = one.merged(Manifest(model=MODEL))
    record = bounded.phases[DECODE]
    assert min(record.buckets) == 9  # the most frequent stay
    assert sum(record.missed.values()) == sum(one.phases[DECODE].missed.values())
    assert (len(record.buckets), len(record.missed), len(bounded.jit)) == (MAX_BUCKETS, MAX_MISSED + 1, MAX_JIT)
    assert min(bounded.jit.values()) == 9
    text = json.dumps(bounded.as_dict(), indent=1)
    assert len(text) < MAX_FILE_BYTES
    assert Manifest.from_dict(json.loads(text)) == bounded


def test_what_it_takes_from_a_runtime(view: View) -> None:
    for bucket, kind, steps in ((1, "general", 5), (8, "specialized", 2), (16, "eager", 1)):
        view.entry(DECODE, bucket, kind)
        view.step(DECODE, bucket, steps)
    view.entry(DECODE, 1, "eager")  # another set of inputs
    view.entry(DECODE, None, "general")
    view.entry(PREFILL, 64, "general")  # warmed up, and never asked for
    view.capture(DECODE, 8)
    view.step(DECODE, None, 7)
    missed = MissedSizes()
    for size in (300, 300, 500, 0):
        missed.note(DECODE, size)
    view.jit()
    view.jit()
    view.jit("other", "")
    got = manifest_of(view, MODEL, missed)
    assert got.phases == {
        DECODE: PhaseRecord(
            buckets={
                1: BucketRecord(steps=5, compiled=("general",), program="general"),
                8: BucketRecord(steps=2, compiled=("specialized",), captured=True, program="specialized"),
                16: BucketRecord(steps=1),
            },
            missed={300: 2, 500: 1, None: 4},
        )
    }
    assert got.jit == {("triton", "kernel", "x: *bf16"): 2, ("triton", "other", ""): 1}
    assert manifest_of(view, MODEL).phases[DECODE].missed == {None: 7}


def test_what_a_real_runtime_tells(kit: Any) -> None:
    runtime = kit.runtime(kit.Toy(), kit.config("aot_eager", decode={"specialize": (4,)}))
    for num_tokens in (1, 2, 3, 3, 9, 11):
        kit.step(runtime, "decode", num_tokens)
    got = manifest_of(runtime, MODEL)
    assert got.phases == {
        DECODE: PhaseRecord(
            buckets={
                2: BucketRecord(steps=2, compiled=("general",), program="general"),
                4: BucketRecord(steps=2, compiled=("specialized",), program="specialized"),
            },
            missed={None: 2},
        )
    }
    runtime.close()


# ---- of which model it is


class Model(torch.nn.Module):
    def __init__(self, width: int = 4, num_blocks: int = 2, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, 4, dtype=dtype)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("cache", torch.zeros(num_blocks, 4), persistent=False)


class Other(Model):
    pass


def named(**changes: Any) -> GraphConfig:
    return GraphConfig(decode=PhaseConfig(**{"backend": "full", "buckets": (1, 2), **changes}))


def test_a_model_id_depends_on_what_a_bucket_depends_on() -> None:
    torch.manual_seed(1)
    base = model_id(Model(), named())
    torch.manual_seed(2)
    assert model_id(Model(), named()) == base  # other values
    # As many blocks as memory was free for, and when things are compiled.
    assert model_id(Model(num_blocks=3), named()) == base
    assert model_id(Model(), GraphConfig(decode=named().decode, startup="eager", manifest="x")) == base
    others = [
        model_id(Model(width=5), named()),
        model_id(Model(dtype=torch.float16), named()),
        model_id(Other(), named()),
        model_id(Model(), named(compiler="aot_eager")),
        model_id(Model(), named(backend="disabled")),
    ]
    renamed = Model()
    renamed.linear2 = renamed.linear
    del renamed.linear
    others.append(model_id(renamed, named()))
    assert len({base.split("-")[0], *(other.split("-")[0] for other in others)}) == len(others) + 1
    assert {other.split("-")[1] for other in others} == {base.split("-")[1]}
    model, ladders = model_id(Model(), named(buckets=(1, 4))).split("-")
    assert (model, ladders) == (base.split("-")[0], ladders) != tuple(base.split("-"))


def test_a_manifest_of_other_ladders_is_one_only_where_that_is_said() -> None:
    manifest = Manifest(model="11-22")
    manifest.check_model("11-22")
    manifest.check_model("11-33", any_ladder=True)
    with pytest.raises(AnotherModelError, match="it is of other ladders"):
        manifest.check_model("11-33")
    for any_ladder in (False, True):
        with pytest.raises(AnotherModelError, match="it is of another model: a class, a tensor's name"):
            manifest.check_model("12-22", any_ladder=any_ladder)


# ---- files of no use


def edited(change: Callable[[dict[str, Any]], object]) -> str:
    data = example().as_dict()
    change(data)
    return json.dumps(data)


def bucket(data: dict[str, Any]) -> dict[str, Any]:
    return data["phases"]["decode"]["buckets"]["8"]


WHOLE = json.dumps(example().as_dict())
BAD: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "it is no JSON, or only a part of it: "),
    "truncated": (WHOLE[: len(WHOLE) // 2], "it is no JSON, or only a part of it: "),
    "binary": (b"\xff\xfe\x00", "it is no JSON, or only a part of it: "),
    "deep": ("[" * 100_000, "it is no JSON"),
    "huge number": ('{"format": ' + "9" * 5000 + "}", "it is no JSON"),
    "huge": (" " * (MAX_FILE_BYTES + 1), "it has more than 4 MiB"),
    "list": ("[1]", "the file is [1], no object"),
    "key twice": ('{"format": 1, "format": 1}', "a key is there twice"),
    "NaN": (WHOLE.replace('"runs": 1', '"runs": NaN'), "NaN is no number of JSON"),
    "Infinity": (WHOLE.replace('"runs": 1', '"runs": Infinity'), "Infinity is no number of JSON"),
    "another format": (edited(lambda d: d.update(format=2)), "its format is 2, and this version reads 1"),
    "format true": (edited(lambda d: d.update(format=True)), "its format is True, and this version reads 1"),
    "no format": ("{}", "its format is None"),
    "another version": (edited(lambda d: d.update(piecework="0.0.0")), "piecework '0.0.0' wrote it, and this is "),
    "another model": (edited(lambda d: d.update(model="33-22")), "it is of another model: "),
    "other ladders": (edited(lambda d: d.update(model="11-33")), "it is of other ladders"),
    "no model": (edited(lambda d: d.update(model="x")), "model is 'x', no two hashes"),
    "model 3": (edited(lambda d: d.update(model=3)), "model is 3, no text of at most"),
    "key missing": (edited(lambda d: d.pop("jit")), "the file lacks 'jit'"),
    "unknown key": (edited(lambda d: d.update(note="by hand")), "the file has an unknown key 'note'"),
    "unknown phase": (edited(lambda d: d["phases"].update(verify={})), "phases has 'verify', which is no phase"),
    "phases a list": (edited(lambda d: d.update(phases=[])), "phases is [], no object"),
    "runs negative": (edited(lambda d: d.update(runs=-1)), "runs is -1, no count"),
    "runs 1.5": (edited(lambda d: d.update(runs=1.5)), "runs is 1.5, no count"),
    "runs true": (edited(lambda d: d.update(runs=True)), "runs is True, no count"),
    "steps negative": (edited(lambda d: bucket(d).update(steps=-4)), "phases.decode.buckets.8.steps is -4, no count"),
    "steps text": (edited(lambda d: bucket(d).update(steps="4")), "phases.decode.buckets.8.steps is '4', no count"),
    "steps huge": (edited(lambda d: bucket(d).update(steps=10**30)), "phases.decode.buckets.8.steps is 1000"),
    "captured 1": (edited(lambda d: bucket(d).update(captured=1)), "8.captured is 1, neither true nor false"),
    "compiled": (edited(lambda d: bucket(d).update(compiled=["fast"])), "8 has 'fast', which is no kind of program"),
    "compiled word": (edited(lambda d: bucket(d).update(compiled="general")), "8.compiled is 'general', no list"),
    "compiled long": (edited(lambda d: bucket(d).update(compiled=["eager"] * 5)), "8.compiled has 5 items, more than"),
    "program list": (edited(lambda d: bucket(d).update(program=[])), "8 has [], which is no kind of program"),
    "size word": (edited(lambda d: d["phases"]["decode"]["buckets"].update(big={})), "buckets has 'big', no number"),
    "size 0": (edited(lambda d: d["phases"]["decode"]["missed"].update({"0": 1})), "missed has '0', no number"),
    "size -1": (edited(lambda d: d["phases"]["decode"]["missed"].update({"-1": 1})), "missed has '-1', no number"),
    "size long": (edited(lambda d: d["phases"]["decode"]["missed"].update({"9" * 99: 1})), "missed has '999"),
    "missed null": (edited(lambda d: d["phases"]["decode"]["missed"].update(other=None)), "missed.other is None, no"),
    "many sizes": (
        edited(lambda d: d["phases"]["decode"]["missed"].update({str(i): 1 for i in range(1, MAX_BUCKETS + 9)})),
        "phases.decode.missed has 1033 sizes, more than 1024",
    ),
    "jit": (edited(lambda d: d["jit"].append(3)), "jit[1] is 3, no object"),
    "jit name": (edited(lambda d: d["jit"][0].update(name="x" * 401)), "jit[0].name is 'xxx"),
    "many jit": (edited(lambda d: d.update(jit=d["jit"] * 257)), "jit has 257 items, more than 256"),
}


@pytest.mark.parametrize(("content", "reason"), BAD.values(), ids=BAD)
def test_a_bad_file_is_ignored_with_its_reason_and_kept(
    path: Path, view: View, content: str | bytes, reason: str
) -> None:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    before = path.read_bytes()
    kept = keeper(path, view)
    assert kept.start() is None
    [warning] = view.warnings
    assert warning.startswith(f"manifest {path}: ignored, since ")
    assert reason in warning
    assert len(warning) < 400
    assert path.read_bytes() == before  # until there is something new
    view.step(DECODE, 8)
    kept.stop()
    bad = path.with_name("manifest.json.bad")
    assert bad.read_bytes() == before
    [_, moved] = view.warnings
    assert moved.startswith(f"manifest {path}: what was there is kept as {bad}, since ")
    assert reason in moved
    assert Manifest.load(path).phases == {DECODE: PhaseRecord(buckets={8: BucketRecord(steps=1)})}
    assert view.actions == ["ignored", "put_aside", "written"]


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text() | st.integers(), st.lists, max_leaves=3))
def test_whatever_stands_in_a_file_reading_never_raises(value: Any) -> None:
    """Each value of a manifest, in turn, is something else."""

    def variants(data: Any) -> Any:
        yield value
        if isinstance(data, dict):
            yield from ({**data, key: new} for key, old in data.items() for new in variants(old))
        elif isinstance(data, list):
            yield from ([*data[:i], new, *data[i + 1 :]] for i, old in enumerate(data) for new in variants(old))

    for variant in variants(example().as_dict()):
        try:
            manifest = Manifest.from_dict(variant)
        except ValueError:
            continue
        assert Manifest.from_dict(manifest.as_dict()) == manifest


def test_no_file_is_no_warning(path: Path, view: View) -> None:
    assert Manifest.read(path, MODEL, view.recorder) is None
    assert (view.warnings, view.actions) == ({}, [])
    example().write(path)
    assert Manifest.read(path, MODEL, view.recorder) == Manifest.read(path, MODEL) == example()
    assert view.actions == ["read"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes here")
def test_a_pipe_is_not_waited_for(path: Path, view: View) -> None:
    os.mkfifo(path)
    assert Manifest.read(path, MODEL, view.recorder) is None
    assert "it is no regular file" in next(iter(view.warnings))


def test_a_file_that_cannot_be_read(path: Path, view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    example().write(path)

    def refuse(*args: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("os.stat", refuse)
    assert Manifest.read(path, MODEL, view.recorder) is None
    monkeypatch.undo()
    assert list(view.warnings) == [f"manifest {path}: ignored, since it cannot be read: Permission denied"]


# ---- runs that add up in one file


def test_runs_merge_and_a_run_adds_each_step_once(path: Path, view: View) -> None:
    for run in range(3):
        again = View()
        kept = keeper(path, again)
        before = kept.start()
        assert (before.runs if before is not None else 0) == run
        again.entry(DECODE, 8, "general")
        for _ in range(2):
            again.step(DECODE, 8, 5)
            again.step(DECODE, None, 1)
            again.jit()
            assert kept.write_now()
            assert kept.write_now()  # nothing new
        kept.stop()
        kept.stop()
        got = Manifest.load(path)
        assert got.runs == run + 1
        assert got.phases == {
            DECODE: PhaseRecord(
                buckets={8: BucketRecord(steps=10 * (run + 1), compiled=("general",), program="general")},
                missed={None: 2 * (run + 1)},
            )
        }
        assert got.jit == {("triton", "kernel", "x: *bf16"): 2 * (run + 1)}
        assert again.warnings == {}


def test_a_file_that_is_deleted_gets_all_of_the_run_again(path: Path, view: View) -> None:
    kept = keeper(path, view)
    kept.start()
    view.step(DECODE, 8, 5)
    kept.write_now()
    path.unlink()
    view.step(DECODE, 8, 2)
    kept.stop()
    got = Manifest.load(path)
    assert (got.runs, got.phases[DECODE].buckets[8].steps) == (1, 7)


def test_an_entry_that_was_replaced_does_not_count_backwards(path: Path, view: View) -> None:
    """A promotion makes a new entry, whose own count begins anew."""
    kept = keeper(path, view)
    view.entry(DECODE, 8, "eager")
    view.step(DECODE, 8, 5)
    kept.write_now()
    view.entries.clear()
    view.entry(DECODE, 8, "general")
    view.step(DECODE, 8, 1)
    kept.write_now()
    record = Manifest.load(path).phases[DECODE].buckets[8]
    assert record == BucketRecord(steps=6, compiled=("general",), program="general")


def test_data_is_what_this_run_met(path: Path, view: View) -> None:
    example().write(path)
    kept = keeper(path, view)
    view.step(PREFILL, 64, 2)
    view.jit()
    kept.write_now()
    assert kept.data() == Manifest(
        model=MODEL,
        phases={PREFILL: PhaseRecord(buckets={64: BucketRecord(steps=2)})},
        jit={("triton", "kernel", "x: *bf16"): 1},
        runs=1,
    )


WRITER = """
import sys
sys.path.insert(0, sys.argv[3])
from test_manifest import View, keeper, DECODE
from pathlib import Path
view = View()
kept = keeper(Path(sys.argv[1]), view)
print("ready", flush=True)
sys.stdin.readline()
for i in range(int(sys.argv[2])):
    view.step(DECODE, 8)
    view.jit(f"kernel {i % 3}")
    assert kept.write_now()
assert not view.warnings, view.warnings
"""


def test_servers_on_one_file_lose_nothing(path: Path) -> None:
    """Two processes and two threads, which read, add and write at the same time."""
    num = 25
    command = [sys.executable, "-c", WRITER, str(path), str(num), str(Path(__file__).parent)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(2)]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 2
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()

    def serve() -> None:
        view = View()
        kept = keeper(path, view)
        for i in range(num):
            view.step(DECODE, 8)
            view.jit(f"kernel {i % 3}")
            kept.write_now()

    threads = [threading.Thread(target=serve) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for process in processes:
        process.communicate(timeout=120)
        assert process.returncode == 0
    got = Manifest.load(path)
    assert (got.runs, got.phases[DECODE].buckets[8].steps, sum(got.jit.values())) == (4, 4 * num, 4 * num)
    assert {name for name in os.listdir(path.parent) if not name.endswith(".lock")} == {path.name}


def test_two_models_on_one_file_do_not_take_it_from_each_other(path: Path) -> None:
    views = [View(), View()]
    first, second = (keeper(path, view, model=model) for view, model in zip(views, ("11-22", "33-22"), strict=True))
    for view in views:
        view.step(DECODE, 8)
    assert first.write_now()
    assert second.write_now()  # what it finds is of no use to it
    assert not first.write_now()
    assert second.write_now()
    assert Manifest.load(path).model == "33-22"
    assert Manifest.load(f"{path}.bad").model == "11-22"
    [warning] = views[0].warnings
    assert (
        "cannot be written (a runtime of another model or of other ladders writes it too); serving goes on" in warning
    )


def test_a_reader_never_sees_a_part(path: Path) -> None:
    example().write(path)
    ended = threading.Event()

    def read() -> None:
        while not ended.is_set():
            Manifest.load(path)

    failures: list[BaseException] = []

    def guarded() -> None:
        try:
            read()
        except BaseException as error:
            failures.append(error)

    reader = threading.Thread(target=guarded)
    reader.start()
    for i in range(100):
        example(steps=10**i % MAX_COUNT).write(path)
    ended.set()
    reader.join()
    assert failures == []


def test_a_link_stays_one(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.mkdir()
    path.symlink_to(target / "real.json")
    example().write(path)
    assert path.is_symlink()
    assert Manifest.load(target / "real.json") == example()


# ---- files that cannot be written


def test_a_directory_is_refused(tmp_path: Path, view: View) -> None:
    with pytest.raises(ConfigError) as caught:
        keeper(tmp_path, view)
    assert str(caught.value) == (
        f"manifest: expected the path of a file, got the directory {str(tmp_path)!r}; name a file in it"
    )


@pytest.mark.parametrize("where", ["absent/manifest.json", "file/manifest.json", "/proc/manifest.json"])
def test_a_place_that_cannot_be_written_is_one_warning_and_serving_goes_on(
    tmp_path: Path, view: View, where: str
) -> None:
    if where.startswith("/proc") and not os.path.isdir("/proc/self"):
        pytest.skip("there is no /proc here, in which nobody can make a file")
    (tmp_path / "file").write_text("")
    kept = keeper(tmp_path / where, view)
    assert kept.start() is None
    first = dict(view.warnings)
    view.step(DECODE, 8)
    assert not kept.write_now()
    kept.stop()
    warnings = [text for text in view.warnings if "cannot be written (" in text]
    assert first[warnings[0]] == 1
    assert warnings[0].endswith("make its directory writable or name another file")
    assert sum(view.warnings[text] for text in warnings) == 3  # at the start, and at each attempt
    assert "failed" in view.actions
    assert os.listdir(tmp_path) == ["file"]


def test_a_full_disk_leaves_the_old_file_and_nothing_half_written(
    path: Path, view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    example().write(path)
    kept = keeper(path, view)
    kept.start()
    view.step(DECODE, 8, 5)
    with monkeypatch.context() as patch:

        def full(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr("os.fsync", full)
        assert not kept.write_now()
    assert Manifest.load(path) == example()
    assert {name for name in os.listdir(path.parent) if not name.endswith(".lock")} == {path.name}
    [warning] = view.warnings
    assert "cannot be written (No space left on device); serving goes on, and what came is kept for the next" in warning
    kept.stop()  # there is room again
    assert Manifest.load(path).phases[DECODE].buckets[8].steps == 4 + 5


def test_a_lock_that_somebody_holds_is_not_waited_for_for_ever(
    path: Path, view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "LOCK_TIMEOUT_S", 0.05)
    kept = keeper(path, view)
    with FileLock(f"{path}.lock"):
        assert not kept.write_now()
    [warning] = view.warnings
    assert "cannot be written (another process holds its lock)" in warning
    assert kept.write_now()


# ---- when it is written


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_timer_writes_and_stop_writes_the_rest(path: Path, view: View) -> None:
    kept = keeper(path, view, interval_s=0.01)
    kept.start()
    view.step(DECODE, 8, 3)
    wait_for(lambda: path.exists() and Manifest.load(path).order(DECODE))
    threads = [thread for thread in threading.enumerate() if thread.name == "piecework-manifest"]
    assert all(thread.daemon for thread in threads)
    kept.stop()
    assert not any(thread.is_alive() for thread in threads)
    view.step(DECODE, 8, 9)  # after the end: nobody writes it
    assert Manifest.load(path).phases[DECODE].buckets[8].steps == 3


def test_the_wall_clock_does_not_matter(path: Path, view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(10**9, 0, -(10**6)))
    monkeypatch.setattr("time.time", lambda: float(next(now)))
    kept = keeper(path, view, interval_s=0.01)
    kept.start()
    view.step(DECODE, 8, 3)
    wait_for(lambda: path.exists() and Manifest.load(path).order(DECODE))
    kept.stop()
    assert view.warnings == {}


def test_the_timer_keeps_no_runtime_alive(path: Path) -> None:
    view = View()
    kept = keeper(path, view, interval_s=0.01)
    kept.start()
    [thread] = [thread for thread in threading.enumerate() if thread.name == "piecework-manifest"]
    gone = weakref.ref(view)
    del view, kept
    wait_for(lambda: gc.collect() is not None and gone() is None)
    thread.join(timeout=60)
    assert not thread.is_alive()


def test_what_is_no_regular_file_is_refused_and_stays(tmp_path: Path) -> None:
    import os
    import stat

    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="which is a device or the like"):
        ManifestKeeper(pipe, View(), Recorder(Counters()), model="m")
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_files_of_no_use_are_all_kept(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    for i in range(3):
        path.write_text(f"precious {i}")
        keeper = ManifestKeeper(path, View(), Recorder(Counters()), model="m")
        keeper.start()
        keeper.stop()
    kept = sorted(file.read_text() for file in tmp_path.iterdir() if ".bad" in file.name)
    assert kept == ["precious 0", "precious 1", "precious 2"]
