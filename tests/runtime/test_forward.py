"""What Runtime says when it is given something else than it takes, or names that forward does not have."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import piecework as pw
from piecework.runtime.forward import ForwardParameters


class Model(torch.nn.Module):
    def forward(self, ids: torch.Tensor, bias: torch.Tensor, gain: float = 1.0) -> torch.Tensor:
        return ids * gain + bias


class Open(torch.nn.Module):
    def forward(self, *args: Any, **inputs: torch.Tensor) -> torch.Tensor:
        return inputs["ids"] * 2


DIMS = {"ids": 0, "bias": 0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": Model}, r"model: expected an instance of torch.nn.Module, got the class Model; write Model\(...\)"),
        ({"model": torch.relu}, "model: expected an instance of torch.nn.Module, got builtin_function_or_method"),
        ({"dynamic_dims": None}, r"dynamic_dims: expected a mapping from input names, got NoneType; write {name:"),
        ({"dynamic_dims": ["ids"]}, "dynamic_dims: expected a mapping from input names, got list"),
        ({"dynamic_dims": {0: {0: "tokens"}}}, "dynamic_dims: expected a mapping .*, got dict with the keys 0"),
        ({"dynamic_dims": {"idz": 0}}, "dynamic_dims: .* Model.forward, which are ids, bias, gain; got 'idz'"),
        ({"pad": 0}, "pad: expected a mapping from input names, got int"),
        ({"pad": {"other": 0}}, "pad: .* Model.forward, which are ids, bias, gain; got 'other'"),
        ({"example_inputs": torch.ones(2)}, "example_inputs: expected a mapping from input names, got Tensor"),
        ({"example_inputs": {"idz": torch.ones(2)}}, "example_inputs: .* got 'idz'; correct the name, or give forward"),
    ],
)
def test_the_constructor_names_what_does_not_fit(change: dict[str, Any], message: str) -> None:
    arguments = {"model": Model(), "dynamic_dims": DIMS} | change
    with pytest.raises(pw.InputError, match=message):
        pw.Runtime(arguments.pop("model"), **arguments)


@pytest.mark.parametrize(
    ("config", "got"), [({"prefill": {}}, "dict"), (pw.PhaseConfig(), "PhaseConfig"), (pw.GraphConfig, "the class")]
)
def test_a_config_of_another_kind_is_refused(config: Any, got: str) -> None:
    with pytest.raises(pw.ConfigError, match=f"config: expected a GraphConfig, got {got}"):
        pw.Runtime(Model(), config, dynamic_dims=DIMS)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (torch.ones(2), "inputs: expected a mapping from input names, got Tensor"),
        ([torch.ones(2)], "inputs: expected a mapping from input names, got list"),
        ({"ids": torch.ones(2), "bias": torch.ones(2), "gian": 2.0}, "inputs: .* ids, bias, gain; got 'gian'"),
        ({"ids": torch.ones(2)}, "inputs: Model.forward also needs bias, got ids; pass what is missing"),
    ],
)
def test_a_step_names_what_does_not_fit(inputs: Any, message: str, compiler: str) -> None:
    config = pw.GraphConfig(decode=pw.PhaseConfig(backend="disabled", compiler=compiler))
    runtime = pw.Runtime(Model(), config, dynamic_dims=DIMS)
    with pytest.raises(pw.InputError, match=message):
        runtime.run("decode", inputs)
    assert runtime.counters["traces"] == 0
    right = {"ids": torch.ones(2), "bias": torch.ones(2)}
    assert runtime.run("decode", right).tolist() == [2, 2]


def test_warm_up_names_what_is_missing_too() -> None:
    config = pw.GraphConfig(decode=pw.PhaseConfig(backend="disabled", compiler="aot_eager"))
    runtime = pw.Runtime(Model(), config, dynamic_dims=DIMS, example_inputs={"ids": torch.ones(2)})
    with pytest.raises(pw.InputError, match="Model.forward also needs bias"):
        runtime.warm_up()


def test_a_forward_with_keywords_takes_any_name() -> None:
    runtime = pw.Runtime(Open(), dynamic_dims={"ids": 0})
    assert runtime.run("decode", {"ids": torch.ones(2), "more": torch.ones(1)}).tolist() == [2, 2]


def test_a_signature_that_cannot_be_read_is_not_judged() -> None:
    unknown = ForwardParameters.of("forward", min)  # a builtin without a signature
    assert (unknown.names, unknown.open) == ((), True)
    unknown.check_inputs(["anything"])
    none = ForwardParameters.of("forward", lambda *xs: xs)
    with pytest.raises(pw.InputError, match="which are none that can be passed by name; got 'x'"):
        none.check_names("dynamic_dims", ["x"])
