"""Placeholders find the model's tensors on each call, however they were replaced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from piecework.errors import InputError

from .toys import Fn, assert_same, double, make_program, run, run_eager

X = {"x": torch.randn(3, 4)}


class Model(nn.Module):
    """Tensors in every place where a model may keep them; `tied` and `untied` share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.untied = nn.Linear(4, 4, bias=False)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.untied.weight
        self.layers = nn.ModuleList([nn.Linear(4, 4)])
        self.register_buffer("scale", torch.rand(4))
        self.kv = (torch.rand(4), torch.rand(4))
        self.table = {"rows": [torch.rand(4)]}
        self.plain = torch.rand(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.untied(x)
        out = torch.empty_like(h)
        double(h, out)
        h = self.layers[0](self.tied(out) * self.kv[0] + self.kv[1])
        return h * self.scale + self.table["rows"][0] * self.plain


def rebind_parameter(m: Model) -> None:
    m.layers[0].bias = nn.Parameter(torch.rand(4))


def rebind_buffer(m: Model) -> None:
    m.scale = torch.rand(4)


def rebind_plain_attribute(m: Model) -> None:
    m.plain = torch.rand(4)


def rebind_tuple(m: Model) -> None:
    m.kv = (torch.rand(4), torch.rand(4))


def rebind_inside_list(m: Model) -> None:
    m.table["rows"][0] = torch.rand(4)


def rebind_list(m: Model) -> None:
    m.table["rows"] = [torch.rand(4)]


def rebind_dict(m: Model) -> None:
    m.table = {"rows": [torch.rand(4)]}


def rebind_module(m: Model) -> None:
    m.layers[0] = nn.Linear(4, 4)


def rebind_both_tied(m: Model) -> None:
    m.untied.weight = m.tied.weight = nn.Parameter(torch.rand(4, 4))


def write_in_place(m: Model) -> None:
    with torch.no_grad():
        m.untied.weight.copy_(torch.rand(4, 4))


REBINDS = [
    rebind_parameter,
    rebind_buffer,
    rebind_plain_attribute,
    rebind_tuple,
    rebind_inside_list,
    rebind_list,
    rebind_dict,
    rebind_module,
    rebind_both_tied,
    write_in_place,
]


def test_every_replacement_is_followed_twice():
    model = Model()
    program = make_program(model, X)
    for rebind in REBINDS * 2:
        before = run_eager(model, X)
        rebind(model)
        expected = run_eager(model, X)
        assert not torch.equal(before, expected)
        assert_same(run(program, X), expected)


def wrong_shape(m: Model) -> None:
    m.layers[0].bias = nn.Parameter(torch.rand(1))


def wrong_dtype(m: Model) -> None:
    m.scale = m.scale.double()


def wrong_strides(m: Model) -> None:
    m.layers[0].weight = nn.Parameter(torch.rand(4, 4).t())


def wrong_device(m: Model) -> None:
    m.kv = (m.kv[0].to("meta"), m.kv[1])


def removed(m: Model) -> None:
    del m.layers[0].bias


def none_instead(m: Any) -> None:
    m.layers[0].bias = None


def shorter_list(m: Model) -> None:
    m.table["rows"].clear()


def no_tensor(m: Any) -> None:
    m.plain = 1.0


def untied(m: Model) -> None:
    m.tied.weight = nn.Parameter(torch.rand(4, 4))


def untied_the_other_way(m: Model) -> None:
    m.untied.weight = nn.Parameter(torch.rand(4, 4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (wrong_shape, r"'layers.0.bias': the program was traced with torch.float32\[4\].*got torch.float32\[1\]"),
        (wrong_dtype, r"'scale': .*float32.*got torch.float64"),
        (wrong_strides, r"'layers.0.weight': .*strides \[4, 1\].*strides \[1, 4\]"),
        (wrong_device, r"'kv.0': .*on cpu.*on meta"),
        (removed, "'layers.0.bias': .*now there is none"),
        (none_instead, "'layers.0.bias': .*now there is none"),
        (shorter_list, "'table.rows.0': .*now there is none"),
        (no_tensor, "'plain': .*now there is a float"),
        (untied, "'tied.weight': .*'untied.weight' too, and now they are two"),
        (untied_the_other_way, "'tied.weight': .*'untied.weight' too, and now they are two"),
    ],
)
def test_a_replacement_that_the_program_does_not_fit_is_refused(change, message):
    model = Model()
    program = make_program(model, X)
    state = dict(model.layers[0]._parameters), model.kv, list(model.table["rows"]), model.plain
    weight, scale = model.untied.weight, model.scale
    change(model)
    for _ in range(2):
        with pytest.raises(InputError, match=message):
            run(program, X)
    # Putting the old tensors back makes it right again.
    model.layers[0]._parameters.update(state[0])
    model.kv, model.table["rows"], model.plain = state[1:]
    model.untied.weight = model.tied.weight = weight
    model.scale = scale
    assert_same(run(program, X), run_eager(model, X))


def test_paths_are_the_dotted_names():
    paths = make_program(Model(), X).graph.traced.bindings.model_paths
    assert sorted(paths) == [
        "kv.0",
        "kv.1",
        "layers.0.bias",
        "layers.0.weight",
        "plain",
        "scale",
        "table.rows.0",
        "untied.weight",
    ]


def test_two_parameters_that_share_storage():
    whole = torch.rand(4, 4)
    model = Fn(lambda m, x: (x @ m.upper.t()) + (x @ m.lower.t()), upper=whole[:2], lower=whole[2:])
    program = make_program(model, X, compiler="aot_eager")
    assert_same(run(program, X), run_eager(model, X))
    whole.mul_(3)
    assert_same(run(program, X), run_eager(model, X))


def test_one_module_in_two_places():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = self.b = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x))

    model = Twice()
    program = make_program(model, X)
    assert_same(run(program, X), run_eager(model, X))
    model.b = nn.Linear(4, 4)
    with pytest.raises(InputError, match="now they are two"):
        run(program, X)
