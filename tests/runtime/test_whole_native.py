"""Fused ops in a whole forward: native bodies where the pieces run kernels that nobody asked for.

The kernel of these tests runs on the CPU and adds 10 to RMSNorm, so that a result says who ran.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import piecework as pw
from piecework.ops import fused
from piecework.ops.norm import RMSNorm, rms_norm
from piecework.ops.opaque import like_first, opaque
from piecework.runtime.warm_up import WarmUp


@pw.split_op(mutates_args=("out",), name="piecework_whole_native::center", capturable=True)
def center(x: torch.Tensor, out: torch.Tensor) -> None:
    """Takes the mean of each row away, which no offset survives."""
    out.copy_(x - x.mean(-1, keepdim=True))


@opaque("tests_plus_ten", fake=like_first)
def plus_ten(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return rms_norm.native(x, weight, eps) + 10


def calls_plus_ten(x: torch.Tensor, weight: torch.Tensor, eps: float, variance_size: int | None = None) -> torch.Tensor:
    """A kernel that is no operator, but calls one."""
    result: torch.Tensor = plus_ten(x, weight, eps)
    return result


@pytest.fixture(autouse=True)
def one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """RMSNorm has a kernel `ten` for the CPU, which is the default there; whole programs are taken."""
    for op in fused.fused_ops():
        monkeypatch.setattr(op, "_kernels", {})
    register = rms_norm.kernel("ten", device_types=("cpu",), beats_inductor=True, operators=(plus_ten,))
    register(calls_plus_ten)
    monkeypatch.setattr(WarmUp, "seconds", lambda *arguments: [2e-3, 1e-3])


class Model(nn.Module):
    """Two norms with a split op between them, which takes away what the first one's kernel adds."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(RMSNorm(4, 1e-5) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.norms
        x = first(x)
        center(x, out := torch.empty_like(x))
        return second(out)


made: list[pw.Runtime] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while made:
        made.pop().close()


def runtime(*items: str, **options: Any) -> pw.Runtime:
    config = pw.GraphConfig(
        prefill={"backend": "disabled"},
        decode={"backend": "full", "compiler": "inductor", "buckets": (2, 4)},
        capture_device="tape",
        enable_torch_compile=True,
        torch_compile_max_bs=2,
        torch_compile_mode="default",
        fused_ops=items,
        **options,
    )
    made.append(pw.Runtime(Model(), config, dynamic_dims={"x": 0}))
    return made[-1]


def offset(one: pw.Runtime, num_tokens: int) -> int:
    """What the last norm's body added at so many tokens."""
    x = torch.arange(4.0 * num_tokens).view(num_tokens, 4).sin()
    with torch.inference_mode():
        expected = one.model(x)
    result = one.run("decode", {"x": x}, copy=True)
    added = round((result - expected).mean().item())
    torch.testing.assert_close(result - added, expected, rtol=1e-4, atol=1e-5)
    return added


def calls(program: Any) -> int:
    """How often the graphs of a program's pieces call the kernel's operator."""
    graphs = [program.graph.built(piece).graph_module.graph for piece in program.graph.split.pieces]
    return sum(node.target is plus_ten for graph in graphs for node in graph.nodes)


def programs(one: pw.Runtime) -> tuple[Any, Any]:
    """The general program and the whole one."""
    [family] = one._table.families.values()
    [general] = family.general
    return general, family.known_whole(2)


@pytest.mark.parametrize(
    ("items", "options", "general", "whole"),
    [
        ((), {}, 10, 0),
        (("none", "+rms_norm"), {}, 10, 10),
        (("all",), {}, 10, 10),
        ((), {"kernel_backend": "ten"}, 10, 10),
        ((), {"kernel_backend": "native"}, 0, 0),
    ],
    ids=["default", "named", "all", "backend", "native"],
)
def test_a_whole_forward_is_native_unless_the_operator_asks(
    items: tuple[str, ...], options: dict[str, str], general: int, whole: int
) -> None:
    one = runtime(*items, **options)
    assert (offset(one, 4), offset(one, 2), offset(one, 4)) == (general, whole, general)
    kinds = {entry.bucket: entry.program.kind for entry in one.entries}
    assert kinds == {2: "whole", 4: "general"}
    assert [calls(program) for program in programs(one)] == [general // 5, whole // 5]
    assert one.counters["traces"] == 1, "one for both"
    assert one.counters["fallbacks"] == {}
    told = one.explain().as_dict()["fused_ops"]["decode"]["rms_norm"]
    if not items and not options:
        assert told["reason"] == "measured no slower than what inductor makes of the native body"
        assert not told["is_asked"]
        assert "fused op" not in str(one.explain()), "it is the default"


def test_what_the_whole_is_made_of_is_in_its_fingerprint() -> None:
    found = set()
    for items in ((), ("none", "+rms_norm")):
        one = runtime(*items)
        offset(one, 2)
        [fingerprint] = programs(one)[1].graph.fingerprints.values()
        found.add(fingerprint)
    assert len(found) == 2


def test_a_worker_compiles_the_native_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is traced in a thread: there is no factory. What then travels has no operator of the kernel's."""
    # The worker imports this module, for its split op; pytest need not have put it where others find it.
    monkeypatch.syspath_prepend(str(Path(__file__).parents[__name__.count(".")]))
    one = runtime(startup="tiered", compile_workers=1)
    for _ in range(5000):
        offset(one, 2), offset(one, 4)
        if one.settled:
            break
        one._tiering.background.wait(0.05)
    assert one.settled
    assert (offset(one, 2), offset(one, 4)) == (0, 10)
    [event] = [event for event in one.events if event.kind == "compile_whole"]
    assert (event.detail["where"], event.detail["bucket"]) == ("worker", 2)
    assert [calls(program) for program in programs(one)] == [2, 0]
    assert one.counters["in_step_seconds"] == 0


def test_a_graph_that_came_from_elsewhere_gives_the_same_whole() -> None:
    first = runtime()
    assert (offset(first, 4), offset(first, 2)) == (10, 0)
    [program] = first.export()
    content = program.to_bytes()
    config = first.config
    made.append(pw.Runtime(Model(), config, dynamic_dims={"x": 0}, programs=[pw.PortableProgram.from_bytes(content)]))
    second = made[-1]
    second._table.compiled = first._table.compiled
    with second.counters.expect(traces=0, compiles_general=0, compiles_whole=0):
        assert (offset(second, 4), offset(second, 2)) == (10, 0)
    assert programs(second)[1].graph.fingerprints == programs(first)[1].graph.fingerprints
