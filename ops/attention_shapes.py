"""The checks of a call of paged attention: what would read or write the wrong place is refused, by shapes alone."""

from __future__ import annotations

import torch

from ..errors import InputError
from .attention_context import AttentionContext


def check_tensors(
    q: torch.Size,
    k: torch.Size,
    v: torch.Size,
    k_cache: torch.Size,
    v_cache: torch.Size,
    out: torch.Size,
    window_size: int,
) -> None:
    """Refuses shapes that do not fit each other; see `piecework.ops.attention.paged_attention`.

    Raises:
        InputError: they do not, or the window is negative.
    """
    if len(q) != 3 or out != q:
        _refuse("q and out: [num_tokens, num_heads, head_size], the same for both", q=q, out=out)
    num_tokens, num_heads, head_size = q
    if len(k) != 3 or v != k or k[0] != num_tokens or k[2] != head_size:
        _refuse(f"k and v: [{num_tokens}, num_kv_heads, {head_size}]", k=k, v=v)
    num_kv_heads = k[1]
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        _refuse("the query heads to be a multiple of the key heads", q=q, k=k)
    if len(k_cache) != 4 or v_cache != k_cache or k_cache[2:] != k[1:]:
        _refuse(
            f"k_cache and v_cache: [num_blocks, block_size, {num_kv_heads}, {head_size}]",
            k_cache=k_cache,
            v_cache=v_cache,
        )
    if window_size < 0:
        raise InputError(f"paged_attention: window_size: expected 1 or more, or 0 for none, got {window_size}; use 0")


def check_context(context: AttentionContext, num_tokens: int, num_blocks: int, block_size: int) -> None:
    """Refuses a context that is not for `num_tokens` rows, that was built for another cache than one of `num_blocks`
    blocks, or whose requests its block table does not hold.

    Looks at shapes and at the host, so that it costs no wait for the device.

    Raises:
        InputError: it is such a one.
    """
    fewer = not context.is_static and context.num_tokens > num_tokens
    if context.slot_mapping.shape != (num_tokens,) or fewer:
        has = "is a static copy with" if context.is_static else f"has {context.num_tokens} and"
        raise InputError(
            f"paged_attention: q has {num_tokens} tokens, but the context {has} a slot_mapping of "
            f"{list(context.slot_mapping.shape)}; give this step's context, padded with -1 to the inputs' size"
        )
    if context.block_size not in (0, block_size) or context.num_blocks > num_blocks:
        known = f"{context.num_blocks} blocks" if context.num_blocks else "blocks"
        raise InputError(
            f"paged_attention: expected a context for the layer's cache of {num_blocks} blocks of {block_size} tokens, "
            f"got one for {known} of {context.block_size or 'any number of'} tokens; build it with the sizes of the "
            f"cache"
        )
    room = context.block_table.shape[1] * block_size
    if max(context.seq_lens_host, default=0) > room:
        raise InputError(
            f"paged_attention: a request has {max(context.seq_lens_host)} tokens, but block_table and block_size "
            f"{block_size} hold {room}; give the context as many blocks as its longest request needs"
        )


def _refuse(expected: str, **shapes: torch.Size) -> None:
    got = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
    raise InputError(f"paged_attention: expected {expected}; got {got}; correct the call in the model's forward")
