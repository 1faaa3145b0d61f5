"""The architectures that the engine can run."""

from __future__ import annotations

from ..config import ModelConfig
from .llama import LlamaForCausalLM

ARCHITECTURES: dict[str, type[LlamaForCausalLM]] = {"LlamaForCausalLM": LlamaForCausalLM}
"""By the name that config.json gives under `architectures`."""


def build_model(config: ModelConfig) -> LlamaForCausalLM:
    """The model of `config` on the meta device: shapes and names, no memory, no values."""
    return ARCHITECTURES[config.architecture](config)
