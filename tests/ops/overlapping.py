"""What a kernel that is launched as a dependent one has to keep to, read off its PTX; see ops/triton/dependent.py."""

from __future__ import annotations

import re

TOUCHES = re.compile(r"\b(ld\.global|st\.global|atom\.|red\.|cp\.async\S*\.global)")


def check_waits_first(ptx: str) -> None:
    """It lets the next kernel come up, and touches no memory before all that was written before it is there."""
    body = ptx[ptx.index(".entry") :]
    wait = body.index("griddepcontrol.wait")
    assert body.count("griddepcontrol.wait") == 1
    assert body.index("griddepcontrol.launch_dependents") < wait
    touched = TOUCHES.search(body)
    assert touched is not None
    assert wait < touched.start()
