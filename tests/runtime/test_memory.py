"""The policy of captures: who is evicted, who gets in, and that nobody takes turns."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecework.runtime.memory import (
    COMPACTION_PAUSE_STEPS,
    MIN_COMPACTION_BYTES,
    CaptureBudget,
)

MIB = 1 << 20


class Serving:
    """A runtime as the policy sees it: captures a bucket at its first step that may, in a pool that never shrinks."""

    def __init__(self, budget: CaptureBudget[int], sizes: dict[int, int]) -> None:
        self.budget = budget
        self.sizes = sizes
        self.live: set[int] = set()
        self.pool_bytes = 0
        self.captures: list[int] = []
        self.num_compactions = 0

    def step(self, key: int) -> None:
        budget = self.budget
        budget.used(key)
        if key not in self.live and budget.may_try(key):
            self._make_room(key)
            self._capture(key)
            victims = budget.victims(key, self.pool_bytes)
            if victims is None:
                self.live.remove(key)
                budget.refused(key, self.sizes[key])
            else:
                self._release(victims, key)
        if budget.wants_compaction(self.pool_bytes):
            self.num_compactions += 1
            self.pool_bytes = sum(self.sizes[each] for each in self.live)
            budget.compacted()
        self._check()

    def _make_room(self, key: int) -> None:
        victims = self.budget.victims(key, self.pool_bytes)
        assert victims is not None, "may_try said that there is room"
        self._release(victims, key)

    def _capture(self, key: int) -> None:
        self.captures.append(key)
        self.live.add(key)
        self.pool_bytes = max(self.pool_bytes, sum(self.sizes[each] for each in self.live))
        self.budget.admit(key, self.sizes[key])

    def _release(self, victims: Iterable[int], new_key: int) -> None:
        victims = list(victims)
        assert new_key not in victims
        assert len(set(victims)) == len(victims)
        for victim in victims:
            self.live.remove(victim)
            self.budget.released(victim)

    def _check(self) -> None:
        budget = self.budget
        assert budget.num_captures == len(self.live)
        assert budget.live_bytes == sum(self.sizes[key] for key in self.live)
        assert budget.budget_bytes is None or budget.live_bytes <= budget.budget_bytes
        assert budget.max_captures is None or budget.num_captures <= budget.max_captures


@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    budget_bytes=st.none() | st.integers(1, 100),
    max_captures=st.none() | st.integers(1, 12),
    steps=st.lists(st.integers(0, 11), max_size=200),
)
def test_the_budget_and_the_cap_hold_after_every_step(
    sizes: list[int], budget_bytes: int | None, max_captures: int | None, steps: list[int]
) -> None:
    serving = Serving(CaptureBudget(budget_bytes, max_captures), dict(enumerate(sizes)))
    for step in steps:
        serving.step(step % len(sizes))  # asserts in each step, also that no newcomer is its own victim
    if budget_bytes is None and max_captures is None:
        assert serving.captures == list(dict.fromkeys(step % len(sizes) for step in steps))


@given(
    live=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=10),
    needs=st.integers(0, 50),
    budget_bytes=st.integers(1, 100),
    max_captures=st.integers(1, 10),
)
def test_victims_are_enough_and_none_goes_in_vain(
    live: list[tuple[int, int]], needs: int, budget_bytes: int, max_captures: int
) -> None:
    budget: CaptureBudget[object] = CaptureBudget(budget_bytes, max_captures)
    for key, (num_bytes, num_uses) in enumerate(live):
        for _ in range(num_uses):
            budget.used(key)
        budget.admit(key, num_bytes)
    for _ in range(1000):  # the newcomer is busier than all others together
        budget.used("new")
    victims = budget.victims("new", budget.live_bytes, needs_bytes=needs)
    if needs > budget_bytes:
        assert victims is None
        return
    assert victims is not None

    def fits(gone: list[object]) -> bool:
        left = [num_bytes for key, (num_bytes, _) in enumerate(live) if key not in gone]
        return sum(left) + needs <= budget_bytes and len(left) + 1 <= max_captures

    assert fits(victims)
    assert all(not fits([other for other in victims if other != victim]) for victim in victims)


def test_the_least_useful_goes_first_and_of_equals_the_larger() -> None:
    budget: CaptureBudget[str] = CaptureBudget(100, None)
    for key, num_bytes, num_uses in (("busy", 30, 9), ("small", 20, 0), ("large", 30, 0)):
        for _ in range(num_uses):
            budget.used(key)
        budget.admit(key, num_bytes)
    budget.used("new")
    assert budget.victims("new", 80, needs_bytes=20) == []
    assert budget.victims("new", 80, needs_bytes=30) == ["large"]
    assert budget.victims("new", 80, needs_bytes=60) == ["large", "small"]
    assert budget.victims("new", 80, needs_bytes=71) is None  # that would cost the busy one its place


def test_uses_decay() -> None:
    budget: CaptureBudget[str] = CaptureBudget(None, 1)
    for _ in range(100):
        budget.used("before")
    before = budget.usefulness("before")
    assert 80 < before < 100
    for _ in range(256):
        budget.used("since")
    assert budget.usefulness("before") == pytest.approx(before / 2)
    assert budget.usefulness("since") > budget.usefulness("before")
    assert budget.usefulness("never") == 0


@pytest.mark.parametrize("limits", [(None, 1), (100, None), (100, 1)])
def test_two_buckets_that_alternate_do_not_take_turns(limits: tuple[int | None, int | None]) -> None:
    serving = Serving(CaptureBudget(*limits), {0: 60, 1: 70})
    for step in range(10_000):
        serving.step(step % 2)
    assert len(serving.captures) <= 2
    assert serving.num_compactions <= 1


@pytest.mark.parametrize("burst", [2, 50, 300, 1000])
def test_bursts_of_two_buckets_take_few_turns(burst: int) -> None:
    """Longer bursts are worth a turn, but each one makes the next dearer."""
    serving = Serving(CaptureBudget(100, None), {0: 60, 1: 70})
    for step in range(10_000):
        serving.step(step // burst % 2)
    assert len(serving.captures) < 10


def test_a_busy_mixture_with_too_little_room_settles() -> None:
    generator = random.Random(0)
    serving = Serving(CaptureBudget(500, None), dict.fromkeys(range(20), 50))
    for _ in range(10_000):
        serving.step(generator.randrange(20))
    assert len(serving.live) == 10
    assert len(serving.captures) < 40


@pytest.mark.parametrize("num_shifts", [1, 12])
def test_a_bucket_that_traffic_moves_to_gets_in(num_shifts: int) -> None:
    """Also one that was evicted many times before, up to the largest advantage that is asked for."""
    serving = Serving(CaptureBudget(100, None), {0: 60, 1: 70})
    for _ in range(5_000):
        serving.step(0)
    needed = []
    for shift in range(1, num_shifts + 1):
        new = shift % 2
        needed.append(next((n for n in range(1_700) if serving.live == {new} or serving.step(new)), 1_700))
        for _ in range(3_000):
            serving.step(new)
    assert 400 < needed[0] < 500
    assert max(needed) < 1_700
    assert needed == sorted(needed), "each eviction makes the next one dearer"
    assert len(serving.captures) == 2 + num_shifts  # the first try of bucket 1 is how its size becomes known


def test_one_that_does_not_fit_alone_is_captured_once() -> None:
    serving = Serving(CaptureBudget(100, None), {0: 60, 1: 101})
    for _ in range(3_000):
        serving.step(0)
        serving.step(1)
        serving.step(1)
    assert serving.captures == [0, 1]
    assert serving.live == {0}


def test_a_refusal_is_looked_at_again_later_and_later() -> None:
    budget: CaptureBudget[str] = CaptureBudget(None, 1)
    budget.used("old")
    budget.admit("old", 1)
    looks = []
    for use in range(1, 200):
        budget.used("old")
        budget.used("new")
        before = budget._record("new").next_try
        assert not budget.may_try("new")
        if budget._record("new").next_try != before:
            looks.append(use)
    assert looks == [1, 2, 4, 8, 16, 32, 64, 128, 192]  # the gap doubles up to 64 uses
    budget.released("old")
    assert not budget.may_try("new")
    for _ in range(64):
        budget.used("new")
    assert budget.may_try("new")


def test_a_capture_that_was_made_and_found_no_room() -> None:
    budget: CaptureBudget[str] = CaptureBudget(100, None)
    for _ in range(10):
        budget.used("old")
    budget.admit("old", 80)
    budget.used("new")
    assert budget.may_try("new")  # its size is not known yet
    assert budget.victims("new", 80) == []
    budget.admit("new", 40)
    assert budget.over(120)
    assert budget.victims("new", 120) is None
    budget.refused("new", 40)
    assert (budget.live_bytes, budget.num_captures) == (80, 1)
    budget.used("new")
    assert not budget.may_try("new")
    assert not budget.may_try("new", needs_bytes=10)  # the next look is one use away


def test_an_estimate_takes_the_place_of_what_is_not_known() -> None:
    budget: CaptureBudget[str] = CaptureBudget(100, None)
    budget.used("old")
    budget.admit("old", 80)
    budget.used("new")
    assert not budget.may_try("new", needs_bytes=40)
    budget.used("new")
    budget.used("new")
    assert budget.may_try("new", needs_bytes=40)
    assert budget.victims("new", 80, needs_bytes=40) == ["old"]


def test_without_limits_nothing_is_over() -> None:
    budget: CaptureBudget[int] = CaptureBudget(None, None)
    for key in range(1000):
        budget.used(key)
        assert budget.may_try(key)
        assert budget.victims(key, 1 << 40) == []
        budget.admit(key, 1 << 30)
    assert not budget.over(1 << 60)


def test_over_counts_the_pool_and_the_captures() -> None:
    budget: CaptureBudget[int] = CaptureBudget(100, 1)
    assert not budget.over(100)
    assert budget.over(101)
    budget.admit(0, 10)
    assert not budget.over(10)
    budget.admit(1, 10)
    assert budget.over(20)


def test_a_pool_over_the_budget_whose_captures_fit_wants_compaction_but_not_all_the_time() -> None:
    budget: CaptureBudget[int] = CaptureBudget(100, None)
    budget.admit(0, 60)
    assert not budget.wants_compaction(100)
    assert budget.wants_compaction(101)
    budget.compacted()  # and the pool is still over it
    for _ in range(COMPACTION_PAUSE_STEPS):
        assert not budget.wants_compaction(101)
        budget.used(0)
    assert budget.wants_compaction(101)
    budget.admit(1, 60)  # what lives does not fit: somebody has to go first
    assert not budget.wants_compaction(120)


def test_a_pool_that_is_mostly_empty_wants_compaction_once_something_was_released() -> None:
    budget: CaptureBudget[int] = CaptureBudget(None, None)
    budget.admit(0, 10 * MIB)
    budget.admit(1, 90 * MIB)
    assert not budget.wants_compaction(100 * MIB)
    budget.released(1)
    assert budget.wants_compaction(100 * MIB)
    assert not budget.wants_compaction(MIN_COMPACTION_BYTES)
    budget.compacted()
    for _ in range(COMPACTION_PAUSE_STEPS):
        budget.used(0)
    assert not budget.wants_compaction(100 * MIB)  # nothing was released since
    budget.released(0)
    assert not budget.wants_compaction(100 * MIB)  # nothing lives: the pool is given back whole


def test_a_release_that_is_no_eviction_makes_nothing_dearer() -> None:
    """A stale capture was not the worse one: its bucket gets back in on the same terms."""
    budget: CaptureBudget[str] = CaptureBudget(None, 1)
    for _ in range(20):
        budget.used("stale")
        budget.admit("stale", 1)
        budget.released("stale")
    budget.used("other")
    budget.admit("other", 1)
    for _ in range(5):
        budget.used("stale")
    assert budget.victims("stale", 1) == ["other"]
    budget.released("unknown")


def test_the_policy_loads_no_torch() -> None:
    code = "import sys, piecework.runtime.memory; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
