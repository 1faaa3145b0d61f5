"""The architectures that the engine can run."""

from __future__ import annotations

from ..config import FAMILIES, ModelConfig
from .decoder import DecoderForCausalLM

ARCHITECTURES: dict[str, type[DecoderForCausalLM]] = dict.fromkeys(FAMILIES, DecoderForCausalLM)
"""By the name that config.json gives under `architectures`."""


def build_model(config: ModelConfig) -> DecoderForCausalLM:
    """The model of `config` on the meta device: shapes and names, no memory, no values."""
    return ARCHITECTURES[config.architecture](config)
