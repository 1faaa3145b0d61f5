"""Drawing tokens from logits with random numbers that the caller gives.

A seeded request draws the same tokens wherever and however often it runs, so a kernel has to take each row's number and
follow one order of the tokens. FlashInfer's samplers (0.6.12) take a seed and an offset of a generator of their own and
go through the ids as they come; sgl-kernel (0.4.4) has none left but that of speculative decoding, which also goes by
id. Neither can serve here, and neither is registered.
"""

from __future__ import annotations

import torch

from ..errors import InputError
from .fused import fused_op
from .opaque import opaque
from .packages import needs

TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of logits that the Triton kernels take."""


@fused_op("sample", fuses=False)
def sample(
    logits: torch.Tensor, uniform: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """One token a row: temperature, then top-k, then top-p of what is left, then the token at the row's number.

    Tokens stand in the order of their logits, the likeliest first, and of equal ones the lower id first. The token is
    the first up to which more than `uniform` of the kept probability lies. A row whose temperature is 0 takes the first
    token of this order. What a row gets depends on nothing in the other rows. Logits that are NaN
    or positive infinities give any token.

    Args:
        logits: [num_rows, vocab_size], of a floating dtype.
        uniform: [num_rows], float64, in [0, 1).
        temperature: [num_rows], float64, 0 or more.
        top_k: [num_rows], whole numbers of any dtype; 0 for all.
        top_p: [num_rows], float64, above 0; 1 for all. The token that reaches it still belongs to the set.

    Returns:
        [num_rows], int64.

    Raises:
        InputError: shapes do not fit each other; checked by the native body, and not while it is traced.
    """
    if not torch.compiler.is_compiling():
        _check(logits, uniform, temperature, top_k, top_p)
    is_drawn = temperature > 0
    probabilities, token_ids = distribution(
        logits,
        temperature=torch.where(is_drawn, temperature, 1).unsqueeze(-1),
        top_k=top_k.unsqueeze(-1),
        top_p=top_p.unsqueeze(-1),
    )
    summed = probabilities.cumsum(-1)
    wanted = uniform.unsqueeze(-1) * summed[:, -1:]
    # The first whose sum is above; rounding may push what is wanted up to the whole sum, where there is none.
    last = (probabilities > 0).sum(-1, keepdim=True) - 1
    found = torch.searchsorted(summed, wanted, right=True).minimum(last).clamp(min=0)
    return token_ids.gather(-1, torch.where(is_drawn.unsqueeze(-1), found, 0)).squeeze(-1)


def distribution(
    logits: torch.Tensor, *, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What tokens are drawn from: temperature, then top-k, then top-p of what is left.

    Args:
        logits: [num_rows, vocab_size].
        temperature: [num_rows, 1], above 0.
        top_k: [num_rows, 1]; 0 for all.
        top_p: [num_rows, 1], above 0; 1 for all. The token that reaches it still belongs to the set.

    Returns:
        Probabilities, float64, the likeliest first and 0 for what cannot be drawn, not normalised after top-p; and
        the token ids in this order. Both [num_rows, vocab_size].
    """
    # Always sorted, also where nothing is cut: a row must not come out otherwise because of what is beside it.
    values, token_ids = logits.sort(dim=-1, descending=True, stable=True)
    scaled = (values.double() - values[:, :1].double()) / temperature  # the largest is 0: no overflow in exp
    rank = torch.arange(logits.shape[-1], device=logits.device)
    scaled = scaled.masked_fill((top_k > 0) & (rank >= top_k), -torch.inf)
    probabilities = scaled.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    return probabilities.masked_fill((top_p < 1) & (before >= top_p) & (rank > 0), 0), token_ids


@opaque("triton_sample", fake=lambda logits, *columns: logits.new_empty(logits.shape[:1], dtype=torch.int64))
def _triton_operator(
    logits: torch.Tensor, uniform: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    from .triton.sampling import sample_rows  # triton is imported by its first use alone

    _check(logits, uniform, temperature, top_k, top_p)
    drawn = sample_rows(logits, uniform, temperature, top_k, top_p)
    return sample.native(logits, uniform, temperature, top_k, top_p) if drawn is None else drawn


@sample.kernel(
    "triton",
    device_types=("cuda",),
    available=needs("triton", "triton"),
    dtypes=TRITON_DTYPES,
    why="sorts nothing, and draws by the rows' numbers",
)
def _triton_sample(
    logits: torch.Tensor, uniform: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """The operator `piecework::triton_sample`; for dtypes that it does not know, the native body.

    The native body too while the kernels are being compiled and nobody is to wait for that (`defer_compiles`).

    Weights and sums of up to a few thousand tokens are float32, where the native body has float64: another token may
    come out where a number is within 1e-5 of the place at which one token ends and the next one begins (also: where
    `top_p` is). Each weight is right to 3e-6, which is what the float32 exponents of tokens leave that are up to 12
    temperatures below the largest one (lower ones weigh too little to add to that), and each sum to 2e-6, which is
    that many roundings in a tree. Tokens 32 temperatures below the largest one are never drawn: together they weigh
    less than 1e-7 of it.
    """
    if logits.dtype not in TRITON_DTYPES:
        return sample.native(logits, uniform, temperature, top_k, top_p)
    drawn: torch.Tensor = _triton_operator(logits, uniform, temperature, top_k, top_p)
    return drawn


def _check(logits: torch.Tensor, *columns: torch.Tensor) -> None:
    if logits.dim() != 2 or logits.shape[1] == 0 or not logits.is_floating_point():
        raise InputError(
            f"sample: logits: expected [num_rows, vocab_size] of a floating dtype, got {list(logits.shape)} of "
            f"{logits.dtype}; pass one row of logits for each token that is wanted"
        )
    for name, column in zip(("uniform", "temperature", "top_k", "top_p"), columns, strict=True):
        if column.shape != logits.shape[:1] or column.device != logits.device:
            raise InputError(
                f"sample: {name}: expected [{logits.shape[0]}] on {logits.device}, one a row of logits, got "
                f"{list(column.shape)} on {column.device}; give each row its own"
            )
