"""Generators of the process are left alone by a thread that only wants to put them back."""

from __future__ import annotations

import random
import threading

import torch

from piecework.graphs.random_state import restores_ignored


def test_a_restore_is_ignored_in_its_thread_and_nowhere_else() -> None:
    setters = random.setstate, torch.random.set_rng_state, torch.cuda.set_rng_state
    torch.manual_seed(3)
    random.seed(3)
    states = torch.random.get_rng_state(), random.getstate()
    first = torch.rand(4), random.random()
    inside, done = threading.Event(), threading.Event()
    seen: list[float] = []

    def other() -> None:
        with restores_ignored():
            inside.set()
            assert done.wait(60)
            torch.random.set_rng_state(states[0])
            random.setstate(states[1])
            seen.append(random.random())

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(60)
    with restores_ignored(), restores_ignored():
        torch.random.set_rng_state(states[0])
        random.setstate(states[1])
        assert not torch.equal(torch.rand(4), first[0])
        assert random.random() != first[1]
    torch.random.set_rng_state(states[0])  # of this thread, while the other one is still inside
    random.setstate(states[1])
    assert torch.equal(torch.rand(4), first[0])
    assert random.random() == first[1]
    done.set()
    thread.join(60)
    assert seen
    assert seen[0] != first[1]
    assert (random.setstate, torch.random.set_rng_state, torch.cuda.set_rng_state) == setters
