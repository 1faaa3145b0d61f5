"""Loading weights: the right rows in the right places, and every way in which a file can be wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from piecework.errors import ModelError
from piecework.runtime.engine.config import ModelConfig
from piecework.runtime.engine.models import ARCHITECTURES, build_model
from piecework.runtime.engine.models.decoder import DecoderForCausalLM
from piecework.runtime.engine.weights import load_weights

CPU = torch.device("cpu")


def build(directory: Path) -> DecoderForCausalLM:
    return build_model(ModelConfig.from_directory(directory, frozenset(ARCHITECTURES)))


def change_weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Rewrites model.safetensors after `change` has altered its tensors in place."""
    path = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize(
    "variant", ["grouped heads", "tied embeddings", "biases", "sharded", "bfloat16", "qwen2", "qwen3"]
)
def test_every_value_arrives(checkpoint_variant: Callable[[str], Path], variant: str) -> None:
    directory = checkpoint_variant(variant)
    shards = sorted(directory.glob("*.safetensors"))
    assert (len(shards) > 1) == (variant == "sharded")
    stored = {name: tensor for path in shards for name, tensor in load_file(path).items()}
    model = build(directory)
    load_weights(model, directory, device=CPU)
    targets = model.checkpoint_tensors()
    assert set(targets) == set(stored)
    for name, tensor in stored.items():
        assert targets[name].dtype == tensor.dtype, name
        assert torch.equal(targets[name], tensor), name
    # The targets are views of the parameters, and every element of every parameter belongs to one.
    assert sum(t.numel() for t in targets.values()) == sum(p.numel() for p in model.parameters())
    storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert {t.untyped_storage().data_ptr() for t in targets.values()} == storages
    assert not any(p.requires_grad for p in model.parameters())


def test_the_dtype_can_be_chosen(checkpoint: Path) -> None:
    model = build(checkpoint)
    load_weights(model, checkpoint, device=CPU, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.model.inv_freq.dtype == torch.float32
    stored = load_file(checkpoint / "model.safetensors")["model.norm.weight"]
    assert torch.equal(model.model.norm.weight, stored.bfloat16())


def test_without_a_dtype_in_the_config_the_stored_one_counts(own_checkpoint: Path) -> None:
    config = json.loads((own_checkpoint / "config.json").read_text())
    config.pop("dtype", config.pop("torch_dtype", None))
    (own_checkpoint / "config.json").write_text(json.dumps(config))
    change_weights(own_checkpoint, lambda tensors: tensors.update({n: t.half() for n, t in tensors.items()}))
    model = build(own_checkpoint)
    load_weights(model, own_checkpoint, device=CPU)
    assert {p.dtype for p in model.parameters()} == {torch.float16}


@pytest.mark.parametrize("asked", [True, False], ids=["the caller says", "config.json says"])
def test_a_float16_file_becomes_a_float32_model(own_checkpoint: Path, asked: bool) -> None:
    change_weights(own_checkpoint, lambda tensors: tensors.update({n: t.half() for n, t in tensors.items()}))
    config = json.loads((own_checkpoint / "config.json").read_text()) | {"dtype": "float16" if asked else "float32"}
    (own_checkpoint / "config.json").write_text(json.dumps(config))
    model = build(own_checkpoint)
    load_weights(model, own_checkpoint, device=CPU, dtype=torch.float32 if asked else None)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    stored = load_file(own_checkpoint / "model.safetensors")
    for name, tensor in model.checkpoint_tensors().items():
        assert stored[name].dtype == torch.float16
        assert torch.equal(tensor, stored[name].float()), name


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=["F8_E4M3", "I8"])
def test_weights_that_need_a_scale_are_refused(
    own_checkpoint: Path, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    change_weights(own_checkpoint, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    stored = request.node.callspec.id
    with pytest.raises(ModelError, match=f"1 dtype: {name} .stored as {stored}, expected one of F64, F32, BF16, F16"):
        load_weights(build(own_checkpoint), own_checkpoint, device=CPU)


@pytest.mark.parametrize("rows", [512, 100, 1])
@pytest.mark.parametrize("as_float64", [False, True])
def test_a_copy_of_tied_embeddings_is_compared(
    checkpoint_variant: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows: int,
    as_float64: bool,
) -> None:
    monkeypatch.setattr("piecework.runtime.engine.weights._COMPARED_ROWS", rows)
    source = checkpoint_variant("tied embeddings")
    tensors = load_file(source / "model.safetensors")
    assert "lm_head.weight" not in tensors
    copy = tensors["model.embed_tokens.weight"].clone()
    tensors["lm_head.weight"] = copy.double() if as_float64 else copy
    save_file(tensors, tmp_path / "model.safetensors")
    load_weights(build(source), tmp_path, device=CPU)
    tensors["lm_head.weight"][-1, -1] += 1e-3
    save_file(tensors, tmp_path / "model.safetensors")
    model = build(source)
    with pytest.raises(ModelError, match="lm_head.weight: expected a copy of model.embed_tokens.weight, as tie_word"):
        load_weights(model, tmp_path, device=CPU)
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize(
    "spoil",
    [lambda t: t[:-1].clone(), lambda t: t.flatten().clone(), lambda t: t.to(torch.int8)],
    ids=["rows", "dims", "dtype"],
)
def test_a_copy_of_tied_embeddings_that_is_none(
    checkpoint_variant: Callable[[str], Path], tmp_path: Path, spoil: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    source = checkpoint_variant("tied embeddings")
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = spoil(tensors["model.embed_tokens.weight"])
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="lm_head.weight: expected a copy of model.embed_tokens.weight"):
        load_weights(build(source), tmp_path, device=CPU)


def test_tensors_without_a_use_are_ignored(checkpoint_variant: Callable[[str], Path], tmp_path: Path) -> None:
    source = checkpoint_variant("tied embeddings")
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    save_file(tensors, tmp_path / "model.safetensors")
    load_weights(build(source), tmp_path, device=CPU)


def test_everything_that_does_not_fit_is_listed_in_one_error(own_checkpoint: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        del tensors["lm_head.weight"]
        tensors["model.layers.3.input_layernorm.weight"] = torch.zeros(64)
        tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(64, 64)
        tensors["model.norm.weight"] = torch.zeros(64, dtype=torch.int8)

    change_weights(own_checkpoint, spoil)
    model = build(own_checkpoint)
    with pytest.raises(ModelError) as caught:
        load_weights(model, own_checkpoint, device=CPU)
    lines = [line.strip() for line in str(caught.value).splitlines()]
    assert lines == [
        f"{own_checkpoint}: the weights do not fit the LlamaForCausalLM of config.json; use the files of one "
        f"checkpoint:",
        "2 missing: lm_head.weight, model.layers.1.mlp.up_proj.weight",
        "1 not of this model: model.layers.3.input_layernorm.weight",
        "1 of another shape: model.layers.0.self_attn.k_proj.weight (expected [32, 64], got [64, 64])",
        "1 dtype: model.norm.weight (stored as I8, expected one of F64, F32, BF16, F16)",
    ]
    # Nothing half-done: no memory was taken.
    assert all(p.is_meta for p in model.parameters())


def test_a_long_list_is_cut(own_checkpoint: Path) -> None:
    change_weights(own_checkpoint, lambda tensors: [tensors.pop(n) for n in list(tensors) if "layers" in n])
    with pytest.raises(ModelError, match=r"27 missing: .*, model\S+ and 19 more$"):
        load_weights(build(own_checkpoint), own_checkpoint, device=CPU)


@pytest.mark.parametrize("keep", [0, 4, 100, -1], ids=["empty", "no header", "part of the header", "last byte gone"])
def test_a_truncated_file_is_named(own_checkpoint: Path, keep: int) -> None:
    path = own_checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    model = build(own_checkpoint)
    with pytest.raises(ModelError, match="not a whole safetensors file, .* may be truncated, so download it") as caught:
        load_weights(model, own_checkpoint, device=CPU)
    assert str(path) in str(caught.value)
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("content", [b"PK\x03\x04" + bytes(100), b"<!DOCTYPE html><html>Not found</html>" * 9])
def test_a_foreign_file_is_named(own_checkpoint: Path, content: bytes) -> None:
    (own_checkpoint / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors: not a whole safetensors file"):
        load_weights(build(own_checkpoint), own_checkpoint, device=CPU)


@pytest.mark.parametrize(
    ("others", "message"),
    [((), "there are no weights in it"), (("pytorch_model.bin",), "it has pytorch_model.bin, which are not read")],
)
def test_no_weights(own_checkpoint: Path, others: tuple[str, ...], message: str) -> None:
    (own_checkpoint / "model.safetensors").unlink()
    for name in others:
        (own_checkpoint / name).touch()
    with pytest.raises(ModelError, match=message):
        load_weights(build(own_checkpoint), own_checkpoint, device=CPU)


def test_missing_shards_are_listed(own_shards: Path) -> None:
    shards = sorted(own_shards.glob("*.safetensors"))
    for path in shards[1:]:
        path.unlink()
    with pytest.raises(ModelError, match=f"{len(shards) - 1} of {len(shards)} files are missing: {shards[1].name}"):
        load_weights(build(own_shards), own_shards, device=CPU)


def test_a_truncated_shard_is_named(own_shards: Path) -> None:
    path = sorted(own_shards.glob("*.safetensors"))[-1]
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ModelError, match=f"{path.name}: not a whole safetensors file"):
        load_weights(build(own_shards), own_shards, device=CPU)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{}", "weight_map: expected an object"),
        ('{"weight_map": {"a": 1}}', "weight_map: expected an object of tensor name to file name"),
        ('{"weight_map": {"a": "../x.safetensors"}}', r"expected names of files beside it, got \.\./x"),
        ("not json", "not readable as JSON"),
    ],
)
def test_a_malformed_index(own_shards: Path, index: str, message: str) -> None:
    (own_shards / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=message):
        load_weights(build(own_shards), own_shards, device=CPU)
