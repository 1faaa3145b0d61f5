"""Memory at fixed addresses that captures read and write; see Note [Who owns captured memory] in device.py.

A buffer is sized for the phase's largest bucket, where the first layout that is asked for shows a row a token; else it
grows when that is needed. Each bucket gets the start of it. All buckets of a phase share it, which is right since one
of them runs at a time.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch

from .inputs import TOKENS, BoundInputs, InputContract, check_pad
from .layouts import TensorLayout
from .prepared_fill import Target
from .tails import PadValue, Tail, corner, tail_kind, tail_views

_MAX_TENSORS = 8192
"""Kept by a phase's buffers; far more than its buckets have."""


class Buffers:
    """Named buffers of one phase.

    Args:
        max_num_tokens: the phase's largest bucket.
        keeps_replaced: whether tensors that were made over a buffer stay when it is replaced by a larger one.
    """

    def __init__(self, max_num_tokens: int, *, keeps_replaced: bool = True) -> None:
        self.max_num_tokens = max_num_tokens
        self._keeps_replaced = keeps_replaced
        self._memories: dict[tuple[Hashable, torch.device], torch.UntypedStorage] = {}
        self._replaced_bytes = 0
        self._tensors: dict[tuple[Hashable, TensorLayout], torch.Tensor] = {}
        self._tails: dict[int, Tail] = {}
        """By the address of the buffer."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers, also of replaced ones that are kept."""
        # A list, since another thread may ask.
        return sum(memory.nbytes() for memory in list(self._memories.values())) + self._replaced_bytes

    def addresses(self) -> set[int]:
        """Of all tensors over the buffers."""
        return {tensor.untyped_storage().data_ptr() for tensor in self._tensors.values()}

    def tensor(self, name: Hashable, layout: TensorLayout, bucket: int) -> torch.Tensor:
        """The tensor of this layout at the start of the buffer `name`; the same object for the same arguments.

        A buffer that turns out too small is replaced by one of at least twice its size. What was made over the old one
        is returned as before, unless `keeps_replaced` is False: a capture reads its inputs where they were.

        Args:
            layout: dense, see `TensorLayout.dense`.
            bucket: the number of tokens that the layout is for; with more of them it would be larger.
        """
        known = self._tensors.get((name, layout))
        if known is not None:
            return known
        memory = self._memories.get((name, layout.device))
        if memory is None or memory.nbytes() < layout.num_bytes:
            replaced_bytes = memory.nbytes() if memory is not None else 0
            memory = _allocate(max(self._largest(layout, bucket), 2 * replaced_bytes), layout.device)
            self._memories[name, layout.device] = memory
            self._tails.pop(memory.data_ptr(), None)  # of what lay there before and is gone
            if self._keeps_replaced:
                self._replaced_bytes += replaced_bytes
            else:
                self._tensors = {key: tensor for key, tensor in self._tensors.items() if key[0] != name}
        with torch.inference_mode(False):
            tensor = layout.over(memory)
        if len(self._tensors) >= _MAX_TENSORS:
            del self._tensors[next(iter(self._tensors))]
        self._tensors[name, layout] = tensor
        return tensor

    def find(self, name: Hashable, layout: TensorLayout) -> torch.Tensor | None:
        """What `tensor` returned for this layout, if it did."""
        return self._tensors.get((name, layout))

    def tail(self, static: torch.Tensor) -> Tail:
        """What is known of the buffer that a tensor of `tensor` lies in."""
        return self._tails.setdefault(static.untyped_storage().data_ptr(), Tail())

    def note_fill(self, static: torch.Tensor, shape: Sequence[int], value: PadValue) -> None:
        """Notes that a tensor of `shape` was written to the start of `static`, which is contiguous, and its tail."""
        if static.dim() and static.numel():
            self.tail(static).written(tail_kind(static, value), shape, static.shape[0])

    def forget_tails(self) -> None:
        """Something else may have been written to any of the buffers."""
        for tail in self._tails.values():
            tail.forget()

    def _largest(self, layout: TensorLayout, bucket: int) -> int:
        # Any size might be that of one token; a buffer without a row a token must not be multiplied by the ladder.
        grows = 1 < bucket < self.max_num_tokens and bucket in layout.shape
        return -(-layout.num_bytes * self.max_num_tokens // bucket) if grows else layout.num_bytes


def _allocate(num_bytes: int, device: torch.device) -> torch.UntypedStorage:
    # Not inference tensors: those could be written in inference mode only, and count no versions.
    with torch.inference_mode(False):
        return torch.empty(num_bytes, dtype=torch.uint8, device=device).untyped_storage()


class StaticInputs:
    """A phase's inputs at fixed addresses."""

    def __init__(self, contract: InputContract, buffers: Buffers, *, poison_padding: bool = False) -> None:
        self._contract = contract
        self._buffers = buffers
        self._poison_padding = poison_padding
        self.by_address: set[str] = set()
        """Inputs without dynamic dims that the forward writes: captured where they are, and not copied."""

    def fill(self, bound: BoundInputs, bucket: int) -> dict[str, torch.Tensor]:
        """Copies a step's inputs in, padded to `bucket` tokens. Inputs with dynamic dims are contiguous.

        Raises:
            InputError: an input cannot hold its pad value.
        """
        with torch.no_grad():  # a caller's graph of gradients would stay with the buffers
            return {
                name: tensor if name in self.by_address else self._fill(name, tensor, bucket)
                for name, tensor in bound.tensors.items()
            }

    def _fill(self, name: str, tensor: torch.Tensor, bucket: int) -> torch.Tensor:
        dims = self._contract.dynamic_dims.get(name, {})
        if not dims:
            layout = TensorLayout.of(tensor).dense()
            return self._buffers.tensor(("input", name), layout, self._buffers.max_num_tokens).copy_(tensor)
        value = self._contract.pad.get(name, 0)
        check_pad(name, tensor, value)
        layout = TensorLayout.contiguous(padded_shape(tensor, dims, bucket), tensor.dtype, tensor.device)
        static = self._buffers.tensor(("input", name), layout, bucket)
        if self._poison_padding and tensor.dtype.is_floating_point:
            value = float("nan")
        fill_padded(static, tensor, value)
        self._buffers.note_fill(static, tensor.shape, value)
        return static

    def targets(self, tensors: Mapping[str, torch.Tensor], filled: Mapping[str, torch.Tensor]) -> list[Target]:
        """What `fill`, which returned `filled` for `tensors`, did with each of them; none of those in `by_address`."""
        return [
            Target(
                source=tensor,
                static=filled[name],
                value=self._contract.pad.get(name, 0),
                tail=self._buffers.tail(filled[name]),
            )
            for name, tensor in tensors.items()
        ]


def padded_shape(tensor: torch.Tensor, dims: Mapping[int, str], bucket: int) -> tuple[int, ...]:
    """The shape of `tensor` with its `tokens` dims grown to `bucket`."""
    return tuple(bucket if dims.get(dim) == TOKENS else size for dim, size in enumerate(tensor.shape))


def fill_padded(static: torch.Tensor, tensor: torch.Tensor, value: float) -> torch.Tensor:
    """Writes `tensor` to the start of `static` along each dim and `value` to the rest; returns `static`."""
    for view in tail_views(static, tensor.shape):
        view.fill_(value)
    corner(static, tensor.shape).copy_(tensor)
    return static
