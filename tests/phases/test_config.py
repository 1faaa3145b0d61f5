"""The configs: what they accept, how they normalise it, and the JSON form."""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import piecework.phases
from piecework.phases import Backend, BucketLadder, CaptureDevice, Compiler, GraphConfig, Phase, PhaseConfig, Startup
from piecework.phases.values import ATTENTION_BACKENDS, KERNEL_BACKENDS, MODES


@st.composite
def phase_configs(draw: st.DrawFn, phase: Phase) -> PhaseConfig:
    buckets = draw(st.none() | st.sets(st.integers(1, 9000), min_size=1, max_size=8).map(sorted))
    maximum = draw(st.none() | (st.integers(1, 20_000) if buckets is None else st.just(buckets[-1])))
    ladder = BucketLadder.default(phase, maximum) if buckets is None else BucketLadder(buckets)
    backend = draw(st.sampled_from(list(Backend)))
    return PhaseConfig(
        backend=backend,
        compiler=draw(st.just(Compiler.EAGER) if backend is Backend.BREAKABLE else st.sampled_from(list(Compiler))),
        buckets=buckets,
        max_num_tokens=maximum,
        specialize="all" if draw(st.booleans()) else sorted(draw(st.sets(st.sampled_from(list(ladder))))),
        max_padding_waste=draw(st.none() | st.floats(0, 1)),
        startup=draw(st.none() | st.sampled_from(list(Startup))),
    )


def make_config(**values: Any) -> GraphConfig:
    tiered = Startup.TIERED in [values[phase].startup or values["startup"] for phase in Phase]
    return GraphConfig(**{**values, "evaluate_guards": values["evaluate_guards"] and not tiered})


graph_configs = st.builds(
    make_config,
    prefill=phase_configs(Phase.PREFILL),
    decode=phase_configs(Phase.DECODE),
    startup=st.sampled_from(list(Startup)),
    promotion_budget_ms=st.integers(0, 1000) | st.floats(0, 1e6),
    compile_workers=st.integers(0, 64),
    compile_timeout_s=st.floats(0, 1e6),
    manifest=st.none() | st.text(min_size=1),
    startup_budget=st.floats(0, 1e6),
    emulate_precision_casts=st.none() | st.booleans(),
    capture_device=st.sampled_from(list(CaptureDevice)),
    cache_dir=st.none() | st.text(min_size=1),
    enable_torch_compile=st.booleans(),
    torch_compile_max_bs=st.none() | st.integers(1, 512),
    torch_compile_mode=st.sampled_from(MODES),
    fused_ops=st.sampled_from([(), ("all",), ("none", "+rms_norm"), ("-silu_and_mul", "all", "+rms_norm")]),
    kernel_backend=st.sampled_from([*KERNEL_BACKENDS, "mine"]),
    attention_backend=st.sampled_from(ATTENTION_BACKENDS),
    evaluate_guards=st.booleans(),
    cuda_graph_memory_budget=st.none() | st.integers(1, 1 << 50),
    max_captures=st.none() | st.integers(1, 4096),
    late_address_check=st.booleans(),
    debug_captures=st.booleans(),
)


@given(graph_configs)
def test_json_round_trip(config: GraphConfig) -> None:
    assert GraphConfig.from_json(config.to_json()) == config
    assert GraphConfig.from_json(config.as_dict()) == config
    assert json.loads(config.to_json()) == config.as_dict()


def test_what_json_does_not_name_keeps_its_default() -> None:
    config = GraphConfig.from_json('{"decode": {"buckets": [1, 2]}}')
    assert config == GraphConfig(decode=PhaseConfig(buckets=(1, 2)))
    assert GraphConfig.from_json("{}") == GraphConfig()


def test_plain_values_become_what_the_fields_declare() -> None:
    phase = PhaseConfig(backend="full", compiler="inductor", buckets=[1, 2], specialize=[2], max_padding_waste=1)
    assert phase.backend is Backend.FULL
    assert phase.compiler is Compiler.INDUCTOR
    assert phase.buckets == (1, 2)
    assert phase.specialize == (2,)
    assert isinstance(phase.max_padding_waste, float)
    config = GraphConfig(startup="eager", capture_device="tape", cache_dir=Path("a") / "b", decode={"buckets": [4]})
    assert GraphConfig(fused_ops=["none", "+rms_norm"]).fused_ops == ("none", "+rms_norm")
    assert config.startup is Startup.EAGER
    assert config.capture_device is CaptureDevice.TAPE
    assert config.cache_dir == str(Path("a") / "b")
    assert GraphConfig(manifest=Path("a") / "b").manifest == str(Path("a") / "b")
    assert GraphConfig(decode={"startup": "tiered"}).decode.startup is Startup.TIERED
    for name in ("promotion_budget_ms", "compile_timeout_s", "startup_budget"):
        assert isinstance(getattr(GraphConfig(**{name: 3}), name), float)
    assert config.phase("decode") is config.phase(Phase.DECODE) is config.decode
    assert config.decode == PhaseConfig(buckets=(4,))


@pytest.mark.parametrize("choices", [Phase, Backend, Compiler, Startup, CaptureDevice])
def test_a_choice_is_its_word(choices: type[Backend]) -> None:
    for member in choices:
        assert str(member) == f"{member}" == member.value == member
        assert hash(member) == hash(member.value)
        assert json.loads(json.dumps(member)) == member.value


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("512MiB", 512 << 20),
        ("2GiB", 2 << 30),
        ("1.5GB", 1_500_000_000),
        ("0.5 KiB", 512),
        ("1gib", 1 << 30),
        ("3Gi", 3 << 30),
        ("1TB", 10**12),
        ("2TiB", 2 << 40),
        ("100B", 100),
        ("1048576", 1 << 20),
        (1 << 20, 1 << 20),
        (None, None),
    ],
)
def test_a_memory_budget_reads_sizes(text: str | int | None, num_bytes: int | None) -> None:
    config = GraphConfig(cuda_graph_memory_budget=text)
    assert config.cuda_graph_memory_budget == num_bytes
    assert GraphConfig.from_json(json.dumps({"cuda_graph_memory_budget": text})) == config
    assert GraphConfig.from_json(config.to_json()) == config


def test_the_number_of_captures_is_capped_unless_said_otherwise() -> None:
    assert GraphConfig().max_captures == 512
    assert GraphConfig(max_captures=None).max_captures is None
    assert GraphConfig.from_json('{"max_captures": null}').max_captures is None


def test_whole_forward_compile_is_off_and_its_bound_unset_unless_said_otherwise() -> None:
    config = GraphConfig()
    assert (config.enable_torch_compile, config.torch_compile_max_bs) == (False, None)
    assert config.torch_compile_mode == "max-autotune-no-cudagraphs"
    assert GraphConfig.from_json('{"torch_compile_max_bs": null}') == config


def test_configs_are_values() -> None:
    config = GraphConfig(decode=PhaseConfig(buckets=(1, 2)))
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    assert len({config, GraphConfig(decode=PhaseConfig(buckets=[1, 2]))}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.startup = Startup.EAGER  # type: ignore[misc]
    with pytest.raises(TypeError):
        PhaseConfig("full")  # type: ignore[call-arg]


def test_with_phase_changes_one_phase() -> None:
    config = GraphConfig(prefill=PhaseConfig(buckets=(64,)))
    changed = config.with_phase("prefill", compiler="inductor")
    assert changed.prefill == PhaseConfig(buckets=(64,), compiler="inductor")
    assert changed.decode == config.decode
    assert config.prefill.compiler is Compiler.EAGER


def test_a_phase_may_have_a_startup_policy_of_its_own() -> None:
    config = GraphConfig(startup="tiered", prefill={"startup": "eager"})
    assert (config.startup_of("prefill"), config.startup_of(Phase.DECODE)) == (Startup.EAGER, Startup.TIERED)
    assert GraphConfig().startup_of("decode") is Startup.LAZY


def test_ladder_of_a_phase() -> None:
    assert PhaseConfig(buckets=(3, 9), max_num_tokens=9).ladder("prefill").buckets == (3, 9)
    assert PhaseConfig(max_num_tokens=40).ladder("prefill").buckets == (16, 24, 32, 40)
    assert PhaseConfig().ladder(Phase.DECODE) == BucketLadder.default("decode")


@pytest.mark.parametrize("config", [PhaseConfig, GraphConfig])
def test_declared_signature_names_every_field(config: type[PhaseConfig]) -> None:
    """The signature that type checkers see is written by hand under TYPE_CHECKING; it must not fall behind."""
    tree = ast.parse(inspect.getsource(config))
    (init,) = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
    assert [a.arg for a in init.args.kwonlyargs] == [f.name for f in dataclasses.fields(config)]


@pytest.mark.parametrize("config", [PhaseConfig, GraphConfig])
def test_every_field_is_documented(config: type[PhaseConfig]) -> None:
    for field in dataclasses.fields(config):
        assert len(field.metadata["doc"]) > 10


def test_all_is_what_can_be_imported() -> None:
    assert sorted(piecework.phases.__all__) == piecework.phases.__all__
    modules = {"choices", "config", "flags", "fused", "ladder", "resolve", "values"}
    public = {name for name in vars(piecework.phases) if not name.startswith("_")}
    assert public - modules == set(piecework.phases.__all__) - modules


def test_phases_load_no_torch() -> None:
    code = "import sys, piecework.phases; print({m.partition('.')[0] for m in sys.modules} & {'torch', 'numpy'})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
