"""Two real ranks under `tiered`: they promote the same entries before the same steps, and ask each other no longer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import piecework as pw
from piecework.runtime.agreement import ProcessGroupAgreement

from .toy_captures import Toy, config_of, step

ROOT = Path(pw.__file__).parent
pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo")


def run_ranks(mode: str, folder: Path) -> list[dict[str, Any]]:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.runtime.tiered_ranks", mode, str(rank), str(folder)],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=300)[1].decode()[-3000:] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(("mode", "settled", "program"), [("wait", True, "general"), ("short", False, None)])
def test_ranks_that_wait_end_together(tmp_path: Path, mode: str, settled: bool, program: str | None) -> None:
    first, second = run_ranks(mode, tmp_path)
    assert first == second
    assert first["settled"] is settled
    assert program is None or first["programs"] == [program]


def test_ranks_are_ready_together(tmp_path: Path) -> None:
    first, second = run_ranks("budget", tmp_path)
    assert first == second
    assert set(first["programs"]) == {"general"}


def test_ranks_promote_together_although_one_is_ready_long_before(tmp_path: Path) -> None:
    first, second = run_ranks("steps", tmp_path)
    assert first["promoted"] == second["promoted"]
    assert sorted(bucket for bucket, *_ in first["promoted"]) == [2, 4, 8]
    assert first["early"] == 0  # rank 0 had its program, and waited
    for result in (first, second):
        assert result["settled"]
        assert set(result["programs"]) == {"general"}
        assert result["agreements"] > 0
        assert result["later"] == 0
    assert first["agreements"] == second["agreements"]


def test_without_a_group_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: Any) -> None:
        raise AssertionError("a collective")

    monkeypatch.setattr(ProcessGroupAgreement, "agree", never)
    config = config_of("full", "aot_eager", startup="tiered", compile_workers=0)
    with pw.Runtime(Toy(), config, dynamic_dims={"x": 0}) as runtime:
        for seed in range(2000):
            step(runtime, 4, seed)
            if runtime.settled:
                break
            runtime.wait_settled(0.01)
        assert runtime.counters["promotions"] == 1


class Scripted:
    """Another rank that says what it is told."""

    interval = 4

    def __init__(self) -> None:
        self.other: list[int] | None = None
        self.asked: list[list[int]] = []

    def agree(self, levels: Any) -> list[int]:
        self.asked.append(list(levels))
        other = self.other or [0, 1] * (len(levels) // 2)
        return [min(pair) for pair in zip(levels, other, strict=True)]


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    agreement = Scripted()
    monkeypatch.setattr("piecework.runtime.agreement.agreement_of", lambda group: agreement)
    return agreement


def steps_until(runtime: Any, done: Any) -> None:
    for seed in range(5000):
        step(runtime, 4, seed)
        if done():
            return
        runtime._tiering.background.wait(0.005)
    raise AssertionError("never done")


def test_a_rank_waits_for_the_other_and_gives_up_with_it(scripted: Scripted) -> None:
    config = config_of("full", "aot_eager", startup="tiered", compile_workers=0)
    with pw.Runtime(Toy(), config, dynamic_dims={"x": 0}) as runtime:
        steps_until(runtime, lambda: [1, 1] in scripted.asked)  # this rank could
        assert [entry.program.kind for entry in runtime.entries] == ["eager"]
        assert not runtime.settled
        scripted.other = [0, 0]  # the other one never will
        steps_until(runtime, lambda: runtime.settled)
        assert runtime.entries[0].given_up == "another rank has no better program"
        num_asked = len(scripted.asked)
        for seed in range(20):
            step(runtime, 4, seed)
        assert len(scripted.asked) == num_asked
        assert runtime.counters["promotions"] == 0


def test_a_rank_that_fails_is_asked_as_long_as_the_others_are(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*arguments: Any) -> None:
        raise pw.CompileError("no such luck")

    monkeypatch.setattr("piecework.graphs.piece.compile_piece", failing)
    config = config_of("full", "aot_eager", startup="tiered", compile_workers=0)
    with pw.Runtime(Toy(), config, dynamic_dims={"x": 0}) as runtime:
        steps_until(runtime, lambda: [0, 0] in scripted.asked)
        assert scripted.asked[0] in ([0, 1], [0, 0])
        assert "no such luck" in str(runtime.entries[0].given_up)
        num_asked = len(scripted.asked)
        for seed in range(20):
            step(runtime, 4, seed)
        assert len(scripted.asked) == num_asked
