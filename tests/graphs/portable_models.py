"""Models for the round trip of portable programs, importable by another process, and what that process does."""

from __future__ import annotations

import dataclasses
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from piecework.graphs.inputs import InputContract
from piecework.graphs.portable import PortableProgram
from piecework.graphs.program import Program
from piecework.graphs.recorder import NullRecorder
from piecework.phases import Compiler

from .toys import accumulate, applied, halves

WIDTH = 4


class Layered(nn.Module):
    """Equal layers with a cache each, a size as an output."""

    def __init__(self, num_layers: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU()) for _ in range(num_layers))
        self.register_buffer("cache", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = applied(layer(x)) + x
            accumulate(x, self.cache)
        return {"hidden": x, "rows": x.shape[0]}


class TwoDims(nn.Module):
    """Equal pieces over dims of different names, seen in either order, and sizes of both in arithmetic."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        x, y = applied(x * 2), applied(y * 2)
        first, second = halves(y.relu() @ x.t())
        return first.sum(0)[:, None] * x + y.shape[0], (x.relu() * 3, y.relu() * 3, second.sum() + x.shape[0] * 2)


class Tied(nn.Module):
    """Two names for one weight, and one tensor in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.embedding.weight
        self.tables = [torch.arange(WIDTH, dtype=torch.float32)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(applied(self.embedding(x)) + self.tables[0])


class Aliasing(nn.Module):
    """Views of one buffer, one of them written, cross into one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("whole", torch.arange(3.0 * WIDTH).reshape(3, WIDTH))
        self.register_buffer("row", self.whole[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        view = self.whole[0]
        y = applied(x + self.row)
        self.row.add_(y.sum(0))
        view.mul_(2)
        return y * view + self.whole.sum(0) + self.row


@dataclasses.dataclass
class Output:
    """What `Constants` returns."""

    values: torch.Tensor
    label: str
    nested: tuple[Any, ...]


FROZEN = torch.full((WIDTH,), 0.5)


class Constants(nn.Module):
    """Constants of many kinds, in the graph and in the output; a size that decides, so the trace is backed."""

    def forward(self, x: torch.Tensor, flag: bool = True) -> Output:
        y = applied(x + FROZEN).to(torch.float64).clamp(max=float("inf"))[..., ::2]
        if x.shape[0] > 2:
            y = torch.full_like(y, float("nan"), dtype=torch.float32).nan_to_num(1.5) * y
        y = y + torch.tensor([1.0, 2.0], dtype=torch.float64)
        return Output(y, "a label", (None, 2.5, flag, x.shape[0] + 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model, how its inputs look for a number of tokens, and which dims are dynamic."""

    model: Callable[[], nn.Module]
    dynamic_dims: dict[str, dict[int, str]]
    inputs: Callable[[int], dict[str, Any]]


def x_of(num_tokens: int) -> torch.Tensor:
    return torch.linspace(-1, 1, num_tokens * WIDTH).reshape(num_tokens, WIDTH)


ONE: dict[str, dict[int, str]] = {"x": {0: "tokens"}}
CASES = {
    "layers": Case(model=Layered, dynamic_dims=ONE, inputs=lambda n: {"x": x_of(n)}),
    "two dims": Case(
        model=TwoDims,
        dynamic_dims={"x": {0: "tokens"}, "y": {0: "rows"}},
        inputs=lambda n: {"x": x_of(n), "y": x_of(n + 3)},
    ),
    "tied weights": Case(model=Tied, dynamic_dims=ONE, inputs=lambda n: {"x": x_of(n)}),
    "aliasing": Case(model=Aliasing, dynamic_dims=ONE, inputs=lambda n: {"x": x_of(n)}),
    "constants, backed": Case(model=Constants, dynamic_dims=ONE, inputs=lambda n: {"x": x_of(n), "flag": False}),
}
SIZES = (3, 7)


def made(case: Case, seed: int = 0) -> nn.Module:
    """The model of a case with the weights of a seed."""
    torch.manual_seed(seed)
    return case.model().requires_grad_(False)


def results(program: Program, case: Case, size: int) -> Any:
    """What a program returns for inputs of a size."""
    contract = InputContract(case.dynamic_dims)
    bound = contract.bind(case.inputs(size))
    with torch.inference_mode():
        return program(contract.pad_to_bucket(bound, bound.num_tokens), bound.sizes)


def main(directory: Path, compiler: str) -> None:
    """In the other process: binds each program, compiles it, runs it, and leaves what it returned."""
    for name, case in CASES.items():
        folder = directory / name
        portable = PortableProgram.from_bytes((folder / "program").read_bytes())
        model = made(case)
        graph = portable.bind(model)
        general = graph.compile_general(Compiler(compiler), {}, NullRecorder())
        got: list[Any] = [results(general, case, size) for size in SIZES]
        special = graph.compile_specialized(SIZES[-1], Compiler(compiler), {}, NullRecorder())
        got.append(results(special, case, SIZES[-1]))
        (folder / "results").write_bytes(pickle.dumps((got, dict(model.named_buffers()))))
        assert portable.to_bytes() == (folder / "program").read_bytes()
        assert PortableProgram.from_graph(graph, portable.signature).to_bytes() == portable.to_bytes()
    assert not torch._dynamo.utils.counters["frames"], "nothing is traced here"


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
