"""Launch flags: one table maps each flag to the fields it sets; everything else is generated from the fields.

Flags only build a GraphConfig. argparse checks neither words nor numbers, so that a wrong value meets the same check,
and the same text, as one from JSON or from Python.
"""

from __future__ import annotations

import argparse
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .choices import Backend, Choice, Phase, in_words
from .config import GraphConfig, PhaseConfig, parse_json, read_object

# Flag -> the paths of its fields. The names are SGLang's where it has one.
FLAGS: dict[str, tuple[str, ...]] = {
    "--cuda-graph-backend-prefill": ("prefill.backend",),
    "--cuda-graph-backend-decode": ("decode.backend",),
    "--cuda-graph-tc-compiler": ("prefill.compiler", "decode.compiler"),
    "--cuda-graph-bs-prefill": ("prefill.buckets",),
    "--cuda-graph-bs-decode": ("decode.buckets",),
    "--cuda-graph-max-bs-prefill": ("prefill.max_num_tokens",),
    "--cuda-graph-max-bs-decode": ("decode.max_num_tokens",),
    "--cuda-graph-specialize-prefill": ("prefill.specialize",),
    "--cuda-graph-specialize-decode": ("decode.specialize",),
    "--cuda-graph-max-padding-waste-prefill": ("prefill.max_padding_waste",),
    "--cuda-graph-max-padding-waste-decode": ("decode.max_padding_waste",),
    "--startup": ("startup",),
    "--startup-prefill": ("prefill.startup",),
    "--startup-decode": ("decode.startup",),
    "--promotion-budget-ms": ("promotion_budget_ms",),
    "--compile-workers": ("compile_workers",),
    "--compile-timeout": ("compile_timeout_s",),
    "--manifest": ("manifest",),
    "--startup-budget": ("startup_budget",),
    "--emulate-precision-casts": ("emulate_precision_casts",),
    "--capture-device": ("capture_device",),
    "--cache-dir": ("cache_dir",),
    "--enable-torch-compile": ("enable_torch_compile",),
    "--torch-compile-max-bs": ("torch_compile_max_bs",),
    "--torch-compile-mode": ("torch_compile_mode",),
    "--fused-ops": ("fused_ops",),
    "--kernel-backend": ("kernel_backend",),
    "--attention-backend": ("attention_backend",),
    "--evaluate-guards": ("evaluate_guards",),
    "--cuda-graph-memory-budget": ("cuda_graph_memory_budget",),
    "--cuda-graph-max-captures": ("max_captures",),
    "--late-address-check": ("late_address_check",),
    "--debug-captures": ("debug_captures",),
}
CONFIG = "--cuda-graph-config"
CONFIG_HELP = "the config as JSON, or @ and the path of a JSON file; flags override what it says"
DISABLE = "--disable-cuda-graph"
DISABLE_HELP = "set the backends of both phases to disabled"


def add_graph_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags to `parser`. One that is not given is None in the namespace."""
    group = parser.add_argument_group("phases and graphs", "precedence: flag > JSON > default")
    for flag, paths in FLAGS.items():
        field = _field(paths)
        text = f"{field.metadata['doc']} ({', '.join(paths)}; default: {_default(field)})".replace("%", "%%")
        if field.metadata["switch"]:  # unset is a third thing
            group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
        elif isinstance(field.default, bool):
            group.add_argument(flag, action="store_const", const=True, help=text)
        else:
            read = _number if field.metadata["numeric"] else str
            nargs = "+" if field.metadata["many"] else None
            group.add_argument(flag, type=read, nargs=nargs, metavar=_metavar(field), help=text)
    group.add_argument(CONFIG, metavar="JSON", help=CONFIG_HELP)
    group.add_argument(DISABLE, action="store_const", const=True, help=DISABLE_HELP)


def graph_config_from_args(namespace: argparse.Namespace) -> GraphConfig:
    """The config that the flags of `add_graph_flags` ask for: flag > JSON > default.

    Raises: ConfigError where GraphConfig does, for an unreadable JSON file, and for flags that contradict each other.
    """
    text = _given(namespace, CONFIG)
    config = {} if text is None else read_object(parse_json(_read(text)), GraphConfig, "")
    for flag, paths in FLAGS.items():
        value = _given(namespace, flag)
        if value is not None:
            if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
                value = value[0]  # one word, such as "all", stands for itself and not for a list
            elif _field(paths).metadata["commas"] and isinstance(value, str):
                value = [item.strip() for item in value.split(",")] if value.strip() else []
            for path in paths:
                _put(config, path, value)
    if _given(namespace, DISABLE):
        _disable(config, namespace)
    return GraphConfig.from_json(config)


def flag_table() -> str:
    """The flags as a Markdown table."""
    rows = [("flag", "field", "default", "meaning"), ("---",) * 4]
    for flag, paths in FLAGS.items():
        field = _field(paths)
        shown = " ".join(filter(None, (flag, _metavar(field), "..." if field.metadata["many"] else None)))
        rows.append((f"`{shown}`", ", ".join(f"`{path}`" for path in paths), _default(field), field.metadata["doc"]))
    rows.append((f"`{CONFIG} JSON`", "all", "unset", CONFIG_HELP))
    rows.append((f"`{DISABLE}`", "`prefill.backend`, `decode.backend`", "unset", DISABLE_HELP))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _field(paths: tuple[str, ...]) -> Field[Any]:
    """The field at the first of `paths`; the others document the same."""
    phase, _, name = paths[0].rpartition(".")
    return next(f for f in fields(PhaseConfig if phase else GraphConfig) if f.name == name)


def _metavar(field: Field[Any]) -> str | None:
    if isinstance(field.default, Choice):
        return "{" + ",".join(type(field.default)) + "}"
    return field.metadata["metavar"]  # type: ignore[no-any-return]  # metadata is untyped


def _default(field: Field[Any]) -> str:
    if field.default == ():
        return "unset" if field.metadata["commas"] else "none"
    return "unset" if field.default is None else in_words(field.default)


def _given(namespace: argparse.Namespace, flag: str) -> Any:
    return getattr(namespace, flag.lstrip("-").replace("-", "_"), None)


def _number(text: str) -> int | float | str:
    """The number that `text` writes, or `text` for the config to refuse."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _read(text: str) -> str:
    """Inline JSON, or the content of the file behind an @."""
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{CONFIG}: expected a readable JSON file, got {text[1:]!r} ({error}); "
            "correct the path or give the JSON inline"
        ) from None


def _put(config: dict[str, Any], path: str, value: object) -> None:
    phase, _, name = path.rpartition(".")
    if phase:
        config[phase] = {**read_object(config.get(phase, {}), PhaseConfig, phase), name: value}
    else:
        config[name] = value


def _disable(config: dict[str, Any], namespace: argparse.Namespace) -> None:
    for flag, paths in FLAGS.items():
        value = _given(namespace, flag)
        if paths[0].endswith(".backend") and value not in (None, Backend.DISABLED):
            raise ConfigError(
                f"{DISABLE}: expected no other backend beside it, got {flag} {value}; drop one of the two"
            )
    for phase in Phase:
        _put(config, f"{phase}.backend", Backend.DISABLED)
