"""Gives `packed_attention` to the models of the transformers library, under the name "piecework".

Nothing here imports transformers before it is asked to: it is an optional dependency.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import InputError, NotAvailableError
from .packed_attention import packed_attention

NAME = "piecework"
"""What models call it: `attn_implementation="piecework"`."""

_REFUSED = ("sliding_window", "softcap", "s_aux", "sinks", "position_bias", "head_mask", "indices", "block_indices")
"""What a model may pass that would change the result."""


def transformers_attention() -> str:
    """Registers packed attention with transformers and returns its name, "piecework".

    `AutoModel.from_pretrained(path, attn_implementation=piecework.transformers_attention())` makes a model for packed
    sequences: inputs are `[1, num_tokens]`, `position_ids` begin again with each sequence, and where sequences begin is
    in the step's `PackedContext`. No mask is made, and `attention_mask` is not looked at: what it hides lies past the
    context's last sequence. Calling this again changes nothing.

    Raises:
        NotAvailableError: transformers is not installed, or has no attention interface.
    """
    try:
        from transformers import AttentionInterface
    except ImportError as error:
        raise NotAvailableError(
            f"transformers_attention: expected transformers 4.57 or newer, got: {error}; run: "
            f"pip install 'piecework[hf]'"
        ) from error
    # Nothing is registered as a mask function, and so none is called: transformers' way to say that no mask is needed.
    AttentionInterface.register(NAME, attention_forward)
    return NAME


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers' attention modules call.

    Args:
        query: [1, num_heads, num_tokens, head_size].
        key: [1, num_kv_heads, num_tokens, head_size].
        value: [1, num_kv_heads, num_tokens, value_size].

    Returns:
        [1, num_tokens, num_heads, value_size], and None in place of the attention weights.

    Raises:
        InputError: the model asks for something that packed attention does not compute.
    """
    refused = [name for name in _REFUSED if kwargs.get(name) is not None]
    if attention_mask is not None:
        refused.append("a mask of its own")
    if dropout:
        refused.append("dropout (call model.eval())")
    if refused:
        raise InputError(
            f"packed attention: {type(module).__name__} asks for {', '.join(refused)}, which it does not compute; load "
            f"the model with another attn_implementation"
        )
    if query.shape[0] != 1:
        raise InputError(
            f"packed attention: expected inputs [1, num_tokens] with all sequences behind each other, got a batch of "
            f"{query.shape[0]}; concatenate the sequences and give their lengths as PackedContext.build(seq_lens=...)"
        )
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
    scale = scaling if scaling is not None else q.shape[2] ** -0.5
    packed_attention(q, k, v, out, scale, bool(getattr(module, "is_causal", True) if is_causal is None else is_causal))
    return out.unsqueeze(0), None
