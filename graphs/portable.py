"""The portable program: what a trace yields, in a form that leaves the process and is bound to a live model elsewhere.

It holds the stitch, each distinct piece once, and for every placeholder which input it is or where in the model its
tensor lives. Neither Dynamo nor a compiler is needed to bind it. Nothing in it is pickled: it is JSON, and the tensors
that are constants of the graph, in one safetensors file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch._ops import OpOverload

from ..errors import PortableError
from .audit import Interval
from .bindings import Bindings
from .encode import Data, Decoder, Encoder, decode_constant, decode_function, encode_constant, encode_function
from .inputs import Signature
from .piece import BuiltPiece
from .portable_bindings import bind_placeholders, decode_binding, encode_binding, encode_placeholders
from .portable_piece import build_piece, encode_piece
from .portable_signature import decode_signature, encode_signature
from .remarks import Remark
from .split import Piece, SplitGraph, Subgraph
from .stitched import PiecewiseGraph
from .structure import decode_structure, encode_structure
from .trace import TraceFacts

FORMAT = 1
"""Of the data; a program of another one is refused."""

_METADATA = "piecework"
"""The file's only metadata, since safetensors keeps no order: the SHA-256 of everything else, and the JSON."""


class PortableProgram:
    """A traced model as plain data. Immutable; equal programs have equal bytes."""

    def __init__(self, data: Data, tensors: Mapping[str, torch.Tensor]) -> None:
        """For `from_graph` and `from_bytes`."""
        self._data = data
        self._tensors = tensors

    @classmethod
    def from_graph(
        cls,
        graph: PiecewiseGraph,
        signature: Signature,
        *,
        kernels: Sequence[tuple[str, str]] = (),
        remarks: Sequence[Remark] = (),
    ) -> PortableProgram:
        """The portable form of a graph that was traced for inputs of this signature.

        Args:
            kernels: the (fused op, kernel) that it was traced with, where that is not the native body.
            remarks: what is to be said of the trace where the program arrives.

        Raises:
            PortableError: something in it cannot leave the process; the message says what and where.
        """
        if graph.writes_frozen:
            raise PortableError(
                "portable: the model writes into a tensor that is no attribute of it (a global, a closure), and that "
                "would be a copy elsewhere; register it as a buffer"
            )
        encoder = Encoder()
        pieces: dict[str, Data] = {}
        for fingerprint, uses in graph.distinct_pieces().items():
            pieces[fingerprint] = encode_piece(graph.built(uses[0]), encoder)
        facts = graph.traced
        data = {
            "format": FORMAT,
            "torch": torch.__version__,
            "signature": encode_signature(signature),
            "kernels": [list(choice) for choice in kernels],
            "remarks": [[remark.text, remark.because] for remark in remarks],
            "mode": facts.mode,
            "unbacked_failure": facts.unbacked_failure,
            "intervals": {name: [interval.low, interval.high] for name, interval in facts.intervals.items()},
            "frozen": list(facts.frozen),
            "regions_reused": facts.regions_reused,
            "placeholders": encode_placeholders(facts.bindings, encoder),
            "output": encode_structure(facts.output, lambda binding: encode_binding(binding, encoder)),
            "rows": {path: sorted(map(list, rows.items())) for path, rows in graph.rows.items()},
            "reduced": dict(graph.reduced),
            "written_inputs": list(graph.written_inputs),
            "root": encoder.graph(graph.split.root, None, {}),
            "subgraphs": [[s.kind, [encode_function(op) for op in s.ops]] for s in graph.split.subgraphs],
            "matches": [[encode_function(op), count] for op, count in graph.split.matches.items()],
            "uses": {
                piece.name: {
                    "fingerprint": graph.fingerprints[piece.name],
                    "dims": dict(graph.dim_names[piece.name]),
                }
                for piece in graph.split.pieces
            },
            "pieces": pieces,
        }
        return cls(data, encoder.tensors)

    @classmethod
    def from_bytes(cls, content: bytes) -> PortableProgram:
        """Reads what `to_bytes` wrote.

        Raises:
            PortableError: it is truncated, changed in any bit, something else, or of another format.
        """
        if not isinstance(content, bytes):
            raise PortableError(
                f"portable: expected the bytes that PortableProgram.to_bytes wrote, got {type(content).__name__}; read "
                f"the file first, as in Path(...).read_bytes()"
            )
        try:
            header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
            digest, _, text = header["__metadata__"][_METADATA].partition("\n")
            stored = load_tensors(content)
            if _digest(text, stored) != digest:
                raise ValueError("its checksum is another")
            data = json.loads(text)
        except (ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
            raise PortableError(
                f"portable: expected a program that PortableProgram.to_bytes wrote, got {len(content)} bytes that are "
                f"none ({type(error).__name__}: {error}); make it again"
            ) from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise PortableError(f"portable: expected format {FORMAT}, got {found!r}; make the program again")
        return cls(data, {key: _decode_tensor(facts, stored) for key, facts in data["tensors"].items()})

    def to_bytes(self) -> bytes:
        """The program as one safetensors file; the same in every process."""
        stored: dict[str, torch.Tensor] = {}
        memories: dict[int, str] = {}
        facts = {key: _encode_tensor(tensor, stored, memories) for key, tensor in self._tensors.items()}
        text = json.dumps({**self._data, "tensors": facts}, separators=(",", ":"), allow_nan=False)
        return save_tensors(stored, metadata={_METADATA: f"{_digest(text, stored)}\n{text}"})

    @property
    def signature(self) -> Signature:
        """The inputs that it was traced for."""
        return decode_signature(self._data["signature"])

    @property
    def kernels(self) -> tuple[tuple[str, str], ...]:
        """(fused op, kernel) that it was traced with, where that is not the native body."""
        return tuple((op, kernel) for op, kernel in self._data["kernels"])

    @property
    def remarks(self) -> tuple[Remark, ...]:
        """What the process that traced it has to say of the trace; nothing where that process has told it itself."""
        return tuple(Remark(text=text, because=because) for text, because in self._data.get("remarks", ()))

    @property
    def torch_version(self) -> str:
        """The torch that traced it."""
        return str(self._data["torch"])

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """Of its distinct pieces, in order of first appearance."""
        return tuple(self._data["pieces"])

    @property
    def text(self) -> str:
        """The canonical text of the whole: equal for programs that do the same to the same tensors of a model.

        Names of nodes are not in it, nor how the trace was made.
        """
        data = self._data
        lines = [f"inputs {self.signature}", f"valid for {data['intervals']}"]
        lines += [f"{name} = {use['fingerprint']} over {use['dims']}" for name, use in data["uses"].items()]
        lines += [f"%{i} is {_line(each)}" for i, each in enumerate(data["placeholders"])]
        for i, (op, target, args, kwargs, _) in enumerate(data["root"]):
            lines.append(f"%{i} = {op} {'' if op == 'placeholder' else _line(target)} {_line(args)} {_line(kwargs)}")
        lines.append(f"output {_line(data['output'])}, rows {_line(data['rows'])}, writes {data['written_inputs']}")
        lines += [f"{fingerprint}:\n{piece['text']}" for fingerprint, piece in data["pieces"].items()]
        return "\n".join(lines)

    def piece(self, fingerprint: str) -> BuiltPiece:
        """One distinct piece, alone, ready for a compiler; its dims are named as where it first appears.

        Raises:
            PortableError: there is none of that fingerprint, or it means something else with this process's torch.
        """
        if fingerprint not in self._data["pieces"]:
            raise PortableError(
                f"portable: expected one of the fingerprints {', '.join(self.fingerprints)}, got {fingerprint!r}"
            )
        use = next(use for use in self._data["uses"].values() if use["fingerprint"] == fingerprint)
        return build_piece(self._data["pieces"][fingerprint], use["dims"], self._tensors, f"Piece_{fingerprint[:12]}")

    def bind(self, model: torch.nn.Module) -> PiecewiseGraph:
        """The graph over a live model's own tensors. Pieces are built when a compiler asks for them.

        Raises:
            PortableError: the model lacks tensors, or has others than the program was traced with, all of them
                listed; or an operator of the program does not exist in this process; or another torch made it.
        """
        data = self._data
        if _release(self.torch_version) != _release(torch.__version__):
            raise PortableError(
                f"portable: the program was made with torch {self.torch_version}, and this is {torch.__version__}; "
                f"make it again"
            )
        bindings = bind_placeholders(data["placeholders"], model, self._tensors)
        facts = TraceFacts(
            bindings=Bindings(bindings),
            output=decode_structure(data["output"], lambda each: decode_binding(each, model, self._tensors)),
            intervals={name: Interval(*interval) for name, interval in data["intervals"].items()},
            frozen=tuple(data["frozen"]),
            mode=data["mode"],
            unbacked_failure=data["unbacked_failure"],
            regions_reused=data["regions_reused"],
        )
        uses = data["uses"]
        return PiecewiseGraph(
            facts,
            self._split_graph(),
            build=self._build,
            texts={name: data["pieces"][use["fingerprint"]]["text"] for name, use in uses.items()},
            fingerprints={name: use["fingerprint"] for name, use in uses.items()},
            dim_names={name: use["dims"] for name, use in uses.items()},
            rows={path: dict(map(tuple, rows)) for path, rows in data["rows"].items()},
            reduced=data["reduced"],
            written_inputs=tuple(data["written_inputs"]),
            inputs=self.signature,
        )

    def _build(self, piece: Piece) -> BuiltPiece:
        use = self._data["uses"][piece.name]
        return build_piece(self._data["pieces"][use["fingerprint"]], use["dims"], self._tensors, piece.name)

    def _split_graph(self) -> SplitGraph:
        root = Decoder(tensors=self._tensors).graph(self._data["root"], {}, torch.nn.Module())
        subgraphs: list[Subgraph] = []
        for kind, ops in self._data["subgraphs"]:
            index = sum(s.piece is not None for s in subgraphs)
            piece = Piece(index=index, graph_module=None) if kind == "piece" else None
            subgraphs.append(Subgraph(kind=kind, piece=piece, ops=tuple(map(_operator, ops))))
        matches = {_operator(op): count for op, count in self._data["matches"]}
        return SplitGraph(root=root, subgraphs=tuple(subgraphs), matches=matches)


def _digest(text: str, stored: Mapping[str, torch.Tensor]) -> str:
    """Of everything that is stored: neither the stitch nor a constant is covered by the pieces' fingerprints."""
    digest = hashlib.sha256(text.encode())
    for name in sorted(stored):
        digest.update(f"{name} {stored[name].numel()} ".encode())
        digest.update(stored[name].numpy().tobytes())
    return digest.hexdigest()


def _line(data: Data) -> str:
    return json.dumps(data, sort_keys=True)


def _release(version: str) -> str:
    """Without what says for which device torch was built."""
    return version.partition("+")[0]


def _operator(data: Data) -> OpOverload:
    found = decode_function(data)
    assert isinstance(found, OpOverload)
    return found


def _encode_tensor(tensor: torch.Tensor, stored: dict[str, torch.Tensor], memories: dict[int, str]) -> Data:
    """A constant as a view of its memory, which is stored once for all that share it."""
    memory = tensor.untyped_storage()
    key = memories.setdefault(memory._cdata, f"memory_{len(memories)}")
    if key not in stored:
        stored[key] = torch.tensor([], dtype=torch.uint8, device=tensor.device).set_(memory).cpu()
    return {
        "dtype": encode_constant(tensor.dtype),
        "device": str(tensor.device),
        "sizes": list(tensor.shape),
        "strides": list(tensor.stride()),
        "offset": tensor.storage_offset(),
        "memory": key,
    }


def _decode_tensor(facts: Data, stored: dict[str, Any]) -> torch.Tensor:
    dtype, device = decode_constant(facts["dtype"]), torch.device(facts["device"])
    try:
        base = stored[facts["memory"]]
        if base.device != device:
            base = stored[facts["memory"]] = base.to(device)
    except (RuntimeError, AssertionError) as error:
        raise PortableError(
            f"portable: the program holds a constant on {device}, which is not here ({error})"
        ) from error
    # Not a view of the base: its number of bytes need not be a multiple of the item size.
    empty = torch.tensor([], dtype=dtype, device=device)
    return empty.set_(base.untyped_storage(), facts["offset"], facts["sizes"], facts["strides"])
