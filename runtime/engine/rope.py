"""Rotary position embedding: how fast each pair of a head's entries turns, for every way to stretch a context.

The frequencies and the factors are those of transformers, bit for bit: a checkpoint was trained with them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...errors import ModelError
from .json_keys import Keys


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """The plain rotary embedding (RoFormer, Su et al., 2021), and the base of those that stretch it."""

    theta: float
    """The base: entry pair `i` turns by `theta ** (-2 * i / head_size)` radians a token."""

    def to_json(self) -> dict[str, Any]:
        """The kind, under `rope_type`, and the fields as plain JSON data."""
        kind = next(name for name, rope in _ROPES.items() if rope is type(self))
        return {"rope_type": kind, **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)}}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Rope:
        """The rope that `to_json` wrote down.

        Raises:
            ModelError: there is no such kind, or it has other fields.
        """
        fields = dict(data)
        rope = _ROPES.get(fields.pop("rope_type", ""))
        if rope is None or set(fields) != {field.name for field in dataclasses.fields(rope)}:
            raise ModelError(f"rope: expected a rope_type of {', '.join(_ROPES)} with its fields, got {dict(data)}")
        return rope(**fields)

    @property
    def attention_factor(self) -> float:
        """What cosines and sines are multiplied with."""
        return 1.0

    def inv_freq(self, head_size: int) -> torch.Tensor:
        """[head_size // 2], float32 on the CPU: radians that each entry pair turns from one token to the next."""
        return 1.0 / self.periods(head_size)

    def periods(self, head_size: int) -> torch.Tensor:
        """[head_size // 2], float32 on the CPU: tokens until each entry pair has turned by a radian, not stretched."""
        exponents = torch.arange(0, head_size, 2, dtype=torch.int64, device="cpu").to(torch.float32) / head_size
        return torch.pow(self.theta, exponents)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LinearRope(Rope):
    """Every frequency divided by one factor (position interpolation, Chen et al., 2023)."""

    factor: float

    def inv_freq(self, head_size: int) -> torch.Tensor:
        return 1.0 / self.periods(head_size) / self.factor


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Llama3Rope(Rope):
    """Slow frequencies divided by a factor, fast ones kept, and a ramp between them (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    """A frequency that makes fewer turns than this in the original context is divided by the whole factor."""
    high_freq_factor: float
    """A frequency that makes more turns than this in the original context is kept."""
    original_max_position_embeddings: int
    """The context that the model was trained with first, in tokens."""

    def inv_freq(self, head_size: int) -> torch.Tensor:
        plain = 1.0 / self.periods(head_size)
        wavelengths = 2 * math.pi / plain
        context, low, high = self.original_max_position_embeddings, self.low_freq_factor, self.high_freq_factor
        kept = (context / wavelengths - low) / (high - low)
        between = (1 - kept) * plain / self.factor + kept * plain
        slow = torch.where(wavelengths > context / low, plain / self.factor, between)
        return torch.where(wavelengths < context / high, plain, slow)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class YarnRope(Rope):
    """Like Llama 3's with a ramp over entry pairs, and a temperature on the attention (YaRN, Peng et al., 2023)."""

    factor: float
    original_max_position_embeddings: int
    """The context that the model was trained with first, in tokens."""
    temperature: float
    """The attention factor: given, or made from `factor`."""
    beta_fast: float
    """Turns in the original context from which a frequency is kept."""
    beta_slow: float
    """Turns in the original context up to which a frequency is divided by the whole factor."""
    truncate: bool
    """Whether the ends of the ramp are rounded outwards to whole entry pairs."""

    @property
    def attention_factor(self) -> float:
        return self.temperature

    def inv_freq(self, head_size: int) -> torch.Tensor:
        periods = self.periods(head_size)
        first, last = self._pair(self.beta_fast, head_size), self._pair(self.beta_slow, head_size)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_size - 1)
        if first == last:
            last += 0.001  # a step in place of a ramp
        pairs = torch.arange(head_size // 2, dtype=torch.float32, device="cpu")
        kept = 1 - torch.clamp((pairs - first) / (last - first), 0, 1)
        return 1.0 / (self.factor * periods) * (1 - kept) + 1.0 / periods * kept

    def _pair(self, num_turns: float, head_size: int) -> float:
        """The entry pair, with a fraction, that makes `num_turns` in the original context."""
        turns_of_first = self.original_max_position_embeddings / (num_turns * 2 * math.pi)
        return head_size * math.log(turns_of_first) / (2 * math.log(self.theta))


def read_rope(keys: Keys) -> Rope:
    """The rotary embedding of a config.json, from `rope_scaling` (transformers 4) or `rope_parameters` (5).

    What is wrong is noted in `keys`.
    """
    found = []
    for key in ("rope_scaling", "rope_parameters"):
        value = keys.values.get(key)
        if value is not None and not isinstance(value, dict):
            keys.problems.append(f"{key}: expected an object or null, got {value!r}")
        elif value:
            found.append(_read(_Parameters(keys, key, value)))
    if len(found) == 2 and found[0] != found[1]:
        keys.problems.append(f"rope_scaling and rope_parameters: expected one of them, got {found[0]} and {found[1]}")
    return found[0] if found else _read(_Parameters(keys, "", {}))


class _Parameters:
    """One object of rope parameters, and the keys beside it that it may be spread over."""

    def __init__(self, keys: Keys, key: str, values: Mapping[str, Any]) -> None:
        self.keys = keys
        self.prefix = f"{key}." if key else ""
        self.values = values
        self.kind = values.get("rope_type", values.get("type", "default"))

    def name(self, key: str) -> str:
        return f"{self.prefix}{key}" if key in self.values or key not in self.keys.values else key

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    def number(self, key: str, *, at_least: float | None = None) -> float:
        if not self._is_there(key):
            return 1.0
        return self.keys.number(self.name(key), self.values[key], at_least=at_least)

    def optional(self, key: str, default: float) -> float:
        """A number that may be missing, null or 0, as transformers has it."""
        return self.keys.number(self.name(key), self.values[key]) if self.get(key) else default

    def theta(self) -> float:
        value = self.get("rope_theta", self.keys.values.get("rope_theta", 10000.0))
        return self.keys.number(self.name("rope_theta"), value)

    def factor(self) -> float:
        return self.number("factor", at_least=1)

    def original_context(self) -> int:
        """In tokens; where it stands beside the object, it goes before what the object says."""
        key = "original_max_position_embeddings"
        if self.keys.values.get(key) is not None:
            return self.keys.size(key)
        return self.keys.integer(self.name(key), self.values[key]) if self._is_there(key) else 1

    def _is_there(self, key: str) -> bool:
        if self.get(key) is None:
            self.keys.problems.append(f"{self.prefix}{key}: is missing; rope type {self.kind!r} needs it")
        return self.get(key) is not None


def _read(parameters: _Parameters) -> Rope:
    problems, kind = parameters.keys.problems, parameters.kind
    partial = parameters.get("partial_rotary_factor", parameters.keys.values.get("partial_rotary_factor"))
    if partial not in (None, 1.0):
        problems.append(f"{parameters.name('partial_rotary_factor')}: expected 1.0, got {partial!r}")
    if any(isinstance(value, dict) for value in parameters.values.values()):
        problems.append(f"{parameters.prefix[:-1]}: expected one rope for all layers, got {dict(parameters.values)}")
        return Rope(theta=1.0)
    read = _READERS.get(kind) if isinstance(kind, str) else None
    if read is None:
        why = " (its frequencies change with the length of the text)" if kind in ("dynamic", "longrope", "su") else ""
        spelled = "rope_type" if "rope_type" in parameters.values else "type"
        problems.append(
            f"{parameters.prefix}{spelled}: expected one of {', '.join(ROPE_TYPES)}, got {kind!r}{why}; this rope "
            f"scaling is not supported"
        )
        return Rope(theta=1.0)
    return read(parameters)


def _read_default(parameters: _Parameters) -> Rope:
    return Rope(theta=parameters.theta())


def _read_linear(parameters: _Parameters) -> Rope:
    return LinearRope(theta=parameters.theta(), factor=parameters.factor())


def _read_llama3(parameters: _Parameters) -> Rope:
    num_problems = len(parameters.keys.problems)
    rope = Llama3Rope(
        theta=parameters.theta(),
        factor=parameters.factor(),
        low_freq_factor=parameters.number("low_freq_factor"),
        high_freq_factor=parameters.number("high_freq_factor"),
        original_max_position_embeddings=parameters.original_context(),
    )
    if len(parameters.keys.problems) == num_problems and rope.high_freq_factor <= rope.low_freq_factor:
        parameters.keys.problems.append(
            f"{parameters.prefix}high_freq_factor: expected more than low_freq_factor {rope.low_freq_factor:g}, got "
            f"{rope.high_freq_factor:g}"
        )
    return rope


def _read_yarn(parameters: _Parameters) -> Rope:
    keys, num_problems, factor = parameters.keys, len(parameters.keys.problems), parameters.factor()
    if parameters.get("attention_factor") is not None:
        temperature = parameters.number("attention_factor")
    elif parameters.get("mscale") and parameters.get("mscale_all_dim"):
        numerator, denominator = parameters.number("mscale"), parameters.number("mscale_all_dim")
        temperature = _temperature(factor, numerator) / _temperature(factor, denominator)
    else:
        temperature = _temperature(factor, 1.0)
    rope = YarnRope(
        theta=parameters.theta(),
        factor=factor,
        original_max_position_embeddings=parameters.original_context(),
        temperature=temperature,
        beta_fast=parameters.optional("beta_fast", 32.0),
        beta_slow=parameters.optional("beta_slow", 1.0),
        truncate=keys.boolean(parameters.name("truncate"), parameters.get("truncate"), default=True),
    )
    if len(keys.problems) == num_problems:
        if rope.beta_fast <= rope.beta_slow:
            keys.problems.append(
                f"{parameters.prefix}beta_fast: expected more than beta_slow {rope.beta_slow:g}, got {rope.beta_fast:g}"
            )
        if rope.theta <= 1:
            keys.problems.append(f"{parameters.name('rope_theta')}: expected more than 1, got {rope.theta:g}")
    return rope


def _temperature(factor: float, scale: float) -> float:
    """YaRN's attention factor for a context that is `factor` times as long."""
    return 0.1 * scale * math.log(factor) + 1.0


_READERS: dict[str, Callable[[_Parameters], Rope]] = {
    "default": _read_default,
    "linear": _read_linear,
    "llama3": _read_llama3,
    "yarn": _read_yarn,
}

_ROPES: dict[str, type[Rope]] = {"default": Rope, "linear": LinearRope, "llama3": Llama3Rope, "yarn": YarnRope}

ROPE_TYPES = tuple(_READERS)
"""The rope types that are supported."""
