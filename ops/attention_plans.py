"""Plans of attention: what an implementation decides on the host once a step, before its kernels are launched.

Note [Plans of a context]
An implementation whose kernels follow a plan keeps it in the context's scratch. For a step's own context it is made
at the first call and serves all layers of a kind. A static context outlives steps, and its kernels are captured: there
a plan is renewed, at the same addresses, for each step before anything runs. So whoever fills a static copy calls
`AttentionContext.plan_for(step)` outside of captures, with the context that it was filled from, which has the lengths
on the host. What a capture would freeze of a plan is in `AttentionContext.plan_key()`; a capture that was made with
another key must not be replayed.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from .attention_context import AttentionContext


class Lengths(NamedTuple):
    """A step's requests, on the host; also the key into a static context's scratch, for those it was filled with."""

    query_lens: tuple[int, ...]
    """New tokens of each request."""
    seq_lens: tuple[int, ...]
    """Tokens of each request, the new ones included."""


class Plan(Protocol):
    """Of a static context, for calls of one kind."""

    def renew(self, lengths: Lengths) -> None:
        """Plans for what the context was filled with, at the same addresses. Outside of captures."""

    @property
    def key(self) -> Hashable:
        """What a capture of the call freezes, beside addresses."""


PLANS = "plans"
"""Key into a static context's scratch: its plans, by keys of the implementations."""


def plans_of(context: AttentionContext) -> dict[Hashable, Any]:
    """The plans of a static context, to read or to add one."""
    plans: dict[Hashable, Any] = context.scratch.setdefault(PLANS, {})
    return plans


def renew_plans(context: AttentionContext, lengths: Lengths) -> None:
    """Notes what a static context was filled with, and renews its plans for that."""
    scratch = context.scratch
    scratch[Lengths] = lengths
    plans: Mapping[Hashable, Plan] | None = scratch.get(PLANS)
    if plans:
        for plan in plans.values():
            plan.renew(lengths)


def key_of_plans(context: AttentionContext) -> Hashable:
    """See `AttentionContext.plan_key`."""
    plans: Mapping[Hashable, Plan] | None = context.scratch.get(PLANS)
    return tuple([(key, plan.key) for key, plan in plans.items()]) if plans else None


def lengths_of(context: AttentionContext) -> Lengths:
    """A context's requests on the host. For a static copy that nobody has planned for, waits for the device."""
    if not context.is_static:
        return Lengths(context.query_lens_host, context.seq_lens_host)
    known: Lengths | None = context.scratch.get(Lengths)
    if known is None:
        known = Lengths(tuple(context.query_start_loc.diff().tolist()), tuple(context.seq_lens.tolist()))
    return known
