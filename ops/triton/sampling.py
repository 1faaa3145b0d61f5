"""Draws a token for each row of logits without sorting them, in four Triton kernels that read each row three times.

Where top-k ends, where top-p ends and where a row's random number falls are all one question: which is the largest
logit such that it and the larger ones together count, or weigh, enough? Many programs share a row to answer it roughly:
they find its peak, then count and weigh what is above each of a few edges, then write down the tokens between the edges
where a place may be. Among these few one program searches: the bits of floats are in the order of the floats once the
negative ones are turned round, so that integers are divided until one token is left, or several equal ones, whose order
is that of their ids.

No sum depends on which program is first, nor on the number of rows: sizes follow from the vocabulary alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..deferred import deferring
from .operators import Launcher, power_of_2
from .sampling_chunks import draw_rows_gather, draw_rows_peaks, draw_rows_tally
from .sampling_plan import NUM_LIMITS
from .sampling_search import draw_rows_pick

_CHUNK = 4096
"""Tokens of a program of the kernels that share a row; a power of two. Its sums are added in float32."""
_MAX_CHUNKS = 64
"""Of a row; past that the chunks are larger."""
_BINS = 32
"""Parts in which a row is counted and weighed; a power of two. More: fewer candidates, and each token compared with as
many edges."""
_EDGES_AT_ONCE = 8
"""Of the bins that a program compares its tokens with at once; a power of two."""
_CAPACITY = 32768
"""Candidates of a row that are written down; past that all of the row's logits are searched."""
_SEARCH_BLOCK = 2048
"""Candidates that the search takes at once; a power of two."""
_SEARCH_EDGES = 16
"""Keys that the search tries at once; a power of two."""
_PEAK_WARPS, _TALLY_WARPS, _GATHER_WARPS, _SEARCH_WARPS = 8, 16, 8, 16
_PEAKS, _TALLY, _GATHER, _PICK = map(Launcher, (draw_rows_peaks, draw_rows_tally, draw_rows_gather, draw_rows_pick))


class _Step(NamedTuple):
    """One of the launches."""

    launcher: Launcher
    tensors: tuple[torch.Tensor, ...]
    constants: tuple[int, ...]
    programs: int
    """Of a row."""
    num_warps: int


def sample_rows(
    logits: torch.Tensor, uniform: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor | None:
    """`piecework.ops.sampling.sample` of float32, bfloat16 or float16, whose arguments fit. Does not wait.

    None where a kernel would have to be compiled first and nobody is to wait for that (`defer_compiles`).

    Raises:
        KernelNotReadyError: under `defer_compiles`, in a capture: a kernel is not compiled yet.
        NotAvailableError: the tensors are not on a GPU.
    """
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_rows, vocab_size = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return out
    columns = [column.contiguous() for column in (uniform, temperature, top_k, top_p)]
    steps = _steps(logits, columns, out)
    numbers = (vocab_size, logits.stride(0))

    def launch(step: _Step, num_programs: int) -> bool:
        return step.launcher.launch(
            step.tensors, num_rows, numbers, step.constants, num_programs=num_programs, num_warps=step.num_warps
        )

    # A step must not run on what those before it did not write: no programs are launched where all are not ready.
    if deferring() is not None:
        ready = [launch(step, 0) for step in steps]
        if not all(ready):
            return None
    for step in steps:
        launch(step, num_rows * step.programs)
    return out


def _steps(logits: torch.Tensor, columns: list[torch.Tensor], out: torch.Tensor) -> tuple[_Step, ...]:
    """The launches, in their order, and memory for what they leave to each other."""
    num_rows, vocab_size = logits.shape
    chunk = min(max(_CHUNK, power_of_2(-(-vocab_size // _MAX_CHUNKS))), power_of_2(vocab_size))
    num_chunks = -(-vocab_size // chunk)
    capacity = min(_CAPACITY, vocab_size)
    plan_size = NUM_LIMITS.value + 3 * _BINS

    def empty(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(num_rows, *sizes, dtype=dtype, device=logits.device)

    plan = empty(plan_size, dtype=torch.float64)
    peaks = empty(2, num_chunks, dtype=torch.float32)
    counts = empty(_BINS, num_chunks, dtype=torch.int32)
    weights = empty(_BINS, num_chunks, dtype=torch.float32)
    values = empty(capacity, dtype=logits.dtype)
    ids = empty(capacity, dtype=torch.int32)
    sizes = (plan_size, num_chunks, power_of_2(num_chunks), chunk, _BINS)
    block = min(_SEARCH_BLOCK, power_of_2(vocab_size))
    return (
        _Step(_PEAKS, (logits, *columns, plan, peaks), (plan_size, num_chunks, chunk), num_chunks, _PEAK_WARPS),
        _Step(
            _TALLY,
            (logits, plan, peaks, counts, weights),
            (*sizes, min(_EDGES_AT_ONCE, _BINS)),
            num_chunks,
            _TALLY_WARPS,
        ),
        _Step(
            _GATHER, (logits, plan, peaks, counts, weights, values, ids), (*sizes, capacity), num_chunks, _GATHER_WARPS
        ),
        _Step(
            _PICK, (logits, plan, peaks, values, ids, out), (*sizes, capacity, block, _SEARCH_EDGES), 1, _SEARCH_WARPS
        ),
    )
