"""The per-step context: what split ops read inside their bodies, never on the traced path.

Dynamo cannot trace `ContextVar.get`, so a model's forward must not call `get_context`; an operator body is opaque to
Dynamo and may.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any, TypeVar

from ..errors import ContextError

T = TypeVar("T")

_CURRENT: ContextVar[Any] = ContextVar("piecework_step_context", default=None)
_PADDING = "piecework.padding"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Padding:
    """How a tensor field of a context grows with the bucket."""

    value: int | float
    """What the padded tail holds."""
    dims: Mapping[int, str]
    """Dim -> name of its size, in the words of `dynamic_dims`."""


def context_field(*, pad: int | float, dims: Mapping[int, str] | None = None, **kwargs: Any) -> Any:
    """A dataclass field of a context whose tensor is padded with `pad` along `dims` (default: dim 0 is `tokens`).

    The names in `dims` are those of the runtime's `dynamic_dims`; `{}` says that the field does not grow.
    """
    padding = Padding(value=pad, dims=dict(dims) if dims is not None else {0: "tokens"})
    metadata = {**kwargs.pop("metadata", {}), _PADDING: padding}
    return dataclasses.field(metadata=metadata, **kwargs)


def padded_fields(context: object) -> dict[str, Padding]:
    """The fields of `context` declared with `context_field`, by name. Empty for an object that is no dataclass."""
    if not dataclasses.is_dataclass(context):
        return {}
    return {f.name: f.metadata[_PADDING] for f in dataclasses.fields(context) if _PADDING in f.metadata}


def plain_fields(context: object) -> tuple[str, ...]:
    """The other fields of `context`, by name. Empty for an object that is no dataclass."""
    if not dataclasses.is_dataclass(context):
        return ()
    return tuple(f.name for f in dataclasses.fields(context) if _PADDING not in f.metadata)


@contextlib.contextmanager
def use_context(context: object) -> Iterator[None]:
    """Makes `context` what `get_context` returns in this thread, for the duration of a step."""
    token = _CURRENT.set(context)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def get_context(kind: type[T]) -> T:
    """Returns this step's context, for use inside operator bodies.

    Raises:
        ContextError: no step is running, the step was given no context, or it is not a `kind`.
    """
    context = _CURRENT.get()
    if isinstance(context, kind):
        return context
    got = "no context" if context is None else f"a {type(context).__name__}"
    raise ContextError(
        f"an operator asked for this step's {kind.__name__} and got {got}; pass context={kind.__name__}(...) to "
        f"Runtime.run, or wrap a direct call in piecework.use_context(...)"
    )
