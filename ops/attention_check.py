"""The debug mode's look at an `AttentionContext`: every value, on the host, before a kernel believes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import torch

from ..errors import InputError

if TYPE_CHECKING:
    from .attention_context import AttentionContext

_DIMS = {"query_start_loc": 1, "seq_lens": 1, "block_table": 2, "slot_mapping": 1}
_BUILD = "build the context with AttentionContext.build(...), or correct the field"


def check_context(context: AttentionContext) -> None:
    """As `AttentionContext.check`.

    Raises:
        InputError: names the first bad element, what it may be, and what it is.
    """
    for name, dims in _DIMS.items():
        tensor = getattr(context, name)
        if tensor.dim() != dims or tensor.dtype not in (torch.int32, torch.int64):
            _refuse(name, f"int32 or int64 of {dims} dims", f"{tensor.dtype} of shape {list(tensor.shape)}", _BUILD)
    starts = context.query_start_loc.cpu().to(torch.int64)
    lens = context.seq_lens.cpu().to(torch.int64)
    table = context.block_table.cpu().to(torch.int64)
    slots = context.slot_mapping.cpu().to(torch.int64)
    _check_starts(starts, len(slots))
    _check_lens(context, starts.diff(), lens, table.shape[1])
    if not context.is_static:
        _check_host("query_lens_host", context.query_lens_host, starts.diff())
        _check_host("seq_lens_host", context.seq_lens_host, lens)
    _check_table(table, context)
    _check_slots(context, slots)
    _check_places(context, slots, starts, lens, table)


def _check_starts(starts: torch.Tensor, num_tokens: int) -> None:
    if starts[0] != 0:
        _refuse("query_start_loc[0]", "0, where the first request begins", int(starts[0]), _BUILD)
    falls = _first(starts.diff() < 0)
    if falls is not None:
        request = falls[0]
        _refuse(
            f"query_start_loc[{request + 1}]",
            f"at least {int(starts[request])}, where request {request} begins",
            int(starts[request + 1]),
            _BUILD,
        )
    if starts[-1] > num_tokens:
        _refuse(
            f"query_start_loc[{len(starts) - 1}]",
            f"at most {num_tokens}, the tokens of slot_mapping",
            int(starts[-1]),
            _BUILD,
        )


def _check_lens(context: AttentionContext, query_lens: torch.Tensor, lens: torch.Tensor, num_blocks: int) -> None:
    short = _first(lens < query_lens)
    if short is not None:
        [request] = short
        _refuse(
            f"seq_lens[{request}]", f"at least its {int(query_lens[request])} new tokens", int(lens[request]), _BUILD
        )
    if context.block_size:
        room = num_blocks * context.block_size
        long = _first(lens > room)
        if long is not None:
            [request] = long
            _refuse(
                f"seq_lens[{request}]",
                f"at most {room}, the room of {num_blocks} blocks of {context.block_size} in block_table",
                int(lens[request]),
                "give the table as many blocks as the longest request needs",
            )


def _check_host(name: str, host: tuple[int, ...], device: torch.Tensor) -> None:
    for request, (there, here) in enumerate(zip(device.tolist(), host, strict=True)):
        if there != here:
            _refuse(
                f"{name}[{request}]",
                f"{there}, what the device tensors say",
                here,
                "leave the host fields out, or set them with the tensors",
            )


def _check_table(table: torch.Tensor, context: AttentionContext) -> None:
    """All of it: some implementations gather what lies past a request's length, to ignore it."""
    bad = _first((table < 0) | (table >= context.num_blocks) if context.num_blocks else table < 0)
    if bad is not None:
        allowed = f"0 to {context.num_blocks - 1}" if context.num_blocks else "0 or more"
        request, index = bad
        in_use = ""
        if context.block_size:
            used = -(-int(context.seq_lens[request]) // context.block_size)
            in_use = f", of which request {request} uses {used} blocks"
        _refuse(
            f"block_table[{request}, {index}]",
            f"a block of {allowed}{in_use}",
            int(table[request, index]),
            "give the request its own blocks, and 0 past its length",
        )


def _check_slots(context: AttentionContext, slots: torch.Tensor) -> None:
    bad, allowed = slots < -1, "-1 or more"
    if context.num_blocks and context.block_size:
        last = context.num_blocks * context.block_size - 1
        bad, allowed = bad | (slots > last), f"-1 to {last}, as the cache has {context.num_blocks} blocks of "
        allowed += str(context.block_size)
    where = _first(bad)
    if where is not None:
        _refuse(f"slot_mapping[{where[0]}]", allowed, int(slots[where[0]]), _BUILD)
    order = slots.argsort(stable=True)
    in_order = slots[order]
    twice = _first((in_order[1:] == in_order[:-1]) & (in_order[1:] >= 0))
    if twice is not None:
        first, second = order[twice[0]], order[twice[0] + 1]
        _refuse(
            f"slot_mapping[{int(second)}]",
            f"a slot of its own, as token {int(first)} is written to this one",
            int(slots[second]),
            "give each token its slot, or -1 to one that is not to be written",
        )


def _check_places(
    context: AttentionContext, slots: torch.Tensor, starts: torch.Tensor, lens: torch.Tensor, table: torch.Tensor
) -> None:
    """Each token that is written goes where its request's blocks have its position; padding is not written."""
    num_tokens = int(starts[-1])
    padding = _first(slots[num_tokens:] != -1)
    if padding is not None:
        token = num_tokens + padding[0]
        _refuse(
            f"slot_mapping[{token}]",
            f"-1, as the requests have {num_tokens} tokens and this one is padding",
            int(slots[token]),
            "pad with -1",
        )
    if not context.block_size or num_tokens == 0:
        return
    request = torch.repeat_interleave(torch.arange(len(lens)), starts.diff())
    position = torch.arange(num_tokens) - starts[request + 1] + lens[request]
    block = table[request, position // context.block_size]
    expected = block * context.block_size + position % context.block_size
    wrong = _first((slots[:num_tokens] != expected) & (slots[:num_tokens] != -1))
    if wrong is not None:
        [token] = wrong
        _refuse(
            f"slot_mapping[{token}]",
            f"{int(expected[token])}, where the block table has position {int(position[token])} of request "
            f"{int(request[token])}, or -1",
            int(slots[token]),
            _BUILD,
        )


def _first(bad: torch.Tensor) -> list[int] | None:
    """The index of the first element that is true."""
    found = bad.nonzero()
    return [int(index) for index in found[0]] if len(found) else None


def _refuse(where: str, expected: str, got: int | str, do: str) -> NoReturn:
    raise InputError(f"AttentionContext.{where}: expected {expected}; got {got}; {do}")
