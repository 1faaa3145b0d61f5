"""Fused ops: one function with a native body, which compilers can fuse, and kernels that do the same at once.

Who runs is decided before a trace and before a step, by
`piecework.ops.fused_choice.choose`. A trace finds the choice in the ops themselves, since
Dynamo cannot read a ContextVar; eager code finds it in a ContextVar, so that runtimes and threads do not meet.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

import torch
from torch._ops import OpOverload

from ..errors import RegistrationError
from .kernel import COMPILING, check_operators, check_support, overload_of
from .kernel import Kernel as Kernel
from .kernel import KernelSpec as KernelSpec
from .registry import load_entry_points

if TYPE_CHECKING:
    from .fused_choice import Choice

P = ParamSpec("P")
R = TypeVar("R")
K = TypeVar("K", bound=Callable[..., Any])

NATIVE = "native"
"""What a choice says of an op that runs its native body."""
RESERVED = (NATIVE, "auto")
"""Words of `kernel_backend` that no kernel may be called."""
_OURS = ("activation", "linear", "norm", "rotary", "sampling")
_OPS: dict[str, FusedOp[Any, Any]] = {}
_LOCK = threading.RLock()
_EXPANDING: ContextVar[bool] = ContextVar("piecework_expanding", default=False)
_EAGER: ContextVar[Mapping[str, str]] = ContextVar("piecework_fused_ops", default=MappingProxyType({}))


class FusedOp(Generic[P, R]):
    """A fused op; called like its native body. Made by `@fused_op(name)`."""

    __name__: str
    __qualname__: str

    def __init__(self, name: str, native: Callable[P, R], location: str, *, fuses: bool = True) -> None:
        self.name = name
        self.fuses = fuses
        """Whether a compiler can fuse the native body with its neighbours."""
        self.native = native
        self.location = location
        """`file:line` of the native body."""
        self._kernels: dict[str, Kernel] = {}
        # What a trace calls. An attribute and not a table by name: a guard on a string would look like frozen state.
        self._traced: Callable[..., R] = native
        for attribute in ("__module__", "__name__", "__qualname__", "__doc__"):
            setattr(self, attribute, getattr(native, attribute))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling():
            return self._traced(*args, **kwargs)
        return self._body(_EAGER.get().get(self.name, NATIVE))(*args, **kwargs)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Its kernels in the order of preference, which is that of registration."""
        return tuple(self._kernels.values())

    def kernel(
        self,
        name: str,
        *,
        device_types: tuple[str, ...],
        available: Callable[[], str | None] | None = None,
        dtypes: tuple[torch.dtype, ...] | None = None,
        min_capability: tuple[int, int] | None = None,
        captures: bool = True,
        compiles: bool | None = None,
        beats_inductor: bool = False,
        operators: tuple[Any, ...] = (),
        why: str = "",
    ) -> Callable[[K], K]:
        """Registers the decorated function, or an operator, as a kernel with the signature of the native body.

        It must be an opaque torch operator or call one, so that a traced graph, and with it the fingerprint, names it.

        Args:
            name: where the kernel comes from: "torch", "triton", "sgl_kernel", "flashinfer", or a word of your own. The
                operator chooses by it (`kernel_backend`).
            device_types: where it runs, such as `("cuda",)`.
            available: returns why the kernel cannot run in this process, or None when it can; asked when a runtime is
                made. An ImportError counts as a reason. See `piecework.ops.packages.needs`.
            dtypes: the dtypes of the activations that it serves; None: all.
            min_capability: the least compute capability on CUDA, such as `(8, 0)`; None: any.
            captures: whether a capture may hold its calls.
            compiles: whether its first call compiles it, which takes a second and more; None: as its name says,
                which "triton" and "flashinfer" do.
            beats_inductor: whether it was measured no slower than what Inductor makes of the native body; the
                default under `inductor` then too, unless a kernel that goes before can serve.
            operators: of a function, the opaque operators that it calls in the native body's place, with the native
                body's leading arguments. A whole forward that is compiled at once has the native body where a trace
                holds one of these; an operator that is no kernel and is not named here stays. A kernel that is an
                operator need not name itself.
            why: what speaks for it, in a few words; `piecework ops` shows it.

        Raises:
            RegistrationError: the name is taken or reserved, an argument is of another kind, or the signature is
                another one.
        """

        def register(body: K) -> K:
            location = _where(body)
            if isinstance(device_types, str) or not device_types:
                raise RegistrationError(
                    f"{location}: device_types: expected a tuple of device types, got {device_types!r}; "
                    f'write device_types=("cuda",)'
                )
            if name in RESERVED or not name.isidentifier():
                raise RegistrationError(
                    f"{location}: kernel of {self.name}: expected a name that is an identifier and not "
                    f"{' or '.join(RESERVED)}, got {name!r}; choose another"
                )
            where = f"{location}: kernel {name} of {self.name}"
            check_support(where, dtypes, min_capability)
            own = overload_of(body)
            calls = (*((own,) if own is not None else ()), *check_operators(where, operators))
            if (got := _parameters(body)) != (expected := _parameters(self.native)):
                raise RegistrationError(
                    f"{location}: kernel {name} of {self.name}: expected the native body's parameters "
                    f"({', '.join(expected)}), got ({', '.join(got)}); {self.location} has them"
                )
            with _LOCK:
                known = self._kernels.get(name)
                if known is not None and not _reloaded(known.location, known.body, location, body):
                    raise RegistrationError(
                        f"{location}: kernel {name} of {self.name} was registered at {known.location} already; "
                        f"rename one of them"
                    )
                self._kernels[name] = Kernel(
                    name=name,
                    device_types=tuple(device_types),
                    location=location,
                    body=body,
                    available=available,
                    dtypes=dtypes,
                    min_capability=min_capability,
                    captures=captures,
                    compiles=name in COMPILING if compiles is None else compiles,
                    beats_inductor=beats_inductor,
                    operators=calls,
                    why=why,
                )
            return body

        return register

    def _body(self, runs: str) -> Callable[..., R]:
        return self.native if runs == NATIVE else self._kernels[runs].body

    def __reduce__(self) -> str:
        # Like a function: a copy of a module that holds an op holds the same op.
        return self.__qualname__

    def __repr__(self) -> str:
        return f"<fused op {self.name}>"


def fused_op(name: str, *, fuses: bool = True) -> Callable[[Callable[P, R]], FusedOp[P, R]]:
    """Makes the decorated function, which Dynamo must be able to trace, the native body of a new fused op.

    Args:
        name: an identifier, of its own among all fused ops.
        fuses: whether a compiler can fuse the native body with its neighbours. Where it cannot, as with a matrix
            product, a kernel is the default under `inductor` too.

    Raises:
        RegistrationError: the name is no identifier, or another place has it.
    """

    def register(native: Callable[P, R]) -> FusedOp[P, R]:
        location = _where(native)
        function: object = native
        if not inspect.isfunction(function):
            raise RegistrationError(
                f"{location}: fused_op: expected a function, got a {type(native).__name__}; write a function around it"
            )
        if not name.isidentifier():
            raise RegistrationError(f"{location}: fused_op: expected an identifier, got {name!r}; choose another name")
        op = FusedOp(name, native, location, fuses=fuses)
        with _LOCK:
            known = _OPS.get(name)
            if known is not None and not _reloaded(known.location, known.native, location, native):
                raise RegistrationError(
                    f"{location}: the fused op {name} was registered at {known.location} already; rename one of them, "
                    f"or import one module only"
                )
            _OPS[name] = op
        return op

    return register


def fused_ops() -> tuple[FusedOp[Any, Any], ...]:
    """Every fused op, sorted by name; imports Piecework's own and the `piecework.ops` entry points first."""
    for module in _OURS:
        importlib.import_module(f".{module}", __package__)
    load_entry_points()
    with _LOCK:
        return tuple(op for _, op in sorted(_OPS.items()))


def native_bodies(names: Collection[str]) -> dict[OpOverload, Callable[..., Any]]:
    """The operators of the kernels of the ops with these names, and the native body of each."""
    ops = [op for op in fused_ops() if op.name in names]
    return {operator: op.native for op in ops for kernel in op.kernels for operator in kernel.operators}


def is_traced() -> bool:
    """Whether a native body is traced now: by Dynamo, or to take a kernel's place in a graph."""
    return torch.compiler.is_compiling() or _EXPANDING.get()


@contextlib.contextmanager
def expanding() -> Iterator[None]:
    """Inside, native bodies that this thread calls are traced; see `is_traced`."""
    token = _EXPANDING.set(True)
    try:
        yield
    finally:
        _EXPANDING.reset(token)


@contextlib.contextmanager
def tracing_with(choice: Choice) -> Iterator[None]:
    """Makes Dynamo trace what `choice` says, in the whole process; restores what was.

    Only while `piecework.graphs.dynamo.COMPILE_LOCK` is held. A graph that somebody else's torch.compile traces
    meanwhile may get these bodies once: Dynamo guards on them, so that its next call is traced anew.
    """
    with _LOCK:
        ops = tuple(_OPS.values())
    before = [(op, op._traced) for op in ops]
    runs = choice.runs
    try:
        for op in ops:
            op._traced = op._body(runs.get(op.name, NATIVE))
        yield
    finally:
        for op, body in before:
            op._traced = body


@contextlib.contextmanager
def use_choice(choice: Choice) -> Iterator[None]:
    """Makes eager calls of this thread run what `choice` says; without one they run the native bodies."""
    token = _EAGER.set(choice.runs)
    try:
        yield
    finally:
        _EAGER.reset(token)


def _parameters(function: Any) -> tuple[str, ...]:
    """Names of the parameters, with a mark where there is a default; of a torch operator, from its schema."""
    operator = overload_of(function)
    if operator is not None:
        return tuple(f"{a.name}=" if a.has_default_value() else a.name for a in operator._schema.arguments)
    parameters = inspect.signature(function).parameters.values()
    return tuple(f"{p.name}=" if p.default is not p.empty else p.name for p in parameters)


def _where(function: Any) -> str:
    """`file:line` of a function; of an operator, of whoever registers it."""
    code = getattr(function, "__code__", None)
    if code is not None:
        return f"{code.co_filename}:{code.co_firstlineno}"
    frame = sys._getframe(2)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _reloaded(before: str, old: object, now: str, new: object) -> bool:
    """Whether the same lines were executed again by a reload, which compiles the body anew; a factory does not."""
    return before == now and (old is new or getattr(old, "__code__", None) is not getattr(new, "__code__", None))
