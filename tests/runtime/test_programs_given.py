"""A runtime that was given programs of another one traces nothing, and does the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import piecework as pw
from piecework.runtime import programs as programs_module


def config(compiler: str = "aot_eager", **changes: object) -> pw.GraphConfig:
    phase = {"compiler": compiler, "buckets": (2, 4), "specialize": (4,)}
    return pw.GraphConfig(**{"prefill": phase, "decode": phase, **changes})


def runtime_of(model: torch.nn.Module, **options: object) -> pw.Runtime:
    options = {"config": config(), **options}
    return pw.Runtime(model, dynamic_dims={"x": 0}, **options)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.second(self.first(x).relu()) * scale


X = torch.linspace(-1, 1, 12).reshape(3, 4)


@pytest.fixture
def exported() -> tuple[pw.PortableProgram, ...]:
    with runtime_of(Model()) as runtime:
        runtime.run("decode", {"x": X})
        return tuple(pw.PortableProgram.from_bytes(program.to_bytes()) for program in runtime.export())


@pytest.fixture
def no_trace(exported: object, monkeypatch: pytest.MonkeyPatch) -> None:
    def trace(*args: object, **kwargs: object) -> None:
        raise AssertionError("traced")

    monkeypatch.setattr(programs_module, "trace", trace)


@pytest.mark.usefixtures("no_trace")
def test_nothing_is_traced(exported: tuple[pw.PortableProgram, ...]) -> None:
    """One piece: one general compile; one more for the bucket that is specialised."""
    model = Model()
    with runtime_of(model, programs=exported) as runtime:
        with runtime.counters.expect(
            traces=0, programs_bound=1, pieces=1, compiles_general=1, compiles_specialized=1, fallbacks=0
        ):
            for size in (1, 2, 3):
                got = runtime.run("decode", {"x": X[:size]})
                torch.testing.assert_close(got, model(X[:size]))
        assert runtime.explain().as_dict()["traces"][0]["pieces"] == 1


@pytest.mark.usefixtures("no_trace")
def test_the_inputs_are_known_from_the_programs(exported: tuple[pw.PortableProgram, ...]) -> None:
    model = Model()
    with runtime_of(model, programs=exported, config=config(startup="eager")) as runtime:
        with runtime.counters.expect(compiles_general=0, compiles_specialized=0, entries=0):
            torch.testing.assert_close(runtime.run("prefill", {"x": X}), model(X))


def test_other_inputs_are_traced_and_counted(exported: tuple[pw.PortableProgram, ...]) -> None:
    model = Model()
    with runtime_of(model, programs=exported) as runtime:
        got = runtime.run("decode", {"x": X, "scale": 2.0})
        torch.testing.assert_close(got, model(X, 2.0))
        counters = runtime.counters.as_dict()
    assert (counters["traces"], counters["programs_bound"]) == (1, 0)
    assert "none of the given programs is for these inputs and kernels" in counters["fallbacks"]


def test_a_size_outside_of_the_program_is_traced() -> None:
    class Branching(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + (1 if x.shape[0] > 3 else 2)

    with runtime_of(Branching()) as runtime:
        runtime.run("decode", {"x": torch.ones(4, 4)})
        exported = runtime.export()
    model = Branching()
    with runtime_of(model, programs=exported) as runtime:
        for size, traces in ((4, 0), (2, 1)):
            x = torch.ones(size, 4)
            with runtime.counters.expect(traces=traces):
                torch.testing.assert_close(runtime.run("decode", {"x": x}), model(x))


def test_a_program_that_does_not_fit_is_refused_at_once(exported: tuple[pw.PortableProgram, ...]) -> None:
    model = Model()
    model.second = torch.nn.Linear(4, 5)
    with pytest.raises(pw.PortableError, match=r"second\.weight: expected torch\.float32\[4, 4\]"):
        runtime_of(model, programs=exported)


def test_evaluate_guards_needs_a_trace(exported: tuple[pw.PortableProgram, ...]) -> None:
    with pytest.raises(pw.ConfigError, match="programs: expected none under evaluate_guards"):
        runtime_of(Model(), programs=exported, config=config(evaluate_guards=True))


@pytest.mark.parametrize(
    ("programs", "got"), [([b"bytes"], "a list of bytes"), (b"bytes", "bytes"), ("path", "str"), ([1, "x"], "int, str")]
)
def test_what_is_no_program(programs: object, got: str) -> None:
    with pytest.raises(pw.InputError, match=f"expected a list of PortableProgram, got .*{got}"):
        runtime_of(Model(), programs=programs)


def test_nothing_to_export() -> None:
    with runtime_of(Model()) as runtime, pytest.raises(pw.InputError, match="nothing was traced yet"):
        runtime.export()


def test_the_dump_has_the_portable_form(tmp_path: Path) -> None:
    model = Model()
    with runtime_of(model) as runtime:
        runtime.run("decode", {"x": X})
        main = runtime.dump(tmp_path)
        stale = tmp_path / "piece_000000000000.py"
        stale.touch()
        assert runtime.dump(tmp_path) == main
        (exported,) = runtime.export()
    assert not stale.exists()
    content = (tmp_path / "program.safetensors").read_bytes()
    assert content == exported.to_bytes()
    assert "program.safetensors is its portable form" in main.read_text()
    assert "program.forward({'x': ...}, tensors, {'tokens': 4})" in main.read_text()


def test_a_dump_says_why_it_has_no_portable_form(tmp_path: Path) -> None:
    class Keyed(Model):
        def __init__(self) -> None:
            super().__init__()
            self.tables = {(1, 2): torch.ones(4)}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.tables[1, 2]

    with runtime_of(Keyed()) as runtime:
        runtime.run("decode", {"x": X})
        main = runtime.dump(tmp_path)
        assert runtime.counters["fallbacks"] == {"a program has no portable form": 1}
    assert "It has no portable form. portable: the model tensor" in main.read_text()
    assert not (tmp_path / "program.safetensors").exists()


@pytest.mark.parametrize("supported", [True, False])
def test_why_layers_were_not_reused_is_counted(supported: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a fallback; as a warning where torch is too old for it, which no change of the model mends."""

    class Block(torch.nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.linear, self.scale = torch.nn.Linear(4, 4), scale

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return self.linear(input) * self.scale

    monkeypatch.setattr("piecework.graphs.remarks.reuse_is_supported", lambda: supported)
    monkeypatch.setattr("piecework.graphs.trace.reuse_is_supported", lambda: supported)
    model = torch.nn.Sequential(*(Block(float(i)) for i in range(4)))
    with pw.Runtime(model, config(), dynamic_dims={"input": 0}) as runtime:
        runtime.run("decode", {"input": X})
        counters = runtime.counters.as_dict()
    assert counters["regions_reused"] == 0
    assert sum(counters["fallbacks"].values()) == supported
    assert any("2.13 and later can" in text for text in counters["warnings"]) is not supported
