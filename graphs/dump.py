"""The split graph as Python files that a person can read and run.

`program.py` has the stitched forward and says how it is called, one `piece_<fingerprint>.py` each distinct piece, and
`program.safetensors` is the portable program, if it has one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, Node

from ..errors import PortableError
from ..ops import registry
from .bindings import FrozenTensor, InputBinding, ModelTensor, SizeBinding
from .portable import PortableProgram
from .stitched import PiecewiseGraph

_HEADER = "import torch\nfrom math import inf, nan\nfrom torch import device\n"


def dump_program(
    graph: PiecewiseGraph, directory: Path, *, portable: PortableProgram | PortableError | None = None
) -> Path:
    """Writes the files into `directory`, made if missing; returns the path of `program.py`.

    Files of an earlier dump there are removed. `portable` is the same program in portable form, or why it has none.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for pattern in ("piece_*.py", "frozen_*.pt", "constant_*.pt", PORTABLE_FILE):
        for stale in directory.glob(pattern):
            stale.unlink()
    modules = {}
    for fingerprint, pieces in graph.distinct_pieces().items():
        module = f"piece_{fingerprint[:12]}"
        graph_module = graph.built(pieces[0]).graph_module
        constants = _constants(graph_module, directory, module)
        used_by = ", ".join(piece.name for piece in pieces)
        text = "\n".join(f"# {line}" for line in graph.texts[pieces[0].name].splitlines())
        source = _function(graph_module.graph, constants)
        (directory / f"{module}.py").write_text(f'"""{used_by}"""\n\n{_HEADER}{_load(constants)}\n{text}\n\n{source}')
        modules.update({piece.name: module for piece in pieces})
    path = directory / "program.py"
    path.write_text(_program(graph, modules, directory, portable))
    if isinstance(portable, PortableProgram):
        (directory / PORTABLE_FILE).write_bytes(portable.to_bytes())
    return path


PORTABLE_FILE = "program.safetensors"


def _program(
    graph: PiecewiseGraph,
    modules: Mapping[str, str],
    directory: Path,
    portable: PortableProgram | PortableError | None,
) -> str:
    frozen = {}
    arguments = []
    for i, binding in enumerate(graph.traced.bindings.placeholders):
        if isinstance(binding, InputBinding):
            arguments.append(f"inputs[{binding.name!r}]")
        elif isinstance(binding, SizeBinding):
            arguments.append(f"sizes[{binding.name!r}]")
        elif isinstance(binding, ModelTensor):
            arguments.append(f"tensors[{binding.path!r}]")
        elif isinstance(binding, FrozenTensor):
            frozen[f"frozen_{i}"] = binding.tensor
            arguments.append(f"frozen_{i}")
    for name, tensor in frozen.items():
        torch.save(tensor, directory / f"{name}.pt")
    imports = "\n".join([*_split_op_imports(graph), *(f"import {m}" for m in dict.fromkeys(modules.values()))])
    listed = ",\n        ".join(arguments)
    return (
        f'"""{_explanation(graph, portable)}"""\n\n{_HEADER}\n{imports}\n{_load(frozen)}\n\n'
        f"{_function(graph.split.root, {}, modules, name='stitched')}\n\n"
        f"def forward(inputs, tensors, sizes):\n"
        f'    """inputs: tensors by name; tensors: the model\'s, by dotted name; sizes: dynamic dims by name."""\n'
        f"    return stitched(\n        {listed},\n    )\n"
    )


def _explanation(graph: PiecewiseGraph, portable: PortableProgram | PortableError | None) -> str:
    """The docstring of `program.py`: what it is, and how it is called."""
    split_at = sorted({op._schema.name for op in graph.split.matches})
    facts = graph.traced
    inputs = ", ".join(f"{b.name!r}: ..." for b in facts.bindings.placeholders if isinstance(b, InputBinding))
    sizes = ", ".join(f"{name!r}: 4" for name in facts.intervals) or "'tokens': 4"
    lines = [
        f"A traced model, split at {', '.join(split_at) or 'nothing'}.",
        "",
        f"mode: {facts.mode}; valid for {facts.interval} tokens; {len(graph.split.pieces)} pieces, "
        f"{graph.num_distinct} distinct.",
        "",
        "From this folder:",
        "",
        "    import program",
        "    tensors = {**dict(model.named_parameters(remove_duplicate=False)),",
        "               **dict(model.named_buffers(remove_duplicate=False))}",
        "    with torch.inference_mode():",
        f"        outputs = program.forward({{{inputs}}}, tensors, {{{sizes}}})",
        "",
    ]
    if isinstance(portable, PortableError):
        lines += [f"It has no portable form. {portable}", ""]
    elif portable is not None:
        lines += [f"{PORTABLE_FILE} is its portable form, for piecework.PortableProgram.from_bytes(content).", ""]
    return "\n".join(lines).replace("\\", "\\\\").replace('"', "'")


def _split_op_imports(graph: PiecewiseGraph) -> list[str]:
    """The modules that define the split ops of the graph: nobody else imports them in another process."""
    modules = {registry.defining_module(op) for op in graph.split.matches}
    lines = [f"import {module}  # defines split ops" for module in sorted(modules - {"__main__", ""})]
    if "__main__" in modules:
        lines.append("# Its split ops are those of a script, which has to define them before this file is imported.")
    return lines


def _function(
    graph: Graph, constants: Mapping[str, Any], modules: Mapping[str, str] | None = None, name: str = "forward"
) -> str:
    """A graph as one plain function, from FX's own code generation."""
    source = graph.python_code("self").src
    source = re.sub(r"^def forward\(self,? ?", f"def {name}(", source.strip(), count=1)
    for target in constants:
        source = source.replace(f"self.{target}", _constant_name(target))
    for piece, module in (modules or {}).items():
        source = re.sub(rf"\bself\.{piece}\(", f"{module}.forward(", source)
    return f"{source.rstrip()}\n"


def _constants(graph_module: torch.fx.GraphModule, directory: Path, module: str) -> dict[str, Any]:
    found = {}
    for node in _attribute_nodes(graph_module.graph):
        value: Any = graph_module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        found[str(node.target)] = value
        torch.save(value, directory / f"{_constant_name(str(node.target))}.pt")
    return found


def _attribute_nodes(graph: Graph) -> Iterator[Node]:
    return (node for node in graph.nodes if node.op == "get_attr")


def _constant_name(target: str) -> str:
    return "constant_" + re.sub(r"\W", "_", target)


def _load(constants: Mapping[str, Any]) -> str:
    if not constants:
        return ""
    lines = ["from pathlib import Path\n"]
    for target in constants:
        name = target if target.startswith("frozen_") else _constant_name(target)
        lines.append(f'{name} = torch.load(Path(__file__).with_name("{name}.pt"), weights_only=False)')
    return "\n".join(lines) + "\n"
