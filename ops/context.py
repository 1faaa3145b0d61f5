"""The per-step context: what split ops read inside their bodies, never on the traced path.

Dynamo cannot trace `ContextVar.get`, so a model's forward must not call `get_context`; an operator body is opaque to
Dynamo and may.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from typing_extensions import TypeIs

from ..errors import ContextError, InputError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")

_CURRENT: ContextVar[Any] = ContextVar("piecework_step_context", default=None)
_READS: ContextVar[set[type] | None] = ContextVar("piecework_context_reads", default=None)
_PADDING = "piecework.padding"
_HOST = "piecework.host"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Padding:
    """How a tensor field of a context grows with the bucket, and what a static copy of it has room for."""

    value: int | float | Literal["last"]
    """What the padded tail holds; `last`: the last element along the dim again, or 0 where there is none."""
    dims: Mapping[int, str]
    """Dim -> name of its size, in the words of `dynamic_dims`."""
    slots: Mapping[int, str] = dataclasses.field(default_factory=dict)
    """Dim -> name of a size that only contexts have, such as `requests`; it grows in a static copy only."""
    plus: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """Dim -> elements that it has beyond the size of its name."""


def context_field(
    *,
    pad: int | float | Literal["last"],
    dims: Mapping[int, str] | None = None,
    slots: Mapping[int, str] | None = None,
    plus: Mapping[int, int] | None = None,
    **kwargs: Any,
) -> Any:
    """A dataclass field of a context whose tensor is padded with `pad` along `dims` and `slots`.

    Operators read it and do not write it: what a static copy holds behind the step's elements is not written again as
    long as nobody but the runtime (and `plan()` of the context) is seen to write there.

    Args:
        pad: what the tail holds; `"last"` repeats the last element along the dim (0 where there is none).
        dims: dim -> name of its size; the names are those of the runtime's `dynamic_dims`. The dim called `tokens`
            grows to the bucket. By default dim 0 is `tokens`, unless there are `slots`; `{}` says that nothing grows.
        slots: dim -> name of a size that no input has, such as `requests` or `blocks`. Such a dim keeps its size in
            an ordinary step. Where a whole forward is captured, every step must have the same shapes: there it has
            the size that `Runtime(..., context_sizes={"requests": 256})` gives, and slots without use hold `pad`.
        plus: dim -> number of elements that the dim has beyond the size of its name: `{0: 1}` for the boundaries
            between `requests`.
        kwargs: for `dataclasses.field`.

    Raises:
        InputError: a dim is negative or in both `dims` and `slots`, `plus` speaks of another dim, or `pad` is no
            number and not `"last"`.
    """
    if dims is None:
        dims = {0: "tokens"} if slots is None else {}
    padding = Padding(value=pad, dims=dict(dims), slots=dict(slots or {}), plus=dict(plus or {}))
    _check_padding(padding)
    metadata = {**kwargs.pop("metadata", {}), _PADDING: padding}
    return dataclasses.field(metadata=metadata, **kwargs)


def host_field(**kwargs: Any) -> Any:
    """A dataclass field of a context that only host code reads and whose value may differ in each step.

    What an operator body reads on the host is frozen when the body is captured, so a change of any other plain field
    makes a capture of a whole forward stale. A change of this one does not: the static copy that a captured body sees
    has the field's default, if there is one, so that the body cannot take one step's value for all. Without a default
    the field follows the step; `plan()` may read it, a captured body must not.
    """
    metadata = {**kwargs.pop("metadata", {}), _HOST: True}
    return dataclasses.field(metadata=metadata, **kwargs)


def _check_padding(padding: Padding) -> None:
    where = "context_field"
    if padding.value != "last" and (isinstance(padding.value, bool) or not isinstance(padding.value, (int, float))):
        raise InputError(f'{where}: pad: expected a number or "last", got {padding.value!r}; write pad=0')
    for what, names in (("dims", padding.dims), ("slots", padding.slots)):
        if not all(_is_dim(dim) and isinstance(name, str) for dim, name in names.items()):
            raise InputError(
                f"{where}: {what}: expected {{dim: name}} with dims counted from 0, got {dict(names)!r}; "
                f'write {what}={{0: "requests"}}'
            )
    both = sorted(set(padding.dims) & set(padding.slots))
    if both:
        raise InputError(
            f"{where}: expected a dim either in dims or in slots, got {both[0]} in both; leave it in dims if an input "
            f"has that size, in slots if only contexts have it"
        )
    for dim, number in padding.plus.items():
        if dim not in padding.dims and dim not in padding.slots:
            raise InputError(
                f"{where}: plus: expected dims of dims or slots, got {dim!r}; name the size of that dim there as well"
            )
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise InputError(f"{where}: plus: expected numbers of 1 or more, got {number!r} for dim {dim}; correct it")


def _is_dim(dim: object) -> bool:
    return isinstance(dim, int) and not isinstance(dim, bool) and dim >= 0


def padded_fields(context: object) -> Mapping[str, Padding]:
    """The fields of `context` declared with `context_field`, by name. Empty for an object that is no dataclass."""
    return _declared(context).padded


def host_fields(context: object) -> tuple[dataclasses.Field[Any], ...]:
    """The fields of `context` declared with `host_field`. Empty for an object that is no dataclass."""
    return _declared(context).host


def plain_fields(context: object) -> tuple[str, ...]:
    """The other fields of `context`, by name. Empty for an object that is no dataclass."""
    return _declared(context).plain


def is_dataclass_instance(value: object) -> TypeIs[DataclassInstance]:
    """Whether a value has the fields of a dataclass; the class of one has not."""
    return dataclasses.is_dataclass(type(value))


class _Declared(NamedTuple):
    padded: Mapping[str, Padding]
    host: tuple[dataclasses.Field[Any], ...]
    plain: tuple[str, ...]


_DECLARED: weakref.WeakKeyDictionary[type, _Declared] = weakref.WeakKeyDictionary()


def _declared(context: object) -> _Declared:
    """The fields of a context. They are asked for several times a step, so they are kept for each class."""
    kind = type(context)
    known = _DECLARED.get(kind)
    if known is None:
        fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
        known = _DECLARED[kind] = _Declared(
            padded={f.name: f.metadata[_PADDING] for f in fields if _PADDING in f.metadata},
            host=tuple(f for f in fields if _HOST in f.metadata),
            plain=tuple(f.name for f in fields if _PADDING not in f.metadata and _HOST not in f.metadata),
        )
    return known


@contextlib.contextmanager
def use_context(context: object) -> Iterator[None]:
    """Makes `context` what `get_context` returns in this thread, for the duration of a step."""
    token = _CURRENT.set(context)
    try:
        yield
    finally:
        _CURRENT.reset(token)


set_context: Callable[[object], Token[Any]] = _CURRENT.set
reset_context: Callable[[Token[Any]], None] = _CURRENT.reset
"""What `use_context` does, in two halves: for who calls them each step, and can see to it that both happen."""


@contextlib.contextmanager
def noting_reads() -> Iterator[set[type]]:
    """Fills the set with the classes that `get_context` is asked for in this thread, until the body ends."""
    reads: set[type] = set()
    token = _READS.set(reads)
    try:
        yield reads
    finally:
        _READS.reset(token)


def get_context(kind: type[T]) -> T:
    """Returns this step's context, for use inside operator bodies.

    Raises:
        ContextError: no step is running, the step was given no context, or it is not a `kind`.
    """
    context = _CURRENT.get()
    reads = _READS.get()
    if reads is not None:
        reads.add(kind)
    if isinstance(context, kind):
        return context
    got = "no context" if context is None else f"a {type(context).__name__}"
    raise ContextError(
        f"an operator asked for this step's {kind.__name__} and got {got}; pass context={kind.__name__}(...) to "
        f"Runtime.run, or wrap a direct call in piecework.use_context(...)"
    )
