"""Turns "auto" into values, for the device at hand and for what this build can do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, fields, replace

from ..errors import ConfigError, NotAvailableError
from .choices import Backend, CaptureDevice, Choice, Compiler, Phase, in_words
from .config import GraphConfig, PhaseConfig
from .ladder import BucketLadder
from .values import DEFAULT_MODE

ANY = "<any>"
_NOT_AVAILABLE = "is not available in this build"
_STAND_IN = "the tape stands in for a GPU: it checks what a capture would do, and makes nothing faster"

# What a config can say but this build cannot do: pairs of a field and a value, ANY for whatever is not the default.
# The only place that knows: whoever builds a feature deletes its lines.
NOT_BUILT: frozenset[tuple[str, object]] = frozenset()

DEFAULT_MAX_BS = 32
"""What bounds whole-forward compile where `torch_compile_max_bs` is unset."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """A config in which the device has decided, and what follows from it."""

    config: GraphConfig
    """No field is "auto", `emulate_precision_casts` is not unset. Resolved again for the same device it is the same.

    Except `kernel_backend` and `attention_backend`: what these come to is found for each op and for each call.
    """
    ladders: Mapping[Phase, BucketLadder]
    """The ladder of each phase."""
    whole: Mapping[Phase, int]
    """The largest bucket that is compiled whole; a phase that has none is not in it."""
    reasons: tuple[str, ...]
    """A line for each "auto": the field, its value, and why others were passed over; and for what has no effect."""


def resolve(
    config: GraphConfig,
    *,
    device_type: str,
    cuda_available: bool = False,
    not_built: Set[tuple[str, object]] = NOT_BUILT,
) -> Resolved:
    """Resolves `config` for a model on `device_type` (that of a torch.device). Pure: nothing is probed.

    When both backends are `disabled` nothing captures: a capture device is then idle, and not checked.

    Raises: NotAvailableError if the config asks for what this build or this device cannot do; ConfigError if it asks
        for a whole-forward compile that no bucket would get.
    """
    _check_built(config, not_built)
    asked = config
    on_cuda = device_type == "cuda" and cuda_available
    place = "cuda, which is not available" if device_type == "cuda" and not cuda_available else device_type
    capture = config.capture_device
    reasons = []
    no_capture = None  # why "auto" chooses no backend that captures
    if capture is CaptureDevice.AUTO:
        capture = CaptureDevice.CUDA if on_cuda else CaptureDevice.TAPE
        note = ""
        if not on_cuda:
            no_capture = f"the model is on {place}, where auto captures only if capture_device says tape"
            note = f"; {_STAND_IN}" if _names_a_capture(config) else "; nothing captures on it"
        reasons.append(f"capture_device: auto -> {capture} (the model is on {place}{note})")
    elif capture is CaptureDevice.CUDA and not on_cuda and not _idle(config):
        raise NotAvailableError(
            f"capture_device: cuda needs a model on an available CUDA device, got one on {place}; "
            "leave it out, or disable both backends"
        )
    for phase in Phase:
        if config.phase(phase).backend is Backend.AUTO:
            preferred = preferred_backend(phase, config.phase(phase).compiler)
            backend = preferred if no_capture is None else Backend.DISABLED
            passed = f" ({preferred}: {no_capture})" if no_capture is not None else ""
            reasons.append(f"{phase}.backend: auto -> {backend}{passed}")
            config = config.with_phase(phase, backend=backend)
    ladders = {phase: config.phase(phase).ladder(phase) for phase in Phase}
    whole = _compiled_whole(config, ladders, asked, no_capture)
    if whole and config.torch_compile_max_bs is None:
        shown = " and ".join(f"{bucket} in {phase}" for phase, bucket in whole.items())
        reasons.append(f"torch_compile_max_bs: unset -> {shown}")
        config = replace(config, torch_compile_max_bs=max(whole.values()))
    reasons += _without_effect(config, ladders, whole)
    casts = config.emulates_precision_casts
    if casts and config.emulate_precision_casts is None and (_uses_inductor(config) or whole):
        reasons.append("emulate_precision_casts: unset -> true (under tiered, programs take the place of eager code)")
    config = replace(config, capture_device=capture, emulate_precision_casts=casts)
    return Resolved(config=config, ladders=ladders, whole=whole, reasons=tuple(reasons))


def preferred_backend(phase: Phase, compiler: Compiler) -> Backend:
    """The backend that "auto" chooses where captures are possible."""
    if phase is Phase.DECODE:
        return Backend.FULL
    return Backend.BREAKABLE if compiler is Compiler.EAGER else Backend.TC_PIECEWISE


def _compiled_whole(
    config: GraphConfig, ladders: Mapping[Phase, BucketLadder], asked: GraphConfig, no_capture: str | None
) -> dict[Phase, int]:
    """`Resolved.whole`. A bound is a bucket of one phase at least; the others take the last bucket below it.

    Args:
        asked: the config before its backends were resolved.
        no_capture: why "auto" has chosen no backend that captures.
    """
    if not config.enable_torch_compile:
        return {}
    full = {phase: ladders[phase] for phase in Phase if config.phase(phase).backend is Backend.FULL}
    if not full:
        raise _no_whole_forward(config, asked, no_capture)
    most = DEFAULT_MAX_BS
    if config.torch_compile_max_bs is not None:
        most = _check_bound(config.torch_compile_max_bs, full)
    below = {phase: [bucket for bucket in ladder if bucket <= most] for phase, ladder in full.items()}
    whole = {phase: buckets[-1] for phase, buckets in below.items() if buckets}
    if not whole:
        raise ConfigError(
            f"torch_compile_max_bs: expected {_a_bucket_of(full)}, got unset, which stands for one of at most "
            f"{DEFAULT_MAX_BS}; name one of these"
        )
    return whole


def _check_bound(bound: int, full: Mapping[Phase, BucketLadder]) -> int:
    """Raises: ConfigError unless `bound` is a bucket of one of these phases."""
    phase = max(full, key=lambda each: full[each].max)
    if bound > full[phase].max:
        raise ConfigError(
            f"torch_compile_max_bs: expected at most {full[phase].max}, the last bucket of {phase}, got {bound}; "
            f"lower it, or add {bound} to {phase}.buckets"
        )
    if not any(bound in ladder for ladder in full.values()):
        phase = Phase.DECODE if Phase.DECODE in full else phase
        raise ConfigError(
            f"torch_compile_max_bs: expected {_a_bucket_of(full)}, got {bound}; name one of these, or list {bound} in "
            f"{phase}.buckets"
        )
    return bound


def _a_bucket_of(full: Mapping[Phase, BucketLadder]) -> str:
    ladders = (f"{phase}: {', '.join(map(str, ladder))}" for phase, ladder in full.items())
    return f"a bucket of a phase with backend full ({'; '.join(ladders)})"


def _no_whole_forward(config: GraphConfig, asked: GraphConfig, no_capture: str | None) -> ConfigError:
    """The error for a whole-forward compile that no phase has a forward for."""
    got = " and ".join(f"{phase}.backend {config.phase(phase).backend}" for phase in Phase)
    was_auto = no_capture is not None and asked.decode.backend is Backend.AUTO
    why = f" (auto -> disabled: {no_capture})" if was_auto else ""
    do = "set capture_device to tape" if was_auto else "set decode.backend to full"
    return ConfigError(
        f"enable_torch_compile: expected a phase with backend full, which captures a whole forward, got {got}{why}; "
        f"{do}, or leave enable_torch_compile out"
    )


def _without_effect(
    config: GraphConfig, ladders: Mapping[Phase, BucketLadder], whole: Mapping[Phase, int]
) -> Iterator[str]:
    """A line for each option that whole-forward compile, or its absence, takes the effect from."""
    if not config.enable_torch_compile:
        for name, is_default in (
            ("torch_compile_max_bs", config.torch_compile_max_bs is None),
            ("torch_compile_mode", config.torch_compile_mode == DEFAULT_MODE),
        ):
            if not is_default:
                yield f"{name}: {getattr(config, name)} has no effect without enable_torch_compile"
    for phase, last in whole.items():
        specialize = config.phase(phase).specialize
        both = [b for b in (ladders[phase] if specialize == "all" else specialize) if b <= last]
        if both and config.phase(phase).compiler is not Compiler.EAGER:
            yield (
                f"{phase}.specialize: the whole forward of {', '.join(map(str, both))} is compiled too, and takes the "
                "place of the specialized program where it is faster"
            )


def _uses_inductor(config: GraphConfig) -> bool:
    return any(config.phase(phase).compiler is Compiler.INDUCTOR for phase in Phase)


def _idle(config: GraphConfig) -> bool:
    """Whether both phases say that nothing is captured."""
    return all(config.phase(phase).backend is Backend.DISABLED for phase in Phase)


def _names_a_capture(config: GraphConfig) -> bool:
    """Whether a phase names a backend that captures."""
    return any(config.phase(phase).backend not in (Backend.AUTO, Backend.DISABLED) for phase in Phase)


def _check_built(config: GraphConfig, not_built: Set[tuple[str, object]]) -> None:
    """Raises: NotAvailableError for the first value that was asked for and is in `not_built`."""
    for path, name, value, default in _asked(config):
        if (name, value) in not_built or (value != default and (name, ANY) in not_built):
            words = type(value) if isinstance(value, Choice) else [default]
            allowed = [in_words(word) for word in words if (name, word) not in not_built]
            raise NotAvailableError(
                f"{path}: {in_words(value)} {_NOT_AVAILABLE}; allowed now: {', '.join(allowed)}; "
                f"leave it out to get {in_words(default)}"
            )


def _asked(config: GraphConfig) -> Iterator[tuple[str, str, object, object]]:
    """The path, the name, the value and the default of each field that has to be available."""
    for phase in Phase:
        for f in fields(PhaseConfig):
            yield f"{phase}.{f.name}", f.name, getattr(config.phase(phase), f.name), f.default
    for f in fields(GraphConfig):
        if f.name not in list(Phase) and not (f.name == "capture_device" and _idle(config)):
            yield f.name, f.name, getattr(config, f.name), f.default
