"""The runtime's contract, with counters as the oracle. The toy's counts are worked out in conftest.py."""

from __future__ import annotations

import dataclasses
import gc
import math
import threading
import weakref

import pytest
import torch

import piecework as pw

TOLERANCE = 1e-5


@pytest.mark.parametrize("num_layers", [4, 32])
def test_one_trace_and_three_compiles_whatever_the_depth(kit, num_layers):
    runtime = kit.runtime(kit.Toy(num_layers))
    with runtime.counters.expect(
        traces=1,
        opaque_regions=num_layers,
        pieces=num_layers + 1,
        distinct_pieces=3,
        compiles_general=3,
        compiles_specialized=0,
        fallbacks=0,
    ):
        assert kit.step(runtime, "decode", 3) < TOLERANCE


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
def test_right_at_every_size_without_another_trace(kit, compiler):
    runtime = kit.runtime(kit.Toy(), kit.config(compiler))
    kit.step(runtime, "decode", 1)
    traces = 0 if compiler == "eager" else 1
    assert runtime.counters["traces"] == traces
    with runtime.counters.expect(traces=0, compiles_general=0, compiles_specialized=0):
        for phase, sizes in {"decode": (0, 1, 2, 3, 4, 7, 8, 9, 40), "prefill": (1, 2, 15, 16, 17, 32, 33, 64)}.items():
            for num_tokens in sizes:
                assert kit.step(runtime, phase, num_tokens) < TOLERANCE, (phase, num_tokens)


def test_the_body_of_a_split_op_runs_once_a_layer_and_step_and_never_for_a_trace(kit):
    num_layers = 4
    model = kit.Toy(num_layers)
    runtime = kit.runtime(model, kit.config(decode={"specialize": "all"}))
    kit.calls.count = 0
    for step, num_tokens in enumerate((1, 2, 3, 8, 9), start=1):
        runtime.run("decode", kit.inputs(num_tokens), context=kit.context(num_tokens))
        assert kit.calls.count == step * num_layers


def test_steps_of_a_compiled_program_run_at_the_bucket_with_defined_tails(kit):
    runtime = kit.runtime(kit.Toy(1), pad={"positions": 7})
    runtime.run("decode", kit.inputs(3), context=kit.context(3))
    assert kit.calls.rows == [4]
    assert kit.calls.contexts[0].tolist() == [0, 1, 2, -1]


def test_padded_inputs_hold_the_declared_value(kit):
    seen = []

    @pw.split_op(mutates_args=("out",), name="piecework_test::see")
    def see(x: torch.Tensor, out: torch.Tensor) -> None:
        seen.append(x.tolist())
        out.copy_(x)

    class Model(torch.nn.Module):
        def forward(self, slots, x):
            out = torch.empty_like(slots)
            see(slots, out)
            return out + 1, x

    runtime = pw.Runtime(Model(), kit.config(), dynamic_dims={"slots": 0, "x": {1: "tokens"}}, pad={"slots": -1},
                         output_dims={"1": 1})  # fmt: skip
    out, x = runtime.run("decode", {"slots": torch.tensor([5, 6, 7]), "x": torch.ones(2, 3)})
    assert seen == [[5, 6, 7, -1]]
    assert out.tolist() == [6, 7, 8]
    assert x.tolist() == [[1, 1, 1], [1, 1, 1]]


def test_nan_in_the_padded_tail_does_not_leak(kit):
    model = kit.Toy()
    runtime = kit.runtime(model, pad={"positions": math.nan, "input_ids": 0})
    inputs = {**kit.inputs(3), "positions": torch.rand(3)}
    expected = kit.reference(model, inputs, kit.context(3))
    got = runtime.run("decode", inputs, context=kit.context(3))
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got, expected)


def test_the_eager_forward_runs_unpadded_and_without_a_trace(kit):
    runtime = kit.runtime(kit.Toy(), kit.config("eager"))
    with runtime.counters.expect(traces=0, pieces=0, compiles_general=0, steps=1):
        assert kit.step(runtime, "decode", 3) == 0.0
    assert kit.calls.rows == [3, 3]


def test_lazy_compiles_exactly_the_bucket_that_appears(kit):
    runtime = kit.runtime(kit.Toy(4), kit.config(decode={"specialize": (2, 8)}, prefill={"specialize": "all"}))
    assert runtime.counters["traces"] == 0
    with runtime.counters.expect(traces=1, compiles_general=3, compiles_specialized=0):
        kit.step(runtime, "decode", 4)  # in the ladder, not named by specialize
    with runtime.counters.expect(traces=0, compiles_general=0, compiles_specialized=3):
        kit.step(runtime, "decode", 7)  # bucket 8
    with runtime.counters.expect(compiles_specialized=0):
        kit.step(runtime, "decode", 8)
    with runtime.counters.expect(compiles_specialized=3):
        kit.step(runtime, "prefill", 16)
    with runtime.counters.expect(compiles_specialized=3):
        kit.step(runtime, "decode", 2)
    by_bucket = {k: v.get("compiles_specialized", 0) for k, v in runtime.counters.by_phase_and_bucket().items()}
    assert by_bucket == {("decode", 4): 0, ("decode", 8): 3, ("prefill", 16): 3, ("decode", 2): 3}
    assert runtime.counters["in_step_seconds"] > 0


def test_eager_compiles_nothing_after_the_constructor(kit):
    model = kit.Toy(4)
    kit.calls.count = 0
    settings = kit.config(startup="eager", decode={"specialize": (2, 8)}, prefill={"specialize": "all"})
    runtime = kit.runtime(model, settings, example_inputs=kit.inputs(1))
    counters = runtime.counters.as_dict()
    # Both phases have the same inputs and compiler: one trace, one general program. Buckets 2, 8, 16 and 32.
    assert (counters["traces"], counters["compiles_general"], counters["compiles_specialized"]) == (1, 3, 4 * 3)
    assert counters["in_step_seconds"] == 0
    assert kit.calls.count == 0
    with runtime.counters.expect(traces=0, compiles_general=0, compiles_specialized=0, entries=0, fallbacks=2):
        for phase in ("decode", "prefill"):
            for num_tokens in (1, 2, 8, 16, 40 if phase == "prefill" else 4):  # one above each ladder, counted
                assert kit.step(runtime, phase, num_tokens) < TOLERANCE
    assert runtime.counters["in_step_seconds"] == 0


def test_eager_without_examples_says_what_to_pass(kit):
    with pytest.raises(pw.ConfigError, match="startup: 'eager' traces in the constructor.*example_inputs="):
        kit.runtime(kit.Toy(), kit.config(startup="eager"))
    kit.runtime(kit.Toy(), kit.config("eager", startup="eager"))  # nothing to trace: nothing needed


def test_warm_up_front_loads_what_lazy_would_do(kit):
    runtime = kit.runtime(kit.Toy(), kit.config(decode={"specialize": "all"}))
    with pytest.raises(pw.InputError, match="warm_up: the inputs are not known before the first step"):
        runtime.warm_up()
    kit.step(runtime, "decode", 2)
    with runtime.counters.expect(traces=0, compiles_specialized=2 * 3):
        runtime.warm_up("decode")
    with runtime.counters.expect(traces=0, compiles_general=0, compiles_specialized=0):
        kit.step(runtime, "decode", 8)
    with runtime.counters.expect(traces=0, compiles_general=0, compiles_specialized=0, entries=3):
        runtime.warm_up()  # two buckets of prefill, and what lies above


def test_a_step_above_the_ladder_and_one_with_too_much_padding_run_unpadded_and_are_counted(kit):
    runtime = kit.runtime(kit.Toy(1), kit.config(decode={"max_padding_waste": 0.4}))
    for num_tokens in (1, 5, 9, 6):
        assert kit.step(runtime, "decode", num_tokens) < TOLERANCE
    # 1 of 2 rows is 0.5 waste and 5 of 8 is 0.375; 9 is above the ladder.
    assert kit.calls.rows == [1, 8, 9, 8]
    reasons = runtime.counters["fallbacks"]
    assert reasons["above the ladder"] == 1
    assert [count for reason, count in reasons.items() if "padding waste" in reason] == [1]


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

    def failing(compiler, graph_module, fake_mode):
        sizes = [node.meta["example_value"] for node in graph_module.graph.find_nodes(op="placeholder")]
        if not any(isinstance(s, torch.SymInt) for value in sizes for s in getattr(value, "shape", ())):
            failures.append(graph_module)
            raise pw.CompileError("compiler broke")
        return real(compiler, graph_module, fake_mode)

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


def test_two_threads_at_two_new_buckets_are_both_right(kit):
    model = kit.Toy(1)
    runtime = kit.runtime(model, kit.config(decode={"specialize": "all"}))
    barrier = threading.Barrier(4)
    results: dict[int, torch.Tensor] = {}
    errors: list[BaseException] = []
    inputs = {n: kit.inputs(n) for n in (2, 4, 8, 3)}

    def step(num_tokens: int) -> None:
        try:
            barrier.wait()
            slots = kit.Context(slots=torch.full((num_tokens,), -1))  # nobody writes the shared cache
            results[num_tokens] = runtime.run("decode", inputs[num_tokens], context=slots)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=step, args=(n,)) for n in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for num_tokens, got in results.items():
        context = kit.Context(slots=torch.full((num_tokens,), -1))
        torch.testing.assert_close(got, kit.reference(model, inputs[num_tokens], context))
    assert runtime.counters["traces"] == 1
    assert runtime.counters["compiles_specialized"] == 2 * 3  # two pieces, three buckets


def test_two_runtimes_in_one_process_share_nothing(kit):
    first, second = kit.Toy(), kit.Toy(3)
    one, two = kit.runtime(first), kit.runtime(second, kit.config("inductor"))
    assert kit.step(one, "decode", 3) < TOLERANCE
    with one.counters.expect(traces=0, steps=0):
        assert kit.step(two, "decode", 3) < TOLERANCE
    one.close()
    assert kit.step(two, "decode", 5) < TOLERANCE


def test_a_model_and_its_runtime_are_freed_together(kit):
    model = kit.Toy(1)
    runtime = kit.runtime(model)
    kit.step(runtime, "decode", 2)
    runtime.close()
    alive = weakref.ref(model)
    del model, runtime
    gc.collect()
    assert alive() is None


def test_weights_that_change_are_followed(kit):
    model = kit.Toy()
    runtime = kit.runtime(model)
    kit.step(runtime, "decode", 4)
    with torch.no_grad():
        model.head.weight.mul_(2)
    assert kit.step(runtime, "decode", 4) < TOLERANCE
    model.head.weight = torch.nn.Parameter(torch.randn_like(model.head.weight))
    model.layers[0].cache = torch.zeros_like(model.layers[0].cache)
    assert kit.step(runtime, "decode", 4) < TOLERANCE
    model.head.weight = torch.nn.Parameter(torch.randn(3, 16))
    with pytest.raises(pw.InputError, match=r"model tensor 'head.weight': the program was traced with.*got"):
        runtime.run("decode", kit.inputs(4), context=kit.context(4))


def test_what_a_trace_bakes_in_of_torchs_settings_is_part_of_its_identity(kit):
    model = kit.Toy()
    runtime = kit.runtime(model)
    inputs, context = kit.inputs(4), kit.context(4)
    plain = kit.reference(model, inputs, context)
    with torch.autocast("cpu", torch.bfloat16):
        lowered = kit.reference(model, inputs, context)
    assert lowered.dtype is torch.bfloat16
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            got = runtime.run("decode", inputs, context=context)
        model.clear()
        torch.testing.assert_close(got, lowered)
        torch.testing.assert_close(runtime.run("decode", inputs, context=context), plain)
        model.clear()
    assert runtime.counters["traces"] == 2
    assert any("autocast cpu to torch.bfloat16" in t["inputs"] for t in runtime.explain().as_dict()["traces"])


def test_inputs_that_are_not_contiguous_are_right(kit):
    class Model(torch.nn.Module):
        def forward(self, x, table):
            return (x @ table).cos()

    model = Model()
    runtime = pw.Runtime(model, kit.config("inductor"), dynamic_dims={"x": 0})
    wide = torch.randn(4, 8)
    table = torch.randn(5, 8).T  # no dynamic dim: its strides are part of the program's identity
    with runtime.counters.expect(traces=1, fallbacks=0):
        for x in (torch.randn(8, 4).T[:, :8], wide, torch.randn(4, 16)[:, ::2], torch.randn(8, 3).T):
            torch.testing.assert_close(runtime.run("decode", {"x": x, "table": table}), model(x, table))
    with runtime.counters.expect(traces=1):
        table = torch.randn(8, 5)
        torch.testing.assert_close(runtime.run("decode", {"x": wide, "table": table}), model(wide, table))


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_inputs_that_the_model_writes_into_are_written_whatever_the_padding(kit, compiler):
    @pw.split_op(mutates_args=("state",), name="piecework_test::bump")
    def bump(x: torch.Tensor, state: torch.Tensor) -> None:
        state.add_(x)

    class Model(torch.nn.Module):
        def forward(self, x, state, table):
            table.add_(1)
            bump(x * 2, state)
            x[:, :1].mul_(0)
            return x + state

    runtime = pw.Runtime(Model(), kit.config(compiler), dynamic_dims={"x": 0, "state": 0})
    for num_tokens in (3, 4):
        x, state, table = torch.ones(num_tokens, 2), torch.ones(2, num_tokens).T, torch.zeros(5)
        got = runtime.run("decode", {"x": x, "state": state, "table": table})
        assert x.tolist() == [[0, 1]] * num_tokens
        assert state.tolist() == [[3, 3]] * num_tokens
        assert table.tolist() == [1] * 5
        assert got.tolist() == [[3, 4]] * num_tokens


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_a_cache_made_in_any_grad_mode_works(kit, mode):
    model = kit.Toy()
    with mode():
        for layer in model.layers:
            layer.cache = torch.zeros(64, 16)
    runtime = kit.runtime(model)
    inputs, context = kit.inputs(4), kit.context(4)
    got = runtime.run("decode", inputs, context=context)
    again = runtime.run("decode", inputs, context=context)
    torch.testing.assert_close(got, again)  # the rows are the same, so the cache is
    assert float(model.layers[0].cache.abs().sum()) > 0


def test_evaluate_guards_fails_when_the_trace_no_longer_holds(kit):
    class Scaled(torch.nn.Module):
        factor = 2

        def forward(self, x):
            return x * self.factor

    model = Scaled()
    runtime = pw.Runtime(model, kit.config(evaluate_guards=True), dynamic_dims={"x": 0})
    for num_tokens in (1, 3, 9):
        x = torch.randn(num_tokens, 2)
        torch.testing.assert_close(runtime.run("decode", {"x": x}), x * 2)
    model.factor = 3
    with pytest.raises(pw.RecompileError, match="conditions that no longer hold"):
        runtime.run("decode", {"x": torch.ones(1, 2)})
    # Without the mode the value is frozen, and listed.
    plain = pw.Runtime(model, kit.config(), dynamic_dims={"x": 0})
    plain.run("decode", {"x": torch.ones(1, 2)})
    assert any("factor = 3" in state for state in plain.explain().as_dict()["traces"][0]["frozen"])


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


def test_the_debug_mode_looks_into_lists(kit):
    @pw.split_op(mutates_args=("outs",), name="piecework_test::fill")
    def fill(x: torch.Tensor, outs: list[torch.Tensor]) -> None:
        for out in outs:
            out.copy_(x)

    class Model(torch.nn.Module):
        def forward(self, x):
            outs = [torch.zeros_like(x), torch.zeros_like(x)]
            fill(x * 2, outs)
            return outs[0] + outs[1]

    runtime = pw.Runtime(Model(), kit.config(evaluate_guards=True), dynamic_dims={"x": 0})
    torch.testing.assert_close(runtime.run("decode", {"x": torch.ones(2, 2)}), torch.full((2, 2), 4.0))
    assert runtime.explain().as_dict()["never_written"] == {}


def test_the_debug_mode_reports_a_mutation_that_never_happens(kit):
    @pw.split_op(mutates_args=("x", "out"), name="piecework_test::over_declared")
    def over_declared(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x + 1)

    class Model(torch.nn.Module):
        def forward(self, x):
            y = x * 2
            out = torch.zeros_like(y)
            over_declared(y, out)
            return out * 2

    runtime = pw.Runtime(Model(), kit.config(evaluate_guards=True), dynamic_dims={"x": 0})
    torch.testing.assert_close(runtime.run("decode", {"x": torch.ones(2, 2)}), torch.full((2, 2), 6.0))
    explanation = runtime.explain()
    assert explanation.as_dict()["never_written"] == {"piecework_test::over_declared": ["x"]}
    assert "declares x mutated and has never changed it" in str(explanation)


def test_inputs_that_do_not_fit(kit):
    runtime = kit.runtime(kit.Toy())
    good = kit.inputs(3)
    cases = {
        "input 'input_ids': expected a tensor.*got list": {**good, "input_ids": [1, 2, 3]},
        "'positions': dim 0 .*is 2, but 'input_ids' dim 0 with the same name is 3": {
            **good,
            "positions": torch.arange(2),
        },
        "expected at least one of input_ids, positions.*got nothing": {},
        "dynamic_dims declares dim 0 .*got a tensor of shape \\[\\]": {**good, "positions": torch.tensor(1)},
    }
    for message, inputs in cases.items():
        with pytest.raises(pw.InputError, match=message):
            runtime.run("decode", inputs)
    with pytest.raises(pw.InputError, match=r"ToyContext.slots: expected 3 rows on dim 0.*got shape \[2\]"):
        runtime.run("decode", good, context=kit.context(2))
    with pytest.raises(pw.ConfigError, match="phase: expected one of prefill, decode, got 'warmup'"):
        runtime.run("warmup", good)
    with pytest.raises(pw.InputError, match="expected one dim called 'tokens'"):
        pw.Runtime(kit.Toy(), dynamic_dims={"input_ids": {0: "batch"}})


def test_an_op_without_its_context_says_so(kit):
    runtime = kit.runtime(kit.Toy())
    with pytest.raises(pw.ContextError, match="asked for this step's ToyContext and got no context"):
        runtime.run("decode", kit.inputs(2))


def test_a_closed_runtime_refuses_to_run(kit):
    with kit.runtime(kit.Toy()) as runtime:
        kit.step(runtime, "decode", 2)
    runtime.close()
    with pytest.raises(pw.RuntimeClosedError, match="make a new one"):
        runtime.run("decode", kit.inputs(2))


@dataclasses.dataclass
class Result:
    hidden: torch.Tensor
    pooled: torch.Tensor
    extra: dict[str, object]


def test_structured_outputs_are_rebuilt_and_cut(kit):
    class Model(torch.nn.Module):
        def forward(self, x):
            y = x + 1
            extra = {"twice": (y.repeat_interleave(2, 0), x), "n": x.shape[0] + 1, "mask": x[:, 0] > y[:, :1]}
            return Result(hidden=y, pooled=y.new_ones(8), extra=extra)

    runtime = pw.Runtime(Model(), kit.config(), dynamic_dims={"x": 0})
    result = runtime.run("decode", {"x": torch.zeros(5, 2)})
    assert isinstance(result, Result)
    assert result.hidden.shape == (5, 2)
    assert result.pooled.shape == (8,)  # of the bucket's size by chance, and no row of it is padding
    assert result.extra["twice"][0].shape == (10, 2)
    assert result.extra["twice"][1].shape == (5, 2)
    assert result.extra["mask"].shape == (5, 5)
    assert result.extra["n"] == 6  # as the caller's input has it, without padding


def test_explain_and_events_say_what_happened(kit):
    @pw.split_op(mutates_args=("out",), name="piecework_test::never_called")
    def never_called(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x)

    runtime = kit.runtime(kit.Toy(), kit.config(decode={"specialize": (4,)}))
    kit.step(runtime, "decode", 3)
    kit.step(runtime, "decode", 9)
    data = runtime.explain().as_dict()
    assert [(e["phase"], e["bucket"], e["program"], e["steps"]) for e in data["entries"]] == [
        ("decode", 4, "specialized", 1),
        ("decode", None, "general", 1),
    ]
    assert data["traces"][0]["split_ops"] == {"piecework_test::mix": 2}
    assert "piecework_test::never_called" in data["unmatched_split_ops"]
    assert "piecework_test::mix" not in data["unmatched_split_ops"]
    text = str(runtime.explain())
    assert "3 pieces (3 distinct), 2 opaque regions" in text
    assert "specialize names the bucket" in text
    kinds = [event.kind for event in runtime.events]
    assert kinds.count("trace") == 1
    assert kinds.count("compile_general") == kinds.count("compile_specialized") == 3
    compiled = next(event for event in runtime.events if event.kind == "compile_specialized")
    assert compiled.scope.in_step
    assert (compiled.scope.phase, compiled.scope.bucket) == ("decode", 4)
    assert compiled.seconds > 0
    assert len(compiled.detail["fingerprint"]) == 64


def test_expect_reports_every_difference(kit):
    runtime = kit.runtime(kit.Toy())
    with pytest.raises(AssertionError, match=r"traces: expected \+2, got \+1; steps: expected \+0, got \+1"):
        with runtime.counters.expect(traces=2, steps=0, compiles_general=3):
            kit.step(runtime, "decode", 2)
    with pytest.raises(KeyError, match="compile_general unknown"):
        with runtime.counters.expect(compile_general=1):
            pass
