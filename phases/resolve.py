"""Turns "auto" into values, for the device at hand and for what this build can do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, fields, replace

from ..errors import NotAvailableError
from .choices import Backend, CaptureDevice, Choice, Compiler, Phase, Startup, in_words
from .config import GraphConfig, PhaseConfig
from .ladder import BucketLadder

ANY = "<any>"
_NOT_AVAILABLE = "is not available in this build"

# What a config can say but this build cannot do: pairs of a field and a value, ANY for whatever is not the default.
# The only place that knows: whoever builds a feature deletes its lines.
NOT_BUILT: frozenset[tuple[str, object]] = frozenset(
    {
        ("backend", Backend.FULL),
        ("backend", Backend.BREAKABLE),
        ("backend", Backend.TC_PIECEWISE),
        ("startup", Startup.TIERED),
        ("capture_device", CaptureDevice.CUDA),
        ("capture_device", CaptureDevice.TAPE),
        ("cache_dir", ANY),
        ("enable_torch_compile", True),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """A config without "auto", and what follows from it."""

    config: GraphConfig
    """No field is "auto". Resolving it again for the same device changes nothing."""
    ladders: Mapping[Phase, BucketLadder]
    """The ladder of each phase."""
    reasons: tuple[str, ...]
    """A line for each "auto": the field, its value, and why others were passed over."""


def resolve(
    config: GraphConfig,
    *,
    device_type: str,
    cuda_available: bool = False,
    not_built: Set[tuple[str, object]] = NOT_BUILT,
) -> Resolved:
    """Resolves `config` for a model on `device_type` (that of a torch.device). Pure: nothing is probed.

    When both backends are `disabled` nothing captures: a capture device is then idle, and not checked.

    Raises: NotAvailableError if the config asks for what this build or this device cannot do.
    """
    _check_built(config, not_built)
    on_cuda = device_type == "cuda" and cuda_available
    place = "cuda, which is not available" if device_type == "cuda" and not cuda_available else device_type
    capture = config.capture_device
    reasons = []
    no_capture = None  # why "auto" chooses no backend that captures
    if capture is CaptureDevice.AUTO:
        capture = CaptureDevice.CUDA if on_cuda else CaptureDevice.TAPE
        idle = f"; it {_NOT_AVAILABLE}, so nothing captures" if ("capture_device", capture) in not_built else ""
        reasons.append(f"capture_device: auto -> {capture} (the model is on {place}{idle})")
        if not on_cuda:
            no_capture = f"the model is on {place}, where auto captures only if capture_device says tape"
        elif ("capture_device", capture) in not_built:
            no_capture = f"capture_device {capture} {_NOT_AVAILABLE}"
    elif capture is CaptureDevice.CUDA and not on_cuda and not _idle(config):
        raise NotAvailableError(
            f"capture_device: cuda needs a model on an available CUDA device, got one on {place}; "
            "leave it out, or disable both backends"
        )
    for phase in Phase:
        chosen = config.phase(phase)
        if chosen.backend is Backend.AUTO:
            backend, passed = _choose_backend(phase, chosen.compiler, no_capture, not_built)
            reasons.append(f"{phase}.backend: auto -> {backend}" + (f" ({'; '.join(passed)})" if passed else ""))
            config = config.with_phase(phase, backend=backend)
        elif chosen.backend is not Backend.DISABLED and ("capture_device", capture) in not_built:
            raise NotAvailableError(
                f"{phase}.backend: {chosen.backend} captures on {capture}, which {_NOT_AVAILABLE}; leave it out"
            )
    return Resolved(
        config=replace(config, capture_device=capture),
        ladders={phase: config.phase(phase).ladder(phase) for phase in Phase},
        reasons=tuple(reasons),
    )


def preference(phase: Phase, compiler: Compiler) -> tuple[Backend, ...]:
    """The backends that "auto" would choose where captures are possible, the best first."""
    if phase is Phase.DECODE:
        return Backend.FULL, Backend.DISABLED
    return Backend.BREAKABLE if compiler is Compiler.EAGER else Backend.TC_PIECEWISE, Backend.DISABLED


def _choose_backend(
    phase: Phase, compiler: Compiler, no_capture: str | None, not_built: Set[tuple[str, object]]
) -> tuple[Backend, list[str]]:
    """The first backend of `preference` that can be had, and why those before it were passed over."""
    passed = []
    for backend in preference(phase, compiler):
        if backend is Backend.DISABLED:
            break
        if ("backend", backend) in not_built:
            passed.append(f"{backend} {_NOT_AVAILABLE}")
        elif no_capture is not None:
            passed.append(f"{backend}: {no_capture}")
        else:
            break
    return backend, passed


def _idle(config: GraphConfig) -> bool:
    """Whether both phases say that nothing is captured."""
    return all(config.phase(phase).backend is Backend.DISABLED for phase in Phase)


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
