"""The command line: what the commands print, and that every bad input is a few lines and exit code 2."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from piecework import __version__
from piecework.errors import PieceworkError
from piecework.phases import GraphConfig, Phase
from piecework.runtime import cli, console
from piecework.runtime.engine.engine import LLMEngine
from piecework.runtime.engine.params import SamplingParams
from piecework.runtime.engine.toy_checkpoint import make_checkpoint
from piecework.runtime.manifest import BucketRecord, Manifest, PhaseRecord, model_id

PROMPTS = ["Once upon a time", "The river"]
NUM_LAYERS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that must not be changed."""
    return make_checkpoint(tmp_path_factory.mktemp("cli"), num_layers=NUM_LAYERS)


@pytest.fixture
def own_model(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "model"))


def run(*words: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command in this process; always on the CPU where there is a choice."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main([str(word) for word in words])
        except SystemExit as exited:
            code = int(exited.code or 0)
    return code, out.getvalue(), err.getvalue()


def start(*words: object, **options: Any) -> subprocess.Popen[str]:
    """The same in a process of its own."""
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *map(str, words)], **streams | options)


def other_than_progress(err: str) -> list[str]:
    """The lines of stderr that do not tell of work that took over a second."""
    return [line for line in err.splitlines() if not re.fullmatch(r"piecework: .* (\.\.\.|done in [\d.]+ s)", line)]


# ---- generate


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_generate_prints_what_the_engine_answers(model: Path, compiler: str) -> None:
    with LLMEngine(model, GraphConfig(), device="cpu") as engine:
        expected = engine.generate(PROMPTS, SamplingParams(max_new_tokens=5))
    words = ["generate", "--model", model, "--prompt", PROMPTS[0], "--prompt", PROMPTS[1], "--max-new-tokens", 5]
    words += ["--device", "cpu", "--cuda-graph-tc-compiler", compiler]
    text = "\n".join(
        f"prompt: {prompt}\ntext:   {console.printable(output.text)}\n"
        for prompt, output in zip(PROMPTS, expected, strict=True)
    )
    for stream in ([], ["--stream"]):
        code, out, err = run(*words, *stream)
        assert (code, other_than_progress(err)) == (0, [])
        assert out == text
    code, out, err = run(*words, "--json")
    answer = json.loads(out)
    assert (code, other_than_progress(err), answer["model"]) == (0, [], str(model))
    assert answer["results"] == [
        {
            "request_id": f"request-{i}",
            "prompt": prompt,
            "prompt_token_ids": list(output.prompt_token_ids),
            "token_ids": list(output.token_ids),
            "text": output.text,
            "logprobs": None,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "num_preemptions": 0,
        }
        for i, (prompt, output) in enumerate(zip(PROMPTS, expected, strict=True))
    ]
    # A prefill and four decode steps; only a compiler needs a trace.
    assert (answer["counters"]["steps"], answer["counters"]["traces"]) == (5, int(compiler != "eager"))


def test_generate_streams_in_the_order_of_the_prompts(model: Path) -> None:
    writes: list[str] = []

    class Recorded(io.StringIO):
        def flush(self) -> None:
            writes.append(self.getvalue())

    with contextlib.redirect_stdout(Recorded()):
        words = ["generate", "--model", str(model), "--device", "cpu", "--stream", "--max-new-tokens", "6"]
        words += ["--prompt", PROMPTS[0], "--prompt", PROMPTS[1], "--seed", "5", "--temperature", "1"]
        assert cli.main(words) == 0
    steps = list(dict.fromkeys(writes))
    # The first answer grows step by step. The second one grew beside it, so it is there almost at once.
    assert [PROMPTS[1] in text for text in steps][-3:] == [False, True, True]
    assert len(steps) > 4
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(steps))
    assert steps[0].startswith(f"prompt: {PROMPTS[0]}\ntext:   ")
    assert f"\n\nprompt: {PROMPTS[1]}\ntext:   " in steps[-1]


def test_generate_samples_stops_and_gives_logprobs(model: Path) -> None:
    sampling: dict[str, Any] = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "seed": 3, "max_new_tokens": 9}
    with LLMEngine(model, GraphConfig(), device="cpu") as engine:
        [plain] = engine.generate(PROMPTS[:1], SamplingParams(**sampling))
        stop = plain.text[4:6]
        params = SamplingParams(**sampling, stop=["no such text", stop], logprobs=2)
        [expected] = engine.generate(PROMPTS[:1], params)
    assert expected.finish_reason == "stop"
    words: list[object] = ["generate", "--model", model, "--device", "cpu", "--prompt", PROMPTS[0], "--logprobs", 2]
    words += [word for name, value in sampling.items() for word in ("--" + name.replace("_", "-"), value)]
    words += ["--stop", "no such text", "--stop", stop, "--max-num-seqs", 1, "--max-num-batched-tokens", 3]
    code, out, _ = run(*words, "--json")
    answer = json.loads(out)
    [result] = answer["results"]
    assert (code, result["token_ids"], result["text"]) == (0, list(expected.token_ids), expected.text)
    assert (result["finish_reason"], result["stop_reason"]) == ("stop", stop)
    assert answer["counters"]["steps"] > len(result["token_ids"])  # the prompt came in chunks of three
    assert [token["token_id"] for token in result["logprobs"]] == result["token_ids"]
    assert expected.logprobs is not None
    for got, wanted in zip(result["logprobs"], expected.logprobs, strict=True):
        assert got["logprob"] == pytest.approx(wanted.logprob, abs=1e-4)
        assert [token for token, _ in got["top"]] == [token for token, _ in wanted.top]
    code, out, _ = run(*words)
    text, _, table = out.partition("\n\nlog-probabilities: Once upon a time\n")
    assert (code, text) == (0, f"prompt: {PROMPTS[0]}\ntext:   {console.printable(expected.text)}")
    assert len(table.splitlines()) == len(expected.token_ids)
    assert f" {expected.logprobs[0].logprob:.4f};  " in table.splitlines()[0]


def test_without_a_model_it_takes_the_one_of_the_package(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("piecework.runtime.engine.default_model.path", lambda: model)
    code, out, _ = run("generate", "--prompt", PROMPTS[0], "--device", "cpu", "--json")
    assert (code, json.loads(out)["model"]) == (0, str(model))
    code, out, _ = run(
        "explain", "--device", "cpu", "--cuda-graph-tc-compiler", "aot_eager", "--cuda-graph-bs-prefill", 8
    )
    assert code == 0
    assert f"{NUM_LAYERS + 1} pieces (3 distinct)" in out


def test_generate_takes_the_launch_flags_and_explains_on_stderr(model: Path) -> None:
    words = ["generate", "--model", model, "--prompt", PROMPTS[0], "--device", "cpu", "--json", "--explain"]
    config = {"decode": {"compiler": "aot_eager", "buckets": [4], "specialize": "all"}}
    code, out, err = run(*words, "--cuda-graph-config", json.dumps(config), "--cuda-graph-bs-decode", 2, 8)
    counters = json.loads(out)["counters"]
    assert code == 0
    # One general program and one for the decode bucket 2; prefill is eager.
    assert (counters["compiles_general"], counters["compiles_specialized"]) == (3, 3)
    assert "decode: backend disabled, compiler aot_eager, 2 buckets 2 to 8" in err
    assert "specialize names the bucket" in err


def test_generate_takes_dtype_and_cache_size(model: Path) -> None:
    words = ["generate", "--model", model, "--device", "cpu", "--prompt", PROMPTS[0], "--max-new-tokens", 100, "--json"]
    code, out, _ = run(*words, "--dtype", "bfloat16", "--max-model-len", 12, "--num-blocks", 3, "--block-size", 4)
    [result] = json.loads(out)["results"]
    assert code == 0
    assert len(result["prompt_token_ids"]) + len(result["token_ids"]) == 12


def test_a_fallback_is_one_line_on_stderr(model: Path) -> None:
    words = ["generate", "--model", model, "--device", "cpu", "--prompt", PROMPTS[0]]
    code, _, err = run(*words, "--cuda-graph-bs-prefill", 1)
    assert (code, err) == (0, "")  # the eager forward has no ladder
    code, _, err = run(*words, "--cuda-graph-bs-prefill", 1, "--cuda-graph-tc-compiler", "aot_eager")
    told = "piecework: above the ladder (phase: prefill, last_bucket: 1)"
    assert (code, other_than_progress(err)) == (0, [told])
    logger = logging.getLogger("piecework")
    assert (logger.handlers, logger.propagate) == ([], True)


def test_text_that_the_terminal_cannot_show_is_escaped() -> None:
    assert console.printable("a\x1b[31m b\n\u200b é \\") == "a\\x1b[31m b\\n\\u200b é \\"


def test_output_in_another_encoding(model: Path) -> None:
    process = start(
        *("-m", "piecework", "generate", "--model", model, "--prompt", "Ω", "--device", "cpu"),
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    assert out.startswith("prompt: \\u03a9\n")


@pytest.mark.parametrize("backend", ["full", "breakable", "tc_piecewise"])
def test_generate_and_explain_show_what_was_captured(model: Path, backend: str) -> None:
    words = ["--model", model, "--device", "cpu", "--capture-device", "tape", "--max-num-seqs", 1, "--json"]
    words += ["--max-num-batched-tokens", 16, "--cuda-graph-max-captures", 9, "--cuda-graph-memory-budget", "1GiB"]
    for phase in ("prefill", "decode"):
        words += [f"--cuda-graph-backend-{phase}", backend]
    code, out, _ = run("generate", *words, "--prompt", PROMPTS[0], "--max-new-tokens", 3)
    answer = json.loads(out)
    assert (code, answer["counters"]["captures"], answer["counters"]["replays"]) == (0, 2, 1)
    assert {entry["phase"]: entry["captured"] for entry in answer["entries"]} == {"prefill": True, "decode": True}
    code, out, _ = run("explain", *words)
    explained = json.loads(out)
    assert code == 0
    captured = [(entry["phase"], entry["bucket"]) for entry in explained["entries"] if entry["captured"]]
    assert captured == [("decode", 1), ("prefill", 16)]  # the default ladders, cut at the largest steps
    assert explained["memory"]["pool_bytes"] >= max(entry["bytes"] for entry in explained["entries"]) > 0
    assert explained["counters"]["captures"] == 2


# ---- ops and explain


def test_ops_without_a_model_says_not_traced() -> None:
    out, err = start("-m", "piecework", "ops").communicate()
    assert err == ""
    packed, paged, rotary, attention, *fused = out.split("\n\n")
    assert rotary.startswith("piecework::rotary_paged_attention.default\n")
    assert packed.startswith("piecework::packed_attention.default\n")
    [name, schema, mutates, capture, defined, matched] = paged.splitlines()
    assert name == "piecework::paged_attention.default"
    assert schema.startswith("  schema   piecework::paged_attention(Tensor q, ")
    assert mutates == "  mutates  k_cache, v_cache, out"
    assert capture.startswith("  capture  ")
    assert "ops/attention.py:" in defined
    assert matched == "  matched  not traced"
    answer = json.loads(start("-m", "piecework.runtime.cli", "ops", "--json").communicate()[0])
    assert (answer["traced"], answer["never_matched"]) == (False, None)
    assert [op["num_matched"] for op in answer["split_ops"]] == [None, None, None]
    assert answer["split_ops"][0]["name"] == "piecework::packed_attention"
    assert [op["capturable"] for op in answer["split_ops"]] == [None, None, None]  # it depends on the call
    names = [op["name"] for op in answer["fused_ops"]]
    assert {"linear", "rms_norm", "rotary_embedding", "sample", "silu_and_mul"} < set(names)
    assert [text.splitlines()[0].split(", ")[0] for text in fused] == [f"fused op {name}" for name in names]
    rows = [row for op in answer["fused_ops"] for row in op["implementations"]]
    assert {row["name"] for row in rows} >= {"native", "torch", "triton"}
    assert {row["rejected"] for row in rows if row["device_types"] == ["cuda"]} == {"runs on cuda, not on cpu"}
    assert attention.startswith("attention in bfloat16, 32 heads over 8 of 128 elements\n")
    rows = answer["attention"]["implementations"]
    assert [row["name"] for row in rows] == ["triton", "flashinfer", "torch_native", "torch_static"]
    assert [row["decision"]["decode"]["chosen"] for row in rows] == [False, False, True, False]


def test_ops_says_what_packages_are_missing() -> None:
    """On the machine of these tests neither package is installed; that is no error, and torch finds no GPU."""
    if any(find_spec(package) for package in ("flashinfer", "sgl_kernel")):
        pytest.skip("one of the packages is installed")
    words = ["-m", "piecework", "ops", "--device", "cuda", "--json"]
    out, err = start(*words).communicate()
    assert err == ""
    answer = json.loads(out)
    rows = [row for op in answer["fused_ops"] for row in op["implementations"]]
    missing = {row["name"]: row["rejected"] for row in rows if (row["rejected"] or "").startswith("not installed")}
    missing.pop("triton", None)
    assert missing == {
        "flashinfer": "not installed: pip install flashinfer-python",
        "sgl_kernel": "not installed: pip install sglang-kernel",
    }
    decision = next(r["decision"] for r in answer["attention"]["implementations"] if r["name"] == "flashinfer")
    assert decision["prefill"]["reason"] == "not installed: pip install flashinfer-python"
    out, err = start(*words, "--kernel-backend", "sgl_kernel").communicate()
    assert err.startswith(
        "piecework: error: kernel_backend: expected one with a kernel that runs on cuda, got sgl_kernel"
    )
    assert err.count("not installed: pip install sglang-kernel") >= 1


def test_ops_without_a_model_answers_for_the_dtype_that_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ops", "--device", "cuda", "--dtype", "float32", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["attention"]["cases"]["decode"]["dtype"] == "float32"
    rows = [row for op in answer["fused_ops"] if op["name"] == "linear" for row in op["implementations"]]
    assert [row["rejected"] for row in rows if row["name"] == "triton"] == ["serves bfloat16, float16, not float32"]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--dtype", "int8"], "dtype: expected auto or one of float32, "),
        (["--device", "CUDA"], "device: expected cpu, cuda or cuda:N, got 'CUDA'; use one of these"),
    ],
)
def test_ops_refuses_what_no_model_could_have(flags: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ops", *flags]) == 2
    assert text in capsys.readouterr().err


WITH_ANOTHER_OP = """
import sys, torch, piecework as pw
from piecework.runtime.cli import main

@pw.split_op(mutates_args=("out",))
def nobody_calls_me(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x)

raise SystemExit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("flags", [[], ["--cuda-graph-specialize-decode", "all", "--startup", "eager"]])
def test_ops_with_a_model_counts_matches_and_reports_an_op_that_never_matched(model: Path, flags: list[str]) -> None:
    words = ["-c", WITH_ANOTHER_OP, "ops", "--model", model, "--device", "cpu", *flags]
    out, err = start(*words).communicate()
    assert "Traceback" not in err
    assert out.count(f"  matched  {NUM_LAYERS} graph nodes") == 1
    assert out.count("  matched  0 graph nodes") == 3
    never = ["main::nobody_calls_me", "piecework::packed_attention", "piecework::paged_attention"]
    assert out.endswith(f"\nnever matched: {', '.join(never)} (this model's graph does not call them)\n")
    answer = json.loads(start(*words, "--json").communicate()[0])
    assert (answer["traced"], answer["never_matched"]) == (True, never)
    assert {op["name"]: op["num_matched"] for op in answer["split_ops"]} == {
        "main::nobody_calls_me": 0,
        "piecework::packed_attention": 0,
        "piecework::paged_attention": 0,
        "piecework::rotary_paged_attention": NUM_LAYERS,
    }
    config, case = json.loads((model / "config.json").read_text()), answer["attention"]["cases"]["decode"]
    assert (case["num_heads"], case["num_kv_heads"]) == (config["num_attention_heads"], config["num_key_value_heads"])
    assert (case["dtype"], case["block_size"]) == ("float32", 16)
    assert "\nattention in float32, " in out


def test_explain_warms_up_and_dumps(model: Path, tmp_path: Path) -> None:
    words = ["explain", "--model", model, "--device", "cpu", "--cuda-graph-tc-compiler", "aot_eager"]
    words += ["--cuda-graph-bs-prefill", 16, "--cuda-graph-bs-decode", 1, 4, "--cuda-graph-specialize-decode", 4]
    code, out, err = run(*words, "--dump", tmp_path / "dump", "--json")
    answer = json.loads(out)
    assert (code, "Traceback" in err) == (0, False)
    assert answer["dump"] == str(tmp_path / "dump" / "program.py")
    assert "stitched" in Path(answer["dump"]).read_text()
    assert [(e["phase"], e["bucket"], e["program"], e["steps"]) for e in answer["entries"]] == [
        ("decode", 1, "general", 0),
        ("decode", 4, "specialized", 0),
        ("decode", None, "general", 0),  # what lies above the ladder
        ("prefill", 16, "general", 0),
        ("prefill", None, "general", 0),
    ]
    code, out, _ = run(*words, "--dump", tmp_path / "again")
    assert code == 0
    assert f"{NUM_LAYERS + 1} pieces (3 distinct), {NUM_LAYERS} opaque regions" in out
    assert out.endswith(f"dump: {tmp_path / 'again' / 'program.py'}\n")


# ---- prewarm


PREWARM = ["prewarm", "--device", "cpu", "--cuda-graph-tc-compiler", "aot_eager", "--cuda-graph-bs-decode", 1, 4]
PREWARM += ["--cuda-graph-bs-prefill", 16]


@pytest.fixture
def manifest(model: Path, tmp_path: Path) -> Path:
    """What a server of this model met: three requests at once for a while, and one size above the ladder."""
    phase = {"compiler": "aot_eager"}
    config = GraphConfig(decode={**phase, "buckets": (1, 4)}, prefill={**phase, "buckets": (16,)})
    with LLMEngine(model, config, device="cpu") as engine:
        identity = model_id(engine.runtime.model, engine.runtime.config)
    phases = {
        Phase.DECODE: PhaseRecord(buckets={4: BucketRecord(steps=20)}, missed={9: 2}),
        Phase.PREFILL: PhaseRecord(buckets={16: BucketRecord(steps=5)}),
    }
    path = tmp_path / "manifest.json"
    Manifest(model=identity, phases=phases, runs=1).write(path)
    return path


def test_prewarm_builds_what_came_and_says_what_it_did_not(model: Path, manifest: Path) -> None:
    before = manifest.read_bytes()
    words = [*PREWARM, "--model", model, "--manifest", manifest, "--cuda-graph-specialize-decode", "all"]
    code, out, err = run(*words, "--startup", "eager", "--json")
    answer = json.loads(out)
    assert (code, other_than_progress(err)) == (0, [])
    assert (answer["model"], answer["manifest"]) == (str(model), str(manifest))
    covered = [(c["phase"], c["bucket"], c["steps"], c["program"], c["captured"]) for c in answer["covered"]]
    assert covered == [("decode", 4, 20, "specialized", False), ("prefill", 16, 5, "general", False)]
    assert [(each["what"], each["count"]) for each in answer["uncovered"]] == [("decode, 9 tokens", 2)]
    code, out, err = run(*words)
    assert (code, other_than_progress(err)) == (0, [])
    lines = out.splitlines()
    assert lines[0].startswith("covered 2, not covered 1, in ")
    assert lines[2].startswith("decode 4    20     specialized  no")
    assert lines[4].startswith("not covered: decode, 9 tokens, 2 times: above the ladder, which ends at 4")
    assert lines[5] == "nothing is kept: only compiler inductor leaves files, and captures live in their process"
    assert manifest.read_bytes() == before  # what a prewarm does is no traffic


def test_prewarm_that_covers_nothing_exits_with_1(model: Path, manifest: Path) -> None:
    words = ["prewarm", "--device", "cpu", "--model", model, "--manifest", manifest, "--json"]
    words += ["--cuda-graph-tc-compiler", "aot_eager", "--cuda-graph-bs-decode", 2, "--cuda-graph-bs-prefill", 32]
    code, out, err = run(*words)
    answer = json.loads(out)
    assert (code, other_than_progress(err), answer["covered"]) == (1, [], [])
    assert {each["what"]: each["reason"] for each in answer["uncovered"]} == {
        "decode 4": "no bucket of the ladder 2 any more",
        "prefill 16": "no bucket of the ladder 32 any more",
        "decode, 9 tokens": "above the ladder, which ends at 2: it runs unpadded, uncaptured; add a bucket for it",
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--manifest: expected the file that says what will come, got none; name the file that a server with"),
        (["--manifest", "absent"], "--manifest: expected a file, 'absent' does not exist; name the file that"),
        (
            ["--manifest", "."],
            r"--manifest: expected a manifest .*, got '\.': it is no regular file; name",
        ),
        (["--manifest", "FILE", "--startup-budget", "-1"], "startup_budget: expected a number of seconds, 0 or more"),
        (["--manifest", "FILE", "--cuda-graph-tc-compiler", "eager"], "got '.*': it is of another model: a class, a"),
    ],
)
def test_a_bad_prewarm_is_a_short_error(model: Path, manifest: Path, words: list[str], message: str) -> None:
    words = [str(manifest) if word == "FILE" else word for word in words]
    assert_refused([*PREWARM, "--model", model, *words], message)


def test_prewarm_refuses_a_manifest_that_was_cut_off(model: Path, manifest: Path) -> None:
    manifest.write_bytes(manifest.read_bytes()[:100])
    message = "--manifest: expected a manifest that can be used, got '.*': it is no JSON, or only a part of it: "
    assert_refused([*PREWARM, "--model", model, "--manifest", manifest], message)


# ---- help and the process


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["--version"],
        ["generate", "--help"],
        ["bench", "startup", "--help"],
        ["prewarm", "--help"],
        ["explain", "--hlep"],
        [],
    ],
)
def test_help_and_wrong_flags_load_no_torch(words: list[str]) -> None:
    code = f"""
import sys
from piecework.runtime.cli import main
try:
    main({words!r})
except SystemExit as exited:
    heavy = [name for name in ("torch", "numpy", "transformers", "rich") if name in sys.modules]
    assert not heavy, heavy
    raise
"""
    process = start("-c", code)
    out, err = process.communicate()
    helps = "--help" in words or "--version" in words
    assert process.returncode == (0 if helps else 2), err
    assert (out if helps else err).startswith("piecework " if "--version" in words else "usage: piecework")


def test_every_command_has_help_with_its_flags() -> None:
    for words in (["generate"], ["ops"], ["explain"], ["bench", "startup"], ["prewarm"]):
        code, out, err = run(*words, "--help")
        assert (code, err) == (0, "")
        assert "--json" in out
        assert "--cuda-graph-bs-decode" in out


def test_top_level_help_is_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    assert run("--help")[1] == (
        "usage: piecework [-h] [--version] COMMAND ...\n"
        "\n"
        "Compiles a PyTorch model piece by piece.\n"
        "\n"
        "options:\n"
        "  -h, --help  show this help message and exit\n"
        "  --version   show program's version number and exit\n"
        "\n"
        "commands:\n"
        "  COMMAND\n"
        "    generate  continue prompts with a checkpoint\n"
        "    bench     measure\n"
        "    ops       list the split ops and fused ops; with --model, also how many nodes of its graph a split op\n"
        "              matched\n"
        "    explain   warm up every bucket, then say what runs for each and why\n"
        "    prewarm   build ahead of time what --manifest says will come, and serve nothing; --startup-budget limits\n"
        "              the seconds\n"
    )
    assert run("--version") == (0, f"piecework {__version__}\n", "")


@pytest.mark.parametrize("words", [["--help"], ["ops", "--json"]])
def test_a_reader_that_went_away_is_no_error(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    # Unbuffered, argparse itself swallows the error of --help.
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = start("-m", "piecework", *words, stdout=writer, env=buffered)
    os.close(writer)
    assert process.communicate()[1] == ""
    assert process.returncode == 141


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    def raises(error: BaseException) -> Callable[[], int]:
        def run() -> int:
            raise error

        return run

    assert console.exit_code(lambda: 7) == 7
    assert console.exit_code(raises(KeyboardInterrupt())) == 130
    assert capsys.readouterr() == ("", "piecework: interrupted\n")
    assert console.exit_code(raises(PieceworkError("a: b; c"))) == 2
    assert capsys.readouterr() == ("", "piecework: error: a: b; c\n")
    with pytest.raises(ZeroDivisionError):  # a mistake of ours keeps its traceback
        console.exit_code(raises(ZeroDivisionError()))


# ---- bad input


def change_config(model: Path, **changes: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(model: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = model / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path)


def truncate(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (shutil.rmtree, "model: expected a directory with config.json, .* does not exist; pass the directory"),
        (truncate, r"model\.safetensors: not a whole safetensors file, .*; it may be truncated, so download it again"),
        (lambda d: change_weights(d, lambda w: w.pop(NORM)), "\n  1 missing: model.norm.weight"),
        (
            lambda d: change_weights(d, lambda w: w.update(left_over=w[NORM].clone())),
            "\n  1 not of this model: left_over",
        ),
        (
            lambda d: change_weights(d, lambda w: w.update({NORM: w[NORM][:5].clone()})),
            r"\n  1 of another shape: model.norm.weight \(expected \[64\], got \[5\]\)",
        ),
        (
            lambda d: change_config(d, architectures=["BertModel"]),
            "architectures: expected one of LlamaForCausalLM, .*, got BertModel; .* use a checkpoint of a supported",
        ),
        (lambda d: (d / "config.json").write_text("{"), r"config\.json: not readable as JSON .*; download this file"),
        (lambda d: (d / "tokenizer.json").unlink(), r"tokenizer\.json: the file is missing; download"),
    ],
)
@pytest.mark.parametrize("command", [["generate", "--prompt", "fine"], ["explain"], ["ops"]])
def test_a_bad_checkpoint_is_a_short_error(
    own_model: Path, command: list[str], spoil: Callable[[Path], object], message: str
) -> None:
    spoil(own_model)
    assert_refused([*command, "--model", own_model, "--device", "cpu"], message)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--prompt", ""], "prompt 0: expected one token or more, got an empty prompt; write something there"),
        (["--prompt", "word " * 300], r"prompt 0: expected at most 255 tokens, .* got \d+; shorten the prompt"),
        (
            ["--prompt", "\udcff"],
            r"prompt 0: expected text in the terminal's encoding, got '\\udcff'; write it in UTF-8",
        ),
        (["--max-new-tokens", "0"], "max_new_tokens: expected 1 or more, got 0"),
        (["--temperature", "-1"], "temperature: expected 0 or more, got -1.0; use a number in this range"),
        (["--top-k", "-1"], "top_k: expected 0 or more, got -1"),
        (["--top-p", "0"], "top_p: expected more than 0 and at most 1, got 0.0"),
        (["--seed", "-1"], "seed: expected 0 to"),
        (["--stop", ""], "stop: expected texts of one character or more, got ''"),
        (["--logprobs", "513"], "logprobs: expected at most the model's vocab_size 512, got 513; lower it"),
        (["--stream", "--json"], "--stream: expected one of --stream and --json, got both; leave one out"),
        (["--max-num-seqs", "0"], "max_num_seqs: expected a positive integer, got 0"),
        (
            ["--max-num-seqs", "4", "--max-num-batched-tokens", "3"],
            "max_num_batched_tokens: expected at least max_num_seqs 4, since each running request needs a token a step",
        ),
        (["--dtype", "int8"], "dtype: expected auto or one of float32, .*, got 'int8'"),
        (["--device", "abacus"], "device: expected cpu, cuda or cuda:N, got 'abacus'"),
        (["--num-blocks", "0"], "num_blocks: expected a positive integer, got 0"),
        (
            ["--max-model-len", "300"],
            "max_model_len: expected at most the model's max_position_embeddings 256, got 300",
        ),
        (
            ["--cuda-graph-bs-decode", "0", "4"],
            "decode.buckets: expected positive integers, got 0; remove or correct it",
        ),
        (["--cuda-graph-bs-decode", "-4"], "decode.buckets: expected positive integers, got -4"),
        (["--cuda-graph-bs-prefill", "8", "8"], "prefill.buckets: expected each size once, got 8 more than once; keep"),
        (["--cuda-graph-config", '{"prefil": {}}'], "prefil: expected one of the keys .*; did you mean 'prefill'?"),
        (["--cuda-graph-config", '{"decode": {"bs": [1]}}'], r"decode\.bs: expected one of the keys backend, "),
        (["--cuda-graph-config", "{"], "config: expected a JSON object"),
        (["--cuda-graph-config", "@no-such-file"], "--cuda-graph-config: expected a readable JSON file"),
        (
            ["--cuda-graph-backend-decode", "fast"],
            "decode.backend: expected one of auto, disabled, .*, got 'fast'; use",
        ),
        (
            ["--cuda-graph-backend-prefill", "breakable", "--cuda-graph-tc-compiler", "aot_eager"],
            "prefill.compiler: expected eager, since backend breakable captures the eager forward, got aot_eager; ",
        ),
        (["--capture-device", "cuda"], "capture_device: cuda needs a model on an available CUDA device, got one on "),
        (["--cuda-graph-memory-budget", "2G"], "cuda_graph_memory_budget: expected a size .*; write 2GiB or 2GB"),
        (["--cuda-graph-max-captures", "0"], "max_captures: expected a positive integer, got 0; give 1 or more"),
        (
            ["--cuda-graph-bs-decode", "1", "512", "1024"],
            r"decode.buckets: expected buckets that a step of at most 256 tokens \(max_num_seqs\) can take, got 1024",
        ),
        (["--startup", "tierd"], "startup: expected one of eager, lazy, tiered, got 'tierd'; did you mean 'tiered'"),
        (["--startup-budget", "-1"], "startup_budget: expected a number of seconds, 0 or more, got -1; use 0 for none"),
        (
            ["--promotion-budget-ms", "nan"],
            "promotion_budget_ms: expected a number of milliseconds, 0 or more",
        ),
        (["--compile-workers", "1.5"], "compile_workers: expected an integer, 0 or more, got 1.5; use 0 for none"),
        (
            ["--enable-torch-compile"],
            "enable_torch_compile: expected a phase with backend full, which captures a whole forward, got",
        ),
    ],
)
def test_a_bad_flag_is_a_short_error(model: Path, words: list[str], message: str) -> None:
    prompt = [] if "--prompt" in words else ["--prompt", "fine"]
    device = [] if "--device" in words else ["--device", "cpu"]
    assert_refused(["generate", "--model", model, *prompt, *device, *words], message)


def assert_refused(words: list[Any], message: str) -> None:
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert err.startswith("piecework: error: ")
    assert err.count("\n") <= 4
    assert re.search(message, err), err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "--model", "somewhere"], "arguments are required: --prompt"),
        (["generate", "--model", "x", "--prompt", "x", "--max-new-tokens", "x"], "invalid int value: 'x'"),
        (["cache"], "invalid choice: 'cache'"),
        (["bench"], "arguments are required: BENCHMARK"),
    ],
)
def test_argparse_refuses_what_it_cannot_read(words: list[str], message: str) -> None:
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert message in err


def test_explain_refuses_a_dump_that_cannot_be(model: Path, tmp_path: Path) -> None:
    words = ["explain", "--model", model, "--device", "cpu"]
    assert_refused(
        [*words, "--dump", tmp_path], "--dump: expected a compiler that traces, got eager in both phases; add"
    )
    (tmp_path / "file").touch()
    words += ["--cuda-graph-tc-compiler", "aot_eager", "--cuda-graph-bs-prefill", 16, "--cuda-graph-bs-decode", 1]
    code, out, err = run(*words, "--dump", tmp_path / "file")
    assert (code, out) == (2, "")
    assert "piecework: error: --dump: expected a directory that can be written to, got " in err


def test_a_bad_input_of_a_real_process(tmp_path: Path) -> None:
    process = start("-m", "piecework", "generate", "--model", tmp_path / "none", "--prompt", "x", "--device", "cpu")
    out, err = process.communicate()
    assert (process.returncode, out) == (2, "")
    assert err.splitlines() == [
        f"piecework: error: model: expected a directory with config.json, model.safetensors and tokenizer.json, but "
        f"{tmp_path / 'none'} does not exist; pass the directory of a downloaded checkpoint"
    ]
