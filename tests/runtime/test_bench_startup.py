"""`piecework bench startup`: the requests, the fresh processes, what is measured, and what is left behind."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import os
import re
import shutil
import signal
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
from piecework.phases import BucketLadder, GraphConfig, Phase
from piecework.runtime import cli
from piecework.runtime.bench import fresh, report, startup, worker
from piecework.runtime.bench.traffic import make_traffic
from piecework.runtime.engine.toy_checkpoint import make_checkpoint
from piecework.runtime.events import Counters

KEYS = (
    "policy cold ready_s first_token_s settled_s worst_step_s in_step_compiles compiles_before_ready captures "
    "in_step_captures pool_bytes peak_bytes"
).split()


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


@given(
    prefill=st.sets(st.integers(1, 200), min_size=1, max_size=4),
    decode=st.sets(st.integers(1, 40), min_size=1, max_size=4),
    max_prompt_tokens=st.integers(1, 64),
    seed=st.integers(0, 9),
)
def test_traffic_meets_every_bucket_in_every_round(
    prefill: set[int], decode: set[int], max_prompt_tokens: int, seed: int
) -> None:
    ladders = BucketLadder(sorted(prefill)), BucketLadder(sorted(decode))
    arguments: dict[str, Any] = {
        "vocab_size": 7,
        "max_prompt_tokens": max_prompt_tokens,
        "num_rounds": 2,
        "seed": seed,
    }
    if ladders[1].max > ladders[0].max:
        with pytest.raises(ConfigError, match="decode.buckets: .* add .* to prefill.buckets, or lower decode.buckets"):
            make_traffic(*ladders, **arguments)
        return
    rounds = make_traffic(*ladders, **arguments)
    assert rounds == make_traffic(*ladders, **arguments)
    assert len(rounds) == 2
    for batches in rounds:
        num_tokens = [sum(map(len, batch)) for batch in batches]
        num_prompts = [len(batch) for batch in batches]
        for ladder, sizes in zip(ladders, (num_tokens, num_prompts), strict=True):
            assert set(ladder) <= set(sizes)  # each bucket exactly,
            for below, bucket in zip((0, *ladder), ladder, strict=False):  # and a size between, where there is one
                assert bucket == below + 1 or any(below < size < bucket for size in sizes)
        assert max(num_tokens) <= ladders[0].max
        prompts = [prompt for batch in batches for prompt in batch]
        assert all(0 < len(prompt) <= max_prompt_tokens for prompt in prompts)
        assert {token for prompt in prompts for token in prompt} <= set(range(7))


def test_traffic_is_unequal_and_seeded() -> None:
    ladders = BucketLadder((16, 64)), BucketLadder((1, 4))
    first, second = (
        make_traffic(*ladders, vocab_size=512, max_prompt_tokens=250, num_rounds=3, seed=seed) for seed in (0, 1)
    )
    assert first != second
    assert first[0] != first[1]
    lengths = [[len(prompt) for prompt in batch] for batches in first for batch in batches if len(batch) > 1]
    assert sum(len(set(each)) > 1 for each in lengths) > len(lengths) // 2


# ---- what is measured


def test_step_times_follow_the_counters(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(worker, "time", SimpleNamespace(perf_counter=lambda: now))
    counters = Counters()
    times = worker.StepTimes(SimpleNamespace(counters=counters), started=97.0)
    assert (times.settled_s, times.first_token_s, times.step_s) == (3.0, None, [])
    now = 110.0
    times.send()
    now = 114.0
    counters.add("steps")
    counters.add("compiles_general", 3)
    times.on_output(0, None)
    now = 115.0
    times.on_output(1, None)  # the same step
    assert (times.settled_s, times.first_token_s, times.step_s) == (17.0, 17.0, [4.0])
    now = 117.0
    counters.add("steps")
    times.on_output(0, None)
    assert (times.settled_s, times.first_token_s, times.step_s) == (17.0, 17.0, [4.0, 2.0])
    now = 120.0
    counters.add("steps")
    counters.add("promotions")
    times.on_output(0, None)
    assert (times.settled_s, times.first_token_s, times.step_s) == (23.0, 17.0, [4.0, 2.0, 3.0])


def test_a_worker_knows_whether_its_caches_are_cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "measure", lambda spec, *, cold: {"cold": cold})
    spec: dict[str, Any] = {
        "model_dir": "",
        "config": {},
        "dtype": None,
        "device": None,
        "rounds": [],
        "max_new_tokens": 2,
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
def test_eager_compiles_before_ready_and_lazy_inside_steps(model: Path, temporary: Path, tmp_path: Path) -> None:
    file = tmp_path / "startup.json"
    words = ["--model", model, "--cuda-graph-tc-compiler", "aot_eager", "--rounds", 2, "--json", file]
    code, out, err = run(*words, "--cuda-graph-bs-prefill", 4, 16, "--cuda-graph-bs-decode", 1, 4)
    assert (code, "Traceback" in err) == (0, False)
    eager, lazy = json.loads(file.read_text())
    # Three layers, so 3 distinct pieces. The general program, and programs for 1, 4 and 16 tokens: a bucket that both
    # phases have is compiled once.
    num_compiles = 3 + 3 * 3
    assert (eager["policy"], eager["compiles_before_ready"], eager["in_step_compiles"]) == ("eager", num_compiles, 0)
    assert (lazy["policy"], lazy["compiles_before_ready"], lazy["in_step_compiles"]) == ("lazy", 0, num_compiles)
    for result in (eager, lazy):
        assert set(KEYS) <= set(result)
        assert (result["cold"], result["captures"], result["counters"]["fallbacks"]) == (True, 0, {})
        assert 0 < result["ready_s"] < result["first_token_s"]
        assert 0 < result["steady_step_s"] <= result["worst_step_s"]
        assert result["peak_bytes"] > 100e6  # torch alone takes more
        met = [(entry["phase"], entry["bucket"]) for entry in result["entries"] if entry["steps"]]
        assert met == [("decode", 1), ("decode", 4), ("prefill", 4), ("prefill", 16)]
        assert {entry["program"] for entry in result["entries"] if entry["steps"]} == {"specialized"}
    assert (eager["settled_s"], eager["in_step_seconds"]) == (eager["ready_s"], 0)
    assert lazy["settled_s"] >= lazy["first_token_s"]
    assert lazy["in_step_seconds"] > 0
    # The same requests in the same number of steps.
    assert eager["counters"]["steps"] == lazy["counters"]["steps"]
    assert eager["conditions"].pop("config").pop("startup") == "eager"
    assert lazy["conditions"].pop("config").pop("startup") == "lazy"
    assert eager["conditions"] == lazy["conditions"]
    assert eager["conditions"]["model"]["path"] == str(model)
    assert out == report.table(json.loads(file.read_text())) + "\n"
    assert list(temporary.iterdir()) == []


# ---- what is printed

RESULT: dict[str, Any] = {
    "policy": "eager",
    "cold": True,
    "ready_s": 41.26,
    "first_token_s": 41.5,
    "settled_s": 41.26,
    "worst_step_s": 0.0331,
    "steady_step_s": 0.0014,
    "in_step_compiles": 0,
    "compiles_before_ready": 15,
    "captures": 0,
    "in_step_captures": 0,
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
    },
}
OTHER = RESULT | {
    "policy": "lazy",
    "ready_s": 0.0152,
    "first_token_s": 18.1,
    "settled_s": 44.0,
    "worst_step_s": 18.0,
    "in_step_compiles": 15,
    "compiles_before_ready": 0,
    "counters": {"fallbacks": {"above the ladder": 2}},
}


def test_the_table_says_which_number_is_better() -> None:
    assert report.table([RESULT, OTHER]) == (
        "Startup policies: each in a fresh process, cold caches, the same 45 requests\n"
        "LlamaForCausalLM, 3 layers, hidden size 64, float32; inductor; buckets: prefill 16 64, decode 1 4\n"
        "cpu, 2 threads; torch 2.13.0, Python 3.11.7\n"
        "\n"
        "                          eager     lazy\n"
        "ready                     41.3 s    15 ms *   less is better\n"
        "first token               41.5 s    18.1 s *  less is better\n"
        "every bucket at its best  41.3 s *  44.0 s    less is better\n"
        "longest step              33 ms *   18.0 s    less is better\n"
        "steady step (median)      1.4 ms    1.4 ms    less is better\n"
        "compiles inside steps     0 *       15        less is better\n"
        "compiles before ready     15        0 *       less is better\n"
        "captures                  0         0\n"
        "peak memory               523 MB    523 MB    less is better\n"
        "\n"
        "* the best of the row\n"
        "lazy: fallback x2: above the ladder"
    )
    assert "*" not in report.table([RESULT]).partition("\n* the best")[0]


def test_the_table_says_what_was_captured_if_anything_was() -> None:
    conditions = RESULT["conditions"]
    config = conditions["config"] | {"decode": {"backend": "full", "compiler": "inductor"}}
    captured = RESULT | {"captures": 2, "pool_bytes": 3_000_000, "conditions": conditions | {"config": config}}
    text = report.table([captured, captured | {"policy": "lazy", "in_step_captures": 2}])
    assert "; buckets: prefill 16 64, decode 1 4; captured: decode full\n" in text
    assert (
        "captures                  2       2\n"
        "captures inside steps     0 *     2       less is better\n"
        "pool of the captures      3 MB    3 MB\n"
    ) in text


def test_json_goes_to_stdout_or_to_a_file(monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path) -> None:
    monkeypatch.setattr(startup, "compare", lambda spec, policies: [RESULT, OTHER])
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
        (["--policies", "eager,tiered"], "startup: tiered is not available in this build; allowed now: eager, lazy"),
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
        (["--rounds", "0"], "--rounds: expected 1 or more, got 0; raise it"),
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
        (["--enable-torch-compile"], "enable_torch_compile: true is not available in this build"),
        (
            ["--cuda-graph-bs-prefill", "64", "8192", "16384"],
            r"prefill.buckets: expected buckets that a step of at most 8192 tokens \(max_num_batched_tokens\) can take"
            ", got 16384 above 8192",
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
