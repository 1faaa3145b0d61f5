"""Functions that factories name, importable by another process, and what that process does with a request."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import nn

from piecework.ops.norm import RMSNorm
from piecework.runtime.model_factory import ModelFactory, TraceRequest, trace_from_factory

from ..graphs.portable_models import CASES, ONE, WIDTH, Case, x_of
from ..graphs.toys import Fn, applied


class Tables(nn.Module):
    """Buffers that the constructor computes: integers, a mask, a rotary table, one in another dtype; a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("order", torch.arange(WIDTH).flip(0))
        self.register_buffer("mask", torch.ones(WIDTH, WIDTH, dtype=torch.bool).tril())
        angles = torch.outer(torch.arange(8.0), 1.0 / 10.0 ** (torch.arange(0, WIDTH, 2) / WIDTH))
        self.register_buffer("table", torch.cat((angles.cos(), angles.sin()), -1), persistent=False)
        self.register_buffer("wide", torch.linspace(0, 1, WIDTH, dtype=torch.float64))
        self.norm = RMSNorm(WIDTH, 1e-5)
        nn.init.orthogonal_(self.norm.weight.data[None])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = applied(self.norm(x)[:, self.order]) + self.table[3]
        return self.norm((x @ self.mask.to(x.dtype)) * self.wide.to(x.dtype))


ALL_CASES = {**CASES, "tables": Case(model=Tables, dynamic_dims=ONE, inputs=lambda n: {"x": x_of(n)})}


def build_case(name: str) -> nn.Module:
    """The model of a case, with random weights."""
    return ALL_CASES[name].model()


def build_half(name: str) -> nn.Module:
    """The model of a case, changed as a whole after it was made."""
    return build_case(name).to(torch.bfloat16).eval()


def build_plain(default: str) -> nn.Module:
    """A model that takes torch's default dtype; `default` is not used."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())


def build_bad(kind: str) -> Any:
    """What is no model, or cannot be made without values."""
    model = Tables()
    if kind == "item":
        model.scale = model.norm.weight.abs().max().item()
    elif kind == "branch":
        model.flag = bool((model.norm.weight > 0).all())
    elif kind == "nonzero":
        model.register_buffer("where", model.mask.nonzero())
    elif kind == "file":
        torch.load("/nowhere/weights.pt")
    elif kind == "meta":
        model.norm = RMSNorm(WIDTH, 1e-5, device="meta")
    elif kind == "closure":
        table = torch.randn(WIDTH)
        return Fn(lambda m, x: applied(x) + table)
    elif kind == "python":
        return Fn(lambda m, x: (applied(x), torch._dynamo.graph_break()))
    elif kind == "number":
        return 3
    return model


def main() -> None:
    """In another process: a factory, a request and a device from stdin; the program's bytes to stdout."""
    data = json.load(sys.stdin)
    factory, request = ModelFactory.from_json(data["factory"]), TraceRequest.from_json(data["request"])
    sys.stdout.buffer.write(trace_from_factory(factory, request, torch.device(data["device"])))
