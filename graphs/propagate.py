"""Gives the nodes of a graph their fake values, by running it on those of its placeholders."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv


def propagate(graph_module: GraphModule, fake_mode: FakeTensorMode) -> None:
    """Sets `example_value` on every node but placeholders, whose own are the arguments. Runs nothing on a device.

    Raises:
        Whatever an operator raises for these sizes; torch's ambient state (grad mode, autocast) is then as before.
    """
    arguments = [node.meta["example_value"] for node in graph_module.graph.find_nodes(op="placeholder")]
    shape_env = fake_mode.shape_env
    ignored = shape_env.ignore_fresh_unbacked_symbols() if shape_env is not None else contextlib.nullcontext()
    # As Dynamo runs operators: without it some, such as constant_pad_nd, ask an unbacked size for its value.
    with torch.inference_mode(), _autocast_restored(), fake_mode, enable_python_dispatcher(), ignored:
        _Propagator(graph_module, fake_mode).run(*arguments)


def fake_mode_of(graph_module: GraphModule, shape_env: ShapeEnv) -> FakeTensorMode:
    """The mode that a graph's fake tensors belong to; a new one if there are none."""
    for node in graph_module.graph.nodes:
        if isinstance(value := node.meta.get("example_value"), FakeTensor):
            return value.fake_mode
    return FakeTensorMode(shape_env=shape_env)


class _Propagator(Interpreter):
    """Keeps the result of each node."""

    def __init__(self, graph_module: GraphModule, fake_mode: FakeTensorMode) -> None:
        super().__init__(graph_module, garbage_collect_values=False)
        self.fake_mode = fake_mode

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n.op == "get_attr" and isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
            value = self.fake_mode.from_tensor(value, static_shapes=True)
        if n.op not in ("placeholder", "output"):
            n.meta["example_value"] = value
        return value


@contextlib.contextmanager
def _autocast_restored() -> Iterator[None]:
    """A graph that enters autocast and fails before it leaves it must not leave it on."""
    devices = [kind for kind in ("cpu", "cuda") if torch.amp.is_autocast_available(kind)]
    before = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in devices}
    cached = torch.is_autocast_cache_enabled()
    nesting = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    try:
        yield
    finally:
        for kind, (enabled, dtype) in before.items():
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(cached)
        while torch.autocast_increment_nesting() > nesting:
            torch.autocast_decrement_nesting()
            torch.autocast_decrement_nesting()
        torch.autocast_decrement_nesting()
