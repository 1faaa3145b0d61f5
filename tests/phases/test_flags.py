"""Launch flags: precedence, what they set, and the frozen `--help`."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from piecework.phases import (
    Backend,
    GraphConfig,
    Phase,
    PhaseConfig,
    add_graph_flags,
    flag_table,
    graph_config_from_args,
)
from piecework.phases.flags import CONFIG, DISABLE, FLAGS

SNAPSHOT = Path(__file__).with_name("help.txt")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="piecework")
    add_graph_flags(parser)
    return parser


def parse(*arguments: str) -> GraphConfig:
    return graph_config_from_args(make_parser().parse_args(arguments))


# For each flag: what is given, and the fields that differ from the default for it.
CASES: list[tuple[list[str], dict[str, Any]]] = [
    (["--cuda-graph-backend-prefill", "breakable"], {"prefill": {"backend": "breakable"}}),
    (["--cuda-graph-backend-decode", "full"], {"decode": {"backend": "full"}}),
    (["--cuda-graph-tc-compiler", "inductor"], {p: {"compiler": "inductor"} for p in ("prefill", "decode")}),
    (["--cuda-graph-bs-prefill", "64", "256"], {"prefill": {"buckets": [64, 256]}}),
    (["--cuda-graph-bs-decode", "4"], {"decode": {"buckets": [4]}}),
    (["--cuda-graph-max-bs-prefill", "512"], {"prefill": {"max_num_tokens": 512}}),
    (["--cuda-graph-max-bs-decode", "48"], {"decode": {"max_num_tokens": 48}}),
    (["--cuda-graph-specialize-prefill", "all"], {"prefill": {"specialize": "all"}}),
    (["--cuda-graph-specialize-decode", "1", "8"], {"decode": {"specialize": [1, 8]}}),
    (["--cuda-graph-max-padding-waste-prefill", "0.25"], {"prefill": {"max_padding_waste": 0.25}}),
    (["--cuda-graph-max-padding-waste-decode", "1"], {"decode": {"max_padding_waste": 1.0}}),
    (["--startup", "eager"], {"startup": "eager"}),
    (["--startup-prefill", "lazy"], {"prefill": {"startup": "lazy"}}),
    (["--startup-decode", "tiered"], {"decode": {"startup": "tiered"}}),
    (["--promotion-budget-ms", "0"], {"promotion_budget_ms": 0.0}),
    (["--compile-workers", "4"], {"compile_workers": 4}),
    (["--compile-timeout", "12.5"], {"compile_timeout_s": 12.5}),
    (["--manifest", "12"], {"manifest": "12"}),
    (["--startup-budget", "30"], {"startup_budget": 30.0}),
    (["--emulate-precision-casts"], {"emulate_precision_casts": True}),
    (["--capture-device", "tape"], {"capture_device": "tape"}),
    (["--cache-dir", "12"], {"cache_dir": "12"}),
    (["--enable-torch-compile"], {"enable_torch_compile": True}),
    (["--torch-compile-max-bs", "8"], {"torch_compile_max_bs": 8}),
    (["--torch-compile-mode", "default"], {"torch_compile_mode": "default"}),
    (["--fused-ops", "none,+rms_norm, -silu_and_mul"], {"fused_ops": ["none", "+rms_norm", "-silu_and_mul"]}),
    (["--kernel-backend", "triton"], {"kernel_backend": "triton"}),
    (["--attention-backend", "flashinfer"], {"attention_backend": "flashinfer"}),
    (["--evaluate-guards"], {"evaluate_guards": True}),
    (["--cuda-graph-memory-budget", "1.5GiB"], {"cuda_graph_memory_budget": 3 << 29}),
    (["--cuda-graph-max-captures", "7"], {"max_captures": 7}),
    (["--late-address-check"], {"late_address_check": True}),
    (["--debug-captures"], {"debug_captures": True}),
    ([DISABLE], {p: {"backend": "disabled"} for p in ("prefill", "decode")}),
    ([CONFIG, '{"startup": "eager"}'], {"startup": "eager"}),
]


@pytest.mark.parametrize(("arguments", "changed"), CASES, ids=lambda case: case[0] if isinstance(case, list) else "")
def test_a_flag_sets_its_fields_and_no_other(arguments: list[str], changed: dict[str, Any]) -> None:
    assert parse(*arguments) == GraphConfig.from_json(changed) != GraphConfig()


def test_every_flag_has_a_case_and_every_field_a_flag() -> None:
    assert sorted(arguments[0] for arguments, _ in CASES) == sorted([*FLAGS, CONFIG, DISABLE])
    paths = {f"{phase}.{f.name}" for phase in Phase for f in dataclasses.fields(PhaseConfig)}
    paths |= {f.name for f in dataclasses.fields(GraphConfig)} - set(Phase)
    assert sorted(paths) == sorted(path for flag_paths in FLAGS.values() for path in flag_paths)


def test_a_switch_that_is_unset_can_be_set_both_ways() -> None:
    assert parse("--no-emulate-precision-casts") == GraphConfig(emulate_precision_casts=False) != GraphConfig()


def test_no_flag_gives_the_defaults() -> None:
    assert parse() == GraphConfig()
    assert graph_config_from_args(argparse.Namespace()) == GraphConfig()


def test_flag_over_json_over_default(tmp_path: Path) -> None:
    given = {"startup": "eager", "decode": {"buckets": [1, 2], "compiler": "inductor"}, "cache_dir": "kept"}
    file = tmp_path / "graphs.json"
    file.write_text(json.dumps(given))
    for config in (json.dumps(given), f"@{file}"):
        got = parse(CONFIG, config, "--startup", "lazy", "--cuda-graph-bs-decode", "4")
        assert got == GraphConfig.from_json(
            {"startup": "lazy", "decode": {"buckets": [4], "compiler": "inductor"}, "cache_dir": "kept"}
        )


def test_a_flag_that_repeats_the_default_still_overrides_json() -> None:
    config = '{"max_captures": 4, "prefill": {"backend": "full"}}'
    assert (
        parse(CONFIG, config, "--cuda-graph-max-captures", "512", "--cuda-graph-backend-prefill", "auto")
        == GraphConfig()
    )


def test_a_list_of_fused_ops_is_one_word() -> None:
    assert parse("--fused-ops", "all").fused_ops == ("all",)
    assert parse("--fused-ops=-rms_norm,all").fused_ops == ("-rms_norm", "all")
    assert parse(CONFIG, '{"fused_ops": ["all"]}', "--fused-ops=").fused_ops == ()


def test_flags_may_complete_a_json_that_is_wrong_alone() -> None:
    config = '{"decode": {"buckets": [1, 2, 4], "max_num_tokens": 8}}'
    assert parse(CONFIG, config, "--cuda-graph-max-bs-decode", "4").decode.max_num_tokens == 4


def test_disable_overrides_json_and_agrees_with_disabled() -> None:
    got = parse(DISABLE, CONFIG, '{"decode": {"backend": "full"}}', "--cuda-graph-backend-prefill", "disabled")
    assert got.prefill.backend is got.decode.backend is Backend.DISABLED


def help_text() -> str:
    """The part of `--help` that is ours: usage and the headings of argparse differ between Python versions."""
    parser = make_parser()
    (group,) = [g for g in parser._action_groups if g.title == "phases and graphs"]
    formatter = argparse.HelpFormatter(prog="piecework", width=118)  # as with COLUMNS=120
    formatter.start_section(group.title)
    formatter.add_text(group.description)
    formatter.add_arguments(group._group_actions)
    formatter.end_section()
    return formatter.format_help()


def test_help_is_frozen() -> None:
    assert help_text() == SNAPSHOT.read_text(), "if the change is meant, run this file with python to write help.txt"


def test_help_is_what_the_parser_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")
    assert help_text() in make_parser().format_help()


def test_flag_table_has_a_row_for_each_flag() -> None:
    head, rule, *rows = flag_table().splitlines()
    assert head == "| flag | field | default | meaning |"
    assert rule == "| --- | --- | --- | --- |"
    assert [row.split("`")[1].split()[0] for row in rows] == [*FLAGS, CONFIG, DISABLE]
    assert all(row.count("|") == 5 for row in rows)
    assert (
        "| `--torch-compile-mode MODE` | `torch_compile_mode` | max-autotune-no-cudagraphs | the mode of torch.compile "
        "for it: default, or max-autotune-no-cudagraphs |"
    ) in rows


if __name__ == "__main__":
    SNAPSHOT.write_text(help_text())
