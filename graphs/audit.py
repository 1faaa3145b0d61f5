"""After a trace or a compile: for which sizes is the program proven valid, and what Python state did it freeze?

Note [Guards are dropped only after the audit]
Piecework calls programs without Dynamo's guards. So each fact that a guard would have checked is accounted for here: a
condition on the number of tokens narrows the interval, one that no interval describes refuses the trace, equality of
dims with one name is checked on each call by `InputContract`, and guards on Python state are listed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.printers import PythonPrinter

from ..errors import DynamicDimError, GuardError
from .bindings import Bindings, FrozenTensor


@dataclasses.dataclass(frozen=True, slots=True)
class Interval:
    """The sizes from `low` to `high`, both included; `high` None is no bound."""

    low: int = 0
    high: int | None = None

    def __contains__(self, size: int) -> bool:
        return self.low <= size and (self.high is None or size <= self.high)

    def __and__(self, other: Interval) -> Interval:
        highs = [high for high in (self.high, other.high) if high is not None]
        return Interval(max(self.low, other.low), min(highs) if highs else None)

    def __str__(self) -> str:
        return f"[{self.low}, {'inf)' if self.high is None else f'{self.high}]'}"


ANY_SIZE = Interval()


@dataclasses.dataclass(frozen=True, slots=True)
class Condition:
    """Something that must hold for the program to be valid, and where it comes from."""

    expr: Any
    where: str


Intervals = Mapping[str, Interval]
"""Dynamic dim name -> the sizes for which a program is proven valid."""


def intersect(left: Intervals, right: Intervals) -> Intervals:
    """The sizes that are in both; a name that only one of them has keeps its interval."""
    return {name: left.get(name, ANY_SIZE) & right.get(name, ANY_SIZE) for name in {**left, **right}}


def valid_intervals(
    graph_module: torch.fx.GraphModule,
    shape_env: ShapeEnv,
    symbols: Mapping[str, set[sympy.Symbol]],
    sizes: Mapping[str, int],
) -> Intervals:
    """The sizes for which a trace made at `sizes` is valid; takes the proven assertions out of the graph.

    Raises:
        DynamicDimError: the trace holds for one size of a dim only.
        GuardError: it holds for sizes that are no interval, or for related sizes of several dims.
    """
    conditions = list(_conditions(shape_env))
    conditions += _take_assertions(graph_module)
    return solve(conditions, shape_env, symbols, sizes)


def intervals_after_compile(
    shape_env: ShapeEnv, symbols: Mapping[str, set[sympy.Symbol]], sizes: Mapping[str, int]
) -> Intervals:
    """The intervals once a compiler has added its own guards to the trace's ShapeEnv. Raises as `valid_intervals`."""
    return solve(list(_conditions(shape_env)), shape_env, symbols, sizes)


def _conditions(shape_env: ShapeEnv) -> Iterator[Condition]:
    for guard in shape_env.guards:
        yield Condition(guard.expr, guard.sloc.maybe_user_loc or str(guard.sloc))
    for deferred in shape_env.deferred_runtime_asserts.values():
        for runtime_assert in deferred:
            yield Condition(runtime_assert.expr, _user_frame(runtime_assert))


def _user_frame(runtime_assert: Any) -> str:
    frames = runtime_assert.stack.summary() if runtime_assert.stack is not None else []
    outside = [f for f in frames if "/torch/" not in f.filename.replace("\\", "/")]
    frame = outside[-1] if outside else None
    return f"{frame.filename}:{frame.lineno}" if frame is not None else "torch._check"


def _take_assertions(graph_module: torch.fx.GraphModule) -> list[Condition]:
    """Removes assertions on sizes from the graph and returns them as conditions: each call checks the interval instead.

    An assertion on data stays where it is.
    """
    conditions = []
    for node in list(graph_module.graph.nodes):
        if node.op != "call_function" or node.target is not torch.ops.aten._assert_scalar.default:
            continue
        tested = node.args[0]
        value = tested.meta.get("example_value") if isinstance(tested, torch.fx.Node) else tested
        if isinstance(value, torch.SymBool):
            conditions.append(Condition(value.node.expr, _stack_line(node)))
        elif value is not True:
            continue
        graph_module.graph.erase_node(node)
    for node in reversed(list(graph_module.graph.nodes)):
        if not node.users and node.op == "call_function" and getattr(node.target, "__module__", "") == "_operator":
            if isinstance(node.meta.get("example_value"), (torch.SymBool, bool, torch.SymInt, int)):
                graph_module.graph.erase_node(node)
    return conditions


def _stack_line(node: torch.fx.Node) -> str:
    lines = [line.strip() for line in (node.stack_trace or "").splitlines() if line.strip().startswith("File ")]
    return lines[-1] if lines else "torch._check"


def solve(
    conditions: Sequence[Condition],
    shape_env: ShapeEnv,
    symbols: Mapping[str, set[sympy.Symbol]],
    sizes: Mapping[str, int],
) -> Intervals:
    """Intersects the symbols' ranges with every condition, around the sizes that were traced."""
    canonical = {symbol: sympy.Symbol(name, integer=True) for name, group in symbols.items() for symbol in group}
    backed = {symbol for symbol in shape_env.var_to_range if not shape_env.is_unbacked_symint(symbol)}
    intervals = {name: _range(shape_env, group) for name, group in symbols.items()}
    for condition in conditions:
        # Replaced first: two dims of one name are two symbols that the ShapeEnv knows to be equal.
        expr = _plain(shape_env.replace(sympy.sympify(condition.expr)))
        expr = expr.xreplace({_plain(s): c for s, c in canonical.items()})
        if expr in (True, sympy.true):
            continue
        free = expr.free_symbols
        if len(free) == 1 and free <= set(canonical.values()):
            (symbol,) = free
            intervals[symbol.name] &= _solve_one(expr, symbol, sizes.get(symbol.name, 2), condition)
        elif free <= set(canonical.values()) or free & set(map(_plain, backed)):
            # What is on data-dependent symbols alone is asserted by the graph itself.
            raise GuardError(
                f"trace: the model holds only if `{expr}` ({condition.where}), a condition on "
                f"{' and '.join(sorted(map(str, free))) or 'no dim'} that no interval of one dim describes; remove the "
                f"condition, or take the dims out of dynamic_dims"
            )
    for name, interval in intervals.items():
        if interval.high is not None and interval.high <= interval.low:
            raise DynamicDimError(
                f"trace: the dim {name!r} was declared dynamic, but the model holds only for size {interval.low} "
                f"({_origin(conditions)}); take the dim out of dynamic_dims or make the model hold for every size"
            )
    return intervals


def _range(shape_env: ShapeEnv, group: Iterable[sympy.Symbol]) -> Interval:
    """What the ShapeEnv knows of a dim's symbols; a backed one starts at 2."""
    interval = ANY_SIZE
    for symbol in group:
        known = shape_env.var_to_range.get(symbol)
        if known is None:
            continue
        low = int(known.lower) if known.lower.is_finite else 0
        high = None if known.upper in (int_oo, sympy.oo) else int(known.upper)
        interval &= Interval(max(low, 0), None if high is not None and high >= 2**62 else high)
    return interval


def _plain(expr: Any) -> Any:
    """The expression over plain integer symbols: torch's carry assumptions (positive) that decide comparisons early."""
    if not isinstance(expr, sympy.Basic):
        return sympy.sympify(expr)
    return expr.xreplace({s: sympy.Symbol(s.name, integer=True) for s in expr.free_symbols})


def _solve_one(expr: Any, symbol: sympy.Symbol, traced_at: int, condition: Condition) -> Interval:
    """The interval on which a condition on one symbol holds, on the side of the traced size."""
    if isinstance(expr, sympy.And):
        result = ANY_SIZE
        for part in expr.args:
            result &= _solve_one(part, symbol, traced_at, condition)
        return result
    if isinstance(expr, sympy.Not) and isinstance(expr.args[0], sympy.core.relational.Relational):
        return _solve_one(expr.args[0].negated, symbol, traced_at, condition)
    if isinstance(expr, sympy.core.relational.Relational):
        difference = sympy.expand(expr.lhs - expr.rhs)
        if difference.is_polynomial(symbol) and sympy.degree(difference, symbol) == 1:
            slope, offset = difference.coeff(symbol, 1), difference.coeff(symbol, 0)
            if slope.is_Rational and offset.is_Rational:
                return _linear(type(expr), sympy.Rational(-offset, 1) / slope, slope > 0, traced_at, condition)
    scanned = _scan(expr, symbol, traced_at)
    if scanned is not None:
        return scanned
    raise GuardError(
        f"trace: the model decides on the size of {symbol} by `{expr}` ({condition.where}), which holds for sizes that "
        f"are no interval; decide on a size range, move the code into a split op's body, or use compiler='eager'"
    )


_SCAN_LIMIT = 1 << 16


def _scan(expr: Any, symbol: sympy.Symbol, traced_at: int) -> Interval | None:
    """Tries every size below a limit: the interval if the sizes that pass are one run with the traced size in it.

    A run that reaches the limit ends there: what lies above is not proven.
    """
    code = compile(PythonPrinter().doprint(expr), "<condition>", "eval")
    try:
        passes = [bool(eval(code, {"math": math}, {symbol.name: n})) for n in range(_SCAN_LIMIT)]
    except (ArithmeticError, NameError, TypeError):
        return None
    if not (0 <= traced_at < _SCAN_LIMIT and passes[traced_at]):
        return None
    low, high = passes.index(True), _SCAN_LIMIT - 1 - passes[::-1].index(True)
    return Interval(low, high) if all(passes[low : high + 1]) and high > low else None


_FLIPPED = {
    sympy.StrictLessThan: sympy.StrictGreaterThan,
    sympy.LessThan: sympy.GreaterThan,
    sympy.StrictGreaterThan: sympy.StrictLessThan,
    sympy.GreaterThan: sympy.LessThan,
}


def _linear(kind: Any, root: Any, rising: bool, traced_at: int, condition: Condition) -> Interval:
    """`symbol KIND root` as an interval of integers; the relation turns around when the slope is negative."""
    kind = kind if rising else _FLIPPED.get(kind, kind)
    floor, ceiling = int(sympy.floor(root)), int(sympy.ceiling(root))
    if kind is sympy.StrictLessThan:
        return Interval(0, ceiling - 1)
    if kind is sympy.LessThan:
        return Interval(0, floor)
    if kind is sympy.StrictGreaterThan:
        return Interval(max(floor + 1, 0))
    if kind is sympy.GreaterThan:
        return Interval(max(ceiling, 0))
    if kind is sympy.Unequality:
        if floor != ceiling:
            return ANY_SIZE
        return Interval(0, floor - 1) if traced_at < floor else Interval(floor + 1)
    return Interval(floor, floor)


def _origin(conditions: Iterable[Condition]) -> str:
    return "; ".join(f"{c.expr} at {c.where}" for c in conditions) or "its range"


_STATE_GUARDS = frozenset({"EQUALS_MATCH", "CONSTANT_MATCH", "BOOL_MATCH", "NONE_MATCH", "ID_MATCH", "NOT_NONE_MATCH"})
OWN_PREFIX = "piecework_"
"""Part of the names of the traced wrapper's own variables and marks; they are no state of the model's."""
_PLAIN_STATE = (bool, int, float, str, type(None))


def frozen_state(guards: Sequence[Any], bindings: Bindings) -> tuple[str, ...]:
    """The Python values that the trace read and baked in, as `where = value`; then the tensors bound by value."""
    found = []
    for guard in guards:
        kinds = {guard.guard_type, *guard.derived_guard_types}
        value = guard.value if guard.has_value else _MISSING
        if kinds & _STATE_GUARDS and isinstance(value, _PLAIN_STATE):
            if OWN_PREFIX not in guard.name:
                found.append(f"{guard.name} = {value!r}")
    frozen = [b.tensor for b in bindings.placeholders if isinstance(b, FrozenTensor)]
    found += [f"a tensor {list(t.shape)} that is no attribute of the model" for t in frozen]
    return tuple(dict.fromkeys(found))


_MISSING = object()

__all__ = [
    "ANY_SIZE",
    "Condition",
    "Interval",
    "Intervals",
    "frozen_state",
    "intersect",
    "intervals_after_compile",
    "valid_intervals",
]
