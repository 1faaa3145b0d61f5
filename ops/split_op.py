"""`@split_op`: defines an operator and registers it as a split op, in one step.

The operator is defined with `Library.define` and `Library.impl`, whose calls cost a tenth of a
`torch.library.custom_op`'s.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch._ops import OpOverload, OpOverloadPacket

from ..errors import RegistrationError
from . import registry
from .capturing import is_capturing_whole, refuse_uncapturable
from .op_schema import qualified_name, schema_of
from .registry import Capturable, Prepare, SplitOp


class _SplitOpDecorator:
    """The type of `split_op`; see `__call__` and `register`."""

    def __call__(
        self,
        function: Callable[..., Any] | None = None,
        *,
        mutates_args: Sequence[str] | None = None,
        name: str | None = None,
        fake: Callable[..., Any] | None = None,
        capturable: Capturable = False,
        prepare: Prepare | None = None,
    ) -> Callable[[Callable[..., Any]], OpOverload]:
        """Defines an operator whose body is the decorated function, and cuts every graph at its calls.

        The function's type annotations give the schema. The decorated name becomes the operator, which is what the
        model calls. The body is opaque to Dynamo: it may read `get_context()` and launch any kernel.

        Args:
            mutates_args: names of every tensor argument that the body writes to; `()` for a functional operator. A
                write that is not declared here makes wrong programs; check with `torch.library.opcheck`.
            name: `op` or `namespace::op`; by default the function's name in its top-level package's namespace.
            fake: computes the outputs' shapes, dtypes and strides from fake tensors. Needed when anything is
                returned; an operator that only mutates gets one that returns nothing.
            capturable: whether a call may be part of the capture of a whole forward (backend `full`), where the body
                runs once and only the kernels that it launched run again. True says that the body launches kernels and
                nothing else, allocates nothing that must outlive it, and reads on the host nothing that changes from
                step to step: what does comes from the context's device tensors. If that depends on the call: a
                function of the same arguments that returns the reason why the call cannot be captured, or None.
            prepare: what makes a call cheap that is made at each step with the same arguments (backends `tc_piecewise`
                and `breakable`). A function of the operator's arguments, with the same defaults, which is called once
                for a call whose tensors stay where they are: same addresses, shapes and strides, other values. It may
                check and compute whatever depends on these alone, launches nothing, and returns a function of no
                arguments that makes the call from then on: in place of the body, outside of the dispatcher, under
                `torch.inference_mode`, with its effects, results and errors, reading the step's `get_context()`. Or
                None, if these arguments are better served by the body. Where operators are watched (a profiler, a
                mode), the operator itself is called.

        Raises:
            RegistrationError: the definition breaks one of the rules above, or the name is taken.
        """
        if function is not None or mutates_args is None:
            where = _where(function) if function is not None else _caller_location()
            raise RegistrationError(
                f"{where}: split_op takes keyword arguments, and mutates_args must be one of them; "
                f'write @split_op(mutates_args=("out",)), or mutates_args=() for a functional operator'
            )
        return lambda body: _define(
            body, mutates_args=mutates_args, name=name, fake=fake, capturable=capturable, prepare=prepare
        )

    def register(self, name: str, *, capturable: Capturable = False, prepare: Prepare | None = None) -> OpOverload:
        """Makes an operator that somebody else defined, `namespace::op` or `namespace::op.overload`, a split op.

        Args:
            capturable: as in `__call__`. False by default here too: nothing is known of the operator, and one that
                reads lengths on the host would be captured without an error and replay one step's lengths for all.
            prepare: as in `__call__`.

        Raises:
            RegistrationError: there is no such operator, the overload is ambiguous, it returns an argument that it
                mutates, `capturable` or `prepare` is of another kind, or another place registered it before.
        """
        location = _caller_location()
        _check_options(capturable, prepare, f"{location}: split_op.register")
        op = _existing_overload(name, location)
        for returned in op._schema.returns:
            if returned.alias_info is not None and returned.alias_info.is_write:
                raise RegistrationError(
                    f"{location}: {name} returns an argument that it mutates ({op._schema}); a split op must return "
                    f"nothing that it mutates, so register an overload that does not, or wrap it with @split_op"
                )
        with registry.REGISTRY.lock:
            known = registry.REGISTRY.ops.get(op)
            if known is not None and known.location != location:
                raise _taken(known, location)
            registry.REGISTRY.add(op, location, capturable, prepare)
        return op


split_op = _SplitOpDecorator()


def _define(
    body: Callable[..., Any],
    *,
    mutates_args: Sequence[str],
    name: str | None,
    fake: Callable[..., Any] | None,
    capturable: Capturable,
    prepare: Prepare | None,
) -> OpOverload:
    location = _where(body)
    if not inspect.isfunction(body):
        raise RegistrationError(
            f"{location}: expected a function, got a {type(body).__name__}; write a function around it, whose "
            f"annotations give the schema"
        )
    qualified = qualified_name(body, name, location)
    schema = schema_of(body, mutates_args, qualified, location)
    _check_options(capturable, prepare, f"{location}: {qualified}")
    namespace, _, opname = qualified.partition("::")
    with registry.REGISTRY.lock:
        same = _defined_before(qualified, body, capturable, prepare)
        if same is not None:
            return same
        _make_room(qualified, location, body)
        library = torch.library.Library(namespace, "FRAGMENT")
        library.define(f"{opname}{schema}")
        op: OpOverload = getattr(getattr(torch.ops, namespace), opname).default
        if op._schema.returns and fake is None:
            library._destroy()
            raise RegistrationError(
                f"{location}: {qualified} returns {_returns(op)} and has no fake; pass fake=..., a function of the "
                f"same arguments that returns empty tensors of the right shape, dtype and strides"
            )
        library.impl(opname, _guarded(body, op), "CompositeExplicitAutograd")
        torch.library.register_fake(qualified, fake if fake is not None else _returns_nothing, lib=library)
        registry.REGISTRY.libraries[qualified] = library
        registry.REGISTRY.bodies[qualified] = body
        registry.REGISTRY.add(op, location, capturable, prepare)
    return op


def _guarded(body: Callable[..., Any], op: OpOverload) -> Callable[..., Any]:
    """The body, which refuses to run where it would be captured without having said that it can be."""

    @functools.wraps(body)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if is_capturing_whole():
            refuse_uncapturable(op, args, kwargs)
        return body(*args, **kwargs)

    return guarded


def _check_options(capturable: object, prepare: object, where: str) -> None:
    if not isinstance(capturable, bool) and not callable(capturable):
        raise RegistrationError(
            f"{where}: capturable: expected True, False or a function of the operator's arguments that returns why a "
            f"call cannot be captured (or None), got {capturable!r}; pass one of these"
        )
    if prepare is not None and not callable(prepare):
        raise RegistrationError(
            f"{where}: prepare: expected a function of the operator's arguments that returns a function of none, got "
            f"{prepare!r}; pass such a function or leave it out"
        )


def _defined_before(
    qualified: str, body: Callable[..., Any], capturable: Capturable, prepare: Prepare | None
) -> OpOverload | None:
    """The operator that a factory called twice made of the same lines the first time: the two are one."""
    known, before = registry.REGISTRY.find(qualified), registry.REGISTRY.bodies.get(qualified)
    if known is None or before is None or before.__code__ is not body.__code__ or body.__closure__:
        return None
    options = registry.REGISTRY.capturable[known[0]], registry.REGISTRY.prepares.get(known[0])
    same = before.__defaults__ == body.__defaults__ and all(map(_alike, options, (capturable, prepare)))
    return known[0] if same else None


def _alike(before: Capturable | Prepare | None, now: Capturable | Prepare | None) -> bool:
    """Whether two values of an option say the same: functions do when they are made of the same lines."""
    code = getattr(before, "__code__", None)
    return before == now or (code is not None and code is getattr(now, "__code__", None))


def _make_room(qualified: str, location: str, body: Callable[..., Any]) -> None:
    """Frees the name when the same place defines it again (a reload); raises when it belongs to somebody else."""
    known = registry.REGISTRY.find(qualified)
    if known is not None and known[1].location == location and qualified in registry.REGISTRY.libraries:
        # A reload compiles the body again; a factory called twice does not, and its first operator lives on.
        if body.__closure__ and registry.REGISTRY.bodies[qualified].__code__ is body.__code__:
            raise RegistrationError(
                f"{location}: these lines defined {qualified} before, with other values of "
                f"{', '.join(body.__code__.co_freevars)}; both would run the last one, so give each its own name=..."
            )
        registry.REGISTRY.remove(known[0])
        registry.REGISTRY.libraries.pop(qualified)._destroy()
    elif known is not None:
        raise _taken(known[1], location)
    elif torch._C._dispatch_has_kernel(qualified) or _operator_exists(qualified):
        raise RegistrationError(
            f'{location}: the operator {qualified} exists already; use split_op.register("{qualified}") to cut at it, '
            f"or pass another name=..."
        )


def _operator_exists(qualified: str) -> bool:
    namespace, _, opname = qualified.partition("::")
    return hasattr(getattr(torch.ops, namespace), opname)


def _existing_overload(name: str, location: str) -> OpOverload:
    qualified, _, overload = name.partition(".")
    namespace, separator, opname = qualified.partition("::")
    if not separator or not _operator_exists(qualified):
        raise RegistrationError(
            f"{location}: split_op.register: expected an existing operator `namespace::op`, got {name!r}; "
            f"import the module that defines it first"
        )
    packet: OpOverloadPacket = getattr(getattr(torch.ops, namespace), opname)
    overloads = packet.overloads()
    wanted: str | Literal[""] = overload or ("default" if "default" in overloads else "")
    if not wanted and len(overloads) == 1:
        wanted = overloads[0]
    if wanted not in overloads:
        raise RegistrationError(
            f"{location}: split_op.register({name!r}): expected one of the overloads {', '.join(overloads)}; "
            f'write "{qualified}.{overloads[0]}"'
        )
    op: OpOverload = getattr(packet, wanted)
    return op


def _returns_nothing(*args: object, **kwargs: object) -> None:
    """The fake of an operator that only mutates."""


def _returns(op: OpOverload) -> str:
    return ", ".join(str(returned.type) for returned in op._schema.returns)


def _taken(known: SplitOp, location: str) -> RegistrationError:
    return RegistrationError(
        f"{location}: the split op {known.name} was registered at {known.location} already; "
        f"rename one of them with name=..., or import one module only"
    )


def _where(function: Callable[..., Any]) -> str:
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(function)


def _caller_location() -> str:
    frame = sys._getframe(2)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
