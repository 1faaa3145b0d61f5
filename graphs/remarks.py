"""What is to be said of a trace, wherever it was made: a worker cannot warn or count for the runtime that asked."""

from __future__ import annotations

import dataclasses

from .inputs import InputContract
from .region import reuse_is_supported
from .rows import written_from_tokens
from .trace import Traced


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Remark:
    """A fallback that the trace took, or a warning about what the model does."""

    text: str
    because: str | None = None
    """Why the trace fell back; None for a warning."""


def remarks_on(traced: Traced, contract: InputContract) -> tuple[Remark, ...]:
    """Everything that a runtime should record of a trace."""
    remarks = []
    flat = "repeated layers were traced one by one"
    if traced.regions_failure is not None and reuse_is_supported():
        remarks.append(Remark(text=flat, because=traced.regions_failure))
    elif traced.regions_failure is not None:
        remarks.append(Remark(text=f"{flat}: {traced.regions_failure}"))
    if names := written_from_tokens(traced, contract):
        remarks.append(
            Remark(
                text=f"the forward writes what it computes from the tokens into {', '.join(names)}: padded rows too; "
                f"write it in a split op, which knows them from its context"
            )
        )
    if traced.changed:
        remarks.append(
            Remark(
                text=f"the forward changes {', '.join(traced.changed)}: once, at the trace, and not on each step",
            )
        )
    if traced.unbacked_failure is not None:
        remarks.append(Remark(text="the model decides on a size: traced backed", because=traced.unbacked_failure))
    return tuple(remarks)
