"""Ranks agree on what they run: no rank promotes an entry before all ranks can."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from ..errors import ConfigError, PieceworkError

INTERVAL = 8
"""Boundaries between two agreements while something is pending."""

_NUM_WORDS = 64
"""Of the one tensor that is reduced, in most cases: 512 bytes."""
_MOST = torch.iinfo(torch.int64).max


class Agreement(Protocol):
    """How the ranks of a model agree at a step boundary."""

    @property
    def interval(self) -> int:
        """Boundaries between two agreements while something is pending."""
        ...

    def agree(self, levels: Sequence[int]) -> list[int]:
        """The minimum over the ranks of each number.

        All ranks call it at the same boundaries, with lists of one length: best available level of each pending entry,
        in the order of the table.
        """
        ...


def agreement_of(process_group: dist.ProcessGroup | None, *, timeout_s: float = 300.0) -> Agreement | None:
    """The agreement among a group's ranks; None, which costs no collective, for no group or a group of one.

    The world that torch.distributed may know is not taken for a group: others may have made it for something else.

    Raises:
        ConfigError: as `ProcessGroupAgreement`.
    """
    if process_group is None or process_group.size() == 1:
        return None
    return ProcessGroupAgreement(process_group, timeout_s=timeout_s)


class ProcessGroupAgreement:
    """Agreement by one small reduction on the CPU.

    A gloo group is used as it is, so the ranks' own collectives on it must come in one order with these, from the
    thread that runs the steps. For a group of another backend all its ranks must come here: they make a gloo group.

    Args:
        process_group: registered with torch.distributed, as by `new_group` or `init_process_group`.
        timeout_s: how long a rank waits for the others, in a gloo group that is made here; one that is given has its
            own timeout.

    Raises:
        ConfigError: it is no process group that this process is in.
    """

    interval = INTERVAL

    def __init__(self, process_group: dist.ProcessGroup, *, timeout_s: float = 300.0) -> None:
        try:
            self._ranks = dist.get_process_group_ranks(process_group)
            backend = dist.get_backend(process_group)
        except (ValueError, KeyError, RuntimeError, AssertionError, AttributeError) as error:
            raise ConfigError(
                f"process group: expected one of torch.distributed that this process is a rank of, got "
                f"{process_group!r} ({error}); call torch.distributed.init_process_group or new_group first"
            ) from error
        self._group = process_group
        if backend != dist.Backend.GLOO:
            made = dist.new_group(
                self._ranks,
                backend=dist.Backend.GLOO,
                timeout=datetime.timedelta(seconds=timeout_s),
                # The ranks of other groups need not come here.
                use_local_synchronization=True,
            )
            assert made is not None
            self._group = made

    def agree(self, levels: Sequence[int]) -> list[int]:
        """The minimum over the ranks of each number; see `Agreement.agree`.

        Raises:
            PieceworkError: a rank is lost or late, or has a list of another length. Each rank that is there raises.
        """
        mine = list(levels)
        # The first two words tell the shortest and the longest list; both fit any list, so no rank waits in vain.
        room = _NUM_WORDS - 2
        first = self._reduce([len(mine), -len(mine), *mine[:room]], _NUM_WORDS)
        shortest, longest = first[0], -first[1]
        if shortest != longest:
            raise PieceworkError(
                f"agreement: expected lists of one length from all ranks, got {shortest} to {longest} entries, "
                f"{len(mine)} of them here (rank {dist.get_rank()}); give all ranks the same config and steps"
            )
        rest = self._reduce(mine[room:], len(mine) - room) if len(mine) > room else []
        return [*first[2:], *rest][: len(mine)]

    def _reduce(self, words: Sequence[int], num_words: int) -> list[int]:
        tensor = torch.full((num_words,), _MOST, dtype=torch.int64, device="cpu")
        tensor[: len(words)] = torch.tensor(words, dtype=torch.int64, device="cpu")
        try:
            dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self._group)
        except RuntimeError as error:
            raise PieceworkError(
                f"agreement: expected an answer from all of the ranks {', '.join(map(str, self._ranks))}, got none in "
                f"time on rank {dist.get_rank()} ({str(error).strip().partition(chr(10))[0]}); a rank has ended or "
                f"hangs, so look at its log and start all of them again"
            ) from error
        return [int(word) for word in tensor.tolist()]
