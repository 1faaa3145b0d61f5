"""What runs in the next step: first come, first served, and nobody who runs is left out for long."""

from __future__ import annotations

import dataclasses
from collections import deque

from ...phases import Phase
from .block_manager import BlockManager
from .request import Request


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """The tokens of one request in one step."""

    request: Request
    num_tokens: int
    """The next ones that it has pending, 1 or more."""

    @property
    def is_last(self) -> bool:
        """Whether nothing is pending afterwards, so that the request gets its next token from this step."""
        return self.num_tokens == self.request.num_pending


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """One step."""

    phase: Phase
    """`decode` if every request runs the one token that it got from the step before, else `prefill`."""
    chunks: tuple[Chunk, ...]
    """In the order in which the requests began to run."""


class Scheduler:
    """Decides who runs, and whose blocks go when there are too few.

    A step carries one token for each request that decodes, and prompts in the rest of the token budget, cut into
    chunks. It runs as `prefill` as soon as one prompt token is in it: so decoding requests wait for no prompt, and the
    decode phase, whose sizes are numbers of requests, sees nothing but one token a request.

    A request gets blocks for all tokens that it has when it begins to run, and one more whenever its tokens outgrow
    them. When none is left, the newest running request loses all of its own, goes to the front of the queue and is
    computed again later, with the tokens it has. The oldest one can always go on, so every request comes to its end:
    the engine takes only requests that fit into the cache alone.
    """

    def __init__(
        self, blocks: BlockManager, *, max_num_seqs: int, max_num_batched_tokens: int, enable_chunked_prefill: bool
    ) -> None:
        """`max_num_batched_tokens` is at least `max_num_seqs`, and without chunks at least the longest request."""
        assert max_num_batched_tokens >= max_num_seqs
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._blocks = blocks
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._enable_chunked_prefill = enable_chunked_prefill

    def add(self, request: Request) -> None:
        """Puts a request at the end of the queue."""
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Takes a request out, wherever it is, and frees its blocks; one that is gone stays gone."""
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        self._blocks.free(request.blocks)

    def schedule(self) -> Schedule | None:
        """The next step; None if there is nothing to run.

        The requests have blocks for it afterwards, and are otherwise as before: if the step fails, the next call gives
        the same one.
        """
        if self._make_room():
            self._admit()
        if not self.running:
            return None
        budget = self._max_num_batched_tokens - sum(not request.is_prefilling for request in self.running)
        chunks = []
        for request in self.running:
            num_tokens = 1
            if request.is_prefilling:
                num_tokens = min(request.num_pending, budget)
                budget -= num_tokens
            if num_tokens:
                chunks.append(Chunk(request=request, num_tokens=num_tokens))
        is_prefill = any(chunk.request.is_prefilling for chunk in chunks)
        return Schedule(phase=Phase.PREFILL if is_prefill else Phase.DECODE, chunks=tuple(chunks))

    def _make_room(self) -> bool:
        """Gives each running request blocks for its tokens, the oldest first; False if a newer one had to go."""
        before, index = self.num_preemptions, 0
        while index < len(self.running):
            request = self.running[index]
            if self._blocks.grow(request.blocks, request.num_tokens):
                index += 1
            else:
                self._preempt(self.running.pop())
        return self.num_preemptions == before

    def _preempt(self, request: Request) -> None:
        assert self.running, "a request was taken that does not fit into the cache alone"
        self._blocks.free(request.blocks)
        request.num_computed = request.num_prefill = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    def _admit(self) -> None:
        """Lets requests begin while there is room for them: in the step, among the running, and in the cache."""
        budget = self._max_num_batched_tokens
        budget -= sum(request.num_pending for request in self.running)
        while self.waiting and budget > 0 and len(self.running) < self._max_num_seqs:
            request = self.waiting[0]
            if not self._enable_chunked_prefill and request.num_tokens > budget:
                return
            if not self._blocks.grow(request.blocks, request.num_tokens):
                return
            self.running.append(self.waiting.popleft())
            request.num_prefill = request.num_tokens
            budget -= request.num_tokens
