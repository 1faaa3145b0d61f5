"""One piece with everything that a compiler asks of it, and what a compiler made of it."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import sympy
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ..errors import CompileError, TraceError
from ..phases import Compiler
from . import audit
from .compilers import DEFAULT_OPTIONS, CompiledCallable, CompilerOptions, compile_piece
from .fingerprint import Canonical, canonical, fingerprint
from .inputs import TOKENS
from .specialize import specialize


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CompiledPiece:
    """What a compiler made of one fingerprint."""

    call: CompiledCallable
    intervals: audit.Intervals
    """The sizes for which it is valid, by the canonical names of its symbols: compilers add guards of their own."""
    seconds: float


CompiledKey = tuple[str, Compiler]
"""Fingerprint and compiler."""

CompiledPieces = MutableMapping[CompiledKey, CompiledPiece]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuiltPiece:
    """A piece whose nodes carry fake values.

    Pieces of one trace share its fake mode and ShapeEnv; one that came from elsewhere has its own.
    """

    graph_module: GraphModule
    """Placeholders with `example_value`; returns a tuple."""
    fake_mode: FakeTensorMode
    shape_env: ShapeEnv
    dims: Mapping[str, sympy.Symbol]
    """Names of the dynamic dims that the ShapeEnv knows, and their symbols; the piece need not depend on all."""
    intervals: audit.Intervals
    """The sizes for which the trace is valid, by dim."""
    ambient: tuple[str, ...] = ()
    """The settings of torch that it was traced under."""
    kept: tuple[int, ...] | None = None
    """Of a specialised piece, which of the general one's placeholders it still takes."""

    @functools.cached_property
    def canonical(self) -> Canonical:
        """Its canonical text and symbols."""
        intervals = {symbol: self.intervals.get(name, audit.ANY_SIZE) for name, symbol in self.dims.items()}
        return canonical(self.graph_module, intervals=intervals, ambient=self.ambient)

    @functools.cached_property
    def fingerprint(self) -> str:
        """The hash of its canonical text."""
        return fingerprint(self.canonical.text)

    @functools.cached_property
    def dim_names(self) -> Mapping[str, str]:
        """Canonical symbol -> the name of the dim, for those that are dims: `{"s0": "tokens"}`."""
        names = {symbol: name for name, symbol in self.dims.items()}
        return {canon: names[symbol] for symbol, canon in self.canonical.symbols.items() if symbol in names}

    def specialized(self, bucket: int) -> BuiltPiece:
        """The piece for exactly `bucket` tokens."""
        values = {self.dims[TOKENS]: bucket} if TOKENS in self.dims else {}
        special = specialize(self.graph_module, values, self.fake_mode)
        return dataclasses.replace(self, graph_module=special.graph_module, kept=special.kept)

    def compile(self, compiler: Compiler, options: CompilerOptions = DEFAULT_OPTIONS) -> CompiledPiece:
        """Compiles it; the piece itself is left as it is.

        Raises:
            CompileError: the compiler failed, or added a condition on sizes that is no interval.
        """
        started = time.perf_counter()
        call = compile_piece(compiler, self.graph_module, self.fake_mode, options)
        try:
            intervals = self._audit()
        except TraceError as error:
            raise CompileError(f"compiler {compiler}: it added a condition that cannot be kept. {error}") from error
        # The ShapeEnv may be a whole trace's; the piece is shared by other traces, which may hold for other sizes.
        own = {canon: intervals[name] for canon, name in self.dim_names.items() if name in intervals}
        return CompiledPiece(call=call, intervals=own, seconds=time.perf_counter() - started)

    def pick(self, call: CompiledCallable) -> CompiledCallable:
        """A callable that takes the general piece's arguments."""
        return call if self.kept is None else _pick(call, self.kept)

    def _audit(self) -> audit.Intervals:
        symbols = {name: {symbol} for name, symbol in self.dims.items()}
        traced_at = {name: max(interval.low, 2) for name, interval in self.intervals.items()}
        return audit.intervals_after_compile(self.shape_env, symbols, traced_at)


def _pick(call: CompiledCallable, kept: Sequence[int]) -> CompiledCallable:
    @functools.wraps(call, assigned=(), updated=())
    def picked(*arguments: Any) -> Sequence[Any]:
        return call(*[arguments[i] for i in kept])

    return picked
