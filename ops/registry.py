"""The registry of split ops: which there are, which graph nodes call one, and how often that happened.

They register themselves where they are defined: see `piecework.ops.split_op`.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import logging
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from ..errors import RegistrationError

ENTRY_POINT_GROUP = "piecework.ops"

Capturable = bool | Callable[..., str | None]
"""Whether calls of an operator can be captured whole; a function of the call's arguments returns why not, or None."""

Prepare = Callable[..., Callable[[], Any] | None]
"""Makes a call of an operator ready to be made many times: see `prepare` of `piecework.ops.split_op`."""

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SplitOp:
    """One registered split op."""

    name: str
    """Qualified name, `namespace::op`."""
    overload: str
    """Overload name; `default` for operators that Piecework defined."""
    schema: str
    """The operator's schema, as torch prints it."""
    mutates_args: tuple[str, ...]
    """Names of the arguments that the operator writes to."""
    location: str
    """`file:line` of the registration."""
    capturable: bool | None
    """Whether its calls can be part of the capture of a whole forward; None: it depends on the call."""
    num_matched: int | None
    """Graph nodes matched by the traces of this process so far; None before the first trace."""

    @property
    def op(self) -> OpOverload:
        """The operator itself."""
        namespace, _, opname = self.name.partition("::")
        overload: OpOverload = getattr(getattr(getattr(torch.ops, namespace), opname), self.overload)
        return overload


class Registry:
    """What is registered. There is one, process-wide, because torch's operator registry is."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.ops: dict[OpOverload, SplitOp] = {}
        self.matched: dict[OpOverload, int] = {}
        self.num_traces = 0
        self.libraries: dict[str, torch.library.Library] = {}
        self.bodies: dict[str, Callable[..., Any]] = {}
        self.capturable: dict[OpOverload, Capturable] = {}
        self.prepares: dict[OpOverload, Prepare] = {}
        self.loaded_entry_points: set[tuple[str, str]] = set()

    def find(self, name: str) -> tuple[OpOverload, SplitOp] | None:
        """What is registered under a qualified name."""
        return next(((op, entry) for op, entry in self.ops.items() if entry.name == name), None)

    def add(
        self, op: OpOverload, location: str, capturable: Capturable = False, prepare: Prepare | None = None
    ) -> None:
        """Registers an operator, or registers it anew. The caller holds `lock`."""
        self.capturable[op] = capturable
        if prepare is not None:
            self.prepares[op] = prepare
        else:
            self.prepares.pop(op, None)
        self.ops[op] = SplitOp(
            name=op._schema.name,
            overload=op._schema.overload_name or "default",
            schema=str(op._schema),
            mutates_args=mutated_arguments(op),
            location=location,
            capturable=None if callable(capturable) else capturable,
            num_matched=None,
        )

    def remove(self, op: OpOverload) -> None:
        """Forgets an operator. The caller holds `lock`."""
        del self.ops[op], self.capturable[op]
        self.prepares.pop(op, None)
        self.matched.pop(op, None)


REGISTRY = Registry()


def mutated_arguments(op: OpOverload) -> tuple[str, ...]:
    """Names of the arguments that the operator's schema declares written."""
    return tuple(a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write)


def split_ops() -> tuple[SplitOp, ...]:
    """Every registered split op, sorted by name; loads the `piecework.ops` entry points first."""
    load_entry_points()
    with REGISTRY.lock:
        seen = REGISTRY.num_traces > 0
        return tuple(
            dataclasses.replace(entry, num_matched=REGISTRY.matched.get(op, 0) if seen else None)
            for op, entry in sorted(REGISTRY.ops.items(), key=lambda item: (item[1].name, item[1].overload))
        )


def defining_module(op: OpOverload) -> str:
    """Name of the module in which `split_op` defined the operator; empty for one that was defined elsewhere."""
    body = REGISTRY.bodies.get(op._schema.name)
    return body.__module__ if body is not None else ""


def load_entry_points() -> None:
    """Imports every module that an installed package lists under `piecework.ops`.

    So the set of split ops does not depend on what happened to be imported. A module that cannot be imported is
    warned about, once, and its operators are missing.
    """
    for entry_point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        key = (entry_point.name, entry_point.value)
        if key in REGISTRY.loaded_entry_points:
            continue
        REGISTRY.loaded_entry_points.add(key)
        try:
            entry_point.load()
        except Exception as error:  # somebody else's import may fail in any way
            warnings.warn(
                f"entry point {ENTRY_POINT_GROUP}: {entry_point.name} = {entry_point.value} could not be imported "
                f"({type(error).__name__}: {error}); its split ops are not registered",
                RuntimeWarning,
                stacklevel=2,
            )


def match(target: object) -> OpOverload | None:
    """The registered operator that a graph node with this target calls, or None.

    A graph may hold an overload or a packet; both are compared as objects, since their printed names differ.

    Raises:
        RegistrationError: the target is a packet of which only some overloads are split ops.
    """
    if isinstance(target, OpOverload):
        return target if target in REGISTRY.ops else None
    if not isinstance(target, OpOverloadPacket):
        return None
    overloads = [getattr(target, overload) for overload in target.overloads()]
    registered = [op for op in overloads if op in REGISTRY.ops]
    if registered and len(registered) < len(overloads):
        raise RegistrationError(
            f"the model calls {target} without an overload, and only {', '.join(map(str, registered))} of its "
            f"{len(overloads)} overloads are split ops; call the overload by name or register all of them"
        )
    return registered[0] if registered else None


def record_matches(counts: Mapping[OpOverload, int]) -> tuple[str, ...]:
    """Adds one trace's matches to the registry; returns the names of the registered ops that never matched yet."""
    with REGISTRY.lock:
        REGISTRY.num_traces += 1
        for op, count in counts.items():
            REGISTRY.matched[op] = REGISTRY.matched.get(op, 0) + count
        unmatched = tuple(entry.name for op, entry in REGISTRY.ops.items() if not REGISTRY.matched.get(op))
    if unmatched:
        logger.info("split ops that no traced graph has called so far: %s", ", ".join(unmatched))
    return unmatched
