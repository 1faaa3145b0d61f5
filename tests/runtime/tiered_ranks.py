"""One of two ranks of test_tiered_ranks.py: `python -m tests.runtime.tiered_ranks MODE RANK FOLDER`.

Both run the same steps. The programs of rank 1 are held back until rank 0 has had its own for a while. With mode `wait`
they wait until all is settled, with `budget` before ready, and with `short` for less time than rank 1 needs.
"""

from __future__ import annotations

import datetime
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import piecework as pw
from piecework.runtime.agreement import ProcessGroupAgreement
from piecework.runtime.building import WorkerBuilder
from piecework.runtime.programs import ProgramFamily

from .toy_captures import Slots, Toy, config_of, plain, step, x_of

SIZES = (4, 2, 7)
LIMIT_S = 120.0


def waiting(mode: str, rank: int, folder: Path) -> None:
    """No steps but one: boundaries that are made by waiting, as many as each rank happens to make."""
    join(rank, folder)
    precompile = WorkerBuilder.precompile

    def held(self: WorkerBuilder, *more: Any) -> None:
        time.sleep(rank * 1.5)
        precompile(self, *more)

    WorkerBuilder.precompile = held  # type: ignore[method-assign]
    limit_s = 0.4 if mode == "short" else LIMIT_S
    budget = {"startup_budget": limit_s, "manifest": str(folder / f"manifest{rank}")} if mode == "budget" else {}
    config = config_of("full", "aot_eager", startup="tiered", compile_workers=0, **budget)
    more = {"example_inputs": {"x": x_of(2)}, "example_context": Slots(torch.empty(0, dtype=torch.int64))}
    with pw.Runtime(Toy(), config, dynamic_dims={"x": 0}, process_group=dist.group.WORLD, **more) as runtime:  # type: ignore[arg-type]
        if mode != "budget":
            step(runtime, 4)
        settled = runtime.wait_settled(limit_s)
        for seed in range(20):
            step(runtime, 4, seed)
        kinds = [entry.program.kind for entry in runtime.entries if entry.num_steps or mode == "budget"]
        result = {"settled": settled, "programs": kinds}
    (folder / f"{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def join(rank: int, folder: Path) -> None:
    store = dist.FileStore(str(folder / "store"), 2)  # type: ignore[no-untyped-call]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=LIMIT_S))


def main(rank: int, folder: Path) -> None:
    join(rank, folder)
    go = folder / "go"
    calls = [0]
    agree, precompile = ProcessGroupAgreement.agree, WorkerBuilder.precompile

    def counted(self: ProcessGroupAgreement, levels: Any) -> list[int]:
        calls[0] += 1
        return agree(self, levels)

    def held(self: WorkerBuilder, family: ProgramFamily, *more: Any) -> None:
        while rank == 1 and not go.exists():
            time.sleep(0.005)
        precompile(self, family, *more)

    ProcessGroupAgreement.agree = counted  # type: ignore[method-assign]
    WorkerBuilder.precompile = held  # type: ignore[method-assign]
    config = config_of("full", "aot_eager", startup="tiered", compile_workers=0)
    reference = Toy()
    promoted: list[Any] = []
    early: list[Any] = []
    with pw.Runtime(Toy(), config, dynamic_dims={"x": 0}, process_group=dist.group.WORLD) as runtime:
        num_steps, since_ready, deadline = 0, 0, time.monotonic() + LIMIT_S
        is_last = torch.zeros(1)
        while not is_last.item():
            for num_tokens in SIZES:
                torch.testing.assert_close(
                    step(runtime, num_tokens, num_steps), plain(reference, num_tokens, num_steps)
                )
                num_steps += 1
                for event in runtime.events:
                    place = [event.scope.bucket, event.detail.get("to"), event.at_s]
                    if event.kind == "promote" and place not in [known[:3] for known in promoted]:
                        promoted.append([*place, num_steps])
            if rank == 0 and runtime._tiering is not None and runtime._tiering.background.is_idle:
                since_ready += 1
                if since_ready == 20:
                    early = [*promoted]
                    go.touch()
            # Whoever is not settled yet goes on, and the other one with it: all ranks make the same steps.
            is_last = torch.tensor([float(runtime.settled or time.monotonic() > deadline)])
            dist.all_reduce(is_last, op=dist.ReduceOp.MIN)
        at_best = calls[0]
        for seed in range(40):
            step(runtime, SIZES[seed % 3], seed)
        result = {
            "promoted": [[bucket, to, at] for bucket, to, _, at in promoted],
            "early": len(early),
            "settled": runtime.settled,
            "agreements": at_best,
            "later": calls[0] - at_best,
            "programs": [entry.program.kind for entry in runtime.entries],
        }
    (folder / f"{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "steps":
        main(int(sys.argv[2]), Path(sys.argv[3]))
    else:
        waiting(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
