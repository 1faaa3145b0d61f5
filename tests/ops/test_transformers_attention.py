"""transformers' models with packed attention: equal to their own eager attention, and what they may not ask for."""

from __future__ import annotations

import builtins
import types
from typing import Any

import pytest
import torch

from piecework.errors import InputError, NotAvailableError
from piecework.ops.context import use_context
from piecework.ops.packed_attention import PackedContext
from piecework.ops.transformers_attention import attention_forward, transformers_attention

transformers = pytest.importorskip("transformers", minversion="4.57")

SIZES: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def make_model(attention: str, config: Any) -> torch.nn.Module:
    """The same random weights whatever the attention."""
    torch.manual_seed(0)
    model: torch.nn.Module = transformers.AutoModel.from_config(config, attn_implementation=attention)
    return model.eval()


def llama() -> Any:
    return transformers.LlamaConfig(num_key_value_heads=2, use_cache=False, **SIZES)


def bert() -> Any:
    if int(transformers.__version__.partition(".")[0]) < 5:
        pytest.skip("BERT goes through the attention interface from transformers 5 on")
    return transformers.BertConfig(**SIZES)


@pytest.mark.parametrize("make_config", [bert, llama], ids=["bidirectional", "causal over grouped heads"])
def test_packed_sequences_equal_each_alone_under_eager_attention(make_config: Any) -> None:
    reference = make_model("eager", make_config())  # a config of its own: the attention is written into it
    model = make_model(transformers_attention(), make_config())
    assert model.config._attn_implementation == "piecework"
    sequences = [torch.randint(0, 60, (n,)) for n in (5, 1, 9)]
    context = PackedContext.build(seq_lens=[len(s) for s in sequences])
    with torch.inference_mode(), use_context(context):
        packed = model(input_ids=torch.cat(sequences)[None], position_ids=context.positions()[None]).last_hidden_state
    assert packed.shape == (1, 15, 32)
    for got, sequence in zip(packed[0].split([5, 1, 9]), sequences, strict=True):
        with torch.inference_mode():
            alone = reference(input_ids=sequence[None]).last_hidden_state[0]
        torch.testing.assert_close(got, alone, rtol=0, atol=1e-5)


def test_an_attention_mask_is_not_looked_at_and_the_context_says_what_is_padding() -> None:
    model = make_model(transformers_attention(), llama())
    ids = torch.randint(0, 60, (1, 6))
    mask = torch.tensor([[1, 1, 1, 1, 0, 0]])
    with torch.inference_mode():
        with use_context(PackedContext.build(seq_lens=[4])):
            padded = model(input_ids=ids, attention_mask=mask).last_hidden_state
            alone = model(input_ids=ids[:, :4]).last_hidden_state
    torch.testing.assert_close(padded[:, :4], alone, rtol=0, atol=1e-6)


def test_calling_it_again_changes_nothing() -> None:
    assert transformers_attention() == transformers_attention() == "piecework"
    assert transformers.AttentionInterface()["piecework"] is attention_forward
    assert "piecework" not in transformers.AttentionMaskInterface()


def test_without_transformers_the_error_has_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def not_installed(name: str, *args: Any, **kwargs: Any) -> types.ModuleType:
        if name == "transformers":
            raise ModuleNotFoundError("No module named 'transformers'", name=name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", not_installed)
    with pytest.raises(NotAvailableError, match=r"No module named 'transformers'; run: pip install 'piecework\[hf\]'"):
        transformers_attention()


def heads(batch: int = 1, num_tokens: int = 3) -> torch.Tensor:
    return torch.randn(batch, 2, num_tokens, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sliding_window": 4}, "Linear asks for sliding_window, which it does not compute"),
        ({"softcap": 30.0, "s_aux": torch.ones(2)}, "asks for softcap, s_aux,"),
        ({"dropout": 0.1}, r"asks for dropout \(call model.eval\(\)\)"),
        ({"attention_mask": torch.zeros(1, 1, 3, 3)}, "asks for a mask of its own"),
        ({"query": heads(2), "key": heads(2), "value": heads(2)}, "got a batch of 2; concatenate the sequences"),
        ({"key": heads(1, 5), "value": heads(1, 5)}, "each of the 3 query tokens; .* use_cache=False"),
    ],
)
def test_what_it_does_not_compute_is_refused(arguments: dict[str, Any], message: str) -> None:
    plain = {"query": heads(), "key": heads(), "value": heads(), "attention_mask": None, "sliding_window": None}
    with use_context(PackedContext.build(seq_lens=[3])):
        attention_forward(torch.nn.Linear(1, 1), **plain)
        with pytest.raises(InputError, match=message):
            attention_forward(torch.nn.Linear(1, 1), **plain | arguments)


def test_causal_is_the_modules_unless_the_call_says_otherwise_and_the_scale_has_a_default() -> None:
    module = torch.nn.Linear(1, 1)
    q, k, v = heads(), heads(), heads()
    with use_context(PackedContext.build(seq_lens=[3])):
        for of_module, of_call, causal in ((None, None, True), (False, None, False), (False, True, True)):
            if of_module is not None:
                module.is_causal = of_module  # type: ignore[assignment]
            out, weights = attention_forward(module, q, k, v, None, is_causal=of_call)
            expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
            torch.testing.assert_close(out, expected.transpose(1, 2))
            assert weights is None
