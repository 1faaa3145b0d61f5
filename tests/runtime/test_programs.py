"""Which program runs for a size and a set of inputs, and what happens when one cannot be made."""

from __future__ import annotations

import threading

import pytest
import torch

import piecework as pw

TOLERANCE = 1e-5


def test_a_step_above_the_ladder_and_one_with_too_much_padding_run_unpadded_and_are_counted(kit):
    runtime = kit.runtime(kit.Toy(1), kit.config(decode={"max_padding_waste": 0.4}))
    for num_tokens in (1, 5, 9, 6):
        assert kit.step(runtime, "decode", num_tokens) < TOLERANCE
    # 1 of 2 rows is 0.5 waste and 5 of 8 is 0.375; 9 is above the ladder.
    assert kit.calls.rows == [1, 8, 9, 8]
    reasons = runtime.counters["fallbacks"]
    assert reasons["above the ladder"] == 1
    assert [count for reason, count in reasons.items() if "padding waste" in reason] == [1]


def test_a_step_above_the_ladder_is_logged_with_its_phase_and_the_last_bucket(kit, caplog):
    runtime = kit.runtime(kit.Toy(1))
    with caplog.at_level("WARNING", "piecework"):
        for _ in range(2):
            kit.step(runtime, "decode", 9)
    assert [r.getMessage() for r in caplog.records] == ["above the ladder (phase: decode, last_bucket: 8)"]
    assert runtime.counters["fallbacks"] == {"above the ladder": 2}


def test_the_eager_forward_has_no_ladder_to_be_above_of(kit, caplog):
    runtime = kit.runtime(kit.Toy(1), kit.config("eager", decode={"max_padding_waste": 0.1}))
    with caplog.at_level("WARNING", "piecework"), runtime.counters.expect(steps=2, fallbacks=0):
        for num_tokens in (9, 5):
            assert kit.step(runtime, "decode", num_tokens) < TOLERANCE
    assert not caplog.records


def test_optional_inputs_make_another_program_and_are_counted(kit):
    model = kit.Toy()
    runtime = kit.runtime(model)
    kit.step(runtime, "decode", 2)
    inputs = {**kit.inputs(2), "bias": torch.full((16,), 0.5)}
    with runtime.counters.expect(traces=1, fallbacks=1):
        for gain in (1.0, 1.0):
            got = runtime.run("decode", inputs, context=kit.context(2))
            model.clear()
            torch.testing.assert_close(got, kit.reference(model, inputs, kit.context(2)) * gain)
    with runtime.counters.expect(traces=1, fallbacks=1):  # a constant is part of the identity too
        got = runtime.run("decode", {**inputs, "gain": 3.0}, context=kit.context(2))
    torch.testing.assert_close(got, kit.reference(model, inputs, kit.context(2)) * 3.0)
    assert runtime.counters["fallbacks"] == {"the set of inputs differs: traced another program": 2}


def test_input_sets_without_end_do_not_trace_without_end(kit):
    runtime = kit.runtime(kit.Toy(1))
    for i in range(12):
        inputs = {**kit.inputs(2), "gain": float(i)}
        got = runtime.run("decode", inputs, context=kit.context(2))
        runtime.model.clear()
        torch.testing.assert_close(got, kit.reference(runtime.model, inputs, kit.context(2)))
    assert runtime.counters["traces"] == 8
    assert runtime.counters["fallbacks"]["too many different sets of inputs: eager"] == 4


class Branching(torch.nn.Module):
    """Takes another branch above 8 rows: a trace at one size is wrong at another."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale * 2 if x.shape[0] > 8 else x * self.scale * 3


def test_a_size_outside_the_interval_takes_another_program(kit):
    model = Branching()
    runtime = pw.Runtime(model, kit.config(decode={}, prefill={}), dynamic_dims={"x": 0})
    for phase, num_tokens, factor in [("prefill", 16, 2), ("decode", 4, 3), ("decode", 8, 3), ("decode", 9, 2),
                                      ("decode", 1, 3), ("decode", 2, 3), ("prefill", 40, 2)]:  # fmt: skip
        x = torch.randn(num_tokens, 4)
        torch.testing.assert_close(runtime.run(phase, {"x": x}), x * factor)
    assert runtime.counters["traces"] == 2
    reasons = runtime.counters["fallbacks"]
    assert reasons["the model decides on a size: traced backed"] == 2
    assert reasons["the size is outside of every program's interval: traced another program"] == 1
    intervals = [trace["valid_for"] for trace in runtime.explain().as_dict()["traces"]]
    assert intervals == ["[9, inf)", "[2, 8]"]


def test_a_backed_program_pads_size_one_up_to_two(kit):
    model = Branching()
    settings = pw.GraphConfig(decode=pw.PhaseConfig(compiler="aot_eager", buckets=(1, 4), backend="disabled"))
    runtime = pw.Runtime(model, settings, dynamic_dims={"x": 0})
    x = torch.randn(1, 4)
    torch.testing.assert_close(runtime.run("decode", {"x": x}), x * 3)
    assert runtime.counters["fallbacks"]["padded up to the program's interval"] == 1
    assert runtime.entries[0].size == 2


def test_a_size_that_no_trace_holds_for_runs_the_models_own_forward(kit):
    class Checked(torch.nn.Module):
        def forward(self, x):
            torch._check(x.shape[0] <= 6)
            return x + 1

    runtime = pw.Runtime(Checked(), kit.config(), dynamic_dims={"x": 0})
    runtime.run("decode", {"x": torch.ones(4, 1)})
    with pytest.raises(RuntimeError):  # the model's own check, from the eager forward
        runtime.run("decode", {"x": torch.ones(9, 1)})
    assert runtime.counters["fallbacks"]["no trace is valid at this size: eager"] == 1


def test_another_dim_outside_its_interval_takes_the_models_own_forward(kit):
    """`shape[0] == 1` is False in a backed trace, without a guard: the program must not run at 1."""

    class Model(torch.nn.Module):
        def forward(self, x, y):
            x = x * 2 if x.shape[0] > 8 else x * 3
            return x + 100 * y if y.shape[0] == 1 else x + y.sum(0)

    model = Model()
    runtime = pw.Runtime(model, kit.config(), dynamic_dims={"x": 0, "y": {0: "rows"}})
    for num_rows in (1, 3, 1, 2, 5):  # 1 first: what runs for a bucket is not decided by its first step
        x, y = torch.randn(4, 2), torch.randn(num_rows, 2)
        torch.testing.assert_close(runtime.run("decode", {"x": x, "y": y}), model(x, y))
    assert runtime.counters["traces"] == 1
    assert runtime.counters["fallbacks"]["no trace is valid at this size: eager"] == 2
    assert runtime.explain().as_dict()["traces"][0]["intervals"] == {"tokens": "[2, 8]", "rows": "[2, inf)"}


def test_a_step_that_no_trace_holds_for_does_not_wait_for_a_compile(kit):
    class Checked(torch.nn.Module):
        def forward(self, x):
            if torch.compiler.is_compiling():
                torch._check(x.shape[0] <= 6)
            return x + 1

    runtime = pw.Runtime(Checked(), kit.config(), dynamic_dims={"x": 0})
    for num_tokens in (4, 9):
        runtime.run("decode", {"x": torch.ones(num_tokens, 1)})
    done = threading.Event()
    results = []

    def step():
        results.append(runtime.run("decode", {"x": torch.ones(9, 1)}))
        done.set()

    thread = threading.Thread(target=step, daemon=True)
    with runtime._table.lock:  # as during a compile in another thread
        thread.start()
        assert done.wait(60)
    thread.join()
    assert results[0].tolist() == [[2.0]] * 9
    assert runtime.counters["fallbacks"]["no trace is valid at this size: eager"] == 2


def test_a_failed_trace_is_raised_again_and_not_tried_again(kit):
    attempts = []

    class Untraceable(torch.nn.Module):
        def forward(self, x):
            torch._dynamo.graph_break()
            return x

    model = Untraceable()
    runtime = pw.Runtime(model, kit.config(), dynamic_dims={"x": 0})
    for _ in range(2):
        with pytest.raises(pw.TraceError, match="cannot be traced") as caught:
            runtime.run("decode", {"x": torch.ones(2, 1)})
        attempts.append(caught.value)
    assert attempts[0] is attempts[1]


def test_a_failed_specialisation_leaves_the_general_program(kit, monkeypatch):
    from piecework.graphs import piece as piece_module

    real = piece_module.compile_piece
    failures = []

    def failing(compiler, graph_module, fake_mode, options):
        sizes = [node.meta["example_value"] for node in graph_module.graph.find_nodes(op="placeholder")]
        if not any(isinstance(s, torch.SymInt) for value in sizes for s in getattr(value, "shape", ())):
            failures.append(graph_module)
            raise pw.CompileError("compiler broke")
        return real(compiler, graph_module, fake_mode, options)

    monkeypatch.setattr(piece_module, "compile_piece", failing)
    runtime = kit.runtime(kit.Toy(), kit.config(decode={"specialize": (4,)}))
    for _ in range(3):
        assert kit.step(runtime, "decode", 4) < TOLERANCE
    assert len(failures) == 1
    assert runtime.counters["fallbacks"]["specialising failed: general"] == 1
    (entry,) = runtime.entries
    assert entry.program.kind == "general"
    assert "compiler broke" in entry.why


def test_a_compiler_that_fails_names_the_piece_and_the_way_out(kit, monkeypatch):
    from piecework.graphs import compilers

    def broken(graph_module, example_inputs):
        raise RuntimeError("no compiler found")

    monkeypatch.setitem(compilers._COMPILERS, pw.Compiler.AOT_EAGER, broken)
    runtime = kit.runtime(kit.Toy())
    with pytest.raises(pw.CompileError, match="aot_eager: failed on a piece.*no compiler found.*compiler='eager'"):
        kit.step(runtime, "decode", 4)


def test_a_compiler_that_cannot_do_without_sizes_gets_a_backed_trace(kit, monkeypatch):
    from piecework.graphs import compilers

    real = compilers._COMPILERS[pw.Compiler.AOT_EAGER]

    def decides(graph_module, example_inputs):
        if any(value.shape[0] > 0 for value in example_inputs if isinstance(value, torch.Tensor)):
            return real(graph_module, example_inputs)

    monkeypatch.setitem(compilers._COMPILERS, pw.Compiler.AOT_EAGER, decides)
    runtime = kit.runtime(kit.Toy())
    for num_tokens in (3, 1, 8, 30):
        assert kit.step(runtime, "decode", num_tokens) < TOLERANCE
    assert runtime.counters["traces"] == 2
    assert runtime.counters["fallbacks"]["the compiler decides on a size: traced backed"] == 1
