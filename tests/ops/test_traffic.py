"""The traffic model of fused add + RMSNorm: its numbers, how they scale, and that torch does what it counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from piecework.ops import norm
from piecework.ops.norm import fused_add_rms_norm
from piecework.ops.traffic import (
    fused_bytes,
    num_call_sites,
    ratio,
    unfused_add_rms_norm,
    unfused_bytes,
    unfused_operations,
)
from piecework.runtime.engine.config import ModelConfig
from piecework.runtime.engine.models import build_model
from piecework.runtime.engine.rope import Rope

BF16 = torch.bfloat16


class Seen(TorchDispatchMode):
    """(name, bytes read, bytes written) of each operation that makes a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[str, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        # Neither a view nor a question, such as how many entries there are.
        if isinstance(out, torch.Tensor) and func._schema.returns[0].alias_info is None:
            name = func._schema.name.removeprefix("aten::")
            self.operations.append((name, sum(each.nbytes for each in inputs), out.nbytes))
        return out


def test_the_numbers_of_one_token_in_bf16() -> None:
    operations = unfused_operations(1, 4096, BF16)
    assert fused_bytes(1, 4096, BF16) == 40_960
    assert len(operations) == 11
    assert sum(each.reads + each.writes for each in operations) == unfused_bytes(1, 4096, BF16) == 253_976
    assert num_call_sites(32) == 64
    assert ratio(1, 4096, BF16) == 253_976 / 40_960


@pytest.mark.parametrize("variance_size", [None, 1, 24])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 4096), (3, 24), (0, 24)])
def test_torch_does_what_is_counted(num_tokens: int, size: int, dtype: torch.dtype, variance_size: int | None) -> None:
    x, residual = torch.randn(2, num_tokens, size).to(dtype).unbind(0)
    weight = torch.rand(size).to(dtype)
    with Seen() as seen:
        got = unfused_add_rms_norm(x, residual, weight, 1e-5, variance_size)
    counted = unfused_operations(num_tokens, size, dtype, variance_size)
    assert seen.operations == [(each.name, each.reads, each.writes) for each in counted]
    assert len(counted) == (11 if dtype.itemsize == 2 else 7)
    tolerance = {2: 2e-2, 4: 1e-5, 8: 1e-12}[dtype.itemsize]
    expected = fused_add_rms_norm(x, residual, weight, 1e-5, variance_size)
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def test_a_fused_call_moves_its_arguments_and_results() -> None:
    for num_tokens, size, dtype in ((1, 4096, BF16), (7, 24, torch.float32), (0, 24, BF16)):
        x, residual, weight = torch.ones(num_tokens, size), torch.ones(num_tokens, size), torch.ones(size)
        arguments = [each.to(dtype) for each in (x, residual, weight)]
        results = fused_add_rms_norm(*arguments, 1e-5)
        assert fused_bytes(num_tokens, size, dtype) == sum(each.nbytes for each in (*arguments, *results))


def test_tokens_scale_all_but_the_weight() -> None:
    one, many = unfused_operations(1, 4096, BF16), unfused_operations(512, 4096, BF16)
    weight = 4096 * 2
    assert [each.reads for each in many[:-1]] == [512 * each.reads for each in one[:-1]]
    assert [each.writes for each in many] == [512 * each.writes for each in one]
    assert many[-1].reads == 512 * (one[-1].reads - weight) + weight
    assert fused_bytes(512, 4096, BF16) == 512 * (40_960 - weight) + weight


def test_variance_of_some_entries_squares_fewer() -> None:
    less = unfused_bytes(2, 4096, BF16) - unfused_bytes(2, 4096, BF16, variance_size=1024)
    assert less == 2 * 3 * 3072 * 4  # the square is read and written, and read again by its mean


def test_a_decoder_calls_it_twice_a_layer_and_once_behind_them(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_heads=2,
        num_kv_heads=1,
        head_size=8,
        num_layers=3,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope=Rope(theta=1e4),
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        window_sizes=(0, 0, 0),
        tie_word_embeddings=True,
        dtype=None,
        eos_token_ids=frozenset(),
    )
    model = build_model(config)
    model.allocate(torch.device("cpu"), torch.float32)
    calls: list[int] = []

    def counted(*arguments: Any) -> Any:
        calls.append(1)
        return fused_add_rms_norm(*arguments)

    monkeypatch.setattr(norm, "fused_add_rms_norm", counted)
    for layer in model.model.layers:
        monkeypatch.setattr(type(layer.self_attn), "forward", lambda self, x, *others: x)
    with torch.inference_mode():
        for parameter in model.parameters():
            parameter.normal_()
        model.model(torch.arange(4), torch.arange(4))
    assert len(calls) == num_call_sites(3) + 1 == 7
