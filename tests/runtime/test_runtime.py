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
    with pytest.raises(pw.ConfigError, match=r"startup: 'eager' traces and captures in .*example_inputs="):
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


def test_expect_reports_every_difference(kit):
    runtime = kit.runtime(kit.Toy())
    with pytest.raises(AssertionError, match=r"traces: expected \+2, got \+1; steps: expected \+0, got \+1"):
        with runtime.counters.expect(traces=2, steps=0, compiles_general=3):
            kit.step(runtime, "decode", 2)
    with pytest.raises(KeyError, match="compile_general unknown"):
        with runtime.counters.expect(compile_general=1):
            pass
