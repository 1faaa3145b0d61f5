"""`piecework prewarm`: what a manifest says will come is built, and what is not is reported with its reason."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import piecework as pw
from piecework.errors import CompileError, ConfigError
from piecework.phases import GraphConfig, Phase, PhaseConfig, Startup
from piecework.runtime import prewarm as prewarm_module
from piecework.runtime.manifest import BucketRecord, Manifest, PhaseRecord, model_id
from piecework.runtime.manifest_keeper import manifest_of
from piecework.runtime.prewarm import load_manifest, prewarm, prewarming_config

PREFILL, DECODE = Phase.PREFILL, Phase.DECODE


def recorded(runtime: Any, decode: dict[int, int], prefill: dict[int, int] | None = None, **kwargs: Any) -> Manifest:
    """A manifest of a runtime's model: steps by bucket."""
    phases = {
        phase: PhaseRecord(
            buckets={bucket: BucketRecord(steps=steps) for bucket, steps in buckets.items()},
            missed=kwargs.pop("missed", {}) if phase is DECODE else {},
        )
        for phase, buckets in ((PREFILL, prefill or {}), (DECODE, decode))
    }
    return Manifest(model=model_id(runtime.model, runtime.config), phases=phases, runs=1, **kwargs)


def make(kit: Any, config: GraphConfig | None = None, **kwargs: Any) -> pw.Runtime:
    runtime: pw.Runtime = kit.runtime(kit.Toy(), config, example_inputs=kit.inputs(4), **kwargs)
    return runtime


def built(report: Any) -> list[tuple[str, int]]:
    return [(each.phase, each.bucket) for each in report.covered]


def reasons(report: Any) -> dict[str, str]:
    return {each.what: each.reason for each in report.uncovered}


def test_recorded_buckets_are_built_the_most_frequent_first(kit: Any) -> None:
    """2 layers: 3 distinct pieces of the general program, 3 of each specialised one; decode 2 never came."""
    runtime = make(kit, kit.config("aot_eager", decode={"specialize": "all"}))
    manifest = recorded(runtime, {2: 0, 4: 3, 8: 9}, {16: 5})
    with runtime.counters.expect(traces=1, compiles_general=3, compiles_specialized=6, steps=0, captures=0):
        report = prewarm(runtime, manifest, path="m.json")
    assert built(report) == [("decode", 8), ("prefill", 16), ("decode", 4)]
    assert [(each.steps, each.program, each.captured) for each in report.covered] == [
        (9, "specialized", False),
        (5, "general", False),
        (3, "specialized", False),
    ]
    assert report.uncovered == ()
    assert {(e.phase, e.bucket) for e in runtime.entries} >= {(DECODE, 8), (DECODE, 4), (PREFILL, 16)}
    assert (DECODE, 2) not in {(e.phase, e.bucket) for e in runtime.entries}
    # What came is built: the steps of a server find it.
    with runtime.counters.expect(traces=0, compiles_general=0, compiles_specialized=0):
        for num_tokens in (3, 7):
            assert kit.step(runtime, "decode", num_tokens) < 1e-5


def test_captures_are_reported(kit: Any) -> None:
    config = GraphConfig(
        decode=PhaseConfig(backend="breakable", buckets=(2, 4)),
        prefill=PhaseConfig(backend="disabled"),
        capture_device="tape",
    )
    runtime = make(kit, config, example_context=kit.context(0))
    report = prewarm(runtime, recorded(runtime, {4: 2}, {16: 1}), path="m.json")
    assert [(each.bucket, each.program, each.captured) for each in report.covered] == [(4, "eager", True)]
    assert reasons(report) == {"prefill 16": "this phase runs the eager forward, uncaptured: there is nothing to build"}
    text = str(report)
    assert text.startswith("covered 1, not covered 1, in ")
    assert "decode 4  2      eager    yes" in text
    assert "not covered: prefill 16, 1 times: this phase runs the eager forward" in text
    assert text.endswith("nothing is kept: only compiler inductor leaves files, and captures live in their process")
    runtime.close()


def test_a_bucket_that_cannot_be_captured_is_not_covered(kit: Any) -> None:
    """The toy's split op does not say that a whole forward may capture it."""
    config = GraphConfig(decode=PhaseConfig(backend="full", buckets=(2, 4)), capture_device="tape")
    runtime = make(kit, config, example_context=kit.context(0))
    report = prewarm(runtime, recorded(runtime, {4: 2}), path="m.json")
    assert (report.covered, reasons(report)) == ((), {"decode 4": "it was built, and could not be captured"})
    runtime.close()


def test_what_is_not_covered_says_why(kit: Any) -> None:
    runtime = make(kit)
    jit = {
        ("inductor", "decode 4 general", "input_ids: int64[tokens]"): 3,
        ("inductor", "decode 2 specialized", ""): 1,
        ("triton", "a_kernel", "x: *bf16"): 2,
    }
    manifest = recorded(runtime, {4: 2, 3: 1}, missed={300: 6, 5: 2, None: 4}, jit=jit)
    report = prewarm(runtime, manifest, path="m.json")
    assert built(report) == [("decode", 4)]
    assert report.jit_covered == ("inductor: decode 4 general (input_ids: int64[tokens])",)
    above = "above the ladder, which ends at 8: it runs unpadded, uncaptured; add a bucket for it"
    assert reasons(report) == {
        "decode 3": "no bucket of the ladder 2, 4, 8 any more",
        "decode, 300 tokens": above,
        "decode, 5 tokens": "no bucket took it when it came: its padding was too much, or the ladder was another one",
        "decode, other sizes": above,
        "inductor: decode 2 specialized": "nothing here needed it",
        "triton: a_kernel (x: *bf16)": "nothing here needed it",
    }
    assert [each.count for each in report.uncovered] == [1, 6, 2, 4, 1, 2]
    assert json.loads(json.dumps(report.as_dict()))["uncovered"][0]["what"] == "decode 3"
    # The general program for what lies above the ladder is there.
    with runtime.counters.expect(traces=0, compiles_general=0):
        kit.step(runtime, "decode", 30)


def test_a_kernel_that_compiles_now_is_covered(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = make(kit)
    seen = {("triton", "a_kernel", "x: *bf16"): 0, ("triton", "b_kernel", "x: *fp16"): 1}

    class Watch:
        """Saw two kernels, one of them from the cache on disk."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.seen = seen

        def start(self) -> None:
            pass

        stop = start

    monkeypatch.setattr(prewarm_module, "JitWatch", Watch)
    jit = {("triton", "a_kernel", "x: *bf16"): 1, ("triton", "b_kernel", "x: *bf16"): 1}
    report = prewarm(runtime, recorded(runtime, {4: 1}, jit=jit), path="m.json")
    assert report.jit_covered == ("triton: a_kernel (x: *bf16)",)
    assert reasons(report) == {"triton: b_kernel (x: *bf16)": "it was compiled for other shapes or dtypes"}


def test_a_budget_ends_it(kit: Any) -> None:
    runtime = make(kit)
    now = iter(range(100))
    report = prewarm(
        runtime, recorded(runtime, {2: 3, 4: 2, 8: 1}), path="m.json", budget_s=3.0, clock=lambda: float(next(now))
    )
    # Read at the start (0), before the first bucket (1), around it (2, 3) and before the second (4).
    assert built(report) == [("decode", 2)]
    assert reasons(report) == {"decode 4": "the startup budget was spent", "decode 8": "the startup budget was spent"}


def test_a_bucket_that_fails_costs_that_bucket(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = make(kit)
    warm_up = runtime.warm_up

    def fails(phase: Phase, *, buckets: tuple[int, ...]) -> None:
        if buckets == (4,):
            raise CompileError("compiler aot_eager: failed on a piece\nand more")
        warm_up(phase, buckets=buckets)

    monkeypatch.setattr(runtime, "warm_up", fails)
    report = prewarm(runtime, recorded(runtime, {4: 3, 8: 2}), path="m.json")
    assert built(report) == [("decode", 8)]
    assert reasons(report) == {"decode 4": "CompileError: compiler aot_eager: failed on a piece"}


def test_a_bucket_that_ends_up_eager_is_not_covered(kit: Any) -> None:
    class Branchy(kit.Toy):  # type: ignore[misc]
        """Needs a trace for each bucket, one more than there may be."""

        def forward(self, input_ids: Any, positions: Any) -> Any:
            y = super().forward(input_ids, positions)
            for limit in (4, 8, 12, 16):
                if input_ids.shape[0] > limit:
                    y = y + limit
            return y

    runtime = kit.runtime(
        Branchy(num_layers=1),
        kit.config().with_phase("decode", buckets=(4, 8, 12, 16, 20)),
        example_inputs=kit.inputs(4),
    )
    report = prewarm(runtime, recorded(runtime, {4: 5, 8: 4, 12: 3, 16: 2, 20: 1}), path="m.json")
    eager = {entry.bucket for entry in runtime.entries if entry.bucket and entry.program.kind == "eager"}
    assert eager
    assert {bucket for _, bucket in built(report)} == {4, 8, 12, 16, 20} - eager
    assert {reason[:27] for reason in reasons(report).values()} == {"the eager forward runs ther"}


def test_a_manifest_of_another_model_is_an_error(kit: Any) -> None:
    runtime = make(kit)
    other = make(kit, kit.config("eager"))
    with pytest.raises(ConfigError) as caught:
        prewarm(runtime, recorded(other, {4: 1}), path="m.json")
    assert str(caught.value) == (
        "--manifest: expected a manifest of this model, got 'm.json': it is of another model: a class, a tensor's "
        "name, shape or dtype, a compiler or a backend differs; name the file that a server with --manifest wrote"
    )
    assert runtime.entries == ()


def test_a_manifest_of_another_ladder_is_none(kit: Any) -> None:
    first = kit.runtime(kit.Toy())
    for num_tokens in (2, 2, 8):
        kit.step(first, "decode", num_tokens)
    manifest = manifest_of(first, model_id(first.model, first.config))
    runtime = make(kit, kit.config().with_phase("decode", buckets=(4, 8)))
    report = prewarm(runtime, manifest, path="m.json")
    assert built(report) == [("decode", 8)]
    assert reasons(report) == {"decode 2": "no bucket of the ladder 4, 8 any more"}


def test_the_config_of_a_prewarm_serves_nothing_and_writes_no_manifest() -> None:
    given = GraphConfig(
        decode=PhaseConfig(compiler="inductor", startup="tiered"),
        startup="eager",
        manifest="m.json",
        startup_budget=9,
        evaluate_guards=False,
    )
    made = GraphConfig(decode=PhaseConfig(compiler="inductor"), startup=Startup.LAZY, emulate_precision_casts=True)
    assert prewarming_config(given) == made, "what a tiered server makes, which rounds as eager code does"
    guarded = GraphConfig(startup="eager", prefill={"startup": "lazy"}, decode={"startup": "eager"})
    assert prewarming_config(guarded) == GraphConfig(emulate_precision_casts=False)
    said = GraphConfig(startup="tiered", emulate_precision_casts=False)
    assert prewarming_config(said).emulate_precision_casts is False


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (None, "--manifest: expected a file, 'PATH' does not exist; name the file that a server with --manifest wrote"),
        ("{", "--manifest: expected a manifest that can be used, got 'PATH': it is no JSON, or only a part of it: "),
        ('{"format": 7}', "--manifest: expected a manifest that can be used, got 'PATH': its format is 7, and this "),
    ],
)
def test_here_a_bad_file_is_an_error(tmp_path: Path, content: str | None, error: str) -> None:
    path = tmp_path / "m.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_manifest(str(path))
    assert str(caught.value).startswith(error.replace("PATH", str(path)))
    assert str(caught.value).endswith("; name the file that a server with --manifest wrote")


def test_a_directory_or_nothing_is_an_error_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="got '.*': it is no regular file; name"):
        load_manifest(str(tmp_path))
    with pytest.raises(ConfigError, match="--manifest: expected the file that says what will come, got none; name"):
        load_manifest(None)


def test_the_report_says_where_artifacts_are(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor really compiles: what it leaves is in the directory that the report names."""
    runtime = make(kit, kit.config("inductor"))
    manifest = recorded(runtime, {4: 1}, jit={("inductor", "decode 4 general", ""): 1})
    report = prewarm(runtime, manifest, path="m.json")
    directory = os.environ["TORCHINDUCTOR_CACHE_DIR"]
    assert report.kept_in == (
        f"compiled artifacts are in {directory} (TORCHINDUCTOR_CACHE_DIR); start the server with the same setting. "
        "Captures live in their process"
    )
    assert any(files for _, _, files in os.walk(directory))
    assert report.jit_covered == ("inductor: decode 4 general",)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    assert prewarm(runtime, manifest, path="m.json").kept_in.startswith(
        "compiled artifacts are in Inductor's own cache directory; TORCHINDUCTOR_CACHE_DIR names another; start"
    )
