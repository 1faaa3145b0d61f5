"""A step's requests as FlashInfer's plans want them: cumulative tokens and pages, on the host, and one list of pages.

A captured plan is for a number of rows and requests that never changes. So padded rows are attended too, to one token
that exists, and what comes of them is thrown away.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .attention_plans import Lengths
from .staging import to_device


class Pages(NamedTuple):
    """int32 tensors on the host, for `num_reqs` requests in the order of their rows; a page is a cache block."""

    query_start: torch.Tensor
    """[num_reqs + 1]: where each request's rows begin."""
    page_start: torch.Tensor
    """[num_reqs + 1]: where each request's pages begin in the list of pages."""
    last_page_len: torch.Tensor
    """[num_reqs]: tokens in its last page; 0 where it has no page."""
    requests: torch.Tensor
    """[num_reqs]: its row of the block table."""

    def list(self, block_table: torch.Tensor) -> torch.Tensor:
        """The pages of all requests behind each other: int32, on the device of the table; does not wait for it.

        Args:
            block_table: as that of an `AttentionContext`.
        """
        total = int(self.page_start[-1])
        device = block_table.device
        if not block_table.numel():  # then there is nothing but padding
            return torch.zeros(total, dtype=torch.int32, device=device)
        starts, requests = to_device((self.page_start, self.requests), device)
        of = torch.repeat_interleave(starts.diff(), output_size=total)
        column = torch.arange(total, dtype=torch.int32, device=device) - starts[of]
        return block_table[requests[of], column].to(torch.int32)


def pages_of_step(lengths: Lengths, block_size: int) -> Pages:
    """Of a step's own context: no padding."""
    return _pages(list(lengths.query_lens), list(lengths.seq_lens), range(len(lengths.seq_lens)), block_size)


def pages_of_decode(lengths: Lengths, block_size: int, num_rows: int) -> Pages:
    """One request a row, those without a new token left out; a row of padding sees the first token of a page."""
    requests = [request for request, new in enumerate(lengths.query_lens) if new]
    padding = num_rows - len(requests)
    seq_lens = [*(lengths.seq_lens[request] for request in requests), *[1] * padding]
    return _pages([1] * num_rows, seq_lens, [*requests, *[0] * padding], block_size)


def pages_of_slots(lengths: Lengths, block_size: int, num_rows: int, num_slots: int) -> Pages:
    """`num_slots` requests, of which some may be empty, and one more that has the rows of padding."""
    query_lens, seq_lens = lengths
    empty = [0] * (num_slots - len(query_lens))
    padding = num_rows - sum(query_lens)
    rows = [*query_lens, *empty, padding]
    # What has no row needs no page.
    lens = [*(length if new else 0 for new, length in zip(query_lens, seq_lens, strict=True)), *empty, min(padding, 1)]
    return _pages(rows, lens, [*range(num_slots), 0], block_size)


def _pages(query_lens: list[int], seq_lens: list[int], requests: range | list[int], block_size: int) -> Pages:
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    num_pages = (lens + block_size - 1).div_(block_size, rounding_mode="floor")
    return Pages(
        query_start=_starts(torch.tensor(query_lens, dtype=torch.int32)),
        page_start=_starts(num_pages),
        last_page_len=lens - (num_pages - 1).clamp_(min=0) * block_size,
        requests=torch.tensor(requests, dtype=torch.int32),
    )


def _starts(sizes: torch.Tensor) -> torch.Tensor:
    starts = torch.zeros(len(sizes) + 1, dtype=torch.int32)
    torch.cumsum(sizes, 0, dtype=torch.int32, out=starts[1:])
    return starts
