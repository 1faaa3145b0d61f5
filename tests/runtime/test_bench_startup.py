"""`piecework bench startup`: the requests, the fresh processes, what is measured, and what is left behind."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import itertools
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecework.errors import ConfigError
from piecework.phases import BucketLadder, GraphConfig, Phase, Startup
from piecework.runtime import cli
from piecework.runtime.bench import feeder, fresh, report, startup, worker
from piecework.runtime.bench.measures import Run, events_as_data, measures, percentile
from piecework.runtime.bench.traffic import TimedRequest, TrafficShape, make_round, make_trace
from piecework.runtime.engine.toy_checkpoint import make_checkpoint
from piecework.runtime.events import Counters, Event, Scope

KEYS = {
    *"policy cold ready_s first_token_s worst_first_token_s settled_s settled served_s worst_step_s".split(),
    *"ramp_p50_s ramp_p99_s steady_step_s tokens_by_s in_step_compiles compiles_before_ready promotions".split(),
    *"captures in_step_captures in_boundary_captures in_step_seconds pool_bytes peak_bytes".split(),
    *"entries counters conditions steps events".split(),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that must not be changed."""
    return make_checkpoint(tmp_path_factory.mktemp("bench"), num_layers=3)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files of this process and of its children go."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", never)


def run(*words: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the benchmark."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(["bench", "startup", "--device", "cpu", *map(str, words)])
    return code, out.getvalue(), err.getvalue()


# ---- the requests


def shape(**changes: Any) -> TrafficShape:
    return TrafficShape(**{"duration_s": 30.0, "arrivals_per_s": 2.0, "max_new_tokens": 9, "seed": 0} | changes)


@given(
    prefill=st.sets(st.integers(1, 200), min_size=1, max_size=4),
    decode=st.sets(st.integers(1, 40), min_size=1, max_size=4),
    max_prompt_tokens=st.integers(1, 64),
    duration_s=st.sampled_from([3.0, 30.0]),
    arrivals_per_s=st.sampled_from([0.05, 2.0]),
    seed=st.integers(0, 9),
)
def test_every_size_comes_by_the_tenth_second_and_no_other_comes(
    prefill: set[int],
    decode: set[int],
    max_prompt_tokens: int,
    duration_s: float,
    arrivals_per_s: float,
    seed: int,
) -> None:
    ladders = BucketLadder(sorted(prefill)), BucketLadder(sorted(decode))
    about = shape(duration_s=duration_s, arrivals_per_s=arrivals_per_s, seed=seed)
    model: dict[str, Any] = {"vocab_size": 7, "max_prompt_tokens": max_prompt_tokens}
    if ladders[1].max > ladders[0].max:
        for call in (lambda: make_trace(*ladders, about, **model), lambda: make_round(*ladders, seed=seed, **model)):
            with pytest.raises(ConfigError, match="decode.buckets: .* add .* to prefill.buckets, or lower decode.buc"):
                call()
        return
    trace = make_trace(*ladders, about, **model)
    assert trace == make_trace(*ladders, about, **model)
    times = [request.arrival_s for request in trace]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] < duration_s
    together = [list(group) for _, group in itertools.groupby(trace, key=lambda request: request.arrival_s)]
    early = [group for group in together if group[0].arrival_s < 10]
    num_tokens, num_requests = ([sum(len(r.prompt) for r in group) for group in early], [len(g) for g in early])
    for ladder, sizes in zip(ladders, (num_tokens, num_requests), strict=True):
        assert set(ladder) <= set(sizes)  # each bucket exactly,
        for below, bucket in zip((0, *ladder), ladder, strict=False):  # and a size between, where there is one
            assert bucket == below + 1 or any(below < size < bucket for size in sizes)
    assert max(sum(len(request.prompt) for request in group) for group in together) <= ladders[0].max
    assert all(0 < len(request.prompt) <= max_prompt_tokens for request in trace)
    assert all(2 <= request.max_new_tokens <= 9 for request in trace)
    assert {token for request in trace for token in request.prompt} <= set(range(7))
    batches = make_round(*ladders, seed=seed, **model)
    assert set(ladders[0]) <= {sum(map(len, batch)) for batch in batches}
    assert set(ladders[1]) <= {len(batch) for batch in batches}


def test_arrivals_are_a_poisson_process_and_seeded() -> None:
    ladders = BucketLadder((16, 64)), BucketLadder((1, 4))
    model: dict[str, Any] = {"vocab_size": 512, "max_prompt_tokens": 250}
    trace = make_trace(*ladders, shape(duration_s=1000.0, arrivals_per_s=3.0), **model)
    assert trace != make_trace(*ladders, shape(duration_s=1000.0, arrivals_per_s=3.0, seed=1), **model)
    times = sorted({request.arrival_s for request in trace})
    gaps = [after - before for before, after in itertools.pairwise(times)]
    # A thousand seconds hold 3000 arrivals, give or take 55; the deviation of exponential gaps is their mean.
    assert 2780 < len(times) < 3220
    assert statistics.stdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.1)
    assert len({len(request.prompt) for request in trace}) > 20
    assert {request.max_new_tokens for request in trace} == set(range(2, 10))


# ---- feeding an engine


class FakeClock:
    """Moves when it is told to, and when somebody waits."""

    def __init__(self) -> None:
        self.at_s = 0.0
        self.waited: list[float] = []

    def now(self) -> float:
        return self.at_s

    def wait(self, seconds: float) -> None:
        self.waited.append(seconds)
        self.at_s += seconds


class FakeEngine:
    """Answers a request in `num_tokens` steps of one second; every step gives each request a token."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.left: dict[str, int] = {}
        self.sent: list[tuple[float, str]] = []
        self.num_promotes = 0
        counters = Counters()
        config = GraphConfig(promotion_budget_ms=7)
        self.runtime = SimpleNamespace(counters=counters, config=config, promote=self.promote)

    def promote(self, budget_ms: float) -> int:
        assert budget_ms == 7
        self.num_promotes += 1
        return 0

    def add_request(self, prompt: list[int], params: Any) -> str:
        assert params.ignore_eos
        name = f"request {len(self.sent)}"
        self.left[name] = params.max_new_tokens
        self.sent.append((self.clock.now(), name))
        return name

    @property
    def has_unfinished(self) -> bool:
        return bool(self.left)

    def step(self) -> list[Any]:
        self.clock.at_s += 1
        names = list(self.left)
        phase, bucket = (Phase.PREFILL, None) if len(names) > 1 else (Phase.DECODE, 1)
        self.runtime.counters.add("steps", scope=Scope(phase=phase, bucket=bucket))
        self.left = {name: left - 1 for name, left in self.left.items() if left > 1}
        return [SimpleNamespace(request_id=name, new_token_ids=(1,)) for name in names]


def timed(*requests: tuple[float, int]) -> list[TimedRequest]:
    return [TimedRequest(arrival_s=at, prompt=[1], max_new_tokens=count) for at, count in requests]


def test_requests_are_sent_when_they_arrive_whether_or_not_the_engine_is_free() -> None:
    clock = FakeClock()
    engine = FakeEngine(clock)
    fed = feeder.Feeder(engine, clock)
    clock.at_s = 1.25  # the engine was being built; the first request waits since 0.5
    fed.feed(timed((10.0, 1), (0.5, 2), (2.0, 2)))
    # The second one comes inside the first step and is sent after it. Then nobody is there until 10.
    assert engine.sent == [(1.25, "request 0"), (2.25, "request 1"), (pytest.approx(10.0), "request 2")]
    assert [(step.at_s, step.seconds, step.phase, step.bucket, step.num_tokens) for step in fed.steps] == [
        (2.25, 1.0, "decode", 1, 1),
        (3.25, 1.0, "prefill", None, 2),
        (4.25, 1.0, "decode", 1, 1),
        (pytest.approx(11.0), pytest.approx(1.0), "decode", 1, 1),
    ]
    assert fed.first_answer_s == 2.25
    assert fed.first_token_s == pytest.approx({"request 0": 1.75, "request 1": 1.25, "request 2": 1.0})
    # Idle time is where promotions find a boundary, too.
    assert engine.num_promotes == len(clock.waited) > 100
    assert max(clock.waited) <= feeder.IDLE_S
    fed.send_at_once([[1], [2]], 1)
    assert [step.num_tokens for step in fed.steps[4:]] == [2]


def test_the_wall_clock_counts_from_its_making() -> None:
    clock = feeder.WallClock()
    before = clock.now()
    clock.wait(0.001)
    assert 0 <= before < clock.now()


# ---- what is measured


@pytest.mark.parametrize(
    ("count", "percent", "expected"), [(1, 50, 1), (4, 50, 2), (100, 50, 50), (100, 99, 99), (101, 99, 100), (3, 99, 3)]
)
def test_percentiles_are_values_that_came(count: int, percent: float, expected: int) -> None:
    values = [float(value) for value in range(1, count + 1)]
    random.shuffle(values)
    assert percentile(values, percent) == expected
    assert percentile([], percent) is None


def step(at_s: float, seconds: float, num_tokens: int = 1) -> feeder.StepRecord:
    return feeder.StepRecord(at_s=at_s, seconds=seconds, phase="decode", bucket=4, num_tokens=num_tokens)


def event(at_s: float, kind: str, *, in_step: bool = False, **detail: Any) -> Event:
    scope = Scope(phase=Phase.DECODE, bucket=4, in_step=in_step)
    return Event(at_s=at_s, kind=kind, seconds=0.25, scope=scope, detail=detail)


def run_of(events: list[Event], *steps: feeder.StepRecord, num_steady: int = 1) -> dict[str, Any]:
    fed = SimpleNamespace(steps=list(steps), first_token_s={"a": 3.0, "b": 5.0}, first_answer_s=4.0)
    return measures(
        Run(
            ready_s=2.0,
            served_s=40.0,
            settled=True,
            feeder=fed,
            num_steps_before_steady=len(steps) - num_steady,
            events=events_as_data(events, offset_s=1.0),
        )
    )


def test_numbers_come_of_steps_and_events() -> None:
    events = [
        event(0.5, "compile_general"),  # at 1.5, before ready at 2
        event(0.75, "capture"),
        event(3.0, "compile_specialized", in_step=True),
        event(3.5, "capture", in_step=True),
        event(6.0, "capture", piece=Path("x")),
        event(9.0, "promote", to="general"),
        event(50.0, "entry"),  # changes nothing
    ]
    steps = [
        step(4.0, 2.0),
        step(6.0, 0.5, 3),
        step(8.0, 0.25, 2),
        step(30.0, 0.75, 4),
        step(45.0, 9.0),
        step(46.0, 0.125),
    ]
    result = run_of(events, *steps)
    assert (result["ready_s"], result["settled_s"], result["settled"]) == (2.0, 10.0, True)
    assert (result["first_token_s"], result["worst_first_token_s"]) == (4.0, 5.0)
    assert result["worst_step_s"] == 2.0  # 9.0 was after the trace
    assert (result["ramp_p50_s"], result["ramp_p99_s"]) == (0.5, 2.0)
    assert result["steady_step_s"] == 0.125
    assert result["tokens_by_s"] == {"5": 1, "10": 6, "30": 10, "60": 10}
    assert (result["compiles_before_ready"], result["in_step_compiles"]) == (1, 1)
    assert (result["in_step_captures"], result["in_boundary_captures"]) == (1, 1)
    assert json.loads(json.dumps(result["events"]))[4]["detail"] == {"piece": "x"}
    assert [each["at_s"] for each in result["steps"]] == [4.0, 6.0, 8.0, 30.0, 45.0, 46.0]


def test_a_policy_that_was_at_its_best_when_ready_has_no_ramp() -> None:
    result = run_of([event(0.5, "compile_general")], step(4.0, 0.5))
    assert (result["settled_s"], result["ramp_p50_s"], result["ramp_p99_s"]) == (2.0, None, None)


def test_a_worker_knows_whether_its_caches_are_cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "measure", lambda spec, *, cold: {"cold": cold})
    spec: dict[str, Any] = {
        "model_dir": "",
        "config": {},
        "dtype": None,
        "device": None,
        "trace": [],
        "steady": [],
        "steady_new_tokens": 2,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 1,
    }
    (tmp_path / fresh.SPEC).write_text(json.dumps(spec))
    (tmp_path / fresh.CACHES / "inductor" / "ab").mkdir(parents=True)
    results = []
    for _ in range(2):
        assert worker.main(tmp_path) == 0
        results.append(json.loads((tmp_path / fresh.RESULT).read_text())["cold"])
        (tmp_path / fresh.CACHES / "inductor" / "ab" / "kernel.so").touch()
    assert results == [True, False]


@pytest.mark.slow
def test_eager_compiles_before_ready_lazy_inside_steps_and_tiered_in_neither(
    model: Path, temporary: Path, tmp_path: Path
) -> None:
    files = {name: tmp_path / f"startup.{name}" for name in ("json", "html", "trace")}
    words = ["--model", model, "--cuda-graph-tc-compiler", "aot_eager", "--duration", 3]
    words += [word for name, file in files.items() for word in (f"--{name}", file)]
    code, out, err = run(*words, "--cuda-graph-bs-prefill", 4, 16, "--cuda-graph-bs-decode", 1, 4)
    assert (code, "Traceback" in err) == (0, False), err
    results = json.loads(files["json"].read_text())
    eager, lazy, tiered = results
    # Three layers, so 3 distinct pieces. The general program, and programs for 1, 4 and 16 tokens: a bucket that both
    # phases have is compiled once.
    num_compiles = 3 + 3 * 3
    assert (eager["policy"], eager["compiles_before_ready"], eager["in_step_compiles"]) == ("eager", num_compiles, 0)
    assert (lazy["policy"], lazy["compiles_before_ready"], lazy["in_step_compiles"]) == ("lazy", 0, num_compiles)
    assert (tiered["policy"], tiered["compiles_before_ready"], tiered["in_step_compiles"]) == ("tiered", 0, 0)
    for result in results:
        assert result.keys() >= KEYS
        assert (result["cold"], result["captures"], result["counters"]["fallbacks"]) == (True, 0, {})
        assert result["settled"]
        assert 0 < result["ready_s"] < result["first_token_s"] <= result["served_s"]
        assert 0 < result["steady_step_s"] <= max(step["seconds"] for step in result["steps"])
        assert result["peak_bytes"] > 100e6  # torch alone takes more
        met = [(entry["phase"], entry["bucket"]) for entry in result["entries"] if entry["steps"]]
        assert met == [("decode", 1), ("decode", 4), ("prefill", 4), ("prefill", 16)]
        assert {entry["program"] for entry in result["entries"] if entry["steps"]} == {"specialized"}
        served = sum(step["num_tokens"] for step in result["steps"] if step["at_s"] <= result["served_s"])
        assert served == results[0]["conditions"]["num_trace_tokens"]
    assert (eager["settled_s"], eager["in_step_seconds"], eager["promotions"]) == (eager["ready_s"], 0, 0)
    assert lazy["settled_s"] >= lazy["first_token_s"]
    assert lazy["in_step_seconds"] > 0
    assert tiered["in_step_seconds"] == 0
    assert tiered["promotions"] == sum(event["kind"] == "promote" for event in tiered["events"]) > 0
    assert not any(event["in_step"] for event in tiered["events"] if event["kind"].startswith(("trace", "compile")))
    assert [result["conditions"]["config"].pop("startup") for result in results] == ["eager", "lazy", "tiered"]
    casts = [result["conditions"]["config"].pop("emulate_precision_casts") for result in results]
    assert casts == [False, False, True], "what a policy decides where nobody has said"
    assert eager["conditions"] == lazy["conditions"] == tiered["conditions"]
    assert eager["conditions"]["model"]["path"] == str(model)
    assert out == report.table(json.loads(files["json"].read_text())) + "\n"
    assert files["html"].read_text().count("<svg viewBox") >= 3
    processes = [e for e in json.loads(files["trace"].read_text())["traceEvents"] if e["name"] == "process_name"]
    assert [process["args"]["name"] for process in processes] == ["eager", "lazy", "tiered"]
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
def test_eager_captures_before_ready_lazy_inside_steps_and_tiered_between_them(
    model: Path, temporary: Path, tmp_path: Path
) -> None:
    file = tmp_path / "startup.json"
    words = ["--model", model, "--duration", 2, "--json", file, "--cuda-graph-tc-compiler", "aot_eager"]
    words += ["--capture-device", "tape", "--cuda-graph-bs-prefill", 16, "--cuda-graph-bs-decode", 1, 4]
    code, _, err = run(*words)
    assert (code, "Traceback" in err) == (0, False), err
    captures = {
        result["policy"]: (result["captures"], result["in_step_captures"], result["in_boundary_captures"])
        for result in json.loads(file.read_text())
    }
    num_captures, in_steps, at_boundaries = captures.pop("tiered")
    assert captures == {"eager": (3, 0, 0), "lazy": (3, 3, 0)}
    # The eager forward of a bucket of decode, then each program that took its place.
    assert (in_steps, at_boundaries) == (0, num_captures)
    assert num_captures >= 3 + 2
    assert list(temporary.iterdir()) == []


def test_a_warm_run_follows_a_cold_one_over_its_caches_and_no_others(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = []

    def run_worker(folder: str, environment: dict[str, str], output: Any) -> int:
        caches = [Path(environment[name]) for name in fresh.CACHE_VARIABLES]
        assert all(cache.is_dir() and cache.is_relative_to(folder) for cache in caches)
        folders.append(folder)
        code = worker.main(Path(folder))
        (caches[0] / "kernel.so").touch()
        return code

    monkeypatch.setattr(worker, "measure", lambda spec, *, cold: {"startup": spec.config["startup"], "cold": cold})
    monkeypatch.setattr(fresh, "_run_worker", run_worker)
    about: dict[str, Any] = {
        "model_dir": "",
        "dtype": None,
        "device": None,
        "trace": [],
        "steady": [],
        "steady_new_tokens": 2,
    }
    spec = fresh.WorkerSpec(**about, config={}, max_num_seqs=1, max_num_batched_tokens=1)
    results = startup.compare(spec, [Startup.EAGER, Startup.LAZY], warm=True)
    assert [(result["startup"], result["cold"]) for result in results] == [
        ("eager", True),
        ("eager", False),
        ("lazy", True),
        ("lazy", False),
    ]
    assert folders[0] == folders[1] != folders[2] == folders[3]
    assert [result["cold"] for result in startup.compare(spec, [Startup.LAZY])] == [True]
    assert list(temporary.iterdir()) == []


# ---- what is printed

RESULT: dict[str, Any] = {
    "policy": "eager",
    "cold": True,
    "ready_s": 41.26,
    "first_token_s": 41.5,
    "worst_first_token_s": 41.1,
    "settled_s": 41.26,
    "settled": True,
    "served_s": 44.0,
    "worst_step_s": 0.0331,
    "ramp_p50_s": None,
    "ramp_p99_s": None,
    "steady_step_s": 0.0014,
    "tokens_by_s": {"5": 0, "10": 0, "30": 0, "60": 400},
    "promotions": 0,
    "in_step_compiles": 0,
    "compiles_before_ready": 15,
    "captures": 0,
    "in_step_captures": 0,
    "in_boundary_captures": 0,
    "pool_bytes": 0,
    "peak_bytes": 523_000_000,
    "counters": {"fallbacks": {}},
    "conditions": {
        "torch": "2.13.0",
        "python": "3.11.7",
        "device": "cpu, 2 threads",
        "model": {
            "architecture": "LlamaForCausalLM",
            "num_layers": 3,
            "hidden_size": 64,
            "dtype": "float32",
        },
        "config": {phase: {"backend": "disabled", "compiler": "inductor"} for phase in ("prefill", "decode")},
        "buckets": {"prefill": [16, 64], "decode": [1, 4]},
        "num_requests": 45,
        "last_arrival_s": 29.6,
    },
    "steps": [{"at_s": 41.5, "seconds": 0.0331, "phase": "prefill", "bucket": 16, "num_tokens": 1}],
    "events": [],
}
OTHER = RESULT | {
    "policy": "lazy",
    "ready_s": 0.0152,
    "first_token_s": 18.1,
    "worst_first_token_s": 18.1,
    "settled_s": 44.0,
    "settled": False,
    "worst_step_s": 18.0,
    "ramp_p50_s": 0.0014,
    "ramp_p99_s": 18.0,
    "tokens_by_s": {"5": 0, "10": 0, "30": 250, "60": 400},
    "in_step_compiles": 15,
    "compiles_before_ready": 0,
    "counters": {"fallbacks": {"above the ladder": 2}},
}


def test_the_table_says_which_number_is_better() -> None:
    assert report.table([RESULT, OTHER]) == (
        "Startup policies: each in a fresh process, cold caches, the same 45 requests, arriving over 30 s\n"
        "LlamaForCausalLM, 3 layers, hidden size 64, float32; inductor; buckets: prefill 16 64, decode 1 4\n"
        "cpu, 2 threads; torch 2.13.0, Python 3.11.7\n"
        "\n"
        "                           eager     lazy\n"
        "ready                      41.3 s    15 ms *        less is better\n"
        "first token                41.5 s    18.1 s *       less is better\n"
        "worst time to first token  41.1 s    18.1 s *       less is better\n"
        "every bucket at its best   41.3 s *  not by 44.0 s  less is better\n"
        "longest step               33 ms *   18.0 s         less is better\n"
        "step until settled, p50    -         1.4 ms *       less is better\n"
        "step until settled, p99    -         18.0 s *       less is better\n"
        "steady step (median)       1.4 ms    1.4 ms         less is better\n"
        "tokens served by 5 s       0         0              more is better\n"
        "tokens served by 10 s      0         0              more is better\n"
        "tokens served by 30 s      0         250 *          more is better\n"
        "tokens served by 60 s      400       400            more is better\n"
        "compiles inside steps      0 *       15             less is better\n"
        "compiles before ready      15        0 *            less is better\n"
        "promotions                 0         0\n"
        "captures                   0         0\n"
        "peak memory                523 MB    523 MB         less is better\n"
        "\n"
        "* the best of the row\n"
        "lazy: fallback x2: above the ladder"
    )
    warm = report.table([RESULT, RESULT | {"cold": False}])
    assert "cold and warm caches" in warm
    assert re.search("eager +eager, warm\n", warm)
    assert "*" not in report.table([RESULT]).partition("\n* the best")[0]


def test_the_table_says_what_was_captured_if_anything_was() -> None:
    conditions = RESULT["conditions"]
    config = conditions["config"] | {"decode": {"backend": "full", "compiler": "inductor"}}
    captured = RESULT | {"captures": 2, "pool_bytes": 3_000_000, "conditions": conditions | {"config": config}}
    text = report.table([captured, captured | {"policy": "lazy", "in_step_captures": 2}])
    assert "; buckets: prefill 16 64, decode 1 4; captured: decode full\n" in text
    assert (
        "captures                   2       2\n"
        "captures inside steps      0 *     2       less is better\n"
        "captures between steps     0       0\n"
        "pool of the captures       3 MB    3 MB\n"
    ) in text


def test_json_goes_to_stdout_or_to_a_file(monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path) -> None:
    monkeypatch.setattr(startup, "compare", lambda spec, policies, warm: [RESULT, OTHER])
    monkeypatch.chdir(tmp_path)
    words = ["--model", model]
    code, out, err = run(*words)
    assert (code, out) == (0, report.table([RESULT, OTHER]) + "\n")
    for stdout in (["--json"], ["--json", "-"]):
        code, out, err = run(*words, *stdout)
        assert [result["policy"] for result in json.loads(out)] == ["eager", "lazy"]
        assert (code, err) == (0, report.table([RESULT, OTHER]) + "\n")
    code, table, _ = run(*words, "--json", "out.json")
    assert (code, table, (tmp_path / "out.json").read_text()) == (0, err, out)
    assert run(*words, "--html", "out.html", "--trace", "out.trace")[0] == 0
    assert "<h2>lazy</h2>" in (tmp_path / "out.html").read_text()
    assert len(json.loads((tmp_path / "out.trace").read_text())["traceEvents"]) > 6


# ---- the flags


def config_of(*words: str) -> GraphConfig:
    parser = argparse.ArgumentParser()
    startup.add_arguments(parser)
    return startup._config(parser.parse_args(words))


def test_the_default_is_inductor_with_every_bucket_of_a_small_ladder() -> None:
    config = config_of()
    assert [config.phase(phase).compiler for phase in Phase] == ["inductor"] * 2
    assert [config.phase(phase).specialize for phase in Phase] == ["all"] * 2
    assert [config.phase(phase).buckets for phase in Phase] == [(16, 64), (1, 4)]


def test_flags_change_the_default_and_json_replaces_it() -> None:
    config = config_of("--cuda-graph-bs-decode", "2", "--cuda-graph-max-bs-prefill", "32")
    assert (config.prefill.buckets, config.prefill.max_num_tokens) == (None, 32)
    assert (config.decode.buckets, config.decode.specialize, config.decode.compiler) == ((2,), "all", "inductor")
    config = config_of("--cuda-graph-specialize-decode", "1", "--cuda-graph-tc-compiler", "aot_eager")
    assert (config.decode.specialize, config.prefill.specialize, config.decode.compiler) == ((1,), "all", "aot_eager")
    json_config = {"decode": {"compiler": "aot_eager"}}
    config = config_of("--cuda-graph-config", json.dumps(json_config), "--cuda-graph-bs-decode", "2")
    assert config == GraphConfig(decode={"compiler": "aot_eager", "buckets": (2,)})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--policies", "tierd"],
            "--policies: expected one of eager, lazy, tiered, got 'tierd'; did you mean 'tiered'?",
        ),
        (
            ["--policies", "lazy,lazy"],
            "--policies: expected each policy once, got 'lazy,lazy'; write it like eager,lazy",
        ),
        (["--policies", ","], "--policies: expected each policy once, got ','"),
        (["--startup", "lazy"], "--startup: expected no policy here, got lazy; name it in --policies"),
        (["--duration", "0"], "--duration: expected a number above 0, got 0; raise it"),
        (["--duration", "nan"], "--duration: expected a number above 0, got nan; raise it"),
        (["--rate", "-1"], "--rate: expected a number above 0, got -1; raise it"),
        (["--html", "no/such/folder/file"], "--html: expected a file that can be written to, got 'no/such/folder/fil"),
        (["--trace", "/"], "--trace: expected a file that can be written to, got '/'; name another"),
        (["--max-new-tokens", "1"], "--max-new-tokens: expected 2 or more, got 1; raise it"),
        (
            ["--max-new-tokens", "256"],
            "--max-new-tokens: expected less than the model's context of 256, got 256; lower",
        ),
        (
            ["--json", "no/such/folder/file"],
            "--json: expected a file that can be written to, got 'no/such/folder/file'",
        ),
        (["--json", "/"], "--json: expected a file that can be written to, got '/'; name another"),
        (
            ["--cuda-graph-bs-decode", "128"],
            "decode.buckets: 128 requests have more than 64 prompt tokens, which is the",
        ),
        (["--cuda-graph-bs-decode", "0"], "decode.buckets: expected positive integers, got 0"),
        (
            ["--enable-torch-compile"],
            "enable_torch_compile: expected a phase with backend full, which captures a whole forward, got",
        ),
        (["--model", "nowhere"], "model: expected a directory with config.json, .* nowhere does not exist"),
    ],
)
@pytest.mark.usefixtures("no_process")
def test_a_bad_flag_is_refused_before_anything_is_started(
    model: Path, temporary: Path, words: list[str], message: str
) -> None:
    code, out, err = run(*([] if "--model" in words else ["--model", model]), *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert re.match(f"piecework: error: {message}", err), err
    assert list(temporary.iterdir()) == []


# ---- processes that end early


@pytest.fixture
def own_model(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "model"))


def test_a_worker_that_fails_shows_why(own_model: Path, temporary: Path, tmp_path: Path) -> None:
    weights = own_model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    code, out, err = run("--model", own_model, "--json", tmp_path / "startup.json")
    assert (code, out) == (2, "")
    lines = [line for line in err.splitlines() if "bench startup: eager" not in line]
    assert lines[0].startswith(f"piecework: error: {weights}: not a whole safetensors file, ")
    assert lines[1:] == [
        "piecework: error: bench: the process of policy eager ended with exit code 2; its output is above: correct "
        "what it says and run again"
    ]
    assert not (tmp_path / "startup.json").exists()
    assert list(temporary.iterdir()) == []


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def processes_with(text: str) -> list[str]:
    """The ids of the running processes whose command line has `text`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if text.encode() in path.read_bytes():
                found.append(path.parent.name)
    return found


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_an_end_by_signal_leaves_nothing(model: Path, temporary: Path, number: int, code: int) -> None:
    words = [sys.executable, "-m", "piecework", "bench", "startup", "--device", "cpu", "--model", str(model)]
    # A shell makes what it runs in the background ignore SIGINT, and whoever that starts inherits it.
    heard = functools.partial(signal.signal, number, signal.SIG_DFL)
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heard)
    try:
        wait_until(lambda: len(processes_with(f"{temporary}/piecework-bench-")) == 1)
        time.sleep(0.5)  # until the parent knows of the process, too
        os.kill(process.pid, number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, out, "Traceback" in err) == (code, "", False)
    assert list(temporary.iterdir()) == []
    assert processes_with(str(temporary)) == []
