"""One distinct piece as plain JSON data, and built again in another process with a ShapeEnv of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, _constrain_range_for_size

from ..errors import PortableError
from .audit import ANY_SIZE, Interval
from .encode import Data, Decoder, Encoder, decode_constant, encode_constant
from .expressions import decode_expr, encode_expr
from .fakes import FakeFactory, Size, TensorDescription, describe
from .memory import memory
from .piece import BuiltPiece
from .propagate import propagate


def encode_piece(piece: BuiltPiece, encoder: Encoder) -> Data:
    """Nodes, placeholder descriptions and symbols, under the canonical names of the symbols.

    Raises:
        PortableError: it holds something that cannot leave the process.
    """
    names = piece.canonical.symbols
    values = [node.meta["example_value"] for node in piece.graph_module.graph.find_nodes(op="placeholder")]
    shared = Counter(memory(value) for value in values if isinstance(value, torch.Tensor))
    groups: dict[int, int] = {}
    placeholders = [_encode_value(value, names, groups, shared) for value in values]
    dims = {symbol: name for name, symbol in piece.dims.items()}
    symbols = {}
    for symbol, name in names.items():
        interval = piece.intervals.get(dims[symbol], ANY_SIZE) if symbol in dims else ANY_SIZE
        unbacked = piece.shape_env.is_unbacked_symint(symbol)
        symbols[name] = {"unbacked": unbacked, "interval": [interval.low, interval.high]}
    return {
        "text": piece.canonical.text,
        "symbols": symbols,
        "placeholders": placeholders,
        "nodes": encoder.graph(piece.graph_module.graph, piece.graph_module, names),
        "ambient": list(piece.ambient),
    }


def build_piece(data: Data, dims: Mapping[str, str], tensors: Mapping[str, torch.Tensor], name: str) -> BuiltPiece:
    """A piece that a compiler can take, with fake values on all nodes.

    Args:
        data: what `encode_piece` returned.
        dims: canonical symbol -> name of the dim it is where the piece is used; a data-dependent size is none.
        tensors: the program's constants.
        name: for the generated code.

    Raises:
        PortableError: it is damaged, or means something else with this process's torch.
    """
    shape_env = ShapeEnv(duck_shape=False, allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
    fake_mode = FakeTensorMode(shape_env=shape_env)
    symbols = {symbol: _make_symbol(shape_env, symbol, facts) for symbol, facts in data["symbols"].items()}
    graph_module = Decoder(tensors=tensors).graph_module(data["nodes"], symbols, name)
    exprs = {symbol: value.node.expr for symbol, value in symbols.items()}
    values = [_decode_value(value, exprs) for value in data["placeholders"]]
    factory = FakeFactory(fake_mode, [value for value in values if isinstance(value, TensorDescription)])
    for node, value in zip(graph_module.graph.find_nodes(op="placeholder"), values, strict=True):
        if isinstance(value, TensorDescription):
            node.meta["example_value"] = factory.tensor(value)
        else:
            node.meta["example_value"] = factory.size(value) if isinstance(value, sympy.Basic) else value
    try:
        propagate(graph_module, fake_mode)
    except Exception as error:  # whatever an operator raises
        raise PortableError(
            f"portable: {name} cannot be built with torch {torch.__version__} ({type(error).__name__}: {error}); "
            f"make the program again"
        ) from error
    intervals = {symbol: Interval(*facts["interval"]) for symbol, facts in data["symbols"].items()}
    piece = BuiltPiece(
        graph_module=graph_module,
        fake_mode=fake_mode,
        shape_env=shape_env,
        dims={dims[symbol]: expr for symbol, expr in exprs.items() if symbol in dims},
        intervals={dims[symbol]: interval for symbol, interval in intervals.items() if symbol in dims},
        ambient=tuple(data["ambient"]),
    )
    if piece.canonical.text != data["text"]:
        raise PortableError(
            f"portable: {name} does not mean here what it meant where it was made; it is damaged, or was made with "
            f"another version of torch than {torch.__version__}; make the program again"
        )
    return piece


def _encode_value(
    value: Any, names: Mapping[sympy.Symbol, str], groups: dict[int, int], shared: Mapping[int, int]
) -> Data:
    if isinstance(value, torch.SymInt):
        return {"size": encode_expr(value.node.expr, names)}
    if not isinstance(value, torch.Tensor):
        return {"constant": encode_constant(value)}
    if value.layout is not torch.strided or value.is_conj() or value.is_neg():
        raise PortableError(
            f"portable: a piece takes a {value.layout} tensor or a lazy conjugate, which cannot travel; make it dense "
            f"(x.to_dense(), x.resolve_conj()) before the model"
        )
    description = describe(value)
    whole = shared[description.memory] > 1 or description.offset != 0
    return {
        "tensor": str(value.dtype).removeprefix("torch."),
        "device": str(value.device),
        "sizes": [_encode_size(size, names) for size in description.sizes],
        "strides": [_encode_size(stride, names) for stride in description.strides],
        "offset": _encode_size(description.offset, names),
        "memory": groups.setdefault(memory(value), len(groups)),
        # Of memory with one user nothing more is asked than that tensor's own size.
        "memory_bytes": _encode_size(description.memory_bytes, names) if whole else 0,
    }


def _encode_size(size: Size, names: Mapping[sympy.Symbol, str]) -> Data:
    return encode_expr(size, names)


def _decode_value(data: Data, symbols: Mapping[str, sympy.Symbol]) -> Any:
    if "size" in data:
        return decode_expr(data["size"], symbols)
    if "tensor" not in data:
        return decode_constant(data["constant"])
    numbers: dict[str, Any] = {
        name: tuple(_decode_size(size, symbols) for size in data[name]) for name in ("sizes", "strides")
    }
    return TensorDescription(
        dtype=getattr(torch, data["tensor"]),
        device=torch.device(data["device"]),
        offset=_decode_size(data["offset"], symbols),
        memory=data["memory"],
        memory_bytes=_decode_size(data["memory_bytes"], symbols),
        **numbers,
    )


def _decode_size(data: Data, symbols: Mapping[str, sympy.Symbol]) -> Size:
    expr = decode_expr(data, symbols)
    return int(expr) if expr.is_Integer else expr


def _make_symbol(shape_env: ShapeEnv, name: str, facts: Data) -> torch.SymInt:
    """A symbol of which the ShapeEnv knows what the trace knew."""
    interval = Interval(*facts["interval"])
    if facts["unbacked"]:
        with shape_env.ignore_fresh_unbacked_symbols():
            size = shape_env.create_unbacked_symint()
        _constrain_range_for_size(size, min=interval.low, max=interval.high)
        return size
    # The smallest size: what `BuiltPiece` takes as the traced one when it audits the compiler's guards.
    hint = max(interval.low, 2)
    source = ConstantSource(name)
    expr = shape_env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    made = shape_env.create_symintnode(expr, hint=hint, source=source)
    assert isinstance(made, torch.SymInt)
    # Asking is how a ShapeEnv learns of a bound; the audit then finds it among the guards.
    if not (made >= interval.low and (interval.high is None or made <= interval.high)):
        raise PortableError(f"portable: the interval {interval} of {name} has no size; make the program again")
    return made
