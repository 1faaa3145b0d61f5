"""What a step's attention reads beside its tensors: the requests of the step, on the device and on the host."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence

import torch

from ..errors import InputError
from .context import context_field, host_field


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AttentionContext:
    """What one step's attention needs to know about its requests; the tokens of a step lie request after request.

    A request's new tokens are its last ones: a request with `n` new tokens and length `s` has them at the positions
    `s - n` to `s - 1`, and whatever lies before is read from the cache.

    When a whole forward is captured, the runtime keeps a static copy (`as_static`), which the capture reads, and fills
    it before each run. A context class may define `plan()`: it is called on the static copy, outside of captures,
    before each run. This one needs none yet.

    Raises:
        InputError: the fields disagree about the number of requests.
    """

    slot_mapping: torch.Tensor = context_field(pad=-1)  # noqa: RUF009 (it returns a dataclasses.field)
    """[num_tokens], int64: `block * block_size + offset` where a token's K and V go; -1 writes nothing."""
    query_start_loc: torch.Tensor = context_field(pad="last", slots={0: "requests"}, plus={0: 1})  # noqa: RUF009
    """[num_reqs + 1], int32: request `r` has the tokens `query_start_loc[r]` to `query_start_loc[r + 1] - 1`."""
    seq_lens: torch.Tensor = context_field(pad=0, slots={0: "requests"})  # noqa: RUF009
    """[num_reqs], int32: tokens of each request, the new ones included."""
    block_table: torch.Tensor = context_field(pad=0, slots={0: "requests", 1: "blocks"})  # noqa: RUF009
    """[num_reqs, max_blocks], int32: the cache blocks of each request in order; past its length any valid block."""
    query_lens_host: tuple[int, ...] = host_field(default=())
    """New tokens of each request, so that no layer waits for the device; read from the tensors if not given."""
    seq_lens_host: tuple[int, ...] = host_field(default=())
    """`seq_lens` on the host, for the same reason; read from the tensor if not given."""
    is_static: bool = False
    """Whether this is the runtime's static copy: shapes fixed, unused request slots empty (query_len 0, seq_len 0),
    host fields empty; everything must be read from device tensors."""

    def __post_init__(self) -> None:
        num_reqs = self.num_reqs
        if self.query_start_loc.shape != (num_reqs + 1,) or self.block_table.shape[:1] != (num_reqs,):
            raise InputError(
                f"AttentionContext: seq_lens has {num_reqs} requests, so query_start_loc must have {num_reqs + 1} "
                f"elements and block_table {num_reqs} rows; got {list(self.query_start_loc.shape)} and "
                f"{list(self.block_table.shape)}; build the context with AttentionContext.build(...)"
            )
        if self.is_static:
            return
        if not self.query_lens_host:
            object.__setattr__(self, "query_lens_host", tuple(self.query_start_loc.diff().tolist()))
        if not self.seq_lens_host:
            object.__setattr__(self, "seq_lens_host", tuple(self.seq_lens.tolist()))
        if len(self.query_lens_host) != num_reqs or len(self.seq_lens_host) != num_reqs:
            raise InputError(
                f"AttentionContext: there are {num_reqs} requests, but query_lens_host has "
                f"{len(self.query_lens_host)} and seq_lens_host {len(self.seq_lens_host)}; give one number a request, "
                f"or leave both out"
            )

    @property
    def num_reqs(self) -> int:
        """Number of requests in this step; of request slots in a static copy."""
        return self.seq_lens.shape[0]

    @property
    def num_tokens(self) -> int:
        """Number of new tokens, padding not counted.

        Raises:
            InputError: the context is static: the number is on the device only.
        """
        if self.is_static:
            raise InputError(
                "AttentionContext.num_tokens: expected a step's own context, got the runtime's static copy, whose "
                "lengths are on the device only; read query_start_loc in a kernel"
            )
        return sum(self.query_lens_host)

    @property
    def is_decode(self) -> bool:
        """Whether every request is known to have exactly one new token; never known of a static copy."""
        return not self.is_static and self.query_lens_host.count(1) == len(self.query_lens_host)

    def as_static(self, fields: Mapping[str, torch.Tensor]) -> AttentionContext:
        """A copy over the tensors in `fields`, by field name: the runtime's static copy. Checks nothing."""
        static = copy.copy(self)
        for name, value in {**fields, "query_lens_host": (), "seq_lens_host": (), "is_static": True}.items():
            object.__setattr__(static, name, value)
        return static

    @classmethod
    def build(
        cls,
        *,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> AttentionContext:
        """Makes the tensors of a step from each request's new tokens, length and cache blocks.

        Raises:
            InputError: a request is shorter than its new tokens, or its blocks do not hold its length.
        """
        if not len(query_lens) == len(seq_lens) == len(block_tables):
            raise InputError(
                f"AttentionContext.build: query_lens, seq_lens and block_tables must have one element a request; got "
                f"{len(query_lens)}, {len(seq_lens)} and {len(block_tables)} elements"
            )
        for request, (query_len, seq_len, blocks) in enumerate(zip(query_lens, seq_lens, block_tables, strict=True)):
            if not 0 <= query_len <= seq_len <= len(blocks) * block_size:
                raise InputError(
                    f"AttentionContext.build: request {request} has {query_len} new tokens, length {seq_len} and "
                    f"{len(blocks)} blocks of {block_size}; expected 0 <= new tokens <= length <= room in its blocks; "
                    f"allocate more blocks or correct the lengths"
                )
        width = max((len(blocks) for blocks in block_tables), default=0)
        table = torch.tensor([[*b, *[0] * (width - len(b))] for b in block_tables], dtype=torch.int64)
        table = table.view(len(block_tables), width)
        new = torch.tensor(query_lens, dtype=torch.int64)
        total = torch.tensor(seq_lens, dtype=torch.int64)
        start = torch.zeros(len(query_lens) + 1, dtype=torch.int64)
        torch.cumsum(new, 0, out=start[1:])
        request_of = torch.repeat_interleave(torch.arange(len(query_lens)), new)
        position = torch.arange(len(request_of)) + (total - new - start[:-1])[request_of]
        block = table[request_of, position // block_size]
        return cls(
            slot_mapping=(block * block_size + position % block_size).to(device),
            query_start_loc=start.to(device, torch.int32),
            seq_lens=total.to(device, torch.int32),
            block_table=table.to(device, torch.int32),
            query_lens_host=tuple(query_lens),
            seq_lens_host=tuple(seq_lens),
        )
