"""Two real ranks over gloo agree on the least of their levels, and none waits for ever."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import piecework
from piecework.errors import ConfigError
from piecework.runtime.agreement import INTERVAL, Agreement, ProcessGroupAgreement, agreement_of

from .agreeing_ranks import TIMEOUT_S

ROOT = Path(piecework.__file__).parent
pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch without gloo")


def run_ranks(role: str, folder: Path) -> list[Any]:
    """What each of two ranks returned; None for one that ended before."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.runtime.agreeing_ranks", role]
    with_loopback = {**os.environ, "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
    ranks = [
        subprocess.Popen([*command, str(rank), "2", str(folder)], cwd=ROOT, env=with_loopback, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    errors = []
    try:
        for rank in ranks:
            errors.append(rank.communicate(timeout=240)[1].decode()[-2000:])
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    files = [folder / f"{rank}.json" for rank in range(2)]
    assert files[0].exists(), errors
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


def test_the_least_level_of_each_entry(tmp_path: Path) -> None:
    first, second = run_ranks("minimum", tmp_path)
    long = [min((i * 7) % 11, (i * 7 + 5) % 11) for i in range(150)]
    assert first == second == [[1, 0, -1], [], [0, 1, -1], long, [1]]


def test_lists_of_different_lengths_are_an_error_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_ranks("lengths", tmp_path)
    for rank, ((short, long), after) in enumerate((first, second)):
        assert "expected lists of one length from all ranks, got 0 to 3 entries" in short
        assert "got 1 to 200 entries" in long
        assert f"(rank {rank})" in long
        assert after == [0]


def test_a_rank_that_dies_ends_the_wait_of_the_others(tmp_path: Path) -> None:
    (agreed, text, seconds), second = run_ranks("death", tmp_path)
    assert second is None
    assert agreed == [0]
    assert "expected an answer from all of the ranks 0, 1, got none in time on rank 0" in text
    assert seconds < 10 * TIMEOUT_S


def test_a_rank_that_does_not_come_ends_the_wait_at_the_groups_timeout(tmp_path: Path) -> None:
    text, _ = run_ranks("absence", tmp_path)
    assert "a rank has ended or hangs" in text


def test_a_group_of_another_backend_gets_one_of_its_own(tmp_path: Path) -> None:
    assert run_ranks("subgroup", tmp_path) == [[True, True, [0, 3], [0, 3]]] * 2


def test_no_process_group_is_no_agreement() -> None:
    assert agreement_of(None) is None


@pytest.mark.parametrize("group", [None, 3, "world"])
def test_what_is_no_group_is_refused(group: Any) -> None:
    with pytest.raises(ConfigError, match="expected one of torch.distributed"):
        ProcessGroupAgreement(group)


def test_the_protocol_is_kept() -> None:
    keeps: type[Agreement] = ProcessGroupAgreement
    assert keeps.interval == INTERVAL
