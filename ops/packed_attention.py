"""Attention over packed sequences: the split op for models without a KV cache, and the context it reads.

The sequences of a step lie behind each other along one dim of tokens, without padding between them; where each begins
is in this step's `PackedContext`. `piecework.ops.transformers_attention` gives the operator to transformers' models.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from ..errors import InputError
from .context import context_field, get_context
from .split_op import split_op


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PackedContext:
    """Where the sequences of one step begin and end. Rows past the last sequence are padding.

    Raises:
        InputError: the fields disagree about the number of sequences.
    """

    seq_start_loc: torch.Tensor = context_field(pad=0, dims={})  # noqa: RUF009 (it returns a dataclasses.field)
    """[num_seqs + 1], int32: sequence `s` has the tokens `seq_start_loc[s]` to `seq_start_loc[s + 1] - 1`."""
    seq_lens_host: tuple[int, ...] = ()
    """Tokens of each sequence, so that no layer waits for the device; read from the tensor if not given."""

    def __post_init__(self) -> None:
        if self.seq_start_loc.dim() != 1 or not len(self.seq_start_loc):
            raise _no_start(f"shape {list(self.seq_start_loc.shape)}")
        if not self.seq_lens_host:
            start = self.seq_start_loc.tolist()
            if start[0] != 0:
                raise _no_start(str(start))
            lengths = tuple(end - begin for begin, end in itertools.pairwise(start))
            object.__setattr__(self, "seq_lens_host", lengths)
        if len(self.seq_lens_host) != self.num_seqs or any(length < 0 for length in self.seq_lens_host):
            raise InputError(
                f"PackedContext: seq_start_loc speaks of {self.num_seqs} sequences, seq_lens_host is "
                f"{self.seq_lens_host}; give one length a sequence, none negative, or leave seq_lens_host out"
            )

    @property
    def num_seqs(self) -> int:
        """Number of sequences in this step."""
        return self.seq_start_loc.shape[0] - 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens, padding not counted."""
        return sum(self.seq_lens_host)

    def positions(self) -> torch.Tensor:
        """[num_tokens], int64: the place of each token in its own sequence, on the device of the context."""
        return torch.cat([torch.arange(length) for length in (*self.seq_lens_host, 0)]).to(self.seq_start_loc.device)

    @classmethod
    def build(cls, *, seq_lens: Sequence[int], device: torch.device | str = "cpu") -> PackedContext:
        """Makes the context of a step from the length of each sequence.

        Raises:
            InputError: a length is negative.
        """
        start = torch.zeros(len(seq_lens) + 1, dtype=torch.int64)
        torch.cumsum(torch.tensor(seq_lens, dtype=torch.int64), 0, out=start[1:])
        return cls(seq_start_loc=start.to(device, torch.int32), seq_lens_host=tuple(seq_lens))


def _why_not_captured(*args: object, **kwargs: object) -> str:
    return "it reads the lengths of the sequences on the host"


@split_op(mutates_args=("out",), capturable=_why_not_captured)
def packed_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, scale: float, causal: bool
) -> None:
    """Attends within each sequence of this step's `PackedContext`.

    Rows of `out` past the last sequence become zeros, whatever the inputs hold there, and reach no other row.

    Args:
        q: [num_tokens_padded, num_heads, head_size], any strides.
        k: [num_tokens_padded, num_kv_heads, head_size], any strides; each key head serves `num_heads // num_kv_heads`
            query heads.
        v: [num_tokens_padded, num_kv_heads, value_size], any strides.
        out: [num_tokens_padded, num_heads, value_size]; every row is written.
        scale: factor on the scores, usually `head_size ** -0.5`.
        causal: whether a token sees only itself and what lies before it.

    Raises:
        ContextError: no step is running, or its context is no `PackedContext`.
        InputError: shapes do not fit each other or the context.
    """
    context = get_context(PackedContext)
    _check_shapes(q, k, v, out, context)
    grouped = q.shape[1] != k.shape[1]
    row = 0
    for length in context.seq_lens_host:
        if length == 0:
            continue
        rows = slice(row, row + length)
        query, keys, values = (x[rows].transpose(0, 1)[None] for x in (q, k, v))
        result = scaled_dot_product_attention(query, keys, values, scale=scale, is_causal=causal, enable_gqa=grouped)
        out[rows].copy_(result[0].transpose(0, 1))
        row += length
    out[row:].zero_()


def _no_start(got: str) -> InputError:
    return InputError(
        f"PackedContext: seq_start_loc: expected cumulative lengths [num_seqs + 1] that begin with 0, got {got}; build "
        f"the context with PackedContext.build(seq_lens=...)"
    )


def _check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, context: PackedContext) -> None:
    got = ", ".join(f"{n} {list(t.shape)}" for n, t in (("q", q), ("k", k), ("v", v), ("out", out)))
    if any(t.dim() != 3 for t in (q, k, v, out)) or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise InputError(
            f"packed_attention: expected [num_tokens, heads, head_size], with the query heads a multiple of the key "
            f"heads; got {got}; correct the call in the model's forward"
        )
    num_tokens, num_heads, head_size = q.shape
    num_kv_heads = k.shape[1]
    if k.shape[0] != num_tokens or v.shape[0] != num_tokens:
        raise InputError(
            f"packed_attention: expected a key and a value for each of the {num_tokens} query tokens; got {got}; there "
            f"is no KV cache here (pass use_cache=False) and no attention to another sequence"
        )
    if k.shape[2] != head_size or v.shape[1] != num_kv_heads or out.shape != (num_tokens, num_heads, v.shape[2]):
        raise InputError(
            f"packed_attention: expected k with head_size {head_size}, v with {num_kv_heads} heads and out "
            f"[{num_tokens}, {num_heads}, {v.shape[2]}]; got {got}; correct the call in the model's forward"
        )
    if context.num_tokens > num_tokens:
        raise InputError(
            f"packed_attention: q has {num_tokens} tokens, but the context's sequences have {context.num_tokens}; give "
            f"this step's context, PackedContext.build(seq_lens=...)"
        )
