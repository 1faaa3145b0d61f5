"""Repeated layers: traced once where torch can reuse a trace, and inlined again before the graph is split.

Dynamo emits a region (`torch.compiler.nested_compile_region`) as a call of a subgraph, and from torch 2.13 on stamps
out the calls of further layers without tracing them.

Note [Which layers share a region]
torch decides by guards whether a stamp is right, and they have gaps (seen with torch 2.13 and 2.14): objects that
Dynamo knows from elsewhere (an Enum member, a class, a config that the root reads too), hooks of submodules, `1` and
`1.0`, the autocast state, and globals that change between two calls. So only layers whose Python state is the same
share one: plain values by type and value, everything else by identity, in the whole subtree; but integers by type
alone, since torch's guards do hold for them and many models number their layers. A call under another autocast state,
or with one tensor as two arguments, is no region, and a trace that changed something outside of the model between two
calls is thrown away. What a stamp reads is checked afterwards: see Note [A reused region is checked].

Note [How layers are marked]
While the model is traced, the layers' class has another `forward`, which calls the region if Dynamo traces a layer that
belongs to one and is the forward that it was for everybody else: another thread that runs the model notices nothing. A
marked copy of the model would touch no class, but to code that compares modules a copy is another module.
"""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._dynamo.comptime import comptime

from .dynamo import outside_state

MIN_LAYERS = 4
"""Fewer equal layers than this are traced one by one: a region costs about as much as it saves."""

MAX_VARIANTS = 8
"""Different traces of one region, after which torch gives up and the model is traced flat."""


class RegionError(Exception):
    """Why the regions of a trace cannot be used. Never leaves `trace`, which traces flat instead."""


def reuse_is_supported() -> bool:
    """Whether this torch stamps out repeated regions: 2.13 and later. Earlier ones trace each again."""
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    return (major, minor) >= (2, 13)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Regions:
    """The repeated layers of a model."""

    layers: Mapping[str, torch.nn.Module]
    """By dotted name."""
    groups: tuple[tuple[str, ...], ...]
    """Names of layers that share a region: see Note [Which layers share a region]."""
    states: dict[int, set[Any]] = dataclasses.field(default_factory=dict)
    """Index of a region -> what the forward had changed outside of the model when it was called."""

    def check_states(self) -> None:
        """Raises: RegionError if something outside of the model changed between two calls of a region."""
        if any(len(states) > 1 for states in self.states.values()):
            raise RegionError("the forward changes what layers may read between two of them")

    def locate(self, name: str) -> tuple[str, str]:
        """The layer that a tensor of this dotted name is in, or "", and its name there."""
        parts = name.split(".")
        for i in range(1, len(parts)):
            if (layer := ".".join(parts[:i])) in self.layers:
                return layer, ".".join(parts[i:])
        return "", name

    @contextlib.contextmanager
    def marked(self) -> Iterator[None]:
        """Lets Dynamo trace the layers as regions; see Note [How layers are marked]. The caller holds COMPILE_LOCK."""
        classes = [type(self.layers[group[0]]) for group in self.groups]
        regions = tuple(_region(layer_class, index) for index, layer_class in enumerate(classes))
        self.states.clear()
        recorders = tuple(_recorder(self.states, index) for index in range(len(classes)))
        with contextlib.ExitStack() as stack:
            for layer_class in dict.fromkeys(classes):
                stack.enter_context(_forward_replaced(layer_class, _forward_once(layer_class, regions, recorders)))
            for index, group in enumerate(self.groups):
                for name in group:
                    self.layers[name].__dict__[_INDEX] = index
                    stack.callback(self.layers[name].__dict__.pop, _INDEX, None)
            yield


_INDEX = "piecework_region"
"""Attribute of a marked layer: the index of its region. Told by its id, it would be guarded on and like no other."""


def find_regions(model: torch.nn.Module) -> Regions | None:
    """The model's repeated layers, or None if it has none.

    A layer is repeated if `MIN_LAYERS` children of one module have the same class and the same names, shapes and dtypes
    of tensors, and modules below. Of nested ones only the outermost count.
    """
    layers: dict[str, torch.nn.Module] = {}
    groups: list[tuple[str, ...]] = []
    for siblings in _repeated(model, ""):
        layers.update(siblings)
        by_state: dict[Any, list[str]] = {}
        for name, layer in siblings.items():
            by_state.setdefault(_state(layer), []).append(name)
        groups += [tuple(names) for names in by_state.values() if len(names) > 1]
    return Regions(layers=layers, groups=tuple(groups)) if layers else None


def _repeated(module: torch.nn.Module, prefix: str) -> Iterator[dict[str, torch.nn.Module]]:
    alike: dict[Any, dict[str, torch.nn.Module]] = {}
    for name, child in module._modules.items():
        if child is not None:
            alike.setdefault(_structure(child), {})[f"{prefix}{name}"] = child
    for structure, siblings in alike.items():
        if structure is not None and len({id(layer) for layer in siblings.values()}) >= MIN_LAYERS:
            yield siblings
        else:
            for name, child in siblings.items():
                yield from _repeated(child, f"{name}.")


def _structure(layer: torch.nn.Module) -> Any:
    """What repeated layers have in common; None for a module that is no layer."""
    forward = getattr(type(layer), "forward", None)
    if not layer._modules or not isinstance(forward, types.FunctionType) or _is_torchs(type(layer)):
        return None
    tensors = [(n, t.shape, t.dtype) for n, t in (*layer.named_parameters(), *layer.named_buffers())]
    modules = [(n, type(m)) for n, m in layer.named_modules()]
    return (tuple(tensors), tuple(modules)) if tensors else None


def _is_torchs(layer_class: type) -> bool:
    """A class that much else is made of: it is left alone."""
    return layer_class.__module__.partition(".")[0] == "torch"


_TABLES = frozenset(torch.nn.Module().__dict__) - {"training"}


def _state(layer: torch.nn.Module) -> Any:
    """The Python state of a layer and everything below it, to be compared; unlike every other if it has hooks below."""
    below = [module for module in layer.modules() if module is not layer]
    if "forward" in layer.__dict__ or any("forward" in m.__dict__ or _has_hooks(m) for m in below):
        return ("own", id(layer))
    return tuple(
        (name, key, _value(value, integers=False))
        for name, module in layer.named_modules()
        for key, value in module.__dict__.items()
        if key not in _TABLES
    )


def _has_hooks(module: torch.nn.Module) -> bool:
    return any(value for key, value in module.__dict__.items() if "hooks" in key and key in _TABLES)


def _value(value: Any, *, integers: bool = True) -> Any:
    """What stands for a value when two layers are compared; `integers` says whether those count by value."""
    kind = type(value)
    if kind is int and not integers:
        return kind
    if value is None or kind in (bool, int, float, complex, str, bytes, torch.device, torch.Size):
        return kind, repr(value)
    if kind in (tuple, list, set, frozenset) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        items = sorted(value, key=repr) if kind in (set, frozenset) else value
        return kind, tuple(_value(item) for item in items)
    if kind is dict:
        return kind, tuple((_value(key), _value(item)) for key, item in value.items())
    if isinstance(value, torch.Tensor):
        return kind, value.shape, value.dtype, value.device, value.stride()
    return kind, id(value)


def _region(layer_class: type, index: int) -> Callable[..., Any]:
    """The class's forward as a region of its own.

    torch finds what it has traced by the code object, and two of those are equal unless something in them differs.
    """
    forward: Any = layer_class.forward  # type: ignore[attr-defined]
    # A copy: torch writes its options onto the function.
    code = forward.__code__.replace(co_name=f"{forward.__code__.co_name}_{index}")
    own = types.FunctionType(code, forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__)
    own.__kwdefaults__ = forward.__kwdefaults__
    options: dict[str, Any] = {"max_reuse_entries": MAX_VARIANTS} if reuse_is_supported() else {}
    marked: Callable[..., Any] = torch.compiler.nested_compile_region(own, **options)
    return marked


def _recorder(states: dict[int, set[Any]], index: int) -> Callable[[Any], None]:
    def record(context: Any) -> None:
        states.setdefault(index, set()).add(outside_state())

    return record


def _forward_once(
    layer_class: type, regions: tuple[Callable[..., Any], ...], recorders: tuple[Callable[[Any], None], ...]
) -> Callable[..., Any]:
    """The forward of a class while it is marked."""
    forward: Any = layer_class.forward  # type: ignore[attr-defined]
    ambient = _ambient()

    def forward_once(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            return forward(self, *args, **kwargs)
        index = self.__dict__.get(_INDEX)
        # Two arguments that are one tensor are one in the region, and two other ones are then one of them in a stamp.
        if index is None or _ambient() != ambient or _has_twice(_tensors([*args, *kwargs.values()])):
            return forward(self, *args, **kwargs)
        comptime(recorders[index])  # runs while Dynamo traces
        return regions[index](self, *args, **kwargs)

    return forward_once


def _ambient() -> tuple[Any, ...]:
    """The settings that a forward can be called under inside of a model. Traced."""
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
        torch.is_grad_enabled(),
    )


@contextlib.contextmanager
def _forward_replaced(layer_class: Any, forward: Callable[..., Any]) -> Iterator[None]:
    own = layer_class.__dict__.get("forward")
    layer_class.forward = forward
    try:
        yield
    finally:
        if own is None:
            del layer_class.forward
        else:
            layer_class.forward = own


def _tensors(values: Any) -> list[torch.Tensor]:
    """The tensors in tuples, lists and dicts. Traced, like `_has_twice`: no generators."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found.extend(_tensors(value))
        elif isinstance(value, dict):
            found.extend(_tensors(list(value.values())))
    return found


def _has_twice(tensors: list[torch.Tensor]) -> bool:
    for i, tensor in enumerate(tensors):
        for other in tensors[:i]:
            if tensor is other:
                return True
    return False
