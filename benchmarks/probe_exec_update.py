"""What one graph executable for several buckets (cuGraphExecUpdate) would save: time and device memory, on CUDA.

python benchmarks/probe_exec_update.py [--json FILE]
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from report import conditions, write_json

NUM_LAYERS, WIDTH, COPIES = 64, 1024, 16


def captured(num_tokens: int, weights: list[torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
    """A chain of products, norms and sums, five kernels a layer; the graph is not instantiated."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = x + torch.nn.functional.layer_norm(torch.tanh(x @ weight) * 0.5, (WIDTH,))
        return x

    graph = torch.cuda.CUDAGraph(keep_graph=True)
    x = torch.randn(num_tokens, WIDTH, device="cuda", dtype=torch.bfloat16)
    forward(x)
    with torch.cuda.graph(graph):
        y = forward(x)
    return graph, [x, y]


def measure() -> dict[str, Any]:
    driver = ctypes.CDLL("libcuda.so.1")
    weights = [torch.randn(WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16) / 32 for _ in range(NUM_LAYERS)]
    kept = [captured(num_tokens, weights) for num_tokens in (8, 8, 64)]
    same, other, larger = (ctypes.c_void_p(graph.raw_cuda_graph()) for graph, _ in kept)
    info = (ctypes.c_uint64 * 3)()  # CUgraphExecUpdateResultInfo: a result and two nodes
    execs: list[ctypes.c_void_p] = []

    def instantiate() -> None:
        execs.append(ctypes.c_void_p())
        status = driver.cuGraphInstantiateWithFlags(ctypes.byref(execs[-1]), same, ctypes.c_uint64(0))
        assert status == 0, f"cuGraphInstantiateWithFlags: {status}"
        launch()

    def launch() -> None:
        assert driver.cuGraphLaunch(execs[-1], ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)) == 0

    def timed(call: Any, repeat: int) -> float:
        seconds = []
        for _ in range(repeat):
            torch.cuda.synchronize()
            started = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds) * 1e3

    def free_bytes() -> int:
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0]

    instantiate()
    before = free_bytes()
    result: dict[str, Any] = {"kernels": 5 * NUM_LAYERS, "instantiate_and_launch_ms": timed(instantiate, COPIES)}
    result["bytes_an_executable"] = (before - free_bytes()) / COPIES
    result["launch_ms"] = timed(launch, COPIES)
    for name, graph in {"same size": other, "another size": larger}.items():
        statuses: list[int] = []

        def update(to: ctypes.c_void_p, statuses: list[int] = statuses) -> None:
            statuses.append(driver.cuGraphExecUpdate_v2(execs[-1], to, info))

        # There and back, as when buckets take turns.
        ms = statistics.median(timed(functools.partial(update, to), 1) for to in (graph, same) * 4)
        result[name] = {"statuses": sorted(set(statuses)), "result": info[0] & 0xFFFFFFFF, "update_ms": ms}
    return result | conditions("cuda")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parsed = parser.parse_args()
    measured = measure()
    print(json.dumps(measured))
    write_json(parsed.json, measured)
