"""A deep decoder is traced in a fraction of the time of a flat trace, into the same program."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from piecework.graphs import trace as trace_module
from piecework.graphs.inputs import InputContract
from piecework.graphs.portable import PortableProgram
from piecework.graphs.region import reuse_is_supported
from piecework.graphs.stitched import PiecewiseGraph
from piecework.graphs.trace import Traced
from piecework.runtime.engine.engine import LLMEngine
from piecework.runtime.engine.toy_checkpoint import make_checkpoint

NUM_LAYERS = 32


@pytest.mark.slow
@pytest.mark.skipif(not reuse_is_supported(), reason="torch before 2.13 traces each region again")
def test_32_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Best of three each, in turn; CPU seconds of this process, which other processes do not change."""
    contract = InputContract({"input_ids": 0, "positions": 0})
    bound = contract.bind({"input_ids": torch.arange(4), "positions": torch.arange(4)})
    seconds: dict[str, list[float]] = {"regions": [], "flat": []}
    traces: dict[str, Traced] = {}
    with LLMEngine(make_checkpoint(tmp_path, num_layers=NUM_LAYERS), num_blocks=8, max_model_len=16) as engine:

        def timed(kind: str) -> None:
            started = time.process_time()
            traces[kind] = trace_module.trace(engine.model.model, bound.signature, contract, sizes=bound.sizes)
            seconds[kind].append(time.process_time() - started)

        for _ in range(3):
            timed("regions")
            with monkeypatch.context() as patched:
                patched.setattr(trace_module, "find_regions", lambda model: None)
                timed("flat")
    assert (traces["regions"].regions_reused, traces["flat"].regions_reused) == (NUM_LAYERS - 1, 0)
    graphs = {kind: PiecewiseGraph.from_trace(traced, contract) for kind, traced in traces.items()}
    assert graphs["regions"].texts == graphs["flat"].texts
    portable = [PortableProgram.from_graph(graph, bound.signature) for graph in graphs.values()]
    assert portable[0].text == portable[1].text
    assert min(seconds["regions"]) <= 0.6 * min(seconds["flat"]), seconds
