"""Each family against transformers: log-probabilities in float32 through a paged cache, whole, in chunks and token by
token; and what a trace makes of a decoder."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from piecework.errors import ConfigError
from piecework.graphs.region import reuse_is_supported
from piecework.ops.attention import AttentionContext
from piecework.ops.context import use_context
from piecework.phases import GraphConfig, PhaseConfig
from piecework.runtime.engine.config import ModelConfig
from piecework.runtime.engine.models import ARCHITECTURES, build_model
from piecework.runtime.engine.models.decoder import Attention, DecoderForCausalLM, DecoderModel
from piecework.runtime.engine.toy_checkpoint import make_checkpoint
from piecework.runtime.engine.weights import load_weights
from piecework.runtime.runtime import Runtime

CPU = torch.device("cpu")
BLOCK_SIZE = 4
PROMPT_LENS = (23, 9, 1)
NUM_DECODED = 6
WINDOW = 5

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, all biases, key heads apart": {"attention_bias": True, "mlp_bias": True, "num_kv_heads": 4},
    "llama, llama3 rope": {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
    "llama, linear rope": {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "llama, yarn rope": {"rope_scaling": YARN},
    "llama, tied": {"tie_word_embeddings": True},
    "mistral, window": {"family": "mistral", "sliding_window": WINDOW, "num_layers": 3},
    "mistral, window of one": {"family": "mistral", "sliding_window": 1},
    "mistral, window beyond the text": {"family": "mistral", "sliding_window": 100},
    "mistral, no window": {"family": "mistral"},
    "qwen2, tied": {"family": "qwen2", "tie_word_embeddings": True},
    "qwen2, windows differ": {
        "family": "qwen2",
        "sliding_window": WINDOW,
        "max_window_layers": 1,
        "num_layers": 3,
    },
    "qwen3": {"family": "qwen3", "head_size": 24},
    "qwen3, biases, tied, window": {
        "family": "qwen3",
        "head_size": 24,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "sliding_window": WINDOW,
    },
}


@pytest.fixture(scope="module")
def family_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function from a key of FAMILIES to a directory that must not be changed."""

    @functools.cache
    def make(name: str) -> Path:
        return make_checkpoint(tmp_path_factory.mktemp("family"), **FAMILIES[name])

    return make


def load(directory: Path, *, num_blocks: int = 32, dtype: torch.dtype = torch.float32) -> DecoderForCausalLM:
    """The model with its weights and caches; what a cache slot held before a token was written must not matter."""
    model = build_model(ModelConfig.from_directory(directory, frozenset(ARCHITECTURES)))
    load_weights(model, directory, device=CPU, dtype=dtype)
    config = model.config
    shape = (num_blocks, BLOCK_SIZE, config.num_kv_heads, config.head_size)
    with torch.inference_mode():
        for layer in model.modules():
            if isinstance(layer, Attention):
                layer.k_cache = torch.full(shape, float("nan"), dtype=dtype)
                layer.v_cache = torch.full(shape, float("nan"), dtype=dtype)
    return model


@dataclasses.dataclass
class Text:
    """One request: its tokens, how many of them have been run, its blocks and its log-probabilities so far."""

    ids: list[int]
    blocks: list[int]
    num_run: int = 0
    logprobs: list[torch.Tensor] = dataclasses.field(default_factory=list)


def texts(vocab_size: int) -> list[Text]:
    """Prompts of PROMPT_LENS and what follows them, in blocks that are not in order."""
    generator = torch.Generator().manual_seed(5)
    free = torch.randperm(32, generator=generator).tolist()
    made = []
    for prompt_len in PROMPT_LENS:
        ids = torch.randint(vocab_size, (prompt_len + NUM_DECODED,), generator=generator).tolist()
        made.append(Text(ids=ids, blocks=[free.pop() for _ in range(-(-len(ids) // BLOCK_SIZE))]))
    return made


Forward = Callable[[dict[str, torch.Tensor], AttentionContext], torch.Tensor]
"""The decoder for one step: from its inputs and its context to the hidden states."""


def eager_forward(model: DecoderForCausalLM) -> Forward:
    def forward(inputs: dict[str, torch.Tensor], context: AttentionContext) -> torch.Tensor:
        with use_context(context):
            return model.model(**inputs)

    return forward


def step(model: DecoderForCausalLM, forward: Forward, batch: Sequence[Text], num_new: Sequence[int]) -> None:
    """Runs the next `num_new` tokens of each text together, and keeps the log-probabilities after each of them."""
    new = [text.ids[text.num_run : text.num_run + n] for text, n in zip(batch, num_new, strict=True)]
    context = AttentionContext.build(
        query_lens=num_new,
        seq_lens=[text.num_run + n for text, n in zip(batch, num_new, strict=True)],
        block_tables=[text.blocks for text in batch],
        block_size=BLOCK_SIZE,
    )
    positions = [text.num_run + i for text, n in zip(batch, num_new, strict=True) for i in range(n)]
    inputs = {"input_ids": torch.tensor([i for ids in new for i in ids]), "positions": torch.tensor(positions)}
    with torch.inference_mode():
        logprobs = model.logits(forward(inputs, context)).log_softmax(-1)
    for text, rows, n in zip(batch, logprobs.split(list(num_new)), num_new, strict=True):
        text.logprobs.append(rows)
        text.num_run += n


def run_whole(model: DecoderForCausalLM, forward: Forward, batch: Sequence[Text]) -> None:
    """Every prompt in one step, then every other token in a step of its own."""
    step(model, forward, batch, PROMPT_LENS)
    for _ in range(NUM_DECODED):
        step(model, forward, batch, [1] * len(batch))


def run_in_chunks(model: DecoderForCausalLM, forward: Forward, batch: Sequence[Text]) -> None:
    """The long prompt in two chunks; the second beside a decode and another prompt."""
    long, middle, short = batch
    step(model, forward, [short, long], [1, 14])
    step(model, forward, [short, middle, long], [1, PROMPT_LENS[1], PROMPT_LENS[0] - 14])
    step(model, forward, [long, middle], [2, 1])
    for _ in range(NUM_DECODED - 2):
        step(model, forward, [long, middle, short], [1, 1, 1])
    step(model, forward, [short, middle], [1, 1])


@functools.cache
def reference_model(directory: Path) -> Any:
    kind = getattr(transformers, json.loads((directory / "config.json").read_text())["architectures"][0])
    return kind.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


@functools.cache
def reference(directory: Path, ids: tuple[int, ...]) -> torch.Tensor:
    """[len(ids), vocab_size]: transformers' log-probabilities after each token, without a cache."""
    with torch.inference_mode():
        logits: torch.Tensor = reference_model(directory)(torch.tensor([ids]), use_cache=False).logits[0]
    return logits.log_softmax(-1)


def assert_equal_to_reference(directory: Path, batch: Sequence[Text]) -> None:
    for text in batch:
        assert text.num_run == len(text.ids)
        expected = reference(directory, tuple(text.ids))
        torch.testing.assert_close(torch.cat(text.logprobs), expected, rtol=0, atol=1e-4)


# ---- the same numbers as transformers


@pytest.mark.parametrize("run", [run_whole, run_in_chunks])
@pytest.mark.parametrize("name", FAMILIES)
def test_logprobs_equal_transformers(family_checkpoint: Callable[[str], Path], name: str, run: Any) -> None:
    directory = family_checkpoint(name)
    model = load(directory)
    batch = texts(model.config.vocab_size)
    run(model, eager_forward(model), batch)
    assert_equal_to_reference(directory, batch)


@pytest.mark.parametrize("name", ["llama", "mistral, window", "qwen2, windows differ", "qwen3"])
def test_no_tensor_could_be_lost_unseen(family_checkpoint: Callable[[str], Path], name: str) -> None:
    """The comparison above would fail if any tensor of the checkpoint had another value."""
    directory = family_checkpoint(name)
    model = load(directory)
    expected = reference(directory, tuple(texts(model.config.vocab_size)[0].ids))
    for tensor_name, tensor in model.checkpoint_tensors().items():
        kept = tensor.clone()
        tensor.zero_()
        batch = texts(model.config.vocab_size)
        step(model, eager_forward(model), batch[:1], [len(batch[0].ids)])
        assert (batch[0].logprobs[0] - expected).abs().max() > 1e-3, tensor_name
        tensor.copy_(kept)


def test_the_window_is_what_makes_the_difference(family_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    directory = Path(shutil.copytree(family_checkpoint("mistral, window"), tmp_path / "model"))
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sliding_window": None}))
    model = load(directory)
    assert model.config.window_sizes == (0, 0, 0)
    batch = texts(model.config.vocab_size)
    run_whole(model, eager_forward(model), batch)
    found = torch.cat(batch[0].logprobs)
    with_window = reference(family_checkpoint("mistral, window"), tuple(batch[0].ids))
    torch.testing.assert_close(found[:WINDOW], with_window[:WINDOW], rtol=0, atol=1e-4)
    assert ((found - with_window).abs().amax(-1)[WINDOW:] > 1e-2).all()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_half_precision_stays_near(tmp_path: Path, family: str) -> None:
    directory = make_checkpoint(tmp_path / "model", family=family, dtype="bfloat16", initializer_range=0.05)
    model = load(directory, dtype=torch.bfloat16)
    batch = texts(model.config.vocab_size)
    run_whole(model, eager_forward(model), batch)
    expected = reference(directory, tuple(batch[0].ids))
    found = torch.cat(batch[0].logprobs)
    assert found.dtype == torch.float32
    assert float((found - expected).norm() / expected.norm()) < 1e-2


# ---- what a trace makes of it


def runtime_forward(model: DecoderForCausalLM, runtime: Runtime) -> Forward:
    def forward(inputs: dict[str, torch.Tensor], context: AttentionContext) -> torch.Tensor:
        phase = "decode" if set(context.query_lens_host) == {1} else "prefill"
        hidden: torch.Tensor = runtime.run(phase, inputs, context=context)
        return hidden

    return forward


@pytest.mark.parametrize(
    ("changes", "num_windows"),
    [
        ({}, 1),
        ({"family": "mistral", "sliding_window": WINDOW}, 1),
        ({"family": "qwen2", "sliding_window": WINDOW, "max_window_layers": 3}, 2),
        ({"family": "qwen3", "tie_word_embeddings": True}, 1),
    ],
    ids=["llama", "mistral", "qwen2", "qwen3"],
)
def test_layers_share_their_trace_and_their_pieces(tmp_path: Path, changes: dict[str, Any], num_windows: int) -> None:
    num_layers = 6
    directory = make_checkpoint(tmp_path / "model", num_layers=num_layers, **changes)
    model = load(directory)
    config = GraphConfig(
        prefill=PhaseConfig(compiler="aot_eager", buckets=(16, 32, 64)),
        decode=PhaseConfig(compiler="aot_eager", buckets=(1, 2, 4)),
    )
    tokens = {"input_ids": {0: "tokens"}, "positions": {0: "tokens"}}
    with Runtime(model.model, config, dynamic_dims=tokens) as runtime:
        batch = texts(model.config.vocab_size)
        run_in_chunks(model, runtime_forward(model, runtime), batch)
        assert_equal_to_reference(directory, batch)
        counters = runtime.counters.as_dict()
    # Before the first attention, between two, after the last; a first layer of another kind would be a fourth.
    assert (counters["traces"], counters["pieces"], counters["distinct_pieces"]) == (1, num_layers + 1, 3)
    # A trace for each window, and the other layers are stamped out.
    assert counters["regions_reused"] == (num_layers - num_windows if reuse_is_supported() else 0)
    assert counters["fallbacks"] == {}


def test_layers_differ_in_nothing_but_their_tensors(family_checkpoint: Callable[[str], Path]) -> None:
    def plain(module: torch.nn.Module) -> dict[str, Any]:
        hidden = {"_parameters", "_buffers", "_modules"}
        return {name: value for name, value in vars(module).items() if name not in hidden}

    model = load(family_checkpoint("qwen2, windows differ"))
    first, *others = model.model.layers
    for layer in others:
        for (name, ours), (other_name, theirs) in zip(first.named_modules(), layer.named_modules(), strict=True):
            assert name == other_name
            differing = {key for key, value in plain(ours).items() if plain(theirs)[key] != value}
            assert differing == ({"window_size"} if name == "self_attn" else set())


# ---- the surface that the engine uses


def test_every_architecture_has_a_model_and_the_caches_are_buffers(family_checkpoint: Callable[[str], Path]) -> None:
    assert sorted(ARCHITECTURES) == [f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3")]
    model = load(family_checkpoint("qwen3"))
    assert isinstance(model.model, DecoderModel)
    assert model.config.architecture == "Qwen3ForCausalLM"
    caches = [name for name, _ in model.model.named_buffers() if name.endswith(("k_cache", "v_cache"))]
    assert len(caches) == 2 * model.config.num_layers
    assert not any("cache" in name or "inv_freq" in name for name in model.state_dict())


def test_a_built_model_takes_no_memory(family_checkpoint: Callable[[str], Path]) -> None:
    for name in FAMILIES:
        model = build_model(ModelConfig.from_directory(family_checkpoint(name), frozenset(ARCHITECTURES)))
        assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"family": "gemma"}, "family: expected one of llama, mistral, qwen2, qwen3, got 'gemma'"),
        ({"family": "mistral", "mlp_bias": True}, "mlp_bias: expected none, as mistral .* only llama has it"),
        ({"family": "qwen2", "attention_bias": True}, "attention_bias: expected none, .* only llama, qwen3 has it"),
        ({"sliding_window": 4}, "sliding_window: expected none, as llama has no such key, got 4"),
        ({"family": "mistral", "max_window_layers": 1}, "max_window_layers: expected none, as mistral has no such key"),
    ],
)
def test_a_toy_that_cannot_be_made_is_refused(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_checkpoint(tmp_path / "model", **arguments)
    assert not (tmp_path / "model").exists()
