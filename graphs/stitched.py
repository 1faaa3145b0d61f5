"""A traced model cut at its split ops: the pieces by fingerprint, the stitch between them, and what it is bound to.

It comes from a trace, or from a `PortableProgram` that another process made. Compiling its pieces gives a `Program`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.fx import GraphModule, Node

from ..phases import Compiler
from . import audit
from .bindings import FrozenTensor, InputBinding, ModelTensor, PlaceholderBinding, SizeBinding
from .blank import blank_outputs
from .compilers import DEFAULT_OPTIONS, CompiledCallable, CompilerOptions
from .data_sizes import DataSize, find_data_size
from .inputs import TOKENS, InputContract, Signature
from .memory import memory_of
from .mutation import mutated_arguments
from .outputs import Rows
from .piece import BuiltPiece, CompiledPieces
from .program import Program, ProgramKind
from .propagate import fake_mode_of
from .recorder import Recorder
from .root_memory import Memories, output_memories, root_memories
from .rows import output_rows, reduced_outputs
from .split import Piece, SplitGraph, split
from .trace import Traced, TraceFacts
from .whole_inputs import layouts_of_inputs

Build = Callable[[Piece], BuiltPiece]


class PiecewiseGraph:
    """A model cut into pieces, ready to be compiled."""

    def __init__(
        self,
        facts: TraceFacts,
        split_graph: SplitGraph,
        *,
        build: Build,
        texts: Mapping[str, str],
        fingerprints: Mapping[str, str],
        dim_names: Mapping[str, Mapping[str, str]],
        rows: Mapping[str, Rows],
        reduced: Mapping[str, str] | None = None,
        written_inputs: tuple[str, ...],
        writes_frozen: bool = False,
        inputs: Signature,
        whole_bucket: int | None = None,
        pieces_write_model: bool | None = None,
    ) -> None:
        self.traced = facts
        self.split = split_graph
        self.texts = texts
        """Name of a piece -> its canonical text."""
        self.fingerprints = fingerprints
        """Name of a piece -> the hash of its canonical text."""
        self.dim_names = dim_names
        """Name of a piece -> its canonical symbols that are dims, and their names: `{"s0": "tokens"}`."""
        self.rows = rows
        self.reduced = reduced or {}
        """Outputs that are computed from the tokens and have no rows: path -> what they are, in words."""
        self.written_inputs = written_inputs
        self.writes_frozen = writes_frozen
        """Whether the model writes into a tensor that it does not hold."""
        self.inputs = inputs
        """The layouts of the tensors that it takes; of others too, and of constants, where a signature was at hand."""
        self.whole_bucket = whole_bucket
        """Of a whole forward, the one number of tokens that it is for; see `whole_graph`."""
        self.trace_s = 0.0
        """Seconds that its trace took; 0 for a graph that another process traced."""
        self.num_compiles = 0
        """Pieces that were compiled for its programs; what another graph had compiled is not counted."""
        self.compile_s = 0.0
        """Seconds that these compiles took."""
        self._build = build
        self._built: dict[str, BuiltPiece] = {}
        self._blank_outputs: dict[str, frozenset[int]] = {}
        self._output_memories: dict[str, tuple[Memories, ...]] = {}
        if pieces_write_model is not None:  # known: in a whole forward, split ops are in the piece
            self.pieces_write_model = pieces_write_model

    @classmethod
    def from_trace(cls, traced: Traced, contract: InputContract, *, ambient: Sequence[str] = ()) -> PiecewiseGraph:
        """Cuts a trace, made under the settings `ambient` of torch.

        Raises:
            TraceError: it cannot be cut, or padded rows could not be cut off an output.
        """
        rows = output_rows(traced, contract)
        reduced = reduced_outputs(traced, contract, rows)
        split_graph = split(traced.graph_module)
        fake_mode = fake_mode_of(traced.graph_module, traced.shape_env)
        built = {
            piece.name: BuiltPiece(
                graph_module=piece.graph_module,
                fake_mode=fake_mode,
                shape_env=traced.shape_env,
                dims=traced.symbols,
                intervals=traced.intervals,
                ambient=tuple(ambient),
            )
            for piece in split_graph.pieces
            if piece.graph_module is not None
        }
        written = _written(traced)
        return cls(
            traced,
            split_graph,
            build=lambda piece: built[piece.name],
            texts={name: piece.canonical.text for name, piece in built.items()},
            fingerprints={name: piece.fingerprint for name, piece in built.items()},
            dim_names={name: piece.dim_names for name, piece in built.items()},
            rows=rows,
            reduced=reduced,
            written_inputs=tuple(b.name for b in written if isinstance(b, InputBinding)),
            writes_frozen=any(isinstance(b, FrozenTensor) for b in written),
            inputs=layouts_of_inputs(traced, contract),
        )

    @property
    def num_distinct(self) -> int:
        """How many different fingerprints the pieces have."""
        return len(set(self.fingerprints.values()))

    def built(self, piece: Piece) -> BuiltPiece:
        """A piece with fake values, as a compiler wants it."""
        if piece.name not in self._built:
            self._built[piece.name] = self._build(piece)
        return self._built[piece.name]

    def blank_outputs(self, name: str) -> frozenset[int]:
        """Indices of a piece's outputs that nothing was written to."""
        key = self.fingerprints[name]
        if key not in self._blank_outputs:
            self._blank_outputs[key] = blank_outputs(self.built(self._pieces[name]).graph_module)
        return self._blank_outputs[key]

    @functools.cached_property
    def memories(self) -> Mapping[Node, Memories]:
        """The values of the stitched graph -> the memories that they may lie in."""
        root = self.split.root
        placeholders = zip(root.find_nodes(op="placeholder"), self.traced.bindings.placeholders, strict=True)
        sizes = {node for node, binding in placeholders if isinstance(binding, SizeBinding)}
        return root_memories(root, sizes, self._memories_of_outputs)

    def _memories_of_outputs(self, name: str) -> tuple[Memories, ...]:
        key = self.fingerprints[name]
        if key not in self._output_memories:
            self._output_memories[key] = output_memories(self.built(self._pieces[name]).graph_module)
        return self._output_memories[key]

    @functools.cached_property
    def _pieces(self) -> Mapping[str, Piece]:
        return {piece.name: piece for piece in self.split.pieces}

    @functools.cached_property
    def data_size(self) -> DataSize | None:
        """An operator of a piece that makes a size which depends on data, if there is one."""
        for first, *_ in self.distinct_pieces().values():
            built = self.built(first)
            found = find_data_size(built.graph_module, built.dims.values())
            if found is not None:
                return found
        return None

    @functools.cached_property
    def pieces_write_model(self) -> bool:
        """Whether a piece, and not a split op, writes into a tensor of the model: each call counts then."""
        root = self.split.root
        placeholders = zip(root.find_nodes(op="placeholder"), self.traced.bindings.placeholders, strict=True)
        own = {node for node, binding in placeholders if isinstance(binding, ModelTensor)}
        writes = {
            fingerprint: _written_placeholders(self.built(first).graph_module)
            for fingerprint, (first, *_) in self.distinct_pieces().items()
        }
        for call in root.find_nodes(op="call_module"):
            for i in writes[self.fingerprints[str(call.target)]]:
                argument = call.args[i]
                if isinstance(argument, Node) and self.memories[argument] & own:
                    return True
        return False

    def distinct_pieces(self) -> dict[str, list[Piece]]:
        """The pieces of each fingerprint, in order of first appearance."""
        groups: dict[str, list[Piece]] = {}
        for piece in self.split.pieces:
            groups.setdefault(self.fingerprints[piece.name], []).append(piece)
        return groups

    def compile_general(
        self,
        compiler: Compiler,
        compiled: CompiledPieces,
        recorder: Recorder,
        options: CompilerOptions = DEFAULT_OPTIONS,
    ) -> Program:
        """Compiles each distinct piece that `compiled` lacks for any size, and links the general program.

        Raises:
            CompileError: a compiler failed on a piece.
        """
        return self._compile("general", None, compiler, compiled, recorder, options)

    def compile_specialized(
        self,
        bucket: int,
        compiler: Compiler,
        compiled: CompiledPieces,
        recorder: Recorder,
        options: CompilerOptions = DEFAULT_OPTIONS,
    ) -> Program:
        """Compiles each distinct piece for exactly `bucket` tokens, and links the specialised program.

        Raises:
            CompileError: a compiler failed on a piece.
        """
        return self._compile("specialized", bucket, compiler, compiled, recorder, options)

    def compile_whole(
        self,
        bucket: int,
        compiled: CompiledPieces,
        recorder: Recorder,
        options: CompilerOptions = DEFAULT_OPTIONS,
    ) -> Program:
        """Compiles the whole forward, split ops included, for exactly `bucket` tokens by Inductor.

        Args:
            options: with the mode of `torch.compile` whose settings apply.

        Raises:
            CompileError: the compiler failed on it, or there is no whole forward for `bucket`; see `whole_graph`.
        """
        from .whole import whole_graph  # which makes graphs of this class

        whole = whole_graph(self, bucket)
        return whole._compile("whole", bucket, Compiler.INDUCTOR, compiled, recorder, options)

    def _compile(
        self,
        kind: ProgramKind,
        bucket: int | None,
        compiler: Compiler,
        compiled: CompiledPieces,
        recorder: Recorder,
        options: CompilerOptions,
    ) -> Program:
        calls: dict[str, CompiledCallable] = {}
        intervals = self.traced.intervals
        title, detail = _announced(kind, bucket, options)
        special: dict[Any, BuiltPiece] = {}
        with recorder.progress(title, total=self.num_distinct) as advance:
            for piece in self.split.pieces:
                dims, built = self.dim_names[piece.name], None
                key = (self.fingerprints[piece.name], compiler)
                if bucket is not None and kind == "specialized":
                    # Equal pieces over the same dims are equal once a size is filled in.
                    use = (*key, *dims.items())
                    if use not in special:
                        special[use] = self.built(piece).specialized(bucket)
                    built = special[use]
                    key, dims = (built.fingerprint, compiler), built.dim_names
                if key not in compiled:
                    compiled[key] = (built or self.built(piece)).compile(compiler, options)
                    self.num_compiles += 1
                    self.compile_s += compiled[key].seconds
                    recorder.record(
                        f"compile_{kind}",
                        seconds=compiled[key].seconds,
                        fingerprint=key[0],
                        compiler=str(compiler),
                        **detail,
                    )
                    advance()
                valid = {dims[symbol]: interval for symbol, interval in compiled[key].intervals.items()}
                intervals = audit.intersect(intervals, valid)
                calls[piece.name] = compiled[key].call if built is None else built.pick(compiled[key].call)
        if bucket is not None:
            intervals = {**intervals, TOKENS: audit.Interval(bucket, bucket)}
        return Program(self, calls, kind=kind, intervals=intervals)


def _announced(kind: ProgramKind, bucket: int | None, options: CompilerOptions) -> tuple[str, dict[str, Any]]:
    """What a compile is called where its progress is shown, and what is recorded of it."""
    if bucket is None:
        return "compiling the general program", {}
    if kind == "whole":
        return f"compiling the whole forward for {bucket} tokens", {"bucket": bucket, "mode": options.mode or "default"}
    return f"compiling bucket {bucket}", {"bucket": bucket}


def _written_placeholders(graph_module: GraphModule) -> list[int]:
    """Indices of the placeholders that a piece writes into."""
    nodes, placeholders = graph_module.graph.nodes, graph_module.graph.find_nodes(op="placeholder")
    written = {memory_of(argument) for node in nodes for argument in mutated_arguments(node)} - {None}
    return [i for i, placeholder in enumerate(placeholders) if memory_of(placeholder) in written]


def _written(traced: Traced) -> list[PlaceholderBinding]:
    """The placeholders that the model writes into, itself or through a split op."""
    written = {
        memory_of(argument) for node in traced.graph_module.graph.nodes for argument in mutated_arguments(node)
    } - {None}
    placeholders: Sequence[Node] = list(traced.graph_module.graph.find_nodes(op="placeholder"))
    return [
        binding
        for node, binding in zip(placeholders, traced.bindings.placeholders, strict=True)
        if memory_of(node) in written
    ]
