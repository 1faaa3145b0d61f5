"""Programs on their way out of a runtime and into another: export, dump, and what was handed in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError, InputError, PortableError
from ..graphs.dump import dump_program
from ..graphs.portable import PortableProgram
from ..graphs.program import Program
from ..graphs.stitched import PiecewiseGraph
from ..phases import GraphConfig
from .events import Recorder
from .programs import ProgramFamily

BoundProgram = tuple[PortableProgram, PiecewiseGraph]
"""A program of another process, and its graph over this model."""


def bind_programs(
    programs: Sequence[PortableProgram], model: torch.nn.Module, config: GraphConfig
) -> list[BoundProgram]:
    """Binds what a runtime was given.

    Raises:
        InputError: it is no list of programs.
        ConfigError: the config has `evaluate_guards`, and programs carry no guards.
        PortableError: one does not fit the model.
    """
    if isinstance(programs, PortableProgram) or not all(isinstance(each, PortableProgram) for each in programs):
        raise InputError(
            f"programs: expected a list of PortableProgram, got {_kinds(programs)}; make them of bytes with "
            f"PortableProgram.from_bytes"
        )
    if programs and config.evaluate_guards:
        raise ConfigError(
            "programs: expected none under evaluate_guards, since they carry no guards; drop one of the two"
        )
    return [(program, program.bind(model)) for program in programs]


def portable_programs(families: Iterable[ProgramFamily]) -> tuple[PortableProgram, ...]:
    """The portable form of every general program. Raises: PortableError."""
    return tuple(_portable(family, program) for family, program in _general(families))


def dump_programs(families: Iterable[ProgramFamily], root: Path, recorder: Recorder) -> Path | None:
    """Writes every general program; returns the first one's main file, None if there is no program.

    One that has no portable form is written all the same, and counted.
    """
    programs = _general(families)
    targets = [root] if len(programs) == 1 else [root / f"trace_{i}" for i in range(len(programs))]
    written = []
    for (family, program), target in zip(programs, targets, strict=True):
        portable: PortableProgram | PortableError
        try:
            portable = _portable(family, program)
        except PortableError as error:
            portable = error
            recorder.fallback("a program has no portable form", because=str(error))
        written.append(dump_program(program.graph, target, portable=portable))
    return written[0] if written else None


def _general(families: Iterable[ProgramFamily]) -> list[tuple[ProgramFamily, Program]]:
    return [(family, program) for family in families for program in family.general]


def _portable(family: ProgramFamily, program: Program) -> PortableProgram:
    return PortableProgram.from_graph(program.graph, family.signature, kernels=family.fused.kernels)


def _kinds(values: Any) -> str:
    """The types of what was given, in words."""
    if not isinstance(values, (list, tuple)):
        return type(values).__name__
    return f"a {type(values).__name__} of {', '.join(sorted({type(value).__name__ for value in values}))}"
