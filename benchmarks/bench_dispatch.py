"""Where the host's time of a replayed step goes, in microseconds.

    python benchmarks/bench_dispatch.py [--device cuda] [--layers 32] [--profile] [--max-seconds 80] [--json FILE]

A decoder of 32 layers that is so thin (hidden size 128) that the device is never what a step waits for; the device is
idle when a step begins, and the time is taken until `run` returns, not until the device is done. On a CPU segments are
recorded by the tape and do nothing at a replay, and attention does nothing (null_device.py): what is left is Python.

`total_us` is a call of `run`, `replay_us` `Capture.replay` in it, and `beyond_replay_us` the rest, of the same steps.
`segments_us` and `split_calls_us` are what a replay is made of, one after the other. `parts_us` are functions of
another runtime, as far as a step calls them, each with what it calls. `profile` are the functions with the most time
of their own under cProfile, which slows small ones most: shares, not times. `--spy NAME=MODULE:FUNCTION` adds a part.
A way that fails, or for which no time is left, says so in its row.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import functools
import importlib
import itertools
import pstats
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from time import perf_counter_ns
from typing import Any
from unittest import mock

import torch
from llama import Llama
from null_device import null_device
from report import NOT_BEGUN, Deadline, attempt, conditions, count, in_short, write_json
from timing import Clock

import piecework as pw
from piecework.graphs.capture import Capture
from piecework.graphs.split_calls import SplitCall

WAYS = (("full", "aot_eager"), ("full", "eager"), ("tc_piecewise", "aot_eager"), ("breakable", "eager"))
NUM_REQS, SEQ_LEN, NUM_INPUTS = 8, 128, 4
PARTS = {
    "read layout": "piecework.runtime.known_layout:LayoutReader.read",
    "plan holds": "piecework.runtime.step_plans:StepPlan.holds",
    "addresses, in that": "piecework.graphs.addresses:Addresses.hold",
    "fill": "piecework.graphs.prepared_fill:PreparedFill.run",
    "result": "piecework.runtime.step_plans:StepPlan.result",
    "bind": "piecework.graphs.inputs:InputContract.bind",
    "pick": "piecework.runtime.entry_table:EntryTable.pick",
    "copy inputs": "piecework.graphs.buffers:StaticInputs.fill",
    "copy context": "piecework.runtime.static_context:StaticContext.fill",
    "copy context, tokens": "piecework.runtime.static_context:StaticContext.fill_tokens_only",
    "staleness": "piecework.runtime.capture_slot:Slot.stale",
    "cut outputs": "piecework.graphs.outputs:OutputContract.cut",
    "count": "piecework.runtime.events:Counters.add",
}
"""Where a part is looked for; one that a version of the runtime does not have, or does not call, is left out."""
PROFILE_LINES = 24


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=count, default=32)
    parser.add_argument("--profile", action="store_true", help="print the profiles, which the JSON has anyway")
    parser.add_argument("--spy", action="append", default=[], metavar="NAME=MODULE:FUNCTION")
    parser.add_argument("--max-seconds", type=float, default=80.0, help="no way is begun after this")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parsed = parser.parse_args(arguments)
    if wrong := [spy for spy in parsed.spy if not re.fullmatch(r"[^=]+=[\w.]+:[\w.]+", spy)]:
        parser.error(f"--spy: expected NAME=MODULE:FUNCTION, got {wrong[0]!r}")
    deadline = Deadline(parsed.max_seconds)
    command = ["python", "benchmarks/bench_dispatch.py", *(sys.argv[1:] if arguments is None else arguments)]
    parts = {**PARTS, **dict(spy.split("=", 1) for spy in parsed.spy)}
    bench = Bench(parsed.device, parsed.layers, parts)
    result: dict[str, Any] = {
        "layers": parsed.layers,
        "requests": NUM_REQS,
        "capture_device": "cuda" if bench.on_cuda else "null",
        "ways": [],
        **conditions(parsed.device),
        "command": " ".join(command),
    }
    for backend, compiler in WAYS:
        way: dict[str, Any] = {"backend": backend, "compiler": compiler}
        result["ways"].append(way)
        if deadline.has():
            attempt(way, lambda way=way: bench.measure(way))
        else:
            way["error"] = NOT_BEGUN
        result["seconds"] = deadline.passed
        write_json(parsed.json, result)
    print(table(result, with_profiles=parsed.profile))
    return 0 if all("error" not in way for way in result["ways"]) else 1


class Bench:
    """One thin model; every way runs on it."""

    def __init__(self, device: str, num_layers: int, parts: dict[str, str]) -> None:
        self.device = torch.device(device)
        self.on_cuda = self.device.type == "cuda"
        self.repeat = 400 if self.on_cuda else 100
        self.parts = parts
        self.clock = Clock(self.device)
        dtype = torch.bfloat16 if self.on_cuda else torch.float32
        num_blocks = NUM_REQS * SEQ_LEN // 16
        self.llama = Llama(self.device, dtype, num_layers=num_layers, shape="narrow", num_blocks=num_blocks)
        self.steps = [self.llama.decode_step(NUM_REQS, SEQ_LEN, seed=seed) for seed in range(NUM_INPUTS)]

    def measure(self, way: dict[str, Any]) -> None:
        """Writes the times of one way to its row."""
        with contextlib.nullcontext() if self.on_cuda else null_device():
            replays = Replays(self.clock)
            with replays.patched(), self.runtime(way) as runtime:
                self.warm_up(runtime)
                replays.whole.clear()
                totals = self.host_us(runtime)
                way["total_us"], way["total_us_min"] = statistics.median(totals), min(totals)
                beyond = [total - replay / 1e3 for total, replay in zip(totals, replays.whole, strict=True)]
                way["beyond_replay_us"], way["beyond_replay_us_min"] = statistics.median(beyond), min(beyond)
                way |= {"replay_us": statistics.median(replays.whole) / 1e3, "profile": self.profile(runtime)}
                replays.takes_apart = True
                self.host_us(runtime)
                way |= replays.result()
            spies = {name: Spy() for name in self.parts}
            with spying(self.parts, spies), self.runtime(way) as runtime:
                self.warm_up(runtime)
                for spy in spies.values():
                    spy.end_step()
                    spy.steps.clear()
                self.host_us(runtime, spies.values())
        spied = {name: statistics.median(spy.steps) / 1e3 for name, spy in spies.items() if any(spy.steps)}
        way["parts_us"] = spied

    def runtime(self, way: dict[str, Any]) -> pw.Runtime:
        decode = {"backend": way["backend"], "compiler": way["compiler"], "buckets": (NUM_REQS,)}
        return pw.Runtime(
            self.llama.decoder,
            pw.GraphConfig(
                prefill={"backend": "disabled"}, decode=decode, capture_device="cuda" if self.on_cuda else "tape"
            ),
            dynamic_dims={"input_ids": 0, "positions": 0},
            context_sizes={"requests": NUM_REQS, "blocks": SEQ_LEN // 16},
        )

    def warm_up(self, runtime: pw.Runtime) -> None:
        """Raises: RuntimeError if steps are not replayed then."""
        for i in range(2 * NUM_INPUTS):
            inputs, context = self.steps[i % NUM_INPUTS]
            runtime.run("decode", inputs, context=context)
        if not runtime.counters["replays"]:
            raise RuntimeError(f"no replay: {runtime.counters['fallbacks']}")

    def host_us(self, runtime: pw.Runtime, spies: Iterable[Spy] = ()) -> list[float]:
        """Microseconds of each call of `run`, with the device idle before it."""
        times = []
        for inputs, context in itertools.islice(itertools.cycle(self.steps), self.repeat):
            self.clock.wait()
            started = perf_counter_ns()
            runtime.run("decode", inputs, context=context)
            times.append((perf_counter_ns() - started) / 1e3)
            for spy in spies:
                spy.end_step()
        return times

    def profile(self, runtime: pw.Runtime) -> list[dict[str, Any]]:
        """The functions with the most time of their own: their share of a step, and their calls in one."""
        profiler = cProfile.Profile()
        for inputs, context in itertools.islice(itertools.cycle(self.steps), self.repeat):
            self.clock.wait()
            profiler.enable()
            runtime.run("decode", inputs, context=context)
            profiler.disable()
        stats = pstats.Stats(profiler)
        entries = [(own, calls, where) for where, (_, calls, own, *_) in stats.stats.items()]
        total = sum(own for own, *_ in entries) or 1.0
        return [
            {"function": named(where), "share": own / total, "calls_a_step": calls / self.repeat}
            for own, calls, where in sorted(entries, reverse=True)[:PROFILE_LINES]
        ]


class Spy:
    """Nanoseconds of a function's calls, by step."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self._of_step = 0

    def end_step(self) -> None:
        """What is called from now on is of another step."""
        self.steps.append(self._of_step)
        self._of_step = 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = perf_counter_ns()
            try:
                return function(*args, **kwargs)
            finally:
                self._of_step += perf_counter_ns() - started

        return timed


@contextlib.contextmanager
def spying(parts: dict[str, str], spies: dict[str, Spy]) -> Iterator[None]:
    """Times the parts that there are."""
    with contextlib.ExitStack() as stack:
        for name, where in parts.items():
            module, _, path = where.partition(":")
            try:
                owner: Any = importlib.import_module(module)
                *classes, attribute = path.split(".")
                for each in classes:
                    owner = getattr(owner, each)
                function = getattr(owner, attribute)
            except (ImportError, AttributeError):
                continue
            stack.enter_context(mock.patch.object(owner, attribute, spies[name].around(function)))
        yield


class Replays:
    """Times `Capture.replay`, and what it is made of."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.takes_apart = False
        self.whole: list[int] = []
        self.segments: list[int] = []
        self.split_calls: list[int] = []
        self._apart: Capture | None = None
        self._launches: list[Callable[[], Any]] = []
        self._calls: list[Callable[[], Any]] = []

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        replay = Capture.replay

        def timed(capture: Capture) -> None:
            if self.takes_apart:
                self._take_apart(capture)
                return
            started = perf_counter_ns()
            replay(capture)
            self.whole.append(perf_counter_ns() - started)

        with mock.patch.object(Capture, "replay", timed):
            yield

    def _take_apart(self, capture: Capture) -> None:
        """Here, since a step's context and modes are set: the launches of all segments, then all split calls."""
        if capture is not self._apart:
            self._apart = capture
            segments = [step for step in capture.steps if not isinstance(step, SplitCall)]
            launches = [launcher() if (launcher := getattr(s, "launcher", None)) else s.replay for s in segments]
            self._launches = [launch for launch in launches if launch is not None]
            self._calls = [step.direct(capture.tracked) for step in capture.steps if isinstance(step, SplitCall)]
        for doing, times in ((self._launches, self.segments), (self._calls, self.split_calls)):
            self._clock.wait()
            started = perf_counter_ns()
            for do in doing:
                do()
            times.append(perf_counter_ns() - started)

    def result(self) -> dict[str, Any]:
        """For a way's row."""
        return {
            "segments": len(self._launches),
            "split_calls": len(self._calls),
            "segments_us": statistics.median(self.segments) / 1e3,
            "split_calls_us": statistics.median(self.split_calls) / 1e3,
        }


def named(where: tuple[str, int, str]) -> str:
    """A function of a profile as text, such as `runtime/runtime.py:141 run`."""
    file, line, name = where
    if not line:
        return name
    root = str(Path(pw.__file__).parent)
    return f"{file.removeprefix(root).removeprefix('/') if file.startswith(root) else Path(file).name}:{line} {name}"


def table(result: dict[str, Any], *, with_profiles: bool) -> str:
    """A short table."""
    columns = ("total", "replay", "segments", "split_calls", "beyond_replay")
    lines = [f"{'host time of a step, us':<26}" + "".join(f"{name:>15}" for name in columns)]
    for way in result["ways"]:
        name = f"{way['backend']}, {way['compiler']}"
        if "error" in way:
            lines.append(f"{name:<26} {way['error']}")
            continue
        lines.append(f"{name:<26}" + "".join(f"{way[f'{column}_us']:15.1f}" for column in columns))
        lines.append("    " + ", ".join(f"{part} {us:.1f}" for part, us in way["parts_us"].items()))
        if with_profiles:
            lines += [f"    {e['share']:6.1%} {e['calls_a_step']:7.1f} x  {e['function']}" for e in way["profile"]]
    about = f"{result['layers']} layers, {result['requests']} requests, capture device {result['capture_device']}"
    return "\n".join([*lines, f"{about}; medians; {in_short(result)}"])


if __name__ == "__main__":
    raise SystemExit(main())
