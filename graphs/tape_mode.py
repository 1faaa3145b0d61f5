"""The modes that are active while a tape records: nothing is computed, everything is written down.

Note [How a tape records an operator]
- Composite operators are taken apart by their own C++ kernel, on the real tensors, so that what reaches the tape is
  what reaches a backend when they are called without one: same kernels, same bits.
- Views touch no data and are really made; so are changes of metadata (`t_`, `resize_`).
- An operator that writes its arguments is written down and returns them, unchanged.
- Of all others the outputs' metadata come from fake tensors; the outputs are allocated and poisoned.
- A step holds aliases of its tensors, never the model's own: a later change of metadata does not reach it, and what
  else refers to a memory shows whether the model still holds it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import CaptureError
from .tape_fakes import Fakes
from .tape_guards import refusal, refused_function, refused_op
from .tape_kinds import Kind, kind_of, map_tensors
from .tape_pool import Block, TapePool, poison
from .tape_steps import OpStep, Step, tensors_of


class Recording:
    """What a segment consists of, while it is made and afterwards."""

    def __init__(self, pool: TapePool) -> None:
        self.steps: list[Step] = []
        self.error: CaptureError | None = None
        """The first refusal: a model that catches it goes on, and its recording is void."""
        self.pool = pool
        self._held: list[Block] = []

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the same memory for the tape to hold."""
        alias = tensor.detach()
        block = self.pool.block_of(tensor)
        if block is not None:
            block.num_own += 1
            self._held.append(block)
        return alias

    def clear(self) -> None:
        """Lets go of all tensors."""
        self.steps.clear()
        for block in self._held:
            block.num_own -= 1
        self._held.clear()


class TapeFunctionMode(TorchFunctionMode):
    """Sees calls that never reach a dispatcher, such as `Tensor.tolist`; refuses those while a segment is open."""

    def __init__(self) -> None:
        super().__init__()
        self.recording: Recording | None = None
        """That of the open segment."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.recording is not None:
            refused = refused_function(func, args, kwargs)
            if refused is not None:
                error = refusal(*refused)
                self.recording.error = self.recording.error or error
                raise error
            if func is torch.nn.functional.one_hot:
                with torch._C._AutoDispatchBelowAutograd():  # where it would be taken apart, above the dispatch mode
                    return func(*args, **kwargs)
        return func(*args, **kwargs)


class TapeMode(TorchDispatchMode):
    """Records operators. See Note [How a tape records an operator]."""

    supports_higher_order_operators = True

    def __init__(self, recording: Recording, fakes: Fakes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = recording
        self.paused = False
        """Whether operators are made as if there were no tape."""
        self._fakes = fakes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        if any(_is_subclass(kind) for kind in types):
            return NotImplemented  # it unwraps itself, and its inner operators come here
        try:
            return self._record(func, args, kwargs)
        except CaptureError as error:
            self.recording.error = self.recording.error or error
            raise

    def _record(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if not isinstance(func, OpOverload):
            raise refusal(
                str(func), "a tape does not know higher-order operators; call the plain function in the captured region"
            )
        reason = refused_op(func, args, kwargs)
        if reason is not None:
            raise refusal(func.name(), reason)
        map_tensors(functools.partial(_check_dense, func), (args, kwargs))
        kind = kind_of(func)
        if kind is Kind.DECOMPOSE:
            with self:
                return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        if kind is Kind.INSPECT:
            return func(*args, **kwargs)
        if kind is Kind.METADATA:
            changed = func(*args, **kwargs)
            self.recording.pool.resized(args[0])
            return changed
        if kind is Kind.VIEW:
            views = func(*args, **kwargs)
            if _share_memory(tensors_of(views), (args, kwargs)):
                return views
        fakes = self._fakes.call(func, args, kwargs)
        if kind is Kind.ALLOCATE:
            return self._fresh(fakes.returned)
        for out, fake in fakes.grown:
            out.resize_(fake.shape).as_strided_(fake.shape, fake.stride())
            self.recording.pool.resized(out)
            poison(out)
        outputs, filled = self._outputs(func, args, kwargs, fakes.returned)
        own_args, own_kwargs = map_tensors(self.recording.alias, (tuple(args), kwargs))
        self.recording.steps.append(OpStep(op=func, args=own_args, kwargs=own_kwargs, outputs=filled))
        return outputs

    def _outputs(
        self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], fakes: Any
    ) -> tuple[Any, tuple[torch.Tensor | None, ...]]:
        """What a call returns while recording, and which of that is to be filled at a replay."""
        returns = func._schema.returns
        if not returns:
            return None, ()
        values: list[Any] = []
        filled: list[torch.Tensor | None] = []
        for returned, fake in zip(returns, (fakes,) if len(returns) == 1 else fakes, strict=True):
            if returned.alias_info is not None and returned.alias_info.is_write:
                written = _written_argument(func, returned, args, kwargs)
                values.append(written)
                filled.extend(None for _ in tensors_of([written]))
                continue
            value = map_tensors(self._fresh, fake)
            values.append(value)
            filled.extend(
                self.recording.alias(tensor) if isinstance(tensor, torch.Tensor) else None
                for tensor in tensors_of([value])
            )
        return values[0] if len(returns) == 1 else tuple(values), tuple(filled)

    def _fresh(self, fake: torch.Tensor) -> torch.Tensor:
        return self.recording.pool.allocate(fake.shape, fake.stride(), fake.dtype, fake.device)


def _written_argument(func: OpOverload, returned: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The argument that a return value is."""
    for index, argument in enumerate(func._schema.arguments):
        info = argument.alias_info
        if info is not None and info.is_write and info.before_set & returned.alias_info.before_set:
            return kwargs[argument.name] if argument.name in kwargs else args[index]
    raise AssertionError(f"{func._schema}: no argument for {returned.alias_info}")


def _is_subclass(kind: type) -> bool:
    dispatch = getattr(kind, "__torch_dispatch__", None)
    return dispatch is not None and dispatch is not torch._C._disabled_torch_dispatch_impl


def _check_dense(func: OpOverload, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout is not torch.strided:
        raise refusal(func.name(), f"a tensor of layout {tensor.layout}; use dense tensors in the captured region")
    return tensor


def _share_memory(views: Sequence[Any], arguments: Any) -> bool:
    """Whether each view lies in the memory of an argument."""
    memories: set[int] = set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        memories.add(tensor.untyped_storage()._cdata)
        return tensor

    map_tensors(note, arguments)
    return all(view.untyped_storage()._cdata in memories for view in views)
