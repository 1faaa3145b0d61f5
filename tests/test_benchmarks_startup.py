"""bench_startup.py and bench_straddle.py on a CPU: what is driven, what is counted, and what is said of failures."""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
POLICIES = ["tiered", "eager", "lazy", "plain torch.compile", "plain eager"]

Load = Callable[[str], ModuleType]


@pytest.fixture(scope="module")
def load() -> Iterator[Load]:
    """Imports a file of benchmarks/, as running it would."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        yield importlib.import_module


def spec_of(load: Load, **changes: Any) -> Any:
    about = load("bench_startup").SHAPES["tiny"] | changes
    return load("startup_spec").Spec(policy="tiered", device="cpu", shape="tiny", **about, out="")


# ---- the steps


def test_every_bucket_comes_in_time_and_then_they_go_round(load: Load) -> None:
    child, bench = load("startup_spec"), load("bench_startup")
    spec = child.Spec(policy="tiered", device="cuda", shape="8b", **bench.SHAPES["8b"], out="")
    assert (len(spec.decode), len(spec.prefill), spec.num_blocks) == (8, 4, 128 * 16)
    order = list(itertools.islice(child.schedule(spec), 200 + 2 * 12))
    assert order == list(itertools.islice(child.schedule(spec), 224))
    firsts = [order.index(bucket) for bucket in spec.buckets]
    assert max(firsts) * spec.interval_s < spec.meet_s
    assert firsts != sorted(firsts)
    # Those that came come again before the last new one does.
    assert len({order[i] for i in range(max(firsts))}) == 11
    assert all(order[: max(firsts)].count(bucket) >= 2 for bucket in sorted(spec.buckets, key=order.index)[:8])
    for begin in (200, 212):
        assert sorted(order[begin : begin + 12]) == sorted(spec.buckets)


# ---- the numbers


def step(at_s: float, seconds: float, state: str = "same", bucket: int = 1) -> dict[str, Any]:
    return {"at_s": at_s, "seconds": seconds, "phase": "decode", "bucket": bucket, "state": state}


def event(at_s: float, kind: str, seconds: float, *, in_step: bool = False, **detail: Any) -> dict[str, Any]:
    return {"at_s": at_s, "kind": kind, "seconds": seconds, "in_step": in_step, "detail": detail}


def test_a_step_is_late_beyond_its_own_kind_or_by_what_it_waited_for(load: Load) -> None:
    numbers = load("startup_numbers")
    steps = [
        step(1.0, 0.9, "eager"),  # the only one of its kind: slow by itself, and waited for a capture of 70 ms
        step(2.0, 0.010, "eager, replayed"),
        step(3.0, 0.065, "eager, replayed"),  # 55 ms over the median
        step(4.0, 0.011, "eager, replayed"),
        step(5.0, 0.055, "eager, replayed", bucket=2),  # the only one of its kind, and waited for nothing
    ]
    events = [
        event(0.9, "boundary", 0.07),
        event(0.95, "entry", 5.0, in_step=True),  # what it took is in other events
        event(2.999, "capture", 0.05, in_step=True),
        event(4.99, "worker_job", 3.0),  # nobody waited for it
    ]
    first, second = numbers.delayed(steps, events)
    assert (first["at_s"], first["late_ms"], first["events"]) == (1.0, pytest.approx(70), ["boundary"])
    assert (second["at_s"], second["late_ms"], second["events"]) == (3.0, pytest.approx(54), ["capture"])


def test_eager_steps_without_kernels_are_of_their_own_kind(load: Load) -> None:
    """Until attention kernels are compiled torch's operators attend, which takes its own time."""
    steps = [step(at_s, 0.107, "eager") for at_s in (1.0, 2.0, 3.0, 4.0)]
    steps += [step(at_s, 0.05, "eager") for at_s in (5.5, 6.0, 7.0, 8.0)]
    steps += [step(9.0, 0.102, "eager")]
    late = load("startup_numbers").delayed(steps, [event(0.1, "kernel", 0.1), event(4.5, "kernel", 1.0)])
    assert [found["at_s"] for found in late] == [9.0]
    late = load("startup_numbers").delayed(steps, [])
    assert [found["at_s"] for found in late] == []
    steps = [step(at_s, 0.01, "eager") for at_s in (1.0, 2.0, 3.0, 4.0)] + [step(9.0, 3.0, "eager")]
    late = load("startup_numbers").delayed(steps, [event(5.0, "kernel", 1.0)])
    assert [found["at_s"] for found in late] == [9.0], "one alone is late beside the others"
    assert load("startup_numbers").causes([event(4.5, "kernel", 1.0)], 0.1) == {"attention kernels": {"nobody": 1.0}}


def test_causes_are_split_by_who_waited(load: Load) -> None:
    events = [
        event(0.5, "capture", 0.25),
        event(2.0, "capture", 0.5, in_step=True),
        event(3.0, "capture", 1.0),
        event(4.0, "compile_general", 7.0, where="worker"),  # it is in the job,
        event(4.0, "trace", 3.0, where="worker"),  # and so is this
        event(4.0, "worker_job", 6.0),
        event(5.0, "compile_general", 2.0),
        event(5.0, "boundary", 1.0),
    ]
    assert load("startup_numbers").causes(events, 1.0) == {
        "capture": {"before ready": 0.25, "a step": 0.5, "nobody": 1.0},
        "jobs of workers": {"nobody": 6.0},
        "compile": {"nobody": 2.0},
    }


def test_replays_beside_workers_are_multiples_of_the_same_replays_alone(load: Load) -> None:
    replayed = "eager, replayed"
    steps = [
        step(1.0, 0.1, replayed),  # before the job
        step(2.5, 0.030, replayed),
        step(3.0, 0.022, replayed, bucket=2),
        step(3.5, 0.020, "general, replayed"),  # another program
        step(6.05, 0.1, replayed),  # it ended after the job
        step(4.0, 0.1, replayed) | {"phase": "prefill"},
    ]
    alone = {"decode 1": [19.0, 20.0, 21.0], "decode 2": [20.0]}
    found = load("startup_numbers").beside_workers(steps, [event(6.0, "worker_job", 4.0)], alone, "tiered")
    assert found == {
        "num_beside": 2,
        "beside_p50": pytest.approx(1.1),
        "beside_p99": pytest.approx(1.5),
        "alone_p99": pytest.approx(1.05),
    }
    nothing = load("startup_numbers").beside_workers(steps, [], alone, "tiered")
    assert (nothing["num_beside"], nothing["beside_p50"]) == (0, None)


def test_replays_beside_a_whole_forward_are_those_of_the_other_buckets(load: Load) -> None:
    """From the last general program on, to the end where the whole forward has not come."""
    replayed = "general, replayed"
    steps = [
        step(2.9, 0.1, replayed, bucket=2),  # it began before the whole forward did
        step(3.5, 0.030, replayed, bucket=2),
        step(4.0, 0.1, replayed),  # its own bucket
        step(4.5, 0.1, "eager, replayed", bucket=2),
        step(6.0, 0.024, replayed, bucket=2),
    ]
    events = [event(2.0, "compile_general", 1.0), event(2.85, "compile_general", 1.0)]
    beside = load("startup_numbers").beside_workers
    alone = {"decode 1": [20.0], "decode 2": [20.0]}
    found = beside(steps, events, alone, "tiered+whole")
    assert (found["num_beside"], found["beside_p50"]) == (2, pytest.approx(1.2))
    ended = beside(steps, [*events, event(5.0, "compile_whole", 2.0)], alone, "tiered+whole")
    assert (ended["num_beside"], ended["beside_p50"]) == (1, pytest.approx(1.5))


def test_a_row_is_made_of_what_there_is(load: Load) -> None:
    numbers, spec = load("startup_numbers"), spec_of(load)
    assert numbers.row_of({"policy": "tiered", "steps": [], "ready_s": 1.0}, spec) == {"ready_s": 1.0}
    seen = {
        "ready_s": 1.0,
        "steps": [
            step(2.0, 0.5, "eager"),
            step(3.0, 0.1, "eager, replayed"),
            step(4.0, 0.5, "eager", bucket=2),
            step(5.0, 0.5, "eager", bucket=2),
            step(6.0, 0.1, "eager, replayed", bucket=2),
        ],
        "settled_at_s": 5.5,
        "buckets_met": 4,
        "events": [event(0.5, "trace", 0.1), event(4.5, "promote", 0.0), event(9.0, "capture", 0.1)],
        "counters": {"promotions": 1},
        "steady_ms": {"decode 1": [90.0, 100.0, 400.0]},
    }
    row = numbers.row_of(seen, spec)
    assert (row["first_token_s"], row["settled_s"], row["worst_step_ms"]) == (2.0, 4.5, 500.0)
    assert (row["buckets_met"], row["captured_by_second"], row["promotions"]) == ("4 of 4", "1 of 2", 1)
    assert row["steady_ms"] == {"decode 1": 100.0}
    assert row["causes"]["first steps"] == {"a step": pytest.approx(0.9)}
    assert "beside_p50" not in row
    policies = {"lazy": row, "eager": {"steady_ms": {"decode 1": 80.0, "decode 2": 1.0}}, "plain": {"error": "no"}}
    numbers.against(policies)
    assert row["steady_to_eager"] == {"decode 1": 1.25}
    assert policies["eager"]["steady_to_eager_worst"] == 1.0
    assert "steady_to_eager" not in policies["plain"]


# ---- whole runs


@pytest.mark.slow
def test_startup_runs_every_policy_in_a_process_of_its_own(
    load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "startup.json"
    assert load("bench_startup").main(["--device", "cpu", "--json", str(file)]) == 0, capsys.readouterr().err
    result = json.loads(file.read_text())
    policies = result["policies"]
    assert list(policies) == POLICIES
    assert {"device", "driver", "torch", "triton", "commit", "command", "seconds", "layers"} <= result.keys()
    for row in policies.values():
        assert "error" not in row
        assert 0 <= row["ready_s"] < row["first_token_s"]
        assert row["buckets_met"] == "4 of 4"
        assert set(row["steady_ms"]) == {"decode 1", "decode 2", "prefill 8", "prefill 16"}
    ours = {name: policies[name]["causes"] for name in ("tiered", "eager", "lazy")}
    # Where each policy pays for the trace and the compiles.
    assert set(ours["eager"]["trace"]) == set(ours["eager"]["compile"]) == {"before ready"}
    assert set(ours["lazy"]["trace"]) == set(ours["lazy"]["compile"]) == {"a step"}
    assert "a step" not in ours["tiered"].get("trace", {}) | ours["tiered"]["compile"]
    assert policies["tiered"]["promotions"] >= 4
    assert policies["tiered"]["captured_by_second"] == "2 of 2"
    assert policies["tiered"]["settled_s"] > policies["tiered"]["ready_s"]
    assert set(policies["tiered"]["alone_ms"]) == {"decode 1", "decode 2"}
    assert policies["eager"]["steady_to_eager_worst"] == 1.0
    assert "plain torch.compile" in capsys.readouterr().out


def test_startup_says_what_failed_and_what_has_no_time(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench, file = load("bench_startup"), tmp_path / "startup.json"
    options = ["--device", "cpu", "--json", str(file), "--policies"]
    assert bench.main([*options, "lazy,eager", "--max-seconds", "0"]) == 1
    errors = [row["error"] for row in json.loads(file.read_text())["policies"].values()]
    assert errors == ["not begun: no time left"] * 2
    # A child that cannot begin, and one that is stopped after it wrote something.
    script = tmp_path / "startup_child.py"
    monkeypatch.setattr(bench, "HERE", tmp_path)
    script.write_text("raise KeyError('broken')")
    assert bench.main([*options, "lazy"]) == 1
    assert json.loads(file.read_text())["policies"]["lazy"] == {
        "error": "RuntimeError: exit code 1: KeyError: 'broken'"
    }
    seen = json.dumps({"steps": [], "ready_s": 2.5})
    script.write_text(
        f"import json, sys, time\nopen(json.load(open(sys.argv[1]))['out'], 'w').write({seen!r})\ntime.sleep(600)\n"
    )
    monkeypatch.setattr(bench, "POLICY_S", 2.0)
    assert bench.main([*options, "lazy"]) == 1
    row = json.loads(file.read_text())["policies"]["lazy"]
    assert row == {"ready_s": 2.5, "error": "RuntimeError: stopped after 2 s"}
    assert "lazy: RuntimeError: stopped after 2 s" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        bench.main(["--policies", "lazy,sleepy"])
    assert "plain torch.compile, plain eager, tiered+whole, got sleepy" in capsys.readouterr().err


@pytest.mark.slow
def test_in_float32_no_token_changes_across_a_promotion(
    load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench, file = load("bench_straddle"), tmp_path / "straddle.json"
    assert bench.main(["--device", "cpu", "--layers", "1", "--requests", "5", "--batch", "3", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert list(result["ways"]) == ["no promotion", "general", "general, emulated casts"]
    assert [way["differ"] for way in result["ways"].values()] == [0, 0, 0]
    assert list(result["steps"]) == ["eager", "general", "general, emulated casts"]
    assert all(row["step_ms"] > 0 and "error" not in row for row in result["steps"].values())
    general, casts = (result["steps"][name]["step_ms"] for name in ("general", "general, emulated casts"))
    assert result["casts_cost"] == pytest.approx(casts / general - 1)
    assert "0 of 5" in capsys.readouterr().out


def test_other_tokens_are_counted_and_those_before_a_promotion_are_an_error(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = load("bench_straddle").Bench("cpu", 1, 4, 2)
    same = [list(range(32)) for _ in range(4)]
    other = [list(range(32)) for _ in range(4)]
    other[1][20], other[1][25], other[3][16] = -1, -1, -1
    row: dict[str, Any] = {}
    monkeypatch.setattr(bench, "tokens", lambda before, after: other)
    bench.compare(row, "general", same)
    assert (row["differ"], row["share"], row["first_difference_median"]) == (2, 0.5, 18)
    other[0][15] = -1
    with pytest.raises(ValueError, match="a token before the promotion differs: token 15"):
        bench.compare(row, "general", same)


def test_half_of_an_answer_comes_from_each_program(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    bench, calls = load("bench_straddle").Bench("cpu", 1, 3, 2), []

    def run(name: str, phase: str, tokens: Any, query_lens: Any, seq_lens: Any) -> torch.Tensor:
        calls.append((name, phase, list(seq_lens)))
        return torch.zeros(len(tokens), 64)

    monkeypatch.setattr(bench, "run", run)
    answers = bench.tokens("eager", "general")
    assert [len(answer) for answer in answers] == [32, 32, 32]
    first, lengths = calls[:32], [len(prompt) for prompt in bench.prompts[:2]]
    assert first[0] == ("eager", "prefill", lengths)
    assert [name for name, _, _ in first[1:]] == ["eager"] * 15 + ["general"] * 16
    assert [seq_lens for _, _, seq_lens in first[1:]] == [[length + i for length in lengths] for i in range(1, 32)]
    assert len(calls) == 2 * 32
