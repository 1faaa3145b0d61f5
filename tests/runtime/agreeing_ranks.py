"""What a rank does in the tests of agreement; importable by a spawned process."""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from piecework.errors import PieceworkError
from piecework.runtime.agreement import ProcessGroupAgreement, agreement_of

TIMEOUT_S = 8.0


def minimum(rank: int) -> Any:
    """Lists of several lengths, one of them longer than what one reduction takes, in a row."""
    agreement = ProcessGroupAgreement(dist.group.WORLD)
    lists = [[3, 0, -1], [], [0, 2, -1]] if rank == 0 else [[1, 2, -1], [], [5, 1, 7]]
    long = [(i * 7 + rank * 5) % 11 for i in range(150)]
    return [agreement.agree(each) for each in (*lists, long, [rank + 1])]


def lengths(rank: int) -> Any:
    """Another number of entries on each rank, then again one number."""
    agreement = ProcessGroupAgreement(dist.group.WORLD)
    texts = []
    for mine in [[1, 2, 3], list(range(200))] if rank == 0 else [[], [1]]:
        try:
            agreement.agree(mine)
        except PieceworkError as error:
            texts.append(str(error))
    return [texts, agreement.agree([rank])]


def death(rank: int) -> Any:
    """The second rank ends without a word between two agreements."""
    agreement = ProcessGroupAgreement(dist.group.WORLD)
    first = agreement.agree([rank])
    if rank == 1:
        os._exit(9)
    started = time.monotonic()
    try:
        agreement.agree([1])
    except PieceworkError as error:
        return [first, str(error), time.monotonic() - started]
    return [first, None, 0.0]


def absence(rank: int) -> Any:
    """The second rank lives and does not come."""
    ProcessGroupAgreement(dist.group.WORLD).agree([rank])
    short = dist.new_group([0, 1], backend="gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S / 4))
    agreement = ProcessGroupAgreement(short)
    if rank == 1:
        while not (Path(sys.argv[4]) / "0.json").exists():
            time.sleep(0.05)
        return None
    try:
        agreement.agree([1])
    except PieceworkError as error:
        return str(error)
    return None


def subgroup(rank: int) -> Any:
    """A group of one rank costs nothing, and a group of a backend without CPU tensors gets one of its own."""
    alone = dist.new_group([rank], use_local_synchronization=True)
    # As NCCL's: a group whose own collectives the agreement must not use. No GPU is needed to have it.
    other = dist.new_group([0, 1], backend="fake")
    first, second = agreement_of(other), agreement_of(other)  # as two runtimes have them
    assert first is not None
    assert second is not None
    agreed = [agreement.agree([rank, 4 - rank]) for agreement in (second, first)]
    return [agreement_of(alone) is None, agreement_of(None) is None, *agreed]


ROLES: dict[str, Callable[[int], Any]] = {role.__name__: role for role in (minimum, lengths, death, absence, subgroup)}


def main() -> None:
    """Arguments: role, rank, number of ranks, folder for the store and the results."""
    role, rank, num_ranks, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    if role == "subgroup":
        import torch.testing._internal.distributed.fake_pg  # noqa: F401 (registers the backend)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=num_ranks,
        timeout=datetime.timedelta(seconds=TIMEOUT_S),
    )
    result = json.dumps(ROLES[role](rank))
    (folder / f"{rank}.part").write_text(result)
    os.replace(folder / f"{rank}.part", folder / f"{rank}.json")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
