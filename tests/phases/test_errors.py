"""Every invalid config is one error with one text, whether it came from Python, JSON or flags."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from piecework.errors import ConfigError
from piecework.phases import GraphConfig, Phase, PhaseConfig, add_graph_flags, graph_config_from_args
from piecework.phases.flags import FLAGS


def from_flags(*arguments: str) -> GraphConfig:
    parser = argparse.ArgumentParser()
    add_graph_flags(parser)
    return graph_config_from_args(parser.parse_args(arguments))


def as_flags(values: dict[str, Any], prefix: str = "") -> list[str]:
    """The flags that say what `values` say."""
    flag_of = {path: flag for flag, paths in FLAGS.items() for path in paths}
    words = []
    for name, value in values.items():
        if name == "fused_ops":
            words.append(f"{flag_of[name]}={','.join(value)}")
            continue
        words += [flag_of[prefix + name], *map(str, value if isinstance(value, list) else [value])]
    return words


def text_of(make: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        make()
    return str(caught.value)


# Field values of the prefill phase -> the error text behind "prefill.".
PHASE_ERRORS: list[tuple[dict[str, Any], str]] = [
    (
        {"buckets": [1024, 2048], "max_num_tokens": 4096},
        "buckets: the last bucket is 2048 but max_num_tokens is 4096; add 4096 or lower max_num_tokens",
    ),
    (
        {"buckets": [1024, 2048], "max_num_tokens": 1024},
        "buckets: the last bucket is 2048 but max_num_tokens is 1024; "
        "remove the buckets above 1024 or raise max_num_tokens",
    ),
    ({"buckets": [0]}, "buckets: expected positive integers, got 0; remove or correct it"),
    ({"buckets": [-4]}, "buckets: expected positive integers, got -4; remove or correct it"),
    ({"buckets": [4, 4]}, "buckets: expected each size once, got 4 more than once; keep one"),
    ({"buckets": [8, 4]}, "buckets: expected ascending sizes, got 4 after 8; sort the list"),
    ({"max_num_tokens": 0}, "max_num_tokens: expected a positive integer, got 0; give 1 or more"),
    (
        {"backend": "piecewise"},
        "backend: expected one of auto, disabled, full, breakable, tc_piecewise, got 'piecewise'; "
        "did you mean 'tc_piecewise'?",
    ),
    (
        {"buckets": [4, 8], "specialize": [4, 6]},
        "specialize: expected 'all' or buckets of the ladder 4, 8, got 6; remove 6 or list it in buckets",
    ),
    ({"specialize": "al"}, "specialize: expected a list of buckets or all, got 'al'; did you mean 'all'?"),
    (
        {"backend": "breakable", "compiler": "inductor"},
        "compiler: expected eager, since backend breakable captures the eager forward, got inductor; "
        "leave the compiler out, or use backend tc_piecewise",
    ),
    ({"max_padding_waste": 1.5}, "max_padding_waste: expected a share from 0 to 1, got 1.5; use 0.25 for a quarter"),
    ({"max_padding_waste": -1}, "max_padding_waste: expected a share from 0 to 1, got -1; use 0.25 for a quarter"),
    (
        {"max_padding_waste": float("nan")},
        "max_padding_waste: expected a share from 0 to 1, got nan; use 0.25 for a quarter",
    ),
    ({"startup": "tierd"}, "startup: expected one of eager, lazy, tiered, got 'tierd'; did you mean 'tiered'?"),
]
# Field values of the whole config -> the error text.
SHARED_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"startup": "lasy"}, "startup: expected one of eager, lazy, tiered, got 'lasy'; did you mean 'lazy'?"),
    (
        {"promotion_budget_ms": -1},
        "promotion_budget_ms: expected a number of milliseconds, 0 or more, got -1; use 0 for none",
    ),
    (
        {"promotion_budget_ms": float("nan")},
        "promotion_budget_ms: expected a number of milliseconds, 0 or more, got nan; use 0 for none",
    ),
    ({"compile_workers": -2}, "compile_workers: expected an integer, 0 or more, got -2; use 0 for none"),
    ({"compile_workers": 1.5}, "compile_workers: expected an integer, 0 or more, got 1.5; use 0 for none"),
    (
        {"compile_timeout_s": -0.5},
        "compile_timeout_s: expected a number of seconds, 0 or more, got -0.5; use 0 for none",
    ),
    ({"manifest": ""}, "manifest: expected the path of a file, got ''; name one or leave it out"),
    ({"startup_budget": -5}, "startup_budget: expected a number of seconds, 0 or more, got -5; use 0 for none"),
    (
        {"startup_budget": float("inf")},
        "startup_budget: expected a number of seconds, 0 or more, got inf; use 0 for none",
    ),
    ({"startup_budget": "long"}, "startup_budget: expected a number of seconds, 0 or more, got 'long'; use 0 for none"),
    ({"capture_device": "gpu"}, "capture_device: expected one of auto, cuda, tape, got 'gpu'; use one of these"),
    ({"cache_dir": ""}, "cache_dir: expected the path of a directory, got ''; name one or leave it out"),
    (
        {"cuda_graph_memory_budget": 0},
        "cuda_graph_memory_budget: expected a number of bytes or a size like 512MiB, 2GiB or 1.5GB, got 0; "
        "write one, or leave it out for no limit",
    ),
    (
        {"cuda_graph_memory_budget": "lots"},
        "cuda_graph_memory_budget: expected a number of bytes or a size like 512MiB, 2GiB or 1.5GB, got 'lots'; "
        "write one, or leave it out for no limit",
    ),
    (
        {"cuda_graph_memory_budget": "2G"},
        "cuda_graph_memory_budget: expected a size with a unit such as MiB or MB, got '2G'; write 2GiB or 2GB",
    ),
    ({"max_captures": 0}, "max_captures: expected a positive integer, got 0; give 1 or more"),
    ({"torch_compile_max_bs": 0}, "torch_compile_max_bs: expected a positive integer, got 0; give 1 or more"),
    (
        {"torch_compile_mode": "defualt"},
        "torch_compile_mode: expected one of default, max-autotune-no-cudagraphs, got 'defualt'; "
        "did you mean 'default'?",
    ),
    (
        {"torch_compile_mode": "reduce-overhead"},
        "torch_compile_mode: expected one of default, max-autotune-no-cudagraphs, got 'reduce-overhead', which makes "
        "CUDA graphs of its own, as the capture does here; use 'default'",
    ),
    (
        {"torch_compile_mode": "max-autotune"},
        "torch_compile_mode: expected one of default, max-autotune-no-cudagraphs, got 'max-autotune', which makes "
        "CUDA graphs of its own, as the capture does here; use 'max-autotune-no-cudagraphs'",
    ),
    (
        {"fused_ops": ["none", "rms_norm"]},
        "fused_ops: expected all, none, +name or -name, got 'rms_norm'; write +rms_norm or -rms_norm",
    ),
    (
        {"fused_ops": ["all", "-a-b"]},
        "fused_ops: expected all, none, +name or -name, got '-a-b'; remove or correct it",
    ),
    ({"fused_ops": ["all", ""]}, "fused_ops: expected all, none, +name or -name, got ''; remove or correct it"),
    ({"fused_ops": ["all", "none"]}, "fused_ops: expected exactly one of all and none, got all and none; keep one"),
    (
        {"fused_ops": ["+rms_norm", "-silu_and_mul"]},
        "fused_ops: expected exactly one of all and none, got only +rms_norm, -silu_and_mul; "
        "add none to name what takes a kernel, or all to name what does not",
    ),
    ({"fused_ops": ["none", "none"]}, "fused_ops: expected each item once, got none more than once; keep one"),
    ({"fused_ops": ["all", "-a", "-a"]}, "fused_ops: expected each item once, got -a more than once; keep one"),
    ({"fused_ops": ["all", "-a", "+a"]}, "fused_ops: expected one sign for a, got +a and -a; keep one"),
    (
        {"kernel_backend": "sgl-kernel"},
        "kernel_backend: expected one of auto, native, torch, triton, sgl_kernel, flashinfer, got 'sgl-kernel'; "
        "did you mean 'sgl_kernel'?",
    ),
    (
        {"attention_backend": "flash"},
        "attention_backend: expected one of auto, triton, flashinfer, torch, got 'flash'; did you mean 'flashinfer'?",
    ),
]


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize(("values", "text"), PHASE_ERRORS)
def test_values_of_a_phase(phase: Phase, values: dict[str, Any], text: str) -> None:
    expected = f"{phase}.{text}"
    config: dict[str, Any] = {phase: values}
    assert text_of(lambda: GraphConfig(**config)) == expected
    assert text_of(lambda: GraphConfig.from_json(config)) == expected
    assert text_of(lambda: GraphConfig.from_json(json.dumps(config))) == expected
    assert text_of(lambda: from_flags(*as_flags(values, f"{phase}."))) == expected
    assert text_of(lambda: from_flags("--cuda-graph-config", json.dumps(config))) == expected
    # A PhaseConfig built alone does not know its phase.
    assert text_of(lambda: PhaseConfig(**values)) == text


def test_specialize_outside_a_default_ladder() -> None:
    """Which ladder is the default is known once the phase is."""
    values: dict[str, Any] = {"max_num_tokens": 24, "specialize": [20]}
    expected = (
        "prefill.specialize: expected 'all' or buckets of the ladder 16, 24, got 20; remove 20 or list it in buckets"
    )
    assert text_of(lambda: GraphConfig(prefill=PhaseConfig(**values))) == expected
    assert text_of(lambda: GraphConfig(prefill=values)) == expected
    assert text_of(lambda: GraphConfig.from_json({"prefill": values})) == expected
    assert text_of(lambda: from_flags(*as_flags(values, "prefill."))) == expected
    assert GraphConfig(decode=values).decode.specialize == (20,)


@pytest.mark.parametrize(("values", "text"), SHARED_ERRORS)
def test_values_of_both_phases(values: dict[str, Any], text: str) -> None:
    assert text_of(lambda: GraphConfig(**values)) == text
    assert text_of(lambda: GraphConfig.from_json(json.dumps(values))) == text
    assert text_of(lambda: from_flags(*as_flags(values))) == text


@pytest.mark.parametrize(
    "values",
    [{"startup": "tiered"}, {"decode": {"startup": "tiered"}}, {"startup": "tiered", "prefill": {"startup": "lazy"}}],
)
def test_tiered_and_evaluate_guards(values: dict[str, Any]) -> None:
    expected = (
        "startup: expected eager or lazy under evaluate_guards, since guards are of a trace in the step's own thread, "
        "got tiered; drop one of the two"
    )
    assert text_of(lambda: GraphConfig(**values, evaluate_guards=True)) == expected
    assert text_of(lambda: GraphConfig.from_json({**values, "evaluate_guards": True})) == expected
    assert text_of(lambda: from_flags("--startup-decode", "tiered", "--evaluate-guards")) == expected


def test_a_flag_for_both_phases_names_the_first() -> None:
    text = "prefill.compiler: expected one of eager, aot_eager, inductor, got 'indutor'; did you mean 'inductor'?"
    assert text_of(lambda: from_flags("--cuda-graph-tc-compiler", "indutor")) == text
    assert text_of(lambda: GraphConfig(prefill={"compiler": "indutor"})) == text


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"cache_dir": b"x"}, "cache_dir: expected the path of a directory, got b'x'; name one or leave it out"),
        ({"manifest": b"x"}, "manifest: expected the path of a file, got b'x'; name one or leave it out"),
        (
            {"startup_budget": True},
            "startup_budget: expected a number of seconds, 0 or more, got True; use 0 for none",
        ),
        (
            {"startup_budget": None},
            "startup_budget: expected a number of seconds, 0 or more, got None; use 0 for none",
        ),
        ({"compile_workers": True}, "compile_workers: expected an integer, 0 or more, got True; use 0 for none"),
        ({"emulate_precision_casts": 1}, "emulate_precision_casts: expected true or false, got 1; use one of these"),
        ({"evaluate_guards": 1}, "evaluate_guards: expected true or false, got 1; use one of these"),
        ({"enable_torch_compile": "no"}, "enable_torch_compile: expected true or false, got 'no'; use one of these"),
        (
            {"prefill": {"max_padding_waste": True}},
            "prefill.max_padding_waste: expected a share from 0 to 1, got True; use 0.25 for a quarter",
        ),
        ({"late_address_check": 1}, "late_address_check: expected true or false, got 1; use one of these"),
        ({"debug_captures": 1}, "debug_captures: expected true or false, got 1; use one of these"),
        (
            {"cuda_graph_memory_budget": 0.5},
            "cuda_graph_memory_budget: expected a number of bytes or a size like 512MiB, 2GiB or 1.5GB, got 0.5; "
            "write one, or leave it out for no limit",
        ),
        (
            {"cuda_graph_memory_budget": True},
            "cuda_graph_memory_budget: expected a number of bytes or a size like 512MiB, 2GiB or 1.5GB, got True; "
            "write one, or leave it out for no limit",
        ),
        (
            {"torch_compile_mode": None},
            "torch_compile_mode: expected one of default, max-autotune-no-cudagraphs, got None; use one of these",
        ),
        (
            {"torch_compile_mode": 2},
            "torch_compile_mode: expected one of default, max-autotune-no-cudagraphs, got 2; use one of these",
        ),
        ({"torch_compile_max_bs": True}, "torch_compile_max_bs: expected a positive integer, got True; give 1 or more"),
        (
            {"fused_ops": "all"},
            'fused_ops: expected a list like ["none", "+rms_norm"], got \'all\'; '
            "list all or none, then +name and -name",
        ),
        (
            {"fused_ops": 3},
            'fused_ops: expected a list like ["none", "+rms_norm"], got 3; list all or none, then +name and -name',
        ),
        ({"fused_ops": ["all", 1]}, "fused_ops: expected all, none, +name or -name, got 1; remove or correct it"),
        ({"startup": None}, "startup: expected one of eager, lazy, tiered, got None; use one of these"),
        (
            {"decode": {"buckets": 8}},
            "decode.buckets: expected a list of positive integers, got 8; list the sizes",
        ),
        (
            {"decode": {"buckets": []}},
            "decode.buckets: expected at least one size, got an empty list; add one or leave buckets out",
        ),
        (
            {"kernel_backend": None},
            "kernel_backend: expected one of auto, native, torch, triton, sgl_kernel, flashinfer, got None; "
            "use one of these",
        ),
        (
            {"attention_backend": 1},
            "attention_backend: expected one of auto, triton, flashinfer, torch, got 1; use one of these",
        ),
        ({"decode": {"buckets": [True]}}, "decode.buckets: expected positive integers, got True; remove or correct it"),
    ],
)
def test_values_that_no_flag_can_say(values: dict[str, Any], text: str) -> None:
    assert text_of(lambda: GraphConfig(**values)) == text_of(lambda: GraphConfig.from_json(values)) == text


PHASE_KEYS = "backend, compiler, buckets, max_num_tokens, specialize, max_padding_waste, startup"
KEYS = (
    "prefill, decode, startup, promotion_budget_ms, compile_workers, compile_timeout_s, manifest, startup_budget, "
    "emulate_precision_casts, capture_device, cache_dir, enable_torch_compile, torch_compile_max_bs, "
    "torch_compile_mode, fused_ops, kernel_backend, attention_backend, evaluate_guards, cuda_graph_memory_budget, "
    "max_captures, late_address_check, debug_captures"
)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"prefil": {}}', f"prefil: expected one of the keys {KEYS}, got 'prefil'; did you mean 'prefill'?"),
        (
            '{"decode": {"bucket": [1]}}',
            f"decode.bucket: expected one of the keys {PHASE_KEYS}, got 'bucket'; did you mean 'buckets'?",
        ),
        ('{"decode": {"xyz": 1}}', f"decode.xyz: expected one of the keys {PHASE_KEYS}, got 'xyz'; use one of these"),
        ("[1]", f"config: expected an object with keys from {KEYS}, got [1]; write an object, {{}} for the defaults"),
        (
            '{"decode": 4}',
            f"decode: expected an object with keys from {PHASE_KEYS}, got 4; write an object, {{}} for the defaults",
        ),
        ('{"startup": "lazy", "startup": "eager"}', "config: expected each key once, got 'startup' twice; keep one"),
    ],
)
def test_json_of_another_shape(text: str, error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        GraphConfig.from_json(text)
    assert str(caught.value) == error


@pytest.mark.parametrize(
    "text", ["", "{", "{'decode': {}}", "[" * 100_000, '{"torch_compile_max_bs": ' + "9" * 5000 + "}"]
)
def test_text_that_is_not_json(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^config: expected a JSON object, got ") as caught:
        GraphConfig.from_json(text)
    assert len(str(caught.value)) < 400


def test_flags_that_contradict_each_other() -> None:
    assert text_of(lambda: from_flags("--disable-cuda-graph", "--cuda-graph-backend-decode", "full")) == (
        "--disable-cuda-graph: expected no other backend beside it, got --cuda-graph-backend-decode full; "
        "drop one of the two"
    )


def test_config_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "absent.json", tmp_path, tmp_path / "binary"):
        text = text_of(lambda path=path: from_flags("--cuda-graph-config", f"@{path}"))  # type: ignore[misc]
        assert text.startswith(f"--cuda-graph-config: expected a readable JSON file, got {str(path)!r} (")
        assert text.endswith("; correct the path or give the JSON inline")
