"""What a step's attention reads beside its tensors: the requests of the step, on the device and on the host."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from array import array
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from ..errors import InputError
from .attention_plans import Lengths, key_of_plans, renew_plans
from .context import context_field, host_field
from .staging import host_integers, to_device


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AttentionContext:
    """What one step's attention needs to know about its requests; the tokens of a step lie request after request.

    A request's new tokens are its last ones: a request with `n` new tokens and length `s` has them at the positions
    `s - n` to `s - 1`, and whatever lies before is read from the cache.

    When a whole forward is captured, the runtime keeps a static copy (`as_static`), which the capture reads, and fills
    it before each run, and calls `plan_for` of the copy. See Note [Plans of a context] in attention_plans.py.

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
    num_blocks: int = 0
    """Blocks of the KV cache, for checks; 0: not known."""
    block_size: int = 0
    """Tokens in one block of the KV cache, for checks; 0: not known."""
    scratch: dict[Hashable, Any] = host_field(default_factory=dict, repr=False, compare=False)  # noqa: RUF009
    """Memory of the kernels that attend with this context, kept as long as it lives: key -> tensor or value, none of
    which holds the context. Copies for the same step share it; a static copy has its own, since captures may hold its
    addresses. Work on it is on one stream."""
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
        if self.is_static or (num_reqs == 0 and not self.query_lens_host and not self.seq_lens_host):
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

    def check(self) -> None:
        """Looks at every value, for the debug mode: kernels do not, and would read and write wherever they are told to.

        Waits for the device. What needs `num_blocks` or `block_size` is left out where they are 0; that they are those
        of a layer's cache is for `paged_attention` to see. A static copy, which has no host fields, is checked like any
        other but for those.

        Raises:
            InputError: slots that the cache does not have, that two tokens share, or that are not where the block
                table has their token; blocks that the cache does not have; lengths that do not fit each other, the
                tokens or the table's room; host fields that say something else than the tensors. The first is named.
        """
        from .attention_check import check_context  # only the debug mode needs it

        check_context(self)

    def as_static(self, fields: Mapping[str, torch.Tensor]) -> AttentionContext:
        """A copy over the tensors in `fields`, by field name: the runtime's static copy. Checks nothing."""
        static = copy.copy(self)
        # Scratch of this step's would be freed under a capture, or shared with steps on another stream.
        host: dict[str, Any] = {"query_lens_host": (), "seq_lens_host": (), "scratch": {}}
        for name, value in {**fields, **host, "is_static": True}.items():
            object.__setattr__(static, name, value)
        return static

    def plan_for(self, step: AttentionContext | None) -> None:
        """Renews the plans of a static copy for what it was filled with; outside of captures, before it is read.

        Args:
            step: the context that it was filled from; None: padding, which has no requests.
        """
        lengths = Lengths((), ()) if step is None else Lengths(step.query_lens_host, step.seq_lens_host)
        renew_plans(self, lengths)

    def plan_key(self) -> Hashable:
        """What captures made with this static copy have frozen of its plans; None: nothing.

        Other than when a capture was made: it must not be replayed.
        """
        return key_of_plans(self)

    @classmethod
    def build(
        cls,
        *,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        block_size: int,
        num_blocks: int = 0,
        max_blocks: int | None = None,
        device: torch.device | str = "cpu",
    ) -> AttentionContext:
        """Makes the tensors of a step from each request's new tokens, length and cache blocks.

        Args:
            num_blocks: blocks of the cache, if the tables are to be checked against it; 0: not known.
            max_blocks: width of `block_table`; by default what the request with the most blocks needs. A few round
                widths, in place of one for each length, let a runtime recognise its steps.

        Raises:
            InputError: a request is shorter than its new tokens, its blocks do not hold its length, it has more than
                `max_blocks`, or a block that the cache does not have; or a size cannot be one.
        """
        if block_size < 1 or num_blocks < 0:
            raise InputError(
                f"AttentionContext.build: expected a block_size of 1 or more and num_blocks of 0 (not known) or more, "
                f"got {block_size} and {num_blocks}; give the sizes of the KV cache"
            )
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
        table = _table(block_tables, max_blocks)
        if num_blocks:
            _check_blocks(table, num_blocks)
        tensors = (
            host_integers(_slots(query_lens, seq_lens, block_tables, block_size)),
            host_integers(array("i", itertools.accumulate(query_lens, initial=0))),
            host_integers(array("i", seq_lens)),
            table,
        )
        slot_mapping, query_start_loc, lens, block_table = to_device(tensors, device)
        return cls(
            slot_mapping=slot_mapping,
            query_start_loc=query_start_loc,
            seq_lens=lens,
            block_table=block_table,
            query_lens_host=tuple(query_lens),
            seq_lens_host=tuple(seq_lens),
            num_blocks=num_blocks,
            block_size=block_size,
        )


def _table(block_tables: Sequence[Sequence[int]], max_blocks: int | None) -> torch.Tensor:
    """The `block_table` of a step, on the host."""
    width = max(map(len, block_tables), default=0)
    if max_blocks is not None:
        if width > max_blocks:
            raise InputError(
                f"AttentionContext.build: max_blocks is {max_blocks}, but a request has {width} blocks; raise "
                f"max_blocks, or leave it out"
            )
        width = max_blocks
    table, zeros = array("i"), array("i", bytes(4 * width))
    for blocks in block_tables:
        # An array of the same type is copied as memory; of another one, it would be refused.
        table.extend(blocks if not isinstance(blocks, array) or blocks.typecode == "i" else blocks.tolist())
        table.extend(zeros[len(blocks) :])
    return host_integers(table).view(len(block_tables), width)


def _check_blocks(table: torch.Tensor, num_blocks: int) -> None:
    """Refuses blocks that the cache does not have while they are on the host still."""
    if table.numel():
        low, high = torch.aminmax(table)
        if low < 0 or high >= num_blocks:
            request, index = ((table < 0) | (table >= num_blocks)).nonzero()[0].tolist()
            raise InputError(
                f"AttentionContext.build: block_tables[{request}][{index}]: expected a block of 0 to "
                f"{num_blocks - 1}, as there are num_blocks {num_blocks}, got {int(table[request, index])}; correct "
                f"the table"
            )


def _slots(
    query_lens: Sequence[int], seq_lens: Sequence[int], block_tables: Sequence[Sequence[int]], block_size: int
) -> array[int]:
    """The `slot_mapping` of a step: a run of slots for each block that gets new tokens."""
    slots = array("q")
    for query_len, seq_len, blocks in zip(query_lens, seq_lens, block_tables, strict=True):
        position = seq_len - query_len
        while position < seq_len:
            index, offset = divmod(position, block_size)
            count = min(block_size - offset, seq_len - position)
            first = blocks[index] * block_size + offset
            slots.extend(range(first, first + count))
            position += count
    return slots
