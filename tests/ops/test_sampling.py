"""Drawing tokens: the native body against loops, who is chosen, what a trace holds; the kernel, in other processes."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from piecework.errors import InputError
from piecework.ops.fused import use_choice
from piecework.ops.fused_choice import choose
from piecework.ops.sampling import sample

from .sampling_reference import Columns, check, columns, drawings
from .test_triton_kernels import run_tests

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Triton is for Linux only")


@linux
@pytest.mark.slow
def test_the_kernels_under_the_interpreter() -> None:
    run_tests("sampling_interpreted.py", at_least=30, TRITON_INTERPRET="1")


@linux
@pytest.mark.slow
def test_the_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    # Without the last one Triton 3.9 warns that it is not set.
    environment = {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    run_tests("sampling_compiled.py", at_least=11, **environment)


@given(drawings())
@settings(max_examples=100, deadline=None)
def test_the_native_body_draws_what_is_at_the_number(arguments: Columns) -> None:
    check(sample(*arguments), arguments, slack=1e-9)


def test_greedy_rows_beside_drawn_ones_take_the_first_of_the_largest() -> None:
    logits = torch.tensor([1.0, 7.0, 7.0, 2.0]).expand(3, -1)
    assert sample(logits, *columns((0.99, 0.0, 0, 1.0), (0.6, 1.0, 0, 1.0), (0.99, 0.0, 3, 0.1))).tolist() == [1, 2, 1]


def test_double_logits_are_drawn_by_the_native_body() -> None:
    """Two that float32 cannot tell apart."""
    logits = torch.tensor([[1.0, 1.0 + 1e-12]], dtype=torch.float64)
    [kernel] = sample.kernels
    assert kernel.body(logits, *columns((0.3, 0.0, 0, 1.0))).tolist() == [1]


def test_rows_that_there_are_none_of() -> None:
    assert sample(torch.zeros(0, 5), *columns()).shape == (0,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({0: torch.zeros(4)}, r"sample: logits: expected \[num_rows, vocab_size\] of a floating dtype, got \[4\]"),
        ({0: torch.zeros(2, 0)}, r"sample: logits: .* got \[2, 0\] of torch.float32; pass one row"),
        ({0: torch.zeros(2, 3, dtype=torch.int64)}, "got .* of torch.int64"),
        ({1: torch.zeros(3)}, r"sample: uniform: expected \[2\] on cpu, one a row of logits, got \[3\] on cpu"),
        ({4: torch.zeros(2, 1)}, r"sample: top_p: expected \[2\]"),
        ({2: torch.zeros(2, device="meta")}, r"sample: temperature: expected \[2\] on cpu.* on meta; give each row"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(changes: dict[int, torch.Tensor], message: str) -> None:
    plain = (torch.zeros(2, 3), *columns(*[(0.5, 1.0, 0, 1.0)] * 2))
    with pytest.raises(InputError, match=message):
        sample(*(changes.get(index, argument) for index, argument in enumerate(plain)))


# ---- who draws


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.parametrize(
    ("device_type", "changes", "runs"),
    [
        ("cpu", {}, "native"),
        ("cuda", {}, "triton"),
        ("cuda", {"dtype": torch.bfloat16}, "triton"),
        ("cuda", {"dtype": torch.float64}, "native"),
        ("cuda", {"kernel_backend": "native"}, "native"),
    ],
)
def test_who_is_chosen(device_type: str, changes: dict[str, Any], runs: str, compiler: str) -> None:
    """Sorting is nothing that Inductor fuses: the kernel is the default under it too."""
    assert choose((), compiler=compiler, device_type=device_type, **changes).runs["sample"] == runs


def test_without_triton_the_reason_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    [chosen] = [op for op in choose((), compiler="eager", device_type="cuda").ops if op.name == "sample"]
    assert chosen.runs == "native"
    assert chosen.passed_over == (("triton", "not installed: pip install triton"),)


def test_the_choice_in_use_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = torch.tensor([3])
    [kernel] = sample.kernels
    ours = dataclasses.replace(kernel, body=lambda *arguments: drawn)
    monkeypatch.setitem(sample._kernels, "triton", ours)
    with use_choice(choose((), compiler="eager", device_type="cuda")):
        assert sample(torch.zeros(1, 5), *columns((0.1, 1.0, 0, 1.0))) is drawn
    assert sample(torch.zeros(1, 5), *columns((0.1, 1.0, 0, 1.0))).tolist() == [0]


def test_a_trace_names_the_operator() -> None:
    graphs: list[Any] = []

    def keep(graph: torch.fx.GraphModule, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    [kernel] = sample.kernels
    program = torch.compile(lambda *arguments: kernel.body(*arguments) + 1, backend=keep, fullgraph=True)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        out = program(torch.zeros(2, 9), *columns(*[(0.5, 1.0, 0, 1.0)] * 2))
    assert (out.shape, out.dtype) == ((2,), torch.int64)
    called = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert called[0] == torch.ops.piecework.triton_sample.default


def test_the_native_body_can_be_traced() -> None:
    arguments = (torch.randn(3, 50), *columns(*[(0.5, 1.0, 5, 0.9)] * 3))
    program = torch.compile(sample.native, backend="eager", fullgraph=True)
    assert torch.equal(program(*arguments), sample(*arguments))


def test_triton_is_imported_by_its_first_use_alone() -> None:
    code = (
        "import sys, json, piecework.ops.sampling, torch; from piecework.ops.fused_choice import choose; "
        "runs = choose((), compiler='eager', device_type='cuda').runs['sample']; "
        "print(json.dumps([runs, 'triton' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["triton", False]
