"""What a program costs before anything is compiled: traced flat, traced with regions, and bound from its portable form.

    python benchmarks/bench_trace.py [--layers 32] [--repeat 5] [--device cuda] [--json FILE]

A Llama with random weights; the four ways in turn, `--repeat` times each, the median of wall-clock seconds. On a torch
that cannot reuse regions (before 2.13) both traces are flat, and the table says so.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from report import Deadline, conditions, write_json

from piecework.graphs import trace as trace_module
from piecework.graphs.inputs import InputContract
from piecework.graphs.piece import CompiledPieces
from piecework.graphs.portable import PortableProgram
from piecework.graphs.recorder import NullRecorder
from piecework.graphs.stitched import PiecewiseGraph
from piecework.phases import Compiler
from piecework.runtime.engine.engine import LLMEngine
from piecework.runtime.engine.toy_checkpoint import make_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--max-seconds", type=float, default=80.0, help="no repetition but the first is begun after this"
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    result = measure(arguments.layers, arguments.repeat, arguments.device, Deadline(arguments.max_seconds))
    print(table(result))
    write_json(arguments.json, result)


def measure(num_layers: int, repeat: int, device: str, deadline: Deadline) -> dict[str, Any]:
    """The medians in seconds, with their conditions."""
    contract = InputContract({"input_ids": 0, "positions": 0})
    with (
        tempfile.TemporaryDirectory() as folder,
        LLMEngine(
            make_checkpoint(folder, num_layers=num_layers), num_blocks=16, max_model_len=64, device=device
        ) as engine,
    ):
        model = engine.model.model
        ids = torch.arange(8, device=device)
        bound = contract.bind({"input_ids": ids, "positions": ids})

        def traced() -> PiecewiseGraph:
            found = trace_module.trace(model, bound.signature, contract, sizes=bound.sizes)
            return PiecewiseGraph.from_trace(found, contract)

        def traced_flat() -> PiecewiseGraph:
            with no_regions():
                return traced()

        graph, flat = traced(), traced_flat()
        program = PortableProgram.from_graph(graph, bound.signature)
        content = program.to_bytes()
        # Under aot_eager, so that the compile itself is small: all its pieces are compiled before.
        compiled: CompiledPieces = {}
        graph.compile_general(Compiler.AOT_EAGER, compiled, NullRecorder())

        def warm() -> None:
            loaded = PortableProgram.from_bytes(content).bind(model)
            loaded.compile_general(Compiler.AOT_EAGER, compiled, NullRecorder())

        ways: dict[str, Callable[[], Any]] = {
            "trace_flat_s": traced_flat,
            "trace_s": traced,
            "export_s": lambda: PortableProgram.from_graph(graph, bound.signature).to_bytes(),
            "load_and_bind_s": warm,
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for each in range(repeat):
            if each and not deadline.has():
                repeat = each
                break
            for name, way in ways.items():
                started = time.perf_counter()
                way()
                seconds[name].append(time.perf_counter() - started)
        return {
            **{name: statistics.median(values) for name, values in seconds.items()},
            "layers": num_layers,
            "pieces": len(graph.split.pieces),
            "distinct_pieces": graph.num_distinct,
            "regions_reused": graph.traced.regions_reused,
            "same_texts_as_flat": graph.texts == flat.texts,
            "program_bytes": len(content),
            "repeat": repeat,
            **conditions(device),
        }


@contextlib.contextmanager
def no_regions() -> Iterator[None]:
    """Traces are flat inside."""
    before = trace_module.find_regions
    trace_module.find_regions = lambda model: None
    try:
        yield
    finally:
        trace_module.find_regions = before


def table(result: dict[str, Any]) -> str:
    """A short table."""
    rows = [
        ("trace, flat", result["trace_flat_s"]),
        (f"trace, {result['regions_reused']} layers reused", result["trace_s"]),
        ("export", result["export_s"]),
        ("load, bind and link", result["load_and_bind_s"]),
    ]
    lines = [f"{name:<28} {seconds:8.3f} s" for name, seconds in rows]
    lines.append(
        f"{result['layers']} layers, {result['pieces']} pieces ({result['distinct_pieces']} distinct), program of "
        f"{result['program_bytes']} bytes; {result['device']}, torch {result['torch']}, median of {result['repeat']}"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
