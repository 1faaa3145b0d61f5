"""Models whose compiled pieces are saved by another process, and what that process does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from piecework.graphs.artifact import save_piece
from piecework.graphs.inputs import InputContract
from piecework.graphs.portable import PortableProgram
from piecework.graphs.stitched import PiecewiseGraph
from piecework.phases import Compiler

from .portable_models import CASES, ONE, WIDTH, Case, made, x_of
from .toys import accumulate, applied, trace_model

BUCKET = 7


class Mixed(nn.Module):
    """A buffer that a piece writes, several outputs, two of equal value of which one is written later, and views."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("state", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        y = applied(x)
        self.state.add_(y.sum(0))
        doubled = y * 2
        twin = doubled.clone()
        accumulate(x, doubled)
        return {"turned": y.t(), "view": doubled[:, 1:], "twin": twin, "state": self.state + 1, "z": self.linear(y)}


SAVED = {
    "mixed": Case(model=Mixed, dynamic_dims=ONE, inputs=lambda n: {"x": x_of(n)}),
    "two dims": CASES["two dims"],
    "constants, backed": CASES["constants, backed"],
}
"""Without a hint, unbacked with one dim and with two, and backed."""
SPECIALIZED = "mixed"


def portable_of(case: Case, model: nn.Module | None = None) -> PortableProgram:
    """The portable program of a case."""
    contract = InputContract(case.dynamic_dims)
    traced = trace_model(model if model is not None else made(case), case.inputs(5), case.dynamic_dims)
    graph = PiecewiseGraph.from_trace(traced, contract)
    return PortableProgram.from_graph(graph, contract.bind(case.inputs(5)).signature)


def main(directory: Path) -> None:
    """In the other process: compiles each distinct piece and saves it."""
    for name, case in SAVED.items():
        portable = portable_of(case)
        (directory / name).write_bytes(portable.to_bytes())
        for fingerprint in portable.fingerprints:
            piece = portable.piece(fingerprint)
            pieces = [piece, piece.specialized(BUCKET)] if name == SPECIALIZED else [piece]
            for each in pieces:
                save_piece(each.compile(Compiler.INDUCTOR), each, directory)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
